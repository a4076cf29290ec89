"""A discrete-event model of a server: a client's streams, the queue, steps of prompts and answers, the prefix cache.

Its rules are those of our scheduler with chunked prefill: a step takes one token of every running answer first (or
some, with speculation), then goes on with prompts that are begun, then begins others in the queue's order, all within
`chunk` tokens and `max_num_seqs` requests. A request that shares a prefix with one being computed waits for it. What
differs: KV blocks for a whole answer are taken at its start, so that nothing is ever preempted; answers have the
lengths that they are given; reading and rendering requests costs time but no processor.

Steps in which only answers run are taken together, up to the next event: the model's time does not depend on it.
"""
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cache_model import WORTH_WAITING, KvPool, Store, common
from cost_model import Costs, Step
from replay_trace import BLOCK, Request

POLICIES = {
    "fcfs": "prompts and answers in one step, prompts in the order of their arrival",
    "shortest": "the same, but of the waiting prompts the one with least to compute first",
    "separate": "prompts in steps of their own, before answers go on",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is chosen. chunk: tokens of a step. speculate: tokens guessed per step; acceptance: the chance that a
    guessed token is right, given that those before it are. draft: seconds for guessing one."""

    concurrency: int = 4
    chunk: int = 16384
    policy: str = "fcfs"
    max_num_seqs: int = 8
    speculate: int = 0
    acceptance: float = 0.0
    draft: float = 0.0

    @property
    def advance(self) -> float:
        """Tokens that a step adds to an answer, on average."""
        return sum(self.acceptance ** guessed for guessed in range(self.speculate + 1))


@dataclasses.dataclass(frozen=True)
class Wait:
    """Why a request cannot start. room: there is none, and nobody behind it may overtake."""

    room: bool


class Cache(Protocol):
    """Which tokens of a prompt need not be computed."""

    def peek(self, request: Request) -> int:
        """Tokens that would be found now."""

    def start(self, request: Request, prefilling: Sequence[Request]) -> int | Wait:
        """Takes what the request needs and returns the tokens found, or says why it must wait."""

    def computed(self, request: Request) -> None:
        """Its prompt is computed."""

    def ended(self, request: Request) -> None:
        """Its answer is complete."""


class Given:
    """A cache that finds what it is told, per request index; for hits that were measured, and for none at all."""

    def __init__(self, hits: dict[int, int]) -> None:
        self.hits = hits

    def peek(self, request: Request) -> int:
        return min(self.hits.get(request.index, 0), request.length - 1)

    def start(self, request: Request, prefilling: Sequence[Request]) -> int | Wait:
        return self.peek(request)

    def computed(self, request: Request) -> None:
        """Nothing is learned."""

    def ended(self, request: Request) -> None:
        """Nothing is learned."""


class Modelled:
    """KV blocks and checkpoints by the rules of `cache_model`."""

    def __init__(self, kv: KvPool, store: Store) -> None:
        self.kv, self.store = kv, store
        kv.on_evict = store.kv_gone
        self._held: dict[int, tuple[list[int], int, list[int]]] = {}     # index -> shared, private, entered
        self._asked: set[tuple[int, int]] = set()

    def peek(self, request: Request) -> int:
        return self.store.lookup(request, self.kv.known(_usable(request)))

    def start(self, request: Request, prefilling: Sequence[Request]) -> int | Wait:
        keys = _usable(request)
        known = self.kv.known(keys)
        hit = self.store.lookup(request, known)
        longest, longer = max(((common(request, other), other) for other in prefilling),
                              key=lambda pair: pair[0], default=(0, None))
        if longer is not None and longest >= hit + WORTH_WAITING:
            if (request.index, longer.index) not in self._asked:
                self._asked.add((request.index, longer.index))
                self.store.ask(longer, longest)
            return Wait(room=False)
        blocks = -(-(request.length + request.answer) // BLOCK)
        shared = keys[:hit // BLOCK]
        if blocks > self.kv.capacity:
            raise ValueError(f"request {request.index} needs {blocks} KV blocks, there are {self.kv.capacity}")
        if not self.kv.start(shared, blocks - len(shared)):
            return Wait(room=True)
        self.store.admit(request, hit, known)
        self._held[request.index] = (shared, blocks - len(shared), [])
        return hit

    def computed(self, request: Request) -> None:
        shared, _, entered = self._held[request.index]
        entered += self.kv.enter(request.keys[len(shared):].tolist())
        self.store.computed(request)

    def ended(self, request: Request) -> None:
        shared, private, entered = self._held.pop(request.index)
        entered += self.kv.enter(request.answer_keys.tolist())
        self.store.ended(request)
        self.kv.end(shared + entered, private - len(entered))


def _usable(request: Request) -> list[int]:
    """Keys of the blocks that may be found: one token at least is computed."""
    return request.keys[:(request.length - 1) // BLOCK].tolist()


@dataclasses.dataclass
class _Job:
    request: Request
    sent: float
    hit: int = 0
    computed: int = 0
    produced: float = 0.0
    first: float | None = None

    @property
    def left(self) -> float:
        return max(1, self.request.answer) - self.produced


def simulate(requests: Sequence[Request], cache: Cache, costs: Costs, setting: Setting, *,
             arrivals: Sequence[float] | None = None, limit_s: float = float("inf"),
             after: dict[int, int] | None = None,
             progress: Callable[[int], None] = lambda done: None) -> tuple[list[dict[str, Any]], float]:
    """Runs the requests.

    Args:
        arrivals: seconds at which each is sent (open loop); else `setting.concurrency` streams send them in their
            order, each as soon as it is free (closed loop).
        limit_s: requests not sent until then are dropped.
        after: request index -> that of the request which must have ended before it is sent (closed loop).

    Returns:
        Samples as a formal run keeps them, ordered by index, and the wall time.

    Raises:
        ValueError: an unknown policy, or a request that does not fit into the KV pool.
    """
    if setting.policy not in POLICIES:
        raise ValueError(f"the policy {setting.policy!r} is none of {', '.join(POLICIES)}")
    return _Server(requests, cache, costs, setting, arrivals, limit_s, after or {}, progress).run()


class _Server:
    def __init__(self, requests: Sequence[Request], cache: Cache, costs: Costs, setting: Setting,
                 arrivals: Sequence[float] | None, limit_s: float, after: dict[int, int],
                 progress: Callable[[int], None]) -> None:
        self.cache, self.costs, self.setting, self.progress = cache, costs, setting, progress
        self.now = 0.0
        self.limit_s = limit_s
        self.after = after
        self.ended: set[int] = set()
        self.threads: dict[int, tuple[int, int]] = {}       # index -> that of its first turn, its own turn
        for request in requests:
            first, turn = self.threads.get(request.parent, (request.index, -1))
            self.threads[request.index] = (first, turn + 1)
        self.unsent = list(reversed(requests)) if arrivals is None else []
        self.intended = arrivals
        # (reaches the queue, order, job)
        self.coming: list[tuple[float, int, _Job]] = []
        self.waiting: list[_Job] = []
        self.prefilling: list[_Job] = []
        self.decoding: list[_Job] = []
        self.samples: list[dict[str, Any]] = []
        self.order = 0
        self.free = setting.concurrency
        # Whether anybody who waits might start now who could not before.
        self.changed = True
        if arrivals is not None:
            for request, at in zip(requests, arrivals, strict=True):
                self._send(request, at)

    def run(self) -> tuple[list[dict[str, Any]], float]:
        self._fill_streams()
        while self.coming or self.waiting or self.prefilling or self.decoding:
            while self.coming and self.coming[0][0] <= self.now:
                self.waiting.append(heapq.heappop(self.coming)[2])
                self.changed = True
            pieces = self._pieces()
            if pieces:
                rows = self.decoding if self.setting.policy != "separate" else []
                self._step(pieces, list(rows))
            elif self.decoding:
                self._decode()
            elif self.coming:
                self.now = max(self.now, self.coming[0][0])
            else:
                raise ValueError(f"request {self.waiting[0].request.index} can never start")
        return sorted(self.samples, key=lambda sample: sample["index"]), self.now

    def _fill_streams(self) -> None:
        while self.free and self.unsent and self.now < self.limit_s:
            place = next((place for place in range(len(self.unsent) - 1, -1, -1) if self._may_be_sent(place)), None)
            if place is None:
                break
            self.free -= 1
            self._send(self.unsent.pop(place), self.now)

    def _may_be_sent(self, place: int) -> bool:
        before = self.after.get(self.unsent[place].index)
        return before is None or before in self.ended

    def _send(self, request: Request, at: float) -> None:
        self.order += 1
        heapq.heappush(self.coming, (at + self.costs.before(request.length), self.order, _Job(request, at)))

    def _pieces(self) -> list[tuple[_Job, int]]:
        """Which tokens of which prompts the next step computes; begins those that can."""
        tokens = 1 + self.setting.speculate
        budget = self.setting.chunk
        if self.setting.policy != "separate":
            budget -= len(self.decoding) * tokens
        pieces = []
        for job in self.prefilling:
            count = min(budget, job.request.length - job.computed)
            if count > 0:
                pieces.append((job, count))
                budget -= count
        if not self.changed or not self.waiting:
            return pieces
        if self.setting.policy == "shortest":
            self.waiting.sort(key=lambda job: job.request.length - self.cache.peek(job.request))
        tried_all = True
        for job in list(self.waiting):
            if budget <= 0 or len(self.prefilling) + len(self.decoding) >= self.setting.max_num_seqs:
                tried_all = budget > 0
                break
            found = self.cache.start(job.request, [other.request for other in self.prefilling])
            if isinstance(found, Wait):
                if found.room:
                    break
                continue
            self.waiting.remove(job)
            job.hit = job.computed = found
            count = min(budget, job.request.length - found)
            self.prefilling.append(job)
            pieces.append((job, count))
            budget -= count
        # Without budget left the same requests may start in the next step; without a place, only when one is free.
        self.changed = not tried_all
        return pieces

    def _step(self, pieces: list[tuple[_Job, int]], rows: list[_Job]) -> None:
        tokens = 1 + self.setting.speculate
        self.now += self.costs.step(Step([(job.computed, count) for job, count in pieces],
                                         [job.request.length + job.produced for job in rows], tokens)
                                    ) + self._draft(len(rows))
        for job, count in pieces:
            job.computed += count
            if job.computed >= job.request.length:
                self.prefilling.remove(job)
                self.cache.computed(job.request)
                job.first, job.produced = self.now, 1.0
                self.decoding.append(job)
                self.changed = True
        self._advance(rows, 1)
        self._finish()

    def _decode(self) -> None:
        """Steps of answers alone, up to the end of one of them or the arrival of a request."""
        advance, tokens = self.setting.advance, 1 + self.setting.speculate
        rows = self.decoding
        context = sum(job.request.length + job.produced for job in rows)

        def seconds(steps: int) -> float:
            return self.costs.decoding(len(rows), context, steps, tokens, advance) + steps * self._draft(len(rows))
        steps = max(1, min(-int(-job.left // advance) for job in rows))
        if self.coming and self.now + seconds(steps) > self.coming[0][0]:
            low, high = 1, steps
            while low < high:
                middle = (low + high) // 2
                if self.now + seconds(middle) >= self.coming[0][0]:
                    high = middle
                else:
                    low = middle + 1
            steps = low
        self.now += seconds(steps)
        self._advance(rows, steps)
        self._finish()

    def _draft(self, rows: int) -> float:
        return self.setting.draft * self.setting.speculate if rows else 0.0

    def _advance(self, rows: list[_Job], steps: int) -> None:
        for job in rows:
            job.produced += steps * self.setting.advance

    def _finish(self) -> None:
        for job in [job for job in self.decoding if job.left <= 1e-9]:
            self.decoding.remove(job)
            self.cache.ended(job.request)
            self.samples.append(self._sample(job))
            self.ended.add(job.request.index)
            self.free += self.intended is None
            self.changed = True
            self.progress(len(self.samples))
        self._fill_streams()

    def _sample(self, job: _Job) -> dict[str, Any]:
        request = job.request
        conversation, turn = self.threads[request.index]
        return {"index": request.index, "conversation": str(conversation), "turn": turn, "class": "ok", "status": 200,
                "error": None, "finish": "stop", "intended_s": None if self.intended is None else job.sent,
                "sent_s": job.sent, "first_s": job.first, "last_s": self.now, "prompt_tokens": request.length,
                "cached_tokens": job.hit, "completion_tokens": max(1, request.answer), "reasoning_tokens": None,
                "expected_prompt_tokens": request.length, "theoretical_reuse": request.shared // BLOCK * BLOCK,
                "deltas": max(1, request.answer), "after_finish": 0}
