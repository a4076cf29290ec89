"""The worker on the CPU: ours for every device, with the device set-up and the memory budget of a CPU."""
from typing import Any

import torch

import vllm.envs as envs
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, set_custom_all_reduce
from vllm.model_executor import set_random_seed
from vllm.overlay.runtime import platform_cpu
from vllm.worker import cpu_worker_stock as _stock
from vllm.worker.worker import Worker

# Tokens of the step by which the memory of a step is measured.
_MEASURED_TOKENS = 256


class CPUWorker(Worker):
    """`Worker` on device cpu. What stock calls the GPU cache lies in main memory; nothing is ever swapped."""

    def init_device(self) -> None:
        """Binds threads, joins the ranks by gloo and seeds.

        Raises:
            ValueError: LoRA was asked for.
        """
        if self.lora_config is not None:
            raise ValueError("LoRA is not supported on the CPU")
        binding = envs.VLLM_CPU_OMP_THREADS_BIND
        if binding != "all":
            _stock.logger.info(torch.ops._C_utils.init_cpu_threads_env(binding.split("|")[self.rank]))
        self.device = torch.device("cpu")
        set_custom_all_reduce(False)
        init_distributed_environment(self.parallel_config.world_size, self.rank, self.distributed_init_method,
                                     self.local_rank, backend="gloo")
        ensure_model_parallel_initialized(self.parallel_config.tensor_parallel_size,
                                          self.parallel_config.pipeline_parallel_size)
        set_random_seed(self.model_config.seed)

    def _memory(self) -> tuple[int, float, int | None]:
        return platform_cpu.available_memory() // self.parallel_config.world_size, 1.0, None

    def _kv_tokens(self) -> int | None:
        asked, block_bytes = platform_cpu.kv_cache_space(), self.get_cache_block_size_bytes()
        if not asked or not block_bytes or self.cache_config.num_gpu_blocks_override is not None:
            return super()._kv_tokens()
        return asked * platform_cpu.GIB // block_bytes * self.cache_config.block_size

    def _free_for_state(self) -> int | None:
        return platform_cpu.available_memory() // self.parallel_config.world_size

    @torch.inference_mode()
    def determine_num_available_blocks(self) -> tuple[int, int]:
        """Measures what a step needs and gives the KV cache what remains of memory, within `kv_cache_blocks`' limits.

        Returns:
            (KV blocks, 0).

        Raises:
            ValueError: one sequence of max_model_len does not fit.
        """
        step = self._measure_step()
        reserve = step + platform_cpu.GIB // 4
        self.phases.end("profile")
        block_bytes = self.get_cache_block_size_bytes()
        if not block_bytes:
            return 0, 0
        blocks = platform_cpu.kv_cache_blocks(block_bytes, self.cache_config.block_size,
                                              self.model_config.max_model_len, self.scheduler_config.max_num_seqs,
                                              reserve, self.parallel_config.world_size, platform_cpu.kv_cache_space())
        planned = "" if self.plan is None else f", {self.plan.workspace / platform_cpu.GIB:.2f} planned"
        _stock.logger.info("KV cache: %d tokens, %.2f GiB (a step needs %.2f GiB beside it%s).",
                           blocks * self.cache_config.block_size, blocks * block_bytes / platform_cpu.GIB,
                           reserve / platform_cpu.GIB, planned)
        return blocks, 0

    def _measure_step(self) -> int:
        """Returns the bytes that the largest step takes beside weights and caches.

        A step of the full size would take minutes on few cores, so a smaller one of the same proportions is run and its
        memory multiplied: activations grow with the tokens, logits with the sequences. Pictures are in no such step;
        theirs is the plan's figure.
        """
        full = self.scheduler_config
        tokens = min(full.max_num_batched_tokens, _MEASURED_TOKENS)
        sequences = max(1, full.max_num_seqs * tokens // full.max_num_batched_tokens)
        with (self._largest_step(tokens, sequences), platform_cpu.PeakMemory() as memory,
              platform_cpu.without_device_sync()):
            self.model_runner.profile_run()
        measured = memory.grown * full.max_num_batched_tokens // tokens
        if self.plan is None:
            return measured
        return max(measured, self.plan.step, self.plan.tower) + self.plan.held


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
