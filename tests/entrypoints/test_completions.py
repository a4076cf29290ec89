"""POST /v1/completions over a scripted engine."""

from __future__ import annotations

import pytest

from tests.helpers.fake_engine import FakeEngine, client, ids, post, stream, tokenizer

PATH = "/v1/completions"


def text_of(chunks: list[dict], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


@pytest.mark.parametrize("together", [1, 4, 100])
@pytest.mark.parametrize(("answer", "request_fields", "text", "finish"), [
    ("Hello, wörld 🎉.", {}, "Hello, wörld 🎉.", "stop"),
    ("1 2 3 15 16", {"stop": "15"}, "1 2 3 ", "stop"),
    ("a b c d", {"max_tokens": 2}, "a b", "length"),
    ("<think>hm</think>", {}, "<think>hm</think>", "stop"),
    ("x<|im_start|>y", {}, "xy", "stop"),
    ("x<|im_start|>y", {"skip_special_tokens": False}, "x<|im_start|>y", "stop"),
    ("b", {"echo": True}, "hib", "stop"),
    ("b", {"echo": True, "max_tokens": 0}, "hi", "length"),
    ("b", {"echo": True, "max_tokens": 0, "stop": "b"}, "hi", "length"),
])
def test_streamed_and_whole(answer, request_fields, text, finish, together):
    http = client(FakeEngine(answer, together=together))
    whole = post(http, PATH, **{"max_tokens": 50, **request_fields})
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (text, finish)
    chunks = stream(http, PATH, **{"max_tokens": 50, "stream_options": {"include_usage": True}, **request_fields})
    assert text_of(chunks) == text
    assert chunks[-2]["choices"][0]["finish_reason"] == finish
    assert chunks[-1]["usage"] == whole["usage"]


def test_shape():
    body = post(client(FakeEngine("ok")), PATH)
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["usage"] == {"prompt_tokens": len(ids("hi")), "completion_tokens": len(ids("ok")) + 1,
                             "total_tokens": len(ids("hi")) + len(ids("ok")) + 1,
                             "prompt_tokens_details": {"cached_tokens": 0}}
    assert body["choices"][0] == {"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop",
                                  "stop_reason": None,
                                  "prompt_logprobs": None}
    assert {chunk["object"] for chunk in stream(client(FakeEngine("ok")), PATH)} == {"text_completion"}


def test_sixteen_tokens_unless_told():
    assert post(client(FakeEngine("x " * 100)), PATH)["usage"]["completion_tokens"] == 16


def test_several_prompts_and_choices():
    engine = FakeEngine("one", "two")
    prompts = ["first", ids("second")]
    for prompt, count in ((prompts[:1], 1), ([prompts[0], prompts[0]], 2)):
        body = post(client(engine), PATH, prompt=prompt, n=2)
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
        assert [choice["text"] for choice in body["choices"]] == ["one", "two"] * count
        assert body["usage"]["prompt_tokens"] == len(ids("first")) * count
        chunks = stream(client(engine), PATH, prompt=prompt, n=2)
        assert [text_of(chunks, i) for i in range(2 * count)] == ["one", "two"] * count


def test_prompts_as_token_ids():
    engine = FakeEngine("x")
    post(client(engine), PATH, prompt=[5, 6, 7])
    post(client(engine), PATH, prompt=[[8], [9, 10]])
    assert sorted(tokens for tokens, _, _ in engine.requests) == [[5, 6, 7], [8], [9, 10]]
    response = client(engine).post(PATH, json={"model": "llm", "prompt": [5, 100000]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt", response.text


def test_truncated_prompt():
    engine = FakeEngine("x")
    post(client(engine), PATH, prompt=[5, 6, 7], truncate_prompt_tokens=2)
    assert engine.requests[0][0] == [6, 7]


def test_logprobs():
    http = client(FakeEngine("a b"))
    tokens = [*ids("a b"), ids("<|im_end|>")[0]]
    whole = post(http, PATH, logprobs=2)["choices"][0]["logprobs"]
    shown = [tokenizer().decode([token]) for token in tokens]
    assert whole["tokens"] == shown
    assert whole["token_logprobs"] == [-0.5] * len(tokens)
    assert whole["text_offset"] == [sum(map(len, shown[:i])) for i in range(len(shown))]
    assert all(len(entry) == 2 for entry in whole["top_logprobs"]), whole
    joined: dict = {}
    for chunk in stream(http, PATH, logprobs=2):
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values)
    assert joined == whole


def test_logprobs_of_the_prompt():
    """echo with logprobs: the prompt's tokens first; nothing comes before the first one, so it has none."""
    http = client(FakeEngine("c"))
    request = {"prompt": "abc d", "echo": True, "logprobs": 1, "max_tokens": 5}
    whole = post(http, PATH, **request)["choices"][0]["logprobs"]
    prompt = ids("abc d")
    assert len(whole["tokens"]) == len(prompt) + 2
    assert whole["token_logprobs"][0] is None and whole["top_logprobs"][0] is None
    assert whole["text_offset"][len(prompt)] == len("abc d")
    joined: dict = {}
    for chunk in stream(http, PATH, **request):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined == whole
    asked = post(http, PATH, prompt="abc d", prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert asked[0] is None and asked[1][str(prompt[1])]["logprob"] == -0.5, asked


def test_what_the_model_read_and_wrote():
    http = client(FakeEngine("b c"))
    request = {"prompt": ["hi", "you"], "return_token_ids": True, "prompt_logprobs": 1}
    whole = post(http, PATH, **request)["choices"]
    assert [choice["prompt_token_ids"] for choice in whole] == [ids("hi"), ids("you")]
    assert [choice["token_ids"] for choice in whole] == [[*ids("b c"), ids("<|im_end|>")[0]]] * 2
    first: dict = {}
    tokens: dict = {0: [], 1: []}
    for chunk in stream(http, PATH, **request):
        (choice,) = chunk["choices"]
        first.setdefault(choice["index"], choice)
        tokens[choice["index"]] += choice["token_ids"]
    for i, choice in enumerate(whole):
        assert first[i]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert first[i]["prompt_logprobs"] == choice["prompt_logprobs"] is not None
        assert tokens[i] == choice["token_ids"]


def test_a_prompt_that_keeps_its_beginning():
    engine = FakeEngine("x")
    post(client(engine), PATH, prompt=[5, 6, 7], truncate_prompt_tokens=2, truncation_side="right")
    assert engine.requests[0][0] == [5, 6]
