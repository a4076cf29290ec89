"""What stock vLLM 0.6.3 on the CPU needs of its build and of its environment."""
import importlib.metadata
import subprocess
import sys
from pathlib import Path

from tests.helpers import tiny_models

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_OUTLINES = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("outlines", "pyairports"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
import vllm.entrypoints.openai.api_server
from tests.helpers.tiny_models import greedy, make_engine, run
(output, ) = run(make_engine(sys.argv[1]), [[1, 2, 3]], greedy(2))
print("TOKENS", len(output.outputs[0].token_ids))
"""


def test_stock_knows_that_it_is_built_for_the_cpu():
    """`is_cpu()` looks for "cpu" in the distribution's version, which PyPI's source package does not have."""
    from vllm.utils import is_cpu
    assert is_cpu() and importlib.metadata.version("vllm") == "0.6.3+cpu"


def test_a_plain_request_never_imports_outlines(qwen2):
    """It is not installed, because its pyairports is broken on PyPI."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_OUTLINES, str(qwen2)], cwd=ROOT, text=True, timeout=200,
                          env=tiny_models.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and "TOKENS 2" in done.stdout, done.stdout[-3000:]
