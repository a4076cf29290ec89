"""Penalties in a batch where only some requests want prompt logprobs."""
from array import array
from typing import Any

import torch

from vllm.model_executor import sampling_metadata_stock as _stock
from vllm.sequence import VLLM_TOKEN_ID_ARRAY_TYPE
from vllm.utils import make_tensor_with_pad


class SamplingTensors(_stock.SamplingTensors):
    """Stock's tensors of the sampler."""

    @classmethod
    def from_sampling_metadata(cls, sampling_metadata: _stock.SamplingMetadata, vocab_size: int, device: torch.device,
                               dtype: torch.dtype) -> tuple["SamplingTensors", bool, bool, bool]:
        """As stock, with the token rows of the penalties in line with the rows of the logits.

        Stock asks the last group of the batch, instead of each, whether there are rows for prompt logprobs, and so
        applies the penalties of one request to another.
        """
        tensors, do_penalties, do_top_p_top_k, do_min_p = super().from_sampling_metadata(
            sampling_metadata, vocab_size, device, dtype)
        if do_penalties:
            prompts, outputs = _token_rows(sampling_metadata)
            tensors.prompt_tokens, tensors.output_tokens = (
                make_tensor_with_pad(rows, vocab_size, dtype=torch.int64, device=device) for rows in (prompts, outputs))
        return tensors, do_penalties, do_top_p_top_k, do_min_p


def _token_rows(sampling_metadata: _stock.SamplingMetadata) -> tuple[list[array], list[array]]:
    """Prompt and output tokens per row of the logits; rows for prompt logprobs have none, for they are not
    penalised."""
    prompts: list[array] = []
    outputs: list[array] = []
    for group in sampling_metadata.seq_groups:
        for _ in group.prompt_logprob_indices:
            prompts.append(array(VLLM_TOKEN_ID_ARRAY_TYPE))
            outputs.append(array(VLLM_TOKEN_ID_ARRAY_TYPE))
        if group.do_sample:
            for seq_id in group.seq_ids:
                prompts.append(group.seq_data[seq_id].prompt_token_ids_array)
                outputs.append(group.seq_data[seq_id].output_token_ids_array)
    return prompts, outputs


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
