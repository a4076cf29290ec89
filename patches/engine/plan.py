"""What has to change in the tree: every row is checked here, before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from patches.engine import pins, receipt
from patches.engine.errors import Refused
from patches.engine.files import Content
from patches.engine.layout import RECEIPT, Layout, kept_path, some
from patches.engine.states import Examination, Finding, State
from patches.engine.stock import Tree

REFUSED = (State.FOREIGN, State.MISSING)


@dataclass(frozen=True)
class Plan:
    """pin: of the tree. findings: the state of every target. leaving: files of rows that are no more, path -> id.

    changes: path -> content (None: absent), in the order in which to make them; only what really changes. refusals
    and warnings: one line each. With a refusal there are no changes.
    """

    tree: Path
    pin: str
    findings: list[Finding]
    leaving: dict[str, str]
    changes: dict[str, Content | None]
    refusals: list[str]
    warnings: list[str]

    @property
    def exit_code(self) -> int:
        """0 clean, 1 drift, 2 refused."""
        return 2 if self.refusals else 1 if any(finding.drift for finding in self.findings) else 0


def plan_apply(layout: Layout, known: pins.Pins, root: Path) -> Plan:
    """What apply would do to the tree at root. Raises Refused when the repository itself is not in order."""
    layout.check()
    known.check(layout.overlays)
    tree = Tree(root)
    examination = Examination(layout, known, tree)
    findings = examination.findings
    leaving = {path: marker for path, marker in tree.marked.items() if path not in {f.piece.path for f in findings}}
    refusals = _refusals(findings)
    warnings = [f"{f.piece.path}: DRIFT: {f.drift}" for f in findings if f.drift]
    wanted: dict[str, Content | None] = {}
    if not refusals:
        wanted |= _removals(tree, leaving)
        wanted |= {kept_path(f.piece.path): f.original for f in findings if f.original}
        wanted |= {f.piece.path: f.deployed for f in findings}
        wanted[RECEIPT] = receipt.receipt_of(layout, examination.pin, findings)
    return Plan(root, examination.pin, findings, leaving, _really(tree, wanted), refusals, warnings)


def _refusals(findings: list[Finding]) -> list[str]:
    """One line for each cause, however many targets it concerns."""
    targets: dict[str, list[str]] = {}
    for f in findings:
        if f.state in REFUSED:
            targets.setdefault(f"{f.state.value}: {f.note}", []).append(f.piece.path)
    return [f"{some(paths)}: {cause}" for cause, paths in targets.items()]


def plan_revert(root: Path) -> dict[str, Content | None]:
    """The changes that bring the tree at root back to stock. Neither manifest nor pins are needed."""
    tree = Tree(root)
    wanted = _removals(tree, tree.marked)
    wanted[RECEIPT] = None
    return _really(tree, wanted)


def _removals(tree: Tree, ours: dict[str, str]) -> dict[str, Content | None]:
    """Stock's file where one was moved aside, nothing where ours was an addition."""
    wanted: dict[str, Content | None] = dict.fromkeys(sorted(tree.left_behind))
    for path in ours:
        if path in tree.kept and tree.read(kept_path(path)) is None:
            raise Refused(f"{kept_path(path)}, the stock file that {path} replaced, is gone: install vLLM 0.6.3 anew")
        wanted[path] = tree.read(kept_path(path))
        wanted[kept_path(path)] = None
    return wanted


def _really(tree: Tree, wanted: dict[str, Content | None]) -> dict[str, Content | None]:
    """Without the paths that are as wanted already."""
    changes: dict[str, Content | None] = {}
    for path, content in wanted.items():
        current = tree.read(path)
        if (current.data if current else None) != (content.data if content else None):
            changes[path] = content
    return changes
