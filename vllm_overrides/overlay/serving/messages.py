"""The conversation of a chat request, brought into the one form that the chat template reads.

Every message becomes ``{"role", "content": str}``; an assistant's may carry ``reasoning_content`` (str) and
``tool_calls`` (``{"id", "type": "function", "function": {"name", "arguments": dict}}``), a tool's ``tool_call_id``.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.fields import text, well_formed

# The template's roles; `function` is the older name of `tool`.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Only these may come without content: an answer can be all calls, a tool can return nothing.
_MAY_BE_SILENT = ("assistant", "tool", "function")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text"}
_MEDIA_PARTS = ("image_url", "input_image", "image", "video_url", "video", "input_audio", "audio_url", "audio", "file",
                "input_file")


def normalise_messages(value: Any, path: str = "messages") -> list[dict[str, Any]]:
    """The conversation in the form above. Raises RequestError that names the message and field at fault."""
    if value is None:
        raise missing(path)
    if not isinstance(value, list):
        raise wrong_type(path, "an array", value)
    if not value:
        raise RequestError(f"{path} must hold at least one message.", param=path, code="invalid_value")
    return [_message(one, f"{path}[{i}]") for i, one in enumerate(value)]


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    role = value.get("role")
    if role is None:
        raise missing(f"{path}.role")
    if text(role, f"{path}.role") not in _ROLES:
        raise RequestError(f"{path}.role must be one of {', '.join(_ROLES)}; got {role!r:.40}.", param=f"{path}.role")
    content, thought = _content(value.get("content"), f"{path}.content", role)
    message: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": content}
    if role == "assistant":
        message.update(_assistant_extras(value, path, thought))
    elif role in ("tool", "function") and isinstance(value.get("tool_call_id"), str):
        message["tool_call_id"] = value["tool_call_id"]
    return message


def _content(value: Any, path: str, role: str) -> tuple[str, str]:
    """(text, thought) of a message's content: a string, a list of parts, or nothing."""
    if value is None:
        if role in _MAY_BE_SILENT:
            return "", ""
        raise missing(path)
    if isinstance(value, str):
        return well_formed(value), ""
    if not isinstance(value, list):
        raise wrong_type(path, "a string or an array of parts", value)
    texts: list[str] = []
    thoughts: list[str] = []
    for i, part in enumerate(value):
        one, is_thought = _part(part, f"{path}[{i}]")
        (thoughts if is_thought else texts).append(one)
    # Joined by nothing: so the model's own template renders a list of text parts.
    return "".join(texts), "".join(thoughts)


def _part(part: Any, path: str) -> tuple[str, bool]:
    """(text, whether it is a thought) of one part of a content list."""
    if isinstance(part, str):
        return part, False
    if not isinstance(part, dict):
        raise wrong_type(path, "an object", part)
    kind = part.get("type")
    if kind is None and "text" in part:
        kind = "text"
    if kind is None:
        raise missing(f"{path}.type")
    if kind in _MEDIA_PARTS:
        raise not_supported(path, f"this server takes text only, no {kind} part yet.")
    field = _TEXT_PARTS.get(kind) or _THOUGHT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise RequestError(f"{path}.type is not a known kind of part: {kind!r:.40}.", param=f"{path}.type")
    value = part.get(field)
    return ("" if value is None else text(value, f"{path}.{field}")), kind in _THOUGHT_PARTS


def _assistant_extras(value: dict[str, Any], path: str, thought: str) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    for name in ("reasoning_content", "reasoning"):
        if isinstance(value.get(name), str) and value[name]:
            thought = value[name]
            break
    if thought:
        extras["reasoning_content"] = thought
    calls = value.get("tool_calls")
    if not calls and isinstance(value.get("function_call"), dict):
        calls = [{"function": value["function_call"]}]
    if calls:
        if not isinstance(calls, list):
            raise wrong_type(f"{path}.tool_calls", "an array", calls)
        extras["tool_calls"] = [_tool_call(one, f"{path}.tool_calls[{i}]") for i, one in enumerate(calls)]
    return extras


def _tool_call(value: Any, path: str) -> dict[str, Any]:
    """One earlier call; keys that only streams have (``index``) fall away."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    function = value.get("function")
    if function is None and isinstance(value.get("custom"), dict):
        function = {"name": value["custom"].get("name"), "arguments": {"input": value["custom"].get("input", "")}}
    if function is None:
        raise missing(f"{path}.function")
    if not isinstance(function, dict):
        raise wrong_type(f"{path}.function", "an object", function)
    name = function.get("name")
    if name is None:
        raise missing(f"{path}.function.name")
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": text(name, f"{path}.function.name"),
                     "arguments": call_arguments(function.get("arguments"))},
    }
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call


def call_arguments(value: Any) -> dict[str, Any]:
    """A call's arguments as the template wants them: an object.

    Text that holds a JSON object is parsed; blank text, null and nothing are no arguments; anything else becomes one
    parameter ``arguments`` that holds it unchanged, so that a broken history is still shown to the model as it was.
    """
    if isinstance(value, dict):
        return value
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        parsed = _parse_object(value)
        if parsed is not None:
            return parsed
    return {"arguments": value}


def _parse_object(value: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
