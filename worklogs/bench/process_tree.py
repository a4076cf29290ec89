"""What a server's processes use of processors and of memory, from /proc."""
import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PROC = Path("/proc")
# What marks the process that computes, in the command line of its own: current vLLM names it, and stock 0.6.3's (ours)
# is a child that Python's multiprocessing has spawned.
ENGINES = ("EngineCore", "multiprocessing.spawn")


class NoEngine(Exception):
    """The processes of a server cannot be told apart; one line."""


def children() -> dict[int, tuple[int, float]]:
    """Process id -> (parent, processor seconds of it and of its children that it has waited for) of all that live."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for entry in os.listdir(PROC):
        if not entry.isdigit():
            continue
        try:
            fields = (PROC / entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue        # It has ended since.
        found[int(entry)] = int(fields[1]), sum(map(int, fields[11:15])) / tick
    return found


def tree(root: int, known: dict[int, tuple[int, float]]) -> list[int]:
    """A process and all below it."""
    found = []
    for process in known:
        above = process
        while above != root and above in known:
            above = known[above][0]
        if above == root:
            found.append(process)
    return found


def seconds(root: int) -> float:
    """Processor seconds (user and system) of a process and of all below it, but for those whose parent has ended
    without waiting for them."""
    known = children()
    return sum(known[process][1] for process in tree(root, known))


@contextlib.contextmanager
def stopped(roots: Iterable[int]) -> Iterator[None]:
    """Inside, these processes and all below them do nothing."""
    known = children()
    whole = [process for root in roots for process in tree(root, known)]
    _signal(whole, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(whole, signal.SIGCONT)


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def command(process: int) -> str:
    """Its command line; empty for one that has ended."""
    try:
        return (PROC / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def front_end_seconds(root: int) -> float:
    """Processor seconds of a server without its engine: of the tree less the engine's part of it.

    Raises:
        NoEngine: no process below the first is an engine.
    """
    known = children()
    whole = tree(root, known)
    engines = [process for process in whole if process != root and any(mark in command(process) for mark in ENGINES)]
    if not engines:
        raise NoEngine(f"process {root} has no engine of its own below it ({' or '.join(ENGINES)} in a command line)")
    behind = {process for engine in engines for process in tree(engine, known)}
    return sum(known[process][1] for process in whole if process not in behind)


def memory(root: int) -> dict[str, Any]:
    """Bytes of a tree now and at most: {"pss", "rss", "peak_rss", "peak", "processes"}. pss counts a page that several
    share once; peak_rss is the sum of what each had at most, shared pages as often as they are held. peak is peak_rss
    less what is held more than once now (rss - pss: libraries, which are there all the time); the tree's true peak is
    no more where processes have theirs at different times.

    Raises:
        OSError: the root has ended, or its memory may not be read.
    """
    found: dict[str, Any] = {"pss": 0, "rss": 0, "peak_rss": 0, "processes": 0}
    for process in tree(root, children()):
        try:
            rolled = _fields(PROC / str(process) / "smaps_rollup")
            status = _fields(PROC / str(process) / "status")
        except (FileNotFoundError, ProcessLookupError):
            if process == root:
                raise
            continue        # It has ended since.
        if "VmHWM" not in status:
            continue        # It has ended, and nobody has waited for it yet.
        found["pss"] += rolled["Pss"]
        found["rss"] += status["VmRSS"]
        found["peak_rss"] += status["VmHWM"]
        found["processes"] += 1
    found["peak"] = found["peak_rss"] - (found["rss"] - found["pss"])
    return found


def _fields(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file, in bytes."""
    found = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found
