"""A conversation with the server on the vendor's files, started as computility-run.yaml says, and the same one with the
server of .venv (stock 0.6.3 compiled for the CPU, a newer torch): equal tokens, streamed and whole.

run.py runs it; the name keeps the ordinary suite from collecting it.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.demo_checkpoint import demo_checkpoint
from tests.helpers.server_process import ServerProcess, free_port

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 60
SYSTEM = {"role": "system", "content": "You tell the weather."}
QUESTION = {"role": "user", "content": "What is the weather in Beijing? 北京天气"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Beijing"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny, 21 degrees"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The demo checkpoint: a small random model with the real layout and the real tokenizer."""
    return demo_checkpoint()


@contextmanager
def served(log: Path, python: str, checkpoint: Path, ranks: int, more: list[str], path: str) -> Iterator[ServerProcess]:
    """The platform's own command, with what a CPU needs changed."""
    run = yaml.safe_load((ROOT / "computility-run.yaml").read_text())
    here = {"python3": python, "/model": str(checkpoint), "float16": "float32",
            "/workspace/chat_template_multi_system.jinja": str(ROOT / "chat_template_multi_system.jinja")}
    command = [here.get(word, word) for word in run["command"]]
    port = free_port()
    command += ["-tp", str(ranks), "--host", "127.0.0.1", "--port", str(port), *more]
    environment = {**os.environ, **{entry["name"]: entry["value"] for entry in run["env"]}, "PYTHONPATH": path}
    server = ServerProcess(command, port, log, environment)
    try:
        yield server.wait_until_ready()
        assert server.end(ask=True) == 0, server.output()[-3000:]
    finally:
        server.process.kill()


def whole(server: ServerProcess, messages: list[dict[str, Any]]) -> dict[str, Any]:
    response = server.post(**request(messages))
    assert response.status_code == 200, response.text
    answer = response.json()
    choice = answer["choices"][0]
    return {"reasoning": choice["message"].get("reasoning_content") or "",
            "content": choice["message"].get("content") or "",
            "tokens": [entry["token"] for entry in choice["logprobs"]["content"]],
            "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
            "finish": choice["finish_reason"],
            "usage": (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])}


def streamed(server: ServerProcess, messages: list[dict[str, Any]]) -> dict[str, Any]:
    text = server.post(**request(messages), stream=True, stream_options={"include_usage": True}).text
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]", text
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for choice in choices for entry in (choice.get("logprobs") or {}).get("content") or ()]
    usage = chunks[-1]["usage"]
    return {"reasoning": "".join(choice["delta"].get("reasoning_content") or "" for choice in choices),
            "content": "".join(choice["delta"].get("content") or "" for choice in choices),
            "tokens": [entry["token"] for entry in entries], "logprobs": [entry["logprob"] for entry in entries],
            "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]][0],
            "usage": (usage["prompt_tokens"], usage["completion_tokens"])}


def request(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": TOKENS, "logprobs": True}


def converse(server: ServerProcess) -> list[dict[str, Any]]:
    """Two turns, each answer whole and streamed; before the second come the first answer, a call and its result."""
    turns = []
    messages = [SYSTEM, QUESTION]
    for _ in range(2):
        one, other = whole(server, messages), streamed(server, messages)
        assert one["tokens"] and {**one, "logprobs": 0} == {**other, "logprobs": 0}, (one, other)
        assert furthest(one, other) < 1e-5, (one, other)
        turns.append(one)
        messages = [*messages, {"role": "assistant", "content": one["content"], "reasoning_content": one["reasoning"],
                                "tool_calls": [CALL]}, RESULT, {"role": "user", "content": "And tomorrow?"}]
    return turns


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))


@pytest.fixture(scope="session")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The conversation with stock's pin for the CPU."""
    python = os.environ["VLLM_OVERLAY_CPU_PYTHON"]
    assert Path(python).exists(), f"{python} is missing: `make overlay` makes it"
    with served(tmp_path_factory.mktemp("pypi") / "log", python, checkpoint, 1, [], "") as server:
        assert "pin pypi-0.6.3" in server.output()
        return converse(server)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_vendor_s_files_answer_as_stock_s(ranks: int, checkpoint: Path, expected: list[dict[str, Any]],
                                              tmp_path: Path) -> None:
    # Stock counts CUDA devices before it chooses processes for the ranks by itself.
    more = ["--device", "cpu", "--distributed-executor-backend", "mp"]
    with served(tmp_path / "log", sys.executable, checkpoint, ranks, more, os.environ["PYTHONPATH"]) as server:
        assert "pin corex-3.2.3" in server.output()
        turns = converse(server)
    for turn, right in zip(turns, expected, strict=True):
        assert {**turn, "logprobs": 0} == {**right, "logprobs": 0}, (turn, right)
        assert furthest(turn, right) < 1e-4, (turn, right)
    print("furthest logprob:", [furthest(*pair) for pair in zip(turns, expected, strict=True)])
