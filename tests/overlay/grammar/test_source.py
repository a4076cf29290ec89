"""Schemas on their way to llguidance: what demands nothing is left out, everything else stays."""

from __future__ import annotations

import pytest

from vllm.overlay.grammar.source import WHITESPACE, alone, json_part, literal


def schema(given, **options):
    return json_part(given, **options)["json_schema"]


@pytest.mark.parametrize("idle", [
    {"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"propertyNames": True}, {"propertyNames": {}},
    {"unevaluatedProperties": True}, {"unevaluatedItems": {}}, {"dependentRequired": {}}, {"dependentSchemas": {}},
])  # fmt: skip
@pytest.mark.parametrize("where", [
    lambda one: one, lambda one: {"properties": {"a": one}}, lambda one: {"$defs": {"a": {"items": one}}},
    lambda one: {"anyOf": [{"type": "string"}, one]}, lambda one: {"additionalProperties": {"allOf": [one]}},
])  # fmt: skip
def test_keywords_that_demand_nothing_are_left_out(idle, where):
    got = schema(where({"type": "array", **idle}))
    del got["x-guidance"]
    assert got == where({"type": "array"})


@pytest.mark.parametrize("given", [
    {"uniqueItems": True}, {"uniqueItems": 0}, {"propertyNames": {"pattern": "a"}}, {"unevaluatedProperties": False},
    {"properties": {"uniqueItems": False, "propertyNames": {"type": "string"}}},
    {"const": {"uniqueItems": False}}, {"enum": [{"uniqueItems": False}]}, {"default": {"uniqueItems": False}},
])  # fmt: skip
def test_everything_else_stays(given):
    got = schema(given)
    del got["x-guidance"]
    assert got == given


def test_whole_numbers_are_written_as_such():
    got = schema({"items": {"maxLength": 2.0, "minLength": 1.5}, "maxItems": float("inf"), "const": {"maxItems": 2.0}})
    del got["x-guidance"]
    assert str(got) == "{'items': {'maxLength': 2, 'minLength': 1.5}, 'maxItems': inf, 'const': {'maxItems': 2.0}}"


def test_options_are_ours():
    """A request's own would let it ask for white space without end."""
    options = schema({"type": "object", "x-guidance": {"whitespace_pattern": " *", "lenient": True}})["x-guidance"]
    assert options == {"whitespace_pattern": WHITESPACE, "json_allow_general_unicode_escapes": True}
    assert schema({}, lenient=True, whitespace="")["x-guidance"] == {
        "whitespace_pattern": "", "json_allow_general_unicode_escapes": True, "lenient": True}
    assert schema(False)["allOf"] == [False] and schema(True)["allOf"] == [True]


def test_given_schemas_are_not_changed():
    given = {"type": "array", "uniqueItems": False, "items": {"uniqueItems": False}}
    alone(json_part(given))
    assert given == {"type": "array", "uniqueItems": False, "items": {"uniqueItems": False}}


@pytest.mark.parametrize("text", [
    "", "a", '"', "\\", "\n\r\t", "\x00\x1f\x7f", "é中🎉\u2028", "%json {}", "// # /x/", "<think>"])
def test_every_text_can_be_a_literal(matcher, vocabulary, text):
    one = matcher(alone({"lark_grammar": f"start: {literal(text)}"}))
    assert one.consume_tokens(vocabulary.tokenize_str(text)) and one.is_accepting(), one.get_error()


def test_white_space_is_bounded(matcher, vocabulary):
    def fits(text: str) -> bool:
        return matcher(alone(json_part({"type": "array"}))).consume_tokens(vocabulary.tokenize_str(text))

    for good in ("[]", "[1, 2]", "[\n  1,\r\n\t2\n]", "[ 1 , 2 ]"):
        assert fits(good), good
    for bad in ("[  1]", "[\n\n1]", "[\n" + " " * 61 + "1]"):
        assert not fits(bad), bad
