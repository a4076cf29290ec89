"""The demo checkpoint behind the Makefile's command, started once for the suite."""
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.demo_server import Demo
from tests.helpers.server_process import free_port
from tests.helpers.tokenizer import cache_folder, tokenizer_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The demo checkpoint, made by the programs that the Makefile runs; anew when one of them has changed."""
    digest = hashlib.sha256(tokenizer_folder().name.encode())
    for name in ("make_demo_checkpoint.py", "random_checkpoint.py"):
        digest.update((ROOT / "worklogs" / name).read_bytes())
    folder = cache_folder() / f"demo-{digest.hexdigest()[:16]}"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, ROOT / "worklogs/make_demo_checkpoint.py", folder, "--tokenizer",
                        tokenizer_folder()], check=True)
    return folder


@pytest.fixture(scope="session")
def demo(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    port = free_port()
    environment = {**os.environ, "PYTHON": sys.executable, "NAME": "llm", "HOST": "127.0.0.1", "PORT": str(port)}
    command = ["bash", ROOT / "requirements/serve.sh", checkpoint, "--enable-reset-prefix-cache"]
    started = Demo(command, port, tmp_path_factory.mktemp("demo") / "log", environment)
    try:
        yield started.wait_until_ready()
    finally:
        status = started.end(ask=True)
    assert status == 0, f"ended with {status} after SIGTERM:\n{started.output()[-3000:]}"
