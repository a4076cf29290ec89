"""Every rule is seen to pass and to fail, against a server that answers rightly and wrongly."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.acceptance import harness as under_test
from tests.acceptance.answers import RIGHT, SKIPPED, WRONG
from tests.acceptance.harness import Harness, Server
from tests.acceptance.questions import QUESTIONS
from tests.acceptance.stub import BROKEN, GONE, REFUSED, Asked, Reply, says, served, streams, words
from tests.acceptance.table import NOT_SCORED, SCORED, rule_of
from tests.conformance.checks import Outcome

DIRECT = Server("/version", "kwargs_thinking", True, True)


class Judged:
    """One server for all; `judge` gives what becomes of a check whose requests are answered so."""

    def __init__(self, timeout: float = 20.0) -> None:
        self.asked: list[Asked] = []
        self.pauses: list[float] = []
        self.replies: Sequence[Reply] = ()
        self._timeout = timeout

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        return self.replies[min(len(self.asked), len(self.replies)) - 1]

    def judge(self, name: str, replies: Sequence[Reply], server: Server = DIRECT) -> Outcome:
        self.asked.clear()
        self.pauses.clear()
        self.replies = replies
        harness = Harness(self.base, "llm", "key", self._timeout)
        harness.server = server
        return harness.run(name)


@pytest.fixture(scope="module")
def judged() -> Iterator[Judged]:
    made = Judged()
    with served(made.answer) as made.base:
        yield made


@pytest.fixture(autouse=True)
def pauses(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test.time, "sleep", judged.pauses.append)


def each(held: Mapping[str, Sequence[Any]]) -> list[tuple[str, int]]:
    return [(name, number) for name in QUESTIONS for number in range(len(held.get(name, ())))]


def test_the_count():
    groups = {"d": 10, "t1": 3, "t2": 17, "t3": 7, "t4": 2, "t5": 1, "t6": 1, "t7": 1, "t8": 1, "t9": 1, "t10": 1,
              "t11": 2, "t12": 3, "t13": 1, "t14": 1, "t15": 1, "t16": 3}
    found: dict[str, int] = {}
    for name in QUESTIONS:
        first = name.partition("_")[0]
        group = "d" if first.startswith("d") else first.rstrip("abc")
        found[group] = found.get(group, 0) + 1
    assert found == groups and len(QUESTIONS) == 56 and len(SCORED) == 52 and set(NOT_SCORED) < set(QUESTIONS)
    assert set(RIGHT) == set(WRONG) == set(QUESTIONS), set(QUESTIONS) - set(RIGHT) | set(QUESTIONS) - set(WRONG)


@pytest.mark.parametrize(("name", "number"), each(RIGHT))
def test_right_answers_pass(judged, name, number):
    outcome = judged.judge(name, RIGHT[name][number])
    assert outcome.verdict == "ok" and outcome.why, outcome
    assert all(asked.body["model"] == "llm" for asked in judged.asked) and judged.asked


@pytest.mark.parametrize(("name", "number"), each(WRONG))
def test_wrong_answers_fail(judged, name, number):
    replies, why = WRONG[name][number]
    outcome = judged.judge(name, replies)
    assert outcome.verdict == "failed" and why in outcome.why, outcome


@pytest.mark.parametrize(("name", "number"), each(SKIPPED))
def test_what_says_nothing_is_skipped(judged, name, number):
    replies, why = SKIPPED[name][number]
    outcome = judged.judge(name, replies)
    assert outcome.verdict == "skipped" and why in outcome.why, outcome


def test_a_connection_that_breaks_fails(judged):
    outcome = judged.judge("t2_n_1", [GONE])
    assert outcome.verdict == "failed" and "RemoteProtocolError" in outcome.why, outcome


def test_an_answer_that_comes_too_late_fails(monkeypatch):
    monkeypatch.undo()
    late = Judged(timeout=0.1)
    with served(late.answer) as late.base:
        outcome = late.judge("t2_n_1", [Reply(200, says("hello").body, after=0.5)])
    assert outcome.verdict == "failed" and "ReadTimeout" in outcome.why, outcome


@pytest.mark.parametrize(("name", "kind"), [
    ("d02_stream_usage", "text/event-stream"), ("d02_stream_usage", "text/plain"), ("t2_n_1", "application/json")])
def test_an_answer_that_never_ends_fails(monkeypatch, name, kind):
    """Bytes come all the time: no wait for the next one is too long."""
    monkeypatch.undo()
    endless = Judged(timeout=0.3)
    with served(endless.answer) as endless.base:
        outcome = endless.judge(name, [Reply(200, ": still here\n\n" * 5, kind, every=0.02)])
    assert outcome.verdict == "failed" and "not over after 0.3 s" in outcome.why and outcome.seconds < 1, outcome


def test_of_a_server_that_is_no_bare_engine_more_is_expected(judged):
    other = Server(None, "kwargs_thinking", True, True)
    assert judged.judge("t2_top_p_0_0", [REFUSED], other).verdict == "failed"
    assert judged.judge("t2_top_p_0_0", [says("hello")], other).verdict == "ok"
    for name in ("t11a_no_auth", "t11b_wrong_auth"):
        assert judged.judge(name, [says("hello")], other).verdict == "failed"
        assert judged.judge(name, [Reply(401, {})], other).verdict == "ok"
    assert rule_of("t2_n_1", False) is rule_of("t2_n_1", True)


class TestWhatIsSent:
    """Beyond the table itself: what depends on the server, the key and the order."""

    @pytest.mark.parametrize(("spelling", "field", "off", "on"), [
        ("kwargs_thinking", "chat_template_kwargs", {"thinking": False}, {"thinking": True}),
        ("kwargs_enable_thinking", "chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": True}),
        ("object", "thinking", {"type": "disabled"}, {"type": "enabled"})])
    def test_the_switch_as_it_was_found(self, judged, spelling, field, off, on):
        server = Server("/version", spelling, True, True)
        for name, value in (("t1b_thinking_false", off), ("t1a_thinking_true", on), ("t1c_thinking_default", None),
                            ("t8_json_object", off), ("t3_max_tokens_none", None)):
            judged.judge(name, [says("4")], server)
            assert judged.asked[0].body.get(field) == value, (name, judged.asked)
        judged.judge("d10_thinking_disable_ctk", [says("4")], server)
        assert judged.asked[0].body["chat_template_kwargs"] == {"thinking": False, "enable_thinking": False}

    def test_keys(self, judged):
        for name, key in (("t2_n_1", "Bearer key"), ("t11a_no_auth", None), ("t11b_wrong_auth", "Bearer wrong-key")):
            judged.judge(name, [says("hello")])
            assert judged.asked[0].headers.get("authorization") == key, (name, judged.asked)

    def test_one_long_prompt_twice(self, judged):
        bodies = []
        for _ in range(2):
            judged.judge("d06_cache_hit", [streams(*words(5))])
            first, second = (asked.body for asked in judged.asked)
            assert first == second and judged.pauses == [0.0, 5.0]
            assert first["stream_options"] == {"include_usage": True}
            assert len(first["messages"][0]["content"].split()) > 2048
            bodies.append(first)
        assert bodies[0] != bodies[1], "a cache may hold it from an earlier run"

    def test_only_the_model(self, judged):
        judged.judge("t14_empty_body", [REFUSED])
        assert judged.asked[0].body == {"model": "llm"}


@pytest.mark.parametrize(("works", "spelling", "found"), [
    ({"chat_template_kwargs": {"thinking": False}}, "kwargs_thinking", True),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "kwargs_enable_thinking", True),
    ({"thinking": {"type": "disabled"}}, "object", True),
    ({"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}, "kwargs_both", True),
    (None, "kwargs_both", False)])
def test_the_switch_is_found(works, spelling, found):
    sent = []

    def answer(asked: Asked) -> Reply:
        if asked.path != "/v1/chat/completions":
            return Reply(404, {})
        switch = {name: asked.body[name] for name in ("thinking", "chat_template_kwargs") if name in asked.body}
        sent.append(switch)
        assert asked.body["max_tokens"] == 512 and asked.body["temperature"] == 0, asked
        if "thinking" in switch and works != switch:
            return REFUSED
        return says("4") if switch == works else says("4", "2+2")

    with served(answer) as base:
        server = Harness(base, "llm").probe()
    assert (server.spelling, server.found, server.thinks) == (spelling, found, True) and sent[0] == {}, (server, sent)
    assert len(sent) == ["kwargs_thinking", "kwargs_enable_thinking", "object", "kwargs_both"].index(spelling) + 2, sent


@pytest.mark.parametrize("reply", [
    Reply(200, "<html>", "text/html"), Reply(200, [1]), Reply(200, {"choices": []}), Reply(200, {"choices": [{}]}),
    Reply(200, {"choices": [{"message": None}]}), says(content=["4"])])
def test_a_trial_that_is_answered_in_another_form_is_no_end(reply):
    with served(lambda asked: reply if asked.path == "/v1/chat/completions" else Reply(404, {})) as base:
        server = Harness(base, "llm").probe()
    assert (server.spelling, server.found, server.thinks) == ("kwargs_both", False, False)


@pytest.mark.parametrize(("answered", "direct"), [
    ({"/version": "application/json"}, "/version"), ({"/get_server_info": "application/json", "/version":
                                                      "application/json"}, "/get_server_info"),
    ({"/version": "text/html"}, None), ({}, None)])
def test_what_the_server_is(answered, direct):
    def answer(asked: Asked) -> Reply:
        if asked.path == "/v1/chat/completions":
            return says("4")
        return Reply(200, {}, answered[asked.path]) if asked.path in answered else Reply(404, {})

    with served(answer) as base:
        server = Harness(base, "llm").probe()
    assert server.direct == direct and not server.thinks and ("no bare" in str(server)) is (direct is None)


def _forced(count: int, usage: bool = True) -> Reply:
    return streams(*words(3 if usage else count), usage={"completion_tokens": count} if usage else None)


@pytest.mark.parametrize(("replies", "passes"), [
    ([_forced(8192)], True), ([_forced(7782)], True), ([_forced(7781)], False), ([_forced(7782, usage=False)], True),
    ([_forced(7781, usage=False)], False), ([_forced(8192), _forced(100)], False), ([REFUSED], False),
    ([BROKEN], False), ([says("An essay")], False)])
def test_long_output(judged, replies, passes):
    judged.asked.clear()
    judged.replies = replies
    outcome = Harness(judged.base, "llm").run_long_output(2, 8192)
    assert (outcome.verdict == "ok") is passes, outcome
    for asked in judged.asked:
        assert asked.body["max_tokens"] == asked.body["min_tokens"] == 8192 and asked.body["ignore_eos"] is True, asked


def test_long_outputs_are_asked_for_at_once():
    all_there = threading.Barrier(3, timeout=10)

    def answer(_: Asked) -> Reply:
        all_there.wait()
        return _forced(200)

    with served(answer) as base:
        outcome = Harness(base, "llm").run_long_output(3, 200)
    assert outcome.verdict == "ok" and outcome.why.count("200 tokens") == 3, outcome
