"""The filters against stock's and against the row loop."""
import ast
import random
from pathlib import Path

import pytest
import torch

from tests.overlay.kernels.helpers import recorded
from vllm.model_executor.layers import sampler as _sampler
from vllm.overlay.kernels import sampling as op
from vllm.overlay.kernels.sampling import torch_impl

REFERENCE = op.backends.load("reference")
VOCAB = 248320


def stock(name):
    """Stock's own function from its source, for the deployed extension has replaced it in the module."""
    path = Path(getattr(_sampler, "_stock", _sampler).__file__)
    functions = [node for node in ast.parse(path.read_text()).body
                 if isinstance(node, ast.FunctionDef) and node.name == name]
    namespace = {"torch": torch}
    exec(compile(ast.Module(functions, []), str(path), "exec"), namespace)
    return namespace[name]


STOCK_TOP = stock("_apply_top_k_top_p")
STOCK_MIN = stock("_apply_min_p")


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixes(seed, rows, vocab):
    """Every combination of off, small, middling and extreme values of p and k."""
    rng = random.Random(seed)
    p = torch.tensor([rng.choice([1.0, 1.0, 0.95, 0.5, 0.01, 0.999, 1e-6]) for _ in range(rows)])
    k = torch.tensor([min(vocab, rng.choice([vocab, vocab, 1, 2, 20, 64, 256, 257, vocab // 2 + 1]))
                      for _ in range(rows)])
    return p, k


def assert_equal_filters(got, want, what):
    assert got.shape == want.shape and got.dtype == want.dtype
    wrong = (got != want).sum(1)
    assert not wrong.any(), f"{what}: rows {wrong.nonzero().flatten().tolist()} differ in {wrong[wrong > 0].tolist()}"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("vocab", [2, 50, 330, 3000])
def test_equal_to_stock_without_ties(seed, vocab):
    logits = 4 * normal(seed, 12, vocab)
    p, k = mixes(seed, 12, vocab)
    want = STOCK_TOP(logits.clone(), p, k)
    assert_equal_filters(op.apply_top_k_top_p(logits, p, k), want, f"p {p.tolist()} k {k.tolist()}")
    assert_equal_filters(REFERENCE.apply_top_k_top_p(logits, p, k), want, "reference")


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_stock_on_the_real_vocabulary(seed):
    logits = 3 * normal(seed, 6, VOCAB)
    p, k = torch.tensor([0.95, 1, 0.95, 0.3, 0.9, 1]), torch.tensor([20, 20, 256, 1, VOCAB, VOCAB])
    assert_equal_filters(op.apply_top_k_top_p(logits, p, k), STOCK_TOP(logits.clone(), p, k), f"seed {seed}")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("step", [1.0, 0.25, 10.0])
def test_among_ties_as_many_stay_as_in_stock_and_those_of_the_highest_ids(seed, step):
    """Logits are rounded by the model's dtype: ties are the rule, also beyond the candidates that are looked at."""
    logits = (normal(seed, 12, 900) * 2 / step).round() * step
    p, k = mixes(seed, 12, 900)
    got, want = op.apply_top_k_top_p(logits, p, k), STOCK_TOP(logits.clone(), p, k)
    what = f"p {p.tolist()} k {k.tolist()}"
    assert_equal_filters(got.sort(dim=1).values, want.sort(dim=1).values, f"values, {what}")
    assert_equal_filters(got, REFERENCE.apply_top_k_top_p(logits, p, k), what)


@pytest.mark.parametrize("allowed", [1, 3, 100])
def test_masked_vocabularies(allowed):
    """What a grammar leaves: fewer finite logits than k. No full sort there either."""
    logits = torch.full((4, 5000), -float("inf"))
    logits[:, ::5000 // allowed] = normal(0, 4, len(range(0, 5000, 5000 // allowed)))
    p, k = torch.tensor([0.9, 1, 0.9, 0.1]), torch.tensor([20, 20, 50, 1])
    with recorded() as recorder:
        got = torch_impl.apply_top_k_top_p(logits, p, k)
    assert_equal_filters(got, STOCK_TOP(logits.clone(), p, k), f"{allowed} allowed")
    assert torch.isfinite(got).any(1).all()
    assert not sorted_widths(recorder, 5000), recorder.names


def sorted_widths(recorder, vocab):
    return [width for name, width in recorder.widths if "sort" in name and width >= vocab]


def test_small_k_sorts_no_vocabulary():
    logits = normal(1, 8, 5000)
    with recorded() as recorder:
        torch_impl.apply_top_k_top_p(logits, torch.full((8, ), 0.95), torch.full((8, ), 20))
    assert not sorted_widths(recorder, 5000)
    with recorded() as recorder:
        torch_impl.apply_top_k_top_p(logits, torch.full((8, ), 0.95), torch.full((8, ), 5000))
    assert sorted_widths(recorder, 5000), "the guard has no power"


def test_a_row_gives_the_same_alone_and_in_a_batch():
    logits = (8 * normal(2, 9, 700)).round() / 4
    p, k = mixes(3, 9, 700)
    together = op.apply_top_k_top_p(logits, p, k)
    for row in range(9):
        alone = op.apply_top_k_top_p(logits[row:row + 1], p[row:row + 1], k[row:row + 1])
        assert torch.equal(together[row:row + 1], alone), f"row {row} p {p[row]} k {k[row]}"


def test_inputs_are_left_alone_and_half_precision_parameters_are_as_in_stock():
    logits, p, k = normal(4, 5, 400), torch.full((5, ), 0.9).bfloat16(), torch.full((5, ), 30, dtype=torch.int32)
    before = logits.clone()
    assert_equal_filters(op.apply_top_k_top_p(logits, p, k), STOCK_TOP(logits.clone(), p, k), "bfloat16 p")
    assert torch.equal(logits, before)


def test_non_finite_logits_are_not_hidden():
    logits = normal(5, 3, 400)
    logits[1, 7] = float("nan")
    got = op.apply_top_k_top_p(logits, torch.full((3, ), 0.9), torch.full((3, ), 30))
    assert got[1].isnan().any() and not got[[0, 2]].isnan().any()
    want = STOCK_TOP(logits.clone(), torch.full((3, ), 0.9), torch.full((3, ), 30))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("seed", range(6))
def test_min_p(seed):
    logits = 3 * normal(seed, 7, 500)
    min_p = torch.tensor([0, 0.05, 0.5, 1, 0.001, 0, 0.2])
    before = logits.clone(), min_p.clone()
    got = op.apply_min_p(logits, min_p)
    assert torch.equal(logits, before[0]) and torch.equal(min_p, before[1]) and min_p.dim() == 1
    assert_equal_filters(got, REFERENCE.apply_min_p(logits, min_p), "reference")
    assert_equal_filters(got, STOCK_MIN(logits.clone(), min_p.clone()), "stock")


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 128, 3000, 3072])
def test_greedy(rounded, vocabulary):
    logits = normal(6, 20, vocabulary)
    if rounded:
        logits = logits.round()
    got = op.greedy(logits)
    assert torch.equal(got, REFERENCE.greedy(logits))
    assert torch.equal(got, torch.argmax(torch.log_softmax(logits, -1), -1)), "stock takes the argmax of the logprobs"


@pytest.mark.parametrize("vocabulary", [3000, 3072])
def test_greedy_takes_the_first_and_does_not_hide_nan(vocabulary):
    logits = torch.full((4, vocabulary), -float("inf"))
    logits[0, [700, 701, 2999]] = 1.0
    logits[1, [5, 2900]] = torch.tensor([1.0, float("nan")])
    logits[2, [0, 2999]] = float("inf")
    assert op.greedy(logits).tolist() == [700, 2900, 0, 0]
    assert op.greedy(logits[:0]).shape == (0, )
    assert op.greedy(logits.t().contiguous().t()).tolist() == [700, 2900, 0, 0]
