"""Grammars are compiled once, in threads, kept in order of use, and refused without harm to others."""

from __future__ import annotations

import threading
import time

import pytest

from tests.helpers.fake_engine import EOS, ids
from vllm.overlay.grammar import compiler as module
from vllm.overlay.grammar.compiler import WARM, Compiler, GrammarError, short
from vllm.overlay.grammar.source import alone, choice_part, json_part, regex_part


def choice(text: str) -> str:
    return alone(choice_part([text]))


def test_a_grammar_is_compiled_once(compiler):
    first = compiler.compiled(choice("once"))
    assert compiler.compiled(choice("once")) is first
    one, two = first.result(30).copy(), first.result().copy()
    assert one.consume_tokens(ids("on")) and two.consume_tokens(ids("once")) and two.is_accepting()
    assert not one.is_accepting(), "copies share nothing that moves"


def test_the_last_grammars_are_kept(vocabulary, monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 3)
    made = Compiler(lambda: vocabulary)
    first = made.compiled(choice("a"))
    kept = made.compiled(choice("b"))
    made.compiled(choice("a"))
    made.compiled(choice("c"))
    assert WARM not in made._kept and list(made._kept) == [choice("b"), choice("a"), choice("c")]
    made.compiled(choice("b"))
    made.compiled(choice("d"))
    assert made.compiled(choice("b")) is kept and made.compiled(choice("a")) is not first
    made.close()


def test_what_is_none_is_refused_every_time_and_harms_nobody(compiler):
    for grammar, says in (("start: (", "Expected"), ("{", "EOF"), ("", "Empty"),
                          ("start: start", "nothing satisfies it"),
                          (alone(json_part({"type": "wat"})), "Invalid type: wat"),
                          ('start: "a"\nstart: "b"', "duplicate")):
        for _ in range(2):
            with pytest.raises(GrammarError, match=says):
                compiler.compiled(grammar).result(30)
    assert compiler.compiled(choice("fine")).result(30)


def test_a_failed_grammar_is_compiled_anew(compiler):
    first = compiler.compiled(choice("again"))
    compiler.forget(choice("again"))
    compiler.forget("never seen")
    assert compiler.compiled(choice("again")) is not first


def test_nobody_waits_for_the_grammar_of_another():
    """One thread's work takes as long as it takes; the caller is back at once, and the other grammars get on."""
    release, began = threading.Event(), threading.Event()

    def slow_vocabulary():
        began.set()
        release.wait(30)
        raise ValueError("no vocabulary")

    made = Compiler(slow_vocabulary)
    assert began.wait(30)
    started = time.perf_counter()
    waiting = made.compiled(choice("x"))
    assert time.perf_counter() - started < 0.5 and not waiting.done()
    release.set()
    with pytest.raises(ValueError, match="no vocabulary"):
        waiting.result(30)
    made.close()


@pytest.mark.parametrize("grammar", [
    alone(json_part({"type": "string", "maxLength": 10**6})), alone(regex_part("((a{1,1000}){1,1000}){1,1000}")),
    alone(regex_part("(a|b)*a(a|b){40}")), alone(json_part({"enum": [f"value {i}" for i in range(3000)]})),
    alone(json_part({"type": "array", "minItems": 10**5, "maxItems": 10**6})),
    alone(json_part({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}})),
    alone(json_part({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [
        {"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}}})),
])  # fmt: skip
def test_grammars_that_are_huge_when_unfolded(compiler, grammar):
    """Whatever becomes of them, it does so soon, and the process lives."""
    began = time.perf_counter()
    try:
        matcher = compiler.compiled(grammar).result(60).copy()
        for _ in range(5):
            matcher.compute_bitmask()
    except GrammarError as refused:
        assert str(refused)
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("message, expected", [
    ("NoExtensionBias\n<non-verbose/>", "nothing satisfies it"),
    ('at 1(8): invalid regex "(" (in regex): regex parse error:\n    (\n    ^\nerror: unclosed group\n   1 | start',
     "no regular expression: unclosed group"),
    ("1(5): Expected token ':', found '\\n'\n   1 | wat\n       ^", "1(5): Expected token ':', found '\\n'"),
    ("x" * 1000, "x" * 250 + " ... " + "x" * 100), ("short\n<state>\nlong</state>", "short"),
])  # fmt: skip
def test_messages_in_one_line(message, expected):
    assert short(message) == expected


def test_the_tokens_that_end_a_sequence(vocabulary, compiler):
    assert vocabulary.eos_tokens == [EOS]
    assert compiler.compiled(WARM).result(30).copy().consume_tokens(ids("{}"))
