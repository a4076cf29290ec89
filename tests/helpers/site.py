"""Our application, listening, over an engine that gives the answers a test tells it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn

from tests.helpers.fake_engine import FakeEngine, application
from vllm.outputs import RequestOutput


class Scripted(FakeEngine):
    """A FakeEngine that gives its answers one after the other, one to a request; the last one for ever."""

    def say(self, *answers: str, delay: float = 0.0, error: Exception | None = None, error_after: int = 0) -> None:
        """What comes next; nothing of earlier requests is remembered."""
        self.coming, self.delay, self.error, self.error_after = list(answers), delay, error, error_after
        self.requests.clear()
        self.pictures.clear()
        self.aborted.clear()

    async def _outputs(self, tokens: Sequence[int], params: Any, request_id: str) -> AsyncIterator[RequestOutput]:
        self.answers = (self.coming.pop(0) if len(self.coming) > 1 else self.coming[0], )
        # As if all of the prompt but its end had been in the cache.
        self.cached = len(tokens) - 4
        async for output in super()._outputs(tokens, params, request_id):
            yield output


class Site:
    """The application, listening. arguments: of the command line; changes: of Settings."""

    def __init__(self, *arguments: str, **changes: Any) -> None:
        self.engine = Scripted("Hello.")
        self.engine.say("Hello.")
        app = application(self.engine, arguments, log_requests=False, **changes)
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve()), daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "it does not listen"
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
