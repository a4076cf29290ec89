"""Rotary position embedding against the pair loop and against rotations of complex numbers."""
import pytest
import torch

from tests.overlay.kernels.helpers import DTYPES, ROUNDING, assert_close, no_host_sync, relative_error, runnable
from vllm.overlay.kernels import blocks
from vllm.overlay.kernels import rope as op

REFERENCE = op.backends.load("reference")
BACKENDS = runnable(op.backends)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, heads, kv_heads, size, rotary", [
    (5, 4, 2, 16, 8), (1, 1, 1, 2, 2), (7, 16, 2, 256, 64), (300, 4, 2, 64, 64), (3, 5, 1, 33, 32),
    (4, 3, 1, 50, 44), (0, 2, 1, 8, 4)])
@pytest.mark.parametrize("elements", [1 << 17, 40])
def test_apply(backend, dtype, tokens, heads, kv_heads, size, rotary, elements, monkeypatch):
    monkeypatch.setattr(blocks, "_ELEMENTS", elements)
    rotation = op.RotaryTable(rotary, 1e7)(torch.arange(tokens) * 1000)
    q, k = normal(0, tokens, heads, size).to(dtype), normal(1, tokens, kv_heads, size).to(dtype)
    before = q.clone()
    turned = op.backends.load(backend).apply_rope(q, k, *rotation)
    for got, want, x in zip(turned, REFERENCE.apply_rope(q, k, *rotation), (q, k), strict=True):
        assert_close(got, want, ROUNDING[dtype], f"{tuple(x.shape)}")
        assert got.is_contiguous() and torch.equal(got[..., rotary:], x[..., rotary:])
    assert torch.equal(q, before)


def test_a_pair_is_a_complex_number_turned():
    table = op.RotaryTable(8, 100.0)
    x = normal(2, 6, 1, 10)
    positions = torch.tensor([0, 1, 2, 50, 999, 5])
    got, _ = op.apply_rope(x, x, table(positions))
    speeds = 100.0**(-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(x[:, 0, :4].double(), x[:, 0, 4:8].double()) * torch.exp(1j * positions[:, None] * speeds)
    assert_close(got[:, 0, :8], torch.cat((turned.real, turned.imag), 1).float(), 1e-4, "turned")
    assert torch.equal(got[0], x[0]), "position 0 is not turned"


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend):
    """q and k arrive as views of one projection."""
    both = normal(3, 5, 3, 32)
    rotation = op.RotaryTable(8, 1e4)(torch.arange(5))
    q, k = both[:, :2, :16], both[:, 2:, 16:]
    apply = op.backends.load(backend).apply_rope
    for got, want in zip(apply(q, k, *rotation), apply(q.contiguous(), k.mT.contiguous().mT, *rotation), strict=True):
        assert torch.equal(got, want)


def test_interleaved_sections_of_the_35b_model():
    """Angle i of 32: h for i = 1, 4, ..., 31; w for i = 2, 5, ..., 29; t for the rest."""
    table = op.RotaryTable(64, 1e7, (11, 11, 10))
    plain = op.RotaryTable(64, 1e7)
    positions = torch.tensor([[3, 100], [50, 7], [9, 2000]])
    rotation = table(positions)
    for i in range(32):
        axis = {1: 1, 2: 2, 0: 0}[i % 3]
        want = plain(positions[axis])
        assert torch.equal(rotation.cos[:, i], want.cos[:, i]) and torch.equal(rotation.sin[:, i], want.sin[:, i]), i
    assert sum(1 for i in range(32) if i % 3 == 1) == 11 and sum(1 for i in range(32) if i % 3 == 2) == 10


def test_angles_past_a_section_are_of_time():
    """With (4, 1, 1) only angle 1 is of h and only angle 2 of w: 4 and 5 lie past 3 h and 3 w."""
    rotation = op.RotaryTable(12, 1e4, (4, 1, 1))(torch.tensor([[5], [60], [700]]))
    for i, position in enumerate([5, 60, 700, 5, 5, 5]):
        want = op.RotaryTable(12, 1e4)(torch.tensor([position]))
        assert torch.equal(rotation.cos[:, i], want.cos[:, i]), i


def test_text_positions_need_no_third_axis():
    table = op.RotaryTable(64, 1e7, (11, 11, 10))
    positions = torch.tensor([0, 1, 262143])
    text, image = table(positions), table(positions.expand(3, -1))
    assert torch.equal(text.cos, image.cos) and torch.equal(text.sin, image.sin)
    assert text.cos.dtype == torch.float32


def test_the_comparison_notices_neighbouring_pairs():
    """GPT-J's pairs (2i, 2i + 1) instead of halves."""
    x = normal(4, 5, 1, 8)
    rotation = op.RotaryTable(8, 1e4)(torch.arange(1, 6))
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    other = op.apply_rope(x[..., order], x, rotation)[0][..., order.argsort()]
    assert relative_error(op.apply_rope(x, x, rotation)[0], other) > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_waits_for_the_device(backend, monkeypatch):
    table = op.RotaryTable(8, 1e4, (2, 1, 1))
    x, positions = normal(5, 4, 2, 16), torch.arange(12).view(3, 4)
    module = op.backends.load(backend)
    with no_host_sync(monkeypatch):
        module.apply_rope(x, x, *table(positions))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="rotary_dim 7"):
        op.RotaryTable(7, 1e4)
    with pytest.raises(ValueError, match="sections .* for 4 angles"):
        op.RotaryTable(8, 1e4, (2, 2, 2))
    with pytest.raises(ValueError, match=r"positions \(3, 4\) with sections None"):
        op.RotaryTable(8, 1e4)(torch.zeros(3, 4, dtype=torch.int64))
