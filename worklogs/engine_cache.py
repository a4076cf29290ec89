"""What the simulated engine (engine_model.py) asks of a prefix cache, and two that answer: hits as given, and our
server's rules.

The latter drives the server's own `Policy` and `CheckpointStore` as its coordinator does (overlay/prefix_cache): blocks
and checkpoints exist when the step that made them has ended, a cold prompt's end is a step of its own, and a prompt
waits for another only as long as that one is still to pass what both begin with. What differs: blocks for a whole
answer are taken at its start, and a checkpoint that follows an answer leaps where steps are taken together.
"""
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from cache_model import WORTH_WAITING, KvPool
from cost_model import cut_of
from replay_trace import BLOCK, Request

# A request that is computed or waits, and how many of its tokens are computed.
Ahead = tuple[Request, int]


@dataclasses.dataclass(frozen=True)
class Wait:
    """Why a request cannot start. room: there is none, and nobody behind it may overtake."""

    room: bool


class Cache(Protocol):
    """Which tokens of a prompt need not be computed."""

    def peek(self, request: Request) -> int:
        """Tokens that would be found now."""

    def cut(self, request: Request, hit: int) -> int:
        """Where the prompt is cut in two, 0 for nowhere, if `hit` tokens of it were found."""

    def start(self, request: Request, ahead: Sequence[Ahead]) -> int | Wait:
        """Takes what the request needs and returns the tokens found, or says why it must wait."""

    def notice(self, request: Request, ahead: Sequence[Ahead]) -> None:
        """It waits for want of room in the step; what it shares with those ahead may be kept for it."""

    def step(self, rows: Sequence[Ahead]) -> None:
        """Steps have ended that computed these so far, prompts and answers; of the latter, several at once."""

    def ended(self, request: Request) -> None:
        """Its answer is complete."""


class Given:
    """A cache that finds what it is told, per request index; for hits that were measured, and for none at all."""

    def __init__(self, hits: dict[int, int], cut: bool = False) -> None:
        """cut: whether the server computes the end of a cold prompt in a step of its own."""
        self.hits, self.cuts = hits, cut

    def peek(self, request: Request) -> int:
        return min(self.hits.get(request.index, 0), request.length - 1)

    def cut(self, request: Request, hit: int) -> int:
        return cut_of(request.length, hit) if self.cuts else 0

    def start(self, request: Request, ahead: Sequence[Ahead]) -> int | Wait:
        return self.peek(request)

    def notice(self, request: Request, ahead: Sequence[Ahead]) -> None:
        """Nothing is learned."""

    def step(self, rows: Sequence[Ahead]) -> None:
        """Nothing is learned."""

    def ended(self, request: Request) -> None:
        """Nothing is learned."""


class _Place(NamedTuple):
    """As `Point` of overlay/prefix_cache/policy.py."""

    position: int
    key: bool
    saved: int


@dataclasses.dataclass
class _Running:
    """chain: keys of the prompt's blocks and the answer's. points: where the prompt is still to leave checkpoints,
    ascending. base: of its last key. shared, private, entered: blocks, as KvPool counts them. done: blocks that were
    computed or found. rolling, rolled: the checkpoint that moves along with the answer, and how far it went."""

    chain: list[int]
    points: list[Any]
    base: int
    shared: list[int]
    private: int
    done: int
    entered: list[int] = dataclasses.field(default_factory=list)
    rolling: Any = None
    rolled: int = 0


class Modelled:
    """The server's cache of a model with recurrent state."""

    def __init__(self, kv: KvPool, policy: Any, store_class: Any, device: int, host: int, cut: bool = True) -> None:
        """device, host: slots for checkpoints. cut: as in `Given`."""
        self.kv, self.policy, self.cuts = kv, policy, cut
        self.store = store_class(policy, range(device), range(device, device + host), needs_changed=self._needs_changed)
        kv.on_evict = self.store.drop_kv
        # How often a request could not start: for want of KV blocks, or because another computes its beginning.
        self.no_room = self.waited = 0
        self._running: dict[int, _Running] = {}
        self._partings: dict[int, set[int]] = {}
        self._noticed: dict[int, int] = {}
        self._admitted = 0

    def peek(self, request: Request) -> int:
        return self._look_up(request)[1]

    def cut(self, request: Request, hit: int) -> int:
        return cut_of(request.length, hit) if self.cuts else 0

    def start(self, request: Request, ahead: Sequence[Ahead]) -> int | Wait:
        known, hit = self._look_up(request)
        if self.policy.last(request.length) >= self.policy.first and self._waits(request, hit, ahead):
            self.waited += 1
            return Wait(room=False)
        blocks = -(-(request.length + request.answer) // BLOCK)
        chain = [*request.keys.tolist(), *request.answer_keys.tolist()]
        shared = chain[:hit // BLOCK]
        if blocks > self.kv.capacity:
            raise ValueError(f"request {request.index} needs {blocks} KV blocks, there are {self.kv.capacity}")
        found = self.store.find(chain, hit // BLOCK) if hit else None
        if not self.kv.start(shared, blocks - len(shared)):
            self.no_room += 1
            return Wait(room=True)
        partings = self._partings.pop(request.index, set()) | {known}
        points = self.policy.points(request.length, hit, self.store.num_slots, request.boundaries, partings)
        self._running[request.index] = _Running(chain, points, hit, shared, blocks - len(shared), len(shared))
        self._admitted += 1
        self.store.tick()
        if found is not None:
            self.store.hit(found)
        return hit

    def notice(self, request: Request, ahead: Sequence[Ahead]) -> None:
        if self._noticed.get(request.index) != self._admitted:
            self._noticed[request.index] = self._admitted
            self._waits(request, 0, ahead)

    def step(self, rows: Sequence[Ahead]) -> None:
        wanted: list[tuple[_Running, Any, bool]] = []
        for request, computed in rows:
            running, end = self._running[request.index], computed // BLOCK * BLOCK
            while running.points and running.points[0].position <= computed:
                wanted.append((running, running.points.pop(0), False))
            if computed >= request.length and end > max(self.policy.last(request.length), self.policy.first - 1,
                                                        running.rolled):
                wanted.append((running, _Place(end, True, end - running.base), True))
                running.rolled = end
        # Keys first, as where slots are few.
        for running, point, rolls in sorted(wanted, key=lambda each: not each[1].key):
            taken = self.store.capture(running.chain, point.position, point.key, point.saved,
                                       running.rolling if rolls else None)
            if taken is not None and rolls:
                running.rolling = taken
            elif taken is not None and point.key:
                running.base = max(running.base, point.position)
        for request, computed in rows:
            running, blocks = self._running[request.index], computed // BLOCK
            running.entered += self.kv.enter(running.chain[running.done:blocks])
            running.done = max(running.done, blocks)
        self.store.commit(self.kv.has)

    def ended(self, request: Request) -> None:
        running = self._running.pop(request.index)
        self._noticed.pop(request.index, None)
        self.kv.end(running.shared + running.entered, running.private - len(running.entered))

    def _look_up(self, request: Request) -> tuple[int, int]:
        """Tokens whose KV is known, and tokens that need no computing."""
        keys = request.keys[:(request.length - 1) // BLOCK].tolist()
        known = self.kv.known(keys)
        found = self.store.find(keys, known)
        return known * BLOCK, found.position if found is not None else 0

    def _waits(self, request: Request, hit: int, ahead: Sequence[Ahead]) -> bool:
        for other, computed in ahead:
            position = shared_ahead(request, hit, other, computed)
            if position:
                self._part(other, position)
                return True
        return False

    def _part(self, request: Request, position: int) -> None:
        """The request is to leave a checkpoint at a place that it has not reached yet."""
        running = self._running.get(request.index)
        if running is None:
            self._partings.setdefault(request.index, set()).add(position)
            return
        if any(point.position == position and point.key for point in running.points):
            return
        before = max((point.position for point in running.points if point.key and point.position < position),
                     default=running.base)
        rest = [point for point in running.points if point.position != position]
        new = _Place(position, True, position - before)
        running.points = sorted([*rest, new], key=lambda point: point.position)

    def _needs_changed(self, contents: Any) -> None:
        for content in contents:
            self.kv.need(content, content in self.store.tree)


def shared_ahead(request: Request, hit: int, other: Request, computed: int) -> int:
    """Tokens that a waiting prompt will find once `other` is computed, if that is still to pass them and they are worth
    waiting for; else 0. The rule of overlay/prefix_cache/sharing.py."""
    limit = min((request.length - 1) // BLOCK, other.length // BLOCK)
    needed = max((hit + WORTH_WAITING) // BLOCK, computed // BLOCK + 1)
    if limit < needed or request.keys[needed - 1] != other.keys[needed - 1]:
        return 0
    different = np.flatnonzero(request.keys[:limit] != other.keys[:limit])
    common = int(different[0]) if len(different) else limit
    return common * BLOCK if common >= needed else 0
