"""The commands of ``patch_ops.sh``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from patches.engine import pins, readme, receipt, repin
from patches.engine.errors import Refused
from patches.engine.layout import RECEIPT, Layout
from patches.engine.locate import find_tree
from patches.engine.marker_proof import marker_differences
from patches.engine.plan import Plan, plan_apply, plan_revert
from patches.engine.states import State
from patches.engine.transaction import change, locked, undo_interrupted
from patches.engine.verify import hash_differences

DONE, REREAD, REFUSED = 0, 1, 2
STOPPED = 130  # what a shell reports after Ctrl-C
TREE_COMMANDS = ("plan", "apply", "verify", "revert", "status")
REPOSITORY_COMMANDS = ("readme", "repin")
DEFAULT = "apply-and-verify"


def main(arguments: Sequence[str], layout: Layout | None = None, pins_file: Path = pins.PINS_FILE) -> int:
    """Runs one command; the exit status.

    plan and status: 0 clean, 1 drift, 2 refused. ``repin --dry-run``: 0 no row to read again, 1 some, 2 refused. The
    others: 0 done, 2 refused or failed.

    layout and pins_file: this repository's, unless a test brings its own.
    """
    layout = layout or Layout.of_repository()
    try:
        options = _options(arguments)
        if options.command in REPOSITORY_COMMANDS:
            return _on_repository(options, layout, pins_file)
        return _on_tree(options.command, _Commands(find_tree(options.root, options.first), layout, pins_file))
    except Refused as no:
        for reason in no.reasons:
            _complain(reason)
    except OSError as error:
        _complain(f"{error}: remove the cause and run `bash patch_ops.sh status`")
    except KeyboardInterrupt:
        _complain("stopped from the keyboard; the tree is as it was")
        return STOPPED
    return REFUSED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}: `bash patch_ops.sh --help` shows what there is")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="patch_ops.sh", description="Lays the overlay over the installed vLLM.")
    parser.add_argument(
        "--root", metavar="DIR", help="the vllm folder, instead of the one that the interpreter would import"
    )
    parser.add_argument(
        "--first", action="store_true", help="of several vllm trees, take the one that the interpreter would import"
    )
    commands = (*TREE_COMMANDS, *REPOSITORY_COMMANDS, DEFAULT)
    parser.add_argument("command", nargs="?", choices=commands, default=DEFAULT)
    parser.add_argument(
        "arguments", nargs="*", help="repin: STOCK_SYMBOLS.json, or DIR PIN [DIR PIN ...] with untouched vllm folders"
    )
    parser.add_argument("--dry-run", action="store_true", help="repin: only say what is new")
    options = parser.parse_intermixed_args(arguments)
    if options.command != "repin" and (options.arguments or options.dry_run):
        parser.error(f"{options.command} takes no {'--dry-run' if options.dry_run else options.arguments[0]!r}")
    return options


def _on_repository(options: argparse.Namespace, layout: Layout, pins_file: Path) -> int:
    if options.command == "readme":
        readme.rewrite(layout.overlays)
        return DONE
    in_use = repin.pins_in_use(pins_file, options.arguments)
    trees = repin.read_trees(options.arguments, in_use, layout.overlays)
    lines, reread = repin.report(in_use, trees, layout.overlays) if in_use else (["no pins to compare with"], False)
    print("\n".join(lines), flush=True)
    found = pins.cut(trees, layout.overlays)
    if options.dry_run:
        return REREAD if reread else DONE
    pins.dump(found, pins_file)
    print(f"{len(found.stock)} stock files pinned: {', '.join(found.names)}")
    return DONE


def _on_tree(command: str, commands: _Commands) -> int:
    if command == DEFAULT:
        return commands.apply() or commands.verify()
    return getattr(commands, command)()


class _Commands:
    """What can be done to one tree; each returns the exit status."""

    def __init__(self, root: Path, layout: Layout, pins_file: Path) -> None:
        self._root = root
        self._layout = layout
        self._pins_file = pins_file

    def plan(self) -> int:
        plan = self._make_plan()
        _print_states(plan)
        for path, content in plan.changes.items():
            print(f"would {'write' if content else 'remove'} {path}")
        print(f"{len(plan.changes)} changes to make")
        return plan.exit_code

    def status(self) -> int:
        plan = self._make_plan()
        _print_states(plan)
        print(_summary(plan))
        return plan.exit_code

    def apply(self) -> int:
        with locked(self._root):
            _undo(self._root)
            plan = plan_apply(self._layout, pins.load(self._pins_file), self._root)
            _warn(plan)
            if plan.refusals:
                raise Refused(*plan.refusals[:-1], f"{plan.refusals[-1]} (nothing in {self._root} was touched)")
            if plan.changes:
                change(self._root, plan.changes, "apply")
        what = f"{len(self._layout.overlays)} overlays, pin {plan.pin}"
        manifest = receipt.manifest_hash(self._layout)[:12]
        print(f"applied: {len(plan.changes)} changes, {what}, manifest {manifest}, {self._root}")
        return DONE

    def verify(self) -> int:
        differences, pin = hash_differences(self._layout, pins.load(self._pins_file), self._root)
        differences += marker_differences(self._root, self._layout.overrides, self._layout.overlays)
        for difference in differences:
            print(f"not verified: {difference}", file=sys.stderr)
        if differences:
            return REFUSED
        print(f"verified: hashes and markers of {len(self._layout.pieces)} files, pin {pin}")
        return DONE

    def revert(self) -> int:
        with locked(self._root):
            _undo(self._root)
            changes = plan_revert(self._root)
            if changes:
                change(self._root, changes, "revert")
        print(f"reverted: {len(changes)} changes, {self._root} is stock")
        left = sorted(path.name for path in (self._root / RECEIPT).parent.glob("*"))
        if left:
            print(f"warning: {(self._root / RECEIPT).parent} holds files that are not ours: {', '.join(left)}")
        return DONE

    def _make_plan(self) -> Plan:
        with locked(self._root):
            _undo(self._root)
            return plan_apply(self._layout, pins.load(self._pins_file), self._root)


def _undo(root: Path) -> None:
    interrupted = undo_interrupted(root)
    if interrupted:
        print(f"undone: {interrupted}, which had been killed half-way")


def _print_states(plan: Plan) -> None:
    print(f"{plan.tree} (pin {plan.pin})")
    for finding in plan.findings:
        piece = finding.piece
        drifted = " (drift)" if finding.drift and finding.state is not State.DRIFT else ""
        print(f"{finding.state.value + drifted:8} {piece.row.kind:11} {piece.path}  {piece.row.id}")
    for path, marker in plan.leaving.items():
        print(f"{State.STALE.value:8} {'no row':11} {path}  {marker}")
    counts = Counter(finding.state.value for finding in plan.findings)
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    _warn(plan)
    for refusal in plan.refusals:
        _complain(refusal)


def _summary(plan: Plan) -> str:
    if plan.refusals:
        return "apply would be refused"
    if not plan.changes:
        return "applied and up to date"
    if not plan.leaving and all(finding.state in (State.STOCK, State.DRIFT) for finding in plan.findings):
        return "nothing is applied"
    return f"not up to date: apply would change {len(plan.changes)} files"


def _warn(plan: Plan) -> None:
    for warning in plan.warnings:
        print(f"warning: {warning}")


def _complain(reason: str) -> None:
    print(f"refused: {reason}", file=sys.stderr)
