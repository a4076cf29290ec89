"""Applies one unified diff to one file, with no fuzz.

The rule: the lines that a hunk removes or keeps must occur, in full and in a row, exactly once in the file. Line
numbers are not used. The two pins have the same function at different line numbers, so the number cannot be what
decides; and lines that occur twice would let a hunk land in the wrong function without anybody noticing, so such a
hunk is refused even where its number fits (make it again with more context: ``diff -U8``). Line endings do not count;
inserted lines take the file's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from patches.engine.errors import Refused
from patches.engine.markers import line_ending

_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class Hunk:
    """start: line number where the diff was made. steps: (sign, text) with sign ``' '``, ``'-'`` or ``'+'``."""

    start: int
    steps: list[tuple[str, str]] = field(default_factory=list)

    @property
    def old(self) -> list[str]:
        """The lines that the hunk expects to find."""
        return [text for sign, text in self.steps if sign != "+"]


def parse_diff(text: str, name: str) -> list[Hunk]:
    """The hunks of a diff of one file. name: for messages. Raises Refused when it is broken or changes several."""
    hunks: list[Hunk] = []
    left = [0, 0]  # lines of the old and of the new file that the current hunk still owes
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        sign = line[:1] or " "  # editors strip the blank of an empty context line
        if left != [0, 0]:
            if sign == "\\":
                continue
            left[0] -= sign in " -"
            left[1] -= sign in " +"
            if sign not in " -+" or min(left) < 0:
                raise Refused(
                    f"{name} line {number} does not fit its hunk's line counts: make the diff again with diff -u"
                )
            hunks[-1].steps.append((sign, line[1:]))
        elif header := _HEADER.match(line):
            left = [int(header[2] or 1), int(header[4] or 1)]
            hunks.append(Hunk(int(header[1])))
        elif line.startswith("+++ ") and hunks:
            raise Refused(f"{name} changes several files: one diff per file")
    if left != [0, 0] or not hunks:
        raise Refused(f"{name} is {'cut off' if hunks else 'no unified diff'}: make the diff again with diff -u")
    return hunks


def apply_diff(data: bytes, hunks: list[Hunk], name: str) -> bytes:
    """data with all hunks applied. Raises Refused, naming the hunk, unless each fits in exactly one place, in order."""
    ending = line_ending(data)
    lines = data.split(b"\n")
    plain = [line.rstrip(b"\r").decode("utf-8", errors="surrogateescape") for line in lines]
    out: list[bytes] = []
    done = 0
    for number, hunk in enumerate(hunks, 1):
        place = _only_place(plain, hunk, f"{name} hunk {number}")
        if place < done:
            raise Refused(f"{name} hunk {number} lies before hunk {number - 1}: make the diff again with diff -u")
        out += lines[done:place]
        done = place
        for sign, text in hunk.steps:
            if sign == "+":
                out.append(text.encode("utf-8") + ending[:-1])
            else:
                out += lines[done : done + 1] if sign == " " else []
                done += 1
    return b"\n".join(out + lines[done:])


def _only_place(plain: list[str], hunk: Hunk, name: str) -> int:
    old = hunk.old
    if not old:
        raise Refused(f"{name} has no context, so its place is not sure: make the diff again with diff -U3")
    places = [i for i in range(len(plain) - len(old) + 1) if plain[i : i + len(old)] == old]
    if len(places) == 1:
        return places[0]
    if places:
        raise Refused(f"{name} fits in {len(places)} places: make the diff again with more context (diff -U8)")
    first = f"line {hunk.start}, {old[0].strip()[:60]!r} and following"
    raise Refused(f"{name} ({first}) fits nowhere: rework the diff for this stock file")
