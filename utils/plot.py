"""The curve of a run as a picture."""

from fnmatch import fnmatch
from pathlib import Path


def plot(history: list[dict], curves: dict, title: str, path: Path) -> None:
    """A PNG with one panel for each entry of `curves` whose columns were logged."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    logged = dict.fromkeys(column for row in history for column in row)
    names = {panel: columns.values() if isinstance(columns, dict) else columns for panel, columns in curves.items()}
    found = {panel: [c for c in logged if any(fnmatch(c, name) for name in names[panel])] for panel in curves}
    found = {panel: columns for panel, columns in found.items() if columns}
    figure, axes = plt.subplots(1, max(1, len(found)), figsize=(5 * max(1, len(found)), 3.6), squeeze=False)
    for axis, (panel, columns) in zip(axes[0], found.items()):
        lines = {column: [(row["step"], row[column]) for row in history if column in row] for column in columns}
        over_steps = not isinstance(curves[panel], dict)
        if not over_steps:
            lines = {"last row": [(x, history[-1][c]) for x, c in sorted(curves[panel].items()) if c in history[-1]]}
        for label, points in lines.items():
            axis.plot(*zip(*points), marker="o" if len(points) < 40 else None, markersize=3, label=label)
        axis.set(title=panel, xlabel="step" if over_steps else "")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
