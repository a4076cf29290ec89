"""Where the picture of a content part is: the forms in which clients send one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.fields import text

# OpenAI's chat and responses APIs, and what Qwen's own tools and other vendors' clients send.
PICTURE_PARTS = ("image_url", "input_image", "image")


@dataclass(frozen=True)
class PictureSource:
    """One picture of a request. path: of its field, for messages. url: a data URL or an address; never shown."""

    path: str
    url: str = field(repr=False)


def picture_source(part: dict[str, Any], path: str) -> PictureSource:
    """The picture of a part of a kind in PICTURE_PARTS. Raises RequestError that names the field at fault.

    Its URL is ``image_url`` or ``image``, as text or as ``{"url", "detail"}``, or ``url``; or its data is Anthropic's
    ``{"source": {"type": "base64", "media_type", "data"}}``. ``detail`` has no meaning for this model.
    """
    if part.get("file_id"):
        raise not_supported(f"{path}.file_id", "this server keeps no files; send the picture as a data URL.")
    for name in ("image_url", "image", "url"):
        value = part.get(name)
        if value is not None:
            return _from_url(value, f"{path}.{name}")
    if part.get("source") is not None:
        return _from_source(part["source"], f"{path}.source")
    raise missing(f"{path}.image_url")


def _from_url(value: Any, path: str) -> PictureSource:
    if isinstance(value, dict):
        if value.get("detail") is not None:
            text(value["detail"], f"{path}.detail")
        if value.get("url") is None:
            raise missing(f"{path}.url")
        value = value["url"]
    if not isinstance(value, str):
        raise wrong_type(path, "a string or an object with a url", value)
    if not value.strip():
        raise RequestError(f"{path} is empty.", param=path)
    return PictureSource(path, value)


def _from_source(value: Any, path: str) -> PictureSource:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    if value.get("type") == "url":
        return _from_url(value.get("url"), f"{path}.url")
    if value.get("data") is None:
        raise missing(f"{path}.data")
    return PictureSource(path, f"data:;base64,{text(value['data'], f'{path}.data')}")
