"""One sequence and its constraint: which tokens may come next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.overlay.grammar.compiler import short
from vllm.overlay.grammar.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

_THOUGHT, _FREE, _GRAMMAR = "thought", "free", "grammar"
Words = np.ndarray[Any, np.dtype[np.uint32]]


class Follower:
    """Goes along with the tokens of one sequence. failed: why it cannot go on, None as long as it can.

    It holds nothing that the tokens do not tell: given other tokens than it has seen, it begins anew.
    """

    def __init__(self, constraint: Constraint, matcher: LLMatcher | None, *, ends: Collection[int] = (),
                 stops: Collection[int] = (), min_tokens: int = 0, allowed: Iterable[int] | None = None,
                 on_failure: Callable[[], None] = lambda: None) -> None:
        """matcher: of the constraint's grammar, at its beginning, and this sequence's own. ends: tokens by which the
        model ends a sequence. stops: all that end this one; none of them may come in the first ``min_tokens`` tokens,
        unless nothing else may. allowed: the only tokens that may come at all, None for all. on_failure: called when
        the matcher fails."""
        self._constraint = constraint
        self._matcher = matcher
        self._ends = tuple(ends)
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._allowed = None if allowed is None else frozenset(allowed)
        self._on_failure = on_failure
        self.failed: str | None = None
        # Whether that is because of allowed_token_ids.
        self.narrowed = False
        self._begin()

    def __deepcopy__(self, _: dict[int, Any]) -> Follower:
        # SamplingParams are cloned; who follows a sequence stays the same.
        return self

    def _begin(self) -> None:
        self._seen = 0
        constraint = self._constraint
        self._phase = _THOUGHT if constraint.in_thought else _FREE if constraint.free else _GRAMMAR
        if self._matcher is not None:
            self._matcher.reset()

    def follow(self, tokens: Sequence[int]) -> None:
        """tokens: all that the sequence has generated. What is known of them already costs nothing."""
        if len(tokens) < self._seen:
            self._begin()
        new = tokens[self._seen:]
        self._seen = len(tokens)
        for position, token in enumerate(new):
            if self._phase == _GRAMMAR:
                self._consume(list(new[position:]))
                return
            if token in self._constraint.openers:
                self._phase = _GRAMMAR
                self._consume([token])
            elif self._phase == _THOUGHT and token == self._constraint.end_thought:
                self._phase = _FREE if self._constraint.free else _GRAMMAR

    def _consume(self, tokens: list[int]) -> None:
        if self._matcher is not None and self.failed is None and not all(map(self._matcher.consume_token, tokens)):
            self._fail()

    def _fail(self) -> None:
        assert self._matcher is not None
        self.failed = f"the output could not be kept to its grammar: {short(self._matcher.get_error())}"
        self._on_failure()

    @property
    def matcher(self) -> LLMatcher | None:
        """Who computes the next mask; None where that takes no grammar."""
        return self._matcher if self._phase == _GRAMMAR and self.failed is None else None

    def finish(self, mask: Words) -> bool:
        """Completes the mask of the next token, in place. mask: [ceil(V / 32)], token t is bit t % 32 of word t // 32;
        what ``matcher`` computed, or anything where it is None.

        Returns False where every token may come, or where ``failed`` is set.
        """
        matcher = self.matcher
        if matcher is not None:
            if matcher.is_error():
                self._fail()
                return False
        elif not self._mask_without_grammar(mask):
            return False
        if self._allowed is not None:
            self._only(mask, self._allowed)
        if self._seen < self._min_tokens:
            self._without(mask, self._stops)
        return self.failed is None

    def _mask_without_grammar(self, mask: Words) -> bool:
        constraint = self._constraint
        if self.failed is not None:
            return False
        mask.fill(0xFFFFFFFF)
        budget = constraint.thought_budget
        if self._phase == _THOUGHT and budget is not None and self._seen >= budget:
            assert constraint.end_thought is not None
            mask.fill(0)
            _set(mask, constraint.end_thought)
            return True
        if constraint.endless or (self._phase == _THOUGHT and constraint.grammar is not None and not constraint.free):
            # What must follow a grammar cannot end before it has begun. Where the request itself wants to stop, it may.
            self._without(mask, self._ends)
            return True
        return self._seen < self._min_tokens or self._allowed is not None

    def _without(self, mask: Words, tokens: Iterable[int]) -> None:
        before = mask.copy()
        for token in tokens:
            if token >> 5 < len(mask):
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if not mask.any():
            mask[:] = before

    def _only(self, mask: Words, tokens: Iterable[int]) -> None:
        only = np.zeros_like(mask)
        for token in tokens:
            _set(only, token)
        mask &= only
        if not mask.any():
            self.narrowed = True
            self.failed = "allowed_token_ids leaves no token that the grammar allows next"


def _set(mask: Words, token: int) -> None:
    if token >> 5 < len(mask):
        mask[token >> 5] |= np.uint32(1 << (token & 31))
