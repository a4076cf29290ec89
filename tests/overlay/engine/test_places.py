"""Places are shared by requests, not by samples: on a scheduler without an engine."""

from types import SimpleNamespace

import pytest

from tests.core.groups import group
from tests.core.test_scheduler import finish, scheduler, step


def names(groups):
    return [one.request_id for one in groups]


class Many:
    """A request of several samples."""

    def __init__(self, one, name, samples, length=6, **fields):
        self.fanout = SimpleNamespace()
        for index in range(samples):
            added = group(range(length), request_id=f"{name}{index}", **fields)
            added.fanout = self.fanout
            one.add_seq_group(added)


def test_alone_it_uses_every_place():
    one = scheduler(slots=4, seqs=4, tokens=64)
    Many(one, "a", 6)
    assert list(step(one)) == ["a0", "a1", "a2", "a3"] and names(one.waiting) == ["a4", "a5"]
    finish(one, "a1")
    step(one)
    assert names(one.running) == ["a0", "a2", "a3", "a4"] and names(one.waiting) == ["a5"]


@pytest.mark.parametrize("slots", [0, 4])
def test_whoever_has_no_place_gets_one(slots):
    one = scheduler(slots=slots, seqs=4, tokens=64)
    Many(one, "a", 6)
    step(one)
    for name in ("x", "y", "z", "late"):
        one.add_seq_group(group(range(6), request_id=name))
    steps = [set(step(one)) for _ in range(8)]
    assert names(one.running) == ["a0", "x", "y", "z"], steps
    assert names(one.waiting) == ["late", "a4", "a5", "a3", "a2", "a1"], "each request keeps one"
    # At most a step to displace and one to compute the prompt, for each of them.
    assert "x" in steps[1] and "y" in steps[3] and "z" in steps[5], steps
    finish(one, "y")
    step(one)
    assert "late" in names(one.running)
    finish(one, "late")
    assert set(step(one)) == {"a0", "a4", "x", "z"}, "a place that nobody else wants"


def test_the_one_that_has_most_gives():
    one = scheduler(seqs=5, tokens=64)
    Many(one, "a", 2)
    Many(one, "b", 3)
    step(one)
    one.add_seq_group(group(range(6), request_id="x"))
    step(one), step(one)
    assert sorted(names(one.running)) == ["a0", "a1", "b0", "b1", "x"]


def test_two_of_them_share():
    """The second one's first sample gets a place; its others those that become free."""
    one = scheduler(seqs=4, tokens=64)
    Many(one, "a", 8)
    step(one)
    Many(one, "b", 8)
    step(one), step(one)
    assert names(one.running) == ["a0", "a1", "a2", "b0"]


def test_its_next_sample_waits_in_turn():
    """A request whose only place has become free stands in the queue as any other."""
    one = scheduler(seqs=1, tokens=64)
    Many(one, "a", 3)
    step(one)
    one.add_seq_group(group(range(6), request_id="x"))
    order = []
    for _ in range(4):
        order += names(one.running)
        finish(one, order[-1])
        step(one)
    assert order == ["a0", "a1", "x", "a2"], "it had come before x, and does not come before it twice"


def test_memory_too():
    one = scheduler(seqs=8, tokens=64, blocks=8)
    Many(one, "a", 3, length=8)
    step(one)
    one.add_seq_group(group(range(12), request_id="x"))
    for _ in range(3):
        step(one)
    assert names(one.running) == ["a0", "x"], names(one.running)


def test_not_while_a_prompt_is_computed():
    """The newcomer could not be computed: nothing would be gained."""
    one = scheduler(seqs=3, tokens=8, blocks=200)
    Many(one, "a", 2, length=4)
    step(one)
    one.add_seq_group(group(range(60), request_id="long"))
    step(one)
    one.add_seq_group(group(range(4), request_id="x"))
    while any(each.is_prefill() for each in one.running):
        assert len(one.running) == 3 and "x" not in step(one)
    step(one)
    assert "x" in step(one) and set(names(one.running)) == {"long", "a0", "x"}


@pytest.mark.parametrize(("priority", "admitted"), [(0, True), (5, True), (9, False)])
def test_priorities(priority, admitted):
    """Nothing is given back for a less urgent request, nor do a more urgent one's samples wait for it."""
    one = scheduler(seqs=2, tokens=64)
    one.scheduler_config.policy = "priority"
    Many(one, "a", 3, priority=5)
    step(one)
    one.add_seq_group(group(range(6), request_id="x", priority=priority))
    step(one), step(one)
    assert ("x" in names(one.running)) == admitted
    finish(one, "a0")
    step(one)
    assert ("x" in names(one.running)) == admitted and len(one.running) == 2


def test_what_is_held_back_can_be_aborted():
    one = scheduler(seqs=1, tokens=64)
    Many(one, "a", 3)
    one.add_seq_group(group(range(6), request_id="x"))
    step(one)
    assert names(one.waiting) == ["x", "a1", "a2"]
    one.abort_seq_group({"a1", "a2"})
    assert names(one.waiting) == ["x"]
