"""One set of recall questions, asked in every way in which a server may compute them: the law of DESIGN 6 over HTTP.

In float32 every way gives the tokens of the first, item by item; in bfloat16 as many answers are right, within one in a
hundred. What is recalled stands in states and KV alike, so a state that is lost or of another request shows:
the negative control loses them to prove it.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.meaning.conftest import BUDGET
from tests.meaning.floors import RECALL
from tests.meaning.items import Item, accuracy, recall_chats
from tests.meaning.served import LOST, Said, Twin, assert_law
from vllm.overlay.hybrid import StatePool

CHATS, MANY, VERY_MANY = 6, 100, 400
# Tokens of an answer where it is to grow over the space that there is: as many as CONTEXT allows, so that requests that
# come late still meet those that run.
GROWN = 110


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return [Item(chat, thinking) for chat in recall_chats(CHATS, "law") for thinking in (False, True)]


@pytest.fixture(scope="module")
def questions(items):
    return [item.question for item in items]


@pytest.fixture(scope="module")
def cold(plain: Twin, questions) -> list[Said]:
    """One at a time, none of them ever seen."""
    answers = plain.all(questions, at_once=False, cache_salt="cold")
    for index, answer in enumerate(answers):
        # A question without and with thinking has one prompt but for its last tokens.
        assert index % 2 or answer.cached == 0, f"{index}: {answer.cached} tokens were cached"
    return answers


@pytest.fixture(scope="module")
def many(plain: Twin) -> tuple[list[Item], list[Said]]:
    items = [Item(chat, number % 4 == 0) for number, chat in enumerate(recall_chats(MANY, "many", shortest=0))]
    return items, plain.all([item.question for item in items], at_once=True)


def test_it_recalls(many, cold, items):
    found, few = accuracy(*many), accuracy(items, cold)
    wrong = [(item.chat.answer, said.content) for item, said in zip(*many, strict=True) if not item.right(said)]
    print(f"{found:.0%} of {MANY}, {few:.0%} of {len(items)}; wrong (wanted, got): {wrong[:10]}")
    assert found >= RECALL


def test_answers_are_alive(cold):
    """Equal tokens show something only where answers differ."""
    assert len({tuple(answer.tokens) for answer in cold}) > len(cold) * 2 / 3
    assert all(answer.tokens and len(answer.logprobs) == len(answer.tokens) for answer in cold)


def test_warm(plain, questions, cold):
    again = plain.all(questions, at_once=False, cache_salt="cold")
    for answer in again:
        assert len(answer.prompt) - 1 - LOST <= answer.cached < len(answer.prompt), (answer.cached, len(answer.prompt))
    assert_law(again, cold)


def test_batched(plain, questions, cold):
    assert_law(plain.all(questions, at_once=True, cache_salt="batched"), cold)


def test_chunked(live, stressed, questions, cold):
    before = len(live.steps)
    answers = stressed.all(questions, at_once=False, cache_salt="chunked")
    needed = sum(math.ceil((len(answer.prompt) - answer.cached) / BUDGET) + len(answer.tokens) - 1
                 for answer in answers)
    assert len(live.steps) - before >= needed > len(questions) + sum(len(answer.tokens) - 1 for answer in answers)
    assert_law(answers, cold)


def test_preempted(stressed, questions, cold):
    """Answers go on behind their end, so that those that run grow over the space that there is."""
    before = stressed.metric("num_preemptions_total")
    answers = stressed.all(questions, at_once=True, cache_salt="preempted", ignore_eos=True, max_tokens=GROWN)
    count = stressed.metric("num_preemptions_total") - before
    print(f"{count:.0f} preemptions")
    assert count > 0
    short = [right for right in cold if len(right.tokens) <= GROWN]
    assert len(short) > len(cold) / 2
    assert_law(*zip(*((got, right) for got, right in zip(answers, cold, strict=True) if right in short), strict=True))


@pytest.mark.parametrize("tensor", ["conv", "recurrent"])
def test_negative_control(live, stressed, items, questions, cold, monkeypatch, tensor):
    """States that are lost between the pieces of a prompt must show in the tokens, and in what is recalled."""
    begin = StatePool.apply_init

    def drop(pool: StatePool, live_slots: torch.Tensor, inits: object) -> None:
        begin(pool, live_slots, inits)
        getattr(pool, tensor).zero_()

    monkeypatch.setattr(StatePool, "apply_init", drop)
    answers = stressed.all(questions[::2], at_once=False, cache_salt=tensor)
    same = sum(got.tokens == right.tokens for got, right in zip(answers, cold[::2], strict=True))
    print(f"{tensor}: {same} of {len(answers)} answers have the same tokens; "
          f"{accuracy(items[::2], answers):.0%} right, {accuracy(items[::2], cold[::2]):.0%} of the unbroken ones")
    assert same < len(answers) / 2
    with pytest.raises(AssertionError):
        assert_law(answers, cold[::2])


def test_two_ranks(two_ranks, questions, cold):
    assert_law(two_ranks.all(questions, at_once=True), cold)


def test_forked(plain, questions, cold):
    """Several samples of one prompt; greedy ones are all what one is."""
    for question, right in list(zip(questions, cold, strict=True))[:4]:
        answers = plain.ask(*question, n=3, cache_salt="forked")
        assert len(answers) == 3
        assert_law(answers, [right] * 3)


def test_one_conversation_goes_on_in_different_ways(plain, items, cold):
    """At once, from the prefix that they share, against each by itself and cold."""
    for number, (item, said) in enumerate(zip(items[:4], cold, strict=False)):
        history = [*item.chat.messages, {"role": "assistant", "content": said.content}]
        following = [item.chat.messages[-1]["content"], "What is 3 + 4?", "Repeat exactly: BLUE-9 and 北京"]
        branches = [([*history, {"role": "user", "content": text}], item.thinking) for text in following]
        alone = [plain.ask(*branch, cache_salt=f"alone {number} {place}")[0] for place, branch in enumerate(branches)]
        together = plain.all(branches, at_once=True, cache_salt="cold")
        assert all(answer.cached == 0 for answer in alone)
        assert all(answer.cached >= len(said.prompt) - LOST for answer in together), [
            (answer.cached, len(said.prompt)) for answer in together]
        assert_law(together, alone)


def within_a_hundredth(found: float, expected: float) -> bool:
    return abs(found - expected) <= 0.01 + 1e-9


def test_bfloat16(half, many):
    """Cold and at once, then warm."""
    items, expected = many
    questions, right = [item.question for item in items], accuracy(items, expected)
    runs = [half.all(questions, at_once=True) for _ in range(2)]
    found = [accuracy(items, answers) for answers in runs]
    print(f"float32 {right:.0%}, bfloat16 {found[0]:.0%} cold, {found[1]:.0%} warm")
    assert sum(answer.cached > 0 for answer in runs[1]) > MANY / 2
    assert all(within_a_hundredth(one, right) for one in found), (right, found)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", [
    pytest.param((), id="plain"), pytest.param(("--tensor-parallel-size", "2"), id="two ranks"),
    pytest.param(("--max-num-batched-tokens", "64"), id="chunked"),
    pytest.param(("--max-model-len", str(2048), "--num-gpu-blocks-override", "130"), id="preempted")])
def test_bfloat16_under_stress(start, plain, arguments):
    items = [Item(chat, number % 4 == 0) for number, chat in enumerate(recall_chats(VERY_MANY, "very", shortest=0))]
    questions = [item.question for item in items]
    server = start("--dtype", "bfloat16", *arguments)
    right, found = (accuracy(items, twin.all(questions, at_once=True)) for twin in (plain, server))
    if "--num-gpu-blocks-override" in arguments:
        assert server.metric("num_preemptions_total") > 0
    print(f"float32 {right:.1%}, bfloat16 {found:.1%} of {VERY_MANY}")
    assert within_a_hundredth(found, right)
