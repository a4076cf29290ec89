"""Whether a request wants thought: every spelling that clients use for one switch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.overlay.serving.errors import wrong_type

_ON = frozenset({"enabled", "enable", "on", "true", "yes", "auto", "adaptive"})
_OFF = frozenset({"disabled", "disable", "off", "false", "no", "none"})


def _as_switch(value: Any, path: str) -> bool | None:
    """on/off as boolean, word, or ``{"type": word}``; None for null, empty, or a word that says neither."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return _as_switch(value.get("type"), f"{path}.type")
    if not isinstance(value, str):
        raise wrong_type(path, "a boolean, a string or an object with a type", value)
    word = value.strip().lower()
    return True if word in _ON else False if word in _OFF else None


def thinking_switch(body: Mapping[str, Any], template_kwargs: Mapping[str, Any]) -> bool | None:
    """True or False where the request says so, None where it leaves it to the template (which thinks).

    The spellings, the most specific first: ``chat_template_kwargs.enable_thinking`` (the template's own variable),
    ``chat_template_kwargs.thinking``, ``enable_thinking``, ``thinking`` (boolean, word or ``{"type": ...}``),
    ``reasoning_effort: "none"`` (any other effort has no meaning here). Where two disagree, the first one counts.
    """
    spellings = (
        (template_kwargs.get("enable_thinking"), "chat_template_kwargs.enable_thinking"),
        (template_kwargs.get("thinking"), "chat_template_kwargs.thinking"),
        (body.get("enable_thinking"), "enable_thinking"),
        (body.get("thinking"), "thinking"),
    )
    switches = [_as_switch(value, path) for value, path in spellings]
    decided = [switch for switch in switches if switch is not None]
    if decided:
        return decided[0]
    effort = body.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise wrong_type("reasoning_effort", "a string", effort)
    return False if effort == "none" else None
