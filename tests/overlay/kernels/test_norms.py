"""The norms against their definitions."""
import pytest
import torch

from tests.overlay.kernels.helpers import DTYPES, ROUNDING, assert_close, no_host_sync, relative_error
from vllm.overlay.kernels import blocks
from vllm.overlay.kernels import norms as op

REFERENCE = op.backends.load("reference")
SHAPES = [(1, 1), (5, 130), (0, 16), (7, 3, 33), (4, 2, 256), (9, )]


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gemma, elements", [(True, 1 << 17), (False, 1 << 17), (True, 40)])
def test_rms_norm(dtype, shape, gemma, elements, monkeypatch):
    monkeypatch.setattr(blocks, "_ELEMENTS", elements)
    x, residual = normal(0, *shape).to(dtype), normal(1, *shape).to(dtype)
    weight = normal(2, shape[-1]).to(dtype)
    before = x.clone(), residual.clone()
    got = op.rms_norm(x, weight, 1e-6, gemma=gemma)
    assert_close(got, REFERENCE.rms_norm(x, weight, 1e-6, None, gemma), ROUNDING[dtype], "without residual")
    got, total = op.rms_norm(x, weight, 1e-6, residual, gemma)
    want, want_total = REFERENCE.rms_norm(x, weight, 1e-6, residual, gemma)
    assert torch.equal(total, want_total), "the sum is rounded once, to the dtype"
    assert_close(got, want, ROUNDING[dtype], "with residual")
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1]), "an input was changed"


def test_gemma_adds_one():
    x = normal(3, 4, 32)
    zero = torch.zeros(32)
    assert_close(op.rms_norm(x, zero, 0.0).pow(2).mean(-1), torch.ones(4), 1e-6, "mean square")
    assert not op.rms_norm(x, zero, 0.0, gemma=False).any()


def test_the_square_of_a_large_float16_does_not_overflow():
    x = torch.full((2, 64), 60000.0, dtype=torch.float16)
    assert_close(op.rms_norm(x, torch.zeros(64), 1e-6), torch.ones(2, 64, dtype=torch.float16), 1e-3, "large")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("elements", [1 << 17, 40])
def test_gated_rms_norm(dtype, shape, elements, monkeypatch):
    monkeypatch.setattr(blocks, "_ELEMENTS", elements)
    o, z, weight = 1e6 * normal(4, *shape), normal(5, *shape).to(dtype), normal(6, shape[-1]).to(dtype)
    before = o.clone()
    got = op.gated_rms_norm(o, z, weight, 1e-6)
    assert_close(got, REFERENCE.gated_rms_norm(o, z, weight, 1e-6), ROUNDING[dtype], "gated")
    assert torch.equal(o, before)


def test_the_gate_comes_after_the_norm():
    o, z, weight = normal(7, 3, 16), normal(8, 3, 16), torch.ones(16)
    gate = z * torch.sigmoid(z)
    before = op.rms_norm(o * gate, weight, 1e-6, gemma=False)
    got = op.gated_rms_norm(o, z, weight, 1e-6)
    assert_close(got, op.rms_norm(o, weight, 1e-6, gemma=False) * gate, 1e-6, "norm, then gate")
    assert relative_error(got, before) > 0.1


def test_a_readout_that_was_rounded_is_refused():
    with pytest.raises(ValueError, match="float32 until here"):
        op.gated_rms_norm(torch.zeros(2, 4, dtype=torch.float16), torch.zeros(2, 4), torch.ones(4), 1e-6)


def test_non_finite_values_stay_in_their_row():
    x = normal(9, 3, 8)
    x[1, 2] = float("inf")
    got = op.rms_norm(x, torch.zeros(8), 1e-6)
    assert not torch.isfinite(got[1]).all() and torch.isfinite(got[[0, 2]]).all()


def test_nothing_waits_for_the_device(monkeypatch):
    x = normal(10, 3, 8)
    module = op.backends.load("torch")
    with no_host_sync(monkeypatch):
        module.rms_norm(x, x[0], 1e-6, x, True)
        module.gated_rms_norm(x, x, x[0], 1e-6)
