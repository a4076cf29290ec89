"""Router and experts against the token loop."""
import pytest
import torch

from tests.overlay.kernels.helpers import DTYPES, assert_close, no_host_sync, recorded, relative_error
from vllm.overlay.kernels import moe as op
from vllm.overlay.kernels import native as library
from vllm.overlay.kernels.moe import native, torch_impl
from vllm.overlay.kernels.panels import Panels

# gate and up are rounded to the dtype between the two products.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
NATIVE = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
PATHS = [torch_impl.experts_grouped, torch_impl.experts_gathered,
         pytest.param(native.experts, id="native", marks=NATIVE)]
ROUTES = [pytest.param(native.route, id="native", marks=NATIVE), pytest.param(torch_impl.route, id="torch")]
REFERENCE = op.backends.load("reference")


def tensors(seed, tokens, count, top_k, hidden, inner, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=gen).to(dtype)
    w13 = (torch.randn(count, 2 * inner, hidden, generator=gen) * hidden**-0.5).to(dtype)
    w2 = (torch.randn(count, hidden, inner, generator=gen) * inner**-0.5).to(dtype)
    weights, ids = REFERENCE.route(torch.randn(tokens, count, generator=gen), top_k, True)
    return x, w13, w2, weights, ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens, count, top_k, hidden, inner", [
    (1, 4, 1, 8, 3), (1, 16, 8, 30, 20), (5, 3, 3, 17, 1), (3, 64, 2, 48, 40), (40, 7, 2, 24, 16), (0, 4, 2, 8, 4),
    (130, 2, 1, 45, 37), (300, 16, 8, 33, 18),
])
def test_all_paths_equal_the_reference(path, dtype, tokens, count, top_k, hidden, inner):
    parts = tensors(tokens, tokens, count, top_k, hidden, inner, dtype)
    assert_close(path(*parts), REFERENCE.experts(*parts), TOLERANCE[dtype], f"{path.__name__} {dtype}")


@pytest.mark.parametrize("path", PATHS)
def test_experts_without_tokens_are_not_touched(path):
    x, w13, w2, weights, ids = tensors(0, 6, 9, 3, 16, 8)
    unused = [expert for expert in range(9) if expert not in ids]
    if not unused:
        ids, unused = ids % 8, [8]
    w13[unused], w2[unused] = float("nan"), float("nan")
    got = path(x, w13, w2, weights, ids)
    assert_close(got, REFERENCE.experts(x, w13, w2, weights, ids), 2e-6, f"without {unused}")


def test_the_decode_path_gathers_no_more_than_its_bound(monkeypatch):
    parts = tensors(1, 7, 16, 4, 32, 16)
    whole = torch_impl.experts_gathered(*parts)
    pair = parts[1][0].numel() + parts[2][0].numel()
    monkeypatch.setattr(torch_impl, "_GATHER_BYTES", 2 * 4 * pair * 4)
    with recorded() as recorder:
        tiled = torch_impl.experts_gathered(*parts)
    assert_close(tiled, whole, 1e-6, "tiled")
    assert recorder.largest <= 2 * 4 * parts[1][0].numel(), recorder.largest


def test_the_decode_path_does_not_wait_for_the_device(monkeypatch):
    parts = tensors(2, 3, 16, 4, 32, 16)
    logits = torch.randn(3, 16)
    with no_host_sync(monkeypatch):
        torch_impl.experts_gathered(*parts)
        torch_impl.route(logits, 4, True)


def test_which_path_is_taken(monkeypatch):
    """Copies of weights cost several times the products on a CPU, whose loop over experts waits for nothing."""
    taken = []
    monkeypatch.setattr(torch_impl, "experts_grouped", lambda *args: taken.append("grouped"))
    monkeypatch.setattr(torch_impl, "experts_gathered", lambda *args: taken.append("gathered"))
    torch_impl.experts(*tensors(0, 1, 4, 2, 8, 4))
    meta = [part.to("meta") for part in tensors(0, 16, 4, 2, 8, 4)]
    torch_impl.experts(*meta)
    torch_impl.experts(*[part.to("meta") for part in tensors(0, 17, 4, 2, 8, 4)])
    assert taken == ["grouped", "gathered", "grouped"]


@pytest.mark.parametrize("path", PATHS)
def test_a_token_gives_the_same_alone_and_in_a_batch(path):
    x, w13, w2, weights, ids = tensors(3, 20, 8, 2, 24, 12)
    together = path(x, w13, w2, weights, ids)
    alone = torch.cat([path(x[t:t + 1], w13, w2, weights[t:t + 1], ids[t:t + 1]) for t in range(20)])
    assert_close(together, alone, 1e-6, path.__name__)


@pytest.mark.parametrize("path", PATHS)
def test_shares_of_the_inner_size_add_up(path):
    """What tensor parallelism relies on: w13 holds the rank's rows of gate, then the rank's rows of up."""
    x, w13, w2, weights, ids = tensors(4, 5, 6, 2, 16, 8)
    gate, up = w13[:, :8], w13[:, 8:]
    parts = [path(x, torch.cat((gate[:, s], up[:, s]), 1).contiguous(), w2[:, :, s].contiguous(), weights, ids)
             for s in (slice(0, 3), slice(3, 8))]
    assert_close(parts[0] + parts[1], path(x, w13, w2, weights, ids), 2e-6, path.__name__)


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_stays_in_its_token(path):
    x, w13, w2, weights, ids = tensors(5, 6, 4, 2, 16, 8)
    clean = path(x, w13, w2, weights, ids)
    x[2, 3] = float("nan")
    got = path(x, w13, w2, weights, ids)
    assert got[2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert_close(got[rest], clean[rest], 1e-6, "the other tokens")


@NATIVE
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_gives_a_token_the_same_bits_in_any_small_batch_on_any_threads(dtype):
    """An expert sums few tokens in one order, many in another. The pairs are more than are kept at a time, too."""
    x, w13, w2, weights, ids = tensors(7, 300, 12, 5, 130, 67, dtype)
    few = native.experts(x[:16], w13, w2, weights[:16], ids[:16])
    alone = torch.cat([native.experts(x[t:t + 1], w13, w2, weights[t:t + 1], ids[t:t + 1]) for t in range(16)])
    assert torch.equal(few, alone)
    together = native.experts(x, w13, w2, weights, ids)
    threads = torch.get_num_threads()
    try:
        for other in (1, 2, 5):
            torch.set_num_threads(other)
            assert torch.equal(native.experts(x, w13, w2, weights, ids), together), other
    finally:
        torch.set_num_threads(threads)


@NATIVE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden, inner", [(64, 32), (288, 64), (130, 32), (64, 34)])
def test_packed_weights_give_a_token_the_same_bits_in_any_batch_on_any_threads(dtype, hidden, inner):
    """Both packed, and either of them. Some experts get many tokens, and the pairs are more than are kept at a time."""
    x, w13, w2, weights, ids = tensors(7, 500, 12, 5, hidden, inner, dtype)
    ids[:400] = ids[:400] % 5
    want = REFERENCE.experts(x, w13, w2, weights, ids)
    packed = native.pack(w13.clone(), w2.clone())
    if not library.library_multiplies(dtype):
        assert [isinstance(one, Panels) for one in packed] == [inner % 32 == 0, hidden % 32 == 0]
    together = native.experts(x, *packed, weights, ids)
    assert_close(together, want, TOLERANCE[dtype], "packed")
    if not all(isinstance(one, Panels) for one in packed):
        return
    threads = torch.get_num_threads()
    try:
        for other in (1, 2, 5):
            torch.set_num_threads(other)
            assert torch.equal(native.experts(x, *packed, weights, ids), together), other
            for some in (slice(3, 4), slice(399, 401), slice(0, 16), slice(20, 300)):
                assert torch.equal(native.experts(x[some], *packed, weights[some], ids[some]), together[some]), some
    finally:
        torch.set_num_threads(threads)


def test_weights_are_packed_where_one_back_end_has_both_phases(monkeypatch):
    _, w13, w2, _, _ = tensors(1, 2, 3, 2, 64, 32)
    monkeypatch.setattr(op.backends, "_phases", (torch_impl, native))
    assert op.pack(w13, w2) == (w13, w2)
    monkeypatch.setattr(op.backends, "_phases", (torch_impl, torch_impl))
    assert op.pack(w13, w2) == (w13, w2)


@NATIVE
def test_native_takes_rows_that_are_apart_and_an_expert_twice():
    x, w13, w2, weights, ids = tensors(8, 6, 5, 3, 19, 7)
    wide = torch.full((6, 40), float("nan"))
    wide[:, 3:22] = x
    ids[1] = ids[1, 0]
    assert_close(native.experts(wide[:, 3:22], w13, w2, weights, ids), REFERENCE.experts(x, w13, w2, weights, ids),
                 2e-6, "rows apart")


@NATIVE
@pytest.mark.parametrize("wrong", [-1, 6, 2**40])
def test_native_refuses_an_id_that_is_none(wrong):
    x, w13, w2, weights, ids = tensors(9, 5, 6, 2, 16, 8)
    ids[3, 1] = wrong
    with pytest.raises(IndexError, match="none of 6 experts"):
        native.experts(x, w13, w2, weights, ids)
    with pytest.raises(ValueError, match="w13"):
        native.experts(x, w13.double(), w2, weights, ids % 6)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 8, 17])
def test_route_of_what_is_not_finite_gives_weights_that_are_not(route, wrong, at):
    logits = torch.randn(3, 18, generator=torch.Generator().manual_seed(0))
    clean, _ = route(logits, 4, True)
    logits[1, at] = wrong
    weights, ids = route(logits, 4, True)
    assert weights[1].isnan().all() and REFERENCE.route(logits, 4, True)[0][1].isnan().all()
    assert ((ids >= 0) & (ids < 18)).all()
    assert torch.equal(weights[[0, 2]], clean[[0, 2]])
    logits[1] = -float("inf")
    assert route(logits, 4, True)[0][1].isnan().all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, count, top_k, renormalize", [(30, 256, 8, True), (4, 5, 5, False), (1, 3, 1, True)])
def test_route(route, dtype, tokens, count, top_k, renormalize):
    gen = torch.Generator().manual_seed(tokens)
    # Distinct values in every dtype, so that the choice is not a matter of ties.
    logits = torch.stack([torch.randperm(count, generator=gen) for _ in range(tokens)]).to(dtype) / 16
    weights, ids = route(logits, top_k, renormalize)
    want_weights, want_ids = REFERENCE.route(logits, top_k, renormalize)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    assert torch.equal(ids, want_ids)
    assert_close(weights, want_weights, 1e-6, "weights")
    if renormalize:
        assert_close(weights.sum(1), torch.ones(tokens), 1e-6, "sums")


@pytest.mark.parametrize("route", ROUTES)
def test_route_keeps_the_softmax_in_float32(route):
    """In float16 e^-12 is a denormal and the far experts' weights lose most of their digits."""
    logits = torch.tensor([[0., -12., -13.]], dtype=torch.float16)
    weights, _ = route(logits, 3, False)
    assert_close(weights, torch.softmax(logits.double(), 1).float(), 1e-6, "weights")
    assert abs(weights[0, 2].item() / 2.2603e-06 - 1) < 1e-3


@pytest.mark.parametrize("route", ROUTES)
def test_route_among_ties_takes_probabilities_as_large_as_the_reference(route):
    gen = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 4, (50, 64), generator=gen).float()
    weights, ids = route(logits, 8, True)
    want, _ = REFERENCE.route(logits, 8, True)
    assert_close(weights, want, 1e-6, "weights")
    assert all(len(set(row)) == 8 for row in ids.tolist())


def test_the_comparison_notices_a_swapped_gate():
    x, w13, w2, weights, ids = tensors(6, 5, 6, 2, 16, 8)
    swapped = torch.cat((w13[:, 8:], w13[:, :8]), 1)
    assert relative_error(op.experts(x, swapped, w2, weights, ids), REFERENCE.experts(x, w13, w2, weights, ids)) > 0.1


@pytest.mark.parametrize("change", ["w2", "ids", "x"])
def test_what_does_not_fit_is_refused(change):
    x, w13, w2, weights, ids = tensors(0, 5, 6, 2, 16, 8)
    if change == "w2":
        w2 = w2[:, :, 1:]
    elif change == "ids":
        ids = ids[:, 1:]
    else:
        x = x[:, 1:]
    with pytest.raises(ValueError, match="moe: "):
        op.experts(x, w13, w2, weights, ids)
    with pytest.raises(ValueError, match="top_k 7 of 6 experts"):
        op.route(torch.zeros(2, 6), 7)
