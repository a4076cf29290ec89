"""What this repository deploys: the rows of the manifest, their files, and all that can be wrong with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from patches.engine import markers
from patches.engine.errors import Refused
from patches.manifest import OVERLAYS, Overlay

KINDS = ("addition", "extension", "edit", "replacement")
RECEIPT = "overlay/receipt.json"
_KEPT = "_stock"
_SHOWN = 5  # names in one line
_TO_LF = r"`grep -rlZ $'\r' vllm_overrides patches | xargs -0 sed -i 's/\r$//'`"
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Piece:
    """One file of one row. path: below ``vllm/``. source: the file of this repository that it is made from."""

    row: Overlay
    path: str
    source: Path


@dataclass(frozen=True)
class Layout:
    """The folders and the table that the engine works from; tests make their own."""

    overrides: Path
    edits: Path
    overlays: tuple[Overlay, ...]

    @classmethod
    def of_repository(cls) -> Layout:
        """The layout of the repository that this file lies in."""
        root = Path(__file__).resolve().parents[2]
        return cls(root / "vllm_overrides", root / "patches" / "edits", OVERLAYS)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All files of all rows, in the order of the table."""
        return tuple(piece for row in self.overlays for piece in self.pieces_of(row))

    def pieces_of(self, row: Overlay) -> list[Piece]:
        """The files of one row: one, or all of a folder."""
        if row.kind == "edit":
            return [Piece(row, row.target, self.edits / (row.target + ".patch"))]
        if not row.target.endswith("/"):
            return [Piece(row, row.target, self.overrides / row.target)]
        return [
            Piece(row, row.target + name, self.overrides / row.target / name)
            for name in files_below(self.overrides / row.target)
        ]

    def check(self) -> None:
        """Raises Refused with every fault of the table and of the files that belong to it."""
        faults = [*_table_faults(self.overlays), *self._file_faults()]
        if faults:
            raise Refused(*faults)

    def _file_faults(self) -> Iterator[str]:
        if not self.overrides.is_dir():
            yield f"{self.overrides} does not exist: take the whole repository along"
            return
        owners = Counter(piece.source for piece in self.pieces)
        listed = {self.overrides / name for name in files_below(self.overrides)}
        listed |= {self.edits / name for name in files_below(self.edits)}
        if unlisted := sorted(self._shown(source) for source in listed - owners.keys()):
            yield f"in no row: {some(unlisted)}: add rows to patches/manifest.py, or take the files away"
        for source in sorted(source for source, count in owners.items() if count > 1):
            yield f"{self._shown(source)} is in {owners[source]} rows: leave it in one"
        for row in self.overlays:
            if not self.pieces_of(row):
                yield f"row {row.id}: no file under vllm_overrides/{row.target}"
        for piece in self.pieces:
            yield from self._source_faults(piece)
        # Of a checkout that turned line endings over every file has them, and one line must do.
        present = sorted({piece.source for piece in self.pieces if piece.source.is_file()})
        if crlf := [self._shown(source) for source in present if b"\r\n" in source.read_bytes()]:
            yield f"CRLF line endings in {some(crlf)}: take a fresh git clone, or {_TO_LF}"

    def _source_faults(self, piece: Piece) -> Iterator[str]:
        shown = self._shown(piece.source)
        if not piece.source.is_file():
            yield f"row {piece.row.id}: {shown} does not exist"
            return
        data = piece.source.read_bytes()
        if not markers.can_carry_marker(piece.path):
            yield f"{shown}: files of this type have no comments, so they cannot carry the marker: use another type"
        if markers.holds_marker(data):
            yield f"{shown} holds a marker line, which is added when the file is deployed: take it out"

    def _shown(self, source: Path) -> str:
        return source.relative_to(self.overrides.parent).as_posix()


def some(names: list[str]) -> str:
    """Names for one line: the first few, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def kept_path(path: str) -> str:
    """Where the stock file lies while ours is at its path: ``x.py`` becomes ``x_stock.py``."""
    pure = PurePosixPath(path)
    return str(pure.with_name(pure.stem + _KEPT + pure.suffix))


def files_below(folder: Path) -> list[str]:
    """Every file below folder, relative to it, sorted; what Python compiled is left out."""
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return sorted(p.as_posix() for p in found if "__pycache__" not in p.parts)


def symbol_place(row: Overlay, symbol: str) -> tuple[str, str]:
    """(file, dotted name) of a symbol as rows write them: ``Name`` of the target, or ``other/file.py:Name``."""
    path, colon, name = symbol.rpartition(":")
    return (path if colon else row.target, name)


def _table_faults(overlays: tuple[Overlay, ...]) -> Iterator[str]:
    ids = Counter(row.id for row in overlays)
    for key, count in (ids + Counter("target " + row.target for row in overlays)).items():
        if count > 1:
            yield f"{count} rows have the {key if key.startswith('target ') else 'id ' + key}: make it one row"
    for row in overlays:
        for fault in _row_faults(row):
            yield f"row {row.id}: {fault}"
        for other in row.requires:
            if other not in ids:
                yield f"row {row.id}: requires {other}, which is no row"


def _row_faults(row: Overlay) -> Iterator[str]:
    path = PurePosixPath(row.target)
    if not _ID.fullmatch(row.id):
        yield "the id must be kebab-case"
    for name in ("reason", "upstream", "remove_when", "test"):
        if not getattr(row, name).strip():
            yield f"{name} is empty"
    if row.kind not in KINDS:
        yield f"kind {row.kind!r} is none of {', '.join(KINDS)}"
    if path.is_absolute() or ".." in path.parts or row.target.rstrip("/") != str(path) or path.stem.endswith(_KEPT):
        yield f"target {row.target!r} must be a plain path below vllm/, not ending in {_KEPT}.py"
    if row.target == RECEIPT:
        yield "that path is the receipt's"
    if row.kind != "addition" and path.suffix != ".py":
        yield "only .py files of stock can be changed: their syntax trees are what the pins record"
    if row.kind == "extension" and path.name == "__init__.py":
        yield "__init__.py cannot be extended (its sibling would be another module): make it an edit"
    for symbol in row.symbols:
        if row.kind == "addition" and ":" not in symbol:
            yield f"symbol {symbol}: an addition has no stock file of its own, write path.py:Symbol"
