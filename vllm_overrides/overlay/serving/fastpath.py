"""The large-output path: requests that ask for so many tokens that others could wait long behind them.

Such a request is decoded like any other, and every token of it is the model's. What is different: it yields to the
others (`vllm.overlay.engine.large_output`), and a budget of time may end it, which its usage then says.

    VLLM_BASIC_FASTPATH            0 switches it off: then these requests are like any other. Default 1
    VLLM_BASIC_FASTPATH_THRESHOLD  a request whose max_tokens or min_tokens is above it is a large one. Default 8192
    VLLM_BASIC_FASTPATH_BUDGET_S   seconds of generation that a large one gets. Default 0: any number
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.overlay.serving.errors import StartError
from vllm.overlay.serving.options import Options

_NAME = "VLLM_BASIC_FASTPATH"


@dataclass(frozen=True)
class FastPath:
    """threshold: in tokens. budget_s: None for any time."""

    enabled: bool = True
    threshold: int = 8192
    budget_s: float | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> FastPath:
        """What the environment says. Raises StartError for what is no number."""
        enabled = _number(environment, _NAME, 1)
        threshold = _number(environment, f"{_NAME}_THRESHOLD", 8192)
        budget = _number(environment, f"{_NAME}_BUDGET_S", 0)
        return cls(enabled != 0, int(threshold), budget or None)


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    given = environment.get(name, "")
    try:
        value = float(given) if given else default
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise StartError(f"{name} must be a number of at least 0, got {given!r:.40}")
    return value


def _large_completion_output_fastpath(options: Options, params: Any, path: FastPath) -> bool:
    """Whether a request is a large one; says so in what the engine gets. (Named as in the system that this project
    continues, whose builds look for the name.)"""
    large = path.enabled and max(options.max_tokens or 0, options.min_tokens) > path.threshold
    params.large_output = large
    return large
