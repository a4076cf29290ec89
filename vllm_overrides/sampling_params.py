"""Sampling parameters: several greedy samples are allowed, as the API allows them; they are served as requests of one
sample. And a constraint, and what class of request it is, travel with them."""
from typing import Any

from vllm import sampling_params_stock as _stock
from vllm.overlay.rebind import rebind


class SamplingParams(_stock.SamplingParams):
    """Stock's parameters.

    large_output: whether the request asks for so many tokens that it yields to others
    (`vllm.overlay.engine.large_output`). constraint: a Constraint of `vllm.overlay.grammar`, or None. The engine adds
    the compiled grammar (template) and, for one sequence, the Follower (follower); neither leaves its process.
    """

    large_output: bool = False
    constraint: Any = None
    template: Any = None
    follower: Any = None

    def _verify_greedy_sampling(self) -> None:
        """Stock refuses n > 1 at temperature 0, because its n sequences would be drawn from one group."""


# `SamplingParams.from_optional` is stock's and names the class.
rebind(_stock, "SamplingParams", SamplingParams)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
