"""The engine in a process of its own: a failed step reaches the requests that were in it, a failed start ends in one
line."""
import sys
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.multiprocessing import RPCError
from vllm.engine.multiprocessing import engine_stock as _stock
from vllm.overlay.engine.step_failure import StepFailed
from vllm.overlay.rebind import rebind
from vllm.usage.usage_lib import UsageContext
from vllm.utils import weak_bind


class MQLLMEngine(_stock.MQLLMEngine):
    """Stock's engine behind sockets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine.on_step_failure = weak_bind(self._report_failure)

    def _report_failure(self, failure: StepFailed) -> None:
        for request_id in failure.request_ids:
            self._send_outputs(RPCError(request_id=request_id, is_engine_errored=False, exception=failure))


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
