"""What the operator tests share: random steps, comparisons that print, and a guard against waiting for the device."""
from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.overlay.kernels.backend import Backends

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")
# One rounding of the result may fall to the other side of the reference's.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


@dataclass
class Step:
    """Rows of one step: see vllm.overlay.kernels.rows. Slots from `slots` on hold nothing and are never named."""
    lengths: list[int]
    starts: list[int]
    prefills: int
    live: list[int]
    captures: tuple[tuple[int, int, int], ...]
    context: list[int]
    slots: int

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    @property
    def live_slots(self) -> torch.Tensor:
        return torch.tensor(self.live, dtype=torch.int64)

    @property
    def captured(self) -> list[int]:
        return [slot for _, _, slot in self.captures]


def starts_of(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def random_step(rng: random.Random, sizes: list[int], max_prefills: int = 5, max_decodes: int = 3) -> Step:
    prefills = rng.randint(0, max_prefills)
    lengths = [rng.choice(sizes) for _ in range(prefills)] + [1] * rng.randint(0 if prefills else 1, max_decodes)
    starts = starts_of(lengths)
    captures = []
    for row, length in enumerate(lengths):
        for _ in range(rng.randint(0, 2) if length else 0):
            captures.append([row, rng.randint(1, length)])
    slots = list(range(len(lengths) + len(captures) + 3))
    rng.shuffle(slots)
    rng.shuffle(captures)
    live = [slots.pop() for _ in lengths]
    return Step(lengths, starts, prefills, live, tuple((row, offset, slots.pop()) for row, offset in captures),
                [rng.choice([0, rng.randint(0, 300)]) for _ in lengths], len(live) + len(captures) + 3)


def poisoned(shape: tuple[int, ...], live: list[int], gen: torch.Generator,
             dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN everywhere but in the slots `live`."""
    pool = torch.full(shape, NAN, dtype=dtype)
    pool[live] = torch.randn(len(live), *shape[1:], generator=gen).to(dtype)
    return pool


def runnable(backends: Backends) -> list[str]:
    """Names of the operator's back ends that can run here, best first, without the reference."""
    return [name for name in backends.names if name != "reference" and _runs(backends, name)]


def _runs(backends: Backends, name: str) -> bool:
    try:
        backends.load(name)
    except RuntimeError:
        return False
    return True


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    """Largest difference relative to the largest magnitude of `want`. Non-finite values anywhere fail."""
    assert got.shape == want.shape and got.dtype == want.dtype, (what, got.shape, want.shape, got.dtype, want.dtype)
    assert torch.isfinite(want).all(), f"{what}: the reference itself is not finite"
    error = relative_error(got, want)
    assert error <= tolerance, f"{what}: relative error {error:.3e}, tolerance {tolerance:.1e}"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    if not got.numel():
        return 0.0
    difference = (got.double() - want.double()).abs().max()
    if not torch.isfinite(difference):
        return float("inf")
    return float(difference / want.double().abs().max().clamp_min(1e-30))


class _Recorder(TorchDispatchMode):

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        # Size of the last dimension of each operation's first tensor.
        self.widths: list[tuple[str, int]] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if args and isinstance(args[0], torch.Tensor) and args[0].dim():
            self.widths.append((str(func), args[0].shape[-1]))
        # A view of the inputs allocates nothing.
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, out.numel())
        return out


@contextmanager
def recorded() -> Iterator[_Recorder]:
    """Records the names of the operations inside, and the elements of the largest tensor that one of them made."""
    recorder = _Recorder()
    with recorder:
        yield recorder


@contextmanager
def no_host_sync(monkeypatch) -> Iterator[None]:  # type: ignore[no-untyped-def]
    """Fails where a device tensor's values would be read on the host: what stalls an accelerator."""

    def refuse(self, *args):  # type: ignore[no-untyped-def]
        raise AssertionError("a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        with recorded() as recorder:
            yield
    reading = [name for name in recorder.names if "nonzero" in name or "_local_scalar" in name or "unique" in name]
    assert not reading, reading
