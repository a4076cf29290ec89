"""Forced outputs for clients that know nothing of grammars: `tests.helpers.forced`, put into their requests.

    python -m vllm.entrypoints.openai.api_server ... --middleware tests.conformance.forcing.Forcing

What to say stands in a header, or in the base URL for clients that send no headers of their own. The server's own code
is not touched: it gets what a client could have sent, and the model has to say it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from tests.helpers.forced import forced

HEADER = "x-forced-output"
SHORT = "x-short-output"
PREFIX = "/forced/"
RESULT = "$RESULT"
_OWN_GRAMMAR = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ABSENT: tuple[Any, ...] = (None, "", [], {})
# What a generated request may ask for at most: (fields, what stays of it, up to which value it is valid).
_SHORT = ((("min_tokens", *_LIMITS), 4, 2**18), (("n", "best_of"), 2, 1024))
Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """What the model says. answer: its text, in which $RESULT stands for the last result of a tool. call: what it says
    instead where there are tools and no result yet. thought: before either, where the request lets it think.

    A request that demands a form of its own (JSON, a call) is left alone.
    """

    answer: str
    call: str = ""
    thought: str = "Let me see."

    def header(self) -> dict[str, str]:
        """The header of a request that is to be answered so."""
        return {HEADER: self._coded()}

    def base(self, url: str) -> str:
        """The base URL of a client that is to be answered so; url: the server's, without ``/v1``."""
        return url + PREFIX + self._coded()

    def _coded(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    def changed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The body that makes the model say it."""
        if _has_own_form(body):
            return body
        result = _last_result(body)
        text = self.call if self.call and body.get("tools") and result is None else self.answer
        text = text.replace(RESULT, result or "")
        if _thinks(path, body):
            text = f"{self.thought}\n</think>\n\n{text}"
        more = forced(text)
        # A client's limit is for what a model would say of itself.
        limit = more.pop("max_tokens")
        return {**body, **more, **{name: max(body[name], limit) for name in _LIMITS if body.get(name)}}


def _has_own_form(body: dict[str, Any]) -> bool:
    forms = (body.get("response_format"), (body.get("text") or {}).get("format"),
             (body.get("output_config") or {}).get("format"))
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return (any(name in body for name in _OWN_GRAMMAR) or kind in ("required", "function", "tool", "any")
            or any(form and form.get("type") != "text" for form in forms))


def _thinks(path: str, body: dict[str, Any]) -> bool:
    switch = (body.get("thinking") or {}).get("type")
    if path.endswith("/messages"):
        return switch in ("enabled", "adaptive")
    return switch != "disabled" and (body.get("chat_template_kwargs") or {}).get("enable_thinking", True) \
        and body.get("reasoning_effort") != "none"


def _last_result(body: dict[str, Any]) -> str | None:
    """The text of the tool's result that the request ends with, or None."""
    said = body.get("messages") or body.get("input")
    last = said[-1] if isinstance(said, list) and said else {}
    if last.get("role") == "tool":
        return _text(last.get("content"))
    if last.get("type") == "function_call_output":
        return _text(last.get("output"))
    blocks = last.get("content")
    results = [block for block in blocks if block.get("type") == "tool_result"] if isinstance(blocks, list) else []
    return _text(results[-1].get("content")) if results else None


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def _planned(coded: str, path: str, content: bytes) -> bytes:
    plan = Plan(**json.loads(base64.urlsafe_b64decode(coded)))
    return json.dumps(plan.changed(path, json.loads(content))).encode()


def shortened(path: str, content: bytes) -> bytes:
    """The body of a request that nobody wrote by hand, with little to generate; what is not valid stays so."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(body, dict):
        return content
    for names, most, valid in _SHORT:
        body.update({name: most for name in names if type(body.get(name)) is int and most < body[name] <= valid})
    if all(body.get(name) in _ABSENT for name in _LIMITS) and not path.startswith("/v1/messages"):
        body["max_output_tokens" if path.startswith("/v1/responses") else "max_tokens"] = _SHORT[0][1]
    return json.dumps(body).encode()


class Forcing:
    """ASGI middleware. Header SHORT: as `shortened`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]],
                       send: Callable[[Message], Awaitable[None]]) -> None:
        """Passes everything on; the body of a request that comes with a plan, changed."""
        path, held = scope.get("path", ""), dict(scope.get("headers", ()))
        coded, short = held.get(HEADER.encode(), b"").decode(), SHORT.encode() in held
        if path.startswith(PREFIX):
            coded, _, rest = path.removeprefix(PREFIX).partition("/")
            path = f"/{rest}"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if not (coded or short) or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = shortened(path, b"".join(parts)) if short else _planned(coded, path, b"".join(parts))
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"content-length",
                                                                                   b"transfer-encoding")]
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def changed() -> Message:
            return pending.pop() if pending else await receive()

        await self._app({**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, changed, send)
