"""An offline run that was stopped and resumed equals the one that was not, bit for bit, also in its online phase."""

import json
import os
import random
import shutil
import signal
import time

import pytest
from helpers import (
    SMALL,
    Forked,
    assert_same_result,
    checkpoints,
    command_line,
    metrics,
    new_run,
    stopped_after,
    user_error,
    wait_for,
)
from small_data import pendulum

from algos import bc, dt, iql
from utils import run as run_module
from utils.checkpoint import load_newest

SCRIPTS = {"bc": bc, "iql": iql, "dt": dt}
CASES = {  # name -> script, arguments; every run has 160 steps and checkpoints at multiples of 32
    "bc": ("bc", ["--top-fraction", 0.5]),
    "bc-dropout": ("bc", ["--dropout", 0.2]),
    "iql": ("iql", []),
    "iql-online": ("iql", ["--max-steps", 80, "--online-steps", 80]),
    "iql-online-annealed": ("iql", ["--max-steps", 64, "--online-steps", 96, "--no-anneal-actor", "--dropout", 0.1]),
    "dt": ("dt", []),
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """No picture is drawn of these runs: it would take most of their time."""
    monkeypatch.setattr(run_module, "plot", lambda *_: None)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return pendulum(tmp_path_factory.mktemp("data") / "pendulum.hdf5")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, dataset):
    """case -> the folder of the run that nothing disturbed; made once, never to be changed."""
    made = {}

    def make(case: str):
        if case not in made:
            module, args = flags(case, dataset)
            made[case] = new_run(module, tmp_path_factory.mktemp(case), *args)
            (made[case] / "curve.png").touch()
        return made[case]

    return make


def flags(case: str, dataset) -> tuple:
    algo, more = CASES[case]
    return SCRIPTS[algo], [*SMALL[algo], "--dataset", dataset, "--keep", 99, *more]


@every_case
def test_killed_at_any_moment(case, uninterrupted, dataset, tmp_path):
    """SIGKILL at a random moment loses no row, repeats none, and changes no weight."""
    module, args = flags(case, dataset)
    reference, output_dir = uninterrupted(case), tmp_path / "runs"
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moment: {seed}")
    process = Forked(module, *args, "--output-dir", output_dir, log=tmp_path / "log")
    folder = wait_for(process, output_dir, lambda run: bool(checkpoints(run)))
    time.sleep(random.Random(seed).uniform(0, 0.3))
    os.kill(process.pid, signal.SIGKILL)
    out, code = process.communicate()
    assert code in (0, -signal.SIGKILL), out
    command_line(module, "--resume", folder)
    assert_same_result(folder, reference)


@every_case
def test_from_every_checkpoint(case, uninterrupted, dataset, tmp_path):
    reference = uninterrupted(case)
    steps = checkpoints(reference)
    assert steps == [32, 64, 96, 128, 160]
    for step in steps[:4]:
        folder = stopped_after(step, reference, tmp_path / str(step))
        if "online" in case:  # inside an episode
            assert ("envs" in load_newest(folder / "checkpoints")) == (step > 80 or (step > 64 and "annealed" in case))
        command_line(SCRIPTS[CASES[case][0]], "--resume", folder)
        assert_same_result(folder, reference)


def test_online_after_an_offline_run_that_had_ended(uninterrupted, dataset, tmp_path):
    """--resume RUN --online-steps N equals a run that had them from the start."""
    module, args = flags("iql", dataset)
    reference = new_run(module, tmp_path / "reference", *args, "--online-steps", 64)
    folder = shutil.copytree(uninterrupted("iql"), tmp_path / "run")
    command_line(module, "--resume", folder, "--online-steps", 64)
    drop = lambda rows: [{k: v for k, v in row.items() if k != "eval/best_return"} for row in rows]  # noqa: E731
    assert drop(metrics(folder)) == drop(metrics(reference)) and metrics(folder)[-1]["step"] == 224
    old_last = next(row for row in metrics(folder) if row["step"] == 160)
    assert "eval/best_return" in old_last, "it was the last row then"


@pytest.mark.parametrize("case", ["bc", "iql-online", "dt"])
def test_an_exception_in_evaluation(case, uninterrupted, dataset, tmp_path, monkeypatch):
    """The training up to it is saved. The resumed run goes on after it, and all else is as if nothing had failed."""
    module, args = flags(case, dataset)
    name = "rollouts" if case == "dt" else "evaluate"
    whole = getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda make, act, *rest: whole(make, lambda *_: 1 // 0, *rest))
        out, code = Forked(module, *args, "--output-dir", tmp_path / "runs", log=tmp_path / "log").communicate()
    assert code == 1 and "ZeroDivisionError" in out, out
    (folder,) = (tmp_path / "runs").iterdir()
    assert checkpoints(folder) == [32, 64]
    command_line(module, "--resume", folder)
    reference = shutil.copytree(uninterrupted(case), tmp_path / "reference")
    for run in (folder, reference):
        rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(run)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_same_result(folder, reference)


@pytest.mark.parametrize("case, words", [("bc", "--max-steps 224"), ("dt", "--max-steps 224")])
def test_longer_budget(case, words, uninterrupted, dataset, tmp_path):
    """No schedule depends on it, so --max-steps may grow."""
    module, args = flags(case, dataset)
    longer = new_run(module, tmp_path / "longer", *args, *words.split())
    extended = shutil.copytree(uninterrupted(case), tmp_path / "extended")
    command_line(module, "--resume", extended, *words.split())
    ours, theirs = (
        [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(folder)]
        for folder in (extended, longer)
    )
    assert ours == theirs


@pytest.mark.parametrize(
    "case, change",
    [
        ("iql", "--max-steps 224"),
        ("iql", "--expectile 0.9"),
        ("iql", "--rewards raw"),
        ("bc", "--top-fraction 0.4"),
        ("dt", "--context-length 3"),
        ("dt", "--target-returns 5"),
    ],
)
def test_changed_arguments_are_refused(case, change, uninterrupted, tmp_path, capsys):
    folder = stopped_after(128, uninterrupted(case), tmp_path)
    with user_error(capsys, change.split()[0], "cannot change on --resume"):
        command_line(SCRIPTS[case], "--resume", folder, *change.split())
