"""Whose turn it is: places in a step belong to requests, not to their samples.

A request of sixteen samples may use every place that nobody else wants. But one that has none comes before another
one's second sample, and where there is no place or no memory left for it, a request that has several gives one back:
its youngest sample is displaced, and goes on later without loss. So nobody waits longer for a place than if every
request had one sample.
"""
from __future__ import annotations

from collections import Counter, deque
from typing import Any

from vllm.core.interfaces import AllocStatus
from vllm.sequence import SequenceGroup


def share(scheduler: Any) -> list[SequenceGroup]:
    """Called before a Scheduler schedules a step: puts its waiting requests in order, and has a place given back if one
    is due.

    Returns the samples that may not be admitted in this step. They are not in the queue; their place is at its end.
    """
    if not scheduler.waiting or not any(group.fanout for group in (*scheduler.waiting, *scheduler.running)):
        return []
    held = Counter(id(group.fanout) for group in scheduler.running if group.fanout is not None)
    firsts, further = _split(scheduler.waiting, held)
    if not firsts:
        return []
    most_urgent = min(firsts, key=lambda group: group.priority)
    gives = _who_gives_back(scheduler, held, most_urgent)
    if gives is not None:
        scheduler.displace(gives)
        firsts, further = _split(scheduler.waiting, held)
    held_back = []
    if _free_places(scheduler) <= len(firsts):
        held_back = [group for group in further if group.priority >= most_urgent.priority]
        further = [group for group in further if group.priority < most_urgent.priority]
    scheduler.waiting = deque(firsts + further)
    return held_back


def _split(waiting: deque[SequenceGroup], held: Counter[int]) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
    """(groups whose request has no place yet, further samples), each in order. held: places by the id of a FanOut."""
    have_one = set(held)
    firsts: list[SequenceGroup] = []
    further: list[SequenceGroup] = []
    for group in waiting:
        is_first = group.fanout is None or id(group.fanout) not in have_one
        (firsts if is_first else further).append(group)
        have_one.add(id(group.fanout))
    return firsts, further


def _free_places(scheduler: Any) -> int:
    free: int = scheduler.scheduler_config.max_num_seqs - len(scheduler.running)
    return free if scheduler.slots is None else min(free, scheduler.slots.num_free)


def _who_gives_back(scheduler: Any, held: Counter[int], waits: SequenceGroup) -> SequenceGroup | None:
    """The youngest sample of the request that has most, if ``waits`` has no room, and a request that has several is not
    more urgent."""
    several = [group for group in scheduler.running if held[id(group.fanout)] > 1 and group.priority >= waits.priority]
    # While a prompt is computed there is nothing left of a step for another one.
    if not several or any(group.is_prefill() for group in scheduler.running):
        return None
    if _free_places(scheduler) > 0 and scheduler.block_manager.can_allocate(waits) != AllocStatus.LATER:
        return None
    most = max(held[id(group.fanout)] for group in several)
    return [group for group in several if held[id(group.fanout)] == most][-1]
