"""Counted weights against the parameters that the models make, to the byte."""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.models.shapes import moe, text, vision
from vllm.distributed import parallel_state_stock as parallel_state
from vllm.model_executor.models import qwen3_5
from vllm.overlay.model.int8 import HEAD_TOO, LINEAR_ATTENTION_TOO, Int8WeightOnlyConfig
from vllm.overlay.plan.sizes import Sizes
from vllm.overlay.plan.weights import weight_parts
from vllm.transformers_utils.configs.qwen3_5 import CONFIG_CLASSES

PUBLISHED = Path(__file__).resolve().parents[3] / "worklogs/model/config.json"
GIB = 1 << 30
MOE = text(64, 6, 2, (8, 2, 16), (4, 8, 16, 8), 4, 0.5, **moe(6, 2, 16, 24))
DENSE = text(48, 3, 3, (4, 4, 12), (4, 4, 8, 12), 3, 0.5, intermediate_size=40, attention_bias=True)
MODELS = {
    "moe-text": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", MOE),
    "moe-pictures": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
                     {"text_config": {**MOE, "mtp_num_hidden_layers": 2, "mtp_use_dedicated_embeddings": False},
                      "vision_config": vision(64, 3, (32, 4), 52, patch=4, merge=2, side=4, frames=2),
                      "image_token_id": 1}),
    # Three heads are no two ranks', and neither is this inner size.
    "dense-pictures": ("Qwen3_5ForConditionalGeneration", "qwen3_5",
                       {"text_config": DENSE, "image_token_id": 1, "tie_word_embeddings": True,
                        "vision_config": vision(48, 2, (24, 3), 51, patch=6, merge=2, side=5, frames=1)}),
    "dense-text": ("Qwen3_5ForCausalLM", "qwen3_5_text", DENSE),
}


def config_of(architecture: str, kind: str, fields: dict):
    made = {one.model_type: one for one in CONFIG_CLASSES}[kind](**{**fields, "dtype": "float16"})
    made.architectures = [architecture]
    return made


@pytest.fixture
def build(monkeypatch):
    """Makes a model without memory, as rank 0 of some."""

    def make(config, ranks: int, dtype: torch.dtype, quantised: bool = False, mtp: bool = False):
        group = SimpleNamespace(world_size=ranks, rank_in_group=0)
        monkeypatch.setattr(parallel_state, "_TP", group)
        monkeypatch.setattr(parallel_state, "_PP", SimpleNamespace(world_size=1, rank_in_group=0))
        monkeypatch.setenv(qwen3_5.MTP_ASKED, str(int(mtp)))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                kind = getattr(qwen3_5, config.architectures[0])
                return kind(config, None, Int8WeightOnlyConfig() if quantised else None)
        finally:
            torch.set_default_dtype(before)

    return make


def bytes_of(model) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize("quantised", [False, True], ids=["whole", "int8"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_of_the_parameters(build, monkeypatch, name, ranks, quantised):
    config = config_of(*MODELS[name])
    for dtype, mtp, more in ((torch.float16, False, "0"), (torch.float32, True, "1")):
        monkeypatch.setenv(LINEAR_ATTENTION_TOO, more)
        monkeypatch.setenv(HEAD_TOO, more)
        model = build(config, ranks, dtype, quantised, mtp)
        parts = weight_parts(config, ranks, dtype, "int8_weight_only" if quantised else None, mtp,
                             name.endswith("pictures"))
        counted, real = sum(part.total for part in parts), bytes_of(model)
        assert counted == real, f"{dtype}, mtp {mtp}: counted {counted}, the model has {real}: {parts}"
        slot = Sizes.of(config.get_text_config(), ranks, dtype).slot_bytes
        assert slot == model.get_state_spec().slot_bytes


def test_each_component(build):
    """Not only their sum."""
    config = config_of(*MODELS["moe-pictures"])
    model = build(config, 2, torch.float16, mtp=True)
    parts = {part.name: part.total for part in weight_parts(config, 2, torch.float16, None, True, True)}
    layers = model.model.layers
    real = {"embedding": bytes_of(model.model.embed_tokens), "head": bytes_of(model.lm_head),
            "attention": sum(bytes_of(layer.self_attn) for layer in layers if layer.is_attention),
            "linear attention": sum(bytes_of(layer.linear_attn) for layer in layers if not layer.is_attention),
            "experts": sum(one.numel() * 2 for layer in layers for one in (layer.mlp.w13, layer.mlp.w2)),
            "shared expert": sum(bytes_of(layer.mlp.shared_expert) for layer in layers),
            "router": sum(bytes_of(layer.mlp.gate) + bytes_of(layer.mlp.shared_expert_gate) for layer in layers),
            "vision tower": bytes_of(model.visual), "multi-token prediction": bytes_of(model.mtp)}
    assert {name: parts[name] for name in real} == real
    assert set(parts) - set(real) == {"norms"}


def test_the_published_model_on_four_cards(build):
    """What vLLM logged for an earlier system: 16.2 "GB", which are GiB, of text weights on each of four cards."""
    fields = json.loads(PUBLISHED.read_text())
    config = config_of("Qwen3_5MoeForConditionalGeneration", fields.pop("model_type"), fields)
    counted = {pictures: weight_parts(config, 4, torch.float16, None, False, pictures) for pictures in (False, True)}
    text_only, whole = (sum(part.total for part in parts) for parts in counted.values())
    assert abs(text_only / GIB - 16.2) < 0.05, f"{text_only / GIB:.2f} GiB"
    assert whole == bytes_of(build(config, 4, torch.float16))
    sizes = Sizes.of(config.get_text_config(), 4, torch.float16)
    assert 16.0e6 < sizes.slot_bytes < 16.5e6, f"{sizes.slot_bytes / 1e6:.2f} MB a card"
    assert 63e6 < Sizes.of(config.get_text_config(), 1, torch.float16).slot_bytes < 66e6


def test_ranks_that_cannot_share():
    with pytest.raises(ValueError, match=r"^tensor parallel size 3 does not divide linear_num_key_heads 4, .*"):
        weight_parts(config_of(*MODELS["moe-text"]), 3, torch.float16, None, False, False)
    with pytest.raises(ValueError, match=r"^weights in gptq cannot be counted"):
        weight_parts(config_of(*MODELS["moe-text"]), 1, torch.float16, "gptq", False, False)
