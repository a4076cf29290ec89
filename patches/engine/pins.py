"""The stock trees that are accepted: ``patches/pins.json``, cut down to what the rows stand on, and how it is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patches.engine import files
from patches.engine.digests import Digests, class_value
from patches.engine.errors import Refused
from patches.engine.layout import symbol_place
from patches.manifest import Overlay

PINS_FILE = Path(__file__).resolve().parents[1] / "pins.json"
_REPIN = "run `bash patch_ops.sh repin STOCK_SYMBOLS.json`, or repin with the tree of every pin"

# The digests of a whole stock file by its path, None where the tree has no such file.
Lookup = Callable[[str], Digests | None]


@dataclass(frozen=True)
class Pins:
    """stock: path -> pin -> digests, for every file that a row changes or stands on."""

    stock: dict[str, dict[str, Digests]]

    @property
    def names(self) -> list[str]:
        """The pins, sorted."""
        return sorted({pin for by_pin in self.stock.values() for pin in by_pin})

    def check(self, overlays: tuple[Overlay, ...]) -> None:
        """Raises Refused unless the pins hold exactly what the rows need, each of them."""
        needed = needed_by(overlays)
        if needed.keys() != self.stock.keys():
            differing = ", ".join(sorted(needed.keys() ^ self.stock.keys()))
            raise Refused(f"patches/pins.json does not go with the manifest ({differing}): {_REPIN}")
        for path, symbols in needed.items():
            if absent := sorted(set(self.names) - self.stock[path].keys()):
                raise Refused(f"patches/pins.json lacks {path} of {', '.join(absent)}: {_REPIN}")
            for pin, digests in self.stock[path].items():
                if symbols.keys() != digests.symbols.keys():
                    differing = ", ".join(sorted(symbols.keys() ^ digests.symbols.keys()))
                    raise Refused(
                        f"patches/pins.json, {path} of {pin}, does not go with the manifest ({differing}): {_REPIN}"
                    )

    def whole(self, path: str, digests: Digests | None) -> set[str]:
        """The pins whose file at path equals this one."""
        return {
            pin
            for pin, stock in self.stock.get(path, {}).items()
            if digests is not None and stock.whole == digests.whole
        }

    def lookup(self, pin: str) -> Lookup:
        """What is known of one pin."""
        return lambda path: self.stock.get(path, {}).get(pin)


def load(file: Path = PINS_FILE) -> Pins:
    """Reads what dump wrote."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        return Pins({path: {pin: _digests(entry) for pin, entry in by_pin.items()} for path, by_pin in raw.items()})
    except FileNotFoundError:
        raise Refused(f"{file} does not exist: {_REPIN}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(f"{file} is broken ({error}): {_REPIN}") from None


def _digests(entry: dict[str, Any]) -> Digests:
    return Digests(entry["whole"], dict(entry["symbols"]))


def dump(pins: Pins, file: Path = PINS_FILE) -> None:
    """Writes pins as JSON, the same bytes for the same pins."""
    raw = {path: {pin: vars(stock) for pin, stock in by_pin.items()} for path, by_pin in pins.stock.items()}
    files.write(file, files.Content((json.dumps(raw, indent=1, sort_keys=True) + "\n").encode()))


def read_table(table: Path) -> dict[str, Lookup]:
    """The trees in a table of symbols, by the name of their pin.

    table: JSON ``{path: {pin: {"digest": ..., "symbols": {name: {"digest": ...} or {"bases": [...]}}}}}``.
    """
    try:
        entries = json.loads(table.read_text(encoding="utf-8"))
        trees: dict[str, dict[str, Digests]] = {}
        for path, by_pin in entries.items():
            for pin, entry in by_pin.items():
                symbols = {name: _value(symbol) for name, symbol in entry["symbols"].items()}
                trees.setdefault(pin, {})[path] = Digests(entry["digest"], symbols)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(f"{table} cannot be read as a table of symbols: {error}") from None
    return {pin: tree.get for pin, tree in trees.items()}


def _value(symbol: dict[str, Any]) -> str:
    return symbol["digest"] if "digest" in symbol else class_value(symbol["bases"])


def cut(trees: Mapping[str, Lookup], overlays: tuple[Overlay, ...]) -> Pins:
    """The pins that the rows need, out of whole trees.

    Every tree must hold every file and symbol, else Refused: a row that stands on something that one pin lacks cannot
    be applied there.
    """
    faults: list[str] = []
    stock: dict[str, dict[str, Digests]] = {}
    for path, symbols in sorted(needed_by(overlays).items()):
        for pin, lookup in sorted(trees.items()):
            entry = lookup(path)
            if entry is None:
                users = [row.id for row in overlays if path in places_of(row)]
                faults.append(f"{pin} has no {path}, on which {_rows(users)}")
                continue
            faults += [
                f"{path} of {pin} has no symbol {name}, on which {_rows(users)}"
                for name, users in sorted(symbols.items())
                if name not in entry.symbols
            ]
            found = {name: entry.symbols[name] for name in sorted(symbols) if name in entry.symbols}
            stock.setdefault(path, {})[pin] = Digests(entry.whole, found)
    if faults:
        raise Refused(*faults)
    return Pins(stock)


def _rows(ids: Iterable[str]) -> str:
    return f"{', '.join(dict.fromkeys(ids))} stands: rework the row in patches/manifest.py and its code"


def places_of(row: Overlay) -> dict[str, list[str]]:
    """path -> symbols of it that the row names; the target of a row that changes stock is there, even with none."""
    places: dict[str, list[str]] = {} if row.kind == "addition" else {row.target: []}
    for symbol in row.symbols:
        path, name = symbol_place(row, symbol)
        places.setdefault(path, []).append(name)
    return places


def needed_by(overlays: tuple[Overlay, ...]) -> dict[str, dict[str, list[str]]]:
    """path -> symbol -> ids of the rows that name it."""
    needed: dict[str, dict[str, list[str]]] = {}
    for row in overlays:
        for path, names in places_of(row).items():
            symbols = needed.setdefault(path, {})
            for name in names:
                symbols.setdefault(name, []).append(row.id)
    return needed
