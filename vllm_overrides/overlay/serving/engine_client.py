"""The engine that a server talks to: started, watched, and ended with the server."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.engine import ranks
from vllm.overlay.serving import leftovers
from vllm.overlay.serving.engine_process import END, END_PATIENCE, log_failure, run_engine
from vllm.overlay.serving.errors import StartError, one_line
from vllm.overlay.serving.restarts import EngineLost, RestartPolicy, Restarts

logger = init_logger(__name__)

# How often the client is asked whether it has given the engine up, in seconds. It does so when no heartbeat has come
# for much longer.
_LOOK_S = 2
# How often an engine is told to end, in seconds.
_AGAIN_S = 0.5


@dataclass
class Engine:
    """client: an EngineClient. failed: set, with the reason, when there is no engine any more and will be none. settle:
    called when the server is ready."""

    client: Any
    failed: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    settle: Callable[[], None] = lambda: None


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
        log_failure(error)
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
async def in_own_process(engine_args: Any, engine_config: Any, policy: RestartPolicy | None = None
                         ) -> AsyncIterator[Engine]:
    """The engine in a process of its own, which is started again when it is lost, as often as ``policy`` says.

    Raises StartError with the engine's own reason when it does not come up.
    """
    with metrics_folder():
        async with Restarts(partial(_engine_process, engine_args, engine_config),
                            policy or RestartPolicy()) as restarts:
            yield Engine(restarts, restarts.failed, restarts.settle)


@asynccontextmanager
async def _engine_process(engine_args: Any, engine_config: Any) -> AsyncIterator[Engine]:
    """One process and its client; ``failed`` is set when it is lost. When this is left nothing of it is left."""
    from vllm.overlay.runtime.platform_cpu import malloc_tunables
    from vllm.overlay.serving.patient_client import PatientClient
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils import get_open_zmq_ipc_path, is_cpu

    ipc_path = get_open_zmq_ipc_path()
    if is_cpu():
        os.environ["GLIBC_TUNABLES"] = malloc_tunables(os.environ.get("GLIBC_TUNABLES", ""))
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
    client = watching = engine = None
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
        lost = engine is not None and engine.failed.done()
        if client is not None:
            client.close()
        ending = asyncio.get_running_loop().run_in_executor(None, _end, process, 0 if lost else END_PATIENCE)
        try:
            await asyncio.shield(ending)
        finally:
            # The server may end while what a lost engine has left is being removed.
            await asyncio.wait({ending})
            leftovers.remove_sockets(ipc_path)
            leftovers.settle_metrics(os.environ.get("PROMETHEUS_MULTIPROC_DIR"), process.pid)
            reports.close()


def _end(process: Any, patience: float) -> None:
    """The end of the engine's process, and of all that it has started. patience: how long it may take to end by itself,
    in seconds; 0: it is not told to."""
    until = time.monotonic() + patience
    while process.exitcode is None and (left := until - time.monotonic()) > 0:
        # Repeated: one that comes just before it waits for requests is looked at when that wait ends: after 10 s.
        # Another thread may be the one that hears of its end.
        with suppress(ProcessLookupError):
            os.kill(process.pid, END)
        process.join(min(left, _AGAIN_S))
    if process.exitcode is None:
        if patience:
            logger.warning("the engine has not ended within %g s and is killed", patience)
        process.kill()
        process.join()
    leftovers.end_group(process.pid)


def _fail(engine: Engine, reason: str) -> None:
    """Tell the server, and everybody who waits for an output that will not come: the client alone notices after a
    minute."""
    if not engine.failed.done():
        engine.failed.set_result(reason)
    error = EngineLost(reason)
    # Who has been given to it and has not been heard of yet would wait for ever.
    if getattr(engine.client, "_errored_with", error) is None:
        engine.client._errored_with = error
    _tell(engine.client, error)


def dismiss(client: Any, error: Exception) -> None:
    """Fail all requests that are with an engine, or wait for one, with ``error``. client: an EngineClient."""
    if isinstance(client, Restarts):
        client.dismiss(error)
    _tell(client, error)


def _tell(client: Any, error: Exception) -> None:
    for queue in tuple(getattr(client, "output_queues", {}).values()):
        queue.put_nowait(error)
    # The streams of an engine in this process.
    if (tracker := getattr(client, "_request_tracker", None)) is not None:
        tracker.propagate_exception(error)


def _exit_soon() -> None:
    timer = threading.Timer(END_PATIENCE, os._exit, [1])
    timer.daemon = True
    timer.start()


async def _watch(engine: Engine) -> None:
    """Looks whether the client has given the engine up, which no process's end need show."""
    client = engine.client
    # Without its loop nobody hears an output.
    hearing = getattr(client, "output_loop", None) or asyncio.get_running_loop().create_future()
    while not client.errored and not hearing.done():
        await asyncio.wait({hearing}, timeout=_LOOK_S)
    if not client.errored:
        client._set_errored(hearing.exception() or RuntimeError("its outputs are not read any more"))
    # Stock's error about the dead engine speaks of a stack trace, and then repeats the cause.
    _fail(engine, one_line(getattr(client, "_errored_with", None) or client.dead_error))


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

