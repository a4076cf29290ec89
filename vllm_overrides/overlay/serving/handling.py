"""What every route does with a request: read its body, answer it, stop when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import uuid4

from fastapi import Request
from starlette.responses import JSONResponse, Response

from vllm.overlay.serving.answer import Answer, failure
from vllm.overlay.serving.anthropic.failure import error_body as anthropic_error
from vllm.overlay.serving.connection import ClientGone, EventStream, TimeIsUp, while_connected
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.limits import read_json, timed_out
from vllm.overlay.serving.service import Service
from vllm.tracing import extract_trace_headers

# nginx's number for a client that left before its answer; nobody reads it.
CLIENT_GONE = 499

Answerer = Callable[..., Coroutine[Any, Any, Answer]]


def error_response(path: str, error: RequestError) -> Response:
    """The error in the form of the API that the path belongs to. path: without what a proxy put before it."""
    body = anthropic_error(error) if path.startswith("/v1/messages") else error.body()
    named = {"X-Request-Id": error.request_id} if error.request_id else {}
    return JSONResponse(body, status_code=error.status, headers={**error.headers, **named})


def service_of(request: Request) -> Service:
    """The Service that the application serves."""
    return request.app.state.service


async def json_body(request: Request) -> Any:
    """The request's JSON body. Raises RequestError for what is too large or no JSON."""
    return await read_json(request, request.app.state.limits)


def new_id() -> str:
    """An id for what goes wrong before an answer has one."""
    return f"req-{uuid4().hex}"


async def _when_available(service: Service, answering: Coroutine[Any, Any, Answer]) -> Answer:
    """What is wrong with a request is said at once; only what can be answered waits for an engine."""
    answer = await answering
    await service.available()
    return answer


async def serve(request: Request, answerer: Answerer) -> Response:
    """The answer to a request that generates, whole or streamed."""
    body = [await json_body(request)]
    place = request.app.state.admission.enter()
    streams = False
    try:
        answer = await _answer(request, answerer, body)
        if answer.options.stream:
            streams = True
            return EventStream(answer.stream(), place.leave, {"X-Request-Id": answer.id})
        try:
            whole = await while_connected(answer.whole(), request.receive)
            return JSONResponse(whole, headers={"X-Request-Id": answer.id})
        except ClientGone:
            raise
        except Exception as error:
            raise failure(error, answer.id) from error
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        if not streams:
            place.leave()


async def _answer(request: Request, answerer: Answerer, body: list[Any]) -> Answer:
    """The answer, ready to be read. body: is emptied, since it may be large, and the answer takes longer."""
    limit_s = request.app.state.limits.timeout_s
    until = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
    try:
        traced = await service_of(request).engine.is_tracing_enabled()
        headers = extract_trace_headers(request.headers) if traced else None
        # Making pictures ready takes seconds.
        answering = answerer(body.pop(), headers)
        answer = await while_connected(_when_available(service_of(request), answering), request.receive, until)
    except ClientGone:
        raise
    except TimeIsUp:
        raise timed_out(limit_s or 0) from None
    except Exception as error:
        raise failure(error, new_id()) from error
    if limit_s is not None and until is not None:
        answer.end_at(until, timed_out(limit_s))
    return answer
