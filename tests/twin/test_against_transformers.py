"""The modules that need transformers 5, run in the environment that has it (the server's has 4)."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
# pytest and Pillow are the server environment's. They come last, so that the reference's transformers is found first.
RUN = "import sys; sys.path.append(sys.argv.pop(1)); import pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.parametrize("module", ["test_model.py", "test_judge.py"])
def test_module(module: str) -> None:
    python = os.environ["VLLM_OVERLAY_REFERENCE_PYTHON"]
    assert Path(python).exists(), f"{python} does not exist: `make env-reference` makes it"
    words = [python, "-c", RUN, sysconfig.get_path("purelib"), "-p", "no:cacheprovider", "-q", "-rs",
             str(FOLDER / module)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout
