"""What the other APIs have in common: each is translated into a chat request, and told of errors in its own terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.overlay.serving.errors import RequestError

# Fields of a chat request that these APIs share with it, name and meaning, where they have them at all.
SAME = ("model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
        "min_tokens", "logit_bias", "skip_special_tokens", "allowed_token_ids", "parallel_tool_calls", "priority",
        "request_id", "cache_salt", "stream", "chat_template_kwargs", "structured_outputs", "thinking_token_budget",
        "enable_thinking", "reasoning_effort", "preserve_thinking", "include_reasoning")


class Conversation:
    """Messages of a chat request that are being written, and where in the client's own request each comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._parts: dict[str, str] = {}

    def add(self, message: dict[str, Any], origin: str, parts: Sequence[str] = ()) -> dict[str, Any]:
        """Append a message; gives it back. parts: where the parts of its content come from, if not from there."""
        for i, path in enumerate(parts):
            self._parts[f"messages[{len(self.messages)}].content[{i}]"] = path
        self.messages.append(message)
        self.origins.append(origin)
        return message

    def names(self) -> dict[str, str]:
        """The path of a message, or of a part, in the chat request -> in the client's."""
        return {**{f"messages[{i}]": origin for i, origin in enumerate(self.origins)}, **self._parts}


@contextmanager
def in_terms_of(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field that a RequestError is about. names: a path of the chat request -> the client's own; what lies
    below it keeps the rest of its path."""
    try:
        yield
    except RequestError as error:
        given = error.param or ""
        for known in sorted(names, key=len, reverse=True):
            if given == known or given.startswith((f"{known}.", f"{known}[")):
                error.param = names[known] + given[len(known):]
                error.message = error.message.replace(given, error.param)
                break
        raise


def same_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a body that a chat request takes as it is."""
    return {name: body[name] for name in SAME if name in body}


def text_of(parts: Any, kinds: Sequence[str]) -> str:
    """The texts of a list of parts, of those of the given types; "" of anything else."""
    if not isinstance(parts, list):
        return ""
    return "".join(part["text"] for part in parts
                   if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str))
