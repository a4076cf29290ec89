"""Outputs that a model may give, and what a client must read in each: thoughts, answers and calls in all combinations.

A text is what the model generates behind a prompt that opens a thought; the tools are TOOLS.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.forced import call

TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
    "path": {"type": "string"}, "text": {"type": "string"}, "line": {"type": "integer"}, "ratio": {"type": "number"},
    "force": {"type": "boolean"}, "range": {"type": "array", "items": {"type": "integer"}},
    "options": {"type": "object"}, "note": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]

THOUGHTS = ["", "Hm.", "First, 1 < 2.\n\nThen <b>more</b>.", "想一想 🤔 naïve", "Use <tool_cal? No: </thin k>.",
            " leading and trailing  ", "a\n\n\nb", "`</code>` \\n \"quotes\""]
ANSWERS = ["", "Yes.", "# Title\n\n* one\n* two\n\n```py\nif a < b:\n    print('</x>')\n```",
           "中文，日本語、한국어 🎉👩‍👩‍👧🇨🇳",
           "e\u0301 \u202bעברית\u202c \u200b", "<function=f> is how a call begins, </parameter> how it does not",
           "{\"a\": [1, 2, {\"b\": null}]}", "Tabs\tand\r\nreturns  \n  ", "<", "a <tool", "< / think >",
           "&lt;think&gt;", "1. 2. 3.\n\n\n\n4."]
# (name, [(parameter, as written, value)])
CALLS: list[tuple[str, list[tuple[str, str, Any]]]] = [
    ("now", []),
    ("edit", [("path", "/a/b.txt", "/a/b.txt")]),
    ("edit", [("path", "北京 \"🎉\" \\", "北京 \"🎉\" \\"), ("line", "3", 3)]),
    ("edit", [("text", "if x:\n    <b>y</b>\n\n# ende", "if x:\n    <b>y</b>\n\n# ende")]),
    ("edit", [("text", "", "")]),
    ("edit", [("text", "</param> <function=x> {\"a\": 1}", "</param> <function=x> {\"a\": 1}")]),
    ("edit", [("line", "-7", -7), ("ratio", "0.5", 0.5), ("force", "true", True)]),
    ("edit", [("range", "[1, 2, 3]", [1, 2, 3]), ("options", "{\"deep\": {\"er\": [null, \"x\"]}}",
                                                  {"deep": {"er": [None, "x"]}})]),
    ("edit", [("note", "null", None), ("either", "5", 5)]),
    ("edit", [("either", "five", "five"), ("force", "false", False)]),
    ("edit", [("text", "1", "1"), ("path", "true", "true")]),
    ("edit", [("text", "  spaces  \n\ttab", "  spaces  \n\ttab")]),
]


@dataclass(frozen=True)
class Text:
    """written: the model's whole output. thought, answer, calls (name, arguments): what is in it."""

    written: str
    thought: str
    answer: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def _made(thought: str, answer: str, calls: list[tuple[str, list[tuple[str, str, Any]]]]) -> Text:
    said = answer + ("\n\n" if answer and calls else "")
    written = "\n".join(call(name, *[(key, form) for key, form, _ in arguments]) for name, arguments in calls)
    between = "\n" if thought else ""
    return Text(f"{thought}{between}</think>\n\n{said}{written}", thought, answer,
                [(name, {key: value for key, _, value in arguments}) for name, arguments in calls])


def texts() -> list[Text]:
    """More than 150 of them, the same every time."""
    chance = random.Random(7)
    made = [_made(thought, answer, []) for thought, answer in itertools.product(THOUGHTS, ANSWERS) if answer]
    for thought, one in itertools.product(THOUGHTS[:4], CALLS):
        made.append(_made(thought, chance.choice(ANSWERS[:8]), [one]))
    for _ in range(20):
        several = chance.choices(CALLS, k=chance.randint(2, 4))
        made.append(_made(chance.choice(THOUGHTS), chance.choice(ANSWERS[:5]), several))
    return made


def read(message: dict[str, Any]) -> Text:
    """What a client reads in a chat message; ``written`` is empty."""
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"]))
             for one in message.get("tool_calls") or []]
    return Text("", (message.get("reasoning_content") or "").strip(), (message.get("content") or "").strip(), calls)


def expected(text: Text) -> Text:
    """What a client must read. Blanks at the ends of a thought or of an answer may be taken away."""
    return Text("", text.thought.strip(), text.answer.strip(), text.calls)
