"""Constraints in a step: rows that have one are masked, all others are left alone, failures are marked."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.fake_engine import EOS, ids, tokenizer
from vllm.overlay.engine.nonfinite import FailedOutput
from vllm.overlay.engine.step_failure import Refused
from vllm.overlay.grammar import step
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.follower import Follower
from vllm.overlay.grammar.source import alone, choice_part

SIZE = len(tokenizer())


def group(follower, tokens=(), *, row: int | None):
    """As in stock's SamplingMetadata. row: of the logits; None for a group whose prompt is not complete."""
    data = SimpleNamespace(output_token_ids_array=array("l", tokens))
    return SimpleNamespace(sampling_params=SimpleNamespace(**({} if follower is None else {"follower": follower})),
                           seq_ids=[7], seq_data={7: data}, do_sample=row is not None,
                           sample_indices=[] if row is None else [row])


@pytest.fixture
def choosing(matcher):
    def make(*texts: str) -> Follower:
        grammar = alone(choice_part(texts))
        return Follower(Constraint(grammar), matcher(grammar), ends=(EOS, ), stops=(EOS, ))

    return make


def allowed(row: torch.Tensor) -> set[int]:
    return set((~row.isneginf()).nonzero().flatten().tolist())


def constrained(groups, rows: int = 8, vocab: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    before = torch.randn(rows, vocab)
    logits = before.clone()
    step.constrain(logits, SimpleNamespace(seq_groups=groups))
    return before, logits


def test_only_rows_with_a_constraint_are_touched(choosing):
    free = Follower(Constraint(None, in_thought=True, end_thought=5, thought_budget=10), None)
    groups = [group(None, row=0), group(choosing("ab"), row=1), group(choosing("ab"), row=None),
              group(free, ids("x"), row=2), group(choosing("ab", "cd"), ids("a"), row=5), group(None, row=6)]
    before, logits = constrained(groups)
    assert torch.equal(logits[[0, 2, 3, 4, 6, 7]], before[[0, 2, 3, 4, 6, 7]])
    assert allowed(logits[1]) == set(ids("ab")) & {ids("ab")[0]} and allowed(logits[5]) == {ids("b")[0]}
    for row in (1, 5):
        kept = sorted(allowed(logits[row]))
        assert torch.equal(logits[row, kept], before[row, kept]), "what is allowed keeps its logit"


def test_a_step_without_constraints_computes_nothing(monkeypatch):
    monkeypatch.setattr(step, "apply_token_mask", pytest.fail)
    for groups in ([], None, [group(None, row=0)]):
        before, logits = constrained(groups)
        assert torch.equal(before, logits)


def test_many_rows_at_once(choosing):
    words = ["alpha", "beta", "gamma", "delta", "eps", "zeta", "eta", "theta"]
    followers = [choosing(words[i % 8]) for i in range(40)]
    _, logits = constrained([group(one, row=row) for row, one in enumerate(followers)], rows=40)
    for row in range(40):
        first = allowed(logits[row])
        assert first == allowed(logits[row % 8]) and len(first) == 1, row


def test_failures_are_marked_and_their_rows_left_alone(choosing):
    wrong, right = choosing("yes"), choosing("no")
    groups = [group(right, row=0), group(wrong, ids("x"), row=1)]
    before, logits = constrained(groups)
    assert torch.equal(logits[1], before[1]) and len(allowed(logits[0])) == 1
    outputs = [SimpleNamespace(outputs=["first", "second"])]
    step.mark(outputs, SimpleNamespace(seq_groups=groups))
    first, second = outputs[0].outputs
    assert first == "first" and isinstance(second, FailedOutput)
    assert second.failure is Refused and second.slot is None and "kept to its grammar" in second.reason
    step.mark([], SimpleNamespace(seq_groups=None))
    step.mark([], None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card(choosing):
    logits = torch.randn(4, SIZE, device="cuda", dtype=torch.float16)
    before = logits.clone()
    step.constrain(logits, SimpleNamespace(seq_groups=[group(choosing("ab"), row=1), group(choosing("cd"), row=3)]))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert len(allowed(logits[1].cpu())) == len(allowed(logits[3].cpu())) == 1
