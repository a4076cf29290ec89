"""The stock trees that are accepted: ``patches/pins.json``, cut down to what the rows stand on, and how it is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patches.engine import files
from patches.engine.digests import Digests, class_value
from patches.engine.errors import Refused
from patches.engine.layout import symbol_place
from patches.manifest import Overlay

PINS_FILE = Path(__file__).resolve().parents[1] / "pins.json"
_REPIN = "run `bash patch_ops.sh repin STOCK_SYMBOLS.json`"


@dataclass(frozen=True)
class Pins:
    """stock: path -> pin -> digests, for every file that a row changes or stands on."""

    stock: dict[str, dict[str, Digests]]

    @property
    def names(self) -> list[str]:
        """The pins, sorted."""
        return sorted({pin for by_pin in self.stock.values() for pin in by_pin})

    def check(self, overlays: tuple[Overlay, ...]) -> None:
        """Raises Refused unless the pins hold exactly what the rows need."""
        needed = _needed(overlays)
        if needed.keys() != self.stock.keys():
            differing = ", ".join(sorted(needed.keys() ^ self.stock.keys()))
            raise Refused(f"patches/pins.json does not go with the manifest ({differing}): {_REPIN}")
        for path, symbols in needed.items():
            for pin, digests in self.stock[path].items():
                if symbols != digests.symbols.keys():
                    differing = ", ".join(sorted(symbols ^ digests.symbols.keys()))
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


def load(file: Path = PINS_FILE) -> Pins:
    """Reads what dump wrote."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused(f"{file} does not exist: {_REPIN}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"{file} is broken ({error}): {_REPIN}") from None
    return Pins({path: {pin: Digests(**stock) for pin, stock in by_pin.items()} for path, by_pin in raw.items()})


def dump(pins: Pins, file: Path = PINS_FILE) -> None:
    """Writes pins as JSON, the same bytes for the same pins."""
    raw = {path: {pin: vars(stock) for pin, stock in by_pin.items()} for path, by_pin in pins.stock.items()}
    files.write(file, files.Content((json.dumps(raw, indent=1, sort_keys=True) + "\n").encode()))


def cut(table: Path, overlays: tuple[Overlay, ...]) -> Pins:
    """The pins that the rows need, out of a table of whole trees.

    table: JSON ``{path: {pin: {"digest": ..., "symbols": {name: {"digest": ...} or {"bases": [...]}}}}}``. Every pin
    in it must hold every file and symbol, else Refused: a row that stands on something that one pin lacks cannot be
    applied there.
    """
    try:
        trees = json.loads(table.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{table} cannot be read as a table of symbols: {error}") from None
    names = sorted({pin for by_pin in trees.values() for pin in by_pin})
    faults: list[str] = []
    stock: dict[str, dict[str, Digests]] = {}
    for path, symbols in sorted(_needed(overlays).items()):
        for pin in names:
            entry = trees.get(path, {}).get(pin)
            faults += _lacking(path, pin, entry, symbols)
            if entry is not None:
                found = {name: _value(entry["symbols"][name]) for name in sorted(symbols) if name in entry["symbols"]}
                stock.setdefault(path, {})[pin] = Digests(entry["digest"], found)
    if faults:
        raise Refused(*faults)
    return Pins(stock)


def _lacking(path: str, pin: str, entry: dict[str, Any] | None, symbols: set[str]) -> Iterator[str]:
    if entry is None:
        yield f"{pin} has no {path}: correct the row in patches/manifest.py"
        return
    for name in sorted(symbols - entry["symbols"].keys()):
        yield f"{path} of {pin} has no symbol {name}: correct the row in patches/manifest.py"


def _value(symbol: dict[str, Any]) -> str:
    return symbol["digest"] if "digest" in symbol else class_value(symbol["bases"])


def _needed(overlays: tuple[Overlay, ...]) -> dict[str, set[str]]:
    """path -> the symbols of it that rows name; the target of every row that changes stock is there, even with none."""
    needed: dict[str, set[str]] = {}
    for row in overlays:
        if row.kind != "addition":
            needed.setdefault(row.target, set())
        for symbol in row.symbols:
            path, name = symbol_place(row, symbol)
            needed.setdefault(path, set()).add(name)
    return needed
