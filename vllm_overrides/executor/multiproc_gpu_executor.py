"""The executor of several ranks: its processes end when a start fails and when the interpreter exits."""
import atexit
import weakref
from typing import Any

from vllm.overlay.runtime import platform_cpu

platform_cpu.provide_triton_cache_manager()

from vllm.executor import multiproc_gpu_executor_stock as _stock  # noqa: E402


class _EndsItsWorkers:
    """Stock tells its workers by a queue to end, from a destructor: a worker that waits for another rank never reads
    it, and at exit the queue waits forever for a thread that can no longer start."""

    def _init_executor(self) -> None:
        atexit.register(_end_workers, weakref.ref(self))
        try:
            super()._init_executor()  # type: ignore[misc]
        except BaseException:
            _end_workers(weakref.ref(self))
            raise


class MultiprocessingGPUExecutor(_EndsItsWorkers, _stock.MultiprocessingGPUExecutor):
    """Stock's executor."""


class MultiprocessingGPUExecutorAsync(_EndsItsWorkers, _stock.MultiprocessingGPUExecutorAsync):
    """Stock's executor of the asynchronous engine."""


def _end_workers(executor: "weakref.ref[Any]") -> None:
    monitor = getattr(executor(), "worker_monitor", None)
    if monitor is not None:
        if monitor._close:
            return
        # So that the monitor takes their end for intended, and a later shutdown() finds nothing to do.
        monitor._close = True
    for worker in getattr(executor(), "workers", ()):
        worker.process.kill()


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
