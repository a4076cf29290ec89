"""logit_bias and allowed_token_ids for the whole vocabulary. Stock counts a tokenizer without its added tokens, so that
`</think>`, or a token of a tool call, could neither be asked for nor forbidden."""
from typing import Any, NamedTuple

from vllm.entrypoints.openai import logits_processors_stock as _stock
from vllm.sampling_params import LogitsProcessor
from vllm.transformers_utils.tokenizer import AnyTokenizer


class _WholeVocabulary(NamedTuple):
    """The one thing that stock asks a tokenizer here."""
    vocab_size: int


def get_logits_processors(logit_bias: dict[int, float] | dict[str, float] | None,
                          allowed_token_ids: list[int] | None, tokenizer: AnyTokenizer) -> list[LogitsProcessor]:
    """Stock's, where every id below len(tokenizer) is a token.

    Raises:
        ValueError: an id that is no token, or an empty list of allowed ones.
    """
    return _stock.get_logits_processors(logit_bias, allowed_token_ids, _WholeVocabulary(len(tokenizer)))


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
