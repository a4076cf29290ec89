"""What tools and their choice demand of an answer: which constraint the engine gets, and what its grammar admits."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from tests.helpers.fake_engine import ids, tokenizer
from tests.helpers.forced import call
from tests.helpers.random_schemas import Schemas
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.vocabulary import make_vocabulary
from vllm.overlay.serving.constrain import Constrainer, Markers
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.normalise import normalise_chat

END_THINK, CALL, END_CALL = ids("</think><tool_call></tool_call>")
WEATHER = {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}}, "required": ["city"]}
NAMED = {"type": "function", "function": {"name": "weather"}}
OBJECT = {"response_format": {"type": "json_object"}}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}, **more}}


TOOLS = [tool("weather", WEATHER), tool("now")]
STRICT = [tool("weather", WEATHER, strict=True), tool("now")]
# No whole number is above 5 and below 1.
BROKEN = tool("broken", {"type": "object", "properties": {"x": {"type": "integer", "minimum": 5, "maximum": 1}},
                         "required": ["x"]})
GOOD = call("weather", ("city", "Bei\njing"), ("days", "3"))
BAD = call("weather", ("city", "x"), ("days", "9"))


@pytest.fixture(scope="module")
def constrainer():
    made = Constrainer(tokenizer(), Markers(END_THINK, CALL, END_CALL))
    yield made
    made.close()


@pytest.fixture(scope="module")
def vocabulary():
    return make_vocabulary(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])


def constraint(constrainer, in_thought: bool = False, **body: Any) -> Constraint | None:
    request = normalise_chat({"model": "m", "messages": [{"role": "user", "content": "x"}], **body})
    return asyncio.run(constrainer.of_chat(request, in_thought))


@pytest.fixture
def admits(constrainer, vocabulary):
    """Whether the constraint of a request's fields admits a text, from where its grammar begins."""
    from llguidance import LLMatcher

    def check(body: dict[str, Any], text: str, in_thought: bool = False) -> bool:
        made = constraint(constrainer, in_thought, **body)
        matcher = LLMatcher(vocabulary, made.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(ids(text)) and matcher.is_accepting()

    return check


@pytest.mark.parametrize("body", [
    {}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}, {"tools": STRICT, "tool_choice": "none"},
    {"parallel_tool_calls": False}, {"tools": [tool("weather", WEATHER, strict=False)]},
])  # fmt: skip
def test_nothing_is_asked_and_nothing_is_constrained(constrainer, body):
    assert constraint(constrainer, True, **body) is None


@pytest.mark.parametrize("choice, must, one", [
    ({"tool_choice": "required"}, True, False), ({"tool_choice": NAMED}, True, True),
    ({"tool_choice": "required", "parallel_tool_calls": False}, True, True),
    ({"parallel_tool_calls": False}, False, True),
    ({"tools": STRICT}, False, False),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}}, False, False),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}}, True, False),
])  # fmt: skip
@pytest.mark.parametrize("in_thought", [True, False])
def test_when_the_grammar_begins_and_how_often_it_calls(constrainer, admits, choice, must, one, in_thought):
    body = {"tools": TOOLS, **choice}
    made = constraint(constrainer, in_thought, **body)
    assert (made.in_thought, made.end_thought) == (in_thought, END_THINK if in_thought else None)
    assert (made.free, made.openers) == (not must, frozenset({CALL})), "where free text may come before the call"
    assert admits(body, GOOD, in_thought)
    assert admits(body, f"{GOOD}\n{GOOD}", in_thought) != one
    assert admits(body, "\n\n" + GOOD, in_thought) == (must and in_thought), "line breaks come behind a thought only"
    assert not admits(body, "text", in_thought) and not admits(body, GOOD + " text", in_thought)
    assert not admits(body, call("other"), in_thought)


@pytest.mark.parametrize("body, now", [
    ({"tools": TOOLS, "tool_choice": "required"}, True), ({"tools": TOOLS, "tool_choice": NAMED}, False),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                      "tools": [{"type": "function", "name": "weather"}]}}, False),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "required", "tools": [NAMED, {"type": "function", "function": {"name": "now"}}]}}}, True),
    ({"functions": [one["function"] for one in TOOLS], "function_call": {"name": "weather"}}, False),
])  # fmt: skip
def test_only_tools_that_may_be_called(admits, body, now):
    assert admits(body, GOOD) and admits(body, call("now")) == now


@pytest.mark.parametrize("body, kept", [
    ({"tools": TOOLS, "tool_choice": "required"}, True), ({"tools": TOOLS, "tool_choice": NAMED}, True),
    ({"tools": STRICT}, True), ({"tools": TOOLS, "parallel_tool_calls": False}, False),
    ({"tools": [*STRICT, BROKEN], "tool_choice": "required"}, True),
    ({"tools": [*STRICT, {**BROKEN, "function": {**BROKEN["function"], "strict": True}}]}, True),
])  # fmt: skip
def test_arguments_follow_the_schema_where_a_call_is_forced_or_strict(admits, body, kept):
    assert admits(body, GOOD)
    assert admits(body, BAD) != kept
    assert admits(body, call("weather")) != kept, "city is required"


def test_a_tool_with_a_broken_schema_can_be_called_all_the_same(admits):
    body = {"tools": [BROKEN, *TOOLS], "tool_choice": "required"}
    assert admits(body, call("broken", ("x", "any <b>\n</parameter> thing"))) and admits(body, call("broken"))
    assert not admits(body, call("broken", ("y", "1"))) and not admits(body, BAD)


def test_a_strict_tool_with_a_broken_schema_that_must_be_called_is_refused_by_name(constrainer):
    broken = {**BROKEN, "function": {**BROKEN["function"], "strict": True}}
    for choice in ("required", {"type": "function", "function": {"name": "broken"}}):
        with pytest.raises(RequestError, match="strict tool 'broken' cannot be kept to: .*minimum") as refused:
            constraint(constrainer, tools=[broken, *TOOLS], tool_choice=choice)
        assert refused.value.param == "tools" and refused.value.status == 400


PATCH = {"type": "custom", "name": "patch", "format": {
    "type": "grammar", "syntax": "lark",
    "definition": 'start: "*** Begin" LF line+ "*** End" LF?\nline: /[+-][^\\n]*/ LF\nLF: "\\n"'}}
SQL = {"type": "custom", "custom": {"name": "sql", "format": {"type": "grammar", "grammar": {
    "syntax": "regex", "definition": "SELECT [a-z]+;"}}}}


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "required"}, {"parallel_tool_calls": False}])
def test_what_custom_tools_take_follows_their_grammar(admits, constrainer, choice):
    body = {"tools": [PATCH, SQL, *TOOLS], **choice}
    assert constraint(constrainer, **body).free == (choice.get("tool_choice") is None)
    for good in ("*** Begin\n+a\n-b c\n*** End", "*** Begin\n+x\n*** End\n"):
        assert admits(body, call("patch", ("input", good))), good
    for bad in ("*** Begin\n*** End", "+a", "", "*** Begin\n+a\n"):
        assert not admits(body, call("patch", ("input", bad))), bad
    assert admits(body, call("sql", ("input", "SELECT a;"))) and not admits(body, call("sql", ("input", "DROP a;")))
    assert not admits(body, call("patch")) and admits(body, call("now"))


def test_a_custom_tool_whose_grammar_is_none_takes_any_text(admits):
    for broken in ("start: (", "root ::= (", "start: other"):
        tool_of = {**PATCH, "format": {**PATCH["format"], "definition": broken}}
        body = {"tools": [tool_of, SQL], "tool_choice": "required"}
        assert admits(body, call("patch", ("input", "anything\nat all")))
        assert not admits(body, call("sql", ("input", "DROP a;")))


def test_names_that_no_call_can_hold(constrainer, admits):
    odd = [tool("a\nb"), tool("<x>"), tool(" blank "), tool("x" * 300)]
    assert constraint(constrainer, tools=odd, parallel_tool_calls=False) is None, "nothing that needs a grammar"
    with pytest.raises(RequestError, match="None of the tools can be called") as refused:
        constraint(constrainer, tools=odd, tool_choice="required")
    assert refused.value.param == "tools"
    assert admits({"tools": [*odd, *TOOLS], "tool_choice": "required"}, call("now"))


def test_a_form_of_the_content_or_calls(constrainer, admits):
    body = {"tools": TOOLS, **OBJECT}
    made = constraint(constrainer, True, **body)
    assert (made.free, made.openers, made.in_thought) == (False, frozenset({CALL}), True)
    assert admits(body, '\n\n{"a": 1}', True) and admits(body, f"\n\n{GOOD}\n{GOOD}", True) and admits(body, BAD, True)
    assert not admits(body, "text", True) and not admits(body, '{"a": 1}' + GOOD, True)
    assert admits({**body, "tools": STRICT}, GOOD) and not admits({**body, "tools": STRICT}, BAD)


def test_a_form_of_the_content_beside_a_forced_or_forbidden_call(constrainer, admits):
    forced, forbidden = ({"tools": TOOLS, **OBJECT, "tool_choice": choice} for choice in ("required", "none"))
    assert admits(forced, GOOD) and not admits(forced, "{}")
    assert admits(forbidden, "{}") and not admits(forbidden, GOOD)
    assert constraint(constrainer, True, **forbidden).openers == frozenset()


def test_a_grammar_of_the_whole_output_takes_tools_and_budget_as_its_own_business(constrainer):
    grammar = {"grammar": 'start: "x" </think> "y"', "enable_in_reasoning": True}
    made = constraint(constrainer, True, structured_outputs=grammar, tools=STRICT, tool_choice="required",
                      thinking_token_budget=5)
    assert made == Constraint(made.grammar)


def test_budgets_beside_calls(constrainer):
    made = constraint(constrainer, True, tools=TOOLS, tool_choice="required", thinking_budget=5)
    assert made.thought_budget == 5
    assert constraint(constrainer, False, tools=TOOLS, tool_choice="required", thinking_budget=5).thought_budget is None
    alone = constraint(constrainer, True, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 9})
    opens = frozenset({CALL})
    assert alone == Constraint(None, in_thought=True, end_thought=END_THINK, thought_budget=9, openers=opens)
    assert constraint(constrainer, True, tools=TOOLS, tool_choice="none", thinking_budget=9).openers == frozenset()


def test_a_server_that_reads_no_calls(vocabulary):
    made = Constrainer(tokenizer(), Markers(END_THINK))
    assert constraint(made, True, tools=STRICT, parallel_tool_calls=False) is None
    made.close()


@pytest.mark.parametrize("choice, field", [
    ({"type": "allowed_tools"}, "tool_choice.tools"),
    ({"type": "allowed_tools", "allowed_tools": 5}, "tool_choice.allowed_tools"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}}, "tool_choice.allowed_tools.mode"),
    ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tool_choice.allowed_tools.tools"),
    ({"type": "allowed_tools", "tools": [{"type": "function", "name": "nope"}]}, "tool_choice.tools[0]"),
    ({"type": "allowed_tools", "tools": [{"type": "mcp", "server_label": "x"}]}, "tool_choice.tools"),
])  # fmt: skip
def test_allowed_tools_that_are_wrong(constrainer, choice, field):
    with pytest.raises(RequestError) as refused:
        constraint(constrainer, tools=TOOLS, tool_choice=choice)
    assert refused.value.param == field, refused.value.message


def of_parameter(schema: Any, strict: bool = False, **defs: Any) -> list[dict[str, Any]]:
    return [tool("f", {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": defs},
                 strict=strict)]


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_alternatives_that_multiply_with_every_level(admits, keyword):
    """8^12 of them, which are two."""
    link = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 8 + [{"type": "integer"}]} for i in range(12)}
    body = {"tools": of_parameter({"$ref": "#/$defs/a0"}, **link, a12={"type": "string", "maxLength": 3}),
            "tool_choice": "required"}
    for good in ("abc", "12345"):
        assert admits(body, call("f", ("x", good))), good
    assert not admits(body, call("f", ("x", "abcd")))


@pytest.mark.parametrize("defs", [
    {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, {"a": {"$ref": "#/$defs/a"}},
    {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string", "maxLength": 3}]}},
    {"a": {"type": ["string", "object"], "anyOf": [{"$ref": "#/$defs/a"}], "title": "A"}},
])  # fmt: skip
def test_a_parameter_that_refers_to_itself_is_served(admits, defs):
    body = {"tools": of_parameter({"$ref": "#/$defs/a"}, **defs), "tool_choice": "required"}
    assert admits(body, call("f", ("x", "abc")))


def test_parameters_that_all_bring_the_same_large_definitions(admits, constrainer):
    """300 times 20 KB would be written: they are not kept to, and refused where they have to be."""
    large = {"type": "object", "properties": {f"key{i}": {"type": "integer", "title": "x" * 20} for i in range(500)}}
    parameters = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/large", "title": str(i)}
                                                   for i in range(300)},
                  "$defs": {"large": {"type": "array", "items": {"$ref": "#/$defs/one"}}, "one": large}}
    loose = {"tools": [tool("f", parameters), *STRICT], "tool_choice": "required"}
    assert admits(loose, call("f", ("p3", "anything"))) and not admits(loose, BAD)
    assert len(constraint(constrainer, **loose).grammar) < 100_000
    with pytest.raises(RequestError, match="'f' cannot be kept to: they take more than") as refused:
        constraint(constrainer, tools=[tool("f", parameters, strict=True)], tool_choice="required")
    assert refused.value.param == "tools"


def test_tools_that_are_too_much_together_only(admits, constrainer, monkeypatch):
    from vllm.overlay.grammar import calls

    monkeypatch.setattr(calls, "_MOST_RULES", 6000)
    many = [tool(f"tool_{i}", WEATHER) for i in range(30)]
    body = {"tools": [*many, *STRICT], "tool_choice": "required"}
    assert admits(body, call("tool_3", ("city", "x"), ("days", "9"))), "only what is strict is kept to"
    assert admits(body, GOOD) and not admits(body, BAD)
    with pytest.raises(RequestError, match="tools cannot be kept to: they take more than 6000") as refused:
        constraint(constrainer, tools=[tool(f"tool_{i}", WEATHER, strict=True) for i in range(30)],
                   tool_choice="required")
    assert refused.value.param == "tools" and refused.value.code != "unsupported_parameter"


def test_tools_whose_grammars_would_end_the_process(admits, constrainer):
    rules = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(30_000)) + 'a30000: "x"'
    links = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(5000)}
    chain = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": {**links, "a5000": {}}}
    text = {**PATCH, "format": {**PATCH["format"], "definition": rules}}
    body = {"tools": [tool("f", chain), text, *STRICT], "tool_choice": "required"}
    assert admits(body, call("f", ("x", "any"))) and admits(body, call("patch", ("input", "any")))
    assert admits(body, GOOD) and not admits(body, BAD)
    with pytest.raises(RequestError, match="strict tool 'f' cannot be kept to: it is nested too deeply"):
        constraint(constrainer, tools=[tool("f", chain, strict=True)], tool_choice="required")


def test_half_an_emoji_in_a_schema_harms_nobody(admits, constrainer):
    schema = {"type": "object", "properties": {"x": {"const": "a\ud83d", "description": "\udc00"}}, "required": ["x"],
              "additionalProperties": False}
    body = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}}
    assert admits(body, '{"x": "a\ufffd"}')
    assert admits({"tools": [tool("f", schema, strict=True)], "tool_choice": "required"},
                  call("f", ("x", "a\ufffd")))


@pytest.mark.parametrize("strict", [True, False])
def test_no_schema_of_a_tool_is_more_than_refused(constrainer, strict):
    """Broken ones too; and where no call is forced, none is refused."""
    refused = 0
    for seed in range(150):
        schemas = Schemas(seed)
        parameters = [schemas.one(1), {"type": "object", "properties": {"a": schemas.one(1), "b": schemas.odd(1)},
                                       "required": schemas.rng.choice([["a"], ["c"], [["a"]], "a", None])}]
        tools = [tool(f"t{i}", one, strict=strict) for i, one in enumerate(parameters)]
        for choice in ("auto", "required"):
            try:
                made = constraint(constrainer, tools=tools, tool_choice=choice)
                assert (made is None) == (choice == "auto" and not strict)
            except RequestError as error:
                assert choice == "required" and strict and error.param == "tools" and "\n" not in error.message
                refused += 1
    assert (refused > 20) == strict, refused


def test_without_the_library_only_what_needs_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    made = Constrainer(tokenizer(), Markers(END_THINK, CALL, END_CALL))
    assert constraint(made, True, tools=STRICT, parallel_tool_calls=False) is None
    assert constraint(made, True, tools=STRICT, thinking_budget=3).thought_budget == 3
    for body in ({"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, **OBJECT}):
        with pytest.raises(RequestError, match="cannot keep to grammars"):
            constraint(made, **body)
    made.close()


def test_a_hundred_strict_tools_are_one_grammar(constrainer):
    many = [tool(f"tool_{i}", {**WEATHER, "title": str(i)}, strict=True) for i in range(100)]
    lark = json.loads(constraint(constrainer, tools=many).grammar)["grammars"][0]["lark_grammar"]
    assert all(json.dumps(f"tool_{i}>\n") in lark for i in range(100))
