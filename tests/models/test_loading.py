"""Loading from shards: what a rank reads, what is in memory meanwhile, what is said, and what is refused before it."""
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import INDEX, as_rank, four_rank_config, write_shards
from tests.helpers.tiny_models import make_engine, make_readable_engine, model_of
from vllm.model_executor.layers import linear as stock
from vllm.model_executor.models import qwen3_5
from vllm.overlay.model import checkpoint, shards
from vllm.overlay.model.checkpoint import Wanted, linear, load_checkpoint
from vllm.overlay.model.shards import CheckpointError, Shards
from worklogs.random_checkpoint import write_checkpoint

MB = 1 << 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint in one file."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoint"
    write_checkpoint(folder, four_rank_config(), seed=5)
    return folder


@pytest.fixture(scope="module")
def tensors(whole):
    return load_file(whole / "model.safetensors")


@pytest.fixture(scope="module")
def sharded(tensors, tmp_path_factory):
    """The same in three shards."""
    folder = tmp_path_factory.mktemp("sharded") / "checkpoint"
    write_shards(folder, tensors, 3, four_rank_config())
    return folder


@pytest.fixture(scope="module")
def engine(sharded):
    return make_readable_engine(sharded)


@pytest.fixture
def model(engine):
    return model_of(engine)


@pytest.fixture
def broken(sharded, tmp_path):
    """A copy to damage."""
    return shutil.copytree(sharded, tmp_path / "broken")


@pytest.fixture
def lines(monkeypatch):
    said = []
    for module in (checkpoint, shards):
        monkeypatch.setattr(module.logger, "info", lambda text, *values: said.append(text % values))
    return said


def test_shards_and_one_file_give_the_same_model(model, whole, tensors, lines):
    loaded = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for source in (Shards(whole), tensors.items()):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        model.load_weights(source)
        assert all(torch.equal(parameter, loaded[name]) for name, parameter in model.named_parameters())


def test_a_checkpoint_of_pickles_still_loads(model, whole, tensors, tmp_path):
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    other = model_of(make_readable_engine(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def local_model(engine, rank, ranks, source):
    with as_rank(rank, ranks):
        model = qwen3_5.Qwen3_5MoeForCausalLM(engine.model_config.hf_config, engine.cache_config)
        model.load_weights(source)
    return model


def read_by(model, tensors, rank, ranks):
    """Bytes per tensor that a rank asks for."""
    with as_rank(rank, ranks):
        wanted = list(model.model.wanted("model"))
    return {want.name: sum(tensors[want.name][cut].nbytes for cut in want.cuts) for want in wanted}


def test_a_rank_reads_its_part(engine, sharded, tensors):
    total = sum(tensor.nbytes for tensor in tensors.values())
    replicated = ("norm", "gate.weight", "shared_expert_gate", "k_proj", "v_proj", "embed_tokens")
    for rank in range(4):
        source = Shards(sharded)
        model = local_model(engine, rank, 4, source)
        print(f"rank {rank} of 4 reads {source.bytes_read} of {total} bytes")
        assert source.bytes_read < 0.32 * total
        for name, count in read_by(model, tensors, rank, 4).items():
            if not any(part in name for part in replicated):
                assert 4 * count == tensors[name].nbytes, name
    one = Shards(sharded)
    local_model(engine, 0, 1, one)
    assert one.bytes_read == total


def test_ranks_together_hold_the_experts_and_joined_matrices(engine, sharded, tensors):
    ranks = [local_model(engine, rank, 2, Shards(sharded)) for rank in range(2)]
    experts = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    halves = [rank.model.layers[0].mlp.w13.split(16, dim=1) for rank in ranks]
    assert torch.equal(torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=1), experts)
    down = torch.cat([rank.model.layers[0].mlp.w2 for rank in ranks], dim=2)
    assert torch.equal(down, tensors["model.layers.0.mlp.experts.down_proj"])
    q, k, v = tensors["model.layers.0.linear_attn.conv1d.weight"].squeeze(1).split(64)
    for rank, half in zip(ranks, (slice(32), slice(32, 64)), strict=True):
        assert torch.equal(rank.model.layers[0].linear_attn.conv_weight, torch.cat([q[half], k[half], v[half]]))
        assert torch.equal(rank.model.layers[0].linear_attn.A_log,
                           tensors["model.layers.0.linear_attn.A_log"].chunk(2)[half.start is not None])
    words = torch.cat([rank.lm_head.weight for rank in ranks])
    assert torch.equal(words[:131], tensors["lm_head.weight"]) and not words[131:].any()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layers_get_what_stocks_own_loaders_give_them(engine, ranks):
    """All kinds of stock layers, biases too, from matrices one by one and joined."""
    cases = [(lambda: stock.ReplicatedLinear(12, 8), ((), ), 8, 12), (lambda: stock.ColumnParallelLinear(12, 8), ((), ),
                                                                     8, 12),
             (lambda: stock.RowParallelLinear(8, 12), ((), ), 12, 8),
             (lambda: stock.MergedColumnParallelLinear(12, [8, 16, 4]), ((0, 8), (1, 16), (2, 4)), 28, 12),
             (lambda: stock.QKVParallelLinear(12, 6, 8, 2), (("q", 48), ("k", 12), ("v", 12)), 72, 12)]
    for rank in range(ranks):
        for make, parts, outputs, inputs in cases:
            with as_rank(rank, ranks):
                one, other, joined = make(), make(), make()
                weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
                found = {"all.weight": weight, "all.bias": bias}
                load_checkpoint(found.items(), linear("all", joined, outputs, inputs), {}, ())
                first, wanted = 0, []
                for part in parts:
                    shard, rows = part or (None, outputs)
                    piece = {"weight": weight[first:first + rows], "bias": bias[first:first + rows]}
                    first += rows
                    found = {f"{shard}.{key}": tensor for key, tensor in piece.items()}
                    wanted = linear(str(shard), one, rows, inputs, *([] if shard is None else [shard]))
                    load_checkpoint(found.items(), wanted, {}, ())
                    for key, param in other.named_parameters():
                        param.weight_loader(param, piece[key], *([] if shard is None else [shard]))
            for (key, right), a, b in zip(other.named_parameters(), one.parameters(), joined.parameters(),
                                          strict=True):
                assert torch.equal(a, right) and torch.equal(b, right), (type(other).__name__, key, rank, ranks)


def resident():
    with open("/proc/self/status", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return (int(found["RssAnon"].split()[0]) + int(found["RssFile"].split()[0])) * 1024


def test_memory_is_the_model_and_one_shard(tmp_path):
    count, size = 6, 16 * MB
    tensors = {f"t{index}": torch.full((4, size // 16), float(index)) for index in range(count)}
    write_shards(tmp_path, tensors, count, {})
    del tensors
    places = [torch.zeros(4, size // 16) for _ in range(count)]
    seen = []

    def load(index, piece):
        places[index].copy_(piece)
        seen.append(resident())

    before = resident()
    source = Shards(tmp_path)
    wanted = [Wanted(f"t{index}", (4, size // 16), lambda piece, index=index: load(index, piece))
              for index in range(count)]
    load_checkpoint(source, wanted, {}, ())
    assert [place[0, 0].item() for place in places] == list(range(count))
    print(f"{count} shards of {size // MB} MB: at most {(max(seen) - before) / MB:.1f} MB beside the weights, "
          f"{(resident() - before) / MB:.1f} MB afterwards")
    assert max(seen) - before < source.largest + 4 * MB
    assert resident() - before < 4 * MB


def test_a_piece_takes_no_more_memory_than_itself(tmp_path):
    write_shards(tmp_path, {"t": torch.ones(8 * MB, 2)}, 1, {})
    before, seen = resident(), []
    wanted = [Wanted("t", (8 * MB, 2), lambda piece: seen.append((float(piece.sum()), resident())),
                     cuts=((slice(MB), ), ))]
    source = Shards(tmp_path)
    load_checkpoint(source, wanted, {}, ())
    assert seen[0][0] == 2 * MB and source.bytes_read == 8 * MB
    assert seen[0][1] - before < 12 * MB, (seen[0][1] - before) / MB


def test_time_and_bytes_in_one_line_and_a_line_per_shard(model, sharded, lines):
    model.load_weights(Shards(sharded))
    size = sum((sharded / file).stat().st_size for file in os.listdir(sharded) if file.endswith("safetensors"))
    assert [line.split(",")[0] for line in lines[:-1]] == [f"Weights: shard {n} of 3" for n in (1, 2, 3)]
    assert lines[-1].startswith("Loaded weights in ") and f"of the checkpoint's {size / 1e9:.3f} GB read" in lines[-1]


def test_a_terminal_gets_a_bar_instead_of_lines(model, sharded, lines, monkeypatch, capsys):
    monkeypatch.setattr(shards.sys.stderr, "isatty", lambda: True, raising=False)
    model.load_weights(Shards(sharded))
    assert len(lines) == 1 and "Loading weights: 100%" in capsys.readouterr().err


def test_other_ranks_are_silent(engine, sharded, lines):
    local_model(engine, 1, 2, Shards(sharded))
    assert lines == []


def shard(folder, number=1):
    return sorted(folder.glob("*.safetensors"))[number]


def cut_short(folder):
    os.truncate(shard(folder), shard(folder).stat().st_size - 100)


def spoil_header(folder):
    data = bytearray(shard(folder).read_bytes())
    data[8:12] = b"nope"
    shard(folder).write_bytes(data)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_shard(folder, change, number=1):
    tensors = load_file(shard(folder, number))
    change(tensors)
    save_file(tensors, shard(folder, number), metadata={"format": "pt"})


DOWN, NORM = "model.layers.1.mlp.experts.down_proj", "model.norm.weight"


def holder(folder, name):
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    return sorted(path.name for path in folder.glob("*.safetensors")).index(file)


@pytest.mark.parametrize("damage, message", [
    (cut_short, "model-00002-of-00003.safetensors has .* bytes and its header says .*; fetch it again"),
    (lambda f: os.truncate(shard(f), 0), "model-00002-of-00003.safetensors is no safetensors file: 0 bytes"),
    (lambda f: shard(f).write_bytes(b"<html>Not found, try later</html>"), "is no safetensors file: 33 bytes"),
    (spoil_header, "model-00002-of-00003.safetensors has a damaged header"),
    (lambda f: shard(f).unlink(), "names 3 shards, of which 1 are missing: model-00002-of-00003.safetensors; fetch"),
    (lambda f: edit_index(f, lambda m: m.update({NORM: "other.safetensors"})),
     "names 4 shards, of which 1 are missing: other.safetensors"),
    (lambda f: edit_index(f, lambda m: m.update({"x": "model-00001-of-00003.safetensors"})),
     f"{INDEX} says that x is in model-00001-of-00003.safetensors, which does not hold it"),
    (lambda f: (f / INDEX).write_text("{"), "is no index of a checkpoint"),
    (lambda f: (f / INDEX).write_text("[]"), "is no index of a checkpoint"),
    (lambda f: [edit_shard(f, lambda t: t.update({NORM: torch.ones(64)}), number) for number in range(3)],
     f"checkpoint tensor {NORM} is both in model-00001-of-00003.safetensors and in model-00002-of-00003.safetensors"),
    (lambda f: edit_shard(f, lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}), holder(f, DOWN)),
     f"checkpoint tensor {DOWN} is int8, the model needs a float of 16 bits or more; a quantised checkpoint must say"),
    (lambda f: edit_shard(f, lambda t: t.update({DOWN: t[DOWN].to(torch.float8_e4m3fn)}), holder(f, DOWN)),
     f"checkpoint tensor {DOWN} is float8_e4m3fn, the model needs a float of 16 bits"),
    (lambda f: edit_shard(f, lambda t: t.update({DOWN: torch.ones(4, 64, 16)}), holder(f, DOWN)),
     rf"checkpoint tensor {DOWN} has shape \(4, 64, 16\), the model needs \(4, 64, 32\)"),
])
def test_what_is_damaged_is_named_before_anything_is_read(model, broken, damage, message, monkeypatch):
    damage(broken)
    monkeypatch.setattr(shards, "safe_open", lambda *_, **__: pytest.fail("a shard was read"))
    with pytest.raises(CheckpointError, match=message) as caught:
        model.load_weights(Shards(broken))
    assert "\n" not in str(caught.value)


def test_the_loader_says_it_too_and_folders_without_weights_are_stocks_affair(broken):
    cut_short(broken)
    with pytest.raises(CheckpointError, match="fetch it again"):
        make_engine(broken)
    for path in broken.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="3 shards, of which 3 are missing"):
        make_engine(broken)
    (broken / INDEX).unlink()
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        make_engine(broken)


def test_shards_without_an_index_and_files_beside_the_index(model, broken):
    save_file({"optimiser": torch.ones(1)}, broken / "zz.safetensors")
    model.load_weights(Shards(broken))
    (broken / INDEX).unlink()
    with pytest.raises(CheckpointError, match="1 unknown tensor: optimiser"):
        model.load_weights(Shards(broken))
    (broken / "zz.safetensors").unlink()
    model.load_weights(Shards(broken))


def test_other_models_get_whole_tensors(engine, sharded):
    """The seam is for models that ask for shards."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.loader import get_model_loader
    loader = get_model_loader(LoadConfig())
    for asks, kind in ((True, Shards), (False, object)):
        found = loader._get_all_weights(engine.model_config, SimpleNamespace(reads_shards=asks))
        assert isinstance(found, kind) and isinstance(found, Shards) is asks
    name, tensor = next(iter(found))
    assert isinstance(tensor, torch.Tensor) and name


def test_a_quantised_checkpoint_goes_through_stocks_loaders():
    """Whole tensors; a joined one is cut in the proportion of its matrices, packed along the output or not."""

    class Packed(stock.UnquantizedLinearMethod):
        pass

    given = []
    layer = stock.MergedColumnParallelLinear(12, [8, 16, 8], bias=False)
    layer.quant_method = Packed()
    # A stock parameter takes no second loader.
    del layer.weight.weight_loader
    layer.weight.weight_loader = lambda param, tensor, *shard: given.append((tensor.tolist(), *shard))
    tensor = torch.arange(4)[:, None]
    load_checkpoint([("x.weight", tensor[:1])], linear("x", layer, 8, 12, 2), {}, ())
    load_checkpoint([("y.weight", tensor[:3])], linear("y", layer, 24, 12, 0, 1), {}, ())
    assert given == [([[0]], 2), ([[0]], 0), ([[1], [2]], 1)]
