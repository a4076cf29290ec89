"""Prompts as our server makes them, without a server: its own rendering code, with a checkpoint's tokenizer.

The code is that of this working tree (vllm_overrides/overlay/serving); vLLM itself, whose import takes long, need not
be installed.
"""
import asyncio
import hashlib
import importlib
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "chat_template_multi_system.jinja"


class ServedError(Exception):
    """A checkpoint that cannot be used, or a request that the server would refuse; one line."""


class Prompt(NamedTuple):
    """text: as rendered, one placeholder for a picture. ids: what the model reads."""

    text: str
    ids: list[int]


class Served:
    """Renders bodies of /v1/chat/completions for one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        """folder: needs tokenizer.json; config.json too where requests hold pictures.

        Raises:
            ServedError: it has no tokenizer, or its configuration cannot be used.
        """
        if not (folder / "tokenizer.json").exists():
            raise ServedError(f"{folder}: no tokenizer.json; give a checkpoint's folder")
        transformers = importlib.import_module("transformers")
        settings = _pictures(folder)
        render, self._normalise, pictures = (_served(name) for name in ("render", "normalise", "pictures.reader"))
        self._error = _served("errors").RequestError
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:      # Whatever a library of another language raises for a file that is none of its.
            words = " ".join(str(error).split())[:200]
            raise ServedError(f"{folder}: its tokenizer cannot be read: {words}") from error
        self.template = TEMPLATE.read_text(encoding="utf-8")
        placeholders = None
        if settings is not None:
            placeholders = _served("pictures.placeholders").Placeholders(tokenizer, settings.placeholder,
                                                                         settings.marks)
        self.takes_pictures = settings is not None
        self._reader = pictures.PictureReader(settings)
        self._renderer = render.Renderer(tokenizer, self.template, placeholders)
        self._loop = asyncio.new_event_loop()
        self.digests = {"tokenizer": _digest((folder / "tokenizer.json").read_bytes()),
                        "template": _digest(self.template.encode())}
        self._tokenizer = tokenizer

    def render(self, body: dict[str, Any]) -> Prompt:
        """Raises:
            ServedError: the server would refuse it.
        """
        try:
            return self._loop.run_until_complete(self._render({"model": "llm", **body}))
        except self._error as error:
            raise ServedError(str(error)) from error

    def count(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self._tokenizer(text, add_special_tokens=False).input_ids)

    def close(self) -> None:
        """Ends its threads."""
        self._renderer.close()
        self._reader.close()
        self._loop.close()

    async def _render(self, body: dict[str, Any]) -> Prompt:
        request = self._normalise.normalise_chat(body)
        measured = await self._reader.measured(request.pictures)
        prompt = await self._renderer.chat(request, [picture.tokens for picture in measured])
        return Prompt(prompt.text, prompt.token_ids)


def _served(name: str) -> Any:
    """A module of the server's. Where vLLM is imported already, it is the installed one, which is the same code."""
    package = sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    if getattr(package, "__file__", None) is None:
        package.__path__ = [str(ROOT / "vllm_overrides")]
        logger = sys.modules.setdefault("vllm.logger", types.ModuleType("vllm.logger"))
        logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
    return importlib.import_module(f"vllm.overlay.serving.{name}")


def _pictures(folder: Path) -> Any:
    """The server's PictureInput; None for a model without pictures."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError as error:
        raise ServedError(f"{folder}/config.json does not parse: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config") or {}, dict) or not isinstance(
            config.get("vision_config") or {}, dict):
        raise ServedError(f"{folder}/config.json: is no configuration of a model")
    context = (config.get("text_config") or config).get("max_position_embeddings") or 1 << 30
    shown = types.SimpleNamespace(**{**config, "vision_config": types.SimpleNamespace(**config["vision_config"])
                                     if config.get("vision_config") else None})
    model = types.SimpleNamespace(hf_config=shown, model=str(folder), max_model_len=context)
    try:
        return _served("pictures.settings").picture_input(model)
    except ValueError as error:
        raise ServedError(f"{folder}: {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
