"""Prompts: the golden cases of the model's own template, and that an answer parsed and sent back renders as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.fake_engine import FakeEngine, application, ids, tokenizer
from vllm.overlay.serving.normalise import normalise_chat
from vllm.overlay.serving.options import Options
from vllm.overlay.serving.parse.markers import END_THINK
from vllm.overlay.serving.render import Renderer, ends_in_thought, well_formed
from vllm.overlay.serving.respond import ChatMessage

GOLDEN = Path(__file__).parents[2] / "chat_template" / "golden"
TEXT_CASES = sorted(path.stem for path in GOLDEN.glob("*.json") if not path.stem.startswith("image"))
TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
    "path": {"type": "string"}, "line": {"type": "integer"}, "options": {"type": "object"}}}}}]


@pytest.mark.parametrize("arguments", ["object", "text"])
@pytest.mark.parametrize("case", TEXT_CASES)
async def test_golden(case, arguments):
    """Byte for byte what the model's own template makes, whichever way the arguments of earlier calls are sent."""
    golden = json.loads((GOLDEN / f"{case}.json").read_text(encoding="utf-8"))
    messages = golden["messages"]
    if arguments == "text":
        messages = json.loads(json.dumps(messages))
        for call in (call for message in messages for call in message.get("tool_calls", [])):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    kwargs = dict(golden["kwargs"])
    body = {"model": "m", "messages": messages, "tools": golden["tools"],
            "add_generation_prompt": kwargs.pop("add_generation_prompt"), "chat_template_kwargs": kwargs}
    prompt = await Renderer(tokenizer(), None).chat(normalise_chat(body))
    assert prompt.text == golden["rendered"]
    assert prompt.token_ids == ids(golden["rendered"])
    assert prompt.in_thought == golden["rendered"].endswith("<think>\n")


ANSWERS = {
    "thought and content": "Let me see.\n\n1. One\n</think>\n\nThe *answer*.\n\n    code\nend",
    "thought and call": "I need it.\n</think>\n\n<tool_call>\n<function=edit>\n<parameter=path>\na b.py\n</parameter>\n"
                        "<parameter=line>\n3\n</parameter>\n<parameter=options>\n{\"a\": [1, 2.5, null, \"é\"]}\n"
                        "</parameter>\n</function>\n</tool_call>",
    "content and two calls": "Hm.\n</think>\n\nI look.\n\n<tool_call>\n<function=edit>\n<parameter=path>\n\n  x <b>\n\n"
                             "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=edit>\n</function>\n"
                             "</tool_call>",
    "no thought": "\n</think>\n\nHello.",
    "content only": "Hello.",
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_a_turn_and_its_answer_begin_the_next_prompt(case):
    """What was generated, parsed, sent back by the client and rendered again is what was generated: the cache stays
    good."""
    answer = ANSWERS[case]
    thinking = END_THINK in answer
    service = application(FakeEngine()).state.service
    body = {"model": "llm", "messages": [{"role": "user", "content": "go"}], "tools": TOOLS,
            "enable_thinking": thinking}
    request = normalise_chat(body)
    prompt = await service.renderer.chat(request)
    choice = service.chat_choice(0, request, prompt, [])
    message = ChatMessage("assistant", "reasoning_content", request.tools)
    message.add(choice.feed(ids(answer + "<|im_end|>"), None, "stop", None).events)
    sent = [*body["messages"], message.body(), {"role": "tool", "tool_call_id": "c", "content": "done"}]
    following = await service.renderer.chat(normalise_chat({**body, "messages": sent}))
    assert following.text.startswith(prompt.text + answer + "<|im_end|>\n"), following.text


@pytest.mark.parametrize(("prompt", "inside"), [
    ("<|im_start|>assistant\n<think>\n", True), ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
    ("<|im_start|>user\nsay <think><|im_end|>\n", False), ("<|im_start|>assistant\n<think>\nI am not su", True),
    ("plain <think> text", False), ("plain\n<think>\n", True), ("", False),
])
def test_whether_a_prompt_ends_in_a_thought(prompt, inside):
    assert ends_in_thought(prompt) is inside


def test_unpaired_surrogates_are_replaced_and_pairs_are_kept():
    assert well_formed("a\ud83cb") == "a\ufffdb"
    assert well_formed(json.loads('"\\ud83c\\udf89 \\udf89"')) == "🎉 \ufffd"
    assert well_formed("日本 🎉") == "日本 🎉"


@pytest.mark.parametrize("thinking", [None, False])
async def test_the_prompt_does_not_depend_on_whether_tools_may_or_must_be_called(thinking):
    """An agent that forbids calls for one turn, or forces one, keeps its cached prefix, and the model its thought."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "enable_thinking": thinking}
    first, *others = [await Renderer(tokenizer(), None).chat(normalise_chat({**body, "tool_choice": choice}))
                      for choice in ("auto", "none", "required", {"type": "function", "function": {"name": "edit"}})]
    assert others == [first] * 3 and first.in_thought == (thinking is None)


async def test_long_prompts_are_cut_from_the_left():
    renderer = Renderer(tokenizer(), None)
    whole = await renderer.completion("one two three", Options())
    assert (await renderer.completion("one two three",
                                      Options(truncate_prompt_tokens=2))).token_ids == whole.token_ids[-2:]
