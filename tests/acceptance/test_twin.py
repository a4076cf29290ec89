"""The platform's checks, whole, against our server on the twin: 52 of 52."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TWIN = ROOT / "tests/twin/checkpoint"


def judged(folder: Path, *arguments: str) -> dict[str, object]:
    """Runs what `make acceptance` runs. Returns the report's totals."""
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.acceptance.serve", TWIN, "--log", folder / "server.log", "--report", report,
         "--no-skip", *arguments], cwd=ROOT, capture_output=True, text=True)
    failed = [line for line in done.stdout.splitlines() if not line.startswith("PASS")]
    assert done.returncode == 0, "\n".join([*failed, done.stderr])
    assert "52 of 52 scored checks passed" in done.stdout, done.stdout
    totals: dict[str, object] = json.loads(report.read_text(encoding="utf-8"))["totals"]
    return totals


@pytest.mark.timeout(600)
def test_all_checks_pass(tmp_path):
    assert judged(tmp_path, "--long-tokens", "512") == {"PASS": 52, "FAIL": 0, "SKIP": 0, "long_output": "PASS"}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_checks_pass_with_the_whole_long_output(tmp_path):
    assert judged(tmp_path)["long_output"] == "PASS"
