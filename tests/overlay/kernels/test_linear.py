"""Dense products: every back end against the reference, and what compiled code owes beyond that."""
import pytest
import torch

from tests.overlay.kernels.helpers import runnable
from vllm.overlay.kernels import linear, native
from vllm.overlay.kernels.linear import backends

BACKENDS = [*runnable(backends), "reference"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def made(rows, count, size, dtype, bias=False):
    gen = torch.Generator().manual_seed(rows * count + size)
    x = torch.randn(rows, size, generator=gen).to(dtype)
    weight = (torch.randn(count, size, generator=gen) * size**-0.5).to(dtype)
    return x, weight, torch.randn(count, generator=gen).to(dtype) if bias else None


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows, count, size", [(1, 1, 1), (1, 130, 257), (2, 5, 31), (3, 64, 16), (16, 33, 40),
                                               (17, 9, 24), (65, 12, 20), (0, 8, 8),
                                               (20, 131, 520), (25, 33, 257), (31, 300, 7)])
def test_against_the_reference(backend, dtype, rows, count, size):
    x, weight, bias = made(rows, count, size, dtype, bias=rows % 2 == 1)
    truth = backends.load("reference").linear(x, weight, bias)
    got = backends.load(backend).linear(x, weight, bias)
    assert got.shape == truth.shape and got.dtype == truth.dtype
    error = (got.float() - truth.float()).abs().max().item() if rows else 0.0
    print(backend, dtype, (rows, count, size), "error", error)
    assert error <= TOLERANCE[dtype] * max(1.0, truth.float().abs().max().item() if rows else 0.0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_apart_and_other_shapes(backend, dtype):
    """Rows with NaN between them, which must not be read."""
    x, weight, _ = made(5, 40, 24, dtype)
    wide = torch.full((5, 30), float("nan"), dtype=dtype)
    wide[:, 3:27] = x
    module = backends.load(backend)
    truth = backends.load("reference").linear(x, weight, None)
    close = {"rtol": 0, "atol": TOLERANCE[dtype] * truth.abs().max().item()}
    torch.testing.assert_close(module.linear(wide[:, 3:27], weight, None), truth, **close)
    torch.testing.assert_close(module.linear(x.view(5, 1, 24), weight, None), truth.view(5, 1, 40), **close)


@pytest.mark.skipif("native" not in BACKENDS, reason="no compiled operators here")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_neither_batch_nor_threads_change_a_row(dtype):
    """Few rows are summed in one order, many in another."""
    x, weight, _ = made(63, 4000, 300, dtype)
    module, threads = backends.load("native"), torch.get_num_threads()
    few, many = module.linear(x[:16], weight, None), module.linear(x, weight, None)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (1, 2, 3, 4, 5, 6, 7, 9, 16):
                assert torch.equal(module.linear(x[:rows], weight, None), few[:rows]), (count, rows)
            for rows in () if native.library_multiplies(dtype) else (20, 24, 25, 63):
                assert torch.equal(module.linear(x[:rows], weight, None), many[:rows]), (count, rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_is_passed_on(backend):
    x, weight, _ = made(2, 6, 19, torch.float32)
    x[0, 18], weight[4, 2] = float("nan"), float("inf")
    out = backends.load(backend).linear(x, weight, None)
    assert out[0].isnan().all() and out[1, 4].isinf() and out[1, :4].isfinite().all()


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"linear: x \(2, 3\) torch.float32, weight \(4, 5\)"):
        linear.linear(torch.zeros(2, 3), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="torch.bfloat16"):
        linear.linear(torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.bfloat16))
