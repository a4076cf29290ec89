"""What the prefix cache takes for the content of a token: its id, or, for a placeholder, which place of which picture
it stands for.

Placeholders have one id whatever they show. A cache that hashed them would give one picture's KV and states to a
request with another picture of the same size.
"""
from bisect import bisect_right
from collections.abc import Sequence

# Above every vocabulary, and below what Python's hash of an integer would reduce, so that equal hashes mean equal ids.
_FIRST, _LAST = 1 << 32, (1 << 61) - (1 << 33)


def first_hash_id(digest: bytes) -> int:
    """Returns the hash id of a picture's first placeholder; place i of the picture has this + i. It is drawn from 2**61
    values by the first eight bytes of `digest`, a SHA-256, and fits into int64 with all that follow."""
    return _FIRST + int.from_bytes(digest[:8], "big") % (_LAST - _FIRST)


def hash_ids(token_ids: Sequence[int], spans: Sequence[tuple[int, int, int]], start: int, end: int) -> list[int]:
    """Returns what identifies the content of the tokens [start, end).

    token_ids: prompt and output. spans: (first, end, hash id of its first placeholder) of each picture, sorted,
    not overlapping. Equal pictures at equal places give equal ids, everything else different ones.
    """
    ids = list(token_ids[start:end])
    # Asked for each block of a prompt, which may have thousands of pictures.
    for place in range(bisect_right(spans, start, key=lambda span: span[1]), len(spans)):
        first, last, base = spans[place]
        if first >= end:
            break
        low, high = max(first, start), min(last, end)
        ids[low - start:high - start] = range(base + low - first, base + high - first)
    return ids
