"""First proof that the overlay lies in the tree: the hashes of sources, receipt and deployed files agree."""

from __future__ import annotations

import json
from pathlib import Path

from patches.engine import pins, receipt
from patches.engine.layout import RECEIPT, Layout
from patches.engine.plan import plan_apply
from patches.engine.transaction import JOURNAL


def hash_differences(layout: Layout, known: pins.Pins, root: Path) -> tuple[list[str], str]:
    """One line for each difference, and the pin.

    None: the receipt is what these sources give on this stock, and the files are what the receipt says. Raises Refused
    when the repository itself is not in order.
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
    for overlay in json.loads((root / RECEIPT).read_text(encoding="utf-8"))["overlays"]:
        for entry in overlay["files"]:
            for path, expected in ((entry["path"], entry["sha256"]), (entry["kept"], entry["kept_sha256"])):
                if path is None:
                    continue
                file = root / path
                if not file.is_file():
                    differences.append(f"{path} is in the receipt and does not exist")
                elif receipt.sha256(file.read_bytes()) != expected:
                    differences.append(f"{path} is not the file that the receipt names")
    return differences
