"""Compares formal runs of the same requests: ratios with intervals, the noise band, and a verdict for each figure.

    python worklogs/compare.py BASE.json OTHER.json [MORE.json ...] [--keep]

Records with one server, version and command are repeats of one arm; the first record's arm is the base, and every other
is compared with it. Order does not matter otherwise. Repeats say how much two runs of one thing differ (the noise
band); until an arm has three, --noise is the least that is assumed. Ratios are other / base: of requests in pairs (only
those that both answered), and of the whole run's figures. Intervals (95 %) come from drawing whole conversations, the
same for both arms; with fewer than six conversations there is none, only the range of the repeats' ratios, marked so.

Better or worse is said only where the whole interval lies outside the noise band; all else is no change, which is not
the proof that there is none. A figure that falls to 0, or becomes infinite, needs no interval.

The verdict of an arm follows from the gates' figures (weighted score, hit rate, success rate, P90 of TTFT, P10 of
output TPS) and the failure-adjusted ones: worse if one is worse and none better, better the other way round, mixed if
both. The others are named, but decide nothing: 18 figures are compared, each at 95 %, so that one may seem to differ by
chance.

A run that ended early and what --resume made of it are one run, and are refused together.

Runs that were disturbed (the client was slow, others used the machine's cores, the run ended early or took several
sittings) are refused, unless --any-health is given; then they are named.

Exit status: 0 no arm is worse than the base or mixed, 1 bad input, 3 one is.
"""
import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
from bench import definitions, records, stats  # noqa: E402

WORSE = 3
HEAD = ("figure", "base", "other", "ratio", "95 % interval", "noise", "n", "verdict")
# The figures that decide about an arm: those that the platform judges, and those that failures would flatter.
DECISIVE = tuple(path for path in stats.FIGURES
                 if path in {gate[1] for gate in definitions.GATES} or path.startswith("failure_adjusted."))


def run_of(record: records.Record) -> stats.Run:
    """What a comparison needs of a record."""
    return stats.Run(record["samples"], record["wall_s"], record["summary"], record["mode"])


def arms(found: list[records.Record]) -> dict[str, list[records.Record]]:
    """Records by arm, the first record's arm first.

    Raises:
        RecordError: one arm only, records that did not measure the same or by other definitions, or two of one run.
    """
    records.refuse_one_run_twice(found)
    for record in found:
        if record["definitions"] != definitions.VERSION:
            raise records.RecordError(f"{records.title(record)} has the figures of {record['definitions']}, and this "
                                      f"program computes {definitions.VERSION}: compare them by the commit that made "
                                      "it")
    grouped: dict[str, list[records.Record]] = {}
    for record in found:
        if differences := records.differences(found[0], record):
            raise records.RecordError(f"{records.name(found[0])} and {records.name(record)} did not measure the same: "
                                      + "; ".join(differences))
        grouped.setdefault(records.arm(record), []).append(record)
    if len(grouped) < 2:
        raise records.RecordError("all records are of one server, version and command; a comparison needs two "
                                  "(--by-record takes each record for an arm of its own)")
    return grouped


def overall(ratios: list[stats.Ratio]) -> str:
    """"better", "worse", "mixed" or "no change", by the figures of DECISIVE; then which these are, and the rest."""
    def names(said: str, decisive: bool) -> list[str]:
        return [ratio.name for ratio in ratios if ratio.verdict == said and (ratio.name in DECISIVE) == decisive]

    better, worse = names("better", True), names("worse", True)
    word = "mixed" if better and worse else "worse" if worse else "better" if better else "no change"
    notes = [("better", better), ("worse", worse), ("not reported", names("not reported", True)),
             ("others, better", names("better", False)), ("others, worse", names("worse", False))]
    return "; ".join([word, *(f"{title}: {', '.join(found)}" for title, found in notes if found)])


def number(value: float | None) -> str:
    """Four digits."""
    if value is None:
        return "-"
    return stats.shown(value, "{:.4g}" if abs(value) < 10_000 else "{:,.0f}")


def row(ratio: stats.Ratio) -> list[str]:
    """The cells of HEAD."""
    interval = ratio.bounds
    if ratio.interval is not None:
        interval = stats.between(ratio.interval, "{:.3f}")
        interval += "" if ratio.bounds == stats.LEVEL_WORDS else f" ({ratio.bounds})"
    return [ratio.name, number(ratio.base), number(ratio.other),
            "-" if ratio.ratio is None else stats.shown(ratio.ratio, "{:.3f}"), interval,
            f"{ratio.noise:.1%}{'' if ratio.measured else ' assumed'}", str(ratio.count), ratio.verdict]


def disturbed(found: list[records.Record], others: float = records.OTHERS_CORES) -> list[str]:
    """A line for each run whose figures are not the server's alone. others: cores that others may use."""
    return [f"{records.title(record)}: {'; '.join(why)}" for record in found
            if (why := records.disturbances(record, others))]


def compare(found: list[records.Record], by_record: bool = False, rounds: int = stats.ROUNDS,
            noise: float = stats.ASSUMED_NOISE, others: float = records.OTHERS_CORES) -> list[dict[str, Any]]:
    """Every arm against the first: {"base", "other" (names), "runs" [n, n], "verdict", "disturbed" (a line for each
    run that was), "ratios"}. others: cores that others may use.

    Raises:
        RecordError: see `arms`.
    """
    if by_record:
        found = [{**record, "server": {**record["server"], "command": f"#{index}"}}
                 for index, record in enumerate(found, 1)]
    grouped = list(arms(found).values())
    base = grouped[0]
    compared = []
    for other in grouped[1:]:
        ratios = stats.compare([run_of(one) for one in base], [run_of(one) for one in other], definitions.summary,
                               rounds=rounds, noise=noise)
        compared.append({"base": records.name(base[0]), "other": records.name(other[0]),
                         "runs": [len(base), len(other)], "verdict": overall(ratios),
                         "disturbed": disturbed([*base, *other], others), "ratios": ratios})
    return compared


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="two or more, the base's first")
    parser.add_argument("--by-record", action="store_true", help="no record is a repeat of another")
    parser.add_argument("--any-health", action="store_true", help="compare runs that were disturbed, too")
    parser.add_argument("--noise", type=float, default=stats.ASSUMED_NOISE,
                        help="the least band until one arm has three runs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=stats.ROUNDS, help="draws (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison there")
    parser.add_argument("--keep", action="store_true", help="keep it in remote_results/")
    options = parser.parse_args(arguments)
    if len(options.records) < 2:
        parser.error("a comparison needs two records")
    if options.rounds < 20:
        parser.error("--rounds: at least 20")
    if not 0 <= options.noise < 1:
        parser.error("--noise is a share, from 0 to 1")
    return options


def _plain(value: Any) -> Any:
    """For JSON, which has no infinite numbers."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return definitions.INFINITE if isinstance(value, float) and math.isinf(value) else value


def kept(options: argparse.Namespace, compared: list[dict[str, Any]]) -> dict[str, Any]:
    """The comparison as a record."""
    return {"kind": "formal-perf-comparison", **bench_record.commit(),
            "command": bench_record.without_paths(["compare.py", *map(str, options.records)]),
            "definitions": definitions.VERSION, "records": [path.name for path in options.records],
            "rounds": options.rounds,
            "comparisons": [{**one, "ratios": [_plain(dataclasses.asdict(ratio)) for ratio in one["ratios"]]}
                            for one in compared]}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    try:
        found = [records.read(path) for path in options.records]
        # First of all: an ended run would be refused as disturbed, with an advice that does not help here.
        records.refuse_one_run_twice(found, [path.name for path in options.records])
        if not options.any_health:
            records.refuse_disturbed(found, [path.name for path in options.records])
        compared = compare(found, options.by_record, options.rounds, options.noise)
        for one in compared:
            print(f"{one['other']} ({one['runs'][1]} runs) against {one['base']} ({one['runs'][0]}): {one['verdict']}")
            for line in one["disturbed"]:
                print(f"  DISTURBED: {line}")
            cells = [list(HEAD), *(row(ratio) for ratio in one["ratios"])]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            for line in cells:
                print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        record = kept(options, compared)
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if options.keep:
            print(f"kept as {bench_record.keep('formal-perf-comparison', record).name}")
    except (records.RecordError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    return WORSE if any(one["verdict"].startswith(("worse", "mixed")) for one in compared) else 0


if __name__ == "__main__":
    sys.exit(main())
