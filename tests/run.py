"""The whole suite, as `make test` and CI run it: checks of the source, and each suite of tests/ in its own process.

Each suite runs alone in its process because an engine leaves distributed state behind, and two run at a time because
most of a suite is one thread of Python. Prints the time of every suite and ends with the line
"N passed, N failed, N skipped".
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTHON_SOURCES = ["patches", "vllm_overrides", "worklogs", "tests"]
# Started first, so that the last process to finish is a short one. A suite that is not named here comes after them.
LONGEST_FIRST = ["models", "conformance", "e2e", "meaning", "core", "worker", "entrypoints", "executor", "overlay",
                 "submission", "patches", "worklogs"]
NO_TESTS = 5        # pytest's exit status when it collected none
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclass
class Result:
    name: str
    seconds: float
    returncode: int
    output: str
    is_pytest: bool
    may_be_empty: bool

    @property
    def counts(self) -> dict[str, int]:
        """Outcomes in pytest's closing line; any other check counts as one test."""
        if not self.is_pytest:
            return {"passed": int(not self.returncode), "failed": int(bool(self.returncode)), "skipped": 0}
        closing = [line for line in self.output.splitlines() if re.search(r" in [\d.]+s\b", line)]
        found = {kind.rstrip("s") if kind.startswith("error") else kind: int(n)
                 for n, kind in COUNTS.findall(closing[-1])} if closing else {}
        failed = found.get("failed", 0) + found.get("error", 0)
        if self.returncode and not failed and not (self.returncode == NO_TESTS and self.may_be_empty):
            failed = 1
        passed = found.get("passed", 0)
        return {"passed": passed, "failed": failed, "skipped": found.get("skipped", 0)}


def run(name: str, command: list[str], environment: dict[str, str] | None = None) -> Result:
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, errors="replace")
    return Result(name, time.monotonic() - start, done.returncode, done.stdout, "pytest" in command, "long" in command)


def lint_commands() -> dict[str, list[str]]:
    sources = [name for name in PYTHON_SOURCES if (ROOT / name).is_dir()]
    return {
        "lint (ruff)": [str(BIN / "ruff"), "check", *sources],
        "types (mypy)": [str(BIN / "mypy"), "patches", "vllm_overrides/overlay"],
        "deployed overlay (verify)": ["bash", "patch_ops.sh", "verify"],
    }


def suites() -> list[str]:
    names = sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py")))
    rank = {name: index for index, name in enumerate(LONGEST_FIRST)}
    return sorted(names, key=lambda name: rank.get(name, len(rank)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="suites at a time (default 2)")
    parser.add_argument("--long", action="store_true", help="only the tests marked long; keeps the result")
    parser.add_argument("--lint-only", action="store_true")
    parser.add_argument("suite", nargs="*", help="names of folders in tests/ (default: all)")
    args = parser.parse_args()
    os.environ.setdefault("PYTHON", sys.executable)

    jobs: dict[str, list[str]] = {}
    if not args.lint_only:
        jobs.update({f"tests/{name}": [sys.executable, "-m", "pytest", "-q", f"tests/{name}", "--durations=5",
                                       *(["-m", "long"] if args.long else [])] for name in args.suite or suites()})
    if not args.long and not args.suite:
        jobs.update(lint_commands())

    results, totals = run_all(jobs, args.jobs)
    if args.long:
        keep(results, totals, "test-long")
    return conclude(totals)


def run_all(jobs: dict[str, list[str]], at_a_time: int,
            environment: dict[str, str] | None = None) -> tuple[list[Result], dict[str, int]]:
    """Runs the commands and prints what became of each. Returns the results and the sums of their counts."""
    start = time.monotonic()
    results: list[Result] = []
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        started = [pool.submit(run, *job, environment) for job in jobs.items()]
        for future in concurrent.futures.as_completed(started):
            result = future.result()
            results.append(result)
            if result.counts["failed"]:
                print(f"\n######## {result.name}: FAILED (exit {result.returncode})\n{result.output}", flush=True)
            elif result.counts["skipped"]:
                print("\n".join(line for line in result.output.splitlines() if line.startswith("SKIPPED")), flush=True)
            print(f"{result.name:40s} {result.seconds:7.1f} s   {result.counts}", flush=True)

    totals = {kind: sum(result.counts[kind] for result in results) for kind in ("passed", "failed", "skipped")}
    print(f"\n{'suite':40s} {'seconds':>7s}")
    for result in sorted(results, key=lambda result: -result.seconds):
        print(f"{result.name:40s} {result.seconds:7.1f}")
    print(f"{'wall':40s} {time.monotonic() - start:7.1f}")
    return results, totals


def conclude(totals: dict[str, int]) -> int:
    """Prints the closing line and returns the exit status."""
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    if not totals["passed"]:
        print("nothing was tested", file=sys.stderr)
        return 1
    return 1 if totals["failed"] else 0


def keep(results: list[Result], totals: dict[str, int], kind: str, **more: object) -> None:
    """Writes the results to remote_results/, under their time and `kind`. more: further fields of the record."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, capture_output=True).stdout.strip()
    now = datetime.datetime.now(datetime.timezone.utc)
    path = ROOT / "remote_results" / f"{now:%Y%m%d-%H%M%S}_{kind}.json"
    path.parent.mkdir(exist_ok=True)
    suites = [{"name": result.name, "seconds": round(result.seconds, 1), **result.counts} for result in results]
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    record = {"kind": kind, "utc": now.isoformat(timespec="seconds"), "commit": commit,
              "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
              "machine": f"{os.cpu_count()} x {model.group(1) if model else platform.machine()}, "
                         f"Python {platform.python_version()}",
              **more, "totals": totals, "suites": suites}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"kept in {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
