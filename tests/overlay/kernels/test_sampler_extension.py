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


def step(params, seed=0):
    """One decode step of one request per entry of `params`; every request's generator starts at its seed."""
    groups = []
    for index, fields in enumerate(params):
        data = SequenceData.from_seqs([1, 2, 3], [4])
        data.update_num_computed_tokens(3)
        groups.append(SequenceGroupMetadata(request_id=str(index), is_prompt=False, seq_data={index: data},
                                            sampling_params=SamplingParams(**fields), block_tables={index: [0]}))
    generators = {str(index): torch.Generator().manual_seed(fields["seed"])
                  for index, fields in enumerate(params) if "seed" in fields}
    metadata = SamplingMetadata.prepare(groups, [4] * len(params), [1] * len(params), "cpu", False, generators)
    logits = 3 * torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed))
    return sampler.Sampler()(logits, metadata)


def test_stock_uses_our_filters():
    assert sampler_stock._apply_top_k_top_p is sampling.apply_top_k_top_p
    assert sampler_stock._apply_min_p is sampling.apply_min_p


def test_every_other_name_is_stocks():
    assert sampler.Sampler is sampler_stock.Sampler
    assert sampler.SamplerOutput is sampler_stock.SamplerOutput
    assert sampler._get_logprobs if hasattr(sampler_stock, "_get_logprobs") else sampler.get_logprobs
    with pytest.raises(AttributeError):
        sampler.no_such_name  # noqa: B018


@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_and_logprobs_as_stock(seed, monkeypatch):
    ours = step(PARAMS, seed)
    monkeypatch.setattr(sampler_stock, "_apply_top_k_top_p", STOCK_TOP)
    monkeypatch.setattr(sampler_stock, "_apply_min_p", STOCK_MIN)
    stocks = step(PARAMS, seed)
    assert [group.samples[0].output_token for group in ours] == [group.samples[0].output_token for group in stocks]
    assert ours[5].samples[0].logprobs == stocks[5].samples[0].logprobs
    assert len({group.samples[0].output_token for group in ours}) > 1


def test_a_request_gets_the_same_token_alone_and_in_a_batch():
    together = step(PARAMS)
    logits = 3 * torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(0))
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
