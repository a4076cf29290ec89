"""Compares what programs that measure servers say with what a server is known to have done.

    nice -n -5 python worklogs/peers/cross_check.py [--tools ours,evalscope,aiperf] [--no-keep]

The server is worklogs/stub_server.py, which emits recorded chunks on a fixed schedule and logs when it flushed what.
Each tool (worklogs/peers/tools.py) sends the same requests, one at a time. Compared are, per request, the tokens, which
must be exact, and TTFT, the whole time, the time per token and each step between events with output, which must be
within 2 % or 2 ms of what was flushed, by the tool's own definition of an answer's end. How late the stub was behind
its schedule is kept beside it.

A time can be wrong because a process had to wait for a core. So a tool is run until each of the recorded answers was
once measured with all its times within the limits, at most --attempts times; if that is not reached, it disagrees. All
runs are kept, with the share of requests that were within, and the median and the largest deviation.

Exit status: 0 all tools agree, 1 a tool could not be run, 3 one disagrees.
"""
import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench_record  # noqa: E402
import stub_server  # noqa: E402
from bench.progress import Progress  # noqa: E402
from peers import tools  # noqa: E402
from peers.tools import Figures, Tool, ToolError  # noqa: E402

OFF_MS, OFF_SHARE = 2.0, 0.02
DISAGREES = 3
# Beside the example's answers, a long one and a slow one. No two have one prompt length: it tells which was measured.
RECORDING = [*stub_server.EXAMPLE, stub_server.answer(0.25, 0.04, 40, 4000, 3072),
             stub_server.answer(1.5, 0.3, 3, 9000, 0)]
# Who keeps the connection opens it in the first request; the second pass measures that answer without.
PASSES = 2
TIMES = ("ttft_ms", "whole_ms", "per_token_ms", "steps_ms")
COUNTS = ("prompt", "completion", "cached", "reasoning")
Log = dict[str, Any]


def events(chunks: list[list[Any]], flushed: list[float]) -> list[tuple[float, dict[str, Any]]]:
    """(when its last byte was flushed, the event) of every event with JSON."""
    found, rest = [], ""
    for (_, text), when in zip(chunks, flushed, strict=True):
        *whole, rest = (rest + text).split("\n\n")
        found += [(when, json.loads(event[len("data: "):])) for event in whole if not event.endswith("[DONE]")]
    return found


def truth(entry: Log, recording: list[stub_server.Answer], end: str) -> Figures:
    """What a request was, by the stub's log, with `end` as the end of an answer."""
    chunks = recording[entry["recording"]]["chunks"]
    found = events(chunks, entry["flushed_s"])
    output = [when for when, event in found for choice in event["choices"]
              if any(choice["delta"].get(name) for name in ("content", "reasoning_content", "tool_calls"))]
    last = {tools.LAST_BYTE: entry["flushed_s"][-1], tools.LAST_EVENT: found[-1][0], tools.LAST_OUTPUT: output[-1]}[end]
    usage = next(event["usage"] for _, event in found if "usage" in event)
    ttft, whole = (1000 * (when - entry["received_s"]) for when in (output[0], last))
    return Figures(ttft, whole, tools.per_token(ttft, whole, usage["completion_tokens"]),
                   [1000 * (after - before) for before, after in zip(output, output[1:], strict=False)],
                   usage["prompt_tokens"], usage["completion_tokens"],
                   usage.get("prompt_tokens_details", {}).get("cached_tokens"),
                   usage.get("completion_tokens_details", {}).get("reasoning_tokens"))


def within(true: float, said: float) -> bool:
    """2 % or 2 ms."""
    return abs(said - true) <= max(OFF_MS, OFF_SHARE * true)


def judged(true: Figures, said: Figures) -> dict[str, Any]:
    """{"tokens": whether all counts that the tool keeps are exact, "within": whether all times are, "off_ms": how much
    each time is off, the worst of the steps}."""
    tokens = all(getattr(said, name) in (None, getattr(true, name)) for name in COUNTS) and said.prompt is not None
    off: dict[str, float | None] = {}
    good = True
    for name in TIMES:
        one, other = getattr(true, name), getattr(said, name)
        if name == "steps_ms":
            if other is None:
                off[name] = None
                continue
            good &= len(one) == len(other) and all(map(within, one, other))
            off[name] = max((b - a for a, b in zip(one, other, strict=False)), key=abs, default=0.0)
        else:
            good &= within(one, other)
            off[name] = other - one
    return {"tokens": tokens, "within": good,
            "off_ms": {name: None if value is None else round(value, 3) for name, value in off.items()}}


@contextlib.contextmanager
def stub(folder: Path, recording: list[stub_server.Answer]) -> Iterator[tuple[str, Path]]:
    """(URL, log) of a stub in a process of its own.

    Raises:
        ToolError: it does not start.
    """
    log = folder / "stub.log"
    (folder / "recording.json").write_text(json.dumps(recording), encoding="utf-8")
    with subprocess.Popen([sys.executable, stub_server.__file__, "--log", str(log), "--recording",
                           str(folder / "recording.json")], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith("Ready: "):
                raise ToolError("the stub server does not start")
            yield line.split()[1], log
        finally:
            process.terminate()


def measure(tool: Tool, folder: Path, recording: list[stub_server.Answer], timeout: float) -> dict[str, Any]:
    """One run of a tool: how late the stub was, and per request the schedule's figures, the tool's, and the verdict."""
    folder.mkdir(parents=True)
    count = PASSES * len(recording)
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps({
        "messages": [{"role": "user", "content": f"request {index}"}], "model": "llm", "max_tokens": 50, "stream": True,
        "stream_options": {"include_usage": True}}) + "\n" for index in range(count)), encoding="utf-8")
    with stub(folder, recording) as (url, log):
        said = tool.run(url, file, folder / "tool", count, timeout)
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    if len(entries) != len(said):
        raise ToolError(f"{tool.name} sent {len(entries)} requests and tells of {len(said)}")
    late = [1000 * (flushed - due) for entry in entries for flushed, due in
            zip(entry["flushed_s"], entry["due_s"], strict=True)]
    rows = []
    for entry, one in zip(entries, said, strict=True):
        true = truth(entry, recording, tool.end)
        rows.append({"answer": entry["recording"], **judged(true, one), "true": _plain(true), "said": _plain(one)})
    return {"stub_late_ms": {"median": round(statistics.median(late), 3), "max": round(max(late), 3)}, "requests": rows}


def _plain(figures: Figures) -> dict[str, Any]:
    """Rounded to a microsecond."""
    return {name: [round(each, 3) for each in value] if isinstance(value, list) else
            round(value, 3) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(figures).items()}


def verdict(tool: Tool, version: str | None, runs: list[dict[str, Any]], answers: int) -> dict[str, Any]:
    """What is kept of a tool."""
    rows = [row for run in runs for row in run["requests"]]
    proved = {row["answer"] for row in rows if row["within"]}
    off = {}
    for name in TIMES:
        values = [row["off_ms"][name] for row in rows if row["off_ms"][name] is not None]
        off[name] = {"median": round(statistics.median(values), 3), "worst": max(values, key=abs)} if values else None
    return {"version": version, "end_of_an_answer": tool.end, "runs": len(runs), "requests": len(rows),
            "tokens_exact": all(row["tokens"] for row in rows), "within": sum(row["within"] for row in rows),
            "answers": answers, "answers_proved": len(proved), "off_ms": off,
            "agrees": len(proved) == answers and all(row["tokens"] for row in rows), "attempts": runs}


def check(chosen: list[Tool], attempts: int, folder: Path, timeout: float, progress: Progress,
          recording: list[stub_server.Answer] | None = None) -> dict[str, dict[str, Any]]:
    """Tool -> verdict; the tools take turns, so that a busy minute is not one tool's.

    Raises:
        ToolError: one cannot be run.
    """
    recording = RECORDING if recording is None else recording
    versions = {tool.name: tool.version() for tool in chosen}
    runs: dict[str, list[dict[str, Any]]] = {tool.name: [] for tool in chosen}
    found: dict[str, dict[str, Any]] = {}
    for attempt in range(attempts):
        for place, tool in enumerate(chosen):
            if tool.name not in found or not found[tool.name]["agrees"]:
                progress.show(attempt * len(chosen) + place, tool.name)
                runs[tool.name].append(measure(tool, folder / f"{tool.name}-{attempt}", recording, timeout))
                found[tool.name] = verdict(tool, versions[tool.name], runs[tool.name], len(recording))
    progress.close()
    return found


def shown(found: dict[str, dict[str, Any]]) -> str:
    """For a terminal."""
    lines = []
    for name, one in found.items():
        lines.append(f"{name} {one['version'] or ''}".strip() + f": {'agrees' if one['agrees'] else 'DISAGREES'}; "
                     f"tokens {'exact' if one['tokens_exact'] else 'NOT EXACT'}; {one['answers_proved']} of "
                     f"{one['answers']} answers, {one['within']} of {one['requests']} requests within the limits, "
                     f"{one['runs']} runs")
        lines += [f"  {time:13s} off by {off['median']:.2f} ms (median), {off['worst']:.2f} at the most"
                  for time, off in one["off_ms"].items() if off is not None]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(tools.TOOLS), help="default: %(default)s")
    parser.add_argument("--attempts", type=int, default=6, help="runs of a tool at most (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--no-keep", action="store_true", help="keep no record in remote_results/")
    parser.add_argument("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    names = options.tools.split(",")
    if unknown := [name for name in names if name not in tools.TOOLS]:
        parser.error(f"--tools: {', '.join(unknown)}: none of {', '.join(tools.TOOLS)}")
    if options.attempts < 1:
        parser.error("--attempts: at least 1")
    words = ["cross_check.py", *(sys.argv[1:] if arguments is None else arguments)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = check([tools.TOOLS[name] for name in names], options.attempts, Path(folder), options.timeout,
                          Progress(options.attempts * len(names), not options.no_progress))
        except ToolError as error:
            print(f"cross_check: {error}", file=sys.stderr)
            with contextlib.suppress(OSError):
                for log in Path(folder).glob("*/tool/log"):
                    print(*log.read_text(errors="replace").splitlines()[-5:], sep="\n", file=sys.stderr)
            return 1
    print(shown(found))
    record = {"kind": "cross-check", **bench_record.commit(), "machine": bench_record.machine(),
              "command": bench_record.without_paths(words), "nice": os.getpriority(os.PRIO_PROCESS, 0),
              "limits": {"ms": OFF_MS, "share": OFF_SHARE}, "recording": bench_record.digest(RECORDING), "tools": found}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not options.no_keep:
        print(f"kept as {bench_record.keep('cross-check', record).name}")
    return 0 if all(one["agrees"] for one in found.values()) else DISAGREES


if __name__ == "__main__":
    sys.exit(main())
