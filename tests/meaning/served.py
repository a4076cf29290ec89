"""A served twin as a client sees it, and the law of float32 for its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx

from tests.helpers.tiny_models import assert_same

TIMEOUT_S = 900
LONGEST = 160
# The most that a hit loses of what could be used again (DESIGN 1).
LOST = 64


@dataclass
class Said:
    """One answer. tokens: ids, the end of the turn included; logprobs: per token, id -> logprob of the two best;
    prompt: the prompt's ids; cached: how many of them were not computed."""

    content: str
    thought: str
    calls: list[dict[str, Any]]
    finish: str
    tokens: list[int]
    prompt: list[int]
    cached: int
    logprobs: list[dict[int, float]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """As a client puts it into the history."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def shown(self) -> dict[str, Any]:
        """All that does not depend on how it came; ids of calls are drawn anew."""
        return {"content": self.content, "thought": self.thought, "finish": self.finish, "tokens": self.tokens,
                "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in self.calls]}


class Twin:
    """A server, by its address. `ask` and `stream` are greedy."""

    def __init__(self, base: str) -> None:
        self.base = base

    def ask(self, messages: Sequence[dict[str, Any]], thinking: bool, **more: Any) -> list[Said]:
        """The choices."""
        found = self._post(self._body(messages, thinking, {"logprobs": True, "top_logprobs": 2, **more})).json()
        out = []
        for choice in found["choices"]:
            said = choice["message"]
            entries = choice["logprobs"]["content"]
            out.append(Said(
                said.get("content") or "", said.get("reasoning_content") or "", said.get("tool_calls") or [],
                choice["finish_reason"], choice["token_ids"], found["prompt_token_ids"],
                found["usage"]["prompt_tokens_details"]["cached_tokens"],
                [{_id(one): one["logprob"] for one in (entry, *entry["top_logprobs"])} for entry in entries]))
        return out

    def stream(self, messages: Sequence[dict[str, Any]], thinking: bool, **more: Any) -> Said:
        """The same from a stream's chunks, without logprobs."""
        body = self._body(messages, thinking, {"stream": True, "stream_options": {"include_usage": True}, **more})
        lines = [line for line in self._post(body).text.split("\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]", lines[-3:]
        said = Said("", "", [], "", [], [], 0)
        for line in lines[:-1]:
            chunk = json.loads(line.removeprefix("data: "))
            said.prompt = chunk.get("prompt_token_ids") or said.prompt
            if chunk.get("usage"):
                said.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in chunk["choices"]:
                _add(said, choice)
        return said

    def all(self, questions: Sequence[tuple[Sequence[dict[str, Any]], bool]], at_once: bool, **more: Any) -> list[Said]:
        """The first choice of each question (messages, thinking)."""
        if not at_once:
            return [self.ask(*question, **more)[0] for question in questions]
        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(lambda question: self.ask(*question, **more)[0], questions))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 where nothing was counted yet."""
        text = httpx.get(f"{self.base}/metrics", timeout=TIMEOUT_S).text
        # A counter's declaration has no "_total" everywhere.
        assert f"# TYPE vllm:{name.removesuffix('_total')}" in text, f"no metric {name}"
        return sum(float(line.split()[-1]) for line in text.split("\n") if line.split("{")[0] == f"vllm:{name}")

    def _body(self, messages: Sequence[dict[str, Any]], thinking: bool, more: dict[str, Any]) -> dict[str, Any]:
        return {"model": "llm", "messages": list(messages), "temperature": 0, "max_tokens": LONGEST,
                "chat_template_kwargs": {"enable_thinking": thinking}, "return_token_ids": True,
                "return_tokens_as_token_ids": True, **more}

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        response = httpx.post(f"{self.base}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text
        return response


def _id(entry: dict[str, Any]) -> int:
    return int(entry["token"].removeprefix("token_id:"))


def _add(said: Said, choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    said.content += delta.get("content") or ""
    said.thought += delta.get("reasoning_content") or ""
    said.finish = choice.get("finish_reason") or said.finish
    said.tokens = said.tokens + (choice.get("token_ids") or [])
    for call in delta.get("tool_calls") or ():
        if call["index"] == len(said.calls):
            said.calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        for name in ("name", "arguments"):
            said.calls[call["index"]]["function"][name] += call["function"].get(name) or ""


def assert_law(got: Sequence[Said], expected: Sequence[Said]) -> None:
    """Of float32: the same tokens, item by item, and logprobs within 1e-5 (`assert_same`). Where `got` goes on behind
    the end of the turn, the rest is not compared."""
    def outputs(answers: Sequence[Said]) -> list[Any]:
        return [SimpleNamespace(outputs=[SimpleNamespace(
            token_ids=answer.tokens[:len(right.tokens)],
            logprobs=[{token: SimpleNamespace(logprob=value) for token, value in place.items()}
                      for place in answer.logprobs[:len(right.tokens)]])])
            for answer, right in zip(answers, expected, strict=True)]

    parted = assert_same(outputs(got), outputs(expected))
    print(f"{len(expected)} answers, {sum(len(answer.tokens) for answer in expected)} tokens, {parted} parted at a tie")


def reusable(before: Said | None, prompt: Sequence[int]) -> int:
    """Tokens of a prompt of which the turn before left a state: all that it computed, where the prompt repeats its
    answer whole. An answer that is repeated in part, or in another form, has no state at the place where they part;
    its prompt has."""
    if before is None:
        return 0
    shared = common([*before.prompt, *before.tokens], prompt)
    whole = len(before.prompt) + len(before.tokens)
    return shared if shared >= whole - 1 else min(shared, len(before.prompt))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))
