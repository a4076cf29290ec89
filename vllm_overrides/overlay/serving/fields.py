"""Checks of single request fields.

A check takes (value, path) and gives the value to use, or raises a RequestError that names the path. Null, empty text,
empty lists and empty objects never reach a check of an optional field: they count as absent (see ``read``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from vllm.logger import init_logger
from vllm.overlay.serving.errors import RequestError, wrong_type

logger = init_logger(__name__)

Check = Callable[[Any, str], Any]
T = TypeVar("T", bound=Check)
# What counts as absent, and so is valid for every optional field.
_ABSENT: dict[str, Any] = {"enum": [None, "", [], {}]}


def described(check: T, **schema: Any) -> T:
    """The check, with a JSON schema of what it lets pass."""
    check.schema = schema  # type: ignore[attr-defined]
    return check


def schema_of(check: Check) -> dict[str, Any]:
    """The JSON schema of an optional field with this check."""
    return optional(_required(check)) if _required(check) else {}


def optional(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, or what counts as absent."""
    return {"anyOf": [schema, _ABSENT]}


def _required(check: Check) -> dict[str, Any]:
    return getattr(check, "schema", {})


def _range(low: float | None, high: float | None) -> dict[str, Any]:
    return {name: value for name, value in (("minimum", low), ("maximum", high)) if value is not None}


def is_absent(value: Any) -> bool:
    """Whether a field with this value is as good as not there."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def read(body: Mapping[str, Any], checks: Mapping[str, Check], where: str = "") -> dict[str, Any]:
    """The known fields of ``body`` that are present, checked. Fields that nobody knows are ignored (debug log)."""
    found = {}
    unknown = []
    for name, value in body.items():
        check = checks.get(name)
        if check is None:
            unknown.append(name)
        elif not is_absent(value):
            found[name] = check(value, f"{where}{name}")
    if unknown:
        logger.debug("ignored request fields: %s", unknown)
    return found


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"between {low} and {high}"
    return f"at least {low}" if low is not None else f"at most {high}"


def _check_range(value: Any, path: str, low: float | None, high: float | None) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        raise RequestError(f"{path} must be {_bounds(low, high)}, got {value!r:.40}.", param=path)


def number(low: float | None = None, high: float | None = None) -> Check:
    """A finite number within [low, high]."""

    def check(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(path, "a number", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{path} must be a finite number.", param=path)
        _check_range(value, path, low, high)
        try:
            # No -0.0, which compares as 0 and prints as something else.
            return float(value) + 0.0
        except OverflowError:
            raise RequestError(f"{path} is too large a number.", param=path) from None

    return described(check, type="number", **_range(low, high))


def integer(low: int | None = None, high: int | None = None) -> Check:
    """A whole number within [low, high]; 3.0 counts as 3, as JSON does not tell them apart."""

    def check(value: Any, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(path, "an integer", value)
        _check_range(value, path, low, high)
        return value

    return described(check, type="integer", **_range(low, high))


def flag(value: Any, path: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong_type(path, "a boolean", value)
    return value


def one_of(*words: str) -> Check:
    """One of a few strings."""

    def check(value: Any, path: str) -> str:
        if text(value, path) not in words:
            raise RequestError(f"{path} must be {' or '.join(words)}, got {value!r:.40}.", param=path)
        return value

    return described(check, enum=list(words))


def text(value: Any, path: str) -> str:
    """A string, well formed: what is shown to the client again must be encodable."""
    if not isinstance(value, str):
        raise wrong_type(path, "a string", value)
    return well_formed(value)


def well_formed(value: str) -> str:
    """The text with unpaired surrogates (a client that cut a string inside an emoji) replaced: neither a tokenizer nor
    UTF-8 takes them."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def mapping(value: Any, path: str) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object", value)
    return value


def anything(value: Any, path: str) -> Any:
    """A field that is accepted and looked at elsewhere, or not at all."""
    return value


def list_of(item: Check) -> Check:
    """An array whose every item passes ``item``."""

    def check(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type(path, "an array", value)
        return [item(one, f"{path}[{i}]") for i, one in enumerate(value)]

    return described(check, type="array", items=_required(item))


def one_or_list(item: Check) -> Check:
    """One value or an array of them; gives a list."""
    many = list_of(item)

    def check(value: Any, path: str) -> list[Any]:
        return many(value, path) if isinstance(value, list) else [item(value, path)]

    return described(check, anyOf=[_required(item), _required(many)])


for _check, _name in ((flag, "boolean"), (text, "string"), (mapping, "object")):
    described(_check, type=_name)
