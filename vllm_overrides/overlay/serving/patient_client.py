"""The server's end of the engine's process: as patient with it as one step may be long, with our message to it, and
without a task to be woken for each output."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import uuid
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import cloudpickle
import zmq

import vllm.envs as envs
from vllm.engine.multiprocessing import RPCError, RPCProcessRequest
from vllm.engine.multiprocessing import client as _stock
from vllm.outputs import RequestOutput
from vllm.overlay.prefix_cache.reset import PrefixCacheIsReset, ResetPrefixCache
from vllm.overlay.rebind import rebind
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer_group import init_tokenizer_from_configs

# The engine's own watch over its steps speaks first, and knows which rank it waits for.
_GRACE_S = 10


class _TokenizersWhenAsked:
    """Stock's tokenizers of a client, made when they are asked for. The server has its own; more would take 60 MB and
    a second of its start."""

    def __init__(self, **of: Any) -> None:
        self._make: Callable[[], Any] = cache(partial(init_tokenizer_from_configs, **of))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


rebind(_stock, "init_tokenizer_from_configs", _TokenizersWhenAsked)


class PatientClient(_stock.MQLLMEngineClient):
    """Stock's client, which gives an engine up when nothing is heard of it for VLLM_RPC_TIMEOUT (10 s).

    The heartbeat is a thread of Python: one native call that keeps the interpreter's lock for so long (the first load
    of a kernel, a full launch queue) would end a server that nothing restarts. The end of the process, and a step that
    never ends, are noticed in other ways (`vllm.overlay.serving.engine_client`, `vllm.overlay.engine.ranks`).
    """

    _stop_reading: Callable[[], object] | None = None

    async def run_heartbeat_loop(self, timeout: int) -> None:
        """Stock's loop with VLLM_ENGINE_ITERATION_TIMEOUT_S as its limit. timeout: in ms, taken where it is longer."""
        limit = int(1000 * (envs.VLLM_ENGINE_ITERATION_TIMEOUT_S + _GRACE_S))
        await super().run_heartbeat_loop(timeout=max(timeout, limit))

    async def run_output_handler_loop(self) -> None:
        """Hands the engine's outputs to who waits for them, until the client is closed. Raises what cannot be read.

        Stock polls and receives by two awaited calls of pyzmq, which cost more than all else that a message needs.
        """
        loop = asyncio.get_running_loop()
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self.output_socket.underlying)
        place = int(socket.getsockopt(zmq.FD))
        broken: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            # The descriptor tells of a change only once, so all that has come is read.
            try:
                while True:
                    self._deliver(pickle.loads(socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return
            except Exception as error:
                self._close_reader()
                if not broken.done():
                    broken.set_exception(error)

        loop.add_reader(place, read)
        self._stop_reading = lambda: loop.remove_reader(place)
        read()
        # As in stock, being cancelled is no error.
        with contextlib.suppress(asyncio.CancelledError):
            await broken
        self._close_reader()

    def _close_reader(self) -> None:
        stop, self._stop_reading = self._stop_reading, None
        if stop is not None:
            stop()

    def close(self) -> None:
        """Stock's. The loop must not look at a descriptor that is closed: the next one may have its number."""
        self._close_reader()
        super().close()

    def _deliver(self, message: Any) -> None:
        if not isinstance(message, (RPCError, BaseException)):
            for output in message:
                if (queue := self.output_queues.get(output.request_id)) is not None:
                    queue.put_nowait(output)
            return
        told = message if isinstance(message, RPCError) else RPCError(None, True, message)
        if told.is_engine_errored and not self.errored:
            self._errored_with = told.exception
        queues = self.output_queues
        for queue in tuple(queues.values()) if told.request_id is None else (queues.get(told.request_id), ):
            if queue is not None:
                queue.put_nowait(told.exception)

    async def feed(self, prompt: Any, params: SamplingParams, request_id: str, give: Callable[[RequestOutput], None], *,
                   priority: int = 0, trace_headers: Mapping[str, str] | None = None) -> None:
        """Stock's ``generate``, which calls ``give`` with each output as soon as it is read; returns after the last.

        Raises what the engine says of the request, or ``give`` raises; whatever ends it, the engine stops working on
        the request.
        """
        if self.errored:
            raise self.dead_error
        reader = _Reader(give)
        self.output_queues[request_id] = reader
        try:
            parts = []
            if params.logits_processors:
                # Closures, which pickle refuses.
                parts.append(cloudpickle.dumps(params.logits_processors))
                params = copy.copy(params)
                params.logits_processors = None
            request = RPCProcessRequest(prompt=prompt, params=params, request_id=request_id, priority=priority,
                                        trace_headers=trace_headers)
            await self.input_socket.send_multipart((pickle.dumps(request), *parts), copy=False)
            await reader.over
        finally:
            try:
                if not reader.finished and not self.errored:
                    await self.abort(request_id)
            finally:
                del self.output_queues[request_id]

    async def reset_prefix_cache(self) -> None:
        """Returns when the engine has forgotten every prefix that it computed, after the step that it is in. Raises
        what ended the engine."""
        if self.errored:
            raise self.dead_error
        message = ResetPrefixCache(f"reset-{uuid.uuid4().hex}")
        # Whatever comes for this id is put here, by stock as well as by whoever notices that the engine is gone.
        answers: asyncio.Queue[PrefixCacheIsReset | BaseException] = asyncio.Queue()
        self.output_queues[message.request_id] = answers
        try:
            await self._send_one_way_rpc_request(message, self.input_socket)
            answer = await answers.get()
        finally:
            del self.output_queues[message.request_id]
        if isinstance(answer, BaseException):
            raise answer


class _Reader:
    """Stands where stock has a request's queue. over: done after the last output, or with what ended it before."""

    def __init__(self, give: Callable[[RequestOutput], None]) -> None:
        self._give = give
        self.finished = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put_nowait(self, item: RequestOutput | BaseException) -> None:
        """An output, or what ended the request."""
        if self.over.done():
            return
        if isinstance(item, BaseException):
            self._fail(item)
            return
        try:
            self._give(item)
        except Exception as error:
            self._fail(error)
            return
        if item.finished:
            self.finished = True
            self.over.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self.over.set_exception(error)
        # Who was cancelled meanwhile does not ask for it, of which asyncio would complain.
        self.over.exception()
