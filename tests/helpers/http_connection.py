"""One HTTP request to the application by ASGI: its client can read slowly, and leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Connection:
    """messages: what the application has sent; received: set when the first part of a body has come."""

    def __init__(self, app: Any, path: str, body: Any = None, receive: Any = None, method: str = "POST") -> None:
        """receive: instead of the whole body and then silence."""
        self._body = b"" if body is None else json.dumps(body).encode()
        self._sent_body = False
        self._left = asyncio.Event()
        self.messages: list[dict] = []
        self.received = asyncio.Event()
        # Cleared by a test whose client does not read.
        self.reads = asyncio.Event()
        self.reads.set()
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
                 "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
                 "scheme": "http", "headers": [(b"content-type", b"application/json")], "client": ("c", 1),
                 "server": ("s", 80)}
        self.task = asyncio.ensure_future(app(scope, receive or self._receive, self._send))

    async def _receive(self) -> dict:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        await self.reads.wait()
        self.messages.append(message)
        if message.get("body"):
            self.received.set()

    async def leave(self) -> None:
        self._left.set()
        await asyncio.wait_for(self.task, 60)

    async def status(self, seconds: float = 20) -> int:
        """Of the whole response."""
        await asyncio.wait_for(self.task, seconds)
        return self.status_now

    @property
    def status_now(self) -> int:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)
