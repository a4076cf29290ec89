"""`encrypted_content` of a thought. To clients it is opaque: they keep it and send it back, and some (the AI SDK, so
opencode) send nothing else of a thought where nothing is stored. Nothing here is secret: the text stands beside it."""

from __future__ import annotations

import base64
import binascii
from typing import Any

INCLUDE = "reasoning.encrypted_content"
_OURS = "thought-"


def sealed(text: str) -> str:
    """The thought as `encrypted_content`."""
    return _OURS + base64.b64encode(text.encode()).decode()


def unsealed(value: Any) -> str:
    """The thought of an `encrypted_content` of ours; "" for any other, which nobody here can read."""
    if not isinstance(value, str) or not value.startswith(_OURS):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_OURS), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
