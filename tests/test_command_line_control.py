"""Control: wrong input ends with one sentence and exit code 2; saved agents are scored as trained, usable elsewhere."""

import json
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import SCRIPTS, WALK
from helpers import SMALL, checkpoints, command_line, metrics, new_run, user_error
from safetensors.torch import load_file

from algos import ppo
from utils import run as run_module
from utils.checkpoint import load_newest

BANDIT = "--env-id environments:Bandit-v0 --env-kwargs"
BOTH = [
    ("--env-id Absent-v0", "Absent", "registered"),
    ("--env-id nowhere:Name-v0", "nowhere", "--env-id"),
    ("--env-kwargs size=3", "size", "--env-id"),
    ("--env-kwargs size", "NAME=VALUE"),
    (f"{BANDIT} action=unit observation=sequence", "observation space", "fixed number"),
    (f"{BANDIT} action=multibinary", "action space", "MultiBinary"),
    (f"{BANDIT} action=dict", "action space", "Dict"),
    (f"{BANDIT} action=integers", "int64", "Box of floats"),
    ("--total-timesteps 0", "--total-timesteps", "at least 1"),
    ("--num-envs 0", "--num-envs", "at least 1"),
    ("--hidden-size 0", "--hidden-size", "at least 1"),
    ("--eval-episodes 0", "--eval-episodes", "at least 1"),
    ("--eval-every -1", "--eval-every", "at least 0"),
    ("--save-every 0", "--save-every", "at least 1"),
    ("--keep 0", "--keep", "at least 1"),
    ("--threads -1", "--threads", "at least 0"),
    ("--learning-rate 0", "--learning-rate", "above 0"),
    ("--learning-rate nan", "--learning-rate", "finite"),
    ("--gamma 1.1", "--gamma", "from 0 to 1"),
    ("--gamma -0.1", "--gamma", "from 0 to 1"),
    ("--gamma nan", "--gamma", "finite"),
    ("--device quantum", "quantum", "cpu"),
    ("--output-dir file/runs", "--output-dir", "writable"),
    ("--capture-video", "--capture-video", "--evaluate"),
    ("--resume nowhere", "nowhere", "config.json"),
    ("--evaluate nowhere", "nowhere", "config.json"),
]
OWN = {
    "ppo": [
        ("--num-minibatches 3", "--num-minibatches 3", "32"),
        ("--num-minibatches 32", "--num-minibatches 32", "at least 2"),
        ("--total-timesteps 31", "--total-timesteps 31", "32"),
        ("--num-steps 0", "--num-steps", "at least 1"),
        ("--num-minibatches 0", "--num-minibatches", "at least 1"),
        ("--update-epochs 0", "--update-epochs", "at least 1"),
        ("--gae-lambda 1.5", "--gae-lambda", "from 0 to 1"),
        ("--clip-coef 0", "--clip-coef", "above 0"),
        ("--max-grad-norm 0", "--max-grad-norm", "above 0"),
        ("--target-kl 0", "--target-kl", "above 0"),
        ("--ent-coef -0.1", "--ent-coef", "at least 0"),
        ("--vf-coef -1", "--vf-coef", "at least 0"),
        ("--vf-coef inf", "--vf-coef", "finite"),
        ("--log-std-init nan", "--log-std-init", "finite"),
    ],
    "sac": [
        ("--env-id CartPole-v1", "Discrete", "SAC needs a Box"),
        (f"{BANDIT} action=box", "Box", "finite bounds"),
        ("--total-timesteps 161", "--total-timesteps 161", "--num-envs 2"),
        ("--tau 1.5", "--tau", "from 0 to 1"),
        ("--alpha 0", "--alpha", "above 0"),
        ("--target-entropy nan", "--target-entropy", "finite"),
        ("--batch-size 0", "--batch-size", "at least 1"),
        ("--buffer-size 0", "--buffer-size", "at least 1"),
        ("--buffer-size 1000000000000000", "--buffer-size 1000000000000000", "36,000,000.0 GB"),
        ("--utd-ratio 0", "--utd-ratio", "at least 1"),
        ("--learning-starts -1", "--learning-starts", "at least 0"),
        ("--log-every 0", "--log-every", "at least 1"),
    ],
}
WRONG = [(algo, *case) for algo in SCRIPTS for case in BOTH + OWN[algo]]


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """No picture is drawn of these runs: it would take most of their time."""
    monkeypatch.setattr(run_module, "plot", lambda *_: None)


@pytest.mark.parametrize("algo, args, words", [(algo, args, words) for algo, args, *words in WRONG], ids=str)
def test_seen_before_the_run(algo, args, words, tmp_path, monkeypatch, capsys):
    """The sentence names what is wrong, and nothing has been written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    output = [] if "--output-dir" in args else ["--output-dir", "made"]
    with user_error(capsys, *words):
        command_line(SCRIPTS[algo], *SMALL[algo], *args.split(), *output)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- scoring a saved agent ---

TRAINED = {
    "ppo-cartpole": ("ppo", []),
    "ppo-walk": ("ppo", [*WALK, "--env-kwargs", "size=5", "label=a b"]),
    "sac-walk": ("sac", [*WALK, "--env-kwargs", "size=5"]),
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """case -> the folder of a finished run, never to be changed."""
    made = {}

    def make(case: str):
        if case not in made:
            algo, args = TRAINED[case]
            made[case] = new_run(SCRIPTS[algo], tmp_path_factory.mktemp(case), *SMALL[algo], *args)
        return made[case]

    return make


def score(module, folder, capsys, *args) -> dict:
    capsys.readouterr()
    command_line(module, "--evaluate", folder, *args)
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


@pytest.mark.parametrize("case", TRAINED)
def test_evaluate_gives_the_last_row(case, trained, tmp_path, monkeypatch, capsys):
    """The score of a finished run is its own last one, without any further flag, from any folder, also where the run
    was resumed and has been moved since; with another seed or number of episodes it is another. The run stays as it
    was."""
    folder, module = trained(case), SCRIPTS[TRAINED[case][0]]
    expected = {name: value for name, value in metrics(folder)[-1].items() if name.startswith("eval/")}
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    assert len(expected) == 3 and score(module, folder, capsys) == expected
    assert score(module, folder, capsys, "--seed", 5) != expected != score(module, folder, capsys, "--eval-episodes", 5)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    resumed = shutil.copytree(folder, tmp_path / "resumed")
    command_line(module, "--resume", resumed)
    assert score(module, resumed.rename(tmp_path / "moved"), capsys) == expected


def test_evaluate_uses_the_saved_statistics(trained, tmp_path, capsys):
    """An agent that is shown observations of another mean, or of another scale, is another agent."""
    folder = shutil.copytree(trained("ppo-walk"), tmp_path / "copy")
    expected, scores = score(ppo, folder, capsys), set()
    path = sorted((folder / "checkpoints").glob("*.pt"))[-1]
    for name, change in (("mean", lambda x: x + 3), ("var", lambda x: x * 9)):
        state = load_newest(folder / "checkpoints")
        whole = path.read_bytes()
        state["statistics"]["obs"][name] = change(state["statistics"]["obs"][name])
        torch.save(state, path)
        scores.add(score(ppo, folder, capsys)["eval/return"])
        path.write_bytes(whole)
    assert len(scores | {expected["eval/return"]}) == 3


@pytest.mark.parametrize(
    "args, words",
    [
        ("--gamma 0.5", ["--gamma", "0.99"]),
        ("--hidden-size 8", ["--hidden-size", "64"]),
        ("--no-normalize", ["--normalize", "True"]),
        ("--env-id CartPole-v0", ["--env-id", "CartPole-v1"]),
        ("--env-kwargs max_episode_steps=9", ["--env-kwargs", "()"]),
        ("--eval-episodes 0", ["--eval-episodes", "at least 1"]),
    ],
)
def test_evaluate_refuses_what_the_agent_was_made_with(args, words, trained, capsys):
    """What is typed beside --evaluate is heeded or refused, never ignored."""
    with user_error(capsys, *words):
        command_line(ppo, "--evaluate", trained("ppo-cartpole"), *args.split())


def test_evaluate_needs_a_run(trained, tmp_path, capsys):
    """Not a folder of something else, another script's, or without checkpoints; a damaged one is passed over."""
    folder = shutil.copytree(trained("ppo-cartpole"), tmp_path / "copy")
    with user_error(capsys, str(folder / "model"), "config.json"):
        command_line(ppo, "--evaluate", folder / "model")
    with user_error(capsys, str(folder), "another script", "clip_coef"):
        command_line(SCRIPTS["sac"], "--evaluate", folder)
    assert checkpoints(folder) == [128, 160]
    (folder / "checkpoints/step-00000160.pt").write_bytes(b"half")
    capsys.readouterr()
    command_line(ppo, "--evaluate", folder)
    out = capsys.readouterr().out.splitlines()
    assert "step-00000160.pt cannot be read" in out[0] and "eval/return" in json.loads(out[-1])
    shutil.rmtree(folder / "checkpoints")
    with user_error(capsys, str(folder), "no readable checkpoint"):
        command_line(ppo, "--evaluate", folder)


@pytest.mark.parametrize("case", ["discrete", "box", "raw"])
def test_the_model_is_usable_elsewhere(case, tmp_path):
    """RUN/model/model.safetensors, by plain torch and README's formula, acts as the agent does."""
    args = {
        "discrete": [],
        "box": [*WALK],
        "raw": [*WALK, "--no-normalize"],
    }[case]
    run = new_run(ppo, tmp_path, *SMALL["ppo"], *args)
    tensors = load_file(run / "model" / "model.safetensors")
    actor = {name.removeprefix("actor."): tensor for name, tensor in tensors.items() if name.startswith("actor.")}
    size, hidden = actor["0.weight"].shape[::-1]
    policy = torch.nn.Sequential(
        torch.nn.Linear(size, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, hidden), torch.nn.Tanh(),
        torch.nn.Linear(hidden, len(actor["4.bias"])),
    )  # fmt: skip
    policy.load_state_dict(actor)
    obs = torch.randn(500, size, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 500)[:, None]
    if case == "raw":
        assert not {"obs_mean", "obs_var"} & tensors.keys()
        shown = obs
    else:
        shown = ((obs - tensors["obs_mean"]) / (tensors["obs_var"] + 1e-8).sqrt()).clip(-10, 10).float()
        assert (shown.abs() == 10).any() and (shown != obs).any(1).all()
    with torch.no_grad():
        out = policy(shown)
    actions = out.argmax(-1).numpy() if case == "discrete" else out.clip(-2, 2).numpy()

    state = load_newest(run / "checkpoints")
    space = gym.spaces.Discrete(2) if case == "discrete" else gym.spaces.Box(-2, 2, (1,))
    agent, statistics = ppo.Agent(size, space, hidden), ppo.Statistics(size, 2, 0.99, case != "raw")
    agent.load_state_dict(state["agent"])
    statistics.load_state_dict(state["statistics"])
    ours = ppo.act_in_evaluation(agent, statistics, obs.numpy(), torch.zeros(500, 1), torch.Generator())
    assert len(np.unique(ours)) > 1
    np.testing.assert_allclose(actions, ours, rtol=0, atol=1e-6)
