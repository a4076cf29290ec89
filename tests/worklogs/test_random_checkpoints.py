"""The programs that make random checkpoints: the bench slices and the demo."""
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from worklogs import make_demo_checkpoint, make_slice, random_checkpoint
from worklogs.random_checkpoint import CannotWrite, tensors, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = json.loads((ROOT / "worklogs/model/config.json").read_text())


def call(program, *arguments):
    return subprocess.run([sys.executable, ROOT / "worklogs" / program, *map(str, arguments)], text=True,
                          capture_output=True)


def tiny(**changes):
    text = {**PUBLISHED["text_config"], "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 4, "linear_value_head_dim": 4,
            "linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_attention_heads": 2, "num_experts": 3,
            "moe_intermediate_size": 4, "shared_expert_intermediate_size": 4, **changes}
    vision = {**PUBLISHED["vision_config"], "depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 12,
              "out_hidden_size": 8, "patch_size": 2, "num_position_embeddings": 4}
    return {**PUBLISHED, "text_config": text, "vision_config": vision}


def test_bench_slice_is_the_real_model_with_fewer_layers_experts_and_words():
    config = make_slice.slice_config(PUBLISHED, 4, 64, 151936, "bfloat16")
    sizes = {spec.name: spec.shape for spec in tensors(config)}
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert sizes["model.layers.0.mlp.experts.gate_up_proj"] == (64, 1024, 2048)
    assert sizes["model.layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert sizes["model.layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert sizes["lm_head.weight"] == sizes["model.embed_tokens.weight"] == (151936, 2048)
    assert 3.0e9 < 2 * sum(int(np.prod(shape)) for shape in sizes.values()) < 3.2e9
    assert not any("visual" in name or "mtp" in name for name in sizes)
    unchanged = ("hidden_size", "head_dim", "linear_num_value_heads", "num_experts_per_tok", "max_position_embeddings")
    assert all(config[key] == PUBLISHED["text_config"][key] for key in unchanged)


def test_vision_tower_is_the_real_one():
    sizes = {spec.name: spec.shape for spec in tensors(PUBLISHED) if "visual" in spec.name}
    assert sizes["model.visual.patch_embed.proj.weight"] == (1152, 3, 2, 16, 16)
    assert sizes["model.visual.pos_embed.weight"] == (2304, 1152)
    assert sizes["model.visual.blocks.26.attn.qkv.weight"] == (3456, 1152)
    assert sizes["model.visual.blocks.26.mlp.linear_fc1.bias"] == (4304, )
    assert sizes["model.visual.merger.linear_fc2.weight"] == (2048, 4608)
    assert len(sizes) == 3 + 27 * 12 + 6


def test_slice_program(tmp_path):
    arguments = ("--layers", 1, "--experts", 2, "--vocab", 64)
    done = call("make_slice.py", "--seed", 5, *arguments, tmp_path / "one")
    assert done.returncode == 0, done.stderr
    data = (tmp_path / "one/model.safetensors").read_bytes()
    assert f"{len(data):,} bytes" in done.stdout and hashlib.sha256(data).hexdigest() in done.stdout
    config = json.loads((tmp_path / "one/config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"]) == (2, 2)
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]


def test_the_seed_decides(tmp_path):
    digests = [write_checkpoint(tmp_path / str(run), tiny(), seed)[1] for run, seed in enumerate((5, 5, 6))]
    assert digests[0] == digests[1] != digests[2]


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("kept")
    done = call("make_slice.py", "--layers", 1, "--experts", 2, "--vocab", 64, tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"make_slice: {tmp_path} exists and is not an empty folder; name another one or remove it\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("arguments, message", [
    (("--layers", 41), "make_slice: --layers 41: the model has 40"),
    (("--config", "/nowhere/config.json"), "make_slice: [Errno 2] No such file or directory: '/nowhere/config.json'"),
])
def test_bad_arguments_are_one_line(tmp_path, arguments, message):
    done = call("make_slice.py", *arguments, tmp_path / "out")
    assert (done.returncode, done.stderr) == (1, message + "\n")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = random_checkpoint.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(random_checkpoint.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CannotWrite, match="needs 0.00 GB and .* has 0.00 GB left"):
        write_checkpoint(tmp_path / "out", tiny(), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path):
    def fail(name, first, block):
        if name == "lm_head.weight":
            raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        write_checkpoint(tmp_path / "out", tiny(), 0, fail)
    assert list(tmp_path.iterdir()) == []


def test_tensors_do_not_depend_on_each_other_or_on_block_size(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "two", tiny(), 0)
    monkeypatch.setattr(random_checkpoint, "BLOCK_VALUES", 24)
    write_checkpoint(tmp_path / "one", tiny(num_hidden_layers=1, layer_types=["linear_attention"]), 0)
    two, one = load_file(tmp_path / "two/model.safetensors"), load_file(tmp_path / "one/model.safetensors")
    assert set(one) < set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_file_is_a_safetensors_file_of_that_dtype(tmp_path, dtype):
    write_checkpoint(tmp_path / "out", tiny(dtype=dtype), 0)
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        tensor = file.get_tensor("model.language_model.layers.0.linear_attn.A_log")
    assert tensor.dtype is getattr(torch, dtype)
    assert ((tensor >= 0) & (tensor <= np.log(16))).all()


@pytest.fixture(scope="module")
def demo(tmp_path_factory, full_folder):
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    done = call("make_demo_checkpoint.py", folder, "--tokenizer", full_folder)
    assert done.returncode == 0, done.stderr
    yield folder, done.stdout
    (folder / "model.safetensors").unlink()


def test_demo_has_the_real_layout(demo, full_folder):
    folder, printed = demo
    config = json.loads((folder / "config.json").read_text())
    text, real = config["text_config"], PUBLISHED["text_config"]
    assert set(config) == set(PUBLISHED) and set(text) == set(real)
    assert config["architectures"] == PUBLISHED["architectures"]
    for key in ("vocab_size", "max_position_embeddings", "eos_token_id", "linear_conv_kernel_dim"):
        assert text[key] == real[key]
    assert json.loads((folder / "generation_config.json").read_text())["top_k"] == 20
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    vision = config["vision_config"]
    assert set(vision) == set(PUBLISHED["vision_config"]) and vision["out_hidden_size"] == text["hidden_size"]
    assert [preprocessor[name] for name in ("patch_size", "temporal_patch_size", "merge_size")] == [
        vision[name] for name in ("patch_size", "temporal_patch_size", "spatial_merge_size")]
    assert (folder / "tokenizer.json").read_bytes() == (full_folder / "tokenizer.json").read_bytes()
    size = (folder / "model.safetensors").stat().st_size
    assert size < 250e6 and f"{size:,} bytes" in printed


def test_demo_head_favours_the_words_of_its_side(demo, full_folder):
    """Two channels carry the form of an answer: they are written by the embedding only, and read by the head."""
    folder, _ = demo
    tokens = make_demo_checkpoint.read_tokens(full_folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        embedding = file.get_tensor("model.language_model.embed_tokens.weight")[:, :2].float()
        head = file.get_tensor("lm_head.weight")[:, :2].float()
        for name in names:
            if re.search(r"(out_proj|o_proj|down_proj|merger.linear_fc2.weight)", name):
                assert not file.get_tensor(name)[..., :2, :].any(), name
        assert file.get_tensor("model.visual.merger.linear_fc2.bias")[:2].tolist() == [1, -1]
    bias = {name: head @ embedding[tokens[token]] for name, token in
            (("thought", "Ċ"), ("answer", "ĊĊ"), ("in thought", "ĠPerhaps"), ("in answer", "Ġriver"))}
    for side, ending, other in (("thought", "</think>", "<|im_end|>"), ("answer", "<|im_end|>", "</think>")):
        assert torch.equal(bias[side], bias[f"in {side}"])
        assert bias[side][tokens[ending]] == make_demo_checkpoint.END == bias[side].max()
        assert bias[side][tokens[other]] == make_demo_checkpoint.NEVER == bias[side].min()
        assert (bias[side][248077:] == make_demo_checkpoint.NEVER).all()


def test_demo_without_its_tokens_is_refused(tmp_path):
    done = call("make_demo_checkpoint.py", tmp_path / "out", "--tokenizer", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"make_demo_checkpoint: {tmp_path}/tokenizer.json does not exist")
    content = {"model": {"vocab": {"Ċ": 0}}, "added_tokens": [{"content": "<think>", "id": 1}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    done = call("make_demo_checkpoint.py", tmp_path / "out", "--tokenizer", tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"make_demo_checkpoint: {tmp_path}/tokenizer.json lacks the tokens '</think>', '<|im_end|>'\n"
    assert not (tmp_path / "out").exists()
