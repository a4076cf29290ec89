"""The prefix cache's counts as Prometheus metrics. Tokens have the names that current vLLM gives them.

Imported by the engine only when it logs: prometheus_client looks once, when it is imported, for the folder in which
several processes count (`vllm.overlay.serving.engine_client.metrics_folder`).
"""
from collections.abc import Mapping, Sequence

import prometheus_client

from vllm.overlay.prefix_cache.stats import MISSES, PrefixCacheStats

# Name without _total, field of PrefixCacheStats, help.
_COUNTERS = (
    ("vllm:prefix_cache_queries", "queries", "Tokens of admitted requests, looked up in the prefix cache."),
    ("vllm:prefix_cache_hits", "hits", "Tokens that were found in the prefix cache and not computed again."),
    ("vllm:state_checkpoints_taken", "taken", "Checkpoints of recurrent state that were taken."),
    ("vllm:state_checkpoints_hit", "hit", "Checkpoints that a sequence was restored from."),
    ("vllm:state_checkpoints_evicted", "evicted", "Checkpoints that gave their slot to another."),
    ("vllm:state_checkpoints_demoted", "demoted", "Checkpoints that moved from the device to the host."),
    ("vllm:state_checkpoints_dropped", "dropped", "Checkpoints whose KV blocks went, or that were forgotten."),
    ("vllm:state_checkpoint_failures", "failures", "Steps in which a checkpoint was not what it should have been."),
)


class PrefixCacheMetrics:
    """The collectors of one engine, registered when they are made."""

    def __init__(self, labelnames: Sequence[str]) -> None:
        self._counters = {field: prometheus_client.Counter(name, text, labelnames) for name, field, text in _COUNTERS}
        self._misses = prometheus_client.Counter(
            "vllm:prefix_cache_misses", "Requests of which nothing was found in the prefix cache, by reason.",
            [*labelnames, "reason"])
        self._slots, self._bytes = (
            prometheus_client.Gauge(f"vllm:state_checkpoint_{unit}", f"{what} that checkpoints occupy, by pool.",
                                    [*labelnames, "pool"], multiprocess_mode="sum")
            for unit, what in (("slots", "Slots"), ("bytes", "Bytes, of all ranks,")))
        self._logged = PrefixCacheStats()

    def log(self, stats: PrefixCacheStats, labels: Mapping[str, str]) -> None:
        """Counts what came since the last call. stats: of all schedulers, since the start. labels: of every metric."""
        for field, counter in self._counters.items():
            counter.labels(**labels).inc(getattr(stats, field) - getattr(self._logged, field))
        for reason in {*MISSES, *stats.misses}:
            new = stats.misses[reason] - self._logged.misses[reason]
            self._misses.labels(**labels, reason=reason).inc(new)
        for pool, slots in (("device", stats.device_slots), ("host", stats.host_slots)):
            self._slots.labels(**labels, pool=pool).set(slots)
            self._bytes.labels(**labels, pool=pool).set(slots * stats.slot_bytes)
        self._logged = stats
