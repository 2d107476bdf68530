"""What goes wrong in several processes: one is killed, told to stop, slow, or meets an error of the user's. All end,
and continued, the run equals the one that nothing disturbed, bit for bit.

All runs are of grpo.py on two processes of one thread each, on the CPU over gloo; --fsdp where it says so. Where
torchrun itself does not matter, they are forked from this one, which saves its start and the imports.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ENVIRONMENT, REPO, SMALL, Forked, assert_same_result, metrics, runs_in

import utils.lm
from algos import grpo
from utils.dist import Trained

FLAGS = [*SMALL["grpo"], "--sample-batch-size", "4", "--beta", "0.04", "--save-every", "2"]
SHARDS = ("--fsdp", "--precision", "float32")
REWARDS = """
import os, time
calls = 0
def graded(completions, **_):
    global calls
    calls += 1
    rank, call, what = os.environ.get("FAULT", "no 0 x").split()
    if os.environ.get("RANK") == rank and calls == int(call):
        if what == "raise":
            raise RuntimeError("the judge is out")
        time.sleep(float(what))
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


def prepare_fault(moment: str, count: int, number: int) -> None:
    """This process gets signal `number` when it comes to `moment` for the COUNTth time: sample (a batch), update
    (between gradients and their sum), or save (with half of a checkpoint written, or where it waits for process 0)."""
    seen, write = [], torch.save

    def fault() -> None:
        seen.append(moment)
        if len(seen) == count:
            os.kill(os.getpid(), number)

    def before(owner, name: str) -> None:
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **how: (fault(), function(*args, **how))[1])

    def half_written(state, file, **how) -> None:
        write(state, file, **how)
        if hasattr(file, "name"):  # what a resumed process sends to the others has none
            file.flush()
            os.truncate(file.name, file.tell() // 2)
            fault()
            file.seek(0)
            write(state, file)

    if moment == "save" and os.environ["RANK"] == "0":
        torch.save = half_written
    else:
        places = {"sample": (utils.lm, "sample"), "update": (grpo, "clip_gradients"), "save": (Trained, "state_dict")}
        before(*places[moment])


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def forked(folder: Path, *args, fault: str = "") -> tuple[int, str]:
    """Two processes; fault: RANK and words of `prepare_fault`. The largest exit code and what both have printed."""
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    whose, *what = fault.split() or [""]

    def process(rank: str) -> Forked:
        def train(args) -> list:
            os.environ.update(shared, RANK=rank)
            if rank == whose:
                prepare_fault(what[0], int(what[1]), getattr(signal, what[2]))
            return grpo.train(args)

        module = SimpleNamespace(__file__=grpo.__file__, Args=grpo.Args, NAME=grpo.NAME, train=train)
        return Forked(module, *args, log=folder / f"{rank}.txt")

    ended = [process.communicate() for process in [process("0"), process("1")]]
    return max(abs(code) for _, code in ended), "".join(text for text, _ in ended)


class Job:
    """torchrun in a session of its own, both outputs in one text."""

    def __init__(self, folder: Path, *args, nodes: int = 0, **environment: str):
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2 // (nodes or 1)]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job"]
        words += ["--nnodes", nodes, *meet] if nodes else ["--standalone"]
        words = [*map(str, words), str(REPO / "algos/grpo.py"), *map(str, args)]
        self.output = folder / "output.txt"
        with open(self.output, "w") as output:
            self.launchers = [
                subprocess.Popen(words, cwd=folder, stdout=output, stderr=output, start_new_session=True,
                                 env=os.environ | ENVIRONMENT | environment)
                for _ in range(nodes or 1)
            ]  # fmt: skip

    def end(self, timeout: float = 300) -> tuple[int, str]:
        """The largest exit code and what all have printed. A job that hangs is killed, and fails the test."""
        until = time.monotonic() + timeout
        try:
            codes = [launcher.wait(max(until - time.monotonic(), 0)) for launcher in self.launchers]
        finally:
            for launcher in self.launchers:
                if launcher.poll() is None:
                    for pid in [*children(launcher.pid), launcher.pid]:
                        os.kill(pid, signal.SIGKILL)
        return max(codes), self.output.read_text()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def flags(project: Path, name: str) -> list[str]:
    return [*FLAGS, "--reward", f"{project / 'rewards.py'}:graded", "--output-dir", str(project / name)]


def whole(project: Path, name: str, *more: str) -> Path:
    code, output = forked(project, *flags(project, name), *more)
    assert code == 0, output
    return runs_in(project / name)[0]


@pytest.fixture(scope="module")
def undisturbed(project) -> Path:
    return whole(project, "whole")


@pytest.fixture(scope="module")
def undisturbed_shards(project) -> Path:
    return whole(project, "whole-shards", *SHARDS)


def saved_step(folder: Path) -> int:
    path = folder / "checkpoint.pt"
    return torch.load(path, weights_only=True)["step"] if path.exists() else 0


def continued(ended: tuple[int, str], folder: Path, reference: Path) -> None:
    assert ended[0] == 0, ended[1]
    assert_same_result(folder, reference)


def stop_one(project: Path, name: str, fault: str, *more: str) -> tuple[Path, str]:
    code, output = forked(project, *flags(project, name), *more, fault=fault)
    assert code, output
    (folder,) = runs_in(project / name)
    assert not (folder / "model").exists()
    return folder, output


def test_one_process_of_a_run_is_told_to_stop_another_raises_and_one_is_killed(project, undisturbed):
    """In turn, each time when the run goes on. At last it ends as two launchers, as on two nodes."""
    folder, output = stop_one(project, "unlucky", "1 update 3 SIGTERM")
    assert "stopped after step 3; continue with --resume" in output  # all processes, at the same step
    assert saved_step(folder) == 3 and [row["step"] for row in metrics(folder)] == [0, 1, 2, 3]
    code, output = Job(project, "--resume", folder, FAULT="1 2 raise").end()
    assert code == 1 and "RuntimeError: the judge is out" in output and "rewards.py" in output, output
    assert saved_step(folder) == 4
    code, output = forked(project, "--resume", folder, fault="0 save 1 SIGKILL")  # half a checkpoint is written
    assert code == signal.SIGKILL and saved_step(folder) == 4, output
    continued(Job(project, "--resume", folder, nodes=2).end(), folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["1 sample 12 SIGKILL", "0 update 4 SIGKILL", "1 save 2 SIGKILL"])
def test_a_process_is_killed(fault, project, undisturbed):
    folder, _ = stop_one(project, f"killed-{fault.replace(' ', '-')}", fault)
    assert saved_step(folder) in (2, 4)
    continued(forked(project, "--resume", folder), folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["1 update 4 SIGKILL", "0 save 2 SIGKILL", "1 sample 12 SIGTERM"])
def test_a_process_of_shards_is_stopped(fault, project, undisturbed_shards):
    folder, _ = stop_one(project, f"shards-{fault.replace(' ', '-')}", fault, *SHARDS)
    assert saved_step(folder) >= 2
    continued(forked(project, "--resume", folder), folder, undisturbed_shards)


@pytest.mark.slow
def test_torchrun_itself_is_told_to_stop(project, undisturbed):
    """As by a batch system before the time is over: it tells all processes."""
    job = Job(project, *flags(project, "batch"))
    while not list(project.glob("batch/*/checkpoint.pt")):
        time.sleep(0.05)
    job.launchers[0].terminate()
    _, output = job.end()
    (folder,) = runs_in(project / "batch")
    assert "stopped after step" in output and saved_step(folder) == metrics(folder)[-1]["step"], output
    continued(Job(project, "--resume", folder).end(), folder, undisturbed)


@pytest.mark.slow
def test_a_slow_reward_hits_no_timeout(project, undisturbed):
    ended = Job(project, *flags(project, "slow"), FAULT="1 5 15").end()
    continued(ended, runs_in(project / "slow")[0], undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("words, sentence", [("--num-prompts 1", "--num-prompts must be at least 2"),
                                             ("--resume absent", "absent")])  # fmt: skip
def test_wrong_input_is_said_before_what_torchrun_adds(words, sentence, tmp_path):
    """And no run is left."""
    code, output = Job(tmp_path, "--device", "cpu", "--output-dir", tmp_path / "runs", *words.split()).end()
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 1 and said and sentence in said[0] and "Traceback" not in output.partition(said[0])[0]
    assert not (tmp_path / "runs").exists()
