"""One server for the whole suite: ours over the small demo checkpoint, or the one at CONFORMANCE_BASE_URL."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.target import Target
from tests.helpers.server_process import ServerProcess, free_port
from tests.helpers.small_demo import small_demo

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As `make serve` starts it, and with what lets tests force outputs and see what is left of requests."""
    port = free_port()
    environment = {**os.environ, "PYTHON": sys.executable, "NAME": "llm", "HOST": "127.0.0.1", "PORT": str(port),
                   "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = ServerProcess(["bash", ROOT / "requirements/serve.sh", small_demo(), "--dtype", "float32",
                             "--middleware", "tests.conformance.forcing.Forcing",
                             "--middleware", "tests.conformance.inside.Inside"], port,
                            tmp_path_factory.mktemp("conformance") / "log", environment)
    try:
        yield started.wait_until_ready()
    finally:
        status = started.end(ask=True)
    assert status == 0, f"ended with {status} after SIGTERM:\n{started.output()[-3000:]}"


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The server that the checks are run against."""
    base = os.environ.get("CONFORMANCE_BASE_URL")
    if base:
        return Target(base, os.environ.get("CONFORMANCE_MODEL", "llm"), os.environ.get("CONFORMANCE_KEY", "none"))
    return Target(request.getfixturevalue("own_server").base)
