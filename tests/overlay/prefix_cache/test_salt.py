"""Salts as a request brings them to the engine, and what they make of a prompt's content."""
import pytest

from vllm.overlay.prefix_cache.salt import salted_id, take_salt

TOKENS = {"prompt_token_ids": [1, 2]}


@pytest.mark.parametrize("data, rest, salt", [
    (None, None, None), ({"image": ["a"]}, {"image": ["a"]}, None), ({"cache_salt": "x"}, None, "x"),
    ({"cache_salt": "x", "image": ["a"]}, {"image": ["a"]}, "x")])
def test_it_is_taken_out(data, rest, salt):
    given = {**TOKENS, "multi_modal_data": data}
    assert take_salt(given) == {**TOKENS, "multi_modal_data": rest, "cache_salt": salt}
    assert given["multi_modal_data"] == data, "the request's own inputs were changed"


@pytest.mark.parametrize("wrong", ["", 7, None, b"x", ["x"]])
def test_what_is_none(wrong):
    with pytest.raises(ValueError, match="cache_salt") as caught:
        take_salt({**TOKENS, "multi_modal_data": {"cache_salt": wrong}})
    assert "\n" not in str(caught.value)


def test_content_of_another_salt_or_token_is_another():
    salts = ["a", "b", "ab", "a" * 1000, "北京", "\ud800"]
    # The last stands for a place of a picture.
    tokens = [0, 1, 248_319, (1 << 61) - 1]
    found = {(salt, token): salted_id(salt, token) for salt in salts for token in tokens}
    assert len(set(found.values())) == len(found), found
    assert all(-(1 << 63) <= one < 0 for one in found.values()), found
    assert found == {key: salted_id(*key) for key in found}
