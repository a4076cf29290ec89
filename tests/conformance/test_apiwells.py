"""The package apiwells, a doctor of endpoints, against our server: every probe that has something to look at passes."""

from __future__ import annotations

from apiwells.models import ResultStatus
from apiwells.runner import run_deep_diagnostics

from tests.conformance.forcing import Plan
from tests.helpers.forced import call

# Its probe of tools wants this word in the call, and the tool's result as the answer.
SAYS = Plan("$RESULT OK.", call=call("get_diagnostic_value", ("challenge", "apiwells-tool-check")))
# A server without TLS has none to look at.
NOT_APPLICABLE = {"tls"}


def test_deep_diagnostics(own_server):
    results = run_deep_diagnostics(f"{SAYS.base(own_server.base)}/v1", "llm", timeout=240, max_tokens=1500,
                                   authentication_requested=False)
    assert {"chat", "streaming", "tool_calling", "structured_output", "models"} <= {one.name for one in results}
    for one in results:
        wanted = {ResultStatus.PASS} | ({ResultStatus.SKIP} if one.name in NOT_APPLICABLE else set())
        assert one.status in wanted, (one.name, one.status, one.summary, one.evidence)
