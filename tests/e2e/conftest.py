"""The demo checkpoint behind the Makefile's command, started once for the suite."""
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.demo_checkpoint import demo_checkpoint
from tests.helpers.demo_server import Demo
from tests.helpers.server_process import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    port = free_port()
    environment = {**os.environ, "PYTHON": sys.executable, "NAME": "llm", "HOST": "127.0.0.1", "PORT": str(port)}
    command = ["bash", ROOT / "requirements/serve.sh", demo_checkpoint(), "--enable-reset-prefix-cache"]
    started = Demo(command, port, tmp_path_factory.mktemp("demo") / "log", environment)
    try:
        yield started.wait_until_ready()
    finally:
        status = started.end(ask=True)
    assert status == 0, f"ended with {status} after SIGTERM:\n{started.output()[-3000:]}"
    # Python's tracker complains of what a killed engine leaves, as the one does that a test kills.
    ending = started.output().rpartition("Shutting down")[2]
    assert "leaked" not in ending and "is killed" not in ending, ending
