"""The page at ``/``: a chat with the served model in one static file, which asks for nothing but this server's API."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

_FILE = Path(__file__).with_name("index.html")


def page_router() -> APIRouter:
    """The route of the page. Raises OSError where its file is not deployed."""
    page = _FILE.read_bytes()
    tag = f'"{hashlib.sha256(page).hexdigest()[:32]}"'
    headers = {
        # Asked for anew each time, and answered with 304 as long as it is the same.
        "Cache-Control": "no-cache", "ETag": tag,
        "Content-Security-Policy": content_security_policy(page.decode()),
        "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.head("/")
    async def web_page(request: Request) -> Response:
        known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    return router


def content_security_policy(page: str) -> str:
    """Only the page's own script and style, by their hashes, and only this server: what a model says can neither run
    nor fetch anything, whatever the page does with it."""
    return "; ".join([
        "default-src 'none'", f"script-src {_hashes(page, 'script')}", f"style-src {_hashes(page, 'style')}",
        "img-src data:", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'"])


def _hashes(page: str, element: str) -> str:
    texts = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
