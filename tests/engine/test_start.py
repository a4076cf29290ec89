"""A start that cannot succeed: one line, exit status 1, and an end."""
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import tiny_models

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from vllm import AsyncEngineArgs
from vllm.engine.multiprocessing.engine import run_mp_engine
from vllm.overlay.runtime import platform_cpu
from vllm.usage.usage_lib import UsageContext
platform_cpu.available_memory = lambda: int(sys.argv[3])
arguments = AsyncEngineArgs(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_num_batched_tokens=64,
                            max_num_seqs=8)
run_mp_engine(arguments, UsageContext.API_SERVER, "ipc://" + sys.argv[2])
"""


@pytest.mark.parametrize("free, message", [
    (1 << 20, "The engine cannot start: too little memory: the KV cache of one sequence of max_model_len 2048 takes"),
])
def test_the_engine_process(qwen2, tmp_path, free, message):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(qwen2), str(tmp_path / "engine"), str(free)], cwd=ROOT,
                          text=True, timeout=240, env=tiny_models.environment(), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    errors = [line for line in done.stdout.splitlines() if "ERROR" in line]
    assert done.returncode == 1 and len(errors) == 1 and message in errors[0], done.stdout[-3000:]
    assert "Traceback" not in done.stdout, done.stdout[-3000:]
