"""Bytes of PNG, JPEG, WebP or GIF -> an upright RGB picture. The header is checked before anything is
decoded.

Transparency is composited over white, 16-bit grey keeps its high byte, an animation gives its first frame, and EXIF
orientation is applied.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.pictures.process import MOST_ASPECT

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Of a JPEG; progressive ones have ten or so. Each pass over a large picture takes as long as decoding all of it.
_MOST_SCANS = 100
_ORIENTATION = 0x0112
# What undoes each orientation. The names that every Pillow has; newer ones declare others.
_names: Any = Image
_UPRIGHT = {2: _names.FLIP_LEFT_RIGHT, 3: _names.ROTATE_180, 4: _names.FLIP_TOP_BOTTOM, 5: _names.TRANSPOSE,
            6: _names.ROTATE_270, 7: _names.TRANSVERSE, 8: _names.ROTATE_90}


def picture_size(data: bytes, path: str, max_pixels: int) -> tuple[int, int]:
    """(width, height) by the header alone. Raises RequestError (naming path) for what is no picture, or too large."""
    # Pillow's own WebP reader makes its canvas before it tells the size.
    _check_size(_webp_size(data), path, max_pixels)
    try:
        size = _opened(data, path).size
    except Image.DecompressionBombError:
        raise RequestError(f"{path} is a picture of more than {2 * (Image.MAX_IMAGE_PIXELS or 0)} pixels; at most "
                           f"{max_pixels} are decoded (--max-picture-source-pixels).", param=path,
                           code="invalid_image") from None
    _check_size(size, path, max_pixels)
    return size


def decode(data: bytes, path: str, size: tuple[int, int]) -> Image.Image:
    """The picture, RGB, upright. size: as picture_size gave it. Raises RequestError (naming path)."""
    image = _opened(data, path)
    try:
        image.load()
        if image.size != size:
            raise ValueError("its size is not what its header says")
        return _upright(_rgb(image), _orientation(image))
    except Exception as error:
        raise _undecodable(path, error) from error


def _opened(data: bytes, path: str) -> Image.Image:
    if data[:2] == b"\xff\xd8" and data.count(b"\xff\xda") > _MOST_SCANS:
        raise RequestError(f"{path} is a JPEG of more than {_MOST_SCANS} scans.", param=path, code="invalid_image")
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise RequestError(f"{path} is not a picture in one of the formats {', '.join(FORMATS)}, or its header is "
                           "damaged.", param=path, code="invalid_image") from None
    except Image.DecompressionBombError:
        raise
    except Exception as error:
        raise _undecodable(path, error) from error


def _undecodable(path: str, error: Exception) -> RequestError:
    # Pillow's plugins raise whatever a damaged file drives them to, from struct.error to MemoryError.
    why = " ".join(str(error).split()) or type(error).__name__
    return RequestError(f"{path} is a damaged picture, which cannot be decoded: {why:.120}", param=path,
                        code="invalid_image")


def _check_size(size: tuple[int, int] | None, path: str, max_pixels: int) -> None:
    if size is None:
        return
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"{path} is a picture of {width}x{height} pixels, which has none.", param=path,
                           code="invalid_image")
    if width * height > max_pixels:
        raise RequestError(f"{path} is a picture of {width}x{height} = {width * height} pixels; at most {max_pixels} "
                           "are decoded (--max-picture-source-pixels).", param=path, code="invalid_image")
    if max(size) > MOST_ASPECT * min(size):
        raise RequestError(f"{path} is a picture of {width}x{height} pixels; one side may be at most {MOST_ASPECT} "
                           "times the other. Please crop it.", param=path, code="invalid_image")


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Of the first chunk; None for other formats. Source: the WebP container specification, RFC 9649."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return (int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF)
    return None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(coloured, mask=coloured.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Of 16-bit grey, which Pillow's own conversion cuts off at 255."""
    wide = np.asarray(image)
    grey = Image.fromarray((wide >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(Image.fromarray(np.where(wide == clear, 0, 255).astype(np.uint8)))
    return grey


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:
        # Damaged EXIF says nothing about a picture that has been decoded; browsers show it as it lies.
        return None


def _upright(image: Image.Image, orientation: Any) -> Image.Image:
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)
