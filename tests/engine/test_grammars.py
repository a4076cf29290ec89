"""Grammars through the whole engine: the law holds for them too, and a request waits for its grammar alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import shutil
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, make_qwen2, prompt, run
from tests.helpers.tokenizer import added_token_ids, tokenizer_folder
from vllm import LLM, SamplingParams
from vllm.overlay.engine.step_failure import Refused
from vllm.overlay.grammar.compiler import GrammarError
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.source import alone, choice_part, json_part, regex_part
from vllm.overlay.grammar.waiting import Grammars
from vllm.sampling_params import GuidedDecodingParams

SMALL = 479
END_THINK, EOS = added_token_ids(SMALL)["</think>"], added_token_ids(SMALL)["<|im_end|>"]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
PERSON = Constraint(alone(json_part(SCHEMA, whitespace=" ?")))
DIGITS = Constraint(alone(regex_part(r"\d{20,30}")))
THOUGHTFUL = Constraint(alone(choice_part(["yes", "no", "perhaps"])), in_thought=True, end_thought=END_THINK,
                        thought_budget=7)
FIELDS = {"skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = make_qwen2(tmp_path_factory.mktemp("qwen2"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder(SMALL) / name, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return make_engine(checkpoint, **FIELDS, enable_prefix_caching=True)


def constrained(constraint: Constraint | None, max_tokens: int = 120, **more: Any) -> SamplingParams:
    return greedy(max_tokens, constraint=constraint, **{"ignore_eos": False, **more})


PARAMS = [constrained(PERSON), constrained(None, 20), constrained(DIGITS), constrained(THOUGHTFUL),
          constrained(None, 40, ignore_eos=True), constrained(PERSON, 5)]
# Not 150: its fourth token's logprob moves by 0.9e-5 between prefill and decode with PyTorch's own operators, too.
PROMPTS = [prompt(length, seed=length) for length in (100, 40, 70, 30, 151, 20)]


def run_each(engine, tag: str, together: bool = True) -> list[Any]:
    found: dict[str, Any] = {}
    for index, (tokens, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        add(engine, f"{tag}{index}", tokens, params.clone())
        if not together:
            found.update(drain(engine))
    found.update(drain(engine))
    return [found[f"{tag}{index}"] for index in range(len(PROMPTS))]


def content(tokenizer, output) -> str:
    tokens = list(output.outputs[0].token_ids)
    return tokenizer.decode(tokens[:-1] if tokens[-1] == EOS else tokens)


@pytest.fixture(scope="module")
def plain(engine):
    """Each alone, with a fresh cache for each prompt."""
    return run_each(engine, "plain", together=False)


def test_each_output_is_what_its_request_asked_for(plain, tokenizer):
    person, _, digits, thoughtful, _, cut = plain
    assert set(json.loads(content(tokenizer, person))) == {"name", "age"}
    assert re.fullmatch(r"\d{20,30}", content(tokenizer, digits))
    thought, _, answer = content(tokenizer, thoughtful).rpartition("</think>")
    assert answer in ("yes", "no", "perhaps") and len(thoughtful.outputs[0].token_ids) <= 7 + 2 + 8, thought
    reasons = [output.outputs[0].finish_reason for output in plain]
    assert reasons[:1] + reasons[2:4] == ["stop"] * 3 and reasons[5] == "length"


def test_in_a_batch_with_free_requests(engine, plain):
    assert_same(run_each(engine, "batch"), plain)


def test_in_pieces(checkpoint, plain):
    """Prompts of 20 to 150 tokens in steps of 24, beside sequences that generate."""
    pieces = make_engine(checkpoint, **FIELDS, max_num_batched_tokens=24, max_num_seqs=3)
    assert_same(run_each(pieces, "pieces"), plain)


@pytest.mark.parametrize("seed", range(2))
def test_preempted_often(engine, plain, seed):
    import random

    random.seed(seed)
    scheduler, = engine.scheduler
    before = scheduler.num_cumulative_preemption
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 40
    try:
        assert_same(run_each(engine, f"preempted{seed}"), plain)
    finally:
        scheduler.enable_artificial_preemption = False
    assert scheduler.num_cumulative_preemption >= before + 15


def test_several_samples_each_follow_their_own_grammar(engine, tokenizer):
    params = constrained(PERSON, temperature=1.0, seed=5, n=5, logprobs=None)
    output, = run(engine, [prompt(30, 9)], params, tag="samples")
    texts = [tokenizer.decode(one.token_ids[:-1]) for one in output.outputs]
    assert len(set(texts)) > 1 and all(set(json.loads(text)) == {"name", "age"} for text in texts), texts
    again, = run(engine, [prompt(30, 9)], params, tag="again")
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in output.outputs], "seeds"


def test_penalties_biases_and_limits_cannot_break_a_grammar(engine, tokenizer):
    every = {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": -2.0, "logit_bias": {
        tokenizer.convert_tokens_to_ids(letter): 100.0 for letter in "abc{"}, "min_p": 0.5, "top_k": 3, "top_p": 0.1,
        "temperature": 2.0, "seed": 1, "min_tokens": 100, "ignore_eos": True, "prompt_logprobs": 1}
    output, = run(engine, [prompt(30, 4)], constrained(PERSON, 200, **every), tag="every")
    assert set(json.loads(content(tokenizer, output))) == {"name", "age"}
    assert output.outputs[0].finish_reason == "stop", "behind its end a grammar has nothing left, min_tokens or not"


def test_aborted_in_the_middle(engine, plain):
    for index, (tokens, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        add(engine, f"stay{index}", tokens, params.clone())
        add(engine, f"leave{index}", tokens, params.clone())
    found: dict[str, Any] = {}
    for step in range(10_000):
        if not engine.has_unfinished_requests():
            break
        if step < len(PARAMS):
            engine.abort_request(f"leave{step}")
        for output in engine.step():
            found[output.request_id] = output
    assert_same([found[f"stay{index}"] for index in range(len(PARAMS))], plain)


def slow(engine, monkeypatch, grammar: str) -> concurrent.futures.Future:
    """Makes the grammar's compilation end when the returned future is done: with its result."""
    compiler, ready = engine.grammars._compiler, concurrent.futures.Future()
    true = compiler.compiled
    monkeypatch.setattr(compiler, "compiled", lambda wanted: ready if wanted == grammar else true(wanted))
    return ready


def test_a_request_waits_for_its_grammar_and_nobody_with_it(engine, plain, monkeypatch):
    true = engine.grammars._compiler.compiled(PERSON.grammar)
    ready = slow(engine, monkeypatch, PERSON.grammar)
    for index, (tokens, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        add(engine, f"wait{index}", tokens, params.clone())
    found: dict[str, Any] = {}
    while len(found) < 4 or not all(output.finished for output in found.values()):
        for output in engine.step():
            found[output.request_id] = output
    assert sorted(found) == ["wait1", "wait2", "wait3", "wait4"]
    assert engine.has_unfinished_requests() and engine.step() == [], "two still wait"
    engine.abort_request("wait5")
    ready.set_result(true.result())
    found.update(drain(engine))
    assert_same([found[f"wait{index}"] for index in range(5)], plain[:5])


def test_a_waiting_request_with_several_samples_is_aborted_whole(engine, monkeypatch):
    slow(engine, monkeypatch, PERSON.grammar)
    add(engine, "several", PROMPTS[0], constrained(PERSON, n=3, temperature=1.0))
    assert engine.has_unfinished_requests()
    engine.abort_request("several")
    assert not engine.has_unfinished_requests() and drain(engine) == {}


def drained_with_refusals(engine) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """(last output of each request, request and message of each refusal), when all are through."""
    found: dict[str, Any] = {}
    refused: list[tuple[str, str]] = []
    while engine.has_unfinished_requests():
        try:
            found.update((output.request_id, output) for output in engine.step())
        except Refused as failure:
            refused += [(request_id, str(failure)) for request_id in failure.request_ids]
    return found, refused


def test_a_grammar_that_turns_out_to_be_none_is_refused_to_its_request_alone(engine, plain, monkeypatch):
    ready = slow(engine, monkeypatch, PERSON.grammar)
    for index, (tokens, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        add(engine, f"refuse{index}", tokens, params.clone())
    ready.set_exception(GrammarError("no such thing"))
    found, refused = drained_with_refusals(engine)
    assert refused == [("refuse0", "no such thing"), ("refuse5", "no such thing")]
    assert_same([found[f"refuse{index}"] for index in range(1, 5)], plain[1:5])
    with pytest.raises(ValueError, match="Expected"):
        add(engine, "known", PROMPTS[0], constrained(Constraint("wat")))
        drain(engine)
    with pytest.raises(ValueError, match="Expected"):
        add(engine, "known again", PROMPTS[0], constrained(Constraint("wat")))
        drain(engine)


def test_a_sequence_whose_grammar_fails_is_refused_and_the_engine_goes_on(engine, plain, tokenizer):
    """What no mask can bring about is done by hand: the matcher is told of a token that the grammar does not allow."""
    add(engine, "fails", PROMPTS[2], constrained(DIGITS))
    add(engine, "goes on", PROMPTS[0], constrained(PERSON))
    while not engine.scheduler[0].running:
        engine.step()
    follower = next(group.sampling_params.follower for group in engine.scheduler[0].running
                    if group.request_id == "fails")
    follower._matcher.consume_token(tokenizer.convert_tokens_to_ids("x"))
    found, refused = drained_with_refusals(engine)
    (name, message), = refused
    assert name == "fails" and "could not be kept to its grammar" in message
    assert_same([found["goes on"]], plain[:1])
    assert_same(run(engine, [PROMPTS[2]], constrained(DIGITS), tag="later"), plain[2:3])


@pytest.mark.parametrize("what, why", [
    ({"tokenizer": None}, "no tokenizer"), ({"scheduler_config": {"is_multi_step": True}}, "--num-scheduler-steps"),
    ({"speculative_config": object()}, "--speculative-model"),
    ({"parallel_config": {"pipeline_parallel_size": 2}}, "--pipeline-parallel-size"),
])  # fmt: skip
def test_engines_that_cannot_keep_to_grammars_say_so(what, why):
    fields = {"tokenizer": object(), "scheduler_config": {"is_multi_step": False}, "speculative_config": None,
              "parallel_config": {"pipeline_parallel_size": 1}, **what}
    grammars = Grammars(SimpleNamespace(**{name: SimpleNamespace(**one) if isinstance(one, dict) else one
                                           for name, one in fields.items()}))
    added = []
    with pytest.raises(ValueError, match=f"cannot be kept to a grammar: .*{why}"):
        grammars.hold("x", constrained(PERSON), added.append)
    grammars.hold("y", constrained(None), added.append)
    grammars.hold("z", constrained(Constraint(None, in_thought=True, end_thought=5, thought_budget=5)), added.append)
    assert len(added) == 2 and not len(grammars)


def guided() -> Iterable[tuple[dict[str, Any], str]]:
    yield {"json": SCHEMA, "whitespace_pattern": " ?"}, r'\{ ?"name".*\}'
    yield {"json": json.dumps(SCHEMA)}, r'\{\s*"name"(.|\s)*\}'
    yield {"regex": r"\d{3}"}, r"\d{3}"
    yield {"choice": ["red", "blue"]}, "red|blue"
    yield {"grammar": 'root ::= "a"+ "b"'}, "a+b|a+"


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint), dtype="float32", max_model_len=512, num_gpu_blocks_override=200, max_num_seqs=4)


@pytest.mark.parametrize("fields, shape", guided())
def test_stocks_own_guided_decoding_offline(llm, fields, shape):
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=3, guided_decoding=GuidedDecodingParams(**fields))
    for output in llm.generate(["Hello", "Bye"], params, use_tqdm=False):
        assert re.fullmatch(shape, output.outputs[0].text), output.outputs[0].text


def test_stocks_own_guided_decoding_in_the_asynchronous_engine(checkpoint, tokenizer):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(
        model=str(checkpoint), dtype="float32", max_model_len=512, num_gpu_blocks_override=200, max_num_seqs=4,
        disable_log_requests=True, disable_log_stats=True))

    async def ask(name: str, params: SamplingParams) -> str:
        text = ""
        async for output in engine.generate("Hello", params, name):
            text = output.outputs[0].text
        return text

    async def main() -> None:
        params = [SamplingParams(max_tokens=100, seed=3, guided_decoding=GuidedDecodingParams(**fields))
                  for fields, _ in guided()]
        free = asyncio.ensure_future(ask("free", SamplingParams(max_tokens=20, ignore_eos=True)))
        texts = await asyncio.gather(*(ask(str(i), one) for i, one in enumerate(params)))
        for text, (_, shape) in zip(texts, guided(), strict=True):
            assert re.fullmatch(shape, text), text
        assert await free
        with pytest.raises(ValueError, match="Expected"):
            await ask("wrong", SamplingParams(constraint=Constraint("wat")))

    asyncio.run(main())
