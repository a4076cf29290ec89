"""Pictures of one or four colours, drawn, resized and cut as the server does it."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import numpy as np
import torch
from chats import Picture
from config import PICTURE_SIZE, ROOT, real
from PIL import Image

SETTINGS = real("preprocessor_config.json")
PATCH, MERGE = SETTINGS["patch_size"], SETTINGS["merge_size"]


@cache
def process() -> ModuleType:
    """The server's own module, which its tests hold equal to transformers' processor byte by byte."""
    spec = importlib.util.spec_from_file_location(
        "picture_process", ROOT / "vllm_overrides/overlay/serving/pictures/process.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(picture: Picture, size: tuple[int, int] | None = None) -> Image.Image:
    """The picture in its own or another size."""
    width, height = size or picture.size
    if len(picture.colours) == 1:
        return Image.new("RGB", (width, height), picture.colours[0])
    pixels = np.empty((height, width, 3), np.uint8)
    for place, colour in enumerate(picture.colours):
        rows = slice(0, height // 2) if place < 2 else slice(height // 2, height)
        columns = slice(0, width // 2) if place % 2 == 0 else slice(width // 2, width)
        pixels[rows, columns] = colour
    return Image.fromarray(pixels)


def patches_of(picture: Picture, exact: bool = False) -> tuple[tuple[int, int], torch.Tensor]:
    """(grid, patches): grid (h, w) in patches; patches float32 [h * w, 3 * 2 * 16 * 16], what the tower takes.

    Args:
        exact: draw in the picture's own size and resize. Otherwise it is drawn in the size that it would be resized to,
            which differs at the inner edges only and spares a picture of 16 million pixels a hundredth of its time.
    """
    limits = {"min_pixels": PICTURE_SIZE["shortest_edge"], "max_pixels": PICTURE_SIZE["longest_edge"]}
    if exact:
        grid, cut = process().patches_of(drawn(picture), patch=PATCH, merge=MERGE, **limits)
    else:
        size = process().target_size(*picture.size, PATCH * MERGE, *limits.values())
        grid, cut = process().cut(drawn(picture, size), PATCH, MERGE)
    values = cut.float() / 127.5 - 1
    return grid, values[:, :, None].expand(-1, -1, SETTINGS["temporal_patch_size"], -1, -1).flatten(1)
