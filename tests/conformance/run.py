"""Does a server speak what clients of OpenAI's API rely on? Runs against any base URL; a line per check, a JSON report.

    python -m tests.conformance.run --base-url http://127.0.0.1:8000 [--model llm] [--report FILE]

Groups: `platform` (the checks of the evaluation platform), `history` (what its recorded requests hold), `clients`
(requests recorded from real clients). What the model says is judged by `tests.acceptance`. With `--keep` the report
also goes to remote_results/, for worklogs/ledger.py. Exit status: 0 all passed or skipped, 1 some failed, 2 wrong use.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import sys
import time
from pathlib import Path

import httpx

from tests.conformance import acceptance, clients, history
from tests.conformance.checks import Check, Outcome, run_checks
from tests.conformance.target import Target
from worklogs import bench_record

CHECKS: list[Check] = [*acceptance.CHECKS, *history.CHECKS, *clients.CHECKS]


def chosen(patterns: list[str], slow: bool) -> list[Check]:
    """The checks whose id matches one of the patterns (all without any); slow ones only if wanted."""
    return [check for check in CHECKS if (slow or not check.slow)
            and (not patterns or any(fnmatch.fnmatch(check.id, pattern) for pattern in patterns))]


def line(outcome: Outcome) -> str:
    why = f"   {outcome.why.splitlines()[0]:.300}" if outcome.why else ""
    return f"{outcome.verdict:7s} {outcome.id:60s} {outcome.seconds:6.1f} s{why}"


def report(target: Target, outcomes: list[Outcome], started: float) -> dict[str, object]:
    """What a run found, as plain JSON values."""
    try:
        version = target.get("/version")
        said = version.body if version.status == 200 else None
    except httpx.HTTPError:
        # A server that a check ended is reported, too.
        said = None
    totals = {verdict: sum(outcome.verdict == verdict for outcome in outcomes)
              for verdict in ("ok", "failed", "skipped")}
    return {"server": said, "model": target.model, "seconds": round(time.monotonic() - started, 1),
            "clients": {name: importlib.metadata.version(name) for name in ("openai", "anthropic")},
            "totals": totals, "checks": [{"id": outcome.id, "verdict": outcome.verdict, "why": outcome.why,
                                          "seconds": round(outcome.seconds, 2)} for outcome in outcomes]}


def keep(kind: str, version: str, command: str, found: dict[str, object], folder: Path = bench_record.RESULTS) -> Path:
    """The report as a record. kind, version, command: of the server; version: what it says of itself counts more."""
    return bench_record.keep_of_server("conformance", kind, found["server"], version, command, found, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, help="with or without /v1")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--slow", action="store_true", help="also the checks that take minutes on a CPU")
    parser.add_argument("--jobs", type=int, default=8, help="requests at a time (default 8; the platform sends 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds without a byte (default 300)")
    parser.add_argument("--report", type=Path, help="file for the JSON report")
    parser.add_argument("--keep", choices=["ours", "vllm", "llama"], help="kind of the server: keep a record")
    parser.add_argument("--server-version", default="", help="kept; ours and vLLM say it themselves")
    parser.add_argument("--server-command", default="", help="how it was started; kept without paths")
    parser.add_argument("checks", nargs="*", help="patterns of ids, for example 'platform/t*' (default: all)")
    args = parser.parse_args()
    checks = chosen(args.checks, args.slow)
    if not checks:
        parser.error(f"no check matches {' '.join(args.checks)}")
    target = Target(args.base_url, args.model, args.api_key, args.timeout)
    started = time.monotonic()
    outcomes = run_checks(checks, target, args.jobs, lambda outcome: print(line(outcome), flush=True))
    found = report(target, outcomes, started)
    if args.report:
        args.report.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if args.keep:
        print(f"kept as {keep(args.keep, args.server_version, args.server_command, found).name}")
    print(", ".join(f"{count} {verdict}" for verdict, count in found["totals"].items()))  # type: ignore[attr-defined]
    return 1 if any(outcome.verdict == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
