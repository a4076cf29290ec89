"""Stock's sampler with the filters of `vllm.overlay.kernels.sampling`: no vocabulary is sorted where top-k is small.

And what a request asks for is what it gets: parameters are not rounded to the logits' dtype, and each seeded request
draws from its own generator. Stock walks over all groups of the step, those that sample nothing because their prompt
is not complete included, and so gives a row the generator of another request.

Where every request wants its likeliest token and nobody asks for logprobs, the largest logit is all that is looked for:
stock has softmax, log_softmax and a copy of both made of the whole vocabulary before it.
"""
from typing import Any

import torch

from vllm.model_executor.layers import sampler_stock as _stock
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.overlay.kernels import sampling
from vllm.overlay.rebind import rebind
from vllm.sampling_params import SamplingType

_stock_multinomial = _stock._multinomial


def _multinomial(probs: torch.Tensor, num_samples: int, seq_groups: list[Any] | None = None) -> torch.Tensor:
    sampling_groups = None if seq_groups is None else [group for group in seq_groups if group.do_sample]
    return _stock_multinomial(probs, num_samples, sampling_groups)


rebind(_stock, "_multinomial", _multinomial)
rebind(_stock, "_apply_top_k_top_p", sampling.apply_top_k_top_p)
rebind(_stock, "_apply_min_p", sampling.apply_min_p)


class Sampler(_stock.Sampler):
    """Stock's sampler on float32 logits.

    Stock makes temperature, top_p, min_p and the penalties of the logits' dtype: in bfloat16 a top_p of 0.95 is 0.9492
    and a repetition penalty of 1.05 is 1.0469, and penalised logits are rounded again.
    """

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> _stock.SamplerOutput | None:
        """logits: [T, V] of any float dtype. Otherwise as stock's."""
        logits = logits.float()
        if self.include_gpu_probs_tensor or not _only_likeliest(sampling_metadata):
            return super().forward(logits, sampling_metadata)
        if not sampling_metadata.reuse_sampling_tensors or self._do_penalties:
            self._init_sampling_tensors(logits, sampling_metadata)
        logits = _stock._apply_min_tokens_penalty(logits, sampling_metadata)
        if self._do_penalties:
            tensors = self._sampling_tensors
            logits = _stock._apply_penalties(logits, tensors.prompt_tokens, tensors.output_tokens,
                                             tensors.presence_penalties, tensors.frequency_penalties,
                                             tensors.repetition_penalties)
        rows = sampling_metadata.categorized_sample_indices[SamplingType.GREEDY]
        tokens = sampling.greedy(logits if len(rows) == len(logits) else logits[rows.long()])
        found = _stock._greedy_sample(sampling_metadata.seq_groups, tokens)
        prompt_logprobs, sample_logprobs = _stock.get_logprobs(logits, sampling_metadata, found)
        return _stock._build_sampler_output(found, sampling_metadata, prompt_logprobs, sample_logprobs,
                                            on_device_tensors=None, skip_sampler_cpu_output=False)


def _only_likeliest(sampling_metadata: SamplingMetadata) -> bool:
    """Whether the step's result is the likeliest token of each row and nothing else."""
    return not sampling_metadata.skip_sampler_cpu_output and all(
        group.sampling_params.sampling_type == SamplingType.GREEDY and group.sampling_params.logprobs is None
        and group.sampling_params.prompt_logprobs is None for group in sampling_metadata.seq_groups)


def __getattr__(name: str) -> object:
    return getattr(_stock, name)
