"""What a choice's text turns into: the one vocabulary between parsing and responding, streamed or whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the visible answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins: its position among the choice's calls, and the function's name."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: the next characters of their JSON text."""

    index: int
    text: str


Event = Thought | Content | CallStart | CallArguments


def merged(events: list[Event]) -> list[Event]:
    """The same events with neighbours of one kind joined, so that a step makes few deltas."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Thought) and isinstance(last, Thought):
            out[-1] = Thought(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            out[-1] = CallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out
