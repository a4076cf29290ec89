"""A Service for callers who know nothing of ours, such as stock's batch runner: what they cannot say is inferred."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.overlay.serving.parse import parsers_of
from vllm.overlay.serving.pictures.settings import picture_input
from vllm.overlay.serving.service import Service, Settings


def standalone_service(handler: Any, tokenizer: Any, tool_call_parser: str | None,
                       sampling_defaults: Mapping[str, Any], priorities: bool, boundaries: bool) -> Service:
    """handler: our OpenAIServingChat, of whose arguments it is made; tool_call_parser: None = by the tokenizer.

    Thoughts and calls are parsed where the tokenizer has their tokens. priorities, boundaries: whether the engine
    heeds them.
    """
    reasoning, calls = parsers_of(tokenizer.get_vocab())
    model = handler.model_config
    return Service(handler.engine_client, tokenizer, Settings(
        model_names=tuple(path.name for path in handler.base_model_paths),
        model_path=handler.base_model_paths[0].model_path,
        max_model_len=model.max_model_len,
        max_logprobs=model.max_logprobs,
        reasoning_parser=reasoning,
        tool_call_parser=tool_call_parser or calls,
        auto_tools=handler.enable_auto_tools or tool_call_parser is None,
        response_role=handler.response_role,
        chat_template=handler.chat_template,
        sampling_defaults=sampling_defaults,
        tokens_as_ids=handler.return_tokens_as_token_ids,
        log_requests=handler.request_logger is not None,
        priorities=priorities,
        pictures=picture_input(model),
        boundaries=boundaries,
    ))
