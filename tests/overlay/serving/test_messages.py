"""Conversations as agents send them, and the one form that the template reads."""

from __future__ import annotations

import pytest

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.messages import call_arguments, normalise_messages


def assistant(**fields):
    return normalise_messages([{"role": "assistant", **fields}])[0][0]


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("content", [None, "", [], "absent"])
def test_an_answer_of_calls_only(content):
    fields = {} if content == "absent" else {"content": content}
    assert assistant(tool_calls=[CALL], **fields) == {
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize(("arguments", "read"), [
    ('{"a": {"b": [1, 2.5, null]}}', {"a": {"b": [1, 2.5, None]}}), ({"a": 1}, {"a": 1}), ("{}", {}), ("", {}),
    ("  ", {}),
    (None, {}), ('{"a": 1', {"arguments": '{"a": 1'}), ("[1, 2]", {"arguments": "[1, 2]"}), ("5", {"arguments": "5"}),
    ([1, 2], {"arguments": [1, 2]}), ("plain words", {"arguments": "plain words"}),
    ("[" * 5000, {"arguments": "[" * 5000}),
])
def test_arguments(arguments, read):
    assert call_arguments(arguments) == read


def test_extra_keys_of_a_call_fall_away():
    extra = {**CALL, "index": 0, "extra": 1, "function": {**CALL["function"], "parsed": None}}
    assert assistant(tool_calls=[extra]) == assistant(tool_calls=[CALL])


def test_older_and_other_forms_of_a_call():
    assert assistant(function_call=CALL["function"])["tool_calls"][0]["function"] == {"name": "f",
                                                                                      "arguments": {"a": 1}}
    custom = {"type": "custom", "custom": {"name": "shell", "input": "ls"}}
    assert assistant(tool_calls=[custom])["tool_calls"][0]["function"] == {"name": "shell",
                                                                           "arguments": {"input": "ls"}}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_in_every_role(role):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}, "c"]
    assert normalise_messages([{"role": role, "content": parts}])[0][0]["content"] == "abc"


def test_thought_in_the_history():
    for fields in ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_content": None, "reasoning": "hm"}):
        assert assistant(content="x", **fields) == {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    parts = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "x"}]
    assert assistant(content=parts) == {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert "reasoning_content" not in assistant(content="x", reasoning_content="")


def test_a_refusal_in_the_history_is_what_was_said():
    assert assistant(content=None, refusal="I will not.") == {"role": "assistant", "content": "I will not."}
    assert assistant(content="x", refusal=None)["content"] == "x"
    assert assistant(content=[{"type": "refusal", "refusal": "No."}])["content"] == "No."


def test_tool_results():
    got, _ = normalise_messages([{"role": "tool", "tool_call_id": "c1", "content": "ok"},
                              {"role": "tool", "content": None},
                              {"role": "function", "name": "f", "content": "old"}, {"role": "tool"}])
    assert got == [{"role": "tool", "content": "ok", "tool_call_id": "c1"}, {"role": "tool", "content": ""},
                   {"role": "tool", "content": "old"}, {"role": "tool", "content": ""}]


def test_order_and_roles_are_kept():
    """Where system messages stand is the template's business."""
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(
        ["system", "system", "user", "developer", "assistant", "system", "tool", "user"])]
    assert normalise_messages(messages) == (messages, ())


@pytest.mark.parametrize(("message", "param", "code"), [
    ({"content": "x"}, "messages[1].role", "missing_required_parameter"),
    ({"role": None, "content": "x"}, "messages[1].role", "missing_required_parameter"),
    ({"role": 5, "content": "x"}, "messages[1].role", "invalid_type"),
    ({"role": "wizard", "content": "x"}, "messages[1].role", "invalid_value"),
    ({"role": "user"}, "messages[1].content", "missing_required_parameter"),
    ({"role": "user", "content": None}, "messages[1].content", "missing_required_parameter"),
    ({"role": "user", "content": 5}, "messages[1].content", "invalid_type"),
    ({"role": "user", "content": {"text": "x"}}, "messages[1].content", "invalid_type"),
    ({"role": "user", "content": [5]}, "messages[1].content[0]", "invalid_type"),
    ({"role": "user", "content": [{"text": 5, "type": "text"}]}, "messages[1].content[0].text", "invalid_type"),
    ({"role": "user", "content": [{"type": "hologram"}]}, "messages[1].content[0].type", "invalid_value"),
    ({"role": "user", "content": [{"x": 1}]}, "messages[1].content[0].type", "missing_required_parameter"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]", "unsupported_parameter"),
    ({"role": "user", "content": [{"type": "video_url"}]}, "messages[1].content[0]", "unsupported_parameter"),
    ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls", "invalid_type"),
    ({"role": "assistant", "tool_calls": [5]}, "messages[1].tool_calls[0]", "invalid_type"),
    ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function", "missing_required_parameter"),
    ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name",
     "missing_required_parameter"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "messages[1].tool_calls[0].function.name",
     "invalid_type"),
    ("hi", "messages[1]", "invalid_type"), (None, "messages[1]", "invalid_type"),
])
def test_refused_by_name(message, param, code):
    with pytest.raises(RequestError) as caught:
        normalise_messages([{"role": "user", "content": "x"}, message])
    assert (caught.value.param, caught.value.code) == (param, code), caught.value.message
