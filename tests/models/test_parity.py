"""The model against Hugging Face transformers, through the whole engine: every position of prompt and output."""
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.tiny_models import greedy, make_engine, run
from tests.models.shapes import NEW_TOKENS, PROMPT_LENGTHS, SHAPES, SLICE_LENGTHS, VOCABULARY, prompt

TOLERANCE = 1e-4
TYPICAL = 1e-5
TIE = 1e-4
SLICE_VOCABULARY = 8192
SLICE_IDS = 64


def differences(found: Sequence[Any], expected: np.ndarray) -> list[float]:
    """found: per position a dict id -> Logprob; expected: [positions, vocabulary]."""
    return [abs(entry.logprob - row[token]) for place, row in zip(found, expected, strict=True)
            for token, entry in place.items()]


def compare(output: Any, length: int, tokens: Sequence[int], logprobs: np.ndarray) -> tuple[list[float], int]:
    """Returns the differences of all logprobs, and 1 where greedy tokens part at a tie (the rest is not compared)."""
    found = differences(output.prompt_logprobs[1:], logprobs[:length - 1])
    done = output.outputs[0]
    for place, (token, expected) in enumerate(zip(done.token_ids, tokens, strict=True)):
        row = logprobs[length - 1 + place]
        found += differences([done.logprobs[place]], row[None])
        if token != expected:
            best = np.sort(row)[-2:]
            assert best[1] - best[0] < TIE, f"token {place}: {token}, expected {expected}; {done.token_ids} {tokens}"
            return found, 1
    return found, 0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_shape_in_float32(shape, reference):
    expected = np.load(reference / f"{shape.name}.npz")
    engine = make_engine(reference / shape.name, max_logprobs=VOCABULARY, max_num_batched_tokens=512)
    outputs = run(engine, [prompt(length) for length in PROMPT_LENGTHS],
                  greedy(NEW_TOKENS, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY))
    parted, found = 0, []
    for length, output in zip(PROMPT_LENGTHS, outputs, strict=True):
        some, tie = compare(output, length, expected[f"tokens{length}"], expected[f"logprobs{length}"])
        found, parted = found + some, parted + tie
    worst, typical = max(found), float(np.sqrt(np.mean(np.square(found))))
    deviation, spread = float(expected[f"logprobs{PROMPT_LENGTHS[-1]}"].std()), float(expected["spread"])
    print(f"{shape.name}: {len(found)} logprobs of deviation {deviation:.1f} differ by {worst:.1e} at most, "
          f"{typical:.1e} in the mean square; transformers from itself by {spread:.1e} at most; {parted} ties")
    assert deviation > 1, "the reference is too flat to show an error"
    assert typical < TYPICAL
    # Where a readout nearly cancels, the norm after it magnifies rounding, transformers' own included.
    assert worst < max(TOLERANCE, 2 * spread)
    assert parted <= 1


def slice_outputs(folder: Path, expected: Any, dtype: str, budget: int) -> list[Any]:
    """Distributions of the slice over the reference's own tokens, in pieces of `budget` tokens."""
    engine = make_engine(folder, dtype=dtype, max_logprobs=SLICE_IDS, max_num_batched_tokens=budget)
    prompts = [prompt(length, SLICE_VOCABULARY) + expected[f"tokens{length}"].tolist() for length in SLICE_LENGTHS]
    return run(engine, prompts, greedy(1, prompt_logprobs=SLICE_IDS), together=False)


def test_bench_slice_in_float32(reference):
    expected = np.load(reference / "slice.npz")
    engine = make_engine(reference / "slice", max_logprobs=SLICE_IDS)
    outputs = run(engine, [prompt(length, SLICE_VOCABULARY) for length in SLICE_LENGTHS],
                  greedy(NEW_TOKENS, logprobs=SLICE_IDS, prompt_logprobs=SLICE_IDS))
    found = [compare(output, length, expected[f"tokens{length}"], expected[f"logprobs{length}"])
             for length, output in zip(SLICE_LENGTHS, outputs, strict=True)]
    worst = max(max(some) for some, _ in found)
    print(f"slice, float32: logprobs differ by {worst:.1e} at most, {sum(tie for _, tie in found)} ties")
    assert worst < TOLERANCE


def test_bench_slice_in_bfloat16(reference):
    """Not farther from the float32 truth than transformers in bfloat16; and cut in pieces of 16, within twice
    transformers' own spread under the same cut."""
    expected = np.load(reference / "slice.npz")
    whole = slice_outputs(reference / "slice", expected, "bfloat16", 512)
    pieces = slice_outputs(reference / "slice", expected, "bfloat16", 16)
    for length, one, other in zip(SLICE_LENGTHS, whole, pieces, strict=True):
        count = length + NEW_TOKENS - 1
        rows = [(place, token) for place in range(count) for token in one.prompt_logprobs[place + 1]]
        places, ids = np.array(rows).T
        truth = expected[f"logprobs{length}"][places, ids]
        theirs = expected[f"bfloat16_{length}"][places, ids]
        ours = np.array([one.prompt_logprobs[place + 1][token].logprob for place, token in rows])
        error, allowed = (np.sqrt(np.mean((value - truth)**2)) for value in (ours, theirs))
        both = [(place, token) for place, token in rows if token in other.prompt_logprobs[place + 1]]
        ours_spread = max(abs(one.prompt_logprobs[place + 1][token].logprob -
                              other.prompt_logprobs[place + 1][token].logprob) for place, token in both)
        their_spread = np.abs(expected[f"bfloat16_{length}"] - expected[f"chunked_{length}"])[:count].max()
        print(f"slice, bfloat16, {length} tokens: error {error:.4f}, transformers' {allowed:.4f}; "
              f"spread over pieces {ours_spread:.4f}, transformers' {their_spread:.4f}")
        assert len(both) > 0.8 * len(rows)
        assert error < 1.1 * allowed
        assert ours_spread <= 2 * their_spread
