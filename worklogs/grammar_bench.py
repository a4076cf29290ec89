#!/usr/bin/env python3
"""What structured output costs at the real vocabulary: masks, applying them, and the first request of a new schema.

    python worklogs/grammar_bench.py                    # tokenizer and demo model are made where they are missing
    python worklogs/grammar_bench.py --no-server        # masks only

* mask: what a step does for one row, `Follower.follow` (the last token) to `Follower.finish`, for every token of texts
  that the tokenizer cut; first the text behind a grammar compiled for it alone (cold), then once more (warm).
* apply: `apply_token_mask` on one row of logits, per dtype.
* compile: from the text of a grammar to a matcher whose first mask is computed.
* server: a request over HTTP to the demo server, thinking off, one token long, with a schema that it has never seen,
  then the same again; in turn with requests without a schema.

One run is one record in remote_results/, which `worklogs/ledger.py` shows as its table `grammar`. It says at the end
which of the limits were kept: mask (cold) median <= 100 us for JSON schemas and <= 300 us for regular expressions,
apply <= 300 us a row (float32), first request at most 50 ms (median) slower than the next. Exit status 1: one was not.
"""
from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "worklogs")]
import bench_record  # noqa: E402

MASK_LIMITS_US = {"json": 100, "regex": 300}
APPLY_LIMIT_US, FIRST_LIMIT_MS = 300, 50
# Compiled first, so that the threads are there.
WARM_UP = 'start: "x"'
PROSE = ("The quick brown fox jumps over the lazy dog, and nobody minds. Prices rose by 3.5 % in 2025; experts "
         "disagree. 敏捷的棕色狐狸跳过了懒狗。Це речення українською. ") * 3
CODE = 'def area(radius: float) -> float:\n    """Of a circle."""\n    return 3.14159 * radius ** 2  # "pi"\n' * 6
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required,
            "additionalProperties": False}


# name -> (schema, a value of it)
SCHEMAS: dict[str, tuple[Any, Any]] = {
    "any object": ({"type": "object"}, {"a": [1, 2.5, None, True, {"b": "c"}], "text": PROSE[:200]}),
    "person": (record(name=STRING, age=INTEGER), {"name": "Alice", "age": 30}),
    "steps of a solution": (
        record(steps={"type": "array", "items": record(explanation=STRING, output=STRING)}, final_answer=STRING),
        {"steps": [{"explanation": PROSE[:300], "output": "8x = -30"}] * 3, "final_answer": "x = -15/4"}),
    "calendar": (
        record(name=STRING, date={**STRING, "format": "date-time"}, participants={"type": "array", "items": STRING}),
        {"name": "Science fair", "date": "2025-03-14T09:30:00Z", "participants": ["Alice", "Bob", "李雷"]}),
    "recursive tree": (
        {"$ref": "#/$defs/node", "$defs": {"node": record(["value"], value=INTEGER, children={
            "type": "array", "items": {"$ref": "#/$defs/node"}})}},
        {"value": 1, "children": [{"value": 2, "children": [{"value": 3}, {"value": 4}]}, {"value": 5}]}),
    "labels": (record(sentiment={"enum": ["positive", "negative", "neutral"]},
                      score={**NUMBER, "minimum": 0, "maximum": 1},
                      tags={"type": "array", "items": {"enum": ["news", "sport"]}, "minItems": 1, "maxItems": 3}),
               {"sentiment": "neutral", "score": 0.25, "tags": ["sport", "news"]}),
    "receipt": (
        record(shop=STRING, total=NUMBER, currency={"type": "string", "pattern": "^[A-Z]{3}$"}, lines={
            "type": "array", "items": record(article=STRING, count={**INTEGER, "minimum": 1}, price=NUMBER)},
               note={"anyOf": [STRING, {"type": "null"}]}),
        {"shop": "Café \"Zentral\"", "total": 23.9, "currency": "EUR", "lines": [
            {"article": "Espresso", "count": 2, "price": 3.2}, {"article": "Kuchen", "count": 1, "price": 17.5}],
         "note": None}),
    "bounded text": (record(title={**STRING, "maxLength": 60}, body={**STRING, "minLength": 20, "maxLength": 2000}),
                     {"title": "A report", "body": PROSE}),
    "edit of a file": (record(path=STRING, old=STRING, new=STRING),
                       {"path": "src/area.py", "old": CODE[:120], "new": CODE}),
    "numbers": ({"type": "array", "items": {"type": "array", "items": NUMBER}}, [[1.5, -2, 3e10], [0.001, 42, 7]] * 6),
    "map": ({"type": "object", "additionalProperties": {"type": "array", "items": INTEGER}},
            {f"key {i}": [i, i * i] for i in range(12)}),
    "union": ({"type": "array", "items": {"anyOf": [record(kind={"const": "text"}, text=STRING), record(
        kind={"const": "number"}, value=NUMBER)]}},
              [{"kind": "text", "text": "hello"}, {"kind": "number", "value": 5}] * 4),
}
# name -> (expression, a text of it)
EXPRESSIONS: dict[str, tuple[str, str]] = {
    "telephone": (r"\+\d{1,3} \d{3}-\d{4}", "+49 555-1234"),
    "date": (r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", "2025-03-14"),
    "email": (r"[a-zA-Z0-9._-]+@[a-zA-Z0-9-]+\.(com|org|net)", "john.doe_77@example-site.org"),
    "identifier": (r"[A-Z]{2}-[0-9a-f]{8}", "AB-0123cdef"),
    "address in a network": (r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
                             "192.168.17.254"),
    "words": (r"[a-z]+( [a-z]+){2,40}", "the quick brown fox jumps over the lazy dog and nobody minds it at all"),
    "sentences": (r"([A-Z][^.!?\n]*[.!?] ?){1,5}", "The fox jumps. Is the dog lazy? Nobody minds, really! "),
    "anything": (r"(?s:.*)", PROSE),
    "lines": (r"(- [^\n]+\n){1,20}", "- first thing\n- second, longer thing\n- 第三\n"),
    "number": (r"-?(0|[1-9]\d*)(\.\d+)?", "-1234.5678"),
    "yes or no, and why": (r"(yes|no), because [^\n]{1,300}", "no, because the dog is lazy and the fox is quick"),
    "answer in a box": (r"The answer is \\boxed\{[^{}]{1,50}\}\.", "The answer is \\boxed{42 + x}."),
}
TOOLS = [("get_weather", record(["city"], city=STRING, days={**INTEGER, "minimum": 1}),
          [("city", "Beijing"), ("days", "3")]),
         ("write_file", record(path=STRING, content=STRING), [("path", "src/area.py"), ("content", CODE)]),
         ("search", record(query=STRING, filters={"type": "object"}),
          [("query", PROSE[:80]), ("filters", '{"year": 2025}')])]


def cases(opens: int, closes: int) -> Iterator[tuple[str, str, str, str]]:
    """Yields (kind, name, grammar, a text that it admits). opens, closes: the tokens around a call."""
    from vllm.overlay.grammar.calls import Tool, calls_rules
    from vllm.overlay.grammar.source import alone, json_part, regex_part

    for name, (schema, value) in SCHEMAS.items():
        yield "json", name, alone(json_part(schema)), json.dumps(value, ensure_ascii=False)
        yield "json", f"{name}, indented", alone(json_part(schema)), json.dumps(value, ensure_ascii=False, indent=2)
    for name, (expression, text) in EXPRESSIONS.items():
        yield "regex", name, alone(regex_part(expression)), text
    tools = [Tool(name, schema) for name, schema, _ in TOOLS]
    rules, _ = calls_rules(tools, [tool.name for tool in tools], opens=opens, closes=closes, one=False)
    for name, _, arguments in TOOLS:
        inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
        yield "calls", name, alone({"lark_grammar": f"start: calls\n{rules}"}), (
            f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>")


def micros(seconds: float) -> int:
    return round(1e6 * seconds)


def cases_of(tokenizer: Any) -> list[tuple[str, str, str, str]]:
    """The cases with this tokenizer's own control tokens."""
    opens, closes = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    return list(cases(opens, closes))


def measure_masks(tokenizer: Any, vocabulary: Any) -> list[dict[str, Any]]:
    """One row per case: times in microseconds, of every token in order, the last one that of the end."""
    import numpy as np
    from llguidance import LLExecutor

    from vllm.overlay.grammar.compiler import Compiler
    from vllm.overlay.grammar.constraint import Constraint
    from vllm.overlay.grammar.follower import Follower

    compiler = Compiler(lambda: vocabulary)
    compiler.compiled(WARM_UP).result()
    executor = LLExecutor()
    masks = np.empty((1, -(-vocabulary.vocab_size // 32)), np.uint32)
    end, *_ = vocabulary.eos_tokens
    rows = []
    for kind, name, grammar, text in cases_of(tokenizer):
        # Two texts of one grammar must not help each other.
        compiler.forget(grammar)
        began = time.perf_counter()
        template = compiler.compiled(grammar).result()
        compiled = time.perf_counter() - began
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        times: dict[str, list[int]] = {"cold_us": [], "warm_us": []}
        for which in times:
            follower = Follower(Constraint(grammar), template.copy(), ends=(end, ))
            for length in range(len(tokens) + 1):
                known = tokens[:length]
                began = time.perf_counter()
                follower.follow(known)
                executor.unsafe_compute_mask_ptr([(follower.matcher, 0)], masks.ctypes.data, masks.nbytes, 1)
                allowed = follower.finish(masks[0])
                times[which].append(micros(time.perf_counter() - began))
                token = tokens[length] if length < len(tokens) else end
                if not allowed or not masks[0, token >> 5] >> (token & 31) & 1:
                    raise SystemExit(f"{kind} {name}: token {length} of the text is not allowed: {follower.failed}")
        rows.append({"kind": kind, "name": name, "tokens": len(tokens), "compile_us": micros(compiled), **times})
    compiler.close()
    return rows


def measure_apply(samples: int, size: int) -> dict[str, list[int]]:
    """Times in microseconds of one row of `size` logits, by dtype; masks of half of the tokens and of none in turn."""
    import torch

    from vllm.overlay.kernels.token_mask import apply_token_mask

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    masks = [torch.randint(-2**31, 2**31, (1, -(-size // 32)), generator=generator).int(),
             torch.zeros(1, -(-size // 32), dtype=torch.int32)]
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.randn(1, size, generator=generator).to(dtype)
        times = []
        for sample in range(samples):
            row = logits.clone()
            began = time.perf_counter()
            apply_token_mask(row, masks[sample % 2], [0])
            times.append(micros(time.perf_counter() - began))
        found[str(dtype).removeprefix("torch.")] = times[2:]
    return found


@contextlib.contextmanager
def demo_server(model: Path) -> Iterator[str]:
    """The address of a server over the demo model."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["bash", ROOT / "requirements/serve.sh", model, "--max-model-len", "8192"], stdout=log, stderr=log, env={
                **os.environ, "PYTHON": sys.executable, "NAME": "llm", "HOST": "127.0.0.1", "PORT": str(port)})
        try:
            while True:
                log.seek(0)
                said = log.read()
                if "\nReady: " in said:
                    break
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}:\n{said[-2000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def post(base: str, body: dict[str, Any]) -> float:
    """Seconds until the whole answer is there."""
    data = json.dumps({"model": "llm", "max_tokens": 1, "enable_thinking": False, "temperature": 0,
                       "messages": [{"role": "user", "content": "Hello"}], **body}).encode()
    request = urllib.request.Request(f"{base}/v1/chat/completions", data, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    return time.perf_counter() - began


def measure_requests(base: str, samples: int) -> dict[str, list[int]]:
    """Times in microseconds of requests with a new schema, with the same again, and with none."""
    for _ in range(3):
        post(base, {})
    found: dict[str, list[int]] = {"first": [], "next": [], "free": []}
    names = list(SCHEMAS)
    for sample in range(samples):
        schema, _ = SCHEMAS[names[sample % len(names)]]
        new = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            **schema, "title": f"never seen before: {time.time_ns()}"}}}}
        found["first"].append(micros(post(base, new)))
        found["next"].append(micros(post(base, new)))
        found["free"].append(micros(post(base, {})))
    return found


def summary(times: list[int]) -> dict[str, float]:
    ordered = sorted(times)
    at = lambda share: ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]  # noqa: E731
    return {"count": len(ordered), "median": statistics.median(ordered), "mean": round(statistics.mean(ordered), 1),
            "p90": at(0.9), "p99": at(0.99), "max": ordered[-1]}


def summaries(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What was measured, in microseconds, in the ledger's order."""
    found = {}
    for kind in ("json", "regex", "calls"):
        rows = [row for row in result["masks"] if row["kind"] == kind]
        for which in ("cold", "warm"):
            found[f"mask, {kind}, {which}"] = summary([time for row in rows for time in row[f"{which}_us"]])
    found |= {f"apply, {dtype}, a row": summary(times) for dtype, times in result["apply_us"].items()}
    for kind in ("json", "regex", "calls"):
        found[f"compile, {kind}"] = summary([row["compile_us"] for row in result["masks"] if row["kind"] == kind])
    requests = result.get("requests_us")
    if requests:
        found |= {f"request, {which}": summary(requests[which]) for which in ("first", "next", "free")}
        found["request, first beyond next"] = summary(beyond(requests))
    return found


def beyond(requests: dict[str, list[int]]) -> list[int]:
    """How much longer the first request of a schema took than the next one, in microseconds."""
    return [first - following for first, following in zip(requests["first"], requests["next"], strict=True)]


def verdicts(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was measured (the same name as in `summaries`) -> median, limit, whether it was kept; in microseconds."""
    medians = summaries(result)
    limits = {**{f"mask, {kind}, cold": limit for kind, limit in MASK_LIMITS_US.items()},
              "apply, float32, a row": APPLY_LIMIT_US, "request, first beyond next": 1000 * FIRST_LIMIT_MS}
    return {name: {"median": medians[name]["median"], "limit": limit, "kept": medians[name]["median"] <= limit}
            for name, limit in limits.items() if name in medians}


def manifest() -> str | None:
    """The hash of the overlay that is measured, as its receipt has it."""
    import vllm

    receipt = Path(vllm.__file__).parent / "overlay/receipt.json"
    return json.loads(receipt.read_text(encoding="utf-8"))["manifest"] if receipt.exists() else None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / ".cache/demo-tokenizer")
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/demo", help="what the server serves")
    parser.add_argument("--no-server", action="store_true")
    parser.add_argument("--vocab-size", type=int, default=248320, help="width of the logits (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=60,
                        help="of the requests' and of apply's times (default: %(default)s)")
    parser.add_argument("--name", default="grammar-bench", help="of the record (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=bench_record.RESULTS, help="folder of the record")
    options = parser.parse_args(arguments)
    if options.samples < 3:
        parser.error(f"--samples {options.samples}: three are the least")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 where a limit was not kept."""
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from transformers import AutoTokenizer

    from vllm.overlay.grammar.vocabulary import library, make_vocabulary
    from worklogs import make_demo_checkpoint, make_tokenizer

    if not (options.tokenizer / make_tokenizer.FILES[-1]).exists():
        make_tokenizer.make(options.tokenizer)
    if not options.no_server and not (options.model / "config.json").exists():
        subprocess.run([sys.executable, make_demo_checkpoint.__file__, options.model, "--tokenizer",
                        options.tokenizer], check=True)
    started, state = time.perf_counter(), bench_record.commit()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    began = time.perf_counter()
    vocabulary = make_vocabulary(tokenizer, options.vocab_size, ends)
    result: dict[str, Any] = {"vocabulary_ms": round(1e3 * (time.perf_counter() - began))}
    # A collection of all that torch and transformers have made would count as somebody's mask.
    gc.collect()
    gc.freeze()
    result["masks"] = measure_masks(tokenizer, vocabulary)
    result["apply_us"] = measure_apply(options.samples, options.vocab_size)
    if not options.no_server:
        with demo_server(options.model) as base:
            result["requests_us"] = measure_requests(base, options.samples)
    found, limits = summaries(result), verdicts(result)
    words = ["grammar_bench.py", *(sys.argv[1:] if arguments is None else arguments)]
    path = bench_record.keep(options.name, {
        "kind": "grammar-bench", "server": "ours", **state, "manifest": manifest(), "library": library(),
        "machine": bench_record.machine(), "load": round(os.getloadavg()[0], 1),
        "command": bench_record.without_paths(words), "cases": bench_record.digest(cases_of(tokenizer)),
        "vocabulary": options.vocab_size, "seconds": round(time.perf_counter() - started, 1), "limits": limits,
        "summary": found, **result}, options.out)
    for name, numbers in found.items():
        print(f"{name:26s} " + "  ".join(f"{key} {value:g}" for key, value in numbers.items()))
    for name, verdict in limits.items():
        print(f"{'kept' if verdict['kept'] else 'MISSED':6s} {name}: median {verdict['median']:g} us "
              f"(limit {verdict['limit']})")
    print(f"kept as {path.name}")
    return 0 if all(verdict["kept"] for verdict in limits.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
