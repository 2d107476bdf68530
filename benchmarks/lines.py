"""How large the code is, and how much of it stands twice.

    python benchmarks/lines.py [CHECKOUT]

Lines of code are counted without docstrings, comments, blank lines and the Args class. `copied` is what a user of
`utils/eject.py` gets of utils/ beside the script. A line of a `train` is shared where three or more scripts have it.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOTS = ("grpo", "dpo", "sft", "ppo", "sac", "bc", "dt")


def code_lines(text: str, inside: str = "") -> list[str]:
    """The stripped lines of code of a source text, or of its top-level function `inside`."""
    tree, lines = ast.parse(text), text.splitlines()
    dropped = set()
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.ClassDef) and node.name == "Args":
            dropped |= set(range(node.lineno, node.end_lineno + 1))
    kept = range(1, len(lines) + 1)
    if inside:
        (node,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == inside)
        kept = range(node.lineno, node.end_lineno + 1)
    stripped = [lines[i - 1].strip() for i in kept if i not in dropped]
    return [line for line in stripped if line and not line.startswith("#")]


def shared(folder: Path, scripts: tuple[str, ...]) -> str:
    trains = {script: code_lines((folder / f"{script}.py").read_text(), "train") for script in scripts}
    count = Counter(line for lines in trains.values() for line in set(lines))
    total, again = (
        sum(map(len, trains.values())),
        sum(count[line] >= 3 for lines in trains.values() for line in lines),
    )
    return f"{again} of {total} lines ({again / total:.0%})"


def main(root: Path) -> None:
    scripts = sorted(path.stem for path in (root / "algos").glob("*.py"))
    sums = {"algos": 0, "utils": 0}
    for script in scripts:
        path = root / f"algos/{script}.py"
        own = len(code_lines(path.read_text()))
        ejected = subprocess.run([sys.executable, root / "utils/eject.py", path], capture_output=True, text=True)
        copied = len(code_lines(ejected.stdout)) - own if ejected.returncode == 0 else float("nan")
        sums["algos"] += own
        print(f"algos/{script}.py: {own} lines of code, copied {copied}")
    for path in sorted((root / "utils").glob("*.py")):
        sums["utils"] += (lines := len(code_lines(path.read_text())))
        print(f"utils/{path.name}: {lines}")
    print(f"algos/ {sums['algos']}, utils/ {sums['utils']}, together {sum(sums.values())}")
    print(f"lines of `train` that three or more share: of the roots {shared(root / 'algos', ROOTS)}, of all scripts "
          f"{shared(root / 'algos', tuple(scripts))}")  # fmt: skip
    for folder in ("tests", "benchmarks"):
        lines = sum(len(path.read_text().splitlines()) for path in (root / folder).rglob("*.py"))
        print(f"{folder}/: {lines} lines of Python")
    print(f"README.md: {len((root / 'README.md').read_text().split())} words")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1])
