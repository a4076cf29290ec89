"""What the model reads about the states of the rows that it is running, set around one forward pass."""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch

from vllm.overlay.hybrid.checkpoint_error import CheckpointError
from vllm.overlay.hybrid.state_orders import StepOrders
from vllm.overlay.hybrid.state_pool import StatePool
from vllm.overlay.runtime.current import Current

# For each of a step's checkpoints whether this rank has it -> whether all ranks have.
Agree = Callable[[Sequence[bool]], Sequence[bool]]


@dataclass(frozen=True)
class StateStep:
    """Rows of one forward pass and the state of each. Rows are in batch order: prefill rows first, then decode rows.

    pool: where the states are. live_slots: int64 [N] on the pool's device. query_start_loc: N + 1 host ints; row i has
    the tokens [query_start_loc[i], query_start_loc[i + 1]). num_prefills: rows before it may have any length, the
    others have exactly one token. captures: (row, offset, slot): the state and convolution tail as they are after
    `offset` tokens of that row's piece (1..length) are to be copied to `slot`. tags: of the captures.
    """
    pool: StatePool
    live_slots: torch.Tensor
    query_start_loc: list[int]
    num_prefills: int
    captures: tuple[tuple[int, int, int], ...] = ()
    tags: tuple[int, ...] = ()

    @classmethod
    def begin(cls, pool: StatePool, orders: StepOrders, agree: Agree = lambda here: here) -> "StateStep":
        """Carries out the orders that come before the forward pass and describes the step to the model.

        All sources are read before anything is written: what a slot holds may be moved to the host, and another state
        captured in it, in one step. agree: asked only by a step that restores or moves checkpoints.

        Raises:
            IndexError: an order names a slot that the pool does not have there.
            CheckpointError: on every rank alike, and nothing was written: a checkpoint is not where it should be.
        """
        pool.check(orders)
        _check_checkpoints(pool, orders, agree)
        pool.apply_init(orders.live_slots, orders.inits)
        for source, target, _ in orders.moves:
            pool.move(source, target)
        pool.forget(slot for _, _, slot, _ in orders.captures)
        return cls(pool=pool,
                   live_slots=torch.tensor(orders.live_slots, dtype=torch.long, device=pool.recurrent.device),
                   query_start_loc=[0, *accumulate(orders.query_lens)],
                   num_prefills=orders.num_prefills,
                   captures=tuple((row, offset, slot) for row, offset, slot, _ in orders.captures),
                   tags=tuple(tag for _, _, _, tag in orders.captures))

    def end(self) -> None:
        """The forward pass has succeeded: what it captured are checkpoints now."""
        for (_, _, slot), tag in zip(self.captures, self.tags, strict=True):
            self.pool.captured(slot, tag)


def _check_checkpoints(pool: StatePool, orders: StepOrders, agree: Agree) -> None:
    wanted = [(slot, tag) for slot, tag in zip(orders.inits, orders.init_tags, strict=True) if slot >= 0]
    wanted += [(source, tag) for source, _, tag in orders.moves]
    if not wanted:
        return
    faults = [pool.fault(slot, tag) for slot, tag in wanted]
    everywhere = agree([fault is None for fault in faults])
    missing = [(tag, fault) for (_, tag), fault, there in zip(wanted, faults, everywhere, strict=True) if not there]
    if missing:
        said = "; ".join(f"checkpoint {tag}: {fault or 'another rank does not hold it'}" for tag, fault in missing)
        raise CheckpointError(f"a checkpoint is not where it should be: {said}", [tag for tag, _ in missing])


_current: Current[StateStep] = Current()


def get_state_step() -> StateStep | None:
    """Returns the step that is running; None outside a step and where rows have no state (memory profiling, other
    models)."""
    return _current.get()


def set_state_step(step: StateStep | None) -> AbstractContextManager[None]:
    """Makes `step` what `get_state_step` returns while the context lasts."""
    return _current.set(step)
