"""Long prompts hold up neither short ones nor the event loop, and hopeless ones are told so early."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from transformers import AutoTokenizer

from tests.helpers.fake_engine import SMALL, FakeEngine, application, client, settings, tokenizer
from tests.helpers.tokenizer import tokenizer_folder
from vllm.overlay.serving import hopeless
from vllm.overlay.serving.errors import PromptTooLong
from vllm.overlay.serving.service import Service

LONG = "word " * 20_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Stuck:
    """A tokenizer that makes no tokens of a long text until it is let go."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(small=SMALL))
        self.begun, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __len__(self):
        return len(self._tokenizer)

    def __call__(self, text, **kwargs):
        if len(text) >= len(LONG):
            self.begun.set()
            assert self.go.wait(60)
        return self._tokenizer(text, **kwargs)


def application_of(service):
    app = application(FakeEngine())
    app.state.service = app.state.openai_serving_chat._service = service
    return app


@pytest.mark.parametrize(("path", "long", "short"), [
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, {"messages": [{"role": "user", "content": "hi"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
     {"messages": [{"role": "user", "content": "hi"}]}),
    (TEXT, {"prompt": LONG}, {"prompt": "hi"}), ("/tokenize", {"prompt": LONG}, {"prompt": "hi"}),
])
async def test_a_short_prompt_does_not_wait_for_a_long_one(path, long, short):
    stuck = Stuck()
    app = application_of(Service(FakeEngine(), stuck, settings(max_model_len=100_000)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver", timeout=60) as http:
        waiting = asyncio.ensure_future(http.post(path, json={"model": "llm", **long}))
        try:
            assert await asyncio.to_thread(stuck.begun.wait, 60), "the long prompt was not begun"
            assert (await http.post(path, json={"model": "llm", **short})).status_code == 200
            assert not waiting.done()
        finally:
            stuck.go.set()
        assert (await waiting).status_code == 200, (await waiting).text


@pytest.mark.parametrize("body", [
    {"messages": [{"role": "user", "content": "hi"}] * 10_000},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
    {"messages": [{"role": "user", "content": "word " * 60_000}]},
    {"messages": [{"role": "user", "content": "hi"}], "stop": [f"x{i}" for i in range(64)],
     "logit_bias": {str(i): 1 for i in range(500)}, "stop_token_ids": [5] * 100_000},
])
async def test_the_event_loop_goes_on_meanwhile(body):
    """Whatever is large about a request: nobody else waits for it."""
    app = application(FakeEngine(), max_model_len=2_000_000)
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - before)

    watching = asyncio.ensure_future(watch())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver", timeout=120) as http:
        began = time.monotonic()
        response = await http.post(CHAT, json={"model": "llm", "max_tokens": 3, **body})
        took = time.monotonic() - began
    watching.cancel()
    assert response.status_code in (200, 400), response.text[:300]
    assert longest < 1, f"the event loop stood still for {longest:.2f} s of {took:.2f} s"


@pytest.mark.parametrize("piece", [7, 1000, 1 << 17])
def test_a_hopeless_prompt_is_told_the_least_that_it_has(piece, monkeypatch):
    monkeypatch.setattr(hopeless, "_PIECE", piece)
    text = "some words of a text " * 500
    true = len(tokenizer()(text, add_special_tokens=False).input_ids)
    try:
        hopeless.refuse_hopeless(tokenizer(), text, 100, "messages")
    except PromptTooLong as error:
        assert 100 < error.prompt_tokens <= true and "at least" in error.message and "100 tokens" in error.message
    else:
        assert piece == 7, "pieces of 7 characters prove nothing"
    hopeless.refuse_hopeless(tokenizer(), text, true, "messages")
    hopeless.refuse_hopeless(tokenizer(), " " * 5000, 600, "messages")


def test_a_hopeless_prompt_over_http():
    """In both forms of request, quickly, with both numbers; one that is to be cut is not hopeless."""
    http = client(FakeEngine(), max_model_len=64)
    text = "word " * 30_000
    for path, fields, param in ((CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
                                (TEXT, {"prompt": text}, "prompt"), ("/tokenize", {"prompt": text}, "prompt")):
        error = http.post(path, json={"model": "llm", **fields}).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded"), error
        assert "at least" in error["message"] and "64 tokens" in error["message"], error
    assert http.post(TEXT, json={"model": "llm", "prompt": text, "truncate_prompt_tokens": 5}).status_code == 200


async def test_both_lanes_use_the_tokenizer_at_once():
    """The tokens are those of one after the other, however the two meet."""
    service = Service(FakeEngine(), tokenizer(), settings(max_model_len=200_000))
    short, long = "hi there, \u00fcber", LONG + "end"
    http = httpx.AsyncClient(transport=httpx.ASGITransport(application_of(service)), base_url="http://testserver",
                             timeout=60)

    async def tokens(text: str) -> list[int]:
        return (await http.post("/tokenize", json={"model": "llm", "prompt": text})).json()["tokens"]

    async with http:
        alone = {text: await tokens(text) for text in (short, long)}
        for _ in range(4):
            together = await asyncio.gather(*(tokens(text) for text in [long, *[short] * 40, long]))
            assert [together[0], together[-1]] == [alone[long]] * 2
            assert together[1:-1] == [alone[short]] * 40
