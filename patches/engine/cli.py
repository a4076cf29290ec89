"""The commands of ``patch_ops.sh``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from patches.engine import pins, readme, receipt
from patches.engine.errors import Refused
from patches.engine.layout import RECEIPT, Layout
from patches.engine.locate import find_tree
from patches.engine.marker_proof import marker_differences
from patches.engine.plan import Plan, plan_apply, plan_revert
from patches.engine.states import State
from patches.engine.transaction import change, locked, undo_interrupted
from patches.engine.verify import hash_differences

REFUSED = 2


def main(arguments: Sequence[str]) -> int:
    """Runs one command; the exit status. plan and status: 0 clean, 1 drift, 2 refused. The others: 0 done, 2 refused or failed."""
    options = _parser().parse_args(arguments)
    try:
        if options.command in _REPOSITORY_COMMANDS:
            return _REPOSITORY_COMMANDS[options.command](options)
        return _TREE_COMMANDS[options.command](find_tree(options.root))
    except Refused as no:
        for reason in no.reasons:
            _complain(reason)
    except OSError as error:
        _complain(f"{error}: remove the cause and run `bash patch_ops.sh status`")
    return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="patch_ops.sh", description=__doc__)
    parser.add_argument("--root", metavar="DIR", help="the vllm folder, instead of the one that the interpreter would import")
    commands = [*_TREE_COMMANDS, *_REPOSITORY_COMMANDS]
    parser.add_argument("command", nargs="?", choices=commands, default="apply-and-verify")
    parser.add_argument("file", nargs="?", type=Path, help="repin: the table of symbols of the stock trees (JSON)")
    return parser


def _plan(root: Path) -> int:
    with locked(root):
        _undo(root)
        plan = plan_apply(Layout.of_repository(), pins.load(), root)
    _print_states(plan)
    _print_changes(plan)
    return plan.exit_code


def _status(root: Path) -> int:
    with locked(root):
        _undo(root)
        plan = plan_apply(Layout.of_repository(), pins.load(), root)
    _print_states(plan)
    if plan.refusals:
        print("apply would be refused")
    elif plan.changes and all(finding.state in (State.STOCK, State.DRIFT) for finding in plan.findings) and not plan.leaving:
        print("nothing is applied")
    elif plan.changes:
        print(f"not up to date: apply would change {len(plan.changes)} files")
    else:
        print("applied and up to date")
    return plan.exit_code


def _apply(root: Path) -> int:
    layout = Layout.of_repository()
    with locked(root):
        _undo(root)
        plan = plan_apply(layout, pins.load(), root)
        _warn(plan)
        if plan.refusals:
            raise Refused(*plan.refusals, f"nothing in {root} was touched")
        if plan.changes:
            change(root, plan.changes, "apply")
    digest = receipt.manifest_hash(layout)
    print(f"applied: {len(plan.changes)} changes, {len(layout.overlays)} overlays, pin {plan.pin}, manifest {digest[:12]}, {root}")
    return 0


def _verify(root: Path) -> int:
    layout = Layout.of_repository()
    differences, pin = hash_differences(layout, pins.load(), root)
    differences += marker_differences(root, layout.overrides, layout.overlays)
    if differences:
        for difference in differences:
            print(f"not verified: {difference}", file=sys.stderr)
        return REFUSED
    print(f"verified: hashes and markers of {len(layout.pieces)} files, pin {pin}")
    return 0


def _revert(root: Path) -> int:
    with locked(root):
        _undo(root)
        changes = plan_revert(root)
        if changes:
            change(root, changes, "revert")
    print(f"reverted: {len(changes)} changes, {root} is stock")
    folder = (root / RECEIPT).parent
    if folder.is_dir():
        print(f"warning: {folder} still holds files that are not ours, among them {next(folder.iterdir()).name}")
    return 0


def _apply_and_verify(root: Path) -> int:
    return _apply(root) or _verify(root)


def _readme(_: argparse.Namespace) -> int:
    readme.rewrite(Layout.of_repository().overlays)
    return 0


def _repin(options: argparse.Namespace) -> int:
    if options.file is None:
        raise Refused("repin needs the table of symbols: bash patch_ops.sh repin STOCK_SYMBOLS.json")
    found = pins.cut(options.file, Layout.of_repository().overlays)
    pins.dump(found)
    print(f"{len(found.stock)} stock files pinned")
    return 0


def _undo(root: Path) -> None:
    interrupted = undo_interrupted(root)
    if interrupted:
        print(f"undone: {interrupted}, which had been killed half-way")


def _print_states(plan: Plan) -> None:
    print(f"{plan.tree} (pin {plan.pin})")
    for finding in plan.findings:
        drifted = " (drift)" if finding.drift and finding.state is not State.DRIFT else ""
        print(f"{finding.state.value + drifted:8} {finding.piece.row.kind:11} {finding.piece.path}  {finding.piece.row.id}")
    for path, marker in plan.leaving.items():
        print(f"{State.STALE.value:8} {'no row':11} {path}  {marker}")
    counts = Counter(finding.state.value for finding in plan.findings)
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    _warn(plan)
    for refusal in plan.refusals:
        _complain(refusal)


def _print_changes(plan: Plan) -> None:
    for path, content in plan.changes.items():
        print(f"would {'write' if content else 'remove'} {path}")
    print(f"{len(plan.changes)} changes to make")


def _warn(plan: Plan) -> None:
    for warning in plan.warnings:
        print(f"warning: {warning}")


def _complain(reason: str) -> None:
    print(f"refused: {reason}", file=sys.stderr)


_TREE_COMMANDS: dict[str, Callable[[Path], int]] = {
    "plan": _plan, "apply": _apply, "verify": _verify, "revert": _revert, "status": _status, "apply-and-verify": _apply_and_verify,
}  # fmt: skip
_REPOSITORY_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"readme": _readme, "repin": _repin}
