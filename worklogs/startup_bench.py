"""Starts the server as computility-run.yaml says, until a token has come; says what each phase took; keeps it all.

    python worklogs/startup_bench.py [NAME=VALUE ...] [--starts 3]
    MAX_MODEL_LEN=245000 bash worklogs/remote_scripts/start_platform_245k_repro.sh

A start is over when a streamed request has brought a token, not when a port is open. Phases end with lines of the
server's own log and with what is seen from outside; their seconds count from the start of the process. What the server
says itself of its phases is kept beside that.

The log (without paths, names and addresses of this machine) and a record with the command, the names of what was
overridden, versions, and the phases of every start go to remote_results/<date>-<topic>/, also of a start that failed:
exit status, last lines, the phase in which it failed and what can be done about it. The server is ended with all that
it started (SIGTERM to its group; after --patience seconds SIGKILL, which is said), unless --keep.

Whether the weights lay in main memory before a start (page cache) is told where the system tells it; --page-cache drop
puts them out before every start, alternate before every second one.

--resume goes on with an unfinished series of this topic.

Exit status: 0 every start brought a token, 1 bad input, 2 the command line, 3 a start failed, 130 interrupted.

Overrides, from the environment or as NAME=VALUE words, which win and are kept in the record with the command line:
"""
import argparse
import asyncio
import contextlib
import datetime
import hashlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
from bench import definitions, micro_tables, page_cache, platform_start, start_log  # noqa: E402
from bench.client import Client  # noqa: E402
from bench.launched import Launched  # noqa: E402
from bench.progress import Progress  # noqa: E402
from formal_perf_bench import INTERRUPTED, CannotRun, Partial, count, positive  # noqa: E402

FAILED = 3
TOKENS, POLL_S = 8, 0.1
PACKAGES = ("vllm", "torch", "transformers", "tokenizers", "numpy")
Start = dict[str, Any]


# What ends the bench, and the server with it; SIGHUP when an operator's connection breaks.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """Told to end. Its words say whether something is left to resume."""


@contextlib.contextmanager
def handled(handler: Any) -> Iterator[None]:
    """With this handler for ENDING."""
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


class Series:
    """The starts of one run."""

    def __init__(self, plan: platform_start.Plan, options: argparse.Namespace, partial: Partial) -> None:
        self.plan, self.options, self.partial = plan, options, partial
        earlier = [sample["folder"] for sample in partial.samples.values()]
        self.folder = options.out / (earlier[0] if earlier else f"{_now():%Y-%m-%d}-{options.topic}")
        self.files = page_cache.weights(Path(plan.option("--model") or ""))
        self.progress = Progress(options.starts * len(start_log.NAMES), not options.no_progress)
        self._live = bench_record.ROOT / ".cache" / "startup"

    def run(self) -> None:
        """Starts and ends the server as often as asked for; the first start that fails is the last.

        Raises:
            Interrupted: the server that ran was ended, and its start is not kept.
        """
        for number in range(self.options.starts):
            if number in self.partial.samples:
                continue
            start = self._one(number)
            self.partial.add(start)
            if start["failure"] is not None:
                break
        self.progress.close()

    def _one(self, number: int) -> Start:
        how = self.options.page_cache
        if how == "drop" or (how == "alternate" and number % 2 == 0):
            page_cache.drop(self.files)
        resident = page_cache.resident(self.files)
        self._live.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{_now():%Y%m%d-%H%M%S}_start-{number + 1}.log"
        live = self._live / name
        say(f"start {number + 1} of {self.options.starts}, weights in main memory: "
            f"{'not measured' if resident is None else f'{resident:.0%}'}")
        server = Launched(self.plan.command, self.plan.environment, live)
        marks, ended, kept = start_log.Milestones(), None, False
        try:
            code, first, why = self._watch(server, marks, number)
            kept = self.options.keep and why is None
        finally:
            # A second signal must not leave a server behind.
            with handled(signal.SIG_IGN):
                if not kept:
                    ended = server.end(self.options.patience)
            server.close()
            text = start_log.cleaned(live.read_text(encoding="utf-8", errors="replace"))
            (self.folder / name).write_text(text, encoding="utf-8")
            if not kept:
                live.unlink()
        if ended and ended["killed"]:
            say(f"  it did not end within {self.options.patience:g} s of SIGTERM and was killed")
        failure = None if why is None else {
            "phase": marks.phase, "why": start_log.cleaned(why), "exit": code,
            "last_lines": text.rstrip("\n").split("\n")[-start_log.LAST_LINES:], "advice": start_log.advice(text, code)}
        if kept:
            say(f"  the server goes on, on port {self.plan.port}. Its log: .cache/startup/{name}. End it by: "
                f"kill -- -{server.group}")
        return {"index": number, "sent_s": 0.0, "last_s": round(server.seconds(), 3), "folder": self.folder.name,
                "log": name, "resident": resident, "page_cache": page_cache.state(resident), "phases": marks.table(),
                "server_says": marks.account, "deployed": marks.deployed, "first_token": first, "ended": ended,
                "failure": failure}

    def _watch(self, server: Launched, marks: start_log.Milestones, number: int) -> tuple[
            int | None, dict[str, Any] | None, str | None]:
        """(exit status where it ended, what the first request brought, why it failed)."""
        listens, limit = False, self.options.timeout
        while server.seconds() < limit:
            code = server.code
            for name in marks.feed(server.written(), server.seconds()):
                self._tell(number, name, marks)
            if code is not None:
                return code, None, f"the server ended with {code}"
            if not listens and _healthy(self.plan.port):
                listens = True
                marks.reached(start_log.HTTP, server.seconds())
                self._tell(number, start_log.HTTP, marks)
                sent = server.seconds()
                found = asyncio.run(self._ask(limit - sent))
                # The lines that were written while it answered.
                marks.feed(server.written(), server.seconds())
                if found["class"] != definitions.OK or not (found["completion_tokens"] or found["deltas"]):
                    return server.code, found, f"no token came: {found['class']}: {found['error']}"
                # A token without text shows only in what comes behind it.
                took = found["first_s"] if found["first_s"] is not None else found["last_s"]
                marks.reached(start_log.TOKEN, sent + took)
                self._tell(number, start_log.TOKEN, marks)
                return None, {"seconds": round(took, 3), "completion_tokens": found["completion_tokens"]}, None
            time.sleep(POLL_S)
        return None, None, f"no token within {limit:g} s"

    async def _ask(self, timeout: float) -> dict[str, Any]:
        client = Client(f"http://127.0.0.1:{self.plan.port}", max(1.0, timeout),
                        self.plan.environment.get("VLLM_API_KEY"))
        began = client.clock()
        return await client.stream({
            "model": self.plan.model_name, "messages": [{"role": "user", "content": "What is 2+2?"}], "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": TOKENS, "min_tokens": TOKENS,
            "ignore_eos": True}, began)

    def _tell(self, number: int, name: str, marks: start_log.Milestones) -> None:
        row = next(row for row in marks.table() if row["phase"] == name)
        say(f"  {row['at_s']:8.1f} s  {name} (+{row['took_s']:.1f} s)")
        self.progress.show(number * len(start_log.NAMES) + start_log.NAMES.index(name) + 1, name)


def say(words: str) -> None:
    """A line on stdout, whole, wherever the progress line stands."""
    print(f"{chr(13) + chr(27) + '[K' if sys.stderr.isatty() and sys.stdout.isatty() else ''}{words}", flush=True)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _healthy(port: int) -> bool:
    """Whether /health says 200."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            return connection.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def summary(starts: list[Start]) -> list[dict[str, Any]]:
    """Per state of the page cache: seconds of every phase over the starts that brought a token."""
    found = []
    for state in dict.fromkeys(start["page_cache"] for start in starts):
        good = [start["phases"] for start in starts if start["page_cache"] == state and start["failure"] is None]
        rows = []
        for place, name in enumerate(start_log.NAMES):
            row: dict[str, Any] = {"phase": name}
            for figure in ("took_s", "at_s"):
                values = [phases[place][figure] for phases in good if phases[place][figure] is not None]
                row[figure] = {"median": statistics.median(values), "least": min(values), "most": max(values),
                               "count": len(values)} if values else None
            rows.append(row)
        found.append({"page_cache": state, "starts": len(good), "phases": rows})
    return found


def versions(plan: platform_start.Plan) -> dict[str, str | None]:
    """Python and packages of the server's interpreter, from their metadata: nothing is imported."""
    code = ("import importlib.metadata as m, json, platform\nfound = {'python': platform.python_version()}\n"
            f"for name in {PACKAGES!r}:\n    try: found[name] = m.version(name)\n"
            "    except m.PackageNotFoundError: found[name] = None\nprint(json.dumps(found))")
    done = subprocess.run([plan.command[0], "-c", code], env=plan.environment, text=True, capture_output=True)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {}


def record_of(series: Series, words: list[str]) -> dict[str, Any]:
    """What is kept."""
    plan, options = series.plan, series.options
    starts = [series.partial.samples[index] for index in sorted(series.partial.samples)]
    return {"kind": "startup", "server": {"kind": "ours", "command": bench_record.without_paths(plan.command),
                                          "deployed": next((start["deployed"] for start in starts), None)},
            **bench_record.commit(), "machine": bench_record.machine(), "command": bench_record.without_paths(words),
            "topic": options.topic, "file": {"name": options.yaml.name, "sha256": plan.source},
            "overridden": plan.overridden, "versions": versions(plan), "weights_bytes": sum(
                path.stat().st_size for path in series.files), "page_cache": options.page_cache,
            "asked": options.starts, "sittings": series.partial.sittings, "summary": summary(starts),
            "starts": starts}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=f"{__doc__}\n{platform_start.listing()}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="NAME=VALUE")
    add("--starts", type=count(1), default=1, help="how often (default: %(default)s)")
    add("--topic", default="startup", help="names the folder of the result (default: %(default)s)")
    add("--yaml", type=Path, default=bench_record.ROOT / "computility-run.yaml", help="default: this repository's")
    add("--timeout", type=positive, default=1800.0, help="seconds until a token must have come (default: %(default)s)")
    add("--patience", type=positive, default=60.0,
        help="seconds that the server has to end after SIGTERM (default: %(default)s)")
    add("--page-cache", choices=("as-is", "drop", "alternate"), default="as-is", help="of the weights, before a start")
    add("--keep", action="store_true", help="leave the server running (with one start)")
    add("--out", type=Path, default=bench_record.RESULTS, help="where the result's folder is made")
    add("--resume", action="store_true", help="go on with the unfinished series of this topic")
    add("--no-progress", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    if not bench_record.NAME.fullmatch(options.topic):
        parser.error(f"--topic {options.topic!r}: lower-case letters, digits, dots and dashes")
    if options.keep and options.starts != 1:
        parser.error("--keep: with one start only")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    words = [Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)]

    def told(number: int, frame: Any) -> None:
        raise Interrupted("; nothing is left to resume")

    try:
        with handled(told):
            return _main(options, words)
    except Interrupted as error:
        print(f"startup_bench: interrupted; the server was ended{error}", file=sys.stderr)
        return INTERRUPTED
    except (CannotRun, platform_start.StartError, OSError) as error:
        print(f"startup_bench: {error}", file=sys.stderr)
        return 1


def _main(options: argparse.Namespace, words: list[str]) -> int:
    plan = platform_start.plan(options.yaml, options.overrides)
    platform_start.check(plan)
    if _listens(plan.port):
        raise CannotRun(f"port {plan.port} is taken: end what listens there, or give PORT=")
    key = {"file": plan.source, "command": hashlib.sha256(json.dumps(plan.command).encode()).hexdigest(),
           "overridden": plan.overridden, "starts": options.starts, "page_cache": options.page_cache}
    with contextlib.closing(Partial(options.out / f"{options.topic}.startup.partial", key, options.resume)) as partial:
        return _measure(Series(plan, options, partial), words)


def _measure(series: Series, words: list[str]) -> int:
    plan, options, partial = series.plan, series.options, series.partial
    say(f"{options.yaml.name}, overridden: {', '.join(plan.overridden) or 'nothing'}")
    say(f"  {bench_record.without_paths(plan.command)}")
    try:
        series.run()
    except Interrupted:
        if partial.samples:
            raise Interrupted(f" after {len(partial.samples)} of {options.starts} starts; --resume goes on") from None
        raise
    finally:
        if not partial.samples:
            partial.done()
    record = record_of(series, words)
    print(micro_tables.startup([record]), end="")
    path = bench_record.keep(f"startup-{options.topic}", record, series.folder)
    partial.done()
    print(f"kept as {series.folder.name}/{path.name}")
    failure = record["starts"][-1]["failure"]
    if failure is None:
        return 0
    print("\n".join(f"  | {line}" for line in failure["last_lines"]))
    print(f"startup_bench: {failure['why']} (exit status {failure['exit']}) before "
          f"{failure['phase']!r}: {failure['advice']}", file=sys.stderr)
    return FAILED


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
