"""The checks of `tests.conformance.run` against our server, and that they notice a server that is wrong."""

from __future__ import annotations

import pytest

from tests.conformance.checks import Outcome, run_checks
from tests.conformance.run import CHECKS
from tests.conformance.target import Target

AT_A_TIME = 16


@pytest.fixture(scope="session")
def outcomes(target: Target) -> dict[str, Outcome]:
    """All quick checks, several at a time as a busy server sees them."""
    quick = [check for check in CHECKS if not check.slow]
    return {outcome.id: outcome for outcome in run_checks(quick, target, AT_A_TIME)}


@pytest.mark.parametrize("check", [pytest.param(check.id, marks=[pytest.mark.long] if check.slow else [])
                                   for check in CHECKS])
def test_check(check: str, request: pytest.FixtureRequest) -> None:
    slow = {one.id: one for one in CHECKS if one.slow}
    if check in slow:
        outcome, = run_checks([slow[check]], request.getfixturevalue("target"), 1)
    else:
        outcome = request.getfixturevalue("outcomes")[check]
    if outcome.verdict == "skipped":
        pytest.skip(outcome.why)
    assert outcome.verdict == "ok", outcome.why


def test_there_are_enough_shapes():
    clients = {check.id.split("/")[1] for check in CHECKS if check.id.startswith("clients/")}
    shapes = [check.id for check in CHECKS if check.id.startswith("clients/")]
    assert len(shapes) >= 150 and len(shapes) == len(set(shapes)), len(shapes)
    assert {"openai-python", "openai-node", "vercel-ai-sdk", "langchain", "litellm", "pydantic-ai", "smolagents",
            "openai-agents", "instructor", "qwen-agent"} <= clients, clients
