"""The evaluation platform's functional checks, under its ids, against a model that means nothing: status, form, finish
and usage of the answers to what `tests.acceptance` sends. Whether the answers are right is judged there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.acceptance.questions import OFF, ON, QUESTIONS, SPELLINGS, Request, long_text, user
from tests.conformance.checks import Check, Skipped, expect
from tests.conformance.forms import check_answer, check_error, thought_of
from tests.conformance.target import CHAT, Answer, Streamed, Target

# Random weights now and then end a thought or an answer before it has begun, and greedily go round in circles; with a
# seed they say the same always.
STEADY = {"temperature": 1.0, "seed": 1}


def asked(target: Target, messages: Any, **body: Any) -> dict[str, Any]:
    """The checked answer to a chat request, streamed or not."""
    body = {"model": target.model, "messages": messages, **body}
    return check_answer(CHAT, body, target.send(CHAT, body))


def body_of(target: Target, request: Request, **more: Any) -> dict[str, Any]:
    """The body of a platform's request. more: fields that are added or changed."""
    switch = {} if request.thinking is None else ON if request.thinking else OFF
    return {"model": target.model, **request.body, **switch, **more}


def answers(target: Target, name: str, **more: Any) -> list[dict[str, Any]]:
    """The checked answers to a check's requests."""
    bodies = [body_of(target, request, **more) for request in QUESTIONS[name]()]
    return [check_answer(CHAT, body, target.send(CHAT, body)) for body in bodies]


def answer(target: Target, name: str, **more: Any) -> dict[str, Any]:
    """The checked answer to a check's only request."""
    one, = answers(target, name, **more)
    return one


def unchecked(target: Target, name: str) -> Answer:
    """The answer to a check's only request, whatever it is."""
    request, = QUESTIONS[name]()
    return target.send(CHAT, body_of(target, request))


def message_of(got: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(message, finish_reason) of the first choice."""
    return got["choices"][0]["message"], got["choices"][0]["finish_reason"]


def content_of(got: Mapping[str, Any]) -> str:
    """The text behind a thought that a server left in the content."""
    return (message_of(got)[0].get("content") or "").rpartition("</think>")[2]


def _served(name: str, **more: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        answer(target, name, **more)
    return run


def d01(target: Target) -> None:
    message, _ = message_of(answer(target, "d01_basic_nostream", **STEADY))
    expect(message.get("content") or thought_of(message), f"neither content nor thought: {message}")


def _stream(name: str) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        request, = QUESTIONS[name]()
        # So that random weights, too, say enough for five events.
        body = body_of(target, request, min_tokens=8)
        answer = target.send(CHAT, body)
        check_answer(CHAT, body, answer)
        assert isinstance(answer, Streamed)
        data = [line for line in answer.lines if line.startswith("data: ")]
        expect(len(data) >= 5, f"{len(data)} data lines")
        expect(sum("[DONE]" in line for line in data) == 1, "[DONE] is not there once")
        expect("completion_tokens" in answer.text, "no completion_tokens")
        expect(answer.headers.get("transfer-encoding") == "chunked", f"not sent in chunks: {answer.headers}")
    return run


def _cached(words: int) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        text = user(long_text(words))
        counts = [asked(target, text, max_tokens=20, stream=True, stream_options={"include_usage": True})["usage"]
                  for _ in range(2)]
        cached = (counts[1].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        expect(cached > 0, f"usage of the second: {counts[1]}")
    return run


def d07(target: Target) -> None:
    got = answer(target, "d07_reasoning_plus_content", **STEADY)
    message, finish = message_of(got)
    if finish == "length":
        raise Skipped("cut before the answer")
    expect(thought_of(message) and content_of(got), f"thought and content: {message}")


def d08(target: Target) -> None:
    start = time.monotonic()
    answer = unchecked(target, "d08_image_url_blocked")
    expect(answer.status >= 400, f"not refused: {answer}")
    expect(time.monotonic() - start < 20, "refused, but not at once")


def _switched(name: str, on: bool) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        message, _ = message_of(answer(target, name, **STEADY))
        thought = thought_of(message).strip()
        expect(bool(thought) == on, f"thought: {thought!r:.100}")
        if not on:
            expect(message.get("content"), f"no content: {message}")
    return run


def _spelled(switch: Mapping[str, Any], on: bool) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        message, _ = message_of(asked(target, user("2 + 2 = ? 直接给数字。"), max_tokens=100, **switch, **STEADY))
        expect(bool(thought_of(message).strip()) == on, f"thought: {thought_of(message)!r:.100}")
        expect(on or message.get("content"), f"no content: {message}")
    return run


def _refused(name: str, named: str) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        check_error(unchecked(target, name), named)
    return run


def _either(name: str) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        answer = unchecked(target, name)
        expect(answer.status < 500, answer)
        if answer.status >= 400:
            check_error(answer)
    return run


def _ends(name: str, finish: str, **more: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        got = answer(target, name, **more)
        expect(message_of(got)[1] == finish, f"finish {message_of(got)[1]}, usage {got['usage']}")
    return run


def t10(target: Target) -> None:
    content = content_of(answer(target, "t10_stop_word"))
    expect("15" not in content and "16" not in content, content)


def _keys(key: str | None) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        status = Target(target.base, target.model, key).chat(user("hi"), max_tokens=4).status
        expect(status in (200, 401), f"status {status}")
    return run


def t13(target: Target) -> None:
    got = answer(target, "t13_multimodal_base64")
    expect(got["usage"]["prompt_tokens"] > 10000, f"the picture was made smaller: {got['usage']}")


def t15(target: Target) -> None:
    first, second = map(content_of, answers(target, "t15_idempotency_seed", max_tokens=64))
    expect(first and first == second, f"{first!r:.200} and {second!r:.200}")


def harness(target: Target) -> None:
    """Before its checks: which of these answers decides how the harness treats the server."""
    for path in ("/get_model_info", "/get_server_info"):
        expect(target.get(path).status == 404, f"{path} exists")
    version = target.get("/version")
    expect(version.status == 200 and version.headers["content-type"] == "application/json", version)
    expect(target.get("/health").status == 200, "/health")
    models: list[dict[str, Any]] = target.get("/v1/models").body["data"]
    served = [model for model in models if model["id"] == target.model]
    expect(served and type(served[0].get("max_model_len")) is int, models)


def truncation(target: Target) -> None:
    """The long-output module, with 200 tokens for its 8,192."""
    got = asked(target, user("Write a very long essay."), stream=True, stream_options={"include_usage": True},
                max_tokens=200, min_tokens=200, ignore_eos=True)
    expect(got["usage"]["completion_tokens"] == 200 and message_of(got)[1] == "length", got["usage"])


# The others must be served, in the right form.
_OWN: dict[str, Callable[[Target], None]] = {
    "d01_basic_nostream": d01,
    "d02_stream_usage": _stream("d02_stream_usage"),
    "d04_reasoning": _served("d04_reasoning", **STEADY),
    "d06_cache_hit": _cached(2400),
    "d07_reasoning_plus_content": d07,
    "d08_image_url_blocked": d08,
    "d09_thinking_disable_top": _switched("d09_thinking_disable_top", False),
    "d10_thinking_disable_ctk": _switched("d10_thinking_disable_ctk", False),
    "t1a_thinking_true": _switched("t1a_thinking_true", True),
    "t1b_thinking_false": _switched("t1b_thinking_false", False),
    "t1c_thinking_default": _switched("t1c_thinking_default", True),
    "t2_top_p_0_0": _either("t2_top_p_0_0"),
    "t2_top_p_1_1": _refused("t2_top_p_1_1", "top_p"),
    "t3_max_tokens_none": _ends("t3_max_tokens_none", "stop"),
    "t3_max_tokens_1": _ends("t3_max_tokens_1", "length"),
    # Random weights may end of themselves before that.
    "t3_max_tokens_64": _ends("t3_max_tokens_64", "length", ignore_eos=True),
    "t3_max_tokens_mid": _ends("t3_max_tokens_mid", "stop"),
    "t3_max_tokens_max": _ends("t3_max_tokens_max", "stop"),
    "t3_max_tokens_neg1": _refused("t3_max_tokens_neg1", "max_tokens"),
    "t3_max_tokens_over": _refused("t3_max_tokens_over", "max_tokens"),
    "t7_streaming_sse": _stream("t7_streaming_sse"),
    "t10_stop_word": t10,
    "t11a_no_auth": _keys(None),
    "t11b_wrong_auth": _keys("wrong"),
    "t13_multimodal_base64": t13,
    "t14_empty_body": _refused("t14_empty_body", "messages"),
    "t15_idempotency_seed": t15,
    "t16a_missing_role": _refused("t16a_missing_role", "role"),
    "t16b_missing_content": _refused("t16b_missing_content", "content"),
    "t16c_empty_messages": _refused("t16c_empty_messages", "messages"),
}
CHECKS = [Check(f"platform/{name}", run, name == "t13_multimodal_base64") for name, run in {
    "harness": harness,
    **{name: _OWN.get(name) or _served(name) for name in QUESTIONS},
    "d06_cache_hit_311_tokens": _cached(300),
    **{f"thinking_{name}_{'on' if on else 'off'}": _spelled(spelled(on), on)
       for name, spelled in SPELLINGS.items() for on in (False, True)},
    "truncation": truncation,
}.items()]
