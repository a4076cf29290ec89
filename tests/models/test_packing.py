"""Weights that back ends pack for themselves: which ones, where, and that answers stay the same."""
import pytest
import torch
import torch.nn.functional as F

from tests.helpers import tiny_models
from tests.helpers.checkpoints import four_rank_config
from tests.helpers.tiny_models import make_engine, make_readable_engine, model_of
from tests.models.shapes import prompt
from vllm.overlay.kernels import native
from vllm.overlay.kernels.linear import backends
from vllm.overlay.kernels.panels import Panels
from vllm.overlay.model.packing import pack_weights
from worklogs.random_checkpoint import write_checkpoint

pytestmark = pytest.mark.skipif(backends.chosen_name() != "native", reason="no compiled operators here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packing") / "checkpoint"
    write_checkpoint(folder, four_rank_config(), seed=5)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder)


def packed(model):
    """name -> Panels"""
    return {f"{name}.{key}": value for name, layer in model.named_modules() for key, value in vars(layer).items()
            if isinstance(value, Panels)}


def test_what_fills_panels_is_packed_and_nothing_else(engine):
    model = model_of(engine)
    layers = {f"model.layers.{layer}.{name}.weight" for layer in range(3)
              for name in ("mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj")}
    layers |= {f"model.layers.{layer}.linear_attn.{name}.weight" for layer in (0, 1)
               for name in ("in_proj_qkvz", "out_proj")}
    layers |= {f"model.layers.2.self_attn.{name}.weight" for name in ("qkv_proj", "o_proj")}
    layers |= {f"model.layers.{layer}.mlp.{name}" for layer in range(3) for name in ("w13", "w2")}
    found = packed(model)
    # Two rows per head, the router's and the vocabulary's fill narrow panels only.
    narrow = {f"model.layers.{layer}.{name}.weight" for layer in range(3)
              for name in ("linear_attn.in_proj_ba", "mlp.gate")}
    assert layers <= set(found) <= layers | narrow | {"lm_head.weight"}
    assert all(one.operand == torch.float32 for one in found.values())
    names = dict(model.named_parameters())
    assert not set(layers) & set(names)
    assert "model.embed_tokens.weight" in names and "model.layers.0.mlp.shared_expert_gate.weight" in names


def test_answers_are_those_of_weights_in_rows(engine, folder):
    prompts = [prompt(length) for length in (1, 7, 40, 150)]
    plain = tiny_models.run(make_readable_engine(folder), prompts, tiny_models.greedy(12))
    # Two orders of every sum.
    tiny_models.assert_same(tiny_models.run(engine, prompts, tiny_models.greedy(12)), plain, tolerance=1e-4)


def test_an_embedding_that_is_the_head_stays_rows(tmp_path):
    write_checkpoint(tmp_path / "tied", {**four_rank_config(), "tie_word_embeddings": True}, seed=6)
    prompts = [prompt(9), prompt(30)]
    tied, plain = make_engine(tmp_path / "tied"), make_readable_engine(tmp_path / "tied")
    assert model_of(tied).lm_head.weight is model_of(tied).model.embed_tokens.weight and packed(model_of(tied))
    tiny_models.assert_same(*(tiny_models.run(one, prompts, tiny_models.greedy(5)) for one in (tied, plain)))


def test_weights_are_packed_in_their_own_memory(folder):
    engine = make_readable_engine(folder)
    model = model_of(engine)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    pack_weights(model)
    assert {name: one.numbers.data_ptr() for name, one in packed(model).items()}.items() \
        <= before.items()


def test_packed_weights_cannot_be_read_as_rows_or_loaded_over(engine, folder):
    layer = model_of(engine).model.layers[0].mlp.shared_expert.down_proj
    with pytest.raises(TypeError):
        F.linear(torch.ones(1, layer.input_size), layer.weight)
    with pytest.raises(AttributeError):
        layer.weight.data.zero_()
    with pytest.raises(AttributeError):
        model_of(engine).load_weights([])
    with pytest.raises(RuntimeError, match="cannot be saved"):
        model_of(engine).state_dict()


def test_what_the_library_multiplies_stays_rows(folder, monkeypatch):
    """AMX is the library's: there weights are what it wants."""
    monkeypatch.setattr(native, "library_multiplies", lambda dtype: True)
    engine = make_engine(folder)
    assert not packed(model_of(engine))
    assert len(tiny_models.run(engine, [prompt(20)], tiny_models.greedy(3))) == 1
