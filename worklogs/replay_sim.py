"""Predicts the platform's figures for a configuration, from measured costs and a model of engine and cache.

    python worklogs/replay_sim.py points FORMAL_C1.json [FORMAL_C1.json MICROBENCH.json ...] --chunk 2048 -o points.json
    python worklogs/replay_sim.py fit points.json
    python worklogs/replay_sim.py check FORMAL_C4.json [REPEAT.json ...] --points points.json [--keep]
    python worklogs/replay_sim.py rank --points worklogs/points_bi_v100.json --concurrency 1,2,4,8 --chunk 8192,16384

points  takes points from records: of formal runs with one request at a time (every TTFT and every decoding speed), and
        of any record that has a list "points" (cost_model.py says what a point is). Several runs of one server, each
        at another hour, make the costs a mean of the machine's speeds.
fit     fits the costs, and shows every residual and what the points leave open.
check   simulates the requests of a formal run (lengths, order, answers' lengths as they came), of which repeats are
        given, and compares the median of predicted with that of measured figures: with the cache as modelled, and with
        the hits that were measured, where the server reports any. Each repeat is simulated --runs times, in each of
        which every step takes a random bit more or less (--jitter), since percentiles of a closed loop are a matter of
        chance (replay_check.py). A run that points came from is refused; so are, here and for points, runs that were
        disturbed (compare.py), unless --any-health is given. Exit status 3 if one of the platform's
        figures is off by more than --limit, 4 if none is and one is not known.
rank    simulates the 881 requests of replay_trace.py for every combination of --concurrency, --chunk, --policy and
        --speculate, each with a cache of its own, ranks them, and says what is measured and what is assumed. It does so
        under every alternative of the points file, since a rank that an assumption turns is none.

The engine's rules are in engine_model.py, the cache's in engine_cache.py, the costs in cost_model.py, and what is taken
from a record in replay_requests.py.
"""
import argparse
import dataclasses
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
import cache_sim  # noqa: E402
import cost_model  # noqa: E402
import replay_check  # noqa: E402
import replay_trace  # noqa: E402
from bench import definitions, jsonl, records, stats, trace  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.served import ServedError  # noqa: E402
from cache_model import KvPool  # noqa: E402
from cost_model import Costs, Fit  # noqa: E402
from engine_cache import Cache, Given, Modelled  # noqa: E402
from engine_model import POLICIES, Setting, jittered, simulate  # noqa: E402
from formal_perf_bench import INTERRUPTED, count, positive  # noqa: E402
from replay_check import MEASURED, MODELLED, SHOWN, measurement  # noqa: E402
from replay_requests import RequestsError, hits_of, rendered_of, requests_of  # noqa: E402
from replay_trace import BLOCK, Request  # noqa: E402

LIMIT_S = 46_800.0      # the platform starts no request after that
OFF, NOT_JUDGED = 3, 4
MODEL_ASSUMES = (
    "texts of the replay are not known: what prompts share is made up to meet the published shares (replay_trace.py)",
    "answers have the recorded lengths, whatever the setting",
    "KV for a whole answer is taken at its start; nothing is preempted, nothing fails",
    "reading and rendering take time but no processor from the engine; requests of one step cost what their sum costs",
    "the time of a step is linear in the features of cost_model.py",
    "the end of a cold prompt is a step of its own (our server), and costs what any step does",
    "moving checkpoints to the host and back costs no time",
)


class SimError(Exception):
    """What was asked for cannot be done; one line."""


def cuts(record: dict[str, Any], wanted: bool | None) -> bool:
    """Whether the record's server computes the end of a cold prompt in a step of its own. wanted: --cut, --no-cut."""
    server = record.get("server")
    return wanted if wanted is not None else isinstance(server, dict) and server.get("kind") == "ours"


def points_of(record: dict[str, Any], chunk: int, source: str, cut: bool = False) -> list[dict[str, Any]]:
    """Points that a record holds. cut: of its server.

    Raises:
        SimError: it holds none.
    """
    if isinstance(record.get("points"), list):
        return [{"source": source, **({"cut": cut} if point.get("what") == "ttft" else {}), **point}
                for point in record["points"]]
    if record.get("kind") != records.KIND:
        raise SimError(f"{source}: neither a list \"points\" nor a formal run")
    if record["mode"] != "closed" or record["concurrency"] != 1:
        raise SimError(f"{source}: {record['concurrency']} requests at a time; points need a run with 1, where each is "
                       "alone on the server")
    found: list[dict[str, Any]] = []
    for sample in record["samples"]:
        prompt, cached, tokens = (sample[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens"))
        if sample["class"] != "ok" or sample["first_s"] is None or prompt is None:
            continue
        if cached is not None:
            found.append({"what": "ttft", "prompt": prompt, "cached": cached, "chunk": chunk,
                          "cut": cut, "seconds": sample["first_s"] - sample["sent_s"],
                          "source": f"{source}, request {sample['index']}"})
        if tokens and tokens >= 8 and sample["last_s"] > sample["first_s"]:
            found.append({"what": "step", "batch": 1, "context": prompt + tokens // 2,
                          "seconds": (sample["last_s"] - sample["first_s"]) / (tokens - 1),
                          "source": f"{source}, request {sample['index']}"})
    if not found:
        raise SimError(f"{source}: no request that succeeded and reported its tokens")
    return found


def modelled_cache(memory: dict[str, Any], cut: bool = True, classes: tuple[Any, Any] | None = None) -> Modelled:
    """Our server's cache: its own rules, with `memory` (kv_tokens, kv_bytes, device, host, slot_bytes)."""
    policy, store = classes or cache_sim.server_classes()
    room = memory["kv_tokens"] * memory["kv_bytes"] - memory["device"] * memory["slot_bytes"]
    kv = KvPool(room // (BLOCK * memory["kv_bytes"]))
    return Modelled(kv, policy(), store, memory["device"], memory["host"], cut)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """summary: as of a formal run. samples: as of a formal run."""

    summary: dict[str, Any]
    wall_s: float
    samples: list[dict[str, Any]]

    def figure(self, path: str) -> float | None:
        """By its name in SHOWN."""
        return self.wall_s if path == "wall_s" else stats.figure(self.summary, path)


def predict(requests: Sequence[Request], cache: Cache, costs: Costs, setting: Setting, **options: Any) -> Prediction:
    """One simulated run. options: of `engine_model.simulate`."""
    samples, wall = simulate(requests, cache, costs, setting, **options)
    return Prediction(definitions.summary(samples, wall), wall, samples)


def option_of(command: str | None, name: str) -> int | None:
    """An integer option of a server's command line."""
    found = re.search(rf"--{name}[= ](\d+)", command or "")
    return int(found[1]) if found else None


def check(record: dict[str, Any], requests: Sequence[Request], fitted: Fit, chunk: int, max_num_seqs: int,
          memory: dict[str, Any], cut: bool = False,
          classes: tuple[Any, Any] | None = None, jitter: float = 0.0, seed: str = "") -> dict[str, Prediction]:
    """The run, simulated once, by ARMS; the second is left out where no request reports cached tokens.

    Args:
        jitter, seed: of the steps' times, as of `jittered`; both arms draw the same.
    """
    setting = Setting(concurrency=record["concurrency"] or len(requests), chunk=chunk, max_num_seqs=max_num_seqs)
    by_index = {sample["index"]: sample for sample in record["samples"]}
    arrivals = None
    if record["mode"] == "open":
        arrivals = [by_index[request.index]["intended_s"] for request in requests]
    caches: dict[str, Cache] = {MODELLED: modelled_cache(memory, cut, classes)}
    hits, _ = hits_of(record)
    if hits is not None:
        caches[MEASURED] = Given(hits, cut)
    return {name: predict(requests, cache, fitted.costs, setting, arrivals=arrivals, pace=jittered(jitter, seed))
            for name, cache in caches.items()}


def memory_of(contents: dict[str, Any], requests: Sequence[Request],
              given: tuple[int | None, int, int] = (None, 0, 0)) -> dict[str, Any]:
    """The cache's memory: as given (tokens of KV, checkpoints on the device, on the host), or what the points file says
    of it, or room for everything, which is an assumption."""
    kv, device, host = given
    if kv is not None:
        return {"kv_tokens": kv, "kv_bytes": 1, "device": device, "host": host, "slot_bytes": 0,
                "why": f"as given: KV of {kv:,} tokens, {device} checkpoints on the device, {host} on the host"}
    if "memory" in contents:
        return dict(contents["memory"])
    tokens = sum(-(-(request.length + request.answer) // BLOCK) * BLOCK for request in requests)
    return {"kv_tokens": tokens + 1024, "kv_bytes": 1024, "device": 1024, "host": 0, "slot_bytes": 0,
            "why": "ASSUMED, neither --kv-tokens nor the points say it: room for all prompts; 1,024 checkpoints"}


def alternatives(contents: dict[str, Any], points: Sequence[cost_model.Point]) -> dict[str, Fit]:
    """The fit as given, and one with each alternative's costs fixed."""
    found = {"as given": cost_model.fit(contents, points)}
    for one in contents.get("alternatives", []):
        unknown = set(one["values"]) - set(cost_model.NAMES)
        if unknown:
            raise SimError(f"alternative {one['name']!r}: {', '.join(sorted(unknown))} is no cost")
        fixed = {name: {"value": value, "why": one.get("why", one["name"])} for name, value in one["values"].items()}
        found[one["name"]] = cost_model.fit({**contents, "assumed": {**contents.get("assumed", {}), **fixed}}, points)
    return found


def answered(run: int) -> list[Request]:
    """What an earlier run of the replay answered, by replay_shape.csv; nothing shared, for a run without a cache."""
    found = []
    with open(replay_trace.SHAPE, encoding="utf-8") as file:
        names = next(file).strip().split(",")
        for line in file:
            row = dict(zip(names, line.strip().split(","), strict=True))
            if row["prompt_tok"] and row[f"out_tok_run{run}"]:
                nothing = np.zeros(0, np.int64)
                found.append(Request(int(row["seq"]), int(row["prompt_tok"]), int(row[f"out_tok_run{run}"]), nothing,
                                     nothing, (), -1, 0))
    return found


def public_checks(contents: dict[str, Any], fitted: Fit) -> list[dict[str, Any]]:
    """What the costs predict of figures that were reported and not used for the fit."""
    found = []
    for one in contents.get("checks", []):
        prediction = predict(answered(one["answered_in_run"]), Given({}), fitted.costs,
                             Setting(concurrency=one["concurrency"], chunk=one["chunk"]))
        for path, reported in one["reported"].items():
            value = prediction.figure(path)
            found.append({"name": one["name"], "figure": path, "mark": one["mark"], "source": one["source"],
                          "reported": reported, "predicted": value, "off": value / reported - 1 if value else None})
    return found


def rank(fits: dict[str, Fit], settings: Sequence[Setting], requests: Sequence[Request],
         cache_of: Callable[[], Cache], trace_key: str, done: dict[str, dict[str, Any]], keep: Any = None,
         progress: Any = lambda done, words: None) -> list[dict[str, Any]]:
    """Figures of each setting under each alternative; within each those first that send most requests before the
    platform's limit, and of these the best weighted score.

    Args:
        cache_of: makes an empty cache. trace_key: names requests and cache.
        done: outcomes that a broken-off run left, by key; they are not computed again.
        keep: called with (key, outcome) for each new one.
        progress: called with how many are done and the one that follows.
    """
    outcomes = []
    for name, fitted in fits.items():
        for setting in settings:
            key = json.dumps([name, dataclasses.asdict(setting), fitted.costs.values, trace_key])
            if key not in done:
                progress(len(outcomes), f"{name}: {words_of(setting)}")
                cache = cache_of()
                found = predict(requests, cache, fitted.costs, setting, limit_s=LIMIT_S)
                done[key] = {"alternative": name, **dataclasses.asdict(setting), "sent": len(found.samples),
                             "of": len(requests), "figures": {path: found.figure(path) for path in SHOWN},
                             "gates": [[gate["name"], gate["met"]] for gate in found.summary["gates"]]}
                if isinstance(cache, Modelled):
                    done[key]["waits"] = {"room": cache.no_room, "prefix": cache.waited}
                if keep is not None:
                    keep(key, done[key])
            outcomes.append(done[key])
    order = {name: place for place, name in enumerate(fits)}

    def place(one: dict[str, Any]) -> tuple[int, int, float]:
        weighted = one["figures"]["weighted"]
        return order[one["alternative"]], -one["sent"], float("inf") if weighted is None else -weighted
    return sorted(outcomes, key=place)


def words_of(setting: Setting | dict[str, Any]) -> str:
    """A setting for tables."""
    one = setting if isinstance(setting, dict) else dataclasses.asdict(setting)
    guess = f", {one['speculate']} guessed at {one['acceptance']:g}" if one["speculate"] else ""
    return f"{one['concurrency']} at a time, chunk {one['chunk']:,}, {one['policy']}{guess}"


def costs_table(fitted: Fit) -> list[str]:
    """Lines: every cost, measured or assumed."""
    lines = []
    for name, words in cost_model.FEATURES.items():
        state = f"assumed: {fitted.costs.assumed[name]}" if name in fitted.costs.assumed else "fitted to the points"
        lines.append(f"  {name:16s} {fitted.costs.values[name]:.4g} s for {words}; {state}")
    return lines


def residuals_table(fitted: Fit, most: int = 40) -> list[str]:
    """Lines: every point, the worst first where there are more than `most`."""
    found = sorted(zip(fitted.residuals, fitted.errors, strict=True), key=lambda pair: -abs(pair[1]))
    lines = [f"  {mark} {words}: measured {seconds:.4g} s, fitted {value:.4g} s, {error:+.1%} ({source})"
             for (words, source, mark, seconds, value), error in found[:most]]
    if len(found) > most:
        lines.append(f"  and {len(found) - most} points that are closer")
    errors = [abs(error) for error in fitted.errors]
    lines.append(f"  relative errors of {len(errors)} points: root mean square {fitted.rms:.1%}, "
                 f"median {statistics.median(errors):.1%}, most {max(errors):.1%}")
    free = len(cost_model.NAMES) - len(fitted.costs.assumed)
    if len(errors) <= free:
        lines.append(f"  {len(errors)} points for {free} costs: they fit by construction, which proves nothing")
    return lines


def print_fit(fitted: Fit) -> None:
    """What is measured, and what is assumed."""
    print("Costs:", *costs_table(fitted), "Points and residuals:", *residuals_table(fitted), sep="\n")


def fit_record(fitted: Fit) -> dict[str, Any]:
    """The fit, for a record."""
    return {"costs": fitted.costs.values, "assumed": fitted.costs.assumed, "undetermined": fitted.undetermined,
            "rms": round(fitted.rms, 5), "points": len(fitted.residuals),
            "residuals": [{"point": words, "source": source, "mark": mark, "measured_s": round(seconds, 6),
                           "fitted_s": round(value, 6)} for words, source, mark, seconds, value in fitted.residuals]}


def _add_cut(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cut", action=argparse.BooleanOptionalAction,
                        help="the server computes the end of a cold prompt in a step of its own, as ours does for "
                             "models with recurrent state; default: if it is ours")


def _add_health(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--any-health", action="store_true",
                        help="take runs that were disturbed, too: a slow client, cores that others used, an early end, "
                             "several sittings")


def _numbers(text: str) -> list[int]:
    values = text.split(",")
    if not all(value.isdecimal() for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, as 1,2,4")
    return [int(value) for value in values]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = parser.add_subparsers(dest="program", required=True)
    one = programs.add_parser("points", help="take points from records")
    one.add_argument("records", nargs="+", type=Path)
    one.add_argument("--chunk", type=count(1), required=True, help="the server's max_num_batched_tokens")
    one.add_argument("--experts", type=count(0), default=0, help="of a mixture-of-experts model")
    one.add_argument("--top-k", type=count(0), default=0)
    _add_cut(one)
    _add_health(one)
    one.add_argument("--out", "-o", type=Path, required=True)
    one = programs.add_parser("fit", help="fit the costs, show residuals")
    one.add_argument("points", type=Path)
    one = programs.add_parser("check", help="compare predicted with measured figures of a formal run")
    one.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="of one formal run and its repeats")
    one.add_argument("--points", type=Path, required=True)
    one.add_argument("--chunk", type=count(1), help="default: from the server's command in the record")
    one.add_argument("--max-num-seqs", type=count(1), help="the same")
    one.add_argument("--dataset", type=Path, help="of the run: what prompts share and where messages end; else what "
                                                  "the record says of it, which is less")
    one.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="the server's checkpoint folder, with --dataset")
    one.add_argument("--kv-tokens", type=count(1), help="that the server's KV cache holds, as it logs at its start; "
                                                   "default: what the points file says, or room for everything")
    one.add_argument("--checkpoints", type=count(0), help="slots on the device, with --kv-tokens")
    one.add_argument("--host-checkpoints", type=count(0), default=0)
    _add_cut(one)
    _add_health(one)
    one.add_argument("--runs", type=int, default=replay_check.RUNS,
                     help="simulated runs of each record (default: %(default)s; without jitter all are the same)")
    one.add_argument("--jitter", type=float, default=replay_check.JITTER, metavar="SHARE",
                     help="by how much single steps take more or less than they cost, a standard deviation (assumed; "
                          "%(default)s)")
    one.add_argument("--no-progress", action="store_true")
    one.add_argument("--limit", type=positive, default=0.15,
                     help="share that a figure may be off (default: %(default)s)")
    one.add_argument("--keep", action="store_true", help="keep the outcome in remote_results/")
    one = programs.add_parser("rank", help="rank settings by the figures predicted for the replay")
    one.add_argument("--points", type=Path, required=True)
    one.add_argument("--concurrency", type=_numbers, default=[1, 2, 4, 8])
    one.add_argument("--chunk", type=_numbers, default=[4096, 8192, 16384])
    one.add_argument("--policy", type=lambda text: text.split(","), default=["fcfs"],
                     help="; ".join(f"{name}: {words}" for name, words in POLICIES.items()))
    one.add_argument("--speculate", type=_numbers, default=[0], help="tokens guessed per step")
    one.add_argument("--acceptance", type=float, default=0.7, help="of a guessed token (assumed; %(default)s)")
    one.add_argument("--draft", type=float, default=0.0, help="seconds for guessing one (assumed; %(default)s)")
    one.add_argument("--max-num-seqs", type=int, default=8)
    one.add_argument("--cache", choices=("server", "none", "unlimited"), default="server",
                     help="hits: by the server's rules and memory, none, or all that repeats")
    one.add_argument("--seed", type=int, default=0, help="of the trace")
    one.add_argument("--count", type=count(1), help="only the first requests")
    one.add_argument("--partial", type=Path, metavar="FILE",
                     help="outcomes are added there; what is there is not computed again")
    one.add_argument("--keep", action="store_true", help="keep the outcome in remote_results/")
    one.add_argument("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    if options.program == "points" and options.top_k > options.experts:
        parser.error("--top-k is at most --experts")
    if options.program == "check":
        if (options.dataset is None) != (options.tokenizer is None):
            parser.error("--dataset and --tokenizer go together")
        if (options.kv_tokens is None) != (options.checkpoints is None):
            parser.error("--kv-tokens and --checkpoints go together")
        if options.runs < 1 or not 0 <= options.jitter < 1:
            parser.error("--runs is at least 1, --jitter a share from 0 to below 1")
    if options.program == "rank":
        if unknown := set(options.policy) - set(POLICIES):
            parser.error(f"--policy {', '.join(sorted(unknown))}: {', '.join(POLICIES)} are known")
        if min(*options.concurrency, *options.chunk, options.max_num_seqs, 1) < 1 or min(options.speculate) < 0:
            parser.error("--concurrency, --chunk and --max-num-seqs are at least 1, --speculate at least 0")
        if not 0 <= options.acceptance <= 1:
            parser.error("--acceptance is a share, from 0 to 1")
        if not 0 <= options.draft < float("inf"):
            parser.error("--draft is a number of seconds")
    return options


def _points(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    sources = []
    given = [_json(path) for path in options.records]
    replay_check.refuse_twice(given, [path.name for path in options.records])
    formal = [(path, record) for path, record in zip(options.records, given, strict=True)
              if record.get("kind") == records.KIND]
    for path, record in formal:
        records.check(record, path.name)
    if not options.any_health:
        records.refuse_disturbed([record for _, record in formal], [path.name for path, _ in formal])
    for path, record in formal[1:]:
        if differences := replay_check.servers_differ(formal[0][1], record):
            raise SimError(f"{formal[0][0].name} and {path.name} are not of one server: {'; '.join(differences)}")
    for path, record in zip(options.records, given, strict=True):
        found += points_of(record, options.chunk, path.name, cuts(record, options.cut))
        why = records.disturbances(record) if record.get("kind") == records.KIND else []
        print(*(f"{path.name}: DISTURBED: {words}" for words in why), sep="\n", end="\n" if why else "")
        sources.append({"name": path.name, "measured": measurement(record), "run": record.get("run"), "disturbed": why})
    contents = {"name": ", ".join(path.name for path in options.records), "chunk": options.chunk,
                "experts": options.experts, "top_k": options.top_k, "records": sources, "points": found}
    options.out.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} points written to {options.out}")
    return 0


def _json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SimError(f"{path}: does not parse: {error}") from error
    if not isinstance(record, dict):
        raise SimError(f"{path}: is no JSON object")
    return record


def refuse_own(record: dict[str, Any], name: str, contents: dict[str, Any]) -> None:
    """Raises:
        SimError: points came from this very run, so that it proves nothing of them.
    """
    for one in contents.get("records", []):
        # A run that ended early is part of the one that went on with it.
        if one["measured"] == measurement(record) or None is not one.get("run") == record.get("run"):
            raise SimError(f"{name}: the points came from this run ({one['name']}); check against another")
    source = next((str(point.get("source", "")) for point in contents["points"]
                   if str(point.get("source", "")).split(", request ")[0] == name), None)
    if source is not None:
        raise SimError(f"{name}: the points came from this run ({source}); check against another")


def _check(options: argparse.Namespace) -> int:
    found, names = [records.read(path) for path in options.records], [path.name for path in options.records]
    replay_check.refuse_other_runs(found, names)
    contents, points = cost_model.read(options.points)
    for record, name in zip(found, names, strict=True):
        refuse_own(record, name, contents)
    if not options.any_health:
        records.refuse_disturbed(found, names)
    fitted, server = cost_model.fit(contents, points), found[0]["server"]
    chunk = options.chunk or option_of(server.get("command"), "max-num-batched-tokens") or contents.get("chunk")
    seqs = options.max_num_seqs or option_of(server.get("command"), "max-num-seqs")
    if not chunk:
        raise SimError("the record does not say the server's max_num_batched_tokens; give --chunk")
    if not seqs:
        raise SimError("the record does not say the server's max_num_seqs; give --max-num-seqs")
    prompts = rendered_of(found[0], options.dataset, options.tokenizer, found[1:]) if options.dataset else None
    requests = [requests_of(record, prompts) for record in found]
    given = options.kv_tokens, options.checkpoints or 0, options.host_checkpoints
    # Where there is to be room for everything, repeats whose answers have other lengths ask for other rooms.
    memory = max((memory_of(contents, each, given) for each in requests), key=lambda one: int(one["kv_tokens"]))
    shares = "rendered from the dataset" if prompts else "of the record; ends of messages only where earlier prompts " \
                                                         "had them (give --dataset for all)"
    cut = cuts(found[0], options.cut)
    print_fit(fitted)
    # Without jitter all runs are the same.
    runs = options.runs if options.jitter else 1
    simulating = Progress(runs * len(found), not options.no_progress)
    predicted: dict[str, list[dict[str, float | None]]] = {}
    for number, run in itertools.product(range(len(found)), range(runs)):
        simulating.show(number * runs + run, names[number])
        for arm, one in check(found[number], requests[number], fitted, chunk, seqs, memory, cut,
                              jitter=options.jitter, seed=f"{number} {run}").items():
            predicted.setdefault(arm, []).append({path: one.figure(path) for path in SHOWN})
    simulating.close()
    if len(predicted.get(MEASURED, [])) < len(predicted[MODELLED]):
        predicted.pop(MEASURED, None)
    left_out = [hits_of(record)[1] for record in found]
    print(f"Against {len(found)} run{'s' if len(found) > 1 else ''} ({records.name(found[0])}, "
          f"{found[0]['concurrency']} at a time, chunk {chunk:,}, max_num_seqs {seqs}; cache: {memory['why']}; "
          f"prompts: {shares}; cold prompts {'cut' if cut else 'not cut'} before their end):",
          *(run_line(*each, arms=len(predicted)) for each in zip(names, found, left_out, strict=True)), sep="\n")
    if MEASURED not in predicted:
        print("  no request reports cached tokens" + (" in one of the runs" if len(found) > 1 else "")
              + ": not predicted with the hits as measured")
    if len(commits := list(dict.fromkeys(str(record.get("commit"))[:7] for record in found))) > 1:
        print(f"  of several commits: {', '.join(commits)}")
    if len(found) == 1:
        print("  one run only: how much repeats of it differ is not known")
    print(f"  predicted by {runs} simulated run{'s' if runs > 1 else ''} of each; " + (
        f"the time of each step varies by {options.jitter:.1%} (assumed)" if options.jitter else "no step varies"))
    rows = replay_check.rows(found, predicted)
    print(replay_check.head(list(predicted)), *(row.line() for row in rows), sep="\n")
    off, unknown = replay_check.verdict(rows, options.limit)
    print(f"within {options.limit:.0%}: " + ("all" if not off else f"all but {', '.join(off)}")
          + (f"; not judged: {', '.join(unknown)}" if unknown else ""))
    if options.keep:
        path = bench_record.keep("replay-sim-check", {
            "kind": "replay-sim-check", **bench_record.commit(), "command": options.command, "records": names,
            "commits": [record.get("commit") for record in found], "health": [records.health(one) for one in found],
            "disturbed": [f"{name}: {words}" for name, record in zip(names, found, strict=True)
                          for words in records.disturbances(record)],
            "server": server, "concurrency": found[0]["concurrency"], "chunk": chunk, "max_num_seqs": seqs,
            "limit": options.limit, "off": off, "not_judged": unknown, "memory": memory, "prompts": shares, "cut": cut,
            "cached_not_reported": sum(left_out), "runs": runs, "jitter": options.jitter,
            "level": replay_check.LEVEL, "model_assumes": MODEL_ASSUMES[2:], "fit": fit_record(fitted),
            "figures": [row.kept() for row in rows]})
        print(f"kept as {path.name}")
    return OFF if off else NOT_JUDGED if unknown else 0


def run_line(name: str, record: dict[str, Any], left_out: int, arms: int) -> str:
    """A run that is checked against, and what to know of it."""
    failed = sum(sample["class"] != "ok" for sample in record["samples"])
    notes = [records.health(record), *(f"DISTURBED: {words}" for words in records.disturbances(record))]
    notes += [f"{failed} failed requests left out"] if failed else []
    if left_out and arms > 1:
        notes.append(f"{left_out} requests do not report cached tokens: 0, by the platform's rule")
    return f"  {name}: {'; '.join(notes)}"


def _rank(options: argparse.Namespace) -> int:
    contents, points = cost_model.read(options.points)
    fits = alternatives(contents, points)
    requests = replay_trace.build(options.seed, count=options.count)
    settings = [Setting(concurrency, chunk, policy, options.max_num_seqs, guessed,
                        options.acceptance if guessed else 0.0, options.draft if guessed else 0.0)
                for concurrency, chunk, policy, guessed in itertools.product(
                    options.concurrency, options.chunk, options.policy, options.speculate)]

    partial = {}
    if options.partial and options.partial.exists():
        partial = dict(jsonl.read(options.partial))

    def keep(key: str, outcome: Any) -> None:
        if options.partial:
            jsonl.add(options.partial, [key, outcome])

    memory = memory_of(contents, requests)
    hits = dict(enumerate(replay_trace.reusable(requests))) if options.cache == "unlimited" else {}

    def cache_of() -> Cache:
        # An unlimited cache is ours, too; without one nobody is to compute the same in the same way.
        return modelled_cache(memory) if options.cache == "server" else Given(hits, options.cache == "unlimited")

    trace_key = bench_record.digest([options.cache, memory if options.cache == "server" else None, [
        [request.length, request.answer, hits.get(request.index, 0), request.keys.tolist(), request.boundaries]
        for request in requests]])
    ranking = Progress(len(fits) * len(settings), not options.no_progress)
    outcomes = rank(fits, settings, requests, cache_of, trace_key, partial, keep, ranking.show)
    ranking.close()
    print_fit(fits["as given"])
    checked = public_checks(contents, fits["as given"])
    for one in checked:
        print(f"Check, {one['name']}: {one['figure']} predicted {one['predicted']:.4g}, reported {one['reported']:g} "
              f"({one['off']:+.1%}; {one['mark']}, {one['source']})")
    print("Assumed by the model:", *(f"  {words}" for words in MODEL_ASSUMES), sep="\n")
    rates = [one["figures"]["hit_rate"] for one in outcomes if one["figures"]["hit_rate"] is not None]
    room = sum(one["waits"]["room"] > 0 for one in outcomes if "waits" in one)
    print(f"Hits: {min(rates):.3f} to {max(rates):.3f} ({options.cache}); in {room} of {len(outcomes)} outcomes a "
          "request had to wait for KV blocks")
    for name in fits:
        print(f"{name}:")
        for one in [one for one in outcomes if one["alternative"] == name]:
            print("  " + outcome_line(one))
    if options.keep:
        path = bench_record.keep("replay-sim", {
            "kind": "replay-sim", **bench_record.commit(), "command": options.command,
            "definitions": definitions.VERSION,
            "name": contents.get("name", options.points.name), "seed": options.seed, "cache": options.cache,
            "requests": len(requests), "hit_rates": [min(rates), max(rates)],
            "model_assumes": MODEL_ASSUMES, "fit": fit_record(fits["as given"]),
            "alternatives": contents.get("alternatives", []), "memory": memory, "checks": checked,
            "outcomes": outcomes})
        print(f"kept as {path.name}")
    return 0


def outcome_line(one: dict[str, Any]) -> str:
    """A ranked setting."""
    def shown(path: str, form: str) -> str:
        value = one["figures"][path]
        return "not reported" if value is None else value if isinstance(value, str) else format(value, form)

    groups = [(words, [name for name, met in one["gates"] if met is state])
              for words, state in (("missed", False), ("not reported", None))]
    verdict = "; ".join(f"{words}: {', '.join(names)}" for words, names in groups if names)
    return (f"{words_of(one):44s} weighted {shown('weighted', '7,.0f')}  wall {shown('wall_s', '8,.0f')} s  "
            f"TTFT P90 {shown('ttft_s.p90', '7.2f')}  output P10 {shown('output_tps.p10', '6.2f')}  "
            f"hits {shown('hit_rate', '.3f')}  sent {one['sent']} of {one['of']}  {verdict or 'all gates met'}")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    options.command = bench_record.without_paths([Path(sys.argv[0]).name,
                                                  *(sys.argv[1:] if arguments is None else arguments)])
    try:
        if options.program == "fit":
            print_fit(cost_model.fit(*cost_model.read(options.points)))
            return 0
        return {"points": _points, "check": _check, "rank": _rank}[options.program](options)
    except KeyboardInterrupt:
        print("replay_sim: interrupted" + (f"; what is in {options.partial} is not computed again" if getattr(
            options, "partial", None) else ""), file=sys.stderr)
        return INTERRUPTED
    except (SimError, RequestsError, ServedError, trace.DatasetError, cost_model.PointsError, records.RecordError,
            ValueError, OSError) as error:
        print(f"replay_sim: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
