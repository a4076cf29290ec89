"""GET /v1/models."""

from __future__ import annotations

import time
from typing import Any

from vllm.overlay.serving.service import Settings

_STARTED = int(time.time())


def card(settings: Settings, name: str) -> dict[str, Any]:
    """One model, with its context length, by which clients cut their prompts."""
    return {"id": name, "object": "model", "created": _STARTED, "owned_by": "vllm", "root": settings.model_path,
            "parent": None,
            "max_model_len": settings.max_model_len}


def listing(settings: Settings) -> dict[str, Any]:
    """All names."""
    return {"object": "list", "data": [card(settings, name) for name in settings.model_names]}
