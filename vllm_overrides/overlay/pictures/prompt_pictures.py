"""The pictures of one prompt as the engine keeps them: checked against the token ids once, then asked at every step."""
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from vllm.overlay.pictures.hashing import first_hash_id, hash_ids
from vllm.overlay.pictures.picture import Picture, PictureSettings
from vllm.overlay.pictures.positions import PictureLayout

HOW = ("give vllm.overlay.pictures.picture.Picture objects, or send pictures to the server (/v1/chat/completions), "
       "which makes them")


class PromptPictures:
    """The pictures of one prompt. Samples of one request share it; nothing in it changes.

    pictures: sorted by offset. layout: the rotary positions of every token.
    """

    def __init__(self, pictures: Sequence[Picture], merge: int) -> None:
        self.pictures = tuple(pictures)
        self.layout = PictureLayout([(picture.offset, picture.grid) for picture in pictures], merge)
        self._spans = [(picture.offset, picture.offset + picture.num_tokens(merge), first_hash_id(picture.digest))
                       for picture in pictures]

    def overlapping(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields (index of the picture, first, end) for each picture that has tokens in [start, end): its tokens
        first .. end - 1, counted within the picture, are there."""
        if start >= self._spans[-1][1]:
            return
        for index, (first, last, _) in enumerate(self._spans):
            low, high = max(first, start), min(last, end)
            if low < high:
                yield index, low - first, high - first

    def num_tokens(self, index: int) -> int:
        """Placeholders of one picture."""
        return self._spans[index][1] - self._spans[index][0]

    def hash_ids(self, token_ids: Sequence[int], start: int, end: int) -> list[int]:
        """See `hashing.hash_ids`."""
        return hash_ids(token_ids, self._spans, start, end)


def read_pictures(inputs: Mapping[str, Any], settings: PictureSettings | None,
                  limit: int | None = None) -> PromptPictures | None:
    """Returns the pictures of a request, None where there are none.

    inputs: stock's LLMInputs, of which prompt_token_ids and multi_modal_data are read. settings: None if the model
    takes no pictures. limit: the most pictures a request may have; None = any number.

    Raises:
        ValueError: multi_modal_data of another kind, more pictures than allowed, or pictures and placeholders that do
            not agree. One line.
    """
    data = inputs.get("multi_modal_data") or {}
    if not isinstance(data, Mapping):
        raise ValueError(f"multi_modal_data is a {type(data).__name__}, not a dict with the key 'image'; {HOW}")
    pictures = data.get("image")
    others = sorted(kind for kind, value in data.items() if kind != "image" and value)
    if settings is None:
        if pictures is not None or others:
            raise ValueError("this model takes no pictures, but the request has multi_modal_data")
        return None
    if others:
        raise ValueError(f"multi_modal_data has {', '.join(map(repr, others))}; this model takes 'image' only")
    pictures = [] if pictures is None else pictures
    if not isinstance(pictures, list | tuple) or not all(isinstance(picture, Picture) for picture in pictures):
        raise ValueError(f"multi_modal_data['image'] is no list of prepared pictures; {HOW}")
    if limit is not None and len(pictures) > limit:
        raise ValueError(f"the request has {len(pictures)} pictures; --limit-mm-per-prompt allows {limit}")
    for number, picture in enumerate(pictures, 1):
        _check(number, picture, inputs["prompt_token_ids"], settings)
    for number, (one, other) in enumerate(pairwise(pictures), 1):
        if other.offset < one.offset + one.num_tokens(settings.merge):
            raise ValueError(f"pictures {number} and {number + 1} overlap in the prompt, or are not sorted by offset")
    expected = sum(picture.num_tokens(settings.merge) for picture in pictures)
    found = inputs["prompt_token_ids"].count(settings.placeholder)
    if found != expected:
        raise ValueError(f"the prompt has {found} picture placeholders (token {settings.placeholder}), its "
                         f"{len(pictures)} pictures need {expected}")
    return PromptPictures(pictures, settings.merge) if pictures else None


def _check(number: int, picture: Picture, token_ids: Sequence[int], settings: PictureSettings) -> None:
    height, width = picture.grid
    if height < 1 or width < 1 or height % settings.merge or width % settings.merge:
        raise ValueError(f"picture {number} has a grid of {height} x {width} patches; both must be multiples of "
                         f"{settings.merge}")
    shape = (height * width, settings.channels, settings.patch, settings.patch)
    if picture.pixels.dtype != torch.uint8 or tuple(picture.pixels.shape) != shape:
        raise ValueError(f"the pixels of picture {number} are {picture.pixels.dtype} {tuple(picture.pixels.shape)}, "
                         f"not torch.uint8 {shape}")
    tokens = picture.num_tokens(settings.merge)
    run = token_ids[picture.offset:picture.offset + tokens] if picture.offset >= 0 else []
    if len(run) < tokens or any(token != settings.placeholder for token in run):
        raise ValueError(f"picture {number} needs {tokens} placeholders (token {settings.placeholder}) from token "
                         f"{picture.offset} of the prompt on, which are not there")
