"""The engine that a server talks to: started, watched, and ended with the server."""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.engine import ranks
from vllm.overlay.plan.memory import PlanError
from vllm.overlay.serving.errors import StartError, one_line

logger = init_logger(__name__)

# Longest wait for an engine process that was told to end, in seconds.
_END_PATIENCE = 10.0
# How often the client is asked whether it has given the engine up, in seconds.
_LOOK_S = 0.5


@dataclass
class Engine:
    """client: an EngineClient. failed: set, with the reason, when the engine's process ends while it is needed."""

    client: Any
    failed: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def run_engine(engine_args: Any, engine_config: Any, usage_context: Any, ipc_path: str, report: Connection) -> None:
    """Main of the engine's process. Sends the reason through ``report`` when it cannot start, and exits with 1.

    engine_config: the server's, so that the two cannot disagree; None = to be made of engine_args once more.
    """
    from vllm.engine.multiprocessing.engine import MQLLMEngine

    def end_at_once(reason: str) -> None:
        # The main thread may be inside a collective or a kernel that never returns.
        try:
            report.send(reason)
        finally:
            os._exit(1)

    ranks.on_loss(end_at_once)
    # The server decides when the engine ends: a Ctrl-C in the terminal reaches both, and the server still has answers
    # to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if engine_config is not None:
        # For a model that stock describes, making another takes as long as importing vLLM.
        engine_args.create_engine_config = lambda: engine_config
    try:
        engine = MQLLMEngine.from_engine_args(engine_args=engine_args, usage_context=usage_context, ipc_path=ipc_path)
    except KeyboardInterrupt:
        raise SystemExit(0) from None
    except Exception as error:
        _log_failure(error)
        report.send(one_line(error))
        raise SystemExit(1) from None
    engine.on_stuck = end_at_once
    engine.start()
    # It returns only when it has failed; a wanted end interrupts it.
    failure = getattr(engine, "_errored_with", None)
    if failure is not None:
        report.send(one_line(failure))
    raise SystemExit(1)


def _log_failure(error: Exception) -> None:
    """Where it happened; not of a refused memory plan, whose one line says all there is."""
    level = logging.DEBUG if isinstance(error, PlanError) else logging.ERROR
    logger.log(level, "the engine could not start", exc_info=error)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt("the server ends the engine")


def _end_with_parent() -> None:
    """A server that was killed cannot end its engine, which would keep the memory for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        # Python handles the signal when the main thread computes Python again, which a collective may prevent.
        time.sleep(_END_PATIENCE)
        os._exit(1)


@asynccontextmanager
async def in_process(engine_args: Any, engine_config: Any) -> AsyncIterator[Engine]:
    """The engine in this process (--disable-frontend-multiprocessing, pipeline parallelism). Raises StartError."""
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.usage.usage_lib import UsageContext

    def build() -> Any:
        return AsyncLLMEngine.from_engine_args(engine_args=engine_args, engine_config=engine_config,
                                               usage_context=UsageContext.OPENAI_API_SERVER)

    loop = asyncio.get_running_loop()
    engine = Engine(None)
    ranks.on_loss(lambda reason: loop.call_soon_threadsafe(_fail, engine, reason))
    # The threads of an engine that is stuck in a collective would not let the interpreter exit.
    engine.failed.add_done_callback(lambda _: _exit_soon())
    building = loop.run_in_executor(None, build)
    await asyncio.wait({building, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        raise StartError(engine.failed.result())
    try:
        engine.client = building.result()
    except Exception as error:
        _log_failure(error)
        raise StartError(one_line(error)) from error
    watching = asyncio.ensure_future(_watch(engine))
    try:
        yield engine
    finally:
        watching.cancel()


@contextmanager
def metrics_folder() -> Iterator[None]:
    """PROMETHEUS_MULTIPROC_DIR, where it is not set: a folder into which server and engine both count. It has to be
    known before either imports prometheus_client, which looks for it once."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="vllm-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        try:
            yield
        finally:
            os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)


@asynccontextmanager
async def in_own_process(engine_args: Any, engine_config: Any) -> AsyncIterator[Engine]:
    """The engine in a process of its own. Raises StartError with the engine's own reason when it does not come up."""
    with metrics_folder():
        async with _engine_process(engine_args, engine_config) as engine:
            yield engine


@asynccontextmanager
async def _engine_process(engine_args: Any, engine_config: Any) -> AsyncIterator[Engine]:
    from vllm.overlay.serving.patient_client import PatientClient
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils import get_open_zmq_ipc_path

    ipc_path = get_open_zmq_ipc_path()
    context = get_context("spawn")
    reports, report = context.Pipe(duplex=False)
    # Configuration classes that come with a checkpoint can only be unpickled where they have been made.
    given = None if engine_args.trust_remote_code else engine_config
    process = context.Process(target=run_engine, name="engine",
                              args=(engine_args, given, UsageContext.OPENAI_API_SERVER, ipc_path, report))
    process.start()
    report.close()
    logger.info("engine process %d", process.pid)
    ended = asyncio.ensure_future(_wait(process))
    client = watching = None
    try:
        client = PatientClient(ipc_path, engine_config)
        await _connect(client, ended)
        if ended.done():
            raise StartError(_reason(reports, process))
        engine = Engine(client)

        def tell(task: asyncio.Future[None]) -> None:
            if not task.cancelled():
                _fail(engine, _reason(reports, process))

        ended.add_done_callback(tell)
        watching = asyncio.ensure_future(_watch(engine))
        yield engine
    finally:
        # Its end is wanted from here on, and nobody asks for the reason.
        ended.cancel()
        if watching is not None:
            watching.cancel()
        process.terminate()
        if client is not None:
            client.close()
        await asyncio.get_running_loop().run_in_executor(None, process.join, _END_PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
        # What an engine that was killed leaves behind: the files of its sockets.
        for left in glob.glob(f"{ipc_path.removeprefix('ipc://')}_*"):
            os.unlink(left)
        _forget_metrics(process.pid)


def _fail(engine: Engine, reason: str) -> None:
    """Tell the server, and everybody who waits for an output that will not come: the client alone notices after a
    minute."""
    if not engine.failed.done():
        engine.failed.set_result(reason)
    error = RuntimeError(f"the engine is gone: {reason}")
    for queue in tuple(getattr(engine.client, "output_queues", {}).values()):
        queue.put_nowait(error)
    # The streams of an engine in this process.
    if (tracker := getattr(engine.client, "_request_tracker", None)) is not None:
        tracker.propagate_exception(error)


def _exit_soon() -> None:
    timer = threading.Timer(_END_PATIENCE, os._exit, [1])
    timer.daemon = True
    timer.start()


async def _watch(engine: Engine) -> None:
    """Looks whether the client has given the engine up, which no process's end need show."""
    while not engine.client.errored:
        await asyncio.sleep(_LOOK_S)
    # Stock's error about the dead engine speaks of a stack trace, and then repeats the cause.
    _fail(engine, one_line(getattr(engine.client, "_errored_with", None) or engine.client.dead_error))


async def _wait(process: Any) -> None:
    """Returns when the process has ended."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.add_reader(process.sentinel, lambda: None if over.done() else over.set_result(None))
    try:
        await over
    finally:
        loop.remove_reader(process.sentinel)


async def _connect(client: Any, ended: asyncio.Future[None]) -> None:
    """Returns when the engine has answered, or has ended. However long the weights take: only its end is a failure."""
    while not ended.done():
        setup = asyncio.ensure_future(client.setup())
        await asyncio.wait({setup, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not setup.done():
            setup.cancel()
            await asyncio.gather(setup, return_exceptions=True)
            return
        try:
            setup.result()
            return
        except TimeoutError:
            continue


def _reason(reports: Connection, process: Any) -> str:
    """Why the engine's process ended: what it reported, else how."""
    try:
        if reports.poll():
            return reports.recv()
    except (EOFError, OSError):
        pass
    process.join(1)
    return f"the engine process (rank 0) {ranks.how_it_ended(process.exitcode)}; its output above has the details"


def _forget_metrics(pid: int | None) -> None:
    from prometheus_client import multiprocess

    multiprocess.mark_process_dead(pid)
