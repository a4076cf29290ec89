"""When an answer passes: the platform's rule of every check, as far as it is known, and no stricter.

A rule takes the answers to a check's requests and gives what it saw, in a few words; it raises Failed or Skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.conformance.checks import Skipped, expect
from tests.conformance.target import Answer, Streamed

Rule = Callable[[Sequence[Answer]], str]
FIELDS = ("reasoning_content", "reasoning", "thinking")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Said:
    """What a message says. field: the thought found in a field of its own; thought: that, or the block at the beginning
    of the content; content: without that block; finish: finish_reason."""

    field: str
    thought: str
    content: str
    finish: str | None
    calls: list[Any]

    @property
    def cut_in_thought(self) -> bool:
        """The limit came before the answer."""
        return self.finish == "length" and not self.content.strip() and not self.calls

    def __str__(self) -> str:
        shown = [f"{name} {value!r:.80}" for name, value in (("thought", self.thought), ("content", self.content))
                 if value]
        return ", ".join([*shown, *([f"calls {json.dumps(self.calls)[:120]}"] if self.calls else []),
                          f"finish {self.finish}"])


def said(answer: Answer) -> Said:
    """The first choice of a success. Raises Failed for a refusal."""
    served(answer)
    expect(isinstance(answer.body, dict), f"no JSON object: {answer}")
    choice = answer.body["choices"][0]
    message = choice["message"]
    field = next((message[name] for name in FIELDS if message.get(name)), "") or _details(message)
    content = message.get("content") or ""
    thought = field
    if content.lstrip().startswith(_OPEN):
        block, _, content = content.lstrip().removeprefix(_OPEN).partition(_CLOSE)
        thought = thought or block
    return Said(field, thought, content, choice.get("finish_reason"), message.get("tool_calls") or [])


def _details(message: Mapping[str, Any]) -> str:
    details = message.get("reasoning_details")
    if not isinstance(details, list):
        return ""
    return "".join(str(part.get("text") or part.get("summary") or "") for part in details if isinstance(part, dict))


def served(answer: Answer) -> None:
    expect(200 <= answer.status < 300, f"status {answer.status}: {answer.text:.300}")


def tokens_of(answer: Answer) -> int:
    """usage.completion_tokens of a whole answer; 0 where there is none."""
    usage = answer.body.get("usage") if isinstance(answer.body, dict) else None
    return (usage or {}).get("completion_tokens") or 0


def last_usage(answer: Answer) -> dict[str, Any]:
    """The last usage in a stream; empty where there is none."""
    assert isinstance(answer, Streamed)
    return next((chunk["usage"] for chunk in reversed(answer.chunks()) if chunk.get("usage")), {})


def accepted(answers: Sequence[Answer]) -> str:
    """2xx."""
    for answer in answers:
        served(answer)
    return "status " + ", ".join(str(answer.status) for answer in answers)


def refused(answers: Sequence[Answer]) -> str:
    """4xx."""
    answer, = answers
    expect(400 <= answer.status < 500, f"status {answer.status}, not 4xx: {answer.text:.200}")
    return f"status {answer.status}: {answer.text:.160}"


def either(answers: Sequence[Answer]) -> str:
    """2xx or 4xx."""
    answer, = answers
    expect(200 <= answer.status < 300 or 400 <= answer.status < 500, f"status {answer.status}: {answer.text:.200}")
    return f"status {answer.status}"


def not_fetched(answers: Sequence[Answer]) -> str:
    """400 or more."""
    answer, = answers
    expect(answer.status >= 400, f"status {answer.status}: the picture was fetched")
    return f"status {answer.status}: {answer.text:.160}"


def keys(answers: Sequence[Answer]) -> str:
    """401 if keys are enforced at all."""
    answer, = answers
    expect(answer.status == 401 or 200 <= answer.status < 300, f"status {answer.status}: {answer.text:.200}")
    return "keys are enforced" if answer.status == 401 else "keys are not enforced"


def unauthorised(answers: Sequence[Answer]) -> str:
    """401."""
    answer, = answers
    expect(answer.status == 401, f"status {answer.status}: {answer.text:.200}")
    return "status 401"


def basic(answers: Sequence[Answer]) -> str:
    answer, = answers
    one = said(answer)
    expect(one.content.strip() or one.thought.strip(), f"neither content nor reasoning: {one}")
    expect(tokens_of(answer) > 0, f"usage: {answer.body.get('usage')}")
    return f"{one}, {tokens_of(answer)} tokens"


def event_stream(answers: Sequence[Answer]) -> str:
    answer, = answers
    served(answer)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    done, counted = answer.text.count("[DONE]"), answer.text.count('"completion_tokens"')
    expect(len(lines) >= 5, f"{len(lines)} lines begin with 'data: ', not 5")
    expect(done == 1, f"[DONE] is there {done} times")
    expect(counted >= 1, "completion_tokens is not there")
    return f"{len(lines)} data lines, one [DONE]"


def tool_call(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    if not one.calls and one.cut_in_thought:
        raise Skipped(f"cut while thinking: {one}")
    expect(one.calls, f"no call: {one}")
    call = one.calls[0]["function"]
    try:
        json.loads(call["arguments"])
    except ValueError as error:
        expect(False, f"arguments are no JSON ({error}): {call['arguments']!r:.200}")
    return f"{call['name']}({call['arguments']:.100})"


def apples(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    text = one.thought + one.content
    expect(len(text) > 20, f"20 characters or fewer: {one}")
    expect("1" in text or "one" in text.lower(), f"neither '1' nor 'one': {one}")
    return str(one)


def colour(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    expect("error" not in answers[0].body, f"error: {answers[0]}")
    text = one.content.strip() or one.thought.strip()
    expect(len(text) > 15, f"15 characters or fewer: {one}")
    return str(one)


def cached(answers: Sequence[Answer]) -> str:
    for answer in answers:
        served(answer)
        expect(isinstance(answer, Streamed), f"no stream: {answer}")
    usage = last_usage(answers[1])
    count = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    expect(count > 0, f"nothing was cached the second time: {usage}")
    return f"{count} of {usage.get('prompt_tokens')} tokens were cached"


def thought_and_content(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    if len(one.field) > 20 and len(one.content) > 20:
        return str(one)
    if one.cut_in_thought:
        raise Skipped(f"cut before the answer: {one}")
    if not one.field and (one.thought or one.content):
        raise Skipped(f"thought and answer are not split: {one}")
    expect(False, f"thought and content must have more than 20 characters each: {one}")
    raise AssertionError


def unthought_four(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    expect(not one.thought.strip(), f"it thought: {one}")
    if len(one.content) >= 100:
        raise Skipped(f"{len(one.content)} characters: {one}")
    expect("4" in one.content, f"no '4': {one}")
    return str(one)


def thinks(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    expect(one.thought.strip(), f"it did not think: {one}")
    return str(one)


def does_not_think(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    expect(not one.thought.strip(), f"it thought: {one}")
    return str(one)


def ends(finish: str) -> Rule:
    def rule(answers: Sequence[Answer]) -> str:
        one = said(answers[0])
        expect(one.finish == finish, f"finish {one.finish}, not {finish}, after {tokens_of(answers[0])} tokens: {one}")
        return f"finish {finish} after {tokens_of(answers[0])} tokens"
    return rule


def contains(*wanted: str) -> Rule:
    def rule(answers: Sequence[Answer]) -> str:
        one = said(answers[0])
        for text in wanted:
            expect(text in one.content, f"{text!r} is not in the content: {one}")
        return f"content {one.content!r:.120}"
    return rule


def colours(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    lacking = [name for name in ("red", "green", "blue", "yellow") if name not in one.content.lower()]
    expect(not lacking, f"{', '.join(lacking)} not named: {one}")
    return f"content {one.content!r:.120}"


def alice(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    try:
        value = json.loads(one.content)
    except ValueError as error:
        expect(False, f"the content is no JSON ({error}): {one}")
    expect(isinstance(value, dict) and value.get("name") == "Alice", f"name is not Alice: {value}")
    expect(type(value.get("age")) in (int, float) and value["age"] == 30, f"age is not the number 30: {value}")
    return f"content {one.content!r:.120}"


def stopped(answers: Sequence[Answer]) -> str:
    one = said(answers[0])
    if not one.content.strip() and one.thought.strip():
        raise Skipped(f"all was thought: {one}")
    expect("1" in one.content, f"no '1': {one}")
    expect("16" not in one.content, f"it went on behind the stop word: {one}")
    return f"content {one.content!r:.120}"


def repeatable(answers: Sequence[Answer]) -> str:
    first, second = (said(answer).content for answer in answers)
    expect(first.strip(), f"nothing said: {said(answers[0])}")
    expect(first == second, f"{first!r:.150} and then {second!r:.150}")
    return f"content {first!r:.120}"
