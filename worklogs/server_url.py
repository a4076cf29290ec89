"""The address of a server, as the programs that ask one take it on their command line."""

from __future__ import annotations

import argparse
import urllib.parse


def base(text: str) -> str:
    """An address without ``/v1`` and slashes at its end. Raises argparse.ArgumentTypeError for what is none."""
    try:
        url = urllib.parse.urlsplit(text)
        right = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        right = False
    if not right:
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")
