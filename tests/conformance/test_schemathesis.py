"""schemathesis asks what our /openapi.json allows, and what it does not: never a 5xx, nor another form than it says.

Everything in these requests is made up by schemathesis; what may be generated is kept short by the Forcing middleware's
header, which is no part of the document.
"""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase

EXAMPLES = 25
SETTINGS = hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                               phases=[Phase.explicit, Phase.generate],
                               suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session")
def api(own_server):
    return schemathesis.openapi.from_url(f"{own_server.base}/openapi.json", wait_for_schema=5)


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@SETTINGS
def test_operation(case):
    case.call_and_validate(timeout=240)
