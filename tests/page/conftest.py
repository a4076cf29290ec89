"""Our application over an engine that says what a test tells it to, and a browser at its page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.site import Site
from tests.page import browser as chromium
from tests.page.browser import Browser, Page


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
