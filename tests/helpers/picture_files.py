"""Picture files as clients send them, and what a server says about pictures in tests."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.fake_engine import ids, tokenizer
from vllm.overlay.serving.pictures.placeholders import Placeholders
from vllm.overlay.serving.pictures.settings import PictureInput, PictureLimits

START, PAD, END, VIDEO = (ids(f"<|{name}|>")[0] for name in ("vision_start", "image_pad", "vision_end", "video_pad"))


def shown(**changes: Any) -> PictureInput:
    """The published model's settings, with the small tokenizer's ids; changes: of the fields, or of its limits."""
    limits = {name: changes.pop(name) for name in tuple(changes) if name in PictureLimits.__dataclass_fields__
              and name not in PictureInput.__dataclass_fields__}
    return PictureInput(**{"placeholder": PAD, "marks": (PAD, VIDEO, START, END), "patch": 16, "merge": 2,
                           "min_pixels": 65536, "max_pixels": 16777216, "resample": 3, "max_tokens": 4096,
                           "limits": PictureLimits(**limits), **changes})


def placeholders() -> Placeholders:
    return Placeholders(tokenizer(), PAD, (PAD, VIDEO, START, END))


def pattern(width: int, height: int, channels: int = 3, depth: int = 8) -> np.ndarray:
    """[height, width, channels] (or without the last, for one channel): pixels that depend on nothing but where they
    are."""
    y, x, c = np.ogrid[:height, :width, :channels]
    values = (x * 7919 + y * 104729 + c * 1299709 + x * y * 31) % 2**depth
    values = values.astype(np.uint16 if depth > 8 else np.uint8)
    return np.squeeze(values, 2) if channels == 1 else values


def picture(width: int = 64, height: int = 64) -> Image.Image:
    return Image.fromarray(pattern(width, height))


def large_picture(side: int) -> Image.Image:
    """A square made in no time."""
    return Image.linear_gradient("L").resize((side, side)).convert("RGB")


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The picture as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def url(data: bytes | Image.Image, mime: str = "image/png") -> str:
    """A data URL."""
    data = data if isinstance(data, bytes) else file(data)
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def part(data: bytes | str | Image.Image) -> dict[str, Any]:
    """A content part of OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else url(data)}}
