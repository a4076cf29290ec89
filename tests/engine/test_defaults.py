"""Engine arguments that nobody gave."""
import json

import pytest

from tests.helpers.tiny_models import make_qwen2
from tests.models.shapes import text


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


def test_no_graphs_of_a_model_with_recurrent_state(config, tmp_path):
    """A graph that was captured without a state step answers every token from a zero state, and nobody would know."""
    from vllm import EngineArgs
    from vllm.overlay.hybrid.plan import plan_slots
    fields = {**text(48, 4, 2, (4, 1, 16), (2, 4, 16, 12), 4, 0.5, intermediate_size=24), "dtype": "float32",
              "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    hybrid = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True).create_engine_config()
    assert hybrid.model_config.enforce_eager and not config().model_config.enforce_eager
    plan = hybrid.model_config, hybrid.cache_config, hybrid.scheduler_config, hybrid.parallel_config
    plan_slots(*plan)
    hybrid.model_config.enforce_eager = False
    with pytest.raises(ValueError, match="capture in CUDA graphs .give --enforce-eager. is not supported"):
        plan_slots(*plan)


def test_memory_of_checkpoints(config):
    """Bytes, or a size as people write it; None leaves it to the memory plan."""
    cache = config(checkpoint_memory="1.5GiB", checkpoint_host_memory=12_345).cache_config
    assert (cache.checkpoint_memory, cache.checkpoint_host_memory) == (3 << 29, 12_345)
    cache = config(checkpoint_memory="0").cache_config
    assert (cache.checkpoint_memory, cache.checkpoint_host_memory) == (0, None)
    for value, words in (("lots", "checkpoint_memory: 'lots' is no size such as 31.72GiB or 16.2GB"),
                         ("1e400", "checkpoint_memory: '1e400' is no size"),
                         (-1, "checkpoint_memory must be a whole number of bytes, or a size such as '2GiB', got -1"),
                         (2e9, "checkpoint_memory must be a whole number of bytes, .*, got 2000000000.0"),
                         ("-1GiB", "checkpoint_memory: '-1GiB' is no size")):
        with pytest.raises(ValueError, match=words):
            config(checkpoint_memory=value)


def test_sizes_without_effect_are_named(config, monkeypatch):
    from vllm.overlay.hybrid import plan
    said = []
    monkeypatch.setattr(plan.logger, "warning", lambda line, *args: said.append(line % args))
    found = config(checkpoint_memory="1GiB", checkpoint_host_memory="2GiB")
    plan.plan_slots(found.model_config, found.cache_config, found.scheduler_config, found.parallel_config)
    assert said == ["--checkpoint-memory is without effect: this model has no recurrent state.",
                    "--checkpoint-host-memory is without effect: this model has no recurrent state."]
    found.model_config.hf_config.layers_block_type = ["linear_attention"]
    found.model_config.enforce_eager, found.cache_config.checkpoint_host_memory = True, 0
    plan.plan_slots(found.model_config, found.cache_config, found.scheduler_config, found.parallel_config)
    assert said[2:] == ["--checkpoint-memory is without effect: prefix caching is off (--enable-prefix-caching)."]


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "block_size"])
def test_numbers_that_cannot_work(config, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        config(**{name: 0})


def test_the_server_arguments_too(qwen2):
    from vllm import AsyncEngineArgs, EngineArgs
    arguments = AsyncEngineArgs(model=str(qwen2), skip_tokenizer_init=True)
    assert isinstance(arguments, EngineArgs)
    assert arguments.create_engine_config().scheduler_config.chunked_prefill_enabled
