"""Grammars that would end the process or take it minutes are refused; others are served meanwhile and afterwards."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.fake_engine import ids
from vllm.overlay.grammar import compiler as compiler_module
from vllm.overlay.grammar import trial as trial_module
from vllm.overlay.grammar.compiler import Compiler, GrammarError
from vllm.overlay.grammar.source import alone, choice_part, grammar_part, json_part
from vllm.overlay.grammar.trial import Trial, TrialFailed


def chained(length: int) -> dict:
    """$refs that lead from one object to the next."""
    links = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {}}}


def rules(length: int, letter: str) -> str:
    return f"start: {letter}0\n" + "".join(f"{letter}{i}: {letter}{i + 1}\n" for i in range(length)) + (
        f'{letter}{length}: "x"\n')


DEADLY = {
    "a chain of $refs": alone(json_part(chained(20_000))),
    "a chain of rules": alone(grammar_part(rules(30_000, "a"))),
    "a chain of terminals behind a control token": alone(grammar_part(
        rules(30_000, "A").replace("start:", "start: <tool_call>"))),
}
ENDLESS = alone(json_part({"type": "string", "allOf": [{"pattern": f"a.*b{i}.*c"} for i in range(30)]}))


@pytest.fixture(scope="module")
def trying(vocabulary):
    made = Compiler(lambda: vocabulary, on_trial=True)
    assert made.compiled(alone(choice_part(["warm"]))).result(60)
    yield made
    made.close()


@pytest.mark.parametrize("name", DEADLY)
def test_what_would_end_the_process_is_refused(trying, name):
    with pytest.raises(GrammarError, match="nested too deeply, or takes more than"):
        trying.compiled(DEADLY[name]).result(60)
    assert trying.compiled(alone(choice_part([name]))).result(60)


def test_what_would_take_minutes_is_ended_and_nobody_waits_for_it(trying, vocabulary, monkeypatch):
    monkeypatch.setattr(trial_module, "_SECONDS", 1)
    impatient = Compiler(lambda: vocabulary, on_trial=True)
    endless = impatient.compiled(ENDLESS)
    for number in range(5):
        assert impatient.compiled(alone(choice_part([str(number)]))).result(60)
    assert not endless.done()
    with pytest.raises(GrammarError, match="takes more than 1 s"):
        endless.result(120)
    assert impatient.compiled(alone(choice_part(["after"]))).result(60)
    impatient.close()


def test_what_a_trial_survives_is_compiled_with_more_stack(trying):
    """The longest chain that passes, to within a fifth."""
    fits, fails = 500, 8_000
    while fails > 1.2 * fits:
        middle = (fits + fails) // 2
        try:
            trying.compiled(alone(json_part(chained(middle)))).result(60)
            fits = middle
        except GrammarError:
            fails = middle
    print(f"{fits} links fit, {fails} do not")
    assert 500 < fits < fails < 8_000


def test_a_trial_takes_control_tokens_as_the_vocabulary_has_them(vocabulary):
    """What it could not read it would not try."""
    trial = Trial(vocabulary, 1000)
    call, = ids("<tool_call>")
    for head in ("<tool_call>", f"<[{call}]>", f"<[0-{vocabulary.vocab_size - 1}]>"):
        with pytest.raises(TrialFailed):
            trial.survive(rules(30_000, "a").replace("start:", f"start: {head}"))
    trial.survive("start: <no_such_token>")
    trial.close()


def test_a_trial_that_does_not_start_refuses_nothing(vocabulary, monkeypatch):
    for program in ("/no/such/program", sys.executable):
        monkeypatch.setattr(trial_module.sys, "executable", program)
        monkeypatch.setattr(trial_module, "_PROGRAM", "/no/such/file.py")
        trial = Trial(vocabulary, 1000)
        trial.survive('start: "x"')
        trial.close()


def test_processes_end_with_their_compiler(vocabulary):
    made = Compiler(lambda: vocabulary, on_trial=True)
    assert not any(made._trials.get() for _ in range(compiler_module._THREADS)), "nobody has needed one yet"
    for _ in range(compiler_module._THREADS):
        made._trials.put(None)
    asyncio.run(made.start_trial())
    for number in range(3):
        made.compiled(alone(choice_part([str(number)]))).result(60)
    first, second = made._trials.get(), made._trials.get()
    assert first is not None and second is None, "grammars that do not meet need one process"
    made._trials.put(None)
    made.compiled(alone(choice_part(["while the first is away"]))).result(60)
    second = made._trials.get()
    processes = [trial._process for trial in (first, second)]
    for trial in (first, second):
        made._trials.put(trial)
    made.close()
    assert all(process.wait(10) is not None for process in processes)


def test_a_process_whose_server_is_gone_ends(vocabulary):
    process = subprocess.Popen([sys.executable, trial_module._PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = process.communicate(Trial(vocabulary, 1000)._about, timeout=60)
    assert out == b"\n" and process.returncode == 0


def test_threads_of_others_keep_their_stack(vocabulary):
    before = threading.stack_size()
    Compiler(lambda: vocabulary).close()
    assert threading.stack_size() == before


def test_long_grammars_are_refused_and_not_kept(vocabulary, monkeypatch):
    monkeypatch.setattr(compiler_module, "_LONGEST", 1000)
    monkeypatch.setattr(compiler_module, "_KEPT_CHARACTERS", 1500)
    made = Compiler(lambda: vocabulary)
    with pytest.raises(GrammarError, match="it has 1[0-9]{3} characters; 1000 is the most"):
        made.compiled(alone(choice_part(["x" * 1000]))).result(0)
    long = [alone(choice_part([letter * 700])) for letter in "abc"]
    for grammar in long:
        made.compiled(grammar).result(60)
    assert list(made._kept) == long[-1:] or list(made._kept) == long[-2:], list(map(len, made._kept))
    assert made._characters == sum(map(len, made._kept)) <= 1500
    made.close()


def test_a_trial_costs_little(trying):
    times = []
    for number in range(20):
        grammar = alone(json_part({"type": "object", "properties": {f"p{number}": {"type": "string"}}}))
        began = time.perf_counter()
        trying.compiled(grammar).result(60)
        times.append(1e3 * (time.perf_counter() - began))
    print(f"median {sorted(times)[10]:.1f} ms")
    assert sorted(times)[10] < 500
