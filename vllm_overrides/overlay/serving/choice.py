"""One choice of an answer, from the engine's token ids to events: the state of it between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.overlay.serving.detokenise import Detokeniser
from vllm.overlay.serving.parse.events import Content, Event, merged
from vllm.overlay.serving.parse.output import OutputParser
from vllm.overlay.serving.stop import StopFilter

Logprobs = Sequence[Mapping[int, Any] | None]


class PlainParser:
    """Stands in for OutputParser where all text is content (/v1/completions)."""

    thinking = False
    in_content = True
    sealed = False
    calls = 0

    def feed(self, piece: str, token: int = -1) -> list[Event]:
        """The text as content."""
        return [Content(piece)] if piece else []

    def finish(self, truncated: bool) -> list[Event]:
        """Nothing is ever held back."""
        return []


@dataclass
class Step:
    """What one output of the engine added. tokens and logprobs: those that belong to the answer. visible: which of
    them are of its content, not of a thought, a call or its end."""

    events: list[Event]
    tokens: list[int]
    logprobs: list[Mapping[int, Any] | None] = field(default_factory=list)
    visible: list[bool] = field(default_factory=list)


class Choice:
    """Feed it the engine's outputs; it says what is new, and when and why it is finished.

    finish_reason: ``stop``, ``length``, ``tool_calls`` or ``abort``; stop_reason: the stop string or token id, if any.
    """

    def __init__(self, index: int, detokeniser: Detokeniser, parser: OutputParser | PlainParser, *,
                 stops: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0,
                 stop_names: Mapping[Any, str] | None = None) -> None:
        """stop_names: the tokens at which the engine stops because the request names them as text."""
        self.index = index
        self._detokeniser = detokeniser
        self._parser = parser
        self._stops = StopFilter(stops, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stop_names = stop_names or {}
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        # Of all tokens together, where the engine was asked for it.
        self.logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; what the engine may still send is not of it."""
        return self.finish_reason is not None

    def feed(self, token_ids: Sequence[int], logprobs: Logprobs | None, finish_reason: str | None,
             stop_reason: str | int | None) -> Step:
        """One output of the engine: new tokens, their logprobs, and the engine's reasons if this is its last."""
        step = Step([], [])
        for i, token in enumerate(token_ids):
            if self.finished:
                return step
            # The token that the engine stopped at ends the answer and is not part of its text.
            ends = finish_reason == "stop" and i == len(token_ids) - 1 and not self._include_stop
            self._one(step, token, logprobs[i] if logprobs else None, silent=ends)
        if finish_reason is not None and not self.finished:
            self._finish(step, finish_reason, stop_reason)
        step.events = merged(step.events)
        return step

    def _one(self, step: Step, token: int, logprobs: Mapping[int, Any] | None, silent: bool) -> None:
        step.tokens.append(token)
        step.logprobs.append(logprobs)
        self.completion_tokens += 1
        if logprobs is not None:
            self.logprob += logprobs[token].logprob
        self.reasoning_tokens += self._parser.thinking
        before = self._parser.in_content
        if not silent:
            events = self._parser.feed(self._detokeniser.push(token), token)
            step.events += self._stops.feed(events, armed=self.completion_tokens >= self._min_tokens)
        step.visible.append(before and self._parser.in_content and not silent)
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "tool_calls" if self._parser.calls else "stop", self._stops.matched
        elif self._parser.sealed:
            step.events += self._stops.flush()
            self.finish_reason = "tool_calls"

    def _finish(self, step: Step, finish_reason: str, stop_reason: str | int | None) -> None:
        step.events += self._stops.feed(self._parser.finish(truncated=finish_reason != "stop"))
        if self._stops.matched is not None:
            finish_reason, stop_reason = "stop", self._stops.matched
        step.events += self._stops.flush()
        self.finish_reason = "tool_calls" if finish_reason == "stop" and self._parser.calls else finish_reason
        self.stop_reason = self._stop_names.get(stop_reason, stop_reason)
