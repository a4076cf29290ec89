"""Weights in int8: how they are made, and products with them against the float32 reference."""
import pytest
import torch

from tests.overlay.kernels.helpers import DTYPES, assert_close, runnable
from vllm.overlay.kernels import int8_weights as op
from vllm.overlay.kernels.int8_weights import torch_impl
from vllm.overlay.kernels.panels import Panels

REFERENCE = op.backends.load("reference")
BACKENDS = runnable(op.backends)
# Restored weights and the result are rounded to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 4, 17), (2, 0), (0, 8)])
def test_a_weight_moves_by_half_a_step_at_most(shape, dtype):
    weight = normal(0, *shape).to(dtype)
    if not weight.numel():
        return
    values, scale = op.quantise(weight)
    assert values.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == weight.shape[:-1]
    assert torch.equal(scale, weight.float().abs().amax(-1) / 127)
    moved = (values * scale.unsqueeze(-1) - weight.float()).abs()
    assert bool((moved <= scale.unsqueeze(-1) * 0.5001).all()), moved.max()
    assert bool((values.abs().amax(-1) == 127).all())


def test_blocks_change_nothing(monkeypatch):
    weight = normal(1, 3, 50, 20)
    whole = op.quantise(weight)
    monkeypatch.setitem(op.quantise_into.__globals__, "_BLOCK", 7 * 20)
    assert all(torch.equal(a, b) for a, b in zip(op.quantise(weight), whole, strict=True))


def test_rows_of_zeros_and_rows_that_are_not_finite():
    weight = normal(2, 4, 6)
    weight[1], weight[2, 3], weight[3, 0] = 0, float("nan"), float("inf")
    values, scale = op.quantise(weight)
    y = op.int8_linear(torch.ones(1, 6), values, scale)[0]
    assert scale[1] == 0 and y[1] == 0
    assert y[0].isfinite() and y[2].isnan() and not y[3].isfinite(), y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens, rows, columns, bias", [(1, 3, 5, False), (4, 70, 33, True), (0, 4, 8, True),
                                                         (9, 64, 128, False), (23, 130, 300, True)])
def test_products_equal_the_reference(tokens, rows, columns, bias, backend, dtype):
    """Rows with NaN between them, which must not be read."""
    values, scale = op.quantise(normal(3, rows, columns) * columns**-0.5)
    wide = torch.full((tokens, columns + 3), float("nan"), dtype=dtype)
    wide[:, 1:-2] = normal(4, tokens, columns).to(dtype)
    added = normal(5, rows).to(dtype) if bias else None
    got = op.backends.load(backend).int8_linear(wide[:, 1:-2], values, scale, added)
    assert got.dtype == dtype
    assert_close(got, REFERENCE.int8_linear(wide[:, 1:-2], values, scale, added), TOLERANCE[dtype], backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_change_nothing(dtype, monkeypatch):
    values, scale = op.quantise(normal(3, 70, 33) * 33**-0.5)
    x, added = normal(4, 4, 33).to(dtype), normal(5, 70).to(dtype)
    right = REFERENCE.int8_linear(x, values, scale, added)
    for tile in (1 << 20, 16 * 33, 1):
        monkeypatch.setattr(torch_impl, "_TILE_CPU", tile)
        assert_close(torch_impl.int8_linear(x, values, scale, added), right, TOLERANCE[dtype], f"tiles of {tile}")


def experts_case(tokens, dtype=torch.float32):
    """Nobody chooses expert 4, whose scales are NaN."""
    w13, s13 = op.quantise(normal(6, 5, 34, 16) / 4)
    w2, s2 = op.quantise(normal(7, 5, 16, 17) / 2)
    x, weights = normal(8, tokens, 16).to(dtype), torch.rand(tokens, 2, generator=torch.Generator().manual_seed(10))
    ids = torch.randint(0, 4, (tokens, 2), generator=torch.Generator().manual_seed(9))
    s13[4], s2[4] = float("nan"), float("nan")
    return x, w13, s13, w2, s2, weights, ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 90])
def test_experts_equal_the_reference(tokens, backend, dtype):
    case = experts_case(tokens, dtype)
    got = op.backends.load(backend).int8_experts(*case)
    assert_close(got, REFERENCE.int8_experts(*case), TOLERANCE[dtype], backend)


@pytest.mark.skipif("native" not in BACKENDS, reason="no compiled operators here")
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_equal_the_reference_in_any_batch(dtype):
    module = op.backends.load("native")
    values, scale = op.quantise(normal(3, 96, 524) * 524**-0.5)
    values[5, :256] = torch.arange(-128, 128)
    x, added = normal(4, 70, 524).to(dtype), normal(5, 96).to(dtype)
    packed = module.pack(values.clone(), 96, dtype)
    assert isinstance(packed, Panels) and packed.operand == dtype and packed.dtype == torch.int8
    whole = module.int8_linear(x, packed, scale, added)
    assert_close(whole, REFERENCE.int8_linear(x, values, scale, added), TOLERANCE[dtype], "packed")
    for rows in (0, 1, 3, 12, 13, 30):
        assert torch.equal(module.int8_linear(x[:rows], packed, scale, added), whole[:rows]), rows
    with pytest.raises(ValueError, match="a weight that is packed for"):
        op.int8_linear(x.double(), packed, scale, None)


@pytest.mark.skipif("native" not in BACKENDS, reason="no compiled operators here")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden, inner", [(64, 32), (42, 32), (64, 18)])
def test_packed_experts_equal_the_reference(dtype, hidden, inner):
    module = op.backends.load("native")
    w13, s13 = op.quantise(normal(6, 5, 2 * inner, hidden) * hidden**-0.5)
    w2, s2 = op.quantise(normal(7, 5, hidden, inner) * inner**-0.5)
    x, weights = normal(8, 90, hidden).to(dtype), torch.rand(90, 2, generator=torch.Generator().manual_seed(10))
    ids = torch.randint(0, 5, (90, 2), generator=torch.Generator().manual_seed(9))
    packed = module.pack(w13.clone(), inner, dtype), module.pack(w2.clone(), hidden, dtype)
    assert [isinstance(one, Panels) for one in packed] == [inner % 32 == 0, hidden % 32 == 0]
    got = module.int8_experts(x, packed[0], s13, packed[1], s2, weights, ids)
    assert_close(got, REFERENCE.int8_experts(x, w13, s13, w2, s2, weights, ids), TOLERANCE[dtype], "packed")


@pytest.mark.parametrize("path", ["experts_grouped", "experts_gathered"])
def test_both_paths_of_torchs_experts_equal_the_reference(path, monkeypatch):
    case = experts_case(7)
    monkeypatch.setattr(torch_impl.moe, "experts", getattr(torch_impl.moe, path))
    assert_close(torch_impl.int8_experts(*case), REFERENCE.int8_experts(*case), 2e-6, path)


@pytest.mark.skipif("native" not in BACKENDS, reason="no compiled operators here")
def test_native_refuses_an_expert_that_is_none():
    *case, ids = experts_case(3)
    ids[2, 1] = 5
    with pytest.raises(IndexError, match="none of 5 experts"):
        op.backends.load("native").int8_experts(*case, ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_does_not_overflow_in_between(backend):
    values, scale = op.quantise(torch.full((1, 4096), 0.02))
    y = op.backends.load(backend).int8_linear(torch.full((1, 4096), 8.0, dtype=torch.float16), values,
                                            scale, None)
    assert abs(y.item() - 4096 * 8 * 0.02) < 1


@pytest.mark.parametrize("call, message", [
    (lambda v, s: op.int8_linear(torch.ones(2, 5), v, s), r"x \(2, 5\), weight \(3, 4\)"),
    (lambda v, s: op.int8_linear(torch.ones(2, 4), v.float(), s), "weight torch.float32"),
    (lambda v, s: op.int8_linear(torch.ones(2, 4), v, s[:2]), r"its scale torch.float32 \(2,\)"),
    (lambda v, s: op.int8_linear(torch.ones(2, 4), v, s, torch.ones(2)), r"bias \(2,\)"),
    (lambda v, s: op.quantise_into(torch.ones(3, 5), v, s), r"weight \(3, 5\) into torch.int8 \(3, 4\)"),
    (lambda v, s: op.int8_experts(torch.ones(2, 4), v[None], s[None], v[None], s[None], torch.ones(2, 1),
                                  torch.zeros(2, 1, dtype=torch.int64)), r"w13 \(1, 3, 4\)"),
])
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(*op.quantise(torch.ones(3, 4)))
