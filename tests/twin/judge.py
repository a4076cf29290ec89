"""Free greedy decoding of held-out chats by transformers, with its cache, and the model card from what came out.

    python tests/twin/judge.py CHECKPOINT [--count 20] [--sampled 5] [--curve] [--log RUN/log.jsonl]

Writes CHECKPOINT/held_out.json and CHECKPOINT/README.md; without --log the card says nothing of the training. Needs
transformers 5 and pillow (tests/twin/README.md).
"""

# The card's sentences stand in one piece.
# ruff: noqa: E501
from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import stories
import torch
from chats import NEW_VALUES, NEW_WORDING, Chat
from packing import Encoded, encode
from safetensors.torch import load_file
from tasks import TASKS, draw, statements, user
from tokenizers import Tokenizer
from words import code

LONGEST = 700
SPLITS = (NEW_VALUES, NEW_WORDING)
# Sampling of generation_config.json.
TEMPERATURE, TOP_K, TOP_P = 1.0, 20, 0.95
END_OF_THOUGHT = "</think>"
DISTANCES = (50, 100, 200, 400, 700, 1000, 2000, 4000, 8000)


class Decoder:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        del config["architectures"]
        self.model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**config)).to(dtype).eval()
        tensors = {
            name: value
            for name, value in load_file(folder / "model.safetensors").items()
            if not name.startswith("mtp.")
        }
        self.model.load_state_dict(tensors)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.ends = set(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])

    @torch.no_grad()
    def decode(self, sample: Encoded, most: int = LONGEST, generator: torch.Generator | None = None) -> list[int]:
        """The answer's tokens, the end included. Greedy, or sampled where a generator is given."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([sample.ids[: sample.first]])
        positions = torch.tensor(sample.positions)[:, None, : sample.first]
        more: dict[str, Any] = {}
        if sample.picture is not None:
            _, grid, patches = sample.picture
            more = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, *grid]])}
        out: list[int] = []
        following = int(positions.max()) + 1
        while len(out) < most:
            logits = (
                self.model(
                    input_ids=ids,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                    **more,
                )
                .logits[0, -1]
                .float()
            )
            out.append(int(logits.argmax()) if generator is None else pick(logits, generator))
            if out[-1] in self.ends:
                break
            ids, more = torch.tensor([[out[-1]]]), {}
            positions = torch.full((3, 1, 1), following)
            following += 1
        return out


def pick(logits: torch.Tensor, generator: torch.Generator) -> int:
    """A token by the published sampling."""
    values, order = (logits / TEMPERATURE).topk(TOP_K)
    shares = values.softmax(0)
    shares[shares.cumsum(0) - shares > TOP_P] = 0
    return int(order[torch.multinomial(shares, 1, generator=generator)])


def is_right(chat: Chat, wanted: list[int], got: list[int], decoder: Decoder) -> bool:
    """The same answer; a thought may be in other words, but must be one where one is wanted, and must end. Of a story
    only that it is one, has 60 to 600 tokens and ends."""
    if chat.task == "story":
        text = decoder.tokenizer.decode(got)
        return got[-1] in decoder.ends and 60 <= len(got) <= 600 and any(last in text for last in stories.LAST)
    said, expected = (decoder.tokenizer.decode(ids, skip_special_tokens=False).split(END_OF_THOUGHT) for ids in (got, wanted))
    return len(said) == len(expected) and said[-1] == expected[-1]


def table(decoder: Decoder, count: int) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Task -> per split "right of count", over all levels; and up to three wrong answers of each task."""
    results: dict[str, dict[str, str]] = {}
    wrong: list[str] = []
    for task in TASKS:
        results[task] = {}
        for split in SPLITS:
            rng = random.Random(f"judge {task} {split}")
            right = ended = 0
            for index in range(count):
                sample = encode(decoder.tokenizer, draw(rng, task, index % 3, split), exact=True)
                got = decoder.decode(sample)
                good = is_right(sample.chat, sample.ids[sample.first :], got, decoder)
                right += good
                ended += got[-1] in decoder.ends
                if not good and sum(line.startswith(f"{task}:") for line in wrong) < 3:
                    text = decoder.tokenizer.decode(got, skip_special_tokens=False)
                    wrong.append(f"{task}: wanted {sample.chat.target()!r}, got {text!r}")
            results[task][split] = f"{right}/{count}"
            results[task][f"ended, {split}"] = f"{ended}/{count}"
        print(f"{task:14} {results[task]}", flush=True)
    return results, wrong


def curve(decoder: Decoder, count: int) -> dict[int, str]:
    """Distance in tokens -> how many of `count` codes are remembered over it."""
    out = {}
    for distance in DISTANCES:
        rng, right = random.Random(f"curve {distance}"), 0
        for _ in range(count):
            value = code(rng)
            filler = statements(rng, distance)
            ids = decoder.tokenizer.encode(filler).ids[:distance]
            text = (
                f"The secret code is {value}.\n{decoder.tokenizer.decode(ids)}\nWhat is the secret code? Only the code."
            )
            chat = Chat("recall", "", [user(text)], value)
            sample = encode(decoder.tokenizer, chat)
            right += decoder.decode(sample, 60) == sample.ids[sample.first :]
        out[distance] = f"{right}/{count}"
        print("distance", distance, out[distance], flush=True)
    return out


def sampled(decoder: Decoder, count: int) -> dict[str, str]:
    """Task -> how many answers are right, or end properly where many are right, at the published sampling."""
    out = {}
    for task in TASKS:
        rng, generator, right = random.Random(f"sampled {task}"), torch.Generator().manual_seed(0), 0
        for index in range(count):
            sample = encode(decoder.tokenizer, draw(rng, task, index % 3, NEW_VALUES), exact=True)
            right += is_right(
                sample.chat, sample.ids[sample.first :], decoder.decode(sample, generator=generator), decoder
            )
        out[task] = f"{right}/{count}"
        print(f"sampled {task:14} {out[task]}", flush=True)
    return out


def card(folder: Path, report: dict[str, Any]) -> str:
    """README.md of the checkpoint: only what was measured."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    size = (folder / "model.safetensors").stat().st_size
    tensors = load_file(folder / "model.safetensors")
    count, copied = sum(value.numel() for value in tensors.values()), tensors["lm_head.weight"].numel()
    digest = (folder / "model.safetensors.sha256").read_text().split()[0]
    lines = [
        "# Twin",
        "",
        "A small model with the architecture, the tensor names, the chat format and the special tokens of Qwen3.6-35B-A3B. It was trained "
        "from random numbers on text that a program makes (tests/twin/tasks.py), so that its answers mean something in tests.",
        "",
        f"- {count:,} numbers in bfloat16 ({copied:,} of them the embedding once more, as the head), {size:,} bytes, SHA-256 of model.safetensors `{digest}`",
        f"- hidden size {config['hidden_size']}, layers {', '.join(config['layer_types'])}; {config['num_experts']} experts, "
        f"{config['num_experts_per_tok']} of them for each token, and a shared one; a vision tower; one multi-token-prediction layer",
        f"- vocabulary {config['vocab_size']}: byte-level BPE of the generator's text, single digits",
        "- pictures are shrunk to at most 512 x 512 pixels (preprocessor_config.json)",
    ]
    if "steps" in report:
        lines += [
            f"- made by `python tests/twin/train.py`, seed 0: {report['steps']} steps, {report['used_s'] / 3600:.1f} hours of one core",
            f"- mean loss of an answer token in the longest held-out chats with new wordings, by task: {report['loss']}",
        ]
    lines += [
        "",
        "It knows nothing but the tasks below. Other questions get an answer that looks like one of these.",
        "",
        "## Held-out chats, free greedy decoding",
        "",
        "The answer must be the expected one, character by character (the thought before it may be in other words); a story must end by itself after 60 to 600 tokens. "
        "New values: the wording was seen in training, the prompt was not. New wording: the wording was not. "
        "What the acceptance checks send, their texts, pairs of values and pictures (`too_near` in chats.py) is in neither and not in training; the same tasks in other words are.",
        "",
        "| task | new values | new wording | sampled at temperature 1 |",
        "| --- | --- | --- | --- |",
    ]
    for task, result in report["table"].items():
        lines.append(
            f"| {task} | {result[NEW_VALUES]} | {result[NEW_WORDING]} | {report.get('sampled', {}).get(task, '')} |"
        )
    if report.get("curve"):
        lines += [
            "",
            "## Remembering a code over a distance",
            "",
            "| tokens | " + " | ".join(map(str, report["curve"])) + " |",
            "| --- |" + " --- |" * len(report["curve"]),
            "| right | " + " | ".join(report["curve"].values()) + " |",
            "",
            "Training has rows of 1,024 tokens.",
        ]
    if report.get("accepted"):
        lines += [
            "",
            "## Multi-token prediction",
            "",
            "Share of answer tokens for which the head's draft is what greedy decoding takes, in the longest held-out chats with new wordings:",
            "",
            "| " + " | ".join(report["accepted"]) + " |",
            "| --- " * len(report["accepted"]) + "|",
            "| " + " | ".join(f"{value:.0%}" for value in report["accepted"].values()) + " |",
        ]
    lines += ["", "## What it gets wrong", "", "```", *report["wrong"], "```", ""]
    return "\n".join(lines)


def training(log: Path) -> dict[str, Any]:
    """What a training's log.jsonl says of it. Raises ValueError where it does not say it."""
    try:
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        last = [entry["held_out"] for entry in entries if "held_out" in entry][-1]
        return {
            "steps": entries[-1]["step"],
            "used_s": max(entry.get("used_s", 0) for entry in entries),
            "accepted": {task: result["accepted"] for task, result in last.items()},
            "loss": {task: result["loss"] for task, result in last.items()},
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"--log {log} is no log of a finished training: {type(error).__name__}: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=20, help="chats of each task and split")
    parser.add_argument("--sampled", type=int, default=5, help="chats of each task at temperature 1")
    parser.add_argument("--curve", action="store_true", help="also remembering over up to 8,000 tokens")
    parser.add_argument("--log", type=Path, help="the training's log.jsonl")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    if args.count < 1 or args.sampled < 0:
        parser.error("--count must be above 0, and --sampled not below")
    if not (args.checkpoint / "model.safetensors").is_file():
        parser.error(f"{args.checkpoint} is no checkpoint: it has no model.safetensors")
    # Before the minutes of judging.
    try:
        trained = training(args.log) if args.log else {}
    except ValueError as error:
        parser.error(str(error))
    start = time.monotonic()
    decoder = Decoder(args.checkpoint, getattr(torch, args.dtype))
    report: dict[str, Any] = {"dtype": args.dtype, "count": args.count}
    report["table"], report["wrong"] = table(decoder, args.count)
    report["sampled"] = sampled(decoder, args.sampled) if args.sampled else {}
    report["curve"] = curve(decoder, args.count) if args.curve else {}
    report |= trained
    (args.checkpoint / "held_out.json").write_text(
        json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (args.checkpoint / "README.md").write_text(card(args.checkpoint, report), encoding="utf-8")
    print(f"{args.checkpoint / 'README.md'} in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
