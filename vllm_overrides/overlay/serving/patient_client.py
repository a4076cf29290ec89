"""The server's end of the engine's process: as patient with it as one step may be long."""

from __future__ import annotations

import vllm.envs as envs
from vllm.engine.multiprocessing.client import MQLLMEngineClient

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
