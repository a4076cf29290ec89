"""What fits, by the predecessor's records, by the submitted settings, and on the command line."""
import json
import logging
import math
from pathlib import Path

import pytest
import torch
import yaml

from vllm.overlay.plan.__main__ import main, read_config
from vllm.overlay.plan.memory import GIB, PlanError, Wish, advice, plan, settle
from vllm.overlay.runtime.byte_size import size

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "worklogs/model"
CARD = int(31.72 * GIB)


def wish(**fields) -> Wish:
    return Wish(**{"config": read_config(MODEL), "dtype": torch.float16, "memory": CARD, "utilization": 0.9, "ranks": 4,
                   "max_model_len": 262_144, "max_num_seqs": 8, "max_num_batched_tokens": 16_384, **fields})


def predecessor(tokens: int, **fields) -> Wish:
    """With 40 layers counted for KV, as the predecessor's vLLM did; what fits his two records beside the weights."""
    return wish(kv_layers=40, weights=16_200_000_000, slot=0, token_bytes=118_800, fixed=1_987_000_000,
                max_num_batched_tokens=tokens, **fields)


def test_the_predecessors_records():
    """24,576 tokens per step left 233,056 tokens of KV, 32,768 left 209,296. From these alone: how much a token of a
    step takes, what is fixed, and then that 16,384 start with a context of 245,000, and 24,576 do not."""
    recorded = {24_576: 233_056, 32_768: 209_296}
    assert plan(predecessor(1)).kv_token == 40_960
    spent = {tokens: CARD * 0.9 - 16.2e9 - kv * 40_960 for tokens, kv in recorded.items()}
    slope = (spent[32_768] - spent[24_576]) / 8_192
    fixed = spent[24_576] - slope * 24_576
    assert math.isclose(slope, 118_800, rel_tol=1e-3) and math.isclose(fixed, 1.987e9, rel_tol=1e-3), (slope, fixed)
    for tokens, kv in recorded.items():
        assert abs(plan(predecessor(tokens)).capacity - kv) < 64, (tokens, plan(predecessor(tokens)).capacity)
    found = plan(predecessor(16_384))
    print(f"16,384 tokens per step: capacity {found.capacity}")
    assert abs(found.capacity - 256_800) < 100
    assert plan(predecessor(16_384, max_model_len=245_000)).fits
    assert not plan(predecessor(24_576, max_model_len=245_000)).fits
    assert not found.fits, "262,144 did not"
    assert plan(predecessor(16_384, max_model_len=245_000)._replace(kv_layers=10)).capacity > 4 * 256_000


def test_the_submitted_settings(capsys):
    """computility-run.yaml on the platform's card: the whole context fits, with 10 layers of KV, and checkpoints beside
    it."""
    command = yaml.safe_load((ROOT / "computility-run.yaml").read_text())["command"]
    names = ("--max-model-len", "--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens", "--dtype")
    given = [text for name in names for text in (name, command[command.index(name) + 1])]
    arguments = ["--config", str(MODEL), "--tp", command[command.index("-tp") + 1], "--memory", "31.72GiB", *given]
    arguments += [text for text in ("--enable-prefix-caching", ) if text in command]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["kv_token"] == 10_240 and found["max_num_seqs"] == 8
    assert found["capacity"] > 2.5 * 262_144, found["capacity"]
    assert found["budget"] == sum(found[name] for name in ("weights", "states", "checkpoints", "workspace", "fixed",
                                                           "kv"))
    # A tenth of what would be KV, and 8 GiB on the host.
    assert found["checkpoints"] == found["num_checkpoints"] * found["slot"] > 50 * found["slot"]
    assert 0 < (found["kv"] + found["checkpoints"]) / 10 - found["checkpoints"] < found["slot"]
    assert found["num_host_checkpoints"] == 8 * GIB // found["slot"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 7 and "x max_model_len 262144" in table, table
    counts = f"{found['num_checkpoints']} of 15.4 MiB; {found['num_host_checkpoints']} on the host, 7.99 GiB"
    assert counts in table, table
    print(table)


def test_what_to_change_is_enough_and_not_too_much():
    """Each proposal, followed, fits; one step further does not."""
    small = wish(memory=26 * GIB, max_num_batched_tokens=65_536)
    with pytest.raises(PlanError) as caught:
        settle(small._replace(max_num_seqs=1))
    message = str(caught.value)
    assert "\n" not in message and "max_model_len 262144" in message, message
    proposals = advice(small._replace(max_num_seqs=1))
    assert all(proposal in message for proposal in proposals) and len(proposals) == 4, message
    fields = {"--max-num-batched-tokens": ("max_num_batched_tokens", int, 256),
              "--max-model-len": ("max_model_len", int, 16),
              "--gpu-memory-utilization": ("utilization", float, -0.01), "--quantization": ("quantization", str, None)}
    for proposal in proposals:
        _, option, *_, value = proposal.split()
        name, kind, step = fields[option]
        followed = small._replace(max_num_seqs=1, **{name: kind(value)})
        assert plan(followed).fits, proposal
        if step is not None:
            assert not plan(followed._replace(**{name: kind(value) + step})).fits, proposal


def test_sequences_are_lowered_as_far_as_needed():
    """256 sequences, stock's default, want 4 GB of states on each card."""
    many = wish(max_num_seqs=2_000)
    assert not plan(many).fits
    found = settle(many)
    assert 1 < found.wish.max_num_seqs < 2_000 and found.fits
    assert not plan(many._replace(max_num_seqs=found.wish.max_num_seqs + 1)).fits
    assert settle(wish()).wish.max_num_seqs == 8


def with_checkpoints(**fields) -> Wish:
    return wish(**{"prefix_caching": True, **fields})


def test_checkpoints_where_nobody_said_how_many():
    """A tenth of what is left for KV, never what one context needs, and none without prefix caching; on the host an
    eighth of what is free, all ranks together a half, and none without one on the device."""
    none, some = plan(wish()), plan(with_checkpoints(host_memory=256 * GIB))
    assert none.num_checkpoints == none.num_host_checkpoints == none.checkpoints == 0
    assert some.num_checkpoints == none.kv // 10 // some.slot and some.kv == none.kv - some.num_checkpoints * some.slot
    assert some.num_host_checkpoints == 8 * GIB // some.slot
    for free, ranks, expected in ((64, 4, 8), (32, 4, 4), (32, 8, 2), (0, 4, 0)):
        host = plan(with_checkpoints(host_memory=free * GIB, ranks=ranks))
        assert host.num_host_checkpoints == expected * GIB // host.slot, (free, ranks)
    # One context is what must stay; what is left above it is less than a tenth here.
    context = -(-262_144 // 16) * 16 * none.kv_token
    tight = none.wish._replace(memory=int((none.wish.budget - none.kv + context + 10 * none.slot) / 0.9) + 1)
    assert plan(tight).fits and plan(tight._replace(prefix_caching=True)).num_checkpoints == 10
    assert plan(tight._replace(prefix_caching=True)).fits
    tighter = plan(tight._replace(prefix_caching=True, memory=tight.memory - int(10 * none.slot / 0.9)))
    assert tighter.num_checkpoints == tighter.num_host_checkpoints == 0


def test_checkpoints_on_a_cpu():
    """At most 2 GiB, at most one for each 64 tokens of KV that there will be, none beside them."""
    cpu = {"device_type": "cpu", "utilization": 1.0, "ranks": 1, "memory": 128 * GIB}
    found = plan(with_checkpoints(**cpu))
    assert found.num_checkpoints == 2 * GIB // found.slot and found.num_host_checkpoints == 0
    for given, expected in ((6_400, 108), (64, 9)):
        few = plan(with_checkpoints(**cpu, kv_tokens=given, max_num_seqs=8))
        assert few.num_checkpoints == min(expected, 2 * GIB // found.slot), given
    both = plan(with_checkpoints(**cpu, checkpoint_memory=3 * GIB, checkpoint_host_memory=GIB))
    assert both.kv == found.kv + found.checkpoints - both.checkpoints, "on a CPU both lie in one memory"
    assert both.checkpoints == (3 * GIB // found.slot + GIB // found.slot) * found.slot


def test_checkpoints_give_way_before_sequences_do():
    """A size that was asked for is lowered as far as needed; only when none are left, sequences are."""
    asked = with_checkpoints(checkpoint_memory=20 * GIB, host_memory=64 * GIB)
    assert not plan(asked).fits
    found = settle(asked)
    assert found.fits and found.wish.max_num_seqs == 8 and 0 < found.num_checkpoints * found.slot < 20 * GIB
    assert not plan(found.wish._replace(checkpoint_memory=(found.num_checkpoints + 1) * found.slot)).fits
    many = settle(asked._replace(max_num_seqs=2_000))
    assert many.fits and many.num_checkpoints == many.num_host_checkpoints == 0
    assert many.wish.max_num_seqs == settle(wish(max_num_seqs=2_000)).wish.max_num_seqs
    with pytest.raises(PlanError) as caught:
        settle(asked._replace(memory=16 * GIB))
    with pytest.raises(PlanError) as without:
        settle(wish(memory=16 * GIB))
    assert str(caught.value) == str(without.value)
    exact = settle(with_checkpoints(checkpoint_memory=GIB, checkpoint_host_memory=2 * GIB))
    assert (exact.num_checkpoints, exact.num_host_checkpoints) == (GIB // exact.slot, 2 * GIB // exact.slot)
    for too_little in (0, exact.slot - 1):
        nothing = settle(with_checkpoints(checkpoint_memory=too_little, checkpoint_host_memory=2 * GIB))
        assert nothing.num_checkpoints == nothing.num_host_checkpoints == 0


def test_memory_that_others_have_taken():
    found = plan(wish(free=20 * GIB))
    assert found.wish.budget == 20 * GIB
    with pytest.raises(PlanError, match=r"of 17\.00 GiB that nothing else has taken of 31\.72 GiB, weights") as caught:
        settle(wish(free=17 * GIB))
    assert "utilization" not in str(caught.value), "more of the card would not help"


def test_weights_that_do_not_fit_at_all():
    with pytest.raises(PlanError, match=r"leaves 0 tokens of KV cache: give --quantization int8_weight_only$"):
        settle(wish(memory=16 * GIB))
    with pytest.raises(PlanError, match=r"leaves 0 tokens of KV cache: no single setting suffices: .*more ranks"):
        settle(wish(memory=8 * GIB))


def test_pictures_and_their_limit():
    largest, none = plan(wish(patches=65_536)), plan(wish(patches=0))
    assert largest.tower < GIB and largest.held == (16_384 + 16_384) * 2_048 * 2
    assert largest.kv < none.kv and none.tower == none.held == 0
    assert {part.name for part in none.parts} == {part.name for part in largest.parts}, "the tower is loaded anyhow"


@pytest.mark.parametrize("text, expected", [("32GiB", 32 << 30), ("31.72 gib", int(31.72 * (1 << 30))),
                                            ("2GB", 2 * 10**9), ("1e9", 10**9), ("512MiB", 512 << 20), ("7", 7),
                                            ("0", 0)])
def test_sizes(text, expected):
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1.2.3", "2 GiBi", "GiB", ".", "1e400"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="is no size such as 31.72GiB or 16.2GB$"):
        size(text)


def run(capsys, *arguments: str) -> tuple[int, str]:
    """Exit status and what stood on stderr."""
    try:
        status = main(["--config", str(MODEL), "--memory", "31.72GiB", *arguments])
    except SystemExit as error:
        status = error.code
    return status, capsys.readouterr().err


def test_the_command_line(capsys, tmp_path):
    status, error = run(capsys, "--tp", "4", "--dtype", "float16", "--max-num-batched-tokens", "400000")
    assert status == 1 and error.count("\n") == 1 and "lower --max-num-batched-tokens to" in error, error
    status, error = run(capsys, "--tp", "4", "--max-num-seqs", "3000", "--max-num-batched-tokens", "3000")
    assert status == 0 and "would be lowered to" in error, error
    status, error = run(capsys, "--tp", "4", "--dtype", "float16", "--max-num-seqs", "8", "--enable-prefix-caching",
                        "--checkpoint-memory", "20GiB")
    assert status == 0 and error.startswith("plan: --checkpoint-memory 20.00 GiB is more than KV leaves room"), error
    status, error = run(capsys, "--tp", "3")
    assert (status, error.splitlines()[-1][:42]) == (2, "plan: tensor parallel size 3 does not divi"), error
    for wrong, words in ((["--tp", "0"], "--tp must be at least 1, got 0"),
                         (["--gpu-memory-utilization", "1.5"], "above 0 and at most 1, got 1.5"),
                         (["--kv-layers", "some"], "--kv-layers must be a number or 'all', got 'some'"),
                         (["--memory", "lots"], "'lots' is no size such as 31.72GiB"),
                         (["--checkpoint-memory", "-1"], "'-1' is no size such as 31.72GiB"),
                         (["--checkpoint-host-memory", "1XB"], "'1XB' is no size such as 31.72GiB"),
                         (["--config", str(tmp_path)], "No such file")):
        status, error = run(capsys, *wrong)
        assert status == 2 and words in error.splitlines()[-1], error
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    status, error = run(capsys, "--config", str(tmp_path))
    assert status == 2 and "model_type must be one of qwen3_5," in error, error
    (tmp_path / "config.json").write_text('{"model_type')
    assert run(capsys, "--config", str(tmp_path))[0] == 2


def test_a_refused_plan_is_logged_without_its_traceback(monkeypatch):
    from vllm.overlay.serving import engine_process
    levels = []
    monkeypatch.setattr(engine_process.logger, "log", lambda level, *_, **__: levels.append(level))
    engine_process.log_failure(PlanError("too little memory"))
    engine_process.log_failure(ValueError("a fault"))
    assert levels == [logging.DEBUG, logging.ERROR]
