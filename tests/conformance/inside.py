"""Shows a test how many asyncio tasks the server's front end has: `--middleware tests.conformance.inside.Inside`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PATH = "/tasks-of-this-process"
Message = MutableMapping[str, Any]


class Inside:
    """ASGI middleware."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]],
                       send: Callable[[Message], Awaitable[None]]) -> None:
        """Answers one path, passes everything else on."""
        if scope.get("path") != PATH:
            await self._app(scope, receive, send)
            return
        body = json.dumps({"tasks": len(asyncio.all_tasks())}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})
