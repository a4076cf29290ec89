"""The memory of recurrent states: one tensor for the convolution tails, one for the recurrent states, addressed by
slot."""
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm.overlay.hybrid.state_orders import KEEP, ZERO


class StateSpec(NamedTuple):
    """What one sequence's state is made of on this rank. A model that has such state returns it from
    `get_state_spec()`.

    num_layers: number of layers with state. conv_shape: (channels on this rank, convolution width - 1) of `conv_dtype`.
    recurrent_shape: (value heads on this rank, key size, value size), always float32.
    """
    num_layers: int
    conv_shape: tuple[int, int]
    conv_dtype: torch.dtype
    recurrent_shape: tuple[int, int, int]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        conv = self.conv_shape[0] * self.conv_shape[1] * torch.empty((), dtype=self.conv_dtype).element_size()
        recurrent = self.recurrent_shape[0] * self.recurrent_shape[1] * self.recurrent_shape[2] * 4
        return self.num_layers * (conv + recurrent)


class StatePool:
    """States of all sequences of one worker.

    conv: [num_layers, num_slots, channels, width - 1] of the spec's dtype. recurrent: [num_layers, num_slots, value
    heads, key size, value size] float32. A slot's content means nothing until an order (ZERO or copy-from) gave it one.
    """

    def __init__(self, spec: StateSpec, num_slots: int, device: torch.device) -> None:
        """Allocates and touches `num_slots` slots.

        Raises:
            ValueError: no slots, or a spec without layers.
        """
        if num_slots < 1 or spec.num_layers < 1:
            raise ValueError(f"a state pool of {num_slots} slots and {spec.num_layers} layers")
        self.spec = spec
        self.num_slots = num_slots
        self.conv = torch.zeros((spec.num_layers, num_slots, *spec.conv_shape), dtype=spec.conv_dtype, device=device)
        self.recurrent = torch.zeros((spec.num_layers, num_slots, *spec.recurrent_shape),
                                     dtype=torch.float32,
                                     device=device)
        # Zeros come lazily from the system; memory that is counted as taken must really be taken.
        self.conv.fill_(0)
        self.recurrent.fill_(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.spec.slot_bytes

    def apply_init(self, live_slots: Sequence[int], inits: Sequence[int]) -> None:
        """Carries out one order per slot before a forward pass: KEEP, ZERO, or the slot to copy from.

        All sources are read before anything is written, so that a slot may be copied and given away in the same step.

        Raises:
            IndexError: a slot outside the pool.
        """
        zeroed: list[int] = []
        copied: list[int] = []
        sources: list[int] = []
        for slot, init in zip(live_slots, inits, strict=True):
            self._check(slot)
            if init == ZERO:
                zeroed.append(slot)
            elif init != KEEP:
                self._check(init)
                copied.append(slot)
                sources.append(init)
        for tensor in (self.conv, self.recurrent):
            taken = tensor[:, sources] if sources else None
            if zeroed:
                tensor[:, zeroed] = 0
            if taken is not None:
                tensor[:, copied] = taken

    def first_nonfinite(self, slot: int) -> int | None:
        """Returns the first layer, counted over those with state, of whose state in `slot` some entry is not finite."""
        for layer in range(self.spec.num_layers):
            if not all(torch.isfinite(tensor[layer, slot]).all() for tensor in (self.recurrent, self.conv)):
                return layer
        return None

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"state slot {slot} in a pool of {self.num_slots}")
