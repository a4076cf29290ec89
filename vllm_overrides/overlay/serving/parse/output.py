"""One choice's text, split into thought, content and tool calls. The same machine serves streamed and whole answers.

* A thought ends at ``</think>``, at ``<tool_call>`` where the request has tools, or with the answer: a thought that
  is cut stays a thought. Newlines around it belong to the format and are left out; so are those before the content
  that follows it.
* ``<think>`` and ``</think>`` are markers only where the format has them, before any content; later on they are text,
  because an answer may be about them.
* Blanks between content and a call, and between calls, are left out. Content behind a call is kept.
* Without tools, or with tool_choice none, ``<tool_call>`` is text. Without a reasoning parser, ``<think>`` is.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm.overlay.serving.parse.events import Content, Event, Thought, merged
from vllm.overlay.serving.parse.markers import CALL, END_CALL, END_THINK, THINK, MarkerSplitter, Span
from vllm.overlay.serving.parse.tool_calls import CallParser

_THOUGHT, _CONTENT, _CALL, _SEALED = "thought", "content", "call", "sealed"


class OutputParser:
    """Fed one token's text at a time; gives the events that are certain. ``finish`` gives the rest."""

    def __init__(self, splitter: MarkerSplitter, *, in_thought: bool = False, reasoning: bool = True,
                 schemas: Mapping[str, dict] | None = None, one_call: bool = False) -> None:
        """in_thought: the prompt ends inside a thought. reasoning: thoughts are split off. schemas: of the tools that
        may be called, by name; None where calls are not parsed. one_call: the answer is over, and says so by
        ``sealed``, with its first call."""
        self._splitter = splitter
        self._reasoning = reasoning
        self._schemas = schemas
        self._at_most = 1 if one_call else None
        self._state = _THOUGHT if in_thought and reasoning else _CONTENT
        self._thought_begun = False
        self._content_begun = False
        self._blanks = ""
        self._behind_thought = False
        self._behind_call = False
        self._block: CallParser | None = None
        self.calls = 0

    @property
    def thinking(self) -> bool:
        """Whether the text now being fed is a thought."""
        return self._state == _THOUGHT

    @property
    def in_content(self) -> bool:
        """Whether the text now being fed is content."""
        return self._state == _CONTENT

    @property
    def sealed(self) -> bool:
        """Whether nothing that may still come belongs to the answer."""
        return self._state == _SEALED

    def feed(self, piece: str, token: int = -1) -> list[Event]:
        """The events that the text of one more token makes certain."""
        return self._consume(self._splitter.feed(piece, token))

    def finish(self, truncated: bool) -> list[Event]:
        """The last events. truncated: the answer was cut by its token limit."""
        events = self._consume(self._splitter.finish())
        if self._block is not None:
            events += self._block.finish(truncated)
            events += self._close_block(self._block)
        if self._blanks and self._state == _THOUGHT and self._thought_begun:
            events.append(Thought(self._blanks))
        elif self._blanks and self._state == _CONTENT and not self._behind_call and (
                self._content_begun or not self._behind_thought):
            events.append(Content(self._blanks))
        self._state = _SEALED
        return merged(events)

    def _consume(self, spans: list[Span]) -> list[Event]:
        events: list[Event] = []
        for span in spans:
            events += self._marker(span.text) if span.is_marker else self._text(span.text)
        return merged(events)

    def _text(self, text: str) -> list[Event]:
        if self._state == _CALL:
            return self._call_text(text)
        if self._state == _THOUGHT:
            return self._thought_text(text)
        return self._content_text(text) if self._state == _CONTENT else []

    def _marker(self, marker: str) -> list[Event]:
        if self._state == _CALL:
            # Its meaning depends on where in the block it stands: the block reads it as text.
            return self._call_text(marker)
        if marker == CALL and self._schemas is not None and self._state in (_THOUGHT, _CONTENT):
            if self._state == _THOUGHT:
                self._end_thought()
            self._open_block()
            return []
        if self._state == _THOUGHT:
            if marker == END_THINK:
                self._end_thought()
                return []
            return [] if marker == THINK and not self._thought_begun else self._thought_text(marker)
        if self._state == _CONTENT:
            if marker == THINK and self._reasoning and not self._content_begun:
                self._state, self._blanks = _THOUGHT, ""
                return []
            if marker == END_THINK and self._reasoning and not self._content_begun:
                self._end_thought()
                return []
            return [] if marker == END_CALL and self._behind_call else self._content_text(marker)
        return []

    def _thought_text(self, text: str) -> list[Event]:
        text = self._blanks + text
        if not self._thought_begun:
            text = text.lstrip("\n")
        text, self._blanks = _split_blanks(text)
        if not text:
            return []
        self._thought_begun = True
        return [Thought(text)]

    def _end_thought(self) -> None:
        self._state, self._blanks, self._behind_thought = _CONTENT, "", True

    def _content_text(self, text: str) -> list[Event]:
        if self._behind_call:
            text = text.lstrip()
            self._behind_call = not text
        text = self._blanks + text
        if self._behind_thought and not self._content_begun:
            text = text.lstrip("\n")
        text, self._blanks = _split_blanks(text)
        if not text:
            return []
        self._content_begun = True
        return [Content(text)]

    def _open_block(self) -> None:
        self._state = _CALL
        self._block = CallParser(self._schemas or {}, self.calls, self._at_most)

    def _call_text(self, text: str) -> list[Event]:
        block = self._block
        if block is None:
            return []
        events = block.feed(text)
        if block.done:
            events += self._close_block(block)
        return events

    def _close_block(self, block: CallParser) -> list[Event]:
        self.calls += block.started
        self._block = None
        self._state = _CONTENT
        if self._at_most is not None and block.closed:
            self._state = _SEALED
            return []
        self._behind_call = self._behind_call or block.started > 0
        return self._content_text(block.rest)


def _split_blanks(text: str) -> tuple[str, str]:
    """(text, the blanks at its end): these are held back until it is known whether they belong to it."""
    solid = text.rstrip()
    return solid, text[len(solid):]

