"""The client's side of the engine's sockets, with an engine that does what a test says."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio

from vllm.engine.multiprocessing import IPC_INPUT_EXT, IPC_OUTPUT_EXT, MQEngineDeadError, RPCAbortRequest, RPCError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.overlay.engine.sent_output import written
from vllm.overlay.serving.patient_client import PatientClient
from vllm.sampling_params import SamplingParams

CONFIG = SimpleNamespace(model_config=None, decoding_config=None, scheduler_config=None, parallel_config=None,
                         lora_config=None)
PARAMS = SamplingParams(max_tokens=5)


def output(name: str, *tokens: int, finished: bool = False) -> RequestOutput:
    return RequestOutput(name, None, None, None, [CompletionOutput(0, "", list(tokens), None, None)], finished)


class Engine:
    """The other end of both sockets, and a client."""

    async def __aenter__(self) -> Engine:
        self._folder = tempfile.TemporaryDirectory()
        path = f"ipc://{self._folder.name}/e"
        self._context = zmq.asyncio.Context()
        self._hears, self._says = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._hears.bind(path + IPC_INPUT_EXT)
        self._says.bind(path + IPC_OUTPUT_EXT)
        self.client = PatientClient(path, CONFIG)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()
        await asyncio.sleep(0)

    async def hears(self) -> object:
        """The next message of the client."""
        return pickle.loads((await asyncio.wait_for(self._hears.recv_multipart(), 10))[0])

    async def says(self, message: object) -> None:
        await self._says.send(written(message))

    def asked(self, name: str) -> tuple[asyncio.Task, list[list[int]]]:
        """(a request that is under way, the tokens that it is given)."""
        got: list[list[int]] = []
        return asyncio.ensure_future(self.client.feed({"prompt_token_ids": [1]}, PARAMS, name, lambda one: got.append(
            list(one.outputs[0].token_ids)), priority=3)), got


async def test_outputs_reach_whom_they_belong_to_in_order():
    async with Engine() as engine:
        (first, got), (second, other) = engine.asked("a"), engine.asked("b")
        request = await engine.hears()
        assert (request.request_id, request.prompt, request.priority) == ("a", {"prompt_token_ids": [1]}, 3)
        assert request.params.max_tokens == 5
        await engine.hears()
        await engine.says([output("a", 1), output("b", 7), output("nobody", 9)])
        await engine.says([output("b", 8, finished=True), output("a", 2)])
        await engine.says([output("a", 3, finished=True), output("a", 4)])
        await asyncio.wait_for(asyncio.gather(first, second), 10)
        assert got == [[1], [2], [3]] and other == [[7], [8]]
        assert not engine.client.output_queues


async def test_many_messages_at_once():
    """The descriptor is readable once for all of them."""
    async with Engine() as engine:
        task, got = engine.asked("a")
        await engine.hears()
        for i in range(500):
            await engine.says([output("a", i, finished=i == 499)])
        await asyncio.wait_for(task, 10)
        assert got == [[i] for i in range(500)]


async def test_who_leaves_is_aborted_and_who_is_finished_is_not():
    async with Engine() as engine:
        task, _ = engine.asked("a")
        await engine.hears()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        message = await engine.hears()
        assert isinstance(message, RPCAbortRequest) and message.request_id == "a"
        done, _ = engine.asked("b")
        await engine.hears()
        await engine.says([output("b", 1, finished=True)])
        await done
        engine.asked("c")
        assert (await engine.hears()).request_id == "c", "an abort of b was sent"


async def test_a_reader_that_fails_is_aborted_alone():
    async with Engine() as engine:
        def give(_: RequestOutput) -> None:
            raise RuntimeError("full")

        failing = asyncio.ensure_future(engine.client.feed({"prompt_token_ids": [1]}, PARAMS, "a", give))
        other, got = engine.asked("b")
        await engine.hears(), await engine.hears()
        await engine.says([output("a", 1), output("b", 2, finished=True)])
        with pytest.raises(RuntimeError, match="full"):
            await failing
        await other
        assert got == [[2]] and (await engine.hears()).request_id == "a"


@pytest.mark.parametrize("everybody", [False, True])
async def test_errors(everybody):
    """Of one request, or of the engine; after that nobody is given to it."""
    async with Engine() as engine:
        (first, _), (second, got) = engine.asked("a"), engine.asked("b")
        await engine.hears(), await engine.hears()
        await engine.says(RPCError(None if everybody else "a", everybody, KeyError("why")))
        with pytest.raises(KeyError, match="why"):
            await first
        if everybody:
            with pytest.raises(KeyError, match="why"):
                await second
            with pytest.raises(MQEngineDeadError):
                await engine.asked("c")[0]
            return
        assert (await engine.hears()).request_id == "a"
        await engine.says([output("b", 1, finished=True)])
        await second
        assert got == [[1]]


async def test_what_cannot_be_read_ends_the_loop():
    async with Engine() as engine:
        await engine._says.send(b"no pickle")
        with pytest.raises(pickle.UnpicklingError):
            await asyncio.wait_for(engine.client.output_loop, 10)


async def test_logits_processors_travel_beside_the_request():
    """Closures, which pickle refuses."""
    async with Engine() as engine:
        three = 3
        params = SamplingParams(max_tokens=1, logits_processors=[lambda ids, logits: logits + three])
        task = asyncio.ensure_future(engine.client.feed({"prompt_token_ids": [1]}, params, "a", lambda _: None))
        request, processors = (pickle.loads(part) for part in await engine._hears.recv_multipart())
        assert request.params.logits_processors is None and processors[0](None, 4) == 7
        assert params.logits_processors, "the caller's own are as they were"
        task.cancel()


async def test_no_tokenizer_is_made_unless_it_is_asked_for():
    """There is no model here that it could be made of."""
    async with Engine() as engine:
        with pytest.raises(AttributeError):
            await engine.client.get_tokenizer(None)
