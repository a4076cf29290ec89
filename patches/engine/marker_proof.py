"""Second proof that the overlay lies in the tree: grep, by code that shares only the table with apply."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from patches.manifest import Overlay


def marker_differences(tree: Path, overrides: Path, overlays: tuple[Overlay, ...]) -> list[str]:
    """One line for each marker that should be in the tree and is not, or the reverse; empty when all is right."""
    wanted = sorted(_wanted(overrides, overlays))
    found = sorted(_found(tree))
    return [f"no marker of row {row} in {path}" for path, row in wanted if (path, row) not in found] + [
        f"unexpected marker of row {row} in {path}"
        for path, row in found
        if (path, row) not in wanted or found.count((path, row)) > 1
    ]


def _wanted(overrides: Path, overlays: tuple[Overlay, ...]) -> list[tuple[str, str]]:
    wanted = []
    for row in overlays:
        if row.target[-1] != "/":
            wanted.append((row.target, row.id))
            continue
        for folder, _, names in os.walk(overrides / row.target):
            if os.path.basename(folder) != "__pycache__":
                wanted += [(os.path.relpath(os.path.join(folder, name), overrides), row.id) for name in names]
    return wanted


def _found(tree: Path) -> list[tuple[str, str]]:
    done = subprocess.run(
        ["grep", "-rIoE", "--exclude-dir=__pycache__", "--null", r"^(#|//|<!--) vllm-overlay: [a-z0-9-]+", "."],
        cwd=tree, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode > 1:
        return [("grep", done.stderr.strip())]
    lines = [line.split("\0", 1) for line in done.stdout.splitlines()]
    return [(path[2:], text.rsplit(" ", 1)[1]) for path, text in lines]
