"""The last line of every deployed file, a comment ``vllm-overlay: <id>``: whose the file is, receipt or not."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_HASH = ("# ", "")
_SLASHES = ("// ", "")
_HTML = ("<!-- ", " -->")
_COMMENTS = {
    ".py": _HASH, ".sh": _HASH, ".toml": _HASH, ".yaml": _HASH, ".cmake": _HASH,
    ".c": _SLASHES, ".cc": _SLASHES, ".cpp": _SLASHES, ".h": _SLASHES, ".hpp": _SLASHES,
    ".cu": _SLASHES, ".cuh": _SLASHES,
    ".md": _HTML, ".html": _HTML,
}  # fmt: skip
_MARKER = re.compile(rb"^(?:# |// |<!-- )vllm-overlay: ([a-z0-9-]+)(?: -->)?\r?$", re.MULTILINE)
_TAIL = 300  # bytes; longer than any marker line


def can_carry_marker(path: str) -> bool:
    """Whether files of this type have comments (JSON, for one, has none)."""
    return PurePosixPath(path).suffix in _COMMENTS


def with_marker(data: bytes, path: str, overlay_id: str) -> bytes:
    """data with the marker as its last line, in the line ending that data uses."""
    before, after = _COMMENTS[PurePosixPath(path).suffix]
    ending = line_ending(data)
    if data and not data.endswith(b"\n"):
        data += ending
    return data + f"{before}vllm-overlay: {overlay_id}{after}".encode() + ending


def marker_of(data: bytes) -> str | None:
    """The id in the marker that data ends with, or None."""
    lines = data[-_TAIL:].rstrip(b"\n").rsplit(b"\n", 1)
    found = _MARKER.fullmatch(lines[-1])
    return found.group(1).decode() if found else None


def holds_marker(data: bytes) -> bool:
    """Whether a marker line stands anywhere in data; sources must hold none, it is added when they are deployed."""
    return _MARKER.search(data) is not None


def line_ending(data: bytes) -> bytes:
    """The line ending that most lines of data have."""
    crlf = data.count(b"\r\n")
    return b"\r\n" if crlf > data.count(b"\n") - crlf else b"\n"
