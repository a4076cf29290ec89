"""The model's own template, rendered for 25 conversations, against ours, byte by byte."""

import json
from pathlib import Path

import pytest

from tests.chat_template.specification import specified
from tests.helpers.chat_template import render

CASES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in
         sorted((Path(__file__).parent / "golden").glob("*.json"))}


def test_all_cases_are_here():
    assert len(CASES) == 25, sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_template_equals_the_models_own(name):
    case = CASES[name]
    assert render(case["messages"], case["tools"], **case["kwargs"]) == case["rendered"]


@pytest.mark.parametrize("name", CASES)
def test_specification_equals_the_models_own(name):
    # The second opinion of the random tests is worth nothing if it is wrong here.
    case = CASES[name]
    assert specified(case["messages"], case["tools"], **case["kwargs"]) == case["rendered"]
