"""What a request demands of its output -> the engine's Constraint, checked before the engine hears of it.

* A ``response_format`` or its relatives: the content is of that form. With tools that may be called: it is, or calls
  come instead.
* A call that has to come comes at once, behind the thought. Its arguments follow the tool's schema, where that can be
  written as rules (`vllm.overlay.grammar.calls`).
* Where calls may come (``auto``) nothing is constrained, unless something is asked of them: ``strict`` tools, custom
  tools with a grammar, a single call (``parallel_tool_calls: false``), or some tools only. Then text is free up to the
  token that opens a call.
* Thoughts are free, up to their budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.grammar.calls import Tool, Untypable, calls_rules
from vllm.overlay.grammar.compiler import GrammarError, of_tokenizer
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.source import Part, alone, joined, regex_part
from vllm.overlay.serving.errors import RequestError, not_supported
from vllm.overlay.serving.normalise import ChatRequest
from vllm.overlay.serving.structured import Structure
from vllm.overlay.serving.tools import ToolChoice, Tools

logger = init_logger(__name__)

# What the model writes between a thought and its answer; the parser takes it away again.
_BREAK = r"BREAK: /\n{1,2}/"


@dataclass(frozen=True)
class Markers:
    """Token ids: of what ends a thought, opens a call and closes it. None where this server does not look for them."""

    end_thought: int | None = None
    call: int | None = None
    end_call: int | None = None


@dataclass(frozen=True)
class _Calls:
    """The calls of an output. must: there is one; one: there is no second; typed: names of the tools whose arguments
    follow their schema if they can; strict: of those that have to."""

    tools: tuple[Tool, ...]
    must: bool
    one: bool
    typed: frozenset[str]
    strict: frozenset[str]


class Constrainer:
    """Writes the constraints of one server's requests. Compiles each grammar first, in a thread, so that what is none
    is a 400 that names its field."""

    def __init__(self, tokenizer: Any, markers: Markers) -> None:
        self._markers = markers
        self._compiler = of_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id], on_trial=True)

    def close(self) -> None:
        """End its threads and processes."""
        self._compiler.close()

    async def get_ready(self) -> None:
        """Returns when the first grammar need not wait for anything but its own compilation."""
        await self._compiler.start_trial()

    async def of_completion(self, structure: Structure | None) -> Constraint | None:
        """The constraint of a completion's output, or None. Raises RequestError for a structure that is none."""
        return None if structure is None else Constraint(alone(await self._checked(structure)))

    async def of_chat(self, request: ChatRequest, in_thought: bool) -> Constraint | None:
        """The constraint of a chat answer, or None.

        in_thought: the prompt ends inside a thought. Raises RequestError for what cannot be kept to.
        """
        structure = request.structure
        part = None if structure is None else await self._checked(structure)
        if part is not None and structure is not None and structure.whole_output:
            return Constraint(alone(part))
        thought = in_thought and self._markers.end_thought is not None
        calls = self._calls(request)
        if calls is not None and calls.must:
            part = None
        free = calls is not None and not calls.must and part is None
        grammar = None
        if calls is not None:
            grammar = await self._with_calls(part, calls, breaks=thought and not free)
        elif part is not None:
            grammar = _whole(part, None, breaks=thought)
        budget = request.thinking_budget if thought else None
        if grammar is None and budget is None:
            return None
        return Constraint(grammar, in_thought=thought, end_thought=self._markers.end_thought if thought else None,
                          free=free and grammar is not None, thought_budget=budget, openers=self._openers(request))

    def _openers(self, request: ChatRequest) -> frozenset[int]:
        """What ends a thought as well as its own end: a call, where one may come."""
        if self._markers.call is None or self._markers.end_call is None or request.tool_choice.mode == "none":
            return frozenset()
        return frozenset({self._markers.call})

    def _calls(self, request: ChatRequest) -> _Calls | None:
        """What is asked of the calls, or None where nothing is."""
        if not self._openers(request):
            return None
        tools, choice = request.tools, request.tool_choice
        names = _callable(tools, choice)
        one = not request.parallel_tool_calls or choice.mode == "named" or tools.legacy
        strict, written = tools.strict & frozenset(names), tools.grammars.keys() & frozenset(names)
        asked = choice.forced or one or strict or written or choice.allowed or request.structure
        if not asked or not names:
            return None
        return _Calls(tuple(Tool(name, tools.schemas[name], tools.grammars.get(name)) for name in names), choice.forced,
                      one, frozenset(names) if choice.forced else strict | written,
                      strict if choice.forced else frozenset())

    async def _with_calls(self, part: Part | None, calls: _Calls, *, breaks: bool) -> str | None:
        """The grammar of calls, or of content or calls; None where that cannot be had and need not be.

        breaks: line breaks may come before them.
        """
        try:
            try:
                return await self._with_rules(part, calls, calls.typed, breaks)
            except (Untypable, GrammarError):
                # One tool at a time, to know which it is.
                fitting = [name for name in calls.typed if await self._fits(calls, name)]
            try:
                return await self._with_rules(part, calls, fitting, breaks)
            except (Untypable, GrammarError) as error:
                logger.warning("calls of %d tools are not kept to their schemas, which are too much together: %s",
                               len(fitting) - len(calls.strict), error)
                return await self._with_rules(part, calls, calls.strict, breaks)
        except (ImportError, ValueError) as error:
            if calls.must or part is not None:
                if isinstance(error, (Untypable, GrammarError)):
                    raise RequestError(f"tools cannot be kept to: {error}.", param="tools") from None
                raise _unable("tools", error) from error
            logger.warning("calls are not kept to any grammar: %s", error)
            return None

    async def _with_rules(self, part: Part | None, calls: _Calls, typed: Collection[str], breaks: bool) -> str:
        """Raises Untypable or GrammarError where a typed tool, or all of it, is more than can be kept to."""
        assert self._markers.call is not None and self._markers.end_call is not None
        opens, closes = self._markers.call, self._markers.end_call
        grammar = await self._compiler.run(lambda: _whole(part, calls_rules(
            calls.tools, typed, opens=opens, closes=closes, one=calls.one), breaks))
        await self._compiled(grammar)
        return grammar

    async def _fits(self, calls: _Calls, name: str) -> bool:
        """Whether a tool's arguments can be kept to its schema. Raises RequestError where they have to be."""
        only = replace(calls, tools=tuple(tool for tool in calls.tools if tool.name == name))
        try:
            await self._with_rules(None, only, {name}, breaks=False)
        except (Untypable, GrammarError) as error:
            if name in calls.strict:
                raise RequestError(f"The parameters of the strict tool {name!r:.80} cannot be kept to: {error}.",
                                   param="tools") from None
            logger.info("calls of %r are not kept to its schema: %s", name, error)
            return False
        return True

    async def _checked(self, structure: Structure) -> Part:
        """The structure's grammar."""
        try:
            part, grammar = await self._compiler.run(lambda: _made(structure))
            await self._compiled(grammar)
        except GrammarError as error:
            if structure.whitespace is not None:
                await self._check_whitespace(*structure.whitespace)
            raise RequestError(f"{structure.field} cannot be kept to: {error}.", param=structure.field) from None
        except (ImportError, ValueError) as error:
            raise _unable(structure.field, error) from error
        return part

    async def _check_whitespace(self, field: str, pattern: str) -> None:
        """Raises RequestError where the expression is at fault."""
        try:
            await self._compiled(await self._compiler.run(lambda: alone(regex_part(pattern))))
        except GrammarError as error:
            raise RequestError(f"{field} cannot be kept to: {error}.", param=field) from None

    async def _compiled(self, grammar: str) -> None:
        # Others may wait for the same one, so it is compiled even where this client leaves.
        await asyncio.shield(asyncio.wrap_future(self._compiler.compiled(grammar)))


def _callable(tools: Tools, choice: ToolChoice) -> list[str]:
    """Names of the tools that may be called. Raises RequestError where one must be and none can."""
    wanted = [choice.name] if choice.name is not None else [name for name in tools.schemas
                                                            if choice.allowed is None or name in choice.allowed]
    names = [name for name in wanted if Tool(name, {}).callable]
    if choice.forced and not names:
        raise RequestError("None of the tools can be called: a name is not empty, has at most 256 characters and no <, "
                           "> or line break.", param="tools")
    return names


def _made(structure: Structure) -> tuple[Part, str]:
    try:
        part = structure.make()
        return part, alone(part)
    except RecursionError:
        raise GrammarError("nested too deeply") from None


def _whole(part: Part | None, calls: tuple[str, list[Part]] | None, breaks: bool) -> str:
    rules, parts = ([], []) if calls is None else ([calls[0]], list(calls[1]))
    choices = (["@content"] if part is not None else []) + (["calls"] if rules else [])
    start = f"start: {'BREAK? ' if breaks else ''}({' | '.join(choices)})"
    lark = "\n".join([start, *([_BREAK] if breaks else []), *rules])
    return joined([{"lark_grammar": lark}, *([{"name": "content", **part}] if part is not None else []), *parts])


def _unable(field: str, error: Exception) -> RequestError:
    return not_supported(field, f"this server cannot keep to grammars ({error}).")
