"""An engine process that is lost is started again, with the same arguments, while the server goes on.

A request that the engine was working on fails at once: it may be what ended it, and a client may have seen a part of
its answer. A new one waits for the next engine (`Restarts.available`): clients of OpenAI's kind send a refused request
again twice within some seconds, which is less than any model takes to load, and then give up; they wait for an answer
for ten minutes. Whoever balances load over several servers asks /health, which says 503 meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from vllm.inputs import TokensPrompt
from vllm.logger import init_logger
from vllm.overlay.serving.errors import SERVER_ERROR, RequestError, StartError, one_line
from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)

# How often a request that waits looks whether it need not any more, in seconds.
_LOOK_S = 0.1
# OpenAI's client does as Retry-After says up to this many seconds, and not at all above.
_LONGEST_RETRY_AFTER_S = 60


@dataclass(frozen=True)
class RestartPolicy:
    """most: how often an engine is started again within ``window_s`` seconds; 0 for never. wait_s: seconds that a new
    request waits for it."""

    most: int = 5
    window_s: float = 3600.0
    # OpenAI's clients wait for 600 s, and shall hear the reason.
    wait_s: float = 540.0


class EngineLost(RuntimeError):
    """Raised to a request whose engine is gone. The message says how."""


class Restarts:
    """An EngineClient of the engine that runs just now. failed: set, with the reason, when no other one is started.

    Used as an asynchronous context manager. What is asked about the model is answered by the client of the last engine.
    """

    def __init__(self, start: Callable[[], AbstractAsyncContextManager[Any]], policy: RestartPolicy) -> None:
        """start: makes the context of one engine, which gives an ``engine_client.Engine`` or raises StartError."""
        self._start = start
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        self._first: asyncio.Future[None] = self._loop.create_future()
        self._engine: Any = None
        self._client: Any = None
        self._settled = False
        self._dismissed: Exception | None = None
        self._why = ""
        self._times: deque[float] = deque()
        self._lost_at = self._took = 0.0
        self._count = _counter()

    async def __aenter__(self) -> Restarts:
        """Raises StartError where the first engine does not come up."""
        self._keeping = asyncio.ensure_future(self._keep())
        try:
            await asyncio.wait({self._keeping, self._first}, return_when=asyncio.FIRST_COMPLETED)
            if not self._first.done():
                self._keeping.result()
        except BaseException:
            # Python does not leave what it could not enter, and the engine would outlive a server that is told to end.
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine = None
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    def settle(self) -> None:
        """The server is ready. An engine that is lost before that is a failed start, and not started again."""
        self._settled = True

    def dismiss(self, error: Exception) -> None:
        """Nobody is given to an engine any more, nor waits for one: ``error`` is raised instead."""
        self._dismissed = error

    @property
    def _is_up(self) -> bool:
        return self._engine is not None and not self._engine.failed.done() and not self._client.errored

    async def feed(self, *args: Any, **kwargs: Any) -> None:
        """See PatientClient. Raises EngineLost where there is no engine."""
        if self._dismissed is not None:
            raise self._dismissed
        if not self._is_up:
            raise EngineLost(self._why)
        await self._client.feed(*args, **kwargs)

    async def check_health(self) -> None:
        """Raises EngineLost unless there is an engine that has produced a token."""
        if not self._is_up:
            raise EngineLost(f"it was lost ({self._why}) and is being started again")
        await self._client.check_health()

    async def reset_prefix_cache(self) -> None:
        """Returns when no prefix is known any more; an engine that is started meanwhile knows none. Raises RequestError
        (503) when that takes too long."""
        while True:
            await self.available()
            try:
                await self._client.reset_prefix_cache()
                return
            except Exception:
                if self._is_up:
                    raise

    async def available(self) -> None:
        """Returns when there is an engine. Raises RequestError (503) when that takes too long."""
        until = self._loop.time() + self._policy.wait_s
        while not self._is_up:
            if self._dismissed is not None:
                raise self._dismissed
            left = until - self._loop.time()
            if left <= 0 or self.failed.done():
                raise self._unavailable()
            await asyncio.wait({self.failed}, timeout=min(left, _LOOK_S))

    def _unavailable(self) -> RequestError:
        if self.failed.done():
            return RequestError(f"The engine was lost ({self._why}), and this server ends.", status=503,
                                kind=SERVER_ERROR, code="engine_lost")
        remaining = math.ceil(self._took - (self._loop.time() - self._lost_at))
        seconds = min(max(remaining, 1), _LONGEST_RETRY_AFTER_S)
        error = RequestError(f"The engine was lost ({self._why}) and is being started again; please try again in "
                             f"{seconds} s.", status=503, kind=SERVER_ERROR, code="engine_restarting")
        error.headers["Retry-After"] = str(seconds)
        return error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def _keep(self) -> None:
        while True:
            began = self._loop.time()
            try:
                async with self._start() as engine:
                    if self._first.done():
                        await _first_token(engine.client)
                        logger.info("The engine is back, %.1f s after it was lost", self._loop.time() - self._lost_at)
                    self._took = self._loop.time() - began
                    self._engine, self._client = engine, engine.client
                    if not self._first.done():
                        self._first.set_result(None)
                    # Shielded: the end of the server cancels this task, which must not look like a lost engine.
                    self._lose(await asyncio.shield(engine.failed))
            except Exception as error:
                if not self._first.done():
                    raise
                self._why = one_line(error)
                if not isinstance(error, StartError):
                    logger.exception("The engine could not be started again")
            if not self._may_restart():
                return
            # The first time at once; what keeps an engine from starting may be over in a while.
            await asyncio.sleep(2**(len(self._times) - 1) - 1)

    def _lose(self, why: str) -> None:
        self._engine, self._why, self._lost_at = None, why, self._loop.time()

    def _may_restart(self) -> bool:
        now, policy = self._loop.time(), self._policy
        while self._times and now - self._times[0] > policy.window_s:
            self._times.popleft()
        if not self._settled or len(self._times) >= policy.most:
            often = f"; it has been started again {policy.most} times within {policy.window_s:g} s" * (
                self._settled and policy.most > 0)
            self.failed.set_result(self._why + often)
            return False
        self._times.append(now)
        self._count.inc()
        logger.error("The engine is lost: %s. It is started again (%d of %d times within %g s)", self._why,
                     len(self._times), policy.most, policy.window_s)
        return True


async def _first_token(client: Any) -> None:
    """Raises StartError where an engine that has just been started produces none."""
    try:
        await client.feed(TokensPrompt(prompt_token_ids=[0]),
                          SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), f"first-{uuid4().hex}",
                          lambda _: None)
    except Exception as error:
        raise StartError(f"the first token could not be produced: {one_line(error)}") from error


@functools.lru_cache(maxsize=1)
def _counter() -> Any:
    # Imported when its folder is known, see `engine_client.metrics_folder`.
    from prometheus_client import Counter

    return Counter("vllm:engine_restarts", "How often a lost engine process has been started again.")
