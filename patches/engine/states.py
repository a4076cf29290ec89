"""In which state each target is, by looking at its bytes; a lost receipt does no harm."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from patches.engine.diffs import apply_diff, parse_diff
from patches.engine.digests import Digests
from patches.engine.errors import Refused
from patches.engine.files import Content
from patches.engine.layout import Layout, Piece, kept_path, symbol_place
from patches.engine.markers import with_marker
from patches.engine.pins import Pins
from patches.engine.stock import Tree
from patches.manifest import Overlay

_UNKNOWN = "install a supported vLLM, or review what changed there, rework the row and repin"


class State(str, Enum):
    """STOCK, APPLIED and STALE are fine; DRIFT is applied with a warning; FOREIGN and MISSING are refused."""

    STOCK = "STOCK"
    APPLIED = "APPLIED"
    STALE = "STALE"
    DRIFT = "DRIFT"
    FOREIGN = "FOREIGN"
    MISSING = "MISSING"


@dataclass(frozen=True)
class Finding:
    """One target's state.

    note: for a refused target, what is wrong and what to do. drift: how its stock file differs from every pin
    although the row's symbols do not, which an applied target keeps having. original: the stock file. deployed: what
    apply puts in its place.
    """

    piece: Piece
    state: State
    note: str = ""
    drift: str = ""
    original: Content | None = None
    deployed: Content | None = None


class Examination:
    """Compares one tree with a layout and the pins."""

    def __init__(self, layout: Layout, pins: Pins, tree: Tree) -> None:
        self._layout = layout
        self._pins = pins
        self._tree = tree

    @cached_property
    def findings(self) -> list[Finding]:
        """One per file that the rows deploy, in the order of the table."""
        return [self._finding(piece) for piece in self._layout.pieces]

    @cached_property
    def pin(self) -> str:
        """The pin that most changed files equal; ``a|b`` when all of them equal both, ``unknown`` when none does."""
        targets = {row.target for row in self._layout.overlays if row.kind != "addition"}
        equal = [pins for path in targets if (pins := self._pins.whole(path, self._digests(path)))]
        if not equal:
            return "unknown" if targets else "|".join(self._pins.names) or "unknown"
        votes = Counter(pin for pins in equal for pin in pins)
        best = sorted(pin for pin, count in votes.items() if count == max(votes.values()))
        return "|".join(best) if votes[best[0]] == len(equal) else best[0]

    def _finding(self, piece: Piece) -> Finding:
        try:
            drift = self._drift(piece.row)
            return self._addition(piece) if piece.row.kind == "addition" else self._change(piece, drift)
        except OSError as error:
            return Finding(piece, State.FOREIGN, f"{error}: put a plain file there, or nothing for an addition")
        except _No as no:
            return Finding(piece, no.state, no.reason)
        except Refused as no:
            return Finding(piece, State.FOREIGN, str(no))

    def _addition(self, piece: Piece) -> Finding:
        current = self._tree.read(piece.path)
        deployed = Content(with_marker(piece.source.read_bytes(), piece.path, piece.row.id))
        if current is not None and self._tree.marker(piece.path) is None:
            raise _No(State.FOREIGN, "a file that is not ours lies where ours belongs: move it away, or rename ours")
        if current is not None and self._tree.read(kept_path(piece.path)) is not None:
            raise _No(State.FOREIGN, "stock has a file of that name, so the row is no addition: make it an extension")
        return Finding(piece, _progress(current, deployed), deployed=deployed)

    def _change(self, piece: Piece, drift: str) -> Finding:
        ours = self._tree.marker(piece.path) is not None
        original = self._tree.original(piece.path)
        kept = self._tree.read(kept_path(piece.path))
        if original is None:
            lost = f"{kept_path(piece.path)}, which ours stands on, is gone" if ours else "stock has no such file"
            raise _No(State.MISSING, f"{lost}: install vLLM 0.6.3 anew")
        if not ours and kept is not None and kept_path(piece.path) not in self._tree.left_behind:
            raise _No(State.FOREIGN, f"{kept_path(piece.path)} exists and is not ours: move it away")
        deployed = Content(_deployed_bytes(piece, original), original.mode)
        state = _progress(self._tree.read(piece.path) if ours else None, deployed)
        if drift and state is State.STOCK:
            state = State.DRIFT
        return Finding(piece, state, drift=drift, original=original, deployed=deployed)

    def _drift(self, row: Overlay) -> str:
        """Empty when the row's stock file equals a pin, else how it drifted. Raises _No when the row has no footing."""
        fitting = self._fitting_pins(row)
        if row.kind == "addition":
            return ""
        equal = self._pins.whole(row.target, self._digests(row.target)) & fitting
        if equal & set(self.pin.split("|")):
            return ""
        if equal:
            return f"equals {' and '.join(sorted(equal))}, while the tree is {self.pin}"
        if not row.symbols:
            raise _No(State.FOREIGN, f"equals no pin, and the row names no symbol that could vouch for it: {_UNKNOWN}")
        return "equals no pin, but every symbol that the row stands on does"

    def _fitting_pins(self, row: Overlay) -> set[str]:
        """The pins in which all symbols of the row are as they are here. Raises _No when there is none."""
        differing: dict[str, list[str]] = {pin: [] for pin in self._pins.names}
        for symbol in row.symbols:
            path, name = symbol_place(row, symbol)
            if self._tree.original(path) is None:
                raise _No(State.MISSING, f"{path}, which has the row's symbol {name}, is gone: install vLLM 0.6.3 anew")
            digests = self._digests(path)
            here = digests.symbols.get(name) if digests else None
            for pin, stock in self._pins.stock[path].items():
                if here is None:
                    differing[pin].append(f"{path} has no {name}")
                elif stock.symbols[name] != here:
                    differing[pin].append(f"{path} {name} is [{here}], stock has [{stock.symbols[name]}]")
        fitting = {pin for pin, faults in differing.items() if not faults}
        if row.symbols and not fitting:
            nearest = min(differing, key=lambda pin: (len(differing[pin]), pin))
            faults = differing[nearest]
            more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
            raise _No(State.FOREIGN, f"{faults[0]}{more} (nearest pin {nearest}): {_UNKNOWN}")
        return fitting or set(self._pins.names)

    def _digests(self, path: str) -> Digests | None:
        try:
            return self._tree.digests(path)
        except OSError:
            return None  # the finding of that path says what is wrong with it


class _No(Exception):
    """A target that is refused, with its state."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


def _progress(ours: Content | None, deployed: Content) -> State:
    """ours: the file with our marker that lies there, if one does."""
    if ours is None:
        return State.STOCK
    return State.APPLIED if ours.data == deployed.data else State.STALE


def _deployed_bytes(piece: Piece, original: Content) -> bytes:
    source = piece.source.read_bytes()
    if piece.row.kind == "edit":
        name = f"patches/edits/{piece.path}.patch"
        try:
            text = source.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Refused(f"{name} is no UTF-8 ({error}): store it as UTF-8") from None
        source = apply_diff(original.data, parse_diff(text, name), name)
    return with_marker(source, piece.path, piece.row.id)
