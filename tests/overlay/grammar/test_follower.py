"""Which tokens a sequence may have next: phase by phase, with budgets and limits, however its tokens became known."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from tests.helpers.fake_engine import EOS, ids, tokenizer
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.follower import Follower
from vllm.overlay.grammar.source import alone, choice_part, grammar_part, json_part, regex_part

SIZE = len(tokenizer())
WORDS = -(-SIZE // 32)
END_THINK, CALL, END_CALL, END_OF_TEXT = ids("</think><tool_call></tool_call><|endoftext|>")
ALL = frozenset(range(SIZE))
YES = alone(choice_part(["yes"]))


def follower(constraint: Constraint, matcher=None, **more) -> Follower:
    made = None if constraint.grammar is None else matcher(constraint.grammar)
    return Follower(constraint, made, **{"ends": (EOS, ), "stops": (EOS, END_OF_TEXT), **more})


def next_tokens(one: Follower, tokens: list[int]) -> frozenset[int]:
    """The tokens that may come behind `tokens`, which the follower is told of as a step would."""
    one.follow(tokens)
    mask = np.random.default_rng(len(tokens)).integers(0, 2**32, WORDS, dtype=np.uint32)
    if one.matcher is not None:
        one.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if not one.finish(mask):
        return ALL
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:SIZE]
    return frozenset(np.nonzero(bits)[0].tolist())


def walk(one: Follower, seed: int, limit: int = 300, before: list[int] | None = None) -> list[int]:
    """Tokens chosen at random among those that may come, until the sequence ends or the limit."""
    rng, tokens = random.Random(seed), list(before or [])
    while len(tokens) < limit and (not tokens or tokens[-1] != EOS):
        tokens.append(rng.choice(sorted(next_tokens(one, tokens))))
    return tokens


def text(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


def test_a_grammar_from_the_first_token_to_the_end(matcher):
    for seed in range(20):
        tokens = walk(follower(Constraint(alone(regex_part(r"[ab]{2,4}-\d"))), matcher), seed)
        assert tokens[-1] == EOS and tokens.count(EOS) == 1, text(tokens)
        import re
        assert re.fullmatch(r"[ab]{2,4}-[0-9]", text(tokens[:-1])), text(tokens)


def test_the_end_is_allowed_only_where_the_grammar_is_complete(matcher):
    one = follower(Constraint(alone(regex_part("a+b?"))), matcher)
    assert EOS not in next_tokens(one, [])
    assert EOS in next_tokens(one, ids("a"))
    assert next_tokens(one, ids("a") + ids("b")) == {EOS}
    assert next_tokens(one, [*ids("a"), *ids("b"), EOS]) == {EOS}, "an engine that is late asks once more"


def test_control_tokens_are_no_text(matcher):
    inside = next_tokens(follower(Constraint(alone(regex_part("(?s:.*)"))), matcher), ids("x"))
    assert {EOS} == inside & set(range(SIZE - 33, SIZE))


def test_behind_a_thought(matcher):
    one = follower(Constraint(YES, in_thought=True, end_thought=END_THINK), matcher)
    thought = ids("Hm, no <b>.\n\n")
    for length in range(len(thought) + 1):
        assert next_tokens(one, thought[:length]) == ALL - {EOS}, "a thought is free, but not the end of all"
    assert next_tokens(one, [*thought, END_THINK]) <= {ids("y")[0], ids("yes")[0]}
    assert text(walk(one, 1, before=[*thought, END_THINK])) == text(thought) + "</think>yes<|im_end|>"


def test_what_the_request_itself_stops_at_may_come_in_a_thought(matcher):
    one = follower(Constraint(YES, in_thought=True, end_thought=END_THINK), matcher, stops=(EOS, END_THINK))
    assert END_THINK in next_tokens(one, ids("Hm"))


def test_free_text_until_the_grammar_opens(matcher):
    grammar = f'start: <[{CALL}]> "x" <[{END_CALL}]>'
    constraint = Constraint(grammar, in_thought=True, end_thought=END_THINK, free=True, openers=frozenset({CALL}))
    for before in ([], ids("a thought"), [*ids("a"), END_THINK], [*ids("a"), END_THINK, *ids("text, more text")]):
        one = follower(constraint, matcher)
        assert next_tokens(one, before) == ALL, text(before)
        assert next_tokens(one, [*before, CALL]) == set(ids("x"))
        assert next_tokens(one, [*before, CALL, *ids("x")]) == {END_CALL}
        assert next_tokens(one, [*before, CALL, *ids("x"), END_CALL]) == {EOS}


def test_an_end_that_is_ignored_comes_neither_in_a_thought_nor_in_free_text(matcher):
    constraint = Constraint(f'start: <[{CALL}]> "x"', in_thought=True, end_thought=END_THINK, free=True,
                            openers=frozenset({CALL}), endless=True)
    for before in ([], ids("a"), [*ids("a"), END_THINK], [*ids("a"), END_THINK, *ids("b")]):
        assert next_tokens(follower(constraint, matcher), before) == ALL - {EOS}, text(before)
    assert next_tokens(follower(constraint, matcher), [*ids("a"), CALL, *ids("x")]) == {EOS}


def test_an_opener_inside_a_thought_ends_it(matcher):
    grammar = f'start: "yes" | <[{CALL}]> "x"'
    one = follower(Constraint(grammar, in_thought=True, end_thought=END_THINK, openers=frozenset({CALL})), matcher)
    assert next_tokens(one, [*ids("Hm"), CALL]) == set(ids("x"))


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_ends_when_its_budget_is_spent(budget):
    one = follower(Constraint(None, in_thought=True, end_thought=END_THINK, thought_budget=budget,
                              openers=frozenset({CALL})))
    thought = ids("a b c d e f g h")[:budget]
    for length in range(budget):
        assert next_tokens(one, thought[:length]) == ALL
    assert next_tokens(one, thought) == {END_THINK}
    assert next_tokens(one, [*thought, END_THINK]) == ALL
    assert next_tokens(one, [*thought, END_THINK, *ids("and so on and on")]) == ALL


def test_a_thought_that_ended_earlier_spends_no_budget():
    constraint = Constraint(None, in_thought=True, end_thought=END_THINK, thought_budget=3, openers=frozenset({CALL}))
    for end in (END_THINK, CALL):
        assert next_tokens(follower(constraint), [*ids("a"), end, *ids("b c d e f")]) == ALL


def test_a_spent_budget_leads_into_the_grammar(matcher):
    one = follower(Constraint(YES, in_thought=True, end_thought=END_THINK, thought_budget=4), matcher)
    tokens = walk(one, 3)
    assert tokens[4:].count(END_THINK) == 1 and len(tokens[:tokens.index(END_THINK)]) <= 4
    assert text(tokens).endswith("</think>yes<|im_end|>")


def test_min_tokens_keeps_the_end_away_where_something_else_may_come(matcher):
    one = follower(Constraint(alone(regex_part("a*"))), matcher, min_tokens=3)
    lengths = [len(ids("a" * n)) for n in range(4)]
    for tokens in (ids("a"), ids("a") * 2):
        assert EOS not in next_tokens(one, tokens), lengths
    assert EOS in next_tokens(one, ids("a") * 3)
    short = follower(Constraint(YES), matcher, min_tokens=50)
    assert text(walk(short, 0)) == "yes<|im_end|>", "a grammar that is over is over"


def test_min_tokens_without_a_grammar_and_in_a_thought(matcher):
    one = follower(Constraint(None, in_thought=True, end_thought=END_THINK, thought_budget=1), min_tokens=3)
    assert next_tokens(one, []) == ALL - {EOS, END_OF_TEXT}
    assert next_tokens(one, ids("a")) == {END_THINK}
    assert next_tokens(one, [*ids("a"), END_THINK]) == ALL - {EOS, END_OF_TEXT}
    assert next_tokens(one, [*ids("a"), END_THINK, *ids("b")]) == ALL
    stopping = follower(Constraint(None, in_thought=True, end_thought=END_THINK, thought_budget=0),
                        stops=(EOS, END_THINK), min_tokens=3)
    assert next_tokens(stopping, []) == {END_THINK}, "nothing else may come"


def test_allowed_tokens_and_grammar_together(matcher):
    a, b = ids("a")[0], ids("b")[0]
    constraint = Constraint(alone(regex_part("[ab]+")))
    assert next_tokens(follower(constraint, matcher, allowed=[a, EOS, 5]), [b]) == {a, EOS}
    stuck = follower(constraint, matcher, allowed=[5])
    assert next_tokens(stuck, []) == ALL
    assert stuck.failed == "allowed_token_ids leaves no token that the grammar allows next"
    budget = Constraint(None, in_thought=True, end_thought=END_THINK, thought_budget=9)
    assert next_tokens(follower(budget, allowed=[a, b]), []) == {a, b}


@pytest.mark.parametrize("seed", range(5))
def test_however_the_tokens_become_known_the_same_may_come_next(matcher, seed):
    """One by one, several at once, all at once after a preemption, fewer than before."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    constraint = Constraint(alone(json_part(schema)), in_thought=True, end_thought=END_THINK, thought_budget=6)
    first = follower(constraint, matcher)
    tokens = walk(first, seed, limit=60)
    expected = [next_tokens(follower(constraint, matcher), tokens[:length]) for length in range(len(tokens))]
    rng, jumping = random.Random(seed), follower(constraint, matcher)
    for _ in range(25):
        length = rng.randrange(len(tokens))
        assert next_tokens(jumping, tokens[:length]) == expected[length], (length, text(tokens))


def test_a_clone_of_the_parameters_keeps_its_follower(matcher):
    one = follower(Constraint(YES), matcher)
    assert copy.deepcopy(one) is one and copy.deepcopy(Constraint(YES)) == Constraint(YES)


def test_a_grammar_that_cannot_be_followed_fails_by_name_and_is_forgotten(vocabulary):
    """A word list so ambiguous that the parser's limit of items is reached."""
    from llguidance import LLMatcher, LLParserLimits

    forgotten = []
    grammar = grammar_part('start: a\na: a a | "x" | "xx" | "xxx"')["lark_grammar"]
    limits = LLParserLimits(step_max_items=300, max_items_in_row=50)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    one = Follower(Constraint(grammar), matcher, ends=(EOS, ), stops=(EOS, ), on_failure=lambda: forgotten.append(1))
    tokens: list[int] = []
    while one.failed is None and len(tokens) < 300:
        assert next_tokens(one, tokens)
        tokens.append(ids("x")[0])
    assert one.failed and one.failed.startswith("the output could not be kept to its grammar: "), one.failed
    assert "\n" not in one.failed and forgotten == [1]
    assert next_tokens(one, tokens) == ALL and one.matcher is None, "it stays failed"


def test_tokens_that_the_grammar_does_not_allow_fail_it(matcher):
    one = follower(Constraint(YES), matcher)
    one.follow(ids("no"))
    assert one.failed and one.matcher is None


@pytest.mark.parametrize("wrong, why", [
    ({"in_thought": True}, "must name the token that ends it"), ({"grammar": "x", "free": True}, "ended by a token"),
])  # fmt: skip
def test_constraints_that_make_no_sense(wrong, why):
    with pytest.raises(ValueError, match=why):
        Constraint(**wrong)
