"""What the model and the command line say about pictures."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.overlay.pictures.picture import PictureSettings

# In embeddings of one picture, where a model's folder has no preprocessor_config.json: what published ones say.
_LEAST_TOKENS, _MOST_TOKENS = 64, 16_384
_FILE = "preprocessor_config.json"
_MIB = 1 << 20
# Pillow itself refuses what is twice its own limit.
_PILLOW_LIMIT = 178_956_970


@dataclass(frozen=True)
class PictureLimits:
    """Of the command line; None = what the model says, or what fits.

    per_request: pictures; max_tokens: embeddings of all of them together; max_pixels: of one picture after it has been
    resized; max_source_pixels and max_bytes: of one picture as it was sent; allow_remote: whether addresses are
    fetched.
    """

    per_request: int | None = None
    max_tokens: int | None = None
    max_pixels: int | None = None
    max_source_pixels: int = 64 * _MIB
    max_bytes: int = 64 * _MIB
    allow_remote: bool = False

    @classmethod
    def of(cls, args: Namespace) -> PictureLimits:
        """Of parsed arguments. Raises ValueError for a number that no picture could keep."""
        limits = cls((args.limit_mm_per_prompt or {}).get("image"), args.max_picture_tokens, args.max_picture_pixels,
                     args.max_picture_source_pixels, args.max_picture_bytes, args.allow_remote_images)
        for option, value in (("--max-picture-tokens", limits.max_tokens), ("--max-picture-pixels", limits.max_pixels),
                              ("--max-picture-source-pixels", limits.max_source_pixels),
                              ("--max-picture-bytes", limits.max_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{option} is {value}; it must be at least 1. To take no pictures: "
                                 "--limit-mm-per-prompt image=0")
        if limits.max_source_pixels > _PILLOW_LIMIT:
            raise ValueError(f"--max-picture-source-pixels is {limits.max_source_pixels}; Pillow decodes at most "
                             f"{_PILLOW_LIMIT}")
        return limits


@dataclass(frozen=True)
class PictureInput:
    """All that making pictures for one model needs.

    placeholder: the token id of one embedding; marks: ids of this and the other tokens that enclose pictures and videos
    in a prompt. patch, merge: sides in pixels and in patches, as in PictureSettings. min_pixels, max_pixels: between
    which a picture is resized. resample: Pillow's number of the filter. max_tokens: embeddings of one request.
    """

    placeholder: int
    marks: tuple[int, ...]
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    resample: int
    max_tokens: int
    limits: PictureLimits


def picture_input(model_config: Any, limits: PictureLimits | None = None) -> PictureInput | None:
    """Of vLLM's ModelConfig; None for a model that takes no pictures.

    Raises:
        ValueError: preprocessor_config.json disagrees with the vision tower, or --max-picture-pixels is below the
            model's smallest picture.
    """
    model = PictureSettings.of(getattr(model_config, "hf_config", None))
    if model is None:
        return None
    limits = limits or PictureLimits()
    config = model_config.hf_config
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = tuple(token for token in (getattr(config, name, None) for name in names) if token is not None)
    values = _preprocessor(model_config)
    for name, tower in (("patch_size", model.patch), ("merge_size", model.merge)):
        if values.get(name, tower) != tower:
            raise ValueError(f"{name} is {values[name]} in {_FILE} and {tower} in the vision tower")
    square = (model.patch * model.merge)**2
    size = values.get("size") or {}
    least = values.get("min_pixels") or size.get("shortest_edge") or _LEAST_TOKENS * square
    most = limits.max_pixels or values.get("max_pixels") or size.get("longest_edge") or _MOST_TOKENS * square
    if most < max(least, square):
        raise ValueError(f"--max-picture-pixels is {most}, but this model's pictures have at least "
                         f"{max(least, square)}")
    return PictureInput(model.placeholder, marks, model.patch, model.merge, least, most, values.get("resample") or 3,
                        min(limits.max_tokens or model_config.max_model_len, model_config.max_model_len), limits)


def _preprocessor(model_config: Any) -> Mapping[str, Any]:
    """preprocessor_config.json of the model, with what --mm-processor-kwargs replaces; empty where there is none."""
    from transformers import PretrainedConfig

    model = model_config.model
    values: Mapping[str, Any] = {}
    if not os.path.isdir(model) or os.path.exists(os.path.join(model, _FILE)):
        # Finds it in a folder or in the hub's cache, as the configuration itself was found.
        values, _ = PretrainedConfig.get_config_dict(model, _configuration_file=_FILE,
                                                     revision=getattr(model_config, "revision", None))
    return {**values, **(getattr(model_config, "mm_processor_kwargs", None) or {})}
