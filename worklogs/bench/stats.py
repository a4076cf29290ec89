"""Intervals by resampling conversations, ratios of paired runs, the noise of repeats, and verdicts.

Requests of one conversation share their prefix and follow each other, so they are no independent draws: what is drawn,
with replacement, are whole conversations. A drawn set has another total of work than the run had, so its wall time is
the run's, scaled by the time its requests took (closed loop, where a request waits for a free stream) or by their
number (open loop, where the arrivals decide).

A figure may be 0 (nothing came from the cache) or infinite (so many requests failed that the percentile is one of
them). Both are measurements, as draws and as figures, and no "not reported".
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
# Draws of fewer conversations give little more than the range of these.
LEAST_CONVERSATIONS = 6
TOO_FEW = "too few conversations"
# What a difference must exceed where too few repeats say how much two runs of one thing differ: two that happen to be
# close would make the band too narrow.
ASSUMED_NOISE, LEAST_NOISE, LEAST_REPEATS = 0.03, 0.01, 3
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
    """The middle `level` of sorted or unsorted values, which may be infinite; linear between ranks."""
    low, high = (definitions.percentile(values, share) for share in ((1 - level) / 2, (1 + level) / 2))
    if low is None or high is None:
        raise ValueError("no values, no span")
    return low, high


def shown(value: float | str, form: str) -> str:
    """A figure or a bound for people, by a format such as "{:.2f}"; infinite ones in words."""
    return definitions.INFINITE if value == definitions.INFINITE or value == math.inf else form.format(value)


def between(interval: Sequence[float | str], form: str) -> str:
    """An interval for people."""
    return f"{shown(interval[0], form)} to {shown(interval[1], form)}"


def plain(value: float) -> float | str:
    """For JSON, which has no infinite numbers."""
    return definitions.INFINITE if math.isinf(value) else round(value, 6)


def bootstrap(samples: Sequence[Sample], wall_s: float, summarise: Summarise, *, mode: str = "closed",
              rounds: int = ROUNDS, seed: int = 0, level: float = LEVEL,
              paths: Iterable[str] = tuple(FIGURES)) -> dict[str, Any]:
    """Intervals of the figures at `paths` of a summary, to be kept as a record's "intervals".

    Returns:
        {"level", "rounds", "seed", "conversations", "none": why there are no figures, else None,
        "figures": {path: [low, high]}}. A bound may be "infinite". No figures with fewer than LEAST_CONVERSATIONS,
        which say little about others.
    """
    groups = by_conversation(samples)
    found: dict[str, list[float]] = {path: [] for path in paths}
    enough = len(groups) >= LEAST_CONVERSATIONS
    if enough:
        for drawn in draws(list(groups), rounds, seed):
            summary = summarise(*drawn_run(groups, drawn, samples, wall_s, mode))
            for path, values in found.items():
                value = figure(summary, path)
                if value is not None:
                    values.append(value)
    # A figure that most draws lack (no answer that succeeded, say) has no interval worth the name.
    return {"level": level, "rounds": rounds, "seed": seed, "conversations": len(groups),
            "none": None if enough else TOO_FEW,
            "figures": {path: [plain(bound) for bound in span(values, level)]
                        for path, values in found.items() if len(values) > rounds / 2}}


def drawn_run(groups: dict[str, list[Sample]], drawn: Sequence[str], samples: Sequence[Sample], wall_s: float,
              mode: str) -> tuple[list[Sample], float]:
    """The samples of the drawn conversations, and the wall time that a run of them would have taken."""
    chosen = [sample for name in drawn for sample in groups.get(name, ())]
    work = _seconds if mode == "closed" else len
    whole = work(samples)
    return chosen, wall_s * work(chosen) / whole if whole else wall_s


def _seconds(samples: Sequence[Sample]) -> float:
    """That the requests held their streams; those that failed until they did."""
    ends = ((sample, sample.get("failed_s") if sample.get("last_s") is None else sample["last_s"])
            for sample in samples)
    return sum(end - sample["sent_s"] for sample, end in ends if None not in (end, sample.get("sent_s")))


# Per request, of samples that succeeded: name -> (value of a sample, whether more is better).
PER_REQUEST: dict[str, tuple[Callable[[Sample], float | None], bool]] = {
    "TTFT, per request": (definitions.ttft, False), "output TPS, per request": (definitions.output_tps, True),
    "decode TPS, per request": (definitions.decode_tps, True),
}


LEVEL_WORDS, RANGE, NO_BOUNDS = f"{LEVEL:.0%}", "range of runs", "-"


@dataclasses.dataclass(frozen=True)
class Ratio:
    """other / base of one figure. base, other: the figures themselves (geometric means over repeats; None for paired
    requests). ratio: 0 or infinite where one of them is. interval: of the ratio, None where nothing allows one; bounds:
    what it is, or why there is none (LEVEL_WORDS, RANGE, TOO_FEW, NO_BOUNDS). noise: relative; measured: by repeats,
    not assumed. count: requests paired, or runs. verdict: "better", "worse", "no change" or "not reported"."""

    name: str
    base: float | None
    other: float | None
    ratio: float | None
    interval: tuple[float, float] | None
    bounds: str
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
    if interval is None:
        return "no change"
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in interval)
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

    Intervals come from drawing conversations, the same ones for both arms; with too few of them from the repeats, if
    both arms have some: the least and the most of any run of one to any of the other, which is a range and no 95 %.
    The noise band is the largest difference between repeats of one arm, at least LEAST_NOISE, and what is assumed if
    that is more, until one arm has LEAST_REPEATS runs.

    A figure that is 0 or infinite in one arm only needs no interval: it is worse if it counts against the other arm,
    and better if it is so in every run of the base.
    """
    names = list(by_conversation(base[0].samples))
    found = [_of_requests(name, base, other, rounds, seed, noise) for name in PER_REQUEST]
    return found + _of_runs(base, other, names, summarise, rounds, seed, noise)


def _mean(values: Sequence[float | None]) -> float | None:
    """Geometric: infinite or else 0 where one is; None where one is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    if math.inf in known or 0 in known:
        return math.inf if math.inf in known else 0.0
    return math.exp(sum(map(math.log, known)) / len(known))


def _quotient(base: float | None, other: float | None) -> float | None:
    """other / base of figures that may be 0 or infinite; 1 where they are the same."""
    if base is None or other is None:
        return None
    if base == other:
        return 1.0
    return math.inf if base == 0 or math.isinf(other) else other / base


def _band(arms: Sequence[Sequence[float | None]], assumed: float) -> tuple[float, bool]:
    """Noise, and whether repeats say it."""
    repeats = [known for arm in arms
               if len(known := [value for value in arm if value and math.isfinite(value)]) > 1]
    spread = max([LEAST_NOISE, *(max(known) / min(known) - 1 for known in repeats)])
    enough = any(len(known) >= LEAST_REPEATS for known in repeats)
    return (spread, True) if enough or spread > assumed else (assumed, False)


def _cross(base: Sequence[float | None], other: Sequence[float | None]) -> tuple[float, float] | None:
    """Least and most ratio between any two runs; needs repeats on both sides."""
    ratios = [ratio for one in base for two in other if (ratio := _quotient(one, two)) is not None]
    return (min(ratios), max(ratios)) if len(base) > 1 and len(other) > 1 and ratios else None


def _bounded(interval: tuple[float, float] | None, base: Sequence[float | None], other: Sequence[float | None],
             conversations: int) -> tuple[tuple[float, float] | None, str]:
    """The interval of draws, or else the range of repeats where conversations are too few; and which it is."""
    if interval is not None:
        return interval, LEVEL_WORDS
    if conversations >= LEAST_CONVERSATIONS:
        return None, NO_BOUNDS
    found = _cross(base, other)
    return (None, TOO_FEW) if found is None else (found, RANGE)


def _of_requests(name: str, base: Sequence[Run], other: Sequence[Run], rounds: int, seed: int,
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
        return Ratio(name, None, None, None, None, NO_BOUNDS, assumed, False, 0, more, "not reported")
    shared = one.keys() & two.keys()
    means = [[math.exp(sum(math.log(run[index]) for index in shared) / count) for run in arm] for arm in measured]
    band, known = _band(means, assumed)
    interval = None
    if len(logs) >= LEAST_CONVERSATIONS:
        sums = {conversation: (sum(found), len(found)) for conversation, found in logs.items()}
        drawn = [[sums[conversation] for conversation in chosen] for chosen in draws(list(sums), rounds, seed)]
        low, high = span([sum(total for total, _ in each) / sum(number for _, number in each) for each in drawn])
        interval = (math.exp(low), math.exp(high))
    interval, bounds = _bounded(interval, *means, len(logs))
    ratio = math.exp(sum(sum(found) for found in logs.values()) / count)
    return Ratio(name, None, None, ratio, interval, bounds, band, known, count, more,
                 verdict(ratio, interval, band, more))


def _of_runs(base: Sequence[Run], other: Sequence[Run], names: Sequence[str], summarise: Summarise, rounds: int,
             seed: int, assumed: float) -> list[Ratio]:
    arms = (base, other)
    groups = [[by_conversation(run.samples) for run in arm] for arm in arms]
    drawn: dict[str, list[float]] = {path: [] for path in FIGURES}
    for chosen in draws(names, rounds, seed) if len(names) >= LEAST_CONVERSATIONS else ():
        summaries = [[summarise(*drawn_run(found, chosen, run.samples, run.wall_s, run.mode))
                      for run, found in zip(arm, group, strict=True)] for arm, group in zip(arms, groups, strict=True)]
        for path, ratios in drawn.items():
            ratio = _quotient(*(_mean([figure(summary, path) for summary in arm]) for arm in summaries))
            if ratio is not None:
                ratios.append(ratio)
    found = []
    for path, more in FIGURES.items():
        values = [[figure(run.summary, path) for run in arm] for arm in arms]
        one, two = (_mean(arm) for arm in values)
        band, known = _band(values, assumed)
        ratio = _quotient(one, two)
        interval, bounds = _bounded(span(drawn[path]) if len(drawn[path]) > rounds / 2 else None, *values, len(names))
        said = verdict(ratio, interval, band, more)
        if ratio == 0 or ratio == math.inf:
            against = (ratio == 0) == more
            said = "worse" if against else "better" if all(value == one for value in values[0]) else "no change"
        found.append(Ratio(path, one, two, ratio, interval, bounds, band, known, len(base) + len(other), more, said))
    return found
