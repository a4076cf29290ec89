"""Replays of what real clients sent: shapes/<client>.json, recorded from scripted scenarios of the named versions.

Long prompts that a client wrote itself are replaced by words of ours; all else is as it was sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conformance.checks import Check
from tests.conformance.forms import check_answer
from tests.conformance.target import Target

FOLDER = Path(__file__).parent / "shapes"


def recorded() -> list[tuple[str, dict[str, Any]]]:
    """(client/scenario, shape) of every recorded request; a shape has path and body."""
    return [(f"{held['client']}/{shape['name']}", shape) for file in sorted(FOLDER.glob("*.json"))
            for held in [json.loads(file.read_text(encoding="utf-8"))] for shape in held["shapes"]]


def _replay(shape: dict[str, Any]) -> Any:
    def run(target: Target) -> None:
        path, body = shape["path"], {**shape["body"], "model": target.model}
        check_answer(path, body, target.send(path, body))
    return run


CHECKS = [Check(f"clients/{name}", _replay(shape)) for name, shape in recorded()]
