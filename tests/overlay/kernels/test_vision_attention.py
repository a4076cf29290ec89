"""Attention within pictures against the patch loop, with poison wherever nothing may be read."""
import random

import pytest
import torch

from tests.overlay.kernels.helpers import (
    DTYPES,
    NAN,
    ROUNDING,
    assert_close,
    no_host_sync,
    recorded,
    relative_error,
    starts_of,
)
from vllm.overlay.kernels import vision_attention as op
from vllm.overlay.kernels.vision_attention import torch_impl


def poisoned(seed, patches, heads, size, dtype=torch.float32):
    """q, k and v as one product leaves them, side by side, with NaN behind each head."""
    gen = torch.Generator().manual_seed(seed)
    fused = torch.full((patches, 3, heads, size + 3), NAN, dtype=dtype)
    fused[..., :size] = 2 * torch.randn(patches, 3, heads, size, generator=gen).to(dtype)
    return fused[..., :size].unbind(1)


def run(qkv, borders, backend="torch", scale=None):
    scale = qkv[0].shape[2]**-0.5 if scale is None else scale
    return op.backends.load(backend).vision_attention(*qkv, borders, scale)


@pytest.mark.parametrize("seed", range(18))
def test_random_pictures_equal_the_reference(seed, monkeypatch):
    rng = random.Random(seed)
    heads, size, dtype = rng.choice([1, 2, 5]), rng.choice([1, 8, 33, 72]), DTYPES[seed % 3]
    lengths = [rng.choice([0, 1, 2, 4, 17, 40]) for _ in range(rng.randint(1, 5))]
    if seed % 2:
        # Several tiles even at these lengths.
        monkeypatch.setattr(torch_impl, "SCORE_BYTES_CPU", 4 * heads * rng.choice([1, 9, 64]))
    borders = starts_of(lengths)
    qkv = poisoned(seed, borders[-1], heads, size, dtype)
    got = run(qkv, borders)
    assert got.is_contiguous()
    assert_close(got, run(qkv, borders, "reference"), ROUNDING[dtype],
                 f"pictures of {lengths} patches, {heads} heads of {size}, {dtype}")


def test_pictures_do_not_see_each_other():
    borders = [0, 30, 70, 75]
    qkv = poisoned(0, 75, 2, 16)
    alone = [run([part[start:end] for part in qkv], [0, end - start]) for start, end in zip(borders, borders[1:],
                                                                                            strict=False)]
    for part in qkv:
        part[30:70] = NAN
    together = run(qkv, borders)
    assert torch.equal(together[:30], alone[0]) and torch.equal(together[70:], alone[2])
    assert together[30:70].isnan().all()


def test_every_patch_sees_every_other():
    qkv = poisoned(1, 20, 1, 8)
    before = run(qkv, [0, 20], scale=0.01)
    for patch in (0, 19):
        changed = [part.clone() for part in qkv]
        changed[2][patch] += 100
        assert ((run(changed, [0, 20], scale=0.01) - before).abs().amax((1, 2)) > 1).all(), patch


def test_scores_beyond_float16_are_fine():
    qkv = [(300 * part).half() for part in poisoned(2, 12, 2, 72)]
    got = run(qkv, [0, 12])
    assert_close(got, run(qkv, [0, 12], "reference"), ROUNDING[torch.float16], "large scores")


@pytest.mark.parametrize("heads", [1, 16])
def test_scores_stay_in_their_budget(heads):
    patches, size = 3000, 4
    qkv = [torch.zeros(patches, heads, size) for _ in range(3)]
    with recorded() as recorder:
        run(qkv, [0, patches])
    bytes_made, untiled = 4 * recorder.largest, 4 * heads * patches**2
    print(f"{patches} patches, {heads} heads: largest tensor {bytes_made:,} bytes, all scores {untiled:,}")
    assert bytes_made <= torch_impl.SCORE_BYTES_CPU < untiled


def test_the_device_is_not_waited_for(monkeypatch):
    qkv = poisoned(3, 50, 2, 8)
    module = op.backends.load("torch")
    with no_host_sync(monkeypatch):
        module.vision_attention(*qkv, [0, 20, 50], 0.25)


@pytest.mark.parametrize("fault", ["causal", "scale missing", "heads swapped", "border moved"])
def test_the_comparison_notices(fault):
    qkv = poisoned(4, 24, 2, 16)
    want = run(qkv, [0, 10, 24], "reference")
    if fault == "causal":
        got = torch.cat([run([part[start:t + 1] for part in qkv], [0, t + 1 - start])[-1:]
                         for start, end in ((0, 10), (10, 24)) for t in range(start, end)])
    elif fault == "scale missing":
        got = run(qkv, [0, 10, 24], scale=1.0)
    elif fault == "heads swapped":
        got = run([qkv[0].flip(1), *qkv[1:]], [0, 10, 24])
    else:
        got = run(qkv, [0, 11, 24])
    assert relative_error(got, want) > 0.01


@pytest.mark.parametrize("change, message", [
    ({"cu_seqlens": [0, 4]}, r"vision_attention: 5 patches, cu_seqlens \[0, 4\]"),
    ({"cu_seqlens": [1, 5]}, "vision_attention: 5 patches"),
    ({"cu_seqlens": [0, 4, 3, 5]}, "vision_attention: 5 patches"),
    ({"cu_seqlens": []}, "vision_attention: 5 patches"),
    ({"k": torch.zeros(5, 1, 8)}, r"vision_attention: q \(5, 2, 8\), k \(5, 1, 8\)"),
    ({"v": torch.zeros(5, 2, 7)}, "vision_attention: q"),
    ({"q": torch.zeros(5, 16)}, "vision_attention: q"),
])
def test_what_does_not_fit_is_refused(change, message):
    arguments = {**{name: torch.zeros(5, 2, 8) for name in "qkv"}, "cu_seqlens": [0, 5], "scale": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        op.vision_attention(**arguments)


def test_the_public_function_runs_the_default_back_end():
    qkv = poisoned(5, 9, 2, 8)
    assert_close(op.vision_attention(*qkv, [0, 5, 9], 0.3), run(qkv, [0, 5, 9], "reference", 0.3), 1e-6, "out")
    assert op.vision_attention(*[part[:0] for part in qkv], [0], 0.3).shape == (0, 2, 8)
