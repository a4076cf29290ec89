"""What a request says about the form of its output: ``response_format``, ``structured_outputs`` and the older
``guided_*`` fields."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.overlay.grammar.source import Part, choice_part, grammar_part, json_part, regex_part
from vllm.overlay.serving import fields
from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.fields import is_absent

_GUIDED = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT = {"type": "object"}
_TAGS = "describe calls as tools; structural tags are not known here."


@dataclass(frozen=True)
class Structure:
    """The form that the content must have. field: the request's field that says so, for messages.

    make: writes the grammar, which takes long where there is much of it. whole_output: the grammar is one of the whole
    output, thoughts and calls and control tokens included, and nothing else is added to it. whitespace: the field that
    says what white space may stand in JSON, and its expression, for messages.
    """

    field: str
    make: Callable[[], Part]
    whole_output: bool = False
    whitespace: tuple[str, str] | None = None


def read_structure(body: Mapping[str, Any]) -> Structure | None:
    """The one form that a request asks for, or None. Raises RequestError for a field that is wrong, or for two."""
    found = [one for one in (_response_format(body.get("response_format")), *_guided(body),
                             _structured_outputs(body.get("structured_outputs"))) if one is not None]
    if len(found) > 1:
        raise RequestError(f"{found[0].field} and {found[1].field} both say what the output must be; give one of them.",
                           param=found[1].field)
    return found[0] if found else None


def _response_format(value: Any) -> Structure | None:
    if is_absent(value):
        return None
    if not isinstance(value, dict):
        raise wrong_type("response_format", "an object", value)
    kind = value.get("type")
    if kind is None:
        raise missing("response_format.type")
    if kind == "text":
        return None
    if kind == "structural_tag":
        raise not_supported("response_format.type", _TAGS)
    if kind == "json_object":
        # A schema here is how llama.cpp and others spell json_schema.
        return _of_schema(value.get("schema"), "response_format.schema", strict=False, default="response_format")
    if kind != "json_schema":
        raise RequestError(f"response_format.type must be text, json_object or json_schema; got {kind!r:.40}.",
                           param="response_format.type")
    where, named = "response_format.json_schema", value.get("json_schema")
    if named is None and "schema" in value:
        return _of_schema(value["schema"], "response_format.schema", strict=value.get("strict") is True)
    if named is None:
        raise missing(where)
    if not isinstance(named, dict):
        raise wrong_type(where, "an object", named)
    strict = named.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{where}.strict", "a boolean", strict)
    return _of_schema(named.get("schema"), f"{where}.schema", strict=bool(strict), default=where)


def _of_schema(schema: Any, field: str, *, strict: bool, default: str | None = None) -> Structure:
    """strict: what cannot be enforced is refused, not ignored. default: the field that asks for any object where there
    is no schema; None where one is needed."""
    if schema is None:
        if default is None:
            raise missing(field)
        return Structure(default, functools.partial(json_part, _ANY_OBJECT))
    if not isinstance(schema, (dict, bool)):
        raise wrong_type(field, "an object", schema)
    return Structure(field, functools.partial(json_part, schema, lenient=not strict))


def _guided(body: Mapping[str, Any]) -> list[Structure | None]:
    given = {kind: body.get(f"guided_{kind}") for kind in _GUIDED}
    return [_of_kind(kind, value, f"guided_{kind}", body.get("guided_whitespace_pattern"), "guided_whitespace_pattern")
            for kind, value in given.items() if not is_absent(value)]


def _structured_outputs(value: Any) -> Structure | None:
    if is_absent(value):
        return None
    if not isinstance(value, dict):
        raise wrong_type("structured_outputs", "an object", value)
    if not is_absent(value.get("structural_tag")):
        raise not_supported("structured_outputs.structural_tag", _TAGS)
    where = "structured_outputs."
    found = [one for kind in _GUIDED if (one := _of_kind(
        kind, value.get(kind), where + kind, value.get("whitespace_pattern"), f"{where}whitespace_pattern"))]
    if not found:
        raise RequestError(f"structured_outputs must have one of {', '.join(_GUIDED)}.", param="structured_outputs")
    if len(found) > 1:
        raise RequestError(f"structured_outputs has {found[0].field.removeprefix(where)} and "
                           f"{found[1].field.removeprefix(where)}; give one of them.", param=found[1].field)
    whole = value.get("enable_in_reasoning")
    if whole is not None and not isinstance(whole, bool):
        raise wrong_type(f"{where}enable_in_reasoning", "a boolean", whole)
    return replace(found[0], whole_output=bool(whole))


def _of_kind(kind: str, value: Any, field: str, whitespace: Any, whitespace_field: str) -> Structure | None:
    """One of the five ways to describe an output, which ``guided_*`` and ``structured_outputs`` share."""
    if value is None or is_absent(value) and kind != "json":
        return None
    if kind == "json_object":
        if not fields.flag(value, field):
            return None
        value = _ANY_OBJECT
    if kind in ("json", "json_object"):
        pattern = None if is_absent(whitespace) else fields.text(whitespace, whitespace_field)
        return Structure(field, functools.partial(json_part, _schema(value, field), whitespace=pattern),
                         whitespace=None if pattern is None else (whitespace_field, pattern))
    if kind == "choice":
        choices = fields.list_of(fields.text)(value, field)
        return Structure(field, functools.partial(choice_part, choices))
    make = regex_part if kind == "regex" else grammar_part
    return Structure(field, functools.partial(make, fields.text(value, field)))


def _schema(value: Any, field: str) -> Any:
    """A schema as JSON, or as text that is JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{field} is not valid JSON: {error}", param=field) from None
    if not isinstance(value, (dict, bool)):
        raise wrong_type(field, "an object", value)
    return value
