"""Writes down what clients sent and what they got: `--middleware tests.conformance.recording.Recording`.

A JSON line per request goes to the file that the environment names: method, path (without a plan in the base URL),
body, status (0: the client left before there was one). To stand outside of `forcing.Forcing`, it is named after it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tests.conformance.forcing import PREFIX

FILE = "RECORDED_REQUESTS"
_lock = threading.Lock()
Message = MutableMapping[str, Any]


def plain_path(path: str) -> str:
    """The path as a client that knows nothing of plans would have sent it."""
    return "/" + path.removeprefix(PREFIX).partition("/")[2] if path.startswith(PREFIX) else path


class Recording:
    """ASGI middleware."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._file = app, os.environ[FILE]

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]],
                       send: Callable[[Message], Awaitable[None]]) -> None:
        """Passes everything on unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        status = 0

        async def seen() -> Message:
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, seen, sent)
        finally:
            self._write({"method": scope["method"], "path": plain_path(scope["path"]), "status": status,
                         "body": _json(b"".join(parts))})

    def _write(self, line: dict[str, Any]) -> None:
        with _lock, open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _json(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body.decode(errors="replace")
