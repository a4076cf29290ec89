"""The engine's process: its reasons, its end, and what is left of it. The model is not needed for most of that."""

from __future__ import annotations

import asyncio
import glob
import os
import pickle
import re
import shutil
import tempfile
import time
from multiprocessing import Pipe, active_children
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_models import make_qwen2
from tests.helpers.tokenizer import tokenizer_folder
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.multiprocessing import IPC_DATA_EXT, RPCStartupResponse, client
from vllm.overlay.serving import engine_client, patient_client
from vllm.overlay.serving.errors import StartError
from vllm.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """(engine arguments, engine configuration) of a tiny model."""
    folder = make_qwen2(tmp_path_factory.mktemp("model"))
    for file in tokenizer_folder(small=479).iterdir():
        shutil.copy(file, folder)
    arguments = AsyncEngineArgs(model=str(folder), dtype="float32", max_model_len=256, disable_log_stats=True)
    return arguments, arguments.create_engine_config()


def only_says_hello(engine_args, engine_config, usage_context, ipc_path, report):
    """Stands in for the engine: answers that it is up, and then nothing any more."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(ipc_path + IPC_DATA_EXT)
    identity, _ = socket.recv_multipart()
    socket.send_multipart((identity, pickle.dumps(RPCStartupResponse(tracing_enabled=False))))
    time.sleep(600)


async def test_an_engine_that_is_killed_while_it_works(config, monkeypatch):
    """Whoever waits for an output hears of it at once, and the reason is known."""
    monkeypatch.setattr(engine_client, "run_engine", only_says_hello)
    async with engine_client.in_own_process(*config) as engine:
        request = engine.client.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=5), "r")
        waiting = asyncio.ensure_future(request.__anext__())
        await asyncio.sleep(0.2)
        assert not engine.failed.done() and not waiting.done()
        start = time.monotonic()
        active_children()[0].kill()
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await asyncio.wait_for(waiting, 5)
        assert "killed by signal 9" in engine.failed.result() and "out of memory" in engine.failed.result()
        assert time.monotonic() - start < 2


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
    assert str(waiting.get_nowait()) == "the engine is gone: no heartbeat"


async def test_an_engine_that_is_silent_for_a_while_is_not_given_up(config, monkeypatch):
    """As during a native call that keeps the interpreter's lock; a step may take VLLM_ENGINE_ITERATION_TIMEOUT_S."""
    monkeypatch.setattr(engine_client, "run_engine", only_says_hello)
    monkeypatch.setattr(client, "VLLM_RPC_TIMEOUT", 100)
    async with engine_client.in_own_process(*config) as engine:
        await asyncio.sleep(0.5)
        assert not engine.client.errored and not engine.failed.done()
    monkeypatch.setattr(patient_client, "_GRACE_S", 0)
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "1")
    async with engine_client.in_own_process(*config) as engine:
        assert "No heartbeat" in await asyncio.wait_for(asyncio.shield(engine.failed), 10)


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


async def test_nothing_is_left_behind(config, monkeypatch):
    monkeypatch.setattr(engine_client, "run_engine", only_says_hello)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    # Other servers of this machine have their sockets in /tmp; pytest's own folders are too long for a socket's name.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        async with engine_client.in_own_process(*config) as engine:
            pid, metrics = active_children()[0].pid, os.environ["PROMETHEUS_MULTIPROC_DIR"]
            assert glob.glob(f"{folder}/*_socket")
        assert not os.listdir(folder), "the sockets"
    assert not Path(f"/proc/{pid}").exists(), "the process"
    assert not engine.failed.done(), "a wanted end is no failure"
    assert not Path(metrics).exists() and "PROMETHEUS_MULTIPROC_DIR" not in os.environ, "the metrics"


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
