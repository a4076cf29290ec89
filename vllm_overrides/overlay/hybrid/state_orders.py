"""Orders about recurrent state, from the scheduler to the workers: plain integers, the same on every rank.

Slots are numbered through: the live ones, then the checkpoints on the device, then those on the host. A checkpoint has
a tag, a number that the scheduler never gives twice, so that a worker can tell whether a slot still holds what the
scheduler means.
"""
from collections.abc import Sequence
from typing import NamedTuple

# What a sequence's slot must hold before the forward pass; any other value is the slot of the checkpoint to copy from.
KEEP = -1
ZERO = -2


class SequenceOrders(NamedTuple):
    """The scheduler's orders for one sequence in one step.

    live_slot: the slot that holds the sequence's state, and is moved forward in place. init: KEEP, ZERO, or the slot,
    on the device or the host, of the checkpoint to start from. captures: (offset, slot, tag): what the state is after
    `offset` tokens of this step's piece goes to `slot`, on the device, and is checkpoint `tag`. init_tag: of the
    checkpoint that `init` names.
    """
    live_slot: int
    init: int = KEEP
    captures: tuple[tuple[int, int, int], ...] = ()
    init_tag: int = 0


class StepOrders(NamedTuple):
    """All orders of one step, rows in batch order: prefill rows first, then decode rows of one token.

    live_slots, inits, init_tags, query_lens: one entry per row. captures: (row, offset, slot, tag). num_prefills:
    number of leading prefill rows. moves: (source, target, tag): checkpoint `tag` goes from a slot on the device to
    one on the host, before anything of this step is written.
    """
    live_slots: list[int]
    inits: list[int]
    init_tags: list[int]
    captures: list[tuple[int, int, int, int]]
    query_lens: list[int]
    num_prefills: int
    moves: list[tuple[int, int, int]]

    @classmethod
    def collect(cls,
                orders: Sequence[SequenceOrders],
                query_lens: Sequence[int],
                num_prefills: int,
                moves: Sequence[tuple[int, int, int]] = ()) -> "StepOrders":
        """Joins the rows' orders and the step's moves.

        Raises:
            ValueError: rows and lengths do not match, a capture falls outside its row's piece, or two orders write to
                one slot.
        """
        if len(orders) != len(query_lens):
            raise ValueError(f"state orders for {len(orders)} rows in a step of {len(query_lens)}")
        live = [order.live_slot for order in orders]
        captures = [(row, *capture) for row, order in enumerate(orders) for capture in order.captures]
        written = live + [slot for _, _, slot, _ in captures] + [target for _, target, _ in moves]
        if len(set(written)) != len(written):
            raise ValueError(f"two state orders of one step write to the same slot: rows {live}, captures {captures}, "
                             f"moves {list(moves)}")
        for row, offset, _, _ in captures:
            if not 1 <= offset <= query_lens[row]:
                raise ValueError(f"capture after {offset} tokens of row {row}, whose piece has {query_lens[row]}")
        return cls(live, [order.init for order in orders], [order.init_tag for order in orders], captures,
                   list(query_lens), num_prefills, list(moves))
