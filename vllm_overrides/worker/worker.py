"""The worker of every device: stock's, with the memory planned before weights are loaded, and that of recurrent
states."""
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm.overlay.hybrid.plan import allocate_pool
from vllm.overlay.kernels.backend import choose_all
from vllm.overlay.model.packing import pack_weights
from vllm.overlay.plan import engine as plan_engine
from vllm.overlay.plan.memory import GIB, MemoryPlan
from vllm.overlay.runtime import platform_cpu
from vllm.overlay.runtime.all_ranks import least
from vllm.overlay.runtime.phases import engine_phases
from vllm.overlay.runtime.profiling import Profiling
from vllm.worker import worker_stock as _stock

# Tokens of the steps from which the memory of the largest is told. Two, because what a step takes has a constant part:
# the products inside the chunks of 1,024 tokens.
_MEASURED_TOKENS = (1024, 2048)
# What PyTorch's allocator, which cannot move what it holds, loses to fragments: a share of the workspace, and bytes.
_FRAGMENTS, _FRAGMENT_BYTES = 0.1, GIB // 4


class Worker(_stock.Worker):
    """Stock's worker; after the weights it allocates the state pool, so that the KV budget is what remains.

    plan: made before weights are loaded; None for a model whose memory is not counted (vllm.overlay.plan).
    """

    plan: MemoryPlan | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.phases = engine_phases()
        super().__init__(*args, **kwargs)

    def load_model(self) -> None:
        """Stock's.

        Raises:
            RuntimeError: before weights are read, where this rank cannot use the announced back ends.
            ValueError: before weights are read, where the settings do not fit into memory, or the profile that is asked
                for cannot be had.
        """
        choose_all()
        self.profiling = Profiling.asked(self.model_config.enforce_eager)
        self._settle_plan()
        self.phases.end("device and ranks")
        super().load_model()
        pack_weights(self.model_runner.model)
        checkpoints = None if self.plan is None else (self.plan.num_checkpoints, self.plan.num_host_checkpoints)
        self.model_runner.state_pool = allocate_pool(self.model_runner.model, self.cache_config, self.device,
                                                     checkpoints, self._free_for_state())
        self.phases.end("weights and states")

    @torch.inference_mode()
    def determine_num_available_blocks(self) -> tuple[int, int]:
        """Returns (KV blocks, 0 or blocks for swapping).

        Stock computes a step of full length, which takes minutes where operators are slow. For a planned model two
        short ones are computed; what the largest will take is the plan's figure or what they extrapolate to, whichever
        is more. As in stock, what has been taken since the start counts, and the device is asked how much that is.
        """
        if self.plan is None:
            blocks = super().determine_num_available_blocks()
            self.phases.end("profile")
            return blocks
        torch.cuda.empty_cache()
        step = max(self.plan.step, self._extrapolated())
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        workspace = max(step, self.plan.tower) + self.plan.held
        reserve = int(workspace * (1 + _FRAGMENTS)) + _FRAGMENT_BYTES
        budget = int(total * self.cache_config.gpu_memory_utilization)
        # What another process holds was gone before the start: the share is not all there for the taking.
        left = min(budget - (self.init_gpu_memory - free), free) - reserve
        if self.rank == 0:
            plan_engine.compare(self.plan, left, workspace, budget)
        self.phases.end("profile")
        block_bytes = self.get_cache_block_size_bytes()
        return (max(0, left) // block_bytes if block_bytes else 0), 0

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Stock's; the engine is up after it, and says what took how long."""
        super().initialize_cache(num_gpu_blocks, num_cpu_blocks)
        self.profiling.attach(self.model_runner, self.rank)
        self.phases.end("KV cache")
        if self.rank == 0:
            _stock.logger.info("Engine up after %s", self.phases.line())

    def first_nonfinite_state(self, slot: int) -> int | None:
        """See `StatePool.first_nonfinite`; of this rank's part of the states."""
        return self.model_runner.state_pool.first_nonfinite(slot)

    def _settle_plan(self) -> None:
        """Every rank comes to the same plan, that of the one with the least memory."""
        ranks = self.parallel_config.world_size
        memory, utilization, free = self._memory()
        memory, left, host = least([memory, memory if free is None else free, platform_cpu.available_memory()], ranks)
        wish = plan_engine.wish_of(self, memory, utilization, None if free is None else left, host, self._kv_tokens())
        if wish is not None:
            self.plan = plan_engine.settle_for(self, wish)

    def _memory(self) -> tuple[int, float, int | None]:
        """Bytes of the device, the share of it that may be taken, and bytes that nobody else has taken."""
        free, total = torch.cuda.mem_get_info()
        return total, self.cache_config.gpu_memory_utilization, free

    def _kv_tokens(self) -> int | None:
        """The size of the KV cache, in tokens, where it was asked for."""
        blocks = self.cache_config.num_gpu_blocks_override
        return None if blocks is None else blocks * self.cache_config.block_size

    def _extrapolated(self) -> int:
        """Bytes of the largest step, from those of two short ones."""
        full = self.scheduler_config.max_num_batched_tokens
        if full <= _MEASURED_TOKENS[-1]:
            return self._transient(full)
        first, second = (self._transient(tokens) for tokens in _MEASURED_TOKENS)
        low, high = _MEASURED_TOKENS
        return second + max(0, second - first) * (full - high) // (high - low)

    def _transient(self, tokens: int) -> int:
        """Bytes that a step of one prompt takes at its peak and gives back."""
        torch.cuda.reset_peak_memory_stats()
        with self._largest_step(tokens, 1):
            self.model_runner.profile_run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()

    @contextmanager
    def _largest_step(self, tokens: int, sequences: int) -> Iterator[None]:
        """Makes `profile_run` compute a step of this size."""
        runner, full = self.model_runner, self.scheduler_config
        part = copy.copy(full)
        part.max_num_batched_tokens, part.max_num_seqs = tokens, sequences
        runner.scheduler_config = part
        try:
            yield
        finally:
            runner.scheduler_config = full

    def _free_for_state(self) -> int | None:
        """Bytes that the state pool may take; None: the device will say."""
        return None


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
