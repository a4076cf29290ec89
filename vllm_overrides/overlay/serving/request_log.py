"""One line of the log for each request, as JSON behind a word, so that both people and programs find it."""

from __future__ import annotations

import json
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)
_LONGEST_MESSAGE = 300


def log_request(**fields: Any) -> None:
    """A request that is over. Times are in seconds, rounded here; what is None is left out."""
    shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()
             if value is not None}
    logger.info("request %s", json.dumps(shown, ensure_ascii=False))


def log_refusal(method: str, path: str, status: int, message: str, **fields: Any) -> None:
    """A request that did not come to generation."""
    log_request(method=method, path=path, status=status, error=message[:_LONGEST_MESSAGE], **fields)
