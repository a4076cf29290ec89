"""The machine that splits an answer: what each text becomes, and that it is the same however the text arrives."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from vllm.overlay.serving.parse.events import CallArguments, CallStart, Content, Event, Thought, merged
from vllm.overlay.serving.parse.markers import CALL, END_CALL, END_THINK, THINK, MarkerSplitter
from vllm.overlay.serving.parse.output import OutputParser

MARKERS = (THINK, END_THINK, CALL, END_CALL)
IDS = dict(enumerate(MARKERS, start=1000))
SCHEMAS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"},
                                                    "options": {"type": "object"}}},
    "now": {},
}


def call(name: str, **values: str) -> str:
    """The text of one call block, as the chat template writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def parser(by_id: bool, **options) -> OutputParser:
    options.setdefault("schemas", SCHEMAS)
    return OutputParser(MarkerSplitter(IDS if by_id else {}, MARKERS), **options)


def feed(machine: OutputParser, pieces: list[tuple[str, int]], truncated: bool = False) -> list[Event]:
    events: list[Event] = []
    for piece, token in pieces:
        events += machine.feed(piece, token)
    return merged(events + machine.finish(truncated))


def tokens(text: str, cuts: set[int] | None = None) -> list[tuple[str, int]]:
    """The text as tokens: each marker one token with its id, other text cut at ``cuts`` (None = one piece each)."""
    pieces, at = [], 0
    for part in re.split("(" + "|".join(MARKERS) + ")", text):
        if part in MARKERS:
            pieces.append((part, 1000 + MARKERS.index(part)))
        elif part:
            inner = sorted(cut - at for cut in cuts or () if at < cut < at + len(part))
            pieces += [(part[a:b], -1) for a, b in itertools.pairwise([0, *inner, len(part)])]
        at += len(part)
    return pieces


def shown(events: list[Event]) -> dict:
    """The events as the message that they make."""
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls), f"call {event.index} begins after {len(calls)} calls"
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return {"thought": "".join(e.text for e in events if isinstance(e, Thought)),
            "content": "".join(e.text for e in events if isinstance(e, Content)),
            "calls": [tuple(one) for one in calls]}


OPEN = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
WEATHER = ("get_weather", '{"city": "Paris", "days": 3}')
SCRIPT = "<function=x>\n<parameter=y>\n1 < 2 && \"q\"\n</parameter> </param\n</tool_call> 北京 🎉"

# name: (text, options, what it must become). In every case the markers are tokens.
CASES = {
    "content": ("Hello there.", {}, {"content": "Hello there."}),
    "thought and content": ("Hm.\n</think>\n\nYes.", {"in_thought": True}, {"thought": "Hm.", "content": "Yes."}),
    "thought only": ("Hm.\n", {"in_thought": True}, {"thought": "Hm.\n"}),
    "empty thought": ("\n\n</think>\n\nYes.", {"in_thought": True}, {"content": "Yes."}),
    "opens the thought itself": ("<think>\nHm.\n</think>\n\nYes.", {}, {"thought": "Hm.", "content": "Yes."}),
    "opens a thought twice": ("<think>\nHm.\n</think>\n\nYes.", {"in_thought": True},
                              {"thought": "Hm.", "content": "Yes."}),
    "closes a thought that is not open": ("</think>\n\nYes.", {}, {"content": "Yes."}),
    "closes a thought twice": ("Hm.</think>\n</think>\n\nYes.", {"in_thought": True},
                               {"thought": "Hm.", "content": "Yes."}),
    "markers in an answer are text": ("Use <think> and </think>.", {}, {"content": "Use <think> and </think>."}),
    "no reasoning parser": ("Hm.\n</think>\n\nYes.", {"in_thought": True, "reasoning": False},
                            {"content": "Hm.\n</think>\n\nYes."}),
    "blanks inside stay": ("a\n\n  b\n</think>\n\nc\n\n  d\n", {"in_thought": True},
                           {"thought": "a\n\n  b", "content": "c\n\n  d\n"}),
    "leading blanks stay without thought": ("\n  x", {}, {"content": "\n  x"}),
    "only blanks": (" \n", {}, {"content": " \n"}),
    "one call": (call("get_weather", city="Paris", days="3"), {}, {"calls": [WEATHER]}),
    "content and call": ("Let me look.\n\n" + call("get_weather", city="Paris", days="3"), {},
                         {"content": "Let me look.", "calls": [WEATHER]}),
    "thought, content and call": ("I need it.\n</think>\n\nLet me look.\n\n" + call("get_weather", city="Paris",
                                                                                    days="3"),
                                  {"in_thought": True},
                                  {"thought": "I need it.", "content": "Let me look.", "calls": [WEATHER]}),
    "call ends the thought": ("I need it.\n" + call("now"), {"in_thought": True},
                              {"thought": "I need it.", "calls": [("now", "{}")]}),
    "two calls": (call("get_weather", city="Paris", days="3") + "\n" + call("now"), {},
                  {"calls": [WEATHER, ("now", "{}")]}),
    "two functions in one block": (
        "<tool_call>\n<function=now>\n</function>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "</function>\n</tool_call>", {}, {"calls": [("now", "{}"), ("get_weather", '{"city": "Rome"}')]}),
    "text behind a call": (call("now") + "\n\nDone. ", {}, {"content": "Done. ", "calls": [("now", "{}")]}),
    "text around a call": ("Before.\n\n" + call("now") + "\nAfter.", {},
                           {"content": "Before.\n\nAfter.", "calls": [("now", "{}")]}),
    "tags and script in a value": (call("write_file", path="a.xml", text=SCRIPT), {},
                                   {"calls": [("write_file", json.dumps({"path": "a.xml", "text": SCRIPT},
                                                                        ensure_ascii=False))]}),
    "newlines in a value": (call("write_file", text="\n\na\n\nb\n\n"), {},
                            {"calls": [("write_file", json.dumps({"text": "\n\na\n\nb\n\n"}))]}),
    "empty value": (call("write_file", path=""), {}, {"calls": [("write_file", '{"path": ""}')]}),
    "nested value": (call("write_file", options='{"a": {"b": [1, 2.5, null]}}'), {},
                     {"calls": [("write_file", '{"options": {"a": {"b": [1, 2.5, null]}}}')]}),
    "a number where none fits": (call("get_weather", days="many"), {},
                                 {"calls": [("get_weather", '{"days": "many"}')]}),
    "unknown function": (call("other", x="1"), {}, {"calls": [("other", '{"x": "1"}')]}),
    "no newlines": ("<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days>3</parameter>"
                    "</function></tool_call>", {}, {"calls": [WEATHER]}),
    "closing parameter is missing": (OPEN + "</function>\n</tool_call>",
                                     {}, {"calls": [("get_weather", '{"city": "Paris"}')]}),
    "closing function is missing": (OPEN + "</parameter>\n</tool_call>",
                                    {}, {"calls": [("get_weather", '{"city": "Paris"}')]}),
    "ends inside a value": (OPEN, {},
                            {"calls": [("get_weather", '{"city": "Paris"}')]}),
    "ends behind the function": (OPEN + "</parameter>\n</function>", {},
                                 {"calls": [("get_weather", '{"city": "Paris"}')]}),
    "block is not closed before the next": ("<tool_call>\n<function=now>\n</function>\n" + call("now"), {},
                                            {"calls": [("now", "{}"), ("now", "{}")]}),
    "value is not closed before the next": (OPEN + "</tool_call>\n"
                                            + call("now"), {},
                                            {"calls": [("get_weather", '{"city": "Paris"}'), ("now", "{}")]}),
    "a closing tag and many blanks are no end": (
        OPEN + "</parameter>" + " " * 70 + "\n</parameter>\n</function>\n</tool_call>", {},
        {"calls": [("get_weather", json.dumps({"city": "Paris\n</parameter>" + " " * 70}))]}),
    "stray text between parameters": (OPEN.replace("<parameter", "hm <b> <parameter")
                                      + "</parameter>\n</function>\n</tool_call>", {},
                                      {"calls": [("get_weather", '{"city": "Paris"}')]}),
    "block without a function is content": ('<tool_call>\n{"name": "now"}\n</tool_call>', {},
                                            {"content": '<tool_call>\n{"name": "now"}\n</tool_call>'}),
    "empty block": ("a <tool_call>\n</tool_call> b", {}, {"content": "a  b"}),
    "no tools": (call("now"), {"schemas": None}, {"content": call("now")}),
    "thought opens a call without tools": ("a " + call("now"), {"schemas": None, "in_thought": True},
                                           {"thought": "a " + call("now")}),
    "one call only": (call("now") + call("now"), {"one_call": True}, {"calls": [("now", "{}")]}),
    "one call of two functions": ("<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
                                  {"one_call": True}, {"calls": [("now", "{}")]}),
}


def expected(case: str) -> tuple[str, dict, dict]:
    text, options, wanted = CASES[case]
    return text, options, {"thought": "", "content": "", "calls": [], **wanted}


@pytest.mark.parametrize("case", CASES)
def test_whole(case):
    text, options, wanted = expected(case)
    assert shown(feed(parser(True, **options), tokens(text))) == wanted


@pytest.mark.parametrize("case", CASES)
def test_every_single_cut_of_tokens(case):
    """The text between markers cut in two at every place gives what the whole gives."""
    text, options, wanted = expected(case)
    for cut in range(1, len(text)):
        got = shown(feed(parser(True, **options), tokens(text, {cut})))
        assert got == wanted, f"cut at {cut}: {text[:cut]!r} | {text[cut:]!r}"


@pytest.mark.parametrize("case", CASES)
def test_one_character_at_a_time(case):
    text, options, wanted = expected(case)
    assert shown(feed(parser(True, **options), tokens(text, set(range(len(text)))))) == wanted


# Without ids, letters are all there is: a value cannot hold a marker's letters and tell them from a marker. It does
# not have to.
@pytest.mark.parametrize("case", CASES)
def test_markers_found_by_their_letters(case):
    """A vocabulary without the tokens: every cut in two and single characters, markers cut as well, give the same."""
    text, options, wanted = expected(case)
    for cuts in ((), *((cut,) for cut in range(1, len(text))), tuple(range(1, len(text)))):
        pieces = [(text[a:b], -1) for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert shown(feed(parser(False, **options), pieces)) == wanted, f"cut at {cuts}"


def test_letters_of_a_marker_are_text_where_it_is_a_token():
    """An answer about the format, written by ordinary tokens, is left alone."""
    spelled = [("Write </", -1), ("think", -1), ("> then <tool", -1), ("_call>", -1)]
    assert shown(feed(parser(True), spelled))["content"] == "Write </think> then <tool_call>"
    in_thought = shown(feed(parser(True, in_thought=True), spelled))
    assert in_thought["thought"] == "Write </think> then <tool_call>", in_thought


def test_broken_bytes_before_a_marker_are_not_lost():
    """A character cut by a marker comes out, broken, on the marker's own side of it."""
    got = shown(feed(parser(True, in_thought=True), [("a", 5), ("\ufffd</think>", 1001), ("b", 6)]))
    assert got == {"thought": "a\ufffd", "content": "b", "calls": []}


@pytest.mark.parametrize("case", [name for name in CASES if "call" in CASES[name][0] or "think" in CASES[name][0]])
def test_truncated_anywhere(case):
    """A text cut at any place by the token limit: streamed = whole, no marker in what is shown, and no more than the
    whole."""
    text, options, wanted = expected(case)
    inside = {at for match in re.finditer("|".join(MARKERS), text) for at in range(match.start() + 1, match.end())}
    for end in set(range(1, len(text))) - inside:
        head = tokens(text[:end])
        whole = feed(parser(True, **options), head, truncated=True)
        single = feed(parser(True, **options), tokens(text[:end], set(range(end))), truncated=True)
        assert shown(whole) == shown(single), f"cut at {end}: {text[:end]!r}"
        got = shown(whole)
        # A value that holds the format's own tags may look complete where it is cut.
        if wanted["calls"] and "<" not in wanted["content"] + str(wanted["calls"]):
            for name, arguments in got["calls"]:
                begun = [whole_name for whole_name, whole_arguments in wanted["calls"]
                         if whole_name == name and whole_arguments.startswith(arguments)]
                assert begun, f"{name}({arguments}) is no beginning of one of {wanted['calls']}"
            assert wanted["content"].startswith(got["content"].rstrip()), f"cut at {end}: {got}"


def test_events_come_as_early_as_they_can():
    """The name first, then a string's characters as they are generated; not all at the end."""
    machine = parser(True)
    seen = [machine.feed(piece, token) for piece, token in tokens(call("get_weather", city="Paris", days="3"),
                                                                  set(range(400)))]
    steps = [event for events in seen for event in events]
    assert steps[0] == CallStart(0, "get_weather"), steps
    arguments = [event.text for event in steps if isinstance(event, CallArguments)]
    assert arguments[:6] == ['{"city": "P', "a", "r", "i", "s", '"'], arguments


def test_random_answers_streamed_as_whole():
    """Answers made of random pieces of the format, right and wrong, cut at random: always what the whole gives."""
    pieces = [*MARKERS, "<function=now>", "<function=get_weather>", "<parameter=city>", "<parameter=days>",
              "</parameter>",
              "</function>", "\n", "\n\n", " ", "x", "3", "null", "<", "</", "<parameter", "北京", "Hello", "{}", ">"]
    for seed in range(1500):
        rng = random.Random(seed)
        text = "".join(rng.choices(pieces, k=rng.randint(1, 25)))
        options = {"in_thought": rng.random() < 0.5, "one_call": rng.random() < 0.2}
        truncated = rng.random() < 0.3
        whole = shown(feed(parser(True, **options), tokens(text), truncated))
        for _ in range(3):
            cuts = {rng.randrange(len(text) + 1) for _ in range(rng.randint(1, 30))}
            got = shown(feed(parser(True, **options), tokens(text, cuts), truncated))
            assert got == whole, f"seed {seed}: {text!r} cut at {sorted(cuts)}"
        for name, arguments in whole["calls"]:
            if not truncated:
                json.loads(arguments), name


def test_linear_in_the_length():
    """Twenty times the text takes about twenty times as long, not four hundred: a large file in one value, many
    tags."""
    import time

    def seconds(lines: int) -> float:
        text = call("write_file", text="<a>\n" * lines)
        best = float("inf")
        for _ in range(3):
            machine = parser(True)
            start = time.thread_time()
            for piece, token in tokens(text, set(range(0, len(text), 7))):
                machine.feed(piece, token)
            machine.finish(False)
            best = min(best, time.thread_time() - start)
        return best

    small, large = seconds(250), seconds(5000)
    assert large < 60 * small, f"{small:.4f} s for 250 lines, {large:.4f} s for 5000"
