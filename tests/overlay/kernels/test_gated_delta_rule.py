"""The chunked and the stepwise gated delta rule against the token loop."""
import math
import random

import pytest
import torch

from tests.overlay.kernels.helpers import (
    DTYPES,
    assert_close,
    no_host_sync,
    poisoned,
    random_step,
    recorded,
    relative_error,
    runnable,
    starts_of,
)
from vllm.overlay.kernels import gated_delta_rule as op

SIZES = [0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 129]
TOLERANCE = 5e-6
BACKENDS = runnable(op.backends)
each_back_end = pytest.mark.parametrize("backend", BACKENDS)


def tensors(seed, tokens, key_heads, heads, key, value, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, key_heads, key, generator=gen).to(dtype) for _ in range(2))
    v = torch.randn(tokens, heads, value, generator=gen).to(dtype)
    # From almost no decay to a complete one, as exp(A_log) up to 16 and softplus give it.
    g = -torch.exp(4 * torch.randn(tokens, heads, generator=gen) - 2).clamp_max(90)
    return q, k, v, g, torch.rand(tokens, heads, generator=gen), gen


def run(backend, parts, pool, live, starts, prefills, captures=(), context=None):
    context = [0] * len(live) if context is None else context
    return op.backends.load(backend).gated_delta_rule(*parts, pool, torch.tensor(live, dtype=torch.int64), starts,
                                                      prefills, captures, context)


@pytest.mark.parametrize("seed", range(24))
@each_back_end
def test_random_steps_equal_the_reference_and_touch_nothing_else(seed, backend):
    rng = random.Random(seed)
    step = random_step(rng, SIZES)
    key_heads, repeat = rng.randint(1, 3), rng.randint(1, 3)
    key, value = rng.choice([1, 7, 16, 33]), rng.choice([1, 5, 24, 70])
    dtype = DTYPES[seed % 3]
    *parts, gen = tensors(seed, step.tokens, key_heads, key_heads * repeat, key, value, dtype)
    pool = poisoned((step.slots, key_heads * repeat, key, value), step.live, gen)
    want_pool, got_pool = pool.clone(), pool.clone()
    want = run("reference", parts, want_pool, step.live, step.starts, step.prefills, step.captures, step.context)
    got = run(backend, parts, got_pool, step.live, step.starts, step.prefills, step.captures, step.context)
    assert_close(got, want, TOLERANCE, f"o of {step}")
    named = step.live + step.captured
    assert_close(got_pool[named], want_pool[named], TOLERANCE, f"states of {step}")
    others = [slot for slot in range(step.slots) if slot not in named]
    assert got_pool[others].isnan().all(), f"slots {others} were written: {step}"


def test_the_public_function_runs_the_default_back_end():
    *parts, gen = tensors(1, 70, 2, 4, 8, 6)
    pool = torch.randn(3, 4, 8, 6, generator=gen)
    other = pool.clone()
    got = op.gated_delta_rule(*parts, pool, torch.tensor([2]), [0, 70], 1, ((0, 64, 1), ))
    want = run("reference", parts, other, [2], [0, 70], 1, ((0, 64, 1), ))
    assert_close(got, want, TOLERANCE, "o")
    assert_close(pool, other, TOLERANCE, "pool")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("first", [0, 37])
@each_back_end
def test_any_split_of_a_sequence_gives_the_same_state_and_output(seed, first, backend):
    rng = random.Random(seed)
    *parts, gen = tensors(seed, 210, 2, 4, 12, 10)
    pool = torch.randn(2, 4, 12, 10, generator=gen)
    whole_pool, pieces_pool = pool.clone(), pool.clone()
    whole = run(backend, parts, whole_pool, [1], [0, 210], 1, context=[first])
    at, pieces, cuts = 0, [], []
    while at < 210:
        length = min(rng.choice([1, 2, 3, 16, 64, 100]), 210 - at)
        # A piece of one token as a decode row now and then.
        prefills = int(length > 1 or rng.random() < 0.5)
        pieces.append(run(backend, [part[at:at + length] for part in parts], pieces_pool, [1], [0, length], prefills,
                          context=[first + at]))
        at += length
        cuts.append(at)
    assert_close(torch.cat(pieces), whole, TOLERANCE, f"o cut at {cuts}")
    assert_close(pieces_pool, whole_pool, TOLERANCE, f"state cut at {cuts}")


@pytest.mark.parametrize("first", [0, 5, 64])
@each_back_end
def test_a_capture_is_the_state_of_a_run_that_stops_there(first, backend):
    *parts, gen = tensors(3, 200, 1, 2, 16, 8)
    offsets = [1, 2, 15, 16, 59, 63, 64, 65, 123, 128, 199, 200]
    pool = torch.full((len(offsets) + 1, 2, 16, 8), float("nan"))
    pool[0] = torch.randn(2, 16, 8, generator=gen)
    start = pool[:1].clone()
    captures = tuple((0, offset, 1 + i) for i, offset in enumerate(offsets))
    run(backend, parts, pool, [0], [0, 200], 1, captures, [first])
    for _, offset, slot in captures:
        stopped = start.clone()
        run(backend, [part[:offset] for part in parts], stopped, [0], [0, offset], 1, context=[first])
        assert_close(pool[slot], stopped[0], TOLERANCE, f"capture after {offset} tokens from position {first}")


def test_captures_cost_no_second_pass():
    """At an absolute multiple of 64 a capture adds copies only, whatever the piece's first position."""
    *parts, _ = tensors(3, 200, 1, 2, 16, 8)
    products = []
    for captures in ((), ((0, 27, 1), (0, 91, 2), (0, 155, 3))):
        with recorded() as recorder:
            run("torch", parts, torch.zeros(4, 2, 16, 8), [0], [0, 200], 1, captures, [37])
        products.append(sum("bmm" in name for name in recorder.names))
    assert products[0] == products[1] > 0


@each_back_end
def test_a_row_gives_the_same_alone_and_in_a_batch(backend):
    lengths = [70, 1, 16, 130, 1, 1]
    *parts, gen = tensors(4, sum(lengths), 2, 6, 9, 11)
    pool = torch.randn(6, 6, 9, 11, generator=gen)
    together, starts = pool.clone(), starts_of(lengths)
    got = run(backend, parts, together, list(range(6)), starts, 4)
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        alone = pool[row:row + 1].clone()
        single = run(backend, [part[start:end] for part in parts], alone, [0], [0, end - start], int(row < 4))
        assert_close(got[start:end], single, 1e-6, f"row {row}")
        assert_close(together[row], alone[0], 1e-6, f"state of row {row}")


@each_back_end
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[70, 1], [1, 1]])
def test_parts_of_a_wider_tensor(backend, dtype, lengths):
    """Queries, keys and values as the projection leaves them: side by side."""
    tokens = sum(lengths)
    *parts, gen = tensors(11, tokens, 2, 4, 40, 24, dtype)
    pool = torch.randn(2, 4, 40, 24, generator=gen)
    other = pool.clone()
    want = run("reference", parts, other, [1, 0], starts_of(lengths), int(lengths[0] > 1))
    wide = torch.cat([part.flatten(1) for part in parts[:3]], 1).split([80, 80, 96], 1)
    parts[:3] = [part.view(tokens, heads, -1) for part, heads in zip(wide, (2, 2, 4), strict=True)]
    got = run(backend, parts, pool, [1, 0], starts_of(lengths), int(lengths[0] > 1))
    assert_close(got, want, TOLERANCE, "o")
    assert_close(pool, other, TOLERANCE, "pool")


@pytest.mark.parametrize("live, captures", [([5], ()), ([-1], ()), ([0], ((0, 1, 5), )), ([0], ((0, 1, -1), ))])
def test_a_slot_outside_the_pool_is_an_error_also_in_compiled_code(live, captures):
    if "native" not in BACKENDS:
        pytest.skip("it is not built here")
    *parts, _ = tensors(12, 3, 1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"slots -?\d to -?\d of a pool of 5"):
        run("native", parts, torch.zeros(5, 2, 4, 4), live, [0, 3], 1, captures)


def float64_loop(q, k, v, g, beta, state):
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeat = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeat, 1) * q.shape[2]**-0.5, k.repeat_interleave(repeat, 1)
    out = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        written = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], written)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out).float(), state.float()


@each_back_end
def test_weak_decays_after_strong_ones_keep_their_precision(backend):
    """A difference of running sums would lose them: -80 and -1e-3 do not fit one float32 sum."""
    *parts, gen = tensors(5, 128, 1, 1, 32, 32)
    parts[3] = torch.where(torch.arange(128)[:, None] % 64 < 40, -80.0, -1e-3)
    pool = torch.randn(1, 1, 32, 32, generator=gen)
    want, state = float64_loop(*parts, pool[0])
    got = run(backend, parts, pool, [0], [0, 128], 1)
    assert_close(got, want, 2e-6, "o")
    assert_close(pool[0], state, 2e-6, "state")
    # The test has power: the other form is off by far more.
    sums = parts[3][:64, 0].cumsum(0)
    exact = parts[3][:64, 0].double().cumsum(0)
    assert ((sums[63] - sums[41]).exp().double() - (exact[63] - exact[41]).exp()).abs() > 1e-5


@each_back_end
def test_repeated_keys_do_not_cancel(backend):
    """The same token over and over: products of the triangular system's powers would reach 1e17 here."""
    *parts, gen = tensors(6, 192, 1, 2, 16, 8)
    parts[1] = parts[1][:1].expand(192, -1, -1).contiguous()
    parts[3], parts[4] = torch.full((192, 2), -1e-6), torch.ones(192, 2)
    pool = torch.randn(1, 2, 16, 8, generator=gen)
    want, state = float64_loop(*parts, pool[0])
    got = run(backend, parts, pool, [0], [0, 192], 1)
    assert_close(got, want, 5e-6, "o")
    assert_close(pool[0], state, 5e-6, "state")


@each_back_end
def test_values_beyond_float16_stay(backend):
    """`o` of float16 inputs is float32 and may exceed 65504: the best-known failure of this model family."""
    *parts, _ = tensors(7, 80, 1, 1, 4, 4, torch.float16)
    pool = torch.full((1, 1, 4, 4), 3e6)
    parts[3] = torch.zeros(80, 1)
    got = run(backend, parts, pool, [0], [0, 80], 1)
    assert got.dtype == torch.float32 and got.abs().max() > 65504 and torch.isfinite(got).all()


@each_back_end
def test_a_nan_stays_in_its_row(backend):
    lengths = [70, 80, 1, 1]
    *parts, gen = tensors(8, sum(lengths), 1, 2, 8, 8)
    pool = torch.randn(4, 2, 8, 8, generator=gen)
    clean = pool.clone()
    want = run(backend, parts, clean, [0, 1, 2, 3], starts_of(lengths), 2)
    parts[2] = parts[2].clone()
    parts[2][75] = float("nan")
    got = run(backend, parts, pool, [0, 1, 2, 3], starts_of(lengths), 2)
    assert got[75:150].isnan().any() and pool[1].isnan().any(), "a non-finite value was replaced"
    for part, other in ((got[:70], want[:70]), (got[150:], want[150:]), (pool[[0, 2, 3]], clean[[0, 2, 3]])):
        assert torch.equal(part, other)


def test_decode_does_not_wait_for_the_device(monkeypatch):
    *parts, gen = tensors(9, 3, 2, 4, 8, 8)
    pool = torch.randn(4, 4, 8, 8, generator=gen)
    live = torch.tensor([3, 0, 1])
    module = op.backends.load("torch")
    with no_host_sync(monkeypatch):
        module.gated_delta_rule(*parts, pool, live, [0, 1, 2, 3], 0, ((1, 1, 2), ), [5, 6, 7])
    assert torch.equal(pool[2], pool[0])


@pytest.mark.parametrize("fault", ["no decay", "no beta", "heads swapped", "state not carried"])
@each_back_end
def test_the_comparison_notices(fault, backend):
    """The tolerance above is far below what each of these mistakes causes."""
    *parts, gen = tensors(10, 65, 2, 4, 8, 8)
    parts[3] = parts[3].clamp_max(-0.01)
    pool = torch.randn(1, 4, 8, 8, generator=gen)
    want = run("reference", parts, pool.clone(), [0], [0, 65], 1)
    if fault == "no decay":
        parts[3] = torch.zeros_like(parts[3])
    elif fault == "no beta":
        parts[4] = torch.ones_like(parts[4])
    elif fault == "heads swapped":
        parts[0], parts[1] = parts[0].flip(1), parts[1].flip(1)
    else:
        pool.zero_()
    assert relative_error(run(backend, parts, pool, [0], [0, 65], 1), want) > 1000 * TOLERANCE


@each_back_end
@pytest.mark.parametrize("heads", [5, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(dtype, heads, backend):
    gen = torch.Generator().manual_seed(0)
    # Halves of one tensor, as the projection leaves them.
    a, b = (20 * torch.randn(50, 2 * heads, generator=gen).to(dtype)).split(heads, 1)
    A_log, dt_bias = torch.randn(heads, generator=gen), torch.randn(heads, generator=gen)
    g, beta = op.backends.load(backend).gate(a, b, A_log, dt_bias)
    want_g, want_beta = op.backends.load("reference").gate(a, b, A_log, dt_bias)
    assert (g <= 0).all() and g.dtype == beta.dtype == torch.float32
    assert_close(g, want_g, 1e-6, "g")
    assert_close(beta, want_beta, 1e-6, "beta")


@each_back_end
def test_gate_at_its_ends(backend):
    a = torch.tensor([[-float("inf"), -200.0, -60.0, 0.0, 30.0, float("inf"), float("nan")]])
    g, beta = op.backends.load(backend).gate(a, a, torch.zeros(7), torch.zeros(7))
    assert g[0, :2].tolist() == [0, 0] and g[0, 4] == -30 and g[0, 5] == -float("inf") and g[0, 6].isnan()
    assert_close(g[0, 2:4], -torch.tensor([math.exp(-60), math.log(2)]), 1e-6, "g")
    assert abs(g[0, 2] / -math.exp(-60) - 1) < 1e-6, "a decay near 1 keeps its relative precision"
    assert beta[0, 0] == 0 and beta[0, 3] == 0.5 and beta[0, 5] == 1 and beta[0, 6].isnan()


@pytest.mark.parametrize("change, message", [
    ({"num_prefills": 2}, "2 prefill rows of 1"),
    ({"num_prefills": 0}, "decode row 0 has 5 tokens"),
    ({"query_start_loc": [0, 4]}, "for 5 tokens"),
    ({"query_start_loc": [0, 5, 5]}, "3 entries for 1 rows"),
    ({"captures": ((0, 6, 1), )}, "capture after 6 tokens of row 0, whose piece has 5"),
    ({"captures": ((1, 1, 1), )}, "capture of row 1"),
    ({"context_lens": [1, 2]}, "2 context lengths for 1 rows"),
    ({"recurrent": torch.zeros(2, 4, 8, 8, dtype=torch.bfloat16)}, "the state is float32"),
    ({"g": torch.zeros(5, 3)}, "gated_delta_rule: q"),
    ({"k": torch.zeros(5, 1, 8)}, "gated_delta_rule: q"),
])
def test_what_does_not_fit_is_refused(change, message):
    q, k, v, g, beta, _ = tensors(0, 5, 2, 4, 8, 8)
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "recurrent": torch.zeros(2, 4, 8, 8),
                 "live_slots": torch.tensor([0]), "query_start_loc": [0, 5], "num_prefills": 1, **change}
    with pytest.raises(ValueError, match=message):
        op.gated_delta_rule(**arguments)


def test_value_heads_that_do_not_divide_are_refused():
    q, k, v, g, beta, _ = tensors(0, 5, 2, 3, 8, 8)
    with pytest.raises(ValueError, match="3 value heads are no multiple of 2 key heads"):
        op.gated_delta_rule(q, k, v, g, beta, torch.zeros(1, 3, 8, 8), torch.tensor([0]), [0, 5], 1)
