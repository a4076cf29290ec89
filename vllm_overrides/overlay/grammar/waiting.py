"""Requests of an engine that wait until their grammar is compiled. Nobody else waits with them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.overlay.grammar.compiler import Compiler, Template, of_tokenizer
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.follower import Follower
from vllm.overlay.grammar.guided import constraint_of
from vllm.sampling_params import SamplingParams


class Grammars:
    """The grammars of one engine. All but the compiling happens in the engine's own thread."""

    def __init__(self, engine: Any) -> None:
        """engine: an LLMEngine with its tokenizer and its ranks, whose processes must exist before our threads do."""
        self._engine = engine
        self._compiler: Compiler | None = None
        self._waiting: dict[str, tuple[concurrent.futures.Future[Template], Callable[[], None]]] = {}
        self._unavailable = self._why_not()
        if self._unavailable is None:
            self._compiler = of_tokenizer(engine.get_tokenizer(), engine.model_config.get_vocab_size(), self._ends())

    def _why_not(self) -> str | None:
        engine = self._engine
        if engine.tokenizer is None:
            return "the engine has no tokenizer"
        if engine.scheduler_config.is_multi_step or engine.speculative_config is not None:
            return "a step must give one token per sequence (no --num-scheduler-steps, no --speculative-model)"
        if engine.parallel_config.pipeline_parallel_size > 1:
            return "the engine must see the logits (no --pipeline-parallel-size)"
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            return f"llguidance cannot be imported ({error})"
        return None

    def _ends(self) -> list[int]:
        own = None if self._engine.tokenizer is None else self._engine.get_tokenizer().eos_token_id
        more = self._engine.generation_config_fields.get("eos_token_id") or []
        return [token for token in [own, *([more] if isinstance(more, int) else more)] if token is not None]

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, request_id: str, params: Any, add: Callable[[Any], None]) -> None:
        """Calls ``add`` with the request's parameters, at once or when its grammar is ready (see ``due``).

        Raises:
            ValueError: this engine cannot follow a grammar, or the parameters ask for none that can be followed.
        """
        constraint = None
        if isinstance(params, SamplingParams):
            params, constraint = _with_constraint(params)
        if constraint is None or constraint.grammar is None:
            add(params)
            return
        if self._compiler is None:
            raise ValueError(f"output cannot be kept to a grammar: {self._unavailable}")
        future, own = self._compiler.compiled(constraint.grammar), params.clone()
        # Behind its end a grammar allows nothing but the tokens that end a sequence; before it the follower keeps them
        # away where they are to be ignored.
        own.ignore_eos, own.constraint = False, dataclasses.replace(constraint, endless=params.ignore_eos)

        def add_compiled() -> None:
            own.template = future.result()
            add(own)

        if future.done():
            add_compiled()
        else:
            self._waiting[request_id] = future, add_compiled

    def due(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yields (request id, what adds it) of requests that need not wait any more; the call raises ValueError where
        the grammar is none."""
        for request_id, (future, add) in list(self._waiting.items()):
            if future.done() and self._waiting.pop(request_id, None) is not None:
                yield request_id, add

    def wait(self, seconds: float) -> None:
        """Returns when one of those that wait need not do so any more, or after a while."""
        concurrent.futures.wait([future for future, _ in self._waiting.values()], seconds,
                                return_when=concurrent.futures.FIRST_COMPLETED)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Requests that were aborted."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def follow(self, params: SamplingParams, allowed: Iterable[int] | None) -> None:
        """Gives the parameters of one sequence, which are its own, a ``follower`` if they have a constraint.

        allowed: what they had as ``allowed_token_ids``, which stock turns into something else. From here on the
        follower decides when a sequence may end; ``min_tokens`` is its business.
        """
        constraint = params.constraint
        if constraint is None:
            return
        matcher = None
        if params.template is not None:
            matcher = params.template.copy()
        params.follower = Follower(constraint, matcher, ends=self._ends(), stops=params.all_stop_token_ids,
                                   min_tokens=params.min_tokens, allowed=allowed,
                                   on_failure=lambda: self._forget(constraint))
        params.min_tokens = 0

    def _forget(self, constraint: Constraint) -> None:
        if self._compiler is not None and constraint.grammar is not None:
            self._compiler.forget(constraint.grammar)


def _with_constraint(params: SamplingParams) -> tuple[SamplingParams, Constraint | None]:
    if params.guided_decoding is None:
        return params, params.constraint
    # Stock's own field, of which it would make a logits processor of outlines.
    params = params.clone()
    params.constraint, params.guided_decoding = constraint_of(params.guided_decoding), None
    return params, params.constraint
