"""n and best_of through the engine: every sample as a request of its own, one answer to whoever asked."""
import asyncio

import pytest

from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, prompt, run
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

PROMPT = prompt(150, seed=1)
FINAL_ONLY, DELTA, CUMULATIVE = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def sampled(n, **fields):
    return SamplingParams(**{
        "n": n,
        "temperature": 1.5,
        "seed": 40,
        "max_tokens": 8,
        "ignore_eos": True,
        "detokenize": False,
        **fields
    })


@pytest.fixture(scope="module")
def engine(qwen2):
    return make_engine(qwen2, max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=True)


def tokens_of(output):
    return [list(completion.token_ids) for completion in output.outputs]


def singles(engine, count, **fields):
    return [tokens_of(run(engine, [PROMPT], sampled(1, seed=40 + index, **fields))[0])[0] for index in range(count)]


@pytest.mark.parametrize("kind", [FINAL_ONLY, CUMULATIVE])
@pytest.mark.parametrize("n", [2, 5])
def test_n_is_n_requests_with_seeds_that_follow(engine, n, kind):
    """5 samples in 2 places: stock waits forever."""
    expected = singles(engine, n)
    add(engine, "many", PROMPT, sampled(n, output_kind=kind))
    output = drain(engine)["many"]
    assert output.finished and [completion.index for completion in output.outputs] == list(range(n))
    assert tokens_of(output) == expected and len(set(map(tuple, expected))) == n
    assert output.prompt_token_ids == PROMPT and {completion.finish_reason
                                                  for completion in output.outputs} == {"length"}


def test_deltas_add_up_and_end_once(engine):
    expected = singles(engine, 3)
    add(engine, "many", PROMPT, sampled(3, output_kind=DELTA))
    parts, finished = {}, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == "many" and not (finished and finished[-1]), "an output after the last one"
            finished.append(output.finished)
            (completion, ) = output.outputs
            parts.setdefault(completion.index, []).extend(completion.token_ids)
    assert [parts[index] for index in range(3)] == expected
    assert finished.count(True) == 1


def test_reused_output_objects(qwen2, engine):
    """As in the engine process, where a request's output objects are written again in every step."""
    expected = singles(engine, 3)
    engine.use_cached_outputs = True
    try:
        for kind in (CUMULATIVE, FINAL_ONLY):
            add(engine, "many", PROMPT, sampled(3, output_kind=kind))
            assert tokens_of(drain(engine)["many"]) == expected
        add(engine, "many", PROMPT, sampled(3, output_kind=DELTA))
        parts = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                for completion in output.outputs:
                    parts.setdefault(completion.index, []).extend(completion.token_ids)
        assert [parts[index] for index in range(3)] == expected
    finally:
        engine.use_cached_outputs = False


def test_greedy_samples_are_equal(engine):
    """Stock refuses n > 1 at temperature 0."""
    stock = SamplingParams.__mro__[1]
    with pytest.raises(ValueError, match="n must be 1"):
        stock(n=3, temperature=0.0)
    one = run(engine, [PROMPT], greedy(8))[0]
    add(engine, "many", PROMPT, greedy(8, n=3))
    output = drain(engine)["many"]
    assert len(output.outputs) == 3
    for completion in output.outputs:
        output.outputs[0] = completion
        assert_same([output], [one])
    assert SamplingParams.from_optional(n=3, temperature=0.0).n == 3


def test_best_of_picks_by_probability(engine):
    params = {"logprobs": 0}
    all_four = [run(engine, [PROMPT], sampled(1, seed=40 + index, **params))[0].outputs[0] for index in range(4)]
    best = sorted(all_four, key=lambda completion: -completion.cumulative_logprob)[:2]
    for fields in ({}, params):
        add(engine, "best", PROMPT, sampled(2, best_of=4, **fields))
        output = drain(engine)["best"]
        assert [completion.index for completion in output.outputs] == [0, 1]
        assert tokens_of(output) == [list(completion.token_ids) for completion in best]
        assert all(
            (completion.logprobs is None) == (not fields) and (completion.cumulative_logprob is None) == (not fields)
            for completion in output.outputs)


def test_only_work_that_was_saved_is_reported(engine):
    """Later samples find the prompt that the first one computed: that is no hit of the request."""
    fresh = prompt(150, seed=99)
    reported = []
    for _ in range(2):
        add(engine, "many", fresh, sampled(3))
        reported.append(drain(engine)["many"].num_cached_tokens)
    assert reported == [0, 144]


@pytest.mark.parametrize("steps", [1, 2, 4, 12])
def test_an_abort_takes_all_samples(engine, steps):
    scheduler = engine.scheduler[0]
    add(engine, "many", PROMPT, sampled(7))
    add(engine, "other", PROMPT, sampled(1))
    found = {}
    for _ in range(steps):
        found.update({output.request_id: output for output in engine.step()})
    engine.abort_request(["many"])
    assert scheduler.get_num_unfinished_seq_groups() <= 1
    found.update(drain(engine))
    assert tokens_of(found["other"]) == singles(engine, 1)
    assert not engine.fanouts._parents and not engine.fanouts._children
    assert scheduler.block_manager.get_num_free_gpu_blocks() == engine.cache_config.num_gpu_blocks


def test_preempted_samples(engine):
    import random
    random.seed(3)
    expected = singles(engine, 4)
    scheduler = engine.scheduler[0]
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 15
    add(engine, "many", PROMPT, sampled(4))
    output = drain(engine)["many"]
    scheduler.enable_artificial_preemption = False
    assert tokens_of(output) == expected


def test_300_samples_in_2_places(engine):
    """Only as many sequences exist at a time as can run, so 300 long prompts cost no more memory than 2."""
    most = 0
    add(engine, "many", PROMPT, sampled(300, max_tokens=1))
    while engine.has_unfinished_requests():
        most = max(most, engine.scheduler[0].get_num_unfinished_seq_groups())
        outputs = engine.step()
    assert len(outputs[-1].outputs) == 300 and outputs[-1].finished and most == 2


def test_others_get_a_place_and_nothing_is_lost(engine):
    """Both places are taken by samples of long answers: whoever comes is served at once, and these go on later, with
    the same tokens."""
    expected = singles(engine, 3, max_tokens=40)
    add(engine, "many", PROMPT, sampled(3, max_tokens=40))
    for _ in range(10):
        engine.step()
    found = {}
    for name in ("x", "y"):
        add(engine, name, PROMPT, greedy(4))
        steps = 0
        while name not in found:
            found.update({output.request_id: output for output in engine.step() if output.finished})
            steps += 1
        # One step to displace a sample, one for the prompt, which is known, then one for each further token.
        assert steps <= 6, f"{name} was answered after {steps} steps"
    assert engine.scheduler[0].num_cumulative_preemption > 0
    found.update(drain(engine))
    assert tokens_of(found["many"]) == expected
    assert engine.scheduler[0].block_manager.get_num_free_gpu_blocks() == engine.cache_config.num_gpu_blocks


def test_logits_processors_with_a_state_are_cloned(engine):

    class Counts:
        """Allows token 100, 101, ... in the order of its own calls."""
        made = []

        def __init__(self):
            self.calls = 0
            self.made.append(self)

        def clone(self):
            return Counts()

        def __call__(self, past_tokens, logits):
            import torch
            self.calls += 1
            return torch.full_like(logits, -float("inf")).index_fill_(0, torch.tensor([99 + self.calls]), 0.0)

    add(engine, "many", PROMPT, sampled(3, max_tokens=4, logits_processors=[Counts()]))
    assert tokens_of(drain(engine)["many"]) == [[100, 101, 102, 103]] * 3
    assert [one.calls for one in Counts.made] == [0, 4, 4, 4]


def test_the_same_id_twice(engine):
    add(engine, "many", PROMPT, sampled(2))
    with pytest.raises(ValueError, match="request many already exists"):
        add(engine, "many", PROMPT, sampled(2))
    assert len(drain(engine)["many"].outputs) == 2


def test_offline(engine):
    from vllm import LLM
    from vllm.utils import Counter
    llm = LLM.__new__(LLM)
    llm.llm_engine, llm.request_counter = engine, Counter()
    outputs = llm.generate([{
        "prompt_token_ids": PROMPT
    }, {
        "prompt_token_ids": PROMPT
    }], [sampled(3), sampled(1)],
                           use_tqdm=False)
    expected = singles(engine, 3)
    assert [tokens_of(output) for output in outputs] == [expected, expected[:1]]


def test_the_asynchronous_engine(qwen2, engine):
    from vllm import AsyncEngineArgs, AsyncLLMEngine
    expected = singles(engine, 3)
    server = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(model=str(qwen2),
                        skip_tokenizer_init=True,
                        dtype="float32",
                        max_model_len=1024,
                        max_num_seqs=2,
                        max_num_batched_tokens=64,
                        num_gpu_blocks_override=200,
                        disable_log_requests=True,
                        disable_log_stats=True))

    async def ask(request_id, n, kind=CUMULATIVE, leave_after=None):
        last = None
        async for output in server.generate({"prompt_token_ids": PROMPT}, sampled(n, output_kind=kind), request_id):
            last = output
            if leave_after is not None:
                break
        if leave_after is not None:
            await server.abort(request_id)
        return last

    async def main():
        many, one, _ = await asyncio.gather(ask("many", 3), ask("one", 1), ask("leaves", 5, DELTA, leave_after=1))
        assert tokens_of(many) == expected and tokens_of(one) == expected[:1]
        for _ in range(200):
            if not server.engine.has_unfinished_requests():
                break
            await asyncio.sleep(0.01)
        assert not server.engine.has_unfinished_requests() and not server.engine.fanouts._parents
        server.shutdown_background_loop()

    asyncio.run(main())
