"""A conversation -> the prompt's text and token ids, off the event loop: a long one takes a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jinja2

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.fields import well_formed
from vllm.overlay.serving.normalise import ChatRequest, Options
from vllm.overlay.serving.parse.markers import CALL, END_THINK, THINK

T = TypeVar("T")
_TURN, _END_TURN = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Prompt:
    """text and token_ids: what the model reads. in_thought: it ends inside an open thought. opened_call: what it
    holds behind a ``<tool_call>`` that it leaves open, None where it opens none."""

    text: str
    token_ids: list[int]
    in_thought: bool = False
    opened_call: str | None = None


class Renderer:
    """Renders with one tokenizer and chat template. One thread: a fast tokenizer must not be used by two at a time."""

    def __init__(self, tokenizer: Any, chat_template: str | None) -> None:
        """chat_template: Jinja source; None for the tokenizer's own."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")

    @property
    def has_template(self) -> bool:
        """Whether chat can be served at all."""
        return bool(self._chat_template or getattr(self._tokenizer, "chat_template", None))

    async def chat(self, request: ChatRequest) -> Prompt:
        """The prompt of a chat request. Raises RequestError where the template refuses the conversation."""
        return await self._run(lambda: self._chat(request))

    async def completion(self, prompt: str | list[int], options: Options) -> Prompt:
        """The prompt of a completion: given as text, or as token ids."""
        return await self._run(lambda: self._completion(prompt, options))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _chat(self, request: ChatRequest) -> Prompt:
        forced = request.tool_choice.forced and request.add_generation_prompt
        kwargs = dict(request.template_kwargs)
        if request.thinking is not None or forced:
            # Without a grammar a call can be forced only by beginning it in the prompt, where a thought has no place.
            kwargs["enable_thinking"] = bool(request.thinking) and not forced
        try:
            text = self._tokenizer.apply_chat_template(
                request.messages,
                # Also where none may be called: another beginning of the prompt would lose every cached prefix.
                tools=list(request.tools.definitions) or None,
                chat_template=request.chat_template or self._chat_template,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        opened_call = None
        if forced:
            opened_call = f"\n<function={request.tool_choice.name}>\n" if request.tool_choice.name else "\n<function="
            text += CALL + opened_call
        text = well_formed(text)
        ids = self._encode(text, request.options)
        return Prompt(text, ids, ends_in_thought(text) and not forced, opened_call)

    def _completion(self, prompt: str | list[int], options: Options) -> Prompt:
        if isinstance(prompt, str):
            text = well_formed(prompt)
            return Prompt(text, self._encode(text, options))
        size = len(self._tokenizer)
        for token in prompt:
            if token >= size:
                raise RequestError(f"prompt holds token {token}; the vocabulary has {size} tokens.", param="prompt")
        ids = prompt[-options.truncate_prompt_tokens:] if options.truncate_prompt_tokens else prompt
        return Prompt(self._tokenizer.decode(ids, skip_special_tokens=False), list(ids))

    def _encode(self, text: str, options: Options) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=options.add_special_tokens, return_attention_mask=False,
                              return_token_type_ids=False).input_ids
        return ids[-options.truncate_prompt_tokens:] if options.truncate_prompt_tokens else ids


def ends_in_thought(prompt: str) -> bool:
    """Whether the last turn of a prompt opens a thought and does not close it."""
    start = prompt.rfind(_TURN)
    if start < 0 or prompt.rstrip().endswith(_END_TURN):
        return prompt.rstrip().endswith(THINK)
    turn = prompt[start:]
    return turn.rfind(THINK) > turn.rfind(END_THINK)
