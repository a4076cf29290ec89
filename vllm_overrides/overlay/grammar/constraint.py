"""What a request demands of its output, as plain data: it is pickled on its way to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Constraint:
    """An output passes through up to three phases, in this order: thought, free text, grammar.

    grammar: in llguidance's form, Lark or its JSON; None for none. in_thought: the output begins inside a thought,
    which is free and ends with ``end_thought``. free: then comes free text, up to the grammar's first token; without
    it the grammar begins at once, and the sequence cannot end before the grammar allows it. openers: tokens that begin
    the grammar wherever they come, and are its first token. thought_budget: tokens that a thought may have; then the
    distribution has one token left, ``end_thought``. endless: neither a thought nor free text ends the sequence by the
    model's own end.
    """

    grammar: str | None = None
    in_thought: bool = False
    end_thought: int | None = None
    free: bool = False
    openers: frozenset[int] = frozenset()
    thought_budget: int | None = None
    endless: bool = False

    def __post_init__(self) -> None:
        if self.in_thought and self.end_thought is None:
            raise ValueError("a constraint with a thought must name the token that ends it")
        if self.free and not self.openers:
            raise ValueError("free text must be ended by a token")

    def __deepcopy__(self, _: dict[int, Any]) -> Constraint:
        return self
