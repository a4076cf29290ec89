"""What an engine that was killed leaves behind, removed before the next one starts: processes, which hold the
memory that it needs; files of sockets; its part of the metrics."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import struct
import time
from pathlib import Path

from vllm.logger import init_logger

logger = init_logger(__name__)

# How long a killed process may take to be gone: the driver gives its memory back meanwhile. In seconds.
_GONE_S = 30.0
# Python's tracker of shared memory ends by itself, once it has removed what the others left.
_TRACKER = b"resource_tracker"
_TRACKER_S = 3.0
_TOTALS = ("counter", "histogram", "summary")


def end_group(group: int) -> None:
    """Kill all processes of a process group, and wait until they are gone. Blocks."""
    began = time.monotonic()
    while left := _members(group):
        waited = time.monotonic() - began
        for pid in left:
            if waited > _TRACKER_S or not _is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # Where this server is a container's first process, it has inherited the orphans.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if waited > _GONE_S:
            logger.warning("processes %s of the engine cannot be killed; what they hold is not free",
                           ", ".join(map(str, left)))
            return
        time.sleep(0.02)


def _members(group: int) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, its_group = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and (state not in "ZX" or _is_ours(int(entry.name))):
                    found.append(int(entry.name))
    return found


def _is_ours(pid: int) -> bool:
    """Whether a process that has ended waits for us to ask how."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def remove_sockets(ipc_path: str) -> None:
    """Remove the files of an engine's sockets. ipc_path: ``ipc://`` and what their names begin with."""
    for left in glob.glob(f"{glob.escape(ipc_path.removeprefix('ipc://'))}_*"):
        os.unlink(left)


def settle_metrics(folder: str | None, pid: int) -> None:
    """Keep what a process that is gone has counted, in one file for all of them, and forget what it was just doing.

    folder: PROMETHEUS_MULTIPROC_DIR. prometheus_client would go on to show a dead engine's running requests, and a
    file of every one.
    """
    if folder is None:
        return
    from prometheus_client.mmap_dict import MmapedDict

    for path in Path(folder).glob(f"*_{pid}.db"):
        kind = path.name.partition("_")[0]
        if kind in _TOTALS:
            kept = MmapedDict(str(path.with_name(f"{kind}_0.db")))
            try:
                for key, value, *_ in MmapedDict.read_all_values_from_file(str(path)):
                    kept.write_value(key, kept.read_value(key)[0] + value, 0.0)
            except (RuntimeError, ValueError, struct.error) as error:
                # It was killed while it wrote.
                logger.warning("a part of what process %d has counted is lost: %s", pid, error)
            finally:
                kept.close()
        path.unlink()
