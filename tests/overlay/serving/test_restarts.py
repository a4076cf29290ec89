"""An engine that is lost and started again: what requests, /health and the server see of it. Engines are made up."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest

from tests.helpers.fake_engine import USER, FakeEngine, application
from tests.helpers.http_connection import Connection
from vllm.overlay.serving import engine_client, restarts
from vllm.overlay.serving.errors import RequestError, StartError
from vllm.overlay.serving.restarts import EngineLost, RestartPolicy, Restarts


class World:
    """Engines that start when told to. engines: those that have come up. fails: why the next ones do not; broken: what
    they raise to requests."""

    def __init__(self) -> None:
        self.engines: list[engine_client.Engine] = []
        self.running = 0
        self.attempts = 0
        self.fails: str | None = None
        self.broken: Exception | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()

    @asynccontextmanager
    async def start(self):
        self.attempts += 1
        await self.may_start.wait()
        if self.fails is not None:
            raise StartError(self.fails)
        self.running += 1
        assert self.running == 1, "the last one is still there"
        engine = engine_client.Engine(FakeEngine("word " * 200, delay=0.01, error=self.broken))
        self.engines.append(engine)
        try:
            yield engine
        finally:
            self.running -= 1

    def lose(self, why: str = "it was killed") -> None:
        """The newest engine is lost, as `engine_client._fail` does it."""
        self.engines[-1].client.error = EngineLost(why)
        self.engines[-1].failed.set_result(why)

    async def lose_and_wait(self) -> None:
        """The newest engine is lost, and the next one is being started, which it is until ``may_start`` is set."""
        self.may_start.clear()
        self.lose()
        await until(lambda: self.attempts == 2)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Without the pauses before a second and a third try."""
    async def sleep(seconds, sleep=asyncio.sleep):
        await sleep(0 if seconds in (1, 3, 7) else seconds)

    monkeypatch.setattr(restarts.asyncio, "sleep", sleep)


async def until(what, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


def restarted() -> float:
    return restarts._counter()._value.get()


async def test_requests_health_and_the_next_engine():
    world = World()
    before = restarted()
    async with Restarts(world.start, RestartPolicy()) as client:
        client.settle()
        app = application(client)

        def ask(**more):
            return Connection(app, "/v1/chat/completions", {"model": "llm", "messages": USER, "max_tokens": 20,
                                                            "thinking": False, **more})

        def health():
            return Connection(app, "/health", method="GET")

        whole, streamed = ask(max_tokens=400), ask(max_tokens=400, stream=True)
        await streamed.received.wait()
        assert await health().status() == 200
        world.may_start.clear()
        world.lose("rank 1 (process 7) was killed by signal 9")
        await asyncio.wait_for(asyncio.gather(whole.task, streamed.task), 2)
        error = json.loads(whole.body)["error"]
        assert (whole.status_now, error["type"], error["code"]) == (500, "server_error", "engine_lost")
        assert "request chatcmpl-" in error["message"] and "rank 1 (process 7) was killed" in error["message"]
        *_, last, done = [event for event in streamed.body.decode().split("\n\n") if event]
        told = json.loads(last.removeprefix("data: "))["error"]
        assert told["code"] == "engine_lost" and done == "data: [DONE]", last
        await until(lambda: world.attempts == 2)

        answer = health()
        assert await answer.status() == 503 and b"being started again" in answer.body, answer.body
        bad, good = ask(max_tokens=-1), ask(stream=True)
        assert await bad.status() == 400, "what is wrong with a request is said at once"
        await asyncio.sleep(0.3)
        assert not good.messages, "it waits, and nothing has been promised"
        world.may_start.set()
        assert await good.status() == 200 and b"engine_lost" not in good.body and good.body.endswith(b"[DONE]\n\n")
        assert await health().status() == 200
        assert world.engines[1].client.requests[0][0] == [0], "the first token was produced before anybody was let in"
        assert restarted() == before + 1 and not client.failed.done()
    assert world.running == 0 and not client.failed.done()


class Client(FakeEngine):
    """Forgets when told to, or raises what it is told to, as that of an engine that is lost meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def reset_prefix_cache(self) -> None:
        await self.may_answer.wait()
        await super().reset_prefix_cache()


def reset(client):
    app = application(client, ["--enable-reset-prefix-cache"])
    return Connection(app, "/reset_prefix_cache")


@pytest.mark.parametrize("noticed", [True, False], ids=["while it is started again", "while it is lost"])
async def test_a_reset(noticed):
    """It waits for the next engine, which knows nothing, as a request does: whoever asks has what he asked for."""
    world = World()
    async with Restarts(world.start, RestartPolicy()) as client:
        client.settle()
        lost = world.engines[0].client = Client()
        client._client = lost
        asked = None if noticed else reset(client)
        await asyncio.sleep(0.05)
        world.may_start.clear()
        lost.healthy = EngineLost("it was killed")
        world.lose()
        lost.may_answer.set()
        await until(lambda: world.attempts == 2)
        asked = asked or reset(client)
        await asyncio.sleep(0.3)
        assert not asked.messages, "it is answered before there is an engine"
        world.may_start.set()
        assert await asked.status(5) == 200
        assert (lost.resets, world.engines[1].client.resets) == (0, 1)


async def test_a_reset_that_nobody_can_wait_for():
    """A clear refusal when it takes too long; and a client that leaves is waited for by nobody."""
    world = World()
    async with Restarts(world.start, RestartPolicy(wait_s=0.3)) as client:
        client.settle()
        await world.lose_and_wait()
        asked = reset(client)
        assert await asked.status(5) == 503 and "retry-after" in asked.headers
        error = json.loads(asked.body)["error"]
        assert error["code"] == "engine_restarting" and "it was killed" in error["message"], error
        client._policy = RestartPolicy()
        waiting = reset(client)
        await asyncio.sleep(0.2)
        await waiting.leave()
        world.may_start.set()
        await client.available()
        assert world.engines[1].client.resets == 0


async def test_a_reset_that_an_engine_refuses():
    """What is wrong while it is up is said, not tried again."""
    world = World()
    async with Restarts(world.start, RestartPolicy()) as client:
        client.settle()
        world.engines[0].client.healthy = KeyError("a block table")
        asked = reset(client)
        assert await asked.status(5) == 500
        assert "The server failed on request req-" in json.loads(asked.body)["error"]["message"], asked.body


async def test_whoever_waits_is_told_in_time():
    world = World()
    async with Restarts(world.start, RestartPolicy(wait_s=0.3)) as client:
        client.settle()
        client._took = 12.0
        await world.lose_and_wait()
        answer = Connection(application(client), "/v1/chat/completions", {"model": "llm", "messages": USER})
        assert await answer.status() == 503
        assert json.loads(answer.body)["error"]["code"] == "engine_restarting" and b"it was killed" in answer.body
        assert answer.headers["retry-after"] == "12", answer.headers
        client._took = 500.0
        with pytest.raises(RequestError) as caught:
            await client.available()
        assert caught.value.headers["Retry-After"] == "60", "more is not heeded by OpenAI's clients"
        with pytest.raises(EngineLost, match="it was killed"):
            await client.feed()


async def test_a_client_that_leaves_while_it_waits():
    world = World()
    async with Restarts(world.start, RestartPolicy()) as client:
        client.settle()
        await world.lose_and_wait()
        waiting = Connection(application(client), "/v1/chat/completions", {"model": "llm", "messages": USER})
        await asyncio.sleep(0.2)
        await waiting.leave()
        world.may_start.set()
        await client.available()
        assert len(world.engines[1].client.requests) == 1, "only the first token"


@pytest.mark.parametrize("most", [0, 2])
async def test_not_for_ever(most):
    world = World()
    async with Restarts(world.start, RestartPolicy(most=most, window_s=100, wait_s=5)) as client:
        client.settle()
        for i in range(most):
            world.lose()
            await until(lambda count=i + 2: len(world.engines) == count and client._is_up)
        world.lose("again")
        why = await asyncio.wait_for(client.failed, 5)
        assert why == ("again; it has been started again 2 times within 100 s" if most else "again")
        with pytest.raises(RequestError, match="this server ends") as caught:
            await client.available()
        assert caught.value.status == 503 and not caught.value.headers
        assert world.running == 0


async def test_long_ago_does_not_count(monkeypatch):
    world = World()
    async with Restarts(world.start, RestartPolicy(most=1, window_s=0.2)) as client:
        client.settle()
        for count in (2, 3):
            world.lose()
            await until(lambda count=count: len(world.engines) == count)
            await asyncio.sleep(0.3)
        assert not client.failed.done()


async def test_an_engine_that_does_not_come_up_again():
    """Each attempt counts; the reason is the last one."""
    world = World()
    async with Restarts(world.start, RestartPolicy(most=3)) as client:
        client.settle()
        world.fails = "no room for the weights"
        world.lose()
        assert (await asyncio.wait_for(client.failed, 5)).startswith("no room for the weights; it has been started")
        assert world.attempts == 4


async def test_an_engine_that_comes_up_and_produces_nothing():
    """It is not shown to anybody."""
    world = World()
    async with Restarts(world.start, RestartPolicy(most=1)) as client:
        client.settle()

        world.broken = KeyError("a block table")
        world.lose()
        why = await asyncio.wait_for(client.failed, 5)
        assert why.startswith("the first token could not be produced: KeyError: 'a block table'"), why


async def test_a_start_that_fails():
    world = World()
    world.fails = "no such model"
    with pytest.raises(StartError, match="^no such model$"):
        async with Restarts(world.start, RestartPolicy()):
            pytest.fail("it is not up")
    assert world.attempts == 1


async def test_before_the_server_is_ready_a_loss_is_a_failed_start():
    world = World()
    async with Restarts(world.start, RestartPolicy()) as client:
        world.lose("out of memory")
        assert await asyncio.wait_for(client.failed, 5) == "out of memory"
    assert world.attempts == 1


async def test_the_server_ends_while_the_engine_is_started_again():
    world = World()
    async with Restarts(world.start, RestartPolicy()) as client:
        client.settle()
        await world.lose_and_wait()
    assert world.running == 0 and client._keeping.done()


async def test_whoever_waits_when_the_server_must_end():
    world = World()
    async with Restarts(world.start, RestartPolicy()) as client:
        client.settle()
        await world.lose_and_wait()
        waiting = Connection(application(client), "/v1/chat/completions", {"model": "llm", "messages": USER})
        await asyncio.sleep(0.2)
        engine_client.dismiss(client, RequestError("no time", status=503, code="server_shutting_down"))
        assert await waiting.status(1) == 503 and b"no time" in waiting.body


async def test_an_engine_that_is_given_up_and_not_yet_ended():
    """Between the client's finding and the end of the process nobody is given to it."""
    world = World()
    async with Restarts(world.start, RestartPolicy(wait_s=0.1)) as client:
        client.settle()
        world.engines[0].client.errored = True
        with pytest.raises(EngineLost):
            await client.feed()
        with pytest.raises(EngineLost):
            await client.check_health()
        with pytest.raises(RequestError):
            await client.available()


async def test_the_end_of_the_server_is_no_loss_of_the_engine():
    """An engine that counts as lost is killed; this one is to be told to end."""
    world = World()
    async with Restarts(world.start, RestartPolicy()):
        engine, = world.engines
    assert world.running == 0 and not engine.failed.done(), engine.failed


async def test_told_to_end_before_the_first_engine_is_up():
    """Nothing of the engine is left when the server goes on with its end."""
    ended = []

    @asynccontextmanager
    async def start():
        try:
            await asyncio.sleep(30)
            yield
        finally:
            await asyncio.sleep(0.1)
            ended.append(True)

    task = asyncio.ensure_future(Restarts(start, RestartPolicy()).__aenter__())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
