"""Checkpoints cut into shards, and ranks that are only pretended: what the tests of loading share."""
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from tests.models.shapes import moe, text
from vllm.distributed import parallel_state

INDEX = "model.safetensors.index.json"


def four_rank_config(**fields: Any) -> dict[str, Any]:
    """A small mixture of experts that 1, 2 and 4 ranks can share, with two KV heads, so that four must double them."""
    return {**text(64, 3, 3, (4, 2, 16), (4, 4, 16, 16), 4, 0.5, **moe(4, 2, 32, 48)), "architectures":
            ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "dtype": "float32",
            "tie_word_embeddings": False, **fields}


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int, config: dict[str, Any]) -> list[str]:
    """Deals the tensors out to `count` shards with an index; returns the shards' names."""
    folder.mkdir(exist_ok=True)
    files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = list(tensors)
    for number, file in enumerate(files):
        save_file({name: tensors[name].contiguous() for name in names[number::count]}, folder / file,
                  metadata={"format": "pt"})
    index = {name: files[place % count] for place, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return files


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Modules made and loaded inside believe that they are one of several ranks; they cannot run."""
    # Of stock's module, which ours extends.
    names = parallel_state.get_tp_group.__globals__
    group = names["_TP"]
    names["_TP"] = SimpleNamespace(world_size=ranks, rank_in_group=rank)
    try:
        yield
    finally:
        names["_TP"] = group
