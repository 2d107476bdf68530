"""What goes wrong under torchrun: a rank is killed, told to stop, slow, or meets an error of the user's. The job ends
with the cause and, continued, equals the run that nothing disturbed, bit for bit.

All runs are of grpo.py on two ranks of one thread each, on the CPU over gloo; --fsdp where it says so.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, REPO, SMALL, assert_same_result, checkpoints, metrics, runs_in

from utils.distributed import TIMEOUT

GRPO, FAULTY = REPO / "algos/grpo.py", REPO / "tests/faulty_rank.py"
FLAGS = [*SMALL["grpo"], "--sample-batch-size", "4", "--beta", "0.04"]  # four chunks a step, and a reference
REWARDS = """
import os, signal, time
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

    def __init__(self, folder: Path, *args, nodes: int = 0, ranks: int = 2, fault: str = "", **environment: str):
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks // (nodes or 1)]
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


@pytest.fixture(scope="module")
def undisturbed(project) -> Path:
    code, output = Job(project, *flags(project, "whole")).end()
    assert code == 0, output
    return runs_in(project / "whole")[0]


@pytest.fixture(scope="module")
def undisturbed_shards(project) -> Path:
    code, output = Job(project, *flags(project, "whole-shards"), "--fsdp", "--precision", "float32").end()
    assert code == 0, output
    return runs_in(project / "whole-shards")[0]


def continued(project: Path, folder: Path, reference: Path, **how) -> None:
    """--resume ends the run, and nothing is lost."""
    code, output = Job(project, "--resume", folder, **how).end()
    assert code == 0, output
    assert_same_result(folder, reference)


def stop_one_rank(project: Path, name: str, fault: str, *more: str) -> tuple[Path, str]:
    code, output = Job(project, *flags(project, name), *more, fault=fault).end()
    assert code == 1, output
    (folder,) = runs_in(project / name)
    assert not (folder / "model").exists()
    return folder, output


def test_a_rank_is_killed_in_an_evaluation(project, undisturbed):
    """Which the other rank must not take for an error of the user's: it would save the step without its evaluation."""
    folder, output = stop_one_rank(project, "killed-evaluation", "1 rollout 8 SIGKILL")
    assert "SIGKILL" in output and checkpoints(folder) == [0]
    continued(project, folder, undisturbed)


@pytest.mark.slow
def test_a_rank_is_killed_in_an_update(project, undisturbed):
    folder, output = stop_one_rank(project, "killed-update", "1 update 4 SIGKILL")
    assert "SIGKILL" in output and checkpoints(folder) == [0, 2]
    continued(project, folder, undisturbed)


def test_sigterm_to_one_rank_stops_all_at_the_same_step(project, undisturbed):
    """And the run goes on as two launchers, as on two nodes."""
    folder, output = stop_one_rank(project, "told", "1 update 3 SIGTERM")
    assert output.count("stopped after step 3; continue with --resume") == 1
    assert checkpoints(folder)[-1] == 3 and [row["step"] for row in metrics(folder)] == [0, 1, 2, 3]
    continued(project, folder, undisturbed, nodes=2)


def test_a_reward_that_raises_on_rank_1(project, undisturbed):
    """Their frames once, everything saved; with a mended reward the run goes on."""
    code, output = Job(project, *flags(project, "raises"), FAULT="1 4 raise").end()
    assert code == 1 and output.count("RuntimeError: the judge is out") == 1 and "rewards.py" in output
    (folder,) = runs_in(project / "raises")
    saved = checkpoints(folder)[-1]
    assert saved == metrics(folder)[-1]["step"] > 0, "a step is lost"
    continued(project, folder, undisturbed)


@pytest.mark.slow  # by default one of these runs in test_distributed.py
@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--task sort --num-prompts 4 --num-generations 4 --sample-batch-size 16", "--sample-batch-size"),
        ("--num-prompts 0", "--num-prompts is 0"),
        ("--model absent/folder", "--model absent/folder"),
        ("--device cuda:0", "--device cuda:0"),
        ("--resume absent", "absent"),
        ("--reward absent.py:f", "absent.py"),
    ],
)
def test_wrong_input_is_said_once(words, sentence, tmp_path):
    """Before what torchrun adds, whose exit code is 1; and no run is left. The first has one chunk for two ranks."""
    code, output = Job(tmp_path, "--device", "cpu", "--output-dir", tmp_path / "runs", *words.split()).end()
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 1 and len(said) == 1 and sentence in said[0], output
    assert output.index(said[0]) < output.index("ChildFailedError") and "Traceback" not in output.partition(said[0])[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_unknown_flag_is_said_once(tmp_path):
    code, output = Job(tmp_path, "--nonsense").end()
    assert code == 1 and output.count("--nonsense") <= 2 and output.count("Unrecognized options") <= 2, output


KILLS = ["1 rollout 9 SIGKILL", "0 rollout 8 SIGKILL", "0 update 4 SIGKILL", "0 save 3 SIGKILL", "1 save 4 SIGKILL"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", KILLS)
def test_a_rank_is_killed(fault, project, undisturbed):
    folder, output = stop_one_rank(project, f"killed-{fault.replace(' ', '-')}", fault)
    assert "SIGKILL" in output and checkpoints(folder)
    continued(project, folder, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["1 update 4 SIGKILL", "0 rollout 8 SIGKILL", "0 save 3 SIGKILL"])
def test_a_rank_of_shards_is_killed(fault, project, undisturbed_shards):
    more = ("--fsdp", "--precision", "float32")
    folder, output = stop_one_rank(project, f"shards-{fault.replace(' ', '-')}", fault, *more)
    assert "SIGKILL" in output and checkpoints(folder)
    continued(project, folder, undisturbed_shards)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["0 rollout 5 SIGTERM", "1 save 4 SIGTERM"])
def test_one_rank_is_told_to_stop(fault, project, undisturbed_shards):
    folder, output = stop_one_rank(
        project, f"told-{fault.replace(' ', '-')}", fault, "--fsdp", "--precision", "float32"
    )
    assert len(re.findall(r"stopped after step \d; continue with --resume", output)) == 1, output
    assert checkpoints(folder)[-1] == metrics(folder)[-1]["step"]
    continued(project, folder, undisturbed_shards)


@pytest.mark.slow
def test_torchrun_itself_is_told_to_stop(project, undisturbed):
    """As by a batch system before the time is over: it tells all ranks."""
    job = Job(project, *flags(project, "batch"), fault="0 update 3 0.0")
    while not any((folder / "metrics.jsonl").read_text().count("\n") > 1 for folder in runs_in(project / "batch")):
        time.sleep(0.05)
    job.launchers[0].terminate()
    _, output = job.end()
    (folder,) = runs_in(project / "batch")
    assert "stopped after step" in output and checkpoints(folder)[-1] == metrics(folder)[-1]["step"], output
    continued(project, folder, undisturbed)


@pytest.mark.slow
def test_a_slow_reward_hits_no_timeout(project, undisturbed):
    """The other rank waits for it in a collective: with a limit of five seconds the same run ends there."""
    assert TIMEOUT >= timedelta(hours=2)
    code, output = Job(project, *flags(project, "slow"), FAULT="1 5 15").end()
    assert code == 0, output
    assert_same_result(runs_in(project / "slow")[0], undisturbed)
    code, output = Job(project, *flags(project, "short"), fault="0 timeout 5 x", FAULT="1 5 15").end()
    assert code == 1 and "imed out" in output, output


@pytest.mark.slow
def test_two_launchers_are_one_job(project, undisturbed):
    code, output = Job(project, *flags(project, "nodes"), nodes=2).end()
    assert code == 0, output
    (folder,) = runs_in(project / "nodes")
    assert_same_result(folder, undisturbed)
    assert json.loads((folder / "config.json").read_text())["args"]["output_dir"] == str(project / "nodes")
