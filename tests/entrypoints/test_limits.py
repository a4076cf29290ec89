"""What a server takes on, and what it says of it in its log."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest

from tests.helpers.fake_engine import USER, FakeEngine, application, client, ids, post, stream

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def asynchronous(engine: FakeEngine, *arguments: str, **changes) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(application(engine, arguments, **changes)),
                             base_url="http://testserver")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, "/v1/responses", "/tokenize", f"{CHAT}/render"])
def test_a_body_that_is_too_large(path, chunked):
    """413, in the API's own form, whether or not the client says beforehand how long it is."""
    engine = FakeEngine()
    http = client(engine, ["--max-request-bytes", "1000"])
    body = json.dumps({"model": "llm", "messages": USER, "prompt": "hi", "padding": "x" * 2000}).encode()
    response = http.post(path, content=iter([body[:1500], body[1500:]]) if chunked else body)
    assert response.status_code == 413 and "1000 bytes" in response.json()["error"]["message"], response.text
    assert response.json()["error"]["type"] == ("request_too_large" if path == MESSAGES else "invalid_request_error")
    assert not engine.requests


def test_a_body_of_more_values_than_any_prompt_has():
    response = client(FakeEngine()).post(TEXT, content=b'{"model": "llm", "prompt": [' + b"[]," * 4_000_001 + b"[]]}")
    assert response.status_code == 413 and "values" in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_queue_is_limited(streamed):
    """One runs, one waits, the third is told when to come again; a place that is free is given."""
    engine = FakeEngine("a b c d e", delay=0.1)
    async with asynchronous(engine, "--max-num-seqs", "1", "--max-queued-requests", "1") as http:
        body = {"model": "llm", "messages": USER, "stream": streamed, "thinking": False}
        under_way = [asyncio.ensure_future(http.post(CHAT, json=body)) for _ in range(2)]
        await asyncio.wait_for(engine.running.wait(), 10)
        refused = await http.post(CHAT, json=body)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60, refused.text
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = await http.post(MESSAGES, json={"model": "llm", "messages": USER, "max_tokens": 5})
        assert other.status_code == 429 and other.json()["error"]["type"] == "rate_limit_error", other.text
        # What needs no engine is answered all the same.
        assert (await http.get("/v1/models")).status_code == 200
        assert [response.status_code for response in await asyncio.gather(*under_way)] == [200, 200]
        assert (await http.post(CHAT, json=body)).status_code == 200


async def test_a_refused_or_abandoned_request_gives_its_place_back():
    engine = FakeEngine("a b c d e", delay=0.05)
    async with asynchronous(engine, "--max-num-seqs", "1", "--max-queued-requests", "0") as http:
        body = {"model": "llm", "messages": USER, "thinking": False}
        for _ in range(3):
            assert (await http.post(CHAT, json={**body, "temperature": "hot"})).status_code == 400
            for streamed in (False, True):
                asking = asyncio.ensure_future(http.post(CHAT, json={**body, "stream": streamed}))
                await asyncio.wait_for(engine.running.wait(), 10)
                engine.running.clear()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        assert (await http.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, "/v1/responses"])
def test_a_request_that_takes_too_long(path):
    """It is ended in the engine, and the client hears why: by the status, or as the stream's last event."""
    asked = {TEXT: {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}.get(path, {"messages": USER})
    body = {"model": "llm", "max_tokens": 50, **asked}
    engine = FakeEngine("a b c d e f", delay=0.1)
    http = client(engine, ["--request-timeout", "0.25"])
    response = http.post(path, json=body)
    assert response.status_code == 504 and "0.25 s" in response.json()["error"]["message"], response.text
    assert response.json()["error"].get("code", "timeout") == "timeout"
    response = http.post(path, json={**body, "stream": True})
    assert response.status_code == 200 and "0.25 s" in response.text, response.text
    assert len(engine.aborted) == 2
    assert client(engine, ["--request-timeout", "60"]).post(path, json=body).status_code == 200


def lines(caplog) -> list[dict]:
    """The log's lines about requests."""
    found = [record.getMessage() for record in caplog.records if record.name.endswith("request_log")]
    caplog.clear()
    return [json.loads(line.removeprefix("request ")) for line in found]


SECRET = "my secret question"


def test_one_line_per_request(caplog):
    caplog.set_level(logging.INFO)

    answer = "Hm.\n</think>\n\nYes."
    engine = FakeEngine(answer, delay=0.01, cached=7)
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 100}
    whole = post(client(engine), **body)
    (line,) = lines(caplog)
    times = {name: line.pop(name) for name in ("ttft_s", "total_s", "tps", "decode_tps")}
    assert 0 < times["ttft_s"] <= times["total_s"] and times["tps"] > 0 and times["decode_tps"] > 0, times
    assert line == {"id": whole["id"], "stream": False, "prompt_tokens": len(engine.requests[0][0]), "cached_tokens": 7,
                    "max_tokens": 100, "completion_tokens": len(ids(answer)) + 1,
                    "reasoning_tokens": len(ids("Hm.\n</think>")), "finish": "stop"}
    stream(client(engine), n=2, **body)
    (line,) = lines(caplog)
    assert (line["stream"], line["n"], line["finish"]) == (True, 2, "stop")


def test_the_line_of_what_failed_or_was_refused(caplog):
    caplog.set_level(logging.INFO)
    client(FakeEngine("abc", error=RuntimeError("boom"), error_after=1)).post(
        CHAT, json={"model": "llm", "messages": USER})
    of_answer, refusal = lines(caplog)
    assert "boom" in of_answer["error"] and "finish" not in of_answer
    assert (refusal["status"], refusal["id"]) == (500, of_answer["id"])
    client(FakeEngine()).post(CHAT, json={"model": "llm", "messages": [{"role": "user", "content": SECRET}],
                                          "temperature": 3})
    assert lines(caplog) == [{"method": "POST", "path": CHAT, "status": 400, "code": "invalid_value",
                              "param": "temperature", "error": "temperature must be between 0 and 2, got 3."}]


def test_prompts_are_logged_only_where_that_was_asked_for(caplog):
    caplog.set_level(logging.DEBUG)
    body = {"messages": [{"role": "user", "content": SECRET}]}
    for path, more in ((CHAT, body), (TEXT, {"prompt": SECRET})):
        post(client(FakeEngine()), path, **more)
    assert SECRET not in caplog.text
    lines(caplog)
    post(client(FakeEngine(), log_prompts=10**6), **body)
    (line,) = lines(caplog)
    assert line["prompt"] == [f"<|im_start|>user\n{SECRET}<|im_end|>\n<|im_start|>assistant\n<think>\n"]
    post(client(FakeEngine(), log_prompts=5), TEXT, prompt=SECRET)
    assert lines(caplog)[0]["prompt"] == [SECRET[:5]]
    post(client(FakeEngine(), log_requests=False, log_prompts=5), TEXT, prompt=SECRET)
    assert not lines(caplog)
