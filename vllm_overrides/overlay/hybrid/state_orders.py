"""Orders about recurrent state, from the scheduler to the workers: plain integers, the same on every rank."""
from collections.abc import Sequence
from typing import NamedTuple

# What a sequence's slot must hold before the forward pass; any other value is the slot to copy from.
KEEP = -1
ZERO = -2


class SequenceOrders(NamedTuple):
    """The scheduler's orders for one sequence in one step.

    live_slot: the slot that holds the sequence's state, and is moved forward in place. init: KEEP, ZERO, or the slot
    whose content to start from. captures: (offset, slot) pairs: what the state is after `offset` tokens of this step's
    piece goes to `slot`.
    """
    live_slot: int
    init: int = KEEP
    captures: tuple[tuple[int, int], ...] = ()


class StepOrders(NamedTuple):
    """All orders of one step, rows in batch order: prefill rows first, then decode rows of one token.

    live_slots, inits, query_lens: one entry per row. captures: (row, offset, slot). num_prefills: number of leading
    prefill rows.
    """
    live_slots: list[int]
    inits: list[int]
    captures: list[tuple[int, int, int]]
    query_lens: list[int]
    num_prefills: int

    @classmethod
    def collect(cls, orders: Sequence[SequenceOrders], query_lens: Sequence[int], num_prefills: int) -> "StepOrders":
        """Joins the rows' orders.

        Raises:
            ValueError: rows and lengths do not match, two rows share a slot, a capture falls outside its row's piece,
            or two captures,
                or a capture and a row, want the same slot.
        """
        if len(orders) != len(query_lens):
            raise ValueError(f"state orders for {len(orders)} rows in a step of {len(query_lens)}")
        captures = [(row, offset, slot) for row, order in enumerate(orders) for offset, slot in order.captures]
        written = [order.live_slot for order in orders] + [slot for _, _, slot in captures]
        if len(set(written)) != len(written):
            raise ValueError(f"two state orders of one step write to the same slot: rows {written[:len(orders)]}, "
                             f"captures {captures}")
        for row, offset, _ in captures:
            if not 1 <= offset <= query_lens[row]:
                raise ValueError(f"capture after {offset} tokens of row {row}, whose piece has {query_lens[row]}")
        return cls([order.live_slot for order in orders], [order.init for order in orders], captures, list(query_lens),
                   num_prefills)
