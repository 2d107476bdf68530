"""Many processes: the gradient of one batch is that of one process, and any number of them goes on from a checkpoint.
Most tests read what one job of two processes found (tests/two_processes.py), which runs once."""

import json
import os
import subprocess
import sys

import pytest
import torch
from filelock import FileLock
from helpers import LANGUAGE, REPO, SMALL, metrics, new_run
from two_processes import WAYS

from utils.dist import Means, averaged, equal_passes, moments, share, start, stream, total
from utils.lm import resolve

CASES = [*(f"{script}, float64" for script in LANGUAGE), "grpo, by tokens", "grpo, token", "grpo, constant",
         "dapo, 1 and 4", "dapo, 0 and 5"]  # fmt: skip


@pytest.fixture(scope="session")
def found(tmp_path_factory) -> dict:
    """What the job found, of all workers' runs together: the first that comes starts it, the others wait."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) / "two-processes"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "ended").exists():
            ended = subprocess.run([sys.executable, "tests/two_processes.py", folder], capture_output=True, text=True,
                                   cwd=REPO, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
            (folder / "ended").write_text(f"exit code {ended.returncode}\n{ended.stderr}")
    why = (folder / "ended").read_text()
    assert why.startswith("exit code 0\n"), why
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("case", CASES)
def test_a_batch_over_two_processes_has_the_gradient_of_one(found, case, way):
    """Unequal lengths and numbers of groups, so under FSDP of passes too; and the metrics of the whole batch."""
    assert max(found[f"{case}, {way}"].values()) < 1e-10


def test_dapo_fills_the_batch_with_unequal_numbers_of_groups(found):
    assert found["refill, 1 and 4"] == [1, 4] and found["refill, 0 and 5"] == [0, 5]


@pytest.mark.parametrize("way", WAYS[1:])
def test_the_same_in_float32(found, way):
    assert found[f"grpo, float32, {way}"]["gradient"] < 1e-5 and found[f"grpo, float32, {way}"]["metrics"] < 1e-4


@pytest.mark.parametrize("began", WAYS)
@pytest.mark.parametrize("went_on", WAYS)
def test_a_checkpoint_goes_on_with_another_number_of_processes(found, began, went_on):
    """Weights and moments: after one update more all are what they would have been."""
    far, count = found[f"{began} to {went_on}"]
    assert far < 1e-10 and count > 60


@pytest.mark.parametrize("name", ["shards", "lora", "replicas", "dapo"])
def test_a_run_learns_goes_on_and_saves(found, name):
    run = found[f"run, {name}"]
    assert run["steps"] == list(range(5 if name == "replicas" else 4)) and 1e-6 < run["moved"] < 1e-2
    assert run["gap"] < 1e-5 and run["adapter"] == (name in ("lora", "replicas"))


def ranks(monkeypatch, count: int):
    """Yields in turn as each process of `count`."""
    for rank in range(count):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        monkeypatch.setenv("RANK", str(rank))
        yield rank


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_prompt_is_drawn_once(monkeypatch, count):
    """And each process samples with random numbers of its own."""
    shares = [list(share(range(16))) for _ in ranks(monkeypatch, count)]
    assert sorted(sum(shares, [])) == list(range(16)) and max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len({stream("cpu", 1, "train", 1).initial_seed() for _ in ranks(monkeypatch, count)}) == count


def test_one_process_needs_no_others(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert start(torch.device("cpu")) == torch.device("cpu") and not torch.distributed.is_initialized()
    assert total(torch.tensor(3)) == 3 and averaged({"a": 1.0}) == {"a": 1.0}
    assert equal_passes([[0], [1]], type("Args", (), {"fsdp": True})) == [[0], [1]]


def test_moments_by_hand():
    mean, deviation = moments(torch.tensor([[1.0, torch.nan], [4.0, 1.0]]))
    assert mean == 2 and deviation == pytest.approx(3**0.5)
    assert not moments(torch.tensor([torch.nan]))[1] and not moments(torch.tensor([5.0]))[1]


def test_means_are_those_of_all_tokens():
    means, mask = Means(), torch.tensor([[True, True, False], [True, False, False]])
    means.add(mask, a=torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0]]), none=torch.ones(2, 3), row=torch.ones(2, 1))
    means.add(mask[1:], a=torch.tensor([[7.0, 0.0, 0.0]]))
    means.add(mask[:, 2:], nothing=torch.ones(2, 1))
    assert means.read() == {"a": 4.0, "none": 1.0, "row": 1.0}


@pytest.mark.parametrize("flags, says", [("", None), ("--num-minibatches 3", "--num-prompts must be at least 6")])
def test_a_process_without_work_is_refused(monkeypatch, flags, says):
    from algos import grpo
    from utils.core import UserError

    model = torch.nn.Linear(1, 1)
    for _ in ranks(monkeypatch, 2):
        args = grpo.Args(num_prompts=5, num_minibatches=int((flags or "1").split()[-1]))
        if says is None:
            resolve(model, args, grpo.PRESETS)
        else:
            with pytest.raises(UserError, match=says):
                resolve(model, args, grpo.PRESETS)


@pytest.mark.parametrize("flags", [[], ["--fsdp", "--precision", "float32"]])
def test_a_lone_process_under_torchrun_is_a_run_as_any(flags, tmp_path, monkeypatch):
    """It joins a group of one, and may shard."""
    from algos import grpo

    words = [*SMALL["grpo"], "--max-steps", "2"]
    expected = metrics(new_run(grpo, tmp_path / "plain", *words))
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):  # port 0: a free one
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    try:
        rows = metrics(new_run(grpo, tmp_path / "lone", *words, *flags))
        assert torch.distributed.get_world_size() == 1
    finally:
        torch.distributed.destroy_process_group()
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
