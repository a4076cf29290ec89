"""Three programs that measure servers, run on one file of requests and read back: ours, EvalScope perf, AIPerf.

Each is asked for the same: requests in the file's order, one at a time, streamed, tokens as the server counts them.
Their definitions differ in one thing, when an answer ends (`Tool.end`):
  last byte     ours: the end of the response
  last event    EvalScope: the last event that holds JSON, be it usage only
  last output   AIPerf: the last event with text, a thought or a call
All three take for the first token the first event with output, not the first event, and count from before the
connection is opened.
"""
import dataclasses
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".cache" / "peers"
LAST_BYTE, LAST_EVENT, LAST_OUTPUT = "last byte", "last event", "last output"
# AIPerf loads a tokenizer even where it takes the server's counts; offline, it looks for a path in the hub's cache.
TOKENIZER = {
    "tokenizer.json": {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                       "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
                       "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}}


class ToolError(Exception):
    """A tool is not there, failed, or wrote what is not understood; one line."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a tool says of one request, or what the schedule says of it. Times in ms.

    per_token_ms: from the first token to the end, by the tokens after the first. steps_ms: between events with output;
    None where a tool does not keep them. Counts that a tool does not keep per request are None.
    """

    ttft_ms: float
    whole_ms: float
    per_token_ms: float
    steps_ms: list[float] | None
    prompt: int | None
    completion: int | None
    cached: int | None = None
    reasoning: int | None = None


@dataclasses.dataclass(frozen=True)
class Tool:
    """end: of an answer. command(url, file, folder, count): what is run. read(folder): one Figures per request."""

    name: str
    end: str
    command: Callable[[str, Path, Path, int], list[str]]
    read: Callable[[Path], list[Figures]]
    program: Path
    package: str | None = None

    def version(self) -> str | None:
        """Of the installed package; None for ours.

        Raises:
            ToolError: it is not installed.
        """
        if self.package is None:
            return None
        if not self.program.exists():
            raise ToolError(f"{self.name} is not installed: bash worklogs/peers/setup.sh {self.name}")
        found = subprocess.run([self.program.parent / "python", "-c", "import importlib.metadata as m; print(m.version("
                                f"{self.package!r}))"], capture_output=True, text=True)
        return found.stdout.strip() or "unknown"

    def run(self, url: str, file: Path, folder: Path, count: int, timeout: float) -> list[Figures]:
        """Raises:
            ToolError: it fails, takes longer than `timeout` seconds, or does not tell of `count` requests.
        """
        folder.mkdir(parents=True)
        log = folder / "log"
        environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        with log.open("w") as output:
            try:
                status = subprocess.run(self.command(url, file, folder, count), stdout=output, stderr=output,
                                        env=environment, timeout=timeout).returncode
            except subprocess.TimeoutExpired as error:
                raise ToolError(f"{self.name} took more than {timeout:g} s") from error
        if status:
            raise ToolError(f"{self.name} ended with {status}")
        try:
            found = self.read(folder)
        except (OSError, ValueError, KeyError, TypeError, IndexError, sqlite3.Error) as error:
            raise ToolError(f"{self.name}: what it wrote is not understood: {type(error).__name__}: {error}") from error
        if len(found) != count:
            raise ToolError(f"{self.name} tells of {len(found)} requests, not of {count}")
        return found


def per_token(ttft: float, whole: float, completion: int | None) -> float:
    """ms for each token after the first."""
    return (whole - ttft) / max(1, (completion or 0) - 1)


def _ours(url: str, file: Path, folder: Path, count: int) -> list[str]:
    return [sys.executable, str(ROOT / "worklogs" / "formal_perf_bench.py"), str(file), "--base-url", url, "--kind",
            "stub", "--warm-up", "0", "--rounds", "0", "--no-progress", "--out", str(folder), "--json",
            str(folder / "record"), "--limit", str(count)]


def _read_ours(folder: Path) -> list[Figures]:
    found = []
    for sample in json.loads((folder / "record").read_text(encoding="utf-8"))["samples"]:
        ttft, whole = (1000 * (sample[name] - sample["sent_s"]) for name in ("first_s", "last_s"))
        found.append(Figures(ttft, whole, per_token(ttft, whole, sample["completion_tokens"]), None,
                             sample["prompt_tokens"], sample["completion_tokens"], sample["cached_tokens"],
                             sample["reasoning_tokens"]))
    return found


def _evalscope(url: str, file: Path, folder: Path, count: int) -> list[str]:
    return [str(EVALSCOPE.program), "perf", "--model", "llm", "--url", f"{url}/v1/chat/completions", "--api", "openai",
            "--dataset", "line_by_line", "--dataset-path", str(file), "--number", str(count), "--parallel", "1",
            "--stream", "--no-test-connection", "--outputs-dir", str(folder)]


def _read_evalscope(folder: Path) -> list[Figures]:
    databases = sorted(folder.rglob("benchmark_data.db"))
    if len(databases) != 1:
        raise ValueError(f"{len(databases)} files benchmark_data.db")
    with sqlite3.connect(databases[0]) as connection:
        rows = connection.execute("SELECT first_chunk_latency, latency, time_per_output_token, inter_token_latencies, "
                                  "prompt_tokens, completion_tokens FROM result WHERE success ORDER BY start_time"
                                  ).fetchall()
    return [Figures(1000 * first, 1000 * whole, 1000 * each, [1000 * step for step in json.loads(steps)], prompt,
                    completion)
            for first, whole, each, steps, prompt, completion in rows]


def _aiperf(url: str, file: Path, folder: Path, count: int) -> list[str]:
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name, content in TOKENIZER.items():
        (tokenizer / name).write_text(json.dumps(content), encoding="utf-8")
    return [str(AIPERF.program), "profile", "--model", "llm", "--url", url, "--endpoint-type", "chat", "--streaming",
            "--use-server-token-count", "--tokenizer", str(tokenizer), "--input-file", str(file),
            "--custom-dataset-type", "raw_payload", "--dataset-sampling-strategy", "sequential", "--concurrency", "1",
            "--request-count", str(count), "--workers-max", "1", "--ui", "none", "--no-gpu-telemetry",
            "--no-server-metrics", "--output-artifact-dir", str(folder / "out")]


def _read_aiperf(folder: Path) -> list[Figures]:
    lines = (folder / "out" / "profile_export.jsonl").read_text(encoding="utf-8").splitlines()
    records = sorted(map(json.loads, lines), key=lambda record: record["metadata"]["request_start_ns"])
    return [_aiperf_figures(record["metrics"]) for record in records]


def _aiperf_figures(metrics: dict[str, Any]) -> Figures:
    def value(name: str, unit: str) -> Any:
        if name in metrics and metrics[name]["unit"] != unit:
            raise ValueError(f"{name} is in {metrics[name]['unit']}, not in {unit}")
        return metrics[name]["value"] if name in metrics else None

    return Figures(value("time_to_first_token", "ms"), value("request_latency", "ms"),
                   value("inter_token_latency", "ms"), value("inter_chunk_latency", "ms"),
                   value("input_sequence_length", "tokens"), value("output_sequence_length", "tokens"),
                   value("usage_prompt_cache_read_tokens", "tokens"), value("reasoning_token_count", "tokens"))


OURS = Tool("ours", LAST_BYTE, _ours, _read_ours, Path(sys.executable))
EVALSCOPE = Tool("evalscope", LAST_EVENT, _evalscope, _read_evalscope, INSTALLED / "evalscope" / "bin" / "evalscope",
                 "evalscope")
AIPERF = Tool("aiperf", LAST_OUTPUT, _aiperf, _read_aiperf, INSTALLED / "aiperf" / "bin" / "aiperf", "aiperf")
TOOLS = {tool.name: tool for tool in (OURS, EVALSCOPE, AIPERF)}
