"""Stop strings, over every way that the text may arrive."""

from __future__ import annotations

import pytest

from vllm.overlay.serving.parse.events import CallArguments, CallStart, Content, Thought, merged
from vllm.overlay.serving.stop import StopFilter


def run(text: str, stops: list[str], size: int, include: bool = False) -> tuple[str, str | None]:
    one = StopFilter(stops, include)
    out = []
    for at in range(0, len(text), size):
        out += one.feed([Content(text[at:at + size])])
    return "".join(event.text for event in out + one.flush()), one.matched


@pytest.mark.parametrize(("text", "stops", "kept", "matched"), [
    ("1, 2, 15, 16", ["15"], "1, 2, ", "15"),
    ("1, 2, 1", ["15"], "1, 2, 1", None),
    ("ababac", ["abac"], "ab", "abac"),
    ("one two", ["two", "one"], "", "one"),
    ("x<|end|>y", ["<|end|>"], "x", "<|end|>"),
    ("aé🎉b", ["🎉"], "aé", "🎉"),
    ("nothing", [], "nothing", None),
])
def test_stops(text, stops, kept, matched):
    for size in (len(text), 1, 2, 3):
        assert run(text, stops, size) == (kept, matched), f"in pieces of {size}"


def test_the_stop_string_can_be_kept():
    for size in (1, 7):
        assert run("a STOP b", ["STOP"], size, include=True) == ("a STOP", "STOP")


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    one = StopFilter(["15"], False)
    assert one.feed([Content("abc")]) == [Content("abc")]
    assert one.feed([Content("d1")]) == [Content("d")]
    assert one.feed([Content("6")]) == [Content("16")]


def test_calls_are_not_searched_and_texts_are_not_joined_over_them():
    one = StopFilter(["ab"], False)
    events = [Content("a"), CallStart(0, "ab"), CallArguments(0, '{"ab": "ab"}'), Content("b")]
    assert one.feed(events) + one.flush() == events
    assert one.matched is None


def test_thought_and_content_are_not_joined():
    one = StopFilter(["ab"], False)
    assert merged(one.feed([Thought("xa"), Content("by")]) + one.flush()) == [Thought("xa"), Content("by")]
    assert one.matched is None


def test_not_before_min_tokens():
    one = StopFilter(["ab"], False)
    assert merged(one.feed([Content("xab")], armed=False)) == [Content("xab")]
    assert merged(one.feed([Content("yab")])) == [Content("y")]
    assert one.matched == "ab"
