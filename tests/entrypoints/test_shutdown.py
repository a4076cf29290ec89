"""The end of a server: what is under way is finished, or told; the exit code says which."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from types import SimpleNamespace

import httpx
import pytest

from tests.helpers.fake_engine import USER, FakeEngine, settings, tokenizer
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.overlay.runtime import startup_check
from vllm.overlay.serving import engine_client, server
from vllm.overlay.serving.errors import StartError
from vllm.overlay.serving.service import Service
from vllm.utils import FlexibleArgumentParser


class Running:
    """A server on a real port over a fake engine."""

    def __init__(self, engine: FakeEngine, *arguments: str) -> None:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", "--host", "127.0.0.1", *arguments])
        sock = server.bind("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.engine = engine_client.Engine(engine)
        self.task = asyncio.ensure_future(
            server._listen(args, sock, self.engine, Service(engine, tokenizer(), settings()),
                           SimpleNamespace(max_model_len=4096), {}))

    async def request(self, attempts: int = 200, **body) -> httpx.Response:
        async with httpx.AsyncClient(timeout=20) as http:
            for _ in range(attempts):
                try:
                    return await http.post(f"http://127.0.0.1:{self.port}/v1/chat/completions",
                                           json={"model": "llm", "messages": USER, "thinking": False, **body})
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
        raise AssertionError("the server does not listen")

    async def whole_and_streamed(self, **body) -> tuple[asyncio.Future, asyncio.Future]:
        """Both are under way."""
        asked = [asyncio.ensure_future(self.request(stream=stream, **body)) for stream in (False, True)]
        while len(self.engine.client.requests) < 2:
            await asyncio.sleep(0.01)
        return tuple(asked)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_what_is_under_way_is_finished(number):
    engine = FakeEngine("word " * 20, delay=0.005)
    running = Running(engine)
    answer, streamed = await running.whole_and_streamed()
    os.kill(os.getpid(), number)
    assert (await answer).json()["choices"][0]["message"]["content"] == "word " * 20
    assert (await streamed).text.endswith("data: [DONE]\n\n")
    await asyncio.wait_for(running.task, 5)
    assert not engine.aborted
    with pytest.raises(AssertionError, match="does not listen"):
        await running.request(attempts=1)


class WithQueues(FakeEngine):
    """As stock's client: what goes wrong with the engine as a whole reaches requests through their queues."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.output_queues: dict = {}

    async def generate(self, prompt, params, request_id, **kwargs):
        queue = self.output_queues[request_id] = asyncio.Queue()
        source = super().generate(prompt, params, request_id, **kwargs)
        try:
            async for output in source:
                if not queue.empty():
                    raise queue.get_nowait()
                yield output
        finally:
            await source.aclose()
            del self.output_queues[request_id]


async def test_but_not_for_ever():
    """Who is not finished in time is told, whole or in a stream; a server that was told to end has ended well."""
    engine = WithQueues("word " * 500, delay=0.05)
    running = Running(engine, "--shutdown-timeout", "1")
    whole, streamed = await running.whole_and_streamed(max_tokens=3000)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running.task, 3)
    assert (await whole).status_code == 503
    *_, event, done = [line for line in (await streamed).text.split("\n\n") if line]
    for error in ((await whole).json()["error"], json.loads(event.removeprefix("data: "))["error"]):
        assert (error["type"], error["code"]) == ("server_error", "server_shutting_down")
        assert "within the 1 s" in error["message"]
    assert done == "data: [DONE]" and len(engine.aborted) == 2


async def test_nor_for_whom_nobody_can_tell():
    """An engine that hears nothing."""
    engine = FakeEngine(delay=60)
    running = Running(engine, "--shutdown-timeout", "0")
    request = asyncio.ensure_future(running.request())
    await asyncio.wait_for(engine.running.wait(), 10)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running.task, server._FAREWELL_S + 3)
    await asyncio.gather(request, return_exceptions=True)


async def test_a_second_signal():
    """Nobody waits any more, and everybody is told; the server has said before that this is so."""
    engine = WithQueues("word " * 500, delay=0.05)
    running = Running(engine, "--shutdown-timeout", "60")
    whole, streamed = await running.whole_and_streamed(max_tokens=3000)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.3)
    await asyncio.wait_for(running.task, server._FAREWELL_S)
    *_, event, done = [line for line in (await streamed).text.split("\n\n") if line]
    for error in ((await whole).json()["error"], json.loads(event.removeprefix("data: "))["error"]):
        assert (error["code"], error["message"]) == (
            "server_shutting_down", "The server ends at once, without finishing what is under way."), error
    assert done == "data: [DONE]" and len(engine.aborted) == 2


async def test_a_second_signal_for_whom_nobody_can_tell():
    engine = FakeEngine(delay=60)
    running = Running(engine, "--shutdown-timeout", "60")
    request = asyncio.ensure_future(running.request())
    await asyncio.wait_for(engine.running.wait(), 10)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.3)
    await asyncio.wait_for(running.task, server._FAREWELL_S + 3)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def test_signals_before_it_is_ready(monkeypatch):
    """The engine's end is waited for, however often the server is told to end."""
    ended = []

    async def starting(*_):
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.5)
            ended.append(True)

    monkeypatch.setattr(startup_check, "check_deployed", lambda: "")
    monkeypatch.setattr(server, "_serve", starting)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", "--host", "127.0.0.1", "--port", "0"])
    task = asyncio.ensure_future(server.run_server(args))
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), number)
    await asyncio.wait_for(task, 5)
    assert ended == [True]


async def test_the_engine_is_gone():
    """Requests fail, the server ends by itself, and says why."""
    engine = FakeEngine("word " * 500, delay=0.05)
    running = Running(engine)
    request = asyncio.ensure_future(running.request())
    await asyncio.wait_for(engine.running.wait(), 10)
    engine.error = RuntimeError("the engine is gone")
    running.engine.failed.set_result("the machine ran out of memory")
    response = await asyncio.wait_for(request, 10)
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    with pytest.raises(StartError, match="the engine is gone: the machine ran out of memory"):
        await asyncio.wait_for(running.task, 10)


async def test_the_engine_is_gone_and_nobody_is_told():
    """A request that hears nothing does not hold the server up."""
    engine = FakeEngine(delay=60)
    running = Running(engine)
    request = asyncio.ensure_future(running.request())
    await asyncio.wait_for(engine.running.wait(), 10)
    running.engine.failed.set_result("it was killed")
    with pytest.raises(StartError, match="it was killed"):
        await asyncio.wait_for(running.task, server._FAREWELL_S + 3)
    await asyncio.gather(request, return_exceptions=True)


async def test_a_failed_start_is_one_line_and_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(startup_check, "check_deployed", lambda: "")
    sock = server.bind("127.0.0.1", 0)
    sock.listen()
    port = sock.getsockname()[1]
    options = ["--model", "m", "--host", "127.0.0.1", "--port", str(port)]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    with sock, pytest.raises(SystemExit) as caught:
        await server.run_server(args)
    assert caught.value.code == 1
    assert capsys.readouterr().err == (f"vllm: error: cannot listen on 127.0.0.1 port {port}: Address already in use; "
                                       "choose another with --port\n")
