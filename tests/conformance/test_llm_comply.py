"""The package llm-comply against our server, in three of its formats: what does not pass is argued in `exceptions.py`.

Its cases ask for an answer without a limit; the model is made to give a short one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import llm_comply
import pytest
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestStatus as Status
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests.anthropic import ANTHROPIC_TESTS
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS

from tests.conformance.exceptions import LLM_COMPLY
from tests.conformance.forcing import Plan

FORMATS = {"openai_chat": OPENAI_CHAT_TESTS, "openresponses": OPEN_RESPONSES_TESTS, "anthropic": ANTHROPIC_TESTS}
CASES = [pytest.param(name, case, id=f"{name}/{case.id}") for name, cases in FORMATS.items() for case in cases]
SHORT = Plan("Hello there, Alice.")


def ran(base: str, name: str, case, thoughts: bool = True):
    config = ComplianceConfig(f"{base}/v1", "none", "llm", timeout=240, extra_headers={
        **SHORT.header(), "anthropic-version": "2023-06-01"})
    asked = case.build_request
    # Cases about thoughts are skipped but for a few models by name.
    case = dataclasses.replace(case, skip_reason=None, build_request=lambda cfg: {
        **asked(cfg), **({} if thoughts else {"chat_template_kwargs": {"enable_thinking": False}})})
    spec = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / f"{name}.json"))
    return Runner(config, [case], spec).run_one(case)


@pytest.mark.parametrize("name, case", CASES)
def test_case(own_server, name, case):
    result = ran(own_server.base, name, case)
    known = LLM_COMPLY.get(case.id, ())
    unknown = [error for error in result.errors if not any(error.startswith(words) for words in known)]
    assert not unknown, unknown
    assert bool(result.errors) == bool(known), f"the exception is not needed any more: {known}"
    if known:
        # What is excepted is about thoughts; the same without one passes.
        without = ran(own_server.base, name, case, thoughts=False)
        assert without.status is Status.PASSED, without.errors
