"""Requests for very long outputs yield to the others: the order in which a scheduler looks at its queues.

Stock serves whoever came first, and whoever runs goes on until it is finished. One request for tens of thousands of
tokens takes one place of max_num_seqs for an hour, so a few of them shut everybody else out. Here

* they wait behind the others,
* they are the first to be preempted when KV memory runs out, and
* one of them gives its place to another request that waits for a place or for memory.

What is preempted is computed again when its turn comes, which the prefix cache makes short; its tokens are the same. It
must not be for nothing: who has just been given a place keeps it for a while, and who has waited that long counts as
one of the others. So a large request runs at least half of the time, however many others there are.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from vllm.core.interfaces import AllocStatus
from vllm.sequence import SequenceGroup

# How long a large request keeps a place, and how long it waits for the next one before it counts as any other.
TURN_S = 10.0


def is_large(group: SequenceGroup) -> bool:
    """Whether the request asks for a very long output."""
    return bool(getattr(group.sampling_params, "large_output", False))


class LargeOutputs:
    """One scheduler's large requests, and since when each of them runs or waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[tuple[str, bool], float] = {}

    def arrange(self, scheduler: Any) -> None:
        """Orders the queues of a Scheduler before a step, and frees a place if one is due. Without large requests
        nothing is touched."""
        large = [(group, running) for running, queue in ((True, scheduler.running), (False, scheduler.waiting))
                 for group in queue if is_large(group)]
        now = self._clock()
        self._since = {key: self._since.get(key, now) for key in ((group.request_id, runs) for group, runs in large)}
        if not large:
            return
        displaced = self._displaced(scheduler, now)
        if displaced is not None:
            scheduler.displace(displaced)
            self._since[displaced.request_id, False] = now
        scheduler.waiting = _behind(scheduler.waiting, lambda group: self._yields(group, now))
        scheduler.running = _behind(scheduler.running, is_large)

    def _yields(self, group: SequenceGroup, now: float) -> bool:
        return is_large(group) and now - self._since.get((group.request_id, False), now) < TURN_S

    def _displaced(self, scheduler: Any, now: float) -> SequenceGroup | None:
        """The request that shall give its place away: of those that have had their turn, the one that came last."""
        first = next((group for group in scheduler.waiting if not is_large(group)), None)
        if first is None or any(group.is_prefill() for group in scheduler.running):
            # While a prompt is computed there is nothing left of a step for another one.
            return None
        no_place = len(scheduler.running) >= scheduler.scheduler_config.max_num_seqs
        if not no_place and scheduler.block_manager.can_allocate(first) != AllocStatus.LATER:
            return None
        had_turn = [group for group in scheduler.running
                    if is_large(group) and now - self._since[group.request_id, True] >= TURN_S]
        return max(had_turn, key=lambda group: group.arrival_time, default=None)


def _behind(queue: Iterable[SequenceGroup], yields: Callable[[SequenceGroup], bool]) -> deque[SequenceGroup]:
    return deque(sorted(queue, key=yields))
