"""A server in a process group of its own: started, watched, and ended with all that it started."""
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Launched:
    """Writes what it prints to `log`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """Raises OSError where it cannot be started."""
        with log.open("wb") as file:
            self.began = time.monotonic()
            self.process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=file,
                                            stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        self.group = self.process.pid
        self._log = log.open("rb")

    @property
    def code(self) -> int | None:
        """Exit status; None while it runs."""
        return self.process.poll()

    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self.began

    def written(self) -> str:
        """What it wrote since the last call."""
        return self._log.read().decode(errors="replace")

    def end(self, patience: float) -> dict[str, Any]:
        """SIGTERM to the group, after `patience` seconds SIGKILL.

        Returns:
            {"exit", "seconds", "killed"}: killed where something was left that had to be.
        """
        start = time.monotonic()
        self._signal(signal.SIGTERM)
        # The leader may go before those that it started.
        while (self.code is None or self._alive()) and time.monotonic() - start < patience:
            time.sleep(0.05)
        killed = self.code is None or self._alive()
        if killed:
            self._signal(signal.SIGKILL)
        self.process.wait()
        return {"exit": self.process.returncode, "seconds": round(time.monotonic() - start, 2), "killed": killed}

    def close(self) -> None:
        """Stops reading; the server goes on."""
        self._log.close()

    def _alive(self) -> bool:
        """Whether a process of the group runs. One that has ended and that nobody waits for, as where process 1 of a
        container reaps nothing, does not count, though a signal reaches it."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            # It may have gone since.
            with contextlib.suppress(OSError, IndexError):
                state, _, group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
                if int(group) == self.group and state not in "ZX":
                    return True
        return False

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, number)
