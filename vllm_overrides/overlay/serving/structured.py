"""Output that must follow a grammar: which fields ask for it. It is refused, by the field's name, until it can be
obeyed.

Stock would import outlines for these, which is not installed; a plain request never gets near it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.fields import is_absent

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
_WHY = "this server does not do structured output yet; ask for the format in the prompt and leave the field out."


def refuse_structured(body: Mapping[str, Any]) -> None:
    """Raise RequestError where the request asks for guided output: obeying it half would be worse than refusing it."""
    for name in _GUIDED:
        if not is_absent(body.get(name)):
            raise not_supported(name, _WHY)
    wanted = body.get("response_format")
    if is_absent(wanted):
        return
    if not isinstance(wanted, dict):
        raise wrong_type("response_format", "an object", wanted)
    kind = wanted.get("type")
    if kind is None:
        raise missing("response_format.type")
    if kind in ("json_object", "json_schema"):
        raise not_supported("response_format", _WHY)
    if kind != "text":
        raise RequestError(f"response_format.type must be text, json_object or json_schema; got {kind!r:.40}.",
                           param="response_format.type")
