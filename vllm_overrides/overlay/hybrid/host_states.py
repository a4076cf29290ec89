"""States in main memory: checkpoints that the device has no room for."""
from collections.abc import Iterator

import torch

from vllm.logger import init_logger
from vllm.overlay.hybrid.state_spec import StateSpec

logger = init_logger(__name__)

# PyTorch rounds an allocation of pinned memory up to a power of two, so this much is taken at a time.
_PIECE = 1 << 30
# Where a state begins, so that its parts can be seen in their own dtypes.
_ALIGNMENT = 64


class HostStates:
    """`num_slots` states of `spec`, one run of bytes each.

    pinned: whether the device can copy while the host goes on; False where that is not asked for, or the system lets
    no more memory be pinned.
    """

    def __init__(self, spec: StateSpec, num_slots: int, pin: bool) -> None:
        """Allocates and touches the memory. pin: whether to pin it, where the system lets us."""
        self.num_slots = num_slots
        self.pinned = pin
        self._states = [state for count in _pieces(num_slots, _row_bytes(spec))
                        for state in self._allocate(spec, count)]

    def __getitem__(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(conv [num_layers, channels, width - 1], recurrent [num_layers, value heads, key size, value size]) of slot
        0 to num_slots - 1."""
        return self._states[slot]

    def _allocate(self, spec: StateSpec, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        memory = self._bytes(count * _row_bytes(spec)).view(count, -1)
        states = []
        for row in memory:
            recurrent = row[:spec.recurrent_bytes].view(torch.float32)
            conv = row[spec.recurrent_bytes:spec.slot_bytes].view(spec.conv_dtype)
            states.append((conv.view(spec.num_layers, *spec.conv_shape),
                           recurrent.view(spec.num_layers, *spec.recurrent_shape)))
        return states

    def _bytes(self, size: int) -> torch.Tensor:
        if self.pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.pinned = False
                logger.warning("Checkpoints on the host are copied while the device waits: no memory can be pinned "
                               "(%s).", str(error).splitlines()[0])
        # Zeros come lazily from the system; memory that is counted as taken must really be taken.
        return torch.empty(size, dtype=torch.uint8).fill_(0)


def _row_bytes(spec: StateSpec) -> int:
    return -(-spec.slot_bytes // _ALIGNMENT) * _ALIGNMENT


def _pieces(count: int, row: int) -> Iterator[int]:
    """Yields how many rows of so many bytes each allocation holds: as many as fit into a power of two."""
    while count:
        size = min(_PIECE, 1 << ((count * row).bit_length() - 1))
        rows = min(count, max(1, size // row))
        yield rows
        count -= rows
