"""The pictures of a request: limits, order, what is never begun, and an event loop that goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from PIL import Image

from tests.helpers.picture_files import file, large_picture, picture, shown, url
from vllm.overlay.pictures.picture import digest_of
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.pictures import reader as module
from vllm.overlay.serving.pictures.process import patches_of
from vllm.overlay.serving.pictures.reader import PictureReader
from vllm.overlay.serving.pictures.source import PictureSource


def sources(*urls):
    return [PictureSource(f"messages[0].content[{i}].image_url", one) for i, one in enumerate(urls)]


async def read(settings, *urls):
    reader = PictureReader(settings)
    try:
        measured = await reader.measured(sources(*urls))
        return measured, await reader.read(measured, [100 * i for i in range(len(measured))])
    finally:
        reader.close()


async def test_what_the_engine_is_given():
    exif = Image.Exif()
    exif[0x0112] = 6
    images = [picture(640, 480), picture(1, 1), picture(300, 40)]
    measured, pictures = await read(shown(), *(url(file(image, exif=exif)) for image in images))
    assert [one.tokens for one in measured] == [20 * 15, 8 * 8, 3 * 22]
    for i, (image, one) in enumerate(zip(images, pictures, strict=True)):
        grid, pixels = patches_of(image.transpose(Image.ROTATE_270), patch=16, merge=2, min_pixels=65536,
                                  max_pixels=16777216)
        assert (one.offset, one.grid, one.digest) == (100 * i, grid, digest_of(grid, pixels))
        assert one.pixels.equal(pixels) and one.num_tokens(2) == measured[i].tokens


async def refused(words, param, settings, *urls):
    with pytest.raises(RequestError, match=words) as caught:
        await read(settings, *urls)
    assert caught.value.param == param and caught.value.status == 400, caught.value.param


SMALL = url(picture(64, 64))
FIRST = "messages[0].content[0].image_url"


async def test_limits():
    await refused("this model takes no pictures", FIRST, None, SMALL)
    await refused("holds 3 pictures; at most 2", "messages[0].content[2].image_url", shown(per_request=2), *[SMALL] * 3)
    await refused("at most 0", FIRST, shown(per_request=0), SMALL)
    await refused("take 192 tokens; at most 191", "messages", shown(max_tokens=191), *[SMALL] * 3)
    await refused("64x64 = 4096 pixels; at most 4095", FIRST, shown(max_source_pixels=4095), SMALL)
    await refused("at most 50 bytes", FIRST, shown(max_bytes=50), SMALL)
    measured, pictures = await read(shown(max_tokens=192, max_pixels=65536, per_request=3), *[SMALL] * 2,
                                    url(picture(900, 900)))
    assert [one.tokens for one in measured] == [64, 64, 64] and pictures[2].grid == (16, 16)


@pytest.mark.parametrize("address", ["https://example.com/a.png", "http://example.com/a.png", "HTTPS://example.com/a"])
async def test_addresses_are_refused_at_once_unless_allowed(monkeypatch, address):
    async def fetch(*arguments):
        return file(picture(64, 64))

    monkeypatch.setattr(module, "fetch", fetch)
    await refused("--allow-remote-images", FIRST, shown(), address)
    measured, pictures = await read(shown(allow_remote=True), address, SMALL)
    assert [one.tokens for one in measured] == [64, 64] and pictures[0].digest == pictures[1].digest


@pytest.mark.parametrize("address", ["file:///etc/passwd", "/etc/passwd", "ftp://a/b", "iVBORw0KGgo=", "blob:x",
                                     "x" * 100])
async def test_other_addresses_never(address):
    for settings in (shown(), shown(allow_remote=True)):
        await refused("sent as a data URL", FIRST, settings, address)


async def test_a_header_that_lies_about_the_size(monkeypatch):
    monkeypatch.setattr(module, "picture_size", lambda *_: (65, 64))
    await refused("not what its header says", FIRST, shown(), SMALL)


async def test_what_waits_when_the_client_leaves_is_never_begun(monkeypatch):
    begun = []
    go = threading.Event()

    def slow(picture, offset, settings):
        begun.append(offset)
        go.wait(10)

    monkeypatch.setattr(module, "_make", slow)
    reader = PictureReader(shown())
    measured = await reader.measured(sources(*[SMALL] * 10))
    task = asyncio.ensure_future(reader.read(measured, range(10)))
    while len(begun) < module._THREADS:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    go.set()
    reader.close()
    await asyncio.sleep(0.2)
    assert begun == list(range(module._THREADS))


async def test_one_bad_picture_stops_the_others(monkeypatch):
    made = []
    original = module._make

    def counted(picture, offset, settings):
        made.append(offset)
        return original(picture, offset, settings)

    monkeypatch.setattr(module, "_make", counted)
    broken = url(file(picture(64, 64))[:-200])
    await refused("damaged", FIRST, shown(max_tokens=10**5), broken, *[url(picture(1000, 1000))] * 12)
    assert len(made) < 8, made


async def test_the_event_loop_goes_on():
    data = url(file(large_picture(3000), compress_level=1))
    waits = []

    async def beat():
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.005)
            waits.append(time.monotonic() - start)

    beating = asyncio.ensure_future(beat())
    start = time.monotonic()
    await read(shown(max_tokens=10**5), data)
    beating.cancel()
    whole = time.monotonic() - start
    print(f"{whole:.2f} s of work; the event loop waited {max(waits):.3f} s at most")
    assert max(waits) < max(0.25, 0.5 * whole) and len(waits) > 5
