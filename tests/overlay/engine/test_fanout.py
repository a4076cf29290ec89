"""The book of requests of several samples, against every order in which samples can produce and finish."""
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.overlay.engine.fanout import FanOut, FanOuts
from vllm.sampling_params import RequestOutputKind, SamplingParams

KINDS = [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]


def output(child_id, tokens, finished, logprob=None):
    completion = CompletionOutput(0, "", list(tokens), logprob, [{}], "length" if finished else None)
    made = RequestOutput(child_id, None, [1, 2], None, [completion], finished)
    made.num_cached_tokens = 0
    return made


def fanouts_of(params, limit):
    """FanOuts with one request "r", and the list of ids that were given to the scheduler."""
    given_ids, fanouts = [], FanOuts()
    fanout = FanOut("r", params, limit)
    fanout.give = given_ids.append
    fanouts.add(fanout)
    fanouts.admit()
    return fanouts, fanout, given_ids


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 7), st.integers(1, 4), st.data())
def test_any_order(kind, n, limit, data):
    fanouts, fanout, given_ids = fanouts_of(SamplingParams(n=n, output_kind=kind), limit)
    lengths = {index: data.draw(st.integers(1, 4)) for index in range(n)}
    produced = {index: [] for index in range(n)}
    sent, seen, last = [], {index: [] for index in range(n)}, None
    while fanout.running:
        assert len(fanout.running) <= limit
        child_id = data.draw(st.sampled_from(sorted(fanout.running)))
        index = fanout.running[child_id]
        assert fanouts.of_child(child_id) is fanout and fanouts.parent_id(child_id) == "r"
        produced[index].append(10 * index + len(produced[index]))
        finished = len(produced[index]) == lengths[index]
        if kind == RequestOutputKind.FINAL_ONLY and not finished:
            continue
        made = output(child_id, produced[index][-1:] if kind == RequestOutputKind.DELTA else produced[index], finished)
        last = fanout.merge(child_id, made)
        fanouts.admit()
        sent.append(last)
        for completion in last.outputs if last else []:
            if kind == RequestOutputKind.DELTA:
                seen[completion.index] += completion.token_ids
            else:
                seen[completion.index] = list(completion.token_ids)
    assert seen == produced and {index: len(tokens) for index, tokens in seen.items()} == lengths
    told = [one for one in sent if one is not None]
    assert [one.finished for one in told] == [False] * (len(told) - 1) + [True]
    assert {one.request_id for one in told} == {"r"}
    assert len(given_ids) == n and not fanouts._parents and not fanouts._children
    if kind == RequestOutputKind.FINAL_ONLY:
        assert len(told) == 1 and [completion.index for completion in told[0].outputs] == list(range(n))


def test_the_engine_s_objects_are_left_alone():
    """The engine writes a group's next output into the same objects."""
    _, fanout, (first, second) = fanouts_of(SamplingParams(n=2), 2)
    made = output(second, [5], False)
    completion = made.outputs[0]
    fanout.merge(second, made)
    assert (made.request_id, made.outputs, completion.index) == (second, [completion], 0)


def test_parameters_of_a_sample():
    processor = SimpleNamespace(clone=lambda: "a clone")
    params = SamplingParams(n=2, best_of=3, seed=7, temperature=0.5, logits_processors=[processor, "stateless"])
    _, fanout, ids = fanouts_of(params, 3)
    one = fanout.params(ids[2])
    assert (one.n, one.best_of, one._real_n, one.seed, one.temperature, one.logprobs) == (1, None, None, 9, 0.5, 0)
    assert one.logits_processors == ["a clone", "stateless"]
    assert (params.n, params.seed, params.logits_processors) == (3, 7, [processor, "stateless"])
    assert fanouts_of(SamplingParams(n=2), 2)[1].params("r#0").seed is None


def test_best_of():
    _, fanout, ids = fanouts_of(SamplingParams(n=2, best_of=4), 4)
    for child_id in ids:
        fanout.params(child_id)
    logprobs = [-3.0, -1.0, -2.0, -4.0]
    for child_id, logprob in zip(ids, logprobs, strict=True):
        last = fanout.merge(child_id, output(child_id, [int(-logprob)], True, logprob))
    assert [(one.index, list(one.token_ids), one.cumulative_logprob, one.logprobs) for one in last.outputs] == [
        (0, [1], None, None), (1, [2], None, None)]


def test_dropped():
    fanouts, fanout, ids = fanouts_of(SamplingParams(n=5), 2)
    assert fanouts.drop("r") == ids == ["r#0", "r#1"]
    assert fanouts.drop("r") == [] and fanouts.of_child("r#0") is None
    fanouts.admit()
    assert len(ids) == 2
    with pytest.raises(ValueError, match="already exists"):
        for _ in range(2):
            fanouts.add(FanOut("r", SamplingParams(n=2), 1))
