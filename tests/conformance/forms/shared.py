"""What the forms of all endpoints have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.conformance.checks import expect
from tests.conformance.target import Streamed


def typed(model: type[BaseModel] | TypeAdapter[Any], value: Any) -> None:
    """The value must be what a client's own type says."""
    try:
        if isinstance(model, TypeAdapter):
            model.validate_python(value)
        else:
            model.model_validate(value)
    except ValidationError as error:
        expect(False, f"not of the client's type: {error.errors(include_url=False)[:2]} in {json.dumps(value)[:500]}")


def check_usage(usage: Any, prompt: str, completion: str) -> None:
    """Two counts under these names that add up, with details that are no more than they."""
    expect(isinstance(usage, dict), f"usage is {usage!r}")
    counts = [usage.get(name) for name in (prompt, completion)]
    expect(all(type(count) is int for count in counts) and counts[0] > 0 and counts[1] >= 0, f"usage: {usage}")
    if "total_tokens" in usage:
        expect(usage["total_tokens"] == sum(counts), f"usage does not add up: {usage}")
    for detail, most in ((f"{prompt}_details", counts[0]), (f"{completion}_details", counts[1])):
        for count in (usage.get(detail) or {}).values():
            # The client's type has judged the counts that it knows; a server may tell more, as vLLM does of pictures.
            expect(not isinstance(count, int) or 0 <= count <= most, f"usage: more in {detail} than there is: {usage}")


def parsed(text: Any) -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        expect(False, f"not JSON: {text!r:.300}")


def obeys(value: Any, schema: Any) -> None:
    """The value must obey the schema, if there is one."""
    if isinstance(schema, dict):
        try:
            jsonschema.validate(value, schema)
        except jsonschema.ValidationError as error:
            expect(False, f"{value} does not obey the schema: {error.message}")


def openai_chunks(got: Streamed) -> list[dict[str, Any]]:
    """The chunks of a stream of OpenAI's older form: only ``data: `` lines, one [DONE], last; one id."""
    expect(all(line.startswith("data: ") for line in got.lines), f"a line that is no data: {got}")
    expect(got.lines.count("data: [DONE]") == 1 and got.lines[-1] == "data: [DONE]", f"[DONE]: {got.lines[-3:]}")
    chunks = got.chunks()
    expect(chunks and len({chunk.get("id") for chunk in chunks}) == 1, f"no chunk, or several ids: {got}")
    expect(not any("error" in chunk for chunk in chunks), f"an error in the stream: {chunks[-1]}")
    return chunks


def last_usage(body: Mapping[str, Any], chunks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The usage at a stream's end: there, without choices, if it was asked for, and only then."""
    if not (body.get("stream_options") or {}).get("include_usage"):
        expect(not any(chunk.get("usage") for chunk in chunks), "usage although it was not asked for")
        return None
    expect(chunks[-1]["choices"] == [] and chunks[-1].get("usage"), f"no usage at the end: {chunks[-1]}")
    return chunks[-1]["usage"]


def named_events(got: Streamed, done: bool) -> list[dict[str, Any]]:
    """The events of a stream whose every event is named by its type."""
    events = [(name, data) for name, data in got.events if not (done and data == "[DONE]")]
    read = [json.loads(data) for _, data in events]
    expect(read and all(name == event["type"] for (name, _), event in zip(events, read, strict=True)), f"names: {got}")
    return read


def check_limit(body: Mapping[str, Any], used: int, choices: int) -> None:
    """Something was generated, and no more than was asked for."""
    expect(used > 0, "nothing was generated")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit and not body.get("best_of"):
        expect(used <= limit * choices, f"{used} tokens for {choices} x {limit}")
