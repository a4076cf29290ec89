"""The multi-token-prediction head: against a written-out float32 reference; in the published names; where absent."""
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import as_rank, four_rank_config, write_shards
from tests.helpers.tiny_models import make_engine, model_of, rows_stay
from vllm.model_executor.models import qwen3_5
from vllm.overlay.attention.paged_backend import PagedTorchBackend, PagedTorchMetadata
from vllm.overlay.model import checkpoint
from vllm.overlay.model.checkpoint import CheckpointError
from worklogs.random_checkpoint import write_checkpoint

HIDDEN, HEADS, KV_HEADS, HEAD, EXPERTS, INNER, SHARED, EPS = 64, 4, 2, 16, 4, 32, 48, 1e-6
# As the published index spells them.
SHAPES = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "pre_fc_norm_embedding.weight": (HIDDEN, ),
    "pre_fc_norm_hidden.weight": (HIDDEN, ),
    "norm.weight": (HIDDEN, ),
    "layers.0.input_layernorm.weight": (HIDDEN, ),
    "layers.0.post_attention_layernorm.weight": (HIDDEN, ),
    "layers.0.self_attn.q_proj.weight": (2 * HEADS * HEAD, HIDDEN),
    "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "layers.0.self_attn.q_norm.weight": (HEAD, ),
    "layers.0.self_attn.k_norm.weight": (HEAD, ),
}
MOE = {
    "layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
    "layers.0.mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
    "layers.0.mlp.experts.down_proj": (EXPERTS, HIDDEN, INNER),
    "layers.0.mlp.shared_expert.gate_proj.weight": (SHARED, HIDDEN),
    "layers.0.mlp.shared_expert.up_proj.weight": (SHARED, HIDDEN),
    "layers.0.mlp.shared_expert.down_proj.weight": (HIDDEN, SHARED),
    "layers.0.mlp.shared_expert_gate.weight": (1, HIDDEN),
}
DENSE = {f"layers.0.mlp.{name}_proj.weight": shape for name, shape in
         (("gate", (SHARED, HIDDEN)), ("up", (SHARED, HIDDEN)), ("down", (HIDDEN, SHARED)))}


def head_tensors(mlp, layers=1):
    generator = torch.Generator().manual_seed(3)
    shapes = {**SHAPES, **mlp}
    for layer in range(1, layers):
        shapes.update({name.replace("layers.0", f"layers.{layer}"): shape for name, shape in shapes.items()
                       if name.startswith("layers.0")})
    return {f"mtp.{name}": torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1]**-0.5)
            for name, shape in shapes.items()}


def one_by_one(tensors):
    found = dict(tensors)
    both = found.pop("mtp.layers.0.mlp.experts.gate_up_proj")
    down = found.pop("mtp.layers.0.mlp.experts.down_proj")
    for expert in range(EXPERTS):
        name = f"mtp.layers.0.mlp.experts.{expert}"
        found[f"{name}.gate_proj.weight"], found[f"{name}.up_proj.weight"] = both[expert].chunk(2)
        found[f"{name}.down_proj.weight"] = down[expert]
    return found


def dense_config():
    config = four_rank_config(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", intermediate_size=SHARED)
    return {name: value for name, value in config.items() if "expert" not in name and name != "moe_intermediate_size"}


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    """Tensors of a model without its head, mixture of experts and dense."""
    found = {}
    for kind, config in (("moe", four_rank_config()), ("dense", dense_config())):
        folder = tmp_path_factory.mktemp(kind) / "checkpoint"
        write_checkpoint(folder, config, seed=6)
        found[kind] = load_file(folder / "model.safetensors")
    return found


@pytest.fixture
def lines(monkeypatch):
    said = []
    for module in (checkpoint, qwen3_5):
        monkeypatch.setattr(module.logger, "info", lambda text, *values: said.append(text % values))
    return said


@pytest.fixture
def made(body, tmp_path, monkeypatch):
    """An engine over a checkpoint with the given head."""

    def make(kind, head, asked="1", layers=1, **fields):
        monkeypatch.setenv("VLLM_OVERLAY_MTP", asked)
        config = four_rank_config() if kind == "moe" else dense_config()
        config.update(mtp_num_hidden_layers=layers, **fields)
        write_shards(tmp_path, {**body[kind], **head}, 2, config)
        return make_engine(tmp_path, dtype="float32")

    return make


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + weight)


def rotate(x, positions, rotary):
    """x: [T, heads, size]; the first `rotary` of each head turn, halves against each other."""
    frequencies = 10000.0**(-torch.arange(0, rotary, 2) / rotary)
    angles = (positions[:, None] * frequencies)[:, None]
    a, b = x[..., :rotary // 2], x[..., rotary // 2:rotary]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), x[..., rotary:]), -1)


def attend(x, positions, w):
    count = x.shape[0]
    q_gate = (x @ w["self_attn.q_proj.weight"].T).view(count, HEADS, 2 * HEAD)
    q, gate = q_gate.split(HEAD, dim=-1)
    k = (x @ w["self_attn.k_proj.weight"].T).view(count, KV_HEADS, HEAD)
    v = (x @ w["self_attn.v_proj.weight"].T).view(count, KV_HEADS, HEAD)
    q = rotate(norm(q, w["self_attn.q_norm.weight"]), positions, HEAD // 2)
    k = rotate(norm(k, w["self_attn.k_norm.weight"]), positions, HEAD // 2)
    out = torch.zeros(count, HEADS, HEAD)
    for head in range(HEADS):
        mine = head // (HEADS // KV_HEADS)
        for t in range(count):
            scores = torch.softmax(k[:t + 1, mine] @ q[t, head] * HEAD**-0.5, 0)
            out[t, head] = scores @ v[:t + 1, mine]
    return (out * torch.sigmoid(gate)).flatten(1) @ w["self_attn.o_proj.weight"].T


def swiglu(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def mlp(x, w):
    if "mlp.gate.weight" not in w:
        return swiglu(x, *(w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))
    out = torch.zeros_like(x)
    for t, token in enumerate(x):
        weights, ids = torch.softmax(w["mlp.gate.weight"] @ token, 0).topk(2)
        for weight, expert in zip(weights / weights.sum(), ids, strict=True):
            gate, up = w["mlp.experts.gate_up_proj"][expert].chunk(2)
            out[t] += weight * swiglu(token, gate, up, w["mlp.experts.down_proj"][expert])
    shared = swiglu(x, *(w[f"mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
    return out + torch.sigmoid(x @ w["mlp.shared_expert_gate.weight"].T) * shared


def written_out(head, embedding, hidden, following, positions, layer=0):
    """The head in plain float32 over one sequence."""
    top = {name.removeprefix("mtp."): tensor for name, tensor in head.items()}
    w = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in top.items()}
    x = torch.cat((norm(embedding[following], top["pre_fc_norm_embedding.weight"]),
                   norm(hidden, top["pre_fc_norm_hidden.weight"])), -1) @ top["fc.weight"].T
    x = x + attend(norm(x, w["input_layernorm.weight"]), positions, w)
    x = x + mlp(norm(x, w["post_attention_layernorm.weight"]), w)
    return norm(x, top["norm.weight"])


def metadata(context, length):
    """A piece of `length` tokens after `context` others, in blocks 1, 2, ... of 16."""
    total = context + length
    tables = torch.arange(1, 1 + -(-total // 16), dtype=torch.int32)[None]
    return PagedTorchMetadata(num_prefills=1, num_prefill_tokens=length, num_decode_tokens=0,
                              slot_mapping=16 + torch.arange(context, total), seq_lens=[total], block_tables=tables,
                              query_starts=[0, length])


def predict(model, hidden, following, pieces, step=0):
    cache = torch.zeros(PagedTorchBackend.get_kv_cache_shape(8, 16, KV_HEADS, HEAD))
    found, at = [], 0
    for length in pieces:
        rows = slice(at, at + length)
        found.append(model.predict_next(hidden[rows], following[rows], torch.arange(at, at + length), cache,
                                        metadata(at, length), step))
        at += length
    return torch.cat(found)


@pytest.mark.parametrize("kind, mlp_shapes, layout", [("moe", MOE, dict), ("moe", MOE, one_by_one),
                                                      ("dense", DENSE, dict)])
def test_equals_the_written_out_head(made, body, kind, mlp_shapes, layout):
    head = head_tensors(mlp_shapes)
    model = model_of(made(kind, layout(head)))
    torch.manual_seed(0)
    hidden, following = 3 * torch.randn(21, HIDDEN), torch.randint(0, 131, (21, ))
    right = written_out(head, body[kind]["model.embed_tokens.weight"], hidden, following, torch.arange(21))
    for pieces in ([21], [16, 4, 1]):
        found = predict(model, hidden, following, pieces)
        error = ((found - right).abs().max() / right.abs().max()).item()
        print(f"{kind} in pieces {pieces}: relative error {error:.1e}")
        assert error < 1e-5


def test_a_swapped_half_or_a_shifted_position_would_be_seen(made, body):
    head = head_tensors(DENSE)
    model = model_of(made("dense", head))
    hidden, following = torch.randn(9, HIDDEN), torch.randint(0, 131, (9, ))
    found = predict(model, hidden, following, [9])
    embedding = body["dense"]["model.embed_tokens.weight"]
    swapped = {**head, "mtp.fc.weight": head["mtp.fc.weight"].roll(HIDDEN, 1)}
    for wrong in (written_out(swapped, embedding, hidden, following, torch.arange(9)),
                  written_out(head, embedding, hidden, following.roll(1), torch.arange(9))):
        assert (found - wrong).abs().max() > 0.1


def test_further_tokens_go_round_the_layers(made, body):
    head = head_tensors(DENSE, layers=2)
    model = model_of(made("dense", head, layers=2))
    embedding = body["dense"]["model.embed_tokens.weight"]
    hidden, following = torch.randn(5, HIDDEN), torch.randint(0, 131, (5, ))
    for step in range(4):
        right = written_out(head, embedding, hidden, following, torch.arange(5), step % 2)
        found = predict(model, hidden, following, [5], step)
        assert (found - right).abs().max() < 1e-4, step


def test_not_asked_for_it_costs_nothing_and_says_so(made, lines):
    engine = made("dense", head_tensors(DENSE), asked="0")
    model = model_of(engine)
    assert model.mtp is None and not any("mtp" in name for name, _ in model.named_parameters())
    why = "the multi-token-prediction head is not asked for, VLLM_OVERLAY_MTP=1 loads it"
    assert f"Skipped checkpoint tensors under mtp.* ({len(SHAPES) + len(DENSE)}): {why}" in lines
    with pytest.raises(ValueError, match="no multi-token-prediction head is loaded: .* is not asked for"):
        predict(model, torch.ones(1, HIDDEN), torch.ones(1, dtype=torch.int64), [1])


def test_asked_for_and_absent(made, lines):
    model = model_of(made("dense", {}))
    assert model.mtp is None
    assert "Skipped the multi-token-prediction head: the checkpoint has no mtp.*" in lines


def test_asked_for_and_not_in_the_configuration(made, lines):
    assert model_of(made("dense", head_tensors(DENSE), layers=0)).mtp is None
    assert f"Skipped checkpoint tensors under mtp.* ({len(SHAPES) + len(DENSE)}): the configuration has no " \
           "mtp_num_hidden_layers" in lines


def test_a_part_of_a_head_is_no_head(made):
    head = head_tensors(DENSE)
    del head["mtp.norm.weight"]
    with pytest.raises(CheckpointError, match="1 missing tensor: mtp.norm.weight"):
        made("dense", head)


def test_an_embedding_of_its_own_is_refused(made):
    with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings is not supported"):
        made("dense", head_tensors(DENSE), mtp_use_dedicated_embeddings=True)


def test_ranks_split_the_head_as_other_layers(made):
    head = head_tensors(MOE)
    with rows_stay():
        engine = made("moe", head)
    whole = model_of(engine).mtp
    halves = []
    for rank in range(2):
        with as_rank(rank, 2):
            model = qwen3_5.Qwen3_5MoeForCausalLM(engine.model_config.hf_config, engine.cache_config)
            checkpoint.load_checkpoint(head.items(), model.mtp.wanted("mtp"), {}, ())
        halves.append(model.mtp)
    mixers = [half.layers[0] for half in halves]
    assert all(torch.equal(half.fc.weight, whole.fc.weight) for half in halves)
    for name, dim in (("self_attn.o_proj.weight", 1), ("mlp.w2", 2), ("mlp.shared_expert.down_proj.weight", 1)):
        joined = torch.cat([mixer.get_parameter(name) for mixer in mixers], dim)
        assert torch.equal(joined, whole.layers[0].get_parameter(name)), name
