"""Offline scripts: wrong input ends with one sentence and exit code 2; saved agents are scored as trained, without the
dataset, and usable elsewhere. What is wrong with a dataset: tests/test_offline_data.py."""

import json
import shutil

import numpy as np
import pytest
import torch
from helpers import SMALL, command_line, metrics, new_run, user_error
from safetensors.torch import load_file
from small_data import pendulum

from algos import bc, dt, iql
from utils import run as run_module
from utils.checkpoint import load_newest

SCRIPTS = {"bc": bc, "iql": iql, "dt": dt}
ALL = [
    ("--max-steps 0", "--max-steps", "at least 1"),
    ("--batch-size 0", "--batch-size", "at least 1"),
    ("--log-every 0", "--log-every", "at least 1"),
    ("--eval-episodes 0", "--eval-episodes", "at least 1"),
    ("--eval-every -1", "--eval-every", "at least 0"),
    ("--learning-rate 0", "--learning-rate", "above 0"),
    ("--learning-rate nan", "--learning-rate", "finite"),
    ("--dropout 1", "--dropout", "below 1"),
    ("--save-every 0", "--save-every", "at least 1"),
    ("--device quantum", "quantum", "cpu"),
    ("--output-dir data.hdf5/runs", "--output-dir", "writable"),
    ("--capture-video", "--capture-video", "--evaluate"),
    ("--resume nowhere", "nowhere", "config.json"),
    ("--evaluate nowhere", "nowhere", "config.json"),
    ("--dataset nowhere.hdf5", "nowhere.hdf5", "neither a file or folder"),
    ("--env-id CartPole-v1", "Discrete", "finite bounds"),
    ("--env-id MountainCarContinuous-v0", "3 observation and 1 action", "2 and 1"),
    ("--env-id Absent-v0", "Absent", "registered"),
]
OWN = {
    "bc": [
        ("--hidden-size 0", "--hidden-size", "at least 1"),
        ("--top-fraction 0", "--top-fraction", "above 0"),
        ("--top-fraction 1.1", "--top-fraction", "at most 1"),
    ],
    "iql": [
        ("--expectile 1", "--expectile", "below 1"),
        ("--expectile 0", "--expectile", "above 0"),
        ("--temperature -1", "--temperature", "at least 0"),
        ("--online-steps -1", "--online-steps", "at least 0"),
        ("--gamma 1.1", "--gamma", "from 0 to 1"),
        ("--tau -0.1", "--tau", "from 0 to 1"),
    ],
    "dt": [
        ("--context-length 0", "--context-length", "at least 1"),
        ("--embed-dim 9", "--embed-dim 9", "--num-heads 2"),
        ("--rtg-scale 0", "--rtg-scale", "above 0"),
        ("--max-grad-norm 0", "--max-grad-norm", "above 0"),
        ("--weight-decay -1", "--weight-decay", "at least 0"),
        ("--max-episode-length 0", "--max-episode-length", "at least 1"),
        ("--target-returns nan 1", "--target-returns", "finite"),
    ],
}
WRONG = [(algo, *case) for algo in SCRIPTS for case in ALL + OWN[algo]]


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """No picture is drawn of these runs: it would take most of their time."""
    monkeypatch.setattr(run_module, "plot", lambda *_: None)


@pytest.mark.parametrize("algo, args, words", [(algo, args, words) for algo, args, *words in WRONG], ids=str)
def test_seen_before_the_run(algo, args, words, tmp_path, monkeypatch, capsys):
    """The sentence names what is wrong, and nothing has been written."""
    monkeypatch.chdir(tmp_path)
    pendulum(tmp_path / "data.hdf5")
    output = [] if "--output-dir" in args else ["--output-dir", "made"]
    with user_error(capsys, *words):
        command_line(SCRIPTS[algo], *SMALL[algo], "--dataset", "data.hdf5", *args.split(), *output)
    assert [path.name for path in tmp_path.iterdir()] == ["data.hdf5"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """algo -> the folder of a finished run whose dataset is gone, never to be changed."""
    made = {}

    def make(algo: str):
        if algo not in made:
            folder = tmp_path_factory.mktemp(algo)
            data = pendulum(folder / "data.hdf5")
            online = ["--online-steps", 32] if algo == "iql" else []
            made[algo] = new_run(SCRIPTS[algo], folder / "runs", *SMALL[algo], "--dataset", data, *online)
            data.unlink()
        return made[algo]

    return make


def score(module, folder, capsys, *args) -> dict:
    capsys.readouterr()
    command_line(module, "--evaluate", folder, *args)
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


@pytest.mark.parametrize("algo", SCRIPTS)
def test_evaluate_gives_the_last_row(algo, trained, tmp_path, monkeypatch, capsys):
    """From any folder, without the dataset, which the last row needed for its score only."""
    folder = trained(algo)
    last = {name: value for name, value in metrics(folder)[-1].items() if name.startswith("eval/")}
    assert {"eval/score", "eval/best_return", "eval/return"} <= last.keys()
    monkeypatch.chdir(tmp_path)
    expected = {name: value for name, value in last.items() if name not in ("eval/score", "eval/best_return")}
    assert score(SCRIPTS[algo], folder, capsys) == expected
    assert score(SCRIPTS[algo], folder, capsys, "--seed", 5) != expected
    assert len(expected) >= 3


def test_last_and_best_are_both_reported(trained, tmp_path, capsys):
    """In the last row and in the terminal, with the number of episodes and the seed."""
    for algo, module in SCRIPTS.items():
        rows = [row for row in metrics(trained(algo)) if "eval/return" in row]
        assert rows[-1]["eval/best_return"] == max(row["eval/return"] for row in rows) and len(rows) >= 3
        new_run(module, tmp_path, *SMALL[algo], "--dataset", pendulum(tmp_path / "data.hdf5"), "--seed", 7)
        out = capsys.readouterr().out
        assert "at the end" in out and "at best" in out and "of 2 episodes" in out and "seed 7" in out


def test_a_transformer_can_be_asked_for_other_returns(trained, capsys):
    found = score(dt, trained("dt"), capsys, "--target-returns", -100, 50.5)
    assert {"eval/return_at_-100", "eval/return_at_50.5", "eval/slope", "eval/return"} == found.keys()
    with user_error(capsys, "--context-length", "4"):
        command_line(dt, "--evaluate", trained("dt"), "--context-length", 9)


def test_a_lowered_top_fraction_that_leaves_nothing(tmp_path, capsys):
    """Never: the best trajectory stays, however small the fraction is."""
    folder = new_run(bc, tmp_path, *SMALL["bc"], "--dataset", pendulum(tmp_path / "d.hdf5"), "--top-fraction", 1e-9)
    assert metrics(folder)[-1]["step"] == 160 and "40 transitions taken of 240" in capsys.readouterr().out


@pytest.mark.parametrize("algo", ["bc", "iql"])
def test_the_model_is_usable_elsewhere(algo, trained, tmp_path):
    """RUN/model/model.safetensors, by plain torch, acts as the agent does."""
    tensors = load_file(trained(algo) / "model" / "model.safetensors")
    actor = {name.removeprefix("actor.net."): tensor for name, tensor in tensors.items() if "actor.net." in name}
    layers = [torch.nn.Linear(*tensor.shape[::-1]) for name, tensor in actor.items() if name.endswith("weight")]
    for layer, index in zip(layers, sorted({name.split(".")[0] for name in actor})):
        layer.load_state_dict({"weight": actor[f"{index}.weight"], "bias": actor[f"{index}.bias"]})
    obs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mean = layers[2](layers[1](layers[0](obs).relu()).relu()).tanh()
    args = SCRIPTS[algo].Args(hidden_size=16, dropout=0.0)
    agent = SCRIPTS[algo].Agent(3, 1, args)
    agent.load_state_dict(load_newest(trained(algo) / "checkpoints")["agent"])
    space = type("Space", (), {"shape": (1,)})
    ours = SCRIPTS[algo].act(agent.actor, space, obs.numpy(), 0.0, torch.Generator())
    np.testing.assert_allclose(mean.numpy(), ours, rtol=0, atol=1e-6)
    assert np.ptp(ours) > 1e-3


def test_a_run_can_move(trained, tmp_path, capsys):
    folder = shutil.copytree(trained("bc"), tmp_path / "moved")
    assert score(bc, folder, capsys) == score(bc, trained("bc"), capsys)
