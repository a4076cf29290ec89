"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Send

from vllm.overlay.serving.errors import error_body


class ApiKeys:
    """Lets a request below /v1, or for the reset of the prefix cache, pass only with one of the keys. Plain ASGI: it
    does not stand between stream and client."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        asks = scope["type"] == "http" and scope["method"] != "OPTIONS"
        if asks and self._guarded(scope) and not self._allowed(scope):
            body = error_body("Invalid or missing API key.", "authentication_error", code="invalid_api_key")
            await JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _guarded(self, scope: MutableMapping[str, Any]) -> bool:
        root = scope.get("root_path", "")
        path = scope["path"]
        return (path[len(root):] if root and path.startswith(root) else path).startswith(("/v1", "/reset_prefix_cache"))

    def _allowed(self, scope: MutableMapping[str, Any]) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return any(hmac.compare_digest(given, key) for key in self._expected)
