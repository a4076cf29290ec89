"""schemathesis asks what our /openapi.json allows, and what it does not: never a 5xx, nor another answer than it says.

Its own command runs, in which alone it tries the limits of every field (`coverage`), too. All of its requests are made
up by it; a header that is no part of the document keeps short what is generated for them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.conformance.exceptions import SCHEMATHESIS
from tests.conformance.forcing import SHORT


def ran(base: str, folder: Path, examples: int, *more: str) -> str:
    """What the command says. It must end with 0: nothing found."""
    config = folder / "schemathesis.toml"
    config.write_text("".join(
        f"[[operations]]\ninclude-path = {json.dumps(path)}\n" + "".join(f"checks.{check}.enabled = false\n"
                                                                       for check in checks)
        for path, checks in SCHEMATHESIS.items()))
    # One worker: with several, hypothesis comes upon a fault of Python 3.11's own parser, which counts its depth for
    # all threads together.
    done = subprocess.run([Path(sys.executable).parent / "schemathesis", "--config-file", config, "run",
                           f"{base}/openapi.json", "--header", f"{SHORT}: yes", "--max-examples", str(examples),
                           "--workers", "1", "--generation-deterministic", "--no-shrink", "--continue-on-failure",
                           "--request-timeout", "200", "--no-color", *more],
                          cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = re.sub(r"(?m)^( +curl .{300}).*$", r"\1...", done.stdout)
    assert done.returncode == 0, said[-8000:]
    return said


def check(base: str, folder: Path, examples: int, *more: str) -> None:
    said = ran(base, folder, examples, *more)
    paths = httpx.get(f"{base}/openapi.json").json()["paths"]
    operations = sum(len(methods) for methods in paths.values())
    assert f"Tested: {operations}" in said, said[-3000:]
    assert httpx.get(f"{base}/health").status_code == 200


@pytest.mark.timeout(600)
def test_what_the_document_allows_and_not(own_server, tmp_path):
    check(own_server.base, tmp_path, 10, "--phases", "fuzzing")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_limits_of_every_field(own_server, tmp_path):
    check(own_server.base, tmp_path, 60, "--phases", "coverage,fuzzing")
