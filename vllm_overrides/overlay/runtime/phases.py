"""How long each phase of a start took."""
import os
import time
from multiprocessing import parent_process
from pathlib import Path


class Phases:
    """A stopwatch that is told at the end of each phase what it was.

    began: of the first phase, on the clock of time.monotonic.
    """

    def __init__(self, began: float) -> None:
        self._began = self._last = began
        self.took: dict[str, float] = {}

    def end(self, name: str) -> None:
        """What ran since the end of the phase before was `name`; one that is named again adds up."""
        now = time.monotonic()
        self.took[name] = self.took.get(name, 0.0) + now - self._last
        self._last = now

    def line(self) -> str:
        """Returns "12.3 s: imports 5.0 s (41 %), ..."."""
        total = self._last - self._began
        parts = (f"{name} {took:.1f} s ({100 * took / max(total, 1e-9):.0f} %)" for name, took in self.took.items())
        return f"{total:.1f} s: {', '.join(parts)}"


def process_began() -> float:
    """When this process was started, on the clock of time.monotonic: its imports are part of a start."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def engine_phases() -> Phases:
    """Of an engine that begins now; where it has a process of its own, with that."""
    if parent_process() is None:
        return Phases(time.monotonic())
    phases = Phases(process_began())
    phases.end("process and imports")
    return phases
