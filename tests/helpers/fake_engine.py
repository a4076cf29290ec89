"""The HTTP application over an engine that says what a test tells it to: no model, no process, real tokenizer and
template."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient
from transformers import AutoTokenizer

from tests.helpers.tokenizer import tokenizer_folder
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.overlay.serving.app import build_app, init_app_state
from vllm.overlay.serving.service import Service, Settings
from vllm.sequence import Logprob
from vllm.utils import FlexibleArgumentParser

# Few merges, so that words and characters are several tokens; the added tokens as published, behind them.
SMALL = 479


@functools.lru_cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder(small=SMALL))


def ids(text: str) -> list[int]:
    """The text as the model would generate it, control tokens included."""
    return tokenizer()(text, add_special_tokens=False).input_ids


class FakeEngine:
    """An EngineClient. Each choice i of a request gets ``answers[i]``: text, which ends by end-of-turn unless
    max_tokens cuts it.

    requests: what was asked of it; pictures: those of each request; beside: its multi_modal_data; aborted: ids of
    requests that were closed before they were finished; generated: tokens given; resets: how many.
    """

    def __init__(self, *answers: str, together: int = 1, delay: float = 0.0, prefill: int = 0,
                 error: Exception | None = None, error_after: int = 0, cached: int | None = None) -> None:
        """together: tokens per output; delay: seconds per output; prefill: outputs without tokens before the first one;
        error: raised after ``error_after`` outputs; cached: tokens of each prompt that outputs say were cached."""
        self.answers = answers or ("Hello.",)
        self.together = together
        self.delay = delay
        self.prefill = prefill
        self.error = error
        self.error_after = error_after
        self.cached = cached
        self.requests: list[tuple[list[int], Any, str]] = []
        self.pictures: list[list[Any]] = []
        self.beside: list[dict[str, Any] | None] = []
        self.aborted: list[str] = []
        self.generated = 0
        self.errored = False
        self.resets = 0
        self.healthy: Exception | None = None
        self.running = asyncio.Event()

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None:
        if self.healthy is not None:
            raise self.healthy

    async def reset_prefix_cache(self) -> None:
        if self.healthy is not None:
            raise self.healthy
        self.resets += 1

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncIterator[RequestOutput]:
        tokens = prompt["prompt_token_ids"]
        self.requests.append((tokens, params, request_id))
        self.beside.append(prompt.get("multi_modal_data"))
        self.pictures.append((prompt.get("multi_modal_data") or {}).get("image", []))
        finished = False
        try:
            given = 0
            async for output in self._outputs(tokens, params, request_id):
                if self.error is not None and given >= self.error_after:
                    raise self.error
                given += 1
                self.running.set()
                # At least one turn of the loop: an engine's outputs come one at a time.
                await asyncio.sleep(self.delay)
                finished = output.finished
                output.num_cached_tokens = self.cached
                yield output
        finally:
            if not finished:
                self.aborted.append(request_id)

    async def feed(self, prompt: Any, params: Any, request_id: str, give: Callable[[RequestOutput], None],
                   **beside: Any) -> None:
        stream = self.generate(prompt, params, request_id, **beside)
        try:
            async for output in stream:
                give(output)
        finally:
            await stream.aclose()

    async def _outputs(self, tokens: Sequence[int], params: Any, request_id: str) -> AsyncIterator[RequestOutput]:
        for _ in range(self.prefill):
            yield RequestOutput(request_id, None, list(tokens), None, [CompletionOutput(0, "", [], None, None)], False)
        answers = [self._answer(self.answers[i % len(self.answers)], params) for i in range(params.n)]
        left = [answer for answer, _ in answers]
        ends = [len(answer) < params.max_tokens for answer in left]
        done = [False] * params.n
        while not all(done):
            for i in range(params.n):
                if done[i]:
                    continue
                new, left[i] = left[i][:self.together], left[i][self.together:]
                end = answers[i][1]
                new = [*new, EOS if end is None else end] if not left[i] and ends[i] else new
                done[i] = not left[i]
                self.generated += len(new)
                logprobs = None if params.logprobs is None else [alternatives(token, params.logprobs) for token in new]
                prompt_logprobs = None
                if params.prompt_logprobs is not None:
                    prompt_logprobs = [None] + [alternatives(token, params.prompt_logprobs) for token in tokens[1:]]
                reason = ("stop" if ends[i] else "length") if done[i] else None
                one = CompletionOutput(i, "", new, 0.0, logprobs, reason, end if reason == "stop" else None)
                yield RequestOutput(request_id, None, list(tokens), prompt_logprobs, [one], all(done))

    @staticmethod
    def _answer(text: str, params: Any) -> tuple[list[int], int | None]:
        """(its tokens, the one of params.stop_token_ids that comes behind them)."""
        answer = ids(text)
        end = None
        for at, token in enumerate(answer):
            if token in params.stop_token_ids:
                answer, end = answer[:at], token
                break
        return answer[:params.max_tokens], end


EOS = ids("<|im_end|>")[0]


def alternatives(token: int, count: int) -> dict[int, Logprob]:
    """The token with logprob -0.5, and ``count`` others below it, the last one impossible."""
    others = [(token + 1 + i) % 400 for i in range(count)]
    found = {token: Logprob(-0.5, 1)} | {other: Logprob(-1.0 - i, 2 + i) for i, other in enumerate(others)}
    if others:
        found[others[-1]] = Logprob(float("-inf"), 99)
    return found


def settings(**changes: Any) -> Settings:
    return Settings(**{"model_names": ("llm", "alias"), "model_path": "/model", "max_model_len": 4096,
                       "reasoning_parser": "qwen3",
                       "tool_call_parser": "qwen3_coder", "auto_tools": True, **changes})


def application(engine: FakeEngine, arguments: Sequence[str] = (), **changes: Any) -> Any:
    """The FastAPI application; arguments: of the command line; changes: of Settings."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "/model", *arguments])
    app = build_app(args)
    service = Service(engine, tokenizer(), settings(**changes))
    init_app_state(app.state, service, SimpleNamespace(max_model_len=service.settings.max_model_len))
    return app


def client(engine: FakeEngine, arguments: Sequence[str] = (), **changes: Any) -> TestClient:
    return TestClient(application(engine, arguments, **changes), raise_server_exceptions=False)


USER = [{"role": "user", "content": "hi"}]


def post(http: TestClient, path: str = "/v1/chat/completions", **body: Any) -> Any:
    """The response's JSON; asserts that it is 200."""
    default = {"messages": USER} if "chat" in path else {"prompt": "hi"}
    response = http.post(path, json={"model": "llm", **default, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: TestClient, path: str = "/v1/chat/completions", **body: Any) -> list[dict]:
    """The chunks of a streamed response; asserts what every stream must have: ``data: `` lines and one [DONE], last."""
    default = {"messages": USER} if "chat" in path else {"prompt": "hi"}
    response = http.post(path, json={"model": "llm", "stream": True, **default, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1, lines
    return [json.loads(line[len("data: "):]) for line in lines[:-1]]


def named_events(response: Any) -> list[dict]:
    """The events of a stream whose every event is named by its type, which is asserted."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def gathered(chunks: list[dict], index: int = 0) -> dict:
    """The message that a chat stream makes, in the form of a whole answer; asserts the order of its parts."""
    message: dict[str, Any] = {"role": None, "content": ""}
    calls: list[dict] = []
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert finish is None, f"a delta after the finish: {choice}"
            delta = choice["delta"]
            for name in ("content", "reasoning_content", "reasoning"):
                if name in delta:
                    assert delta[name] or "role" in delta, f"an empty delta: {choice}"
                    message[name] = message.get(name, "") + delta[name]
            if "role" in delta:
                assert message["role"] is None, "two roles"
                message["role"] = delta["role"]
            for part in delta.get("tool_calls", []):
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": {"name": part["function"]["name"],
                                                                                       "arguments": ""}})
                else:
                    assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}, part
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            finish = choice["finish_reason"]
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": finish}


def comparable(choice: dict) -> dict:
    """A choice without what differs by chance (ids) or by form (null and empty content, what is always there)."""
    message = {name: value for name, value in choice["message"].items()
               if name not in ("tool_calls", "refusal", "annotations")}
    message["content"] = message["content"] or ""
    message["tool_calls"] = [(one["type"], one["function"]["name"], one["function"]["arguments"])
                             for one in choice["message"].get("tool_calls", [])]
    return {"message": message, "finish_reason": choice["finish_reason"]}
