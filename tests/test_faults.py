"""Kills, full disks, damaged files, two processes in one folder: nothing recorded is lost, nothing half-written is
believed, and after recovery the run equals the one that nothing disturbed, bit for bit.

Most of it happens to a script of a few lines on utils/run.py, which is all of the file handling that scripts share; so
every moment can be tried. Each script's own state is in test_resume*.py, which kill each root at one
random moment; here, at fifty (slow).
"""

import dataclasses
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from datetime import datetime
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from every_script import NAMES, options, script
from helpers import (
    LANGUAGE,
    Forked,
    assert_one_sentence,
    assert_same_result,
    checkpoints,
    command_line,
    metrics,
    new_run,
    runs_in,
    stopped_after,
    user_error,
    wait_for,
    weights,
)
from safetensors.torch import load_file, save_file

from utils import run as run_module
from utils.checkpoint import load_newest, save_checkpoint
from utils.cli import RunArgs, prepare
from utils.errors import UserError
from utils.models import TINY_MODEL, load_model
from utils.preferences import load_preferences
from utils.run import Run
from utils.tasks import load_task

SIZE = 2000
SMALL = "--device cpu --save-every 2 --keep 99".split()


@dataclasses.dataclass
class Args(RunArgs):
    max_steps: int = 8
    """steps"""


class Walk:
    """A script on utils/run.py: weights that walk at random."""

    __file__, Args = __file__, Args

    def __init__(self, before_step=lambda step: None):
        self.before_step = before_step

    def train(self, args: Args) -> list[dict]:
        device = prepare(args)
        weight = torch.zeros(SIZE, device=device)
        run, step = Run(args, "walk", "line", args.max_steps, ("place",)), 0

        def state() -> dict:
            return {"weight": weight}

        if run.state is not None:
            step, weight = run.state["step"], run.state["weight"]
        run.restore()
        while step < args.max_steps:
            self.before_step(step)
            step += 1
            weight = weight + torch.rand(SIZE)
            run.log(step, place=weight.mean().item())
            run.end_step(step, state)
        return run.finish(lambda folder: save_file({"weight": weight}, folder / "model.safetensors"), {}, "walk")


@pytest.fixture(autouse=True)
def no_git(monkeypatch):
    """No git is asked for the commit of these runs: it would take most of their time."""
    monkeypatch.setattr(run_module, "environment", lambda: {})


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The walk that nothing disturbed, never to be changed."""
    return new_run(Walk(), tmp_path_factory.mktemp("walk"), *SMALL)


def assert_nothing_half_written(folder: Path) -> None:
    """What stands under its final name is whole, and what is recorded stands once and in order."""
    for path in (folder / "checkpoints").glob("step-*.pt"):
        assert torch.load(path, weights_only=True)["step"] == int(path.stem.removeprefix("step-"))
    if (folder / "config.json").exists():
        json.loads((folder / "config.json").read_text())
    if (folder / "model").exists():
        weights(folder)
    if (folder / "metrics.jsonl").exists():
        lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]  # a kill may cut the last one
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == sorted(set(steps))


def recovered(module, folder: Path, reference: Path) -> bool:
    """Resumes a run that was killed and compares it. False where there is nothing to resume, which is said so."""
    assert_nothing_half_written(folder)
    if checkpoints(folder):
        command_line(module, "--resume", folder)
        assert_same_result(folder, reference)
        return True
    assert not (folder / "model").exists()
    with pytest.raises(SystemExit, match="2"):
        command_line(module, "--resume", folder)
    return False


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
        code = killed(number, tmp_path, *SMALL, "--keep", 1, "--save-every", 1, "--output-dir", runs)
        folders = runs_in(runs)
        if code == 0:
            break
        for folder in folders:  # none where it died before there was one
            if checkpoints(folder):
                killed(number, tmp_path, "--resume", folder)
            recovered(Walk(), folder, reference)
    assert number > 40, "not every operation is seen"


@pytest.mark.slow
@pytest.mark.parametrize("algo", LANGUAGE)
def test_killed_at_fifty_moments(algo, tmp_path):
    module, args = script(algo, tmp_path)
    new_run(module, tmp_path / "first", *args)  # imports what it needs
    began = time.perf_counter()
    reference = new_run(module, tmp_path / "reference", *args)
    life = time.perf_counter() - began
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    moments, runs, kills, resumed = random.Random(seed), tmp_path / "runs", 0, 0
    while kills < 50:
        folders = runs_in(runs)
        now = ["--resume", folders[0]] if folders else args
        process = Forked(module, *now, "--output-dir", runs, log=tmp_path / "log")
        time.sleep(moments.uniform(0, 1.1 * life))
        os.kill(process.pid, signal.SIGKILL)
        out, code = process.communicate()
        assert code in (0, -signal.SIGKILL), out
        kills += code != 0
        for folder in runs_in(runs):
            assert_nothing_half_written(folder)
            if code == 0:
                assert_same_result(folder, reference)
            resumed += bool(folders) and code != 0
            if code == 0 or not checkpoints(folder):
                shutil.rmtree(folder)
    assert resumed > 5, "hardly any kill came after a first checkpoint"
    for folder in runs_in(runs):
        assert recovered(module, folder, reference)


# --- a full disk ---

full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="not run: no /dev/full on this system")


@full_disk
def test_no_space_left_for_a_checkpoint(reference, tmp_path, monkeypatch):
    """The run says why it ends; the checkpoints before and all rows are there, and with space it goes on."""
    save = run_module.save_checkpoint

    def on_a_full_disk(folder: Path, step: int, *rest) -> None:
        if step == 6:
            (folder / "step-00000006.pt.tmp").symlink_to("/dev/full")
        save(folder, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "save_checkpoint", on_a_full_disk)
        out, code = Forked(Walk(), *SMALL, "--output-dir", tmp_path / "runs", log=tmp_path / "log").communicate()
    (folder,) = runs_in(tmp_path / "runs")
    assert code == 2, out
    assert_one_sentence(
        out[out.index("error: ") :], "step-00000006.pt", "No space left on device", f"--resume {folder}"
    )
    assert checkpoints(folder) == [2, 4] and [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    (folder / "checkpoints/step-00000006.pt.tmp").unlink(missing_ok=True)
    assert recovered(Walk(), folder, reference)


def test_no_space_left_for_the_model(reference, tmp_path, monkeypatch):
    """No model is there rather than half of one; resuming writes it."""

    def half(tensors, path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(sys.modules[__name__], "save_file", half)
        new_run(Walk(), tmp_path, *SMALL)
    (folder,) = runs_in(tmp_path)
    assert checkpoints(folder)[-1] == 8 and not (folder / "model").exists()
    assert recovered(Walk(), folder, reference)


# --- damaged files of a run ---


def flipped(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


DAMAGE = {
    "empty": lambda whole: b"",
    "cut in half": lambda whole: whole[: len(whole) // 2],
    "without its end": lambda whole: whole[:-1],
    "zeros": lambda whole: bytes(len(whole)),
    "zeros in the middle": lambda whole: whole[: len(whole) // 2] + bytes(64) + whole[len(whole) // 2 + 64 :],
    "random bytes": lambda whole: random.Random(0).randbytes(len(whole)),
    "one bit of the weights": lambda whole: flipped(whole, whole.index(b"data/0") + 200),
    "text": lambda whole: b"not a checkpoint\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_checkpoint(damage, reference, tmp_path, capsys):
    """It is named and set aside, and the one before it is continued from."""
    folder = stopped_after(6, reference, tmp_path)
    newest = folder / "checkpoints/step-00000006.pt"
    newest.write_bytes(DAMAGE[damage](newest.read_bytes()))
    command_line(Walk(), "--resume", folder)
    out = capsys.readouterr().out
    assert f"{newest} cannot be read" in out and "falling back to the checkpoint before it" in out
    assert newest.with_suffix(".damaged").exists()
    assert_same_result(folder, reference)


def test_no_bit_of_a_checkpoint_can_change_unnoticed(tmp_path):
    """Wherever one is flipped, what is loaded is what was saved, or the checkpoint before."""
    for step in (1, 2):
        torch.save({"step": step, "weight": torch.arange(30.0) * step}, tmp_path / f"step-{step}.pt")
    path, fallen_back = tmp_path / "step-2.pt", 0
    whole = path.read_bytes()
    for at in range(0, len(whole), 11):
        path.write_bytes(flipped(whole, at))
        state = load_newest(tmp_path)
        assert state.keys() == {"step", "weight"} and state["step"] in (1, 2)
        assert torch.equal(state["weight"], torch.arange(30.0) * state["step"]), f"byte {at} of {len(whole)}"
        fallen_back += state["step"] == 1
        path.with_suffix(".damaged").unlink(missing_ok=True)
    assert fallen_back > 20


def test_the_newest_of_many_digits(tmp_path):
    """By number, not as text: it is the one that stays, and the one that is read."""
    steps = [9, 10, 99_999_999, 100_000_000, 100_000_001, 1_000_000_000]
    for done, step in enumerate(steps, 1):
        save_checkpoint(tmp_path / "checkpoints", step, {"step": step}, keep=2)
        assert checkpoints(tmp_path) == steps[:done][-2:]
        assert load_newest(tmp_path / "checkpoints")["step"] == step


def test_all_checkpoints_damaged(reference, tmp_path, capsys):
    """One sentence, and everything is left as it was, for whoever can mend it."""
    folder = stopped_after(6, reference, tmp_path)
    for path, damage in zip(
        sorted((folder / "checkpoints").iterdir()), ("zeros", "cut in half", "one bit of the weights")
    ):
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with user_error(capsys, str(folder), "no readable checkpoint"):
        command_line(Walk(), "--resume", folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
@pytest.mark.parametrize("share", [None, 0, 0.2])
def test_other_files_of_a_run_lost_or_cut(name, share, reference, tmp_path, capsys):
    """One sentence with the file's name: rows and transitions from before the checkpoint cannot be computed again."""
    folder = stopped_after(6, reference, tmp_path)
    whole = (folder / name).read_bytes()
    (folder / name).unlink()
    if share is not None:
        (folder / name).write_bytes(whole[: int(share * len(whole))])
    with user_error(capsys, name.partition("/")[0]):
        command_line(Walk(), "--resume", folder)
    (folder / name).write_bytes(whole)
    command_line(Walk(), "--resume", folder)
    assert_same_result(folder, reference)


# --- two processes ---


def test_two_processes_resume_one_run(reference, tmp_path, capsys):
    """The second is refused and changes nothing while the first is in its steps; the first ends as if alone."""
    folder, gate = stopped_after(4, reference, tmp_path), tmp_path / "gate"
    gate.touch()

    def waits(step: int) -> None:
        (tmp_path / "there").touch()
        while gate.exists():
            time.sleep(0.01)

    first = Forked(Walk(waits), "--resume", folder, log=tmp_path / "log")
    wait_for(first, tmp_path, lambda path: path.name == "there")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with user_error(capsys, "another process", str(folder)):
        command_line(Walk(), "--resume", folder)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    gate.unlink()
    out, code = first.communicate()
    assert code == 0, out
    assert_same_result(folder, reference)


def test_two_runs_begun_in_one_moment(reference, tmp_path, monkeypatch, capsys):
    moment = datetime.now()
    monkeypatch.setattr(run_module, "datetime", SimpleNamespace(now=lambda: moment))
    first = new_run(Walk(), tmp_path, *SMALL)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    with user_error(capsys, "--output-dir", "exists"):
        command_line(Walk(), *SMALL, "--output-dir", tmp_path)
    assert before == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    assert_same_result(first, reference)


# --- datasets and models ---


LOADERS = {"rows": lambda path: load_task(path), "pairs": lambda path: load_preferences(path, 10, 1)}


def write_rows(path: Path, datasets) -> list[dict]:
    rows = [{"prompt": f"S{i}1:", "completion": f"1{i}", "chosen": f"1{i}", "rejected": f"{i}1"} for i in range(30)]
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_a_dataset_that_is_cut_off(suffix, loader, own_cache, tmp_path):
    """Anywhere inside a row: one sentence, and no half of a row is trained on."""
    path = tmp_path / f"rows.{suffix}"
    write_rows(path, own_cache)
    LOADERS[loader](str(path))
    whole = path.read_bytes()
    for i, share in enumerate((0.02, 0.5, 0.99)):
        cut = tmp_path / f"cut{i}.{suffix}"
        size = int(share * len(whole))
        size -= suffix == "jsonl" and whole[size - 1 : size + 1].count(b"\n")  # never between two rows
        cut.write_bytes(whole[: size - 1])
        with pytest.raises(UserError, match=cut.name):
            LOADERS[loader](str(cut))


def cut(name: str, share: float):
    return lambda folder: (folder / name).write_bytes(
        (whole := (folder / name).read_bytes())[: int(share * len(whole))]
    )


def without_a_layer(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.2." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


MODELS = {  # what happened to the folder, and a word of the sentence
    "weights cut in half": (cut("model.safetensors", 0.5), "reachable"),
    "weights without their end": (cut("model.safetensors", 0.999), "reachable"),
    "weights empty": (cut("model.safetensors", 0), "reachable"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "a layer lacks": (without_a_layer, "9 of its weights"),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "tokenizer"),
    "no vocabulary": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    "vocabulary cut in half": (cut("tokenizer.json", 0.5), "reachable"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "configuration cut in half": (cut("config.json", 0.5), "config"),
}


@pytest.mark.parametrize("fault", MODELS)
def test_a_model_folder_that_is_not_whole(fault, tmp_path):
    folder = shutil.copytree(TINY_MODEL, tmp_path / "mine")
    damage, word = MODELS[fault]
    damage(folder)
    with pytest.raises(UserError, match=f"--model {folder}.*{word}"):
        load_model(str(folder))


@pytest.mark.parametrize("algo", [name for name in NAMES if "model" in options(name)])
def test_no_run_begins_on_a_model_that_is_not_whole(algo, tmp_path, capsys):
    module, args = script(algo, tmp_path)
    for fault in ("weights cut in half", "no tokenizer"):
        folder = shutil.copytree(TINY_MODEL, tmp_path / fault.replace(" ", "-"))
        MODELS[fault][0](folder)
        with user_error(capsys, "--model", str(folder)):
            command_line(module, *args, "--model", folder, "--output-dir", tmp_path / "made")
    assert not (tmp_path / "made").exists()
