"""A conversation -> the prompt's text and token ids, off the event loop: a long one takes a second."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import jinja2

from vllm.overlay.pictures.picture import Picture
from vllm.overlay.serving.boundaries import Ends, repaired, shifted, token_places, watched
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.fields import well_formed
from vllm.overlay.serving.hopeless import refuse_hopeless
from vllm.overlay.serving.normalise import ChatRequest
from vllm.overlay.serving.options import Options
from vllm.overlay.serving.parse.markers import END_THINK, THINK
from vllm.overlay.serving.pictures.placeholders import Placeholders

T = TypeVar("T")
_TURN, _END_TURN = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Prompt:
    """text and token_ids: what the model reads. in_thought: it ends inside an open thought. text has one placeholder
    for a picture, token_ids one for each of its embeddings, from offsets[i] on for the i-th; pictures are added when
    they are read. boundaries: how many tokens there are before each end of a message, ascending, none of 0 or of all
    tokens; of a chat only. cache_salt: only prompts with the same one share prefixes."""

    text: str
    token_ids: list[int]
    in_thought: bool = False
    offsets: tuple[int, ...] = ()
    pictures: tuple[Picture, ...] = ()
    boundaries: tuple[int, ...] = ()
    cache_salt: str | None = None


class Renderer:
    """Renders with one tokenizer and chat template, in one thread."""

    def __init__(self, tokenizer: Any, chat_template: str | None, placeholders: Placeholders | None = None,
                 context: int | None = None, find_boundaries: bool = False) -> None:
        """chat_template: Jinja source; None for the tokenizer's own. placeholders: None where the model takes no
        pictures. context: the longest prompt that is worth its time, in tokens. find_boundaries: whether somebody wants
        to know Prompt.boundaries, which are empty otherwise."""
        self._context = context
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._placeholders = placeholders
        self._find_boundaries = find_boundaries
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")

    @property
    def has_template(self) -> bool:
        """Whether chat can be served at all."""
        return bool(self._chat_template or getattr(self._tokenizer, "chat_template", None))

    async def chat(self, request: ChatRequest, picture_tokens: Sequence[int] = ()) -> Prompt:
        """The prompt of a chat request; picture_tokens: how many each of its pictures takes.

        Raises RequestError where the template refuses the conversation, or writes another number of pictures.
        """
        return await self._run(lambda: self._chat(request, picture_tokens))

    async def completion(self, prompt: str | list[int], options: Options) -> Prompt:
        """The prompt of a completion: given as text, or as token ids."""
        return await self._run(lambda: self._completion(prompt, options))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _chat(self, request: ChatRequest, picture_tokens: Sequence[int]) -> Prompt:
        kwargs = dict(request.template_kwargs)
        if request.thinking is not None:
            kwargs["enable_thinking"] = request.thinking
        secret = Placeholders.secret()
        messages: Any = request.messages
        # Also where none may be called: another beginning of the prompt would lose every cached prefix.
        tools: Any = list(request.tools.definitions) or None
        ends = Ends()
        cut_here = Placeholders.secret() if request.continue_final_message else ""
        try:
            if self._placeholders is not None:
                messages, tools = self._placeholders.guarded((messages, tools), secret)
            if cut_here:
                messages = _marked(messages, cut_here)
            template = request.chat_template or self._chat_template
            watch = nullcontext(messages)
            if self._find_boundaries:
                watch = watched(messages, ends, self._tokenizer, template, tools)
            with watch as messages:
                text = self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=request.add_generation_prompt,
                    tokenize=False,
                    **kwargs,
                )
        except RecursionError:
            raise RequestError("These messages or tools are nested too deeply.", param="messages") from None
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        if cut_here:
            text = _cut(text, cut_here)
        # A text that ends with the message to be continued was cut there.
        places = [place for place in ends.places if place <= len(text)]
        if (proper := well_formed(text)) != text:
            places = repaired(places, text)
            text = proper
        self._refuse_hopeless(text, request.options, "messages")
        text, ids, places = self._tokenised(text, request.options, secret, places)
        offsets: tuple[int, ...] = ()
        if self._placeholders is not None:
            ids, offsets = self._placeholders.expanded(ids, picture_tokens)
            places = shifted(places, offsets, picture_tokens)
        cut = len(ids)
        ids = _truncated(ids, request.options)
        cut = 0 if request.options.truncate_right else cut - len(ids)
        boundaries = tuple(sorted({place - cut for place in places if 0 < place - cut < len(ids)}))
        return Prompt(text, ids, ends_in_thought(text), offsets, boundaries=boundaries,
                      cache_salt=request.options.cache_salt)

    def _completion(self, prompt: str | list[int], options: Options) -> Prompt:
        if isinstance(prompt, str):
            text = well_formed(prompt)
            self._refuse_hopeless(text, options, "prompt")
            secret = Placeholders.secret()
            if self._placeholders is not None:
                text = self._placeholders.guarded(text, secret)
            text, ids, _ = self._tokenised(text, options, secret)
            return Prompt(text, _truncated(ids, options), cache_salt=options.cache_salt)
        size = len(self._tokenizer)
        for token in prompt:
            if token >= size:
                raise RequestError(f"prompt holds token {token}; the vocabulary has {size} tokens.", param="prompt")
        ids = _truncated(prompt, options)
        return Prompt(self._tokenizer.decode(ids, skip_special_tokens=False), list(ids),
                      cache_salt=options.cache_salt)

    def _refuse_hopeless(self, text: str, options: Options, param: str) -> None:
        if self._context is not None and not options.truncate_prompt_tokens:
            refuse_hopeless(self._tokenizer, text, self._context, param)

    def _tokenised(self, text: str, options: Options, secret: str,
                   places: Sequence[int] = ()) -> tuple[str, list[int], list[int]]:
        """(text, its token ids, tokens before each place); the text is cut where the secret stands, see Placeholders.
        places: offsets in the text as it is given, ascending."""
        pieces = text.split(secret)
        ids: list[int] = []
        found: list[int] = []
        begin = done = 0
        for i, piece in enumerate(pieces):
            encoded = self._tokenizer(piece, add_special_tokens=options.add_special_tokens and i == 0,
                                      return_attention_mask=False, return_token_type_ids=False)
            here = slice(done, bisect_left(places, begin + len(piece) + len(secret), lo=done))
            found += [len(ids) + tokens for tokens in token_places(encoded, [one - begin for one in places[here]])]
            ids += encoded.input_ids
            begin += len(piece) + len(secret)
            done = here.stop
        return "".join(pieces), ids, found


def _marked(messages: Sequence[Any], mark: str) -> list[Any]:
    """The messages, the last of which ends with the mark.

    transformers looks for the message's text from the prompt's end instead: it finds nothing of an empty message, and a
    short one inside the tokens that end its turn ("end" in ``<|im_end|>``). Blanks at its end are left out, as the
    model's template leaves them out: the model's words begin with theirs.
    """
    last = messages[-1]
    return [*messages[:-1], {**last, "content": last["content"].rstrip() + mark}]


def _cut(text: str, mark: str) -> str:
    """A prompt up to the mark. Raises RequestError where the template did not write it."""
    before, found, _ = text.rpartition(mark)
    if not found:
        raise RequestError("The chat template does not show the last message, so it cannot be continued.",
                           param="continue_final_message")
    return before.replace(mark, "")


def _truncated(ids: list[int], options: Options) -> list[int]:
    most = options.truncate_prompt_tokens
    if not most:
        return ids
    return ids[:most] if options.truncate_right else ids[-most:]


def ends_in_thought(prompt: str) -> bool:
    """Whether the last turn of a prompt opens a thought and does not close it."""
    start = prompt.rfind(_TURN)
    if start < 0 or prompt.rstrip().endswith(_END_TURN):
        return prompt.rstrip().endswith(THINK)
    turn = prompt[start:]
    return turn.rfind(THINK) > turn.rfind(END_THINK)
