"""A picture -> the size that the model wants -> patches: transformers' Qwen2VLImageProcessor, up to its rescaling.

Written out because the processor of 4.51 refuses sides below one merged patch (a 1x1 picture), both versions take a
picture three pixels high for one with its channels first, and both copy the patches four times (3 s and 0.3 GB for
4096x4096, here 0.3 s). The tests compare with the processor, byte by byte.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image

# The processor's own limit.
MOST_ASPECT = 200


def target_size(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(width, height) to which a picture is resized: multiples of ``factor``, the aspect kept as well as they allow,
    between min_pixels and max_pixels. Sizes in pixels.

    Source: smart_resize of transformers 4.55, models/qwen2_vl. An extreme aspect may exceed max_pixels, as there.

    Raises ValueError where one side is more than MOST_ASPECT times the other.
    """
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise ValueError(f"one side is more than {MOST_ASPECT} times the other")
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    if new_width * new_height > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
    elif new_width * new_height < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_width = math.ceil(width * grow / factor) * factor
        new_height = math.ceil(height * grow / factor) * factor
    return new_width, new_height


def cut(picture: Image.Image, patch: int, merge: int) -> tuple[tuple[int, int], torch.Tensor]:
    """(grid, patches) of an RGB picture whose sides are multiples of patch * merge.

    grid: (h, w) in patches. patches: uint8 [h * w, 3, patch, patch], merge x merge neighbours after one another.
    """
    pixels = torch.from_numpy(np.array(picture))
    height, width, channels = pixels.shape
    h, w = height // patch, width // patch
    blocks = pixels.view(h // merge, merge, patch, w // merge, merge, patch, channels)
    return (h, w), blocks.permute(0, 3, 1, 4, 6, 2, 5).reshape(h * w, channels, patch, patch)


def patches_of(picture: Image.Image, *, patch: int, merge: int, min_pixels: int, max_pixels: int,
               resample: int = 3) -> tuple[tuple[int, int], torch.Tensor]:
    """``cut`` of the picture (RGB) after it has been resized to its target size."""
    size = target_size(picture.width, picture.height, patch * merge, min_pixels, max_pixels)
    return cut(picture if picture.size == size else picture.resize(size, resample), patch, merge)
