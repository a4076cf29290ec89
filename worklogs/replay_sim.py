"""Predicts the platform's figures for a configuration, from measured costs and a model of engine and cache.

    python worklogs/replay_sim.py points FORMAL_C1.json [MICROBENCH.json ...] --chunk 2048 -o points.json
    python worklogs/replay_sim.py fit points.json
    python worklogs/replay_sim.py check FORMAL_C4.json --points points.json [--keep]
    python worklogs/replay_sim.py rank --points worklogs/points_bi_v100.json --concurrency 1,2,4,8 --chunk 8192,16384

points  takes points from records: of formal runs with one request at a time (every TTFT and every decoding speed), and
        of any record that has a list "points" (cost_model.py says what a point is).
fit     fits the costs, and shows every residual and what the points leave open.
check   simulates the requests of a formal run (lengths, order, answers' lengths as they came) and compares predicted
        with measured figures: with the cache as modelled, and with the hits that were measured. Exit status 3 if one of
        the platform's figures is off by more than --limit.
rank    simulates the 881 requests of replay_trace.py for every combination of --concurrency, --chunk, --policy and
        --speculate, ranks them, and says what is measured and what is assumed. It does so under every alternative of
        the points file, since a rank that an assumption turns is none.

The engine's rules are in engine_model.py, the cache's in cache_model.py, the costs in cost_model.py.
"""
import argparse
import dataclasses
import itertools
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
import cache_sim  # noqa: E402
import cost_model  # noqa: E402
import replay_trace  # noqa: E402
from bench import definitions, records, stats  # noqa: E402
from bench.progress import Progress  # noqa: E402
from cache_model import KvPool, ServerStore  # noqa: E402
from cost_model import Costs, Fit  # noqa: E402
from engine_model import POLICIES, Cache, Given, Modelled, Setting, simulate  # noqa: E402
from replay_trace import BLOCK, Request  # noqa: E402

LIMIT_S = 46_800.0      # the platform starts no request after that
OFF = 3
# Of a record's figures: those that the platform judges by, and others that help to see why they are off.
JUDGED = ("wall_s", "ttft_s.p90", "output_tps.p10", "aggregate.output_tps", "aggregate.total_tps", "hit_rate",
          "weighted")
SHOWN = (*JUDGED, "ttft_s.p50", "output_tps.p50", "decode_tps.p50")
MODEL_ASSUMES = (
    "texts of the replay are not known: what prompts share is made up to meet the published shares (replay_trace.py)",
    "answers have the recorded lengths, whatever the setting",
    "KV for a whole answer is taken at its start; nothing is preempted, nothing fails",
    "reading and rendering take time but no processor from the engine; requests of one step cost what their sum costs",
    "the time of a step is linear in the features of cost_model.py",
)


class SimError(Exception):
    """What was asked for cannot be done; one line."""


def points_of(record: dict[str, Any], chunk: int, source: str) -> list[dict[str, Any]]:
    """Points that a record holds.

    Raises:
        SimError: it holds none.
    """
    if isinstance(record.get("points"), list):
        return [{"source": source, **point} for point in record["points"]]
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
                          "seconds": sample["first_s"] - sample["sent_s"],
                          "source": f"{source}, request {sample['index']}"})
        if tokens and tokens >= 8 and sample["last_s"] > sample["first_s"]:
            found.append({"what": "step", "batch": 1, "context": prompt + tokens // 2,
                          "seconds": (sample["last_s"] - sample["first_s"]) / (tokens - 1),
                          "source": f"{source}, request {sample['index']}"})
    if not found:
        raise SimError(f"{source}: no request that succeeded and reported its tokens")
    return found


def requests_of(record: dict[str, Any]) -> tuple[list[Request], dict[int, int], dict[int, int]]:
    """The requests of a formal run that succeeded: as the model takes them, the hits that were measured, and per index
    the turn before it where no turn was sent before its last one had ended.

    What a turn repeats beyond its conversation's last prompt, it is taken to share with the first request that is long
    enough (a system turn, say). Prompts are taken to part where messages end, which the server knows.
    """
    counter = itertools.count(1)
    places: dict[int, set[int]] = {}        # index -> where messages end
    last: dict[str, Request] = {}
    ends: dict[str, float] = {}
    requests: list[Request] = []
    hits: dict[int, int] = {}
    after: dict[int, int] = {}
    in_turn = True
    for sample in sorted(record["samples"], key=lambda one: one["index"]):
        length = sample["prompt_tokens"] or sample["expected_prompt_tokens"]
        if sample["class"] != "ok" or not length:
            continue
        reused = min(sample["theoretical_reuse"] or 0, length - 1)
        before = last.get(sample["conversation"])
        if before is None or len(before.keys) < reused // BLOCK:
            before = next((one for one in requests if len(one.keys) >= reused // BLOCK), None)
        if not reused or before is None:
            before, reused = None, 0
        keys = before.keys[:reused // BLOCK].tolist() if before is not None else []
        for index in (sample["index"], *(() if before is None else (before.index, ))):
            places.setdefault(index, {length - 5}).add(reused)
        keys = keys + [next(counter) for _ in range(length // BLOCK - len(keys))]
        answer = max(1, sample["completion_tokens"] or 1)
        own = [next(counter) for _ in range((length + answer) // BLOCK - length // BLOCK)]
        request = Request(sample["index"], length, answer, np.array(keys, np.int64), np.array(own, np.int64),
                          (), before.index if before is not None else -1, reused)
        previous = last.get(sample["conversation"])
        if previous is not None:
            after[sample["index"]] = previous.index
            in_turn &= sample["sent_s"] >= ends[sample["conversation"]] - 1e-6
        last[sample["conversation"]], ends[sample["conversation"]] = request, sample["last_s"]
        hits[sample["index"]] = sample["cached_tokens"] or 0
        requests.append(request)
    if not requests:
        raise SimError("the record has no request that succeeded with its prompt's length known")
    requests = [dataclasses.replace(request, boundaries=tuple(sorted(
        place for place in places[request.index] if 0 < place < request.length))) for request in requests]
    return requests, hits, after if in_turn else {}


def modelled_cache(memory: dict[str, Any], chunk: int, classes: tuple[Any, Any] | None = None) -> Modelled:
    """Our server's cache: its own rules, with `memory` (kv_tokens, kv_bytes, device, host, slot_bytes)."""
    policy, store = classes or cache_sim.server_classes()
    room = memory["kv_tokens"] * memory["kv_bytes"] - memory["device"] * memory["slot_bytes"]
    kv = KvPool(room // (BLOCK * memory["kv_bytes"]))
    return Modelled(kv, ServerStore(store, policy(), memory["device"], memory["host"], kv, chunk))


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


def check(record: dict[str, Any], fitted: Fit, chunk: int, max_num_seqs: int, memory: dict[str, Any],
          classes: tuple[Any, Any] | None = None) -> dict[str, Prediction]:
    """The run, simulated: "cache modelled" and "hits as measured"."""
    requests, hits, after = requests_of(record)
    setting = Setting(concurrency=record["concurrency"] or len(requests), chunk=chunk, max_num_seqs=max_num_seqs)
    by_index = {sample["index"]: sample for sample in record["samples"]}
    arrivals = None
    if record["mode"] == "open":
        arrivals = [by_index[request.index]["intended_s"] for request in requests]
    caches: dict[str, Cache] = {"cache modelled": modelled_cache(memory, chunk, classes),
                                "hits as measured": Given(hits)}
    return {name: predict(requests, cache, fitted.costs, setting, arrivals=arrivals, after=after)
            for name, cache in caches.items()}


def measured(record: dict[str, Any], path: str) -> float | None:
    """A figure of the run itself."""
    return record["wall_s"] if path == "wall_s" else stats.figure(record["summary"], path)


def memory_of(contents: dict[str, Any], requests: Sequence[Request]) -> dict[str, Any]:
    """What the points file says of the cache's memory, or room for everything."""
    if "memory" in contents:
        return dict(contents["memory"])
    tokens = sum(-(-(request.length + request.answer) // BLOCK) * BLOCK for request in requests)
    return {"kv_tokens": tokens + 1024, "kv_bytes": 1024, "device": 1024, "host": 0, "slot_bytes": 0,
            "why": "room for all prompts; 1,024 checkpoints"}


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


def rank(contents: dict[str, Any], fits: dict[str, Fit], settings: Sequence[Setting], requests: Sequence[Request],
         hits: dict[int, int], done: dict[str, dict[str, Any]], keep: Any = None,
         progress: Any = lambda done, words: None) -> list[dict[str, Any]]:
    """Figures of each setting under each alternative, the best weighted score first within each.

    Args:
        hits: per request, tokens found by the cache.
        done: outcomes that a broken-off run left, by key; they are not computed again.
        keep: called with (key, outcome) for each new one.
        progress: called with how many are done and the one that follows.
    """
    outcomes = []
    trace = bench_record.digest([[request.length, request.answer, hits.get(request.index, 0)] for request in requests])
    for name, fitted in fits.items():
        for setting in settings:
            key = json.dumps([name, dataclasses.asdict(setting), fitted.costs.values, trace])
            if key not in done:
                progress(len(outcomes), f"{name}: {words_of(setting)}")
                found = predict(requests, Given(hits), fitted.costs, setting, limit_s=LIMIT_S)
                done[key] = {"alternative": name, **dataclasses.asdict(setting), "sent": len(found.samples),
                             "of": len(requests), "figures": {path: found.figure(path) for path in SHOWN},
                             "gates": [[gate["name"], bool(gate["met"])] for gate in found.summary["gates"]]}
                if keep is not None:
                    keep(key, done[key])
            outcomes.append(done[key])
    order = {name: place for place, name in enumerate(fits)}
    return sorted(outcomes, key=lambda one: (order[one["alternative"]], -one["sent"],
                                             -(one["figures"]["weighted"] or 0.0)))


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


def _numbers(text: str) -> list[int]:
    return [int(value) for value in text.split(",")]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = parser.add_subparsers(dest="program", required=True)
    one = programs.add_parser("points", help="take points from records")
    one.add_argument("records", nargs="+", type=Path)
    one.add_argument("--chunk", type=int, required=True, help="the server's max_num_batched_tokens")
    one.add_argument("--experts", type=int, default=0, help="of a mixture-of-experts model")
    one.add_argument("--top-k", type=int, default=0)
    one.add_argument("--out", "-o", type=Path, required=True)
    one = programs.add_parser("fit", help="fit the costs, show residuals")
    one.add_argument("points", type=Path)
    one = programs.add_parser("check", help="compare predicted with measured figures of a formal run")
    one.add_argument("record", type=Path)
    one.add_argument("--points", type=Path, required=True)
    one.add_argument("--chunk", type=int, help="default: from the server's command in the record")
    one.add_argument("--max-num-seqs", type=int, help="the same")
    one.add_argument("--limit", type=float, default=0.15, help="share that a figure may be off (default: %(default)s)")
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
                     help="hits: found once by the server's rules at the first setting, none, or all that repeats")
    one.add_argument("--seed", type=int, default=0, help="of the trace")
    one.add_argument("--count", type=int, help="only the first requests")
    one.add_argument("--partial", type=Path, metavar="FILE",
                     help="outcomes are added there; what is there is not computed again")
    one.add_argument("--keep", action="store_true", help="keep the outcome in remote_results/")
    one.add_argument("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    if options.program == "rank":
        if unknown := set(options.policy) - set(POLICIES):
            parser.error(f"--policy {', '.join(sorted(unknown))}: {', '.join(POLICIES)} are known")
        if min(*options.concurrency, *options.chunk, options.max_num_seqs, 1) < 1 or min(options.speculate) < 0:
            parser.error("--concurrency, --chunk and --max-num-seqs are at least 1, --speculate at least 0")
        if not 0 <= options.acceptance <= 1:
            parser.error("--acceptance is a share, from 0 to 1")
    return options


def _points(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for path in options.records:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SimError(f"{path}: does not parse: {error}") from error
        found += points_of(record, options.chunk, path.name)
    contents = {"name": ", ".join(path.name for path in options.records), "chunk": options.chunk,
                "experts": options.experts, "top_k": options.top_k, "points": found}
    options.out.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} points written to {options.out}")
    return 0


def _check(options: argparse.Namespace) -> int:
    record = records.read(options.record)
    contents, points = cost_model.read(options.points)
    fitted = cost_model.fit(contents, points)
    command = record["server"].get("command")
    chunk = options.chunk or option_of(command, "max-num-batched-tokens") or contents.get("chunk")
    seqs = options.max_num_seqs or option_of(command, "max-num-seqs") or 256
    if not chunk:
        raise SimError("the record does not say the server's max_num_batched_tokens; give --chunk")
    memory = memory_of(contents, requests_of(record)[0])
    print_fit(fitted)
    found = check(record, fitted, chunk, seqs, memory)
    failed = sum(sample["class"] != "ok" for sample in record["samples"])
    print(f"Against {options.record.name} ({records.name(record)}, {record['concurrency']} at a time, chunk {chunk:,}, "
          f"max_num_seqs {seqs}; {failed} failed requests left out; cache: {memory['why']}):")
    print(f"  {'figure':24s} {'measured':>10s}" + "".join(f" {name:>26s}" for name in found))
    rows, off = [], []
    for path in SHOWN:
        real = measured(record, path)
        errors = {}
        line = f"  {path:24s} {real if real is None else format(real, '10.4g')}"
        for name, prediction in found.items():
            value = prediction.figure(path)
            errors[name] = value / real - 1 if real and value is not None else None
            line += f" {'-' if value is None else format(value, '.4g'):>14s}" \
                    f" {'' if errors[name] is None else format(errors[name], '+.1%'):>11s}"
        print(line + ("" if path in JUDGED else "   (shown only)"))
        error = errors["cache modelled"]
        rows.append({"figure": path, "measured": real, "judged": path in JUDGED,
                     **{name: prediction.figure(path) for name, prediction in found.items()}})
        if path in JUDGED and error is not None and abs(error) > options.limit:
            off.append(path)
    print(f"within {options.limit:.0%}: " + ("all" if not off else f"all but {', '.join(off)}"))
    if options.keep:
        path = bench_record.keep("replay-sim-check", {
            "kind": "replay-sim-check", **bench_record.commit(), "command": options.command,
            "record": options.record.name,
            "server": record["server"], "concurrency": record["concurrency"], "chunk": chunk, "max_num_seqs": seqs,
            "limit": options.limit, "off": off, "memory": memory, "model_assumes": MODEL_ASSUMES[2:],
            "fit": fit_record(fitted), "figures": rows})
        print(f"kept as {path.name}")
    return OFF if off else 0


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
        partial = dict(json.loads(line) for line in options.partial.read_text(encoding="utf-8").splitlines())

    def keep(key: str, outcome: Any) -> None:
        if options.partial:
            with open(options.partial, "a", encoding="utf-8") as file:
                file.write(json.dumps([key, outcome]) + "\n")

    finding = Progress(len(requests), not options.no_progress)
    hits = _hits(options, contents, fits["as given"], requests, settings[0], partial, keep, finding)
    finding.close()
    ranking = Progress(len(fits) * len(settings), not options.no_progress)
    outcomes = rank(contents, fits, settings, requests, hits, partial, keep, ranking.show)
    ranking.close()
    print_fit(fits["as given"])
    checked = public_checks(contents, fits["as given"])
    for one in checked:
        print(f"Check, {one['name']}: {one['figure']} predicted {one['predicted']:.4g}, reported {one['reported']:g} "
              f"({one['off']:+.1%}; {one['mark']}, {one['source']})")
    print("Assumed by the model:", *(f"  {words}" for words in MODEL_ASSUMES), sep="\n")
    print(f"Hits: {sum(hits.values()) / sum(request.length for request in requests):.3f} ({options.cache})")
    for name in fits:
        print(f"{name}:")
        for one in [one for one in outcomes if one["alternative"] == name]:
            print("  " + outcome_line(one))
    if options.keep:
        path = bench_record.keep("replay-sim", {
            "kind": "replay-sim", **bench_record.commit(), "command": options.command,
            "definitions": definitions.VERSION,
            "name": contents.get("name", options.points.name), "seed": options.seed, "cache": options.cache,
            "requests": len(requests), "hit_rate": sum(hits.values()) / sum(one.length for one in requests),
            "model_assumes": MODEL_ASSUMES, "fit": fit_record(fits["as given"]),
            "alternatives": contents.get("alternatives", []), "memory": contents.get("memory"), "checks": checked,
            "outcomes": outcomes})
        print(f"kept as {path.name}")
    return 0


def _hits(options: argparse.Namespace, contents: dict[str, Any], fitted: Fit, requests: Sequence[Request],
          setting: Setting, partial: dict[str, Any], keep: Any, progress: Progress) -> dict[int, int]:
    """Per request, tokens found. By the server's rules they are found once: settings change them by less than a
    hundredth, and finding them takes most of the time."""
    if options.cache == "none":
        return {}
    if options.cache == "unlimited":
        return dict(enumerate(replay_trace.reusable(list(requests))))
    memory = memory_of(contents, requests)
    key = json.dumps(["hits", options.seed, len(requests), memory, dataclasses.asdict(setting), fitted.costs.values])
    if key not in partial:
        samples, _ = simulate(requests, modelled_cache(memory, setting.chunk), fitted.costs, setting,
                              progress=lambda done: progress.show(done, "hits"))
        partial[key] = {str(sample["index"]): sample["cached_tokens"] for sample in samples}
        keep(key, partial[key])
    return {int(index): tokens for index, tokens in partial[key].items()}


def outcome_line(one: dict[str, Any]) -> str:
    """A ranked setting."""
    figures = {name: 0.0 if value is None else value for name, value in one["figures"].items()}
    missed = [name for name, met in one["gates"] if not met]
    return (f"{words_of(one):44s} weighted {figures['weighted']:7,.0f}  wall {figures['wall_s']:8,.0f} s  "
            f"TTFT P90 {figures['ttft_s.p90']:7.2f}  output P10 {figures['output_tps.p10']:6.2f}  "
            f"sent {one['sent']} of {one['of']}  " + (f"missed: {', '.join(missed)}" if missed else "all gates met"))


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
    except (SimError, cost_model.PointsError, records.RecordError, ValueError, OSError) as error:
        print(f"replay_sim: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
