"""The added tokens that the twin's programs name."""

from __future__ import annotations

NAMES = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)


def fake_ids(vocabulary: int) -> dict[str, int]:
    """Ids at the end of a vocabulary, for tests without a tokenizer."""
    return {name: vocabulary - len(NAMES) + index for index, name in enumerate(NAMES)}
