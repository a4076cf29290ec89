"""Bytes that a step takes at its peak beside weights, states and KV: which tensors live then, from the model's sizes.

This follows vllm/model_executor/models/qwen3_5.py and the PyTorch back ends (kernels/*/torch_impl.py) statement by
statement; `tests/overlay/plan` holds it to the measured peak within 10 %. Whoever changes what lives there changes it
here. Not counted: `prompt_logprobs`, which need logits of every token of a prompt's piece.
"""
from typing import Any, NamedTuple

import torch

from vllm.overlay.kernels import blocks
from vllm.overlay.kernels.gated_delta_rule import CHUNK
from vllm.overlay.kernels.gated_delta_rule import torch_impl as delta
from vllm.overlay.kernels.int8_weights import torch_impl as int8_impl
from vllm.overlay.kernels.paged_attention import torch_impl as paged
from vllm.overlay.model.vision import BATCH_PATCHES, activation_bytes
from vllm.overlay.plan.sizes import Sizes


class Step(NamedTuple):
    """tokens: of the step, all of one prompt. rows: sequences that get a token. busiest: tokens that the busiest expert
    gets; at worst all. device_type: "cpu" or "cuda". quantised: whether large matrices are int8."""
    tokens: int
    rows: int
    busiest: int
    device_type: str
    quantised: bool = False


def decoder_phases(sizes: Sizes, step: Step) -> dict[str, int]:
    """Returns the bytes that live in each phase of a layer, and while tokens are drawn. Their maximum is the peak."""
    return _Decoder(sizes, step).phases()


def decoder_bytes(sizes: Sizes, step: Step) -> int:
    """Returns the peak of `decoder_phases`, with what the products with int8 weights need beside it."""
    return max(decoder_phases(sizes, step).values()) + (_restored(sizes, step) if step.quantised else 0)


def picture_bytes(vision: Any, sizes: Sizes, patches: int, step: Step, dtype: torch.dtype) -> tuple[int, int]:
    """Returns what pictures take: (while the largest, or a batch of them, is computed; embeddings that may be held
    beside a step).

    Args:
        vision: the tower's configuration. patches: of the largest picture.
    """
    if not patches:
        return 0, 0
    # Small pictures are computed together.
    begun = step.tokens * vision.spatial_merge_size**2
    together = max(patches, min(BATCH_PATCHES, begun + patches))
    # All pictures that begin inside the step and the one that goes on after it.
    held = (step.tokens + patches // vision.spatial_merge_size**2) * sizes.hidden * sizes.item
    return activation_bytes(vision, sizes.hidden, together, dtype, sizes.ranks, step.device_type), held


class _Decoder:

    def __init__(self, sizes: Sizes, step: Step) -> None:
        self.sizes, self.step = sizes, step
        # One float32 copy of a half-precision tensor; float32 tensors are not copied.
        self.copied = 0 if sizes.item == 4 else 1
        self.per_hidden = step.tokens * sizes.hidden * sizes.item

    def phases(self) -> dict[str, int]:
        sizes, step = self.sizes, self.step
        # Ids, positions, slots of the cache, and the angles of the step.
        beside = step.tokens * (3 * 8 + 4 * sizes.rotary)
        found = {"norms": 6 * self.per_hidden + (1 + self.copied) * self._block(step.tokens, sizes.hidden)}
        # In a layer: its input and residual, which the caller holds, and the normalised input and residual.
        inside = 4 * self.per_hidden
        if sizes.linear_layers:
            found.update({f"linear attention, {name}": inside + size for name, size in self._linear().items()})
        if sizes.linear_layers < sizes.layers:
            found.update({f"attention, {name}": inside + size for name, size in self._attention().items()})
        mlp = self._experts() if sizes.experts else {"MLP": self._swiglu(sizes.inner)}
        found.update({name: inside + size for name, size in mlp.items()})
        found["drawing tokens"] = self.per_hidden + step.rows * self._per_drawn()
        return {name: beside + size for name, size in found.items()}

    def _block(self, rows: int, width: int) -> int:
        """Bytes of one float32 intermediate of an operator that walks over blocks of rows."""
        if self.step.device_type != "cpu":
            return rows * width * 4
        return min(rows, max(1, blocks._ELEMENTS // max(1, width))) * width * 4

    def _linear(self) -> dict[str, int]:
        sizes, tokens, item = self.sizes, self.step.tokens, self.sizes.item
        values = sizes.value_heads * sizes.value
        mixed = tokens * sizes.channels * item
        # What is held to the end: gates of the output, and what decays and strengths are made of.
        gates = tokens * (values + 2 * sizes.value_heads) * item
        # Decays and strengths, and the readout, in float32.
        read = tokens * (2 * sizes.value_heads + values) * 4
        heads_in_rows = self._block(tokens * sizes.value_heads, sizes.value)
        return {
            # The projection, until both parts of it are copied.
            "projection": 2 * (gates + mixed),
            "convolution": gates + 3 * mixed + (2 + self.copied) * self._block(tokens, sizes.channels),
            "delta rule": gates + mixed + read + self._delta(),
            "gated norm": gates + read + 2 * tokens * values * item + (2 + self.copied) * heads_in_rows,
            "output": gates + read + tokens * values * item + self.per_hidden,
        }

    def _delta(self) -> int:
        sizes, tokens = self.sizes, self.step.tokens
        chunks = min(delta._GROUP, -(-tokens // CHUNK))
        size = CHUNK
        if tokens <= CHUNK:
            size = delta._BLOCK
            while size < tokens:
                size *= 2
        per_value_head = chunks * sizes.value_heads * size
        # Pairwise decay, the system, its inverse, and the attention inside chunks; readers and their products.
        square = 4 * per_value_head * size * 4
        readers = chunks * sizes.key_heads * 2 * size * (sizes.key + size) * 4
        # Gates by head; a chunk's reads, writes and outputs; a few copies of the state.
        values = sizes.value_heads * sizes.value
        small = 3 * per_value_head * 4 + 7 * size * values * 4 + 4 * values * sizes.key * 4
        padded = 0
        if tokens % size and tokens < delta._GROUP * size:
            rows = chunks * size
            padded = rows * (sizes.channels * sizes.item + (2 * sizes.value_heads + values) * 4)
        return square + readers + small + padded

    def _attention(self) -> dict[str, int]:
        sizes, tokens, item = self.sizes, self.step.tokens, self.sizes.item
        queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
        query = tokens * queries * item
        projected = tokens * (2 * queries + 2 * keys) * item
        key = tokens * keys * item
        rotated = 5 * self._block(tokens, sizes.heads * sizes.rotary) // 2
        # Three of queries' size: the queries, the result and the result of one sequence.
        return {
            "norm of queries": projected + 2 * query + (1 + self.copied) * self._block(tokens * sizes.heads,
                                                                                      sizes.head),
            "rotation": projected + 2 * query + key + rotated,
            "scores": projected + 3 * query + 2 * key + self._scores(),
            "gate": projected + 3 * query + key,
            "output": projected + 2 * query + key + self.per_hidden,
        }

    def _scores(self) -> int:
        sizes = self.sizes
        scores = paged._SCORES_CPU if self.step.device_type == "cpu" else paged._SCORES
        count = min(self.step.tokens, max(1, scores // (paged._TILE * sizes.heads)))
        tile = min(paged._TILE, self.step.tokens)
        query = count * sizes.heads * sizes.head
        scored = count * sizes.heads * tile * 4
        # Scaled queries and mixed values, and either those of the tile and its mask or the tile before, which is held
        # until the next replaces it.
        beside = max(scored, query * 4 + scored // (4 * sizes.kv_heads))
        keys = (2 + self.copied) * tile * sizes.kv_heads * sizes.head * 4
        return scored + beside + 2 * query * 4 + keys

    def _swiglu(self, inner: int) -> int:
        """Of a dense MLP: both halves, and SiLU and product, or product and result."""
        first = self.step.tokens * inner * self.sizes.item
        beside = 2 * first if self.step.device_type == "cpu" else first
        return 2 * first + max(beside, first + self.per_hidden)

    def _experts(self) -> dict[str, int]:
        sizes, step = self.sizes, self.step
        hidden, inner = sizes.hidden * sizes.item, sizes.inner * sizes.item
        routed = step.tokens * (sizes.experts * sizes.item + sizes.top_k * 12)
        order = step.tokens * sizes.top_k * 20
        # Of the expert before: what it gave and both halves are held until this one's replace them.
        gathered = 2 * hidden + 4 * inner
        swiglu = hidden + 2 * inner + (2 + self.copied) * sizes.inner * 4
        down = max(2 * hidden, hidden + self.copied * sizes.hidden * 4) + 3 * inner
        total = step.tokens * sizes.hidden * 4
        return {
            "router": routed + step.tokens * sizes.experts * 4,
            "experts": routed + order + total + step.busiest * max(gathered, swiglu, down),
            "shared expert": routed + max(3 * self.per_hidden, self.per_hidden + self._swiglu(sizes.shared)),
        }

    def _per_drawn(self) -> int:
        """Bytes per sequence that gets a token: its logits, those of all ranks joined, their copy in float32, and what
        sorting a whole row takes beside them."""
        sizes = self.sizes
        logits = sizes.item * (1 if sizes.ranks == 1 else 2) + 4 * self.copied
        return sizes.vocab * (logits + 20)


def _restored(sizes: Sizes, step: Step) -> int:
    """One tile of a weight back in the model's dtype, on its way through float32, and the product with it."""
    tile = int8_impl._TILE_CPU if step.device_type == "cpu" else int8_impl._TILE
    largest = sizes.hidden * max(2 * sizes.inner, 2 * sizes.shared, 2 * (sizes.heads + sizes.kv_heads) * sizes.head)
    tile = min(tile, largest)
    expert = 2 * sizes.inner * sizes.hidden if sizes.experts else 0
    return max(tile, expert) * (4 + sizes.item) + step.tokens * max(1, tile // sizes.hidden) * sizes.item
