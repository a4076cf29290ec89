"""A model of a prefix cache of a hybrid model, driven by a trace: KV blocks, checkpoints, and requests in time.

Time is simple: one prefill at a time at a fixed rate, every stream decodes at a fixed rate beside it, and a request is
sent when one of the `concurrency` streams is free. It only decides what runs beside what; it predicts no latency.
"""
import dataclasses
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from replay_trace import BLOCK, Request

# A request waits for another that computes a prefix of its own if that spares it so many tokens.
WORTH_WAITING = 128


class Store(Protocol):
    """Keeps checkpoints. A checkpoint's key is that of the last block before it."""

    taken: int
    evicted: int
    dropped: int
    demoted: int
    restored_from_host: int

    def lookup(self, request: Request, known: int) -> int:
        """Tokens that can be restored, given that the KV of `known` leading blocks is there. Changes nothing."""

    def admit(self, request: Request, hit: int, known: int) -> None:
        """`request` starts, with `hit` tokens restored."""

    def ask(self, request: Request, position: int) -> None:
        """Another request waits until `request`, which is being computed, has passed `position` tokens."""

    def computed(self, request: Request) -> None:
        """The prompt is computed; what was captured on the way counts from now on."""

    def ended(self, request: Request) -> None:
        """The answer is complete."""

    def kv_gone(self, key: int) -> None:
        """The KV block `key` was given up."""


class KvPool:
    """KV blocks that are in use or may be found again; gives up those that nobody needs first, then the oldest."""

    def __init__(self, blocks: int) -> None:
        self.capacity = blocks
        self.private = 0
        self.evicted = 0
        self.on_evict: Callable[[int], None] = lambda key: None
        self._refs: dict[int, int] = {}
        self._needed: set[int] = set()
        self._unused: dict[int, tuple[bool, int, int, int]] = {}
        self._heap: list[tuple[bool, int, int, int]] = []
        self._clock = itertools.count()

    def known(self, keys: Sequence[int]) -> int:
        """How many leading blocks are there."""
        return next((index for index, key in enumerate(keys) if key not in self._refs), len(keys))

    def start(self, shared: Sequence[int], private: int) -> bool:
        """Uses cached blocks and takes `private` new ones; False, and nothing changed, if there are not so many."""
        kept = [key for key in shared if not self._refs[key]]
        free = self.capacity - len(self._refs) - self.private
        if free + len(self._unused) - len(kept) < private:
            return False
        for key in shared:
            self._refs[key] += 1
        for key in kept:
            del self._unused[key]
        while free < private:
            self._evict()
            free += 1
        self.private += private
        return True

    def enter(self, keys: Sequence[int]) -> list[int]:
        """Private blocks that were computed can be found from now on, unless their like is there already. Returns
        those that were entered; they are in use."""
        entered = [key for key in keys if key not in self._refs]
        self._refs.update(dict.fromkeys(entered, 1))
        self.private -= len(entered)
        return entered

    def end(self, used: Sequence[int], private: int) -> None:
        """Gives back what a request used."""
        self.private -= private
        now = next(self._clock)
        for depth, key in enumerate(used):
            self._refs[key] -= 1
            if not self._refs[key]:
                self._push(key, now, -depth)

    def need(self, key: int, needed: bool) -> None:
        """Whether a checkpoint stands on this block. It need not be there."""
        if needed:
            self._needed.add(key)
        else:
            self._needed.discard(key)
        if key in self._unused and self._unused[key][0] != needed:
            _, now, depth, _ = self._unused[key]
            self._push(key, now, depth)

    def has(self, key: int) -> bool:
        """Whether the block can be found."""
        return key in self._refs

    def _push(self, key: int, now: int, depth: int) -> None:
        entry = (key in self._needed, now, depth, key)
        self._unused[key] = entry
        heapq.heappush(self._heap, entry)

    def _evict(self) -> None:
        while True:
            entry = heapq.heappop(self._heap)
            if self._unused.get(entry[3]) == entry:
                break
        key = entry[3]
        del self._unused[key], self._refs[key]
        self.evicted += 1
        self.on_evict(key)


class SimpleStore:
    """The other rules: checkpoints at `places(request, hit, known)` (positions), the oldest goes first.

    touch: a hit makes a checkpoint the youngest (least recently used goes first) or does not (first in, first out).
    ends: the end of an answer is a place, too. Without a host pool.
    """

    def __init__(self, slots: int, places: Callable[[Request, int, int], Sequence[int]], touch: bool = True,
                 ends: bool = True) -> None:
        self.slots, self.places, self.touch, self.ends = slots, places, touch, ends
        self.taken = self.evicted = self.dropped = self.demoted = self.restored_from_host = 0
        self._checkpoints: OrderedDict[int, None] = OrderedDict()
        self._planned: dict[int, list[int]] = {}

    def lookup(self, request: Request, known: int) -> int:
        keys = request.keys
        for block in range(min(known, (request.length - 1) // BLOCK), 0, -1):
            if int(keys[block - 1]) in self._checkpoints:
                return block * BLOCK
        return 0

    def admit(self, request: Request, hit: int, known: int) -> None:
        if hit and self.touch:
            self._checkpoints.move_to_end(int(request.keys[hit // BLOCK - 1]))
        self._planned[request.index] = sorted({place // BLOCK for place in self.places(request, hit, known)
                                               if hit < place < request.length and place >= BLOCK})

    def ask(self, request: Request, position: int) -> None:
        """These rules wait for nobody's sake but their own."""

    def computed(self, request: Request) -> None:
        for block in self._planned.pop(request.index):
            self._take(int(request.keys[block - 1]))

    def ended(self, request: Request) -> None:
        if self.ends and len(request.answer_keys):
            self._take(int(request.answer_keys[-1]))

    def kv_gone(self, key: int) -> None:
        if key in self._checkpoints:
            del self._checkpoints[key]
            self.dropped += 1

    def _take(self, key: int) -> None:
        if key in self._checkpoints or not self.slots:
            return
        if len(self._checkpoints) >= self.slots:
            self._checkpoints.popitem(last=False)
            self.evicted += 1
        self._checkpoints[key] = None
        self.taken += 1


class ServerStore:
    """The server's own rules: `CheckpointStore` and `Policy` of overlay/prefix_cache, driven as its scheduler does."""

    def __init__(self, store_class: Any, policy: Any, device: int, host: int, kv: KvPool, piece: int = 16384) -> None:
        """device, host: slots. piece: tokens that one step computes."""
        self.policy, self.piece, self.kv = policy, piece, kv
        self.store = store_class(policy, range(device), range(device, device + host), needs_changed=self._needs_changed)
        self.restored_from_host = 0
        self._start: dict[int, int] = {}
        self._partings: dict[int, list[int]] = {}
        self._rolling: dict[int, Any] = {}

    @property
    def taken(self) -> int:
        return self.store.stats.taken

    @property
    def evicted(self) -> int:
        return self.store.stats.evicted

    @property
    def dropped(self) -> int:
        return self.store.stats.dropped

    @property
    def demoted(self) -> int:
        return self.store.stats.demoted

    def lookup(self, request: Request, known: int) -> int:
        found = self.store.find(request.keys.tolist(), min(known, (request.length - 1) // BLOCK))
        return found.position if found is not None else 0

    def admit(self, request: Request, hit: int, known: int) -> None:
        if hit:
            found = self.store.find(request.keys.tolist(), hit // BLOCK)
            self.restored_from_host += found.on_host
            self.store.hit(found)
        self.store.tick()
        self._start[request.index] = hit
        self._partings[request.index] = [known * BLOCK] if known * BLOCK > hit else []

    def ask(self, request: Request, position: int) -> None:
        self._partings[request.index].append(position)

    def computed(self, request: Request) -> None:
        chain = request.keys.tolist()
        start = self._start.pop(request.index)
        points = self.policy.points(request.length, start, self.store.num_slots, request.boundaries,
                                    self._partings.pop(request.index))
        for begin in range(start, request.length, self.piece):
            for point in points:
                if begin < point.position <= begin + self.piece:
                    self.store.capture(chain, point.position, point.key, point.saved)
            self.store.commit(self.kv.has)
        if len(request.answer_keys):
            self._roll(request, 1)

    def ended(self, request: Request) -> None:
        if len(request.answer_keys) > 1:
            self._roll(request, len(request.answer_keys))
        self._rolling.pop(request.index, None)

    def kv_gone(self, key: int) -> None:
        self.store.drop_kv(key)

    def _roll(self, request: Request, blocks: int) -> None:
        """The one checkpoint that follows a running answer: in the simulation it jumps from its begin to its end."""
        chain = [*request.keys.tolist(), *request.answer_keys.tolist()[:blocks]]
        position = len(chain) * BLOCK
        self._rolling[request.index] = self.store.capture(
            chain, position, True, position - self.policy.last(request.length), self._rolling.get(request.index))
        # While an answer runs its blocks are in use; the model enters them at its end only.
        self.store.commit(lambda key: True)

    def _needs_changed(self, contents: Any) -> None:
        for content in contents:
            self.kv.need(content, content in self.store.tree)


@dataclasses.dataclass
class Outcome:
    """What a replay came to, in tokens where nothing else is said. computed: of prompts. again: computed although an
    earlier prompt had them. known: computed although their KV was there."""

    prompt: int = 0
    cached: int = 0
    computed: int = 0
    again: int = 0
    known: int = 0
    requests_with_hit: int = 0
    waited: int = 0
    kv_blocks_evicted: int = 0
    checkpoints_taken: int = 0
    checkpoints_evicted: int = 0
    checkpoints_dropped: int = 0
    checkpoints_demoted: int = 0
    restored_from_host: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were restored."""
        return self.cached / self.prompt if self.prompt else 0.0


@dataclasses.dataclass
class _Running:
    request: Request
    shared: list[int]
    private: int
    prefilled: float
    cached: list[int] = dataclasses.field(default_factory=list)


def replay(requests: Sequence[Request], reusable: Sequence[int], kv: KvPool, store: Store, concurrency: int = 4,
           prefill_rate: float = 2000.0, decode_rate: float = 20.0, wait: bool = True,
           progress: Callable[[int], None] = lambda index: None) -> Outcome:
    """Sends the requests in their order, each when a stream is free.

    Args:
        reusable: per request, what an unlimited cache would find, in tokens.
        prefill_rate, decode_rate: tokens per second; prefills one after another, decoding of every stream by itself.
        wait: a request waits for another that computes a prefix of its own (WORTH_WAITING).

    Raises:
        ValueError: a request does not fit into the empty KV pool.
    """
    outcome, order = Outcome(), itertools.count()
    kv.on_evict = store.kv_gone
    events: list[tuple[float, int, bool, _Running]] = []     # (time, -, whether the answer is complete, of whom)
    prefilling: dict[int, _Running] = {}
    now = engine_free = 0.0

    def advance(until: float) -> None:
        while events and events[0][0] <= until:
            _, _, complete, running = heapq.heappop(events)
            request = running.request
            if not complete:
                del prefilling[request.index]
                running.cached = kv.enter(request.keys[len(running.shared):].tolist())
                store.computed(request)
                continue
            # Blocks whose like was there already stay private, and so do those behind them.
            answer = kv.enter(request.answer_keys.tolist())
            running.cached += answer
            store.ended(request)
            kv.end(running.shared + running.cached, running.private - len(running.cached))

    streams = [0.0] * concurrency
    for request in requests:
        now = max(now, heapq.heappop(streams))
        advance(now)
        usable = (request.length - 1) // BLOCK
        blocks = -(-(request.length + request.answer) // BLOCK)
        if blocks > kv.capacity:
            raise ValueError(f"request {request.index} needs {blocks} KV blocks, there are {kv.capacity}")
        keys = request.keys[:usable].tolist()
        waited = False
        while True:
            known = kv.known(keys)
            hit = store.lookup(request, known)
            longer = [(shared, running) for running in prefilling.values()
                      if (shared := common(request, running.request)) >= hit + WORTH_WAITING] if wait else []
            if longer:
                shared, running = max(longer, key=lambda pair: pair[0])
                store.ask(running.request, shared)
                waited, now = True, max(now, running.prefilled)
            elif kv.start(keys[:hit // BLOCK], blocks - hit // BLOCK):
                break
            else:
                now = events[0][0]
            advance(now)
        store.admit(request, hit, known)
        engine_free = max(now, engine_free) + (request.length - hit) / prefill_rate
        running = _Running(request, keys[:hit // BLOCK], blocks - hit // BLOCK, engine_free)
        prefilling[request.index] = running
        ends = engine_free + request.answer / decode_rate
        heapq.heappush(events, (engine_free, next(order), False, running))
        heapq.heappush(events, (ends, next(order), True, running))
        heapq.heappush(streams, ends)
        outcome.prompt += request.length
        outcome.cached += hit
        outcome.computed += request.length - hit
        outcome.again += max(0, reusable[request.index] - hit)
        outcome.known += known * BLOCK - hit
        outcome.requests_with_hit += hit > 0
        outcome.waited += waited
        progress(request.index)
    advance(float("inf"))
    outcome.kv_blocks_evicted = kv.evicted
    outcome.checkpoints_taken, outcome.checkpoints_evicted = store.taken, store.evicted
    outcome.checkpoints_dropped, outcome.checkpoints_demoted = store.dropped, store.demoted
    outcome.restored_from_host = store.restored_from_host
    return outcome


def common(one: Request, other: Request) -> int:
    """Tokens of the whole blocks that two prompts begin with."""
    usable = min((one.length - 1) // BLOCK, (other.length - 1) // BLOCK)
    if not usable or one.keys[0] != other.keys[0]:
        return 0
    different = np.flatnonzero(one.keys[:usable] != other.keys[:usable])
    return (int(different[0]) if len(different) else usable) * BLOCK
