"""The server's end of the engine's process: as patient with it as one step may be long, and with our message to it."""

from __future__ import annotations

import asyncio
import uuid

import vllm.envs as envs
from vllm.engine.multiprocessing.client import MQLLMEngineClient
from vllm.overlay.prefix_cache.reset import PrefixCacheIsReset, ResetPrefixCache

# The engine's own watch over its steps speaks first, and knows which rank it waits for.
_GRACE_S = 10


class PatientClient(MQLLMEngineClient):
    """Stock's client, which gives an engine up when nothing is heard of it for VLLM_RPC_TIMEOUT (10 s).

    The heartbeat is a thread of Python: one native call that keeps the interpreter's lock for so long (the first load
    of a kernel, a full launch queue) would end a server that nothing restarts. The end of the process, and a step that
    never ends, are noticed in other ways (`vllm.overlay.serving.engine_client`, `vllm.overlay.engine.ranks`).
    """

    async def run_heartbeat_loop(self, timeout: int) -> None:
        """Stock's loop with VLLM_ENGINE_ITERATION_TIMEOUT_S as its limit. timeout: in ms, taken where it is longer."""
        limit = int(1000 * (envs.VLLM_ENGINE_ITERATION_TIMEOUT_S + _GRACE_S))
        await super().run_heartbeat_loop(timeout=max(timeout, limit))

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
