"""Measures servers on one dataset and one checkpoint, one after the other, in turns, and compares them.

    python worklogs/peers/compare_on.py DATASET.jsonl --model CKPT --servers ours,vllm,llama --rounds 3 \\
        -- --concurrency 2 --exact-tokens --max-tokens 64 --set temperature=0

What follows `--` is for formal_perf_bench.py. Every run has a server of its own, started by worklogs/peers/serve.sh
(setup.sh installs the peers), so every cache is empty before. Never are two servers there at once, and a round has each
server once, in the order of --servers; the first is the base of the comparison. --args KIND=WORDS adds options of a
server's own; --command KIND=LINE starts another server, with {model} and {port} in the line.

Before each run it waits until the machine is quiet: until others use at most --others cores. What others used during a
run is in its record. Runs that were disturbed, by compare.py's rule with that limit, are left out of the comparison
where each server has one that was not; else all are compared. The summary names them in both cases.

A server whose prompts have other lengths than ours is measured all the same (--any-tokenizer); its record says how many
differ. A run that fails is told and the others go on. What is done stands in OUT/compare-on.partial, beside the
servers' logs; --resume measures what is missing or failed.

Exit status: 0 all runs are there, 1 bad input, 3 some failed, 130 interrupted.
"""
import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench_record  # noqa: E402
import compare  # noqa: E402
from bench import records, trace  # noqa: E402
from bench.progress import Progress  # noqa: E402
from peers import servers  # noqa: E402
from peers.servers import ServerFailed  # noqa: E402
from peers.turns import FAILED, INTERRUPTED, VERSIONS, CannotRun, Partial, Run, wait_until_quiet  # noqa: E402

BENCH = Path(__file__).resolve().parents[1] / "formal_perf_bench.py"


def schedule(kinds: list[str], rounds: int) -> list[tuple[int, str]]:
    """(round, server) in turns: no server is measured twice before all others were once."""
    return [(number, kind) for number in range(rounds) for kind in kinds]


def bench_words(kind: str, port: int, pid: int, file: Path, options: argparse.Namespace) -> list[str]:
    """The measuring program's command line."""
    return [sys.executable, str(BENCH), str(options.dataset), "--base-url", f"http://127.0.0.1:{port}", "--kind", kind,
            "--cache", "fresh", "--server-pid", str(pid), "--server-command", servers.shown(
                kind, options.model, options.args.get(kind, ""), options.command.get(kind)),
            *(["--server-version", VERSIONS[kind]] if kind in VERSIONS and kind not in options.command else []),
            *([] if kind == "ours" else ["--any-tokenizer"]), *(["--no-progress"] if options.no_progress else []),
            "--out", str(options.results), "--json", str(file), *options.bench]


def measure(number: int, kind: str, options: argparse.Namespace) -> Run:
    """{"round", "kind", "before_cores", and "record": file name, "others_cores" or "failed": one line}."""
    found: Run = {"round": number, "kind": kind, "before_cores": wait_until_quiet(options.others, options.quiet)}
    log, file = options.out / f"server-{kind}-{number}.log", options.out / f"run-{kind}-{number}.json"
    file.unlink(missing_ok=True)
    # Of a run whose server was lost there is nothing to go on with.
    (options.results / f"formal-perf-{kind}.partial").unlink(missing_ok=True)
    words = servers.command(kind, options.model, options.port, options.args.get(kind, ""), options.command.get(kind))
    try:
        with servers.running(words, options.port, log, options.patience) as pid:
            ended = subprocess.run(bench_words(kind, options.port, pid, file, options), stdout=subprocess.PIPE,
                                   text=True)
    except ServerFailed as error:
        return {**found, "failed": str(error)}
    if ended.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if ended.returncode:
        return {**found, "failed": f"formal_perf_bench.py ended with {ended.returncode}; the server's log: {log}"}
    record = json.loads(file.read_text(encoding="utf-8"))
    return {**found, "record": file.name, "kept": ended.stdout.strip().rpartition("kept as ")[2],
            "others_cores": record["others_cores"], "disagree": record["tokenizer"]["disagree"]}


def compared(runs: list[Run], options: argparse.Namespace) -> tuple[list[dict[str, Any]], str | None]:
    """Each server against the first, and what must be said of it.

    Raises:
        RecordError: they cannot be compared.
    """
    good = [(run["kind"], records.read(options.out / run["record"])) for run in runs if "record" in run]
    calm = [(kind, record) for kind, record in good if not records.disturbances(record, options.others)]
    kinds, without = {kind for kind, _ in good}, {kind for kind, _ in good} - {kind for kind, _ in calm}
    words = None
    if without:
        words = (f"disturbed runs are compared, too, since {', '.join(sorted(without))} has no other: not a comparison "
                 "on a quiet machine")
    elif len(calm) < len(good):
        words, good = f"{len(good) - len(calm)} disturbed runs are left out", calm
    order = {kind: place for place, kind in enumerate(options.servers)}
    good.sort(key=lambda one: order[one[0]])
    if len(kinds) < 2:
        return [], words
    return compare.compare([record for _, record in good], others=options.others), words


def told(runs: list[Run], found: list[dict[str, Any]], words: str | None, options: argparse.Namespace) -> str:
    """The summary for a terminal."""
    lines = []
    for run in sorted(runs, key=lambda one: (options.servers.index(one["kind"]), one["round"])):
        name = f"{run['kind']}, round {run['round'] + 1}: "
        if "failed" in run:
            lines.append(f"{name}FAILED: {run['failed']}")
            continue
        record = records.read(options.out / run["record"])
        figures = [f"{title} {compare.number(records.lookup(record['summary'], path))}" for title, path in (
            ("TTFT P50", "ttft_s.p50"), ("P90", "ttft_s.p90"), ("decode TPS P50", "decode_tps.p50"),
            ("output TPS", "aggregate.output_tps"), ("weighted", "weighted"))]
        lines.append(f"{name}{', '.join(figures)}; {records.health(record)}"
                     + (f"; {run['disagree']} prompts have another length" if run["disagree"] else ""))
        lines += [f"  DISTURBED: {why}" for why in records.disturbances(record, options.others)]
    for one in found:
        lines.append(f"{one['other']} ({one['runs'][1]} runs) against {one['base']} ({one['runs'][0]}): "
                     f"{one['verdict']}")
        lines += ["  " + "  ".join(compare.row(ratio)) for ratio in one["ratios"]]
    return "\n".join([*lines, *([words] if words else [])])


def pair(argument: str) -> tuple[str, str]:
    """KIND=WORDS."""
    kind, equals, words = argument.partition("=")
    if not equals or kind not in servers.KINDS:
        raise argparse.ArgumentTypeError(f"{argument!r} is not KIND=WORDS with one of {', '.join(servers.KINDS)}")
    return kind, words


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    words, bench = arguments, []
    if "--" in arguments:
        words, bench = arguments[:arguments.index("--")], arguments[arguments.index("--") + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint's folder")
    parser.add_argument("--servers", default="ours,vllm,llama", help="the first is the base (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each server (default: %(default)s)")
    parser.add_argument("--args", type=pair, action="append", default=[], metavar="KIND=WORDS",
                        help="options of a server")
    parser.add_argument("--command", type=pair, action="append", default=[], metavar="KIND=LINE",
                        help="another server")
    parser.add_argument("--others", type=float, default=records.OTHERS_CORES,
                        help="cores that others may use (default: %(default)s)")
    parser.add_argument("--quiet", type=float, default=600.0, help="seconds to wait for that (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds of a start (default: %(default)s)")
    parser.add_argument("--port", type=int, help="default: any that is free")
    parser.add_argument("--out", type=Path, default=bench_record.ROOT / ".cache" / "peers" / "runs",
                        help="folder of records and logs (default: .cache/peers/runs)")
    parser.add_argument("--keep", action="store_true", help="keep the records and the comparison in remote_results/")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-progress", action="store_true")
    options = parser.parse_args(words)
    options.bench = bench
    options.servers = options.servers.split(",")
    options.args, options.command = dict(options.args), dict(options.command)
    if unknown := [kind for kind in options.servers if kind not in servers.KINDS]:
        parser.error(f"--servers: {', '.join(unknown)}: none of {', '.join(servers.KINDS)}")
    if len(set(options.servers)) < len(options.servers):
        parser.error("--servers: each once")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    options.model = options.model.resolve()
    options.results = bench_record.RESULTS if options.keep else options.out
    options.port = options.port or servers.free_port()
    return options


def checkpoint_digest(model: Path) -> str:
    """Of a checkpoint's folder; of its large files the size and time stand for the bytes."""
    files = sorted(path for path in model.iterdir() if path.suffix in (".json", ".jinja", ".safetensors"))
    return bench_record.digest([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def key_of(options: argparse.Namespace, digest: str) -> dict[str, Any]:
    """What makes two comparisons the same."""
    return {"dataset": digest, "model": options.model.name, "checkpoint": checkpoint_digest(options.model),
            "commit": bench_record.commit()["commit"], "servers": options.servers, "rounds": options.rounds,
            "args": options.args, "command": options.command, "bench": options.bench}


def run_all(options: argparse.Namespace, partial: Partial) -> None:
    """All that is missing."""
    turns = schedule(options.servers, options.rounds)
    progress = Progress(len(turns), not options.no_progress, sum(partial.done(*turn) for turn in turns))
    for place, turn in enumerate(turns):
        if not partial.done(*turn):
            progress.show(place, f"{turn[1]}, round {turn[0] + 1}")
            progress.close()
            partial.add(measure(*turn, options))
    progress.show(len(turns))
    progress.close()


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse(words)
    with contextlib.ExitStack() as closing:
        return _main(options, words, closing)


def _main(options: argparse.Namespace, words: list[str], closing: contextlib.ExitStack) -> int:
    try:
        if not (options.model / "config.json").exists():
            raise CannotRun(f"no checkpoint at {options.model} (config.json is missing)")
        partial = Partial(options.out / "compare-on.partial", key_of(options, trace.read(options.dataset).sha256),
                          options.resume)
        closing.callback(partial.close)
        run_all(options, partial)
        runs = list(partial.runs.values())
        found, said = compared(runs, options) if any("record" in run for run in runs) else ([], None)
    except KeyboardInterrupt:
        print("compare_on: interrupted; --resume goes on", file=sys.stderr)
        return INTERRUPTED
    except (CannotRun, trace.DatasetError, records.RecordError, OSError) as error:
        print(f"compare_on: {error}", file=sys.stderr)
        return 1
    print(told(runs, found, said, options))
    failed = sum("failed" in run for run in runs)
    if found:
        names = [run["kept"] for run in runs if "record" in run]
        record = compare.kept(argparse.Namespace(records=list(map(Path, names)), rounds=compare.stats.ROUNDS), found)
        record |= {"command": bench_record.without_paths(["compare_on.py", *words]), "machine": bench_record.machine(),
                   "runs": runs, "said": said}
        print(f"kept as {bench_record.keep('formal-perf-comparison', record, options.results).name}")
    if failed:
        print(f"compare_on: {failed} of {len(runs)} runs failed; --resume measures them again", file=sys.stderr)
        return FAILED
    partial.path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
