"""Every way to ask for a form of the output: what is read, what is refused and by which name, what the engine gets."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.helpers.fake_engine import ids, tokenizer
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.vocabulary import make_vocabulary
from vllm.overlay.serving.constrain import Constrainer, Markers
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.normalise import normalise_chat
from vllm.overlay.serving.structured import read_structure

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NAMED = {"name": "x", "schema": SCHEMA, "strict": True}
END_THINK = ids("</think>")[0]


@pytest.fixture(scope="module")
def constrainer():
    made = Constrainer(tokenizer(), Markers(END_THINK))
    yield made
    made.close()


@pytest.fixture(scope="module")
def vocabulary():
    return make_vocabulary(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])


def constraint(constrainer, body, *, in_thought: bool = False, **fields) -> Constraint | None:
    """Of a chat request; a completion's is the same where no thought is begun."""
    request = normalise_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **body, **fields})
    return asyncio.run(constrainer.of_chat(request, in_thought))


def admits(vocabulary, grammar: str, tokens: list[int]) -> bool:
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("body, field, good, bad", [
    ({"response_format": {"type": "json_object"}}, "response_format", '{"b": [1, null]}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema", '{"a": 1}', '{"a": ""}'),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "response_format.json_schema.schema",
     '{"a":1}', '{"a": 1, "b": 2}'),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format.schema", '{"a":1}', "1"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema",
     "{}", "1"),
    ({"guided_json": SCHEMA}, "guided_json", '{"a": 1}', "{}"),
    ({"guided_json": json.dumps(SCHEMA)}, "guided_json", '{\n    "a": 1\n}', "{}"),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "_"}, "guided_json", '{_"a":_1}', '{ "a": 1}'),
    ({"guided_json_object": True}, "guided_json_object", '{"x": 1}', "1"),
    ({"guided_regex": r"\d{3}-[ab]"}, "guided_regex", "123-a", "123-c"),
    ({"guided_regex": r"^a/b$"}, "guided_regex", "a/b", "a/bc"),
    ({"guided_choice": ["yes", "\x7f \"quoted\" \\ <think>"]}, "guided_choice", "\x7f \"quoted\" \\ <think>", "no"),
    ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, "guided_grammar", "a12", "a"),
    ({"guided_grammar": 'root ::= "a" b\nb ::= [0-9]+'}, "guided_grammar", "a12", "a"),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", '{"a": 1}', "{}"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs.json", "[1]", "x"),
    ({"structured_outputs": {"json": True}}, "structured_outputs.json", '"x"', "x"),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "{}", "[]"),
    ({"structured_outputs": {"regex": "(a|b)+", "choice": None, "json": None}}, "structured_outputs.regex", "abba", ""),
    ({"structured_outputs": {"choice": ["", "x"]}}, "structured_outputs.choice", "", "y"),
])  # fmt: skip
def test_what_is_asked_for_is_what_the_grammar_admits(constrainer, vocabulary, body, field, good, bad):
    assert read_structure(body).field == field
    made = constraint(constrainer, body)
    assert made == Constraint(made.grammar), "not from the first token on, or with a budget"
    assert asyncio.run(constrainer.of_completion(read_structure(body))).grammar is not None
    assert admits(vocabulary, made.grammar, vocabulary.tokenize_str(good)), (good, made.grammar)
    assert not admits(vocabulary, made.grammar, vocabulary.tokenize_str(bad)), (bad, made.grammar)


def test_control_tokens_of_a_grammar_are_tokens_and_text_that_looks_like_them_is_text(constrainer, vocabulary):
    grammar = constraint(constrainer, {"structured_outputs": {"grammar": 'start: "é\\n" <think> "</think>"'}}).grammar
    spelled = vocabulary.tokenize_str("</think>")
    assert len(spelled) > 1
    assert admits(vocabulary, grammar, [*ids("é\n<think>"), *spelled])
    assert not admits(vocabulary, grammar, ids("é\n<think></think>"))


def test_a_grammar_of_the_content_begins_behind_the_thought_and_its_line_breaks(constrainer, vocabulary):
    made = constraint(constrainer, {"guided_choice": ["yes"]}, in_thought=True)
    assert (made.in_thought, made.end_thought, made.free, made.openers) == (True, END_THINK, False, frozenset())
    for text, fits in (("yes", True), ("\n\nyes", True), ("\nyes", True), ("\n\n\nyes", False), ("yes\n", False)):
        assert admits(vocabulary, made.grammar, vocabulary.tokenize_str(text)) == fits, text
    begins_at_once = constraint(constrainer, {"guided_choice": ["yes"]})
    assert not admits(vocabulary, begins_at_once.grammar, vocabulary.tokenize_str("\n\nyes"))


def test_a_grammar_of_the_whole_output_has_nothing_added(constrainer, vocabulary):
    body = {"structured_outputs": {"grammar": 'start: "x" </think> "y"', "enable_in_reasoning": True}}
    made = constraint(constrainer, body, in_thought=True, thinking_token_budget=1)
    assert made == Constraint(made.grammar)
    assert admits(vocabulary, made.grammar, ids("x</think>y"))


def test_where_thoughts_are_not_told_from_content_there_is_none(vocabulary):
    made = Constrainer(tokenizer(), Markers())
    got = constraint(made, {"guided_choice": ["yes"]}, in_thought=True, thinking_token_budget=3)
    assert got == Constraint(got.grammar)
    made.close()


def test_a_budget_alone(constrainer):
    assert constraint(constrainer, {}, in_thought=True, thinking_token_budget=7) == Constraint(
        None, in_thought=True, end_thought=END_THINK, thought_budget=7)
    assert constraint(constrainer, {}, in_thought=False, thinking_token_budget=7) is None
    assert constraint(constrainer, {}, in_thought=True) is None


@pytest.mark.parametrize("body", [
    {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": {}}, {"guided_regex": ""},
    {"structured_outputs": {}}, {"guided_choice": []}, {"guided_json_object": False}, {"guided_decoding_backend": "x"},
])  # fmt: skip
def test_no_form_is_asked_for(body):
    assert read_structure(body) is None


@pytest.mark.parametrize("body, field", [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"schema": {}}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": 1}}}, "response_format.json_schema.strict"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": [1]}, "guided_json"), ({"guided_json": "1"}, "guided_json"),
    ({"guided_regex": 5}, "guided_regex"), ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_choice": ["a", 5]}, "guided_choice[1]"), ({"guided_json_object": "yes"}, "guided_json_object"),
    ({"guided_json": {"type": "object"}, "guided_whitespace_pattern": 5}, "guided_whitespace_pattern"),
    ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": "x"}, "structured_outputs"), ({"structured_outputs": {"x": 1}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "enable_in_reasoning": 1}}, "structured_outputs.enable_in_reasoning"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
])  # fmt: skip
def test_refused_as_it_is_read(body, field):
    with pytest.raises(RequestError) as refused:
        read_structure(body)
    message = refused.value.message
    assert refused.value.param == field and field.split(".")[0].split("[")[0] in message, message


def strict(schema) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}}


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("body, says", [
    (strict({"type": "wat"}), "Invalid type: wat"),
    (strict(False), "schema is false"),
    (strict({"type": "integer", "minimum": 5, "maximum": 1}), "minimum"),
    (strict({"enum": []}), "empty"),
    (strict({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible types"),
    (strict({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (strict({"not": {"type": "string"}}), "not"),
    (strict({"$ref": "https://example.com/schema.json"}), "example.com"),
    (strict({"$ref": "#/$defs/none"}), "none"),
    (strict({"$ref": "#"}), "nothing satisfies it"),
    (strict({"type": "string", "pattern": "(?=x)y"}), "look-around"),
    (strict({"type": "string", "format": "haiku"}), "haiku"),
    (strict(deep(5000)), "nested too deeply"),
    (strict(deep(300)), "recursion limit"),
    ({"guided_json": {"type": "integer", "minimum": -10**40}}, "integer"),
    ({"guided_regex": "("}, "unclosed group"), ({"guided_regex": r"\bword\b"}, "lookarounds not supported"),
    ({"guided_regex": "(" * 3000 + ")" * 3000}, "nest"),
    ({"guided_grammar": "wat"}, "Expected"), ({"guided_grammar": "start: other"}, "unknown name"),
    ({"guided_grammar": "start: <nope>"}, "unknown special token"), ({"guided_grammar": "start: start"}, "nothing"),
    ({"guided_grammar": "root ::= ("}, "Expected"), ({"guided_grammar": "root ::= " + "(" * 5000}, "nested too deeply"),
    ({"guided_grammar": "start: <[99999999]>"}, "range"),
])  # fmt: skip
def test_what_is_no_grammar_is_refused_in_one_line_that_names_the_field(constrainer, body, says):
    with pytest.raises(RequestError) as refused:
        constraint(constrainer, body)
    error = refused.value
    assert error.status == 400 and error.param == read_structure(body).field and error.param in error.message
    assert says in error.message and "\n" not in error.message and len(error.message) < 600, error.message


@pytest.mark.parametrize("schema, good", [
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "[1, 1]"),
    ({"type": "string", "format": "haiku"}, '"x"'),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
])  # fmt: skip
def test_a_schema_that_is_not_strict_is_kept_to_as_far_as_possible(constrainer, vocabulary, schema, good):
    loose = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    assert admits(vocabulary, constraint(constrainer, loose).grammar, vocabulary.tokenize_str(good))
    with pytest.raises(RequestError, match="cannot be kept to"):
        constraint(constrainer, strict(schema))


def test_a_client_that_leaves_does_not_take_the_grammar_from_others(constrainer):
    async def two() -> Constraint | None:
        body = {"guided_regex": "[a-z]{1,3}x{1,2000}(abc|def){3,9}"}
        first = asyncio.ensure_future(constrainer.of_completion(read_structure(body)))
        second = asyncio.ensure_future(constrainer.of_completion(read_structure(body)))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(two()).grammar


def test_without_the_library_the_field_is_refused_by_name(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    made = Constrainer(tokenizer(), Markers(END_THINK))
    for body in ({"guided_choice": ["a"]}, {"guided_regex": "a"}):
        with pytest.raises(RequestError, match="cannot keep to grammars") as refused:
            constraint(made, body)
        assert refused.value.code == "unsupported_parameter"
    assert constraint(made, {}, in_thought=True, thinking_token_budget=3).thought_budget == 3
    made.close()
