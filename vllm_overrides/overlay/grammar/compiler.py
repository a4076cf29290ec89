"""Grammars -> matchers, in threads, so that a step never waits for one; the last grammars are kept."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.logger import init_logger
from vllm.overlay.grammar.trial import Trial, TrialFailed
from vllm.overlay.grammar.trial_process import STACK

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = init_logger(__name__)
T = TypeVar("T")

# Grammars that are kept. One takes from 0.1 MB to some MB, about 100 bytes for each character; what its lexer learns is
# shared by all who use it.
_KEPT = 128
_KEPT_CHARACTERS = 16_000_000
_LONGEST = 4_000_000
# States that the lexer of one grammar may have, each of 1 to 2 KB.
_MOST_STATES = 100_000
# Two, so that one request with a huge grammar does not keep the others from theirs.
_THREADS = 2
# Of those threads, in bytes: what a trial survives with less is compiled here.
_STACK = 4 * STACK
# Compiled at the start, so that the library is ready.
WARM = '{"grammars": [{"json_schema": {"type": "object"}}]}'


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is llguidance's."""


class Template:
    """A grammar that is compiled. ``copy`` makes a matcher of one sequence; what its lexer learns, all copies know."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def __deepcopy__(self, _: dict[int, Any]) -> Template:
        return self

    def copy(self) -> LLMatcher:
        """A matcher at the grammar's beginning."""
        return self._matcher.deep_copy()


class Compiler:
    """The grammars of one process. Not for several threads: its own do the work."""

    def __init__(self, vocabulary: Callable[[], LLTokenizer], *, on_trial: bool = False) -> None:
        """vocabulary: makes the tokenizer, in a thread. on_trial: grammars are tried in another process first, since
        they come from clients and nobody has compiled them yet."""
        self._threads = _threads_with_stack()
        # One for each thread; None before it is started. The last one used is the next, so that a second process
        # (50 MB) is there only where two grammars have met.
        self._trials: queue.LifoQueue[Trial | None] | None = queue.LifoQueue() if on_trial else None
        if self._trials is not None:
            for _ in range(_THREADS):
                self._trials.put(None)
        self._closed = False
        self._vocabulary = self._threads.submit(vocabulary)
        self._kept: OrderedDict[str, Future[Template]] = OrderedDict()
        self._characters = 0
        self.compiled(WARM)

    def compiled(self, grammar: str) -> Future[Template]:
        """The grammar's template, as soon as it is there.

        Its future raises GrammarError where the grammar is none, and what ``vocabulary`` raised.
        """
        if len(grammar) > _LONGEST:
            refused: Future[Template] = Future()
            refused.set_exception(GrammarError(f"it has {len(grammar)} characters; {_LONGEST} is the most"))
            return refused
        future = self._kept.get(grammar)
        if future is None or future.cancelled() or (future.done() and future.exception() is not None):
            self.forget(grammar)
            future = self._kept[grammar] = self._threads.submit(self._compile, grammar)
            self._characters += len(grammar)
        self._kept.move_to_end(grammar)
        while len(self._kept) > _KEPT or self._characters > _KEPT_CHARACTERS:
            self.forget(next(iter(self._kept)))
        return future

    async def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``, done in one of the threads."""
        return await asyncio.wrap_future(self._threads.submit(work))

    async def start_trial(self) -> None:
        """Starts a process that tries grammars now, so that the first grammar need not wait for it."""
        await self.run(lambda: self._on_trial(lambda trial: None))

    def forget(self, grammar: str) -> None:
        """Keep a grammar no longer: a matcher of it has failed, and what it has learnt may be at fault."""
        if self._kept.pop(grammar, None) is not None:
            self._characters -= len(grammar)

    def close(self) -> None:
        """End the threads and the processes."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end_trials()

    def _end_trials(self) -> None:
        with contextlib.suppress(queue.Empty):
            while self._trials is not None:
                trial = self._trials.get_nowait()
                if trial is not None:
                    trial.close()

    def _on_trial(self, what: Callable[[Trial], None]) -> None:
        """Does something with a trial that nobody else uses, if there are any."""
        if self._trials is None:
            return
        trial = self._trials.get()
        try:
            if trial is None:
                trial = Trial(self._vocabulary.result(), _MOST_STATES)
            what(trial)
        except TrialFailed as error:
            raise GrammarError(str(error)) from None
        finally:
            self._trials.put(trial)
            if self._closed:
                self._end_trials()

    def _compile(self, grammar: str) -> Template:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self._vocabulary.result()
        began = time.perf_counter()
        if grammar != WARM:
            self._on_trial(lambda trial: trial.survive(grammar))
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=_MOST_STATES,
                                                                                    verbose_errors=False))
        if not matcher.is_error():
            # The first mask is the dearest: the lexer makes its first states.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(short(matcher.get_error()))
        took = 1e3 * (time.perf_counter() - began)
        logger.debug("compiled a grammar of %d characters in %.1f ms", len(grammar), took)
        return Template(matcher)


def short(message: str) -> str:
    """llguidance's message in one line, without the grammar that it shows and what it says of its own inside."""
    if message.startswith("NoExtension"):
        return "nothing satisfies it"
    what = re.search(r"^error: (.*)", message, re.MULTILINE)
    if what is not None:
        return f"no regular expression: {what[1]}"
    if message.startswith("panic"):
        return "it is too large"
    shown = next((found.start() for found in re.finditer(r"^\s*\d+ \| |^<", message, re.MULTILINE)), len(message))
    message = " ".join(message[:shown].split())
    return message if len(message) <= 400 else f"{message[:250]} ... {message[-100:]}"


def _threads_with_stack() -> ThreadPoolExecutor:
    """All threads at once, since the size of their stack is nobody else's."""
    threads, all_there = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar"), threading.Barrier(_THREADS)
    before = threading.stack_size(_STACK)
    try:
        for _ in range(_THREADS):
            threads.submit(all_there.wait)
    finally:
        threading.stack_size(before)
    return threads


def of_tokenizer(tokenizer: Any, vocab_size: int, eos: list[int], *, on_trial: bool = False) -> Compiler:
    """The compiler for a transformers tokenizer; see ``vocabulary.make_vocabulary``."""

    def make() -> LLTokenizer:
        from vllm.overlay.grammar.vocabulary import library, make_vocabulary

        began = time.perf_counter()
        made = make_vocabulary(tokenizer, vocab_size, eos)
        logger.info("Grammars: %s, %d tokens read in %.1f s", library(), vocab_size, time.perf_counter() - began)
        return made

    return Compiler(make, on_trial=on_trial)
