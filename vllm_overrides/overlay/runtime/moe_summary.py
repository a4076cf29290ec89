"""PROF_MOE_SUMMARY: what the pieces of the mixture-of-experts layers take, on the average call."""
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from vllm.logger import init_logger
from vllm.overlay.kernels.phased import DECODE, FEW_TOKENS, PREFILL, phase_of

logger = init_logger(__name__)

# Steps between two reports.
STEPS = 100
PIECES = ("gate", "routed", "shared", "all_reduce")


class Layer(Protocol):
    """What is measured of a layer. x: [T, hidden]."""

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gate: the router's product and its choice, (weights, ids)."""

    def routed(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The chosen experts."""

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """The shared expert, and the sigmoid that it is multiplied by."""

    def all_reduce(self, out: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""


@dataclass
class _Bucket:
    """Of the calls of one phase. seconds: of each of PIECES."""
    calls: int = 0
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PIECES))

    def add(self, calls: int, seconds: list[float]) -> None:
        self.calls += calls
        self.seconds = [old + new for old, new in zip(self.seconds, seconds, strict=True)]

    def line(self) -> str:
        averages = (f"{piece}_avg_ms={1000 * took / self.calls:.3f}"
                    for piece, took in zip(PIECES, self.seconds, strict=True))
        return f"{' '.join(averages)} calls={self.calls}"


class MoeSummary:
    """Computes layers piece by piece, and logs the averages every STEPS steps, of these steps, and at the end, of all.

    A call counts as a decode's if it has few tokens, as for MOE_DECODE_NATIVE. The sum of routed and shared experts
    counts as shared.

    Args:
        wait: ends when the device has computed what it was given; None where that has happened when a call returns.
    """

    def __init__(self, rank: int, wait: Callable[[], object] | None) -> None:
        self._rank, self._wait = rank, wait
        self._steps = self._reported = 0
        self._latest, self._all = ({phase: _Bucket() for phase in (PREFILL, DECODE)} for _ in range(2))
        slower = "" if wait is None else "; the device is waited for around every piece, which costs speed"
        logger.info("PROF_MOE_SUMMARY: rank %d reports every %d steps and at its end; decode: calls of at most %d "
                    "tokens%s", rank, STEPS, FEW_TOKENS, slower)

    def forward(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden] -> [T, hidden]: what the layer computes."""
        times = [self._now()]
        weights, ids = layer.choose(x)
        times.append(self._now())
        out = layer.routed(x, weights, ids)
        times.append(self._now())
        out = out + layer.shared(x)
        times.append(self._now())
        out = layer.all_reduce(out)
        times.append(self._now())
        took = [end - start for start, end in zip(times, times[1:])]  # noqa: B905
        self._latest[phase_of(x.shape[0])].add(1, took)
        return out

    def before_step(self) -> None:
        """Nothing: the layers are measured, not the step."""

    def after_step(self) -> None:
        """Reports when it is time."""
        self._steps += 1
        if self._steps - self._reported == STEPS:
            self._report(f"the last {STEPS} steps", self._latest)
            self._settle()

    def end(self) -> None:
        """Reports the whole time; for the engine's end."""
        self._settle()
        self._report(f"all {self._steps} steps", self._all)

    def _settle(self) -> None:
        for phase, bucket in self._latest.items():
            self._all[phase].add(bucket.calls, bucket.seconds)
            self._latest[phase] = _Bucket()
        self._reported = self._steps

    def _report(self, which: str, buckets: dict[str, _Bucket]) -> None:
        for phase, bucket in buckets.items():
            if bucket.calls:
                logger.info("PROF_MOE_SUMMARY: rank %d, %s, %s: %s", self._rank, which, phase, bucket.line())

    def _now(self) -> float:
        if self._wait is not None:
            self._wait()
        return time.perf_counter()
