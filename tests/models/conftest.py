"""What the tests of the hybrid model share: Hugging Face's answers, computed in the background, small checkpoints."""
import concurrent.futures
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.models.shapes import moe, text
from worklogs.random_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def ask_reference(folder: Path) -> None:
    """Fills `folder`: the bench slice with 8 experts in `slice`, and what reference_program.py writes."""
    python = os.environ.get("VLLM_OVERLAY_REFERENCE_PYTHON", "")
    if not python or not Path(python).exists():
        raise FileNotFoundError(f"VLLM_OVERLAY_REFERENCE_PYTHON is {python!r}, which does not exist: "
                                f"`make env-reference` makes the environment with Hugging Face transformers 5")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    slice_folder = folder / "slice"
    make_slice = [sys.executable, ROOT / "worklogs/make_slice.py", "--experts", "8", "--vocab", "8192", slice_folder]
    for command in (make_slice, [python, Path(__file__).with_name("reference_program.py"), folder, slice_folder]):
        done = subprocess.run([str(part) for part in command], env=environment, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"{command[1]} failed:\n{done.stdout}")


@pytest.fixture(scope="session", autouse=True)
def _asking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Starts the reference while other tests run, if any test wants it."""
    if not any("reference" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    folder = tmp_path_factory.mktemp("reference")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield folder, pool.submit(ask_reference, folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def reference(_asking) -> Path:
    """Folder with the reference's checkpoints and answers (see reference_program.py)."""
    folder, future = _asking
    error = future.exception()
    if error is not None:
        pytest.fail(str(error), pytrace=False)
    return folder


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture-of-experts checkpoint in float32 that two ranks can share."""
    config = {**text(64, 4, 4, (4, 2, 32), (2, 4, 16, 16), 4, 0.5, **moe(4, 2, 24, 40)),
              "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "float32",
              "tie_word_embeddings": False}
    folder = tmp_path_factory.mktemp("hybrid") / "checkpoint"
    write_checkpoint(folder, config, seed=3, adjust=flatter)
    return folder


def flatter(name: str, _first: int, block: np.ndarray) -> None:
    """Logits of deviation 1/4: rounding, which grows with them, then stays at half the law's 1e-5 and below."""
    if name == "lm_head.weight":
        block /= 8
