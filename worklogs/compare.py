"""Compares formal runs of the same requests: ratios with intervals, the noise band, and a verdict for each figure.

    python worklogs/compare.py BASE.json OTHER.json [MORE.json ...] [--keep]

Records with one server, version and command are repeats of one arm; the first record's arm is the base, and every other
is compared with it. Order does not matter otherwise. Repeats say how much two runs of one thing differ (the noise
band); without any, --noise is assumed. Ratios are other / base: of requests in pairs (only those that both answered),
and of the whole run's figures. Intervals come from drawing whole conversations, the same for both arms.

Better or worse is said only where the whole interval lies outside the noise band; all else is no change, which is not
the proof that there is none. The run is better if its weighted score is and nothing else is worse, and worse the other
way round.

Exit status: 0 no arm is worse than the base, 1 bad input, 3 one is.
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


def run_of(record: records.Record) -> stats.Run:
    """What a comparison needs of a record."""
    return stats.Run(record["samples"], record["wall_s"], record["summary"], record["mode"])


def arms(found: list[records.Record]) -> dict[str, list[records.Record]]:
    """Records by arm, the first record's arm first.

    Raises:
        RecordError: one arm only, or records that did not measure the same.
    """
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
    """One word for an arm, and which figures disagree with it."""
    worse = [ratio.name for ratio in ratios if ratio.verdict == "worse"]
    better = [ratio.name for ratio in ratios if ratio.verdict == "better"]
    score = next(ratio.verdict for ratio in ratios if ratio.name == "weighted")
    if score == "worse" or (worse and not better):
        return "worse" + (f", but better: {', '.join(better)}" if better else "")
    if score == "better" or (better and not worse):
        return "better" + (f", but worse: {', '.join(worse)}" if worse else "")
    return f"no change; better: {', '.join(better)}; worse: {', '.join(worse)}" if worse else "no change"


def number(value: float | None) -> str:
    """Four digits."""
    if value is not None and math.isinf(value):
        return definitions.INFINITE
    return "-" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def row(ratio: stats.Ratio) -> list[str]:
    """The cells of HEAD."""
    interval = "-" if ratio.interval is None else f"{ratio.interval[0]:.3f} to {ratio.interval[1]:.3f}"
    return [ratio.name, number(ratio.base), number(ratio.other), "-" if ratio.ratio is None else f"{ratio.ratio:.3f}",
            interval, f"{ratio.noise:.1%}{'' if ratio.measured else ' assumed'}", str(ratio.count), ratio.verdict]


def compare(found: list[records.Record], by_record: bool = False, rounds: int = stats.ROUNDS,
            noise: float = stats.ASSUMED_NOISE) -> list[dict[str, Any]]:
    """Every arm against the first: {"base", "other" (names), "runs" [n, n], "verdict", "ratios"}.

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
                         "runs": [len(base), len(other)], "verdict": overall(ratios), "ratios": ratios})
    return compared


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="two or more, the base's first")
    parser.add_argument("--by-record", action="store_true", help="no record is a repeat of another")
    parser.add_argument("--noise", type=float, default=stats.ASSUMED_NOISE,
                        help="band without repeats (default: %(default)s)")
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


def _plain(ratio: stats.Ratio) -> dict[str, Any]:
    """For JSON, which has no infinite numbers."""
    found = dataclasses.asdict(ratio)
    return {name: definitions.INFINITE if isinstance(value, float) and math.isinf(value) else value
            for name, value in found.items()}


def kept(options: argparse.Namespace, compared: list[dict[str, Any]]) -> dict[str, Any]:
    """The comparison as a record."""
    return {"kind": "formal-perf-comparison", **bench_record.commit(),
            "command": bench_record.without_paths(["compare.py", *map(str, options.records)]),
            "definitions": definitions.VERSION, "records": [path.name for path in options.records],
            "rounds": options.rounds,
            "comparisons": [{**one, "ratios": [_plain(ratio) for ratio in one["ratios"]]}
                            for one in compared]}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    try:
        compared = compare([records.read(path) for path in options.records], options.by_record, options.rounds,
                           options.noise)
        for one in compared:
            print(f"{one['other']} ({one['runs'][1]} runs) against {one['base']} ({one['runs'][0]}): {one['verdict']}")
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
    return WORSE if any(one["verdict"].startswith("worse") for one in compared) else 0


if __name__ == "__main__":
    sys.exit(main())
