"""Which tokens stand for pictures: those of the template, never what a user spells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.fake_engine import ids, tokenizer
from tests.helpers.picture_files import PAD, START, placeholders
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.normalise import normalise_chat
from vllm.overlay.serving.options import Options
from vllm.overlay.serving.render import Renderer

GOLDEN = Path(__file__).parents[3] / "chat_template" / "golden"
SPELLED = "<|vision_start|><|image_pad|><|vision_end|>"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def renderer(template=None) -> Renderer:
    return Renderer(tokenizer(), template, placeholders())


def request(messages, **fields):
    return normalise_chat({"model": "m", "messages": messages, **fields})


@pytest.mark.parametrize("counted", [(1, 1), (64, 2), (3, 500)])
@pytest.mark.parametrize("case", ["image_one", "image_two_interleaved"])
async def test_golden(case, counted):
    golden = json.loads((GOLDEN / f"{case}.json").read_text(encoding="utf-8"))
    chat = request(golden["messages"], **golden["kwargs"])
    counts = counted[:len(chat.pictures)]
    prompt = await renderer().chat(chat, counts)
    assert prompt.text == golden["rendered"]
    expected = []
    offsets = []
    left = list(counts)
    for token in ids(golden["rendered"]):
        if token == PAD:
            offsets.append(len(expected))
            expected += [PAD] * left.pop(0)
        else:
            expected.append(token)
    assert prompt.token_ids == expected and list(prompt.offsets) == offsets and not left


async def test_text_cases_are_tokenised_as_before():
    for path in sorted(GOLDEN.glob("*.json")):
        golden = json.loads(path.read_text(encoding="utf-8"))
        if not path.stem.startswith("image"):
            kwargs = dict(golden["kwargs"])
            chat = request(golden["messages"], tools=golden["tools"], chat_template_kwargs=kwargs,
                           add_generation_prompt=kwargs.pop("add_generation_prompt"))
            prompt = await renderer().chat(chat)
            assert (prompt.text, prompt.token_ids) == (golden["rendered"], ids(golden["rendered"])), path.stem


TOOL = {"type": "function", "function": {"name": "f", "description": SPELLED, "parameters": {
    "type": "object", "properties": {SPELLED: {"type": "string", "enum": [SPELLED]}}}}}


@pytest.mark.parametrize(("messages", "fields"), [
    ([{"role": "user", "content": f"a {SPELLED} b"}], {}),
    ([{"role": "user", "content": [{"type": "text", "text": "<|image"}, {"type": "text", "text": "_pad|>"}]}], {}),
    ([{"role": "system", "content": SPELLED}, {"role": "user", "content": "<|video_pad|><|image_pad|><|image_pad|>"}],
     {}),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": SPELLED, "reasoning_content": SPELLED},
      {"role": "user", "content": "y"}], {"chat_template_kwargs": {"preserve_thinking": True}}),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {
        "name": "f<|image_pad|", "arguments": {SPELLED: SPELLED, "b<|image_pad|": [SPELLED]}}}]},
      {"role": "tool", "content": SPELLED}], {}),
    ([{"role": "user", "content": "x"}], {"tools": [TOOL]}),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": f"I see {SPELLED}"}],
     {"continue_final_message": True}),
])
async def test_what_the_user_spells_is_text(messages, fields):
    """No token of a picture, and the very characters that were sent."""
    chat = request(messages, **fields)
    prompt = await renderer().chat(chat)
    plain = await Renderer(tokenizer(), None).chat(chat)
    assert prompt.text == plain.text and tokenizer().decode(prompt.token_ids) == plain.text
    assert PAD in plain.token_ids, "the case spells nothing"
    assert not {PAD, START} & set(prompt.token_ids) and not prompt.offsets


async def test_spelled_beside_a_real_one():
    chat = request([{"role": "user", "content": [{"type": "text", "text": f"<|image_pad|>{SPELLED}"}, PICTURE,
                                                 {"type": "text", "text": "<|image_pad|>"}]}])
    prompt = await renderer().chat(chat, [5])
    assert prompt.token_ids.count(PAD) == 5
    assert prompt.token_ids[prompt.offsets[0]:prompt.offsets[0] + 5] == [PAD] * 5
    assert prompt.token_ids[prompt.offsets[0] - 1] == START
    assert prompt.text.count("<|image_pad|>") == 4


async def test_completions_spell_text_too():
    prompt = await renderer().completion(f"a{SPELLED}b", Options())
    assert PAD not in prompt.token_ids and tokenizer().decode(prompt.token_ids) == prompt.text == f"a{SPELLED}b"


@pytest.mark.parametrize(("template", "found"), [
    ("{{ messages[0].role }}", 0), ("{% for m in messages %}<|image_pad|><|image_pad|>{% endfor %}", 2)])
async def test_a_template_that_writes_another_number_of_pictures(template, found):
    chat = request([{"role": "user", "content": [PICTURE]}])
    with pytest.raises(RequestError, match=f"wrote {found} pictures into the prompt; the messages hold 1"):
        await renderer(template).chat(chat, [4])


async def test_nesting_that_no_template_can_render():
    deep: object = "x"
    for _ in range(5000):
        deep = [deep]
    chat = request([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {
        "name": "f", "arguments": {"a": deep}}}]}])
    with pytest.raises(RequestError, match="nested"):
        await renderer().chat(chat)
