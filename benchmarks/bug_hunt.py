"""A bug to find, for teaching: a script with one unnamed mistake of the catalogue (tests/planted.py), and its curve.

    python benchmarks/bug_hunt.py new 7                    hunt-7/: the project with bug number 7, and hunt-7/curve.png
    python benchmarks/bug_hunt.py new 8 --script sac       of one script
    python benchmarks/bug_hunt.py reveal hunt-7            the line, why people make it, the test that catches it,
                                                           where it happened in public code

The number says which bug, to the computer alone. hunt-7/algos holds one script, which runs as ever; the mistake is in
it or in hunt-7/utils. The curve is of one run (seed 1) over those of the recorded seeds; many a bug hides from it.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from planted import BUGS, Edit  # noqa: E402

from benchmarks.curves import CURVES, LONG, recorded  # noqa: E402

RUN = "import json, sys; from benchmarks.curves import run_once; print(json.dumps(run_once(sys.argv[1], 1)))"


def candidates(script: str) -> list[tuple[Edit, str]]:
    """Bugs, each with the curve of a script that has it."""
    curves = {of: name for name, (of, *_) in reversed(CURVES.items()) if name not in LONG and recorded(name)}
    return [(edit, curves[name]) for edit in BUGS for name in dict.fromkeys(Path(file).stem for file in edit.files)
            if name in curves and script in ("", name)]  # fmt: skip


def choose(number: int, script: str) -> tuple[Edit, str]:
    found = candidates(script)
    if not found:
        sys.exit(f"error: there is no bug with a curve in {script}.py: give one of {', '.join(sorted(names()))}")
    return random.Random(number).choice(found)


def names() -> set[str]:
    return {CURVES[curve][0] for _, curve in candidates("")}


def new(number: tyro.conf.Positional[int], script: str = "", output_dir: Path = Path()) -> None:
    """Writes OUTPUT_DIR/hunt-NUMBER.

    Args:
        number: of the bug: any whole number.
        script: grpo, sac, ...: where the bug is to be; "": anywhere.
        output_dir: where the folder is made.
    """
    edit, curve = choose(number, script)
    folder = output_dir / f"hunt-{number}"
    if folder.exists():
        sys.exit(f"error: {folder} is there already: give another number, or move it away")
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for name in ("algos", "utils", "benchmarks"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for file in edit.files:
            (copy / file).write_text(edit.apply((ROOT / file).read_text(), file))
        done = subprocess.run([sys.executable, "-c", RUN, curve], cwd=copy, capture_output=True, text=True)
        of = CURVES[curve][0]
        (folder / "algos").mkdir(parents=True)
        shutil.copy(copy / f"algos/{of}.py", folder / "algos")
        shutil.copytree(copy / "utils", folder / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "hunt.json").write_text(json.dumps({"number": number, "script": script}) + "\n")
    row = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    draw(curve, row, folder / "curve.png")
    outcome = f"its curve: {folder}/curve.png" if row else "it does not run to its end"
    print(f"one line of {folder}/algos/{of}.py, or of what it uses of {folder}/utils, is wrong; {outcome}")


def draw(curve: str, row: dict | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    column = CURVES[curve][2]
    figure, axis = plt.subplots(figsize=(6, 4))
    for right in recorded(curve):
        axis.plot(right[column], color="0.8", linewidth=0.8, label="recorded seeds" if right["seed"] == 1 else None)
    if row is not None:
        axis.plot(row[column], color="C3", label="this script, seed 1")
    axis.set(title=curve, xlabel="step", ylabel=column)
    axis.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def reveal(folder: tyro.conf.Positional[Path]) -> None:
    """Prints what is wrong in a folder that `new` wrote."""
    hunt = json.loads((folder / "hunt.json").read_text())
    edit, _ = choose(hunt["number"], hunt["script"])
    right = (ROOT / next(f for f in edit.files if (folder / f).exists())).read_text()
    line = right[: right.index(edit.old)].count("\n") + 1
    results = ROOT / "benchmarks/results/planted_bugs.json"
    found = json.loads(results.read_text())["bugs"].get(edit.name, {}) if results.exists() else {}
    print(f"{edit.name}, in {', '.join(edit.files)}, line {line}")
    print(f"  right   {edit.old.strip()}\n  here    {edit.new.strip() or '(nothing)'}\n  why     {edit.why}")
    print(f"  public  {edit.public or 'not known to us'}")
    print(f"  caught  {found.get('test', 'by no fast test that has run')}")
    if found.get("line"):
        print(f"          {found['line']}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"new": new, "reveal": reveal})
