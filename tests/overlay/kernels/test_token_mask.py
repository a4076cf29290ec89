"""Token masks against the loop over bits: every dtype, rows in any order, and nothing else touched."""
import random
import statistics
import time

import pytest
import torch

from tests.overlay.kernels.helpers import DTYPES, recorded
from vllm.overlay.kernels import token_mask as op
from vllm.overlay.kernels.token_mask import torch_impl

REFERENCE = op.backends.load("reference")


def masks(seed: int, rows: int, words: int) -> torch.Tensor:
    return torch.randint(-2**31, 2**31, (rows, words), generator=torch.Generator().manual_seed(seed)).int()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most_rows", [1, 3, 16])
def test_equal_to_the_reference_in_every_bit(dtype, most_rows, monkeypatch):
    monkeypatch.setitem(torch_impl._ROWS, "cpu", most_rows)
    rng = random.Random(most_rows)
    for trial in range(20):
        total, vocab = rng.randint(1, 9), rng.choice([1, 31, 32, 33, 64, 500])
        words = max(1, -(-vocab // 32) + rng.choice([-1, 0, 0, 1]))
        rows = rng.sample(range(total), rng.randint(1, total))
        logits = torch.randn(total, vocab, generator=torch.Generator().manual_seed(trial)).to(dtype)
        mask = masks(trial, len(rows), words)
        want, got = logits.clone(), logits.clone()
        REFERENCE.apply_token_mask(want, mask, rows)
        op.apply_token_mask(got, mask, rows)
        what = f"trial {trial}: rows {rows} of {total}, vocabulary {vocab}, {words} words"
        assert torch.equal(got, want), what
        others = [row for row in range(total) if row not in rows]
        assert torch.equal(got[others], logits[others]), what


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_which_bit_is_which_token(backend):
    logits = torch.zeros(2, 70)
    mask = torch.zeros(1, 3, dtype=torch.int32)
    mask[0, 0], mask[0, 1], mask[0, 2] = 1 << 5, -2**31, 0b100001
    op.backends.load(backend).apply_token_mask(logits, mask, [1])
    assert (logits[1] == 0).nonzero().flatten().tolist() == [5, 63, 64, 69]
    assert not logits[0].any()


def test_what_is_not_finite_is_passed_on():
    logits = torch.tensor([[float("nan"), float("nan"), -float("inf"), -float("inf"), float("inf")]])
    op.apply_token_mask(logits, torch.tensor([[0b10101]], dtype=torch.int32), [0])
    assert logits.isnan().tolist() == [[True, True, False, False, False]]
    assert logits[0, 2:].tolist() == [-float("inf"), -float("inf"), float("inf")]


def test_a_mask_for_every_row_and_no_rows_at_all():
    logits = torch.randn(3, 40)
    with pytest.raises(ValueError, match="2 masks for 1 rows"):
        op.apply_token_mask(logits, masks(0, 2, 2), [1])
    before = logits.clone()
    op.apply_token_mask(logits, masks(0, 0, 2), [])
    assert torch.equal(before, logits)


def test_neighbouring_rows_are_one_operation(monkeypatch):
    monkeypatch.setitem(torch_impl._ROWS, "cpu", 16)
    op.apply_token_mask(torch.randn(6, 64), masks(0, 1, 2), [0])
    with recorded() as recorder:
        op.apply_token_mask(torch.randn(6, 64), masks(0, 5, 2), [1, 2, 3, 4, 0])
    assert len([name for name in recorder.names if "index_select" in name]) == 2, recorder.names


def test_a_row_of_the_real_vocabulary_is_cheap():
    """0.2 ms where nothing else runs (worklogs/grammar_bench.py measures); the bound leaves room for a busy machine."""
    logits, mask = torch.randn(1, 248320), masks(0, 1, 7760)
    times = []
    for _ in range(30):
        began = time.perf_counter()
        op.apply_token_mask(logits, mask, [0])
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 2e-3, f"median {statistics.median(times) * 1e6:.0f} us"
