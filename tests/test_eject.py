"""utils/eject.py: the one-file copy runs where nothing of ours can be imported and gives the same curve bit for bit."""

import ast
import json
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_loader

import pytest
from control import CONTROL, WALK, walk, write_project
from every_script import options, script
from helpers import GENERATORS, LANGUAGE, REPO, assert_same_result, metrics, new_run

from tests.specs import SPECS
from utils.eject import DATA, UTILS, EjectError, eject, main
from utils.lm import TINY_MODEL

DRIVER = """
import json, runpy, sys
from matplotlib.figure import Figure
Figure.savefig = lambda *_, **__: None  # to draw takes longer than to train
for path, args in json.loads(sys.argv[1]):
    sys.argv = [path, *args]
    runpy.run_path(path, run_name="__main__")
"""
CLASH = "from utils.lm import sample\n\n\ndef positions():\n    return sample\n"


@pytest.mark.parametrize("scripts", [LANGUAGE, [*CONTROL, *GENERATORS]], ids=["language", "others"])
def test_ejected_scripts_give_the_same_curves(scripts, tmp_path, monkeypatch, imports_as_they_were):
    """All of them, in another process, with another hash seed and from another folder; an environment
    may be the user's own, of a package in the current folder, beside one called utils."""
    for name in ("ours", "theirs"):
        (tmp_path / name / "scripts").mkdir(parents=True)
        write_project(tmp_path / name)
    jobs, missing = [], [name for name in scripts if SPECS[name].needs and find_spec(SPECS[name].needs) is None]
    for algo in [name for name in scripts if name not in missing]:
        module, args = script(algo, tmp_path)
        args += ["--online-steps", 16] if "online_steps" in options(algo) else []
        if "model" in options(algo):  # the shipped model is a folder, which a copied script lacks
            args += ["--model", TINY_MODEL, "--max-steps", 2, "--eval-every", 2]
            args += ["--teacher", TINY_MODEL] if "teacher" in options(algo) else []
        # goals, masks or data, which Mine-v0 does not have
        needs = "Goal" in SPECS[algo].walk or algo in ("her_sac", "ppo_mask") or "dataset" in options(algo)
        if "num_envs" in options(algo) and not SPECS[algo].needs and not needs:
            args += ["--env-id", "project:Mine-v0", *([] if walk(algo) == WALK else ["--env-kwargs", "choices=3"])]
        (tmp_path / f"theirs/scripts/{algo}.py").write_text(eject(REPO / f"algos/{algo}.py"))
        jobs.append((algo, module, [*map(str, args), "--output-dir"]))
    # -I: neither the current folder nor PYTHONPATH is searched, so nothing of ours can be found
    command = json.dumps([(f"scripts/{algo}.py", [*args, f"out/{algo}"]) for algo, _, args in jobs])
    done = subprocess.run([sys.executable, "-I", "-c", DRIVER, command], cwd=tmp_path / "theirs", capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path / "ours")
    for algo, module, args in jobs:
        [theirs] = (tmp_path / f"theirs/out/{algo}").iterdir()
        ours = new_run(module, tmp_path / f"ours/out/{algo}", *args[:-1])
        assert len(metrics(ours)) >= 2
        assert_same_result(theirs, ours)
    if missing:
        pytest.skip(f"not run: {', '.join(missing)}, whose packages are not installed")


def copied(algo, path, monkeypatch):
    """The module that a copy at `path` is."""
    monkeypatch.setitem(sys.modules, "mine", module := module_from_spec(spec_from_loader("mine", None)))
    module.__file__ = str(path)
    exec(eject(REPO / f"algos/{algo}.py"), vars(module))
    return module


@pytest.mark.parametrize("algo", SPECS)
def test_the_script_comes_first(algo):
    """As it stands, behind its docstring, imports and what Args inherits. The line that starts it is the last one."""
    original, copy = (REPO / f"algos/{algo}.py").read_text(), eject(REPO / f"algos/{algo}.py", "mine.py")
    start, begin = original.index("\n\n\nif __name__"), copy.index("\nNAME, TITLE = ")
    assert original[original.index("\nNAME, TITLE = ") : start] in copy and copy.endswith(original[start:])
    assert copy[:begin].count("\n") + 2 <= 185 and copy[: copy.index("\ndef ", begin)].count("\n") + 2 <= 325
    assert "\n    python mine.py" in copy and f"python algos/{algo}.py" not in copy


@pytest.mark.parametrize("algo, flag", [("grpo", "--model"), ("reward_model", "--model"), ("bc", "--dataset")])
def test_data_that_stays_behind(algo, flag, tmp_path, monkeypatch, capsys):
    """It is named when the copy is made, in its first lines, and when it is looked for."""
    assert {path.name for path in UTILS.iterdir() if path.suffix != ".py"} - {"__pycache__"} == {*DATA}
    monkeypatch.setattr(sys, "argv", ["eject.py", str(REPO / f"algos/{algo}.py"), "-o", str(tmp_path / "mine.py")])
    main()
    assert f"with {flag}.\n" in capsys.readouterr().err and f"with {flag}.\n" in (tmp_path / "mine.py").read_text()
    mine = copied(algo, tmp_path / "mine.py", monkeypatch)
    with pytest.raises(mine.UserError, match=f"there is no.*{flag}"):
        mine.train(mine.Args())


def test_a_copy_leaves_the_user_s_own_utils_alone(tmp_path, monkeypatch, imports_as_they_were):
    """Even one that stands above all files."""
    write_project(tmp_path)
    mine = copied("ppo", "/mine.py", monkeypatch)
    monkeypatch.setitem(sys.modules, "utils.shapes", mine)  # in place of theirs
    mine.find_users_code(tmp_path)
    assert sys.modules["utils.shapes"] is mine and sys.path[0] == str(tmp_path)


def test_only_what_is_used_is_inlined():
    text = eject(REPO / "algos/sft.py")
    names = {node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert {"completion_logps", "Run", "UserError", "update"} <= names
    assert not {"k3", "alarm", "RewardModel", "collect"} & names
    assert text.count("on use") == 1 and "# Left out, for it is imported on use alone: utils/vllm.py.\n" in text
    assert "def ask(" not in text and "\nfrom utils" not in text and "sys.path.insert(0, str(Path(__file__)" not in text


def test_what_the_script_calls_when_it_is_read(tmp_path):
    """It stands above the script, with what it calls in turn, however far below that stands in utils."""
    (tmp_path / "x.py").write_text('from utils.builtin import procedural\nX = [procedural(x) for x in ["sort"]]\nX\n')
    exec(eject(tmp_path / "x.py"), found := {})
    assert found["X"][0][0](0, 1)["prompt"].startswith("S")


@pytest.mark.parametrize("text", ["import re, utils", "from utils import lm", "from utils.lm import rank as r", CLASH])
def test_an_import_that_would_be_lost_and_two_meanings_of_a_name_are_refused(text, tmp_path):
    (tmp_path / "x.py").write_text(text)
    with pytest.raises(EjectError, match="positions" if text == CLASH else text):
        eject(tmp_path / "x.py")
