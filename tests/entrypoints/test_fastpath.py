"""The large-output path over a scripted engine: which requests take it, and what a budget does to them."""

from __future__ import annotations

import json
import logging

import pytest

from tests.helpers.fake_engine import USER, FakeEngine, client, ids, post, stream
from vllm.overlay.serving.errors import StartError
from vllm.overlay.serving.fastpath import FastPath

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SLOW = {"delay": 0.03}
# On a busy machine the first token alone takes some tenths of a second.
BUDGET_S = 1.0


def settings(**changes) -> dict:
    return {"max_model_len": 100_000, "fastpath": FastPath(**changes)}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "large"), [
    ({}, False), ({"max_tokens": 8192}, False), ({"max_tokens": 8193}, True), ({"max_tokens": 65_536}, True),
    ({"max_completion_tokens": 8193}, True), ({"min_tokens": 8193, "max_tokens": 8193}, True),
    ({"min_tokens": 8192, "max_tokens": 8192}, False),
])
def test_who_takes_it(path, fields, large):
    engine = FakeEngine("x")
    post(client(engine, **settings()), path, **fields)
    assert engine.requests[0][1].large_output is large


def test_switched_off_or_with_another_threshold():
    for changes, large in (({"enabled": False}, False), ({"threshold": 100}, True), ({"threshold": 101}, False)):
        engine = FakeEngine("x")
        post(client(engine, **settings(**changes)), max_tokens=101)
        assert engine.requests[0][1].large_output is large, changes


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
def test_a_budget_ends_it_and_the_answer_says_so(fields, caplog):
    """finish_reason length, the true count, a mark; what came until then is the model's, and the engine works no more
    on it."""
    caplog.set_level(logging.INFO)
    answer = "word " * 500
    engine = FakeEngine(answer, **SLOW)
    http = client(engine, **settings(threshold=100, budget_s=BUDGET_S))
    whole = post(http, max_tokens=1000, thinking=False, **fields)
    usage = whole["usage"]
    assert usage["output_clamped"] is True and 0 < usage["completion_tokens"] < 100, usage
    for choice in whole["choices"]:
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "length" and answer.startswith(text), choice
    # One more per choice may have been under way.
    assert 0 <= engine.generated - usage["completion_tokens"] <= len(whole["choices"])
    assert len(engine.aborted) == 1
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("request_log")]
    assert json.loads(line.removeprefix("request "))["clamped"] is True


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("with_usage", [False, True])
def test_the_last_chunk_of_a_stream_says_so(path, with_usage):
    http = client(FakeEngine("word " * 500, **SLOW), **settings(threshold=100, budget_s=BUDGET_S))
    chunks = stream(http, path, max_tokens=1000, **({"stream_options": {"include_usage": True}} if with_usage else {}))
    usage = chunks[-1]["usage"]
    assert usage["output_clamped"] is True and usage["completion_tokens"] > 0, chunks[-1]
    finish = chunks[-2 if with_usage else -1]["choices"][0]["finish_reason"]
    assert finish == "length" and (chunks[-1]["choices"] == []) is with_usage


def test_a_budget_that_ends_before_the_first_token():
    engine = FakeEngine("x", delay=5)
    body = post(client(engine, **settings(threshold=100, budget_s=0.1)), max_tokens=1000)
    assert body["usage"]["completion_tokens"] == 0 and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["output_clamped"] is True and body["choices"][0]["message"]["content"] == ""


def test_who_is_not_large_or_is_done_in_time_is_untouched():
    answer = "word " * 10
    engine = FakeEngine(answer, **SLOW)
    short = post(client(engine, **settings(threshold=100, budget_s=0.05)), max_tokens=100, thinking=False)
    large = post(client(engine, **settings(threshold=100, budget_s=60)), max_tokens=101, thinking=False)
    for body in (short, large):
        assert body["choices"][0]["finish_reason"] == "stop" and "output_clamped" not in body["usage"]
        assert body["usage"]["completion_tokens"] == len(ids(answer)) + 1


def test_the_other_apis_say_it_too():
    http = client(FakeEngine("word " * 500, **SLOW), **settings(threshold=100, budget_s=BUDGET_S))
    body = http.post("/v1/responses", json={"model": "llm", "input": "hi", "max_output_tokens": 1000}).json()
    assert body["status"] == "incomplete" and body["usage"]["output_clamped"] is True, body["usage"]
    body = http.post("/v1/messages", json={"model": "llm", "messages": USER, "max_tokens": 1000}).json()
    assert body["stop_reason"] == "max_tokens" and body["usage"]["output_clamped"] is True, body["usage"]


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, FastPath(True, 8192, None)), ({"": "1"}, FastPath(True, 8192, None)),
    ({"_THRESHOLD": "4096"}, FastPath(True, 4096)),
    ({"": "0"}, FastPath(False)), ({"_BUDGET_S": "1.5"}, FastPath(budget_s=1.5)), ({"_BUDGET_S": "0"}, FastPath()),
    ({"": "", "_THRESHOLD": ""}, FastPath()),
])
def test_environment(environment, expected):
    assert FastPath.of({f"VLLM_BASIC_FASTPATH{name}": value for name, value in environment.items()}) == expected


@pytest.mark.parametrize("name", ["VLLM_BASIC_FASTPATH", "VLLM_BASIC_FASTPATH_THRESHOLD",
                                  "VLLM_BASIC_FASTPATH_BUDGET_S"])
@pytest.mark.parametrize("value", ["many", "-1", "inf", "nan"])
def test_environment_that_is_wrong(name, value):
    with pytest.raises(StartError, match=name):
        FastPath.of({name: value})
