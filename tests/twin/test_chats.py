"""What the generator promises: the template's own text, disjoint splits, nothing near an acceptance prompt."""

from __future__ import annotations

import functools
import random

import pytest
from chats import NEW_VALUES, NEW_WORDING, TRAIN, Chat, Picture, split_of, squeezed, text_of, too_near
from tasks import TASKS, assistant, draw, user

from tests.acceptance.questions import ESSAYS, QUESTIONS, essay
from tests.helpers.chat_template import render as by_template

EACH = 60


def drawn(task: str, split: str, count: int = EACH) -> list[Chat]:
    rng = random.Random(f"{task} {split}")
    return [draw(rng, task, index % 3, split) for index in range(count)]


@pytest.mark.parametrize("task", TASKS)
def test_text_is_the_templates(task):
    for chat in drawn(task, TRAIN, 30):
        wanted = by_template(
            chat.messages,
            tools=chat.tools or None,
            add_generation_prompt=True,
            enable_thinking=chat.thought is not None,
        )
        assert chat.prompt() == wanted, f"{chat.prompt()!r}\n{wanted!r}"
        answer = {
            "role": "assistant",
            "content": chat.answer,
            "reasoning_content": chat.thought or "",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in chat.calls],
        }
        whole = by_template([*chat.messages, answer], tools=chat.tools or None)
        assert chat.prompt() + chat.target() + "\n" == whole, f"{chat.prompt() + chat.target()!r}\n{whole!r}"


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_decided_by_the_chat(task):
    seen = {split: drawn(task, split) for split in (TRAIN, NEW_VALUES, NEW_WORDING)}
    prompts = {split: {chat.prompt() + str(chat.picture) for chat in chats} for split, chats in seen.items()}
    assert not prompts[TRAIN] & (prompts[NEW_VALUES] | prompts[NEW_WORDING])
    wordings = {split: {squeezed(chat.wording) for chat in chats} for split, chats in seen.items()}
    print(task, {split: (len(wordings[split]), len(prompts[split])) for split in seen}, "wordings and prompts")
    assert not wordings[NEW_WORDING] & (wordings[TRAIN] | wordings[NEW_VALUES])
    for split, chats in seen.items():
        assert all(split_of(chat) == split for chat in chats)


@pytest.mark.parametrize(
    "chat",
    [
        Chat("arithmetic", "", [user("What is 2+2?")], ""),
        Chat("arithmetic", "", [user("please, what is 2 + 2")], ""),
        Chat("arithmetic", "", [user("2 + 2 = ? 直接给数字。")], ""),
        Chat("talk", "", [user("Hi!")], ""),
        Chat("story", "", [user("Please write a short story.")], ""),
        Chat("echo", "", [user("Repeat exactly: 中文测试：你好世界")], ""),
        Chat("echo", "", [user("say `_No_System`")], ""),
        Chat("recall", "", [user("The word is BLUE_42."), assistant("OK"), user("Which word?")], ""),
        Chat("json", "", [user("A JSON object: name Alice, age 30")], ""),
        Chat("tool call", "", [user("How warm is Beijing?")], "", tools=[{"function": {"name": "get_weather"}}]),
        Chat("picture", "", [user("?")], "", picture=Picture((64, 64), ((255, 0, 0),))),
        Chat(
            "picture",
            "",
            [user("?")],
            "",
            picture=Picture((9, 9), ((235, 20, 20), (20, 180, 40), (25, 40, 230), (245, 235, 20))),
        ),
    ],
    ids=lambda chat: chat.task,
)
def test_near_an_acceptance_prompt(chat):
    assert too_near(chat)


@functools.cache
def sent_by_the_checks() -> set[str]:
    """Squeezed user messages of all checks, and of the long output."""
    requests = [request for make in QUESTIONS.values() for request in make()]
    requests += [essay(number, 1) for number in range(len(ESSAYS))]
    found = {squeezed(text_of(message)) for request in requests for message in request.body.get("messages", ())}
    return found - {""}


def test_whatever_a_check_sends_is_near():
    """One by one: what is drawn now and then shows in no sample. A cache's text is new each time."""
    texts = {
        text_of(message)
        for name, make in QUESTIONS.items()
        for request in make()
        for message in request.body.get("messages", ())
        if message.get("role") == "user" and not name.endswith("cache_hit")
    } - {""}
    assert len(texts) > 20
    missed = [text for text in texts if not too_near(Chat("any", "", [user(text)], ""))]
    assert not missed, missed


@pytest.mark.parametrize("task", TASKS)
def test_no_chat_ends_with_what_a_check_sends(task):
    """As sent: the text of the last user message, whatever the checks of it are."""
    checks = sent_by_the_checks()
    assert len(checks) > 25
    for split in (TRAIN, NEW_VALUES, NEW_WORDING):
        for chat in drawn(task, split):
            text = [text_of(message) for message in chat.messages if message["role"] == "user"][-1]
            assert squeezed(text) not in checks, f"{split}: {text!r} is sent by a check"


def test_other_values_are_not_near():
    assert not too_near(Chat("arithmetic", "", [user("What is 3+2?")], ""))
    assert not too_near(Chat("picture", "", [user("?")], "", picture=Picture((64, 64), ((250, 0, 0),))))


@pytest.mark.parametrize("task", TASKS)
def test_same_random_stream_gives_the_same_chat(task):
    one, other = (draw(random.Random(7), task, 2, TRAIN) for _ in range(2))
    assert (one.prompt(), one.target()) == (other.prompt(), other.target())
