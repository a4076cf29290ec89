"""Engine arguments that nobody gave."""
import pytest

from tests.helpers.tiny_models import make_qwen2


@pytest.fixture
def config(qwen2):
    from vllm import EngineArgs
    return lambda **arguments: EngineArgs(model=str(qwen2), skip_tokenizer_init=True, **arguments).create_engine_config(
    )


def test_prompts_are_cut_by_default(config):
    """Stock does so on CUDA above 32 K tokens only, and else sizes a step for the whole context."""
    scheduler = config().scheduler_config
    assert scheduler.chunked_prefill_enabled and scheduler.max_num_batched_tokens == 2048
    assert config(max_num_batched_tokens=333).scheduler_config.max_num_batched_tokens == 333
    assert not config(enable_chunked_prefill=False, max_model_len=512).scheduler_config.chunked_prefill_enabled


def test_prefix_caching_brings_chunked_prefill(config):
    wanted = config(enable_prefix_caching=True, enable_chunked_prefill=False)
    assert wanted.cache_config.enable_prefix_caching and wanted.scheduler_config.chunked_prefill_enabled


def test_no_memory_for_swapping(config):
    assert config().cache_config.swap_space_bytes == 0
    assert config(preemption_mode="swap", swap_space=8).cache_config.swap_space_bytes == 0


def test_a_sliding_window_is_left_to_stock(tmp_path):
    from vllm import EngineArgs
    model = make_qwen2(tmp_path / "window", use_sliding_window=True, sliding_window=64)
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True)
    assert not arguments.create_engine_config().scheduler_config.chunked_prefill_enabled


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "block_size"])
def test_numbers_that_cannot_work(config, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        config(**{name: 0})


def test_the_server_arguments_too(qwen2):
    from vllm import AsyncEngineArgs, EngineArgs
    arguments = AsyncEngineArgs(model=str(qwen2), skip_tokenizer_init=True)
    assert isinstance(arguments, EngineArgs)
    assert arguments.create_engine_config().scheduler_config.chunked_prefill_enabled
