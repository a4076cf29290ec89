"""The deployed sampler: stock's, with our filters inside, and the same tokens."""
import pytest
import torch

from tests.overlay.kernels.test_sampling import STOCK_MIN, STOCK_TOP, VOCAB
from vllm.model_executor.layers import sampler, sampler_stock
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.overlay.kernels import sampling
from vllm.sampling_params import SamplingParams
from vllm.sequence import SequenceData, SequenceGroupMetadata

PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "seed": 1},
    {"temperature": 0.7, "top_p": 0.5, "seed": 2},
    {"temperature": 1.3, "top_k": 300, "seed": 3},
    {"temperature": 1.0, "min_p": 0.1, "seed": 4},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.02, "seed": 5, "logprobs": 3},
    {"temperature": 1.0, "seed": 6},
]


def random_logits(rows, seed=0):
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def step(params, logits, kind=sampler.Sampler, unfinished=0, temperature=1.0):
    """One decode step of one request per entry of `params`; every request's generator starts at its seed.

    Before them in the batch stand `unfinished` seeded prompts, of `temperature`, that are not complete after this step.
    """
    groups = [SequenceGroupMetadata(request_id=f"prompt {index}", is_prompt=True, do_sample=False,
                                    seq_data={100 + index: SequenceData.from_seqs([1, 2, 3, 4])}, token_chunk_size=2,
                                    sampling_params=SamplingParams(seed=50 + index, temperature=temperature),
                                    block_tables={100 + index: [0]})
              for index in range(unfinished)]
    for index, fields in enumerate(params):
        data = SequenceData.from_seqs([1, 2, 3], [4])
        data.update_num_computed_tokens(3)
        groups.append(SequenceGroupMetadata(request_id=str(index), is_prompt=False, seq_data={index: data},
                                            sampling_params=SamplingParams(**fields), block_tables={index: [0]}))
    generators = {str(index): torch.Generator().manual_seed(fields["seed"])
                  for index, fields in enumerate(params) if "seed" in fields}
    generators.update({f"prompt {index}": torch.Generator().manual_seed(50 + index) for index in range(unfinished)})
    metadata = SamplingMetadata.prepare(groups, [2] * unfinished + [4] * len(params),
                                        [2] * unfinished + [1] * len(params), "cpu", False, generators)
    return kind()(logits.clone(), metadata)


def tokens(output):
    return [group.samples[0].output_token for group in output if group.samples]


def test_stock_uses_our_filters():
    assert sampler_stock._apply_top_k_top_p is sampling.apply_top_k_top_p
    assert sampler_stock._apply_min_p is sampling.apply_min_p


def test_every_other_name_is_stocks():
    assert issubclass(sampler.Sampler, sampler_stock.Sampler)
    assert sampler.SamplerOutput is sampler_stock.SamplerOutput
    assert sampler._get_ranks is sampler_stock._get_ranks
    with pytest.raises(AttributeError):
        sampler.no_such_name  # noqa: B018


@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_and_logprobs_as_stock(seed, monkeypatch):
    logits = random_logits(len(PARAMS), seed)
    ours = step(PARAMS, logits)
    monkeypatch.setattr(sampler_stock, "_apply_top_k_top_p", STOCK_TOP)
    monkeypatch.setattr(sampler_stock, "_apply_min_p", STOCK_MIN)
    stocks = step(PARAMS, logits, sampler_stock.Sampler)
    assert tokens(ours) == tokens(stocks)
    assert ours[5].samples[0].logprobs == stocks[5].samples[0].logprobs
    assert len(set(tokens(ours))) > 1


@pytest.mark.parametrize("kind, top_p", [(sampler.Sampler, 0.95), (sampler_stock.Sampler, 0.94921875)])
def test_top_p_is_not_rounded_to_the_logits_dtype(kind, top_p, monkeypatch):
    """The stock sampler stands beside ours to show that the test has power."""
    seen = []

    def spy(logits, p, k):
        seen.append(float(p[0]))
        return logits

    monkeypatch.setattr(sampler_stock, "_apply_top_k_top_p", spy)
    step([{"temperature": 1.0, "top_p": 0.95, "seed": 1}], random_logits(1).bfloat16(), kind)
    assert seen == [pytest.approx(top_p, abs=1e-7)]


def test_temperature_and_penalties_are_not_rounded_to_the_logits_dtype():
    logits = random_logits(1).bfloat16()
    fields = {"temperature": 0.7, "repetition_penalty": 1.05, "seed": 1, "logprobs": 1}
    output = step([fields], logits)
    penalised = logits[0].double()
    for token in (1, 2, 3, 4):
        penalised[token] = penalised[token] / 1.05 if penalised[token] > 0 else penalised[token] * 1.05
    want = torch.log_softmax(penalised / 0.7, 0)
    for token, got in output[0].samples[0].logprobs.items():
        assert got.logprob == pytest.approx(float(want[token]), abs=2e-4), "0.02 off where they are"


def test_a_seeded_request_draws_the_same_beside_unfinished_prompts(monkeypatch):
    logits = random_logits(len(PARAMS))
    assert tokens(step(PARAMS, logits, unfinished=2)) == tokens(step(PARAMS, logits))
    monkeypatch.setattr(sampler_stock, "_multinomial", sampler._stock_multinomial)
    assert tokens(step(PARAMS, logits, unfinished=2)) != tokens(step(PARAMS, logits)), "stock would pass too"


def test_a_request_gets_the_same_token_alone_and_in_a_batch():
    logits = random_logits(len(PARAMS))
    together = step(PARAMS, logits)
    for index, fields in enumerate(PARAMS):
        filtered = logits[index:index + 1] / (fields["temperature"] or 1)
        if fields["temperature"] == 0:
            assert together[index].samples[0].output_token == int(sampling.greedy(filtered))
            continue
        if "top_p" in fields or "top_k" in fields:
            filtered = sampling.apply_top_k_top_p(filtered, torch.tensor([fields.get("top_p", 1.0)]),
                                                  torch.tensor([fields.get("top_k", VOCAB)]))
        if "min_p" in fields:
            filtered = sampling.apply_min_p(filtered, torch.tensor([fields["min_p"]]))
        noise = torch.empty_like(filtered).exponential_(generator=torch.Generator().manual_seed(fields["seed"]))
        assert together[index].samples[0].output_token == int((filtered.softmax(-1) / noise).argmax()), fields


LIKELIEST = [
    {"temperature": 0.0},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "min_tokens": 9, "max_tokens": 10, "stop_token_ids": [7]},
]


@pytest.mark.parametrize("chosen, unfinished", [(slice(0, 1), 0), (slice(0, 1), 2), (slice(0, 4), 0), (slice(0, 4), 2),
                                                (slice(1, 3), 0), (slice(1, 3), 2), (slice(0, 0), 2)])
def test_the_likeliest_tokens_are_found_without_probabilities(chosen, unfinished, monkeypatch):
    params = LIKELIEST[chosen]
    logits = random_logits(len(params), seed=9)
    logits[:, 4] = 30.0
    logits[:, 7] = 29.9
    want = step(params, logits, sampler_stock.Sampler, unfinished, 0.0)
    for name in ("softmax", "log_softmax"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("a whole vocabulary of probabilities"))
    got = step(params, logits, sampler.Sampler, unfinished, 0.0)
    print(tokens(got), tokens(want))
    assert tokens(got) == tokens(want) and len(tokens(got)) == len(params)
    assert [(group.samples and group.samples[0].logprobs, group.prompt_logprobs) for group in got] == [
        (group.samples and group.samples[0].logprobs, group.prompt_logprobs) for group in want]


@pytest.mark.parametrize("beside", [{"temperature": 0.0, "logprobs": 2}, {"temperature": 1.0, "seed": 3}])
def test_beside_other_requests_it_is_stocks_step(beside):
    params, logits = [*LIKELIEST, beside], random_logits(5, seed=11)
    got, want = step(params, logits), step(params, logits, sampler_stock.Sampler)
    assert tokens(got) == tokens(want) and tokens(got)[:4] == tokens(step(LIKELIEST, logits[:4]))
    assert got[4].samples[0].logprobs == want[4].samples[0].logprobs
