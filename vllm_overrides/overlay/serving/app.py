"""The HTTP application: routes, and every failure as an OpenAI error object."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
from argparse import Namespace
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

import vllm.envs as envs
from vllm.entrypoints.openai import api_server_stock
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_engine import BaseModelPath
from vllm.logger import init_logger
from vllm.overlay.serving import models, tokens
from vllm.overlay.serving.answer import failure
from vllm.overlay.serving.auth import ApiKeys
from vllm.overlay.serving.chat import ChatAnswer
from vllm.overlay.serving.completions import CompletionAnswer, completion_answer
from vllm.overlay.serving.connection import ClientGone, EventStream, while_connected
from vllm.overlay.serving.errors import INVALID_REQUEST, SERVER_ERROR, RequestError, error_body
from vllm.overlay.serving.service import Service
from vllm.tracing import extract_trace_headers
from vllm.version import __version__

logger = init_logger(__name__)
router = APIRouter()
# Served with --enable-reset-prefix-cache only.
reset_router = APIRouter()
# nginx's number for a client that left before its answer; nobody reads it.
_CLIENT_GONE = 499

Answerer = Callable[..., Coroutine[Any, Any, ChatAnswer | CompletionAnswer]]


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


async def _serve(request: Request, answerer: Answerer) -> Response:
    traced = await service_of(request).engine.is_tracing_enabled()
    headers = extract_trace_headers(request.headers) if traced else None
    try:
        # Making pictures ready takes seconds. No name holds the body: it may be large, and the answer takes longer.
        answer = await while_connected(answerer(await json_body(request), headers), request.receive)
    except ClientGone:
        return Response(status_code=_CLIENT_GONE)
    if answer.options.stream:
        return EventStream(answer.stream())
    try:
        return JSONResponse(await while_connected(answer.whole(), request.receive))
    except ClientGone:
        return Response(status_code=_CLIENT_GONE)
    except Exception as error:
        raise failure(error, answer.id) from error


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation."""
    return await _serve(request, request.app.state.openai_serving_chat.answer)


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue a text."""
    return await _serve(request, functools.partial(completion_answer, service_of(request)))


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The names that this server's one model is served under."""
    return JSONResponse(models.listing(service_of(request).settings))


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """One of them."""
    service_of(request).check_model(name)
    return JSONResponse(models.card(service_of(request).settings, name))


@router.get("/version")
async def version() -> Response:
    """The version of the vLLM underneath."""
    return JSONResponse({"version": __version__})


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """200 while the engine lives. The server listens only after it has produced a token, so before that nobody can
    ask."""
    failed = request.app.state.failed
    try:
        # The client alone would notice after its next heartbeat.
        if failed is not None and failed.done():
            raise RuntimeError(failed.result())
        await service_of(request).engine.check_health()
    except Exception as error:
        return JSONResponse(error_body(f"The engine is not well: {error}", SERVER_ERROR, code="unhealthy"),
                            status_code=503)
    return Response(status_code=200)


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt or of a conversation."""
    return JSONResponse(await tokens.tokenize(service_of(request), await json_body(request)))


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    return JSONResponse(await tokens.detokenize(service_of(request), await json_body(request)))


@reset_router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every prefix that was computed; requests under way go on. 200 when it is done."""
    await service_of(request).engine.reset_prefix_cache()
    return Response(status_code=200)


def build_app(args: Namespace) -> FastAPI:
    """The application for parsed command line arguments; ``app.state`` is filled by ``init_app_state``."""
    hidden: dict[str, Any] = {"openapi_url": None, "docs_url": None,
                              "redoc_url": None} if args.disable_fastapi_docs else {}
    app = FastAPI(title="vLLM", version=__version__, lifespan=api_server_stock.lifespan, **hidden)
    app.include_router(router)
    if args.enable_reset_prefix_cache:
        app.include_router(reset_router)
    app.root_path = args.root_path or ""
    api_server_stock.mount_metrics(app)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_exception)
    for path in args.middleware:
        _add_middleware(app, path)
    keys = [key for key in (envs.VLLM_API_KEY, args.api_key) if key]
    if keys:
        app.add_middleware(ApiKeys, keys=keys)
    app.add_middleware(CORSMiddleware, allow_origins=args.allowed_origins, allow_credentials=args.allow_credentials,
                       allow_methods=args.allowed_methods, allow_headers=args.allowed_headers)
    return app


def init_app_state(state: State, service: Service, model_config: Any, log_stats: bool = True,
                   failed: asyncio.Future[str] | None = None) -> None:
    """What the routes find under ``app.state``. model_config: the engine's. failed: done, with the reason, once the
    engine is gone."""
    settings = service.settings
    state.service = service
    state.failed = failed
    state.engine_client = service.engine
    state.log_stats = log_stats
    state.openai_serving_chat = OpenAIServingChat(
        service.engine, model_config, [BaseModelPath(name, settings.model_path) for name in settings.model_names],
        settings.response_role, lora_modules=None, prompt_adapters=None, request_logger=None, service=service)


def _add_middleware(app: FastAPI, path: str) -> None:
    module, name = path.rsplit(".", 1)
    middleware: Any = getattr(importlib.import_module(module), name)
    if isinstance(middleware, type):
        add: Any = app.add_middleware
        add(middleware)
    elif inspect.iscoroutinefunction(middleware):
        app.middleware("http")(middleware)
    else:
        raise ValueError(f"--middleware {path} is neither a class nor a coroutine function")


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    logger.info("%d for %s %s: %.300s", error.status, request.method, request.url.path, error.message)
    return JSONResponse(error.body(), status_code=error.status)


async def _on_client_gone(_: Request, _error: Exception) -> Response:
    """A client that left while it sent its body: no fault of the server's, so nothing is logged."""
    return Response(status_code=_CLIENT_GONE)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(step) for step in first["loc"] if step != "body") or None
    return JSONResponse(error_body(f"{param or 'body'}: {first['msg']}", param=param, code="invalid_value"),
                        status_code=400)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_body(message, INVALID_REQUEST, code=None), status_code=error.status_code,
                        headers=error.headers)


async def _on_exception(request: Request, error: Exception) -> Response:
    wrapped = failure(error, f"{request.method} {request.url.path}")
    return JSONResponse(wrapped.body(), status_code=wrapped.status)
