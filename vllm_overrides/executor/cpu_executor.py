"""The executor on the CPU: stock's multiprocessing executor of GPUs, with its workers on the CPU.

One rank runs in the engine's own process, further ranks in processes of their own, as on a card.
"""
import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from vllm.executor import cpu_executor_stock as _stock
from vllm.executor.multiproc_gpu_executor import MultiprocessingGPUExecutor, MultiprocessingGPUExecutorAsync
from vllm.overlay.runtime import platform_cpu
from vllm.worker.worker_base import WorkerBase


class CPUExecutor(MultiprocessingGPUExecutor):
    """Runs `vllm.worker.cpu_worker.CPUWorker`. Dtype, chunked prefill and prefix caching are left as they were asked
    for."""

    def _init_executor(self) -> None:
        _share_cores(self.parallel_config.world_size)
        super()._init_executor()

    def _check_executor_parameters(self) -> None:
        """Raises ValueError for what needs a GPU, in place of stock's count of CUDA devices."""
        if self.scheduler_config.is_multi_step or self.speculative_config:
            raise ValueError("multi-step scheduling and stock's speculative decoding are not supported on the CPU")
        if self.parallel_config.world_size > 1:
            # A forked child of a process that has already used OpenMP hangs in its first parallel region.
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self.model_config.enforce_eager = True

    def _get_worker_module_and_class(self) -> tuple[str, str, Callable[[], type[WorkerBase]] | None]:
        return "vllm.worker.cpu_worker", "CPUWorker", None


class CPUExecutorAsync(CPUExecutor, MultiprocessingGPUExecutorAsync):
    """The same for the asynchronous engine in the server's own process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One thread for all steps: every new thread that computes would start a team of OpenMP threads of its own.
        self._steps = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model-step")
        self.driver_exec_model = self._execute_in_thread

    async def _execute_in_thread(self, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._steps,
                                                                partial(self.driver_worker.execute_model, *args))

    def shutdown(self) -> None:
        super().shutdown()
        if (steps := getattr(self, "_steps", None)) is not None:
            steps.shutdown(wait=False)


def _share_cores(ranks: int) -> None:
    """Gives each rank its share of the cores, unless OMP_NUM_THREADS says otherwise; stock's executor would take one
    thread."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    threads = max(1, platform_cpu.available_cpus() // ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    _stock.logger.info("%d threads for each of %d ranks (OMP_NUM_THREADS)", threads, ranks)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
