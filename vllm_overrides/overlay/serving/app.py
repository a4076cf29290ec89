"""The HTTP application: routes, and every failure as an OpenAI error object."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette._utils import get_route_path
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

import vllm.envs as envs
from vllm.entrypoints.openai import api_server_stock
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_engine import BaseModelPath
from vllm.overlay.serving import models, openapi, tokens
from vllm.overlay.serving.answer import failure
from vllm.overlay.serving.anthropic.answer import count_tokens, messages_answer
from vllm.overlay.serving.auth import ApiKeys
from vllm.overlay.serving.completions import completion_answer
from vllm.overlay.serving.connection import ClientGone, while_connected
from vllm.overlay.serving.errors import SERVER_ERROR, RequestError, error_body
from vllm.overlay.serving.handling import CLIENT_GONE, error_response, json_body, new_id, serve, service_of
from vllm.overlay.serving.limits import Admission, Limits
from vllm.overlay.serving.page import page_router
from vllm.overlay.serving.request_log import log_refusal
from vllm.overlay.serving.responses.answer import input_tokens, responses_answer
from vllm.overlay.serving.service import Service
from vllm.version import __version__

router = APIRouter()
# Served with --enable-reset-prefix-cache only.
reset_router = APIRouter()
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation."""
    return await serve(request, request.app.state.openai_serving_chat.answer)


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue a text."""
    return await serve(request, functools.partial(completion_answer, service_of(request)))


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Continue a conversation, in OpenAI's newer form."""
    return await serve(request, functools.partial(responses_answer, service_of(request)))


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request) -> Response:
    """The length of a response's prompt."""
    return JSONResponse(await input_tokens(service_of(request), await json_body(request)))


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Continue a conversation, in Anthropic's form."""
    return await serve(request, functools.partial(messages_answer, service_of(request)))


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(request: Request) -> Response:
    """The length of a message's prompt."""
    return JSONResponse(await count_tokens(service_of(request), await json_body(request)))


@router.post("/v1/chat/completions/render")
async def render_chat_completion(request: Request) -> Response:
    """What a chat request's generation would begin with."""
    return JSONResponse(await tokens.render(service_of(request), await json_body(request)))


@router.get("/v1/models")
@router.head("/v1/models", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """The names that this server's one model is served under."""
    return JSONResponse(models.listing(service_of(request).settings))


@router.get("/v1/models/{name:path}")
@router.head("/v1/models/{name:path}", include_in_schema=False)
async def get_model(request: Request, name: str) -> Response:
    """One of them."""
    service_of(request).check_model(name)
    return JSONResponse(models.card(service_of(request).settings, name))


@router.get("/version")
@router.head("/version", include_in_schema=False)
async def version() -> Response:
    """The version of the vLLM underneath."""
    return JSONResponse({"version": __version__})


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 while there is an engine that has produced a token. The server listens only after that, so before nobody can
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
    try:
        await while_connected(service_of(request).engine.reset_prefix_cache(), request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    except Exception as error:
        raise failure(error, new_id()) from error
    return Response(status_code=200)


def build_app(args: Namespace) -> FastAPI:
    """The application for parsed command line arguments; ``app.state`` is filled by ``init_app_state``."""
    hidden: dict[str, Any] = {"openapi_url": None, "docs_url": None,
                              "redoc_url": None} if args.disable_fastapi_docs else {}
    app = FastAPI(title="vLLM", version=__version__, lifespan=api_server_stock.lifespan, **hidden)
    app.include_router(router)
    if args.enable_reset_prefix_cache:
        app.include_router(reset_router)
    if not args.disable_web_page:
        app.include_router(page_router())
    app.openapi = lambda: openapi.document(  # type: ignore[method-assign]
        app, app.state.service.settings.model_names, app.state.service.settings.max_model_len,
        app.state.service.vocab_size)
    app.root_path = args.root_path or ""
    app.state.limits = Limits.of(args)
    app.state.admission = Admission(app.state.limits)
    api_server_stock.mount_metrics(app)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_exception)
    for path in args.middleware:
        _add_middleware(app, path)
    keys = [key for key in (envs.VLLM_API_KEY, *(args.api_key or ())) if key]
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
    log_refusal(request.method, request.url.path, error.status, error.message, code=error.code, param=error.param,
                id=error.request_id)
    return error_response(get_route_path(request.scope), error)


async def _on_client_gone(_: Request, _error: Exception) -> Response:
    """A client that left while it sent its body: no fault of the server's, so nothing is logged."""
    return Response(status_code=CLIENT_GONE)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(step) for step in first["loc"] if step != "body") or None
    return await _on_request_error(request, RequestError(f"{param or 'body'}: {first['msg']}", param=param))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = get_route_path(request.scope)
    why = str(error.detail)
    if error.status_code == 404:
        # What is there is said, for a base URL that is a little wrong, and for APIs that need another kind of model.
        why = f"there is no such route; this server generates text at {', '.join(GENERATING)}."
    told = RequestError(f"{request.method} {path}: {why}", code="unknown_url" if error.status_code == 404 else None,
                        status=error.status_code)
    told.headers = dict(error.headers or {})
    if error.status_code == 405:
        # Starlette names the methods of the first route that fits only; GET and HEAD are two.
        told.headers["Allow"] = ", ".join(sorted({
            method for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE
            for method in getattr(route, "methods", None) or ()}))
    return error_response(path, told)


async def _on_exception(request: Request, error: Exception) -> Response:
    path = get_route_path(request.scope)
    return error_response(path, failure(error, new_id()))
