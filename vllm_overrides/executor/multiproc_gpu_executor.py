"""The executor of several ranks: a lost rank is named, and no rank outlives the engine."""
import atexit
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.overlay.runtime import platform_cpu

platform_cpu.provide_triton_cache_manager()

from vllm.executor import multiproc_gpu_executor_stock as _stock  # noqa: E402
from vllm.overlay.engine.ranks import RankLost, RankMonitor, RankProcess  # noqa: E402
from vllm.overlay.rebind import rebind  # noqa: E402

# `_init_executor` is stock's and names the classes.
rebind(_stock, "WorkerMonitor", RankMonitor)
rebind(_stock, "ProcessWorkerWrapper", RankProcess)


class _KnowsItsRanks:
    """Stock ends its ranks from a destructor, which an interpreter that exits may never call."""

    def _init_executor(self) -> None:
        atexit.register(_end_ranks, weakref.ref(self))
        try:
            with self._naming_lost_rank():
                super()._init_executor()  # type: ignore[misc]
        except BaseException:
            _end_ranks(weakref.ref(self))
            raise

    def _run_workers(self, *args: Any, **kwargs: Any) -> Any:
        with self._naming_lost_rank():
            return super()._run_workers(*args, **kwargs)  # type: ignore[misc]

    def _driver_execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with self._naming_lost_rank():
            return super()._driver_execute_model(*args, **kwargs)  # type: ignore[misc]

    async def _driver_execute_model_async(self, *args: Any, **kwargs: Any) -> Any:
        with self._naming_lost_rank():
            return await super()._driver_execute_model_async(*args, **kwargs)  # type: ignore[misc]

    def check_health(self) -> None:
        """Raises RankLost if a rank was lost."""
        with self._naming_lost_rank():
            super().check_health()  # type: ignore[misc]

    def ranks_are_together(self) -> bool:
        """Whether every rank waits for the next step, so that one which raised in the first rank is over for all."""
        monitor = self.worker_monitor  # type: ignore[attr-defined]
        runner = self.driver_worker.model_runner  # type: ignore[attr-defined]
        # Stock's other runners, of poolers and encoders, do not tell.
        exchanging = getattr(runner, "exchanging", True)
        return not exchanging and (monitor is None or monitor.loss(0) is None)

    @contextmanager
    def _naming_lost_rank(self) -> Iterator[None]:
        """Stock raises what the loss of a rank led to: a connection that was closed, a result that never came."""
        try:
            yield
        except Exception as error:
            monitor = getattr(self, "worker_monitor", None)
            reason = monitor.loss() if monitor is not None else None
            if reason is None or isinstance(error, RankLost):
                raise
            raise RankLost(reason) from error


class MultiprocessingGPUExecutor(_KnowsItsRanks, _stock.MultiprocessingGPUExecutor):
    """Stock's executor."""


class MultiprocessingGPUExecutorAsync(_KnowsItsRanks, _stock.MultiprocessingGPUExecutorAsync):
    """Stock's executor of the asynchronous engine."""


def _end_ranks(executor: "weakref.ref[Any]") -> None:
    monitor = getattr(executor(), "worker_monitor", None)
    if monitor is not None:
        monitor.close()
    for worker in getattr(executor(), "workers", ()):
        worker.process.kill()


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
