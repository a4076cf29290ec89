"""The forms that requests give a grammar in -> llguidance's: JSON schema, regular expression, choice, Lark, GBNF.

A *part* is one grammar of llguidance's list of grammars, as JSON. ``alone`` makes a whole of a part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from vllm.overlay.grammar.compiler import GrammarError
from vllm.overlay.serving.fields import well_formed

Part = dict[str, Any]

# White space inside JSON, at most once where JSON allows any: a blank, or a line break with indentation. Without a
# limit a model that has lost its way writes blanks until its last token.
WHITESPACE = r"\x20|\r?\n[\x20\t]{0,60}"
_IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False, ), "propertyNames": (True, {}, {"type": "string"}), "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}), "dependentRequired": ({}, ), "dependentSchemas": ({}, )}
# Keywords whose values count something; JSON Schema has 2.0 for 2, llguidance has not.
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
# Keywords whose values hold schemas.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties", "not", "contains", "if", "then", "else"})
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def json_part(schema: Any, *, lenient: bool = False, whitespace: str | None = None) -> Part:
    """Of a JSON schema, which may be any JSON value. lenient: keywords that llguidance does not know are ignored,
    instead of refused. whitespace: a regular expression for all white space inside, instead of WHITESPACE."""
    if not isinstance(schema, dict):
        # Where options are to be set, llguidance wants an object.
        schema = {"allOf": [schema]}
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace,
                               "json_allow_general_unicode_escapes": True}
    if lenient:
        options["lenient"] = True
    return {"json_schema": {**_without_idle(schema), "x-guidance": options}}


def _without_idle(schema: Any) -> Any:
    """The schema without keywords that demand nothing, which llguidance would refuse by their name alone, and which
    libraries that write schemas like to write; and with whole numbers written as such."""
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for keyword, value in schema.items():
        if keyword in _IDLE and any(value == idle and type(value) is type(idle) for idle in _IDLE[keyword]):
            continue
        if keyword in _MAPS and isinstance(value, dict):
            value = {name: _without_idle(one) for name, one in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            value = [_without_idle(one) for one in value]
        elif keyword in _SINGLE:
            value = _without_idle(value)
        elif keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            value = int(value)
        kept[keyword] = value
    return kept


def regex_part(pattern: str) -> Part:
    """Of a regular expression that the whole text has to match. ``\\d`` is a digit from 0 to 9."""
    from llguidance import regex_to_lark

    return {"lark_grammar": f"start: /{regex_to_lark(pattern, 'd')}/"}


def choice_part(choices: Sequence[str]) -> Part:
    """Of texts of which one is chosen."""
    return {"lark_grammar": "start: " + " | ".join(map(literal, choices))}


def grammar_part(text: str) -> Part:
    """Of a grammar in Lark's form, as llguidance reads it, or in llama.cpp's (GBNF, ``root ::= ...``).

    Raises:
        GrammarError: what looks like GBNF is none.
    """
    if _GBNF.search(text) is None:
        return {"lark_grammar": text}
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return {"lark_grammar": gbnf_to_lark(text)}
    except RecursionError:
        raise GrammarError("nested too deeply") from None
    except Exception as error:
        raise GrammarError(" ".join(str(error).split())) from error


def alone(part: Part) -> str:
    """The whole grammar that consists of one part."""
    return joined([part])


def joined(parts: Sequence[Part]) -> str:
    """The whole grammar of these parts, the first of which is where it starts. Unpaired surrogates, which are no text,
    are replaced.

    Raises:
        GrammarError: a part is nested too deeply.
    """
    try:
        return well_formed(json.dumps({"grammars": list(parts)}, ensure_ascii=False))
    except RecursionError:
        raise GrammarError("nested too deeply") from None


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
