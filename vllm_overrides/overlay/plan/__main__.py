"""`python -m vllm.overlay.plan`: the memory plan of a model, without a device and without its weights."""
import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm.overlay.model import int8
from vllm.overlay.model.mtp_switch import MTP_ASKED
from vllm.overlay.plan.engine import largest_picture
from vllm.overlay.plan.memory import FIXED, PlanError, Wish, plan, settle, shown
from vllm.overlay.runtime.byte_size import size
from vllm.transformers_utils.configs.qwen3_5 import CONFIG_CLASSES

_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")}


def read_config(path: Path) -> Any:
    """The configuration in a config.json, or in the folder that holds it.

    Raises:
        ValueError: it is none, or of a model that is not planned here.
        OSError: it cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    kinds = {kind.model_type: kind for kind in CONFIG_CLASSES}
    kind = kinds.get(fields.get("model_type")) if isinstance(fields, dict) else None
    if kind is None:
        raise ValueError(f"{file} is not of a model that can be planned: model_type must be one of {', '.join(kinds)}")
    return kind(**{name: value for name, value in fields.items() if name != "model_type"})


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m vllm.overlay.plan", description=__doc__)
    add = found.add_argument
    add("--config", type=Path, required=True, help="config.json, or the folder of a checkpoint")
    add("--tp", "--tensor-parallel-size", type=int, default=1, help="ranks, one on each card (default 1)")
    add("--memory", type=size, required=True, help="of one card, as 31.72GiB; with --device cpu what one rank may take")
    add("--gpu-memory-utilization", type=float, default=0.9, help="default 0.9; 1 with --device cpu")
    add("--max-model-len", type=int, help="default: the model's")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--block-size", type=int, default=16)
    add("--dtype", choices=[*_DTYPES, "auto"], default="auto")
    add("--quantization", choices=[int8.NAME])
    add("--device", choices=sorted(FIXED), default="cuda")
    add("--mtp", action="store_true", help=f"with the multi-token-prediction head ({MTP_ASKED}=1)")
    add("--max-picture-pixels", type=int, help="0: no pictures; default: what the model's preprocessor says")
    add("--enable-prefix-caching", action="store_true", help="with checkpoints of recurrent state")
    add("--checkpoint-memory", type=size, help="for them on a card, as 2GiB; default: a tenth of what is left for KV")
    add("--checkpoint-host-memory", type=size, help="for each card's on the host; default: 8 GiB, at most an eighth of "
                                                    "--host-memory")
    add("--host-memory", type=size, help="free main memory of the machine; default: enough")
    add("--json", action="store_true", help="numbers in bytes")
    other = found.add_argument_group("another system's numbers in place of what is counted here")
    other.add_argument("--kv-layers", help="layers that keep KV, or 'all'")
    other.add_argument("--weights", type=size, help="of one rank, as 16.2GB")
    other.add_argument("--state", type=size, help="of one sequence on one rank, as 16MB")
    other.add_argument("--workspace-per-token", type=size, help="for each of --max-num-batched-tokens, as 119KB")
    other.add_argument("--fixed", type=size, help="what does not grow with anything, as 2GB")
    return found


def wish_of(arguments: argparse.Namespace) -> Wish:
    """Of the command line. Raises ValueError for what cannot be."""
    config = read_config(arguments.config)
    text = config.get_text_config()
    for name in ("tp", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        if (getattr(arguments, name) or 1) < 1 or getattr(arguments, name) == 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    if not 0 < arguments.gpu_memory_utilization <= 1:
        raise ValueError(f"--gpu-memory-utilization must be above 0 and at most 1, got "
                         f"{arguments.gpu_memory_utilization}")
    dtype = config.torch_dtype if arguments.dtype == "auto" else arguments.dtype
    if isinstance(dtype, str):
        dtype = _DTYPES.get(dtype, torch.bfloat16)
    context = arguments.max_model_len or text.max_position_embeddings
    folder = arguments.config if arguments.config.is_dir() else arguments.config.parent
    pixels = arguments.max_picture_pixels
    model = SimpleNamespace(model=str(folder), hf_config=config, max_model_len=context, picture_pixels=pixels,
                            max_pictures=0 if pixels == 0 else None)
    kv_layers = text.num_hidden_layers if arguments.kv_layers == "all" else arguments.kv_layers
    if kv_layers is not None and not str(kv_layers).isdigit():
        raise ValueError(f"--kv-layers must be a number or 'all', got {kv_layers!r}")
    return Wish(config=config, dtype=dtype or torch.bfloat16, memory=arguments.memory, max_model_len=context,
                max_num_seqs=arguments.max_num_seqs, max_num_batched_tokens=arguments.max_num_batched_tokens,
                ranks=arguments.tp, block_size=arguments.block_size, device_type=arguments.device,
                utilization=1.0 if arguments.device == "cpu" else arguments.gpu_memory_utilization,
                quantization=arguments.quantization, mtp=arguments.mtp, patches=largest_picture(model),
                prefix_caching=arguments.enable_prefix_caching, checkpoint_memory=arguments.checkpoint_memory,
                checkpoint_host_memory=arguments.checkpoint_host_memory, host_memory=arguments.host_memory,
                kv_layers=None if kv_layers is None else int(kv_layers), weights=arguments.weights,
                slot=arguments.state, token_bytes=arguments.workspace_per_token, fixed=arguments.fixed)


def main(argv: list[str] | None = None) -> int:
    """Prints the plan. Returns 0 where it fits, 1 with one line on stderr where not, 2 for what cannot be planned."""
    arguments = parser().parse_args(argv)
    try:
        wish = wish_of(arguments)
        found = plan(wish)
    except (ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    why = ""
    try:
        found = settle(wish)
    except PlanError as error:
        why = str(error)
    print(json.dumps(found.numbers(), indent=1) if arguments.json else found.table())
    if why:
        print(f"plan: {why}", file=sys.stderr)
    if found.wish.checkpoint_memory != wish.checkpoint_memory:
        print(f"plan: --checkpoint-memory {shown(wish.checkpoint_memory or 0)} is more than KV leaves room for; it "
              f"would be lowered to {shown(found.wish.checkpoint_memory or 0)}", file=sys.stderr)
    if found.wish.max_num_seqs < wish.max_num_seqs:
        print(f"plan: max_num_seqs {wish.max_num_seqs} is more than the states leave room for; it would be lowered to "
              f"{found.wish.max_num_seqs}", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
