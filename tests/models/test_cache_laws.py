"""Same request, same tokens, with the prefix cache of the hybrid model: random schedules of requests, aborts,
preemptions and failed steps (schedules.py), by one rank and by two.

Every finished request is held to what it gives alone, whole and without a cache. The negative controls show that a
restore that is dropped, or takes another checkpoint, is noticed.
"""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_models import assert_same, environment, greedy, make_engine, run
from tests.models.schedules import NEW, PROMPTS, beginnings, cached_engine, from_json, play
from vllm.overlay.hybrid import StatePool

SEEDS, LONG_SEEDS = range(40), range(40, 240)
PAIRS, LONG_PAIRS = range(3), range(3, 13)


@pytest.fixture(scope="module")
def alone(hybrid):
    engine = make_engine(hybrid, max_num_batched_tokens=1024)
    return run(engine, [each.ids for each in PROMPTS], greedy(NEW), together=False)


@pytest.fixture(scope="module")
def engine(hybrid):
    return cached_engine(hybrid)


def check(schedules, alone):
    """The law for each; returns what they had in common."""
    total = {"requests": 0, "cached": 0, "aborted": 0, "failed": 0, "preempted": 0, "ties": 0}
    for played in schedules:
        total["ties"] += assert_same(*beginnings(played, alone))
        total["requests"] += len(played.outputs)
        for name in ("cached", "aborted", "failed", "preempted"):
            total[name] += getattr(played, name)
    print(", ".join(f"{value} {name}" for name, value in total.items()))
    assert total["ties"] <= total["requests"] // 100
    return total


def check_one_rank(engine, seeds, alone):
    stats = engine.scheduler[0].cache_stats
    total = check((play(engine, seed) for seed in seeds), alone)
    assert min(total["aborted"], total["failed"], total["preempted"]) > len(seeds) / 4, total
    assert total["cached"] > 50 * total["requests"], total
    assert min(stats.evicted, stats.demoted, stats.dropped) > 0, stats


def test_random_schedules(engine, alone):
    check_one_rank(engine, SEEDS, alone)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_random_schedules(engine, alone):
    check_one_rank(engine, LONG_SEEDS, alone)


def two_ranks(model, seeds):
    done = subprocess.run([sys.executable, "-m", "tests.models.schedules", str(model), *map(str, seeds)],
                          env=environment(), text=True, capture_output=True, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("PLAYED "))
    return [from_json(played) for played in json.loads(line[len("PLAYED "):])]


def check_two_ranks(model, seeds, alone):
    total = check(two_ranks(model, seeds), alone)
    assert min(total["aborted"], total["preempted"]) > 0 and total["cached"] > 50 * total["requests"], total


def test_random_schedules_on_two_ranks(hybrid, alone):
    check_two_ranks(hybrid, PAIRS, alone)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_random_schedules_on_two_ranks(hybrid, alone):
    check_two_ranks(hybrid, LONG_PAIRS, alone)


def parted(engine, alone):
    """(how many requests restored something, how many of them do not hold the law)."""
    engine.scheduler[0].reset_prefix_cache()
    restored = wrong = 0
    for seed in range(4):
        played = play(engine, seed, fail=False)
        for (_, output), one, other in zip(played.outputs, *beginnings(played, alone), strict=True):
            if output.num_cached_tokens:
                restored += 1
                try:
                    assert_same([one], [other])
                except AssertionError:
                    wrong += 1
    engine.scheduler[0].reset_prefix_cache()
    return restored, wrong


def test_negative_control_nothing_is_restored(engine, alone, monkeypatch):
    """A live slot keeps what it held."""
    copy = StatePool._copy
    monkeypatch.setattr(StatePool, "_copy",
                        lambda pool, source, target: None if target < pool.num_live else copy(pool, source, target))
    restored, wrong = parted(engine, alone)
    assert restored > 10 and wrong > restored / 2, f"{wrong} of {restored} differ"


def test_negative_control_another_checkpoint(engine, alone, monkeypatch):
    """The neighbour's."""
    copy = StatePool._copy

    def mistaken(pool, source, target):
        if target < pool.num_live and source < pool.num_slots:
            source = pool.num_live + (source - pool.num_live + 1) % (pool.num_slots - pool.num_live)
        copy(pool, source, target)

    monkeypatch.setattr(StatePool, "_copy", mistaken)
    restored, wrong = parted(engine, alone)
    assert restored > 10 and wrong > restored / 2, f"{wrong} of {restored} differ"


def test_negative_control_what_was_moved_is_lost(engine, alone, monkeypatch):
    """A checkpoint that goes to the host arrives as zeros."""
    state = StatePool._state
    moved = StatePool.move

    def move(pool, source, target):
        moved(pool, source, target)
        for tensor in state(pool, target):
            tensor.zero_()

    monkeypatch.setattr(StatePool, "move", move)
    hits = engine.scheduler[0].cache_stats.demoted
    restored, wrong = parted(engine, alone)
    assert engine.scheduler[0].cache_stats.demoted > hits and wrong > 0, f"{wrong} of {restored} differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("chunk", [64, 1024])
def test_cold_and_warm_are_equal_to_the_bit(hybrid, dtype, chunk):
    """The same request alone on the server, for a hit at the prompt's last checkpoint."""
    one = cached_engine(hybrid, dtype=dtype, max_num_batched_tokens=chunk) if dtype == "float32" else make_engine(
        hybrid, dtype=dtype, max_num_batched_tokens=chunk, enable_prefix_caching=True, checkpoint_memory=1 << 20)
    for ids in [PROMPTS[index].ids for index in (0, 7, 13, 19)]:
        one.scheduler[0].reset_prefix_cache()
        (cold, ), (warm, ) = (run(one, [ids], greedy(NEW)) for _ in range(2))
        last = (len(ids) - 1) // 16 * 16
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, last if last >= 64 else 0)
        first, second = ([{token: entry.logprob for token, entry in place.items()}
                          for place in output.outputs[0].logprobs] for output in (cold, warm))
        assert first == second, f"prompt of {len(ids)} tokens"
