"""The tools of a request and which of them the model may, must or must not call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.serving.errors import RequestError, missing, wrong_type
from vllm.overlay.serving.fields import text, well_formed

logger = init_logger(__name__)

# The format of a call writes <function=NAME> on one line; the parser reads names up to this length.
_LONGEST_NAME = 256
# What a tool that takes free text is given it as.
CUSTOM_PARAMETER = "input"


@dataclass(frozen=True)
class ToolChoice:
    """mode: ``none``, ``auto``, ``required`` or ``named``; name: the function's, when named. allowed: names of the
    functions that may be called, None for all."""

    mode: str
    name: str | None = None
    allowed: frozenset[str] | None = None

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in ("required", "named")


@dataclass(frozen=True)
class Tools:
    """definitions: as the client sent them (the template prints them whole); schemas: parameters by function name.

    custom: names of the tools that take free text, which the model writes as one parameter. legacy: they came
    as ``functions``, and a call is answered as ``function_call``. strict: names of those whose calls follow their
    schema. grammars: of what custom tools take, by name: (``lark`` or ``regex``, definition)."""

    definitions: tuple[dict[str, Any], ...]
    schemas: Mapping[str, dict[str, Any]]
    custom: frozenset[str] = frozenset()
    legacy: bool = False
    strict: frozenset[str] = frozenset()
    grammars: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def normalise_tools(value: Any, path: str = "tools") -> Tools:
    """Check tool definitions. Kinds that only other servers can run (web search, ...) are left out with a debug
    line."""
    if not isinstance(value, list):
        raise wrong_type(path, "an array", value)
    definitions, schemas, custom, strict, grammars = [], {}, set(), set(), {}
    for i, tool in enumerate(value):
        where = f"{path}[{i}]"
        if not isinstance(tool, dict):
            raise wrong_type(where, "an object", tool)
        if tool.get("type") == "custom":
            tool, grammar = _custom(tool, where)
            custom.add(tool["function"]["name"])
            if grammar is not None:
                grammars[tool["function"]["name"]] = grammar
        elif "function" not in tool and "name" in tool:
            tool = {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if tool.get("function") is None:
            if tool.get("type", "function") == "function":
                raise missing(f"{where}.function")
            logger.debug("ignored a tool of type %r", tool.get("type"))
            continue
        function = tool["function"]
        if not isinstance(function, dict):
            raise wrong_type(f"{where}.function", "an object", function)
        if function.get("name") is None:
            raise missing(f"{where}.function.name")
        name = text(function["name"], f"{where}.function.name")
        parameters = function.get("parameters")
        definitions.append(tool)
        if function.get("strict") is True:
            strict.add(name)
        # A broken schema is the tool author's fault, not this request's: the values of its calls are then untyped.
        schemas[name] = parameters if isinstance(parameters, dict) else {}
    return Tools(tuple(definitions), schemas, frozenset(custom), strict=frozenset(strict), grammars=grammars)


def normalise_functions(value: Any) -> Tools:
    """``functions``, which ``tools`` have replaced: a list of what a tool has under ``function``."""
    if not isinstance(value, list):
        raise wrong_type("functions", "an array", value)
    for i, function in enumerate(value):
        if not isinstance(function, dict):
            raise wrong_type(f"functions[{i}]", "an object", function)
        if function.get("name") is None:
            raise missing(f"functions[{i}].name")
    tools = normalise_tools([{"type": "function", "function": function} for function in value], "functions")
    return replace(tools, legacy=True)


def _custom(tool: Mapping[str, Any], path: str) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """(a tool that takes free text, as a function of one parameter; the grammar of that text, which the model is shown
    too, or None)."""
    inner = tool.get("custom")
    custom: Any = inner if inner is not None else tool
    if not isinstance(custom, dict):
        raise wrong_type(f"{path}.custom", "an object", custom)
    if custom.get("name") is None:
        raise missing(f"{path}.custom.name" if custom is inner else f"{path}.name")
    about = custom.get("description")
    parts = [about] if isinstance(about, str) and about else []
    shape = custom.get("format")
    known = None
    if isinstance(shape, dict):
        inside = shape.get("grammar")
        grammar = inside if isinstance(inside, dict) else shape
        if isinstance(grammar.get("definition"), str):
            parts.append(f"The input follows this {grammar.get('syntax') or ''} grammar:\n{grammar['definition']}")
            if grammar.get("syntax") in ("lark", "regex"):
                known = grammar["syntax"], well_formed(grammar["definition"])
    return {"type": "function", "function": {
        "name": text(custom["name"], f"{path}.name"), "description": well_formed("\n\n".join(parts)),
        "parameters": {"type": "object", "properties": {CUSTOM_PARAMETER: {"type": "string"}},
                       "required": [CUSTOM_PARAMETER]}}}, known


def normalise_tool_choice(value: Any, tools: Tools, path: str = "tool_choice") -> ToolChoice:
    """The choice, which is ``auto`` when there are tools and ``none`` when there are not, unless the request says so.

    Raises RequestError where a call is forced and there is no such tool.
    """
    if value is None:
        return ToolChoice("auto" if tools.definitions else "none")
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value, tools, path)
    if isinstance(value, dict):
        function = value.get("function", value.get("custom"))
        name = function.get("name") if isinstance(function, dict) else value.get("name")
        if name is None and value.get("type") in ("none", "auto", "required", "any"):
            return normalise_tool_choice(value["type"], tools, path)
        if name is None:
            raise missing(f"{path}.function.name")
        if text(name, f"{path}.function.name") not in tools.schemas:
            raise RequestError(f"{path} names the function {name!r:.80}, which is not among tools.", param=path)
        name = text(name, f"{path}.function.name")
        if not name.strip() or len(name) > _LONGEST_NAME or any(letter in name for letter in "<>\n"):
            raise RequestError(f"{path} names the function {name!r:.80}, which cannot be called: a name is not empty, "
                               f"has at most {_LONGEST_NAME} characters and no <, > or line break.", param=path)
        return ToolChoice("named", name)
    mode = "required" if value == "any" else text(value, path)
    if mode not in ("none", "auto", "required"):
        raise RequestError(f"{path} must be none, auto, required or a function; got {value!r:.60}.", param=path)
    if mode == "required" and not tools.definitions:
        raise RequestError(f"{path} is required, but tools is empty.", param=path)
    return ToolChoice(mode if tools.definitions else "none")


def _allowed_tools(value: Mapping[str, Any], tools: Tools, path: str) -> ToolChoice:
    """``{"type": "allowed_tools"}`` with mode and tools, inside ``allowed_tools`` (chat) or beside it (responses)."""
    inside = value.get("allowed_tools")
    chosen, where = (value, path) if inside is None else (inside, f"{path}.allowed_tools")
    if not isinstance(chosen, dict):
        raise wrong_type(where, "an object", chosen)
    mode = text(chosen.get("mode", "auto"), f"{where}.mode")
    if mode not in ("auto", "required"):
        raise RequestError(f"{where}.mode must be auto or required; got {mode!r:.60}.", param=f"{where}.mode")
    if not isinstance(chosen.get("tools"), list):
        raise wrong_type(f"{where}.tools", "an array", chosen.get("tools"))
    named = [normalise_tool_choice(one, tools, f"{where}.tools[{i}]") for i, one in enumerate(chosen["tools"])
             if not isinstance(one, dict) or one.get("type", "function") in ("function", "custom")]
    names = frozenset(choice.name for choice in named if choice.name is not None)
    if not names:
        raise RequestError(f"{where}.tools names no function.", param=f"{where}.tools")
    return ToolChoice(mode, allowed=names)
