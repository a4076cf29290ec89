"""What the platform's figures mean: of a request, of a run, the weighted score, the gates, the classes of errors.

Everything follows from the samples of a record and its wall time, so that any figure can be computed again.

Of one request:
  TTFT         first_s - sent_s. sent_s: before the connection is opened. first_s: when the bytes came that complete the
               first event whose delta has non-empty content, reasoning, reasoning_content or tool_calls.
  whole time   last_s - sent_s. last_s: when the last byte of the response came.
  output TPS   completion_tokens / whole time, prefill included
  decode TPS   (completion_tokens - 1) / (last_s - first_s)
  input TPS    prompt_tokens / TTFT
  success      class "ok": 2xx, and the stream was read to its end without a transport error

Of a run, over the requests that succeeded unless said otherwise:
  percentiles  linear between ranks: position share * (n - 1)
  aggregate    sums of tokens / wall time of the whole run, failures and idle time included. A sum of prompt or
               completion tokens is told only if every success reports its count: a part of it would look like the whole
  cached       what the server reports. Where no request reports any it is not reported, and so is what needs it; where
               some do, the others count as 0, as the platform does (servers leave the field out for 0), and
               `not_reported` says how many these are.
  hit rate     sum of cached / sum of prompt tokens
  adjusted     with the requests that failed: their TTFT is infinite (written as "infinite": JSON has no such number),
               their output TPS 0
  no output    successes without any first token; they have no TTFT

The platform has one gate more, which this bench does not measure: quality within 4 % of the original model's. It needs
the answers' contents judged, and no time or count says anything of it.
"""
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Sample = dict[str, Any]
Summary = dict[str, Any]

VERSION = "platform-2"
INFINITE = "infinite"
PERCENTILES = {"p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}
# Points per token and minute, of output, of uncached input and of cached input; and what makes the weighted score.
RAW = {"output": 10.8, "uncached_input": 1.8, "cached": 0.36}
WEIGHT = 0.02592
# Lengths of prompts, upper ends (exclusive): PLATFORM 5.1.
BUCKETS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, math.inf)
# name, path in the summary, comparison, bound.
GATES: tuple[tuple[str, str, str, float], ...] = (
    ("output TPS per request, P10", "output_tps.p10", "at least", 20.0),
    ("TTFT P90, s", "ttft_s.p90", "at most", 5.0),
    ("cache hit rate", "hit_rate", "at least", 0.50),
    ("success rate", "success_rate", "at least", 0.99),
    ("weighted score", "weighted", "at least", 8000.0),
    ("whole time P99, s", "whole_s.p99", "at most", 999.999),
)
OK = "ok"
# Words of the server's message that decide, in the order of the platform's list; otherwise the status does. "maximum
# context length" is the platform's own; the others are what servers say in such cases.
WORDS = (
    ("ctx_overflow", ("maximum context length", "context length", "context_length_exceeded", "longer than the maximum",
                      "exceeds the available context")),
    ("image_load", ("image", "picture")),
    ("tool_schema", ("tool", "json schema", "function.parameters")),
    ("multi_system_template", ("system message must be", "multiple system", "chat template")),
    ("request_validation", ("validation", "extra inputs", "field required", "unrecognized", "is required",
                            "must be")),
)
TRANSPORT = ("timeout", "connection", "stream_aborted")


def percentile(values: Iterable[float], share: float) -> float | None:
    """Linear between ranks, at share * (n - 1); None without values. May be infinite."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    part = place - low
    if not part:
        return ordered[low]
    if math.isinf(ordered[low + 1]):
        return math.inf
    return ordered[low] + (ordered[low + 1] - ordered[low]) * part


def percentiles(values: Sequence[float]) -> dict[str, float | str | None]:
    """All of PERCENTILES."""
    found = {name: percentile(values, share) for name, share in PERCENTILES.items()}
    return {name: INFINITE if value is not None and math.isinf(value) else value for name, value in found.items()}


def classify(status: int, message: str) -> str:
    """Class of an answer that is no 2xx: by the words of its message, whatever its status, else by the status."""
    words = message.lower()
    if named := next((name for name, found in WORDS if any(word in words for word in found)), None):
        return named
    if status >= 500:
        return "server_error"
    return {401: "auth", 403: "auth", 404: "not_found", 429: "rate_limited"}.get(status, f"http_{status}")


def ttft(sample: Sample) -> float | None:
    """Seconds; None where no output came."""
    return None if sample.get("first_s") is None else sample["first_s"] - sample["sent_s"]


def whole(sample: Sample) -> float | None:
    """Seconds of the whole request; None where it did not end."""
    return None if sample.get("last_s") is None else sample["last_s"] - sample["sent_s"]


def output_tps(sample: Sample) -> float | None:
    """None where the server did not say how many tokens there were."""
    return _rate(sample.get("completion_tokens"), whole(sample))


def decode_tps(sample: Sample) -> float | None:
    """None for answers of less than two tokens, and for those that came in one piece."""
    tokens, first, last = sample.get("completion_tokens"), sample.get("first_s"), sample.get("last_s")
    if tokens is None or tokens < 2 or first is None or last is None:
        return None
    return _rate(tokens - 1, last - first)


def input_tps(sample: Sample) -> float | None:
    """None where no output came, or the prompt's length was not reported."""
    return _rate(sample.get("prompt_tokens"), ttft(sample))


def _rate(tokens: int | None, seconds: float | None) -> float | None:
    return tokens / seconds if tokens is not None and seconds is not None and seconds > 0 else None


def weighted(output: float | None, uncached: float | None, cached: float | None) -> float | None:
    """The score of aggregate tokens per second."""
    if output is None or uncached is None or cached is None:
        return None
    return 60 * WEIGHT * (RAW["output"] * output + RAW["uncached_input"] * uncached + RAW["cached"] * cached)


def summary(samples: Sequence[Sample], wall_s: float) -> Summary:
    """The figures of a run. wall_s: of the whole batch. A figure that cannot be told is None, never 0."""
    sent = [sample for sample in samples if sample.get("sent_s") is not None]
    good = [sample for sample in sent if sample["class"] == OK]
    tokens = _tokens(good)
    output, uncached, cached = (_rate(tokens[name], wall_s) for name in ("output", "uncached_input", "cached"))
    found: Summary = {
        "requests": len(sent), "success_rate": len(good) / len(sent) if sent else None,
        "hit_rate": _share(tokens["cached"], tokens["prompt"]), "hit_rate_theoretical": _theoretical(good),
        "ttft_s": _over(good, ttft), "whole_s": _over(good, whole), "output_tps": _over(good, output_tps),
        "decode_tps": _over(good, decode_tps), "input_tps": _over(good, input_tps),
        "tokens": tokens,
        "aggregate": {"output_tps": output, "uncached_input_tps": uncached, "cached_tps": cached,
                      "total_tps": None if output is None or tokens["prompt"] is None
                      else (tokens["output"] + tokens["prompt"]) / wall_s if wall_s > 0 else None},
        "weighted": weighted(output, uncached, cached),
        "failure_adjusted": {name: percentiles([found for sample in sent if (
            found := value(sample) if sample["class"] == OK else worst) is not None])
            for name, value, worst in (("ttft_s", ttft, math.inf), ("output_tps", output_tps, 0.0))},
        "classes": dict(Counter(sample["class"] for sample in sent).most_common()),
        "not_reported": {name: sum(sample.get(name) is None for sample in good)
                         for name in ("prompt_tokens", "cached_tokens", "completion_tokens")},
        "no_output": sum(sample.get("first_s") is None for sample in good),
        "unfinished": sum(sample.get("finish") is None for sample in good),
        "after_finish": sum(sample.get("after_finish") or 0 for sample in good),
        "repetitive": sum(bool(sample.get("repetitive")) for sample in good),
        "errors_in_stream": sum(sample.get("error") is not None for sample in good),
    }
    if any(sample.get("intended_s") is not None for sample in good):
        # Open loop: what a user waits who comes at the intended time, whenever the client managed to send.
        found["ttft_from_intended_s"] = _over(good, lambda sample: None if sample.get("first_s") is None
                                              or sample.get("intended_s") is None
                                              else sample["first_s"] - sample["intended_s"])
    found["gates"] = gates(found)
    return found


def gates(found: Summary) -> list[dict[str, Any]]:
    """{name, value, wanted, met}; value and met are None where the figure is not reported."""
    rows = []
    for name, path, comparison, bound in GATES:
        value: Any = found
        for part in path.split("."):
            value = value[part]
        met = None
        if value is not None:
            met = value != INFINITE and (value >= bound if comparison == "at least" else value <= bound)
        rows.append({"name": name, "value": value, "wanted": f"{comparison} {bound:g}", "met": met})
    return rows


def groups(samples: Sequence[Sample]) -> dict[str, list[dict[str, Any]]]:
    """Per range of the prompt's length, and per turn of a conversation: what does not need a wall time."""
    def length(sample: Sample) -> str:
        tokens = sample.get("prompt_tokens") or sample.get("expected_prompt_tokens")
        return "not known" if tokens is None else bucket_name(tokens)

    order = [bucket_name(0 if not index else int(BUCKETS[index - 1])) for index in range(len(BUCKETS))]
    return {"by_length": _groups(samples, length, [*order, "not known"]),
            "by_turn": _groups(samples, lambda sample: sample["turn"],
                               sorted({sample["turn"] for sample in samples}))}


def bucket_of(tokens: int) -> int:
    """Index into BUCKETS."""
    return next(index for index, end in enumerate(BUCKETS) if tokens < end)


def bucket_name(tokens: int) -> str:
    """The range of BUCKETS that a length lies in."""
    index = bucket_of(tokens)
    low = 0 if not index else BUCKETS[index - 1]
    if math.isinf(BUCKETS[index]):
        return f"{low / 1024:g}K and more"
    return f"{low / 1024:g}K to {BUCKETS[index] / 1024:g}K"


def _groups(samples: Sequence[Sample], key: Callable[[Sample], Any], order: Sequence[Any]) -> list[dict[str, Any]]:
    rows = []
    for name in order:
        members = [sample for sample in samples if key(sample) == name]
        if not members:
            continue
        good = [sample for sample in members if sample["class"] == OK]
        tokens = _tokens(good)
        rows.append({"group": name, "requests": len(members), "succeeded": len(good),
                     "hit_rate": _share(tokens["cached"], tokens["prompt"]),
                     "hit_rate_theoretical": _theoretical(good), "ttft_s": _over(good, ttft),
                     "output_tps": _over(good, output_tps), "decode_tps": _over(good, decode_tps)})
    return rows


def _tokens(good: Sequence[Sample]) -> dict[str, int | None]:
    prompt, output = (_sum(good, name) for name in ("prompt_tokens", "completion_tokens"))
    reported = [sample for sample in good if sample.get("cached_tokens") is not None]
    cached = _sum(reported, "cached_tokens")
    return {"prompt": prompt, "output": output, "cached": cached,
            "uncached_input": None if prompt is None or cached is None else prompt - cached}


def _sum(samples: Sequence[Sample], name: str) -> int | None:
    known = [sample[name] for sample in samples if sample.get(name) is not None]
    return sum(known) if known and len(known) == len(samples) else None


def _theoretical(good: Sequence[Sample]) -> float | None:
    if not good or any(sample.get("theoretical_reuse") is None or sample.get("expected_prompt_tokens") is None
                       for sample in good):
        return None
    return _share(_sum(good, "theoretical_reuse"), _sum(good, "expected_prompt_tokens"))


def _share(part: int | None, total: int | None) -> float | None:
    return None if part is None or not total else part / total


def _over(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> dict[str, float | str | None]:
    return percentiles([found for sample in samples if (found := value(sample)) is not None])
