"""What goes wrong with a request, in OpenAI's error shape."""

from __future__ import annotations

from typing import Any

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


def error_body(message: str, kind: str = INVALID_REQUEST, param: str | None = None,
               code: str | None = None) -> dict[str, Any]:
    """The JSON object of a failed request: ``{"error": {"message", "type", "param", "code"}}``."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class RequestError(Exception):
    """A request that cannot be served, by the client's fault (4xx) or by ours (5xx).

    param is the path of the field at fault, as in ``messages[2].content``; code is OpenAI's machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = "invalid_value",
                 status: int = 400, kind: str = INVALID_REQUEST) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind
        self.request_id: str | None = None
        self.headers: dict[str, str] = {}

    def body(self) -> dict[str, Any]:
        """The response's JSON object."""
        return error_body(self.message, self.kind, self.param, self.code)


class PromptTooLong(RequestError):
    """The prompt leaves no room for an answer. Lengths in tokens; at_least: the prompt has more."""

    def __init__(self, prompt_tokens: int, context: int, param: str, at_least: bool = False) -> None:
        super().__init__(f"This model's maximum context length is {context} tokens, but the request's {param} hold "
                         f"{'at least ' * at_least}{prompt_tokens} tokens, which leaves no room for an answer. "
                         "Please shorten them.", param=param, code="context_length_exceeded")
        self.prompt_tokens = prompt_tokens
        self.context = context


def missing(param: str) -> RequestError:
    """A field that must be there is not."""
    return RequestError(f"Missing required field: {param}.", param=param, code="missing_required_parameter")


def wrong_type(param: str, expected: str, value: Any) -> RequestError:
    """A known field holds a JSON value of another type than it may."""
    return RequestError(f"Invalid type for {param}: expected {expected}, got {json_type(value)}.",
                        param=param, code="invalid_type")


def not_supported(param: str, why: str) -> RequestError:
    """A field that we understand and cannot serve."""
    return RequestError(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def json_type(value: Any) -> str:
    """The JSON name of a value's type, with the value where it is short: what an error message shows."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean {str(value).lower()}"
    if isinstance(value, (int, float)):
        return f"number {value!r:.30}"
    if isinstance(value, str):
        return f"string {value!r}" if len(value) <= 40 else "a string"
    return "an array" if isinstance(value, list) else "an object"


class StartError(Exception):
    """Why a server cannot start or go on, in one line for the person who started it."""


def one_line(error: BaseException) -> str:
    """An exception's message as one line; with its type where the message alone says little."""
    message = " ".join(str(error).split())
    # Stock ends this one with the names of all architectures it knows.
    message = message.partition(" Supported architectures:")[0]
    if isinstance(error, (KeyError, AssertionError, IndexError)) or not message:
        message = f"{type(error).__name__}: {message}"
    return message if len(message) <= 600 else message[:600] + " ..."
