"""JSON body -> a typed request. Everything that clients are known to send is accepted here or refused by name.

Unknown fields are ignored; null and empty optional fields are as absent; a known field of a wrong type or out of
range is a RequestError (400) that names it. Nothing below this module sees the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.overlay.serving import fields
from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.messages import normalise_messages
from vllm.overlay.serving.options import MOST_CHOICES, SHARED, Options, read_options, token_ids, truncation
from vllm.overlay.serving.pictures.source import PictureSource
from vllm.overlay.serving.structured import Structure, read_structure
from vllm.overlay.serving.thinking import thinking_budget, thinking_switch
from vllm.overlay.serving.tools import ToolChoice, Tools, normalise_functions, normalise_tool_choice, normalise_tools

# Of all prompts of a completion together: each costs memory before the first one is computed.
_MOST_ANSWERS = 16 * MOST_CHOICES
# What a template is called with anyway; a request may not replace these through chat_template_kwargs.
_TEMPLATE_OWN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
                 "tokenize", "chat_template")


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to continue. pictures: of the messages, in order. thinking: None where the request leaves it to
    the template. show_thought, show_prompt: whether the answer holds the thought, and the prompt's text. structure:
    what form the answer must have. thinking_budget: how many tokens a thought may have, None for any number."""

    model: str
    messages: list[dict[str, Any]]
    pictures: tuple[PictureSource, ...]
    options: Options
    tools: Tools
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    thinking: bool | None
    template_kwargs: Mapping[str, Any]
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    echo: bool
    show_thought: bool = True
    show_prompt: bool = False
    structure: Structure | None = None
    thinking_budget: int | None = None


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts (text or token ids) to continue, each with ``options.n`` choices."""

    model: str
    prompts: list[str | list[int]]
    options: Options
    echo: bool
    structure: Structure | None = None


CHAT: dict[str, fields.Check] = {
    **SHARED,
    "messages": fields.anything,
    "logprobs": fields.flag,
    "top_logprobs": fields.integer(0),
    "tools": fields.anything,
    "tool_choice": fields.anything,
    "parallel_tool_calls": fields.flag,
    "functions": fields.anything,
    "function_call": fields.anything,
    "modalities": fields.list_of(fields.one_of("text", "audio")),
    "include_reasoning": fields.flag,
    "reasoning": fields.mapping,
    "reasoning_effort": fields.anything,
    "thinking": fields.anything,
    "enable_thinking": fields.anything,
    "chat_template": fields.text,
    "chat_template_kwargs": fields.mapping,
    "preserve_thinking": fields.flag,
    "thinking_token_budget": fields.anything,
    "thinking_budget": fields.anything,
    "return_prompt_text": fields.flag,
    "add_generation_prompt": fields.flag,
    "continue_final_message": fields.flag,
    "echo": fields.flag,
}

COMPLETION: dict[str, fields.Check] = {
    **SHARED,
    "prompt": fields.anything,
    "logprobs": fields.integer(0),
    "echo": fields.flag,
    "suffix": fields.text,
}


def normalise_chat(body: Any) -> ChatRequest:
    """The body of /v1/chat/completions as a ChatRequest."""
    body = _object(body)
    found = fields.read(body, CHAT)
    messages, pictures = normalise_messages(body.get("messages"))
    tools, tool_choice = _tools(found)
    template_kwargs = found.get("chat_template_kwargs", {})
    if "preserve_thinking" in found:
        template_kwargs = {"preserve_thinking": found["preserve_thinking"], **template_kwargs}
    if "audio" in found.get("modalities", ()):
        raise not_supported("modalities", "this server answers with text.")
    shown = fields.read(found.get("reasoning", {}), {"exclude": fields.flag}, "reasoning.")
    continue_final = found.get("continue_final_message", False)
    if continue_final and found.get("add_generation_prompt"):
        raise RequestError("continue_final_message and add_generation_prompt cannot both be true.",
                           param="continue_final_message")
    if continue_final and not isinstance(messages[-1]["content"], str):
        raise not_supported("continue_final_message", "the last message holds pictures.")
    if pictures and truncation(found.get("truncate_prompt_tokens")):
        raise not_supported("truncate_prompt_tokens", "the messages hold pictures, which cannot be cut.")
    return ChatRequest(
        model=_model(found),
        messages=messages,
        pictures=pictures,
        options=read_options(found, max_tokens=None, logprobs=_chat_logprobs(found), add_special_tokens=False),
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=found.get("parallel_tool_calls", True),
        thinking=thinking_switch(found, template_kwargs),
        template_kwargs={k: v for k, v in template_kwargs.items() if k not in _TEMPLATE_OWN},
        chat_template=found.get("chat_template"),
        add_generation_prompt=found.get("add_generation_prompt", not continue_final),
        continue_final_message=continue_final,
        echo=found.get("echo", False),
        show_thought=found.get("include_reasoning", not shown.get("exclude", False)),
        show_prompt=found.get("return_prompt_text", False),
        structure=read_structure(body),
        thinking_budget=thinking_budget(body),
    )


def _tools(found: Mapping[str, Any]) -> tuple[Tools, ToolChoice]:
    """tools and tool_choice, or what came before them: functions and function_call."""
    if "tools" in found or "functions" not in found:
        tools = normalise_tools(found.get("tools", []))
        return tools, normalise_tool_choice(found.get("tool_choice"), tools)
    tools = normalise_functions(found["functions"])
    return tools, normalise_tool_choice(found.get("function_call"), tools, "function_call")


def normalise_completion(body: Any) -> CompletionRequest:
    """The body of /v1/completions as a CompletionRequest. max_tokens is 16 unless given, as OpenAI documents."""
    body = _object(body)
    found = fields.read(body, COMPLETION)
    if "suffix" in found:
        raise not_supported("suffix", "the model writes only forward.")
    echo = found.get("echo", False)
    options = read_options(found, max_tokens=16, logprobs=found.get("logprobs"), add_special_tokens=True,
                       least=0 if echo else 1)
    prompts = _prompts(body.get("prompt"))
    if len(prompts) * options.samples > _MOST_ANSWERS:
        raise RequestError(f"{len(prompts)} prompts with {options.samples} answers each are more than the "
                           f"{_MOST_ANSWERS} that one request may ask for.", param="prompt")
    return CompletionRequest(_model(found), prompts, options, echo, read_structure(body))


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_type")
    return body


def _model(found: Mapping[str, Any]) -> str:
    if "model" not in found:
        raise missing("model")
    return found["model"]


def _chat_logprobs(found: Mapping[str, Any]) -> int | None:
    """How many alternatives per token, or None for no logprobs at all."""
    if not found.get("logprobs", False):
        if found.get("top_logprobs"):
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return None
    return found.get("top_logprobs", 0)


def _prompts(value: Any) -> list[str | list[int]]:
    """The four forms of ``prompt``: text, token ids, a list of texts, a list of lists of token ids."""
    if value is None:
        raise missing("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array", value)
    if not value:
        raise RequestError("prompt must not be empty.", param="prompt")
    if isinstance(value[0], str):
        return fields.list_of(fields.text)(value, "prompt")
    if isinstance(value[0], list):
        return fields.list_of(token_ids)(value, "prompt")
    return [token_ids(value, "prompt")]
