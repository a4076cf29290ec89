"""Parsers by the names of --reasoning-parser and --tool-call-parser, and the machine that uses them (``output``).

Both name one family of formats, of which there is one so far; a parser here is the set of control tokens it needs.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm.overlay.serving.parse.markers import CALL, END_CALL, END_THINK, THINK

REASONING_PARSERS: Mapping[str, tuple[str, ...]] = {"qwen3": (THINK, END_THINK)}
# qwen3_xml is what newer vLLM calls the same format.
TOOL_CALL_PARSERS: Mapping[str, tuple[str, ...]] = {"qwen3_coder": (CALL, END_CALL), "qwen3_xml": (CALL, END_CALL)}


def missing_tokens(vocabulary: Mapping[str, int], reasoning: str | None, tool_calls: str | None) -> list[str]:
    """The control tokens that the chosen parsers need and the vocabulary does not have. Names: None = no parser."""
    needed = REASONING_PARSERS.get(reasoning or "", ()) + TOOL_CALL_PARSERS.get(tool_calls or "", ())
    return [token for token in needed if token not in vocabulary]


def parsers_of(vocabulary: Mapping[str, int]) -> tuple[str | None, str | None]:
    """Names of the reasoning and the tool call parser whose control tokens the vocabulary has, or None."""
    reasoning = next((name for name in REASONING_PARSERS if not missing_tokens(vocabulary, name, None)), None)
    calls = next((name for name in TOOL_CALL_PARSERS if not missing_tokens(vocabulary, None, name)), None)
    return reasoning, calls
