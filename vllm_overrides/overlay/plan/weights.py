"""Bytes of the parameters that one rank holds, by component. `tests/overlay/plan` compares with the models' own."""
from typing import Any, NamedTuple

import torch

from vllm.overlay.model import int8
from vllm.overlay.plan.sizes import Sizes

# Rows of the vocabulary come in multiples of this (VocabParallelEmbedding).
_VOCABULARY_STEP = 64


class Part(NamedTuple):
    """Bytes of one component on one rank. split: its share of what the ranks divide; whole: what each of them holds."""
    name: str
    split: int
    whole: int = 0

    @property
    def total(self) -> int:
        return self.split + self.whole


def weight_parts(config: Any, ranks: int, dtype: torch.dtype, quantization: str | None, mtp: bool,
                 pictures: bool) -> list[Part]:
    """Returns the components in the order of the model.

    Args:
        config: of the whole model. quantization: None or "int8_weight_only". mtp: whether the multi-token-prediction
            head is loaded. pictures: whether the vision tower is.

    Raises:
        ValueError: another quantisation; sizes that the ranks cannot share.
    """
    if quantization not in (None, int8.NAME):
        raise ValueError(f"weights in {quantization} cannot be counted, only {int8.NAME} and none")
    text = config.get_text_config()
    layers = _Layers(text, Sizes.of(text, ranks, dtype), quantization is not None)
    sizes = layers.sizes
    attention_layers = sizes.layers - sizes.linear_layers
    vocabulary = -(-sizes.vocab // _VOCABULARY_STEP) * _VOCABULARY_STEP
    if vocabulary % ranks:
        raise ValueError(f"tensor parallel size {ranks} does not divide the {vocabulary} rows of the vocabulary")
    rows = vocabulary // ranks
    parts = [Part("embedding", rows * sizes.hidden * sizes.item),
             Part("head", 0 if config.tie_word_embeddings else layers.matrix(rows, sizes.hidden, int8.HEAD)),
             layers.attention("attention", attention_layers), layers.linear_attention(sizes.linear_layers)]
    parts += layers.mlp("", sizes.layers)
    parts.append(Part("norms", 0, (2 * sizes.layers + 1) * sizes.hidden * sizes.item))
    if pictures and getattr(config, "vision_config", None) is not None:
        parts.append(_vision(config.vision_config, ranks, sizes))
    count = getattr(text, "mtp_num_hidden_layers", 0) if mtp else 0
    if count:
        inside = [layers.attention("", count), *layers.mlp("", count)]
        own = (2 * sizes.hidden**2 + (3 + 2 * count) * sizes.hidden) * sizes.item
        parts.append(Part("multi-token prediction", sum(part.split for part in inside),
                          sum(part.whole for part in inside) + own))
    return [part for part in parts if part.total]


class _Layers:

    def __init__(self, text: Any, sizes: Sizes, quantised: bool) -> None:
        self.text, self.sizes, self.quantised = text, sizes, quantised

    def matrix(self, rows: int, columns: int, name: str = "") -> int:
        """Bytes of a large matrix; `name` as int8.covers asks for it."""
        if self.quantised and int8.covers(name):
            return rows * columns + 4 * rows
        return rows * columns * self.sizes.item

    def attention(self, name: str, count: int) -> Part:
        sizes = self.sizes
        rows = 2 * sizes.heads * sizes.head + 2 * sizes.kv_heads * sizes.head
        split = self.matrix(rows, sizes.hidden) + self.matrix(sizes.hidden, sizes.heads * sizes.head)
        whole = 2 * sizes.head * sizes.item
        if self.text.attention_bias:
            split += rows * sizes.item
            whole += sizes.hidden * sizes.item
        return Part(name, count * split, count * whole)

    def linear_attention(self, count: int) -> Part:
        sizes, name = self.sizes, ".linear_attn."
        values = sizes.value_heads * sizes.value
        split = self.matrix(sizes.channels + values, sizes.hidden, name) + self.matrix(sizes.hidden, values, name)
        split += (2 * sizes.value_heads * sizes.hidden + sizes.channels * sizes.width) * sizes.item
        split += 2 * sizes.value_heads * 4
        return Part("linear attention", count * split, count * sizes.value * 4)

    def mlp(self, name: str, count: int) -> list[Part]:
        sizes = self.sizes
        if not sizes.experts:
            return [Part(name or "MLP", count * self._swiglu(sizes.inner))]
        experts = sizes.experts * self._swiglu(sizes.inner)
        router = (sizes.experts + 1) * sizes.hidden * sizes.item
        return [Part("experts", count * experts), Part("shared expert", count * self._swiglu(sizes.shared)),
                Part("router", 0, count * router)]

    def _swiglu(self, inner: int) -> int:
        return self.matrix(2 * inner, self.sizes.hidden) + self.matrix(self.sizes.hidden, inner)


def _vision(vision: Any, ranks: int, sizes: Sizes) -> Part:
    hidden, item = vision.hidden_size, sizes.item
    patch = vision.in_channels * vision.patch_size**2
    whole = 4 * hidden * (patch + 1) + vision.num_position_embeddings * hidden * item
    split = 0
    merged = hidden * vision.spatial_merge_size**2
    # Matrices in pairs: the first split by rows with its bias, the second by columns; (inputs, inner, outputs).
    pairs = [(merged, merged, vision.out_hidden_size, merged % ranks == 0)]
    pairs += [(hidden, vision.intermediate_size, hidden, vision.intermediate_size % ranks == 0)] * vision.depth
    for inputs, inner, outputs, divides in pairs:
        share = (inner * (inputs + 1) + inner * outputs) * item
        split, whole = (split + share // ranks, whole) if divides else (split, whole + share)
        whole += outputs * item
    attention = vision.depth * (4 * hidden + 3) * hidden * item
    split, whole = (split + attention // ranks, whole) if vision.num_heads % ranks == 0 else (split, whole + attention)
    whole += vision.depth * hidden * item + (4 * vision.depth + 2) * hidden * 4
    return Part("vision tower", split, whole)
