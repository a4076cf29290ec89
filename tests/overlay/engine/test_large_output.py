"""Requests for very long outputs yield: whom a scheduler looks at first, and who gives a place away."""

from __future__ import annotations

import pytest

from tests.helpers import tiny_models
from tests.helpers.tiny_models import add, greedy, make_engine, prompt, run
from vllm.overlay.engine.large_output import TURN_S, LargeOutputs

LONG = 300


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return tiny_models.make_qwen2(tmp_path_factory.mktemp("qwen2"))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make(qwen2):
    """Makes an engine with a clock of its own."""
    def engine(**arguments):
        made = make_engine(qwen2, **{"max_num_seqs": 2, "enable_prefix_caching": True, **arguments})
        clock = Clock()
        made.scheduler[0]._large_outputs = LargeOutputs(clock)
        return made, clock

    return engine


def large(**fields):
    params = greedy(**{"max_tokens": LONG, **fields})
    params.large_output = True
    return params


def step_until(engine, wanted: str, limit: int = 400) -> dict[str, int]:
    """Steps until a request is finished; the tokens that every request had by then."""
    counts: dict[str, int] = {}
    for _ in range(limit):
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
            if output.request_id == wanted and output.finished:
                return counts
    raise AssertionError(f"{wanted} was not finished within {limit} steps: {counts}")


def running(engine) -> list[str]:
    return [group.request_id for group in engine.scheduler[0].running]


def steps(engine, count: int) -> dict:
    last = {}
    for _ in range(count):
        for output in engine.step():
            last[output.request_id] = output
    return last


def test_one_that_has_had_its_turn_gives_its_place_to_another(make):
    """And is computed again later, with the same tokens as undisturbed."""
    engine, clock = make()
    prompts = [prompt(60, seed=seed) for seed in range(3)]
    undisturbed = [run(engine, [one], greedy(LONG))[0].outputs[0].token_ids for one in prompts[:2]]
    for i in range(2):
        add(engine, f"large{i}", prompts[i], large())
    steps(engine, 20)
    add(engine, "short", prompts[2], greedy(5))
    steps(engine, 20)
    assert set(running(engine)) == {"large0", "large1"}, "a turn is not cut short"
    clock.now += TURN_S
    counts = step_until(engine, "short", limit=20)
    assert counts["short"] == 5 and counts["large0"] > 20
    assert running(engine)[0] == "large0", "the one that came last gives its place away"
    final = {}
    while engine.has_unfinished_requests():
        final.update({output.request_id: output for output in engine.step()})
    assert [final[f"large{i}"].outputs[0].token_ids for i in range(2)] == undisturbed


def test_they_wait_behind_the_others_but_not_for_ever(make):
    engine, clock = make(max_num_seqs=1)
    add(engine, "first", prompt(40, seed=0), greedy(3))
    add(engine, "large", prompt(40, seed=1), large())
    for i in range(3):
        add(engine, f"short{i}", prompt(40, seed=2 + i), greedy(3))
    for i in range(2):
        assert "large" not in step_until(engine, f"short{i}")
    # It has waited long enough: who comes from now on comes behind it.
    clock.now += TURN_S
    add(engine, "late", prompt(40, seed=9), greedy(3))
    assert "large" not in step_until(engine, "short2")
    steps(engine, 3)
    assert running(engine) == ["large"]
    assert [group.request_id for group in engine.scheduler[0].waiting] == ["late"]


def test_they_are_the_first_to_be_preempted(make):
    """When KV memory runs out it is they who are computed again, though others came later."""
    engine, _ = make(max_num_seqs=3, num_gpu_blocks_override=24, max_model_len=384, enable_prefix_caching=False)
    preempted = []
    scheduler = engine.scheduler[0]
    original = scheduler._preempt
    scheduler._preempt = lambda group, *args: preempted.append(group.request_id) or original(group, *args)
    add(engine, "large", prompt(100, seed=0), large(max_tokens=250))
    steps(engine, 5)
    add(engine, "short", prompt(100, seed=1), greedy(150))
    assert step_until(engine, "short")["short"] == 150
    assert set(preempted) == {"large"}, preempted


def test_a_place_is_not_taken_for_nothing(make):
    """Where a place is free, or a prompt uses up each step, nobody is displaced."""
    engine, clock = make(max_num_seqs=3, max_num_batched_tokens=64)
    displaced = []
    scheduler = engine.scheduler[0]
    original = scheduler.displace
    scheduler.displace = lambda group: (displaced.append(group.request_id), original(group))
    for i in range(2):
        add(engine, f"large{i}", prompt(40, seed=i), large())
    steps(engine, 10)
    clock.now += TURN_S
    add(engine, "long prompt", prompt(900, seed=5), greedy(200))
    add(engine, "short", prompt(40, seed=6), greedy(3))
    steps(engine, 10)
    assert not displaced, displaced
    clock.now += TURN_S
    step_until(engine, "short")
    assert displaced == ["large1"]


def test_without_large_requests_the_queues_are_left_alone(make):
    engine, clock = make()
    scheduler = engine.scheduler[0]
    for i in range(5):
        add(engine, f"r{i}", prompt(40, seed=i), greedy(30))
    for _ in range(40):
        clock.now += TURN_S
        before = (list(scheduler.running), list(scheduler.waiting))
        scheduler._large_outputs.arrange(scheduler)
        assert (list(scheduler.running), list(scheduler.waiting)) == before
        engine.step()
    assert not scheduler._large_outputs._since


def test_nothing_is_remembered_of_who_is_gone(make):
    engine, clock = make()
    for i in range(4):
        add(engine, f"large{i}", prompt(40, seed=i), large(min_tokens=LONG))
    steps(engine, 5)
    clock.now += TURN_S
    add(engine, "short", prompt(40, seed=8), greedy(2))
    step_until(engine, "short")
    engine.abort_request([f"large{i}" for i in range(4)])
    add(engine, "last", prompt(40, seed=9), greedy(2))
    step_until(engine, "last")
    assert not engine.scheduler[0]._large_outputs._since
