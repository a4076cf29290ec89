"""What a scheduler counts about its prefix cache; `vllm/engine/metrics.py` makes metrics of it."""
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

# Why nothing was restored for a request.
MISSES = ("cold", "short", "no_checkpoint", "prompt_logprobs", "adapter")


@dataclass
class PrefixCacheStats:
    """Counts since the start, which only grow, and what is in use now (slots and bytes). Of one scheduler.

    queries, hits: tokens of admitted requests, and how many of them were not computed again. restored: requests with a
    hit. misses: requests without one, by reason (one of MISSES): "cold" (no KV known), "short" (too short to have a
    checkpoint), "no_checkpoint" (KV known, no state to it), "prompt_logprobs", "adapter" (not looked up).
    taken, hit, evicted, demoted, dropped: checkpoints; hit counts restores, those after a preemption among them;
    demoted are those that moved to the host, dropped those whose KV went or that were forgotten. failures: steps that
    found another state in a slot than they were to restore.
    device_slots, host_slots: checkpoint slots in use. slot_bytes: memory of one slot, of all ranks together.
    """
    queries: int = 0
    hits: int = 0
    restored: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    taken: int = 0
    hit: int = 0
    evicted: int = 0
    demoted: int = 0
    dropped: int = 0
    failures: int = 0
    device_slots: int = 0
    host_slots: int = 0
    slot_bytes: int = 0

    def admitted(self, num_tokens: int, cached: int, reason: str) -> None:
        """Counts a request's first admission. reason: why nothing was restored; only looked at if cached is 0."""
        self.queries += num_tokens
        self.hits += cached
        if cached:
            self.restored += 1
        else:
            self.misses[reason] += 1

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that were not computed again."""
        return self.hits / self.queries if self.queries else 0.0


def total(stats: Iterable[PrefixCacheStats]) -> PrefixCacheStats:
    """Returns the sum over schedulers, which is nobody else's; slot_bytes is the largest."""
    added = PrefixCacheStats()
    for one in stats:
        for each in fields(added):
            if each.name == "slot_bytes":
                added.slot_bytes = max(added.slot_bytes, one.slot_bytes)
            else:
                setattr(added, each.name, getattr(added, each.name) + getattr(one, each.name))
    return added
