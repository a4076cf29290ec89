"""Whether a request wants thought: every spelling that clients use for one switch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.overlay.serving import fields
from vllm.overlay.serving.errors import RequestError, wrong_type

_TOKENS = fields.integer(-1, 2**31)
_ON = frozenset({"enabled", "enable", "on", "true", "yes", "auto", "adaptive"})
_OFF = frozenset({"disabled", "disable", "off", "false", "no", "none"})
# The efforts of OpenAI's, vLLM's and other servers' APIs. This model thinks or does not: only "none" means something.
_EFFORTS = frozenset({"minimal", "low", "medium", "high", "xhigh", "max", "ultra", "auto", "default"})


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
    ``reasoning.enabled``, ``reasoning_effort: "none"``, ``reasoning.effort: "none"`` (any other effort has no meaning
    here). Where two disagree, the first one counts.
    """
    reasoning = body.get("reasoning") or {}
    spellings = (
        (template_kwargs.get("enable_thinking"), "chat_template_kwargs.enable_thinking"),
        (template_kwargs.get("thinking"), "chat_template_kwargs.thinking"),
        (body.get("enable_thinking"), "enable_thinking"),
        (body.get("thinking"), "thinking"),
        (reasoning.get("enabled"), "reasoning.enabled"),
    )
    switches = [_as_switch(value, path) for value, path in spellings]
    decided = [switch for switch in switches if switch is not None]
    if decided:
        return decided[0]
    efforts = ((body.get("reasoning_effort"), "reasoning_effort"), (reasoning.get("effort"), "reasoning.effort"))
    return False if False in [_effort(value, path) for value, path in efforts] else None


def thinking_budget(body: Mapping[str, Any]) -> int | None:
    """How many tokens a thought may have; None where the request does not say, or says -1.

    The spellings, the most specific first: ``thinking_token_budget`` (vLLM), ``thinking_budget``,
    ``thinking.budget_tokens`` (Anthropic), ``reasoning.max_tokens``.
    """
    thinking, reasoning = body.get("thinking"), body.get("reasoning")
    spellings = (
        (body.get("thinking_token_budget"), "thinking_token_budget"),
        (body.get("thinking_budget"), "thinking_budget"),
        (thinking.get("budget_tokens") if isinstance(thinking, dict) else None, "thinking.budget_tokens"),
        (reasoning.get("max_tokens") if isinstance(reasoning, dict) else None, "reasoning.max_tokens"),
    )
    budgets = [_TOKENS(value, path) for value, path in spellings if value is not None]
    return budgets[0] if budgets and budgets[0] >= 0 else None


def _effort(value: Any, path: str) -> bool | None:
    """False for an effort that means no thought, else None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    word = value.strip().lower()
    if word in _OFF:
        return False
    if word not in _EFFORTS | _ON:
        raise RequestError(f"{path} must be none, {', '.join(sorted(_EFFORTS))}; got {value!r:.40}.", param=path)
    return None
