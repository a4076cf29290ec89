"""Our application over an engine that says what a test tells it to, and a browser at its page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import uvicorn

from tests.helpers.fake_engine import FakeEngine, application
from tests.page import browser as chromium
from tests.page.browser import Browser, Page
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
        async for output in super()._outputs(tokens, params, request_id):
            # As if all of the prompt but its end had been in the cache.
            output.num_cached_tokens = len(tokens) - 4
            yield output


class Site:
    """The application, listening. keys: of the API; none until a test sets them."""

    def __init__(self, *arguments: str) -> None:
        self.engine = Scripted("Hello.")
        self.engine.say("Hello.")
        app = application(self.engine, arguments, log_requests=False)
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


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.fixture(scope="session")
def guarded() -> Iterator[Site]:
    """A server that wants a key."""
    made = Site("--api-key", "right")
    yield made
    made.close()


@pytest.fixture(scope="session")
def chrome() -> Iterator[Browser]:
    if chromium.find() is None:
        pytest.skip(chromium.MISSING)
    with chromium.browser() as started:
        yield started


@pytest.fixture
def page(chrome: Browser, site: Site) -> Iterator[Page]:
    """The page, loaded for the first time by somebody. A test ends with no error in its console."""
    site.engine.say("Hello.")
    with chrome.open(site.url) as opened:
        opened.until("document.querySelector('#model').value === 'llm'")
        yield opened
        assert opened.errors == []
