"""What the stamps of answers that ran together say about the steps of a server, and the points for a cost model.

Of one measurement, `batch` answers at once:
  window           from when the last of them had its first delta to when the first of them had its last: all run in it
  step_s           seconds between two deltas of one answer, both in the window: median, P10, P90 over all answers
  token_s          the window / the tokens of one answer in it. Where deltas hold one token each and come evenly it is
                   the median; where a server sends several tokens at once, or pauses, it is not
  stream_tps       (tokens - 1) / (last delta - first delta), median over the answers
  aggregate_tps    tokens of all answers in the window / window
  tokens_per_step  completion tokens / deltas. Above 1 a server sends several tokens at once: speculation, or text that
                   waits for the rest of a character
"""
import statistics
from collections.abc import Sequence
from typing import Any

from . import definitions

Sample = dict[str, Any]
Row = dict[str, Any]

# Fewer gaps per answer say nothing.
LEAST_GAPS = 3
# Median and mean of a step may differ by this share before a row is called uneven.
UNEVEN = 0.25


class NotTogether(Exception):
    """The answers of a batch did not run at the same time for long enough; one line."""


def measured(stamps: Sequence[Sequence[float]], tokens: Sequence[int | None]) -> dict[str, Any]:
    """Figures of one measurement: per answer the times of its deltas, and its completion tokens.

    Raises:
        NotTogether: no window, or too little in it.
    """
    if any(len(times) < 2 for times in stamps):
        raise NotTogether("an answer came in less than two pieces: no time between tokens can be seen")
    start, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    gaps = [later - one for times in stamps for one, later in zip(times, times[1:], strict=False)
            if start <= one and later <= end]
    if len(gaps) < LEAST_GAPS * len(stamps) or end <= start:
        raise NotTogether(f"{len(stamps)} answers never ran together for {LEAST_GAPS} tokens: has the server places "
                          "for so many (--max-num-seqs)? Or are the answers too short (--tokens)?")
    known = [number for number in tokens if number is not None]
    per_step = sum(known) / sum(map(len, stamps)) if len(known) == len(stamps) else None
    inside = sum(start < time <= end for times in stamps for time in times)
    rates = [(number - 1) / (times[-1] - times[0]) for times, number in zip(stamps, tokens, strict=True)
             if number is not None and times[-1] > times[0]]
    return {"step_s": {name: definitions.percentile(gaps, share) for name, share in
                       (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))},
            "gaps": len(gaps), "window_s": end - start, "tokens_per_step": per_step,
            "token_s": (end - start) * len(stamps) / (inside * per_step) if per_step else None,
            "stream_tps": statistics.median(rates) if per_step else None,
            "aggregate_tps": inside * per_step / (end - start) if per_step else None}


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One per context and batch: medians over the rounds, and the range of the rounds' step times."""
    groups: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample["context"], sample["batch"]), []).append(sample)
    return [_row(context, batch, groups[context, batch]) for context, batch in sorted(groups)]


def _row(context: int, batch: int, group: Sequence[Sample]) -> Row:
    good = [sample for sample in group if sample["class"] == definitions.OK]
    row: Row = {"context": context, "batch": batch, "rounds": len(good), "failed": sorted(
        {f"{sample['class']}: {sample['error']}" for sample in group if sample["class"] != definitions.OK})}
    if not good:
        return row
    steps = [sample["step_s"]["p50"] for sample in good]

    def middle(values: list[Any]) -> float | None:
        return None if any(value is None for value in values) else statistics.median(values)

    def of_requests(name: str) -> float | None:
        return middle([request[name] for sample in good for request in sample["requests"]])

    row |= {"prompt_tokens": of_requests("prompt_tokens"), "cached_tokens": of_requests("cached_tokens"),
            "completion_tokens": of_requests("completion_tokens"),
            "step_s": {"p50": statistics.median(steps), "least": min(steps), "most": max(steps),
                       **{name: middle([sample["step_s"][name] for sample in good]) for name in ("p10", "p90")}},
            **{name: middle([sample[name] for sample in good]) for name in (
                "token_s", "stream_tps", "aggregate_tps", "tokens_per_step")},
            "loop_lag_ms": max((sample["client"]["loop_lag_ms"]["max"] or 0.0 for sample in good), default=None),
            "healthy": all(sample["client"]["healthy"] is not False for sample in good)}
    expected = row["step_s"]["p50"] / row["tokens_per_step"] if row["tokens_per_step"] else None
    row["uneven"] = None if expected is None else abs(row["token_s"] / expected - 1) > UNEVEN
    return row


def points(found: Sequence[Row], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What cost_model.py fits. Steps: every row that is even, and whose tokens per step are known. TTFT: of requests
    that were alone on the server and whose cached tokens it reported, the median of those that are alike. What a slow
    client saw is left out.

    The chunk of a TTFT is the server's max_num_batched_tokens, which `replay_sim.py points` is told.
    """
    steps = [{"what": "step", "batch": row["batch"], "tokens": row["tokens_per_step"],
              "context": round(row["prompt_tokens"] + row["completion_tokens"] / 2), "seconds": row["step_s"]["p50"]}
             for row in found if row.get("prompt_tokens") is not None and row["uneven"] is False and row["healthy"]]
    times: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        if sample["client"]["healthy"] is False:
            continue
        alone = list(sample["primes"])
        if sample["batch"] == 1 and sample["class"] == definitions.OK:
            alone += sample["requests"]
        for one in alone:
            if None not in (one["prompt_tokens"], one["cached_tokens"], one["ttft_s"]):
                times.setdefault((one["prompt_tokens"], one["cached_tokens"]), []).append(one["ttft_s"])
    return steps + [{"what": "ttft", "prompt": prompt, "cached": cached, "seconds": statistics.median(seconds)}
                    for (prompt, cached), seconds in sorted(times.items()) if cached < prompt]
