"""The configuration classes: what stock reads of them, from the published file and from what transformers 5 writes."""
import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from vllm.config import ModelConfig
from vllm.transformers_utils.config import get_config, get_hf_text_config
from vllm.transformers_utils.configs.qwen3_5 import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = json.loads((ROOT / "worklogs/model/config.json").read_text())


def written(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def model_config(folder: Path) -> ModelConfig:
    return ModelConfig(str(folder), str(folder), "auto", False, "auto", 0, skip_tokenizer_init=True)


def dense(**changes: object) -> dict:
    text = {key: value for key, value in PUBLISHED["text_config"].items()
            if not key.startswith(("num_experts", "moe_", "shared_expert"))}
    return {**text, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "intermediate_size": 6144,
            **changes}


def test_published_file(tmp_path):
    config = get_config(written(tmp_path, PUBLISHED), trust_remote_code=False)
    assert type(config) is Qwen3_5MoeConfig and type(config.text_config) is Qwen3_5MoeTextConfig
    assert config.torch_dtype is torch.bfloat16 and config.text_config.torch_dtype is torch.bfloat16
    assert config.get_text_config() is config.text_config is get_hf_text_config(config)
    assert config.layers_block_type == (["linear_attention"] * 3 + ["attention"]) * 10
    assert config.tie_word_embeddings is False
    assert config.vision_config.depth == 27
    assert config.text_config.rope_parameters == PUBLISHED["text_config"]["rope_parameters"]
    assert getattr(config.text_config, "rope_scaling", None) is None


def test_every_value_of_the_file_is_kept(tmp_path):
    config = get_config(written(tmp_path, PUBLISHED), trust_remote_code=False)
    for name, value in PUBLISHED["text_config"].items():
        if name not in ("dtype", "partial_rotary_factor"):
            assert getattr(config.text_config, name) == value, name


def test_stock_counts_kv_and_dtype(tmp_path):
    config = model_config(written(tmp_path, PUBLISHED))

    class Alone:
        tensor_parallel_size = pipeline_parallel_size = 1
        rank = 0

    assert config.dtype is torch.bfloat16
    assert config.max_model_len == 262144
    assert config.get_num_attention_layers(Alone()) == 10
    assert (config.get_head_size(), config.get_num_kv_heads(Alone())) == (256, 2)
    assert not config.has_inner_state and not config.is_attention_free and not config.is_multimodal_model


@pytest.mark.parametrize("top, text, expected", [("bfloat16", None, torch.bfloat16), (None, "float16", torch.float16),
                                                 ("float32", "bfloat16", torch.bfloat16)])
def test_dtype_of_either_level(tmp_path, top, text, expected):
    config = copy.deepcopy(PUBLISHED)
    for level, value in ((config, top), (config["text_config"], text)):
        level.pop("dtype")
        if value is not None:
            level["dtype"] = value
    assert model_config(written(tmp_path, config)).dtype is expected


def test_old_spelling_of_dtype_and_rope(tmp_path):
    config = dense(torch_dtype="float16", rope_theta=5e5, partial_rotary_factor=0.5)
    del config["dtype"], config["rope_parameters"]
    loaded = get_config(written(tmp_path, config), trust_remote_code=False)
    assert type(loaded) is Qwen3_5TextConfig and loaded.torch_dtype is torch.float16
    assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}


def test_layer_types_from_the_interval(tmp_path):
    config = dense(num_hidden_layers=5, full_attention_interval=2)
    del config["layer_types"]
    loaded = get_config(written(tmp_path, config), trust_remote_code=False)
    assert loaded.layers_block_type == ["linear_attention", "attention", "linear_attention", "attention",
                                        "linear_attention"]


@pytest.mark.parametrize("top, text, tied", [(None, True, True), (True, False, True), (False, True, False),
                                             (None, None, False)])
def test_the_top_level_decides_about_tying(tmp_path, top, text, tied):
    config = copy.deepcopy(PUBLISHED)
    for level, value in ((config, top), (config["text_config"], text)):
        level.pop("tie_word_embeddings", None)
        if value is not None:
            level["tie_word_embeddings"] = value
    assert get_config(written(tmp_path, config), trust_remote_code=False).tie_word_embeddings is tied


def test_survives_pickling_printing_and_auto_config(tmp_path):
    config = AutoConfig.from_pretrained(written(tmp_path, PUBLISHED))
    other = pickle.loads(pickle.dumps(config))
    assert other.text_config.layer_types == config.text_config.layer_types
    assert '"num_experts": 256' in repr(config)


@pytest.mark.parametrize("changes, message", [
    ({"hidden_size": None}, "lacks hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers in the configuration of a qwen3_5_text model is 0"),
    ({"vocab_size": "248320"}, "vocab_size in the configuration of a qwen3_5_text model is '248320'"),
    ({"layer_types": ["linear_attention"]}, "layer_types has 1 entries for num_hidden_layers 40"),
    ({"layer_types": ["mamba"] * 40}, "layer_types has 'mamba'"),
    ({"layer_types": None, "full_attention_interval": None}, "neither layer_types nor full_attention_interval"),
    ({"rope_parameters": {"mrope_section": [1, 1, 1], "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
     r"mrope_section \[1, 1, 1\] adds up to 3"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "lacks rope_theta"),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.02}}, "gives 5 rotary dimensions"),
])
def test_a_bad_file_is_one_clear_line(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        get_config(written(tmp_path, dense(**changes)), trust_remote_code=False)
    assert "\n" not in str(caught.value)


def test_missing_parts_are_named(tmp_path):
    with pytest.raises(ValueError, match="qwen3_5_moe model lacks text_config"):
        get_config(written(tmp_path, {**PUBLISHED, "text_config": None}), trust_remote_code=False)
    text = {**PUBLISHED["text_config"], "num_experts_per_tok": 300}
    with pytest.raises(ValueError, match="num_experts_per_tok 300 is more than the 256 experts"):
        get_config(written(tmp_path, {**PUBLISHED, "text_config": text}), trust_remote_code=False)
