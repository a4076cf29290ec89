"""What every route does with a request: read its body, answer it, stop when the client has gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from vllm.overlay.serving.answer import Answer, failure
from vllm.overlay.serving.anthropic.failure import error_body as anthropic_error
from vllm.overlay.serving.connection import ClientGone, EventStream, while_connected
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.service import Service
from vllm.tracing import extract_trace_headers

# nginx's number for a client that left before its answer; nobody reads it.
CLIENT_GONE = 499

Answerer = Callable[..., Coroutine[Any, Any, Answer]]


def error_response(path: str, error: RequestError) -> Response:
    """The error in the form of the API that the path belongs to. path: without what a proxy put before it."""
    body = anthropic_error(error) if path.startswith("/v1/messages") else error.body()
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def service_of(request: Request) -> Service:
    """The Service that the application serves."""
    return request.app.state.service


async def json_body(request: Request) -> Any:
    """The request's JSON body, whatever Content-Type says. Raises RequestError for what is not JSON."""
    raw = await request.body()
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from None


async def serve(request: Request, answerer: Answerer) -> Response:
    """The answer to a request that generates, whole or streamed."""
    traced = await service_of(request).engine.is_tracing_enabled()
    headers = extract_trace_headers(request.headers) if traced else None
    try:
        # Making pictures ready takes seconds. No name holds the body: it may be large, and the answer takes longer.
        answer = await while_connected(answerer(await json_body(request), headers), request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    if answer.options.stream:
        return EventStream(answer.stream())
    try:
        return JSONResponse(await while_connected(answer.whole(), request.receive))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    except Exception as error:
        raise failure(error, answer.id) from error


