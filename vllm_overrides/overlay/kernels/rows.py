"""Host-side description of a step's rows, shared by the operators that carry state from token to token.

A step has T tokens in N rows: row i is tokens [query_start_loc[i], query_start_loc[i + 1]). Rows before `num_prefills`
may have any length, zero included; the others are decode rows of exactly one token.
"""
from array import array
from collections.abc import Sequence

Capture = tuple[int, int, int]


def check_rows(num_tokens: int, num_rows: int, query_start_loc: Sequence[int], num_prefills: int) -> None:
    """Raises ValueError where the rows do not describe `num_tokens` tokens in `num_rows` rows. Reads host data only."""
    if len(query_start_loc) != num_rows + 1:
        raise ValueError(f"query_start_loc has {len(query_start_loc)} entries for {num_rows} rows")
    if query_start_loc[0] != 0 or query_start_loc[-1] != num_tokens:
        raise ValueError(f"query_start_loc runs from {query_start_loc[0]} to {query_start_loc[-1]} "
                         f"for {num_tokens} tokens")
    if not 0 <= num_prefills <= num_rows:
        raise ValueError(f"{num_prefills} prefill rows of {num_rows}")
    for row in range(num_rows):
        length = query_start_loc[row + 1] - query_start_loc[row]
        if length < 0 or (row >= num_prefills and length != 1):
            kind = "prefill" if row < num_prefills else "decode"
            raise ValueError(f"{kind} row {row} has {length} tokens")


def captures_by_row(captures: Sequence[Capture], query_start_loc: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns per row the list of (offset, slot), by ascending offset.

    Raises:
        ValueError: a row that does not exist, or an offset outside 1..length of the row's piece.
    """
    rows: list[list[tuple[int, int]]] = [[] for _ in range(len(query_start_loc) - 1)]
    for row, offset, slot in captures:
        if not 0 <= row < len(rows):
            raise ValueError(f"capture of row {row} in a step of {len(rows)} rows")
        length = query_start_loc[row + 1] - query_start_loc[row]
        if not 1 <= offset <= length:
            raise ValueError(f"capture after {offset} tokens of row {row}, whose piece has {length}")
        rows[row].append((offset, slot))
    for wanted in rows:
        wanted.sort()
    return rows


def packed_rows(query_start_loc: Sequence[int], slots: list[int], captures: Sequence[Capture],
                num_slots: int) -> "array[int]":
    """Returns for compiled code, as int64 one after the other: query_start_loc, the rows' slots, and each capture.

    Raises:
        ValueError: captures that do not fit (see `captures_by_row`), or a slot outside the pool.
    """
    if captures:
        captures_by_row(captures, query_start_loc)
    packed = array("q", query_start_loc)
    packed.extend(slots)
    named = slots
    if captures:
        named = slots + [slot for _, _, slot in captures]
        for capture in captures:
            packed.extend(capture)
    if named and not (min(named) >= 0 and max(named) < num_slots):
        raise ValueError(f"slots {min(named)} to {max(named)} of a pool of {num_slots}")
    return packed
