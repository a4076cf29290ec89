"""Where the control tokens of an answer are.

A marker is a token of the vocabulary: the id decides, so the same letters spelled by ordinary tokens are text. Only
where the vocabulary has no such token is a marker looked for in the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


class Span(NamedTuple):
    """A stretch of an answer; a marker's text is exactly the marker."""

    text: str
    is_marker: bool


def marker_ids(vocabulary: Mapping[str, int], markers: Collection[str]) -> dict[int, str]:
    """Token id -> marker, for the markers that are tokens of the vocabulary."""
    return {vocabulary[marker]: marker for marker in markers if marker in vocabulary}


class MarkerSplitter:
    """Cuts an answer, fed token by token, into text and markers."""

    def __init__(self, ids: Mapping[int, str], markers: Collection[str]) -> None:
        """ids: of the markers that are tokens; the other ``markers`` are found by their letters."""
        self._ids = ids
        self._spelled = [marker for marker in markers if marker not in ids.values()]
        self._pattern = re.compile("|".join(map(re.escape, self._spelled))) if self._spelled else None
        self._held = ""

    def feed(self, piece: str, token: int = -1) -> list[Span]:
        """The spans that ``piece``, the text of ``token``, makes certain. Empty text makes no span."""
        marker = self._ids.get(token)
        if marker is None:
            return self._text(piece)
        # Bytes that an earlier token left unfinished come out, broken, before the marker.
        before, _, after = piece.partition(marker)
        return self._text(before) + self.finish() + [Span(marker, True)] + self._text(after)

    def finish(self) -> list[Span]:
        """What was held back because it could have become a marker."""
        held, self._held = self._held, ""
        return [Span(held, False)] if held else []

    def _text(self, piece: str) -> list[Span]:
        if self._pattern is None:
            return [Span(piece, False)] if piece else []
        text, spans, at = self._held + piece, [], 0
        for match in self._pattern.finditer(text):
            if match.start() > at:
                spans.append(Span(text[at:match.start()], False))
            spans.append(Span(match.group(), True))
            at = match.end()
        keep = held_length(text[at:], self._spelled)
        end = len(text) - keep
        if end > at:
            spans.append(Span(text[at:end], False))
        self._held = text[end:]
        return spans


def held_length(text: str, wanted: Collection[str]) -> int:
    """Length of the longest end of ``text`` that may grow into one of ``wanted``."""
    longest = max(map(len, wanted), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(one.startswith(text[-length:]) for one in wanted):
            return length
    return 0
