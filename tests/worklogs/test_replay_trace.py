"""The synthetic trace meets the published figures of the recorded one, and its prompts share what they say."""
from pathlib import Path

import pytest

from worklogs import replay_trace


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_figures_of_the_recorded_traffic(seed: int) -> None:
    requests = replay_trace.build(seed)
    reusable = replay_trace.reusable(requests)
    known, _ = replay_trace.read_shape()
    assert [request.length for request in requests if known[request.index] is not None] == [n for n in known if n]
    share = sum(reusable) / sum(request.length for request in requests)
    print(f"reusable {share:.3f}, mean {sum(request.length for request in requests) / 881:.0f}")
    assert len(requests) == 881
    assert abs(share - 0.656) < 0.015
    whole = [request for request in requests
             if request.parent >= 0 and request.shared == requests[request.parent].length - 1]
    assert len(whole) == replay_trace.EXTENDING
    for bucket, (end, count, wanted) in enumerate(replay_trace.BUCKETS):
        group = [request for request in requests if replay_trace.bucket_of(request.length) == bucket]
        found = sum(reusable[request.index] for request in group) / sum(request.length for request in group)
        print(f"below {end}: {len(group)} prompts, {found:.3f} reusable, wanted {count}, {wanted}")
        assert abs(len(group) - count) <= 2
        if count > 5:  # The sources disagree about the few longest.
            assert abs(found - wanted) < 0.03


def test_prompts_share_what_they_say() -> None:
    requests = replay_trace.build(0)
    for request in requests:
        assert len(request.keys) == request.length // replay_trace.BLOCK
        blocks = (request.length + request.answer) // replay_trace.BLOCK
        assert len(request.answer_keys) == blocks - len(request.keys)
        assert list(request.boundaries) == sorted(set(request.boundaries))
        assert request.boundaries[0] > 0 and request.boundaries[-1] < request.length
        if request.parent >= 0:
            parent, blocks = requests[request.parent], request.shared // replay_trace.BLOCK
            assert parent.index < request.index and request.shared < request.length
            assert (request.keys[:blocks] == parent.keys[:blocks]).all()
            assert not set(request.keys[blocks:].tolist()) & set(parent.keys.tolist())
            inherited = [place for place in parent.boundaries if place <= request.shared]
            assert list(request.boundaries[:len(inherited)]) == inherited


def test_histories_of_a_live_agent_hold_the_answers() -> None:
    requests = replay_trace.build(0, answers="ours")
    longer = [request for request in requests if request.parent >= 0
              and request.shared > requests[request.parent].length]
    for request in longer:
        parent = requests[request.parent]
        both = [*parent.keys.tolist(), *parent.answer_keys.tolist()]
        blocks = request.shared // replay_trace.BLOCK
        assert request.keys[:blocks].tolist() == both[:blocks]
    print(f"{len(longer)} prompts hold an answer")
    assert len(longer) > 80


def test_same_seed_same_trace_and_a_part_of_it() -> None:
    whole, part, other = replay_trace.build(5), replay_trace.build(5, count=50), replay_trace.build(6)
    assert len(part) == 50
    assert all((a.keys == b.keys).all() and a.boundaries == b.boundaries for a, b in zip(part, whole, strict=False))
    assert [request.length for request in whole] != [request.length for request in other]


def test_a_line_that_does_not_parse_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shape.csv"
    path.write_text("seq,prompt_tok,out_tok_run1,out_tok_run2,out_tok_run3\n0,100,5,,\n1,x,,,\n")
    with pytest.raises(ValueError, match="line 3 does not parse"):
        replay_trace.build(path=path)
