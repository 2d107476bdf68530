"""Drawings of the site as SVG text: curves of many seeds, dots of effects, the trees of the families; and one PNG.

Colours are classes, so that the style sheet gives them for light and dark screens.
"""

import math
import statistics
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 420, 260, 52, 34, 24  # a curve; small enough that its text can be read on a phone
MOST = 80  # points of a line: a drawing has no more pixels to tell them apart
STEP, ROW = 118, 30  # of a tree: from parent to child, from line to line


def thinned(values: list[float], most: int = MOST) -> list[tuple[float, float]]:
    """(step, value), where long rows are replaced by means of equal parts. What is not finite is left out."""
    size = max(1, math.ceil(len(values) / most))
    parts = [(start, values[start : start + size]) for start in range(0, len(values), size)]
    points = [(start + (len(part) + 1) / 2, statistics.fmean(part)) for start, part in parts]
    return [(step, value) for step, value in points if math.isfinite(value)]


def median(rows: list[list[float]]) -> list[float]:
    """Over the seeds, of the steps that all have."""
    return [statistics.median(column) for column in zip(*rows, strict=False)]


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from low to high."""
    raw = (high - low) / 4 or 1.0
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.99)
    return [round(k * step, 10) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def bounds(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def lines_of(points: list[tuple[float, float]], css: str) -> str:
    """A line, or a dot where there is one point only."""
    if len(points) == 1:
        ((x, y),) = points
        return f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    return f'<polyline class="{css}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def spread(points: list[tuple[float, float]], place: int, number: int) -> list[tuple[float, float]]:
    """Single evaluations stand side by side, or they would hide one another."""
    return [(x + (place + 0.5) / number - 0.5, y) for x, y in points] if len(points) == 1 else points


def svg(width: float, height: float, title: str, body: str, css: str = "") -> str:
    box = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg class="{css}" role="img" {box}><title>{escape(title)}</title>{body}</svg>'


def height_of(value: float, low: float, high: float, bottom: float) -> float:
    """Where a value is drawn; low: at the bottom."""
    return bottom - (value - low) / (high - low) * (bottom - TOP)


def grid(low: float, high: float, bottom: float, ylabel: str) -> list[str]:
    """The lines behind a drawing, with their numbers, and what these are."""
    body = [f'<text x="4" y="12">{escape(ylabel)}</text>']
    for tick in ticks(low, high):
        y = height_of(tick, low, high, bottom)
        body.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - 8}"/>')
        body.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    return body


def curve(groups: list[list[list[float]]], title: str, axis: tuple[int, str], ylabel: str) -> str:
    """Every seed as a thin line, each group's median as a thick one; the k-th group has the class `gk`. axis: steps
    between two points, and their name."""
    every, xlabel = axis
    seeds = [[thinned(row) for row in rows] for rows in groups]
    points = [point for rows in seeds for row in rows for point in row]
    low, high = bounds([y for _, y in points])
    longest = max(len(row) for rows in groups for row in rows)
    left, right = (1, longest) if longest > 1 else (0.5, 1.5)

    def at(x: float, y: float) -> tuple[float, float]:
        place = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - 8)
        return place, height_of(y, low, high, HEIGHT - BOTTOM)

    body = grid(low, high, HEIGHT - BOTTOM, ylabel)
    last = round(right * every)
    steps = {last, *(x for tick in ticks(left * every, last) if 0 < (x := round(tick)) < 0.85 * last)}
    for x in sorted(steps) if longest > 1 else ():
        place, half = at(x / every, low)[0], 4 * len(f"{x:,}")  # the last label ends where the drawing does
        body.append(f'<text x="{min(place, WIDTH - half):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{x:,}</text>')
    body.append(f'<text x="{WIDTH - 8}" y="{HEIGHT - 3}" text-anchor="end">{escape(xlabel)}</text>')
    for place, rows in enumerate(seeds):
        for number, row in enumerate(rows):
            spot = spread(row, place * len(rows) + number, len(rows) * len(seeds))
            body.append(lines_of([at(*point) for point in spot], f"seed g{place}") if row else "")
        if len(middle := thinned(median(groups[place]))) > 1:
            body.append(lines_of([at(*point) for point in middle], f"median g{place}"))
    return svg(WIDTH, HEIGHT, title, "".join(body), "curve")


def small(rows: list[list[float]], title: str) -> str:
    """For the wall: every seed and the median, without axes."""
    width, height = 150, 72
    seeds = [thinned(row, 40) for row in rows]
    points = [point for row in seeds for point in row]
    low, high = bounds([y for _, y in points])
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    left, right = (left, right) if left < right else (left - 0.5, right + 0.5)

    def at(x: float, y: float) -> tuple[float, float]:
        return 3 + (x - left) / (right - left) * (width - 6), height - 3 - (y - low) / (high - low) * (height - 6)

    body = [lines_of([at(*p) for p in spread(row, k, len(seeds))], "seed g0") for k, row in enumerate(seeds) if row]
    if len(middle := thinned(median(rows), 40)) > 1:
        body.append(lines_of([at(*point) for point in middle], "median g0"))
    return svg(width, height, title, "".join(body), "small")


def dots(runs: dict[str, list[float]], title: str, ylabel: str) -> str:
    """The seeds of each run of an effect, and their mean."""
    low, high = bounds([value for values in runs.values() for value in values])
    height, bottom = 230, 192
    body = grid(low, high, bottom, ylabel)
    for place, (name, values) in enumerate(runs.items()):
        x = LEFT + (place + 0.5) / len(runs) * (WIDTH - LEFT - 8)
        heights = [height_of(value, low, high, bottom) for value in values]
        places = [x + ((k * 7) % 10 - 4.5) * 1.6 for k in range(len(values))]  # side by side, the order says nothing
        body += [f'<circle class="seed g0" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in zip(places, heights)]
        if values:
            body.append(f'<path class="median g0" d="M{x - 14:.1f} {statistics.fmean(heights):.1f}h28"/>')
        lower = 15 * (place % 2) * (len(runs) > 3)  # long names in two rows
        body.append(f'<text x="{x:.1f}" y="{bottom + 18 + lower}" text-anchor="middle">{escape(name)}</text>')
    return svg(WIDTH, height, title, "".join(body), "curve")


def tree(root: str, children: dict[str, list[str]], lines: dict[str, int], field: dict[str, int]) -> str:
    """A family: each node leads to its script's page, each edge has the number of lines of the child's own."""
    body, place = [], {root: (0, 0)}

    def put(script: str, depth: int) -> None:
        place[script] = depth, len(place) - (script == root)
        for child in children.get(script, ()):
            put(child, depth + 1)

    put(root, 0)
    for script, (depth, row) in place.items():
        x, y = depth * STEP + 2, row * ROW + 15
        trunk = y + 11
        for child in children.get(script, ()):
            _, below = place[child]
            end = below * ROW + 15
            body.append(f'<path class="edge f{field[child]}" d="M{x + 18} {trunk}V{end}H{x + STEP}"/>')
            trunk = end
            body.append(f'<text class="own" x="{x + STEP - 8}" y="{end - 4}" text-anchor="end">{lines[child]}</text>')
        box = f'x="{x}" y="{y - 11}" width="{len(script) * 7.3 + 12:.0f}" height="22" rx="3"'
        name = f'<text x="{x + 6}" y="{y + 4}">{script}</text>'
        body.append(f'<a class="f{field[script]}" href="{script}.html"><rect {box}/>{name}</a>')
    width = max(depth * STEP + len(script) * 7.3 + 18 for script, (depth, _) in place.items())
    return svg(math.ceil(width), len(place) * ROW, f"{root}.py and its descendants", "".join(body), "tree")


def wall(curves: dict[str, list[list[float]]], path: Path) -> None:
    """All recorded curves as one picture, for the README."""
    from matplotlib.figure import Figure
    from PIL import Image

    columns = 9
    figure = Figure(figsize=(12, len(curves) / columns * 1.15))
    axes = figure.subplots(math.ceil(len(curves) / columns), columns)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (name, rows) in zip(axes.flat, curves.items()):
        for k, row in enumerate(rows):
            points = spread(thinned(row), k, len(rows))
            axis.plot(*zip(*points), "-" if len(points) > 1 else "o", color="#4477aa", alpha=0.25, linewidth=0.7, ms=2)
        axis.plot(*zip(*thinned(median(rows))), color="#22446a", linewidth=1.4)
        axis.set_title(name, fontsize=6.5, pad=2)
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=80)
    with Image.open(path) as picture:  # 32 colours are enough, and a third of the size
        picture.convert("RGB").quantize(32).save(path, optimize=True)
