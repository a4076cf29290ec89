"""/openapi.json: what the routes take, told from the tables by which requests are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from vllm.overlay.serving import fields
from vllm.overlay.serving.anthropic import request as anthropic
from vllm.overlay.serving.messages import ROLES
from vllm.overlay.serving.normalise import CHAT, COMPLETION
from vllm.overlay.serving.responses import request as responses
from vllm.overlay.serving.translate import SAME

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
# Histories are taken as clients and models wrote them: this says what is refused, which is less than what is right.
_PART: Schema = {"type": "object", "minProperties": 1, "properties": {"type": {"enum": ["text", None]}, "text": {
    "type": ["string", "null"]}}}
_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, _PART]}}]}
_BLOCK_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {**_PART, "required": ["type"], "properties": {
    **_PART["properties"], "type": {"enum": ["text"]}}}}]}
_CALL: Schema = {"type": "object", "required": ["function"], "properties": {
    "id": {}, "type": {}, "function": {"type": "object", "required": ["name"], "properties": {
        "name": _TEXT, "arguments": {}}}}}
_CALLS: Schema = {"anyOf": [{"type": "array", "items": _CALL}, {"enum": [None, "", {}, 0, False]}]}


def _message(roles: Sequence[str], content: Schema = _CONTENT, required: Sequence[str] = (), **more: Schema) -> Schema:
    return {"type": "object", "required": ["role", *required],
            "properties": {"role": {"enum": list(roles)}, "content": content, **more}}


_SILENT: Schema = {"anyOf": [_CONTENT, {"type": "null"}]}
_MESSAGES: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": [
    _message([role for role in ROLES if role in ("system", "developer", "user")], required=["content"]),
    _message(["assistant"], _SILENT, tool_calls=_CALLS),
    _message(["tool", "function"], _SILENT, tool_call_id={})]}}
_INPUT: Schema = {"anyOf": [{**_TEXT, "minLength": 1}, {"type": "array", "minItems": 1, "items": {"anyOf": [
    _message(["user", "system", "developer"], required=["content"]), _message(["assistant"], _SILENT)]}}]}
_BLOCKS: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": [
    _message(["user"], _BLOCK_CONTENT, ["content"]),
    _message(["assistant"], {"anyOf": [_BLOCK_CONTENT, {"type": "null"}]})]}}
_ERROR: Schema = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type"], "properties": {"message": _TEXT, "type": _TEXT}}}}

_SHARED = {name: CHAT[name] for name in SAME if name in CHAT}
_CHATS = (CHAT, {"messages": _MESSAGES}, ("messages",))
_RESPONSES = ({**_SHARED, **responses.FIELDS}, {"input": _INPUT}, ("input",))
# Its name there is stop_sequences, and only that is read.
_MESSAGE_FIELDS = {name: check for name, check in {**_SHARED, **anthropic.FIELDS}.items() if name != "stop"}
_OF_MESSAGES: Mapping[str, Schema] = {"messages": _BLOCKS, "system": fields.optional(_CONTENT)}
Body = tuple[Mapping[str, fields.Check], Mapping[str, Schema], Sequence[str]]


def _bodies(vocabulary: int) -> Mapping[str, Body]:
    """Path -> checks of its fields, schemas of those that checks do not tell of, what must be there beside the model.
    """
    tokens: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": vocabulary - 1}}
    some = {**tokens, "minItems": 1}
    prompt: Schema = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _TEXT}, some,
                                {"type": "array", "minItems": 1, "items": some}]}
    return {
        "/v1/chat/completions": _CHATS,
        "/v1/chat/completions/render": _CHATS,
        "/v1/completions": (COMPLETION, {"prompt": prompt}, ("prompt",)),
        "/v1/responses": _RESPONSES,
        "/v1/responses/input_tokens": _RESPONSES,
        "/v1/messages": (_MESSAGE_FIELDS, _OF_MESSAGES, ("messages", "max_tokens")),
        "/v1/messages/count_tokens": (_MESSAGE_FIELDS, _OF_MESSAGES, ("messages",)),
        "/tokenize": ({"add_special_tokens": fields.flag, "return_token_strs": fields.flag}, {"prompt": _TEXT},
                      ("prompt",)),
        "/detokenize": ({}, {"tokens": tokens}, ("tokens",)),
    }


_NEED_NO_MODEL = ("/tokenize", "/detokenize")
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_REFUSALS = {400: "A field is wrong; the error names it.", 401: "No valid API key.",
             404: "There is no such route or model.", 413: "The body is too large.",
             429: "Too many requests are under way; Retry-After says when to come again.",
             500: "The request failed; the error names an id.", 503: "There is no engine just now.",
             504: "The request was not finished in time."}


def document(app: FastAPI, model_names: Sequence[str], max_model_len: int, vocabulary: int) -> Schema:
    """The OpenAPI document of a server. max_model_len: the limit of what may be asked for, in tokens; vocabulary: how
    many of them there are."""
    bodies = _bodies(vocabulary)
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    model: Schema = {"enum": list(model_names)}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            # A prompt or answer that is too long, or a key that is missing, can be the end of any request.
            operation["responses"].update({str(status): {"description": why, "content": {
                "application/json": {"schema": _ERROR}}} for status, why in _REFUSALS.items()})
            if path == "/health":
                del operation["responses"]["200"]["content"]
            if path in bodies:
                operation["requestBody"] = {"required": True, "content": {
                    "application/json": {"schema": _body(path, bodies[path], model, max_model_len)}}}
            if path in _STREAMED:
                operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return made


def _body(path: str, body: Body, model: Schema, max_model_len: int) -> Schema:
    checks, own, required = body
    # Where nothing is generated, nobody asks whether it would fit.
    most = max_model_len if path in _STREAMED else None
    properties = {name: fields.schema_of(check) for name, check in checks.items()}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if name in properties:
            first = 0 if name == "min_tokens" else 1
            properties[name] = fields.schema_of(fields.integer(first, most))
    if "max_tokens" in required:
        properties["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": most}
    needs_model = () if path in _NEED_NO_MODEL else ("model",)
    model = model if needs_model else fields.optional(model)
    return {"type": "object", "required": [*needs_model, *required],
            "properties": {**properties, **own, "model": model}}
