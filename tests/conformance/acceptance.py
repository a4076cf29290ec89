"""The evaluation platform's functional checks, under its ids, with its requests as far as they are known.

What the answer says is judged where the model can be asked to say it (`Target.judges_content`); from random weights the
status, the form, the finish and the usage are all that can be shown.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image

from tests.conformance.checks import Check, Skipped, expect
from tests.conformance.forms import check_answer, check_error, thought_of
from tests.conformance.target import CHAT, Streamed, Target

OFF = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}
ON = {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}
# Every way to switch thoughts off or on that the harness or its clients are known to use; {} is the default: on.
SPELLINGS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "kwargs_thinking": lambda on: {"chat_template_kwargs": {"thinking": on}},
    "kwargs_enable_thinking": lambda on: {"chat_template_kwargs": {"enable_thinking": on}},
    "kwargs_both": lambda on: {"chat_template_kwargs": {"thinking": on, "enable_thinking": on}},
    "object": lambda on: {"thinking": {"type": "enabled" if on else "disabled"}},
    "flag": lambda on: {"thinking": on},
    "word": lambda on: {"thinking": "enabled" if on else "disabled"},
    "top_level": lambda on: {"enable_thinking": on},
}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
ALICE = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
         "required": ["name", "age"]}
CONTEXT = 262144


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def picture(size: int, colours: Mapping[tuple[int, int], tuple[int, int, int]]) -> str:
    """A PNG as data URL: a square of fields; colours: (column, row) of half the size, or (0, 0) alone for all."""
    image = Image.new("RGB", (size, size), colours[0, 0])
    for (column, row), colour in colours.items():
        image.paste(colour, (column * size // 2, row * size // 2, size, size))
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def asked(target: Target, messages: Any, **body: Any) -> dict[str, Any]:
    """The checked answer to a chat request, streamed or not."""
    body = {"model": target.model, "messages": messages, **body}
    return check_answer(CHAT, body, target.send(CHAT, body))


def message_of(got: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(message, finish_reason) of the first choice."""
    return got["choices"][0]["message"], got["choices"][0]["finish_reason"]


def content_of(got: Mapping[str, Any]) -> str:
    """The text behind a thought that a server left in the content."""
    return (message_of(got)[0].get("content") or "").rpartition("</think>")[2]


def says(target: Target, got: Mapping[str, Any], *wanted: str) -> None:
    if target.judges_content:
        for text in wanted:
            expect(text in content_of(got), f"{text!r} is not in {content_of(got)!r:.300}")


def steady(target: Target) -> dict[str, Any]:
    """Random weights now and then end a thought or an answer before it has begun, and greedily go round in circles;
    with a seed they say the same always."""
    return {} if target.judges_content else {"temperature": 1.0, "seed": 1}


def d01(target: Target) -> None:
    got = asked(target, user("What is 2+2?"), max_tokens=1500, **steady(target))
    message, _ = message_of(got)
    expect(message.get("content") or thought_of(message), f"neither content nor thought: {message}")


def _stream(text: str, limit: int) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        body = {"model": target.model, "messages": user(text), "max_tokens": limit, "stream": True,
                "stream_options": {"include_usage": True}}
        # So that random weights, too, say enough for five events.
        answer = target.send(CHAT, {**body, **({} if target.judges_content else {"min_tokens": 8})})
        check_answer(CHAT, body, answer)
        assert isinstance(answer, Streamed)
        data = [line for line in answer.lines if line.startswith("data: ")]
        expect(len(data) >= 5, f"{len(data)} data lines")
        expect(sum("[DONE]" in line for line in data) == 1, "[DONE] is not there once")
        expect("completion_tokens" in answer.text, "no completion_tokens")
        expect(answer.headers.get("transfer-encoding") == "chunked", f"not sent in chunks: {answer.headers}")
    return run


def tool_call(target: Target) -> None:
    body = {"tools": [WEATHER], "tool_choice": "auto", "temperature": 0, "max_tokens": 4096}
    got = asked(target, user("What is the weather in Beijing?"), **body, **OFF)
    if target.judges_content:
        message, finish = message_of(got)
        if finish == "length":
            raise Skipped("cut while thinking")
        expect(message.get("tool_calls"), f"no call: {message}")


def d04(target: Target) -> None:
    got = asked(target, user("I have 3 apples and eat 1, then 1 more. How many are left?"), **{
        "max_tokens": 1500, "temperature": 0.2, **steady(target)})
    message, _ = message_of(got)
    if target.judges_content:
        said = thought_of(message) + (message.get("content") or "")
        expect(len(said) > 20 and ("1" in said or "one" in said), said)


def d05(target: Target) -> None:
    got = asked(target, user([{"type": "text", "text": "What colour is this picture?"},
                              {"type": "image_url", "image_url": {"url": picture(64, {(0, 0): (255, 0, 0)})}}]),
                max_tokens=300)
    message, _ = message_of(got)
    if target.judges_content:
        expect(len(message.get("content") or thought_of(message)) > 15, message)


def _cached(words: int) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        text = f"Unique {time.time_ns()}. " + " ".join(f"word {i}" for i in range(words // 2))
        counts = [asked(target, user(text), max_tokens=20, stream=True, stream_options={"include_usage": True})["usage"]
                  for _ in range(2)]
        cached = (counts[1].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        expect(cached > 0, f"usage of the second: {counts[1]}")
    return run


def d07(target: Target) -> None:
    got = asked(target, user("Two trains 300 km apart drive towards each other at 70 and 80 km/h. When do they meet?"),
                **{"max_tokens": 4096, "temperature": 0.3, **steady(target)})
    message, finish = message_of(got)
    if finish == "length":
        raise Skipped("cut before the answer")
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    least = 20 if target.judges_content else 0
    expect(len(thought) > least and len(content_of(got)) > least, f"thought and content: {message}")


def d08(target: Target) -> None:
    start = time.monotonic()
    answer = target.chat(user([{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {
        "url": "https://example.com/picture.png"}}]), max_tokens=20)
    expect(answer.status >= 400, f"not refused: {answer}")
    expect(time.monotonic() - start < 20, "refused, but not at once")


def _switched(switch: Mapping[str, Any], on: bool, limit: int = 300, **body: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        message, _ = message_of(asked(target, user("2 + 2 = ? 直接给数字。"),
                                      **{"max_tokens": limit, **switch, **steady(target), **body}))
        thought = thought_of(message).strip()
        expect(bool(thought) == on, f"thought: {thought!r:.100}")
        if not on:
            expect(message.get("content"), f"no content: {message}")
            if target.judges_content:
                expect("4" in message["content"], message)
    return run


def _fields(**fields: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        asked(target, user("hi"), max_tokens=20, **fields)
    return run


def _refused(messages: Any = None, named: str = "", **fields: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        check_error(target.chat(user("hi") if messages is None else messages, **{"max_tokens": 20, **fields}), named)
    return run


def _either(**fields: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        answer = target.chat(user("hi"), max_tokens=20, **fields)
        expect(answer.status < 500, answer)
        if answer.status >= 400:
            check_error(answer)
    return run


def _ends(finish: str, **fields: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        got = asked(target, user("Write a short story"), **fields)
        expect(message_of(got)[1] == finish, f"finish {message_of(got)[1]}, usage {got['usage']}")
    return run


def t3_64(target: Target) -> None:
    # Random weights may end of themselves before that.
    _ends("length", max_tokens=64, **({} if target.judges_content else {"ignore_eos": True}))(target)


EXACT = {"temperature": 0, "max_tokens": 4096, **OFF}


def _repeats(messages: list[dict[str, Any]], *wanted: str, **fields: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        says(target, asked(target, messages, **{**EXACT, **fields}), *wanted)
    return run


def _alice(form: Mapping[str, Any]) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        got = asked(target, user("Give me JSON with name Alice and age 30."), response_format=form, **EXACT)
        # That it is JSON of the form was checked; what is in it is the model's.
        if target.judges_content:
            says(target, got, '"Alice"', "30")
    return run


def t10(target: Target) -> None:
    got = asked(target, user("Count from 1 to 30, one number per line."), stop=["15"], temperature=0, max_tokens=100,
                **OFF)
    says(target, got, "1")
    expect("15" not in content_of(got) and "16" not in content_of(got), content_of(got))


def _keys(key: str | None) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        other = Target(target.base, target.model, key or "none")
        status = other.chat(user("hi"), max_tokens=4).status
        expect(status in (200, 401), f"status {status}")
    return run


def t13(target: Target) -> None:
    url = picture(4096, {(0, 0): (255, 0, 0), (1, 0): (0, 255, 0), (0, 1): (0, 0, 255), (1, 1): (255, 255, 0)})
    got = asked(target, user([{"type": "text", "text": "Name the colours of the four quadrants in English."},
                              {"type": "image_url", "image_url": {"url": url}}]), **EXACT)
    expect(got["usage"]["prompt_tokens"] > 10000, f"the picture was made smaller: {got['usage']}")
    says(target, got, "red", "green", "blue", "yellow")


def t14(target: Target) -> None:
    check_error(target.post(CHAT, {"model": target.model}), "messages")


def t15(target: Target) -> None:
    body = {"temperature": 0, "seed": 42, "max_tokens": 64, **OFF}
    first, second = (content_of(asked(target, user("Say hello in exactly one word."), **body)) for _ in range(2))
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


SYSTEM = [{"role": "system", "content": "Always reply exactly: _SYSTEM_CONTROL"}, *user("anything")]
TURNS = [*user("The secret word is BLUE_42. Remember it."), {"role": "assistant", "content": "I will."},
         *user("What is the secret word?")]

CHECKS = [Check(f"platform/{name}", run, name in ("t13_multimodal_base64", )) for name, run in {
    "harness": harness,
    "d01_basic_nostream": d01,
    "d02_stream_usage": _stream("hi briefly", 50),
    "d03_tool_call": tool_call,
    "d04_reasoning": d04,
    "d05_multimodal": d05,
    "d06_cache_hit": _cached(2400),
    "d06_cache_hit_311_tokens": _cached(300),
    "d07_reasoning_plus_content": d07,
    "d08_image_url_blocked": d08,
    "d09_thinking_disable_top": _switched({"thinking": {"type": "disabled"}}, False, temperature=0),
    "d10_thinking_disable_ctk": _switched(OFF, False, temperature=0),
    **{f"thinking_{name}_{'on' if on else 'off'}": _switched(spelled(on), on, 100)
       for name, spelled in SPELLINGS.items() for on in (False, True)},
    "t1a_thinking_true": _switched(ON, True),
    "t1b_thinking_false": _switched(OFF, False, 100),
    "t1c_thinking_default": _switched({}, True),
    **{f"t2_temperature_{value}".replace(".", "_"): _fields(temperature=value) for value in (0.0, 1.0, 1.1, 2.0)},
    "t2_top_p_0_0": _either(top_p=0),
    **{f"t2_top_p_{value}".replace(".", "_"): _fields(top_p=value) for value in (0.01, 0.95, 1.0)},
    "t2_top_p_1_1": _refused(top_p=1.1, named="top_p"),
    **{f"t2_{kind}_penalty_{value}".replace("-", "neg"): _fields(**{f"{kind}_penalty": value})
       for kind in ("frequency", "presence") for value in (-2, 0, 2)},
    "t2_n_1": _fields(n=1),
    "t2_n_2": _fields(n=2),
    "t3_max_tokens_none": _ends("stop"),
    "t3_max_tokens_1": _ends("length", max_tokens=1),
    "t3_max_tokens_64": t3_64,
    "t3_max_tokens_mid": _ends("stop", max_tokens=65536),
    "t3_max_tokens_max": _ends("stop", max_tokens=CONTEXT - 2048),
    "t3_max_tokens_neg1": _refused(max_tokens=-1, named="max_tokens"),
    "t3_max_tokens_over": _refused(max_tokens=CONTEXT + 1, named="max_tokens"),
    "t4a_no_system": _repeats(user("Reply exactly: _NO_SYSTEM"), "_NO_SYSTEM"),
    "t4b_system_control": _repeats(SYSTEM, "_SYSTEM_CONTROL"),
    "t5_function_calling": tool_call,
    "t6_multi_turn": _repeats(TURNS, "BLUE_42"),
    "t7_streaming_sse": _stream("Count 1 to 5 in english.", 80),
    "t8_json_object": _alice({"type": "json_object"}),
    "t9_json_schema": _alice({"type": "json_schema", "json_schema": {"name": "person", "schema": ALICE}}),
    "t10_stop_word": t10,
    "t11a_no_auth": _keys(None),
    "t11b_wrong_auth": _keys("wrong"),
    "t12_chinese": _repeats(user("Repeat exactly: 中文测试：你好世界"), "中文测试：你好世界"),
    "t12_japanese": _repeats(user("Repeat exactly: 日本語: こんにちは"), "こんにちは"),
    "t12_emoji": _repeats(user("Repeat exactly: Emoji: 🎉🚀✨🇨🇳"), "🎉"),
    "t13_multimodal_base64": t13,
    "t14_empty_body": t14,
    "t15_idempotency_seed": t15,
    "t16a_missing_role": _refused([{"content": "hi"}], "role"),
    "t16b_missing_content": _refused([{"role": "user"}], "content"),
    "t16c_empty_messages": _refused([], "messages"),
    "truncation": truncation,
}.items()]
