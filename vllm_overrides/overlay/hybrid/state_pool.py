"""The memory of recurrent states: one tensor for the convolution tails, one for the recurrent states, addressed by
slot; and behind them checkpoints in main memory."""
import os
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from vllm.overlay.hybrid.host_states import HostStates
from vllm.overlay.hybrid.state_orders import KEEP, ZERO, StepOrders
from vllm.overlay.hybrid.state_spec import StateSpec

# 1: a checkpoint is compared with its checksum before it is restored or moved. For debugging: it waits for the device.
CHECKSUMS = "VLLM_OVERLAY_CHECKPOINT_CHECKSUMS"


class _Held(NamedTuple):
    """What a slot holds. checksum: None where none are kept."""
    tag: int
    checksum: int | None


class StatePool:
    """States of all sequences of one worker, and its checkpoints.

    Slots 0 to num_live - 1 are live, those up to num_slots - 1 hold checkpoints on the device, and then come those on
    the host. conv: [num_layers, num_slots, channels, width - 1] of the spec's dtype. recurrent: [num_layers, num_slots,
    value heads, key size, value size] float32. A live slot's content means nothing until an order (ZERO or a copy) gave
    it one; a checkpoint's only as long as the pool holds its tag.
    """

    def __init__(self, spec: StateSpec, num_live: int, device: torch.device, num_checkpoints: int = 0,
                 num_host: int = 0) -> None:
        """Allocates and touches all slots. num_checkpoints: on the device. num_host: on the host.

        Raises:
            ValueError: no slots, or a spec without layers.
        """
        if num_live < 1 or min(num_checkpoints, num_host) < 0 or spec.num_layers < 1:
            raise ValueError(f"a state pool of {num_live}, {num_checkpoints} and {num_host} slots and "
                             f"{spec.num_layers} layers")
        self.spec = spec
        self.num_live = num_live
        self.num_slots = num_live + num_checkpoints
        shape = (spec.num_layers, self.num_slots)
        self.conv = torch.zeros((*shape, *spec.conv_shape), dtype=spec.conv_dtype, device=device)
        self.recurrent = torch.zeros((*shape, *spec.recurrent_shape), dtype=torch.float32, device=device)
        # Zeros come lazily from the system; memory that is counted as taken must really be taken.
        self.conv.fill_(0)
        self.recurrent.fill_(0)
        self.host = HostStates(spec, num_host, pin=device.type != "cpu")
        self._held: dict[int, _Held] = {}
        self._with_checksums = os.environ.get(CHECKSUMS, "0") == "1"

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on the device."""
        return self.num_slots * self.spec.slot_bytes

    def check(self, orders: StepOrders) -> None:
        """Looks whether every slot of a step's orders is where it may be.

        Raises:
            IndexError: one is not: scheduler and worker disagree about their number.
        """
        live, last = self.num_live, self.num_slots + self.host.num_slots
        for slots, low, high, what in (
                (orders.live_slots, 0, live, "live state"),
                ([slot for slot in orders.inits if slot not in (KEEP, ZERO)], live, last, "checkpoint"),
                ([slot for _, _, slot, _ in orders.captures], live, self.num_slots, "captured checkpoint"),
                ([source for source, _, _ in orders.moves], live, self.num_slots, "moved checkpoint"),
                ([target for _, target, _ in orders.moves], self.num_slots, last, "host checkpoint")):
            for slot in slots:
                if not low <= slot < high:
                    raise IndexError(f"{what} slot {slot} in a pool of {live} live slots, {self.num_slots - live} for "
                                     f"checkpoints on the device and {self.host.num_slots} on the host")

    def fault(self, slot: int, tag: int) -> str | None:
        """Returns why checkpoint `tag` cannot be taken from `slot`; None if it can."""
        held = self._held.get(slot)
        if held is None or held.tag != tag:
            return f"state slot {slot} holds {'nothing' if held is None else f'checkpoint {held.tag}'}"
        if held.checksum is not None and held.checksum != self._checksum(slot):
            return f"the checksum of state slot {slot} differs"
        return None

    def apply_init(self, live_slots: Sequence[int], inits: Sequence[int]) -> None:
        """Carries out one order per live slot before a forward pass: KEEP, ZERO, or the slot of the checkpoint to copy
        from, on the device or the host."""
        for slot, init in zip(live_slots, inits, strict=True):
            if init == ZERO:
                self.conv[:, slot].zero_()
                self.recurrent[:, slot].zero_()
            elif init != KEEP:
                self._copy(init, slot)

    def move(self, source: int, target: int) -> None:
        """Copies a checkpoint from the device to the host. The copy is done before anything that is enqueued later;
        `source` keeps what it holds."""
        self._copy(source, target)
        self._held[target] = self._held[source]

    def captured(self, slot: int, tag: int) -> None:
        """Notes that `slot` now holds checkpoint `tag`. Called once the forward pass that filled it has succeeded."""
        self._held[slot] = _Held(tag, self._checksum(slot) if self._with_checksums else None)

    def forget(self, slots: Iterable[int]) -> None:
        """Notes that the slots hold no checkpoint any more: a forward pass is about to write to them."""
        for slot in slots:
            self._held.pop(slot, None)

    def first_nonfinite(self, slot: int) -> int | None:
        """Returns the first layer, counted over those with state, of whose state in `slot`, on the device, some entry
        is not finite."""
        for layer in range(self.spec.num_layers):
            if not all(torch.isfinite(tensor[layer, slot]).all() for tensor in (self.recurrent, self.conv)):
                return layer
        return None

    def _state(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(conv, recurrent) of a slot, wherever it is."""
        if slot < self.num_slots:
            return self.conv[:, slot], self.recurrent[:, slot]
        return self.host[slot - self.num_slots]

    def _copy(self, source: int, target: int) -> None:
        for taken, given in zip(self._state(target), self._state(source), strict=True):
            # On the current stream: before whatever the step does next, without the host's waiting for it.
            taken.copy_(given, non_blocking=True)

    def _checksum(self, slot: int) -> int:
        if self.recurrent.is_cuda:
            # Copies to the host may still be under way.
            torch.cuda.synchronize()
        found = 0
        for tensor in self._state(slot):
            found = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy(), found)
        return found
