"""The receipt ``vllm/overlay/receipt.json``: what lies in the tree, with hashes. A server checks itself by it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from patches.engine import VERSION
from patches.engine.files import Content
from patches.engine.layout import Layout, kept_path
from patches.engine.states import Finding
from patches.manifest import Overlay


def manifest_hash(layout: Layout) -> str:
    """One hash for all that is deployed: 64 hex digits over id, kind, path and source of every file, sorted.

    It can be computed from a receipt too (``source`` is in it), and it is the same whatever pin the overlay lies on.
    """
    lines = (f"{p.row.id} {p.row.kind} {p.path} {sha256(p.source.read_bytes())}\n" for p in layout.pieces)
    return sha256("".join(sorted(lines)).encode())


def receipt_of(layout: Layout, pin: str, findings: Iterable[Finding]) -> Content:
    """The receipt that goes with findings. It names no time and no place: the same overlay gives the same bytes."""
    findings = list(findings)
    receipt = {
        "engine": VERSION,
        "pin": pin,
        "count": len(layout.overlays),
        "manifest": manifest_hash(layout),
        "drift": {f.piece.path: f.drift for f in findings if f.drift},
        "overlays": [_entry(row, [f for f in findings if f.piece.row is row]) for row in layout.overlays],
    }
    return Content((json.dumps(receipt, indent=1) + "\n").encode())


def _entry(row: Overlay, findings: list[Finding]) -> dict[str, Any]:
    return {"id": row.id, "kind": row.kind, "symbols": list(row.symbols), "files": [_file(f) for f in findings]}


def _file(finding: Finding) -> dict[str, str | None]:
    assert finding.deployed is not None
    original = finding.original
    return {
        "path": finding.piece.path,
        "sha256": sha256(finding.deployed.data),
        "source": sha256(finding.piece.source.read_bytes()),
        "kept": kept_path(finding.piece.path) if original else None,
        "kept_sha256": sha256(original.data) if original else None,
    }


def sha256(data: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(data).hexdigest()
