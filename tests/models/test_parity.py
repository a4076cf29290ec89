"""The model against Hugging Face transformers, through the whole engine: every position of prompt and output."""
from collections.abc import Sequence
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
    outputs = run(engine, [prompt(length, shape.words) for length in PROMPT_LENGTHS],
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bench_slice_in_half_precision(reference, dtype):
    """Not farther from the float32 truth than transformers in that dtype. And the law: cut in pieces of 16, in a mixed
    batch, or preempted, teacher-forced logprobs within twice transformers' own spread over pieces of 16 (of the longest
    prompt: a shorter one than a piece is not cut)."""
    expected = np.load(reference / "slice.npz")
    prompts = [prompt(length, SLICE_VOCABULARY) + expected[f"tokens{length}"].tolist() for length in SLICE_LENGTHS]
    others = [prompt(length, SLICE_VOCABULARY) for length in (1, 30, 41)]
    params = greedy(1, prompt_logprobs=SLICE_IDS)
    engine = make_engine(reference / "slice", dtype=dtype, max_logprobs=SLICE_IDS, max_num_batched_tokens=512)
    scheduler = engine.scheduler[0]
    whole = run(engine, prompts, params, together=False)
    batched = run(engine, prompts + others, params)
    engine.scheduler_config.max_num_batched_tokens = 16
    runs = {"in pieces": run(engine, prompts, params, together=False), "in a batch": batched}
    runs["in pieces, in a batch"] = run(engine, prompts + others, params)
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 8
    runs["preempted"] = run(engine, prompts + others, params)
    assert scheduler.num_cumulative_preemption > 3
    longest = max(SLICE_LENGTHS)
    spread = np.abs(expected[f"{dtype}_{longest}"] - expected[f"{dtype}_chunked_{longest}"]).max()
    print(f"slice, {dtype}: transformers' spread {spread:.4f}")
    for place, length in enumerate(SLICE_LENGTHS):
        one, count = whole[place].prompt_logprobs, length + NEW_TOKENS - 1
        rows = [(at, token) for at in range(count) for token in one[at + 1]]
        places, ids = np.array(rows).T
        truth, theirs = (expected[f"{name}{length}"][places, ids] for name in ("logprobs", f"{dtype}_"))
        ours = np.array([one[at + 1][token].logprob for at, token in rows])
        error, allowed = (np.sqrt(np.mean((value - truth)**2)) for value in (ours, theirs))
        print(f"slice, {dtype}, {length} tokens: error {error:.4f}, transformers' {allowed:.4f}")
        assert error < 1.1 * allowed
        for how, outputs in runs.items():
            other = outputs[place].prompt_logprobs
            both = [(at, token) for at, token in rows if token in other[at + 1]]
            found = max(abs(one[at + 1][token].logprob - other[at + 1][token].logprob) for at, token in both)
            print(f"  {how}: {found:.4f} from whole and alone")
            assert len(both) > 0.8 * len(rows)
            assert found <= 2 * spread, how
