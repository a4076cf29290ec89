"""Stock's sampler with the filters of `vllm.overlay.kernels.sampling`: no vocabulary is sorted where top-k is small.

And what a request asks for is what it gets: parameters are not rounded to the logits' dtype, and each seeded request
draws from its own generator. Stock walks over all groups of the step, those that sample nothing because their prompt
is not complete included, and so gives a row the generator of another request.
"""
from typing import Any

import torch

from vllm.model_executor.layers import sampler_stock as _stock
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.overlay.kernels import sampling
from vllm.overlay.rebind import rebind

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
        return super().forward(logits.float(), sampling_metadata)


def __getattr__(name: str) -> object:
    return getattr(_stock, name)
