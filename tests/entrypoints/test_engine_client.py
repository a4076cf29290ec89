"""The engine's process: its reasons, its end, and what is left of it. The model is not needed for most of that."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import time
from multiprocessing import Pipe, active_children, shared_memory
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_models import make_qwen2
from tests.helpers.tokenizer import tokenizer_folder
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.multiprocessing import (
    IPC_DATA_EXT,
    IPC_INPUT_EXT,
    IPC_OUTPUT_EXT,
    MQEngineDeadError,
    RPCStartupResponse,
    client,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.overlay.serving import engine_client, engine_process, patient_client
from vllm.overlay.serving.errors import StartError
from vllm.overlay.serving.restarts import EngineLost
from vllm.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """(engine arguments, engine configuration) of a tiny model."""
    folder = make_qwen2(tmp_path_factory.mktemp("model"))
    for file in tokenizer_folder(small=479).iterdir():
        shutil.copy(file, folder)
    arguments = AsyncEngineArgs(model=str(folder), dtype="float32", max_model_len=256, disable_log_stats=True)
    return arguments, arguments.create_engine_config()


# Names of the stand-ins' shared memory; other tests of this machine have some, too.
SHARED = f"engine-client-{os.getpid()}-"


@pytest.fixture
def forked(monkeypatch):
    """Replaces the engine's main function by one that may know this test's objects."""
    monkeypatch.setattr(engine_client, "get_context", lambda _: multiprocessing.get_context("fork"))
    return lambda main: monkeypatch.setattr(engine_client, "run_engine", main)


def says_hello(ipc_path):
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(ipc_path + IPC_DATA_EXT)
    identity, _ = socket.recv_multipart()
    socket.send_multipart((identity, pickle.dumps(RPCStartupResponse(tracing_enabled=False))))


def only_says_hello(engine_args, engine_config, usage_context, ipc_path, report):
    """Stands in for the engine: answers that it is up, and then nothing any more."""
    says_hello(ipc_path)
    time.sleep(600)


def gives_first_tokens(engine_args, engine_config, usage_context, ipc_path, report):
    """The same, but for requests of one token."""
    engine_process.stand_apart()
    context = zmq.Context()
    requests, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    requests.bind(ipc_path + IPC_INPUT_EXT)
    outputs.bind(ipc_path + IPC_OUTPUT_EXT)
    shared_memory.SharedMemory(f"{SHARED}{os.getpid()}", create=True, size=1000)
    says_hello(ipc_path)
    while True:
        request = pickle.loads(requests.recv_multipart()[0])
        if getattr(request, "params", None) is not None and request.params.max_tokens == 1:
            one = CompletionOutput(0, "", [7], None, None, "length", None)
            outputs.send_multipart((pickle.dumps([RequestOutput(request.request_id, None, [0], None, [one], True)]), ))


async def test_an_engine_that_is_killed_while_it_works(config, forked):
    """Whoever waits for an output hears of it at once, and the reason is known."""
    forked(only_says_hello)
    async with engine_client.in_own_process(*config) as engine:
        request = engine.client.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=5), "r")
        waiting = asyncio.ensure_future(request.__anext__())
        await asyncio.sleep(0.2)
        assert not engine.failed.done() and not waiting.done()
        start = time.monotonic()
        active_children()[0].kill()
        with pytest.raises(EngineLost, match="killed by signal 9"):
            await asyncio.wait_for(waiting, 5)
        # The server was not ready yet.
        reason = await asyncio.wait_for(engine.failed, 5)
        assert "killed by signal 9" in reason and "out of memory" in reason
        assert time.monotonic() - start < 2


def files(folder):
    return {path.name for path in Path(folder).iterdir()}


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_engine_that_is_lost_is_started_again(config, forked, monkeypatch, stopped):
    """Killed twice, or stopped and given up: nothing accumulates, here or outside."""
    forked(gives_first_tokens)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    if stopped:
        monkeypatch.setattr(patient_client, "_GRACE_S", 0)
        monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "1")
        monkeypatch.setattr(client, "VLLM_RPC_TIMEOUT", 500)

    def shared():
        return [path.name for path in Path("/dev/shm").glob(f"{SHARED}*")]

    def held():
        return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

    async def most_held():
        """zmq opens its files from a thread, too: at any one moment some may still be missing."""
        samples = []
        for _ in range(10):
            samples.append(held())
            await asyncio.sleep(0.05)
        return tuple(max(column) for column in zip(*samples, strict=True))

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        async with engine_client.in_own_process(*config) as engine:
            engine.settle()
            counts = []
            for _ in range(1 if stopped else 2):
                pid = active_children()[0].pid
                assert shared() == [f"{SHARED}{pid}"]
                assert len(files(folder)) == 3, files(folder)
                counts.append(await most_held())
                asked = [engine.client.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=5), str(i))
                         for i in range(3)]
                asked = [asyncio.ensure_future(one.__anext__()) for one in asked]
                await asyncio.sleep(0.1)
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGKILL)
                results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
                assert all(isinstance(result, (EngineLost, MQEngineDeadError)) for result in results), results
                await asyncio.wait_for(engine.client.available(), 10)
                await engine.client.check_health()
                assert not Path(f"/proc/{pid}").exists(), "the last one is still there"
            assert not engine.failed.done() and not engine.client.output_queues
            # zmq closes its files from a thread.
            deadline = time.monotonic() + 5
            while any(now > then for now, then in zip(held(), counts[0], strict=True)):
                assert time.monotonic() < deadline, f"(open files, tasks) {counts}, now {held()}"
                await asyncio.sleep(0.05)
            metrics = os.environ["PROMETHEUS_MULTIPROC_DIR"]
        assert not files(folder), "sockets"
    assert not active_children() and not Path(metrics).exists()
    assert not shared()


async def test_the_server_ends_while_a_lost_engine_is_removed(config, forked, monkeypatch):
    """What it has left is removed all the same."""
    forked(gives_first_tokens)
    begun, remove = threading.Event(), engine_client._end

    def slowly(*args):
        begun.set()
        time.sleep(0.5)
        remove(*args)

    monkeypatch.setattr(engine_client, "_end", slowly)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        async with engine_client.in_own_process(*config) as engine:
            engine.settle()
            active_children()[0].kill()
            assert await asyncio.get_running_loop().run_in_executor(None, begun.wait, 20)
        assert not files(folder), "sockets"
    assert not active_children()


def hears_the_second_time(engine_args, engine_config, usage_context, ipc_path, report):
    """The same, but ends only when it has been told to twice; how it ended stands in a file."""
    said = Path(f"{ipc_path.removeprefix('ipc://')}_heard")
    engine_process.stand_apart()

    def once(*_):
        signal.signal(engine_process.END, lambda *_: (said.write_text("twice"), os._exit(0)))

    signal.signal(engine_process.END, once)
    says_hello(ipc_path)
    while True:
        time.sleep(0.1)


async def test_an_engine_is_told_to_end_until_it_does(config, forked, monkeypatch):
    """It is not killed, as long as it ends within its time: a signal can come when nobody looks."""
    forked(hears_the_second_time)
    heard = []
    monkeypatch.setattr(engine_client.leftovers, "remove_sockets",
                        lambda path: heard.append(Path(f"{path.removeprefix('ipc://')}_heard").read_text()))
    monkeypatch.setattr(engine_client, "_AGAIN_S", 0.05)
    async with engine_client.in_own_process(*config):
        engine, = active_children()
    assert heard == ["twice"] and engine.exitcode == 0, (heard, engine.exitcode)


async def test_an_engine_that_lives_but_is_given_up():
    """A loop that hangs, as the client's heartbeat finds: the server must not go on with it, nor requests wait."""
    waiting: asyncio.Queue = asyncio.Queue()
    client = SimpleNamespace(errored=False, dead_error=TimeoutError("no heartbeat"), output_queues={"r": waiting})
    engine = engine_client.Engine(client)
    watching = asyncio.ensure_future(engine_client._watch(engine))
    await asyncio.sleep(0.05)
    assert not engine.failed.done()
    client.errored = True
    await asyncio.wait_for(watching, 5)
    assert engine.failed.result() == "no heartbeat"
    assert isinstance(lost := waiting.get_nowait(), EngineLost) and str(lost) == "no heartbeat"


async def test_outputs_that_nobody_reads_any_more(config, forked):
    """What breaks the loop that hands them out would leave every request waiting for ever."""
    forked(gives_first_tokens)
    async with engine_client.in_own_process(*config) as engine:
        request = engine.client.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=5), "r")
        waiting = asyncio.ensure_future(request.__anext__())
        await asyncio.sleep(0.1)
        engine.client.output_loop.cancel()
        with pytest.raises(EngineLost, match="not read any more"):
            await asyncio.wait_for(waiting, 5)


async def test_an_engine_that_is_silent_for_a_while_is_not_given_up(config, forked, monkeypatch):
    """As during a native call that keeps the interpreter's lock; a step may take VLLM_ENGINE_ITERATION_TIMEOUT_S."""
    forked(only_says_hello)
    monkeypatch.setattr(client, "VLLM_RPC_TIMEOUT", 100)
    async with engine_client.in_own_process(*config) as engine:
        await asyncio.sleep(0.5)
        assert not engine.client.errored and not engine.failed.done()
    monkeypatch.setattr(patient_client, "_GRACE_S", 0)
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "1")
    async with engine_client.in_own_process(*config) as engine:
        assert "No heartbeat" in await asyncio.wait_for(engine.failed, 10)


@pytest.mark.parametrize("trust_remote_code", [False, True])
async def test_the_engine_gets_the_servers_configuration(trust_remote_code, monkeypatch):
    """But not where unpickling it would need the checkpoint's own code."""
    given = []

    def process(target, name, args):
        given.extend(args)
        raise StartError("enough")

    context = SimpleNamespace(Pipe=Pipe, Process=process)
    monkeypatch.setattr(engine_client, "get_context", lambda _: context)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "set")
    arguments = SimpleNamespace(trust_remote_code=trust_remote_code)
    with pytest.raises(StartError, match="enough"):
        async with engine_client.in_own_process(arguments, "the configuration"):
            pytest.fail("no process was started")
    assert given[:2] == [arguments, None if trust_remote_code else "the configuration"]


@pytest.mark.parametrize(("report", "exitcode", "reason"), [
    ("no room for the weights", 1, "^no room for the weights$"),
    (None, 7, "ended with exit code 7; its output above"),
    (None, -9, "killed by signal 9 .*out of memory"),
    (None, -11, "killed by signal 11; its output above"),
])
def test_reasons(report, exitcode, reason):
    reports, sender = Pipe(duplex=False)
    if report:
        sender.send(report)
    sender.close()
    assert re.search(reason, engine_client._reason(reports, SimpleNamespace(join=lambda _: None, exitcode=exitcode)))


async def test_the_engines_own_reason(config, tmp_path):
    """A real engine that finds, while it loads, that the checkpoint does not fit. What it loads is what the
    configuration names that it is given."""
    arguments, _ = config
    folder = tmp_path / "model"
    shutil.copytree(arguments.model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] = weights["model.layers.0.self_attn.q_proj.weight"][:8].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    broken = AsyncEngineArgs(model=str(folder), dtype="float32", max_model_len=256)
    with pytest.raises(StartError) as caught:
        async with engine_client.in_own_process(arguments, broken.create_engine_config()):
            pytest.fail("it is not up")
    assert "\n" not in str(caught.value) and "its output above" not in str(caught.value), caught.value
