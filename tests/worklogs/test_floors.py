"""What tokens cost at least: against counts by hand and against the checkpoint's own tensors."""
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "worklogs"))
import make_slice  # noqa: E402
import random_checkpoint  # noqa: E402
from bench.floors import floors  # noqa: E402

CONFIG = make_slice.slice_config(json.loads((ROOT / "worklogs" / "model" / "config.json").read_text()), 4, 64, 151_936,
                                 "bfloat16")
SLICE = floors(CONFIG)


def test_all_matrices_of_the_checkpoint_are_counted():
    """Its vectors (norms, biases) are what is left."""
    counted = SLICE.dense + SLICE.experts * SLICE.expert + 2 * SLICE.head
    shapes = [spec.shape for spec in random_checkpoint.tensors(CONFIG)]
    assert counted == sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    assert sum(math.prod(shape) for shape in shapes if len(shape) == 1) < counted / 10_000


def test_bytes_of_a_step_by_hand():
    """One token meets 484 MB of layers and 622 MB of head; its state is 6.3 MB, read and written; KV 2 KB a token."""
    assert SLICE.step_bytes(1, 0) == pytest.approx(484.4e6 + 622.3e6 + 2 * 6.29e6 + 0.29e6, rel=1e-3)
    assert SLICE.step_bytes(1, 1000) - SLICE.step_bytes(1, 0) == 1000 * 2048
    every = SLICE.step_bytes(100_000, 0, sequences=1) - SLICE.step_bytes(1, 0)
    assert every == pytest.approx(2 * 56 * SLICE.expert), "no more experts than there are"
    assert SLICE.step_bytes(16, 0) > SLICE.step_bytes(4, 0) > SLICE.step_bytes(1, 0)


def test_operations_of_a_prompt_by_hand():
    body = 2 * (SLICE.dense + 8 * SLICE.expert)
    assert SLICE.prompt_flops(8192) == pytest.approx(
        body + 2 * SLICE.head / 8192 + 7 * 3 * 32 * 128 * 128 + 4 * 16 * 256 * 4096.5)
    assert SLICE.growth(2048, 32768) == pytest.approx(1.49, abs=0.005)


def test_a_dense_model_has_no_experts():
    text = {**CONFIG, "intermediate_size": 1000}
    del text["num_experts"]
    found = floors({"text_config": text}, width=1)
    assert found.experts == found.expert == 0 and found.step_bytes(5, 0) < SLICE.step_bytes(5, 0)
    with pytest.raises(KeyError, match="hidden_size"):
        floors({})
