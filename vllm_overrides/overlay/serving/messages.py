"""The conversation of a chat request, brought into the one form that the chat template reads.

Every message becomes ``{"role", "content": str}``; an assistant's may carry ``reasoning_content`` (str) and
``tool_calls`` (``{"id", "type": "function", "function": {"name", "arguments": dict}}``), a tool's ``tool_call_id``.
A user's or tool's content with pictures is a list of ``{"type": "text", "text"}`` and ``{"type": "image"}`` in the
order in which they were sent; where the pictures are stands beside the messages, so that no template and no log sees
it.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.fields import text, well_formed
from vllm.overlay.serving.pictures.source import PICTURE_PARTS, PictureSource, picture_source

# The template's roles; `function` is the older name of `tool`.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Only these may come without content: an answer can be all calls, a tool can return nothing.
_MAY_BE_SILENT = ("assistant", "tool", "function")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text"}
_OTHER_MEDIA = ("video_url", "input_video", "video", "input_audio", "audio_url", "audio", "file", "input_file")
# The model knows pictures only as what it is asked about.
_MAY_SHOW = ("user", "tool", "function")


def normalise_messages(value: Any, path: str = "messages") -> tuple[list[dict[str, Any]], tuple[PictureSource, ...]]:
    """(the conversation in the form above, its pictures in order). Raises RequestError that names the message and field
    at fault."""
    if value is None:
        raise missing(path)
    if not isinstance(value, list):
        raise wrong_type(path, "an array", value)
    if not value:
        raise RequestError(f"{path} must hold at least one message.", param=path, code="invalid_value")
    pictures: list[PictureSource] = []
    return [_message(one, f"{path}[{i}]", pictures) for i, one in enumerate(value)], tuple(pictures)


def _message(value: Any, path: str, pictures: list[PictureSource]) -> dict[str, Any]:
    """One message; its pictures are added to ``pictures``."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    role = value.get("role")
    if role is None:
        raise missing(f"{path}.role")
    if text(role, f"{path}.role") not in ROLES:
        raise RequestError(f"{path}.role must be one of {', '.join(ROLES)}; got {role!r:.40}.", param=f"{path}.role")
    said = value.get("content")
    if said is None and role == "assistant" and isinstance(value.get("refusal"), str):
        said = value["refusal"]
    content, thought = _content(said, f"{path}.content", role, pictures)
    message: dict[str, Any] = {"role": "tool" if role == "function" else role, "content": content}
    if role == "assistant":
        message.update(_assistant_extras(value, path, thought))
    elif role in ("tool", "function") and isinstance(value.get("tool_call_id"), str):
        message["tool_call_id"] = value["tool_call_id"]
    return message


def _content(value: Any, path: str, role: str,
             pictures: list[PictureSource]) -> tuple[str | list[dict[str, Any]], str]:
    """(text or parts, thought) of a message's content: a string, a list of parts, or nothing."""
    if value is None:
        if role in _MAY_BE_SILENT:
            return "", ""
        raise missing(path)
    if isinstance(value, str):
        return well_formed(value), ""
    if not isinstance(value, list):
        raise wrong_type(path, "a string or an array of parts", value)
    # Neighbours are joined by nothing: so the model's own template renders a list of text parts.
    texts: list[list[str]] = [[]]
    thoughts: list[str] = []
    for i, part in enumerate(value):
        where = f"{path}[{i}]"
        if _is_picture(part):
            if role not in _MAY_SHOW:
                raise not_supported(where, f"a picture may stand in a user or tool message, not in a {role} message.")
            pictures.append(picture_source(part, where))
            texts.append([])
            continue
        one, is_thought = _part(part, where)
        (thoughts if is_thought else texts[-1]).append(one)
    joined = ["".join(run) for run in texts]
    if len(joined) == 1:
        return joined[0], "".join(thoughts)
    parts: list[dict[str, Any]] = []
    for i, run in enumerate(joined):
        if i:
            parts.append({"type": "image"})
        if run:
            parts.append({"type": "text", "text": run})
    return parts, "".join(thoughts)


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") in PICTURE_PARTS or (
        part.get("type") is None and "text" not in part and bool(part.get("image_url") or part.get("image"))))


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
    if kind in _OTHER_MEDIA:
        raise not_supported(path, f"this server takes text and pictures, no {kind} part.")
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
