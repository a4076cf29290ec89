"""The scheduler's book of state slots: which sequence owns which, and what its slot must hold before its next step."""

from vllm.overlay.hybrid.state_orders import KEEP, ZERO, SequenceOrders


class SlotTable:
    """One live slot per running sequence, of slots 0 to num_slots - 1. It never looks at memory: workers carry out its
    orders."""

    def __init__(self, num_slots: int) -> None:
        self._free: list[int] = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._inits: dict[int, tuple[int, int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, seq_id: int, init: int = ZERO, tag: int = 0) -> int:
        """Gives `seq_id` a slot and returns it. init: what its next step starts from, ZERO or the slot of checkpoint
        `tag` as the step begins.

        Raises:
            RuntimeError: it has one, or none is free: the scheduler admitted more sequences than it may.
        """
        if seq_id in self._slots:
            raise RuntimeError(f"sequence {seq_id} already owns state slot {self._slots[seq_id]}")
        if not self._free:
            raise RuntimeError(f"no state slot is free for sequence {seq_id}: {len(self._slots)} sequences are running")
        slot = self._slots[seq_id] = self._free.pop()
        self._inits[seq_id] = init, tag
        return slot

    def free(self, seq_id: int) -> None:
        """Takes the slot back; nothing happens if `seq_id` has none (it finished, was preempted, or never ran)."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            self._inits.pop(seq_id)
            self._free.append(slot)

    def orders(self, seq_id: int, captures: tuple[tuple[int, int, int], ...] = ()) -> SequenceOrders:
        """Returns the orders of `seq_id` for the step being scheduled; the next step starts from what this one leaves.
        captures: as in SequenceOrders.

        Raises:
            KeyError: it owns no slot.
        """
        init, tag = self._inits[seq_id]
        self._inits[seq_id] = KEEP, 0
        return SequenceOrders(self._slots[seq_id], init, captures, tag)
