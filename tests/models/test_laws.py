"""Same request, same tokens: the hybrid model through the engine, however the work is cut, mixed, preempted or shared.

In float32: equal tokens and logprobs within 1e-5 (`assert_same`). The law of bfloat16 and float16, by transformers'
spread, is in test_parity.py. The negative controls show that the comparison notices a state that is lost.
"""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_models import add, assert_same, drain, environment, greedy, make_engine, run
from tests.models.shapes import VOCABULARY, prompt
from vllm import SamplingParams
from vllm.overlay.engine.step_failure import StepFailed
from vllm.overlay.hybrid import StatePool

PROMPTS = [prompt(length) for length in (1, 200, 7, 64, 1, 65, 129, 33)]
NEW = 10
ALL = 1024


@pytest.fixture(scope="module")
def engine(hybrid):
    return make_engine(hybrid, max_num_batched_tokens=ALL, max_logprobs=VOCABULARY)


@pytest.fixture
def budget(engine, monkeypatch):
    """Sets the tokens of a step; what a prompt has more is left for the next step."""
    return lambda tokens: monkeypatch.setattr(engine.scheduler_config, "max_num_batched_tokens", tokens)


@pytest.fixture(scope="module")
def alone(engine):
    """Every prompt whole and alone."""
    return run(engine, PROMPTS, greedy(NEW), together=False)


def counted(engine, monkeypatch):
    """Counts the engine's forward passes."""
    steps = []
    forward = engine.model_executor.execute_model
    monkeypatch.setattr(engine.model_executor, "execute_model", lambda *a, **k: (steps.append(1), forward(*a, **k))[1])
    return steps


def test_output_is_alive(alone):
    tokens = [token for output in alone for token in output.outputs[0].token_ids]
    assert len(set(tokens)) > 25, f"the model repeats itself, so equal tokens show little: {tokens}"


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 64, 129, ALL])
def test_chunk_sizes(engine, budget, alone, chunk, monkeypatch):
    budget(chunk)
    steps = counted(engine, monkeypatch)
    assert_same(run(engine, PROMPTS, greedy(NEW), together=False), alone)
    pieces = sum(-(-len(tokens) // chunk) for tokens in PROMPTS)
    assert len(steps) == pieces + len(PROMPTS) * (NEW - 1)


@pytest.mark.parametrize("chunk", [16, 50, ALL])
def test_mixed_batch_of_eight(engine, budget, alone, chunk, monkeypatch):
    budget(chunk)
    steps = counted(engine, monkeypatch)
    assert_same(run(engine, PROMPTS, greedy(NEW)), alone)
    assert len(steps) < sum(map(len, PROMPTS)) / chunk + 2 * NEW


def test_one_token_prompts(engine):
    prompts = [[token] for token in range(8)]
    together = run(engine, prompts, greedy(NEW))
    assert_same(together, run(engine, prompts, greedy(NEW), together=False))
    assert len({output.outputs[0].token_ids for output in together}) > 1


def test_aborted_in_mid_prompt(engine, budget, alone):
    """The slot and blocks of a client that left say nothing to the next owner."""
    budget(16)
    for number in range(8):
        add(engine, f"gone{number}", prompt(150 + number), greedy(NEW))
    for _ in range(5):
        engine.step()
    for number in range(8):
        engine.abort_request(f"gone{number}")
    assert_same(run(engine, PROMPTS, greedy(NEW)), alone)


@pytest.mark.parametrize("after", [0, 2, 9, 14])
def test_a_failed_step(engine, budget, alone, monkeypatch, after):
    """It raises after the states of its rows moved on: those requests fail, their slots say nothing to the next."""
    budget(48)
    model = engine.model_executor.driver_worker.model_runner.model
    forward, passes = model.forward, []

    def raises_once(*args, **kwargs):
        passes.append(forward(*args, **kwargs))
        if len(passes) == after + 1:
            raise RuntimeError("no luck")
        return passes[-1]

    monkeypatch.setattr(model, "forward", raises_once)
    for index, tokens in enumerate(PROMPTS):
        add(engine, str(index), tokens, greedy(NEW))
    found, failed = {}, []
    while engine.has_unfinished_requests():
        try:
            found.update({output.request_id: output for output in engine.step()})
        except StepFailed as failure:
            failed += failure.request_ids
    left = [index for index in range(len(PROMPTS)) if str(index) not in failed]
    assert failed and engine.scheduler[0].slots.num_free == engine.scheduler_config.max_num_seqs
    assert_same([found[str(index)] for index in left], [alone[index] for index in left])
    assert_same(run(engine, PROMPTS, greedy(NEW)), alone)


def test_preempted(hybrid, engine):
    """Too few blocks for all: sequences are thrown out and start anew, with a state that starts anew."""
    prompts = [prompt(length) for length in range(25, 33)]
    small = make_engine(hybrid, max_num_batched_tokens=48, num_gpu_blocks_override=20, max_model_len=256)
    outputs = run(small, prompts, greedy(40))
    assert small.scheduler[0].num_cumulative_preemption > 0
    assert_same(outputs, run(engine, prompts, greedy(40), together=False))


def test_three_samples_of_one_prompt(engine, budget):
    """n = 3 is three requests with seeds s, s + 1, s + 2."""
    fields = {"temperature": 1.0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 2, "detokenize": False}
    single = []
    for seed in (11, 12, 13):
        single += run(engine, [PROMPTS[5]], SamplingParams(seed=seed, **fields))
    budget(48)
    add(engine, "three", PROMPTS[5], SamplingParams(n=3, seed=11, **fields))
    three = drain(engine)["three"].outputs
    assert [list(choice.token_ids) for choice in three] == [list(one.outputs[0].token_ids) for one in single]
    assert len({tuple(choice.token_ids) for choice in three}) == 3
    for choice, one in zip(three, single, strict=True):
        assert abs(choice.cumulative_logprob - one.outputs[0].cumulative_logprob) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_request_alone_is_equal_to_the_bit(hybrid, dtype):
    """In every dtype, and whatever the slots and blocks held before."""
    one = make_engine(hybrid, dtype=dtype, max_num_batched_tokens=64, max_num_seqs=3)
    first = run(one, PROMPTS, greedy(NEW), together=False)
    run(one, [prompt(length) for length in range(40, 52)], greedy(NEW))
    for index, tokens in enumerate(PROMPTS):
        add(one, f"gone{index}", prompt(99), greedy(NEW))
        one.step()
        one.abort_request(f"gone{index}")
        (again, ) = run(one, [tokens], greedy(NEW))
        expected = first[index].outputs[0]
        assert again.outputs[0].token_ids == expected.token_ids, f"prompt of {len(tokens)} tokens"
        assert [{token: entry.logprob for token, entry in place.items()} for place in again.outputs[0].logprobs] == [
            {token: entry.logprob for token, entry in place.items()} for place in expected.logprobs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_stay_near_float32(hybrid, alone, dtype):
    """Teacher-forced: logprobs of the float32 run's own tokens; float16 has eight times finer steps than bfloat16."""
    other = make_engine(hybrid, dtype=dtype, max_num_batched_tokens=64)
    sequences = [tokens + list(output.outputs[0].token_ids) for tokens, output in zip(PROMPTS, alone, strict=True)]
    outputs = run(other, sequences, greedy(1, prompt_logprobs=1))
    errors = []
    for tokens, output, expected in zip(PROMPTS, outputs, alone, strict=True):
        for place, token in enumerate(expected.outputs[0].token_ids):
            found = output.prompt_logprobs[len(tokens) + place][token].logprob
            errors.append(abs(found - expected.outputs[0].logprobs[place][token].logprob))
    # The median, because rounding may send a token to another expert.
    typical = sorted(errors)[len(errors) // 2]
    print(f"{dtype}: logprobs of {len(errors)} tokens differ by {typical:.4f} in the median, {max(errors):.4f} at most")
    assert 0 < typical < {"bfloat16": 0.02, "float16": 0.0025}[dtype]


def test_two_ranks(hybrid, alone):
    """Tensor parallel 2, with heads and experts split over the ranks, in a process of its own."""
    program = f"""
import json
from tests.helpers.tiny_models import greedy, make_engine, run
from tests.models.test_laws import NEW, PROMPTS
if __name__ == "__main__":
    engine = make_engine({str(hybrid)!r}, tensor_parallel_size=2, max_num_batched_tokens=64)
    outputs = run(engine, PROMPTS, greedy(NEW))
    print("OUTPUT", json.dumps([[list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob] for o in outputs]))
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment(), text=True, capture_output=True,
                          cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("OUTPUT "))[len("OUTPUT "):])
    for (tokens, logprob), expected in zip(found, alone, strict=True):
        assert tokens == list(expected.outputs[0].token_ids)
        assert abs(logprob - expected.outputs[0].cumulative_logprob) < 1e-5 * NEW


def parted(outputs, expected):
    """How many requests do not hold the law."""
    count = 0
    for one, other in zip(outputs, expected, strict=True):
        try:
            assert_same([one], [other])
        except AssertionError:
            count += 1
    return count


def test_negative_control_no_fresh_start(engine, alone, monkeypatch):
    """Slots that are not zeroed for their new owner must show."""
    monkeypatch.setattr(StatePool, "apply_init", lambda *args: None)
    assert parted(run(engine, PROMPTS, greedy(NEW), together=False), alone) == len(PROMPTS)


@pytest.mark.parametrize("tensor", ["conv", "recurrent"])
def test_negative_control_state_lost_between_pieces(engine, budget, alone, monkeypatch, tensor):
    """A tail or a state that is dropped at every step must show, even in a prompt that was never cut."""
    begin = StatePool.apply_init

    def drop(pool, live_slots, inits):
        begin(pool, live_slots, inits)
        getattr(pool, tensor).zero_()

    monkeypatch.setattr(StatePool, "apply_init", drop)
    budget(64)
    assert parted(run(engine, PROMPTS, greedy(NEW), together=False), alone) == len(PROMPTS)


def test_negative_control_swapped_slots(engine, alone, monkeypatch):
    """Two sequences that read each other's state must show."""
    begin = StatePool.apply_init

    def swap(pool, live_slots, inits):
        begin(pool, live_slots, inits)
        if len(live_slots) == 2:
            for state in (pool.conv, pool.recurrent):
                state[:, live_slots] = state[:, live_slots[::-1]]

    monkeypatch.setattr(StatePool, "apply_init", swap)
    assert parted(run(engine, PROMPTS[1:3], greedy(NEW)), alone[1:3]) == 2
