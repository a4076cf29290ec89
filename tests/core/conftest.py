"""One tiny attention-only checkpoint and one reference run for the suite."""
import pytest

from tests.helpers import tiny_models


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory):
    return tiny_models.make_qwen2(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture
def stock_core(monkeypatch):
    """Puts stock's scheduler, block manager and allocator back into the engine: the negative control of a law."""
    from vllm.core import block_manager_v2, block_manager_v2_stock, scheduler_stock
    from vllm.core.block import cpu_gpu_block_allocator, prefix_caching_block_stock
    from vllm.engine import llm_engine_stock
    from vllm.overlay.prefix_cache.stats import PrefixCacheStats

    class StockScheduler(scheduler_stock.Scheduler):

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.cache_stats = PrefixCacheStats()

        def step_succeeded(self):
            """Ours is told so by our engine; stock has no such thing."""

        step_failed = step_succeeded

    monkeypatch.setattr(llm_engine_stock, "Scheduler", StockScheduler)
    monkeypatch.setattr(block_manager_v2, "BlockSpaceManagerV2", block_manager_v2_stock.BlockSpaceManagerV2)
    monkeypatch.setattr(cpu_gpu_block_allocator, "PrefixCachingBlockAllocator",
                        prefix_caching_block_stock.PrefixCachingBlockAllocator)
