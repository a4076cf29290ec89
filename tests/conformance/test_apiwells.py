"""The package apiwells, a doctor of endpoints, against our server: every probe that has something to look at passes."""

from __future__ import annotations

from apiwells.models import ResultStatus, SupportStatus
from apiwells.runner import run_deep_diagnostics

from tests.conformance.forcing import Plan
from tests.helpers.forced import call

# Its probe of tools wants this word in the call, and the tool's result as the answer.
SAYS = Plan("$RESULT OK.", call=call("get_diagnostic_value", ("challenge", "apiwells-tool-check")))


def test_deep_diagnostics(own_server):
    results = run_deep_diagnostics(f"{SAYS.base(own_server.base)}/v1", "llm", timeout=240, max_tokens=1500,
                                   authentication_requested=False)
    generating = {"chat", "streaming", "tool_calling", "structured_output"}
    assert generating | {"models"} <= {one.name for one in results}
    for one in results:
        assert one.status is ResultStatus.PASS, (one.name, one.status, one.summary, one.evidence)
        # Of some probes (TLS, a key) there is nothing to find here.
        assert one.support is SupportStatus.SUPPORTED or one.name not in generating, (one.name, one.support)
