"""Metrics of the server: stock's, and those of the prefix cache."""
from typing import Any

from vllm.engine import metrics_stock as _stock
from vllm.engine.metrics_types import Stats
from vllm.overlay.prefix_cache.metrics import PrefixCacheMetrics


class Metrics(_stock.Metrics):
    """Stock's collectors and ours; making them unregisters those of an engine before."""

    def __init__(self, labelnames: list[str], max_model_len: int) -> None:
        super().__init__(labelnames, max_model_len)
        self.prefix_cache = PrefixCacheMetrics(labelnames)


class PrometheusStatLogger(_stock.PrometheusStatLogger):
    """Stock's, which also logs `Stats.prefix_cache`, as our LLMEngine sets it."""

    _metrics_cls = Metrics
    metrics: Metrics

    def _log_prometheus(self, stats: Stats) -> None:
        super()._log_prometheus(stats)
        self.metrics.prefix_cache.log(stats.prefix_cache, self.labels)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
