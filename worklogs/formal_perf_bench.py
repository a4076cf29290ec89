"""Measures a server with a dataset, by the platform's definitions (bench/definitions.py), and keeps one record.

    python worklogs/formal_perf_bench.py DATASET.jsonl --base-url http://127.0.0.1:8000 --kind ours --concurrency 1
    python worklogs/formal_perf_bench.py DATASET.jsonl --open-loop [--rate 0.5]
    python worklogs/formal_perf_bench.py DATASET.jsonl ... --resume

Closed loop: requests go out in the dataset's order, each when one of --concurrency streams is free. Open loop: each at
its arrival_s, or with --rate at random times of so many a second, however many are under way; the intended time is
kept, so that a client or a server that is late does not hide it.

A request is sent as it stands in the dataset, but for: model, stream, stream_options.include_usage, the salt, and what
--max-tokens, --exact-tokens and --set say.

Before the run the cache is dealt with (--cache): `salt` gives all requests a cache_salt that no other run has (ours,
current vLLM), `reset` asks for POST /reset_prefix_cache, `none` leaves it as it is, and `fresh` is your word that the
server was started for this run; the record says so. --warm-up requests with short prompts of their own come first and
are not counted.

The tokenizer that made the dataset must be the server's: the shortest prompts are rendered by the server where it can
(ours), and every prompt's length is compared with the one that the server reports. The first that differs ends the run.

What is done is kept in NAME.partial beside the result until it is; --resume goes on there, with the rest. The wall
time of a run in several sittings is their sum. Failures are measurements: a request is never repeated. A request that
was under way when a sitting was broken off is sent again, and may find in the cache what its first try left there: its
sample says so ("again"). Of the client's and the machine's health only the last sitting's is kept. So a run of several
sittings counts as disturbed.

Exit status: 0 the run is complete (whatever the server answered), 1 bad input, or nothing could be sent, 2 the command
line, 3 the server went away in between and what was measured until then is kept, 4 the tokenizer disagrees with the
server, 130 interrupted (what was measured is in the partial file).
"""
import argparse
import asyncio
import contextlib
import json
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
from bench import definitions, jsonl, records, stats, trace  # noqa: E402
from bench.client import Client, LoopLag  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench_client import OthersMeter, lives  # noqa: E402

KINDS = ("ours", "vllm", "llama", "transformers", "stub", "other")
SALTED = ("ours", "vllm")
CACHE = {"salt": "salted", "reset": "reset", "fresh": "a server started for this run", "none": "as it was"}
# Prompts that the server renders before the run, the shortest.
RENDERED = 3
INTERRUPTED, AWAY, DISAGREES = 130, 3, 4
Sample = dict[str, Any]


class CannotRun(Exception):
    """Nothing was measured; one line. code: the exit status."""

    def __init__(self, words: str, code: int = 1) -> None:
        super().__init__(words)
        self.code = code


class Partial:
    """The file of a run that is not complete: a line that says which run, then what each sitting and request gave."""

    def __init__(self, path: Path, key: dict[str, Any], resume: bool) -> None:
        """Raises:
            CannotRun: there is one and it is not to be resumed, or it is another run's, or it does not parse.
        """
        self.path = path
        self.samples: dict[int, Sample] = {}
        self.sent: set[int] = set()
        self.wall = 0.0
        self.sittings = 0
        self.salt = secrets.token_hex(8)
        self.check(path, resume)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._held = jsonl.hold(path)
        except OSError as error:
            raise CannotRun(f"--out {path.parent}: no file can be written there: {error.strerror}") from error
        except jsonl.Held as error:
            raise CannotRun(str(error)) from error
        try:
            if resume:
                self._read(key)
            else:
                self._write({"run": key, "salt": self.salt})
            # At its start, so that one that is killed counts; of its time the last sample's end is all that is known.
            self.sittings += 1
            self._write({"sitting": self.sittings})
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check(path: Path, resume: bool) -> None:
        """Raises:
            CannotRun: as at the start, as far as it can be told before a server was asked.
        """
        # One that was killed before it wrote anything left nothing.
        there = path.exists() and path.stat().st_size > 0
        if resume and not there:
            raise CannotRun(f"nothing to resume: {path} is {'empty' if path.exists() else 'not there'}")
        if not resume and there:
            raise CannotRun(f"{path} holds an unfinished run, or one that goes on now: --resume goes on with it, or "
                            "remove it")

    def sends(self, index: int) -> bool:
        """A request is about to be sent. Returns whether it was before, by a sitting that did not see its end."""
        again = index in self.sent
        self.sent.add(index)
        self._write({"sent": index})
        return again

    def add(self, sample: Sample) -> None:
        """A request is done."""
        self.samples[sample["index"]] = sample
        self._write({"sample": sample})

    def sat(self, wall: float) -> None:
        """A sitting ended; `wall` is that of all."""
        self._write({"wall_s": wall})

    def done(self) -> None:
        """Nothing is left to go on with."""
        self.path.unlink()
        self.close()

    def close(self) -> None:
        """Lets others go on with the file."""
        self._held.close()

    def _write(self, line: dict[str, Any]) -> None:
        jsonl.add(self.path, line)

    def _read(self, key: dict[str, Any]) -> None:
        try:
            first, *lines = jsonl.read(self.path)
            of, self.salt = first["run"], first["salt"]
            changed = [name for name in key if of.get(name) != key[name]]
            for line in lines:
                self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CannotRun(f"{self.path} is no unfinished run ({type(error).__name__}: {error}); remove it") from error
        if changed:
            raise CannotRun(f"{self.path} is of another run ({', '.join(changed)} differ); give the same options, or "
                            "remove it")

    def _take(self, line: dict[str, Any]) -> None:
        if "sample" in line:
            sample = line["sample"]
            self.samples[sample["index"]] = sample
            self.wall = max(self.wall, sample["last_s"] or sample.get("failed_s") or sample["sent_s"])
        elif "wall_s" in line:
            self.wall = max(self.wall, line["wall_s"])
        elif "sent" in line:
            self.sent.add(line["sent"])
        else:
            self.sittings = line["sitting"]


def body_of(item: trace.Item, options: argparse.Namespace, salt: str | None) -> dict[str, Any]:
    """What is sent.

    Raises:
        CannotRun: the lengths of answers that it asks for cannot be bounded.
    """
    body = {**item.body, "model": options.model, "stream": True,
            "stream_options": {**(item.body.get("stream_options") or {}), "include_usage": True}}
    if options.max_tokens is not None or options.exact_tokens:
        asked = [body.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
        for one in asked:
            if one is not None and (isinstance(one, bool) or not isinstance(one, int)):
                raise CannotRun(f"request {item.index} of the dataset asks for {one!r:.40} tokens at most, which is no "
                                "count")
        most = [number for number in (*asked, options.max_tokens,
                                      item.answer_tokens if options.exact_tokens else None) if number is not None]
        body["max_tokens"] = min(most)
        if options.exact_tokens:
            body |= {"min_tokens": body["max_tokens"], "ignore_eos": True}
    if salt is not None:
        body["cache_salt"] = salt
    return {**body, **options.set}


def arrivals(items: list[trace.Item], rate: float | None, seed: int) -> list[float]:
    """Seconds from the run's start.

    Raises:
        CannotRun: no --rate, and a request has no arrival_s.
    """
    if rate is not None:
        chance, now, found = random.Random(seed), 0.0, []
        for _ in items:
            found.append(now)
            now += chance.expovariate(rate)
        return found
    lacking = next((item.index for item in items if item.arrival_s is None), None)
    if lacking is not None:
        raise CannotRun(f"request {lacking} of the dataset has no arrival_s; give --rate")
    return [float(item.arrival_s or 0.0) for item in items]


class Run:
    """One sitting."""

    def __init__(self, client: Client, items: list[trace.Item], options: argparse.Namespace, partial: Partial) -> None:
        self.client, self.options, self.partial = client, options, partial
        self.salt = partial.salt if options.cache == "salt" else None
        self.items = [item for item in items if item.index not in partial.samples]
        self.progress = Progress(len(items), not options.no_progress, len(partial.samples))
        self.ended_early: str | None = None
        self.disagreement: str | None = None
        # Times of a later sitting follow those of the one before.
        self.start = 0.0
        self.wall = partial.wall
        self._over_at: float | None = None
        self._gone = asyncio.Event()

    async def run(self) -> None:
        """Sends all that is not done yet."""
        self.start = self.client.clock() - self.partial.wall
        send = self._open if self.options.open_loop else self._closed
        loop, task = asyncio.get_running_loop(), asyncio.create_task(send())
        gone = asyncio.create_task(self._gone.wait())
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):     # Not in the main thread.
                loop.add_signal_handler(number, self._interrupted)
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            for one in (task, gone):
                one.cancel()
            done = await asyncio.gather(task, gone, return_exceptions=True)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ValueError, RuntimeError):
                    loop.remove_signal_handler(number)
        # Waiting for a server that is gone is no part of the run.
        self.wall = (self._over_at or self.client.clock()) - self.start
        self.partial.sat(self.wall)
        self.progress.close()
        if isinstance(done[0], Exception):
            raise done[0]

    def _interrupted(self) -> None:
        self._end("interrupted")

    def _end(self, why: str, at: float | None = None) -> None:
        if self.ended_early is None:
            self.ended_early, self._over_at = why, at
        self._gone.set()

    async def _closed(self) -> None:
        waiting: Iterator[trace.Item] = iter(self.items)

        async def stream() -> None:
            for item in waiting:
                await self._one(item, None)
        await _all([stream() for _ in range(min(self.options.concurrency, len(self.items)))])

    async def _open(self) -> None:
        times = {item.index: when for item, when in zip(self.options.all_items, arrivals(
            self.options.all_items, self.options.rate, self.options.seed), strict=True)}
        # A later sitting begins with the first request that is left.
        skipped = times[self.items[0].index] - self.partial.wall if self.partial.samples and self.items else 0.0

        async def one(item: trace.Item) -> None:
            due = times[item.index] - skipped
            await asyncio.sleep(max(0.0, self.start + due - self.client.clock()))
            await self._one(item, due)
        await _all([one(item) for item in self.items])

    async def _one(self, item: trace.Item, intended: float | None) -> None:
        again = self.partial.sends(item.index)
        found = await self.client.stream(body_of(item, self.options, self.salt), self.start)
        sample = {"index": item.index, "conversation": item.conversation, "turn": item.turn, "intended_s": intended,
                  "again": again,
                  **{name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()},
                  "expected_prompt_tokens": item.expected_prompt_tokens, "theoretical_reuse": item.theoretical_reuse}
        self.partial.add(sample)
        counts: dict[str, int] = {}
        for one in self.partial.samples.values():
            counts[one["class"]] = counts.get(one["class"], 0) + 1
        self.progress.show(len(self.partial.samples), ", ".join(f"{number} {name}" for name, number in counts.items()))
        self._compare(sample)
        failed_at = self.client.clock()
        if sample["class"] in ("connection", "stream_aborted") and not await self._back():
            self._end(f"the server went away: request {item.index}: {sample['class']}: {sample['error']}", failed_at)
            await asyncio.sleep(3600)       # Until it is cancelled: no further request.

    def _compare(self, sample: Sample) -> None:
        expected, found = sample["expected_prompt_tokens"], sample["prompt_tokens"]
        if expected is not None and found is not None and expected != found and not self.options.any_tokenizer:
            self.disagreement = (f"the tokenizer that made the dataset disagrees with the server: request "
                                 f"{sample['index']} has {found} prompt tokens there, {expected} in the dataset")
            self._end(self.disagreement)

    async def _back(self) -> bool:
        """Whether a connection can be made, now or soon."""
        until = self.client.clock() + self.options.patience
        while not await self.client.listens():
            if self.client.clock() >= until:
                return False
            await asyncio.sleep(0.2)
        return True


async def _all(work: list[Awaitable[None]]) -> None:
    """Cancels the others where one fails."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def prepare(client: Client, items: list[trace.Item], options: argparse.Namespace) -> None:
    """Deals with the cache, warms up, and compares tokenizers.

    Raises:
        CannotRun: nothing should be sent.
    """
    try:
        if not options.any_tokenizer:
            await _compare_rendered(client, items, options)
        if options.cache == "reset" and not options.resume:
            status, found = await client.ask("POST", "/reset_prefix_cache")
            if status != 200:
                raise CannotRun(f"--cache reset: /reset_prefix_cache answers {status}; start the server with "
                                f"--enable-reset-prefix-cache, or use --cache salt ({str(found)[:100]})")
    except OSError as error:
        raise CannotRun(f"{options.base_url}: {error}") from error
    for number in range(options.warm_up):
        body = {"model": options.model, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8,
                "messages": [{"role": "user", "content": f"Warm-up {secrets.token_hex(8)} {number}"}]}
        found = await client.stream(body)
        if found["class"] != definitions.OK:
            raise CannotRun(f"warm-up request {number}: {found['class']}: {found['error']}")


async def version_of(client: Client, options: argparse.Namespace) -> str | None:
    """The server's, where it tells one.

    Raises:
        CannotRun: there is no server.
    """
    if options.server_version:
        return str(options.server_version)
    try:
        status, found = await client.ask("GET", "/version")
    except OSError as error:
        raise CannotRun(f"{options.base_url}: {error}") from error
    if status == 200 and isinstance(found, dict) and "version" in found:
        return str(found["version"])
    return None


async def _compare_rendered(client: Client, items: list[trace.Item], options: argparse.Namespace) -> None:
    """Raises:
        CannotRun: the server renders a prompt to another length.
    """
    known = sorted((item for item in items if item.expected_prompt_tokens is not None),
                   key=lambda item: item.expected_prompt_tokens or 0)
    for item in known[:RENDERED] if options.kind == "ours" else ():
        status, found = await client.ask("POST", "/v1/chat/completions/render", body_of(item, options, None))
        ids = found.get("prompt_token_ids") if isinstance(found, dict) else None
        if status != 200 or not isinstance(ids, list):
            raise CannotRun(f"request {item.index} cannot be rendered by the server: {status} {str(found)[:200]} (is "
                            f"it a server of --kind {options.kind}?)")
        length = len(ids)
        if length != item.expected_prompt_tokens:
            raise CannotRun(f"the tokenizer that made the dataset disagrees with the server: request {item.index} "
                            f"renders to {length} tokens there, {item.expected_prompt_tokens} in the dataset; make the "
                            "dataset with this server's checkpoint (--any-tokenizer measures all the same)", DISAGREES)


def manifest_of(receipt: Path) -> str:
    """The hash of the manifest that was applied.

    Raises:
        CannotRun: it is no receipt.
    """
    try:
        return str(json.loads(receipt.read_text(encoding="utf-8"))["manifest"])
    except OSError as error:
        raise CannotRun(f"--receipt {receipt}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CannotRun(f"--receipt {receipt}: is no receipt of patch_ops.sh ({type(error).__name__}: {error})"
                        ) from error


def dataset_of(dataset: trace.Dataset, requests: int) -> dict[str, Any]:
    """What a record says of the dataset; with a manifest of ours, all that it takes to make it again."""
    manifest = dataset.manifest
    made = {name: manifest[name] for name in ("generator", "settings", "tokenizer", "template") if name in manifest}
    return {"name": dataset.name, "sha256": dataset.sha256, "requests": requests, "seed": manifest.get("seed"),
            "cap": manifest.get("cap"), **(made if "settings" in made else {})}


def record_of(dataset: trace.Dataset, run: Run, health: dict[str, Any], version: str | None, words: list[str],
              options: argparse.Namespace) -> dict[str, Any]:
    """What is kept."""
    samples = [run.partial.samples[index] for index in sorted(run.partial.samples)]
    if options.any_tokenizer:
        # What an earlier prompt shared was counted in another tokenizer's tokens.
        wrong = [sample for sample in samples if None not in (sample["expected_prompt_tokens"], sample["prompt_tokens"])
                 and sample["expected_prompt_tokens"] != sample["prompt_tokens"]]
        if wrong:
            samples = [{**sample, "theoretical_reuse": None} for sample in samples]
    wall = round(run.wall, 6)
    summary = definitions.summary(samples, wall)
    mode = "open" if options.open_loop else "closed"
    compared = [sample for sample in samples if None not in (sample["expected_prompt_tokens"], sample["prompt_tokens"])]
    late = [sample["sent_s"] - sample["intended_s"] for sample in samples if sample["intended_s"] is not None]
    return {
        "kind": "formal-perf", "definitions": definitions.VERSION, "run": run.partial.salt,
        "server": {"kind": options.kind, "version": version,
                   "command": bench_record.without_paths(options.server_command.split())},
        **bench_record.commit(), "manifest": options.manifest, "machine": bench_record.machine(),
        "command": bench_record.without_paths(words),
        "dataset": dataset_of(dataset, len(options.all_items)),
        "model": options.model, "mode": mode, "concurrency": None if options.open_loop else options.concurrency,
        "rate": options.rate, "max_tokens": options.max_tokens, "exact_tokens": options.exact_tokens,
        "set": options.set, "cache_before": CACHE[options.cache], "warm_up": options.warm_up,
        "wall_s": wall, "sittings": run.partial.sittings,
        "client": {**health, "sent_late_s": definitions.percentiles(late) if late else None},
        "tokenizer": {"compared": len(compared), "disagree": sum(
            sample["expected_prompt_tokens"] != sample["prompt_tokens"] for sample in compared)},
        "ended_early": run.ended_early, "summary": summary, "groups": definitions.groups(samples),
        "intervals": stats.bootstrap(samples, wall, definitions.summary, mode=mode, rounds=options.rounds),
        "samples": samples}


def shown(record: dict[str, Any]) -> str:
    """The figures for a terminal."""
    summary = record["summary"]
    lines = [f"definitions {record['definitions']}; {summary['requests']} requests in {record['wall_s']:.2f} s"]
    rows = [("success rate", "success_rate"), ("cache hit rate", "hit_rate"), ("  of possible", "hit_rate_theoretical"),
            ("TTFT P50, s", "ttft_s.p50"), ("TTFT P90, s", "ttft_s.p90"),
            ("TTFT P90, failures counted", "failure_adjusted.ttft_s.p90"),
            ("output TPS of a request, P10", "output_tps.p10"), ("output TPS of a request, P50", "output_tps.p50"),
            ("  P10, failures counted", "failure_adjusted.output_tps.p10"), ("decode TPS, P50", "decode_tps.p50"),
            ("output TPS over the wall", "aggregate.output_tps"),
            ("uncached input TPS over the wall", "aggregate.uncached_input_tps"),
            ("cached TPS over the wall", "aggregate.cached_tps"), ("all TPS over the wall", "aggregate.total_tps"),
            ("weighted score", "weighted")]
    intervals = record["intervals"]["figures"]
    for name, path in rows:
        value: Any = summary
        for part in path.split("."):
            value = value[part]
        text = "not reported" if value is None else value if isinstance(value, str) else f"{value:.4g}"
        if path in intervals:
            text += f"  ({stats.between(intervals[path], '{:.4g}')})"
        lines.append(f"  {name:34s} {text}")
    if record["intervals"]["none"]:
        lines.append(f"  no intervals: {record['intervals']['none']}")
    for title, group in record["groups"].items():
        for row in group if len(group) > 1 else ():
            hit, possible = (row[name] for name in ("hit_rate", "hit_rate_theoretical"))
            lines.append(f"  {title.replace('_', ' ')} {row['group']!s:12s} {row['succeeded']}/{row['requests']} ok, "
                         f"TTFT P90 {_number(row['ttft_s']['p90'])} s, output TPS P10 "
                         f"{_number(row['output_tps']['p10'])}, cached {_number(hit)} of {_number(possible)}")
    for gate in summary["gates"]:
        verdict = {True: "met", False: "NOT MET", None: "not reported"}[gate["met"]]
        value = gate["value"] if isinstance(gate["value"], str) else _number(gate["value"])
        lines.append(f"  gate: {gate['name']:30s} {gate['wanted']:16s} {value:>12s}  {verdict}")
    failed = {name: count for name, count in summary["classes"].items() if name != definitions.OK}
    if failed:
        lines.append(f"  failed: {', '.join(f'{count} {name}' for name, count in failed.items())}")
    if any(odd := {name: summary[name] for name in ("no_output", "unfinished", "after_finish", "repetitive",
                                                    "errors_in_stream") if summary[name]}):
        lines.append(f"  of what succeeded: {', '.join(f'{count} {name}' for name, count in odd.items())}")
    lines += [f"  DISTURBED: {words}: the figures are not the server's alone" for words in records.disturbances(record)]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def settings(argument: str) -> tuple[str, Any]:
    """KEY=JSON of --set."""
    name, _, value = argument.partition("=")
    try:
        if not name:
            raise ValueError("no key")
        return name, json.loads(value, parse_constant=trace.no_number)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{argument!r} is not KEY=JSON: {error}") from error


def count(least: int) -> Callable[[str], int]:
    """A whole number of at least `least`."""
    def number(argument: str) -> int:
        if not argument.isdecimal() or int(argument) < least:
            raise argparse.ArgumentTypeError(f"{argument!r} is no whole number of at least {least}")
        return int(argument)
    return number


def result_name(argument: str) -> str:
    """What a record may be called."""
    if not bench_record.NAME.fullmatch(argument):
        raise argparse.ArgumentTypeError(f"{argument!r}: lower-case letters, digits, dots and dashes")
    return argument


def positive(argument: str) -> float:
    """A number above 0."""
    try:
        value = float(argument)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{argument!r} is no number above 0")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--kind", choices=KINDS, default="ours", help="of server (default: %(default)s)")
    parser.add_argument("--model", default="llm", help="the model's name in requests (default: %(default)s)")
    parser.add_argument("--api-key")
    parser.add_argument("--limit", type=count(1), help="only the first so many requests")
    parser.add_argument("--concurrency", type=count(1), default=1, help="streams of the closed loop (default: 1)")
    parser.add_argument("--open-loop", action="store_true", help="send at arrival times")
    parser.add_argument("--rate", type=positive, help="requests a second at random times instead of arrival_s")
    parser.add_argument("--seed", type=int, default=0, help="of --rate's times (default: 0)")
    parser.add_argument("--max-tokens", type=count(1), help="no answer may be longer")
    parser.add_argument("--exact-tokens", action="store_true",
                        help="every answer has the dataset's answer_tokens (or --max-tokens), by ignore_eos and "
                             "min_tokens: servers get the same work")
    parser.add_argument("--set", type=settings, action="append", default=[], metavar="KEY=JSON",
                        help="a field of every request, for example temperature=0; may be repeated")
    parser.add_argument("--cache", choices=sorted(CACHE),
                        help="default: salt for ours and vllm, none for others, which do not know it")
    parser.add_argument("--warm-up", type=count(0), default=2, help="short requests before (default: %(default)s)")
    parser.add_argument("--any-tokenizer", action="store_true",
                        help="measure although the dataset's tokenizer is not the server's")
    parser.add_argument("--timeout", type=positive, default=1800.0,
                        help="seconds that the next bytes may take (default: %(default)s)")
    parser.add_argument("--patience", type=positive, default=10.0,
                        help="seconds that a server may be away before the run ends (default: %(default)s)")
    parser.add_argument("--rounds", type=count(0), default=stats.ROUNDS, help="draws for intervals (default: 300)")
    parser.add_argument("--server-command", default="", help="how the server was started; kept without paths")
    parser.add_argument("--server-pid", type=count(1),
                        help="process whose tree is the server: the record says how many cores all others used")
    parser.add_argument("--server-version", default="", help="default: what /version says")
    parser.add_argument("--receipt", type=Path, help="receipt.json of the tree that runs, for the manifest's hash")
    parser.add_argument("--name", type=result_name, help="of the result; default: formal-perf-KIND")
    parser.add_argument("--out", type=Path, default=bench_record.RESULTS, help="folder of the record")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there, too")
    parser.add_argument("--resume", action="store_true", help="go on with the unfinished run of this name")
    parser.add_argument("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    options.name = options.name or f"formal-perf-{options.kind}"
    options.cache = options.cache or ("salt" if options.kind in SALTED else "none")
    options.set = dict(options.set)
    if options.cache == "salt" and options.kind not in SALTED:
        parser.error(f"--cache salt: a server of kind {options.kind} ignores cache_salt; start it anew and use none")
    if options.rate is not None and not options.open_loop:
        parser.error("--rate is for --open-loop")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    words = [Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)]
    try:
        return asyncio.run(_main(options, words))
    except KeyboardInterrupt:
        print("formal_perf_bench: interrupted before the first request, or after the last", file=sys.stderr)
        return INTERRUPTED
    except CannotRun as error:
        print(f"formal_perf_bench: {error}", file=sys.stderr)
        return error.code
    except (trace.DatasetError, OSError, ValueError) as error:
        print(f"formal_perf_bench: {error}", file=sys.stderr)
        return 1


async def _main(options: argparse.Namespace, words: list[str]) -> int:
    dataset = trace.read(options.dataset, options.limit)
    options.all_items = list(dataset.items)
    if options.exact_tokens and options.max_tokens is None:
        lacking = next((item.index for item in dataset.items if item.answer_tokens is None), None)
        if lacking is not None:
            raise CannotRun(f"--exact-tokens: request {lacking} has no answer_tokens; give --max-tokens")
    if options.open_loop:
        arrivals(options.all_items, options.rate, options.seed)
    for item in options.all_items:
        body_of(item, options, None)
    if options.json and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise CannotRun(f"--json {options.json}: give a file in a folder that is there")
    if options.server_pid and not lives(options.server_pid):
        raise CannotRun(f"--server-pid {options.server_pid}: there is no such process")
    options.manifest = manifest_of(options.receipt) if options.receipt else None
    client = Client(options.base_url, options.timeout, options.api_key)
    key = {name: getattr(options, name) for name in (
        "base_url", "kind", "model", "limit", "concurrency", "open_loop", "rate", "seed", "max_tokens", "exact_tokens",
        "set", "cache", "any_tokenizer", "server_command", "manifest")}
    path = options.out / f"{options.name}.partial"
    Partial.check(path, options.resume)
    version = await version_of(client, options)
    key |= {"dataset": dataset.sha256, "server_version": version, "commit": bench_record.commit()["commit"]}
    with contextlib.closing(Partial(path, key, options.resume)) as partial:
        return await _measure(client, dataset, partial, version, words, options)


async def _measure(client: Client, dataset: trace.Dataset, partial: Partial, version: str | None, words: list[str],
                   options: argparse.Namespace) -> int:
    fresh = not partial.samples
    try:
        await prepare(client, options.all_items, options)
    except (CannotRun, asyncio.CancelledError):
        if fresh:
            partial.done()
        raise
    run = Run(client, options.all_items, options, partial)
    began = time.monotonic()
    meter = OthersMeter(options.server_pid)
    meter.start()
    async with LoopLag() as lag:
        await run.run()
    others = meter.cores()
    if run.ended_early == "interrupted":
        print(f"formal_perf_bench: interrupted after {len(partial.samples)} of {len(options.all_items)} requests; "
              "--resume goes on", file=sys.stderr)
        return INTERRUPTED
    record = record_of(dataset, run, lag.health(), version, words, options)
    record["client"]["watched_s"] = round(time.monotonic() - began, 3)
    record["others_cores"] = others
    text = shown(record)
    path = bench_record.keep(options.name, record, options.out)
    if options.json:
        shutil.copyfile(path, options.json)
    if run.ended_early is None or run.disagreement:
        partial.done()
    # Last: whoever reads it may go before it is all written.
    print(f"{text}\nkept as {path.name}", flush=True)
    if run.ended_early is None:
        return 0
    print(f"formal_perf_bench: {run.ended_early}; {len(partial.samples)} of {len(options.all_items)} requests were "
          f"sent{'' if run.disagreement else '; --resume goes on with the rest'}", file=sys.stderr)
    return DISAGREES if run.disagreement else AWAY


if __name__ == "__main__":
    sys.exit(main())
