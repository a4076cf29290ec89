"""Compares stock trees with the pins in use: what is new in them, and which rows somebody has to read again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patches.engine import pins
from patches.engine.errors import Refused
from patches.engine.layout import RECEIPT
from patches.engine.locate import find_tree
from patches.engine.pins import Lookup, Pins
from patches.engine.stock import Tree
from patches.engine.transaction import JOURNAL
from patches.manifest import Overlay

_USAGE = "repin STOCK_SYMBOLS.json, or repin DIR PIN [DIR PIN ...] with vllm folders that nothing was applied to"
# A pin stands in lists that | and , separate, and "unknown" is what a tree of no pin is called.
_PIN = re.compile(r"(?!unknown$)[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True)
class FileChange:
    """How one file of a tree differs from the pin in use, in what rows name.

    appeared: named by a row now, and not in the pin in use. whole: the syntax tree of the file as a whole differs.
    """

    path: str
    changed: list[str]
    vanished: list[str]
    appeared: list[str]
    whole: bool

    def touches(self, row: Overlay) -> list[str]:
        """What of it the row has to be read again for, as ``path:Symbol`` or ``path``.

        An edit stands on lines and a replacement on the whole file, so any change of their target counts; so it does
        for a row that names no symbol of its target.
        """
        names = pins.places_of(row).get(self.path)
        if names is None:
            return []
        touched = [f"{self.path}:{name}" for name in names if name in self.changed or name in self.vanished]
        all_counts = self.path == row.target and (row.kind in ("edit", "replacement") or not names)
        return touched or ([self.path] if self.whole and all_counts else [])


def pins_in_use(file: Path, arguments: Sequence[str]) -> Pins | None:
    """The pins that the trees are compared with; None when there are none, or none that can be read.

    Raises Refused for pins that cannot be read and would have to be kept.
    """
    try:
        return pins.load(file) if file.exists() else None
    except Refused:
        if len(arguments) == 1:
            return None  # a table names every pin, so it is the way out
        raise


def read_trees(arguments: Sequence[str], in_use: Pins | None, overlays: tuple[Overlay, ...]) -> dict[str, Lookup]:
    """The trees by pin: those of a table, or those at folders beside the pins in use. Raises Refused."""
    if len(arguments) == 1 and not Path(arguments[0]).is_dir():
        return pins.read_table(Path(arguments[0]))
    if not arguments or len(arguments) % 2:
        raise Refused(f"repin needs the table of symbols, or a tree and the name of its pin: {_USAGE}")
    trees = {pin: _pristine(folder, pin) for folder, pin in zip(arguments[::2], arguments[1::2], strict=True)}
    kept = {pin: in_use.lookup(pin) for pin in in_use.names if pin not in trees} if in_use else {}
    for path, symbols in pins.needed_by(overlays).items():
        for pin, lookup in kept.items():
            known = lookup(path)
            unknown = sorted(symbols.keys() - known.symbols.keys()) if known else [path]
            if unknown:
                raise Refused(f"nothing is known of {path} {unknown[0]} in pin {pin}: give its tree too, {_USAGE}")
    return kept | trees


def _pristine(folder: str, pin: str) -> Lookup:
    if not _PIN.fullmatch(pin):
        raise Refused(f"{pin!r} is no name for a pin: take small letters, digits, dots and hyphens, as in pypi-0.6.3")
    root = find_tree(folder)
    tree = Tree(root)
    if tree.marked or any((root / path).exists() for path in (RECEIPT, JOURNAL)):
        raise Refused(f"the overlay lies on {root}: `bash patch_ops.sh --root {root} revert`, or give a stock tree")
    return tree.digests


def changes(pin: str, base: str, in_use: Pins, tree: Lookup, overlays: tuple[Overlay, ...]) -> list[FileChange]:
    """How tree, to be pinned as pin, differs from the pin base in use; files without a difference are left out."""
    found = []
    for path, symbols in sorted(pins.needed_by(overlays).items()):
        old, new = in_use.lookup(base)(path), tree(path)
        before, now = old.symbols if old else {}, new.symbols if new else {}
        change = FileChange(
            path,
            changed=sorted(name for name in symbols if name in before and before[name] != now.get(name, before[name])),
            vanished=sorted(name for name in symbols if name not in now),
            appeared=sorted(name for name in symbols if name in now and name not in before),
            whole=old is None or new is None or old.whole != new.whole,
        )
        if change.changed or change.vanished or change.appeared or change.whole:
            found.append(change)
    return found


def report(in_use: Pins, trees: Mapping[str, Lookup], overlays: tuple[Overlay, ...]) -> tuple[list[str], bool]:
    """Lines that say what is new against the pins in use; whether a row has to be read again."""
    lines: list[str] = []
    reasons: dict[str, list[str]] = {}
    for pin, tree in sorted(trees.items()):
        bases = [pin] if pin in in_use.names else in_use.names
        compared = {base: changes(pin, base, in_use, tree, overlays) for base in bases}
        base = min(compared, key=lambda name: (_weight(compared[name]), name))
        lines += _lines(pin if base == pin else f"{pin} (new; against {base}, the nearest)", compared[base])
        for row in overlays:
            for place in (place for change in compared[base] for place in change.touches(row)):
                reasons.setdefault(f"  {row.id} ({row.test})", []).append(place)
    lines += [f"{pin}: no pin any more" for pin in in_use.names if pin not in trees]
    lines.append(f"rows to read again: {len(reasons) or 'none'}")
    lines += [f"{row}: {', '.join(dict.fromkeys(places))}" for row, places in reasons.items()]
    return lines, bool(reasons)


def _weight(found: list[FileChange]) -> tuple[int, int]:
    return sum(len(change.changed) + len(change.vanished) for change in found), len(found)


def _lines(title: str, found: list[FileChange]) -> Iterator[str]:
    counts = {kind: sum(len(getattr(change, kind)) for change in found) for kind in ("changed", "vanished", "appeared")}
    if not found:
        yield f"{title}: nothing changed"
        return
    yield f"{title}: {len(found)} files; symbols: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    for change in found:
        said = {kind: getattr(change, kind) for kind in counts if getattr(change, kind)}
        what = "; ".join(f"{kind} {', '.join(names)}" for kind, names in said.items())
        yield f"  {change.path}: {what or 'changed, in nothing that a row names'}"
