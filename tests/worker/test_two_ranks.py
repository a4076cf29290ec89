"""Two ranks (gloo, two processes) are one: the law, the states in the slots, and what is free afterwards.

Both play the same scenarios (two_ranks.py) with the same limits, so that the same sequences own the same slots.
"""
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.tiny_models import assert_same, environment
from tests.models.shapes import VOCABULARY
from tests.worker.two_ranks import BLOCKS, CUTS, DTYPES, FORCED, HYBRIDS, SCENARIOS, SEQS, play, write_models
from vllm.distributed import parallel_state

ROOT = Path(__file__).resolve().parents[2]
FLOAT32 = [(name, key) for name in SCENARIOS if DTYPES[name] == "float32" for key in SCENARIOS[name]]
# In the reference environment: the distributions after each token, in float32 and, in two ways, in bfloat16: as ever,
# and with the products that ranks share computed in halves, rounded, and added.
REFERENCE = """
import json
import sys
import numpy, torch, transformers
sys.path.insert(0, "tests/models")
from reference_program import forced

def in_halves(linear):
    def forward(x):
        half = x.shape[-1] // 2
        product = torch.nn.functional.linear
        return product(x[..., :half], linear.weight[:, :half]) + product(x[..., half:], linear.weight[:, half:])
    linear.forward = forward

folder, sequences, found = sys.argv[1], json.loads(sys.argv[2]), {}
with torch.no_grad():
    for name in ("float32", "bfloat16", "halves"):
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        model = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        if name == "halves":
            shared = [part for path, part in model.named_modules()
                      if path.endswith((".o_proj", ".out_proj", ".down_proj"))]
            assert len(shared) == 2 * model.config.num_hidden_layers
            for part in shared:
                in_halves(part)
        for ids in sequences:
            found[f"{name}{len(ids)}"] = forced(model, ids, len(ids)).numpy()
numpy.savez(folder + "/reference.npz", **found)
"""


def start(*command, **variables):
    return subprocess.Popen([str(part) for part in command], cwd=ROOT, text=True, env={**environment(), **variables},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def played(folder):
    """(by one rank, by two), each {model: {scenario: Played}}."""
    # Ends by itself although its ranks are alive: stock's destructor hangs at exit.
    program = start(sys.executable, "-m", "tests.worker.two_ranks", folder)
    one = {name: play(folder, name, 1) for name in SCENARIOS}
    output, _ = program.communicate(timeout=300)
    assert program.returncode == 0, output[-6000:]
    return one, pickle.loads((folder / "two_ranks.pickle").read_bytes())


def samples(outputs):
    return [SimpleNamespace(outputs=[sample]) for output in outputs for sample in output.outputs]


def joined(states, name):
    """The pool of one rank, from those of two, which have half the heads each: query, key and value channels of the
    convolution are cut one by one."""
    tails, recurrents = zip(*states, strict=True)
    if len(states) == 1:
        return tails[0], recurrents[0]
    config = HYBRIDS[name]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"] // 2
    parts = [np.split(tail, [keys, 2 * keys], axis=2) for tail in tails]
    return (np.concatenate([part for pair in zip(*parts, strict=True) for part in pair], axis=2),
            np.concatenate(recurrents, axis=2))


def assert_states(two, one, name):
    for what, found, expected in zip(("tails", "states"), joined(two.states, name), joined(one.states, name),
                                     strict=True):
        assert found.shape == expected.shape and np.abs(expected).max() > 0.01
        for slot in range(SEQS):
            differ = np.abs(found[:, slot] - expected[:, slot]).max()
            assert differ < 1e-4, f"{what} in slot {slot} differ by {differ} of {np.abs(expected[:, slot]).max()}"


@pytest.mark.parametrize(("name", "key"), [case for case in FLOAT32 if case[1] != "mistaken slots"],
                         ids=lambda value: value.replace(" ", "-"))
def test_two_ranks_are_one(played, name, key):
    one, two = (each[name][key] for each in played)
    parted = assert_same(samples(two.outputs), samples(one.outputs))
    if key in CUTS:
        parted += assert_same(samples(two.outputs), samples(played[0][name]["together"].outputs))
    assert parted <= 2, f"{parted} samples part at ties"
    assert [len(output.outputs) for output in two.outputs] == [len(output.outputs) for output in one.outputs]
    assert [output.num_cached_tokens for output in two.outputs] == [output.num_cached_tokens for output in one.outputs]
    assert two.preemptions == one.preemptions and (two.preemptions >= 5) == (key == "preempted")
    assert two.free == one.free == (SEQS if name in HYBRIDS else None, BLOCKS)
    if name in HYBRIDS:
        assert_states(two, one, name)
    else:
        assert two.states == [None, None]


@pytest.mark.parametrize("name", ["moe", "attention"])
def test_prompt_logprobs(played, name):
    one, two = (each[name]["prompt logprobs"].outputs for each in played)
    count = 0
    for output, expected in zip(two, one, strict=True):
        assert len(output.prompt_logprobs) == len(expected.prompt_logprobs) == len(expected.prompt_token_ids)
        for place in range(1, len(expected.prompt_logprobs)):
            found, right = output.prompt_logprobs[place], expected.prompt_logprobs[place]
            for token in found.keys() & right.keys():
                count += 1
                assert abs(found[token].logprob - right[token].logprob) < 1e-5, f"place {place}, token {token}"
    assert count > 500


def test_samples_differ(played):
    for name in ("moe", "dense", "attention"):
        tokens = [tuple(sample.outputs[0].token_ids) for sample in samples(played[1][name]["drawn"].outputs)]
        assert len(tokens) == 5 and len(set(tokens)) == 5, tokens


def test_the_prefix_cache_was_hit(played):
    """With its KV heads on both ranks."""
    cached = [[output.num_cached_tokens for output in played[1]["attention"][key].outputs]
              for key in ("together", "warm")]
    assert cached == [[0] * 5, [0, 0, 16, 48, 128]], cached


def test_checkpoints_of_a_rank(played):
    """Restored on both ranks; where either lacks them, or they are spoilt, both compute the requests again, cold, and
    leave new ones. Alone or with another, the tokens are the same."""
    one, two = (each["moe-cached"] for each in played)
    for key, found in two.items():
        assert_same(found.outputs, one["cold"].outputs)
        cached = [output.num_cached_tokens for output in found.outputs]
        assert all(cached) if key.startswith("warm") else cached == [0, 0, 0], (key, cached)
        assert bool(found.missed) == key.startswith(("lost", "spoilt")), (key, found.missed)
        assert found.missed == one[key].missed, (key, found.missed, one[key].missed)


def test_a_rank_with_wrong_slots_is_noticed(played):
    """Negative control: the second rank, alone, exchanges the slots of two rows in every second step."""
    two, one = played[1]["moe"]["mistaken slots"], played[0]["moe"]["together"]
    with pytest.raises(AssertionError, match="request"):
        assert_same(samples(two.outputs), samples(one.outputs))
    with pytest.raises(AssertionError, match="in slot"):
        assert_states(two, played[0]["moe"]["mistaken slots"], "moe")


def test_bfloat16(folder, played):
    """Teacher-forced, logprobs of the whole vocabulary: from one rank's no farther than twice what transformers is from
    itself when it adds halves as two ranks do, and from float32 no farther than transformers is."""
    program = start(os.environ["VLLM_OVERLAY_REFERENCE_PYTHON"], "-c", REFERENCE, folder / "dense", json.dumps(FORCED),
                    PYTHONPATH="")
    output, _ = program.communicate(timeout=300)
    assert program.returncode == 0, output[-3000:]
    reference = np.load(folder / "dense" / "reference.npz")
    truth, whole, halves = (np.concatenate([reference[f"{name}{len(tokens)}"][:-1] for tokens in FORCED])
                            for name in ("float32", "bfloat16", "halves"))
    one, two = (np.array([[place[token].logprob for token in range(VOCABULARY)]
                          for output in each["dense-bfloat16"]["forced"].outputs
                          for place in output.prompt_logprobs[1:]]) for each in played)
    spread, differ = np.abs(whole - halves).max(), np.abs(two - one).max()
    allowed, error = (np.sqrt(np.mean((value - truth)**2)) for value in (whole, two))
    print(f"bfloat16, {one.size} logprobs: two ranks from one {differ:.4f}, transformers from itself {spread:.4f}; "
          f"from float32 {error:.4f}, transformers {allowed:.4f}")
    assert 0 < differ <= 2 * spread
    assert error < 1.1 * allowed
    for each in played:
        assert each["dense-bfloat16"]["forced"].free == (SEQS, BLOCKS)


def test_a_rank_that_is_alone_converts_nothing():
    """In each step its logits went to float32 and back."""
    alone = object.__new__(parallel_state.GroupCoordinator)
    alone.world_size = 1
    logits = torch.ones(2, 3, dtype=torch.bfloat16)
    assert alone.gather(logits) is logits
