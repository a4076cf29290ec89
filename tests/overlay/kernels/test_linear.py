"""Dense products: every back end against the reference, and what compiled code owes beyond that."""
import pytest
import torch

from tests.overlay.kernels.helpers import runnable
from vllm.overlay.kernels import linear, native
from vllm.overlay.kernels.linear import backends
from vllm.overlay.kernels.panels import Panels

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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count, size", [(32, 2), (64, 18), (160, 520), (96, 17), (33, 24)])
def test_packed_weights(backend, dtype, count, size):
    """Whole panels and not, in one piece of the sum and several; one order of sums for any rows and threads."""
    module, threads = backends.load(backend), torch.get_num_threads()
    x, weight, bias = made(300, count, size, dtype, bias=True)
    truth = backends.load("reference").linear(x, weight, bias)
    packed = module.pack(weight.clone())
    if backend == "native" and not native.library_multiplies(dtype) and count % 32 == 0 and size % 2 == 0:
        assert isinstance(packed, Panels) and packed.shape == weight.shape and packed.dtype == dtype
    whole = module.linear(x, packed, bias)
    error = (whole.float() - truth.float()).abs().max().item()
    print(backend, dtype, (count, size), type(packed), "error", error)
    assert error <= TOLERANCE[dtype] * max(1.0, truth.float().abs().max().item())
    try:
        for number in (1, 2) if isinstance(packed, Panels) else ():
            torch.set_num_threads(number)
            for rows in (0, 1, 2, 5, 12, 13, 16, 25, 63, 257):
                assert torch.equal(module.linear(x[:rows], packed, bias), whole[:rows]), (number, rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif("native" not in BACKENDS, reason="no compiled operators here")
def test_nothing_beyond_a_packed_weight_is_read_or_written():
    x, weight, _ = made(3, 64, 40, torch.float32)
    room = torch.full((3 * 64, 40), float("nan"))
    room[64:128] = weight
    packed = backends.load("native").pack(room[64:128])
    assert isinstance(packed, Panels) and packed.numbers.data_ptr() == room[64:128].data_ptr()
    assert room[:64].isnan().all() and room[128:].isnan().all() and room[64:128].isfinite().all()
    assert sorted(room[64:128].flatten().tolist()) == sorted(weight.flatten().tolist())
    torch.testing.assert_close(linear.linear(x, packed), x @ weight.T)


@pytest.mark.skipif("native" not in BACKENDS, reason="no compiled operators here")
def test_packed_weights_are_for_one_type_and_one_back_end():
    x, weight, _ = made(3, 64, 40, torch.float32)
    packed = backends.load("native").pack(weight)
    with pytest.raises(ValueError, match="torch.bfloat16"):
        linear.linear(x.bfloat16(), packed)
    with pytest.raises((TypeError, AttributeError)):
        backends.load("torch").linear(x, packed, None)


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
