"""A client that leaves: its request is closed in the engine at once, at any stage, streamed or not."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.helpers.fake_engine import USER, FakeEngine, application
from tests.helpers.http_connection import Connection
from vllm.overlay.serving import backlog

# Longest time from the client's leaving to the engine's hearing of it, in pauses of 10 ms of the event loop: a busy
# machine makes both longer.
AT_ONCE = 20
# Seconds after which nothing is waited for any more.
HANGS = 60


async def pauses(connection: Connection) -> int:
    """How long it takes the server to notice that the client leaves."""
    leaving, count = asyncio.ensure_future(connection.leave()), 0
    while not leaving.done():
        await asyncio.sleep(0.01)
        count += 1
    await leaving
    return count


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["waiting", "prefill", "decoding"])
async def test_leaving(path, stream, stage):
    """waiting: the engine has not answered at all; prefill: outputs without tokens; decoding: in the middle of the
    answer."""
    engine = FakeEngine("word " * 500, delay=60 if stage == "waiting" else 0.02,
                        prefill=1000 if stage == "prefill" else 0)
    body = {"model": "llm", "messages": USER, "prompt": "hi", "stream": stream, "max_tokens": 400, "n": 2}
    connection = Connection(application(engine), path, body)
    await asyncio.wait_for(engine.running.wait(), HANGS)
    if stage == "decoding":
        while engine.generated < 5:
            await asyncio.sleep(0.01)
    generated = engine.generated
    assert await pauses(connection) < AT_ONCE, "the server went on"
    assert engine.aborted == [engine.requests[0][2]], "the engine was not told"
    await asyncio.sleep(0.1)
    assert engine.generated <= generated + 2, "tokens were generated for nobody"


async def test_a_client_that_stays_gets_its_answer_and_nothing_is_aborted():
    engine = FakeEngine("Hello there, you.", delay=0.01)
    connection = Connection(application(engine), "/v1/chat/completions",
                            {"model": "llm", "messages": USER, "stream": True, "thinking": False})
    await asyncio.wait_for(connection.task, HANGS)
    text = b"".join(message.get("body", b"") for message in connection.messages).decode()
    assert text.endswith("data: [DONE]\n\n") and not engine.aborted


async def test_each_event_is_sent_by_itself_when_it_happens():
    """Not gathered: the first token is on its way before the second one exists."""
    engine = FakeEngine("1 2 3 4 5 6", delay=0.05)
    connection = Connection(application(engine), "/v1/chat/completions",
                            {"model": "llm", "messages": USER, "stream": True, "thinking": False})
    await asyncio.wait_for(connection.received.wait(), HANGS)
    assert engine.generated < 4, "the answer was held back"
    await asyncio.wait_for(connection.task, HANGS)
    bodies = [message["body"] for message in connection.messages if message.get("body")]
    assert all(body.count(b"data: ") == 1 for body in bodies), bodies


async def test_a_stop_string_ends_the_work():
    """The engine knows no stop strings: the request is closed when one has come, and one choice does not end the
    others."""
    engine = FakeEngine("a b STOP " + "c " * 200, delay=0.001)
    connection = Connection(application(engine), "/v1/completions",
                            {"model": "llm", "prompt": "x", "stop": "STOP", "max_tokens": 300})
    await asyncio.wait_for(connection.task, HANGS)
    assert json.loads(connection.messages[-1]["body"])["choices"][0]["text"] == "a b "
    assert engine.aborted and engine.generated < 20, engine.generated


async def test_other_requests_go_on():
    engine = FakeEngine("word " * 50, delay=0.002)
    app = application(engine)
    body = {"model": "llm", "messages": USER, "thinking": False}
    staying = [Connection(app, "/v1/chat/completions", body) for _ in range(5)]
    leaving = [Connection(app, "/v1/chat/completions", {**body, "stream": True}) for _ in range(5)]
    await asyncio.wait_for(leaving[-1].received.wait(), HANGS)
    for connection in leaving:
        await connection.leave()
    for connection in staying:
        await asyncio.wait_for(connection.task, HANGS)
        assert json.loads(connection.messages[-1]["body"])["choices"][0]["message"]["content"] == "word " * 50
    assert len(engine.aborted) == 5


async def test_the_event_loop_stays_free_while_a_long_prompt_is_rendered():
    """A prompt of half a million characters takes a second to tokenise; the server goes on answering meanwhile."""
    engine = FakeEngine("x")
    app = application(engine, max_model_len=2_000_000)
    long = Connection(app, "/v1/chat/completions",
                      {"model": "llm", "messages": [{"role": "user", "content": "wörd 北京 " * 60_000}]})
    # Not the clock's time, in which a busy machine may do other things.
    longest, last = 0.0, time.thread_time()
    while not long.task.done():
        await asyncio.sleep(0.005)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    assert json.loads(long.messages[-1]["body"])["usage"]["prompt_tokens"] > 300_000
    assert longest < 0.5, f"the event loop computed for {longest:.2f} s at a time"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_leaving_in_the_middle_of_the_body(path, caplog):
    """Half a body and then nothing: no error of the server's, so none is logged or raised."""
    received = iter([{"type": "http.request", "body": b'{"model": "l', "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict:
        return next(received)

    connection = Connection(application(FakeEngine("word")), path, {}, receive)
    await asyncio.wait_for(connection.task, HANGS)
    assert [message["status"] for message in connection.messages if "status" in message] == [499], connection.messages
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


def texts(connection):
    chunks = [json.loads(event[6:]) for event in connection.body.decode().split("\n\n") if event.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ()))


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_client_that_does_not_read(leaves):
    """What it leaves unread is joined into few events: nothing is lost, and the engine goes on until it leaves."""
    engine = FakeEngine("word " * 100, delay=0.001)
    connection = Connection(application(engine), "/v1/chat/completions",
                            {"model": "llm", "messages": USER, "stream": True, "thinking": False, "max_tokens": 3000})
    await asyncio.wait_for(connection.received.wait(), HANGS)
    connection.reads.clear()
    read, generated = len(connection.messages), engine.generated
    while engine.generated < generated + 100:
        await asyncio.sleep(0.01)
    assert len(connection.messages) == read
    if leaves:
        assert await pauses(connection) < AT_ONCE and len(engine.aborted) == 1
        return
    connection.reads.set()
    await asyncio.wait_for(connection.task, HANGS)
    assert texts(connection) == "word " * 100 and not engine.aborted
    assert len(connection.messages) < engine.generated - 90, "the events were not joined"


async def test_a_client_that_does_not_read_for_too_long(monkeypatch):
    """Its request is ended in the engine without waiting for it; it is told when it reads again."""
    monkeypatch.setattr(backlog.Backlog.__init__, "__defaults__", (100, ))
    engine = FakeEngine("word " * 500, delay=0.001)
    connection = Connection(application(engine), "/v1/chat/completions",
                            {"model": "llm", "messages": USER, "stream": True, "thinking": False, "max_tokens": 3000})
    await asyncio.wait_for(connection.received.wait(), HANGS)
    connection.reads.clear()
    deadline = time.monotonic() + HANGS
    while not engine.aborted:
        assert time.monotonic() < deadline, f"{engine.generated} tokens for nobody"
        await asyncio.sleep(0.01)
    generated = engine.generated
    assert generated < 200
    connection.reads.set()
    await asyncio.wait_for(connection.task, HANGS)
    *_, error, done = [event for event in connection.body.decode().split("\n\n") if event]
    assert json.loads(error[6:])["error"]["code"] == "client_too_slow" and done == "data: [DONE]"
    assert texts(connection) and engine.generated == generated
