"""The patches: equal, byte for byte, to those of the image processor in both versions of transformers."""

from __future__ import annotations

import hashlib
import resource
import time

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.picture_files import picture
from vllm.overlay.serving.pictures.process import cut, patches_of, target_size

LEAST, MOST = 65536, 16777216
# What transformers 4.51.3 and 4.55.3 gave for `picture(width, height)`, cut at max_pixels: grid, first bytes of the
# SHA-256 of the patches without their second frame. The same with Pillow 9.5, 10.4 and 13.0, which is not so for every
# size.
RECORDED = {
    (64, 64, MOST): ((16, 16), "0cee77b7f7ca7dfb"),
    (2048, 2048, MOST): ((128, 128), "92c782c060eaf1fc"),
    (640, 480, MOST): ((30, 40), "93b35ca927827135"),
    (100, 3000, MOST): ((188, 6), "1a199efd182ca5ff"),
    (33, 47, MOST): ((20, 14), "60b6985bb520f404"),
    (1000, 700, MOST): ((44, 62), "7b7fa5556092e06c"),
    (32, 6400, MOST): ((400, 2), "9489a3f61e599791"),
    (2048, 2048, 262144): ((32, 32), "da0fe6ff65571bc8"),
    (640, 480, 262144): ((26, 36), "030ded47dc5b7389"),
    (3000, 100, 262144): ((4, 174), "59568c92ca1130c4"),
    (1000, 700, 262144): ((26, 38), "7684342b505a0013"),
}


def ours(image, most=MOST):
    return patches_of(image, patch=16, merge=2, min_pixels=LEAST, max_pixels=most)


def processor(most=MOST, **settings):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    return Qwen2VLImageProcessor(min_pixels=LEAST, max_pixels=most, patch_size=16, merge_size=2, temporal_patch_size=2,
                                 **settings)


@pytest.mark.parametrize(("width", "height", "most"), RECORDED)
def test_what_both_versions_gave(width, height, most):
    grid, patches = ours(picture(width, height), most)
    assert (grid, hashlib.sha256(patches.numpy()).hexdigest()[:16]) == RECORDED[width, height, most]
    assert patches.shape == (grid[0] * grid[1], 3, 16, 16) and patches.dtype == torch.uint8


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (200, 3), (7, 1400), (31, 5), (400, 300), (1024, 33), (3000, 100),
                                  (257, 4099), (1500, 1400)])
@pytest.mark.parametrize("most", [MOST, 262144])
def test_the_installed_processor_itself(size, most):
    """Its bytes; and the whole of it, in float32: what the model's first step makes of ours is what it would have been
    given. Its second frame is the first."""
    image = picture(*size)
    normalised = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    # Told where the channels are: a picture of three rows it would take for one whose channels come first.
    told = {"return_tensors": "pt", "input_data_format": "channels_last"}
    try:
        expected = processor(most, **normalised).preprocess(image, **told)
    except ValueError as error:
        assert "must be larger than factor" in str(error) and min(size) < 32, error
        pytest.skip("transformers 4.51 refuses sides below 32 pixels; ours resizes as 4.55 does")
    grid, patches = ours(image, most)
    raw = processor(most, do_rescale=False, do_normalize=False).preprocess(image, **told)["pixel_values"]
    assert raw.dtype == torch.uint8 and raw.view(-1, 3, 2, 16, 16)[:, :, 0].equal(patches)
    values = (patches.float() / 255 - 0.5) / 0.5
    theirs = expected["pixel_values"].view(-1, 3, 2, 16, 16)
    assert expected["image_grid_thw"].tolist() == [[1, *grid]]
    for frame in range(2):
        worst = (theirs[:, :, frame] - values).abs().max().item()
        assert worst < 3e-7, f"frame {frame}: {worst}"


def test_the_default_cap_of_the_processor_is_not_ours():
    """Given the model's `size`, the processor silently keeps to 1,003,520 pixels."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    silent = Qwen2VLImageProcessor(size={"shortest_edge": LEAST, "longest_edge": MOST}, patch_size=16, merge_size=2)
    height, width = silent.preprocess(Image.new("RGB", (2048, 2048)), return_tensors="np")["image_grid_thw"][0][1:]
    assert height * width * 256 < 1_003_520
    assert ours(Image.new("RGB", (2048, 2048)))[0] == (128, 128)


@pytest.mark.parametrize(("size", "most", "expected"), [
    ((2048, 2048), MOST, (2048, 2048)), ((4096, 4096), MOST, (4096, 4096)), ((8192, 8192), MOST, (4096, 4096)),
    ((1, 1), MOST, (256, 256)), ((1, 200), MOST, (32, 3648)), ((20000, 100), 65536, (3616, 32)),
])
def test_sizes(size, most, expected):
    assert target_size(*size, 32, LEAST, most) == expected
    assert target_size(*size[::-1], 32, LEAST, most) == expected[::-1], "EXIF rotation must not change the tokens"


def test_extreme_aspects_are_refused():
    for size in ((201, 1), (10, 2001)):
        with pytest.raises(ValueError, match="more than 200 times"):
            target_size(*size, 32, LEAST, MOST)


def test_rows_and_columns_of_a_patch():
    """Merge blocks first: the first four patches are the 2x2 block in the corner."""
    image = np.arange(64 * 96 * 3, dtype=np.int64).reshape(64, 96, 3) % 251
    (h, w), patches = cut(Image.fromarray(image.astype(np.uint8)), 16, 2)
    assert (h, w) == (4, 6)
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    for patch, (row, column) in zip(patches, places, strict=False):
        block = image[16 * row:16 * row + 16, 16 * column:16 * column + 16]
        assert np.array_equal(patch.numpy(), block.transpose(2, 0, 1)), (row, column)


def test_the_largest_picture_is_cut_in_bounded_time_and_memory():
    image = Image.new("RGB", (4096, 4096), (200, 10, 3))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    grid, patches = ours(image)
    seconds = time.monotonic() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"4096x4096: {grid} patches in {seconds:.2f} s, {grown:.0f} MiB more at the peak, "
          f"{patches.nbytes >> 20} kept")
    assert grid == (256, 256) and patches.nbytes == 4096 * 4096 * 3
    assert grown < 400 and seconds < 10
