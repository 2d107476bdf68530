"""What goes wrong under torchrun: a process is killed, told to stop, slow, or meets an error of the user's. The job
ends with the cause and, continued, equals the run that nothing disturbed, bit for bit.

All runs are of grpo.py on two processes of one thread each, on the CPU over gloo; --fsdp where it says so.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ENVIRONMENT, REPO, SMALL, assert_same_result, metrics, runs_in

GRPO, FAULTY = REPO / "algos/grpo.py", REPO / "tests/faulty_rank.py"
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


class Job:
    """torchrun in a session of its own, both outputs in one text."""

    def __init__(self, folder: Path, *args, nodes: int = 0, fault: str = "", **environment: str):
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2 // (nodes or 1)]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job"]
        words += ["--nnodes", nodes, *meet] if nodes else ["--standalone"]
        words += [FAULTY, *fault.split()] if fault else []
        words = [*map(str, words), str(GRPO), *map(str, args)]
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def flags(project: Path, name: str) -> list[str]:
    return [*FLAGS, "--reward", f"{project / 'rewards.py'}:graded", "--output-dir", str(project / name)]


def whole(project: Path, name: str, *more: str) -> Path:
    code, output = Job(project, *flags(project, name), *more).end()
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


def continued(project: Path, folder: Path, reference: Path, **how) -> None:
    """--resume ends the run, and nothing is lost but the evaluation at a step that was not due."""
    code, output = Job(project, "--resume", folder, **how).end()
    assert code == 0, output
    assert_same_result(folder, reference)


def stop_one(project: Path, name: str, fault: str, *more: str) -> tuple[Path, str]:
    code, output = Job(project, *flags(project, name), *more, fault=fault).end()
    assert code == 1, output
    (folder,) = runs_in(project / name)
    assert not (folder / "model").exists()
    return folder, output


def test_one_process_of_a_run_is_told_to_stop_another_raises_and_one_is_killed(project, undisturbed):
    """In turn, each time when the run goes on. At last it ends as two launchers, as on two nodes."""
    folder, output = stop_one(project, "unlucky", "1 update 3 SIGTERM")
    assert "stopped after step 3; continue with --resume" in output  # all processes, at the same step
    assert saved_step(folder) == 3 and [row["step"] for row in metrics(folder)] == [0, 1, 2, 3]
    for how, *words in (
        ({"FAULT": "1 2 raise"}, "RuntimeError: the judge is out", "rewards.py"),
        ({"fault": "0 save 1 SIGKILL"}, "SIGKILL"),  # with half a checkpoint written
    ):
        code, output = Job(project, "--resume", folder, **how).end()
        assert code == 1 and all(word in output for word in words) and saved_step(folder) == 4, output
    continued(project, folder, undisturbed, nodes=2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["1 rollout 9 SIGKILL", "0 update 4 SIGKILL", "1 save 2 SIGKILL"])
def test_a_process_is_killed(fault, project, undisturbed):
    folder, output = stop_one(project, f"killed-{fault.replace(' ', '-')}", fault)
    assert "SIGKILL" in output and saved_step(folder) in (2, 4)
    continued(project, folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["1 update 4 SIGKILL", "0 save 2 SIGKILL", "1 rollout 9 SIGTERM"])
def test_a_process_of_shards_is_stopped(fault, project, undisturbed_shards):
    folder, _ = stop_one(project, f"shards-{fault.replace(' ', '-')}", fault, *SHARDS)
    assert saved_step(folder) >= 2
    continued(project, folder, undisturbed_shards)


@pytest.mark.slow
def test_torchrun_itself_is_told_to_stop(project, undisturbed):
    """As by a batch system before the time is over: it tells all processes."""
    job = Job(project, *flags(project, "batch"), fault="0 update 3 0.0")
    while not any((folder / "metrics.jsonl").read_text().count("\n") > 1 for folder in runs_in(project / "batch")):
        time.sleep(0.05)
    job.launchers[0].terminate()
    _, output = job.end()
    (folder,) = runs_in(project / "batch")
    assert "stopped after step" in output and saved_step(folder) == metrics(folder)[-1]["step"], output
    continued(project, folder, undisturbed)


@pytest.mark.slow
def test_a_slow_reward_hits_no_timeout(project, undisturbed):
    code, output = Job(project, *flags(project, "slow"), FAULT="1 5 15").end()
    assert code == 0, output
    assert metrics(runs_in(project / "slow")[0]) == metrics(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("words, sentence", [("--num-prompts 1", "--num-prompts must be at least 2"),
                                             ("--model absent/folder", "absent/folder"), ("--resume absent", "absent"),
                                             ("--reward absent.py:f", "absent.py")])  # fmt: skip
def test_wrong_input_is_said_before_what_torchrun_adds(words, sentence, tmp_path):
    """And no run is left."""
    code, output = Job(tmp_path, "--device", "cpu", "--output-dir", tmp_path / "runs", *words.split()).end()
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 1 and said and sentence in said[0] and "Traceback" not in output.partition(said[0])[0]
    assert not (tmp_path / "runs").exists()
