"""Asks a running server what its prefix cache finds on the second sighting, and how fast a warm prompt is.

    python worklogs/prefix_cache_bench.py --base-url http://127.0.0.1:8000 --kind ours --model llm \\
        --tokenizer CHECKPOINT --server-command "..." [--receipt .../vllm/overlay/receipt.json] [--server-pid PID]

Works against ours, current vLLM (--enable-prompt-tokens-details) and llama.cpp's server (--kind llama), which serve a
checkpoint with one tokenizer. Prompts are random token ids, or random words for chats, new in every run (--salt), so
nothing that an earlier run left behind is found. Rows (--row, default all but `warm`):

  second       the same prompt twice, 35 lengths from 20 to 5,000
  prefix       a shared prefix P and another suffix S, both orders of size
  chat         conversations that grow by 20 to 500 tokens a turn, thinking on and off, with and without tools
  interleaved  A, B, then A with 20 more tokens
  concurrent   four requests with one prefix at once, then four more
  branch       one prefix, 16 continuations
  warm         time of 8,000 known + 20 new tokens against 8,000 cold ones, and against a prompt of as many tokens as
               were computed: one round after another, medians. Needs an otherwise idle machine; --server-pid lets it
               drop samples that others disturbed

lost = reusable - cached; reusable = n - 1 for an equal prompt, P for a shared prefix, for a chat the longest common
beginning with an earlier prompt of the conversation, rendered and tokenised here. A row is met if lost <= 64 (prompts
of up to 80 tokens need no hit). The record goes to remote_results/, also if the server dies on the way (exit status 1).
"""
import argparse
import concurrent.futures
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
from bench.words import WORDS  # noqa: E402
from bench_client import SOURCES, Answer, Client, OthersMeter, RequestFailed  # noqa: E402

LENGTHS = [round(20 * 250**(step / 34)) for step in range(35)]
PREFIXES, SUFFIXES = (300, 1000, 3000, 6000), (20, 500, 4000)
LOST_LIMIT, SHORTEST = 64, 80
KNOWN, NEW = 8000, 20
# A warm prompt may take 5 % of a cold one, or 1.3 times a step over the tokens that it computes.
COLD_SHARE, STEP_FACTOR = 0.05, 1.3
# Ids of plain words in every tokenizer of ours: behind the single bytes, before the control tokens.
LOWEST_ID = 300
TOOLS = [{"type": "function", "function": {
    "name": name, "description": f"Looks up a {name}.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}
    for name in ("library", "archive", "weather")]

Row = dict[str, Any]


class Renderer:
    """Chat prompts as token ids, by the tokenizer and the template of a checkpoint folder."""

    def __init__(self, folder: str) -> None:
        transformers = importlib.import_module("transformers")
        self._tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def ids(self, messages: list[dict[str, Any]], thinking: bool, tools: Any) -> list[int]:
        """Raises whatever the template raises."""
        parsed = [{**message, "tool_calls": [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message["tool_calls"]]} if "tool_calls" in message else message for message in messages]
        return list(self._tokenizer.apply_chat_template(parsed, tools=tools, add_generation_prompt=True,
                                                        enable_thinking=thinking, return_dict=False))


class Prompts:
    """Random prompts that no other run has."""

    def __init__(self, salt: str, vocabulary: int) -> None:
        self._random = random.Random(salt)
        self._vocabulary = vocabulary

    def ids(self, count: int) -> list[int]:
        """`count` random token ids."""
        return self._random.choices(range(LOWEST_ID, self._vocabulary), k=count)

    def words(self, count: int) -> str:
        """About `count` tokens of text."""
        return " ".join(self._random.choices(WORDS, k=count))

    def between(self, low: int, high: int) -> int:
        """A random number."""
        return self._random.randint(low, high)


def row(name: str, reusable: int, answer: Answer, needed: bool = True, **more: Any) -> Row:
    """A row of the table. needed: whether losing more than 64 tokens fails it."""
    if answer.cached is None:
        return {"case": name, "prompt": answer.prompt, "reusable": reusable, "cached": None, "lost": None,
                "hit": None, "met": None, **more}
    lost = reusable - answer.cached
    return {"case": name, "prompt": answer.prompt, "reusable": reusable, "cached": answer.cached, "lost": lost,
            "hit": answer.cached > 0, "met": lost <= LOST_LIMIT or not needed, **more}


def second(client: Client, prompts: Prompts, renderer: Renderer | None) -> Iterator[Row]:
    """The same prompt twice."""
    for length in LENGTHS:
        ids = prompts.ids(length)
        first = client.complete(ids)
        yield row(f"{length} tokens", length - 1, client.complete(ids), needed=length > SHORTEST,
                  first_cached=first.cached)


def prefix(client: Client, prompts: Prompts, renderer: Renderer | None) -> Iterator[Row]:
    """A shared prefix and another suffix."""
    for known in PREFIXES:
        for suffix in SUFFIXES:
            shared = prompts.ids(known)
            client.complete(shared + prompts.ids(suffix))
            yield row(f"P {known} S {suffix}", known, client.complete(shared + prompts.ids(suffix)))


def chat(client: Client, prompts: Prompts, renderer: Renderer | None) -> Iterator[Row]:
    """Conversations with answers of ours in the history, as recorded ones have."""
    if renderer is None:
        raise ValueError("the chat rows need --tokenizer")
    for thinking in (True, False):
        for tools in (None, TOOLS):
            name = f"thinking {'on' if thinking else 'off'}, {'tools' if tools else 'no tools'}"
            messages: list[dict[str, Any]] = [{"role": "system", "content": prompts.words(prompts.between(100, 300))}]
            earlier: list[list[int]] = []
            for turn in range(10):
                messages += _turn(prompts, turn, tools)
                ids = renderer.ids(messages, thinking, tools)
                answer = client.chat(messages, thinking, tools)
                reusable = max((_common(ids, before) for before in earlier), default=0)
                if earlier:
                    yield row(f"{name}, turn {turn + 1}", min(reusable, len(ids) - 1), answer,
                              last_prompt=len(earlier[-1]), rendered_alike=answer.prompt == len(ids))
                earlier.append(ids)


def _turn(prompts: Prompts, turn: int, tools: Any) -> list[dict[str, Any]]:
    """What is new in a turn's messages: with tools, three of four turns are a call and its result."""
    if tools and turn % 4:
        call = {"id": f"call{turn}", "type": "function",
                "function": {"name": "library", "arguments": json.dumps({"query": prompts.words(8)})}}
        return [{"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": prompts.words(prompts.between(20, 400))}]
    said = [{"role": "assistant", "content": prompts.words(prompts.between(10, 60))}] if turn else []
    return [*said, {"role": "user", "content": prompts.words(prompts.between(20, 400))}]


def interleaved(client: Client, prompts: Prompts, renderer: Renderer | None) -> Iterator[Row]:
    """A, B, then A that has grown, and B that has."""
    one, other = prompts.ids(2500), prompts.ids(2500)
    client.complete(one)
    client.complete(other)
    yield row("A, B, A + 20", 2500, client.complete(one + prompts.ids(20)))
    yield row("then B + 20", 2500, client.complete(other + prompts.ids(20)))
    yield row("then A + 600", 2500, client.complete(one + prompts.ids(600)))


def concurrent_requests(client: Client, prompts: Prompts, renderer: Renderer | None) -> Iterator[Row]:
    """Four at once, then four more. All but one of the first four could share."""
    shared = prompts.ids(2000)
    for number in (1, 2):
        asked = [shared + prompts.ids(60) for _ in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(client.complete, asked))
        answers.sort(key=lambda answer: answer.cached or 0)
        for index, answer in enumerate(answers):
            first = number == 1 and index == 0
            yield row(f"four at once, {'first' if number == 1 else 'second'} time, #{index + 1}", 0 if first else 2000,
                      answer, needed=not first)


def branch(client: Client, prompts: Prompts, renderer: Renderer | None) -> Iterator[Row]:
    """One prefix, 16 continuations."""
    shared = prompts.ids(2000)
    client.complete(shared + prompts.ids(100))
    for number in range(16):
        yield row(f"branch {number + 1}", 2000, client.complete(shared + prompts.ids(prompts.between(20, 300))))


ROWS: dict[str, Callable[[Client, Prompts, Renderer | None], Iterator[Row]]] = {
    "second": second, "prefix": prefix, "chat": chat, "interleaved": interleaved, "concurrent": concurrent_requests,
    "branch": branch}


def warm(client: Client, prompts: Prompts, rounds: int, meter: OthersMeter, others_limit: float,
         samples: list[dict[str, Any]], say: Callable[[str], None]) -> None:
    """Appends samples in rounds of cold, warm and step; the first round is not counted."""
    def measure(kind: str, turn: int, ids: list[int]) -> Answer:
        meter.start()
        answer = client.complete(ids)
        others = meter.cores()
        counted = turn > 0 and (others is None or others <= others_limit)
        samples.append({"kind": kind, "round": turn, "prompt": answer.prompt, "cached": answer.cached,
                        "seconds": round(answer.seconds, 5), "others_cores": others, "counted": counted})
        say(f"warm, round {turn}: {kind} {answer.seconds:.3f} s")
        return answer

    for turn in range(rounds + 1):
        known = prompts.ids(KNOWN)
        measure("cold", turn, known)
        answer = measure("warm", turn, known + prompts.ids(NEW))
        measure("step", turn, prompts.ids(max(2, KNOWN + NEW - (answer.cached or 0))))


def judge(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and ranges of the counted samples, and whether the limit is met; None where too few count."""
    found: dict[str, Any] = {}
    for kind in ("cold", "warm", "step"):
        seconds = [sample["seconds"] for sample in samples if sample["kind"] == kind and sample["counted"]]
        found[kind] = {"count": len(seconds), "median": statistics.median(seconds), "least": min(seconds),
                       "most": max(seconds)} if seconds else {"count": 0}
    if min(found[kind]["count"] for kind in found) < 3:
        return {**found, "met": None}
    cold, warmed, step = (found[kind]["median"] for kind in ("cold", "warm", "step"))
    return {**found, "of_cold": round(warmed / cold, 4), "of_step": round(warmed / step, 3),
            "limit_seconds": round(max(COLD_SHARE * cold, STEP_FACTOR * step), 5),
            "met": warmed <= max(COLD_SHARE * cold, STEP_FACTOR * step)}


def summary(rows: list[Row]) -> dict[str, Any]:
    """Counts of a table's rows."""
    judged = [one for one in rows if one.get("met") is not None]
    lost = [one["lost"] for one in judged]
    return {"cases": len(rows), "hits": sum(bool(one.get("hit")) for one in judged),
            "met": sum(one["met"] for one in judged), "failed": sum("failed" in one for one in rows),
            "most_lost": max(lost, default=None), "median_lost": statistics.median(lost) if lost else None}


def _common(one: list[int], other: list[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--kind", choices=sorted(SOURCES), default="ours",
                        help="decides where the cached count is read")
    parser.add_argument("--model", default="llm", help="the model's name in requests")
    parser.add_argument("--name", help="of the result; default: prefix-cache-KIND")
    parser.add_argument("--row", action="append", choices=[*ROWS, "warm"], help="may be repeated")
    parser.add_argument("--tokenizer", help="checkpoint folder with tokenizer and chat template, for the chat rows")
    parser.add_argument("--vocab", type=int, default=8000, help="random ids are below this (default: %(default)s)")
    parser.add_argument("--salt", help="of the prompts; default: the time")
    parser.add_argument("--rounds", type=int, default=7, help="of the warm row (default: %(default)s)")
    parser.add_argument("--server-pid", type=int, help="process whose tree is the server, to tell others' load")
    parser.add_argument("--others-limit", type=float, default=0.1, help="cores that others may use in a sample")
    parser.add_argument("--server-command", default="", help="how the server was started; kept without paths")
    parser.add_argument("--server-version", default="", help="kept; ours and vLLM are asked")
    parser.add_argument("--receipt", type=Path, help="receipt.json of the tree that runs, for the manifest's hash")
    parser.add_argument("--out", type=Path, default=bench_record.RESULTS, help="folder of the record")
    parser.add_argument("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    if options.vocab <= LOWEST_ID:
        parser.error(f"--vocab {options.vocab} is not above {LOWEST_ID}")
    if options.rounds < 3:
        parser.error(f"--rounds {options.rounds}: three are the least")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    wanted = options.row or list(ROWS)
    salt = options.salt or f"{time.time_ns():x}"

    def say(text: str) -> None:
        if not options.no_progress:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        client = Client(options.base_url, options.kind, options.model)
        renderer = Renderer(options.tokenizer) if options.tokenizer else None
        if "chat" in wanted and renderer is None:
            raise ValueError("the chat rows need --tokenizer")
        manifest = json.loads(options.receipt.read_text(encoding="utf-8"))["manifest"] if options.receipt else None
        version = options.server_version
        if options.kind != "llama":
            version = client.get("/version")["version"]
        client.complete(Prompts(salt + "warm-up", options.vocab).ids(40))
    except (ValueError, OSError, KeyError, RequestFailed) as error:
        print(f"prefix_cache_bench: {error}", file=sys.stderr)
        return 1
    start, tables, died = time.perf_counter(), {}, ""
    state = bench_record.commit()
    samples: list[dict[str, Any]] = []
    for name in wanted:
        prompts = Prompts(f"{salt} {name}", options.vocab)
        rows: list[Row] = []
        try:
            if name == "warm":
                warm(client, prompts, options.rounds, OthersMeter(options.server_pid), options.others_limit, samples,
                     say)
                continue
            for found in ROWS[name](client, prompts, renderer):
                rows.append(found)
                say(f"{name}: {found['case']}: cached {found['cached']} of {found['reusable']}")
        except RequestFailed as error:
            rows.append({"case": "failed", "failed": str(error)})
            died = died or f"{name}: {error}"
            if name == "warm":
                continue
        tables[name] = {"summary": summary(rows), "rows": rows}
        say("")
        print(f"{name:12s} {json.dumps(tables[name]['summary'])}", flush=True)
    say("")
    timing = judge(samples) if samples else None
    if timing:
        print(f"{'warm':12s} {json.dumps(timing)}")
    words = [Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)]
    path = bench_record.keep(options.name or f"prefix-cache-{options.kind}", {
        "kind": "prefix-cache-bench", "server": options.kind, "version": version, **state,
        "manifest": manifest, "machine": bench_record.machine(), "command": bench_record.without_paths(words),
        "server_command": bench_record.without_paths(options.server_command.split()),
        "cached_from": SOURCES[options.kind], "salt": salt, "seconds": round(time.perf_counter() - start, 1),
        "failure": died or None, "tables": tables, "warm": timing and {**timing, "samples": samples}}, options.out)
    print(f"kept as {path.name}")
    if died:
        print(f"prefix_cache_bench: {died}", file=sys.stderr)
    return 1 if died else 0


if __name__ == "__main__":
    sys.exit(main())
