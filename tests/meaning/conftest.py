"""Servers over the twin: one as `make serve` starts it, in float32, and others under stress, each started once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.live_server import LiveServer
from tests.helpers.server_process import ServerProcess, free_port
from tests.meaning.served import Twin

ROOT = Path(__file__).resolve().parents[2]
# The twin's programs import one another by their plain names.
sys.path.insert(0, str(ROOT / "tests/twin"))
# Another one while the twin is still in training.
CHECKPOINT = Path(os.environ.get("TWIN_CHECKPOINT") or ROOT / "tests/twin/checkpoint")
# Of the stressed server: tokens of a step, of a request, and blocks of 16 tokens for all requests together.
BUDGET, CONTEXT, BLOCKS = 64, 512, 34


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Twin]]:
    """Starts a server with further arguments; all end with the session."""
    started: list[ServerProcess] = []

    def begin(*arguments: str) -> Twin:
        port = free_port()
        environment = {**os.environ, "PYTHON": sys.executable, "NAME": "llm", "HOST": "127.0.0.1", "PORT": str(port)}
        command = ["bash", ROOT / "requirements/serve.sh", CHECKPOINT, *arguments]
        server = ServerProcess(command, port, tmp_path_factory.mktemp("twin") / "log", environment)
        started.append(server)
        return Twin(server.wait_until_ready().base)

    yield begin
    ended = [server.end(ask=True) for server in started]
    assert not any(ended), f"ended with {ended} after SIGTERM"


@pytest.fixture(scope="session")
def plain(start: Callable[..., Twin]) -> Twin:
    return start("--dtype", "float32")


@pytest.fixture(scope="session")
def two_ranks(start: Callable[..., Twin]) -> Twin:
    return start("--dtype", "float32", "--tensor-parallel-size", "2")


@pytest.fixture(scope="session")
def half(start: Callable[..., Twin]) -> Twin:
    return start("--dtype", "bfloat16")


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """In this process, so that it can be looked into and broken: small steps, and hardly any space for KV."""
    # As requirements/serve.sh: on a busy machine an engine may not get its turn for a minute.
    os.environ.setdefault("VLLM_ENGINE_ITERATION_TIMEOUT_S", "3600")
    server = LiveServer(CHECKPOINT, tmp_path_factory.mktemp("s"), "--max-num-seqs", "8", "--max-num-batched-tokens",
                        str(BUDGET), "--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", str(BLOCKS))
    yield server
    server.close()


@pytest.fixture
def stressed(live: LiveServer) -> Twin:
    return Twin(f"http://127.0.0.1:{live.port}")
