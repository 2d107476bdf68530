"""benchmarks/bug_hunt.py hides exactly one bug of the catalogue, without its name, and reveals it."""

import json
from pathlib import Path

import pytest
from planted import BUGS

from benchmarks import bug_hunt
from benchmarks.curves import CURVES

ROOT = Path(__file__).resolve().parents[1]
ROW = {column: [0.1, 0.2, 0.3] for _, _, column, _ in CURVES.values()}


@pytest.mark.parametrize("number, script", [(7, ""), (8, "sac"), (9, "kto")])
def test_one_line_is_wrong_and_reveal_says_which(number, script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bug_hunt, "RUN", f"print({json.dumps(json.dumps(ROW))})")  # no training here
    bug_hunt.new(number, script, tmp_path)
    folder, said = tmp_path / f"hunt-{number}", capsys.readouterr().out
    edit, curve = bug_hunt.choose(number, script)
    assert script in ("", CURVES[curve][0]) and edit in BUGS
    (path,) = folder.glob("algos/*.py")
    assert path.stem == CURVES[curve][0] and (folder / "curve.png").stat().st_size > 5_000
    changed = [p.relative_to(folder).as_posix() for p in folder.glob("*/*.py")
               if p.read_text() != (ROOT / p.relative_to(folder)).read_text()]  # fmt: skip
    assert changed and set(changed) <= set(edit.files)
    assert edit.name not in said + "".join(p.read_text() for p in folder.glob("*.json"))
    bug_hunt.reveal(folder)
    revealed = capsys.readouterr().out
    assert edit.name in revealed and edit.why in revealed and f"{path.stem}" in said


def test_a_hunt_is_not_overwritten_and_unknown_scripts_are_refused(tmp_path):
    (tmp_path / "hunt-1").mkdir()
    with pytest.raises(SystemExit, match="there already"):
        bug_hunt.new(1, output_dir=tmp_path)
    with pytest.raises(SystemExit, match="no bug with a curve in ppo_atari"):
        bug_hunt.new(2, "ppo_atari", tmp_path)
