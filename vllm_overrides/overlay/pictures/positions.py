"""M-RoPE positions: three numbers per token (time, row, column), made for the tokens of a step and never for a whole
prompt.

Text counts on by one in all three. The tokens of a picture that begins at position p stand at (p, p + row, p + column)
of its merged grid, and the text behind it goes on at p + the longer side. Source: get_rope_index of Hugging Face
transformers 5, models/qwen3_5, for pictures of one frame.
"""
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch


class _Span(NamedTuple):
    """A picture's tokens [first, end), the columns of its merged grid, the position of its corner, and what is added to
    the index of a text token behind it."""
    first: int
    end: int
    columns: int
    position: int
    shift: int


class PictureLayout:
    """Where the pictures of one sequence stand. Made once per sequence; `positions` costs what it returns.

    Args:
        pictures: (offset, (h, w) in patches), sorted by offset, not overlapping.
        merge: side, in patches, of the square that one token covers.
    """

    def __init__(self, pictures: Sequence[tuple[int, tuple[int, int]]], merge: int) -> None:
        self._spans: list[_Span] = []
        shift = 0
        for offset, (height, width) in pictures:
            rows, columns = height // merge, width // merge
            tokens = rows * columns
            position = offset + shift
            shift += max(rows, columns) - tokens
            self._spans.append(_Span(offset, offset + tokens, columns, position, shift))
        self._ends = [span.end for span in self._spans]

    @property
    def delta(self) -> int:
        """Position minus index of every token behind the last picture."""
        return self._spans[-1].shift if self._spans else 0

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Returns int64 [3, end - start], on the CPU, of the tokens [start, end) of prompt and output."""
        out = torch.empty((3, end - start), dtype=torch.long, device="cpu")
        place = bisect_right(self._ends, start)
        at = start
        while at < end:
            shift = self._spans[place - 1].shift if place else 0
            span = self._spans[place] if place < len(self._spans) else None
            if span is None or at < span.first:
                until = end if span is None else min(end, span.first)
                out[:, at - start:until - start] = torch.arange(at + shift, until + shift, device="cpu")
            else:
                until = min(end, span.end)
                index = torch.arange(at - span.first, until - span.first, device="cpu")
                piece = out[:, at - start:until - start]
                piece[0] = span.position
                piece[1] = span.position + index // span.columns
                piece[2] = span.position + index % span.columns
                place += until == span.end
            at = until
        return out
