"""logit_bias and allowed_token_ids for the whole vocabulary, at once.

Stock counts a tokenizer without its added tokens, and so could neither ask for `</think>` or a token of a call nor
forbid it; and it adds one bias after the other, each time a token is sampled.
"""
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from vllm.entrypoints.openai import logits_processors_stock as _stock
from vllm.sampling_params import LogitsProcessor
from vllm.transformers_utils.tokenizer import AnyTokenizer


class _WholeVocabulary(NamedTuple):
    """The one thing that stock asks a tokenizer here."""
    vocab_size: int


class Bias:
    """Adds biases to a row of logits, in place."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        """biases: by token id."""
        self._ids = torch.tensor(list(biases))
        self._values = torch.tensor(list(biases.values()))

    def __call__(self, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """token_ids: what was generated so far, of no account. logits: (vocabulary,)."""
        self._ids = self._ids.to(logits.device)
        self._values = self._values.to(logits)
        return logits.index_add_(0, self._ids, self._values)


def get_logits_processors(logit_bias: dict[int, float] | dict[str, float] | None,
                          allowed_token_ids: list[int] | None, tokenizer: AnyTokenizer) -> list[LogitsProcessor]:
    """Stock's, where every id below len(tokenizer) is a token.

    Raises:
        ValueError: an id that is no token, or an empty list of allowed ones.
    """
    found = _stock.get_logits_processors(logit_bias, allowed_token_ids, _WholeVocabulary(len(tokenizer)))
    if logit_bias:
        # Stock's first one, a partial, which has checked and clamped them.
        found[0] = Bias(found[0].args[0])  # type: ignore[attr-defined]
    return found


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
