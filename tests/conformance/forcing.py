"""Lets clients that know nothing of grammars get a forced output: a header of the request says it.

    python -m vllm.entrypoints.openai.api_server ... --middleware tests.conformance.forcing.Forcing

The server's own code is not touched: the request's body gets the fields of `tests.helpers.forced`, as a client could
have sent them, and the model has to emit the text.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tests.helpers.forced import forced

HEADER = "x-forced-output"
Message = MutableMapping[str, Any]


def header(text: str) -> dict[str, str]:
    """The header that forces ``text``, which is all that the model generates, a thought included."""
    return {HEADER: urllib.parse.quote(text)}


class Forcing:
    """ASGI middleware."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]],
                       send: Callable[[Message], Awaitable[None]]) -> None:
        """Passes everything on; a body with the header beside it, changed."""
        text = dict(scope.get("headers", ())).get(HEADER.encode())
        if text is None:
            await self._app(scope, receive, send)
            return
        parts = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        body = json.loads(b"".join(parts))
        more = forced(urllib.parse.unquote(text.decode()))
        limit = more.pop("max_tokens")
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if name in body:
                body[name] = max(body[name], limit)
        changed = json.dumps({**body, **more}).encode()
        scope = {**scope, "headers": [(name, value) for name, value in scope["headers"]
                                      if name not in (b"content-length", b"transfer-encoding")]
                 + [(b"content-length", str(len(changed)).encode())]}
        sent = False

        async def once() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": changed, "more_body": False}

        await self._app(scope, once, send)
