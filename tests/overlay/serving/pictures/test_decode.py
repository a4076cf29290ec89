"""Files of every form that is taken, and files that are none."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.helpers.picture_files import file, pattern, picture
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.pictures.decode import decode, picture_size

MOST = 1 << 22
PATH = "messages[0].content[0].image_url"


def read(data: bytes) -> np.ndarray:
    image = decode(data, PATH, picture_size(data, PATH, MOST))
    assert image.mode == "RGB"
    return np.asarray(image)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG of any header; without further chunks it has no pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


PIXELS = pattern(40, 24)
IMAGE = Image.fromarray(PIXELS)
GREY = Image.fromarray(pattern(40, 24, 1))


@pytest.mark.parametrize(("data", "expected"), [
    (file(IMAGE), PIXELS), (file(IMAGE, "WEBP", lossless=True), PIXELS),
    (file(IMAGE, "JPEG", quality=90), np.asarray(Image.open(io.BytesIO(file(IMAGE, "JPEG", quality=90))))),
    (file(IMAGE, "JPEG", progressive=True),
     np.asarray(Image.open(io.BytesIO(file(IMAGE, "JPEG", progressive=True))))),
    (file(GREY), np.asarray(GREY.convert("RGB"))),
    (file(GREY.convert("1")), np.asarray(GREY.convert("1").convert("RGB"))),
    (file(IMAGE.quantize(16)), np.asarray(IMAGE.quantize(16).convert("RGB"))),
    (file(IMAGE.quantize(16), "GIF"), np.asarray(IMAGE.quantize(16).convert("RGB"))),
    (file(GREY, "JPEG"), np.asarray(Image.open(io.BytesIO(file(GREY, "JPEG"))).convert("RGB"))),
    (file(IMAGE.convert("CMYK"), "JPEG"),
     np.asarray(Image.open(io.BytesIO(file(IMAGE.convert("CMYK"), "JPEG"))).convert("RGB"))),
    (file(Image.new("RGB", (1, 1), (1, 2, 3))), np.array([[[1, 2, 3]]], np.uint8)),
], ids=["png", "webp", "jpeg", "progressive", "grey", "black and white", "palette", "gif", "grey jpeg", "cmyk", "1x1"])
def test_forms(data, expected):
    assert np.array_equal(read(data), expected)


def test_cmyk_is_not_inverted():
    red = read(file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95))
    assert np.abs(red.astype(int) - (255, 0, 0)).max() < 8, red[0, 0]


def test_sixteen_bits_keep_their_high_byte():
    wide = pattern(40, 24, 1, depth=16)
    assert np.array_equal(read(file(Image.fromarray(wide)))[..., 1], wide >> 8)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pattern(4, 3).astype(np.uint16) * 257)
    data = png(4, 3, chunk(b"IDAT", zlib.compress(rows)), depth=16)
    assert np.array_equal(read(data), pattern(4, 3))
    clear = png(2, 1, chunk(b"tRNS", struct.pack(">H", 0x1234)),
                chunk(b"IDAT", zlib.compress(b"\0\x12\x34\x12\x33")), depth=16, colour=0)
    assert read(clear).tolist() == [[[255] * 3, [0x12] * 3]]


def test_transparency_is_composited_over_white():
    rgba = Image.fromarray(np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 128]]], np.uint8))
    for data in (file(rgba), file(rgba, "WEBP", lossless=True, exact=True)):
        assert read(data).tolist() == [[[255, 0, 0], [255, 255, 255], [127, 127, 127]]]
    grey = Image.new("LA", (2, 1), (0, 0))
    grey.putpixel((1, 0), (0, 255))
    assert read(file(grey)).tolist() == [[[255] * 3, [0] * 3]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        assert read(file(palette, kind, transparency=0)).tolist() == [[[255] * 3, [9] * 3]], kind
    assert read(file(Image.new("RGB", (1, 1), (7, 7, 7)), transparency=(7, 7, 7))).tolist() == [[[255] * 3]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation(kind, orientation):
    from PIL import ImageOps
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file(IMAGE, kind, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.array_equal(read(data), upright)
    assert read(data).shape[:2] == ((24, 40) if orientation < 5 else (40, 24))


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage",
                                  b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0MM\0*" + b"\xff" * 40])
def test_a_picture_with_damaged_exif_lies_as_it_is(exif):
    assert np.array_equal(read(file(IMAGE, "PNG", exif=exif)), PIXELS)


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (32, 32), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = file(frames[0], kind, save_all=True, append_images=frames[1:], duration=10, **options)
        assert read(data).tolist() == np.asarray(frames[0]).tolist(), kind


def refused(data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read(data)
    assert caught.value.param == PATH and PATH in caught.value.message and caught.value.status == 400
    assert len(caught.value.message) < 300 and "\n" not in caught.value.message


def webp(kind: bytes, body: bytes) -> bytes:
    payload = b"WEBP" + kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(payload)) + payload


@pytest.mark.parametrize(("data", "words"), [
    (png(60000, 60000), "more than 178956970 pixels; at most 4194304"),
    (png(3000, 2000), "3000x2000 = 6000000 pixels; at most 4194304"),
    (png(2**31 - 1, 2**31 - 1), "at most 4194304|damaged"),
    (webp(b"VP8X", bytes(4) + b"\xff\xff\xff" * 2), "16777216x16777216"),
    (webp(b"VP8L", b"\x2f" + struct.pack("<I", 0x0FFFFFFF) + bytes(10)), "16384x16384"),
    (webp(b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + b"\xff\x3f\xff\x3f" + bytes(10)), "16383x16383"),
    (b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x2c" + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
     + b"\x02\x01\0\0;", "more than 178956970 pixels; at most 4194304"),
    (png(3000, 10), "3000x10 pixels; one side may be at most 200 times"),
    (png(0, 5), "none|damaged|header"), (png(5, 0), "none|damaged|header"), (png(5, 5), "damaged"),
    (b"", "formats"), (b"x", "formats"), (b"GIF89a", "formats"), (b"\x89PNG\r\n\x1a\n", "formats|damaged"),
    (b"%PDF-1.4\n", "formats"), (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "formats"),
    (b"BM" + bytes(60), "formats"),
    (b"II*\0" + bytes(60), "formats"), (b"\0" * 10_000, "formats"), (b"RIFF\0\0\0\0WEBP", "formats|damaged"),
    (file(IMAGE)[:200], "damaged"), (file(IMAGE, "JPEG")[:300], "damaged|formats"),
    (file(IMAGE, "WEBP")[:60], "damaged|formats"), (file(IMAGE.quantize(16), "GIF")[:60], "damaged|formats"),
], ids=lambda value: value[:24] if isinstance(value, str) else f"{len(value)} bytes")
def test_refused(data, words):
    refused(data, words)


def test_hostile_chunks():
    """Text that unpacks to a gigabyte, chunks longer than the file, and a picture in a thousand scans."""
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + bytes(3)))
    bomb = zlib.compress(bytes(1 << 28), 9)
    for kind in (b"zTXt", b"iTXt", b"iCCP"):
        body = {b"zTXt": b"k\0\0" + bomb, b"iTXt": b"k\0\1\0\0\0" + bomb, b"iCCP": b"k\0\0" + bomb}[kind]
        data = png(1, 1, chunk(kind, body), pixels)
        try:
            assert read(data).shape == (1, 1, 3), kind
        except RequestError as error:
            assert error.param == PATH, kind
    refused(png(1, 1) [:33] + b"\x7f\xff\xff\xffIDAT", "damaged")
    jpeg = file(picture(64, 64), "JPEG", progressive=True)
    scan = jpeg.rindex(b"\xff\xda")
    refused(jpeg[:scan] + jpeg[scan:-2] * 200 + b"\xff\xd9", "more than 100 scans")
