"""The convolution with its carried tail against the token loop."""
import random

import pytest
import torch

from tests.overlay.kernels.helpers import (
    DTYPES,
    ROUNDING,
    assert_close,
    no_host_sync,
    poisoned,
    random_step,
    runnable,
    starts_of,
)
from vllm.overlay.kernels import blocks
from vllm.overlay.kernels import causal_conv1d as op

SIZES = [0, 1, 2, 3, 4, 5, 20]
BACKENDS = runnable(op.backends)
each_back_end = pytest.mark.parametrize("backend", BACKENDS)


def run(backend, x, weight, bias, pool, live, starts, prefills, captures=()):
    return op.backends.load(backend).causal_conv1d(x, weight, bias, pool, torch.tensor(live, dtype=torch.int64), starts,
                                                   prefills, captures)


@pytest.mark.parametrize("seed", range(24))
@each_back_end
def test_random_steps_equal_the_reference_and_touch_nothing_else(seed, monkeypatch, backend):
    # Several blocks even at these sizes.
    monkeypatch.setattr(blocks, "_ELEMENTS", 1 << 17 if seed < 12 else 14)
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    step = random_step(rng, SIZES)
    channels, width, dtype = rng.choice([1, 7, 64, 300]), rng.choice([1, 2, 4, 5]), DTYPES[seed % 3]
    x = torch.randn(step.tokens, channels, generator=gen).to(dtype)
    weight = torch.randn(channels, width, generator=gen).to(dtype)
    bias = torch.randn(channels, generator=gen).to(dtype) if seed % 2 else None
    pool = poisoned((step.slots, channels, width - 1), step.live, gen, dtype)
    want_pool, got_pool = pool.clone(), pool.clone()
    want = run("reference", x, weight, bias, want_pool, step.live, step.starts, step.prefills, step.captures)
    got = run(backend, x, weight, bias, got_pool, step.live, step.starts, step.prefills, step.captures)
    assert_close(got, want, ROUNDING[dtype], f"y of {step}")
    named = step.live + step.captured
    assert torch.equal(got_pool[named], want_pool[named]), f"tails of {step}: a copy of inputs is exact"
    others = [slot for slot in range(step.slots) if slot not in named]
    assert got_pool[others].isnan().all(), f"slots {others} were written: {step}"


def test_the_public_function_runs_the_default_back_end():
    gen = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 5, generator=gen), torch.randn(5, 4, generator=gen)
    pool = torch.randn(3, 5, 3, generator=gen)
    other = pool.clone()
    got = op.causal_conv1d(x, weight, None, pool, torch.tensor([1, 0]), [0, 5, 6], 1, ((0, 2, 2), ))
    want = run("reference", x, weight, None, other, [1, 0], [0, 5, 6], 1, ((0, 2, 2), ))
    assert_close(got, want, 1e-6, "y")
    assert torch.equal(pool, other)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_a_short_piece_shifts_the_tail(length, backend):
    """Public code zeroes what a piece of one or two tokens does not cover."""
    tail = torch.tensor([[[1., 2., 3.]]])
    x = torch.tensor([[10.], [20.]])[:length]
    run(backend, x, torch.ones(1, 4), None, tail, [0], [0, length], 1)
    assert tail.flatten().tolist() == ([2., 3., 10.] if length == 1 else [3., 10., 20.])


@pytest.mark.parametrize("seed", range(8))
@each_back_end
def test_any_split_of_a_sequence_gives_the_same_tail_and_output(seed, backend):
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    x, weight = torch.randn(40, 6, generator=gen), torch.randn(6, 4, generator=gen)
    pool = torch.randn(1, 6, 3, generator=gen)
    whole_pool, pieces_pool = pool.clone(), pool.clone()
    whole = run(backend, x, weight, None, whole_pool, [0], [0, 40], 1)
    at, pieces, cuts = 0, [], []
    while at < 40:
        length = min(rng.choice([1, 2, 3, 4, 9]), 40 - at)
        prefills = int(length > 1 or rng.random() < 0.5)
        pieces.append(run(backend, x[at:at + length], weight, None, pieces_pool, [0], [0, length], prefills))
        at += length
        cuts.append(at)
    assert_close(torch.cat(pieces), whole, 1e-6, f"y cut at {cuts}")
    assert torch.equal(pieces_pool, whole_pool), f"tail cut at {cuts}"


@each_back_end
def test_a_capture_is_the_tail_of_a_run_that_stops_there(backend):
    gen = torch.Generator().manual_seed(1)
    x, weight = torch.randn(9, 6, generator=gen), torch.randn(6, 4, generator=gen)
    pool = torch.randn(10, 6, 3, generator=gen)
    start = pool[:1].clone()
    run(backend, x, weight, None, pool, [0], [0, 9], 1, tuple((0, offset, offset) for offset in range(1, 10)))
    for offset in range(1, 10):
        stopped = start.clone()
        run(backend, x[:offset], weight, None, stopped, [0], [0, offset], 1)
        assert torch.equal(pool[offset], stopped[0]), f"capture after {offset} tokens"


@each_back_end
def test_a_row_gives_the_same_alone_and_in_a_batch(backend):
    lengths = [7, 1, 3, 1, 1]
    gen = torch.Generator().manual_seed(2)
    x, weight = torch.randn(sum(lengths), 6, generator=gen), torch.randn(6, 4, generator=gen)
    pool = torch.randn(5, 6, 3, generator=gen)
    together, starts = pool.clone(), starts_of(lengths)
    got = run(backend, x, weight, None, together, list(range(5)), starts, 3)
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        alone = pool[row:row + 1].clone()
        single = run(backend, x[start:end], weight, None, alone, [0], [0, end - start], int(row < 3))
        assert_close(got[start:end], single, 1e-6, f"row {row}")
        assert torch.equal(together[row], alone[0]), f"tail of row {row}"


@each_back_end
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_with_gaps_between_their_rows(backend, dtype):
    gen = torch.Generator().manual_seed(4)
    wide, weight = torch.randn(6, 90, generator=gen).to(dtype), torch.randn(70, 4, generator=gen)
    pool = torch.randn(2, 70, 3, generator=gen).to(dtype)
    other = pool.clone()
    got = run(backend, wide[:, 9:79], weight, weight[:, 0], pool, [1, 0], [0, 5, 6], 1)
    want = run("reference", wide[:, 9:79], weight, weight[:, 0], other, [1, 0], [0, 5, 6], 1)
    assert_close(got, want, ROUNDING[dtype], "y")
    assert torch.equal(pool, other)


@pytest.mark.parametrize("live, captures", [([5], ()), ([-1], ()), ([0], ((0, 1, 5), )), ([0], ((0, 1, -1), ))])
def test_a_slot_outside_the_pool_is_an_error_also_in_compiled_code(live, captures):
    if "native" not in BACKENDS:
        pytest.skip("it is not built here")
    with pytest.raises(ValueError, match=r"slots -?\d to -?\d of a pool of 5"):
        run("native", torch.zeros(2, 6), torch.zeros(6, 4), None, torch.zeros(5, 6, 3), live, [0, 2], 1, captures)


def test_decode_does_not_wait_for_the_device(monkeypatch):
    gen = torch.Generator().manual_seed(3)
    x, weight, pool = (torch.randn(*shape, generator=gen) for shape in ((2, 6), (6, 4), (3, 6, 3)))
    live = torch.tensor([2, 0])
    module = op.backends.load("torch")
    with no_host_sync(monkeypatch):
        module.causal_conv1d(x, weight, None, pool, live, [0, 1, 2], 0, ((1, 1, 1), ))
    assert torch.equal(pool[1], pool[0])


def test_what_does_not_fit_is_refused():
    x, live = torch.zeros(2, 6), torch.tensor([0])
    with pytest.raises(ValueError, match="causal_conv1d: x"):
        op.causal_conv1d(x, torch.zeros(6, 4), None, torch.zeros(1, 6, 4), live, [0, 2], 1)
    with pytest.raises(ValueError, match="causal_conv1d: x"):
        op.causal_conv1d(x, torch.zeros(5, 4), None, torch.zeros(1, 5, 3), live, [0, 2], 1)
    with pytest.raises(ValueError, match="decode row 0 has 2 tokens"):
        op.causal_conv1d(x, torch.zeros(6, 4), None, torch.zeros(1, 6, 3), live, [0, 2], 0)
