"""What the model reads about the states of the rows that it is running, set around one forward pass."""
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch

from vllm.overlay.hybrid.state_orders import StepOrders
from vllm.overlay.hybrid.state_pool import StatePool
from vllm.overlay.runtime.current import Current


@dataclass(frozen=True)
class StateStep:
    """Rows of one forward pass and the state of each. Rows are in batch order: prefill rows first, then decode rows.

    pool: where the states are. live_slots: int64 [N] on the pool's device. query_start_loc: N + 1 host ints; row i has
    the tokens [query_start_loc[i], query_start_loc[i + 1]). num_prefills: rows before it may have any length, the
    others have exactly one token. captures: (row, offset, slot): the state and convolution tail as they are after
    `offset` tokens of that row's piece (1..length) are to be copied to `slot`.
    """
    pool: StatePool
    live_slots: torch.Tensor
    query_start_loc: list[int]
    num_prefills: int
    captures: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def begin(cls, pool: StatePool, orders: StepOrders) -> "StateStep":
        """Carries out the orders that come before the forward pass and describes the step to the model.

        Raises:
            IndexError: an order names a slot that the pool does not have: scheduler and worker disagree.
        """
        for _, _, slot, _ in orders.captures:
            if not 0 <= slot < pool.num_slots:
                raise IndexError(f"capture to state slot {slot} in a pool of {pool.num_slots}")
        pool.apply_init(orders.live_slots, orders.inits)
        return cls(pool=pool,
                   live_slots=torch.tensor(orders.live_slots, dtype=torch.long, device=pool.recurrent.device),
                   query_start_loc=[0, *accumulate(orders.query_lens)],
                   num_prefills=orders.num_prefills,
                   captures=tuple((row, offset, slot) for row, offset, slot, _ in orders.captures))


_current: Current[StateStep] = Current()


def get_state_step() -> StateStep | None:
    """Returns the step that is running; None outside a step and where rows have no state (memory profiling, other
    models)."""
    return _current.get()


def set_state_step(step: StateStep | None) -> AbstractContextManager[None]:
    """Makes `step` what `get_state_step` returns while the context lasts."""
    return _current.set(step)
