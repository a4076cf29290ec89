"""State of hybrid models: who owns it, where it lives, and how a step tells the model which rows use which part of it.

The scheduler owns integer slots (`slots`), the worker owns the memory behind them (`state_pool`), a step carries the
orders from the one to the other (`state_orders`), and the model reads the result (`state_step`). DESIGN section 6.
"""
from vllm.overlay.hybrid.checkpoint_error import CheckpointError
from vllm.overlay.hybrid.state_orders import KEEP, ZERO, SequenceOrders, StepOrders
from vllm.overlay.hybrid.state_pool import StatePool
from vllm.overlay.hybrid.state_spec import StateSpec
from vllm.overlay.hybrid.state_step import StateStep, get_state_step, set_state_step

__all__ = ["KEEP", "ZERO", "CheckpointError", "SequenceOrders", "StatePool", "StateSpec", "StateStep", "StepOrders",
           "get_state_step", "set_state_step"]
