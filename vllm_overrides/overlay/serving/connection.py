"""The client's side of a request: an event stream, and work that ends when the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from starlette.responses import Response

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):
    """Nobody waits for the answer any more; its work has been cancelled."""


class TimeIsUp(Exception):
    """The work was not done in time, and has been cancelled."""


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive, until: float | None = None) -> T:
    """The result of ``work``, which is cancelled as soon as the client disconnects (then ClientGone is raised), or at
    ``until``, a time of the event loop (then TimeIsUp is).

    receive is the ASGI receive channel of a request whose body has been read: all that can come is the disconnect.
    """
    left = None if until is None else max(until - asyncio.get_running_loop().time(), 0)
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, listening}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if listening.done():
            raise ClientGone
        raise TimeIsUp
    finally:
        for task in (working, listening):
            task.cancel()
        # Waits until the work's own clean-up (abort in the engine) has run.
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, each flushed by itself; closes its source when the client goes.

    Starlette's StreamingResponse notices a client that leaves during a silent phase (a long prefill) only under some
    servers.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None] | None = None,
                 headers: dict[str, str] | None = None) -> None:
        """on_end: called when the stream is over, however it ends."""
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_end = on_end
        # Proxies (nginx) would otherwise gather events.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the events; raises nothing when the client leaves."""
        try:
            with contextlib.suppress(ClientGone, OSError):
                await while_connected(self._write(send), receive)
        finally:
            if self._on_end is not None:
                self._on_end()

    async def _write(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
