"""`make serve` as a newcomer meets it: the demo checkpoint behind the Makefile's command, asked in twelve ways."""
import concurrent.futures
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image

from tests.helpers.demo_server import QUESTION, Demo
from tests.helpers.picture_files import part

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 262144
END_OF_THOUGHT = 248069
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def test_start_says_what_runs(demo):
    log = demo.output()
    line, = re.findall(r"^vllm overlay: pin pypi-0\.6\.3, .*; back ends: (.*)$", log, re.MULTILINE)
    kernels = ROOT / "vllm_overrides/overlay/kernels"
    operators = sorted(file.parent.name for file in kernels.glob("*/__init__.py"))
    assert list(dict.fromkeys(choice.split()[0] for choice in line.split(", "))) == ["attention", *operators], line
    assert "Prefix caching is off" not in log and "Checkpoints of recurrent state: " in log
    assert httpx.get(f"{demo.base}/v1/models").json()["data"][0]["max_model_len"] == CONTEXT


def test_the_printed_command_works(demo):
    command = re.search(r"^curl .*$", demo.output(), re.MULTILINE)
    assert command, demo.output()[-2000:]
    assert shutil.which("curl"), "this test needs curl"
    done = subprocess.run(["bash", "-c", command.group() + " -s"], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0, done.stdout + done.stderr


def test_a_thought_and_no_thought(demo):
    """With thinking on the output starts inside the thought; switched off, there is content only."""
    on = demo.ask(max_tokens=12, logit_bias={str(END_OF_THOUGHT): -100})["choices"][0]
    assert on["message"]["reasoning_content"] and not on["message"]["content"] and on["finish_reason"] == "length", on
    off = demo.ask(max_tokens=12, ignore_eos=True, chat_template_kwargs={"enable_thinking": False})["choices"][0]
    assert off["message"]["content"] and "reasoning_content" not in off["message"], off
    both = demo.ask(n=8, seed=0, max_tokens=60)["choices"]
    assert all(choice["message"]["content"] for choice in both), both
    assert "think>" not in json.dumps([on, off, both]) and "<|im_" not in json.dumps([on, off, both])


def test_streamed_equals_whole(demo):
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = demo.ask(**body)
    chunks = demo.stream(stream_options={"include_usage": True}, **body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for field in ("reasoning_content", "content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == (whole["choices"][0]["message"].get(field) or "")
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 40


def test_openai_package(demo):
    answer = demo.api.chat.completions.create(model="llm", messages=QUESTION, max_tokens=8, tools=TOOLS)
    assert answer.usage.prompt_tokens > 100 and answer.usage.completion_tokens > 0, answer
    chunks = list(demo.api.completions.create(model="llm", prompt="Once", max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    with pytest.raises(openai.NotFoundError):
        demo.api.chat.completions.create(model="another", messages=QUESTION)


def test_unicode(demo):
    """Text in other scripts arrives whole: echoed prompts, and a stream that never splits a character."""
    text = "中文测试：你好世界 日本語 🎉🚀👩‍👩‍👧 naïve \u0301 עברית"
    echoed = demo.post("/v1/completions", prompt=text, max_tokens=1, echo=True).json()
    assert echoed["choices"][0]["text"].startswith("中文测试：你好世界 日本語 🎉🚀👩‍👩‍👧"), echoed
    chunks = demo.stream(messages=[{"role": "user", "content": text}], max_tokens=60, ignore_eos=True)
    assert len(chunks) > 10 and "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


def test_long_prompt(demo):
    """Several steps' worth of prompt; every token counted once."""
    messages = [{"role": "user", "content": "word " * 6000}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    whole = demo.ask(**body)
    assert whole["usage"]["prompt_tokens"] > 6000 and whole["usage"]["completion_tokens"] == 4, whole["usage"]
    assert demo.stream(stream_options={"include_usage": True}, **body)[-1]["usage"]["completion_tokens"] == 4


def test_several_at_once(demo):
    """Eight greedy requests together get what they get alone (bfloat16: near ties may part; most must not)."""
    prompts = [f"Story {number}: " + "and then " * number for number in range(8)]
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    alone = [demo.post("/v1/completions", prompt=prompt, **body).json()["choices"][0]["text"] for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: demo.post("/v1/completions", prompt=prompt, **body).json(), prompts))
    same = [one["choices"][0]["text"] == other for one, other in zip(together, alone, strict=True)]
    assert sum(same) >= 6, list(zip(alone, [one["choices"][0]["text"] for one in together], strict=True))


def test_several_choices_and_seeds(demo):
    body = {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True}
    choices = demo.post("/v1/completions", n=3, seed=1, **body).json()["choices"]
    texts = [choice["text"] for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 2] and len(set(texts)) == 3, choices
    second = demo.post("/v1/completions", seed=2, **body).json()["choices"][0]["text"]
    assert second == texts[1], "choice i of seed s is the answer to seed s + i"


def test_greedy_answers_repeat(demo):
    answers = [demo.ask(temperature=0, max_tokens=24, seed=42, ignore_eos=True) for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_structured_output(demo):
    """The checks t8 and t9 of the platform as far as a random model can show them, and a call that must come."""
    person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {
        "type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": False}
    off = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}, "temperature": 0}
    named = {"type": "json_schema", "json_schema": {"name": "person", "schema": person, "strict": True}}
    for fields in (off, {"thinking_token_budget": 20}):
        choice, = demo.ask(response_format=named, max_tokens=300, **fields)["choices"]
        content = json.loads(choice["message"]["content"])
        assert set(content) == {"name", "age"} and 0 <= content["age"] <= 150 and choice["finish_reason"] == "stop"
    cut, = demo.ask(response_format={"type": "json_object"}, max_tokens=40, **off)["choices"]
    assert cut["message"]["content"].startswith("{") or cut["finish_reason"] == "stop", cut
    forced, = demo.ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=60, **off)["choices"]
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "get_weather", forced


def test_history_with_calls(demo):
    """What an agent sends back: null content, arguments as text or object, extra keys, several system messages."""
    call = {"id": "c1", "index": 0, "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Beijing"}'}}
    as_object = {**call, "function": {"name": "get_weather", "arguments": {"city": "Beijing"}}}
    counts = []
    for form in (call, as_object):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}, *QUESTION,
                    {"role": "assistant", "content": None, "tool_calls": [form]},
                    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                    {"role": "system", "content": "Answer in English."}]
        answer = demo.ask(messages=messages, tools=TOOLS, max_completion_tokens=4, store=True, unknown_field=1)
        counts.append(answer["usage"]["prompt_tokens"])
    assert counts[0] == counts[1], counts


def test_pictures_between_text(demo):
    """Three of different shapes in one request, seen: another colour, another answer; streamed, sampled twice."""
    def answered(colour: tuple[int, int, int], ask=demo.ask, **fields):
        shapes = [Image.new("RGB", size, colour) for size in ((64, 64), (320, 200), (100, 900))]
        parts = [one for i, shape in enumerate(shapes) for one in ({"type": "text", "text": str(i)}, part(shape))]
        return ask(messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], temperature=0,
                   max_tokens=8, ignore_eos=True, **fields)

    red, again, blue = answered((255, 0, 0)), answered((255, 0, 0)), answered((0, 0, 255))
    # 64, 77 and 84 tokens of pictures, each between two marks.
    assert 231 < red["usage"]["prompt_tokens"] == blue["usage"]["prompt_tokens"] < 260, red["usage"]
    assert red["choices"] == again["choices"], (red, again)
    assert red["choices"][0]["message"] != blue["choices"][0]["message"], red
    deltas = [choice["delta"] for chunk in answered((255, 0, 0), demo.stream) for choice in chunk["choices"]]
    for field in ("reasoning_content", "content"):
        whole = red["choices"][0]["message"].get(field) or ""
        assert "".join(delta.get(field) or "" for delta in deltas) == whole
    assert len(answered((0, 0, 255), n=2)["choices"]) == 2


def test_a_client_that_leaves(demo):
    """It frees the engine long before its 20,000 tokens are done."""
    with httpx.stream("POST", f"{demo.base}/v1/chat/completions", timeout=60, json={
            "model": "llm", "stream": True, "max_tokens": 20000, "ignore_eos": True, "messages": QUESTION}) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 30
    while (running := re.search(r"num_requests_running\S* ([\d.]+)", metrics(demo))) is None or float(running.group(1)):
        assert time.monotonic() < deadline, running
        demo.ask(max_tokens=1)      # the counts are written at the end of a step
        time.sleep(0.2)


@pytest.mark.parametrize("body, field", [
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "who?"}]}, "role"),
    ({"messages": QUESTION, "max_tokens": -1}, "max_tokens"),
    ({"messages": QUESTION, "max_tokens": CONTEXT + 1}, "max_tokens"),
    ({"messages": QUESTION, "temperature": "hot"}, "temperature"),
    ({"messages": QUESTION, "top_p": 1.1}, "top_p"),
    ({"messages": [{"role": "user", "content": "long " * (CONTEXT + 1)}]}, "maximum context length"),
], ids=["no messages", "no role", "negative limit", "limit over context", "word as number", "top_p", "long prompt"])
def test_bad_input_names_the_field(demo, body, field):
    response = demo.post(**body)
    assert response.status_code == 400 and field in response.text, (response.status_code, response.text[:500])
    assert httpx.get(f"{demo.base}/health").status_code == 200


def metrics(demo: Demo) -> str:
    return demo.get("/metrics").text
