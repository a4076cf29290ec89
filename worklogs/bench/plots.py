"""Small SVG plots as text, for one page without scripts: axes, points, bars, a timeline.

Colours are classes, whose variables LIGHT and DARK set, so a plot follows its page. Every mark has a title, which
browsers show under the pointer.
"""
import dataclasses
import html
import math
from collections.abc import Sequence

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
# Classes c0 to c4: an ordered scale, from little to much. s0 to s5: series without order. Both can be told apart with
# the common colour blindnesses.
STYLE = """
svg.swatch { display: inline-block; width: 10px !important; height: 10px; }
svg.plot { width: 100%; max-width: 760px; height: auto; font: 12px system-ui, sans-serif; color: var(--ink); }
svg.plot text { fill: currentColor; }
svg.plot .grid { stroke: var(--line); stroke-width: 1; }
svg.plot .axis { stroke: var(--soft); stroke-width: 1; }
svg.plot .point { fill-opacity: .75; }
svg.plot .goal { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 4; }
svg.plot .mark { stroke: var(--ink); stroke-width: 2.5; }
svg.plot .none { fill: var(--soft); } svg.plot .bad { fill: var(--bad); }
svg.plot .c0 { fill: var(--c0); } svg.plot .c1 { fill: var(--c1); } svg.plot .c2 { fill: var(--c2); }
svg.plot .c3 { fill: var(--c3); } svg.plot .c4 { fill: var(--c4); }
svg.plot .s0 { fill: var(--s0); } svg.plot .s1 { fill: var(--s1); } svg.plot .s2 { fill: var(--s2); }
svg.plot .s3 { fill: var(--s3); } svg.plot .s4 { fill: var(--s4); } svg.plot .s5 { fill: var(--s5); }
"""
LIGHT = ("--c0:#d94801;--c1:#e08214;--c2:#a6a06a;--c3:#4b94b8;--c4:#08519c;"
         "--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#cc79a7;--s4:#a98600;--s5:#56758a;")
DARK = ("--c0:#ff8a4c;--c1:#f5b05c;--c2:#d5cf9a;--c3:#7fc0e3;--c4:#5aa2ff;"
        "--s0:#56b4e9;--s1:#ff9e57;--s2:#3fd0a4;--s3:#e8a3c9;--s4:#e6c84b;--s5:#a9bcc8;")


@dataclasses.dataclass(frozen=True)
class Point:
    """x, y in the axes' units. style: a class of STYLE. title: what is shown under the pointer."""

    x: float
    y: float
    style: str = "s0"
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Bar:
    """value: its height. mark: where a line across stands (a bound), None for none. label: under the bar."""

    label: str
    value: float | None
    mark: float | None = None
    style: str = "s0"
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Stretch:
    """A piece of a timeline's row, from `start` to `end` in seconds."""

    row: int
    start: float
    end: float
    style: str
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A scale: from `low` to `high`, linear or logarithmic, with its ticks."""

    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 to 1; outside values lie at the ends."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values within the scale."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if math.log10(self.high / self.low) < 3.2 else (1, )
            found = [step * 10.0 ** power for power in decades for step in steps]
        else:
            raw = (self.high - self.low) / 5
            unit = 10.0 ** math.floor(math.log10(raw))
            step = next(unit * times for times in (1, 2, 2.5, 5, 10) if unit * times >= raw * 0.999)
            found = [index * step for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [value for value in found if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]


def axis(label: str, values: Sequence[float], log: bool = False, least: float | None = None) -> Axis:
    """A scale that holds all values (and `least`); logarithmic where asked for and where more than 0 is to be shown."""
    known = [value for value in (*values, *(() if least is None else (least, ))) if math.isfinite(value)]
    if log:
        known = [value for value in known if value > 0]
    if not known:
        return Axis(label, 1.0, 10.0, True) if log else Axis(label, 0.0, 1.0)
    low, high = min(known), max(known)
    if log:
        return Axis(label, low / 1.15, high * 1.15, True)
    low = min(low, 0.0)
    return Axis(label, low, high + (high - low) * 0.05 if high > low else low + 1.0)


def short(value: float) -> str:
    """A number for a tick: 12K, 0.5, 250."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def scatter(name: str, points: Sequence[Point], x: Axis, y: Axis, goal: float | None = None) -> str:
    """Points; `goal` is a dashed line across at that y."""
    marks = [f'<circle class="point {point.style}" cx="{_x(x, point.x):.1f}" cy="{_y(y, point.y):.1f}" r="3.2">'
             f'{_title(point.title)}</circle>' for point in points]
    return _frame(name, x, y, marks, goal)


def bars(name: str, found: Sequence[Bar], y: Axis, x_label: str) -> str:
    """Bars side by side, with marks."""
    room = (WIDTH - LEFT - RIGHT) / max(1, len(found))
    width = min(46.0, room * 0.7)
    step = math.ceil(len(found) / 24)
    marks = []
    for index, bar in enumerate(found):
        middle = LEFT + room * (index + 0.5)
        if bar.value is not None:
            top = _y(y, bar.value)
            marks.append(f'<rect class="{bar.style}" x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                         f'height="{max(0.0, HEIGHT - BOTTOM - top):.1f}">{_title(bar.title)}</rect>')
        if bar.mark is not None:
            marks.append(f'<line class="mark" x1="{middle - width / 2 - 2:.1f}" x2="{middle + width / 2 + 2:.1f}" '
                         f'y1="{_y(y, bar.mark):.1f}" y2="{_y(y, bar.mark):.1f}">{_title(bar.title)}</line>')
        if index % step == 0:
            marks.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
                         f'{html.escape(bar.label)}</text>')
    return _frame(name, Axis(x_label, 0.0, 1.0), y, marks, x_ticks=False)


def timeline(name: str, stretches: Sequence[Stretch], rows: int, x: Axis) -> str:
    """Stretches in `rows` rows, the first on top."""
    height = TOP + BOTTOM + max(1, rows) * 22
    room = (height - TOP - BOTTOM) / max(1, rows)
    marks = []
    for piece in stretches:
        left, right = _x(x, piece.start), _x(x, piece.end)
        marks.append(f'<rect class="{piece.style}" x="{left:.2f}" y="{TOP + piece.row * room + 2:.1f}" '
                     f'width="{max(0.6, right - left):.2f}" height="{room - 4:.1f}">{_title(piece.title)}</rect>')
    return _frame(name, x, Axis("stream", 0.0, 1.0), marks, height=height, y_ticks=False)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """HTML: (class, words) each with a swatch."""
    swatch = ('<svg class="plot swatch" viewBox="0 0 10 10" aria-hidden="true">'
              '<rect class="{}" width="10" height="10"/></svg>')
    return '<p class="legend">' + " ".join(
        f"<span>{swatch.format(style)} {html.escape(words)}</span>" for style, words in entries) + "</p>"


def rows_of(spans: Sequence[tuple[float, float]]) -> list[int]:
    """A row for each (start, end) such that none overlap: the first that is free. Its order is that of the spans'."""
    free: list[float] = []
    rows = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda one: spans[one]):
        start, end = spans[index]
        row = next((row for row, until in enumerate(free) if until <= start + 1e-9), len(free))
        if row == len(free):
            free.append(end)
        free[row] = end
        rows[index] = row
    return rows


def _x(scale: Axis, value: float) -> float:
    return LEFT + scale.place(value) * (WIDTH - LEFT - RIGHT)


def _y(scale: Axis, value: float, height: int = HEIGHT) -> float:
    return height - BOTTOM - scale.place(value) * (height - TOP - BOTTOM)


def _title(words: str) -> str:
    return f"<title>{html.escape(words)}</title>" if words else ""


def _frame(name: str, x: Axis, y: Axis, marks: Sequence[str], goal: float | None = None, height: int = HEIGHT,
           x_ticks: bool = True, y_ticks: bool = True) -> str:
    """The plot around its marks."""
    parts = [f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(name)}">']
    bottom, right = height - BOTTOM, WIDTH - RIGHT
    for value in y.ticks() if y_ticks else ():
        place = _y(y, value, height)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}"/>'
                     f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in x.ticks() if x_ticks else ():
        place = _x(x, value)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{bottom}"/>'
                     f'<text x="{place:.1f}" y="{bottom + 15}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
                 f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{bottom}"/>')
    parts += marks
    if goal is not None and y.low <= goal <= y.high:
        place = _y(y, goal, height)
        parts.append(f'<line class="goal" x1="{LEFT}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}">'
                     f'{_title(f"goal: {goal:g}")}</line>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{height - 8}" text-anchor="middle">'
                 f'{html.escape(x.label)}</text>'
                 f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
                 f'{html.escape(y.label)}</text></svg>')
    return "\n".join(parts)


def by_share(share: float | None) -> str:
    """The class of an ordered scale for a share from 0 to 1."""
    return "none" if share is None else f"c{min(4, int(share * 5))}"
