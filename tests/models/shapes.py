"""The random models of the parity tests: sizes odd relative to each other, so that no two can be mixed up unnoticed.

Imported in both environments; needs the standard library only.
"""
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PROMPT_LENGTHS = (1, 2, 5, 67, 150)
SLICE_LENGTHS = (5, 67)
NEW_TOKENS = 8
VOCABULARY = 131
# Placeholder of pictures: the last word of a shape that takes any, so that its prompts of text have one word fewer.
IMAGE_TOKEN = 130
# Merged grids (h, w): one row, the size of the learned square or near it, stretched, one token, tall.
MERGED_GRIDS = ((1, 2), (2, 2), (3, 5), (1, 1), (7, 3))


@dataclass(frozen=True)
class Shape:
    """One model.

    architecture: the published name. text: fields of its text configuration. layout: how the experts are written, "one
    by one" (what transformers' save_pretrained does) or "joined" (the published files). tied: head and embedding.
    vision: fields of the vision tower's configuration, of an architecture that has one. extra: names of further tensors
    to put in the file.
    """
    name: str
    architecture: str
    text: dict[str, Any]
    layout: str = "one by one"
    tied: bool = False
    vision: dict[str, Any] | None = None
    extra: tuple[str, ...] = field(default=())

    @property
    def words(self) -> int:
        """How many ids are text."""
        return VOCABULARY if self.vision is None else IMAGE_TOKEN


def rope(head_dim: int, factor: float) -> dict[str, Any]:
    """Rotary settings with M-RoPE sections that add up."""
    pairs = int(head_dim * factor) // 2
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor, "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}


def text(hidden: int, layers: int, interval: int, heads: tuple[int, int, int], linear: tuple[int, int, int, int],
         width: int, rotary: float, **fields: Any) -> dict[str, Any]:
    """heads: query heads, KV heads, head size. linear: key heads, value heads, key size, value size."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": 1024,
        "layer_types": ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)],
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2],
        "linear_num_key_heads": linear[0], "linear_num_value_heads": linear[1], "linear_key_head_dim": linear[2],
        "linear_value_head_dim": linear[3], "linear_conv_kernel_dim": width, "rope_parameters": rope(heads[2], rotary),
        "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **fields}


def moe(experts: int, top_k: int, inner: int, shared: int) -> dict[str, int]:
    return {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": shared}


def vision(out: int, depth: int, heads: tuple[int, int], inner: int, *, patch: int, merge: int, side: int,
           frames: int) -> dict[str, int]:
    """out: the language model's hidden size. heads: hidden size and heads. side: of the square of learned positions."""
    return {"depth": depth, "hidden_size": heads[0], "num_heads": heads[1], "intermediate_size": inner,
            "out_hidden_size": out, "in_channels": 3, "patch_size": patch, "spatial_merge_size": merge,
            "temporal_patch_size": frames, "num_position_embeddings": side * side}


SHAPES = (
    Shape("moe-text", "Qwen3_5MoeForCausalLM",
          text(56, 4, 3, (4, 1, 24), (2, 4, 16, 12), 4, 0.5, **moe(3, 2, 20, 28))),
    Shape("moe-pictures", "Qwen3_5MoeForConditionalGeneration",
          text(72, 6, 2, (6, 2, 40), (3, 3, 8, 20), 4, 0.25, **moe(5, 3, 12, 36)),
          layout="joined", extra=("mtp.fc.weight", "mtp.norm.weight"),
          vision=vision(72, 3, (48, 3), 52, patch=4, merge=2, side=4, frames=2)),
    Shape("dense-text-tied", "Qwen3_5ForCausalLM",
          text(48, 4, 4, (3, 1, 32), (1, 3, 12, 8), 4, 0.75, intermediate_size=100), tied=True),
    Shape("dense-pictures", "Qwen3_5ForConditionalGeneration",
          text(40, 4, 2, (5, 5, 20), (2, 6, 20, 24), 3, 0.6, intermediate_size=52, attention_bias=True),
          vision=vision(40, 2, (40, 2), 72, patch=6, merge=3, side=5, frames=1)),
    Shape("moe-text-top-1", "Qwen3_5MoeForCausalLM",
          text(64, 6, 3, (6, 3, 18), (2, 2, 24, 16), 2, 1.0, **moe(7, 1, 44, 12)), layout="joined"),
    Shape("dense-text-wide", "Qwen3_5ForCausalLM",
          text(96, 3, 3, (2, 1, 256), (1, 2, 128, 128), 4, 0.25, intermediate_size=72)),
)


def prompt(length: int, vocabulary: int = VOCABULARY) -> list[int]:
    """The same ids in both environments, whatever their library versions."""
    state, ids = 12345 + length, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % (1 << 31)
        ids.append((state >> 8) % vocabulary)
    return ids


def picture_prompt() -> tuple[list[int], list[int]]:
    """Returns the ids of a prompt with a picture of each of MERGED_GRIDS between text, and the pictures' offsets."""
    ids, offsets = prompt(5, IMAGE_TOKEN), []
    for index, (rows, columns) in enumerate(MERGED_GRIDS):
        offsets.append(len(ids))
        ids += [IMAGE_TOKEN] * (rows * columns) + prompt(1 + 4 * index, IMAGE_TOKEN)
    return ids, offsets


def grids(fields: dict[str, int]) -> list[tuple[int, int]]:
    """MERGED_GRIDS in patches, for a vision tower of these fields."""
    return [(rows * fields["spatial_merge_size"], columns * fields["spatial_merge_size"])
            for rows, columns in MERGED_GRIDS]


def pixels(fields: dict[str, int]) -> list[np.ndarray]:
    """Per picture uint8 [h w, channels, patch, patch], the same everywhere: noise on a slope of brightness."""
    random = np.random.RandomState(11)
    found = []
    for index, (h, w) in enumerate(grids(fields)):
        shape = (h * w, fields["in_channels"], fields["patch_size"], fields["patch_size"])
        slope = np.linspace(0, 155, h * w, dtype=np.int64).reshape(-1, 1, 1, 1)
        found.append((random.randint(0, 101, shape) + (slope if index % 2 else slope[::-1])).astype(np.uint8))
    return found
