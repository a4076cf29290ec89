"""What runs in the engine's own process, and what keeps it apart from the server's: its process group, its signals,
its tracker of shared memory. So nothing is left when it is killed, and nothing reaches it that is meant for the server.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.engine import ranks
from vllm.overlay.plan.memory import PlanError
from vllm.overlay.serving.errors import one_line

logger = init_logger(__name__)

# How the server tells it to end. Not by SIGTERM: a supervisor sends that to all processes of a service at a time, and
# the server has answers to finish first.
END = signal.SIGUSR1
# Longest wait for an engine that was told to end, in seconds.
END_PATIENCE = 10.0


def run_engine(engine_args: Any, engine_config: Any, usage_context: Any, ipc_path: str, report: Connection) -> None:
    """Main of the engine's process. Sends the reason through ``report`` when it cannot start, and exits with 1.

    engine_config: the server's, so that the two cannot disagree; None = to be made of engine_args once more.
    """
    stand_apart()
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def end_at_once(reason: str) -> None:
        # The main thread may be inside a collective or a kernel that never returns.
        try:
            report.send(reason)
        finally:
            os._exit(1)

    ranks.on_loss(end_at_once)
    if engine_config is not None:
        # For a model that stock describes, making another takes as long as importing vLLM.
        engine_args.create_engine_config = lambda: engine_config
    try:
        from vllm.engine.multiprocessing.engine import MQLLMEngine

        engine = MQLLMEngine.from_engine_args(engine_args=engine_args, usage_context=usage_context, ipc_path=ipc_path)
    except KeyboardInterrupt:
        _settle()
        raise SystemExit(0) from None
    except Exception as error:
        log_failure(error)
        report.send(one_line(error))
        raise SystemExit(1) from None
    engine.on_stuck = end_at_once
    engine.on_cleanup = _settle
    engine.start()
    # It returns only when it has failed; a wanted end interrupts it.
    failure = getattr(engine, "_errored_with", None)
    if failure is not None:
        report.send(one_line(failure))
    raise SystemExit(1)


def stand_apart() -> None:
    """Called first. The server decides when this process ends, and can find all that it started."""
    os.setpgid(0, 0)
    _own_tracker()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(END, _interrupt)


def _own_tracker() -> None:
    """Python's tracker removes shared memory and semaphores once all are gone who use it. The server's own, which a
    child shares, would keep those of every engine that was killed until the server ends."""
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None
    tracker.ensure_running()


def log_failure(error: Exception) -> None:
    """Where it happened; not of a refused memory plan, whose one line says all there is."""
    level = logging.DEBUG if isinstance(error, PlanError) else logging.ERROR
    logger.log(level, "the engine could not start", exc_info=error)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt("the server ends the engine")


def _settle() -> None:
    """It has heard that it is to end; the server says so until it is gone."""
    signal.signal(END, signal.SIG_IGN)


def _end_with_parent() -> None:
    """A server that was killed cannot end its engine, which would keep the memory for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), END)
        # Python handles the signal when the main thread computes Python again, which a collective may prevent.
        time.sleep(END_PATIENCE)
        os._exit(1)
