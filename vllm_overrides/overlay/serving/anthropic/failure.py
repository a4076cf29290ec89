"""Errors in Anthropic's form: ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""

from __future__ import annotations

from typing import Any

from vllm.overlay.serving.errors import PromptTooLong, RequestError

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
          504: "timeout_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """The JSON object of a failed request, or of an ``error`` event."""
    message = error.message
    if isinstance(error, PromptTooLong):
        # What clients look for before they shorten the conversation and try again.
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context} maximum"
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": error.request_id}
