"""What the tests of whole runs share: a script in a process of its own, or in this one, and its results."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from tests.specs import SPECS
from utils import core

REPO = Path(__file__).resolve().parents[1]
DRAW = core.plot  # conftest.py puts another in its place
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
SMALL = {name: spec.small.split() for name, spec in SPECS.items()}  # arguments of runs of about a second
LANGUAGE = [name for name, spec in SPECS.items() if spec.family.startswith("Language models")]
GENERATORS = [name for name, spec in SPECS.items() if spec.family in ("In context", "Generators")]
ONLINE = [name for name in LANGUAGE if SPECS[name].family == "Language models: rewards"]  # they sample


def start(algo: str, *args, cwd: Path, **environment: str) -> subprocess.Popen:
    """`python algos/<algo>.py args`, from the folder `cwd`, with pipes for its output."""
    return subprocess.Popen(
        [sys.executable, REPO / "algos" / f"{algo}.py", *map(str, args)], cwd=cwd, text=True,
        env=os.environ | ENVIRONMENT | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


class Forked:
    """As `start`, but forked from this process, which saves the seconds of importing torch; both outputs in one log."""

    def __init__(self, module, *args, log: Path):
        self.log = log
        self.process = multiprocessing.get_context("fork").Process(target=self.run, args=(module, *args))
        self.process.start()
        self.pid = self.process.pid

    def run(self, module, *args) -> None:
        os.setsid()  # so that os.killpg is the terminal's Ctrl-C
        tqdm.set_lock(threading.RLock())  # its own is shared between processes: a kill would leave it locked for all
        sys.stdout = sys.stderr = open(self.log, "w", buffering=1)
        for number in (1, 2):
            os.dup2(sys.stdout.fileno(), number)
        warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)  # pytest would keep them
        command_line(module, *args)

    def poll(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float = 100) -> tuple[str, int]:
        """What was printed, and the exit code."""
        self.process.join(timeout)
        if self.process.is_alive():
            os.killpg(self.pid, signal.SIGKILL)
        return self.log.read_text(), self.process.exitcode


def command_line(module, *args, picture: bool = False) -> None:
    """The same command line in this process, which saves the seconds of importing torch; signal handlers, the random
    generators and the module search path are left as they were. Without `picture` the curve is an empty file."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, path = torch.get_num_threads(), list(sys.path)
    try:
        with (
            mock.patch.object(sys, "argv", [module.__file__, *map(str, args)]),
            mock.patch.dict(os.environ, ENVIRONMENT),
            mock.patch.object(core, "plot", DRAW if picture else core.plot),
            torch.random.fork_rng(devices=[]),
        ):
            core.main(module.Args, module.train, module.NAME)
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = path
        for number, handler in handlers.items():
            signal.signal(number, handler)


def new_run(module, output_dir: Path, *args, picture: bool = False) -> Path:
    """The folder of a run made by `command_line` in `output_dir`."""
    before = set(runs_in(output_dir))
    command_line(module, *args, "--output-dir", output_dir, picture=picture)
    (folder,) = set(runs_in(output_dir)) - before
    return folder


def runs_in(output_dir: Path) -> list[Path]:
    return sorted(output_dir.iterdir()) if output_dir.is_dir() else []


def write_rows(path: Path, rows: list[dict]) -> str:
    """A .jsonl file; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without the columns that measure time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the saved model; those of an ensemble's members begin with the member's name. Without LoRA's adapters, which
    are merged into it."""
    root, found = folder / "model", {}
    for path in sorted(root.rglob("model*.safetensors")):
        prefix = "" if path.parent == root else f"{path.parent.name} "
        found |= {prefix + name: tensor for name, tensor in load_file(path).items()}
    assert found, f"{root} holds no weights"
    return found


def checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@contextlib.contextmanager
def copied_at(step: int, copy: Path):
    """Inside, the first run that has a checkpoint of `step` or later is copied then, as a kill leaves it: behind the
    checkpoint stand rows, the last one cut in the middle."""
    end_step = core.Run.end_step

    def copying(run, done, parts):
        end_step(run, done, parts)
        saved = (run.dir / "checkpoint.pt").exists() and checkpoint(run.dir)["step"]
        if saved == done >= step and not copy.exists():
            shutil.copytree(run.dir, copy)
            with open(copy / "metrics.jsonl", "a") as file:
                file.write(f'{{"step": {done + 1}, "reward": 5}}\n{{"step": {done + 2}, "rew')

    with mock.patch.object(core.Run, "end_step", copying):
        yield


def wait_for(process, output_dir: Path, there) -> Path:
    """Returns the run's folder as soon as `there(folder)` holds."""
    ended = False
    while not ended:
        ended = process.poll() is not None  # before the look: it may have ended between two of them
        for folder in runs_in(output_dir):
            if there(folder):
                return folder
        time.sleep(0.002)
    raise AssertionError(process.communicate())


def assert_same_result(folder: Path, reference: Path) -> None:
    """Equal metrics but for time, no row or sample lost or twice, and final weights equal bit for bit."""
    assert metrics(folder) == metrics(reference)
    if (samples := reference / "samples.jsonl").exists():
        assert (folder / "samples.jsonl").read_text() == samples.read_text()
    ours, theirs = weights(folder), weights(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@contextlib.contextmanager
def user_error(capsys, *words: str):
    """Exit code 2 and one sentence on stderr that holds all of `words`; no traceback."""
    capsys.readouterr()
    code = None
    try:
        yield
    except SystemExit as exit:
        code = exit.code
    err = capsys.readouterr().err
    assert code == 2, f"exit code {code}\n{err}"
    assert_one_sentence(err, *words)


def assert_one_sentence(err: str, *words: str) -> None:
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert not [word for word in words if word not in err], err
