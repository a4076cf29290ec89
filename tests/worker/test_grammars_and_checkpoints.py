"""Grammars and restored states: a request that begins from a checkpoint, or is computed again beside one that is
missing, keeps to its grammar as if nothing had happened."""
import json
import shutil

import pytest
from transformers import AutoTokenizer

from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, prompt, run
from tests.helpers.tokenizer import added_token_ids, tokenizer_folder
from vllm.overlay.engine.step_failure import Refused
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.source import alone, json_part, regex_part
from vllm.sampling_params import SamplingParams

SMALL = 479
EOS = added_token_ids(SMALL)["<|im_end|>"]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
PERSON = Constraint(alone(json_part(SCHEMA, whitespace=" ?")))
LONG = prompt(260, seed=260)
# Of the toy model, in bytes.
SLOT = 2 * (64 * 2 + 64) * 4
FIELDS = {"skip_tokenizer_init": False, "max_num_batched_tokens": 64, "max_num_seqs": 4}
CACHED = {**FIELDS, "enable_prefix_caching": True, "checkpoint_memory": 40 * SLOT}


@pytest.fixture(scope="module")
def checkpoint(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "checkpoint"
    shutil.copytree(toy, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder(SMALL) / name, folder)
    return folder


def person(max_tokens: int = 120) -> SamplingParams:
    return greedy(max_tokens, constraint=PERSON, ignore_eos=False)


@pytest.fixture(scope="module")
def plain(checkpoint):
    """Alone, without a cache; in JSON."""
    outputs = run(make_engine(checkpoint, **FIELDS), [LONG], person())
    tokens = list(outputs[0].outputs[0].token_ids)
    assert tokens[-1] == EOS and len(tokens) > 24, tokens
    assert set(json.loads(AutoTokenizer.from_pretrained(checkpoint).decode(tokens[:-1]))) == {"name", "age"}
    return outputs


def pool_of(engine):
    return engine.model_executor.driver_worker.model_runner.state_pool


def stats(engine):
    return engine.scheduler[0].cache_stats


def test_from_a_checkpoint(checkpoint, plain):
    """Left by a request with a grammar or without, found by one with or without; several at once."""
    engine = make_engine(checkpoint, **CACHED)
    for tag, params in enumerate((person(), greedy(20), person(), greedy(20))):
        (output, ) = run(engine, [LONG], params, tag=str(tag))
        assert (output.num_cached_tokens or 0) == (256 if tag else 0), tag
        if params.constraint is not None:
            assert_same([output], plain)
    together = run(engine, [LONG] * 4, person())
    assert_same(together, plain * 4)
    assert [output.num_cached_tokens for output in together] == [256] * 4


@pytest.mark.parametrize("steps", [1, 6, 20])
def test_preempted_while_it_follows_its_grammar(checkpoint, plain, steps):
    """It goes on from the checkpoint that moved along with it, and the grammar where it was."""
    engine = make_engine(checkpoint, **CACHED)
    add(engine, "r", LONG, person())
    while not engine.scheduler[0].running or not engine.scheduler[0].running[0].get_seqs()[0].get_output_len():
        engine.step()
    for _ in range(steps):
        engine.step()
    (scheduler, ), hits = engine.scheduler, stats(engine).hit
    scheduler.displace(scheduler.running[0])
    assert_same([drain(engine)["r"]], plain)
    assert stats(engine).hit == hits + 1, "nothing was restored"


def test_beside_one_whose_checkpoint_is_missing(checkpoint, plain):
    """The step begins anew for all who were in it; their grammars go on."""
    engine = make_engine(checkpoint, **CACHED)
    run(engine, [LONG], greedy(1))
    other = prompt(200, seed=7)
    add(engine, "running", other, person(60))
    for _ in range(12):
        engine.step()
    pool_of(engine)._held.clear()
    add(engine, "restores", LONG, person())
    found = drain(engine)
    assert_same([found["restores"]], plain)
    assert found["restores"].num_cached_tokens == 0 and stats(engine).failures >= 1, stats(engine)
    alone_ = run(make_engine(checkpoint, **FIELDS), [other], person(60))
    assert_same([found["running"]], alone_)


# The only token that may come ends the output, which is too early.
FAILS = greedy(20, constraint=Constraint(alone(regex_part("[a-z]{1,8}!"))), ignore_eos=False, allowed_token_ids=[EOS])


@pytest.mark.parametrize("before", [0, 100, 260])
def test_an_output_that_cannot_be_kept_to_its_grammar_costs_nobody_a_checkpoint(checkpoint, plain, before):
    """What it has found and computed is as good as anybody's: the next one with its prompt begins there.

    before: tokens of its prompt that another one has computed before it. With 100 it takes its last checkpoint in the
    very step that fails.
    """
    engine = make_engine(checkpoint, **CACHED)
    if before:
        run(engine, [LONG[:before]], greedy(1))
    trusted, dropped = stats(engine).device_slots, stats(engine).dropped
    add(engine, "fails", LONG, FAILS)
    with pytest.raises(Refused, match="leaves no token"):
        drain(engine)
    assert stats(engine).device_slots >= trusted and stats(engine).dropped == dropped, stats(engine)
    (output, ) = run(engine, [LONG], person())
    assert_same([output], plain)
    assert output.num_cached_tokens == 256 and stats(engine).dropped == dropped, stats(engine)


def test_an_output_that_fails_beside_others(checkpoint, plain):
    """Who was in its steps, with the same beginning or another one, goes on, and leaves checkpoints as ever."""
    engine = make_engine(checkpoint, **CACHED)
    other = prompt(200, seed=7)
    add(engine, "other", other, person(60))
    add(engine, "fails", LONG, FAILS)
    add(engine, "same", LONG, person())
    with pytest.raises(Refused, match="leaves no token"):
        drain(engine)
    found = drain(engine)
    assert_same([found["same"]], plain)
    assert_same([found["other"]], run(make_engine(checkpoint, **FIELDS), [other], person(60)))
    again = run(engine, [LONG, other], greedy(1), tag="again")
    assert [output.num_cached_tokens for output in again] == [256, 192] and not stats(engine).dropped, stats(engine)
