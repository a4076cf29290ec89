"""Words that an answer must not hold, as sequences of tokens: the last token of one is out where the others came."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

# Below every logit, and finite: where nothing else is left, there is still something to choose from.
_NEVER = -1e4


class BadWords:
    """A logits processor; one may serve any number of sequences. It is pickled on its way to the engine."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        """sequences: of token ids, none of them empty."""
        self._sequences = [tuple(sequence) for sequence in sequences]

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """token_ids: what was generated so far. logits: (vocabulary,), changed in place."""
        out = [sequence[-1] for sequence in self._sequences if _ends_with(token_ids, sequence[:-1])]
        if out:
            logits[torch.tensor(out, device=logits.device)] = _NEVER
        return logits


def _ends_with(token_ids: Sequence[int], beginning: Sequence[int]) -> bool:
    return not beginning or tuple(token_ids[-len(beginning):]) == beginning


def bad_sequences(words: Iterable[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each word, at the beginning of an answer and behind a blank."""
    found = []
    for word in words:
        for written in {word, f" {word.lstrip()}"}:
            ids = tokenizer(written, add_special_tokens=False).input_ids
            if ids and ids not in found:
                found.append(ids)
    return found
