"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai.types

from tests.conformance.checks import expect
from tests.conformance.forms.shared import check_limit, check_usage, last_usage, openai_chunks, typed
from tests.conformance.target import Streamed


def completion(body: Mapping[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """A whole answer; gives it back."""
    # With echo the first token has no probability: null, which OpenAI's service sends, too, and its type leaves out.
    typed(openai.types.Completion, got if not body.get("echo") else {
        **got, "choices": [{**choice, "logprobs": None} for choice in got["choices"]]})
    expect([choice["index"] for choice in got["choices"]] == list(range((body.get("n") or 1) * _prompts(body))),
           f"choices: {got}")
    expect(all(choice["finish_reason"] in ("stop", "length") for choice in got["choices"]), f"finish: {got}")
    check_usage(got.get("usage"), "prompt_tokens", "completion_tokens")
    check_limit(body, got["usage"]["completion_tokens"], len(got["choices"]))
    return got


def completion_stream(body: Mapping[str, Any], got: Streamed) -> dict[str, Any]:
    """A streamed answer; gives its choices in the form of a whole one."""
    chunks = openai_chunks(got)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "finish_reason": None})
            expect(choice["finish_reason"] is None or not part["text"], f"text after the finish: {part}")
            choice["text"] += part["text"]
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
    expect(sorted(choices) == list(range((body.get("n") or 1) * _prompts(body))), f"choices: {sorted(choices)}")
    expect(all(choice["finish_reason"] in ("stop", "length") for choice in choices.values()), f"finish: {choices}")
    usage = last_usage(body, chunks)
    if usage is not None:
        check_usage(usage, "prompt_tokens", "completion_tokens")
    return {"usage": usage, "choices": [{"index": index, **choices[index]} for index in sorted(choices)]}


def _prompts(body: Mapping[str, Any]) -> int:
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
