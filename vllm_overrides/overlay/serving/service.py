"""What all requests of one server share: the engine's client, the tokenizer, the model's limits and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.logger import init_logger
from vllm.overlay.engine.bad_words import BadWords, bad_sequences
from vllm.overlay.serving.choice import Choice, PlainParser
from vllm.overlay.serving.constrain import Constrainer, Markers
from vllm.overlay.serving.detokenise import ByteDetokeniser, Detokeniser, TokenBytes, WindowDetokeniser, is_byte_level
from vllm.overlay.serving.errors import RequestError, not_supported
from vllm.overlay.serving.fastpath import FastPath
from vllm.overlay.serving.lanes import Lanes
from vllm.overlay.serving.logprobs import TokenText
from vllm.overlay.serving.normalise import ChatRequest
from vllm.overlay.serving.options import Options
from vllm.overlay.serving.parse import REASONING_PARSERS, TOOL_CALL_PARSERS
from vllm.overlay.serving.parse.markers import CALL, END_CALL, END_THINK, MarkerSplitter, marker_ids
from vllm.overlay.serving.parse.output import OutputParser
from vllm.overlay.serving.pictures.placeholders import Placeholders
from vllm.overlay.serving.pictures.reader import PictureReader
from vllm.overlay.serving.pictures.settings import PictureInput
from vllm.overlay.serving.render import Prompt, Renderer

logger = init_logger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the command line decides about requests. reasoning_parser, tool_call_parser: names, None for none.
    template_kwargs: of the chat template, for requests that are silent about them. log_prompts: characters of each
    prompt that the log shows. pictures: None where the model takes none. boundaries: whether the engine wants to know
    where messages end, to keep the recurrent state of there."""

    model_names: tuple[str, ...]
    model_path: str
    max_model_len: int
    max_logprobs: int = 20
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    auto_tools: bool = False
    reasoning_field: str = "reasoning_content"
    response_role: str = "assistant"
    chat_template: str | None = None
    trust_request_template: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    tokens_as_ids: bool = False
    log_requests: bool = True
    log_prompts: int = 0
    priorities: bool = False
    pictures: PictureInput | None = None
    boundaries: bool = False
    fastpath: FastPath = FastPath()


class Service:
    """One served model. Makes a request's choices; knows nothing of HTTP."""

    def __init__(self, engine: Any, tokenizer: Any, settings: Settings) -> None:
        """engine: an EngineClient; tokenizer: a transformers tokenizer."""
        self.engine = engine
        shown = settings.pictures
        if shown is not None and max(shown.marks) >= len(tokenizer):
            logger.warning("no pictures are taken: the configuration names the tokens %s for them, and the tokenizer "
                           "has %d", shown.marks, len(tokenizer))
            shown = None
        self.settings = settings = replace(settings, pictures=shown)
        self.pictures = PictureReader(shown)
        marks = Placeholders(tokenizer, shown.placeholder, shown.marks) if shown else None
        self.renderer = Lanes(*(Renderer(tokenizer, settings.chat_template, marks, settings.max_model_len,
                                         settings.boundaries) for _ in range(2)))
        self.vocab_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer) if is_byte_level(tokenizer) else None
        self.token_text = TokenText(tokenizer, self._token_bytes, settings.tokens_as_ids)
        self._markers = REASONING_PARSERS.get(settings.reasoning_parser or "", ()) + TOOL_CALL_PARSERS.get(
            settings.tool_call_parser or "", ())
        self._marker_ids = marker_ids(tokenizer.get_vocab(), self._markers)
        self._special = frozenset(tokenizer.all_special_ids)
        token_of = {marker: token for token, marker in self._marker_ids.items()}
        self.constrainer = Constrainer(tokenizer, Markers(token_of.get(END_THINK), token_of.get(CALL),
                                                          token_of.get(END_CALL)))

    async def available(self) -> None:
        """Returns when there is an engine. Raises RequestError (503) when that takes too long."""
        wait = getattr(self.engine, "available", None)
        if wait is not None:
            await wait()

    def close(self) -> None:
        """End the threads."""
        self.renderer.close()
        self.constrainer.close()
        self.pictures.close()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own names of tokens."""
        return self._tokenizer.convert_ids_to_tokens(list(token_ids))

    def logits_processors(self, options: Options) -> list[Any] | None:
        """What changes the logits of a request beside what the engine knows of."""
        if not options.bad_words:
            return None
        return [BadWords(bad_sequences(options.bad_words, self._tokenizer))]

    def check_model(self, name: str) -> None:
        """Raise RequestError (404) for a model that is not served here."""
        if name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            raise RequestError(f"The model {name!r:.100} does not exist; this server has {served}.",
                               param="model", code="model_not_found", status=404)

    def check_template(self, request: ChatRequest) -> None:
        """Raise RequestError where the request brings its own chat template, which is a program, and may not."""
        if request.chat_template is not None and not self.settings.trust_request_template:
            raise not_supported("chat_template", "the server was not started with --trust-request-chat-template.")

    def check_tools(self, request: ChatRequest) -> None:
        """Raise RequestError where the request wants calls and the server was not told how to read them."""
        mode = request.tool_choice.mode
        if mode == "none" or (self.settings.tool_call_parser and (self.settings.auto_tools or mode != "auto")):
            return
        raise RequestError("Tool calls need the server's options --enable-auto-tool-choice and --tool-call-parser.",
                           param="tool_choice", code="unsupported_parameter")

    def check_token_ids(self, prompt: Prompt) -> None:
        """Raise RequestError where a prompt of token ids holds a picture's token: there is no picture to it."""
        shown = self.settings.pictures
        if shown is not None and shown.placeholder in prompt.token_ids:
            raise RequestError(f"prompt holds token {shown.placeholder}, which stands for a picture; pictures are "
                               "taken in the messages of /v1/chat/completions.", param="prompt")

    def banned_tokens(self, request: ChatRequest) -> list[int]:
        """What the answer must not hold: the beginning of a call, where there are tools and none may be called."""
        if request.tools.definitions and request.tool_choice.mode == "none":
            return [token for token, marker in self._marker_ids.items() if marker == CALL]
        return []

    def stop_tokens(self, stops: Sequence[str]) -> tuple[list[str], list[int]]:
        """(stop strings, stop token ids): stops that are control tokens, which the parser takes out of the text."""
        by_text = {text: token for token, text in self._marker_ids.items()}
        return [stop for stop in stops if stop not in by_text], [by_text[stop] for stop in stops if stop in by_text]

    def chat_choice(self, index: int, request: ChatRequest, prompt: Prompt, stops: Sequence[str]) -> Choice:
        """A choice of a chat answer."""
        calls = bool(self.settings.tool_call_parser) and request.tool_choice.mode != "none"
        parser = OutputParser(
            MarkerSplitter(self._marker_ids, self._markers),
            in_thought=prompt.in_thought,
            reasoning=bool(self.settings.reasoning_parser),
            schemas=request.tools.schemas if calls else None,
            one_call=not request.parallel_tool_calls or request.tool_choice.mode == "named"
            or request.tools.legacy,
        )
        # Control tokens are read even where the tokenizer counts them as special and would leave them out.
        options = request.options
        named = {token: text for token, text in self._marker_ids.items()
                 if text in options.stop and token not in options.stop_token_ids}
        return self._choice(index, options, prompt, parser, stops, self._special - set(self._marker_ids), named)

    def plain_choice(self, index: int, options: Options, prompt: Prompt) -> Choice:
        """A choice of a completion: all text, nothing parsed."""
        return self._choice(index, options, prompt, PlainParser(), options.stop, self._special)

    def _choice(self, index: int, options: Options, prompt: Prompt, parser: Any, stops: Sequence[str],
                special: frozenset[int], stop_names: Mapping[int, str] | None = None) -> Choice:
        skipped = special if options.skip_special_tokens else frozenset()
        detokeniser: Detokeniser
        if self._token_bytes is not None:
            detokeniser = ByteDetokeniser(self._token_bytes, prompt.token_ids, skipped)
        else:
            detokeniser = WindowDetokeniser(self._tokenizer, prompt.token_ids, skipped)
        return Choice(index, detokeniser, parser, stops=stops, include_stop=options.include_stop,
                      min_tokens=options.min_tokens, stop_names=stop_names)
