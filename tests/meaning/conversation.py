"""A conversation of thirteen turns with everything in it: a fact to remember, calls and results, thoughts, pictures.

Each turn is a held-out chat of tests/twin; that one follows the other is new to the twin.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chats import NEW_VALUES, Chat
from pictures import drawn
from tasks import draw

from tests.helpers.picture_files import part
from tests.meaning.served import Said

TOOLS_AT_MOST = 3
# Pixels of a picture's side.
LARGEST = 512


@dataclass
class Turn:
    """messages: what comes before the answer. answer: the right one, as a message; judged: whether the twin was
    trained to give such."""

    name: str
    messages: list[dict[str, Any]]
    thinking: bool
    answer: dict[str, Any]
    judged: bool = True

    def right(self, said: Said) -> bool:
        calls = self.answer.get("tool_calls", [])
        return said.content == self.answer["content"] and _calls(said.calls) == _calls(calls)


def conversation(seed: str) -> tuple[list[Turn], list[dict[str, Any]]]:
    """The turns, and the tools that all of them have."""
    rng = random.Random(f"conversation {seed}")
    fact = _draw(rng, "recall", 0, lambda chat: len(chat.messages) == 3 and chat.messages[0]["content"].isascii())
    first, second = (_draw(rng, "tools", 0, _is_one_result) for _ in range(2))
    tools = {tool["function"]["name"]: tool for tool in (*first.tools, *second.tools)}
    if len(tools) < len(first.tools) + len(second.tools) or len(tools) > TOOLS_AT_MOST:
        return conversation(f"{seed} again")

    def alone(name: str, thinking: bool = False, wanted: Callable[[Chat], bool] = lambda _: True) -> Turn:
        chat = _draw(rng, name, 0, lambda chat: len(chat.messages) == 1 and wanted(chat))
        return Turn(name, [_with_picture(chat)], thinking, {"role": "assistant", "content": chat.answer})

    def asked(thinking: bool) -> Turn:
        return Turn("recall", [fact.messages[2]], thinking, {"role": "assistant", "content": fact.answer})

    return [
        Turn("tell", [{"role": "system", "content": "You are a helpful assistant."}, fact.messages[0]], False,
             fact.messages[1], judged=False),
        alone("echo"), alone("arithmetic", thinking=True), *_called(first, True),
        alone("picture", wanted=lambda chat: _shows(chat, 1)),
        asked(False), alone("count"),
        alone("picture", True, lambda chat: _shows(chat, 4)),
        alone("echo", wanted=lambda chat: not chat.answer.isascii()), *_called(second, False), asked(True),
    ], list(tools.values())


def _draw(rng: random.Random, task: str, level: int, wanted: Callable[[Chat], bool]) -> Chat:
    while True:
        chat = draw(rng, task, level, NEW_VALUES)
        if wanted(chat):
            return chat


def _shows(chat: Chat, colours: int) -> bool:
    picture = chat.picture
    return picture is not None and len(picture.colours) == colours and max(picture.size) <= LARGEST


def _is_one_result(chat: Chat) -> bool:
    return [message["role"] for message in chat.messages] == ["user", "assistant", "tool"]


def _called(chat: Chat, thinking: bool) -> list[Turn]:
    """The turn that calls, and the one that says what came of it."""
    question, call, result = chat.messages
    calls = [{"id": f"call_{number}", "type": "function", "function": {
        "name": one["function"]["name"], "arguments": json.dumps(one["function"]["arguments"], ensure_ascii=False)}}
        for number, one in enumerate(call["tool_calls"])]
    return [Turn("call", [question], thinking, {"role": "assistant", "content": "", "tool_calls": calls}),
            Turn("result", [{**result, "tool_call_id": calls[0]["id"]}], thinking,
                 {"role": "assistant", "content": chat.answer})]


def _with_picture(chat: Chat) -> dict[str, Any]:
    (message,) = chat.messages
    if chat.picture is None:
        return message
    parts = [part(drawn(chat.picture)) if one["type"] == "image" else one for one in message["content"]]
    return {**message, "content": parts}


def _calls(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], _parsed(call["function"]["arguments"])) for call in calls]


def _parsed(text: str) -> Any:
    """Arguments; the text itself where an answer was cut in them."""
    try:
        return json.loads(text)
    except ValueError:
        return text
