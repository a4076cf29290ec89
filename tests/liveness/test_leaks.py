"""After everything at a time - answers, aborts, faults, refusals - there is nothing left of any request."""

from __future__ import annotations

import gc
import json
import logging
import random
import threading
import time

import pytest

from tests.helpers.live_server import PLACES
from vllm.overlay.engine.fanout import FanOut
from vllm.overlay.grammar.follower import Follower
from vllm.overlay.serving.answer import Answer
from vllm.overlay.serving.backlog import Backlog
from vllm.overlay.serving.choice import Choice
from vllm.sequence import SequenceGroup

CLIENTS, REQUESTS = 8, 9
LONG = [{"role": "user", "content": "word " * 150}]


@pytest.fixture
def not_logged():
    """pytest keeps what is logged, and with an exception all that its frames know."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def alive(*kinds):
    """How many objects there are of each class."""
    gc.collect()
    found = dict.fromkeys(kinds, 0)
    for one in gc.get_objects():
        for kind in kinds:
            # By their types: some objects answer isinstance with warnings.
            found[kind] += issubclass(type(one), kind) and getattr(one, "request_id", "it") != ""
    return found


def test_many_choices_in_few_places(live):
    """Stock never answers; others are served in between."""
    begun = len(live.steps)
    answers = []
    many = threading.Thread(target=lambda: answers.append(live.post(n=300, max_tokens=1, temperature=1.0)))
    many.start()
    live.until(lambda: len(live.steps) > begun + 10, "it does not run")
    before = time.monotonic()
    assert live.post(max_tokens=2).status_code == 200
    assert many.is_alive() and time.monotonic() - before < 10
    many.join(120)
    choices = answers[0].json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(300))
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert answers[0].json()["usage"]["completion_tokens"] == 300


def test_nothing_is_left(live, monkeypatch, not_logged):
    """Faults come every 40 steps."""
    model = live.engine.model_executor.driver_worker.model_runner.model
    forward, calls, outcomes = model.forward, [], []

    def sometimes(*args, **kwargs):
        calls.append(1)
        if len(calls) % 40 == 0:
            raise RuntimeError("now and then")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", sometimes)
    def client(number):
        chance = random.Random(number)
        for _ in range(REQUESTS):
            kind = chance.choice(["whole", "stream", "samples", "grammar", "long", "bad", "leaves", "leaves", "cut"])
            body = {"max_tokens": chance.randrange(1, 30), "stream": kind == "stream"}
            body |= {"samples": {"n": 4}, "grammar": {"guided_regex": "[ab]{9}", "thinking": False},
                     "long": {"messages": LONG}, "bad": {"temperature": "hot"}}.get(kind, {})
            if kind in ("leaves", "cut"):
                body |= {"stream": chance.random() < 0.5, "n": chance.choice([1, 3]), "max_tokens": 300}
                asked = live.open(cut=30 if kind == "cut" else None, **body)
                time.sleep(chance.random() * 0.3)
                asked.leave()
                outcomes.append(kind)
                continue
            response = live.post(**body)
            failed = response.status_code == 500 or response.status_code == 200 and "internal_error" in response.text
            outcomes.append("failed" if failed else f"{kind} {response.status_code}")

    threads = [threading.Thread(target=client, args=(number, )) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert len(outcomes) == CLIENTS * REQUESTS, f"only {len(outcomes)} came to an end"
    kinds = set(outcomes)
    assert kinds <= {"failed", "whole 200", "stream 200", "samples 200", "grammar 200", "long 200", "bad 400", "leaves",
                     "cut"}, kinds
    assert "failed" in kinds and len(kinds) >= 8, kinds
    live.until_idle()
    monkeypatch.undo()
    assert live.post().status_code == 200
    live.until_idle()
    # The last error stays with stock's loop of outputs until the next one, and with it who was told; the engine keeps
    # what was in its last steps until their lists are used again.
    most = {Answer: 1, Backlog: 1, Choice: 4, FanOut: PLACES, Follower: PLACES, SequenceGroup: 2 * PLACES}
    found = alive(*most)
    assert all(found[kind] <= most[kind] for kind in most), found
    assert live.process._errored_with is None and not live.client.errored


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_that_nobody_asks_for_any_more_ends_once(live, path):
    """The client leaves while its last token is on the way: finished and aborted at once."""
    for tokens in range(1, 6):
        asked = live.open(path, stream=True, max_tokens=tokens)
        assert asked.read()
        asked.leave()
    live.until_idle()
    body = live.post(path, max_tokens=3).json()
    assert json.dumps(body).count("finish_reason") == 1
