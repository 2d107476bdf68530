"""How large the code is, and how much of it stands twice.

    python benchmarks/lines.py [CHECKOUT]

Lines of code are counted without docstrings, comments, blank lines and the Args class. `copied` is what a user of
`utils/eject.py` gets of utils/ beside the script. A line of a `train` is shared where three or more scripts have it.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.family import code_of, without_args  # noqa: E402

ROOTS = ("grpo", "dpo", "sft", "ppo", "sac", "dqn", "bc", "dt")


def size(path: Path) -> int:
    return len(without_args(code_of(path)))


def copied(root: Path, script: str) -> int:
    with tempfile.NamedTemporaryFile(suffix=".py") as file:
        subprocess.run([sys.executable, root / "utils/eject.py", root / f"algos/{script}.py"], stdout=file, check=True)
        return size(Path(file.name)) - size(root / f"algos/{script}.py")


def train(path: Path) -> list[str]:
    """The lines of its function `train`."""
    code = code_of(path)
    begin = next(i for i, line in enumerate(code) if line.startswith("def train("))
    end = next(i for i in range(begin + 1, len(code)) if not code[i].startswith((" ", ")")))
    return [line.strip() for line in code[begin:end]]


def shared(root: Path, scripts: tuple[str, ...]) -> str:
    trains = [train(root / f"algos/{script}.py") for script in scripts]
    count = Counter(line for lines in trains for line in set(lines))
    total, again = sum(map(len, trains)), sum(count[line] >= 3 for lines in trains for line in lines)
    return f"{again} of {total} lines ({again / total:.0%})"


def main(root: Path) -> None:
    scripts = tuple(sorted(path.stem for path in (root / "algos").glob("*.py")))
    for script in scripts:
        print(f"algos/{script}.py: {size(root / f'algos/{script}.py')} lines of code, copied {copied(root, script)}")
    sizes = {folder: [size(path) for path in (root / folder).glob("*.py")] for folder in ("algos", "utils")}
    print(f"algos/ {sum(sizes['algos'])}, utils/ {sum(sizes['utils'])} (largest file {max(sizes['utils'])})")
    print(f"shared lines of `train`: roots {shared(root, ROOTS)}, all scripts {shared(root, scripts)}")
    for folder in ("tests", "benchmarks"):
        lines = sum(len(path.read_text().splitlines()) for path in (root / folder).rglob("*.py"))
        print(f"{folder}/: {lines} lines of Python")
    print(f"README.md: {len((root / 'README.md').read_text().split())} words")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
