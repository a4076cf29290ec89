"""The GPU worker, runner and executor on the CPU: stock's classes, any cut of the prompts, any batch, the dtype as
asked."""
import pytest
import torch

from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, make_qwen2, prompt, run

PROMPTS = [prompt(length, seed=length) for length in (1, 2, 16, 17, 63, 130, 200, 301)]
TOKENS = 10


@pytest.fixture(scope="module")
def plain(qwen2):
    return run(make_engine(qwen2, max_num_batched_tokens=1024), PROMPTS, greedy(TOKENS), together=False)


def test_it_is_the_path_of_the_card(qwen2):
    from vllm.executor.cpu_executor import CPUExecutor
    from vllm.executor.multiproc_gpu_executor import MultiprocessingGPUExecutor
    from vllm.overlay.attention.paged_backend import PagedTorchBackend
    from vllm.worker import model_runner_stock, worker_stock
    from vllm.worker.model_runner import ModelRunner
    from vllm.worker.worker import Worker
    engine = make_engine(qwen2, enable_prefix_caching=True)
    executor = engine.model_executor
    worker = executor.driver_worker
    assert type(executor) is CPUExecutor and isinstance(executor, MultiprocessingGPUExecutor)
    assert isinstance(worker, Worker) and isinstance(worker, worker_stock.Worker)
    assert type(worker.model_runner) is ModelRunner and isinstance(worker.model_runner, model_runner_stock.ModelRunner)
    assert worker.model_runner.attn_backend is PagedTorchBackend
    assert worker.model_config.enforce_eager
    assert engine.scheduler_config.chunked_prefill_enabled and engine.cache_config.enable_prefix_caching
    assert worker.model_runner.state_pool is None


def test_logits_of_transformers(qwen2, plain):
    """Greedy tokens and their logprobs against an implementation that shares nothing with this one."""
    from transformers import Qwen2ForCausalLM
    reference = Qwen2ForCausalLM.from_pretrained(qwen2)
    for tokens, output in zip(PROMPTS, plain, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logprobs = reference(torch.tensor([tokens + answer])).logits[0, len(tokens) - 1:-1].log_softmax(-1)
        for place, token in enumerate(answer):
            best = logprobs[place].argmax().item()
            mine = output.outputs[0].logprobs[place][token].logprob
            assert token == best or logprobs[place][best] - logprobs[place][token] < 1e-4, (len(tokens), place, token,
                                                                                            best)
            assert abs(mine - logprobs[place][token]
                       ) < 1e-4, f"prompt of {len(tokens)}, token {place}: {mine}, {logprobs[place][token]}"


@pytest.mark.parametrize("budget", [1, 2, 3, 16, 64, 129])
def test_pieces_of_any_size(qwen2, plain, budget):
    engine = make_engine(qwen2, max_num_batched_tokens=budget, max_num_seqs=1)
    assert_same(run(engine, PROMPTS[-3:], greedy(TOKENS)), plain[-3:])


@pytest.mark.parametrize("arguments", [{}, {"max_num_batched_tokens": 40}, {"enable_chunked_prefill": False,
                                                                            "max_num_batched_tokens": 1024}],
                         ids=["pieces of 128", "pieces of 40", "whole prompts"])
def test_a_mixed_batch_of_eight(qwen2, plain, arguments):
    """Arrivals one step apart, so that most steps hold prompts, pieces and decoding sequences together."""
    engine = make_engine(qwen2, **arguments)
    found = {}
    for index, tokens in enumerate(PROMPTS):
        add(engine, str(index), tokens, greedy(TOKENS))
        found.update({output.request_id: output for output in engine.step()})
    found.update(drain(engine))
    assert_same([found[str(index)] for index in range(len(PROMPTS))], plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_what_was_asked_for(qwen2, plain, dtype):
    """Stock casts float16 to bfloat16 on the CPU. Teacher-forced with the float32 run's tokens, logprobs stay near."""
    engine = make_engine(qwen2, dtype=dtype)
    runner = engine.model_executor.driver_worker.model_runner
    wanted = getattr(torch, dtype)
    assert engine.model_config.dtype == wanted
    assert {parameter.dtype for parameter in runner.model.parameters()} == {wanted}
    assert engine.model_executor.driver_worker.gpu_cache[0][0].dtype == wanted
    forced = [tokens + list(output.outputs[0].token_ids) for tokens, output in zip(PROMPTS, plain, strict=True)]
    outputs = run(engine, forced, greedy(1, prompt_logprobs=0))
    worst = 0.0
    for tokens, output, expected in zip(PROMPTS, outputs, plain, strict=True):
        for place, logprobs in enumerate(expected.outputs[0].logprobs):
            token = expected.outputs[0].token_ids[place]
            worst = max(worst,
                        abs(output.prompt_logprobs[len(tokens) + place][token].logprob - logprobs[token].logprob))
    bound = {"bfloat16": 1.0, "float16": 0.1}[dtype]
    assert worst < bound, f"largest difference of a logprob from float32: {worst}"


def test_head_size_256_with_grouped_heads(tmp_path):
    model = make_qwen2(tmp_path / "wide",
                       hidden_size=1024,
                       intermediate_size=64,
                       num_attention_heads=4,
                       num_key_value_heads=1,
                       num_hidden_layers=1,
                       initializer_range=0.05)
    whole = run(make_engine(model, max_num_batched_tokens=1024), PROMPTS[3:6], greedy(4), together=False)
    assert_same(run(make_engine(model, max_num_batched_tokens=23), PROMPTS[3:6], greedy(4)), whole)


def test_seeded_sampling_survives_preemption(qwen2):
    """Stock makes a preempted request's generator anew, so that it draws the same numbers a second time."""
    from vllm import SamplingParams
    params = SamplingParams(temperature=1.5, seed=17, max_tokens=20, ignore_eos=True, detokenize=False)
    engine = make_engine(qwen2)
    expected = run(engine, PROMPTS[3:6], params)
    add(engine, "again", PROMPTS[5], params)
    found = {}
    for number in range(200):
        if not engine.has_unfinished_requests():
            break
        scheduler = engine.scheduler[0]
        scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = number % 4 == 3, 1
        found.update({output.request_id: output for output in engine.step()})
    scheduler.enable_artificial_preemption = False
    assert scheduler.num_cumulative_preemption > 1
    assert list(found["again"].outputs[0].token_ids) == list(expected[2].outputs[0].token_ids)


def test_logits_processors_of_a_prompt_in_pieces(qwen2):
    """Steps in which a group with a logits processor produces no token, alone and beside one that does."""
    seen = []

    def only_seven(prompt_tokens, past_tokens, logits):
        seen.append((len(prompt_tokens), len(past_tokens)))
        return torch.full_like(logits, -float("inf")).index_fill_(0, torch.tensor([7]), 0.0)

    engine = make_engine(qwen2, max_num_batched_tokens=32)
    free = run(engine, [PROMPTS[2]], greedy(20))
    add(engine, "free", PROMPTS[2], greedy(20))
    add(engine, "forced", PROMPTS[5], greedy(3, logits_processors=[only_seven]))
    found = drain(engine)
    assert list(found["forced"].outputs[0].token_ids) == [7, 7, 7]
    assert seen == [(130, 0), (130, 1), (130, 2)]
    assert_same([found["free"]], free)


def test_penalties_beside_prompt_logprobs_and_pieces(qwen2):
    """Groups that want penalties, prompt logprobs and nothing, of which some produce no token in a step."""
    engine = make_engine(qwen2, max_num_batched_tokens=48)
    kinds = [
        greedy(6, repetition_penalty=1.3),
        greedy(6, prompt_logprobs=1),
        greedy(6),
        greedy(6, presence_penalty=0.5, min_tokens=2)
    ]
    alone = [run(engine, [PROMPTS[4 + index]], params)[0] for index, params in enumerate(kinds)]
    for index, params in enumerate(kinds):
        add(engine, str(index), PROMPTS[4 + index], params)
    found = drain(engine)
    assert_same([found[str(index)] for index in range(4)], alone)
    a, b = found["1"].prompt_logprobs, alone[1].prompt_logprobs
    assert len(a) == len(b) == len(PROMPTS[5])


def test_prompt_logprobs_in_pieces_and_over_preemption(qwen2):
    """Stock fails when it recomputes a request that wants prompt logprobs, or returns them twice."""
    import random
    random.seed(1)
    params = greedy(6, prompt_logprobs=0)
    expected = run(make_engine(qwen2, max_num_batched_tokens=1024), PROMPTS[4:], params, together=False)
    engine = make_engine(qwen2, max_num_batched_tokens=40)
    scheduler = engine.scheduler[0]
    for preemptions in (0, 12):
        scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, preemptions
        outputs = run(engine, PROMPTS[4:], params)
        assert_same(outputs, expected)
        for tokens, one, other in zip(PROMPTS[4:], outputs, expected, strict=True):
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs) == len(tokens)
            for place in range(1, len(tokens)):
                mine, right = (each.prompt_logprobs[place][tokens[place]].logprob for each in (one, other))
                assert abs(mine - right) < 1e-5, f"prompt of {len(tokens)}, token {place}: {mine}, expected {right}"
    assert scheduler.num_cumulative_preemption > 5


def test_several_pieces_in_a_step_without_a_token(qwen2, plain, monkeypatch):
    """Pieces cut short of the budget: a step holds several that all go on. Stock returns one output for all of them."""
    engine = make_engine(qwen2)
    scheduler = engine.scheduler[0]
    uncut = scheduler._get_num_new_tokens
    monkeypatch.setattr(scheduler, "_get_num_new_tokens", lambda *arguments: min(uncut(*arguments), 30))
    assert_same(run(engine, PROMPTS[-3:], greedy(TOKENS)), plain[-3:])


def test_a_budget_that_block_size_does_not_divide(qwen2, plain):
    """Stock raises in the engine's loop for it, once prefix caching is on."""
    engine = make_engine(qwen2, max_num_batched_tokens=50, enable_prefix_caching=True)
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


def test_too_little_memory_is_one_line(qwen2, monkeypatch):
    from vllm.overlay.runtime import platform_cpu
    monkeypatch.setattr(platform_cpu, "available_memory", lambda: platform_cpu.GIB // 4 + 100_000)
    with pytest.raises(ValueError, match=r"too little memory: .*max_model_len 1024.*lower --max-model-len") as caught:
        make_engine(qwen2)
    assert "\n" not in str(caught.value)


def test_lora_is_refused(qwen2):
    with pytest.raises(ValueError, match="LoRA is not supported on the CPU"):
        make_engine(qwen2, enable_lora=True, enable_chunked_prefill=False, max_num_batched_tokens=1024)
