"""What the evaluation platform's functional checks send, by the checks' ids: limits, switches and fields as known,
prompts of our own where only their task is known."""

from __future__ import annotations

import base64
import functools
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

CONTEXT = 262144
OFF = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}
ON = {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}
# Every way to switch thoughts that the harness or its clients are known to use. The harness tries the first three,
# alone and in this order, and falls back to the fourth.
SPELLINGS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "kwargs_thinking": lambda on: {"chat_template_kwargs": {"thinking": on}},
    "kwargs_enable_thinking": lambda on: {"chat_template_kwargs": {"enable_thinking": on}},
    "object": lambda on: {"thinking": {"type": "enabled" if on else "disabled"}},
    "kwargs_both": lambda on: ON if on else OFF,
    "flag": lambda on: {"thinking": on},
    "word": lambda on: {"thinking": "enabled" if on else "disabled"},
    "top_level": lambda on: {"enable_thinking": on},
}
TRIED = ("kwargs_thinking", "kwargs_enable_thinking", "object")
FALLBACK = "kwargs_both"
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Name of the city"}},
                   "required": ["city"]}}}
ALICE = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
         "required": ["name", "age"]}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
EXACT = {"temperature": 0, "max_tokens": 4096}


@dataclass(frozen=True)
class Request:
    """body: of a chat request, without model and thinking switch. thinking: what the switch is set to, None to send
    none. key: the API key that is sent, ``own``, ``none`` or ``wrong``. after: seconds to wait before it is sent."""

    body: Mapping[str, Any]
    thinking: bool | None = None
    key: str = "own"
    after: float = 0.0


def user(text: Any) -> list[dict[str, Any]]:
    """A conversation of one message. text: or its parts."""
    return [{"role": "user", "content": text}]


def picture(size: int, colours: Mapping[tuple[int, int], tuple[int, int, int]]) -> str:
    """A PNG as data URL: a square of fields; colours: (column, row) of half the size, or (0, 0) alone for all."""
    image = Image.new("RGB", (size, size), colours[0, 0])
    for (column, row), colour in colours.items():
        image.paste(colour, (column * size // 2, row * size // 2, size, size))
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def shown(text: str, url: str) -> list[dict[str, Any]]:
    """A question about a picture: text first, as the platform orders them."""
    return user([{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}])


def long_text(words: int) -> str:
    """At least as many tokens as words in any vocabulary, and never the same one twice: what a cache holds of it was
    put there by this run."""
    return f"Log {time.time_ns()}. Read it, then answer OK.\n" + " ".join(
        f"entry {index} follows" for index in range(words // 3 + 1))


def ask(messages: Sequence[Mapping[str, Any]], thinking: bool | None = None, **fields: Any) -> tuple[Request, ...]:
    """One request."""
    return (Request({"messages": list(messages), **fields}, thinking), )


def _hi(**fields: Any) -> tuple[Request, ...]:
    return ask(user("hi"), max_tokens=20, **fields)


def _story(**fields: Any) -> tuple[Request, ...]:
    return ask(user("Write a short story"), **fields)


def _repeat(text: str) -> tuple[Request, ...]:
    return ask(user(f"Repeat exactly: {text}"), False, **EXACT)


def _weather() -> tuple[Request, ...]:
    return ask(user("What is the weather in Beijing?"), False, tools=[WEATHER], tool_choice="auto", **EXACT)


def _alice(form: Mapping[str, Any]) -> tuple[Request, ...]:
    return ask(user("Give me a JSON object with name Alice and age 30."), False, response_format=form, **EXACT)


def _twice(words: int, after: float) -> tuple[Request, ...]:
    body = {"messages": user(long_text(words)), "max_tokens": 20, **STREAM}
    return Request(body), Request(body, after=after)


def _hello() -> tuple[Request, ...]:
    return ask(user("Say hello in exactly one word."), False, temperature=0, seed=42) * 2


@functools.cache
def quadrants() -> str:
    """A large picture of four colours."""
    return picture(4096, {(0, 0): (255, 0, 0), (1, 0): (0, 255, 0), (0, 1): (0, 0, 255), (1, 1): (255, 255, 0)})


SYSTEM = [{"role": "system", "content": "Always reply exactly: _SYSTEM_CONTROL"}, *user("anything")]
TURNS = [*user("The secret word is BLUE_42. Remember it."), {"role": "assistant", "content": "I will remember it."},
         *user("What is the secret word?")]
NUMBER = "2 + 2 = ? 直接给数字。"

# In the platform's order. Made when they are sent: pictures take a while, and a text for the cache is new each time.
QUESTIONS: dict[str, Callable[[], tuple[Request, ...]]] = {
    "d01_basic_nostream": lambda: ask(user("What is 2+2?"), max_tokens=1500),
    "d02_stream_usage": lambda: ask(user("hi briefly"), max_tokens=50, **STREAM),
    "d03_tool_call": _weather,
    "d04_reasoning": lambda: ask(user("I have 3 apples. I eat 1 and give 1 away. How many apples are left?"),
                                 max_tokens=1500, temperature=0.2),
    "d05_multimodal": lambda: ask(shown("What colour is this picture? Answer in a sentence.",
                                        picture(64, {(0, 0): (255, 0, 0)})), max_tokens=300),
    "d06_cache_hit": lambda: _twice(2400, 5.0),
    "d07_reasoning_plus_content": lambda: ask(
        user("Two trains 300 km apart drive towards each other at 70 km/h and 80 km/h. When do they meet? Explain."),
        max_tokens=4096, temperature=0.3),
    "d08_image_url_blocked": lambda: ask(shown("What is this?", "https://example.com/picture.png"), max_tokens=20),
    "d09_thinking_disable_top": lambda: ask(user(NUMBER), False, temperature=0, max_tokens=300),
    "d10_thinking_disable_ctk": lambda: ask(user(NUMBER), temperature=0, max_tokens=300, **OFF),
    "t1a_thinking_true": lambda: ask(user("2+2=?"), True, max_tokens=300),
    "t1b_thinking_false": lambda: ask(user("2+2=?"), False, max_tokens=100),
    "t1c_thinking_default": lambda: ask(user("2+2=?"), max_tokens=300),
    "t2_temperature_0_0": lambda: _hi(temperature=0.0),
    "t2_temperature_1_0": lambda: _hi(temperature=1.0),
    "t2_temperature_1_1": lambda: _hi(temperature=1.1),
    "t2_temperature_2_0": lambda: _hi(temperature=2.0),
    "t2_top_p_0_0": lambda: _hi(top_p=0),
    "t2_top_p_0_01": lambda: _hi(top_p=0.01),
    "t2_top_p_0_95": lambda: _hi(top_p=0.95),
    "t2_top_p_1_0": lambda: _hi(top_p=1.0),
    "t2_top_p_1_1": lambda: _hi(top_p=1.1),
    "t2_frequency_penalty_neg2": lambda: _hi(frequency_penalty=-2),
    "t2_frequency_penalty_0": lambda: _hi(frequency_penalty=0),
    "t2_frequency_penalty_2": lambda: _hi(frequency_penalty=2),
    "t2_presence_penalty_neg2": lambda: _hi(presence_penalty=-2),
    "t2_presence_penalty_0": lambda: _hi(presence_penalty=0),
    "t2_presence_penalty_2": lambda: _hi(presence_penalty=2),
    "t2_n_1": lambda: _hi(n=1),
    "t2_n_2": lambda: _hi(n=2),
    "t3_max_tokens_none": _story,
    "t3_max_tokens_1": lambda: _story(max_tokens=1),
    "t3_max_tokens_64": lambda: _story(max_tokens=64),
    "t3_max_tokens_mid": lambda: _story(max_tokens=65536),
    "t3_max_tokens_max": lambda: _story(max_tokens=CONTEXT - 2048),
    "t3_max_tokens_neg1": lambda: _story(max_tokens=-1),
    "t3_max_tokens_over": lambda: _story(max_tokens=CONTEXT + 1),
    "t4a_no_system": lambda: ask(user("Reply exactly: _NO_SYSTEM"), False, **EXACT),
    "t4b_system_control": lambda: ask(SYSTEM, False, **EXACT),
    "t5_function_calling": _weather,
    "t6_multi_turn": lambda: ask(TURNS, False, **EXACT),
    "t7_streaming_sse": lambda: ask(user("Count 1 to 5 in english."), max_tokens=80, **STREAM),
    "t8_json_object": lambda: _alice({"type": "json_object"}),
    "t9_json_schema": lambda: _alice({"type": "json_schema", "json_schema": {"name": "person", "schema": ALICE}}),
    "t10_stop_word": lambda: ask(user("Count from 1 to 30, one number per line."), False, stop=["15"], temperature=0,
                                 max_tokens=100),
    "t11a_no_auth": lambda: (Request({"messages": user("hi"), "max_tokens": 20}, key="none"), ),
    "t11b_wrong_auth": lambda: (Request({"messages": user("hi"), "max_tokens": 20}, key="wrong"), ),
    "t12_chinese": lambda: _repeat("中文测试：你好世界"),
    "t12_japanese": lambda: _repeat("日本語: こんにちは"),
    "t12_emoji": lambda: _repeat("Emoji: 🎉🚀✨🇨🇳"),
    "t13_multimodal_base64": lambda: ask(
        shown("This picture has four quadrants. Name the colour of each one in English.", quadrants()), False,
        **EXACT),
    "t14_empty_body": lambda: (Request({}), ),
    "t15_idempotency_seed": _hello,
    "t16a_missing_role": lambda: ask([{"content": "hi"}], max_tokens=20),
    "t16b_missing_content": lambda: ask([{"role": "user"}], max_tokens=20),
    "t16c_empty_messages": lambda: ask([], max_tokens=20),
}
ESSAYS = ("rivers", "bread", "clocks", "bridges", "trade winds", "paper", "lighthouses", "salt")


def essay(number: int, tokens: int) -> Request:
    """A request of the long-output module. tokens: how many are forced."""
    topic = ESSAYS[number % len(ESSAYS)]
    text = f"Write a very long and detailed essay about the history of {topic}. Do not stop."
    return Request({"messages": user(text), "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
                    **STREAM})
