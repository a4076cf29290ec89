"""First proof that the overlay lies in the tree: the hashes of sources, receipt and deployed files agree."""

from __future__ import annotations

import json
from pathlib import Path

from patches.engine import pins, receipt
from patches.engine.errors import Refused
from patches.engine.layout import RECEIPT, Layout
from patches.engine.plan import plan_apply
from patches.engine.transaction import JOURNAL

_HASHED = (("path", "sha256"), ("kept", "kept_sha256"))


def hash_differences(layout: Layout, known: pins.Pins, root: Path) -> tuple[list[str], str]:
    """One line for each difference, and the pin.

    None: the receipt is what these sources give on this stock, and the files are what the receipt says. Raises Refused
    when the repository itself is not in order, or the receipt is broken.
    """
    if (root / JOURNAL).exists():
        return ["an apply or revert was killed half-way: run `bash patch_ops.sh status`, which undoes it"], "unknown"
    if not (root / RECEIPT).is_file():
        return [f"{RECEIPT} does not exist: run `bash patch_ops.sh apply`"], "unknown"
    plan = plan_apply(layout, known, root)
    differences = list(plan.refusals) + [f"{path} is not as the sources say" for path in plan.changes]
    differences += _against_receipt(root)
    return differences, plan.pin


def _against_receipt(root: Path) -> list[str]:
    differences = []
    for path, expected in _named_in((root / RECEIPT).read_bytes()):
        file = root / path
        if not file.is_file():
            differences.append(f"{path} is in the receipt and does not exist")
        elif receipt.sha256(file.read_bytes()) != expected:
            differences.append(f"{path} is not the file that the receipt names")
    return differences


def _named_in(data: bytes) -> list[tuple[str, str]]:
    """(path, SHA-256) of every deployed and every kept file that a receipt names."""
    try:
        entries = [entry for overlay in json.loads(data)["overlays"] for entry in overlay["files"]]
        pairs = [(entry[path], entry[digest]) for entry in entries for path, digest in _HASHED]
    except (ValueError, LookupError, TypeError) as error:
        raise Refused(f"{RECEIPT} is broken ({error!r}): run `bash patch_ops.sh apply`") from None
    return [(path, digest) for path, digest in pairs if path is not None]
