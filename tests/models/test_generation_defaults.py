"""Sampling defaults come from the model's own generation_config.json and from nowhere else."""
import json
from types import SimpleNamespace

import pytest

from vllm.overlay.model.generation_defaults import get_default_sampling_params


def written(folder, content):
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_published_file(tmp_path):
    folder = written(tmp_path, {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95, "pad_token_id": 5,
                                "eos_token_id": [1, 2], "min_p": None})
    expected = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
    assert get_default_sampling_params(folder) == expected
    config = SimpleNamespace(hf_config=object(), model=str(folder), revision=None)
    assert get_default_sampling_params(config) == expected
    assert type(get_default_sampling_params(folder)["top_k"]) is int


def test_whole_numbers_of_either_kind(tmp_path):
    found = get_default_sampling_params(written(tmp_path, {"temperature": 1, "top_k": 20.0, "repetition_penalty": 1.5,
                                                           "min_p": 0}))
    assert found == {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.5, "min_p": 0.0}
    assert type(found["temperature"]) is float and type(found["top_k"]) is int


def test_no_file_no_defaults(tmp_path):
    assert get_default_sampling_params(tmp_path) == {}
    assert get_default_sampling_params("no/such-model-anywhere") == {}


@pytest.mark.parametrize("content, message", [
    ({"top_k": 2.5}, "top_k in .* is 2.5, not an integer"),
    ({"temperature": "hot"}, "temperature in .* is 'hot', not a number"),
    ({"temperature": True}, "temperature in .* is True, not a number"),
    ("[1]", "is not a JSON object"),
    ("{", "is not JSON"),
])
def test_a_bad_file_is_one_clear_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        get_default_sampling_params(written(tmp_path, content))
    assert "\n" not in str(caught.value)
