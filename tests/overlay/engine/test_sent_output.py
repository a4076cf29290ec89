"""What is told of an output: all that the server reads, and nothing that it knows."""

from __future__ import annotations

import pickle
import time
from array import array

import pytest

from vllm.engine.multiprocessing import RPCError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.overlay.engine.sent_output import written
from vllm.sequence import Logprob, RequestMetrics


def output(token_ids, **changes) -> RequestOutput:
    now = time.time()
    made = RequestOutput("r", "a prompt", list(range(30_000)), None,
                         [CompletionOutput(1, "text", token_ids, -1.5, [{5: Logprob(-0.5, 1, "x")}], "stop", 7)], True,
                         metrics=RequestMetrics(now, now, now, now, 0.0))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("token_ids", [[5], (5, ), array("l", [5])])
def test_what_comes_back(token_ids):
    sent = output(token_ids, num_cached_tokens=3, prompt_logprobs=[None, {6: Logprob(-1.0, 2)}])
    (read, ) = pickle.loads(written([sent]))
    assert type(read) is RequestOutput
    for name in ("request_id", "finished", "num_cached_tokens", "prompt_logprobs"):
        assert getattr(read, name) == getattr(sent, name), name
    (one, ), (was, ) = read.outputs, sent.outputs
    assert one.token_ids == [5], "lists, to which what comes later can be joined"
    for name in ("index", "text", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason"):
        assert getattr(one, name) == getattr(was, name), name


def test_what_stays_behind():
    sent = output([5])
    (read, ) = pickle.loads(written([sent]))
    assert (read.prompt, read.prompt_token_ids, read.metrics) == (None, None, None)
    assert len(written([sent])) < 400 < len(pickle.dumps([sent])) / 100
    assert read.num_cached_tokens is None
    assert len(pickle.loads(pickle.dumps(sent)).prompt_token_ids) == 30_000, "whoever else pickles one gets all of it"


def test_other_messages_are_as_they_were():
    error = pickle.loads(written(RPCError("r", False, ValueError("no"))))
    assert (error.request_id, error.is_engine_errored, str(error.exception)) == ("r", False, "no")
