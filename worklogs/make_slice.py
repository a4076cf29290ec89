"""Makes the bench slice: a random checkpoint of the real model's shape with fewer layers, experts and words.

    python worklogs/make_slice.py --seed 0 OUT               4 layers, 64 experts, vocabulary 151,936: about 3 GB
    python worklogs/make_slice.py --seed 0 --vocab 8192 OUT  the second slice

All sizes that are no option come from worklogs/model/config.json (or --config). No vision tower, no multi-token
prediction.
"""
import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from random_checkpoint import DTYPES, CannotWrite, layer_types, write_checkpoint  # noqa: E402

ARCHITECTURES = {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}


def slice_config(config: dict[str, Any], layers: int, experts: int, vocabulary: int, dtype: str) -> dict[str, Any]:
    """The text-only configuration of the slice of `config` (a parsed config.json).

    Raises:
        CannotWrite: the model has fewer layers.
    """
    text = dict(config.get("text_config", config))
    kinds = layer_types(text)
    if not 1 <= layers <= len(kinds):
        raise CannotWrite(f"--layers {layers}: the model has {len(kinds)}")
    text.update(architectures=[ARCHITECTURES[text["model_type"]]], num_hidden_layers=layers, layer_types=kinds[:layers],
                vocab_size=vocabulary, dtype=dtype, mtp_num_hidden_layers=0)
    if "num_experts" in text:
        text.update(num_experts=experts, num_experts_per_tok=min(experts, text["num_experts_per_tok"]))
    # The published ids lie outside a smaller vocabulary; without them generation ends at max_tokens.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = text.get(key)
        if any(token >= vocabulary for token in (ids if isinstance(ids, list) else [ids]) if token is not None):
            text[key] = None
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; must not exist or be empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--config", type=Path, default=Path(__file__).resolve().parent / "model" / "config.json")
    args = parser.parse_args()
    for name in ("seed", "experts", "vocab"):
        if getattr(args, name) < (name != "seed"):
            parser.error(f"--{name} {getattr(args, name)} is too small")
    start = time.perf_counter()
    try:
        config = json.loads(args.config.read_text(encoding="utf-8"))
        config = slice_config(config, args.layers, args.experts, args.vocab, args.dtype)
        size, digest = write_checkpoint(args.out, config, args.seed)
    except (CannotWrite, OSError, json.JSONDecodeError) as error:
        print(f"make_slice: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {size:,} bytes ({size / 1e9:.2f} GB) in {time.perf_counter() - start:.0f} s, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
