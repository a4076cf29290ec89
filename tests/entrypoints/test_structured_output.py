"""Structured output over HTTP: a model with random weights gives what was asked for, whatever it was."""

from __future__ import annotations

import concurrent.futures
import json
import re
import shutil
from typing import Any

import httpx
import jsonschema
import pytest

from tests.helpers.fake_engine import comparable, gathered
from tests.helpers.forced import call, forced, tiny_server_command
from tests.helpers.server_process import ServerProcess, free_port
from tests.helpers.tiny_models import make_qwen2
from tests.helpers.tokenizer import added_token_ids, tokenizer_folder

CALL = added_token_ids(479)["<tool_call>"]
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {
    "type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": False}
WEATHER = {"type": "object", "properties": {
    "city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["C", "F"]}, "days": {"type": "array", "items": {
        "type": "integer", "minimum": 1, "maximum": 7}, "minItems": 1, "maxItems": 3}}, "required": ["city", "days"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
         {"type": "function", "function": {"name": "now", "parameters": {}}}]
STRICT = [{"type": "function", "function": {**one["function"], "strict": True}} for one in TOOLS]
NAMED = {"type": "function", "function": {"name": "weather"}}
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("structured")
    model = make_qwen2(folder / "model", max_position_embeddings=4096)
    for file in tokenizer_folder(small=479).iterdir():
        shutil.copy(file, model)
    port = free_port()
    started = ServerProcess(tiny_server_command(model, port), port, folder / "log")
    yield started.wait_until_ready()
    started.process.kill()


def ask(server: ServerProcess, path: str = "/v1/chat/completions", **body: Any) -> list[dict]:
    """The choices, of 200."""
    response = server.post(path, **{"max_tokens": 500, "temperature": 1.0, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def schema(of: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": of, **more}}}


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema(server, strict):
    for choice in ask(server, **schema(PERSON, strict=strict), **OFF, n=4):
        jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        assert choice["finish_reason"] == "stop", choice


def test_any_object(server):
    choices = ask(server, response_format={"type": "json_object"}, **OFF, n=6, temperature=1.5)
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert ended and all(isinstance(json.loads(choice["message"]["content"]), dict) for choice in ended), choices
    assert all(choice["message"]["content"].lstrip().startswith("{") for choice in choices)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("fields, shape", [
    ({"guided_regex": r"[ab]{3}-\d"}, r"[ab]{3}-[0-9]"), ({"guided_choice": ["red", "dark blue"]}, "red|dark blue"),
    ({"structured_outputs": {"grammar": 'root ::= ("x" | "yz")+ "."'}}, r"(x|yz)+\."),
    ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
    ({"response_format": {"type": "json_object"}, "max_tokens": 1}, r"\{.*"),
])  # fmt: skip
def test_every_form_on_both_endpoints(server, path, fields, shape):
    more = OFF if "chat" in path else {}
    choice, = ask(server, path, **{"max_tokens": 200, **fields, **more})
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert re.fullmatch(shape, text, re.DOTALL), choice


def test_behind_a_thought_with_a_budget(server):
    choice, = ask(server, **schema(PERSON), thinking_token_budget=12)
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert choice["message"]["reasoning_content"] and choice["finish_reason"] == "stop"
    response = server.post(guided_choice=["yes"], thinking={"type": "enabled", "budget_tokens": 7}, max_tokens=100)
    usage = response.json()["usage"]
    # The token that ends the thought is one of it.
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 8, usage
    assert response.json()["choices"][0]["message"]["content"] == "yes", response.text


def test_a_budget_and_nothing_else(server):
    for budget in (0, 1, 20):
        response = server.post(thinking_token_budget=budget, max_tokens=60, ignore_eos=True, temperature=1.0, seed=3)
        details = response.json()["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] <= budget + 1 and response.json()["choices"][0]["message"]["content"]


def arguments(choice: dict, count: int | None = 1) -> list[dict]:
    """The arguments of a choice's calls of `weather`, valid; asserts that there is nothing but calls."""
    message = choice["message"]
    assert not message["content"] and choice["finish_reason"] == "tool_calls", choice
    assert count is None or len(message["tool_calls"]) == count
    found = [json.loads(one["function"]["arguments"]) for one in message["tool_calls"]
             if one["function"]["name"] == "weather"]
    for one in found:
        jsonschema.validate(one, WEATHER)
    return found


@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}])
@pytest.mark.parametrize("thought", [OFF, {"thinking_token_budget": 5}])
def test_calls_that_must_come(server, choice, thought):
    for one in ask(server, tools=TOOLS, tool_choice=choice, **thought, n=4, parallel_tool_calls=False):
        found = arguments(one)
        assert found or choice == "required", one


def test_calls_that_may_come(server):
    """A bias towards the token that opens a call brings them about."""
    wanted = {"logit_bias": {str(CALL): 100}, **OFF, "n": 4, "temperature": 1.0}
    for one in ask(server, tools=STRICT, **wanted, max_tokens=700):
        if one["finish_reason"] == "tool_calls":
            arguments(one, None)
    for one in ask(server, tools=STRICT, parallel_tool_calls=False, **wanted):
        arguments(one)
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "now"}}]}}
    for one in ask(server, tools=TOOLS, tool_choice=only, parallel_tool_calls=False, **wanted):
        assert [made["function"] for made in one["message"]["tool_calls"]] == [{"name": "now", "arguments": "{}"}]


def test_a_form_or_calls(server):
    """The first token decides: a bias lets it open a call, and without that it is more likely to be content."""
    both = {"tools": STRICT, "parallel_tool_calls": False, **schema(PERSON), **OFF}
    for one in ask(server, **both, logit_bias={str(CALL): 100}, n=3):
        arguments(one)
    for one in ask(server, **both, logit_bias={str(CALL): -100}, n=3):
        jsonschema.validate(json.loads(one["message"]["content"]), PERSON)
    for one in ask(server, **{**both, "tool_choice": "none"}, n=2):
        jsonschema.validate(json.loads(one["message"]["content"]), PERSON)
    for one in ask(server, **{**both, "tool_choice": "required"}, n=2):
        arguments(one)


@pytest.mark.parametrize("body", [
    {**schema(PERSON), **OFF}, {**schema(PERSON), "thinking_token_budget": 6},
    {"tools": TOOLS, "tool_choice": "required", "thinking_token_budget": 6},
    {"tools": TOOLS, "tool_choice": NAMED, **OFF, "max_tokens": 25},
    forced("Hm.\n</think>\n\nSo: 北京 🎉" + call("weather", ("city", "x\ny <b>"), ("days", "[1]")), tools=TOOLS),
])  # fmt: skip
def test_streamed_is_whole(server, body):
    body = {"max_tokens": 300, "temperature": 0.8, "seed": 11, **body}
    whole, = ask(server, **body)
    text = server.post(**body, stream=True).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]
    assert comparable(gathered(chunks)) == comparable(whole)


def test_forced_output_comes_out_letter_for_letter(server):
    texts = ["", "x", "Two lines.\n\nAnd <b>tags</b>, \"quotes\" \\ 中文 🎉 e\u0301", "a </think> b", "{\"a\": [1, 2]}"]
    for text in texts:
        for canonical in (False, True):
            choice, = ask(server, "/v1/completions", **forced(text, canonical=canonical, as_text=["</think>"]))
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    answers = [ask(server, "/v1/completions", **forced("transformation", seed=seed), logprobs=0)[0]
               for seed in range(12)]
    cuts = {answer["logprobs"]["tokens"][0] for answer in answers}
    assert len(cuts) > 1, "the model cuts the text as it likes"


def test_limits_and_stops_end_a_form_as_ever(server):
    cut, = ask(server, **schema(PERSON), **OFF, max_tokens=4)
    assert cut["finish_reason"] == "length" and len(cut["message"]["content"]) < 30
    stopped, = ask(server, guided_regex="a{5}b{5}", stop=["bb"], **OFF)
    assert (stopped["message"]["content"], stopped["finish_reason"], stopped["stop_reason"]) == ("aaaaa", "stop", "bb")
    inside, = ask(server, tools=TOOLS, tool_choice=NAMED, stop=["city", "\n"], **OFF)
    arguments(inside)
    long, = ask(server, guided_choice=["yes"], min_tokens=40, ignore_eos=True, **OFF)
    assert (long["message"]["content"], long["finish_reason"]) == ("yes", "stop")
    narrow = server.post(guided_choice=["yes"], allowed_token_ids=[5], **OFF)
    assert narrow.status_code == 400 and "allowed_token_ids leaves no token" in narrow.text, narrow.text
    assert narrow.json()["error"]["param"] == "allowed_token_ids", narrow.text


END = added_token_ids(479)["<|im_end|>"]
BESIDE = {"n": 3, "temperature": 1.5, "logprobs": True, "top_logprobs": 5, "min_tokens": 2, "ignore_eos": True,
          "top_k": 3, "min_p": 0.3, "frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 1.9,
          "bad_words": ["yes", "no", "{", "Oslo"], "logit_bias": {str(END): 100, str(CALL): -100}}


@pytest.mark.parametrize("form, shape", [
    ({"guided_choice": ["yes", "no"]}, "yes|no"), ({"guided_regex": "[ab]{8}"}, "[ab]{8}"),
    (schema(PERSON, strict=True), r"\{.*\}"), ({"structured_outputs": {"grammar": 'start: "a"~30 "b"'}}, "a{30}b"),
])  # fmt: skip
def test_a_form_beside_all_that_changes_the_distribution(server, form, shape):
    """Biases, penalties, filters and unwanted words choose among what the form leaves, and the form comes first."""
    for choice in ask(server, **form, **BESIDE, **OFF):
        text = choice["message"]["content"]
        assert re.fullmatch(shape, text, re.DOTALL) and choice["finish_reason"] == "stop", choice
        assert all(-9999 <= one["logprob"] <= 0 for one in choice["logprobs"]["content"]), choice


def test_an_end_that_is_ignored_ends_no_free_text(server):
    """With or without something that is asked of the calls in it."""
    wanted = {"tools": TOOLS, "ignore_eos": True, "max_tokens": 24, "logit_bias": {str(END): 100, str(CALL): -100}}
    for more in ({}, {"parallel_tool_calls": False}, {"tools": STRICT}):
        for thought in (OFF, {}):
            choice, = ask(server, **{**wanted, **more, **thought})
            assert choice["finish_reason"] == "length" and len(choice["message"].get("tool_calls") or ()) == 0, choice


def test_two_forms_or_none_of_them(server):
    """Which field is too much is said."""
    for fields, param in (
            ({**schema(PERSON), "guided_choice": ["a"]}, "guided_choice"),
            ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
            ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
            ({"guided_json": {"type": "object"}, "guided_whitespace_pattern": "("}, "guided_whitespace_pattern"),
            ({"structured_outputs": {"json": {}, "whitespace_pattern": "(?=x)"}},
             "structured_outputs.whitespace_pattern")):
        response = server.post(**fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_grammars_that_would_end_the_process(server):
    """They are refused by the field's name, and whoever asks meanwhile is served."""
    links = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(5000)}
    chain = {"$ref": "#/$defs/a0", "$defs": {**links, "a5000": {}}}
    rules = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(30_000)) + 'a30000: "x"'
    deep: Any = {}
    for _ in range(300):
        deep = {"properties": {"x": deep}}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(server.post, **fields) for fields in (
            schema(chain), {"guided_grammar": rules}, {"guided_json": chain}, schema(deep, strict=True))]
        assert ask(server, guided_choice=["fine"], **OFF)[0]["message"]["content"] == "fine"
        for one, param in zip(refused, ("response_format.json_schema.schema", "guided_grammar", "guided_json",
                                        "response_format.json_schema.schema"), strict=True):
            error = one.result().json()["error"]
            assert one.result().status_code == 400 and error["param"] == param and len(error["message"]) < 500, error


def test_many_at_once_with_free_requests_between(server):
    """Every request gets its own form, whatever runs beside it; clients that leave harm nobody."""
    def one(number: int) -> None:
        kind = number % 5
        if kind == 0:
            choice, = ask(server, **schema(PERSON), **OFF, seed=number)
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        elif kind == 1:
            choice, = ask(server, guided_regex=rf"{number}-[xy]{{5,30}}", **OFF, seed=number)
            assert re.fullmatch(rf"{number}-[xy]{{5,30}}", choice["message"]["content"])
        elif kind == 2:
            assert ask(server, max_tokens=30, ignore_eos=True, seed=number)[0]["finish_reason"] == "length"
        elif kind == 3:
            arguments(ask(server, tools=TOOLS, tool_choice=NAMED, **OFF, seed=number)[0])
        else:
            with httpx.stream("POST", server.url("/v1/chat/completions"), timeout=60, json={
                    "model": "llm", "stream": True, "max_tokens": 1000, **OFF, "guided_regex": "[a-z ]{900,}",
                    "messages": [{"role": "user", "content": str(number)}]}) as response:
                next(response.iter_lines())

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(40)))
    assert server.get("/health").status_code == 200


def test_what_is_none_is_a_400_and_the_next_request_is_served(server):
    for body, param in (
            (schema({"type": "wat"}), "response_format.json_schema.schema"), ({"guided_regex": "("}, "guided_regex"),
            (schema(False, strict=True), "response_format.json_schema.schema"),
            ({"guided_grammar": "start: <nope>"}, "guided_grammar"),
            ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0]"),
            ({"tools": [{"type": "function", "function": {"name": "a\nb"}}], "tool_choice": "required"}, "tools"),
            ({"thinking_token_budget": -2}, "thinking_token_budget"),
            ({"thinking_token_budget": "many"}, "thinking_token_budget")):
        response = server.post(**body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
        assert ask(server, guided_choice=["fine"], **OFF)[0]["message"]["content"] == "fine"
