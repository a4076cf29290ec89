"""docs/api.md names every field, route and option that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.fake_engine import FakeEngine, application
from vllm.entrypoints.openai import cli_args_stock
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.overlay.serving.anthropic.request import FIELDS as MESSAGES
from vllm.overlay.serving.normalise import CHAT, COMPLETION
from vllm.overlay.serving.responses.request import FIELDS as RESPONSES
from vllm.utils import FlexibleArgumentParser

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs/api.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`]+)`", DOCS))


@pytest.mark.parametrize("fields", [CHAT, COMPLETION, RESPONSES, MESSAGES], ids=["chat", "completions", "responses",
                                                                                "messages"])
def test_every_field_is_named(fields):
    assert not set(fields) - NAMED, sorted(set(fields) - NAMED)


def test_every_route_is_named():
    routes = {route.path for route in application(FakeEngine()).routes if getattr(route, "include_in_schema", False)}
    named = {path for phrase in NAMED for path in phrase.split() if path.startswith("/")}
    unnamed = {path for path in routes if path.replace("{name:path}", "NAME") not in named}
    assert not unnamed, (unnamed, named)


def test_every_option_of_the_api_is_named_somewhere():
    """In docs/ or README.md."""
    def options(make) -> set[str]:
        parser = make(FlexibleArgumentParser())
        return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}

    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    documents = "".join(page.read_text(encoding="utf-8") for page in pages)
    unnamed = {option for option in options(make_arg_parser) - options(cli_args_stock.make_arg_parser)
               if not option.startswith("--no-") and option not in documents and not any(
                   f"{stem}*" in documents for stem in ("--max-picture-",) if option.startswith(stem))}
    assert not unnamed, unnamed
