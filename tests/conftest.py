"""Environment of every test process, whether tests/run.py or a person started it."""
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for name, value in {
    # Two suites share two cores; more threads than that make decode steps ten times slower.
    "OMP_NUM_THREADS": "1",
    # No hub can be reached, and a slow answer of one would delay every start.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_OVERLAY_REFERENCE_PYTHON": str(ROOT / ".venv-reference/bin/python"),
    "VLLM_OVERLAY_TEST_CACHE": str(ROOT / ".cache/test"),
}.items():
    os.environ.setdefault(name, value)
