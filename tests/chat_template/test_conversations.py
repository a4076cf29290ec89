"""The template on conversations that the golden cases do not show."""

import copy
import re

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_template import conversations
from tests.chat_template.specification import SYSTEM_ROLES, TOOL_ROLES, answer_text, last_question, specified
from tests.helpers.chat_template import render

settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=150)
settings.load_profile("reproducible")

variables = st.fixed_dictionaries({
    "add_generation_prompt": st.booleans(), "enable_thinking": st.booleans(), "preserve_thinking": st.booleans(),
})
histories = st.lists(conversations.messages(), min_size=1, max_size=7)
plain_histories = st.lists(conversations.messages(conversations.plain_texts), min_size=1, max_size=7)
tails = st.lists(conversations.messages(conversations.plain_texts), max_size=4)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@given(histories, conversations.tools, variables)
@settings(max_examples=500)
def test_any_order_of_roles_renders_as_specified(messages, tools, chosen):
    given_messages = copy.deepcopy(messages)
    rendered = render(messages, tools, **chosen)
    assert rendered == specified(messages, tools, **chosen)
    assert render(messages, tools, **chosen) == rendered
    assert messages == given_messages, "rendering changed its input"


@given(plain_histories, conversations.tools)
def test_turns_follow_the_messages(messages, tools):
    """One system turn at most for the leading run, then a turn for each message; neighbouring results share one."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", render(messages, tools), re.DOTALL)
    lead = 0
    while lead < len(messages) and messages[lead]["role"] in SYSTEM_ROLES:
        lead += 1
    expected = ["system"] if lead or tools else []
    before = None
    for role in (message["role"] for message in messages[lead:]):
        if role in TOOL_ROLES:
            if before not in TOOL_ROLES:
                expected.append("user")
        else:
            expected.append("system" if role in SYSTEM_ROLES else role)
        before = role
    assert [role for role, _ in turns] == expected
    if lead < len(messages):
        assert [role for role, _ in turns[:2]] != ["system", "system"], "two system turns at the front"


@given(plain_histories, conversations.answers(), tails, conversations.tools, st.booleans(), st.booleans())
@settings(max_examples=300)
def test_prompt_and_answer_begin_the_next_prompt(messages, answer, tail, tools, thinking, preserve):
    """Turn N's prompt and answer are a prefix of turn N+1's prompt exactly when the answer's thought is kept.

    It is kept if no later message is a question (so within a round of tool calls), or with preserve_thinking.
    The answer is canonical: thought and text without blanks around them, as the parser returns them and the model
    writes them: thought, two line ends around </think>, text, calls.
    """
    if not thinking:
        answer["reasoning_content"] = ""
    written = answer_text(answer) + "<|im_end|>"
    if thinking:
        written = f"{answer['reasoning_content']}\n</think>\n\n{written}"
    asked = {"add_generation_prompt": True, "preserve_thinking": preserve}
    this = render(messages, tools, enable_thinking=thinking, **asked) + written
    following = render([*messages, answer, *tail], tools, enable_thinking=not thinking, **asked)
    kept = preserve or last_question(tail) < 0
    assert following.startswith(this) == kept, (this, following)


@given(plain_histories, tails, conversations.tools, st.booleans())
def test_all_up_to_the_last_question_is_final(messages, tail, tools, preserve):
    """Where the next prompt drops thoughts, everything up to this prompt's last question stays as it is."""
    final = messages[: last_question(messages) + 1]
    if final:
        rendered = render(final, tools, preserve_thinking=preserve)
        assert render(messages, tools, preserve_thinking=preserve).startswith(rendered)
        assert render([*messages, *tail], tools, preserve_thinking=preserve).startswith(rendered)


@given(histories, conversations.texts)
def test_user_text_stays_as_it_is(messages, text):
    """Marks inside a user's text are neither escaped nor interpreted (the model's own template does neither)."""
    assert render([*messages, user(text)]).endswith(f"<|im_start|>user\n{text.strip()}<|im_end|>\n")


def test_leading_system_messages_are_one_turn():
    messages: list[dict] = [
        {"role": "system", "content": " one "},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        {"role": "system", "content": ""},
        user("hi"),
        {"role": "system", "content": "three"},
        {"role": "developer", "content": "four"},
        user("there"),
    ]
    assert render(messages) == (
        "<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>system\nthree<|im_end|>\n<|im_start|>system\nfour<|im_end|>\n<|im_start|>user\nthere<|im_end|>\n"
    )


def test_tools_come_before_the_joined_system_text():
    tool = {"type": "function", "function": {"name": "f", "description": "<é>"}}
    leading = [{"role": "developer", "content": "one"}, {"role": "system", "content": "two"}]
    rendered = render([*leading, user("hi")], [tool])
    assert rendered.count("<|im_start|>system") == 1
    assert '\n{"type": "function", "function": {"name": "f", "description": "<é>"}}\n</tools>' in rendered
    assert rendered.endswith("</IMPORTANT>\n\none\n\ntwo<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")


def test_without_a_user_turn_thoughts_are_kept():
    messages = [{"role": "assistant", "content": "a", "reasoning_content": "t"}, {"role": "tool", "content": "r"}]
    assert render(messages) == ("<|im_start|>assistant\n<think>\nt\n</think>\n\na<|im_end|>\n"
                                "<|im_start|>user\n<tool_response>\nr\n</tool_response><|im_end|>\n")


def test_a_tool_result_sent_as_user_text_is_no_question():
    messages = [user("q"), {"role": "assistant", "content": "a", "reasoning_content": "t"},
                user("<tool_response>\nr\n</tool_response>")]
    assert "<think>\nt\n</think>\n\na" in render(messages)
    for question in ("next", "<tool_response>\nonly opened", "only closed\n</tool_response>"):
        assert "<think>" not in render([*messages, user(question)]), question


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_of_both_field_names_are_read(field):
    assert render([user("q"), {"role": "assistant", "content": "a", field: " t\n"}]).endswith(
        "<|im_start|>assistant\n<think>\nt\n</think>\n\na<|im_end|>\n")


@pytest.mark.parametrize(("arguments", "parameters"), [
    ('{"a": 1}', '<parameter=arguments>\n{"a": 1}\n</parameter>\n'),
    ("not json", "<parameter=arguments>\nnot json\n</parameter>\n"),
    (" \n", ""), ("", ""), (None, ""), ({}, ""),
    ([1, "x"], '<parameter=arguments>\n[1, "x"]\n</parameter>\n'),
    ({"t": True, "n": None, "s": "True", "l": ["é"]},
     "<parameter=t>\ntrue\n</parameter>\n<parameter=n>\nnull\n</parameter>\n<parameter=s>\nTrue\n</parameter>\n"
     '<parameter=l>\n["é"]\n</parameter>\n'),
    ({"items": 1, "get": "x"}, "<parameter=items>\n1\n</parameter>\n<parameter=get>\nx\n</parameter>\n"),
])
def test_call_arguments(arguments, parameters):
    call = {"function": {"name": "f", "arguments": arguments}}
    assert render([{"role": "assistant", "content": None, "tool_calls": [call]}]).endswith(
        f"</think>\n\n<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call><|im_end|>\n")


def test_absent_optional_fields_render_as_null_ones():
    full = [user("q"), {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": None},
            {"role": "user", "content": [{"type": "text", "text": "x", "image_url": None}]}]
    short = [user("q"), {"role": "assistant"}, user("x")]
    assert render(full, tools=[]) == render(short)


@pytest.mark.parametrize(("messages", "reason"), [
    # An empty list inside a list: transformers itself fails on an empty conversation that is not in a batch.
    ([[]], "no messages"),
    ([{"content": "x"}], "Unknown message role"),
    ([{"role": "narrator", "content": "x"}], "Unknown message role: narrator"),
    ([{"role": "user", "content": 5}], "Content must be"),
    ([{"role": "user", "content": [5]}], "A content part must be"),
    ([{"role": "user", "content": [{"type": "audio", "audio": "x"}]}], "content part: audio"),
    ([{"role": "system", "content": [{"type": "image"}]}, user("x")], "cannot hold a picture"),
    ([user("x"), {"role": "developer", "content": [{"type": "video"}]}], "cannot hold a video"),
])
def test_refused_with_a_reason(messages, reason):
    with pytest.raises(jinja2.TemplateError, match=reason):
        render(messages)


def test_only_true_and_false_switch_the_thought():
    for value in (None, True, 0, "false"):
        assert render([user("q")], add_generation_prompt=True, enable_thinking=value).endswith("assistant\n<think>\n")
    kept = [user("q"), {"role": "assistant", "content": "a", "reasoning_content": "t"}, user("q")]
    for value in (None, False, 1, "true"):
        assert "<think>" not in render(kept, preserve_thinking=value)
