"""Intervals by resampling conversations, ratios of paired runs, the noise of repeats, and verdicts.

Requests of one conversation share their prefix and follow each other, so they are no independent draws: what is drawn,
with replacement, are whole conversations. A drawn set has another total of work than the run had, so its wall time is
the run's, scaled by the time its requests took (closed loop, where a request waits for a free stream) or by their
number (open loop, where the arrivals decide).
"""
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import definitions

Sample = dict[str, Any]
Summary = dict[str, Any]
Summarise = Callable[[list[Sample], float], Summary]

LEVEL, ROUNDS = 0.95, 300
# What a difference must exceed where no repeats say how much two runs of one thing differ.
ASSUMED_NOISE, LEAST_NOISE = 0.03, 0.01
# Figures of a summary that get intervals and are compared: path, and whether more is better.
FIGURES = {
    "success_rate": True, "hit_rate": True, "ttft_s.p50": False, "ttft_s.p90": False, "output_tps.p10": True,
    "output_tps.p50": True, "decode_tps.p50": True, "input_tps.p50": True, "aggregate.output_tps": True,
    "aggregate.uncached_input_tps": True, "aggregate.cached_tps": True, "aggregate.total_tps": True, "weighted": True,
    "failure_adjusted.ttft_s.p90": False, "failure_adjusted.output_tps.p10": True,
}


def figure(summary: Summary, path: str) -> float | None:
    """A number of a summary by its dotted path, maybe infinite; None where it was not reported."""
    value: Any = summary
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value == definitions.INFINITE:
        return math.inf
    return float(value) if isinstance(value, int | float) else None


def by_conversation(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples of each conversation, in their order."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample["conversation"], []).append(sample)
    return found


def draws(names: Sequence[str], rounds: int, seed: int) -> Iterator[list[str]]:
    """Conversations drawn with replacement, as many as there are, `rounds` times."""
    chance = random.Random(seed)
    for _ in range(rounds):
        yield chance.choices(names, k=len(names))


def span(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The middle `level` of sorted or unsorted values; linear between ranks."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return at((1 - level) / 2), at((1 + level) / 2)


def bootstrap(samples: Sequence[Sample], wall_s: float, summarise: Summarise, *, mode: str = "closed",
              rounds: int = ROUNDS, seed: int = 0, level: float = LEVEL,
              paths: Iterable[str] = tuple(FIGURES)) -> dict[str, Any]:
    """Intervals of the figures at `paths` of a summary, to be kept as a record's "intervals".

    Returns:
        {"level", "rounds", "seed", "conversations", "figures": {path: [low, high]}}; no figures where there is one
        conversation only, which says nothing about others.
    """
    groups = by_conversation(samples)
    found: dict[str, list[float]] = {path: [] for path in paths}
    if len(groups) > 1:
        for drawn in draws(list(groups), rounds, seed):
            summary = summarise(*drawn_run(groups, drawn, samples, wall_s, mode))
            for path, values in found.items():
                value = figure(summary, path)
                if value is not None and math.isfinite(value):
                    values.append(value)
    # A figure that most draws lack (say, all of whose requests failed) has no interval worth the name.
    return {"level": level, "rounds": rounds, "seed": seed, "conversations": len(groups),
            "figures": {path: [round(bound, 6) for bound in span(values, level)]
                        for path, values in found.items() if len(values) > rounds / 2}}


def drawn_run(groups: dict[str, list[Sample]], drawn: Sequence[str], samples: Sequence[Sample], wall_s: float,
              mode: str) -> tuple[list[Sample], float]:
    """The samples of the drawn conversations, and the wall time that a run of them would have taken."""
    chosen = [sample for name in drawn for sample in groups.get(name, ())]
    work = _seconds if mode == "closed" else len
    whole = work(samples)
    return chosen, wall_s * work(chosen) / whole if whole else wall_s


def _seconds(samples: Sequence[Sample]) -> float:
    return sum(sample["last_s"] - sample["sent_s"] for sample in samples
               if sample.get("last_s") is not None and sample.get("sent_s") is not None)


# Per request, of samples that succeeded: name -> (value of a sample, whether more is better).
PER_REQUEST: dict[str, tuple[Callable[[Sample], float | None], bool]] = {
    "TTFT, per request": (definitions.ttft, False), "output TPS, per request": (definitions.output_tps, True),
    "decode TPS, per request": (definitions.decode_tps, True),
}


@dataclasses.dataclass(frozen=True)
class Ratio:
    """other / base of one figure. base, other: the figures themselves (geometric means over repeats; None for paired
    requests). interval: of the ratio, None where nothing allows one. noise: relative; measured: by repeats, not
    assumed. count: requests paired, or runs. verdict: "better", "worse", "no change" or "not reported"."""

    name: str
    base: float | None
    other: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    noise: float
    measured: bool
    count: int
    more_is_better: bool
    verdict: str


def verdict(ratio: float | None, interval: tuple[float, float] | None, noise: float, more_is_better: bool) -> str:
    """Better or worse if the whole interval lies beyond the noise band on that side, else no change: without an
    interval nothing is shown."""
    if ratio is None:
        return "not reported"
    if interval is None or interval[0] <= 0:
        return "no change"
    low, high = math.log(interval[0]), math.log(interval[1])
    if not more_is_better:
        low, high = -high, -low
    band = math.log1p(noise)
    return "better" if low > band else "worse" if high < -band else "no change"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a comparison needs of one record."""

    samples: list[Sample]
    wall_s: float
    summary: Summary
    mode: str = "closed"


def compare(base: Sequence[Run], other: Sequence[Run], summarise: Summarise, *, rounds: int = ROUNDS, seed: int = 0,
            noise: float = ASSUMED_NOISE) -> list[Ratio]:
    """Ratios of two arms that ran the same requests, each once or more.

    Intervals come from drawing conversations, the same ones for both arms; with one conversation from the repeats, if
    both arms have some: the least and the most of any run of one to any of the other. The noise band is the largest
    difference between repeats of one arm, at least LEAST_NOISE; without repeats it is assumed.
    """
    names = list(by_conversation(base[0].samples))
    found = [_of_requests(name, base, other, names, rounds, seed, noise) for name in PER_REQUEST]
    return found + _of_runs(base, other, names, summarise, rounds, seed, noise)


def _mean(values: Sequence[float | None]) -> float | None:
    """Geometric; None where one is missing or zero."""
    logs = [math.log(value) for value in values if value is not None and value > 0]
    return math.exp(sum(logs) / len(logs)) if logs and len(logs) == len(values) else None


def _band(arms: Sequence[Sequence[float | None]], assumed: float) -> tuple[float, bool]:
    """Noise, and whether repeats say it."""
    spreads = [max(known) / min(known) - 1 for arm in arms
               if len(known := [value for value in arm if value and math.isfinite(value)]) > 1]
    return (max(LEAST_NOISE, *spreads), True) if spreads else (assumed, False)


def _cross(base: Sequence[float | None], other: Sequence[float | None]) -> tuple[float, float] | None:
    """Least and most ratio between any two runs; needs repeats on both sides."""
    ratios = [two / one for one in base for two in other if one and two]
    return (min(ratios), max(ratios)) if len(base) > 1 and len(other) > 1 and ratios else None


def _of_requests(name: str, base: Sequence[Run], other: Sequence[Run], names: Sequence[str], rounds: int, seed: int,
                 assumed: float) -> Ratio:
    value, more = PER_REQUEST[name]

    def values(run: Run) -> dict[int, float]:
        found = {sample["index"]: value(sample) for sample in run.samples if sample["class"] == "ok"}
        return {index: number for index, number in found.items() if number}

    def pooled(runs: Sequence[dict[int, float]]) -> dict[int, float]:
        shared = set.intersection(*(set(run) for run in runs))
        return {index: sum(math.log(run[index]) for run in runs) / len(runs) for index in shared}

    measured = [[values(run) for run in arm] for arm in (base, other)]
    one, two = (pooled(arm) for arm in measured)
    logs: dict[str, list[float]] = {}
    for sample in base[0].samples:
        if sample["index"] in one and sample["index"] in two:
            logs.setdefault(sample["conversation"], []).append(two[sample["index"]] - one[sample["index"]])
    count = sum(map(len, logs.values()))
    if not count:
        return Ratio(name, None, None, None, None, assumed, False, 0, more, "not reported")
    shared = one.keys() & two.keys()
    means = [[math.exp(sum(math.log(run[index]) for index in shared) / count) for run in arm] for arm in measured]
    band, known = _band(means, assumed)
    interval = None
    if len(logs) > 1:
        sums = {conversation: (sum(found), len(found)) for conversation, found in logs.items()}
        drawn = [[sums[conversation] for conversation in chosen] for chosen in draws(list(sums), rounds, seed)]
        low, high = span([sum(total for total, _ in each) / sum(number for _, number in each) for each in drawn])
        interval = (math.exp(low), math.exp(high))
    elif len(names) == 1:
        interval = _cross(*means)
    ratio = math.exp(sum(sum(found) for found in logs.values()) / count)
    return Ratio(name, None, None, ratio, interval, band, known, count, more, verdict(ratio, interval, band, more))


def _of_runs(base: Sequence[Run], other: Sequence[Run], names: Sequence[str], summarise: Summarise, rounds: int,
             seed: int, assumed: float) -> list[Ratio]:
    arms = (base, other)
    groups = [[by_conversation(run.samples) for run in arm] for arm in arms]
    drawn: dict[str, list[float]] = {path: [] for path in FIGURES}
    for chosen in draws(names, rounds, seed) if len(names) > 1 else ():
        summaries = [[summarise(*drawn_run(found, chosen, run.samples, run.wall_s, run.mode))
                      for run, found in zip(arm, group, strict=True)] for arm, group in zip(arms, groups, strict=True)]
        for path, ratios in drawn.items():
            one, two = (_mean([figure(summary, path) for summary in arm]) for arm in summaries)
            if one and two and math.isfinite(one) and math.isfinite(two):
                ratios.append(two / one)
    found = []
    for path, more in FIGURES.items():
        values = [[figure(run.summary, path) for run in arm] for arm in arms]
        one, two = (_mean(arm) for arm in values)
        band, known = _band(values, assumed)
        if one is not None and two is not None and math.isinf(one) != math.isinf(two):
            # So many failures that the percentile is one of them: no ratio, and no doubt either.
            found.append(Ratio(path, one, two, None, None, band, known, len(base) + len(other), more,
                               "worse" if math.isinf(two) != more else "better"))
            continue
        ratio = two / one if one and two and math.isfinite(one) else None
        enough = len(drawn[path]) > rounds / 2
        interval = span(drawn[path]) if enough else _cross(*values) if len(names) == 1 else None
        found.append(Ratio(path, one, two, ratio, interval, band, known, len(base) + len(other), more,
                           verdict(ratio, interval, band, more)))
    return found
