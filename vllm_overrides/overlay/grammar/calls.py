"""Tool calls as rules of a Lark grammar: the format of Qwen3-Coder and later (`vllm.overlay.serving.parse.tool_calls`).

A call is *typed* where its tool's schema can be written as rules: its parameters come in the schema's order, those
that are required always, each with a value of its type. Otherwise it is *loose*: known parameters, any text. Strings
stand as they are, between the tags; every other type stands as JSON. What a string may be is kept as far as raw text
can be kept to it: enum, const, pattern, minLength, maxLength and the commonest formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.overlay.grammar.source import Part, grammar_part, json_part, literal, regex_part
from vllm.overlay.serving.parse.arguments import value_types

_END_VALUE = "\n</parameter>\n"
# The shortest text up to a closing tag; there is no other way to say that a value does not hold one.
_VALUE_RULE = r"value[lazy]: /(?s:.*)\n<\/parameter>\n/"
_KEY_RULE = r"key: /[^<>\s](?:[^<>\n]{0,100}[^<>\s])?/"
_NAME = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
_LONGEST_NAME = 256
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
                          "$comment", "nullable"})
_STRING_KEYWORDS = frozenset({"enum", "const", "pattern", "minLength", "maxLength", "format"})
_DEPTH = 32
# Characters of the rules of one request's tools: each parameter is written with all that its schema refers to.
_MOST_RULES = 2_000_000
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"[A-Za-z0-9._%+-]{{1,64}}@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}


class Untypable(ValueError):
    """A schema that cannot be written as rules; the message says what of it."""


class _Rules:
    """Rules of a grammar, as many as a grammar may well have."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._size = 0

    def add(self, rule: str) -> None:
        """Raises Untypable where they become too many."""
        self._size += len(rule)
        if self._size > _MOST_RULES:
            raise Untypable(f"they take more than {_MOST_RULES} characters when written as rules")
        self.texts.append(rule)


@dataclass(frozen=True)
class Tool:
    """A function that may be called. schema: of its parameters. text: of a tool that takes free text, the grammar of
    that text: (``lark`` or ``regex``, definition), or None."""

    name: str
    schema: Mapping[str, Any]
    text: tuple[str, str] | None = None

    @property
    def callable(self) -> bool:
        """Whether the format of a call can hold its name."""
        return _fits(self.name)


def calls_rules(tools: Sequence[Tool], typed: Iterable[str], *, opens: int, closes: int,
                one: bool) -> tuple[str, list[Part]]:
    """(the rules of one or several calls, the first of which is ``calls``; the parts that they refer to).

    tools: those that may be called, at least one that is ``callable``. typed: names of those whose arguments follow
    their schema. opens, closes: the tokens around a call. one: a single call, not several.

    Raises:
        Untypable: a typed tool's schema cannot be written as rules.
        GrammarError: what a typed tool gives for a grammar is none.
    """
    typed = frozenset(typed)
    rules = _Rules()
    parts: list[Part] = []
    names = []
    for i, tool in enumerate(tools):
        if not tool.callable:
            continue
        if tool.name not in typed:
            body = _loose(tool.schema)
        elif tool.text is not None:
            key, = tool.schema["properties"]
            syntax, definition = tool.text
            part = regex_part(definition) if syntax == "regex" else grammar_part(definition)
            parts.append({"name": f"text{i}", **part})
            body = f"{_opening(key)} @text{i} {literal(_END_VALUE)}"
        else:
            body = _typed(tool.schema, f"f{i}", rules)
        rules.add(f"f{i}: {literal(tool.name + '>' + chr(10))} {body}")
        names.append(f"f{i}")
    return "\n".join([
        "calls: call" if one else 'calls: call ("\\n" call)*',
        f'call: <[{opens}]> "\\n<function=" ({" | ".join(names)}) "</function>\\n" <[{closes}]>',
        *rules.texts,
        _VALUE_RULE,
        _KEY_RULE,
    ]), parts


def _fits(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and len(name) <= _LONGEST_NAME


def _opening(key: str) -> str:
    return literal(f"<parameter={key}>\n")


def _loose(schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    known = [key for key in properties if _fits(key)] if isinstance(properties, Mapping) else []
    if not known:
        return '("<parameter=" key ">\\n" value)*'
    return f"(({' | '.join(map(_opening, known))}) value)*"


def _typed(schema: Mapping[str, Any], prefix: str, rules: _Rules) -> str:
    """The parameters of a call, in the schema's order. prefix: of the names of rules that are added."""
    schema = _without_ref(schema, schema)
    for keyword in ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "minProperties", "maxProperties",
                    "propertyNames", "dependentRequired", "dependentSchemas"):
        if schema.get(keyword):
            raise Untypable(f"{keyword} beside the parameters")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list) or not all(
            isinstance(key, str) for key in required):
        raise Untypable("properties or required of a wrong type")
    others = schema.get("additionalProperties")
    unnamed = [key for key in dict.fromkeys(required) if key not in properties]
    must = frozenset(required)
    if unnamed and others is False:
        raise Untypable(f"required parameters that it does not allow: {', '.join(unnamed)}")
    written = []
    for i, key in enumerate([*properties, *unnamed]):
        if not _fits(key):
            raise Untypable(f"a parameter's name: {key!r:.60}")
        about = properties.get(key, others if isinstance(others, Mapping) else {"type": "string"})
        rules.add(f"{prefix}_{i}: {_opening(key)} ({_value(about, schema)})")
        written.append(f"{prefix}_{i}" if key in must else f"{prefix}_{i}?")
    if not properties and isinstance(others, Mapping) and others:
        rules.add(f'{prefix}_any: "<parameter=" key ">\\n" ({_value(others, schema)})')
        written.append(f"{prefix}_any*")
    return " ".join(written) or '""'


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """A parameter's value and the closing tag behind it."""
    alternatives = dict.fromkeys(_alternatives(schema, root, set(), 0))
    if not alternatives:
        raise Untypable("references that lead nowhere but to themselves")
    # Free text reads as any of the types.
    return "value" if "value" in alternatives else " | ".join(alternatives)


def _alternatives(schema: Any, root: Mapping[str, Any], met: set[str], depth: int) -> Iterator[str]:
    """Yields rules, any of which a value may follow. met: the $refs looked into so far, each once: an alternative that
    is met again adds nothing, and branches that all refer to the same would double the work with every level."""
    if depth > _DEPTH:
        raise Untypable("references that go too deep")
    if schema is False:
        raise Untypable("a parameter that nothing satisfies")
    if not isinstance(schema, Mapping):
        yield "value"
        return
    ref = schema.get("$ref")
    if isinstance(ref, str):
        if ref in met:
            return
        met.add(ref)
    schema = _without_ref(schema, root)
    types = value_types(schema, root)
    if types is None:
        yield "value"
    elif "string" not in types:
        yield _json(schema, root)
    elif (branches := _branches(schema, root)) is not None:
        for branch in branches:
            yield from _alternatives(branch, root, met, depth + 1)
    elif types == {"string"}:
        yield _string(schema)
    elif isinstance(schema.get("enum"), list):
        texts = [one for one in schema["enum"] if isinstance(one, str)]
        others = [one for one in schema["enum"] if not isinstance(one, str)]
        yield _string({"enum": texts})
        yield _json({"enum": others}, root)
    else:
        texts_only = _string({key: value for key, value in schema.items() if key in _STRING_KEYWORDS})
        yield texts_only
        if texts_only != "value":
            yield _json({**schema, "type": sorted(types - {"string"})}, root)


def _branches(schema: Mapping[str, Any], root: Any) -> list[Any] | None:
    """The alternatives of a schema that is nothing but alternatives, or None."""
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and not schema.keys() - _ANNOTATIONS - {keyword, "type"}:
            branches = list(schema[keyword])
            return [*branches, {"type": "null"}] if schema.get("nullable") is True else branches
    if schema.get("nullable") is True:
        return [{key: value for key, value in schema.items() if key != "nullable"}, {"type": "null"}]
    return None


def _json(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    whole = dict(schema)
    if whole.get("nullable") is True and isinstance(whole.get("type"), str):
        whole["type"] = [whole["type"], "null"]
    try:
        if '"$ref"' in json.dumps(whole):
            whole |= {place: root[place] for place in ("$defs", "definitions") if place in root}
        text = json.dumps(json_part(whole)["json_schema"], ensure_ascii=False)
    except RecursionError:
        raise Untypable("nested too deeply") from None
    return f"%json {text} {literal(_END_VALUE)}"


def _string(schema: Mapping[str, Any]) -> str:
    texts = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    if texts is not None:
        fitting = [one for one in texts if isinstance(one, str) and "</parameter>" not in one]
        if not fitting:
            raise Untypable("an enum or const without a text that a call can hold")
        return " | ".join(literal(one + _END_VALUE) for one in fitting)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        return _until_closed(_anchored(pattern))
    named = _FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if named is not None:
        return _until_closed(named)
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, (int, type(None))):
        raise Untypable("minLength or maxLength of a wrong type")
    if not least and most is None:
        return "value"
    return _until_closed(f"(?s:.){{{least},{'' if most is None else most}}}")


def _anchored(pattern: str) -> str:
    """A JSON schema's pattern, which need only occur in the text, as an expression of the whole text."""
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inside = pattern[starts:len(pattern) - ends]
    if (starts or ends) and "|" in inside:
        # It may bind weaker than the anchors.
        raise Untypable("a pattern with anchors and alternatives")
    return f"{'' if starts else '(?s:.*)'}(?:{inside}){'' if ends else '(?s:.*)'}"


def _until_closed(expression: str) -> str:
    from llguidance import regex_to_lark

    # One expression, so that what belongs to the value is decided together with the tag behind it.
    return f"/(?:{regex_to_lark(expression, 'dw')})" + r"\n<\/parameter>\n/"


def _without_ref(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a local $ref leads to; siblings of a $ref other than annotations cannot be written."""
    for _ in range(_DEPTH):
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return schema
        if schema.keys() - _ANNOTATIONS - {"$ref", "$defs", "definitions"}:
            raise Untypable("keywords beside a $ref")
        if not re.match(r"#/(\$defs|definitions)/", ref):
            raise Untypable(f"the $ref {ref!r:.60}")
        target: Any = root
        for step in ref[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            raise Untypable(f"the $ref {ref!r:.60}, which leads nowhere")
        schema = target
    raise Untypable("references that go too deep")
