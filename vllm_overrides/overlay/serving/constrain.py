"""What a request demands of its output -> the engine's Constraint, checked before the engine hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.overlay.grammar.compiler import GrammarError, of_tokenizer
from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.source import Part, alone, joined
from vllm.overlay.serving.errors import RequestError, not_supported
from vllm.overlay.serving.structured import Structure

# What the model writes between a thought and its answer; the parser takes it away again.
_BEHIND_THOUGHT = r"BREAK: /\n{1,2}/"


class Constrainer:
    """Writes the constraints of one server's requests. Compiles each grammar first, in a thread, so that what is none
    is a 400 that names its field."""

    def __init__(self, tokenizer: Any, end_thought: int | None) -> None:
        """end_thought: the token that ends a thought; None where thoughts are not told from content."""
        self._end_thought = end_thought
        self._compiler = of_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()

    async def constraint(self, structure: Structure | None, *, in_thought: bool = False,
                         thought_budget: int | None = None) -> Constraint | None:
        """The constraint of an output, or None for none.

        in_thought: it begins inside a thought. Raises RequestError for a structure that is none.
        """
        part = None if structure is None else await self._checked(structure)
        if structure is not None and part is not None and structure.whole_output:
            return Constraint(alone(part))
        thought = in_thought and self._end_thought is not None
        budget = thought_budget if thought else None
        if part is None and budget is None:
            return None
        grammar = None
        if part is not None:
            start = f"start: BREAK? @content\n{_BEHIND_THOUGHT}" if thought else "start: @content"
            grammar = joined([{"lark_grammar": start}, {"name": "content", **part}])
        return Constraint(grammar, in_thought=thought, end_thought=self._end_thought if thought else None,
                          thought_budget=budget)

    async def _checked(self, structure: Structure) -> Part:
        """The structure's grammar."""
        try:
            part, grammar = await self._compiler.run(lambda: _written(structure))
            # Others may wait for the same one, so it is compiled even where this client leaves.
            await asyncio.shield(asyncio.wrap_future(self._compiler.compiled(grammar)))
        except GrammarError as error:
            raise RequestError(f"{structure.field} cannot be kept to: {error}", param=structure.field) from None
        except (ImportError, ValueError) as error:
            raise not_supported(structure.field, f"this server cannot keep to grammars ({error}).") from error
        return part


def _written(structure: Structure) -> tuple[Part, str]:
    part = structure.make()
    return part, alone(part)
