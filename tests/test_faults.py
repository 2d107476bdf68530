"""Kills, full disks, lost and damaged files: nothing recorded is lost, nothing half-written is believed, and after
recovery the run equals the one that nothing disturbed, bit for bit.

Most of it happens to a script of a few lines on utils/core.py, which is all of the file handling that scripts share; so
every moment can be tried. Each script's own state is in test_resume*.py, which kill each root at one random moment.
"""

import contextlib  # noqa: I001
import dataclasses
import importlib
import io
import json
import os
import shutil
import signal
import sys
import tomllib
from itertools import count
from pathlib import Path

import pytest
import torch
from every_script import NAMES, every_script, options, script
from helpers import (
    Forked, assert_same_result, checkpoint, command_line, copied_at, metrics, new_run, runs_in, user_error, write_rows,
)  # fmt: skip
from safetensors.torch import load_file, save_file
from tiny_runs import train

from algos import grpo
from tests.specs import SPECS
from utils import core
from utils.core import Run, RunArgs, UserError, prepare
from utils.data import load_pairs, load_task
from utils.lm import TINY_MODEL, load_model

SIZE = 2000
SMALL = "--device cpu --save-every 2".split()


@dataclasses.dataclass
class Args(RunArgs):
    max_steps: int = 8
    """steps"""


class Walk:
    """A script on utils/core.py: weights that walk at random."""

    __file__, Args, NAME = __file__, Args, "walk"

    def train(self, args: Args) -> list[dict]:
        device = prepare(args)
        model = torch.nn.Linear(SIZE, 1, bias=False, device=device)
        run = Run(args, "walk", "line", args.max_steps, ("place",))
        run.restore(model=model)
        while run.step < args.max_steps:
            model.weight.data += torch.rand(SIZE)
            run.log(run.step + 1, place=model.weight.mean().item())
            run.end_step(run.step + 1, {"model": model})
        return run.finish(lambda folder: save_file(model.state_dict(), folder / "model.safetensors"), {}, "walk")


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The walk that nothing disturbed, never to be changed."""
    return new_run(Walk(), tmp_path_factory.mktemp("walk"), *SMALL)


@pytest.fixture
def stopped(tmp_path):
    """One that was killed behind its checkpoint of step 6."""
    with copied_at(6, tmp_path / "stopped"):
        new_run(Walk(), tmp_path / "whole", *SMALL)
    return tmp_path / "stopped"


def assert_nothing_half_written(folder: Path) -> None:
    """What stands under its final name is whole, and what is recorded stands once and in order."""
    if (folder / "config.json").exists():
        json.loads((folder / "config.json").read_text())
    if (folder / "metrics.jsonl").exists():
        lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]  # a kill may cut the last one
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == sorted(set(steps))


def recovered(module, folder: Path, reference: Path) -> bool:
    """Resumes a run that was killed and compares it. False where there is nothing to resume, which is said so."""
    assert_nothing_half_written(folder)
    there = (folder / "checkpoint.pt").exists() and bool(checkpoint(folder))
    if there and not (folder / "curve.png").exists():
        command_line(module, "--resume", folder)
    else:  # nothing to resume, or it came to its end
        with pytest.raises(SystemExit, match="2"):
            command_line(module, "--resume", folder)
    if there:
        assert_same_result(folder, reference)
    return there


# --- kills ---


def killed_at_operation(number: int):
    """Makes this process, a child, die at the operation of that number that opens, makes, renames or deletes a file of
    a run, or in the middle of writing a checkpoint."""
    seen, save = count(1), torch.save

    def tick(event: str = "open", args: tuple = ("/runs/",)) -> None:
        kinds = ("open", "os.rename", "os.remove", "os.mkdir", "os.scandir", "os.listdir")
        if event in kinds and isinstance(args[0], (str, Path)) and "/runs/" in str(args[0]) and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_in_two_parts(state, file) -> None:
        save(state, buffer := io.BytesIO())
        whole = buffer.getvalue()
        file.write(whole[: len(whole) // 2])
        file.flush()
        tick()
        file.write(whole[len(whole) // 2 :])

    torch.save = save_in_two_parts
    sys.addaudithook(tick)


def killed(number: int, tmp_path: Path, *args) -> int:
    """The exit code of a walk that dies at that operation: 0 where it has ended before."""
    module = Walk()
    train = module.train
    module.train = lambda args: (killed_at_operation(number), train(args))[1]
    out, code = Forked(module, *args, log=tmp_path / "log").communicate()
    assert code in (0, -signal.SIGKILL), out
    return code


def test_killed_at_every_operation_on_files(reference, tmp_path):
    """A run, and its continuation again, die at the n-th operation, for every n; what is left is never half of
    anything, and gives the same result."""
    for number in count(1):
        runs = tmp_path / f"{number}" / "runs"
        code = killed(number, tmp_path, *SMALL, "--save-every", 1, "--output-dir", runs)
        folders = runs_in(runs)
        if code == 0:
            break
        for folder in folders:  # none where it died before there was one
            if (folder / "checkpoint.pt").exists():
                killed(number, tmp_path, "--resume", folder)
            recovered(Walk(), folder, reference)
    assert number > 3 * 8 + 4, "8 checkpoints are opened, half written and renamed; and there are other files"


# --- a full disk ---


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="not run: no /dev/full on this system")
def test_no_space_left_for_a_checkpoint(reference, tmp_path, monkeypatch):
    """The run says why it ends; the checkpoint before is there, and with space it goes on."""
    write, calls = core.write_atomically, count(1)

    def on_a_full_disk(path: Path, *rest) -> None:
        if path.name == "checkpoint.pt" and next(calls) == 3:
            path.with_name(path.name + ".tmp").symlink_to("/dev/full")
        write(path, *rest)

    with monkeypatch.context() as patch, pytest.raises((OSError, RuntimeError)):
        patch.setattr(core, "write_atomically", on_a_full_disk)
        new_run(Walk(), tmp_path / "runs", *SMALL)
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoint(folder)["step"] == 4 and [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    (folder / "checkpoint.pt.tmp").unlink(missing_ok=True)
    assert recovered(Walk(), folder, reference)


# --- lost files of a run ---


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
@pytest.mark.parametrize("name", ["checkpoint.pt", "config.json"])
def test_files_of_a_run_that_are_lost_or_cut_off(name, share, reference, stopped, capsys):
    """One sentence; with the file the run goes on."""
    whole = (stopped / name).read_bytes()
    (stopped / name).unlink() if share is None else (stopped / name).write_bytes(whole[: int(share * len(whole))])
    with user_error(capsys, name.partition(".")[0], "" if share is None else "is damaged"):
        command_line(Walk(), "--resume", stopped)
    (stopped / name).write_bytes(whole)
    assert recovered(Walk(), stopped, reference)


def test_a_longer_run_that_was_killed_at_its_end_comes_to_it(reference, tmp_path, monkeypatch):
    """Though its picture was there from the shorter one."""
    folder = shutil.copytree(reference, tmp_path / "copy")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Run, "finish", lambda *_: 1 / 0)
        command_line(Walk(), "--resume", folder, "--max-steps", 10)
    command_line(Walk(), "--resume", folder)
    assert len(metrics(folder)) == 10 and (folder / "curve.png").exists()


def test_rows_that_are_lost(stopped):
    """The run goes on, and its file is not filled up with zeros."""
    (stopped / "metrics.jsonl").unlink()
    command_line(Walk(), "--resume", stopped)
    assert [row["step"] for row in metrics(stopped)] == [7, 8]


def test_a_run_of_another_version(stopped, capsys, monkeypatch):
    """What was not used then is left out, also where only Args.moved tells; what was used, and is unknown today, is
    named with the version, and with the script that has it."""
    config = json.loads((stopped / "config.json").read_text())
    assert config["version"] == core.VERSION and config["defaults"]["max_steps"] == 8
    args, defaults = config["args"] | {"gone": 3}, config["defaults"]
    with_json(stopped / "config.json", version="9.9", args=args, defaults=defaults | {"gone": 1})
    with user_error(capsys, "version 9.9", "'gone': 3", core.VERSION):
        command_line(Walk(), "--resume", stopped)
    with_json(stopped / "config.json", defaults=defaults | {"gone": 3})
    command_line(Walk(), "--resume", stopped)
    assert "gone" not in json.loads((stopped / "config.json").read_text())["args"]
    monkeypatch.setattr(Walk.Args, "moved", {"gone": ("other.py", 3)})
    del config["defaults"]
    for value in (3, 4):
        config["args"]["gone"] = value
        (stopped / "config.json").write_text(json.dumps(config))
        with user_error(capsys, "'gone': 4", "moved to other.py") if value == 4 else contextlib.nullcontext():
            command_line(Walk(), "--resume", stopped, "--max-steps", 9)


def test_the_version_is_the_project_s():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == core.VERSION


OTHER_SIZES = {"hidden_size": 9, "embed_dim": 16, "lora_rank": 3}  # a flag -> another value; each script has one


@every_script
def test_a_resume_or_evaluation_that_fails_leaves_the_run(algo, tmp_path, capsys):
    """Each of its files, byte for byte: at its end, and with other sizes."""
    train(algo, SPECS[algo].flags, tmp_path)
    (folder,) = tmp_path.iterdir()
    module = importlib.import_module(f"algos.{algo}")
    flag, size = next((flag, size) for flag, size in OTHER_SIZES.items() if flag in options(algo))
    steps = "total-timesteps" if "total_timesteps" in options(algo) else "max-steps"
    more, other = [f"--{steps}", 10**6], [f"--{flag.replace('_', '-')}", size]
    differs = "no --lora-rank" if algo == "prorl" else "than these"
    wrong = [(["--resume", folder], "is at its end, step"), (["--resume", folder, *more, *other], differs)]
    wrong += [(["--evaluate", folder, *other], differs)] if "evaluate" in options(algo) else []
    for args, word in wrong:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit, match="2"):
            command_line(module, *args, "--output-dir", tmp_path)
        assert word in (said := capsys.readouterr().err.splitlines()[-1]), said
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert list(tmp_path.iterdir()) == [folder]


# --- datasets and models ---


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_dataset_that_is_cut_off(suffix, own_cache, tmp_path):
    """Anywhere inside a row: one sentence, and no half of a row is trained on."""
    rows = [{"prompt": f"S{i}1:", "completion": f"1{i}", "chosen": f"1{i}", "rejected": f"{i}1"} for i in range(30)]
    path = tmp_path / f"rows.{suffix}"
    {"jsonl": lambda: write_rows(path, rows), "json": lambda: path.write_text(json.dumps(rows)),
     "parquet": lambda: own_cache.Dataset.from_list(rows).to_parquet(str(path))}[suffix]()  # fmt: skip
    whole = path.read_bytes()
    for load in (load_task, lambda path: load_pairs(path, 10, 1)):
        load(str(path))
        for i, share in enumerate((0.02, 0.5, 0.99)):
            cut, size = tmp_path / f"cut{i}.{suffix}", int(share * len(whole))
            size -= suffix == "jsonl" and whole[size - 1 : size + 1].count(b"\n")  # never between two rows
            cut.write_bytes(whole[: size - 1])
            with pytest.raises(UserError, match=cut.name):
                load(str(cut))


def without_a_layer(folder: Path) -> None:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if ".layers.2." not in name}
    save_file(kept, path, {"format": "pt"})


def with_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def adapters_alone(folder: Path) -> None:
    """As peft and TRL save them: beside a configuration that names the base."""
    peft = pytest.importorskip("peft", reason="not run: peft is not installed")
    model = peft.get_peft_model(load_model(grpo.Args())[0], peft.LoraConfig(target_modules="all-linear"))
    [path.unlink() for path in (folder / "config.json", folder / "model.safetensors")]
    model.save_pretrained(folder)
    with_json(folder / "adapter_config.json", base_model_name_or_path=TINY_MODEL)


DAMAGES = {  # what the sentence says -> what is done to a model
    "lacks weights": without_a_layer,
    "of its sizes": lambda folder: with_json(folder / "config.json", intermediate_size=8),
    "cannot load": lambda folder: os.truncate(folder / "model.safetensors", 50_000),
    "holds LoRA adapters": adapters_alone,
}


@pytest.mark.parametrize("word", DAMAGES)
@pytest.mark.parametrize("algo", [name for name in NAMES if "model" in options(name)])
def test_no_run_begins_on_a_model_that_is_not_whole(algo, word, tmp_path, capsys):
    module, args = script(algo, tmp_path)
    folder = shutil.copytree(TINY_MODEL, tmp_path / "mine")
    DAMAGES[word](folder)
    capsys.readouterr()
    with user_error(capsys, str(folder), word):
        command_line(module, *args, "--model", folder, "--output-dir", tmp_path / "made")
    assert not (tmp_path / "made").exists()
