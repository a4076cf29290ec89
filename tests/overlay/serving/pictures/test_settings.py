"""What the model's files and the command line say about pictures."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.helpers.fake_engine import settings, tokenizer
from tests.helpers.picture_files import shown
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.overlay.serving.pictures.settings import PictureLimits, picture_input
from vllm.overlay.serving.service import Service
from vllm.utils import FlexibleArgumentParser

FILE = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2}


def model(folder, file=FILE, architecture="Qwen3_5MoeForConditionalGeneration", **fields):
    if file is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(file))
    vision = SimpleNamespace(patch_size=16, spatial_merge_size=2, in_channels=3, temporal_patch_size=2)
    config = SimpleNamespace(architectures=[architecture], image_token_id=248056, video_token_id=248057,
                             vision_start_token_id=248053, vision_end_token_id=248054, vision_config=vision)
    return SimpleNamespace(**{"model": str(folder), "hf_config": config, "max_model_len": 262144, **fields})


def limits(text=""):
    return PictureLimits.of(make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "m", *text.split()]))


def test_the_published_model(tmp_path):
    made = picture_input(model(tmp_path), limits())
    assert (made.placeholder, made.patch, made.merge, made.min_pixels, made.max_pixels, made.resample,
            made.max_tokens) == (248056, 16, 2, 65536, 16777216, 3, 262144)
    assert set(made.marks) == {248056, 248057, 248053, 248054}
    assert made.limits == PictureLimits() and made.limits.per_request is None, "any number that fits"


def test_without_the_file_and_with_other_values(tmp_path):
    made = picture_input(model(tmp_path, None))
    assert (made.min_pixels, made.max_pixels) == (65536, 16777216)
    made = picture_input(model(tmp_path, {"min_pixels": 4096, "max_pixels": 8192, "resample": 2}))
    assert (made.min_pixels, made.max_pixels, made.resample) == (4096, 8192, 2)
    made = picture_input(model(tmp_path, mm_processor_kwargs={"max_pixels": 1 << 20}))
    assert (made.min_pixels, made.max_pixels) == (65536, 1 << 20)


def test_flags(tmp_path):
    given = limits("--limit-mm-per-prompt image=4 --max-picture-pixels 1048576 --max-picture-tokens 5000 "
                   "--max-picture-source-pixels 20000000 --max-picture-bytes 1000 --allow-remote-images")
    assert given == PictureLimits(4, 5000, 1048576, 20000000, 1000, True)
    made = picture_input(model(tmp_path), given)
    assert (made.max_pixels, made.max_tokens, made.limits.per_request) == (1048576, 5000, 4)
    assert picture_input(model(tmp_path), limits("--max-picture-tokens 999999999")).max_tokens == 262144


@pytest.mark.parametrize(("text", "words"), [
    ("--max-picture-tokens 0", "image=0"), ("--max-picture-bytes -1", "at least 1"),
    ("--max-picture-source-pixels 999999999", "Pillow"),
    ("--max-picture-pixels 100", "--max-picture-pixels is 100, but this model's pictures have at least 65536"),
])
def test_limits_that_nothing_can_keep(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        picture_input(model(tmp_path), limits(text))


def test_files_that_disagree(tmp_path):
    with pytest.raises(ValueError, match="patch_size is 14 in preprocessor_config.json and 16 in the vision tower"):
        picture_input(model(tmp_path, {**FILE, "patch_size": 14}))
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(OSError, match="JSON"):
        picture_input(model(tmp_path, None))


def test_models_without_pictures(tmp_path):
    assert picture_input(model(tmp_path, architecture="Qwen3_5MoeForCausalLM")) is None
    assert picture_input(SimpleNamespace(model="m", max_model_len=5)) is None


def test_a_tokenizer_without_the_tokens_serves_text():
    service = Service(None, tokenizer(), settings(pictures=shown(placeholder=10**6, marks=(10**6, 5))))
    assert service.settings.pictures is None
    service.close()
