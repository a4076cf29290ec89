"""The engine in a process of its own: whoever asks learns that it is up, a failed step reaches the requests that were
in it, a failed start ends in one line, a step that never ends ends the engine, and a message resets the prefix cache.
"""
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

import vllm.envs as envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.multiprocessing import RPCAbortRequest, RPCError, RPCStartupResponse
from vllm.engine.multiprocessing import engine_stock as _stock
from vllm.overlay.engine.sent_output import written
from vllm.overlay.engine.step_failure import StepFailed
from vllm.overlay.prefix_cache.reset import PrefixCacheIsReset, ResetPrefixCache
from vllm.overlay.rebind import rebind
from vllm.usage.usage_lib import UsageContext
from vllm.utils import weak_bind

# How long the thread that says that the engine is up may take to notice its end.
_NOTICE_MS = 200


class MQLLMEngine(_stock.MQLLMEngine):
    """Stock's engine behind sockets. `on_stuck`, if set, is told why no step ends any more, from another thread;
    `on_cleanup`, if set, is called when the engine has been told to end."""

    on_stuck: Callable[[str], None] | None = None
    on_cleanup: Callable[[], None] | None = None
    _welcome: threading.Thread | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine.on_step_failure = weak_bind(self._report_failure)
        self.step_limit: float = envs.VLLM_ENGINE_ITERATION_TIMEOUT_S
        self._step_began: float | None = None
        # Stock gives up after 30 s, which a long prefill may take, counted from when it last waited for requests.
        self.last_alive_threshold = self.step_limit + _stock.POLLING_TIMEOUT_MS / 1000

    def run_startup_loop(self) -> None:
        """Begins to tell every client that asks that the engine is up.

        Stock answers one question and closes the socket. On a busy machine that question is of a client that has
        stopped waiting and asked again, or the answer is not sent yet when the socket is closed, and nobody answers any
        more: the server then waits for an engine that is up.
        """
        socket = self.ctx.socket(zmq.ROUTER)
        socket.bind(self.data_ipc_path)
        answer = pickle.dumps(RPCStartupResponse(tracing_enabled=self.engine.is_tracing_enabled()))
        self._welcome = threading.Thread(target=self._tell_ready, args=(socket, answer), daemon=True, name="ready")
        self._welcome.start()

    def _tell_ready(self, socket: zmq.Socket, answer: bytes) -> None:
        with socket:
            while not self._heartbeat_stop_event.is_set():
                if socket.poll(_NOTICE_MS):
                    client, *_ = socket.recv_multipart()
                    socket.send_multipart((client, answer))

    def cleanup(self) -> None:
        """Stock's, and the end of the other ranks: who waits for them in the end waits for processes that only a lost
        parent, or a kill, ends."""
        if self.on_cleanup is not None:
            self.on_cleanup()
        executor = self.engine.model_executor
        self._heartbeat_stop_event.set()
        # Sockets must not be closed while another thread looks at them.
        for thread in (self._welcome, self.heartbeat_thread):
            if thread is not None and thread.is_alive():
                thread.join()
        super().cleanup()
        executor.shutdown()

    def _report_failure(self, failure: StepFailed) -> None:
        for request_id in failure.request_ids:
            self._send_outputs(RPCError(request_id=request_id, is_engine_errored=False, exception=failure))

    def _handle_abort_request(self, request: RPCAbortRequest) -> None:
        if not isinstance(request, ResetPrefixCache):
            super()._handle_abort_request(request)
            return
        self.engine.reset_prefix_cache()
        self._send_outputs([PrefixCacheIsReset(request.request_id)])

    def _send_outputs(self, outputs: Any) -> None:
        if outputs:
            self.output_socket.send_multipart((written(outputs), ), copy=False)

    def engine_step(self) -> list[Any]:
        """Stock's."""
        self._step_began = time.monotonic()
        try:
            return super().engine_step()
        finally:
            self._step_began = None

    def _heartbeat(self) -> None:
        began = self._step_began
        if began is not None and self._errored_with is None and time.monotonic() - began > self.step_limit:
            why = f"a step has not ended after the {self.step_limit:g} s of VLLM_ENGINE_ITERATION_TIMEOUT_S"
            monitor = getattr(self.engine.model_executor, "worker_monitor", None)
            if monitor is not None:
                why += f": {monitor.states()}"
            _stock.logger.error("The engine ends: %s", why)
            self._set_errored(RuntimeError(why))
            if self.on_stuck is not None:
                self.on_stuck(why)
        super()._heartbeat()


# `run_mp_engine` is stock's and names the class.
rebind(_stock, "MQLLMEngine", MQLLMEngine)


def run_mp_engine(engine_args: AsyncEngineArgs, usage_context: UsageContext, ipc_path: str) -> None:
    """Stock's main function of the engine's process. What it cannot be started with is said in one line; the exit
    status is then 1."""
    try:
        _stock.run_mp_engine(engine_args, usage_context, ipc_path)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        _stock.logger.error("The engine cannot start: %s", " ".join(str(error).split()))
        _stock.logger.debug("Where:", exc_info=error)
        sys.exit(1)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
