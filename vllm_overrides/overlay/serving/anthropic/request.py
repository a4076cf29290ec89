"""The body of /v1/messages -> the body of a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.serving import fields
from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.translate import Conversation, same_fields, text_of

logger = init_logger(__name__)

FIELDS: dict[str, fields.Check] = {
    "max_tokens": fields.integer(1),
    "messages": fields.anything,
    "system": fields.anything,
    "tools": fields.list_of(fields.mapping),
    "tool_choice": fields.mapping,
    "stop_sequences": fields.list_of(fields.text),
    "thinking": fields.mapping,
    "output_config": fields.mapping,
    "output_format": fields.mapping,
    "metadata": fields.mapping,
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Blocks of tools that only Anthropic's servers run, and thoughts that only they can read.
_FOREIGN = frozenset({
    "redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use",
    "mcp_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "tool_search_tool_result", "compaction", "fallback"})
# A line that Claude Code puts first, another one in each request: no prompt after it would ever be in the cache.
_BILLING = "x-anthropic-billing-header"
_LEAST_BUDGET = 1024


@dataclass
class MessagesRequest:
    """chat: the body of the chat request. names: paths in it -> in the client's request. hide_thought: the thought's
    text is not sent."""

    chat: dict[str, Any]
    names: dict[str, str]
    hide_thought: bool = False


def translated(body: Any, counting: bool = False) -> MessagesRequest:
    """counting: for count_tokens, which needs no max_tokens. Raises RequestError that names the field at fault."""
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_type")
    same = same_fields(body)
    found = fields.read(body, {**FIELDS, **dict.fromkeys(same, fields.anything)})
    if "max_tokens" not in found and not counting:
        raise missing("max_tokens")
    talk = Conversation()
    _add_system(talk, found.get("system"))
    last = _add_messages(talk, body.get("messages"))
    tools, tool_names = _tools(found.get("tools", []))
    chat: dict[str, Any] = {**same, "messages": talk.messages, "tools": tools, "stop": found.get("stop_sequences"),
                            "max_completion_tokens": found.get("max_tokens"), **_thinking(found),
                            **_tool_choice(found.get("tool_choice", {})), **_format(found)}
    if last == "assistant" and "tool_calls" not in talk.messages[-1]:
        # The beginning of the answer, which the model continues.
        chat["continue_final_message"] = True
    names = {**talk.names(), **tool_names, "max_completion_tokens": "max_tokens", "stop": "stop_sequences",
             "thinking_token_budget": "thinking.budget_tokens", "tool_choice.function.name": "tool_choice.name",
             "response_format.json_schema": "output_config.format", "response_format": "output_config.format"}
    return MessagesRequest(chat, names, found.get("thinking", {}).get("display") == "omitted")


def _add_system(talk: Conversation, value: Any) -> None:
    """A text or a list of blocks, each of which is a system message: the template joins them by an empty line."""
    blocks = [value] if isinstance(value, str) else value
    if blocks is None:
        return
    if not isinstance(blocks, list):
        raise wrong_type("system", "a string or an array of blocks", value)
    for i, block in enumerate(blocks):
        path = "system" if isinstance(value, str) else f"system[{i}]"
        content = block if isinstance(block, str) else [block]
        shown = block if isinstance(block, str) else text_of(content, ("text",))
        if not shown.startswith(_BILLING):
            talk.add({"role": "system", "content": content}, path)


def _add_messages(talk: Conversation, value: Any) -> str | None:
    """Adds them; the role of the last one."""
    if value is None:
        raise missing("messages")
    if not isinstance(value, list):
        raise wrong_type("messages", "an array", value)
    if not value:
        raise RequestError("messages must hold at least one message.", param="messages")
    role = None
    for i, message in enumerate(value):
        path = f"messages[{i}]"
        if not isinstance(message, dict):
            raise wrong_type(path, "an object", message)
        role = message.get("role")
        if role is None:
            raise missing(f"{path}.role")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{path}.role must be user, assistant or system; got {role!r:.40}.",
                               param=f"{path}.role")
        content = message.get("content")
        if role == "system" or not isinstance(content, list):
            talk.add({"role": role, "content": content}, path)
        elif role == "assistant":
            _add_assistant(talk, content, path)
        else:
            _add_user(talk, content, path)
    return role


def _add_user(talk: Conversation, blocks: list[Any], path: str) -> None:
    """Tool results are messages of their own; what stands between them is the user's."""
    own: list[Any] = []
    places: list[str] = []

    def end_own() -> None:
        if own:
            talk.add({"role": "user", "content": list(own)}, path, places)
            own.clear()
            places.clear()

    for i, block in enumerate(blocks):
        where = f"{path}.content[{i}]"
        kind = _kind(block, where)
        if kind == "tool_result":
            end_own()
            talk.add({"role": "tool", "tool_call_id": block.get("tool_use_id"),
                      "content": _parts(block.get("content"), f"{where}.content")}, where)
        elif kind not in _FOREIGN:
            made = _parts([block], f"{path}.content", i)
            own += made
            places += [where] * len(made)
    end_own()
    if not blocks:
        talk.add({"role": "user", "content": ""}, path)


def _add_assistant(talk: Conversation, blocks: list[Any], path: str) -> None:
    parts: list[Any] = []
    places: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        where = f"{path}.content[{i}]"
        kind = _kind(block, where)
        if kind == "thinking":
            thoughts.append(fields.text(block.get("thinking") or "", f"{where}.thinking"))
        elif kind == "tool_use":
            if block.get("name") is None:
                raise missing(f"{where}.name")
            calls.append({"id": block.get("id"), "type": "function",
                          "function": {"name": fields.text(block["name"], f"{where}.name"),
                                       "arguments": block.get("input")}})
        elif kind not in _FOREIGN:
            made = _parts([block], f"{path}.content", i)
            parts += made
            places += [where] * len(made)
    message: dict[str, Any] = {"role": "assistant", "content": parts}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    talk.add(message, path, places)


def _kind(block: Any, path: str) -> str:
    if not isinstance(block, dict):
        raise wrong_type(path, "an object", block)
    if block.get("type") is None:
        raise missing(f"{path}.type")
    kind = fields.text(block["type"], f"{path}.type")
    if kind in _FOREIGN:
        logger.debug("ignored a block of type %s", kind)
    return kind


def _parts(value: Any, path: str, first: int = 0) -> Any:
    """Blocks as parts of a chat message; a document and a search result become their text. path: of the list; first:
    the place of its first block."""
    if not isinstance(value, list):
        return value
    parts: list[Any] = []
    for i, block in enumerate(value, first):
        where = f"{path}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "document":
            parts += _document(block, where)
        elif kind == "search_result":
            title = fields.text(block.get("title") or "", f"{where}.title")
            parts.append({"type": "text", "text": f"{title}\n{text_of(block.get('content'), ('text',))}\n"})
        elif kind != "tool_reference":
            parts.append(block)
    return parts


def _document(block: Mapping[str, Any], path: str) -> list[Any]:
    source = block.get("source")
    if not isinstance(source, dict):
        raise wrong_type(f"{path}.source", "an object", source)
    title = [{"type": "text", "text": f"{block['title']}\n"}] if isinstance(block.get("title"), str) else []
    if source.get("type") == "text":
        return [*title, {"type": "text", "text": fields.text(source.get("data") or "", f"{path}.source.data")}]
    if source.get("type") == "content":
        inside = source.get("content")
        return title + (_parts(inside, f"{path}.source.content") if isinstance(inside, list) else [
            {"type": "text", "text": fields.text(inside or "", f"{path}.source.content")}])
    raise not_supported(f"{path}.source", "this server reads documents that are text; convert others before.")


def _tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(tools of a chat request, their paths). Kinds whose schema only Anthropic knows are left out."""
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for i, tool in enumerate(tools):
        if tool.get("type", "custom") not in ("custom", "function", None):
            logger.debug("ignored a tool of type %r", tool["type"])
            continue
        function = {"name": tool.get("name"), "description": tool.get("description"),
                    "parameters": tool.get("input_schema"), "strict": tool.get("strict")}
        names.update({f"tools[{len(found)}].function": f"tools[{i}]", f"tools[{len(found)}]": f"tools[{i}]"})
        found.append({"type": "function",
                      "function": {name: value for name, value in function.items() if value is not None}})
    return found, names


def _tool_choice(value: Mapping[str, Any]) -> dict[str, Any]:
    if not value:
        return {}
    kind = value.get("type")
    single = fields.read(value, {"disable_parallel_tool_use": fields.flag}, "tool_choice.")
    chat: dict[str, Any] = {"parallel_tool_calls": not single.get("disable_parallel_tool_use", False)}
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": value.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise RequestError(f"tool_choice.type must be auto, any, tool or none; got {kind!r:.40}.",
                           param="tool_choice.type")
    return chat


def _thinking(found: Mapping[str, Any]) -> dict[str, Any]:
    """In this API a request that does not speak of thought wants none."""
    wanted = found.get("thinking")
    if wanted is None:
        asked = found.get("chat_template_kwargs")
        told = isinstance(asked, dict) and ("enable_thinking" in asked or "thinking" in asked)
        return {} if told or "enable_thinking" in found or "reasoning_effort" in found else {"enable_thinking": False}
    kind = wanted.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise RequestError(f"thinking.type must be enabled, adaptive or disabled; got {kind!r:.40}.",
                           param="thinking.type")
    budget = fields.read(wanted, {"budget_tokens": fields.integer(_LEAST_BUDGET)}, "thinking.").get("budget_tokens")
    # Anthropic refuses a budget that max_tokens does not leave room for; qwen-code sends one with every request
    # (32,000 of 8,000). Such a budget never ends a thought: the limit does.
    if kind != "enabled" or budget is None or budget >= found.get("max_tokens", budget + 1):
        return {"enable_thinking": kind != "disabled"}
    return {"enable_thinking": True, "thinking_token_budget": budget}


def _format(found: Mapping[str, Any]) -> dict[str, Any]:
    wanted = found.get("output_config", {}).get("format") or found.get("output_format")
    if not wanted:
        return {}
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise RequestError("output_config.format must be an object of type json_schema.", param="output_config.format")
    if wanted.get("schema") is None:
        raise missing("output_config.format.schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "strict": True,
                                                                       "schema": wanted.get("schema")}}}
