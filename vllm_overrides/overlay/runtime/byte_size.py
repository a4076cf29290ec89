"""Sizes of memory as people write them."""
import argparse
import math
import re

_UNITS = {"": 1, "b": 1, **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
          **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)")


class SizeError(argparse.ArgumentTypeError, ValueError):
    """The text is no size. argparse shows its message as it is."""


def size(text: str) -> int:
    """Bytes of "31.72GiB", "16.2GB", "2e9", "0".

    Raises:
        SizeError: it is none.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    value = math.inf if found is None or found[2] not in _UNITS else float(found[1]) * _UNITS[found[2]]
    if value == math.inf:
        raise SizeError(f"{text!r:.80} is no size such as 31.72GiB or 16.2GB")
    return int(value)
