"""A call's arguments read back from their JSON text, for APIs that do not show them as text."""

from __future__ import annotations

import json
from typing import Any

from vllm.overlay.serving.tools import CUSTOM_PARAMETER


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments as an object. Of a call that the answer's limit cut: those that are there, the last text as far as
    it came.

    A cut call ends behind a whole value or inside a string, never inside an escape (`vllm.overlay.serving.parse`).
    """
    for ending in ("", '"}', "}"):
        try:
            found = json.loads(text + ending)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def custom_input(text: str) -> str:
    """The free text of a call of a custom tool; the JSON text where the model wrote another parameter."""
    given = arguments_of(text).get(CUSTOM_PARAMETER)
    return given if isinstance(given, str) else text
