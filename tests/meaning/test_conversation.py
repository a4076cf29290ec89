"""Thirteen turns with tools, thoughts and pictures in the history, each asked whole and then streamed."""

from __future__ import annotations

from tests.meaning.conversation import conversation
from tests.meaning.floors import CONVERSATION
from tests.meaning.served import LOST, Said, Twin, reusable

# A picture's four colours, with their thought.
LONGEST = 100


def test_thirteen_turns(plain: Twin):
    """Where the twin errs the history goes on with what is right, so that one mistake is not followed by others."""
    turns, tools = conversation("turns")
    history, cached, right, shown = [], list[int](), list[bool](), list[str]()
    before: Said | None = None
    assert len(turns) == 13
    for number, turn in enumerate(turns, start=1):
        history += turn.messages
        whole = plain.ask(history, turn.thinking, tools=tools, max_tokens=LONGEST)[0]
        streamed = plain.stream(history, turn.thinking, tools=tools, max_tokens=LONGEST)
        where = f"turn {number} ({turn.name})"
        assert streamed.shown() == whole.shown() and streamed.prompt == whole.prompt, where
        known, length = reusable(before, whole.prompt), len(whole.prompt)
        assert known - LOST <= whole.cached < length, f"{where}: {whole.cached} cached of {known} that were known"
        assert length - 1 - LOST <= streamed.cached < length, f"{where}: {streamed.cached} cached of {length}"
        good = turn.right(whole)
        shown.append(f"{where}: {whole.cached} of {length} cached, {'right' if good else 'wrong'}: "
                     f"{whole.content or whole.calls}, wanted {turn.answer}")
        right += [good] * turn.judged
        if turn.messages[-1]["role"] == "user":
            cached.append(whole.cached)
        before = whole
        history.append(whole.message() if good else turn.answer)
        if good and whole.calls:
            # The result that follows names its call.
            turns[number].messages[-1]["tool_call_id"] = whole.calls[0]["id"]
    print("\n".join(shown))
    # A turn that begins with a question repeats all that was there before the last question, and that question.
    assert cached == sorted(cached) and cached[-1] > 10 * LOST, cached
    assert sum(right) >= CONVERSATION * len(right), shown


def test_the_conversation_holds_what_it_should():
    turns, tools = conversation("turns")
    names = [turn.name for turn in turns]
    assert names.count("call") == names.count("result") == names.count("picture") == 2, names
    assert {turn.thinking for turn in turns if turn.name == "call"} == {True, False}
    called = [turn.answer["tool_calls"][0]["function"]["name"] for turn in turns if turn.name == "call"]
    assert set(called) <= {tool["function"]["name"] for tool in tools} and len(set(called)) == 2
    pictures = [part for turn in turns for message in turn.messages if isinstance(message["content"], list)
                for part in message["content"] if part["type"] == "image_url"]
    assert len(pictures) == 2 and turns[0].messages[1]["role"] == "user"
