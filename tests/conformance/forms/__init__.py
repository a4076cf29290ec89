"""What an answer must look like, whatever it says: the clients' own types, and what their code relies on beside these.

Everything here raises `Failed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.conformance.checks import expect
from tests.conformance.forms.chat import REASONING, chat, chat_stream
from tests.conformance.forms.completions import completion, completion_stream
from tests.conformance.forms.messages import message, message_stream
from tests.conformance.forms.responses import response, response_stream
from tests.conformance.target import Answer, Streamed


def check_answer(path: str, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """The answer to ``body`` must be a success of the right form; gives it as one JSON object, streamed or not.

    Raises Failed.
    """
    expect(200 <= answer.status < 300, f"refused: {answer}")
    if body.get("stream"):
        expect(isinstance(answer, Streamed), f"asked for a stream, got {answer.headers.get('content-type')}: {answer}")
        assert isinstance(answer, Streamed)
        return _STREAMED[path](body, answer)
    expect(isinstance(answer.body, dict), f"not a JSON object: {answer}")
    return _WHOLE[path](body, answer.body)


def check_error(answer: Answer, *fields: str) -> None:
    """A refusal that a client can show: 4xx, OpenAI's error object, each of ``fields`` named in it."""
    expect(400 <= answer.status < 500, f"not refused: {answer}")
    error = (answer.body or {}).get("error") if isinstance(answer.body, dict) else None
    expect(isinstance(error, dict) and isinstance(error.get("message"), str) and error["message"],
           f"no error object: {answer}")
    expect({"type", "param", "code"} <= set(error), f"error lacks type, param or code: {answer}")
    for field in fields:
        expect(field in answer.text, f"{field} is not named: {answer}")


def thought_of(message: Mapping[str, Any]) -> str:
    """The reasoning of a chat message, where a client may look for it."""
    for name in REASONING:
        if message.get(name):
            return message[name]
    content = message.get("content") or ""
    return content.partition("</think>")[0].removeprefix("<think>") if content.startswith("<think>") else ""


def _count(_: Mapping[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    expect(type(got.get("input_tokens")) is int and got["input_tokens"] > 0, got)
    return got


_WHOLE: Mapping[str, Callable[[Mapping[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "/v1/chat/completions": chat, "/v1/completions": completion, "/v1/responses": response, "/v1/messages": message,
    "/v1/messages/count_tokens": _count, "/v1/responses/input_tokens": _count}
_STREAMED: Mapping[str, Callable[[Mapping[str, Any], Streamed], dict[str, Any]]] = {
    "/v1/chat/completions": chat_stream, "/v1/completions": completion_stream, "/v1/responses": response_stream,
    "/v1/messages": message_stream}
