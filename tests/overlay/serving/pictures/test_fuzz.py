"""Two thousand damaged pictures: each is a picture or a refusal that names its part, and soon."""

from __future__ import annotations

import collections
import random
import struct
import time
import zlib

from PIL import Image

from tests.helpers.fake_engine import FakeEngine, client, post
from tests.helpers.picture_files import file, part, pattern, picture, shown
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.pictures.reader import _make, _measure

COUNT = 2000
PATH = "messages[0].content[0].image_url"
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def files() -> list[bytes]:
    small = picture(48, 40)
    clear = small.convert("RGBA")
    clear.putalpha(100)
    exif = Image.Exif()
    exif[0x0112] = 6
    return [file(small), file(clear), file(small.quantize(16)), file(small.convert("1")),
            file(Image.fromarray(pattern(48, 40, 1, depth=16))),
            file(small, exif=exif), file(small, "PNG", save_all=True, append_images=[clear] * 3),
            file(small, "JPEG"), file(small, "JPEG", progressive=True, exif=exif), file(small.convert("CMYK"), "JPEG"),
            file(small.convert("L"), "JPEG"),
            file(small, "WEBP"), file(clear, "WEBP", lossless=True, exif=exif),
            file(small, "WEBP", save_all=True, append_images=[clear] * 3, duration=9),
            file(small.quantize(16), "GIF"), file(small.quantize(8), "GIF", save_all=True, append_images=[small] * 3)]


def damaged(random: random.Random, good: list[bytes]) -> bytes:
    """One file of them after one of six kinds of damage."""
    data = bytearray(random.choice(good))
    kind = random.randrange(6)
    if kind == 0:
        for _ in range(random.randint(1, 20)):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del data[random.randrange(len(data)):]
    elif kind == 2:
        for _ in range(random.randint(1, 8)):
            byte = random.choice((0, 1, 0x7f, 0x80, 0xff, random.randrange(256)))
            data[random.randrange(4, min(64, len(data)))] = byte
    elif kind == 3:
        start = random.randrange(len(data))
        data[start:start + random.randint(1, 40)] = random.randbytes(random.randint(0, 40))
    elif kind == 4:
        other = random.choice(good)
        data = data[:random.randrange(len(data))] + other[random.randrange(len(other)):]
    else:
        at = random.randrange(len(data))
        data[at:at] = data[at:at + random.randint(1, 200)] * random.randint(1, 50)
    # Otherwise a wrong sum would be all that is ever noticed.
    return mended(bytes(data)) if random.random() < 0.7 else bytes(data)


def mended(data: bytes) -> bytes:
    """A PNG with the check sums that its chunks should have; anything else as it is."""
    if not data.startswith(SIGNATURE):
        return data
    made, at = [SIGNATURE], 8
    while at + 8 <= len(data):
        length = struct.unpack(">I", data[at:at + 4])[0]
        body = data[at + 4:at + 8 + length]
        made.append(data[at:at + 4] + body + struct.pack(">I", zlib.crc32(body)))
        at += 12 + length
    return b"".join(made)


def outcome(data: bytes, settings) -> str:
    try:
        measured = _measure(PATH, data, settings)
        made = _make(measured, 3, settings)
    except RequestError as error:
        assert error.status == 400 and error.param == PATH and "\n" not in error.message, error.message
        assert error.message.startswith(PATH) and len(error.message) < 400, error.message
        return "refused"
    assert made.pixels.shape == (made.grid[0] * made.grid[1], 3, 16, 16) and made.offset == 3
    assert made.num_tokens(2) == measured.tokens
    return "a picture"


def test_damaged_pictures():
    chance, good, settings = random.Random(20261201), files(), shown(max_source_pixels=1 << 22, max_pixels=1 << 18)
    assert {outcome(data, settings) for data in good} == {"a picture"}
    found: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    for number in range(COUNT):
        data = damaged(chance, good)
        start = time.monotonic()
        try:
            found[outcome(data, settings)] += 1
        except Exception as error:
            raise AssertionError(f"picture {number}: {data[:200]!r}... of {len(data)} bytes") from error
        slowest = max(slowest, time.monotonic() - start)
    print(f"{COUNT} damaged pictures: {dict(found)}, the slowest took {slowest:.2f} s")
    assert found["refused"] > COUNT / 4 and found["a picture"] > COUNT / 20, found
    assert slowest < 5


def test_a_handful_over_http():
    chance, good, engine = random.Random(7), files(), FakeEngine("x")
    http = client(engine, pictures=shown(max_source_pixels=1 << 20, max_pixels=1 << 18))
    answers: collections.Counter[int] = collections.Counter()
    for _ in range(40):
        body = {"model": "llm", "messages": [{"role": "user", "content": [part(picture(32, 32)),
                                                                          part(damaged(chance, good))]}]}
        response = http.post("/v1/chat/completions", json=body)
        answers[response.status_code] += 1
        if response.status_code != 200:
            assert response.json()["error"]["param"] == "messages[0].content[1].image_url", response.text
    assert set(answers) == {200, 400} and len(engine.requests) == answers[200], answers
    post(http, messages=[{"role": "user", "content": [part(picture(32, 32)), "?"]}])

