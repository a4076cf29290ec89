"""Loading: every published layout ends in the same parameters, and what does not fit is named in one line."""
import weakref

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.tiny_models import make_engine, make_readable_engine, model_of
from tests.models.shapes import IMAGE_TOKEN, text
from vllm.overlay.model import checkpoint
from vllm.overlay.model.checkpoint import CheckpointError
from worklogs.random_checkpoint import write_checkpoint

LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"


@pytest.fixture(scope="module")
def tensors(hybrid):
    return load_file(hybrid / "model.safetensors")


@pytest.fixture(scope="module")
def model(hybrid):
    return model_of(make_readable_engine(hybrid))


@pytest.fixture
def fits(model, tensors):
    """Loads other tensors and says whether the parameters became what the file's own tensors make of them."""
    model.load_weights(tensors.items())
    expected = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def loaded(changed):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        model.load_weights(changed.items())
        return all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())

    return loaded


def one_by_one(tensors):
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                found[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            found.update((name.replace("down_proj", f"{expert}.down_proj.weight"), one)
                         for expert, one in enumerate(tensor))
        else:
            found[name] = tensor
    return found


def with_pictures(tensors):
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}


def test_every_layout_gives_the_same_model(fits, tensors):
    assert fits(tensors)
    assert fits(one_by_one(tensors))
    assert fits(with_pictures(tensors))
    assert fits(with_pictures(one_by_one(tensors)))
    assert fits(dict(reversed(tensors.items())))


def test_what_is_not_used_yet_is_skipped_with_a_line(fits, tensors, monkeypatch):
    lines = []
    monkeypatch.setattr(checkpoint.logger, "info", lambda text, *values: lines.append(text % values))
    extra = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2), "model.visual.pos_embed.weight": torch.ones(2),
             "mtp.fc.weight": torch.ones(2)}
    assert fits({**tensors, **extra})
    assert lines == ["Skipped checkpoint tensors under model.visual.* (2): only a ...ForConditionalGeneration "
                     "architecture with a vision_config takes pictures",
                     "Skipped checkpoint tensors under mtp.* (1): the configuration has no mtp_num_hidden_layers"]


def changed(tensors, *without, **given):
    return {**{name: tensor for name, tensor in tensors.items() if name not in without},
            **{name.replace("__", "."): tensor for name, tensor in given.items()}}


@pytest.mark.parametrize("change, message", [
    (lambda t: changed(t, "model.norm.weight"), "1 missing tensor: model.norm.weight"),
    (lambda t: changed(with_pictures(t), "model.language_model.norm.weight"),
     "1 missing tensor: model.language_model.norm.weight"),
    (lambda t: changed(t, f"{EXPERTS}.gate_up_proj"), f"1 missing tensor: {EXPERTS}.gate_up_proj"),
    (lambda t: changed(one_by_one(t), f"{EXPERTS}.2.up_proj.weight"), f"1 missing tensor: {EXPERTS}.2.up_proj.weight"),
    (lambda t: changed(t, "lm_head.weight"), "1 missing tensor: lm_head.weight"),
    (lambda t: changed(t, extra__weight=torch.ones(1)), "1 unknown tensor: extra.weight"),
    (lambda t: changed(t, *[name for name in t if "linear_attn" in name]),
     f"27 missing tensors: {LAYER}.linear_attn.in_proj_qkv.weight, {LAYER}.linear_attn.in_proj_z.weight, "
     f"{LAYER}.linear_attn.in_proj_b.weight, {LAYER}.linear_attn.in_proj_a.weight, "
     f"{LAYER}.linear_attn.conv1d.weight and 22 more"),
    (lambda t: changed(t, "model.norm.weight", model__gnorm__weight=torch.ones(64)),
     "1 missing tensor: model.norm.weight; 1 unknown tensor: model.gnorm.weight"),
    (lambda t: {**t, "model.language_model.norm.weight": t["model.norm.weight"]},
     "1 repeated tensor: model.language_model.norm.weight"),
    (lambda t: {**t, f"{EXPERTS}.1.up_proj.weight": torch.ones(24, 64)},
     f"1 repeated tensor: {EXPERTS}.1.up_proj.weight"),
    (lambda t: {f"{EXPERTS}.1.up_proj.weight": torch.ones(24, 64), **t}, f"{EXPERTS}.gate_up_proj"),
])
def test_what_does_not_fit_is_named(model, tensors, change, message):
    with pytest.raises(CheckpointError) as caught:
        model.load_weights(change(tensors).items())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, shape, needed", [
    ("model.embed_tokens.weight", (130, 64), (131, 64)),
    ("lm_head.weight", (131, 32), (131, 64)),
    (f"{EXPERTS}.gate_up_proj", (4, 64, 48), (4, 48, 64)),
    (f"{EXPERTS}.down_proj", (4, 24, 64), (4, 64, 24)),
    (f"{LAYER}.linear_attn.in_proj_qkv.weight", (96, 64), (128, 64)),
    (f"{LAYER}.linear_attn.conv1d.weight", (128, 4), (128, 1, 4)),
    (f"{LAYER}.linear_attn.A_log", (2, ), (4, )),
    ("model.layers.3.self_attn.q_proj.weight", (128, 64), (256, 64)),
    ("model.layers.3.self_attn.q_norm.weight", (16, ), (32, )),
    (f"{LAYER}.mlp.shared_expert_gate.weight", (64, ), (1, 64)),
])
def test_a_wrong_shape_names_both(model, tensors, name, shape, needed):
    with pytest.raises(CheckpointError) as caught:
        model.load_weights({**tensors, name: torch.ones(shape)}.items())
    assert str(caught.value) == f"checkpoint tensor {name} has shape {shape}, the model needs {needed}"


def test_the_engine_refuses_a_broken_file(hybrid, tensors, tmp_path):
    from safetensors.torch import save_file
    save_file(changed(tensors, "model.norm.weight"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((hybrid / "config.json").read_text())
    with pytest.raises(CheckpointError, match="1 missing tensor: model.norm.weight"):
        make_engine(tmp_path)


def test_one_tensor_at_a_time(model, tensors):
    """The loader holds nothing of what it was given: the model exists once."""
    alive = []

    def stream():
        for name, tensor in tensors.items():
            assert sum(reference() is not None for reference in alive) <= 1, name
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy

    model.load_weights(stream())
    assert len(alive) == len(tensors)


VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 12, "out_hidden_size": 32,
          "in_channels": 3, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
          "num_position_embeddings": 9}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A checkpoint with a vision tower: its tensors, the model that it makes."""
    language = text(32, 2, 2, (2, 1, 16), (1, 2, 8, 8), 4, 0.5, intermediate_size=24)
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "float32",
              "image_token_id": IMAGE_TOKEN, "vision_config": VISION,
              "text_config": {**language, "dtype": "float32", "model_type": "qwen3_5_text"}}
    folder = tmp_path_factory.mktemp("seeing") / "checkpoint"
    write_checkpoint(folder, config, seed=1)
    model = model_of(make_readable_engine(folder))
    return load_file(folder / "model.safetensors"), model


def test_a_vision_tower_is_loaded_from_either_name(seeing):
    tensors, model = seeing
    expected = {name: parameter.clone() for name, parameter in model.visual.named_parameters()}
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.load_weights({name.replace("model.visual.", "visual."): tensor for name, tensor in tensors.items()}.items())
    assert expected and all(torch.equal(parameter, expected[name]) for name, parameter in
                            model.visual.named_parameters())
    frames = tensors["model.visual.patch_embed.proj.weight"]
    assert torch.equal(model.visual.patch_weight, (frames[:, :, 0] + frames[:, :, 1]).flatten(1))


@pytest.mark.parametrize("prefix", ["model.visual.", "visual."])
@pytest.mark.parametrize("change, message", [
    (lambda t, p: changed(t, f"{p}merger.norm.bias"), "1 missing tensor: {}merger.norm.bias"),
    (lambda t, p: {**t, f"{p}deepstack.weight": torch.ones(1)}, "1 unknown tensor: {}deepstack.weight"),
    (lambda t, p: {**t, f"{p}pos_embed.weight": torch.ones(4, 16)},
     "checkpoint tensor {}pos_embed.weight has shape (4, 16), the model needs (9, 16)"),
    (lambda t, p: {**t, f"{p}patch_embed.proj.weight": torch.ones(16, 3, 1, 2, 2)},
     "checkpoint tensor {}patch_embed.proj.weight has shape (16, 3, 1, 2, 2), the model needs (16, 3, 2, 2, 2)"),
    (lambda t, p: changed(t, *[name for name in t if "visual" in name]), "21 missing tensors: model.visual."),
])
def test_what_does_not_fit_a_vision_tower_is_named(seeing, prefix, change, message):
    tensors, model = seeing
    named = {name.replace("model.visual.", prefix): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError) as caught:
        model.load_weights(change(named, prefix).items())
    assert message.format(prefix) in str(caught.value)
