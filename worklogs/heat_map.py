"""A table of shares as an SVG picture: one square per cell, the darker the more."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Pixels.
CELL, ROW, LEFT, TOP, BELOW = 84, 44, 96, 64, 48
WORST, BEST = (252, 228, 214), (27, 94, 63)
FONT = 'font-family="sans-serif" fill="#222"'


def svg(title: str, across: str, down: str, columns: Sequence[str], rows: Sequence[str],
        cells: Sequence[Sequence[tuple[int, int] | None]]) -> str:
    """The picture's file.

    Args:
        across, down: what the columns and the rows are. cells: per row and column (how many, of how many), or None for
            a cell that was not measured.
    """
    width, height = LEFT + CELL * len(columns) + 16, TOP + ROW * len(rows) + BELOW
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>', _text(LEFT, 26, title, 15, "start"),
           _text(LEFT, 50, down, 12, "end", dx=-8)]
    for place, name in enumerate(columns):
        out.append(_text(LEFT + CELL * (place + 0.5), TOP + ROW * len(rows) + 18, name, 12))
    out.append(_text(LEFT + CELL * len(columns) / 2, height - 10, across, 12))
    for line, (name, values) in enumerate(zip(rows, cells, strict=True)):
        y = TOP + ROW * line
        out.append(_text(LEFT, y + ROW / 2 + 4, name, 12, "end", dx=-8))
        for place, value in enumerate(values):
            out += _cell(LEFT + CELL * place, y, value)
    return "\n".join([*out, "</svg>", ""])


def _cell(x: float, y: float, value: tuple[int, int] | None) -> list[str]:
    share = value[0] / value[1] if value and value[1] else None
    colour = "#eee" if share is None else "#" + "".join(
        f"{round(low + (high - low) * share):02x}" for low, high in zip(WORST, BEST, strict=True))
    said = "" if share is None or value is None else f"{value[0]} of {value[1]}"
    return [f'<rect x="{x:g}" y="{y:g}" width="{CELL - 2}" height="{ROW - 2}" rx="3" fill="{colour}"/>',
            _text(x + CELL / 2 - 1, y + ROW / 2 + 4, said, 13, fill="#fff" if share and share > 0.5 else "")]


def _text(x: float, y: float, text: str, size: int, anchor: str = "middle", dx: int = 0, fill: str = "") -> str:
    style = FONT.replace("#222", fill) if fill else FONT
    return f'<text x="{x + dx:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" {style}>{escape(text)}</text>'
