"""The worker on the CPU: ours for every device, with the device set-up and the memory budget of a CPU."""
from typing import Any

import torch

import vllm.envs as envs
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, set_custom_all_reduce
from vllm.model_executor import set_random_seed
from vllm.overlay.runtime import platform_cpu
from vllm.worker import cpu_worker_stock as _stock
from vllm.worker.worker import Worker


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

    @torch.inference_mode()
    def determine_num_available_blocks(self) -> tuple[int, int]:
        """Runs the largest step once and gives the KV cache what remains of memory, within `kv_cache_blocks`' limits.

        Returns:
            (KV blocks, 0).

        Raises:
            ValueError: one sequence of max_model_len does not fit.
        """
        before = platform_cpu.resident_memory()
        platform_cpu.reset_peak()
        with platform_cpu.without_device_sync():
            self.model_runner.profile_run()
        still_held = platform_cpu.resident_memory() - before
        reserve = max(0, platform_cpu.resident_memory(peak=True) - before - max(0, still_held)) + platform_cpu.GIB // 4
        block_bytes = self.get_cache_block_size_bytes()
        if not block_bytes:
            return 0, 0
        blocks = platform_cpu.kv_cache_blocks(block_bytes, self.cache_config.block_size,
                                              self.model_config.max_model_len, self.scheduler_config.max_num_seqs,
                                              reserve, self.parallel_config.world_size, envs.VLLM_CPU_KVCACHE_SPACE)
        _stock.logger.info("KV cache: %d tokens, %.2f GiB (a step needs %.2f GiB beside it).",
                           blocks * self.cache_config.block_size, blocks * block_bytes / platform_cpu.GIB,
                           reserve / platform_cpu.GIB)
        return blocks, 0


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
