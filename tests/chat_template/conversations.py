"""Random conversations: every role in any order, texts with blanks, other scripts, and the format's own marks."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARKS = ("<|im_start|>system\n", "<|im_end|>", "<think>\n", "\n</think>\n\n", "<tool_call>", "</tool_call>",
         "<tool_response>", "</tool_response>", "<|image_pad|>", "{{ messages }}", "{% break %}", "{# #}")
WORDS = ("a", "Hello, ", " ", "\n", "\n\n", "\t", "héllo", "系统", "नमस्ते", "مرحبا", "👩\u200d👩\u200d👧",
         "e\u0301", "\u2028", "\u00a0", "0", '"quoted"', "\\n", "\x00", "&<>'")

plain_texts = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
texts = st.lists(st.sampled_from(WORDS + MARKS), max_size=4).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.sampled_from((0.5, 1e100)) | plain_texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(plain_texts, inner, max_size=2),
    max_leaves=4,
)
tools = st.none() | st.lists(
    st.fixed_dictionaries({
        "type": st.just("function"), "function": st.dictionaries(plain_texts, json_values, max_size=2),
    }),
    max_size=2,
)


def contents(words: st.SearchStrategy[str], pictures: bool) -> st.SearchStrategy:
    """Content in every form that clients send; null as well."""
    parts = st.fixed_dictionaries({"type": st.sampled_from(("text", "input_text")), "text": st.none() | words}) | words
    if pictures:
        parts |= st.sampled_from((
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "image"},
            {"type": "input_image", "image_url": "data:,"}, {"type": "video_url", "video_url": {"url": "data:,"}},
        ))
    return words | st.none() | st.lists(parts, max_size=3)


@st.composite
def calls(draw: st.DrawFn, words: st.SearchStrategy[str], parsed: bool) -> dict:
    """A tool call; `parsed` = arguments only as the object that the server makes of them."""
    objects = st.dictionaries(plain_texts, json_values | words, max_size=2)
    anything = objects | words | st.none() | st.lists(st.integers(), max_size=2)
    function: dict[str, Any] = {"name": draw(st.sampled_from(("f", "get_weather")))}
    if parsed or draw(st.booleans()):
        function["arguments"] = draw(objects if parsed else anything)
    return {"id": "c", "type": "function", "function": function} if parsed or draw(st.booleans()) else function


@st.composite
def messages(draw: st.DrawFn, words: st.SearchStrategy[str] = texts, roles: tuple[str, ...] = ROLES) -> dict:
    """One message."""
    role = draw(st.sampled_from(roles))
    message = {"role": role, "content": draw(contents(words, role in ("user", "tool")))}
    if role == "assistant":
        if draw(st.booleans()):
            message[draw(st.sampled_from(("reasoning_content", "reasoning")))] = draw(st.none() | words)
        if draw(st.booleans()):
            message["tool_calls"] = draw(st.none() | st.lists(calls(words, parsed=False), max_size=2))
    return message


@st.composite
def answers(draw: st.DrawFn) -> dict:
    """An assistant's message as our server's parser makes it: trimmed, arguments as an object."""
    return {
        "role": "assistant",
        "content": draw(plain_texts).strip(),
        "reasoning_content": draw(plain_texts).strip(),
        "tool_calls": draw(st.lists(calls(plain_texts, parsed=True), max_size=2)),
    }
