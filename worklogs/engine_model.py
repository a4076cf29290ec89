"""A discrete-event model of a server: a client's streams, the queue, steps of prompts and answers, the prefix cache.

Its rules are those of our scheduler with chunked prefill: a step takes one token of every running answer first (or
some, with speculation), then goes on with prompts that are begun, then begins others in the queue's order, all within
`chunk` tokens and `max_num_seqs` requests. What a prompt finds, whose prefix it waits for, and where it is cut, is the
cache's to say (engine_cache.py). What differs: KV blocks for a whole answer are taken at its start, so that nothing is
ever preempted; answers have the lengths that they are given; reading and rendering requests costs time but no
processor.

Steps in which only answers run are taken together, up to the next event: the model's time does not depend on it.

Simulated twice, a run is the same. To see what small differences in the steps' times make of it, which a closed loop
may let grow, they can be drawn (`jittered`).
"""
import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from cost_model import Costs, Step
from engine_cache import Cache, Wait
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


# What the time of so many steps together is multiplied by.
Pace = Callable[[int], float]


def jittered(share: float, seed: str) -> Pace:
    """Each step by a random factor of its own, whose mean is 1 and whose deviation is `share`; the same of one seed."""
    chance = random.Random(seed)

    def factor(steps: int) -> float:
        # Steps that are taken together differ less than one: they are a mean of as many.
        deviation = share / math.sqrt(steps)
        return math.exp(chance.gauss(0.0, deviation) - deviation ** 2 / 2)
    return factor


@dataclasses.dataclass
class _Job:
    request: Request
    sent: float
    hit: int = 0
    computed: int = 0
    cut: int = 0
    produced: float = 0.0
    first: float | None = None

    @property
    def piece(self) -> int:
        """Tokens of the prompt that are computed next, if a step holds them."""
        return (self.cut if self.computed < self.cut else self.request.length) - self.computed

    @property
    def left(self) -> float:
        return max(1, self.request.answer) - self.produced


def simulate(requests: Sequence[Request], cache: Cache, costs: Costs, setting: Setting, *,
             arrivals: Sequence[float] | None = None, limit_s: float = float("inf"), pace: Pace = lambda steps: 1.0,
             progress: Callable[[int], None] = lambda done: None) -> tuple[list[dict[str, Any]], float]:
    """Runs the requests.

    Args:
        arrivals: seconds at which each is sent (open loop); else `setting.concurrency` streams send them in their
            order, each as soon as it is free, whosever turn it is (closed loop, as formal_perf_bench.py does it).
        limit_s: requests not sent until then are dropped.
        pace: how fast steps are beside what they cost.

    Returns:
        Samples as a formal run keeps them, ordered by index, and the wall time.

    Raises:
        ValueError: an unknown policy, or a request that does not fit into the KV pool.
    """
    if setting.policy not in POLICIES:
        raise ValueError(f"the policy {setting.policy!r} is none of {', '.join(POLICIES)}")
    return _Server(requests, cache, costs, setting, arrivals, limit_s, pace, progress).run()


class _Server:
    def __init__(self, requests: Sequence[Request], cache: Cache, costs: Costs, setting: Setting,
                 arrivals: Sequence[float] | None, limit_s: float, pace: Pace,
                 progress: Callable[[int], None]) -> None:
        self.cache, self.costs, self.setting, self.progress = cache, costs, setting, progress
        self.now = 0.0
        self.limit_s, self.pace = limit_s, pace
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
            self.free -= 1
            self._send(self.unsent.pop(), self.now)

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
            count = min(budget, job.piece)
            if count > 0:
                pieces.append((job, count))
                budget -= count
        if not self.changed or not self.waiting:
            return pieces
        if self.setting.policy == "shortest":
            self.waiting.sort(key=lambda job: job.request.length - self.cache.peek(job.request))
        ahead = [(job.request, job.computed) for job in self.prefilling]
        full = False
        for job in list(self.waiting):
            full |= budget <= 0 or len(self.prefilling) + len(self.decoding) >= self.setting.max_num_seqs
            if full:
                self.cache.notice(job.request, ahead)
            elif isinstance(found := self.cache.start(job.request, ahead), Wait):
                full = found.room
            else:
                self.waiting.remove(job)
                job.hit = job.computed = found
                job.cut = self.cache.cut(job.request, found)
                count = min(budget, job.piece)
                self.prefilling.append(job)
                pieces.append((job, count))
                budget -= count
            ahead.append((job.request, job.computed))
        self.changed = False
        return pieces

    def _step(self, pieces: list[tuple[_Job, int]], rows: list[_Job]) -> None:
        tokens = 1 + self.setting.speculate
        seconds = self.costs.step(Step([(job.computed, count) for job, count in pieces],
                                       [job.request.length + job.produced for job in rows], tokens))
        self.now += (seconds + self._draft(len(rows))) * self.pace(1)
        for job, count in pieces:
            job.computed += count
            if job.computed >= job.request.length:
                self.prefilling.remove(job)
                job.first, job.produced = self.now, 1.0
                self.decoding.append(job)
        # The next step has a budget of its own, and whoever waited for a prefix may have it now.
        self.changed = True
        self._advance(rows, 1, [(job.request, job.computed) for job, _ in pieces])
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
        self.now += seconds(steps) * self.pace(steps)
        self._advance(rows, steps)
        self._finish()

    def _draft(self, rows: int) -> float:
        return self.setting.draft * self.setting.speculate if rows else 0.0

    def _advance(self, rows: list[_Job], steps: int, prompts: Sequence[tuple[Request, int]] = ()) -> None:
        """prompts: which were computed beside them, and how far."""
        for job in rows:
            job.produced = min(job.produced + steps * self.setting.advance, max(1, job.request.answer))
        self.cache.step([*prompts, *((job.request, job.request.length + int(job.produced) - 1) for job in rows)])

    def _finish(self) -> None:
        for job in [job for job in self.decoding if job.left <= 1e-9]:
            self.decoding.remove(job)
            self.cache.ended(job.request)
            self.samples.append(self._sample(job))
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
