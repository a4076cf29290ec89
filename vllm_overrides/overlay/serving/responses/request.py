"""The body of /v1/responses -> the body of a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.serving import fields
from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.responses.sealed import INCLUDE, unsealed
from vllm.overlay.serving.translate import Conversation, same_fields, text_of

logger = init_logger(__name__)

FIELDS: dict[str, fields.Check] = {
    "input": fields.anything,
    "instructions": fields.text,
    "max_output_tokens": fields.integer(1),
    "max_tool_calls": fields.integer(1),
    "tools": fields.list_of(fields.mapping),
    "tool_choice": fields.anything,
    "text": fields.mapping,
    "reasoning": fields.mapping,
    "top_logprobs": fields.integer(0),
    "include": fields.list_of(fields.text),
    "metadata": fields.mapping,
    "truncation": fields.one_of("auto", "disabled"),
    "parallel_tool_calls": fields.flag,
    "store": fields.flag,
    "background": fields.flag,
    "stream": fields.flag,
    "previous_response_id": fields.text,
    "conversation": fields.anything,
    "prompt": fields.anything,
    "safety_identifier": fields.anything,
    "prompt_cache_key": fields.anything,
    "user": fields.anything,
}
_STORED = "this server stores nothing; send the whole conversation as input."
_NOT_SERVED = {
    "previous_response_id": _STORED,
    "conversation": _STORED,
    "prompt": "this server keeps no prompt templates; send instructions and input.",
    "background": _STORED,
}
# Items of tools that only OpenAI's servers run: a conversation that began there may hold them.
_FOREIGN = frozenset({
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
    "computer_call_output", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "local_shell_call", "local_shell_call_output", "tool_search_call", "tool_search_output", "compaction_trigger"})


@dataclass
class ResponsesRequest:
    """chat: the body of the chat request. names: paths in it -> in the client's request. shown: what the answer repeats
    of the request. namespaces: a function's name -> (namespace, its name in there). seals: whether thoughts come with
    `encrypted_content`."""

    chat: dict[str, Any]
    names: dict[str, str]
    shown: dict[str, Any]
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    seals: bool = False


def translated(body: Any) -> ResponsesRequest:
    """Raises RequestError that names the field at fault."""
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_type")
    found = fields.read(body, {**FIELDS, **dict.fromkeys(same_fields(body), fields.anything)})
    for name, why in _NOT_SERVED.items():
        if found.get(name):
            raise not_supported(name, why)
    talk = Conversation()
    if "instructions" in found:
        talk.add({"role": "system", "content": found["instructions"]}, "instructions")
    _add_input(talk, found.get("input"))
    tools, namespaces, tool_names = _tools(found.get("tools", []))
    text, format_of_chat = _text(found.get("text", {}))
    chat: dict[str, Any] = {**same_fields(body), "messages": talk.messages, "tools": tools,
                            "tool_choice": _tool_choice(found.get("tool_choice"), namespaces),
                            "response_format": format_of_chat, "reasoning": found.get("reasoning"),
                            "max_completion_tokens": found.get("max_output_tokens")}
    if found.get("top_logprobs") or "message.output_text.logprobs" in found.get("include", ()):
        chat.update(logprobs=True, top_logprobs=found.get("top_logprobs", 0))
    names = {**talk.names(), **tool_names, "messages": "input", "max_completion_tokens": "max_output_tokens",
             "response_format.json_schema": "text.format", "response_format": "text.format",
             "tool_choice.function.name": "tool_choice.name", "tool_choice.allowed_tools": "tool_choice"}
    reasoning = found.get("reasoning", {})
    shown = {
        "instructions": found.get("instructions"), "tools": [_shown_tool(tool) for tool in found.get("tools", [])],
        "tool_choice": found.get("tool_choice", "auto"), "text": text, "metadata": found.get("metadata", {}),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "max_output_tokens": found.get("max_output_tokens"), "max_tool_calls": found.get("max_tool_calls"),
        "parallel_tool_calls": found.get("parallel_tool_calls", True), "top_logprobs": found.get("top_logprobs", 0),
        "safety_identifier": found.get("safety_identifier"), "prompt_cache_key": found.get("prompt_cache_key"),
        "user": found.get("user")}
    return ResponsesRequest(chat, names, shown, namespaces, INCLUDE in found.get("include", ()))


def _add_input(talk: Conversation, value: Any) -> None:
    if value is None:
        raise missing("input")
    if isinstance(value, str):
        talk.add({"role": "user", "content": value}, "input")
        return
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array of items", value)
    turn = _Turn(talk)
    for i, item in enumerate(value):
        path = f"input[{i}]"
        if not isinstance(item, dict):
            raise wrong_type(path, "an object", item)
        _add_item(turn, item, path)


class _Turn:
    """Gathers the items of one answer (thought, text, calls) into one message, as it was generated."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._open: dict[str, Any] | None = None

    def other(self, message: dict[str, Any], path: str) -> None:
        """A message that is not the assistant's."""
        self._open = None
        self._talk.add(message, path)

    def thought(self, text: str, path: str) -> None:
        """A thought begins an answer."""
        self._open = self._talk.add({"role": "assistant", "content": "", "reasoning_content": text}, path)

    def content(self, content: Any, path: str) -> None:
        """Text goes behind a thought; behind text or calls it is another answer."""
        if self._open is None or self._open["content"] or "tool_calls" in self._open:
            self._open = self._talk.add({"role": "assistant"}, path)
        else:
            self._talk.origins[-1] = path
        self._open["content"] = content

    def call(self, call: dict[str, Any], path: str) -> None:
        """A call goes behind all of them."""
        if self._open is None:
            self._open = self._talk.add({"role": "assistant", "content": ""}, path)
        self._open.setdefault("tool_calls", []).append(call)


def _add_item(turn: _Turn, item: Mapping[str, Any], path: str) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    if kind is None:
        raise missing(f"{path}.type")
    kind = fields.text(kind, f"{path}.type")
    if kind == "message":
        if item.get("role") == "assistant":
            turn.content(item.get("content"), path)
        else:
            turn.other({"role": item.get("role"), "content": item.get("content")}, path)
    elif kind in ("function_call", "custom_tool_call"):
        if item.get("name") is None:
            raise missing(f"{path}.name")
        name = fields.text(item["name"], f"{path}.name")
        if isinstance(item.get("namespace"), str):
            name = _flat(item["namespace"], name)
        given = item.get("arguments") if kind == "function_call" else {"input": item.get("input", "")}
        turn.call({"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": given}}, path)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        turn.other({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}, path)
    elif kind == "reasoning":
        said = text_of(item.get("content"), ("reasoning_text", "text")) or unsealed(item.get("encrypted_content"))
        turn.thought(said or text_of(item.get("summary"), ("summary_text",)), path)
    elif kind == "item_reference":
        raise not_supported(path, _STORED)
    elif kind in _FOREIGN:
        logger.debug("ignored an input item of type %s", kind)
    else:
        raise RequestError(f"{path}.type is not a known kind of item: {kind!r:.40}.", param=f"{path}.type")


def _flat(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def _tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]], dict[str, str]]:
    """(tools of a chat request, namespaces, paths of the tools). Kinds that only OpenAI's servers can run are left
    out."""
    found: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    names: dict[str, str] = {}

    def add(tool: dict[str, Any], path: str, namespace: str | None = None) -> None:
        kind = tool.get("type", "function")
        if kind not in ("function", "custom"):
            logger.debug("ignored a tool of type %r", kind)
            return
        inner = {key: value for key, value in tool.items() if key not in ("type", "defer_loading")}
        if namespace is not None and isinstance(tool.get("name"), str):
            inner["name"] = _flat(namespace, tool["name"])
            namespaces[inner["name"]] = (namespace, tool["name"])
        names.update({f"tools[{len(found)}].{kind}": path, f"tools[{len(found)}]": path})
        found.append({"type": kind, kind: inner.get("function", inner) if kind == "function" else inner})

    for i, tool in enumerate(tools):
        if tool.get("type") == "namespace":
            inside = fields.list_of(fields.mapping)(tool.get("tools") or [], f"tools[{i}].tools")
            for j, one in enumerate(inside):
                add(one, f"tools[{i}].tools[{j}]", fields.text(tool.get("name"), f"tools[{i}].name"))
        else:
            add(tool, f"tools[{i}]")
    return found, namespaces, names


def _tool_choice(value: Any, namespaces: Mapping[str, tuple[str, str]]) -> Any:
    """A function is named flat here, and below ``function`` in a chat request."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        name = value["name"]
        if isinstance(value.get("namespace"), str):
            name = _flat(value["namespace"], name)
        flat = [full for full, (_, local) in namespaces.items() if local == name]
        return {"type": "function", "function": {"name": flat[0] if len(flat) == 1 else name}}
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and isinstance(value.get("tools"), list):
        return {"type": "allowed_tools", "allowed_tools": {
            "mode": value.get("mode"), "tools": [_tool_choice(one, namespaces) for one in value["tools"]]}}
    return value


def _text(value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(``text`` as the answer repeats it, ``response_format`` of a chat request)."""
    read = fields.read(value, {"format": fields.mapping, "verbosity": fields.one_of("low", "medium", "high")}, "text.")
    wanted = read.get("format", {"type": "text"})
    extra = {"verbosity": read["verbosity"]} if "verbosity" in read else {}
    if wanted.get("type") != "json_schema":
        return {"format": wanted, **extra}, wanted
    inner = {key: part for key, part in wanted.items() if key != "type"}
    shown = {"type": "json_schema", "name": wanted.get("name"), "description": wanted.get("description"),
             "schema": wanted.get("schema"), "strict": bool(wanted.get("strict", False))}
    return {"format": shown, **extra}, {"type": "json_schema", "json_schema": inner}


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        return dict(tool)
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}
