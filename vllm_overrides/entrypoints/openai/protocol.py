"""Requests that are not refused before they are read, and responses that lose nothing.

A chat request is what the client sent, unchecked: ``vllm.overlay.serving.normalise`` alone says what is served, whether
the request came by HTTP or as a line of a batch file.

Pydantic writes a nested model by the class that the *field* declares, and drops what a subclass adds without a word. So
every class on the way from a response down to what we add is declared again.
"""

import json
from typing import Any, Literal

from pydantic import ConfigDict, SerializerFunctionWrapHandler, ValidationInfo, create_model, field_validator
from pydantic import model_serializer as _model_serializer

from vllm.entrypoints.openai import protocol_stock as _stock

# Stock's fields without their checks. None is a client's silence, for which stock's defaults would not be true.
_Unchecked: Any = create_model("_Unchecked", __base__=_stock.OpenAIBaseModel,
                               **dict.fromkeys(_stock.ChatCompletionRequest.model_fields, (Any, None)))


class ChatCompletionRequest(_Unchecked):
    """The body of a chat request. Any object is one."""

    model_config = ConfigDict(extra="allow")

    def body(self) -> dict[str, Any]:
        """What was sent, fields that nobody knows included."""
        return self.model_dump(exclude_unset=True)


class _Sparse(_stock.OpenAIBaseModel):
    """Writes what was set or is not empty, as our HTTP answers do, and keeps fields that it does not declare."""

    model_config = ConfigDict(extra="allow")

    @_model_serializer(mode="wrap")
    def _set_or_filled(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items()
                if name in self.model_fields_set or value not in (None, [])}


class UsageInfo(_stock.UsageInfo, _Sparse):
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


class ChatMessage(_stock.ChatMessage, _Sparse):
    """The thought is in the one of the two fields that --reasoning-field names."""

    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatCompletionResponseChoice(_stock.ChatCompletionResponseChoice, _Sparse):
    message: ChatMessage


class ChatCompletionResponse(_stock.ChatCompletionResponse, _Sparse):
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo


class DeltaFunctionCall(_stock.DeltaFunctionCall, _Sparse):
    pass


class DeltaToolCall(_stock.DeltaToolCall, _Sparse):
    """Only the first delta of a call has an id and a type; stock makes up new ones for each."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunctionCall | None = None


class DeltaMessage(_stock.DeltaMessage, _Sparse):
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = []


class ChatCompletionResponseStreamChoice(_stock.ChatCompletionResponseStreamChoice, _Sparse):
    delta: DeltaMessage


class ChatCompletionStreamResponse(_stock.ChatCompletionStreamResponse, _Sparse):
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None


class BatchRequestInput(_stock.BatchRequestInput):
    """A line of a batch file. Its url says what its body is."""

    body: ChatCompletionRequest | _stock.EmbeddingRequest

    @field_validator("body", mode="plain")
    @classmethod
    def _body_of_the_url(cls, value: Any, info: ValidationInfo) -> Any:
        kind = _stock.EmbeddingRequest if info.data.get("url") == "/v1/embeddings" else ChatCompletionRequest
        return kind.model_validate(value)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes, **options: Any) -> "BatchRequestInput":
        """Reads JSON as the HTTP route does: pydantic's own reader refuses half an emoji."""
        return cls.model_validate(json.loads(json_data), **options)


class BatchResponseData(_stock.BatchResponseData):
    body: ChatCompletionResponse | _stock.EmbeddingResponse | None = None


class BatchRequestOutput(_stock.BatchRequestOutput):
    response: BatchResponseData | None


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
