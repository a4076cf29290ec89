"""Parameter values: typed by the tool's schema, streamed as far as the type is certain."""

from __future__ import annotations

import json

import pytest

from vllm.overlay.serving.parse.arguments import ValueWriter, parameter_types, value_types

ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
STRING = {"type": "string"}


@pytest.mark.parametrize(("schema", "types"), [
    (STRING, {"string"}),
    ({"type": ["integer", "null"]}, {"integer", "null"}),
    ({"type": "integer", "nullable": True}, {"integer", "null"}),
    ({"anyOf": [STRING, {"type": "null"}]}, {"string", "null"}),
    ({"oneOf": [{"type": "number"}, {"type": "array", "items": {}}]}, {"number", "array"}),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, {"integer"}),
    ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"object"}),
    ({"$ref": "#/$defs/Unit"}, {"string"}),
    ({"$ref": "#/$defs/Nested"}, {"object", "null"}),
    ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
    ({"const": 2.5}, {"number"}),
    ({"properties": {"a": STRING}}, {"object"}),
    ({"items": STRING}, {"array"}),
    ({}, None), ({"description": "anything"}, None), ({"anyOf": [STRING, {}]}, None), ({"type": "wat"}, None),
    ({"$ref": "#/$defs/Loop"}, None), ({"$ref": "#/nowhere"}, None), ({"$ref": "http://x/y"}, None),
    ("broken", None), (None, None), ({"anyOf": "x", "enum": 3, "allOf": 1}, None), ({"type": {"a": 1}}, None),
])
def test_types_of_a_schema(schema, types):
    root = {"$defs": {"Unit": STRING, "Nested": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                      "Loop": {"$ref": "#/$defs/Loop"}}}
    assert value_types(schema, root) == types


def test_types_of_a_parameter():
    tool = {"properties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": {"type": "boolean"}}
    assert parameter_types(tool, "a") == {"integer"}
    assert parameter_types(tool, "b") == ANY
    assert parameter_types(tool, "other") == {"boolean"}
    assert parameter_types({"properties": {}, "additionalProperties": False}, "other") == {"string"}
    assert parameter_types({"properties": []}, "other") == {"string"}


@pytest.mark.parametrize(("text", "types", "value"), [
    ("5", {"string"}, "5"), ("null", {"string"}, "null"), (' {"a": 1}', {"string"}, ' {"a": 1}'),
    ("", {"string"}, ""), ("line\n\"quoted\"\t\\ 北京 🎉", {"string"}, "line\n\"quoted\"\t\\ 北京 🎉"),
    ("null", {"string", "null"}, None), ("nul", {"string", "null"}, "nul"),
    ("nullable", {"string", "null"}, "nullable"),
    ("None", {"string", "null"}, "None"), ("None", {"integer", "null"}, None),
    ("5", {"integer"}, 5), (" 5 ", {"integer"}, 5), ("5.0", {"integer"}, 5), ("5.5", {"integer"}, "5.5"),
    ("-12", {"integer"}, -12), ("007", {"integer"}, "007"), ("true", {"integer"}, "true"),
    ("1" * 30, {"integer"}, int("1" * 30)),
    ("2.50", {"number"}, 2.5), ("3", {"number"}, 3), ("1e3", {"number"}, 1000.0), ("NaN", {"number"}, "NaN"),
    ("1e999", {"number"}, "1e999"), ("Infinity", {"number"}, "Infinity"), ("9" * 5000, {"integer"}, "9" * 5000),
    ("true", {"boolean"}, True), ("False", {"boolean"}, False), ("yes", {"boolean"}, "yes"),
    ('{"a": [1, null]}', {"object"}, {"a": [1, None]}), ("{'a': None, 'b': True}", {"object"}, {"a": None, "b": True}),
    ("[1, 2]", {"array"}, [1, 2]), ("[1, 2]", {"object"}, "[1, 2]"), ("{broken", {"object"}, "{broken"),
    ('{"a": NaN}', {"object"}, '{"a": NaN}'), ("[" * 3000, {"array"}, "[" * 3000), ("{1, 2}", {"object"}, "{1, 2}"),
    ("5", {"string", "integer"}, 5), ("02134", {"string", "integer"}, "02134"), ("abc", {"string", "integer"}, "abc"),
    ('{"a": 1}', {"string", "object"}, {"a": 1}),
    ("5", ANY, 5), ("text", ANY, "text"), ("true", ANY, True), ("null", ANY, None), ("[1]", ANY, [1]),
])
def test_values(text, types, value):
    """The value, and that it is valid JSON and the same however the text arrives."""
    whole = write(text, types, len(text) or 1)
    assert json.loads(whole, parse_constant=pytest.fail) == value, whole
    for size in (1, 2, 3):
        assert write(text, types, size) == whole, f"in pieces of {size}"


def write(text: str, types, size: int) -> str:
    writer = ValueWriter(frozenset(types))
    out = "".join(writer.feed(text[at:at + size]) for at in range(0, len(text), size))
    return out + writer.finish()


def test_a_string_is_not_held_back():
    writer = ValueWriter(frozenset({"string"}))
    assert [writer.feed(piece) for piece in ("a", "\n", "b")] == ['"a', "\\n", "b"]
    nullable = ValueWriter(frozenset({"string", "null"}))
    assert [nullable.feed(piece) for piece in ("nu", "m", "b")] == ["", '"num', "b"]


def test_definitions_that_refer_to_each_other_cost_one_look_each():
    """Twelve levels of eight branches would be 8**12 looks; nobody waits for those, so a wrong one hangs here."""
    level = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 8} for i in range(12)}
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}] * 8}
    tool = {"properties": {"a": {"$ref": "#/$defs/D0"}, "b": loop}, "$defs": {**level, "D12": STRING, "Loop": loop}}
    assert parameter_types(tool, "a") == {"string"}
    assert parameter_types(tool, "b") == ANY


@pytest.mark.parametrize(("text", "types"), [
    ('["\\ud83d"]', {"array"}), ('{"\\ude00": 1}', {"object"}), ('["\\ud83d\\ude00"]', {"array"}),
    ("1" * 400, {"integer"}), ("-" + "9" * 400, {"number"}),
])
def test_what_json_can_say_and_utf8_or_a_float_cannot_hold(text, types):
    written = write(text, frozenset(types), 3)
    assert json.loads(written.encode()) == json.loads(text)
