"""The ranks beside the first, each in a process of its own: who watches them, and what the loss of one means.

A rank cannot be replaced: the others wait for it inside a collective, which on a card nothing can interrupt. So a lost
rank ends the engine. Stock notices only the end of a process, says neither which rank nor how, and goes on waiting; a
rank that raised keeps its process, and nobody is told at all.

`RankMonitor` finds the reason, kills what is left, and hands the reason to whoever owns this process (`on_loss`).
"""
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from vllm.executor import multiproc_worker_utils as _stock
from vllm.logger import init_logger

logger = init_logger(__name__)

# A rank that raised: how long the first one may take to raise the same, or what came of it, by itself. Its own reason
# is the better one, and a collective that the other rank has left does not return.
_GRACE_S = 5.0
# A rank that died is seen at once; what the first rank raises because of it may be faster still.
_SEEN_S = 0.5
# For results that came before a rank was killed; see `_tell_who_waits`.
_READ_S = 2.0
_PR_SET_PDEATHSIG = 1

_on_loss: Callable[[str], None] | None = None


class RankLost(RuntimeError):
    """Raised by the first rank when another one died or failed. The message says which, and how."""


def on_loss(tell: Callable[[str], None]) -> None:
    """Has `tell` called with the reason when a rank of any engine in this process is lost; from another thread, after
    the other ranks have been killed. The first rank may be inside a collective that never returns."""
    global _on_loss
    _on_loss = tell


def how_it_ended(exitcode: int | None) -> str:
    """What is known about a process that ended; exitcode as multiprocessing has it: negative for a signal."""
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode}"
    memory = " (signal 9 often means that the machine ran out of memory)" if exitcode == -signal.SIGKILL else ""
    return f"was killed by signal {-exitcode}{memory}"


class RankProcess(_stock.ProcessWorkerWrapper):
    """Stock's process of one rank. It ends with the process that started it; what it raises reaches its monitor."""

    monitor: "RankMonitor | None" = None

    def __init__(self, result_handler: Any, worker_factory: Any) -> None:
        self.rank: int = worker_factory.keywords["rank"]
        by_main_thread = threading.current_thread() is threading.main_thread()
        super().__init__(result_handler, partial(_in_rank, worker_factory, by_main_thread))

    def execute_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Stock's, and the monitor hears of an exception."""
        future = _WatchedFuture(partial(self._failed, method))
        self._enqueue_task(future, method, args, kwargs)
        return future

    async def execute_method_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same for the asynchronous engine."""
        try:
            return await super().execute_method_async(method, *args, **kwargs)
        except Exception as error:
            self._failed(method, error)
            raise

    def _failed(self, method: str, error: BaseException) -> None:
        if self.monitor is not None:
            doing = "in a step" if method == "start_worker_execution_loop" else f"in {method}"
            self.monitor.raised(f"{self.name} failed {doing}: {type(error).__name__}: {' '.join(str(error).split())}")

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"rank {self.rank} (process {self.process.pid})"


class _WatchedFuture(_stock.ResultFuture):
    """Stock's future of the synchronous engine, which nobody looks at while the first rank computes."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._failed = failed

    def set_result(self, result: Any) -> None:
        super().set_result(result)
        if result.exception is not None:
            self._failed(result.exception)


class RankMonitor(_stock.WorkerMonitor):
    """Stock's thread that waits for the end of any rank's process."""

    def __init__(self, workers: Sequence[RankProcess], result_handler: Any) -> None:
        super().__init__(workers, result_handler)
        self._close: bool = False
        self._lock = threading.Lock()
        self._lost, self._told = threading.Event(), threading.Event()
        self._reason: str | None = None
        for worker in workers:
            worker.monitor = self

    def run(self) -> None:
        """Waits, and reports an end that nobody wanted."""
        ended = wait([worker.process.sentinel for worker in self.workers])
        if not self._close:
            dead = [worker for worker in self.workers if worker.process.sentinel in ended]
            for worker in dead:
                worker.process.join(_stock.JOIN_TIMEOUT_S)
            self._lose("; ".join(f"{worker.name} {how_it_ended(worker.process.exitcode)}" for worker in dead))

    def raised(self, reason: str) -> None:
        """Called when a rank, which lives, raised `reason`: it takes part in nothing any more."""
        timer = threading.Timer(_GRACE_S, self._lose, [reason])
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """The wanted end. Ranks that wait for one another do not read the queue by which stock tells them to end."""
        with self._lock:
            if self._close:
                return
            self._close = True
        self._kill()

    def loss(self, patience: float = _SEEN_S) -> str | None:
        """Why a rank was lost, if one was; waits `patience` seconds for it to be found out, and for the report to be
        made."""
        if self._lost.wait(patience):
            self._told.wait()
        return self._reason

    def states(self) -> str:
        """What the operating system says of every rank's process, for a person."""
        return ", ".join(f"{worker.name} {_state(worker.process.pid)}" for worker in self.workers)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._close:
                return
            self._close = True
            self._reason = reason
        self._lost.set()
        logger.error("The engine ends: %s", reason)
        try:
            self._kill()
            if _on_loss is not None:
                _on_loss(reason)
        finally:
            self._told.set()

    def _kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join(_stock.JOIN_TIMEOUT_S)
        self._tell_who_waits()

    def _tell_who_waits(self) -> None:
        """Whoever waits for a result of the killed ranks is told that there will be none.

        A rank that was killed while it wrote to the queue of results keeps its lock, or leaves half a message there:
        then neither the thread that would write to it for us nor the one that reads it ever comes back, and an
        interpreter that exits would wait for the first.
        """
        handler = self.result_handler
        handler.result_queue.cancel_join_thread()
        for worker in self.workers:
            worker._task_queue.cancel_join_thread()
        handler.close()
        if handler.is_alive():
            handler.join(_READ_S)
        if handler.is_alive():
            gone = ChildProcessError("worker died")
            for task_id, future in list(handler.tasks.items()):
                _stock._set_future_result(future, _stock.Result(task_id=task_id, exception=gone))


def _state(pid: int | None) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone"
    return {"R": "is running", "S": "is waiting", "D": "hangs in the kernel", "T": "is stopped", "t": "is stopped",
            "Z": "is gone"}.get(letter, f"is in state {letter}")


def _in_rank(worker_factory: Callable[[], Any], started_by_main_thread: bool) -> Any:
    """Runs in the rank's process, before the worker is made."""
    # A Ctrl-C in the terminal, and a supervisor's SIGTERM, may reach every process; the server decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    if started_by_main_thread:
        # Reaches a rank that is stopped, too. Sent when the thread ends that started us: the main thread never does.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_without, args=(parent.pid, ), daemon=True).start()
    return worker_factory()


def _end_without(parent: int) -> None:
    """A rank whose engine is gone would keep its memory for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
