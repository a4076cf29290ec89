"""Starts that cannot succeed: each is one line, raised before the time that loading a model takes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fake_engine import SMALL, FakeEngine, settings, tokenizer
from tests.helpers.tiny_models import make_qwen2
from tests.helpers.tokenizer import tokenizer_folder
from vllm import scripts
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai import run_batch, run_batch_stock
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.overlay.attention import choice
from vllm.overlay.kernels.norms import backends
from vllm.overlay.runtime import announced, startup_check
from vllm.overlay.runtime.phases import Phases
from vllm.overlay.serving import engine_client, server
from vllm.overlay.serving.errors import StartError, one_line
from vllm.overlay.serving.service import Service
from vllm.utils import FlexibleArgumentParser

ROOT = Path(__file__).resolve().parents[2]


def arguments(*extra: str):
    return make_arg_parser(FlexibleArgumentParser()).parse_args(list(extra))


def test_a_port_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1 port {port}: Address already in use.*--port"):
            server.bind("127.0.0.1", port)
        with pytest.raises(StartError, match="Address already in use"):
            server.bind(None, port)
    server.bind("127.0.0.1", port).close()


def test_a_bound_socket_refuses_until_the_server_listens():
    sock = server.bind("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=1)
    sock.close()


# The server over an engine that is made up; a client in the same network asks it at two addresses of the machine.
DEFAULT_ADDRESS = """
import contextlib, os, signal, sys, threading, httpx
from tests.helpers.fake_engine import FakeEngine
from vllm.overlay.serving import engine_client, server

@contextlib.asynccontextmanager
async def made_up(engine_args, config, policy):
    yield engine_client.Engine(FakeEngine())

def ask():
    found = [httpx.get(f'http://{host}:8000/health').status_code for host in ('127.0.0.1', '127.0.0.9')]
    print('health:', found, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

class Server(server._Server):
    async def startup(self, sockets=None):
        await super().startup(sockets=sockets)
        print('bound:', sockets[0].getsockname(), flush=True)
        threading.Thread(target=ask).start()

engine_client.in_own_process = made_up
server._Server = Server
server.main()
"""


def test_where_it_listens_without_flags(model):
    """Port 8000 of all interfaces, as the platform expects; in a network of its own, where nobody else has the port."""
    alone = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make a network namespace (unshare --net)")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([*alone, sys.executable, "-c", DEFAULT_ADDRESS, "--model", model, "--dtype", "float32",
                           "--served-model-name", "llm"],
                          capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "bound: ('0.0.0.0', 8000)" in done.stdout and "health: [200, 200]" in done.stdout, done.stdout[-2000:]


PROGRAMS = {
    "module": (server.main, ["api_server", "--model", "/no/such"]),
    "vllm serve": (scripts.main, ["vllm", "serve", "/no/such"]),
    "run_batch": (run_batch.run, ["run_batch", "-i", "in", "-o", "out", "--model", "/no/such"]),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_refuses_a_half_applied_tree(program, monkeypatch):
    """Before it looks at anything else. A text as exit status is that line on stderr, and status 1."""
    main, argv = PROGRAMS[program]
    monkeypatch.setattr(startup_check, "_JOURNAL", "overlay")
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as caught:
        main()
    assert re.fullmatch("vllm overlay: an apply or revert was killed half-way: run .*", caught.value.code)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_what_is_wrong_in_one_line(program, monkeypatch, capsys):
    main, argv = PROGRAMS[program]
    monkeypatch.setattr(startup_check, "check_deployed", lambda: "")
    monkeypatch.setattr(run_batch, "check_deployed", lambda: "")
    monkeypatch.setattr("sys.argv", [*argv, "--port", "0"])
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 1 and error.startswith("vllm: error: ") and error.count("\n") == 1, error
    assert "/no/such" in error, error


def test_a_batch_starts_like_the_server(model, monkeypatch, capsys):
    """It says what runs, and its workers are bound to that."""
    bound = []

    async def main(args):
        bound.append(os.environ[announced.VARIABLE])

    monkeypatch.setattr(run_batch, "check_deployed", lambda: "pin p, 3 overlays, manifest m")
    monkeypatch.setattr(run_batch_stock, "main", main)
    monkeypatch.setattr("sys.argv", ["run_batch", "-i", "in", "-o", "out", "--model", str(model), "--dtype", "float32"])
    run_batch.run()
    line, = (line for line in capsys.readouterr().out.splitlines() if line.startswith("vllm overlay: "))
    assert re.match("vllm overlay: pin p, 3 overlays, manifest m; back ends: attention torch-paged, "
                    ".*moe prefill native, moe decode native", line)
    assert "attention=torch-paged" in bound[0] and "moe prefill=native,moe decode=native" in bound[0], bound
    assert announced.VARIABLE not in os.environ


@pytest.fixture
def undecided(monkeypatch):
    """As in a process that has not yet chosen a back end of `norms`."""
    monkeypatch.setattr(backends, "_chosen", None)


async def test_a_back_end_that_does_not_exist(model, monkeypatch, undecided):
    monkeypatch.setenv("VLLM_OVERLAY_KERNELS_NORMS", "native2")
    line = await start_failure(model)
    assert ("VLLM_OVERLAY_KERNELS_NORMS=native2: norms: no back end 'native2'; the choices are native, torch, "
            "reference") in line


async def test_a_back_end_that_cannot_run(model, monkeypatch, undecided):
    monkeypatch.setenv("VLLM_OVERLAY_KERNELS_NORMS", "torch")
    monkeypatch.setattr(backends.load("torch"), "unavailable", lambda: "no such card", raising=False)
    line = await start_failure(model)
    assert "VLLM_OVERLAY_KERNELS_NORMS=torch: norms: back end 'torch' cannot run here: no such card" in line


async def test_an_attention_back_end_of_another_device(model, monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH_ATTN")
    choice.selector.get_attn_backend.cache_clear()
    assert "VLLM_ATTENTION_BACKEND=FLASH_ATTN: only TORCH_SDPA runs on the CPU" in await start_failure(model)


async def test_a_worker_that_must_use_another_back_end(model):
    """On which the library of the announced one does not load, say: the start fails with the worker's reason."""
    engine_args = AsyncEngineArgs(model=str(model), dtype="float32", max_model_len=256, disable_log_stats=True)
    choices = {"attention": "torch-paged", "paged_attention": "cuda"}
    with announced.announced(choices), pytest.raises(StartError) as caught:
        async with engine_client.in_own_process(engine_args, engine_args.create_engine_config()):
            pass
    line = str(caught.value)
    assert re.fullmatch(r"paged_attention: the server announced back end cuda, but process \d+ can only use native "
                        r"\(.*\): repair that, or set VLLM_OVERLAY_KERNELS_PAGED_ATTENTION=native", line), line


@pytest.mark.parametrize(("extra", "words"), [
    (["--reasoning-parser", "qwen4"], "--reasoning-parser qwen4 is not known; choose from qwen3"),
    (["--tool-call-parser", "hermes"], "--tool-call-parser hermes is not known; choose from qwen3_coder"),
    (["--enable-auto-tool-choice"], "--enable-auto-tool-choice needs --tool-call-parser"),
    (["--lora-modules", "a=b"], "--lora-modules"),
    (["--model", "/no/such/folder"], "there is no checkpoint at /no/such/folder"),
])
def test_options(extra, words):
    with pytest.raises(StartError, match=words):
        server.check_args(arguments(*extra))


async def start_failure(model, *extra: str) -> str:
    """Why a server over this folder does not start; nothing of it reaches an engine."""
    args = arguments("--model", str(model), "--dtype", "float32", *extra)
    with server.bind("127.0.0.1", 0) as sock, pytest.raises(StartError) as caught:
        await server._serve(args, sock, {}, "", Phases(0.0))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def model(tmp_path):
    make_qwen2(tmp_path / "model")
    for file in tokenizer_folder(small=SMALL).iterdir():
        shutil.copy(file, tmp_path / "model")
    return tmp_path / "model"


async def test_an_unknown_architecture(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    line = await start_failure(model)
    assert "NoSuchForCausalLM" in line and "not supported" in line and len(line) < 400, line


async def test_an_unknown_model_type(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "nosuch"}))
    assert "nosuch" in await start_failure(model)


async def test_a_context_that_the_model_does_not_have(model):
    assert "max_model_len" in await start_failure(model, "--max-model-len", "100000")


async def test_a_tokenizer_without_the_control_tokens(model):
    tokens = json.loads((model / "tokenizer.json").read_text())
    tokens["added_tokens"] = [token for token in tokens["added_tokens"] if "think" not in token["content"]]
    (model / "tokenizer.json").write_text(json.dumps(tokens))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {i: token for i, token in config["added_tokens_decoder"].items()
                                      if "think" not in token["content"]}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    line = await start_failure(model, "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder")
    assert "<think>" in line and "</think>" in line and "<tool_call>" not in line and "--reasoning-parser" in line, line


@pytest.mark.parametrize("left", [(), ("vocab.json",), ("tokenizer_config.json", "merges.txt")])
async def test_no_tokenizer(model, left):
    """Whatever of it is left, unless it is enough for one."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).unlink()
    for file in left:
        (model / file).write_text("{}")
    line = await start_failure(model)
    assert f"there is no tokenizer in {model}: tokenizer.json is missing" in line and "--tokenizer" in line, line


async def test_a_broken_tokenizer_is_not_called_missing(model):
    (model / "tokenizer.json").write_text("{")
    line = await start_failure(model)
    assert str(model) in line and "is missing" not in line, line


async def test_a_broken_generation_config(model):
    (model / "generation_config.json").write_text('{"temperature": "warm"}')
    assert "temperature" in await start_failure(model)


def test_sampling_defaults(model):
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": true}')
    assert server.sampling_defaults("auto", str(model)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert server.sampling_defaults("vllm", str(model)) == {}
    assert server.sampling_defaults(str(model), "/elsewhere") == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


async def test_no_first_token():
    """Ready means that a token was produced: where that fails, the server does not start."""
    service = Service(FakeEngine(error=RuntimeError("the card is sick")), tokenizer(), settings())
    with pytest.raises(StartError, match="first token could not be produced: the card is sick"):
        await server.warm_up(service)
    healthy = FakeEngine()
    await server.warm_up(Service(healthy, tokenizer(), settings()))
    assert healthy.requests[0][1].max_tokens == 1


async def test_the_engine_ends_while_the_server_waits():
    engine = engine_client.Engine(FakeEngine())
    asyncio.get_running_loop().call_later(0.05, engine.failed.set_result, "killed by signal 9")
    with pytest.raises(StartError, match="killed by signal 9"):
        await server._while_alive(engine, asyncio.sleep(30))


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("two\n  lines"), "two lines"),
    (KeyError("x"), "KeyError: 'x'"),
    (RuntimeError(), "RuntimeError: "),
    (ValueError("['X'] are not supported for now. Supported architectures: dict_keys([1, 2])"),
     "['X'] are not supported for now."),
])
def test_one_line(error, line):
    assert one_line(error) == line


@pytest.mark.parametrize(("extra", "changes", "line"), [
    ([], {}, "curl http://127.0.0.1:8000/v1/chat/completions "),
    (["--host", "0.0.0.0", "--port", "9"], {}, "curl http://127.0.0.1:9/v1/chat/completions "),
    (["--host", "::1"], {}, "curl http://[::1]:8000/v1/chat/completions "),
    (["--host", "box", "--root-path", "/api"], {}, "curl http://box:8000/api/v1/chat/completions "),
    (["--api-key", "k"], {}, " -H 'Authorization: Bearer YOUR_KEY' "),
])
def test_ready_lines(extra, changes, line):
    text = server.ready_lines(arguments(*extra), Service(FakeEngine(), tokenizer(), settings(**changes)))
    assert text.startswith("Ready: llm at http") and line in text and "context 4096" in text, text
    base = text.split()[3]
    assert text.endswith(f"\nOr chat in a browser: {base}/"), text
    silent = server.ready_lines(arguments(*extra, "--disable-web-page"), Service(FakeEngine(), tokenizer(), settings()))
    assert "browser" not in silent and line in silent, silent
