"""A data URL's bytes (RFC 2397), as forgiving as browsers are."""

from __future__ import annotations

import binascii
import re
import string
from urllib.parse import unquote_to_bytes

from vllm.overlay.serving.errors import RequestError

# Decoded in pieces: other threads, the event loop among them, run between two.
_PIECE = 1 << 20
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_BLANK = b" \t\r\n\f\v"
_ALPHABET = (string.ascii_letters + string.digits + "+/").encode()


def is_data_url(url: str) -> bool:
    """Whether the URL holds its data itself."""
    return url[:16].lstrip()[:5].lower() == "data:"


def decode_data_url(url: str, path: str, max_bytes: int) -> bytes:
    """The data, whatever the media type says. base64 may be url-safe, unpadded, percent-encoded or broken into lines.

    Raises RequestError (naming path) for what is no base64, or more than max_bytes.
    """
    head, comma, data = url.partition(",")
    if not comma:
        raise RequestError(f"{path} is a data URL without a comma before its data.", param=path, code="invalid_image")
    is_base64 = re.search(r"[:;]\s*base64\s*$", head, re.IGNORECASE) is not None
    # One byte takes up to three characters, beside blanks; what it comes to is looked at again below.
    if len(data) > 4 * max_bytes:
        raise _too_large(path, len(data), max_bytes, "characters")
    if "%" in data:
        raw = unquote_to_bytes(data)
    else:
        try:
            raw = data.encode("ascii")
        except UnicodeEncodeError:
            raise _broken(path) from None
    raw = _from_base64(raw, path, max_bytes) if is_base64 else raw
    if len(raw) > max_bytes:
        raise _too_large(path, len(raw), max_bytes, "bytes")
    if not raw:
        raise RequestError(f"{path} holds no data.", param=path, code="invalid_image")
    return raw


def _from_base64(raw: bytes, path: str, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    left = b""
    size = 0
    ended = False
    for start in range(0, len(raw), _PIECE):
        piece = left + raw[start:start + _PIECE].translate(_TO_STANDARD, _BLANK)
        data = piece.rstrip(b"=")
        if (ended and data) or data.translate(None, _ALPHABET):
            raise _broken(path)
        ended = ended or len(data) < len(piece)
        whole = len(data) if ended else len(data) // 4 * 4
        left = data[whole:]
        pieces.append(_decoded(data[:whole], path))
        size += len(pieces[-1])
        if size > max_bytes:
            raise _too_large(path, size, max_bytes, "bytes or more")
    return b"".join(pieces) + _decoded(left, path)


def _decoded(data: bytes, path: str) -> bytes:
    try:
        return binascii.a2b_base64(data + b"=" * (-len(data) % 4))
    except binascii.Error:
        raise _broken(path) from None


def _broken(path: str) -> RequestError:
    return RequestError(f"{path} is a data URL whose data is not valid base64.", param=path, code="invalid_image")


def _too_large(path: str, size: int, limit: int, unit: str) -> RequestError:
    return RequestError(f"{path} holds a picture of {size} {unit}; at most {limit} bytes are taken "
                        "(--max-picture-bytes).", param=path, code="invalid_image")
