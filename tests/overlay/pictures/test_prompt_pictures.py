"""Pictures of a request: what is refused and how, what the prefix cache hashes, what a model says about pictures."""
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.pictures import CHANNELS, MERGE, PATCH, PLACEHOLDER, SETTINGS, picture, pictured
from vllm.overlay.pictures.hashing import first_hash_id, hash_ids
from vllm.overlay.pictures.picture import Picture, PictureSettings, digest_of
from vllm.overlay.pictures.prompt_pictures import read_pictures

A, B = picture(4, 6), picture(4, 6, seed=1)


def changed(**fields):
    prompt = pictured(3, A, 2)
    prompt["multi_modal_data"] = {"image": [prompt["multi_modal_data"]["image"][0]._replace(**fields)]}
    return prompt


def with_data(data):
    return {"prompt_token_ids": pictured(3, A, 2)["prompt_token_ids"], "multi_modal_data": data}


BOTH = pictured(1, A, B)["multi_modal_data"]["image"]
REFUSED = (
    (with_data({"image": "cat.png"}), r"no list of prepared pictures; give .*Picture objects, or send .* the server"),
    (with_data({"image": SimpleNamespace(size=(3, 4))}), "no list of prepared pictures"),
    (with_data({"image": [A, "cat.png"]}), "no list of prepared pictures"),
    (with_data([A]), "multi_modal_data is a list, not a dict with the key 'image'"),
    (with_data({"image": [A], "video": [1]}), "multi_modal_data has 'video'; this model takes 'image' only"),
    (with_data({}), r"has 6 picture placeholders \(token 120\), its 0 pictures need 0"),
    (pictured(3, A, 2) | {"prompt_token_ids": [5] * 11}, "picture 1 needs 6 placeholders .* from token 3 .* not there"),
    (pictured(3, A, 2) | {"prompt_token_ids": pictured(3, A, 2)["prompt_token_ids"] + [PLACEHOLDER]},
     "has 7 picture placeholders .* 1 pictures need 6"),
    (changed(offset=2), "picture 1 needs 6 placeholders"),
    (changed(offset=-6), "picture 1 needs 6 placeholders"),
    (changed(offset=50), "picture 1 needs 6 placeholders"),
    (changed(grid=(6, 6)), r"the pixels of picture 1 are torch.uint8 \(24, 3, 4, 4\), not torch.uint8 \(36, 3, 4, 4\)"),
    (changed(grid=(3, 8)), "picture 1 has a grid of 3 x 8 patches; both must be multiples of 2"),
    (changed(grid=(0, 0)), "picture 1 has a grid of 0 x 0 patches"),
    (changed(pixels=A.pixels.float()), "the pixels of picture 1 are torch.float32"),
    (pictured(1, A, B) | {"multi_modal_data": {"image": BOTH[::-1]}}, "pictures 1 and 2 overlap .* or are not sorted"),
    (pictured(1, A, B) | {"multi_modal_data": {"image": [BOTH[0], BOTH[1]._replace(offset=4)]}}, "1 and 2 overlap"),
    (pictured(1, A, 1, A, 1, A), "the request has 3 pictures; --limit-mm-per-prompt allows 2"),
)


@pytest.mark.parametrize(("prompt", "message"), REFUSED)
def test_refused_in_one_line(prompt, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_pictures(prompt, SETTINGS, limit=2)
    assert "\n" not in str(caught.value)


def test_accepted():
    found = read_pictures(pictured(2, A, B, 3), SETTINGS, limit=2)
    assert list(found.overlapping(5, 9)) == [(0, 3, 6), (1, 0, 1)] and not list(found.overlapping(14, 99))
    assert found.layout.delta == 2 * (3 - 6)
    for nothing in (None, {}, {"image": None}, {"image": []}):
        assert read_pictures({"prompt_token_ids": [1, 2], "multi_modal_data": nothing}, SETTINGS) is None
    assert read_pictures({"prompt_token_ids": [1]}, SETTINGS) is None


def test_a_model_without_a_tower():
    """Its vocabulary has no placeholder, so no token is refused."""
    assert read_pictures({"prompt_token_ids": [PLACEHOLDER]}, None) is None
    with pytest.raises(ValueError, match="this model takes no pictures"):
        read_pictures(pictured(1, A), None)


def ids(*parts):
    prompt = pictured(*parts)
    found = read_pictures(prompt, SETTINGS)
    return found.hash_ids(prompt["prompt_token_ids"], 0, len(prompt["prompt_token_ids"]))


def test_hash_ids():
    tokens = pictured(3, A, 2)["prompt_token_ids"]
    one = ids(3, A, 2)
    assert one[:3] == tokens[:3] and one[9:] == tokens[9:] and len(one) == 11
    run = one[3:9]
    assert run == list(range(first_hash_id(A.digest), first_hash_id(A.digest) + 6)) and min(run) >= 1 << 32
    assert ids(3, A, 2) == one, "equal pictures at equal places"
    assert not set(run) & set(ids(3, B, 2)), "different pixels"
    reshaped = Picture(0, (6, 4), A.pixels, digest_of((6, 4), A.pixels))
    assert not set(run) & set(ids(3, reshaped, 2)), "the same pixels as another shape"
    assert ids(4, A)[4:10] == run, "the place in the prompt does not matter, the tokens before it are hashed too"
    found = read_pictures(pictured(3, A, 2), SETTINGS)
    for start in range(12):
        for end in range(start, 12):
            assert found.hash_ids(tokens, start, end) == one[start:end]
    assert found.hash_ids(tokens + [PLACEHOLDER], 11, 12) == [PLACEHOLDER], "a generated one is only a token"


def test_a_block_looks_at_its_own_pictures_only():
    class Watched(list):
        looks = 0

        def __getitem__(self, place):
            Watched.looks += 1
            return super().__getitem__(place)

        def __iter__(self):
            return (self[place] for place in range(len(self)))

    spans = Watched((80 * i + 5, 80 * i + 69, first_hash_id(bytes([i % 256, i // 256]) * 16)) for i in range(4000))
    tokens = list(range(80 * 4000))
    whole = hash_ids(tokens, list(spans), 0, len(tokens))
    assert [whole[80 * i + 5:80 * i + 69] for i in (0, 1, 3999)] == [list(range(spans[i][2], spans[i][2] + 64))
                                                                      for i in (0, 1, 3999)]
    Watched.looks = 0
    assert [one for at in range(0, len(tokens), 16) for one in hash_ids(tokens, spans, at, at + 16)] == whole
    assert Watched.looks < len(tokens), f"{Watched.looks} looks at spans for {len(tokens) // 16} blocks"


def test_every_hash_id_fits_into_a_word_and_hashes_to_itself():
    for first in (b"\0" * 32, b"\xff" * 32, A.digest):
        found = first_hash_id(first)
        assert found >= 1 << 32 and hash(found + (1 << 32)) == found + (1 << 32) < 1 << 61


def config(**fields):
    vision = SimpleNamespace(spatial_merge_size=MERGE, patch_size=PATCH, in_channels=CHANNELS)
    return SimpleNamespace(**{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": vision,
                              "image_token_id": PLACEHOLDER, **fields})


def test_which_models_take_pictures():
    assert PictureSettings.of(config()) == SETTINGS
    assert PictureSettings.of(config(architectures=["Qwen3_5ForConditionalGeneration"])) == SETTINGS
    for other in ({"vision_config": None}, {"architectures": ["Qwen3_5MoeForCausalLM"]}, {"architectures": None},
                  {"architectures": ["Qwen2VLForConditionalGeneration"]}):
        assert PictureSettings.of(config(**other)) is None
    with pytest.raises(ValueError, match="lacks image_token_id, vision_config.in_channels$"):
        PictureSettings.of(config(image_token_id=None,
                                  vision_config=SimpleNamespace(spatial_merge_size=2, patch_size=4)))


def test_digest():
    transposed = A.pixels.transpose(0, 1).contiguous().transpose(0, 1)
    assert not transposed.is_contiguous() and digest_of(A.grid, transposed) == A.digest
    other = A.pixels.clone()
    other[0, 0, 0, 0] ^= 1
    assert digest_of(A.grid, other) != A.digest and len(A.digest) == 32
    assert digest_of((2, 2), torch.zeros(4, 3, 4, 4, dtype=torch.uint8)) != digest_of(
        (2, 2), torch.zeros(4, 3, 2, 8, dtype=torch.uint8))
