"""Repeats of one formal run beside simulated runs of it: which records are repeats, medians, ranges, a verdict.

Repeats of one run differ, their percentiles most: the machine's speed drifts, and in a closed loop a small difference
may decide which request falls beside which prompt. So one run validates nothing: measured is the median of the repeats,
and predicted the median of simulated runs whose steps' times are drawn (engine_model.jittered). The verdict goes by the
medians. Whether the two ranges overlap is information: few repeats have too narrow a range, and the simulated runs know
nothing of drift.
"""
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import bench_record
from bench import records, stats

# Of a record's figures: those that the platform judges by, and others that help to see why they are off.
JUDGED = ("wall_s", "ttft_s.p90", "output_tps.p10", "aggregate.output_tps", "aggregate.total_tps", "hit_rate",
          "weighted")
SHOWN = (*JUDGED, "ttft_s.p50", "output_tps.p50", "decode_tps.p50")
# How a run is predicted. The verdict goes by the first.
ARMS = MODELLED, MEASURED = "cache modelled", "hits as measured"
# Single steps scatter by 10 % and more where they were measured, but that is seen from the client, with the machine's
# drift in it. Of the share that is the engine's own little is known, so it is small: enough that what would come at the
# same moment comes in either order, and too little to widen the predicted range until it hides an error.
RUNS, JITTER = 21, 0.03
# Of the predictions, the part that their range holds: from 10 to 90 %.
LEVEL = 0.8
# Beyond what two records must agree in to be compared at all (records.SCOPE).
SERVER = (("server", "server.kind"), ("its version", "server.version"), ("its command", "server.command"))


def measurement(record: records.Record) -> str:
    """What tells one run from another, whatever its file is called: the digest of what was measured."""
    return bench_record.digest(record.get("samples") or record.get("points"))


def refuse_twice(found: Sequence[records.Record], names: Sequence[str]) -> None:
    """Raises:
        RecordError: what was measured once is there twice.
    """
    records.refuse_one_run_twice(found, names)
    seen: dict[str, str] = {}
    for name, record in zip(names, found, strict=True):
        digest = measurement(record)
        if digest in seen:
            raise records.RecordError(f"{seen[digest]} and {name} hold the same samples: give each run once")
        seen[digest] = name


def refuse_other_runs(found: Sequence[records.Record], names: Sequence[str]) -> None:
    """Raises:
        RecordError: the records are not of one run, repeated; it names what differs.
    """
    refuse_twice(found, names)
    for name, record in zip(names[1:], found[1:], strict=True):
        if differences := [*servers_differ(found[0], record), *records.differences(found[0], record)]:
            raise records.RecordError(f"{names[0]} and {name} do not repeat one run: {'; '.join(differences)}")


def servers_differ(one: records.Record, other: records.Record) -> list[str]:
    """What two servers differ in. Their commit is none of it: most change nothing of the server."""
    return [f"{words}: {records.lookup(one, path)!r} and {records.lookup(other, path)!r}" for words, path in SERVER
            if records.lookup(one, path) != records.lookup(other, path)]


def measured(record: records.Record, path: str) -> float | None:
    """A figure of the run itself, by its name in SHOWN."""
    return record["wall_s"] if path == "wall_s" else stats.figure(record["summary"], path)


def error_of(real: float | None, predicted: float | None) -> float | None:
    """Relative, signed; None where either is not known. Something instead of nothing is infinitely off."""
    if real is None or predicted is None:
        return None
    if not real:
        return 0.0 if not predicted else float("inf")
    return predicted / real - 1


@dataclasses.dataclass(frozen=True)
class Values:
    """A figure of several runs. all: None where a run does not know it. level: the part of them in the range."""

    all: tuple[float | None, ...]
    level: float = 1.0

    @property
    def known(self) -> list[float]:
        """Nothing unless every run knows it: the others might be those with the better values."""
        found = [value for value in self.all if value is not None]
        return found if len(found) == len(self.all) else []

    @property
    def median(self) -> float | None:
        """Of all runs."""
        return statistics.median(self.known) if self.known else None

    @property
    def range(self) -> tuple[float, float] | None:
        """Of the middle of them, as much as `level` says."""
        return stats.span(self.known, self.level) if self.known else None

    @property
    def words(self) -> str:
        """For a table."""
        if self.median is None or self.range is None:
            return "not known"
        return f"{self.median:.4g}" + (f" ({self.range[0]:.4g}..{self.range[1]:.4g})" if len(self.all) > 1 else "")


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure: of the records, and of the simulated runs by ARMS."""

    figure: str
    measured: Values
    predicted: dict[str, Values]

    def error(self, arm: str = MODELLED) -> float | None:
        """Of the median prediction, relative to the median measured."""
        return error_of(self.measured.median, self.predicted[arm].median)

    @property
    def judged(self) -> bool:
        """Whether the verdict goes by it."""
        return self.figure in JUDGED and self.error() is not None

    def overlap(self, arm: str) -> bool | None:
        """Whether the ranges do; None where either is not known, or neither is more than one value."""
        real, predicted = self.measured, self.predicted[arm]
        if real.range is None or predicted.range is None or len(real.all) == len(predicted.all) == 1:
            return None
        return real.range[0] <= predicted.range[1] and predicted.range[0] <= real.range[1]

    def line(self) -> str:
        """For a terminal."""
        cells = [f"  {self.figure:21s} {self.measured.words:24s}"]
        for arm, values in self.predicted.items():
            error, overlap = self.error(arm), {True: "overlap", False: "apart", None: ""}[self.overlap(arm)]
            cells.append(f"{values.words:24s} {'' if error is None else format(error, '+.1%'):>7s} {overlap:7s}")
        return "  ".join(cells).rstrip() + ("" if self.figure in JUDGED else "   (shown only)")

    def kept(self) -> dict[str, Any]:
        """For a record. A number per arm, and its range in "ranges": a kept check of one run had only the numbers."""
        return {"figure": self.figure, "measured": self.measured.median, "measured_range": self.measured.range,
                "measured_each": self.measured.all, "judged": self.judged, **dict.fromkeys(ARMS),
                **{arm: values.median for arm, values in self.predicted.items()},
                "ranges": {arm: values.range for arm, values in self.predicted.items()},
                "overlap": {arm: self.overlap(arm) for arm in self.predicted}}


def head(arms: Sequence[str]) -> str:
    """Of the lines of rows."""
    columns = [f"  {'figure':21s} {'measured (range)':24s}", *(f"{arm + ' (10..90 %)':40s}" for arm in arms)]
    return "  ".join(columns).rstrip()


def rows(found: Sequence[records.Record], predicted: dict[str, list[dict[str, float | None]]]) -> list[Row]:
    """predicted: of each simulated run, its figures, by arm."""
    return [Row(path, Values(tuple(measured(record, path) for record in found)),
                {arm: Values(tuple(one[path] for one in runs), LEVEL) for arm, runs in predicted.items()})
            for path in SHOWN]


def verdict(found: Sequence[Row], limit: float) -> tuple[list[str], list[str]]:
    """Figures that are off by more than `limit`, and those that should be judged and cannot be."""
    judged = [(row.figure, row.error()) for row in found if row.figure in JUDGED]
    return ([name for name, error in judged if error is not None and abs(error) > limit],
            [name for name, error in judged if error is None])
