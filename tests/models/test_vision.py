"""The vision tower: against Hugging Face transformers, in batches and pieces, over two ranks, on a picture of 65,536
patches; and what it refuses."""
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tiny_models import greedy, make_engine, model_of
from tests.models.shapes import (
    IMAGE_TOKEN,
    NEW_TOKENS,
    SHAPES,
    VOCABULARY,
    grids,
    picture_prompt,
    pixels,
)
from tests.models.test_parity import TOLERANCE, TYPICAL, compare
from vllm.model_executor.layers import linear
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
from vllm.overlay.model import checkpoint, vision
from vllm.overlay.model.vision import VisionTower, activation_bytes, batches
from vllm.overlay.pictures.picture import Picture, digest_of
from vllm.transformers_utils.configs.qwen3_5 import Qwen3_5VisionConfig

SEEING = [shape for shape in SHAPES if shape.vision is not None]
FIELDS = {"depth": 2, "hidden_size": 48, "num_heads": 4, "intermediate_size": 56, "out_hidden_size": 24,
          "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
          "num_position_embeddings": 36}


def shown(fields):
    return [torch.from_numpy(one) for one in pixels(fields)]


def tower(fields=None, seed=0):
    """A tower by itself, with random weights."""
    made = VisionTower(Qwen3_5VisionConfig(**(fields or FIELDS)), (fields or FIELDS)["out_hidden_size"], "visual")
    fill(made, seed)
    return made


def checkpoint_of(made, seed=0):
    """Random tensors of the names and shapes that the tower asks for."""
    generator = torch.Generator().manual_seed(seed)
    return {want.name: torch.randn(want.shape, generator=generator) * (want.shape[-1]**-0.5 if len(want.shape) > 1
                                                                        else 0.2) + ("norm" in want.name)
            for want in made.wanted("visual")}


def fill(made, seed):
    tensors = checkpoint_of(made, seed)
    for want in made.wanted("visual"):
        want.take(tensors[want.name])


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    """A tower by itself finds no process group, and is called as the engine calls it."""
    Ranks(1, monkeypatch).enter(0)
    with torch.inference_mode():
        yield


def root_mean_square(values):
    return float(np.sqrt(np.mean(np.square(np.asarray(values, dtype=np.float64)))))


@pytest.mark.parametrize("shape", SEEING, ids=lambda shape: shape.name)
def test_embeddings_against_transformers(shape, reference):
    """In float32 equal; in bfloat16 not farther from that than transformers in bfloat16."""
    expected = np.load(reference / f"{shape.name}.npz")
    truth, theirs = expected["embeddings"], expected["embeddings_bfloat16"]
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = model_of(make_engine(reference / shape.name, dtype=dtype))
        parts = model.embed_pictures(shown(shape.vision), grids(shape.vision))
        assert [part.dtype for part in parts] == [getattr(torch, dtype)] * len(parts)
        assert [len(part) for part in parts] == [h * w // shape.vision["spatial_merge_size"]**2
                                                 for h, w in grids(shape.vision)]
        found[dtype] = torch.cat(parts).float().numpy()
    worst = np.abs(found["float32"] - truth).max()
    ours, other = (root_mean_square(one - truth) for one in (found["bfloat16"], theirs))
    ours_worst, other_worst = (np.abs(one - truth).max() for one in (found["bfloat16"], theirs))
    print(f"{shape.name}: embeddings of deviation {truth.std():.2f} differ by {worst:.1e} at most in float32; in "
          f"bfloat16 by {ours:.4f} in the mean square and {ours_worst:.3f} at most, transformers by {other:.4f} and "
          f"{other_worst:.3f}")
    assert truth.std() > 0.1, "the reference is too flat to show an error"
    assert worst < TOLERANCE
    assert ours <= other and ours_worst <= 1.1 * other_worst


@pytest.mark.parametrize("shape", SEEING, ids=lambda shape: shape.name)
@pytest.mark.parametrize("budget", [512, 13], ids=["whole", "in pieces of 13"])
def test_a_prompt_with_pictures_against_transformers(shape, budget, reference):
    expected = np.load(reference / f"{shape.name}.npz")
    engine = make_engine(reference / shape.name, max_logprobs=VOCABULARY, max_num_batched_tokens=budget)
    ids, offsets = picture_prompt()
    pictures = [Picture(offset, grid, values, digest_of(grid, values))
                for offset, grid, values in zip(offsets, grids(shape.vision), shown(shape.vision), strict=True)]
    engine.add_request("r", {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}},
                       greedy(NEW_TOKENS, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    found, ties = compare(outputs[0], len(ids), expected["picture_tokens"], expected["picture_logprobs"])
    worst, typical = max(found), root_mean_square(found)
    print(f"{shape.name}: {len(found)} logprobs of a prompt of {len(ids)} tokens, {ids.count(IMAGE_TOKEN)} of "
          f"pictures, differ by {worst:.1e} at most, {typical:.1e} in the mean square; {ties} ties")
    # Where a readout nearly cancels, the norm after it magnifies rounding, transformers' own included.
    spread, typical_spread = expected["picture_spread"]
    spread = max(spread, float(expected["spread"]))
    print(f"transformers from itself by {spread:.1e} at most, {typical_spread:.1e} in the mean square")
    assert worst < max(TOLERANCE, 2 * spread) and typical < max(TYPICAL, 2 * typical_spread) and not ties


def test_a_picture_gives_the_same_alone_in_a_batch_and_in_pieces(monkeypatch):
    made, values, sizes = tower(), shown(FIELDS), grids(FIELDS)
    alone = [made([one], [size])[0] for one, size in zip(values, sizes, strict=True)]
    runs = {"in one batch": made(values, sizes)}
    monkeypatch.setattr(vision, "BATCH_PATCHES", 70)
    runs["in batches"] = made(values, sizes)
    monkeypatch.setattr(vision, "PIECE_ROWS", 10)
    runs["in batches and pieces"] = made(values, sizes)
    for name, parts in runs.items():
        for index, (got, want) in enumerate(zip(parts, alone, strict=True)):
            difference = float((got - want).abs().max())
            assert difference < 2e-6, f"{name}: picture {index} differs by {difference:.1e}"
    assert made([], []) == []


def test_batches_are_bounded(monkeypatch):
    monkeypatch.setattr(vision, "BATCH_PATCHES", 100)
    assert [(part.start, part.stop) for part in batches([40, 60, 1, 300, 100, 99, 1, 1])] == [
        (0, 2), (2, 3), (3, 4), (4, 5), (5, 7), (7, 8)]


@pytest.mark.parametrize("part", ["the table of positions", "the rotation", "the order of patches", "the mean"])
def test_the_comparison_would_notice(part):
    made, values, size = tower(), shown(FIELDS)[2], grids(FIELDS)[2]
    want = made([values], [size])[0]
    if part == "the table of positions":
        made.side -= 1
    elif part == "the rotation":
        made.theta = 100.0
    elif part == "the order of patches":
        made._places = lambda height, width: torch.stack(
            torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1).view(-1, 2)
    else:
        made.mean = [0.4, 0.5, 0.5]
    assert (made([values], [size])[0] - want).abs().max() > 1e-3


class Ranks:
    """Tensor-parallel ranks as threads of this process: who asks is told by the thread, sums meet at a barrier."""

    def __init__(self, count, monkeypatch):
        self.count, self._local, self._parts = count, threading.local(), [None] * count
        self._barrier = threading.Barrier(count, timeout=60)
        for module in (linear, vision, checkpoint):
            for name, value in (("get_tensor_model_parallel_world_size", lambda: count),
                                ("get_tensor_model_parallel_rank", lambda: self._local.rank),
                                ("tensor_model_parallel_all_reduce", self._sum)):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)

    def enter(self, rank):
        """Makes the calling thread that rank."""
        self._local.rank = rank

    def _sum(self, part):
        self._parts[self._local.rank] = part
        self._barrier.wait()
        total = sum(self._parts[1:], self._parts[0])
        self._barrier.wait()
        return total

    def run(self, work):
        results, errors = [None] * self.count, []

        def one(rank):
            self.enter(rank)
            try:
                with torch.inference_mode():
                    results[rank] = work()
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank, )) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@pytest.mark.parametrize("change, split", [
    ({}, (2, 28, 96)),
    ({"num_heads": 3}, (3, 28, 96)),
    ({"intermediate_size": 55}, (2, 55, 96)),
    ({"num_heads": 1, "hidden_size": 20, "intermediate_size": 7, "spatial_merge_size": 1}, (1, 7, 10)),
])
def test_two_ranks_give_the_same_and_share_what_divides(change, split, monkeypatch):
    fields = {**FIELDS, **change}
    values, sizes = shown(fields), grids(fields)
    want = torch.cat(tower(fields)(values, sizes))

    def work():
        made = tower(fields)
        block = made.blocks[0]
        shares = (block.local_heads, block.mlp.linear_fc1.weight.shape[0], made.merger.linear_fc1.weight.shape[0])
        return torch.cat(made(values, sizes)), shares

    results = Ranks(2, monkeypatch).run(work)
    for rank, (got, shares) in enumerate(results):
        assert shares == split
        difference = float((got - want).abs().max())
        assert difference < 5e-6, f"rank {rank} differs by {difference:.1e}"


def high_water():
    """Resident bytes now, after the high-water mark was set to them."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_a_picture_of_4096_by_4096_pixels_in_bounded_memory():
    fields = {**FIELDS, "depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 4304,
              "patch_size": 16, "out_hidden_size": 32}
    made = tower(fields)
    values = torch.zeros(256 * 256, 3, 16, 16, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    made([values[:256]], [(16, 16)])
    before, started = high_water(), time.monotonic()
    out, = made([values], [(256, 256)])
    taken, seconds = peak() - before, time.monotonic() - started
    bound = activation_bytes(Qwen3_5VisionConfig(**fields), 32, 65536, torch.float32, 1, "cpu")
    print(f"4096 x 4096 pixels, 65,536 patches: {taken / 1e6:.0f} MB at most beside weights and pixels, "
          f"bound {bound / 1e6:.0f} MB; all scores of one head would be {65536**2 * 4 / 1e9:.0f} GB, the MLP's inner "
          f"values {65536 * 4304 * 4 / 1e9:.1f} GB; {seconds:.0f} s")
    assert out.shape == (128 * 128, 32) and out.isfinite().all()
    assert taken < bound


@pytest.mark.parametrize("change, message", [
    ({"deepstack_visual_indexes": [8, 16]}, r"deepstack_visual_indexes \[8, 16\] is not supported, only an empty list"),
    ({"hidden_act": "silu"}, "hidden_act 'silu' of the vision tower is not supported, only 'gelu_pytorch_tanh'"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' of the vision tower is not supported"),
    ({"num_heads": 5}, "hidden_size 48 of the vision tower in 5 heads gives heads whose size is no multiple of 4"),
    ({"num_heads": 8}, "in 8 heads gives heads whose size is no multiple of 4"),
    ({"num_position_embeddings": 35}, "num_position_embeddings 35 of the vision tower is no square"),
    ({"out_hidden_size": 25}, "out_hidden_size 25 of the vision tower is not the language model's hidden_size 24"),
    ({"patch_size": None}, "the configuration of a qwen3_5_vision model lacks patch_size"),
    ({"depth": -1}, "depth in the configuration of a qwen3_5_vision model is -1, not a positive integer"),
    ({"image_std": [0.5]}, r"image_std in the configuration of a qwen3_5_vision model is \[0.5\] for 3 channels"),
])
def test_a_tower_that_is_not_supported_is_one_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        VisionTower(Qwen3_5VisionConfig(**{**FIELDS, **change}), 24, "visual")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("grid, shape, dtype, message", [
    ((2, 3), (6, 3, 4, 4), torch.uint8, "a picture's grid is 2 x 3 patches, no multiples of 2"),
    ((0, 2), (0, 3, 4, 4), torch.uint8, "a picture's grid is 0 x 2 patches"),
    ((2, 2), (5, 3, 4, 4), torch.uint8, r"of 2 x 2 patches has pixels \(5, 3, 4, 4\) of torch.uint8, not \(4,"),
    ((2, 2), (4, 3, 4, 4), torch.float32, r"has pixels \(4, 3, 4, 4\) of torch.float32"),
    ((2, 2), (4, 48), torch.uint8, r"has pixels \(4, 48\) of torch.uint8, not \(4, 3, 4, 4\)"),
])
def test_pixels_that_do_not_fit_are_refused(grid, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        tower()([torch.zeros(shape, dtype=dtype)], [grid])


def test_a_text_model_takes_no_pictures(hybrid):
    model = model_of(make_engine(hybrid))
    assert isinstance(model, Qwen3_5ForCausalLM) and model.visual is None
    with pytest.raises(ValueError, match="Qwen3_5MoeForCausalLM takes no pictures"):
        model.embed_pictures([torch.zeros(4, 3, 4, 4, dtype=torch.uint8)], [(2, 2)])
