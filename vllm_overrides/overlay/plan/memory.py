"""What there is against what is needed: KV capacity, and which setting to change where it does not suffice."""
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm.overlay.model import int8
from vllm.overlay.plan.checkpoints import Room
from vllm.overlay.plan.sizes import Sizes
from vllm.overlay.plan.weights import Part, weight_parts
from vllm.overlay.plan.workspace import Step, decoder_bytes, decoder_phases, picture_bytes
from vllm.overlay.runtime.platform_cpu import wanted_kv_blocks

GIB, MIB = 1 << 30, 1 << 20
# On a card beside all that is counted: context, communicators, handles of libraries, fragments. What the predecessor's
# starts leave unexplained (docs/memory.md). On a CPU: threads and arenas.
FIXED = {"cuda": 2_000_000_000, "cpu": GIB // 4}
_PARTS_SHOWN = 5
# Steps in which settings are proposed.
_TOKENS_STEP, _UTILIZATION_STEP, _MOST_UTILIZATION = 256, 0.01, 0.98


class PlanError(ValueError):
    """The settings do not fit into memory; the message is one line and names what to change."""


class Wish(NamedTuple):
    """Model, settings and memory of one rank.

    config: of the whole model. memory: bytes of the device, or of a CPU's memory that this rank may take. free: bytes
    of it that nobody else has taken; None: all. patches: of the largest picture; 0: no pictures.

    prefix_caching: whether checkpoints of recurrent state are kept. checkpoint_memory, checkpoint_host_memory: bytes
    for them on the device and on the host; None: as `vllm.overlay.plan.checkpoints` says. host_memory: bytes of main
    memory that all ranks can take together; None: enough. kv_tokens: the size of the KV cache that was asked for.

    The last five replace what would be counted: layers with KV, bytes of weights, of a sequence's state, of workspace
    per token, of what is fixed.
    """
    config: Any
    dtype: torch.dtype
    memory: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    ranks: int = 1
    utilization: float = 1.0
    free: int | None = None
    block_size: int = 16
    device_type: str = "cuda"
    quantization: str | None = None
    mtp: bool = False
    patches: int = 0
    prefix_caching: bool = False
    checkpoint_memory: int | None = None
    checkpoint_host_memory: int | None = None
    host_memory: int | None = None
    kv_tokens: int | None = None
    kv_layers: int | None = None
    weights: int | None = None
    slot: int | None = None
    token_bytes: int | None = None
    fixed: int | None = None

    @property
    def budget(self) -> int:
        """Bytes that weights, states, workspace and KV may take together."""
        share = int(self.memory * self.utilization)
        return share if self.free is None else min(share, self.free)


class MemoryPlan(NamedTuple):
    """Bytes on one rank. step: the decoder's workspace, whose largest phase is `peak`. tower: the workspace of the
    largest picture, which is computed before the decoder runs. held: embeddings beside either. num_checkpoints,
    num_host_checkpoints: of recurrent state, each a slot's bytes, on the device and on the host."""
    wish: Wish
    parts: tuple[Part, ...]
    weights: int
    slot: int
    step: int
    peak: str
    tower: int
    held: int
    fixed: int
    kv_token: int
    num_checkpoints: int = 0
    num_host_checkpoints: int = 0

    @property
    def states(self) -> int:
        return self.slot * self.wish.max_num_seqs

    @property
    def checkpoints(self) -> int:
        """Bytes of checkpoints on the device. Beside a CPU, what is called the host is the same memory."""
        count = self.num_checkpoints + (self.num_host_checkpoints if self.wish.device_type == "cpu" else 0)
        return self.slot * count

    @property
    def workspace(self) -> int:
        return max(self.step, self.tower) + self.held

    @property
    def kv(self) -> int:
        """Bytes that are left for KV; negative where the rest alone is too much."""
        return self.wish.budget - self.weights - self.states - self.checkpoints - self.workspace - self.fixed

    @property
    def capacity(self) -> int:
        """Tokens of KV, in whole blocks."""
        if not self.kv_token:
            return self.wish.max_model_len
        block = self.wish.block_size
        return max(0, self.kv) // (self.kv_token * block) * block

    @property
    def fits(self) -> bool:
        """Whether one sequence of max_model_len fits."""
        block = self.wish.block_size
        return self.kv >= 0 and self.capacity >= -(-self.wish.max_model_len // block) * block

    def table(self) -> str:
        """The plan in a few lines."""
        wish = self.wish
        largest = sorted(self.parts, key=lambda part: -part.total)
        parts = ", ".join(f"{part.name} {shown(part.total)}" for part in largest[:_PARTS_SHOWN])
        if not self.parts:
            parts = "as given"
        elif len(largest) > _PARTS_SHOWN:
            parts += f", others {shown(sum(part.total for part in largest[_PARTS_SHOWN:]))}"
        if self.parts and wish.ranks > 1:
            parts += f"; every rank holds {shown(sum(part.whole for part in self.parts))} of it"
        pictures = "no pictures"
        if wish.patches:
            pictures = (f"a picture of {wish.patches} patches, before it, {shown(self.tower)}; embeddings of pictures "
                        f"{shown(self.held)}")
        rows = [("weights", self.weights, parts),
                ("states", self.states, f"{wish.max_num_seqs} sequences of {shown(self.slot)}"),
                ("checkpoints", self.checkpoints, self._kept()),
                ("workspace", self.workspace, f"a step of {wish.max_num_batched_tokens} tokens {shown(self.step)} "
                                              f"({self.peak}); {pictures}"),
                ("fixed", self.fixed, "contexts, libraries, fragments"),
                ("KV cache", self.kv, f"{self.capacity} tokens of {self.kv_token} bytes, "
                                      f"{self.capacity / wish.max_model_len:.2f} x max_model_len {wish.max_model_len}")]
        whose = f" of each of {wish.ranks} ranks" if wish.ranks > 1 else ""
        lines = [f"Memory plan{whose}, {str(wish.dtype)[6:]}"
                 f"{f', {wish.quantization}' if wish.quantization else ''}: {_origin(wish)}"]
        return "\n".join(lines + [f"  {name:11}{shown(size):>11}  {what}" for name, size, what in rows])

    def _kept(self) -> str:
        if not self.num_checkpoints:
            return "none"
        one = f"{self.num_checkpoints} of {shown(self.slot)}"
        if not self.num_host_checkpoints:
            return f"{one}; none on the host"
        return f"{one}; {self.num_host_checkpoints} on the host, {shown(self.num_host_checkpoints * self.slot)}"

    def numbers(self) -> dict[str, Any]:
        """The plan for programs, in bytes."""
        wish = self.wish
        return {"budget": wish.budget, "weights": self.weights,
                "parts": {part.name: {"split": part.split, "whole": part.whole} for part in self.parts},
                "slot": self.slot, "states": self.states, "checkpoints": self.checkpoints,
                "num_checkpoints": self.num_checkpoints, "num_host_checkpoints": self.num_host_checkpoints,
                "step": self.step, "peak": self.peak, "tower": self.tower, "held": self.held,
                "workspace": self.workspace, "fixed": self.fixed, "kv_token": self.kv_token, "kv": self.kv,
                "capacity": self.capacity, "max_model_len": wish.max_model_len, "max_num_seqs": wish.max_num_seqs,
                "max_num_batched_tokens": wish.max_num_batched_tokens, "fits": self.fits}


def shown(size: int) -> str:
    """Bytes for people: "16.18 GiB", "15.4 MiB"."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB // 10 else f"{size / MIB:.1f} MiB"


def plan(wish: Wish) -> MemoryPlan:
    """Counts.

    Raises:
        ValueError: the ranks cannot share the model, or its weights cannot be counted.
    """
    text = wish.config.get_text_config()
    sizes = Sizes.of(text, wish.ranks, wish.dtype)
    parts: tuple[Part, ...] = ()
    weights = wish.weights
    if weights is None:
        parts = tuple(weight_parts(wish.config, wish.ranks, wish.dtype, wish.quantization, wish.mtp, wish.patches > 0
                                   or _has_tower(wish.config)))
        weights = sum(part.total for part in parts)
    step = step_of(wish)
    if wish.token_bytes is None:
        peak = max(decoder_phases(sizes, step).items(), key=lambda phase: phase[1])[0]
        decoder = decoder_bytes(sizes, step)
    else:
        decoder, peak = wish.token_bytes * step.tokens, "as given"
    tower, held = picture_bytes(getattr(wish.config, "vision_config", None), sizes, wish.patches, step, wish.dtype)
    layers = sizes.layers - sizes.linear_layers if wish.kv_layers is None else wish.kv_layers
    fixed = FIXED[wish.device_type] if wish.fixed is None else wish.fixed
    slot = sizes.slot_bytes if wish.slot is None else wish.slot
    found = MemoryPlan(wish, parts, weights, slot, decoder, peak, tower, held, fixed,
                       layers * 2 * sizes.kv_heads * sizes.head * sizes.item)
    return _with_checkpoints(found) if wish.prefix_caching and slot else found


def _with_checkpoints(found: MemoryPlan) -> MemoryPlan:
    """found: with none."""
    wish = found.wish
    block = found.kv_token * wish.block_size
    needed = -(-wish.max_model_len // wish.block_size)
    tokens = wish.kv_tokens
    if tokens is not None:
        needed = tokens // wish.block_size
    elif wish.device_type == "cpu" and block:
        tokens = wish.block_size * wanted_kv_blocks(block, wish.block_size, wish.max_model_len, wish.max_num_seqs)
    room = Room(found.slot, found.kv, needed * block, found.capacity if tokens is None else tokens, wish.max_num_seqs,
                wish.host_memory, wish.ranks, wish.device_type == "cpu")
    device, host = wish.checkpoint_memory, wish.checkpoint_host_memory
    on_device = room.on_device() if device is None else device // found.slot
    on_host = room.on_host(on_device) if host is None else host // found.slot if on_device else 0
    return found._replace(num_checkpoints=on_device, num_host_checkpoints=on_host)


def step_of(wish: Wish, tokens: int | None = None) -> Step:
    """The largest step, or one of so many tokens."""
    tokens = wish.max_num_batched_tokens if tokens is None else tokens
    return Step(tokens, min(wish.max_num_seqs, tokens), tokens, wish.device_type, wish.quantization is not None)


def settle(wish: Wish) -> MemoryPlan:
    """Returns a plan that fits: the wish's, or one with fewer checkpoints, or one with none and fewer sequences at a
    time.

    Raises:
        PlanError: none does. The message says which other setting would.
    """
    found = plan(wish)
    if found.fits:
        return found
    if wish.checkpoint_memory is not None and found.num_checkpoints:
        most = _largest(1, found.num_checkpoints - 1, 1,
                        lambda count: plan(wish._replace(checkpoint_memory=count * found.slot)).fits)
        wish = wish._replace(checkpoint_memory=most * found.slot)
        found = plan(wish)
        if found.fits:
            return found
    sequences = _largest(1, wish.max_num_seqs - 1, 1, lambda value: plan(wish._replace(max_num_seqs=value)).fits)
    if sequences:
        return plan(wish._replace(max_num_seqs=sequences))
    raise PlanError(refusal(found))


def refusal(found: MemoryPlan) -> str:
    """Why a plan does not fit, and what would, in one line."""
    wish = found.wish
    settings = advice(wish)
    what = " or ".join(settings) or (
        "no single setting suffices: give more memory, more ranks (--tensor-parallel-size), or lower several")
    return (f"too little memory for one sequence of max_model_len {wish.max_model_len}: of {_origin(wish)}, weights "
            f"take {shown(found.weights)}, {wish.max_num_seqs} states {shown(found.states)}, steps of "
            f"{wish.max_num_batched_tokens} tokens {shown(found.workspace)} and what is fixed {shown(found.fixed)}, "
            f"which leaves {found.capacity} tokens of KV cache: {what}")


def advice(wish: Wish) -> list[str]:
    """Single settings that would make it fit, each with its value."""
    def fits(**fields: Any) -> bool:
        return plan(wish._replace(**fields)).fits

    found = []
    tokens = _largest(_TOKENS_STEP, wish.max_num_batched_tokens - 1, _TOKENS_STEP,
                      lambda value: fits(max_num_batched_tokens=value))
    if tokens:
        found.append(f"lower --max-num-batched-tokens to {tokens}")
    if fits(max_num_seqs=1):
        sequences = _largest(1, wish.max_num_seqs - 1, 1, lambda value: fits(max_num_seqs=value))
        found.append(f"lower --max-num-seqs to {sequences}")
    capacity = plan(wish).capacity
    if capacity:
        found.append(f"lower --max-model-len to {capacity}")
    taken = wish.free is not None and wish.free <= wish.memory * wish.utilization
    if wish.device_type != "cpu" and not taken:
        steps = round(_MOST_UTILIZATION / _UTILIZATION_STEP)
        first = math.floor(wish.utilization / _UTILIZATION_STEP + 1e-9) + 1
        enough = next((step for step in range(first, steps + 1) if fits(utilization=step * _UTILIZATION_STEP)), None)
        if enough:
            found.append(f"raise --gpu-memory-utilization to {enough * _UTILIZATION_STEP:.2f}")
    if wish.quantization is None and wish.weights is None and fits(quantization=int8.NAME):
        found.append(f"give --quantization {int8.NAME}")
    return found


def _largest(low: int, high: int, step: int, fits: Callable[[int], bool]) -> int:
    """The largest value of range(low, high + 1, step) that fits, where larger ones fit less; 0: none."""
    values = range(low, high + 1, step)
    best, first, last = 0, 0, len(values) - 1
    while first <= last:
        middle = (first + last) // 2
        if fits(values[middle]):
            best, first = values[middle], middle + 1
        else:
            last = middle - 1
    return best


def _has_tower(config: Any) -> bool:
    from vllm.overlay.pictures.picture import PictureSettings
    return PictureSettings.of(config) is not None


def _origin(wish: Wish) -> str:
    if wish.free is not None and wish.free < int(wish.memory * wish.utilization):
        return f"{shown(wish.budget)} that nothing else has taken of {shown(wish.memory)}"
    if wish.utilization == 1.0:
        return f"{shown(wish.budget)} of memory"
    return f"{shown(wish.budget)} ({wish.utilization:g} of {shown(wish.memory)})"
