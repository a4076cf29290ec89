"""Where checkpoints of recurrent state are taken, and which of them is given up first. Numbers only: the simulation
(`worklogs/cache_sim.py`) replays this very code.

Positions are numbers of tokens before a place, multiples of the block size. A checkpoint is a *key* if reuse is
expected to begin there: a message boundary, the last block of a prompt, the place where prompts part, the end of
generation. The others are *grid* points: they are there so that a prefix that nobody announced is lost by at most 64
tokens.
"""
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Point(NamedTuple):
    """A place to take a checkpoint at. saved: tokens from the one before it, of the same rank: what it saves."""
    position: int
    key: bool
    saved: int


@dataclass(frozen=True)
class Policy:
    """The parameters, in tokens where nothing else is said.

    block_size: of the KV cache. first: no checkpoint is taken below. grid: distance of grid points, while there is
    room. grid_share, key_share: of the device slots, how many one prompt's grid points and keys may ask for.
    last_keys: message boundaries at the end of a prompt that are taken before others. grid_weight: what a saved token
    of a grid point counts, against 1 for a key's. half_life: admitted requests per device slot after which an unused
    checkpoint counts half. demoted_above: what a checkpoint must save to be moved to the host.
    """
    block_size: int = 16
    first: int = 64
    grid: int = 64
    grid_share: float = 0.5
    key_share: float = 0.5
    last_keys: int = 8
    grid_weight: float = 1 / 16
    half_life: float = 0.125
    demoted_above: int = 256

    def whole(self, tokens: int) -> int:
        """Returns the last multiple of the block size in `tokens`."""
        return tokens // self.block_size * self.block_size

    def last(self, length: int) -> int:
        """Returns the last place of a prompt that a hit may reach: at least one token must be computed."""
        return self.whole(length - 1)

    def points(self, length: int, hit: int, slots: int, boundaries: Sequence[int] = (),
               partings: Iterable[int] = ()) -> list[Point]:
        """Returns where a prompt takes checkpoints while it is computed, ascending.

        length: of the prompt. hit: where its computation begins. slots: on the device. boundaries: ascending ends of
        messages, the first that of system turn and tools. partings: where it leaves a prefix that others have, too.
        """
        last = self.last(length)
        low = max(hit + 1, self.first)
        if slots < 1 or last < low:
            return []
        keys = self._keys(last, low, boundaries, partings, min(slots, max(2, int(slots * self.key_share))))
        points, before_key, before = [], hit, hit
        for position in sorted(keys.union(self._grid(last, low, slots))):
            key = position in keys
            points.append(Point(position, key, position - (before_key if key else before)))
            before = position
            before_key = position if key else before_key
        return points

    def _keys(self, last: int, low: int, boundaries: Sequence[int], partings: Iterable[int], limit: int) -> set[int]:
        """The most important places, at most `limit`: the end, partings, the first boundary, the last ones, then
        others spread over the rest."""
        ends = sorted({self.whole(end) for end in boundaries})
        ends = ends[bisect_left(ends, low):bisect_left(ends, last + 1)]
        middle = ends[1:max(1, len(ends) - self.last_keys)]
        keys: dict[int, None] = {last: None}
        for position in (*sorted(self.whole(parting) for parting in partings), *ends[:1],
                         *reversed(ends[1 + len(middle):])):
            if len(keys) < limit and low <= position <= last:
                keys[position] = None
        room = min(limit - len(keys), len(middle))
        return {*keys, *(middle[index * len(middle) // room] for index in range(room))}

    def _grid(self, last: int, low: int, slots: int) -> range:
        spacing, limit = self.grid, int(slots * self.grid_share)
        while last // spacing - (low - 1) // spacing > limit:
            spacing *= 2
            if spacing > last:
                return range(0)
        return range((low + spacing - 1) // spacing * spacing, last + 1, spacing)

    def priority(self, saved: int, key: bool, hits: int, last_use: float, slots: int) -> float:
        """Returns what a checkpoint is worth keeping; the lowest goes first.

        It is the logarithm of the tokens it saves, times how often it has proved to be where prompts part, halved for
        every half-life since its last use. So that it need not be made anew as time goes by, the old do not lose, but
        the new gain.

        saved: tokens from the next checkpoint before it. hits: restores; the first one says little, because mostly a
        conversation goes on and leaves a later checkpoint behind. last_use: admitted requests before it was taken or
        hit. slots: on the device.
        """
        # A grid with gaps is not worth more than one without: else what is left of old ones keeps out the new ones.
        worth = max(saved if key else min(saved, self.grid) * self.grid_weight, self.grid_weight) * max(hits, 1)
        return math.log2(worth) + last_use / max(1.0, self.half_life * slots)

    def worth_moving(self, saved: int) -> bool:
        """Whether a checkpoint that must leave the device may go to the host."""
        return saved > self.demoted_above
