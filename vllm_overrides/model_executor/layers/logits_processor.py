"""Steps that produce no token: every rank knows it, and none computes or exchanges logits. And logits are looked at,
for every model, before masks and penalties touch them; what a grammar forbids is taken out of them last."""
from typing import Any

import torch

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers import logits_processor_stock as _stock
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.overlay.engine import nonfinite
from vllm.overlay.grammar import step
from vllm.overlay.rebind import rebind

_stock_apply = _stock._apply_logits_processors


def _apply_logits_processors(logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> torch.Tensor:
    nonfinite.watch(logits, sampling_metadata)
    logits = _stock_apply(logits, sampling_metadata)
    step.constrain(logits, sampling_metadata)
    return logits


rebind(_stock, "_apply_logits_processors", _apply_logits_processors)


class LogitsProcessor(_stock.LogitsProcessor):
    """Stock's layer.

    Where no row is wanted stock gathers tensors without rows over the ranks; the vendor's copy gives every rank an
    empty tensor of its own, and then asks ranks other than the first for sequence groups that only the first has.
    """

    def forward(self, lm_head: VocabParallelEmbedding, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata,
                embedding_bias: torch.Tensor | None = None) -> torch.Tensor | None:
        if sampling_metadata.selected_token_indices.numel():
            return super().forward(lm_head, hidden_states, sampling_metadata, embedding_bias)
        if self.use_gather and get_tensor_model_parallel_rank() != 0:
            return None
        return hidden_states.new_empty((0, self.org_vocab_size))


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
