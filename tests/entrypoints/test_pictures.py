"""Requests with pictures, through the HTTP application: what the engine is given, what the client is told, what is
logged."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time

import httpx
import pytest
from PIL import Image

from tests.helpers.fake_engine import FakeEngine, application, client, ids, post, stream, tokenizer
from tests.helpers.picture_files import PAD, file, large_picture, part, picture, shown, url
from vllm.overlay.serving.pictures import reader

CHAT = "/v1/chat/completions"
THREE = [picture(64, 64), picture(320, 200), picture(100, 900)]
TOKENS = [8 * 8, 11 * 7, 3 * 28]


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def served(engine=None, **limits):
    engine = engine or FakeEngine("I see.")
    return engine, client(engine, pictures=shown(**limits))


MIXED = user(text("first"), part(THREE[0]), text("second"), part(THREE[1]), part(THREE[2]), text("compare"))


def test_three_pictures_of_different_shapes_between_text():
    engine, http = served()
    body = post(http, messages=MIXED, thinking=False)
    assert body["choices"][0]["message"]["content"] == "I see."
    tokens, pictures = engine.requests[0][0], engine.pictures[0]
    assert [one.num_tokens(2) for one in pictures] == TOKENS, [one.grid for one in pictures]
    assert body["usage"]["prompt_tokens"] == len(tokens) and tokens.count(PAD) == sum(TOKENS)
    marked = "<|vision_start|>{}<|vision_end|>"
    pads = [marked.format("<|image_pad|>" * count) for count in TOKENS]
    assert tokens == ids(f"<|im_start|>user\nfirst{pads[0]}second{pads[1]}{pads[2]}compare<|im_end|>\n"
                         "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    for one in pictures:
        assert tokens[one.offset:one.offset + one.num_tokens(2)] == [PAD] * one.num_tokens(2)
    assert [one.offset for one in pictures] == sorted({one.offset for one in pictures})


def test_streamed_and_sampled_several_times():
    engine, http = served(FakeEngine("One.", "Two."))
    chunks = stream(http, messages=MIXED, n=2, thinking=False, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["prompt_tokens"] == len(engine.requests[0][0])
    assert len(engine.requests) == 1 and len(engine.pictures[0]) == 3, "the samples share the pictures"


def test_in_a_tool_result():
    engine, http = served()
    post(http, messages=[{"role": "user", "content": "look"},
                         {"role": "assistant", "content": None, "tool_calls": [{
                             "id": "c", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}]},
                         {"role": "tool", "tool_call_id": "c", "content": [text("here:"), part(THREE[0])]}])
    pad = "<|vision_start|>" + "<|image_pad|>" * 64 + "<|vision_end|>"
    assert f"<tool_response>\nhere:{pad}\n</tool_response>" in tokenizer().decode(engine.requests[0][0])


def test_other_forms_give_the_same_prompt_and_picture():
    engine, http = served()
    data = url(THREE[0])
    raw = data.partition(",")[2]
    for one in ({"type": "image_url", "image_url": {"url": data, "detail": "high"}},
                {"type": "input_image", "image_url": data}, {"type": "image", "image": data},
                {"type": "image", "source": {"type": "base64", "data": raw}},
                {"type": "image_url", "image_url": data.rstrip("=").replace("image/png", "")}):
        post(http, messages=user(text("x"), one))
    assert len({tuple(tokens) for tokens, *_ in engine.requests}) == 1
    assert len({pictures[0].digest for pictures in engine.pictures}) == 1


def refused(messages, status=400, limits=None, **fields):
    engine, http = served(**(limits or {}))
    response = http.post(CHAT, json={"model": "llm", "messages": messages, **fields})
    assert response.status_code == status, response.text
    assert not engine.requests, "the engine was asked"
    return response.json()["error"]


FIELD = "messages[0].content[1].image_url"


@pytest.mark.parametrize(("one", "param", "words"), [
    (part("https://example.com/a.png"), FIELD, "--allow-remote-images"),
    (part("http://127.0.0.1/a.png"), FIELD, "--allow-remote-images"), (part("file:///etc/passwd"), FIELD, "data URL"),
    (part("data:image/png;base64,!!!!"), FIELD, "base64"), (part("data:image/png;base64,AAAA"), FIELD, "PNG, JPEG"),
    (part(b""), FIELD, "no data"), (part(file(THREE[0])[:-300]), FIELD, "damaged"),
    (part(Image.new("1", (9000, 9000))), FIELD, "9000x9000 = 81000000 pixels; at most 67108864"),
    (part(Image.new("L", (2010, 10))), FIELD, "2010x10 pixels; one side may be at most 200 times the other"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "messages[0].content[1]",
     "no video_url part"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "messages[0].content[1]", "no input_audio part"),
    ({"type": "file", "file": {}}, "messages[0].content[1]", "no file part"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_refused_by_name(one, param, words):
    error = refused(user(text("x"), one))
    assert error["param"] == param and words in error["message"], error


def test_what_else_is_refused():
    error = refused([{"role": "system", "content": [part(THREE[0])]}, *user(text("x"))])
    assert error["param"] == "messages[0].content[0]" and "system message" in error["message"]
    error = refused(MIXED, truncate_prompt_tokens=50)
    assert error["param"] == "truncate_prompt_tokens", error
    error = refused(MIXED, add_generation_prompt=False, continue_final_message=True)
    assert error["param"] == "continue_final_message", error
    error = refused(MIXED, limits={"per_request": 2})
    assert error["param"] == "messages[0].content[4].image_url" and "3 pictures; at most 2" in error["message"], error
    error = refused(MIXED, limits={"max_tokens": 224})
    assert f"{sum(TOKENS)} tokens; at most 224" in error["message"], error
    error = refused(user(part(large_picture(2048))))
    assert error["code"] == "context_length_exceeded" and "4096" in error["message"], error
    engine = FakeEngine()
    response = client(engine).post(CHAT, json={"model": "llm", "messages": MIXED})
    error = response.json()["error"]
    assert response.status_code == 400 and "this model takes no pictures" in error["message"] and not engine.requests
    assert error["param"] == "messages[0].content[1].image_url", error


def test_tokens_of_pictures_without_pictures():
    engine, http = served()
    response = http.post("/v1/completions", json={"model": "llm", "prompt": [1, 2, PAD, 3]})
    error = response.json()["error"]
    assert response.status_code == 400 and f"token {PAD}" in error["message"] and error["param"] == "prompt"
    assert not engine.requests
    post(http, "/v1/completions", prompt="what is <|image_pad|>?")
    post(http, messages=user(text("what is <|vision_start|><|image_pad|><|vision_end|>?")))
    assert all(PAD not in tokens for tokens, *_ in engine.requests) and engine.pictures == [[], []]


def test_tokenize():
    engine, http = served()
    counted = http.post("/tokenize", json={"model": "llm", "messages": MIXED, "thinking": False}).json()
    post(http, messages=MIXED, thinking=False)
    assert counted["tokens"] == engine.requests[0][0] and counted["count"] == len(counted["tokens"])
    response = http.post("/tokenize", json={"model": "llm", "messages": user(part(b"x"))})
    assert response.status_code == 400, response.text


def test_no_picture_in_the_logs(caplog):
    """Neither bytes nor addresses, whatever goes wrong, at the most talkative level."""
    secret = base64.b64encode(b"\x01secret bytes of a picture\x02" * 50).decode()
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, logger="vllm"):
            _, http = served()
            answers = [http.post(CHAT, json={"model": "llm", "messages": user(one), **fields}).text
                       for one in (part(f"data:image/png;base64,{secret}"), part(f"data:image/png;base64,{secret}!"),
                                   part(f"https://example.com/{secret}"),
                                   {"type": "image", "source": {"data": secret}}, part(secret),
                                   {"type": "video", "video": secret}, part(file(THREE[0]) + secret.encode()))
                       for fields in ({}, {"unknown": 1}, {"truncate_prompt_tokens": 1})]
    finally:
        logger.removeHandler(caplog.handler)
    assert "400" in caplog.text, "nothing was logged at all"
    for shown_text in (caplog.text, *answers):
        assert secret[:12] not in shown_text and secret[-40:] not in shown_text and "secret" not in shown_text


async def test_a_client_that_leaves_while_its_pictures_are_read(monkeypatch):
    begun = []

    def slow(*arguments):
        begun.append(arguments)
        time.sleep(0.3)

    monkeypatch.setattr(reader, "_make", slow)
    engine = FakeEngine("x")
    app = application(engine, pictures=shown())
    body = json.dumps({"model": "llm", "messages": user(*[part(THREE[0])] * 20)}).encode()
    sent = []
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if received:
            return received.pop()
        while not begun:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
             "headers": [], "http_version": "1.1", "asgi": {"version": "3.0"}, "scheme": "http", "server": ("t", 80),
             "client": ("t", 1), "root_path": ""}
    start = time.monotonic()
    await app(scope, receive, send)
    assert time.monotonic() - start < 0.25, "it waited for the pictures"
    await asyncio.sleep(0.8)
    assert len(begun) <= reader._THREADS and not engine.requests, (len(begun), engine.requests)
    assert not sent or sent[0]["status"] == 499


async def test_a_server_that_decodes_answers_others():
    engine = FakeEngine("x")
    transport = httpx.ASGITransport(app=application(engine, pictures=shown(max_tokens=10**6)))
    large = part(file(large_picture(2500), compress_level=1))
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        busy = asyncio.ensure_future(http.post(CHAT, json={"model": "llm", "messages": user(large, large, large)}))
        await asyncio.sleep(0.2)
        start = time.monotonic()
        other = await http.post(CHAT, json={"model": "llm", "messages": user(text("x"))})
        took = time.monotonic() - start
        print(f"answered in {took:.2f} s beside a request with three large pictures")
        assert other.status_code == 200 and took < 2
        # It is refused for its length, by its headers alone.
        assert (await busy).status_code == 400
