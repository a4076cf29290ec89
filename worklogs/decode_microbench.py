"""Measures what a step of a running server takes, by batch and by context, and keeps one record.

    python worklogs/decode_microbench.py --base-url http://127.0.0.1:8000 --kind ours
    python worklogs/decode_microbench.py --batch 1,2,4 --context 0,1K,8K --tokens 32 --rounds 5
    python worklogs/decode_microbench.py ... --resume

Every measurement sends `batch` requests at once, each with a short question behind a prefix of `context` tokens (0: no
prefix) and an answer of just --tokens tokens (ignore_eos, min_tokens). The prefix is new in every run. It is sent
before, once or as often as it takes until the server says that it knows it (three times at most), so that the requests
compute a few tokens of prompt and all decode together. What the server says was cached is in every row; "not reported"
is never 0. The answers of a batch share their prefix's KV.

Each round measures every context and batch, every second round in the opposite order. Figures are medians over the
rounds; bench/steps.py defines them. Contexts that do not fit into the server's max_model_len are skipped, and the
record says so.

The record holds "points" for `replay_sim.py points RECORD --chunk N`: a step for every row, and the time to the first
token of the requests that were alone on the server, where it reports what was cached.

What is done is kept in NAME.partial beside the record until all is; --resume goes on there.

Exit status: 0 complete (the table says which measurements failed), 1 bad input, or nothing could be sent, 2 the command
line, 3 the server went away (what was measured until then is kept), 130 interrupted.
"""
import argparse
import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
from bench import definitions, micro_tables, steps  # noqa: E402
from bench.client import Client, LoopLag, Reading  # noqa: E402
from bench.progress import Progress  # noqa: E402
from bench.words import WORDS  # noqa: E402
from formal_perf_bench import (  # noqa: E402
    AWAY,
    INTERRUPTED,
    KINDS,
    CannotRun,
    Partial,
    count,
    positive,
    result_name,
    settings,
)

BATCHES, CONTEXTS = "1,2,4,8,16", "0,1K,8K,32K,100K,200K"
QUESTION_WORDS = 8
# A prompt is longer than its words: the template's tokens, and words of more than one.
ROOM = 64
PRIMES, KNOWN_SHARE = 3, 0.9
Sample = dict[str, Any]


class Away(Exception):
    """The server is gone; one line."""


class Texts:
    """Prompts of one run: the same for its salt, new for another."""

    def __init__(self, salt: str) -> None:
        self._salt = salt

    def messages(self, context: int, name: str) -> list[dict[str, str]]:
        """A prefix of about `context` tokens, and a question of its own for each `name`."""
        question = f"{self._words(name, QUESTION_WORDS)}. Write on."
        prefix = [{"role": "system", "content": self._words(f"prefix {context}", context)}] if context else []
        return [*prefix, {"role": "user", "content": question}]

    def _words(self, name: str, number: int) -> str:
        return " ".join(random.Random(f"{self._salt} {name}").choices(WORDS, k=number))


class Bench:
    """One sitting."""

    def __init__(self, client: Client, options: argparse.Namespace, partial: Partial, longest: int | None) -> None:
        self.client, self.options, self.partial = client, options, partial
        self.texts = Texts(partial.salt)
        self.skipped = {context: f"longer than the server's max_model_len {longest}" for context in options.context
                        if longest is not None and context + ROOM + options.tokens > longest}
        self._names = (f"{partial.sittings} {number}" for number in itertools.count())
        self._known: set[int] = set()
        self.start = client.clock() - partial.wall

    def plan(self) -> Iterator[tuple[int, int, int, int]]:
        """(index, round, context, batch), in order."""
        options = self.options
        index = 0
        for turn in range(options.rounds):
            way = -1 if turn % 2 else 1
            for context in options.context[::way]:
                for batch in options.batch[::way]:
                    yield index, turn, context, batch
                    index += 1

    async def run(self) -> None:
        """Measures all that is not measured yet.

        Raises:
            Away: the server is gone.
        """
        plan = list(self.plan())
        progress = Progress(len(plan), not self.options.no_progress, len(self.partial.samples))
        primed: tuple[int, int] | None = None
        for index, turn, context, batch in plan:
            if index in self.partial.samples or context in self.skipped:
                continue
            progress.show(index, f"round {turn + 1}, context {context:,}, batch {batch}")
            sent = self.client.clock() - self.start
            async with LoopLag() as lag:
                primes = [] if primed == (turn, context) or not context else await self._prime(context)
                primed = (turn, context)
                found = {} if context in self.skipped else await self._measure(context, batch)
            if context in self.skipped:
                continue
            self.partial.add({"index": index, "round": turn, "context": context, "batch": batch, "sent_s": sent,
                              "last_s": self.client.clock() - self.start, "primes": primes, "client": lag.health(),
                              **found})
        progress.close()

    async def _prime(self, context: int) -> list[dict[str, Any]]:
        """Sends the prefix until it is known; what the server said each time."""
        found: list[dict[str, Any]] = []
        for _ in range(PRIMES):
            (sample, ), _ = await self._send(context, 1, 1)
            if sample["class"] == "ctx_overflow":
                self.skipped[context] = f"refused: {sample['error']}"
            if sample["class"] != definitions.OK:
                break
            found.append(_request(sample))
            cached = sample["cached_tokens"]
            if cached is None:
                # Nothing tells whether it is known: what a second sighting finds, a third one does.
                if context in self._known or len(found) == 2:
                    break
            elif cached >= KNOWN_SHARE * context:
                break
        self._known.add(context)
        return found

    async def _measure(self, context: int, batch: int) -> dict[str, Any]:
        samples, readings = await self._send(context, batch, self.options.tokens)
        found: dict[str, Any] = {"class": definitions.OK, "error": None, "requests": list(map(_request, samples))}
        failed = next((sample for sample in samples if sample["class"] != definitions.OK), None)
        if failed is not None:
            if failed["class"] == "ctx_overflow":
                self.skipped[context] = f"refused: {failed['error']}"
            return {**found, "class": failed["class"], "error": failed["error"]}
        try:
            return {**found, **steps.measured([reading.stamps for reading in readings],
                                              [sample["completion_tokens"] for sample in samples])}
        except steps.NotTogether as error:
            return {**found, "class": "not_together", "error": str(error)}

    async def _send(self, context: int, batch: int, tokens: int) -> tuple[list[Sample], list[Reading]]:
        """Raises Away where the server is gone."""
        bodies = [{"model": self.options.model, "messages": self.texts.messages(context, next(self._names)),
                   "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": tokens,
                   "min_tokens": tokens, "ignore_eos": True, **self.options.set} for _ in range(batch)]
        readings = [Reading() for _ in bodies]
        samples = await asyncio.gather(*(self.client.stream(body, self.start, reading)
                                         for body, reading in zip(bodies, readings, strict=True)))
        lost = next((sample for sample in samples if sample["class"] in ("connection", "stream_aborted")), None)
        if lost is not None and not await self.client.listens():
            raise Away(f"the server went away at context {context:,}, batch {batch}: {lost['class']}: {lost['error']}")
        return samples, readings


def _request(sample: Sample) -> dict[str, Any]:
    """What is kept of one request."""
    return {"ttft_s": definitions.ttft(sample), **{name: sample[name] for name in (
        "class", "prompt_tokens", "cached_tokens", "completion_tokens", "deltas", "finish")}}


async def facts(client: Client, options: argparse.Namespace) -> tuple[str | None, int | None]:
    """The server's version, and the longest context of the model; None for what it does not say.

    Raises:
        CannotRun: no such server, or no such model there.
    """
    try:
        status, version = await client.ask("GET", "/version")
        known = version.get("version") if status == 200 and isinstance(version, dict) else None
        status, models = await client.ask("GET", "/v1/models")
    except OSError as error:
        raise CannotRun(f"{options.base_url}: {error}") from error
    listed = models.get("data") if status == 200 and isinstance(models, dict) else None
    if not isinstance(listed, list):
        return options.server_version or known, None
    names = {one.get("id"): one for one in listed if isinstance(one, dict)}
    if options.model not in names and options.kind != "llama":      # llama.cpp takes any name.
        raise CannotRun(f"--model {options.model}: the server has {', '.join(map(str, names)) or 'none'}")
    return options.server_version or known, names.get(options.model, {}).get("max_model_len")


def record_of(bench: Bench, version: str | None, words: list[str], ended: str | None) -> dict[str, Any]:
    """What is kept."""
    options, partial = bench.options, bench.partial
    samples = [partial.samples[index] for index in sorted(partial.samples)]
    found = steps.rows(samples)
    lags = [sample["client"]["loop_lag_ms"] for sample in samples]
    return {"kind": "decode-microbench", "definitions": definitions.VERSION,
            "server": {"kind": options.kind, "version": version,
                       "command": bench_record.without_paths(options.server_command.split())},
            **bench_record.commit(), "machine": bench_record.machine(), "command": bench_record.without_paths(words),
            "model": options.model, "batch": options.batch, "context": options.context, "tokens": options.tokens,
            "rounds": options.rounds, "set": options.set, "salt": partial.salt, "sittings": partial.sittings,
            "seconds": round(bench.client.clock() - bench.start, 3), "ended_early": ended,
            "client": {"loop_lag_ms": {name: max((lag[name] or 0.0 for lag in lags), default=None)
                                       for name in ("p50", "p99", "max")},
                       "healthy": all(sample["client"]["healthy"] is not False for sample in samples)},
            "skipped": [{"context": context, "why": why} for context, why in sorted(bench.skipped.items())],
            "rows": found, "points": steps.points(found, samples), "samples": samples}


def ladder(argument: str) -> list[int]:
    """Numbers in ascending order, with K for 1,000: a context of 1K words is one of about so many tokens."""
    found = []
    for word in argument.split(","):
        digits, factor = (word[:-1], 1000) if word[-1:] in ("K", "k") else (word, 1)
        if not digits.isdecimal():
            raise argparse.ArgumentTypeError(f"{word!r} is no whole number (16, 200K)")
        found.append(int(digits) * factor)
    return sorted(set(found))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000")
    add("--kind", choices=KINDS, default="ours", help="of server (default: %(default)s)")
    add("--model", default="llm", help="the model's name in requests (default: %(default)s)")
    add("--batch", type=ladder, default=ladder(BATCHES), help=f"requests at once (default: {BATCHES})")
    add("--context", type=ladder, default=ladder(CONTEXTS), help=f"tokens of the prefix (default: {CONTEXTS})")
    add("--tokens", type=count(8), default=64, help="of every answer (default: %(default)s)")
    add("--rounds", type=count(1), default=3, help="default: %(default)s")
    add("--set", type=settings, action="append", default=[], metavar="KEY=JSON", help="a field of every request")
    add("--timeout", type=positive, default=1800.0, help="seconds for the next bytes (default: %(default)s)")
    add("--api-key")
    add("--server-command", default="", help="how the server was started; kept without paths")
    add("--server-version", default="", help="default: what /version says")
    add("--name", type=result_name, help="of the result; default: decode-microbench-KIND")
    add("--out", type=Path, default=bench_record.RESULTS, help="folder of the record")
    add("--resume", action="store_true", help="go on with the unfinished run of this name")
    add("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    options.name, options.set = options.name or f"decode-microbench-{options.kind}", dict(options.set)
    if options.batch[0] < 1:
        parser.error("--batch: 1 is the least")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    words = [Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)]
    try:
        return asyncio.run(_main(options, words))
    except KeyboardInterrupt:
        print("decode_microbench: interrupted; --resume goes on", file=sys.stderr)
        return INTERRUPTED
    except (CannotRun, OSError, ValueError) as error:
        print(f"decode_microbench: {error}", file=sys.stderr)
        return 1


async def _main(options: argparse.Namespace, words: list[str]) -> int:
    client = Client(options.base_url, options.timeout, options.api_key)
    version, longest = await facts(client, options)
    key = {name: getattr(options, name) for name in (
        "base_url", "kind", "model", "batch", "context", "tokens", "rounds", "set", "server_command")}
    key |= {"server_version": version, "commit": bench_record.commit()["commit"]}
    with contextlib.closing(Partial(options.out / f"{options.name}.partial", key, options.resume)) as partial:
        return await _measure(Bench(client, options, partial, longest), version, words)


async def _measure(bench: Bench, version: str | None, words: list[str]) -> int:
    client, options, partial, ended = bench.client, bench.options, bench.partial, None
    try:
        await bench.run()
    except Away as error:
        ended = str(error)
    if not partial.samples:
        partial.done()
        why = ended or "; ".join(f"context {context:,}: {words}" for context, words in bench.skipped.items())
        raise CannotRun(f"nothing was measured: {why}")
    partial.sat(client.clock() - bench.start)
    record = record_of(bench, version, words, ended)
    table = micro_tables.decode_microbench([record])
    slow = "" if record["client"]["healthy"] else (
        f"THE CLIENT WAS SLOW (its loop was late by {record['client']['loop_lag_ms']} ms): the times are not the "
        "server's alone\n")
    path = bench_record.keep(options.name, record, options.out)
    if ended is None:
        partial.done()
    # Last: whoever reads it may go before it is all written.
    print(f"{table}{slow}kept as {path.name}", flush=True)
    if ended is None:
        return 0
    print(f"decode_microbench: {ended}; --resume goes on with the rest", file=sys.stderr)
    return AWAY


if __name__ == "__main__":
    sys.exit(main())
