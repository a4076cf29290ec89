"""Stock's chat handler over vllm.overlay.serving: our route, and stock's batch runner, get their answers here."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Request

from vllm.entrypoints.openai import serving_chat_stock as _stock
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ChatCompletionResponse, ErrorResponse
from vllm.overlay.model.generation_defaults import get_default_sampling_params
from vllm.overlay.serving.answer import failure
from vllm.overlay.serving.boundaries import wants_boundaries
from vllm.overlay.serving.chat import ChatAnswer, chat_answer
from vllm.overlay.serving.connection import ClientGone, while_connected
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.service import Service
from vllm.overlay.serving.standalone import standalone_service
from vllm.tracing import extract_trace_headers


class OpenAIServingChat(_stock.OpenAIServingChat):
    """Answers chat requests from a Service: the server's own, or one made of stock's arguments."""

    def __init__(self, *args: Any, service: Service | None = None, chat_template: str | None = None,
                 enable_auto_tools: bool = False, tool_parser: str | None = None, **kwargs: Any) -> None:
        """Stock's arguments; service: what answers, and then decides on template, tools and the rest.

        Raises ValueError for adapters, an unreadable chat template, a broken generation_config.json.
        """
        # Stock would look tool_parser up among its own; ours are not there.
        super().__init__(*args, chat_template=None if service else chat_template, **kwargs)
        if self.lora_requests or self.prompt_adapter_requests:
            raise ValueError("LoRA modules and prompt adapters are not served here")
        self.enable_auto_tools = enable_auto_tools
        self._tool_parser_name = tool_parser
        self._service = service
        self._sampling_defaults = {} if service else get_default_sampling_params(self.model_config)

    async def answer(self, body: Any, trace_headers: Mapping[str, str] | None = None) -> ChatAnswer:
        """The answer under way to a request's JSON body. Raises RequestError for what cannot be served."""
        if self._service is None:
            client = self.engine_client
            tokenizer = await client.get_tokenizer()
            # Only the engine in this process can be asked.
            scheduler = await client.get_scheduler_config() if hasattr(client, "get_scheduler_config") else None
            engine = getattr(client, "engine", None)
            # A batch asks for all its lines at once, and all of them have waited here.
            self._service = self._service or standalone_service(
                self, tokenizer, self._tool_parser_name, self._sampling_defaults,
                priorities=getattr(scheduler, "policy", None) == "priority",
                boundaries=engine is not None and wants_boundaries(self.model_config, engine.cache_config))
        return await chat_answer(self._service, body, trace_headers)

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """The answer in stock's types; a stream as text of server-sent events. Raises nothing that stock does not."""
        try:
            headers = None
            if raw_request is not None and await self.engine_client.is_tracing_enabled():
                headers = extract_trace_headers(raw_request.headers)
            answer = await self.answer(request.body(), headers)
        except Exception as error:
            return _error(failure(error, "(no id yet)"))
        if answer.options.stream:
            return _texts(answer.stream())
        try:
            whole = answer.whole()
            body = await (whole if raw_request is None else while_connected(whole, raw_request.receive))
        except ClientGone:
            return self.create_error_response("Client disconnected")
        except Exception as error:
            return _error(failure(error, answer.id))
        return ChatCompletionResponse.model_validate(body)


async def _texts(events: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    async with aclosing(events) as open_events:  # type: ignore[type-var]
        async for event in open_events:
            yield event.decode()


def _error(error: RequestError) -> ErrorResponse:
    return ErrorResponse(message=error.message, type=error.kind, param=error.param, code=error.status)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
