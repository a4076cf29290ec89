"""M-RoPE positions: against a rule written out token by token, against transformers, and cut anywhere."""
import json
import os
import random
import subprocess

import pytest
import torch

from vllm.overlay.kernels.rope import RotaryTable
from vllm.overlay.pictures.orders import StepPictures
from vllm.overlay.pictures.positions import PictureLayout

MERGE = 2
# Pictures as (offset, (h, w)): none; at the start; wide and high with text between; side by side; one token.
LAYOUTS = ([], [(0, (4, 6))], [(3, (2, 10)), (9, (12, 4)), (30, (6, 6))], [(5, (4, 4)), (9, (4, 4)), (13, (2, 2))],
           [(0, (2, 2)), (1, (8, 2)), (40, (2, 8))])
LENGTH = 60


def written_out(pictures, merge, length):
    """The whole sequence's positions, one token after the other."""
    found, starts, index, position = [], dict(pictures), 0, 0
    while index < length:
        if index in starts:
            rows, columns = (side // merge for side in starts[index])
            found += [[position, position + row, position + column] for row in range(rows) for column in range(columns)]
            index += rows * columns
            position += max(rows, columns)
        else:
            found.append([position] * 3)
            index, position = index + 1, position + 1
    return torch.tensor(found[:length]).t()


@pytest.mark.parametrize("pictures", LAYOUTS)
def test_every_cut(pictures):
    whole = written_out(pictures, MERGE, LENGTH)
    layout = PictureLayout(pictures, MERGE)
    for start in range(LENGTH):
        for end in range(start, LENGTH + 1):
            found = layout.positions(start, end)
            assert found.dtype == torch.long and found.shape == (3, end - start)
            assert torch.equal(found, whole[:, start:end]), (pictures, start, end)
    assert layout.delta == int(whole[0, -1]) - (LENGTH - 1)


def test_merge_of_three():
    pictures = [(2, (9, 6)), (20, (3, 12))]
    assert torch.equal(PictureLayout(pictures, 3).positions(0, 40), written_out(pictures, 3, 40))


PROGRAM = """
import json, sys, torch
from types import SimpleNamespace
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
layouts, length, merge = json.load(sys.stdin)
IMAGE = 9
model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge)))
model.get_vision_position_ids = lambda *a, **k: Qwen3_5Model.get_vision_position_ids(model, *a, **k)
answers = []
for pictures in layouts:
    ids, kinds = [1] * length, [0] * length
    for offset, (h, w) in pictures:
        count = h * w // merge ** 2
        ids[offset:offset + count] = [IMAGE] * count
        kinds[offset:offset + count] = [1] * count
    grids = torch.tensor([[1, h, w] for _, (h, w) in pictures]) if pictures else None
    positions, delta = Qwen3_5Model.get_rope_index(
        model, torch.tensor([ids]), mm_token_type_ids=torch.tensor([kinds]), image_grid_thw=grids,
        attention_mask=torch.ones(1, length, dtype=torch.long))
    answers.append([positions[:, 0].tolist(), int(delta.reshape(-1)[0])])
print(json.dumps(answers))
"""


def test_against_transformers():
    """Pictures with text before each, as every prompt of the chat template has it."""
    python = os.environ.get("VLLM_OVERLAY_REFERENCE_PYTHON", "")
    assert os.path.exists(python), "VLLM_OVERLAY_REFERENCE_PYTHON names no Python: `make env-reference` makes it"
    chance = random.Random(0)
    layouts = [[], [(3, (2, 10)), (9, (12, 4)), (30, (6, 6))]]
    for _ in range(6):
        layout, at = [], 0
        for _ in range(3):
            at += chance.randrange(1, 6)
            grid = (2 * chance.randrange(1, 5), 2 * chance.randrange(1, 5))
            layout.append((at, grid))
            at += grid[0] * grid[1] // MERGE**2
        layouts.append(layout)
    done = subprocess.run([python, "-c", PROGRAM], input=json.dumps([layouts, LENGTH, MERGE]), text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    for layout, (positions, delta) in zip(layouts, json.loads(done.stdout), strict=True):
        made = PictureLayout(layout, MERGE)
        found = made.positions(0, LENGTH)
        assert torch.equal(found, torch.tensor(positions)), (layout, found, positions)
        assert made.delta == delta, layout


def test_positions_of_a_step():
    """A piece of a pictured prompt, a whole text, and two decoding rows, one of them behind pictures."""
    layout = PictureLayout(LAYOUTS[2], MERGE)
    step = StepPictures([(0, layout), (3, layout)], None)
    found = step.positions([20, 5, 9, 50], [12, 5, 1, 1])
    expected = [layout.positions(8, 20), torch.arange(5).expand(3, -1), torch.tensor([[8]] * 3),
                torch.tensor([[49 + layout.delta]] * 3)]
    assert torch.equal(found, torch.cat(expected, 1))


def test_text_turns_as_with_one_position():
    """A text beside a pictured prompt gets three equal positions: the same rotation to the bit."""
    table = RotaryTable(64, 1e7, (11, 11, 10))
    one = torch.arange(1000, 1400)
    for plain, threefold in zip(table(one), table(PictureLayout([], 2).positions(1000, 1400)), strict=True):
        assert torch.equal(plain, threefold)
