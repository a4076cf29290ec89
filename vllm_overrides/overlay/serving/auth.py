"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Send

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.handling import error_response

_GUARDED = ("/v1", "/reset_prefix_cache")


class ApiKeys:
    """Lets a request below /v1, or for the reset of the prefix cache, pass only with one of the keys. Plain ASGI: it
    does not stand between stream and client."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [key.encode() for key in keys]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        path = get_route_path(scope) if scope["type"] == "http" else ""
        if path.startswith(_GUARDED) and scope["method"] != "OPTIONS" and not self._allowed(scope):
            error = RequestError("Invalid or missing API key.", code="invalid_api_key", status=401,
                                 kind="authentication_error")
            error.headers = {"WWW-Authenticate": "Bearer"}
            await error_response(path, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: MutableMapping[str, Any]) -> bool:
        given = []
        for name, value in scope["headers"]:
            scheme, _, key = value.partition(b" ")
            if name == b"authorization" and scheme.lower() == b"bearer":
                given.append(key.strip())
            elif name == b"x-api-key":
                # As Anthropic's clients send it.
                given.append(value.strip())
        return any(hmac.compare_digest(one, key) for one in given for key in self._expected)
