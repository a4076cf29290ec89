"""Streamed and whole answers are the same, and what was said, for every text of `texts.py`: from the real engine, whose
model is forced to say it, and from an engine that gives any number of tokens at a time."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conformance.forms import check_answer
from tests.conformance.target import CHAT, Target
from tests.conformance.texts import TOOLS, Text, expected, read, texts
from tests.helpers.fake_engine import FakeEngine, client, comparable, gathered, ids, post, stream
from tests.helpers.forced import forced

TEXTS = texts()
TALK = [{"role": "user", "content": "Go."}]


def test_there_are_enough():
    assert len({text.written for text in TEXTS}) >= 150, len(TEXTS)


def said(message: dict[str, Any], text: Text) -> str | None:
    """What is wrong with a message that should be ``text``, or None."""
    found = read(message)
    return None if found == expected(text) else f"{found} instead of {expected(text)} in {text.written!r}"


def test_from_the_engine(own_server):
    """With the tokenizer's own cut into tokens; every fourth text streamed with one that the model chose."""
    target = Target(own_server.base)

    def wrong(numbered: tuple[int, Text]) -> str | None:
        seed, text = numbered
        body: dict[str, Any] = {"model": "llm", "messages": TALK, "tools": TOOLS, "seed": seed,
                                "stream_options": {"include_usage": True}}
        own = forced(text.written, canonical=True)
        whole = check_answer(CHAT, body, target.send(CHAT, {**body, **own}))
        body["stream"] = True
        streamed = check_answer(CHAT, body, target.send(CHAT, {**body, **(own if seed % 4 else forced(text.written))}))
        for got in (whole, streamed):
            found = said(got["choices"][0]["message"], text)
            finish = got["choices"][0]["finish_reason"]
            if found or finish != ("tool_calls" if text.calls else "stop"):
                return f"{found}, finish {finish}"
        parts = [got["choices"][0]["message"].get(name) or "" for name in ("reasoning_content", "content")
                 for got in (whole, streamed)]
        return None if parts[0] == parts[1] and parts[2] == parts[3] else f"whole, streamed: {parts}"

    with ThreadPoolExecutor(16) as pool:
        found = [why for why in pool.map(wrong, enumerate(TEXTS)) if why]
    assert not found, f"{len(found)} of {len(TEXTS)}:\n" + "\n".join(found[:10])


REQUEST: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "max_tokens": 2000}


def check_chunkings(sizes: Callable[[Text], Iterable[int]]) -> None:
    """sizes: how many tokens at a time the engine gives of a text."""
    engine = FakeEngine()
    http = client(engine)
    for text in TEXTS:
        engine.answers, engine.together = (text.written,), 1
        whole = post(http, **REQUEST)["choices"][0]
        # The engine's own tokens are the tokenizer's, which composes characters.
        if unicodedata.is_normalized("NFC", text.written):
            assert not (wrong := said(whole["message"], text)), wrong
        for together in sizes(text):
            engine.together = together
            found = gathered(stream(http, **REQUEST))
            assert comparable(found) == comparable(whole), f"{together} tokens at a time: {text.written!r}"


def test_in_many_chunkings():
    """From one token at a time to all at once, over an engine that says it."""
    check_chunkings(lambda text: (1, 2, 3, 5, 7, 18, 2000))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_in_all_chunkings():
    check_chunkings(lambda text: range(1, len(ids(text.written)) + 1))


def test_cut_anywhere():
    """An output that its limit cuts is the same in both forms, wherever the cut is."""
    engine = FakeEngine()
    http = client(engine)
    for text in [*TEXTS[::40], *[one for one in TEXTS if one.calls][::8]]:
        engine.answers = (text.written,)
        for limit in range(1, len(ids(text.written)), 6):
            whole = comparable(post(http, **{**REQUEST, "max_tokens": limit})["choices"][0])
            found = comparable(gathered(stream(http, **{**REQUEST, "max_tokens": limit})))
            assert found == whole and whole["finish_reason"] == "length", f"cut after {limit}: {text.written!r}"
