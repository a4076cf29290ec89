"""POST /tokenize, /detokenize and /v1/chat/completions/render, in vLLM's form."""

from __future__ import annotations

from typing import Any

from vllm.overlay.serving import fields
from vllm.overlay.serving.errors import missing
from vllm.overlay.serving.lanes import off_loop
from vllm.overlay.serving.normalise import normalise_chat
from vllm.overlay.serving.options import Options
from vllm.overlay.serving.prepare import rendered
from vllm.overlay.serving.service import Service


async def tokenize(service: Service, body: Any) -> dict[str, Any]:
    """Of ``{"model", "prompt"}`` or of a chat request: what generation would read. Raises RequestError."""
    strings = isinstance(body, dict) and fields.read(body, {"return_token_strs": fields.flag})
    if isinstance(body, dict) and body.get("messages") is not None:
        chat = await off_loop(normalise_chat, {"model": service.settings.model_names[0], **body})
        prompt, _ = await rendered(service, chat)
    else:
        found = fields.read(fields.mapping(body, "body"), {"model": fields.text, "add_special_tokens": fields.flag})
        service.check_model(found.get("model", service.settings.model_names[0]))
        if body.get("prompt") is None:
            raise missing("prompt")
        options = Options(add_special_tokens=found.get("add_special_tokens", True))
        prompt = await service.renderer.completion(fields.text(body["prompt"], "prompt"), options)
    shown = {"token_strs": service.token_strings(prompt.token_ids)} if (
        strings and strings.get("return_token_strs")) else {"token_strs": None}
    return {"count": len(prompt.token_ids), "max_model_len": service.settings.max_model_len,
            "tokens": prompt.token_ids, **shown}


async def render(service: Service, body: Any) -> dict[str, Any]:
    """The prompt of a chat request, as generation would read it. Raises RequestError."""
    prompt, _ = await rendered(service, await off_loop(normalise_chat, body))
    return {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}


async def detokenize(service: Service, body: Any) -> dict[str, Any]:
    """Of ``{"model", "tokens"}``. Raises RequestError."""
    found = await off_loop(fields.read, fields.mapping(body, "body"), {"model": fields.text})
    service.check_model(found.get("model", service.settings.model_names[0]))
    if body.get("tokens") is None:
        raise missing("tokens")
    # The one field there is: an empty list is the text "", other empty things are mistakes.
    check = fields.list_of(fields.integer(0, service.vocab_size - 1))
    prompt = await service.renderer.completion(await off_loop(check, body["tokens"], "tokens"), Options())
    return {"prompt": prompt.text}
