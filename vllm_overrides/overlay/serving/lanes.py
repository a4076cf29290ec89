"""Work on requests beside the event loop: short prompts do not wait behind long ones, nor anything behind either.

A prompt of a million characters takes seconds to become tokens, so long prompts have a thread of their own. The
tokenizer is the same: what it does for us changes nothing of it (padding and truncation, which do, are not asked for),
and a second one takes 60 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vllm.overlay.serving.normalise import ChatRequest
from vllm.overlay.serving.options import Options
from vllm.overlay.serving.render import Prompt, Renderer

T = TypeVar("T")
# Characters from which on a prompt is a long one: tens of milliseconds.
_LONG = 1 << 16
# What the template does with one message, or with one tool, takes as long as so many characters.
_EACH = 128


async def off_loop(work: Callable[..., T], *args: Any) -> T:
    """The result of a function of Python that may take a while, in a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *args)


class Lanes:
    """A Renderer for short prompts and one for long ones."""

    def __init__(self, short: Renderer, long: Renderer) -> None:
        self._short = short
        self._long = long

    @property
    def has_template(self) -> bool:
        """Whether chat can be served at all."""
        return self._short.has_template

    async def chat(self, request: ChatRequest, picture_tokens: Sequence[int] = ()) -> Prompt:
        """As Renderer.chat."""
        return await self._lane(_length(request)).chat(request, picture_tokens)

    async def completion(self, prompt: str | list[int], options: Options) -> Prompt:
        """As Renderer.completion."""
        return await self._lane(len(prompt)).completion(prompt, options)

    def close(self) -> None:
        """End the threads."""
        self._short.close()
        self._long.close()

    def _lane(self, length: int) -> Renderer:
        return self._long if length > _LONG else self._short


def _length(request: ChatRequest) -> int:
    """About how many characters take as long as this prompt; the text of tools and calls is seldom long alone."""
    length = _EACH * (len(request.messages) + len(request.tools.definitions))
    for message in request.messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        length += sum(map(len, parts)) + len(message.get("reasoning_content", ""))
    return length
