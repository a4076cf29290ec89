"""The pictures of one request, made ready for the engine off the event loop, in two steps: how many tokens they take,
which is known from their headers, and then, when all else of the request has been found good, their pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.overlay.pictures.picture import Picture, digest_of
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.pictures.data_url import decode_data_url, is_data_url
from vllm.overlay.serving.pictures.decode import decode, picture_size
from vllm.overlay.serving.pictures.process import patches_of, target_size
from vllm.overlay.serving.pictures.remote import fetch
from vllm.overlay.serving.pictures.settings import PictureInput
from vllm.overlay.serving.pictures.source import PictureSource

T = TypeVar("T")
# Each holds one decoded picture at a time: about 16 bytes per pixel of --max-picture-source-pixels.
_THREADS = 2
_FETCHES = 8


@dataclass(frozen=True)
class MeasuredPicture:
    """A picture that has not been decoded. size: (width, height) as sent; tokens: embeddings it will have."""

    path: str
    data: bytes
    size: tuple[int, int]
    tokens: int


class PictureReader:
    """Makes the pictures of requests for one model. What is cancelled while it waits for its turn is never begun."""

    def __init__(self, settings: PictureInput | None) -> None:
        """settings: None for a model that takes no pictures."""
        self._settings = settings
        self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="pictures")
        self._fetches = asyncio.Semaphore(_FETCHES)

    async def measured(self, sources: Sequence[PictureSource]) -> list[MeasuredPicture]:
        """The pictures with the tokens that they take. Raises RequestError that names the one at fault."""
        if not sources:
            return []
        settings = self._settings
        if settings is None:
            raise _refused(sources[0], "this model takes no pictures.")
        most = settings.limits.per_request
        if most is not None and len(sources) > most:
            raise _refused(sources[most], f"the request holds {len(sources)} pictures; at most {most} are taken "
                                          "(--limit-mm-per-prompt).")
        for source in sources:
            _check_address(source, settings)
        pictures = await _all([self._measure(source, settings) for source in sources])
        total = sum(picture.tokens for picture in pictures)
        if total > settings.max_tokens:
            raise RequestError(f"The request's {len(pictures)} pictures take {total} tokens; at most "
                               f"{settings.max_tokens} fit (--max-picture-tokens and the context length). Please send "
                               "fewer or smaller ones.", param="messages", code="context_length_exceeded")
        return pictures

    async def read(self, pictures: Sequence[MeasuredPicture], offsets: Sequence[int]) -> tuple[Picture, ...]:
        """The decoded pictures at their offsets in the prompt's token ids. Raises RequestError."""
        settings = self._settings
        if not pictures or settings is None:
            return ()
        return tuple(await _all([self._run(_make, picture, offset, settings)
                                 for picture, offset in zip(pictures, offsets, strict=True)]))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)

    async def _measure(self, source: PictureSource, settings: PictureInput) -> MeasuredPicture:
        if is_data_url(source.url):
            return await self._run(_measure, source.path, source.url, settings)
        async with self._fetches:
            data = await fetch(source.url, source.path, settings.limits.max_bytes)
        return await self._run(_measure, source.path, data, settings)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)


def _check_address(source: PictureSource, settings: PictureInput) -> None:
    """Refuse, before any work, what will not be read."""
    if is_data_url(source.url):
        return
    scheme = source.url[:64].lstrip().partition(":")[0].lower()
    if scheme not in ("http", "https"):
        raise _refused(source, "a picture is sent as a data URL: data:image/png;base64,...")
    if not settings.limits.allow_remote:
        raise _refused(source, "this server fetches no remote pictures. Send it as a data URL "
                               "(or start the server with --allow-remote-images).")


def _refused(source: PictureSource, why: str) -> RequestError:
    return RequestError(f"{source.path} is not supported: {why}", param=source.path, code="unsupported_parameter")


def _measure(path: str, data: str | bytes, settings: PictureInput) -> MeasuredPicture:
    raw = decode_data_url(data, path, settings.limits.max_bytes) if isinstance(data, str) else data
    size = picture_size(raw, path, settings.limits.max_source_pixels)
    factor = settings.patch * settings.merge
    # The same for a picture that EXIF turns by a right angle.
    width, height = target_size(*size, factor, settings.min_pixels, settings.max_pixels)
    return MeasuredPicture(path, raw, size, width * height // factor**2)


def _make(picture: MeasuredPicture, offset: int, settings: PictureInput) -> Picture:
    image = decode(picture.data, picture.path, picture.size)
    grid, pixels = patches_of(image, patch=settings.patch, merge=settings.merge, min_pixels=settings.min_pixels,
                              max_pixels=settings.max_pixels, resample=settings.resample)
    return Picture(offset, grid, pixels, digest_of(grid, pixels))


async def _all(works: Sequence[Awaitable[T]]) -> list[T]:
    """Their results; when one fails, or this is cancelled, those that wait for their turn are dropped."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
