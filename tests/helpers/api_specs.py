"""The published schemas of the other APIs, as the package llm-comply carries them."""

from __future__ import annotations

import functools
from pathlib import Path

import llm_comply
from llm_comply.schema import SpecLoader


@functools.lru_cache
def spec(name: str) -> SpecLoader:
    """name: ``openresponses``, ``anthropic`` or ``openai_chat``."""
    return SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / f"{name}.json"))


def assert_valid(body: dict, schema: str, of: str) -> None:
    """The body is as the schema says."""
    errors = spec(of).validate(body, schema)
    assert not errors, f"{schema}: {errors}\n{body}"
