"""Would a server pass the evaluation platform's functional checks? Runs against any base URL.

    python -m tests.acceptance --base-url http://127.0.0.1:8000 --model llm [--report FILE [--resume]]

Sends the requests of all 56 checks one by one, in the platform's order, then the long-output module, and judges
what the model says by the platform's rules. A line per check: PASS, FAIL or SKIP, seconds, what was seen. A skip is out
of the count, as on the platform; four checks are not scored at all. Exit status: 0 nothing that is scored failed, 1
something did, 2 wrong use or no server, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.harness import LONG_OUTPUT, Harness
from tests.acceptance.questions import QUESTIONS
from tests.acceptance.table import NOT_SCORED
from tests.conformance.checks import Outcome
from worklogs import bench_record

SHOWN = {"ok": "PASS", "failed": "FAIL", "skipped": "SKIP"}
KINDS = ("ours", "vllm", "llama")
_TICK_S = 1.0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises SystemExit(2)."""
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, metavar="URL", help="of the server, with or without /v1")
    parser.add_argument("--model", default="llm", metavar="NAME", help="the served name (default llm)")
    parser.add_argument("--api-key", default="none", metavar="KEY")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS",
                        help="that a request may take (default 300, the platform's; the long-output module has none)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN",
                        help=f"only checks whose id matches, for example 't2_*' or {LONG_OUTPUT}; may be repeated")
    parser.add_argument("--no-long-output", action="store_true", help="leave the long-output module out")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N",
                        help="requests at once in the long-output module (default 4, the platform's)")
    parser.add_argument("--long-tokens", type=int, default=8192, metavar="N",
                        help="tokens that each of them is forced to yield (default 8192, the platform's)")
    parser.add_argument("--no-skip", action="store_true", help="count a skipped check that is scored as failed")
    parser.add_argument("--report", type=Path, metavar="FILE", help="JSON report, written after every check")
    parser.add_argument("--resume", action="store_true",
                        help="keep what passed by the report of an earlier run against the same server and model")
    parser.add_argument("--keep", choices=KINDS, help="kind of the server: keep the report as a record for the ledger")
    parser.add_argument("--server-version", default="", help="for the record, of a server that does not tell it")
    parser.add_argument("--server-command", default="", help="for the record: how the server was started")
    parser.add_argument("--no-progress", action="store_true",
                        help="do not show on stderr what is under way (only shown on a terminal anyway)")
    args = parser.parse_args(arguments)
    args.checks = chosen(args.only, not args.no_long_output)
    if not args.checks:
        parser.error(f"no check matches {' '.join(args.only)}")
    if args.resume and not args.report:
        parser.error("--resume needs --report")
    if args.report and args.report.is_dir():
        parser.error(f"--report {args.report} is a folder")
    if args.concurrency < 1 or args.long_tokens < 1 or not args.timeout > 0:
        parser.error("--concurrency, --long-tokens and --timeout must be above 0")
    return args


def chosen(patterns: Sequence[str], long_output: bool) -> list[str]:
    """The ids that match one of the patterns (all without any), in the platform's order."""
    return [name for name in [*QUESTIONS, *([LONG_OUTPUT] if long_output else [])]
            if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


class Report:
    """The report of a run, and its file. kept: outcomes of an earlier run that need not be repeated."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ValueError, OSError for an earlier report that cannot be gone on from."""
        self._file: Path | None = args.report
        self._values: dict[str, Any] = {
            "base_url": args.base_url, "model": args.model, "timeout_s": args.timeout, "concurrency": args.concurrency,
            "long_tokens": args.long_tokens}
        self.kept: dict[str, Outcome] = {}
        if args.resume and args.report.exists():
            try:
                earlier = json.loads(args.report.read_text(encoding="utf-8"))
                other = [name for name, value in self._values.items() if earlier.get(name) != value]
                self.kept = {one["id"]: Outcome(one["id"], "ok", one["why"], one["seconds"])
                             for one in earlier["checks"] if one["status"] == "PASS"}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{args.report} is no report of this program, or a broken one") from error
            if other:
                raise ValueError(f"{args.report} is of a run with another {', '.join(other)}")
        self._values["utc"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._since = time.monotonic()
        self.found: dict[str, Any] = {}

    def write(self, outcomes: Sequence[Outcome], **more: Any) -> None:
        """``found``, and the whole file anew. more: further fields, kept for the next time."""
        self._values.update(more)
        checks = [{"id": one.id, "status": SHOWN[one.verdict], "scored": is_scored(one.id), "why": one.why,
                   "seconds": round(one.seconds, 2)} for one in outcomes]
        self.found = {**self._values, "seconds": round(time.monotonic() - self._since, 1), "totals": totals(outcomes),
                      "checks": checks}
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        half = self._file.with_name(self._file.name + ".part")
        half.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        half.replace(self._file)


def is_scored(name: str) -> bool:
    return name not in NOT_SCORED


def totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts of the scored checks by status, and the verdict on the long-output module (None: not run)."""
    scored = [one for one in outcomes if is_scored(one.id) and one.id != LONG_OUTPUT]
    module = next((one for one in outcomes if one.id == LONG_OUTPUT), None)
    return {**{SHOWN[verdict]: sum(one.verdict == verdict for one in scored) for verdict in SHOWN},
            LONG_OUTPUT: SHOWN[module.verdict] if module else None}


def line(outcome: Outcome) -> str:
    """The line that tells of a check."""
    apart = "" if is_scored(outcome.id) else "(not scored) "
    why = f"{apart}{outcome.why}".splitlines()[0] if apart or outcome.why else ""
    # A server's own words must not move a terminal's cursor or colour it.
    why = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in why)
    return f"{SHOWN[outcome.verdict]} {outcome.id:28s} {outcome.seconds:6.1f} s  {why:.300}".rstrip()


def conclusion(outcomes: Sequence[Outcome]) -> str:
    """The last line: of how many scored checks how many passed."""
    counts = totals(outcomes)
    skipped = f", {counts['SKIP']} skipped (out of the count)" if counts["SKIP"] else ""
    module = f"; long output: {counts[LONG_OUTPUT]}" if counts[LONG_OUTPUT] else ""
    return f"{counts['PASS']} of {counts['PASS'] + counts['FAIL']} scored checks passed{skipped}{module}"


@contextlib.contextmanager
def progress(text: str, on: bool) -> Iterator[None]:
    """Shows on stderr what is under way and for how long."""
    if not on:
        yield
        return
    over, since = threading.Event(), time.monotonic()

    def show() -> None:
        while not over.wait(_TICK_S):
            print(f"\r{text} {time.monotonic() - since:.0f} s", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def run_all(args: argparse.Namespace, harness: Harness, report: Report, facts: Mapping[str, Any]) -> list[Outcome]:
    """All chosen checks, each told as soon as it is known."""
    shows = not args.no_progress and sys.stderr.isatty()
    outcomes: list[Outcome] = []
    for number, name in enumerate(args.checks, 1):
        kept = report.kept.get(name)
        if kept is None:
            with progress(f"[{number}/{len(args.checks)}] {name}", shows):
                outcomes.append(harness.run_long_output(args.concurrency, args.long_tokens) if name == LONG_OUTPUT
                                else harness.run(name))
        else:
            outcomes.append(kept)
        print(line(outcomes[-1]) + ("  (kept)" if kept else ""), flush=True)
        # What passed earlier and has not had its turn would be lost by an interruption.
        later = [report.kept[other] for other in args.checks[number:] if other in report.kept]
        report.write([*outcomes, *later], **facts)
    return outcomes


def passed(outcomes: Sequence[Outcome], no_skip: bool) -> bool:
    """Whether nothing that is scored failed, or, with no_skip, was skipped."""
    bad = ("failed", "skipped") if no_skip else ("failed", )
    return not any(one.verdict in bad and is_scored(one.id) for one in outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; gives its exit status."""
    args = parsed(arguments)
    harness = Harness(args.base_url, args.model, args.api_key, args.timeout)
    try:
        report = Report(args)
        facts = asked_about(harness, args.model)
        # A file that cannot be written is told of before anything is asked.
        report.write([report.kept[name] for name in args.checks if name in report.kept], **facts)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        print(f"acceptance: {args.base_url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"{args.base_url}: {harness.server}; max_model_len {facts['max_model_len']}", flush=True)
    try:
        outcomes = run_all(args, harness, report, facts)
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from a --report", file=sys.stderr)
        return 130
    print(conclusion(outcomes))
    if args.keep:
        print(f"kept as {keep(args.keep, args.server_version, args.server_command, report.found).name}")
    return 0 if passed(outcomes, args.no_skip) else 1


def keep(kind: str, version: str, command: str, found: Mapping[str, Any],
         folder: Path = bench_record.RESULTS) -> Path:
    """A report as a record. kind, version, command: of the server; version: what it says of itself counts more."""
    shown = {name: value for name, value in found.items() if name != "base_url"}
    return bench_record.keep_of_server("acceptance", kind, found["version"], version, command, shown, folder)


def asked_about(harness: Harness, model: str) -> dict[str, Any]:
    """What the report says of the server. Raises httpx.HTTPError where there is none, ValueError where it does not
    serve the model."""
    cards = harness.target.get("/v1/models")
    if cards.status != 200:
        raise ValueError(f"/v1/models: {cards}")
    try:
        names = {card["id"]: card for card in cards.body["data"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"/v1/models lists no models: {cards.text!r:.200}") from error
    if model not in names:
        raise ValueError(f"it serves {', '.join(names)}, not {model} (--model)")
    server, version = harness.probe(), harness.target.get("/version")
    return {"version": version.body if version.status == 200 else None, "max_model_len": names[model].get(
        "max_model_len"), "direct": server.direct, "thinking_switch": server.spelling,
        "thinking_switch_works": server.found, "thinks_by_default": server.thinks}
