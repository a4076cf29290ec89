"""Boundaries as a request brings them to the engine."""
import pytest

from vllm.overlay.prefix_cache.boundaries import take_boundaries


def inputs(*boundaries, **others):
    return {"prompt_token_ids": [1] * 10, "multi_modal_data": {"boundaries": boundaries, **others}}


@pytest.mark.parametrize("request_inputs, data", [
    ({"prompt_token_ids": [1]}, None), ({"prompt_token_ids": [1], "multi_modal_data": None}, None),
    ({"prompt_token_ids": [1], "multi_modal_data": {"image": ["a"]}}, {"image": ["a"]}),
])
def test_a_request_without(request_inputs, data):
    taken = take_boundaries(request_inputs)
    assert taken["boundaries"] == () and taken.get("multi_modal_data") == data


def test_they_are_taken_out():
    assert take_boundaries(inputs(1, 4, 9)) == {"prompt_token_ids": [1] * 10, "multi_modal_data": None,
                                                "boundaries": (1, 4, 9)}
    given = inputs(3, image=["a"])
    assert take_boundaries(given)["multi_modal_data"] == {"image": ["a"]}
    assert "boundaries" in given["multi_modal_data"], "the request's own inputs were changed"
    assert take_boundaries(inputs())["boundaries"] == ()


@pytest.mark.parametrize("wrong", [(0, 4), (4, 4), (5, 4), (4, 10), (11,), (-1,), (1.5,), ("4",), (True,), (None,)])
def test_what_is_none(wrong):
    with pytest.raises(ValueError, match="boundaries") as caught:
        take_boundaries(inputs(*wrong))
    assert "\n" not in str(caught.value)
    for no_list in (7, "12", {1: 2}):
        with pytest.raises(ValueError, match="no list of integers"):
            take_boundaries({"prompt_token_ids": [1] * 10, "multi_modal_data": {"boundaries": no_list}})
