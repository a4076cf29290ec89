"""Stock's own way to ask for a grammar, ``SamplingParams.guided_decoding``, as a Constraint."""

from __future__ import annotations

import json
from typing import Any

from vllm.overlay.grammar.constraint import Constraint
from vllm.overlay.grammar.source import alone, choice_part, grammar_part, json_part, regex_part


def constraint_of(guided: Any) -> Constraint | None:
    """guided: a GuidedDecodingParams. Its ``backend`` means nothing here. Returns None if it asks for nothing.

    Raises:
        ValueError: a schema that is no JSON, or a grammar that is none.
    """
    if guided.json is not None:
        schema = json.loads(guided.json) if isinstance(guided.json, str) else guided.json
        return Constraint(alone(json_part(schema, whitespace=guided.whitespace_pattern)))
    if guided.json_object:
        return Constraint(alone(json_part({"type": "object"}, whitespace=guided.whitespace_pattern)))
    if guided.regex is not None:
        return Constraint(alone(regex_part(guided.regex)))
    if guided.choice is not None:
        return Constraint(alone(choice_part(guided.choice)))
    if guided.grammar is not None:
        return Constraint(alone(grammar_part(guided.grammar)))
    return None
