"""How event streams are read."""

from __future__ import annotations

import pytest

from tests.conformance.target import lines_of

TEXT = "event: a\r\ndata: 1\r\n\r\ndata: \u2028 \x85 \x0b\rdata: 2\n\ndata: 3"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_of_pieces_of_any_size(size):
    """CR, LF or both end a line, also where a piece ends between them; nothing else does."""
    pieces = [TEXT[first:first + size] for first in range(0, len(TEXT), size)]
    assert list(lines_of(pieces)) == ["event: a", "data: 1", "", "data: \u2028 \x85 \x0b", "data: 2", "", "data: 3"]
