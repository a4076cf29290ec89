"""A call's parameter values: text in, JSON out, typed by the tool's schema, streamed as far as the type is certain."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

from vllm.overlay.serving.fields import well_formed

_JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_REF_DEPTH = 32


def value_types(schema: Any, root: Any = None, depth: int = 0,
                known: dict[str, frozenset[str] | None] | None = None) -> frozenset[str] | None:
    """The JSON types that a schema admits, or None where it says nothing.

    Reads type (one or a list), nullable, enum, const, anyOf, oneOf, allOf, local $ref, and the shape keywords
    (properties, items). Never raises: a broken schema says nothing. known: what the $refs met so far admit; each is
    looked into once, since branches that all refer to the same definitions would double the work with every level.
    """
    if not isinstance(schema, Mapping) or depth > _REF_DEPTH:
        return None
    root = schema if root is None else root
    known = {} if known is None else known
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref not in known:
            known[ref] = None       # What refers to itself says nothing.
            known[ref] = value_types(_resolve(ref, root), root, depth + 1, known)
        return known[ref]
    types = _own_types(schema)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and schema[keyword]:
            branches = [value_types(branch, root, depth + 1, known) for branch in schema[keyword]]
            union = None if None in branches else frozenset().union(*branches)  # type: ignore[arg-type]
            types = union if types is None else types if union is None else types & union or types
    if isinstance(schema.get("allOf"), list):
        for branch in schema["allOf"]:
            narrower = value_types(branch, root, depth + 1, known)
            types = narrower if types is None else types if narrower is None else types & narrower or types
    if types is not None and schema.get("nullable") is True:
        types |= {"null"}
    return types


def _own_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    known = frozenset(name for name in names if isinstance(name, str) and name in _JSON_TYPES)
    if known:
        return known
    samples = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if samples:
        return frozenset(_type_of(sample) for sample in samples)
    if isinstance(schema.get("properties"), Mapping):
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _resolve(ref: str, root: Any) -> Any:
    if not ref.startswith("#"):
        return None
    node = root
    for step in ref[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, Mapping) or step not in node:
            return None
        node = node[step]
    return node


def parameter_types(tool_schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types that parameter ``name`` of a tool may have; those of a parameter that the tool does not declare:
    string.

    A declared parameter without a type admits every type.
    """
    properties = tool_schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return value_types(properties[name], tool_schema) or _JSON_TYPES
    other = tool_schema.get("additionalProperties")
    return (value_types(other, tool_schema) if isinstance(other, Mapping) else None) or frozenset({"string"})


class ValueWriter:
    """Turns one value's text, fed in pieces, into JSON text.

    Text of a string parameter comes out as it goes in; every other type waits for the whole value, since only then it
    is known whether the text is one. Text that is of no admitted type becomes a string: nothing that the model wrote
    is lost.
    """

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._held = ""
        self._open = False

    def feed(self, text: str) -> str:
        """JSON text that is certain by now."""
        if self._open:
            return _escaped(text)
        self._held += text
        # A nullable string is a string as soon as it cannot be the word null any more.
        if self._types <= {"string", "null"} and ("null" not in self._types or not "null".startswith(self._held)):
            self._open = True
            return '"' + _escaped(self._held)
        return ""

    def finish(self) -> str:
        """The rest of the value."""
        if self._open:
            return '"'
        value = decode_value(self._held, self._types)
        written = json.dumps(value, ensure_ascii=False)
        # Half an emoji that the model wrote as an escape can only be sent as one.
        return written if well_formed(written) == written else json.dumps(value)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decode_value(text: str, types: frozenset[str]) -> Any:
    """The value that ``text`` stands for, of the first admitted type that it fits; the text itself where it fits
    none."""
    stripped = text.strip()
    if "null" in types and (stripped == "null" or (stripped == "None" and "string" not in types)):
        return None
    if "boolean" in types and stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if types & {"integer", "number"}:
        number = _number(stripped, whole="number" not in types)
        if number is not None:
            return number
    if types & {"object", "array"}:
        wanted = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
        parsed = _container(stripped)
        if isinstance(parsed, wanted):
            return parsed
    return text


def _number(text: str, whole: bool) -> Any:
    """An int or a float written as JSON writes it (a leading + or zero makes it a text), or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # A whole number is finite, and may be too large to be asked.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if whole and isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value


def _container(text: str) -> Any:
    """A JSON object or array; one written as Python writes it (single quotes, None) too; else None."""
    if not text.startswith(("{", "[")):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            # NaN and infinity pass both readers and are no JSON.
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return value
    return None
