"""The model class by itself: what it refuses, what it hands to stock, and that what is not finite stays in sight."""
import copy

import pytest
import torch

from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, run
from tests.models.shapes import prompt
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models import qwen3_5
from vllm.overlay.engine.step_failure import NonFiniteLogits
from vllm.transformers_utils.configs.qwen3_5 import Qwen3_5TextConfig


@pytest.fixture(scope="module")
def engine(hybrid):
    return make_engine(hybrid)


@pytest.fixture
def moe_config(engine):
    return copy.deepcopy(engine.model_config.hf_config)


@pytest.fixture
def dense_config(moe_config):
    values = {name: value for name, value in moe_config.to_dict().items()
              if "expert" not in name and name != "moe_intermediate_size"}
    return Qwen3_5TextConfig(**values, intermediate_size=96)


@pytest.mark.parametrize("change, message", [
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
    ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is no multiple of linear_num_key_heads 2"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "rope_type 'yarn' is not supported, only 'default'"),
    ({"rope_theta": 5e5}, "rope_theta cannot be overridden for this model: edit rope_parameters in its config.json"),
    ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling cannot be overridden"),
])
def test_settings_that_are_not_implemented(moe_config, change, message):
    for name, value in change.items():
        setattr(moe_config, name, value)
    with pytest.raises(ValueError, match=message):
        qwen3_5.Qwen3_5MoeForCausalLM(moe_config)


@pytest.mark.parametrize("ranks, message", [
    (3, "tensor parallel size 3 does not divide linear_num_key_heads 2, linear_num_value_heads 4, "
        "num_attention_heads 4, shared_expert_intermediate_size 40, num_key_value_heads 2"),
    (4, "tensor parallel size 4 does not divide linear_num_key_heads 2$"),
])
def test_sizes_that_ranks_cannot_share(moe_config, monkeypatch, ranks, message):
    monkeypatch.setattr(qwen3_5, "get_tensor_model_parallel_world_size", lambda: ranks)
    with pytest.raises(ValueError, match=message):
        qwen3_5.Qwen3_5MoeForCausalLM(moe_config)


def test_pipeline_parallelism_is_refused(hybrid):
    with pytest.raises((ValueError, NotImplementedError), match="(?i)pipeline parallelism is not supported"):
        make_engine(hybrid, pipeline_parallel_size=2)


class Recorder(QuantizationConfig):
    """A quantisation that quantises nothing and notes which layers ask for it."""

    def __init__(self):
        self.asked = []

    def get_quant_method(self, layer, prefix):
        self.asked.append(prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def get_name(self):
        return "recorder"

    get_supported_act_dtypes = get_min_capability = get_config_filenames = from_config = get_scaled_act_names = None


Recorder.__abstractmethods__ = frozenset()


def test_quantisation_reaches_every_large_matrix_of_a_dense_model(dense_config):
    recorder = Recorder()
    model = qwen3_5.Qwen3_5ForCausalLM(dense_config, quant_config=recorder)
    linear = [f"model.layers.{layer}.linear_attn.{name}" for layer in range(3) for name in ("in_proj_qkvz", "out_proj")]
    full = ["model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn.o_proj"]
    mlp = [f"model.layers.{layer}.mlp.{name}" for layer in range(4) for name in ("gate_up_proj", "down_proj")]
    assert sorted(recorder.asked) == sorted(linear + full + mlp + ["lm_head"])
    assert sum(isinstance(module, LinearBase) for module in model.modules()) == len(linear + full + mlp) + 3


def test_quantised_experts_are_refused(moe_config):
    with pytest.raises(ValueError, match="recorder quantization is not supported for routed experts"):
        qwen3_5.Qwen3_5MoeForCausalLM(moe_config, quant_config=Recorder())


def test_state_is_what_the_configuration_says(engine):
    spec = engine.model_executor.driver_worker.model_runner.model.get_state_spec()
    assert (spec.num_layers, spec.conv_shape, spec.recurrent_shape) == (3, (2 * 2 * 16 + 4 * 16, 3), (4, 16, 16))
    assert spec.conv_dtype is torch.float32


def test_kv_is_counted_for_full_attention_only(engine):
    caches = engine.model_executor.driver_worker.gpu_cache[0]
    assert len(caches) == 1


def test_dummy_weights(hybrid):
    outputs = run(make_engine(hybrid, load_format="dummy"), [prompt(20)], greedy(3))
    assert len(outputs[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(("ordinal", "layer"), [(0, 0), (2, 2)])
def test_a_value_that_is_not_finite_stays_in_sight_and_in_its_row(engine, ordinal, layer):
    """One sequence's state is spoilt: its request fails and names the layer, everybody else's tokens are as before, and
    so are those of the next owner of its slot and blocks."""
    prompts = [prompt(length) for length in (20, 33, 47)]
    alone = run(engine, prompts, greedy(8), together=False)
    for index, tokens in enumerate(prompts):
        add(engine, f"n{index}", tokens, greedy(8))
    engine.step()
    scheduler = engine.scheduler[0]
    spoilt, = (group for group in scheduler.running if group.request_id == "n1")
    slot = scheduler.slots._slots[spoilt.seqs[0].seq_id]
    engine.model_executor.driver_worker.model_runner.state_pool.recurrent[ordinal, slot] = float("nan")
    assert {output.request_id for output in engine.step()} == {"n0", "n2"}
    with pytest.raises(NonFiniteLogits) as caught:
        engine.step()
    assert caught.value.request_ids == ["n1"]
    assert str(caught.value) == (f"non-finite logits at token position 33 (first seen in the recurrent state of layer "
                                 f"{layer})")
    found = drain(engine)
    assert_same([found["n0"], found["n2"]], [alone[0], alone[2]])
    assert_same(run(engine, prompts, greedy(8)), alone)
