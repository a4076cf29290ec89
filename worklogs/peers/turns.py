"""What programs share that measure servers in turns: order, quiet, and the file of what is done."""
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import jsonl  # noqa: E402
from bench_client import OthersMeter  # noqa: E402

INTERRUPTED, FAILED = 130, 3
QUIET_STEP_S = 2.0
# How a server tells its version is its own affair; of these we know it.
VERSIONS = {"llama": "11434.0.0"}
Run = dict[str, Any]


class CannotRun(Exception):
    """Nothing can be measured; one line."""


def wait_until_quiet(limit: float, patience: float) -> float:
    """The cores that others used in the last look, of 2 s, after at most `patience` seconds."""
    meter = OthersMeter(os.getpid())
    until = time.monotonic() + patience
    while True:
        meter.start()
        time.sleep(QUIET_STEP_S if limit < (os.cpu_count() or 1) else 0.0)
        found = meter.cores() or 0.0
        if found <= limit or time.monotonic() >= until:
            return found


class Partial:
    """What is done: a line that says which comparison, then a line per run. A run is known by the fields `names`; one
    with "failed" in it is to be done again."""

    def __init__(self, path: Path, key: dict[str, Any], resume: bool, names: Sequence[str] = ("round", "kind")) -> None:
        """Raises:
            CannotRun: there is one and it is not to be resumed, or none, or another's, or another process works on it.
        """
        self.path, self.names, self.key = path, names, key
        self.runs: dict[tuple[Any, ...], Run] = {}
        if not resume and path.exists():
            raise CannotRun(f"{path} holds an unfinished comparison: --resume goes on with it, or remove it")
        if resume and not path.exists():
            raise CannotRun(f"nothing to resume: {path} is not there")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._held = jsonl.hold(path)
        except (OSError, jsonl.Held) as error:
            raise CannotRun(str(error)) from error
        try:
            if resume:
                self._read(key)
            else:
                jsonl.add(path, {"comparison": key})
        except BaseException:
            self.close()
            raise

    def _read(self, key: dict[str, Any]) -> None:
        try:
            first, *rest = jsonl.read(self.path)
            self.key = first["comparison"]
            for run in rest:
                self.runs[self.place(run)] = run
        except OSError as error:
            raise CannotRun(f"nothing to resume: {self.path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CannotRun(f"{self.path} does not parse: {error}") from error
        if changed := [name for name in key if self.key.get(name) != key[name]]:
            raise CannotRun(f"{self.path} is of another comparison ({', '.join(changed)} differ); give the same "
                            "options, or remove it")

    def close(self) -> None:
        """Lets others go on with the file."""
        self._held.close()

    def place(self, run: Run) -> tuple[Any, ...]:
        """What a run is known by."""
        return tuple(run[name] for name in self.names)

    def add(self, run: Run) -> None:
        """A run is done, or failed."""
        self.runs[self.place(run)] = run
        jsonl.add(self.path, run)

    def done(self, *place: Any) -> bool:
        """Whether it need not be measured."""
        return place in self.runs and "failed" not in self.runs[place]
