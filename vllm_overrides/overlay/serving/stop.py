"""Stop strings: they end thought and content, never the inside of a tool call."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.overlay.serving.parse.events import Content, Event, Thought
from vllm.overlay.serving.parse.markers import held_length


class StopFilter:
    """Passes events through until a stop string has come; holds back only text that may become one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """include: whether the stop string itself is part of the answer."""
        self._stops = stops
        self._include = include
        self._held = ""
        self._kind: type[Content | Thought] = Content
        self.matched: str | None = None

    def feed(self, events: list[Event], armed: bool = True) -> list[Event]:
        """The events up to a stop string. armed=False (min_tokens is not reached yet): no text counts as a stop
        string."""
        if not self._stops:
            return events
        out: list[Event] = []
        for event in events:
            if self.matched is not None:
                break
            if isinstance(event, (Content, Thought)):
                if type(event) is not self._kind:
                    out += self.flush()
                    self._kind = type(event)
                out += self._scan(event.text, armed)
            else:
                out += self.flush()
                out.append(event)
        return out

    def flush(self) -> list[Event]:
        """The text held back: it did not become a stop string."""
        held, self._held = self._held, ""
        return [self._kind(held)] if held else []

    def _scan(self, text: str, armed: bool) -> list[Event]:
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0] if armed else []
        if found:
            at, self.matched = min(found)
            self._held = ""
            end = at + len(self.matched) if self._include else at
            return [self._kind(text[:end])] if end else []
        end = len(text) - held_length(text, self._stops)
        self._held = text[end:]
        return [self._kind(text[:end])] if end else []
