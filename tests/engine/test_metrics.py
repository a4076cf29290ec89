"""What the prefix cache counts, as metrics."""
from collections import Counter

import prometheus_client

from vllm.engine.metrics import PrometheusStatLogger
from vllm.engine.metrics_types import Stats
from vllm.overlay.prefix_cache.stats import MISSES, PrefixCacheStats, total

MODEL = {"model_name": "m"}


def value(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(f"vllm:{name}", {**MODEL, **labels})


def stats(counted: PrefixCacheStats) -> Stats:
    made = Stats(now=0.0, num_running_sys=0, num_waiting_sys=0, num_swapped_sys=0, gpu_cache_usage_sys=0.0,
                 cpu_cache_usage_sys=0.0, cpu_prefix_cache_hit_rate=-1.0, gpu_prefix_cache_hit_rate=counted.hit_rate,
                 num_prompt_tokens_iter=0, num_generation_tokens_iter=0, time_to_first_tokens_iter=[],
                 time_per_output_tokens_iter=[], num_preemption_iter=0, time_e2e_requests=[],
                 num_prompt_tokens_requests=[], num_generation_tokens_requests=[], n_requests=[],
                 finished_reason_requests=[])
    made.prefix_cache = counted
    return made


def test_counts_become_metrics():
    logger = PrometheusStatLogger(local_interval=0.0, labels=MODEL, max_model_len=100)
    one = PrefixCacheStats(slot_bytes=10, device_slots=3, host_slots=2, taken=5, hit=4, evicted=3, demoted=2, dropped=1,
                           failures=6)
    one.admitted(100, 0, "cold")
    one.admitted(300, 64, "")
    logger.log(stats(total([one])))
    counters = {"prefix_cache_queries_total": 400, "prefix_cache_hits_total": 64, "gpu_prefix_cache_hit_rate": 0.16,
                "state_checkpoints_taken_total": 5, "state_checkpoints_hit_total": 4,
                "state_checkpoints_evicted_total": 3, "state_checkpoints_demoted_total": 2,
                "state_checkpoints_dropped_total": 1, "state_checkpoint_failures_total": 6}
    assert {name: value(name) for name in counters} == counters
    assert {reason: value("prefix_cache_misses_total", reason=reason) for reason in MISSES} == {
        **dict.fromkeys(MISSES, 0), "cold": 1}, "reasons are there before they come"
    pools = [(value("state_checkpoint_slots", pool=pool), value("state_checkpoint_bytes", pool=pool))
             for pool in ("device", "host")]
    assert pools == [(3, 30), (2, 20)]
    # The scheduler goes on counting in its own object; what is in use may become less.
    one.admitted(50, 16, "")
    one.admitted(50, 0, "short")
    one.device_slots, one.host_slots = 1, 0
    for _ in range(2):
        logger.log(stats(total([one])))
        assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (500, 80)
        assert value("prefix_cache_misses_total", reason="short") == 1
        assert value("state_checkpoint_bytes", pool="device") == 10


def test_a_second_engine_of_the_process_counts_from_nothing():
    for _ in range(2):
        logger = PrometheusStatLogger(local_interval=0.0, labels=MODEL, max_model_len=100)
        logger.log(stats(PrefixCacheStats(queries=7)))
        assert value("prefix_cache_queries_total") == 7


def test_schedulers_add_up():
    one = PrefixCacheStats(queries=3, hits=1, misses=Counter(cold=2, short=1), device_slots=2, slot_bytes=8)
    two = PrefixCacheStats(queries=4, hits=2, misses=Counter(cold=1), device_slots=1, slot_bytes=8)
    both = total([one, two])
    assert both == PrefixCacheStats(queries=7, hits=3, misses=Counter(cold=3, short=1), device_slots=3, slot_bytes=8)
    both.misses["cold"] += 1
    assert one.misses["cold"] == 2, "a sum is nobody's own"
    assert total([one]) == one and total([one]) is not one
