"""Where the messages of a prompt end, as the chat template itself tells by asking for the next one.

A later turn of a conversation often shares no more than that: a template writes something else behind the last message
(thinking on or off), and drops the thoughts of messages that were the last. To find these places without knowing the
control tokens of one model, the template gets a list of messages that notes how much had been written when each of
them, and the end of the list, was asked for. A template that renders messages inside a macro tells of them too early,
one that never iterates tells nothing. What depends on these places is what the prefix cache keeps, never what is
computed.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import GeneratorType
from typing import Any, SupportsIndex, overload

from jinja2.runtime import LoopContext

from vllm.logger import init_logger
from vllm.overlay.hybrid.plan import is_hybrid

logger = init_logger(__name__)

# The halves of one character, as JSON may spell it.
_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def wants_boundaries(model_config: Any, cache_config: Any) -> bool:
    """Whether the engine has use for them: where it keeps recurrent state at some places only."""
    return bool(cache_config.enable_prefix_caching) and is_hybrid(model_config.hf_config)


class Ends:
    """written: characters that the template has written so far. places: where it asked for a message, ascending."""

    def __init__(self) -> None:
        self.written = 0
        self.places: list[int] = []

    def note(self) -> None:
        """A message, or the end of the messages, is asked for."""
        if self.written > (self.places[-1] if self.places else 0):
            self.places.append(self.written)


class WatchedMessages(list[Any]):
    """Messages that note in ``ends`` who asks for them, also through slices."""

    def __init__(self, messages: Iterable[Any], ends: Ends) -> None:
        super().__init__(messages)
        self.ends = ends

    def __iter__(self) -> Iterator[Any]:
        for message in super().__iter__():
            self.ends.note()
            yield message
        self.ends.note()

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        """The same for a slice of them."""
        found = super().__getitem__(index)
        return WatchedMessages(found, self.ends) if isinstance(index, slice) else found


class _Loop(LoopContext):
    """Jinja's loop of a template that uses ``loop``: a message is asked for when its turn comes, not when the template
    looks ahead to it (``loop.last``, ``loop.nextitem``)."""

    def __init__(self, iterable: Any, *args: Any) -> None:
        self._ends = iterable.ends if isinstance(iterable, WatchedMessages) else None
        super().__init__(list.copy(iterable) if self._ends is not None else iterable, *args)

    def __next__(self) -> Any:
        if self._ends is not None:
            self._ends.note()
        return super().__next__()


# The Ends of the rendering that begins next in this thread.
_begins = threading.local()


def _joined(blocks: Iterable[str]) -> str:
    """Jinja's concat: what a template yields becomes text; counts what the outermost one yields."""
    ends: Ends | None = getattr(_begins, "ends", None)
    if ends is None or not isinstance(blocks, GeneratorType):
        return "".join(blocks)
    _begins.ends = None
    pieces = []
    for block in blocks:
        pieces.append(block)
        ends.written += len(block)
    return "".join(pieces)


@contextmanager
def watched(messages: Iterable[Any], ends: Ends, tokenizer: Any, chat_template: str | None,
            tools: Any) -> Iterator[list[Any]]:
    """Gives the messages as ``tokenizer.apply_chat_template`` is to get them, with this template and tools, inside:
    then their ends are noted."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # It keeps what it has compiled: apply_chat_template gets this very template from it.
        compiled: Any = _compile_jinja_template(tokenizer.get_chat_template(chat_template, tools))
    except (ImportError, AttributeError) as error:
        logger.debug("no message boundaries: %s", error)
    else:
        compiled.environment.concat = _joined
        # The namespace of the compiled source, which imports it from jinja2.runtime.
        compiled.root_render_func.__globals__["LoopContext"] = _Loop
        _begins.ends = ends
    try:
        yield WatchedMessages(messages, ends)
    finally:
        _begins.ends = None


def repaired(places: Sequence[int], text: str) -> list[int]:
    """Places in a text -> in what ``fields.well_formed`` makes of it: two halves become one character, and what stands
    alone is replaced one for one."""
    halves = [found.end() for found in _HALVES.finditer(text)]
    return [place - bisect_right(halves, place) for place in places]


def token_places(encoded: Any, places: Sequence[int]) -> list[int]:
    """Characters -> tokens: how many tokens end at or before each place.

    encoded: what a tokenizer of transformers returned for one text; a slow one does not know. places: offsets in that
    text, ascending. A token that lies across a place is behind it.
    """
    if not places or not encoded.encodings:
        return []
    (encoding,) = encoded.encodings

    def end(token: int) -> int:
        # Special tokens that the tokenizer has added are nowhere in the text.
        return (encoding.token_to_chars(token) or (0, 0))[1]

    tokens = range(len(encoding))
    found = 0
    return [found := bisect_right(tokens, place, lo=found, key=end) for place in places]


def shifted(places: Sequence[int], offsets: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Places in tokens with one placeholder for a picture -> with counts[i] placeholders from offsets[i] on."""
    moved = []
    added = i = 0
    for place in places:
        while i < len(offsets) and offsets[i] < place + added:
            added += counts[i] - 1
            i += 1
        moved.append(place + added)
    return moved
