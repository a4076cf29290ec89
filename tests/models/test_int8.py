"""--quantization int8_weight_only: what is quantised, what it costs in accuracy and memory, on one rank and on two."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import tiny_models
from tests.helpers.checkpoints import as_rank, four_rank_config, write_shards
from tests.helpers.tiny_models import make_engine, make_readable_engine, model_of
from tests.models.shapes import moe, prompt, text
from vllm.model_executor.models import qwen3_5
from vllm.overlay.kernels.int8_weights import quantise
from vllm.overlay.model import int8, int8_error
from vllm.overlay.model.shards import Shards
from worklogs.random_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8") / "checkpoint"
    write_checkpoint(folder, four_rank_config(), seed=8)
    return folder


@pytest.fixture(scope="module")
def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def engine(folder):
    return make_readable_engine(folder, quantization="int8_weight_only")


def restored(values, scale):
    return values * scale.unsqueeze(-1)


def quantised_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.int8}


EXPECTED = {f"model.layers.{layer}.mlp.{name}" for layer in range(3)
            for name in ("w13", "w2", "shared_expert.gate_up_proj.weight", "shared_expert.down_proj.weight")}
EXPECTED |= {f"model.layers.2.self_attn.{name}.weight" for name in ("qkv_proj", "o_proj")}


def test_large_matrices_are_int8_and_nothing_else(engine, tensors):
    model = model_of(engine)
    assert quantised_names(model) == EXPECTED
    for name in ("model.embed_tokens", "lm_head", "model.norm", "model.layers.0.mlp.gate", "model.layers.2.mlp.gate",
                 "model.layers.0.mlp.shared_expert_gate"):
        kept = model.get_parameter(f"{name}.weight")
        assert torch.equal(kept[:tensors[f"{name}.weight"].shape[0]], tensors[f"{name}.weight"]), name


def test_they_are_the_checkpoints_own_quantised(engine, tensors):
    model = model_of(engine)
    q, k, v = (quantise(tensors[f"model.layers.2.self_attn.{name}_proj.weight"]) for name in "qkv")
    layer = model.model.layers[2].self_attn.qkv_proj
    assert torch.equal(layer.weight, torch.cat([values for values, _ in (q, k, v)]))
    assert torch.equal(layer.int8_scale, torch.cat([scale for _, scale in (q, k, v)]))
    experts = model.model.layers[1].mlp
    values, scale = quantise(tensors["model.layers.1.mlp.experts.gate_up_proj"])
    assert torch.equal(experts.w13, values) and torch.equal(experts.w13_scale, scale)


def test_one_by_one_and_joined_experts_are_quantised_alike(engine, tensors):
    model = model_of(engine)
    expected = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for key, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{expert}.{key}.weight")] = half
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(tensor):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = one
        else:
            found[name] = tensor
    for parameter in model.parameters():
        parameter.data.zero_()
    model.load_weights(found.items())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


def test_the_gated_delta_net_is_quantised_when_asked(folder, monkeypatch):
    monkeypatch.setenv("VLLM_OVERLAY_INT8_LINEAR_ATTN", "1")
    model = model_of(make_readable_engine(folder, quantization="int8_weight_only"))
    more = {f"model.layers.{layer}.linear_attn.{name}.weight" for layer in (0, 1)
            for name in ("in_proj_qkvz", "out_proj")}
    assert quantised_names(model) == EXPECTED | more
    assert all(int8_error.quantised(f"model.layers.0.linear_attn.{name}.weight")
               for name in ("in_proj_qkv", "in_proj_z", "out_proj"))


def test_the_head_is_quantised_when_asked(folder, tensors, monkeypatch):
    monkeypatch.setenv("VLLM_OVERLAY_INT8_HEAD", "1")
    engine = make_readable_engine(folder, quantization="int8_weight_only")
    head = model_of(engine).lm_head
    assert quantised_names(model_of(engine)) == EXPECTED | {"lm_head.weight"}
    values, scale = quantise(tensors["lm_head.weight"])
    rows = values.shape[0]
    assert torch.equal(head.weight[:rows], values) and torch.equal(head.int8_scale[:rows], scale)
    assert not head.weight[rows:].any() and not head.int8_scale[rows:].any()
    assert int8_error.quantised("lm_head.weight") and not int8_error.quantised("model.embed_tokens.weight")
    packed = make_engine(folder, quantization="int8_weight_only")
    found = [tiny_models.run(one, [prompt(9)], tiny_models.greedy(3)) for one in (engine, packed)]
    tiny_models.assert_same(*found)


def test_answers_are_those_of_the_restored_weights(engine, folder, tensors, tmp_path):
    """Through the whole engine: an unquantised model of the weights that int8 stands for says the same."""
    changed = {}
    for name, tensor in tensors.items():
        changed[name] = restored(*quantise(tensor)) if int8_error.quantised(name) else tensor
    write_shards(tmp_path, changed, 1, four_rank_config())
    prompts = [prompt(length) for length in (5, 40)]
    plain = tiny_models.run(make_engine(tmp_path), prompts, tiny_models.greedy(6))
    for one in (engine, make_engine(folder, quantization="int8_weight_only")):
        tiny_models.assert_same(tiny_models.run(one, prompts, tiny_models.greedy(6)), plain)


def nbytes(model, which):
    """Bytes of the parameters of the model's large matrices, scales among them."""
    return sum(parameter.nbytes for name, parameter in model.named_parameters()
               if name in which or name.replace("int8_scale", "weight").replace("_scale", "") in which)


def test_memory_halves(tmp_path):
    """Against bfloat16, at sizes where a scale per row is small change."""
    config = four_rank_config(dtype="bfloat16", **{**moe(8, 2, 256, 256), "hidden_size": 256})
    write_checkpoint(tmp_path / "model", config, seed=1)
    plain = model_of(make_readable_engine(tmp_path / "model", dtype="bfloat16"))
    small = model_of(make_readable_engine(tmp_path / "model", dtype="bfloat16", quantization="int8_weight_only"))
    before, after = nbytes(plain, EXPECTED), nbytes(small, EXPECTED)
    print(f"large matrices: {before} bytes in bfloat16, {after} in int8")
    assert 0.5 <= after / before < 0.51
    others = [sum(p.nbytes for p in model.parameters()) - count for model, count in ((plain, before), (small, after))]
    assert others[0] == others[1] > 0


def test_every_layer_stays_within_a_hundredth_of_bfloat16(tmp_path, capsys):
    """The program's own table; the bound is that of README.md for rows of 256 normal values."""
    config = four_rank_config(dtype="bfloat16", **{**moe(8, 2, 256, 256), "hidden_size": 256})
    write_checkpoint(tmp_path / "model", config, seed=1)
    assert int8_error.main([str(tmp_path / "model")]) == 0
    printed = capsys.readouterr().out
    print(printed)
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert [row[0] for row in rows] == [f"model.layers.{layer}.{part}" for layer, parts in (
        (0, ("mlp.experts", "mlp.shared_expert")), (1, ("mlp.experts", "mlp.shared_expert")),
        (2, ("mlp.experts", "mlp.shared_expert", "self_attn"))) for part in parts] + ["all"]
    for name, half, one, weights, products in rows:
        assert 0.49 < float(one) / float(half) < 0.55, name
        # Rows of 256 normal values reach 2.9 deviations: 2.9 / 127 / sqrt(12) = 0.66 %. Products are also rounded.
        assert 0.3 < float(weights[:-1]) < 0.8 and 0.3 < float(products[:-1]) < 1.0, (name, weights, products)


def test_the_program_names_what_the_model_quantises(engine, tensors):
    model, asked = model_of(engine), []
    for want in model.model.wanted("model"):
        counted = {}
        for name in quantised_names(model):
            parameter = model.get_parameter(name)
            counted[name] = parameter.clone()
            parameter.data.fill_(0)
        want.take(tensors[want.name])
        if any(bool(model.get_parameter(name).any()) for name in counted):
            asked.append(want.name)
        for name, value in counted.items():
            model.get_parameter(name).data.copy_(value)
    assert sorted(asked) == sorted(name for name in tensors if int8_error.quantised(name))


@pytest.mark.parametrize("arrange, message", [
    (lambda folder: None, "has no *.safetensors files"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "is no safetensors file: 100 bytes"),
])
def test_the_program_refuses_what_it_cannot_read(tmp_path, capsys, arrange, message):
    arrange(tmp_path)
    assert int8_error.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_that_is_quantised_already_is_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    for method, message in (("fp8", "does not match"), ("int8_weight_only", "made from unquantised checkpoints")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
        with pytest.raises(ValueError, match=message):
            make_engine(tmp_path, quantization="int8_weight_only")


def test_it_is_a_choice_of_the_command_line():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils import FlexibleArgumentParser
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--quantization", int8.NAME])
    assert parsed.quantization == int8.NAME


def test_ranks_quantise_their_own_part(engine, folder, tensors):
    with as_rank(1, 2):
        model = qwen3_5.Qwen3_5MoeForCausalLM(engine.model_config.hf_config, engine.cache_config,
                                              int8.Int8WeightOnlyConfig())
        model.load_weights(Shards(folder))
    down = tensors["model.layers.0.mlp.experts.down_proj"][:, :, 16:]
    experts = model.model.layers[0].mlp
    values, scale = quantise(down)
    assert torch.equal(experts.w2, values) and torch.equal(experts.w2_scale, scale)


def write_two_rank_model(folder):
    config = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "dtype": "float32",
              **text(48, 2, 2, (4, 1, 16), (2, 4, 16, 12), 4, 0.5, **moe(4, 2, 24, 24))}
    write_checkpoint(folder, config, seed=1)


def main(folder, results):
    engine = make_engine(folder, tensor_parallel_size=2, quantization="int8_weight_only")
    found = tiny_models.run(engine, [prompt(20)], tiny_models.greedy(4))
    Path(results).write_text(json.dumps([[token, logprobs[token].logprob] for token, logprobs in
                                         zip(found[0].outputs[0].token_ids, found[0].outputs[0].logprobs,
                                             strict=True)]))


def test_two_ranks_are_near_one(tmp_path):
    """Not equal: they have scales of their own. The first token's logprob is as near as int8 is to float32."""
    model, results = tmp_path / "model", tmp_path / "results"
    write_two_rank_model(model)
    command = [sys.executable, "-m", "tests.models.test_int8", str(model), str(results)]
    done = subprocess.run(command, cwd=ROOT, text=True, timeout=200, env=tiny_models.environment(),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and results.exists(), done.stdout[-6000:]
    two = json.loads(results.read_text())[0]
    runs = [tiny_models.run(make_engine(model, **arguments), [prompt(20)], tiny_models.greedy(4))[0].outputs[0]
            for arguments in ({}, {"quantization": "int8_weight_only"})]
    plain, one = ([run.token_ids[0], run.logprobs[0][run.token_ids[0]].logprob] for run in runs)
    print(f"first token and logprob: float32 {plain}, int8 {one}, int8 on two ranks {two}")
    assert two[0] == one[0] == plain[0]
    assert abs(two[1] - plain[1]) < 0.05 and abs(one[1] - plain[1]) < 0.05


if __name__ == "__main__":
    main(*sys.argv[1:])
