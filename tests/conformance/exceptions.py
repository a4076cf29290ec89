"""What third-party suites say against our server, and why it stays so."""

from __future__ import annotations

# Case: beginnings of the errors that are excepted.
#
# The suite checks streams by the Open Responses specification, which names the deltas of a thought
# `response.reasoning.delta`. OpenAI's API, its clients' types and vLLM name them `response.reasoning_text.delta`, and
# drop events that they do not know: by the specification's name no client would show a thought.
_REASONING_TEXT = ("unknown SSE event type: response.reasoning_text.",)
LLM_COMPLY: dict[str, tuple[str, ...]] = {
    "streaming-response": _REASONING_TEXT,
    "streaming-usage": _REASONING_TEXT,
}

# Path: checks of schemathesis that are not made there.
#
# That all valid data is accepted holds for a body that one schema describes. Where fields have rules with one another
# (min_tokens and max_tokens, n and best_of, stream and stream_options, tools and tool_choice, a prompt and the limits),
# or hold a language of their own (schemas of tools, grammars, templates), the document says less than the server
# checks; each field by itself is tested in tests/entrypoints/test_openapi.py.
_MORE_THAN_A_SCHEMA = ("positive_data_acceptance",)
SCHEMATHESIS: dict[str, tuple[str, ...]] = dict.fromkeys((
    "/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/v1/responses",
    "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"), _MORE_THAN_A_SCHEMA)
