"""Which tokens of a prompt stand for pictures.

The chat template writes ``<|vision_start|><|image_pad|><|vision_end|>`` for a picture. A user may write the same
characters. Before rendering, a secret is put into whatever of it the request spells; afterwards what is left whole was
written by the template, and the text is tokenised in pieces that end where the secret stood, so that what the user
spelled becomes plain text, in no token of its own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from vllm.overlay.serving.errors import RequestError


class Placeholders:
    """Of one model. Its methods are called with one ``secret`` per prompt."""

    def __init__(self, tokenizer: Any, placeholder: int, marks: Sequence[int]) -> None:
        """tokenizer: of transformers; placeholder, marks: as in PictureInput, and known to it."""
        self.placeholder = placeholder
        spelled = [re.escape(text[1:-1]) for text in map(tokenizer.convert_ids_to_tokens, marks) if len(text) > 2]
        first = {re.escape(tokenizer.convert_ids_to_tokens(token)[0]) for token in marks}
        # The last character is left out: the template itself may follow with it.
        self._spelled = re.compile(f"({'|'.join(sorted(first))})(?={'|'.join(spelled)})")

    @staticmethod
    def secret() -> str:
        """What no request holds: plain letters, so that no template or JSON changes them."""
        return secrets.token_hex(12)

    def guarded(self, value: Any, secret: str) -> Any:
        """JSON value -> the same with the secret inside of all that is spelled in its strings and names."""
        if isinstance(value, str):
            return self._spelled.sub(rf"\g<1>{secret}", value)
        if isinstance(value, dict):
            return {self.guarded(name, secret): self.guarded(one, secret) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guarded(one, secret) for one in value]
        return value

    def expanded(self, ids: Sequence[int], counts: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """(ids with counts[i] placeholders for the i-th one, index of the first placeholder of each).

        Raises RequestError where there is not one placeholder for every count.
        """
        places = [i for i, token in enumerate(ids) if token == self.placeholder]
        if len(places) != len(counts):
            raise RequestError(f"The chat template wrote {len(places)} pictures into the prompt; the messages hold "
                               f"{len(counts)}.", param="messages")
        expanded: list[int] = []
        offsets = []
        done = 0
        for place, count in zip(places, counts, strict=True):
            expanded += ids[done:place]
            offsets.append(len(expanded))
            expanded += [self.placeholder] * count
            done = place + 1
        expanded += ids[done:]
        return expanded, tuple(offsets)
