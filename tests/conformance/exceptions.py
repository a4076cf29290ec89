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
