"""Ends of messages as token offsets: what a later turn of the conversation shares with this one."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from os.path import commonprefix

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from tests.chat_template import conversations
from tests.helpers.fake_engine import ids, tokenizer
from tests.helpers.picture_files import PAD, placeholders
from vllm.overlay.serving.boundaries import Ends, repaired, watched
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.fields import well_formed
from vllm.overlay.serving.normalise import normalise_chat
from vllm.overlay.serving.render import Prompt, Renderer

SPELLED = "<|vision_start|><|image_pad|><|vision_end|>"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
    "path": {"type": "string"}}}}}]
CALL = {"function": {"name": "edit", "arguments": {"path": "a.py"}}}
LOOP = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Question one?"},
        {"role": "assistant", "content": "Answer.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Edit a file."},
        {"role": "assistant", "content": "", "reasoning_content": "I need a tool.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "done"}, {"role": "tool", "content": "done, too"}]


def rendered(messages, *, template=None, counts=(), guarded=False, **fields) -> Prompt:
    renderer = Renderer(tokenizer(), template, placeholders() if counts or guarded else None, find_boundaries=True)
    try:
        return renderer._chat(normalise_chat({"model": "m", "messages": messages, **fields}), counts)
    finally:
        renderer.close()


def texts(prompt: Prompt) -> list[str]:
    """The text of the tokens before each boundary."""
    return [tokenizer().decode(prompt.token_ids[:place]) for place in prompt.boundaries]


def turns(prompt: Prompt, end: str = "<|im_end|>\n") -> list[int]:
    """Tokens before the end of each turn, by looking for the control token."""
    pieces = prompt.text.split(end)
    return [len(ids(end.join(pieces[:i + 1]) + end)) for i in range(len(pieces) - 1)]


def test_every_end_of_a_turn():
    """System messages are one turn, and so are results in a row; each result is told apart all the same."""
    prompt = rendered(LOOP, tools=TOOLS)
    assert set(prompt.boundaries) >= set(turns(prompt)) and len(turns(prompt)) == 6, texts(prompt)
    assert prompt.boundaries[0] == turns(prompt)[0], "the first one is behind system and tools"
    assert prompt.token_ids[prompt.boundaries[-1]:] == ids("<|im_start|>assistant\n<think>\n")
    between = [text for text in texts(prompt) if text.endswith("done\n</tool_response>")]
    assert len(between) == 1, texts(prompt)


@pytest.mark.parametrize(("fields", "behind"), [
    ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ({"enable_thinking": True}, "<|im_start|>assistant\n<think>\n"),
    ({"tool_choice": "required"}, "<|im_start|>assistant\n<think>\n"),
])
def test_the_last_one_is_before_the_generation_prompt(fields, behind):
    prompt = rendered(LOOP, tools=TOOLS, **fields)
    assert prompt.token_ids[prompt.boundaries[-1]:] == ids(behind), texts(prompt)[-1]


def test_no_generation_prompt():
    """Where the last message ends, the prompt ends: no boundary."""
    prompt = rendered(LOOP, add_generation_prompt=False)
    with_it = rendered(LOOP)
    assert prompt.boundaries == with_it.boundaries[:-1] and len(prompt.token_ids) == with_it.boundaries[-1]


def test_a_message_that_is_continued():
    messages = [*LOOP[:3], {"role": "assistant", "content": "The answer is"}]
    prompt = rendered(messages, continue_final_message=True, add_generation_prompt=False)
    whole = rendered(messages, add_generation_prompt=False)
    assert prompt.text.endswith("The answer is") and prompt.boundaries == whole.boundaries
    assert len(prompt.boundaries) == 2, texts(prompt)


def test_what_was_cut_away_has_no_boundary():
    whole = rendered(LOOP)
    cut = rendered(LOOP, truncate_prompt_tokens=len(whole.token_ids) - whole.boundaries[1] - 1)
    assert cut.boundaries == tuple(place - whole.boundaries[1] - 1 for place in whole.boundaries[2:])
    assert rendered(LOOP, truncate_prompt_tokens=2).boundaries == ()


def test_pictures_move_what_is_behind_them():
    messages = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What?"}, PICTURE]},
                {"role": "assistant", "content": "Two."}, {"role": "user", "content": ["And?", PICTURE]}]
    small = rendered(messages, counts=(1, 1, 1))
    large = rendered(messages, counts=(64, 1, 500))
    assert len(small.boundaries) == 3
    assert large.boundaries == tuple(place + more for place, more in zip(small.boundaries, (63, 63, 562), strict=True))
    for place in large.boundaries:
        assert PAD not in large.token_ids[place - 2:place], "a boundary is behind the turn's last mark"


def test_what_a_user_spells_moves_nothing():
    """Guarded text is tokenised in pieces; the boundaries are those of the whole."""
    messages = [{"role": "system", "content": SPELLED}, {"role": "user", "content": f"a {SPELLED} <|image_pad|>"},
                {"role": "assistant", "content": "I see"}, {"role": "user", "content": [f"{SPELLED}", PICTURE, "?"]}]
    prompt = rendered(messages, counts=(9,))
    assert len(prompt.boundaries) == 4
    for place, text in zip(prompt.boundaries, texts(prompt), strict=True):
        assert text.endswith("<|im_end|>\n") and prompt.token_ids[place] == ids("<|im_start|>")[0], text


def test_broken_text_is_counted_as_it_is_repaired():
    messages = [{"role": "user", "content": "a\ud83cb \ud83c\udf89 "}, {"role": "assistant", "content": "\udf89"},
                {"role": "user", "content": "c"}]
    prompt = rendered(messages)
    assert list(prompt.boundaries) == turns(prompt) and len(prompt.boundaries) == 3


def test_places_in_repaired_text():
    chance = random.Random(0)
    for _ in range(2000):
        text = "".join(chance.choices("ab\ud83c\ud800\udf89\udfff\U0001f389", k=chance.randrange(1, 12)))
        places = range(len(text) + 1)
        if well_formed(text) != text:
            assert repaired(places, text) == [len(well_formed(text[:place])) for place in places], ascii(text)
    text = "\ud83c" + "word \ud83c\udf89" * 140_000
    began = time.process_time()
    assert repaired(range(7, len(text), 196), text)[-1] < len(well_formed(text))
    assert time.process_time() - began < 2, "one half of a character among 5000 messages holds everybody up"


PLAIN = "[{{ message.role }}] {{ message.content }}\n"
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(("template", "found"), [
    ("{% for message in messages %}" + PLAIN + "{% endfor %}" + PROMPT, [1, 2, 3]),
    ("{% for message in messages[1:] %}" + PLAIN + "{% endfor %}" + PROMPT, [2, 3]),
    ("{% for message in messages if message.role != 'x' %}" + PLAIN + "{% endfor %}" + PROMPT, [1, 2, 3]),
    ("{% for message in messages %}{% endfor %}{% for message in messages | list %}{{ message.role }}{% endfor %}"
     "{% for message in messages %}" + PLAIN + "{% endfor %}" + PROMPT, [0, 1, 2, 3]),
    ("{% block all %}{% for message in messages %}" + PLAIN + "{% endfor %}{% endblock %}" + PROMPT, [1, 2, 3]),
    ("{% for message in messages %}{% if loop.last or loop.nextitem.role != 'x' %}" + PLAIN +
     "{% endif %}{% endfor %}" + PROMPT, [1, 2, 3]),
    ("{% for message in messages %}{{ '' if loop.first else loop.previtem.role[:0] }}{% for one in messages %}"
     "{% endfor %}" + PLAIN + "{% endfor %}" + PROMPT, [1, 2, 3]),
    ("{% generation %}{% endgeneration %}{% for message in messages %}" + PLAIN + "{% endfor %}" + PROMPT, [1, 2, 3]),
], ids=["plain", "slice", "filtered", "three loops", "block", "ahead",
        "nested", "tracked"])
def test_other_templates(template, found):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three"}]
    prompt = rendered(messages, template=template)
    lines = [0]
    for line in prompt.text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    if "three loops" in template or found[0] == 0:
        lines = [len("userassistantuser")] + lines[1:]
    if "messages[1:]" in template:
        lines = [0, 0, *lines[1:]]
    expected = [prompt.text[:lines[i]] for i in found]
    assert texts(prompt) == expected, prompt.text


@pytest.mark.parametrize("template", [
    "{% for message in messages if message.role != 'x' %}{{ 'x' if not loop.last and loop.nextitem.role }}" + PLAIN +
    "{% endfor %}",
    "{% for i in range(messages | length) %}{% set message = messages[i] %}" + PLAIN + "{% endfor %}",
    "{% macro all() %}{% for message in messages %}" + PLAIN + "{% endfor %}{% endmacro %}{{ all() }}",
    "{% set all %}{% for message in messages %}" + PLAIN + "{% endfor %}{% endset %}{{ all }}",
    "{{ messages | tojson }}", "{% for message in messages | reverse %}" + PLAIN + "{% endfor %}",
], ids=["filtered, ahead", "by index", "macro", "set", "no loop", "backwards"])
def test_templates_that_tell_little(template):
    """Boundaries that come early, or none: the text is what it is, and no boundary is outside of it."""
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    prompt = rendered(messages, template=template + PROMPT)
    plain = tokenizer().apply_chat_template(messages, chat_template=template + PROMPT, add_generation_prompt=True,
                                            tokenize=False)
    assert prompt.text == plain and prompt.token_ids == ids(plain)
    assert all(0 < place < len(prompt.token_ids) for place in prompt.boundaries)


def test_a_tokenizer_of_another_kind_costs_the_boundaries_only():
    ends = Ends()
    with watched(["a", "b"], ends, object(), None, None) as messages:
        assert list(messages) == ["a", "b"]
    assert ends.places == []


def test_nobody_asks_for_them():
    renderer = Renderer(tokenizer(), None)
    assert renderer._chat(normalise_chat({"model": "m", "messages": LOOP}), ()).boundaries == ()
    renderer.close()


def random_text(rng: random.Random) -> str:
    return " ".join(rng.choice(("one", "two", "<|im_end|>", "系统", "🎉", "\n\n", "e\u0301", "x" * 30))
                    for _ in range(rng.randint(1, 12)))


def grown(messages: list[dict], rng: random.Random) -> list[dict]:
    """The conversation one request later: an answer, and a question or the results of its calls."""
    answer = {"role": "assistant", "content": random_text(rng), "reasoning_content": random_text(rng)}
    if rng.random() < 0.5:
        answer["tool_calls"] = [CALL] * rng.randint(1, 2)
        return [*messages, answer, *({"role": "tool", "content": random_text(rng)} for _ in answer["tool_calls"])]
    return [*messages, answer, {"role": "user", "content": random_text(rng)}]


@pytest.mark.parametrize("seed", range(20))
def test_what_the_next_turn_shares(seed):
    """It begins with the last turn's messages, up to the last one that the template renders as before: all of them if
    thoughts are kept, else those up to the last question; and there is a boundary of both."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": random_text(rng)}] * rng.randint(0, 2) + [
        {"role": "user", "content": random_text(rng)}]
    for _ in range(6):
        keeps = rng.random() < 0.3
        fields = {"tools": TOOLS, "chat_template_kwargs": {"preserve_thinking": keeps}}
        later = grown(messages, rng)
        one = rendered(messages, enable_thinking=rng.random() < 0.5, **fields)
        two = rendered(later, enable_thinking=rng.random() < 0.5, **fields)
        question = max(i for i, message in enumerate(messages) if message["role"] == "user")
        unchanged = len(messages) if keeps or later[-1]["role"] == "tool" else question + 1
        shared = len(commonprefix([one.token_ids, two.token_ids]))
        alike = rendered(messages[:unchanged], **fields).boundaries[-1]
        assert alike in one.boundaries and alike in two.boundaries and alike <= shared, (
            f"{alike} tokens of the first {unchanged} messages; shared {shared}; {one.boundaries} {two.boundaries}")
        messages = later


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(conversations.messages(conversations.plain_texts, ("system", "user", "assistant", "tool")),
                         min_size=1, max_size=6), tools=conversations.tools)
def test_random_conversations(messages, tools):
    """Every beginning of the conversation that renders as a beginning of the prompt ends at a boundary, and the tokens
    before a boundary are those of the text before it, where no token of the text lies across."""
    pictures = sum(isinstance(part, dict) and "text" not in part for message in messages
                   for part in message["content"] or [] if not isinstance(message["content"], str))
    counts = (1,) * pictures
    fields = {"tools": tools, "guarded": True, "chat_template_kwargs": {"preserve_thinking": True}}
    try:
        prompt = rendered(messages, counts=counts, **fields)
    except RequestError:
        assume(False)
    beginnings = []
    for i in range(len(messages)):
        with suppress(RequestError):    # It lacks a picture.
            beginnings.append(rendered(messages[:i + 1], counts=counts, add_generation_prompt=False, **fields).text)
    event(f"{len(prompt.boundaries)} boundaries, {sum(map(prompt.text.startswith, beginnings))} beginnings")
    for beginning in beginnings:
        if prompt.text.startswith(beginning):
            assert len(ids(beginning)) in prompt.boundaries, (beginning, texts(prompt))
    for place in prompt.boundaries:
        assert ids(tokenizer().decode(prompt.token_ids[:place])) == prompt.token_ids[:place]
