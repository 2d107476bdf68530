"""utils/eject.py: the one-file copy runs where nothing of ours can be imported and gives the same curve bit for bit."""

import ast
import subprocess
import sys

import pytest
from control import write_project
from every_script import every_script, options, script
from helpers import REPO, assert_same_result, metrics, new_run

from tests.specs import SPECS
from utils.eject import EjectError, eject
from utils.lm import TINY_MODEL


@every_script
def test_an_ejected_script_gives_the_same_curve(algo, tmp_path, monkeypatch, imports_as_they_were):
    """In another process, with another hash seed and from another folder; an environment may be the user's own, of a
    package in the current folder, beside one called utils."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        write_project(tmp_path / name)
    module, args = script(algo, tmp_path)
    args += ["--online-steps", 16] if "online_steps" in options(algo) else []
    args += ["--model", TINY_MODEL] if "model" in options(algo) else []  # a folder, which a copied script lacks
    if "num_envs" in options(algo) and not SPECS[algo].needs:
        args += ["--env-id", "project:Mine-v0"]
    ejected = subprocess.run([sys.executable, REPO / "utils/eject.py", REPO / f"algos/{algo}.py"], capture_output=True)
    assert ejected.returncode == 0, ejected.stderr
    (tmp_path / "theirs/scripts").mkdir()
    (tmp_path / "theirs/scripts/mine.py").write_bytes(ejected.stdout)
    # -I: neither the current folder nor PYTHONPATH is searched, so nothing of ours can be found
    command = [sys.executable, "-I", "scripts/mine.py", *map(str, args), "--output-dir", "out"]
    done = subprocess.run(command, cwd=tmp_path / "theirs", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [theirs] = (tmp_path / "theirs/out").iterdir()
    monkeypatch.chdir(tmp_path / "ours")
    ours = new_run(module, tmp_path / "ours/out", *args)
    assert len(metrics(ours)) >= 3
    assert_same_result(theirs, ours)


def test_only_what_is_used_is_inlined():
    text = eject(REPO / "algos/sft.py")
    names = {node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert {"completion_logps", "Run", "UserError", "update"} <= names
    assert not {"k3", "advice", "show", "collect"} & names
    assert "\nfrom utils" not in text and "sys.path.insert(0, str(Path(__file__)" not in text


def test_two_meanings_of_one_name_are_refused(tmp_path):
    script = tmp_path / "x.py"
    script.write_text("from utils.lm import sample\n\n\ndef positions():\n    return sample\n")
    with pytest.raises(EjectError, match="positions"):
        eject(script)
