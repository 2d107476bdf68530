"""Control and offline: wrong input ends with one sentence and exit code 2; a saved agent is scored as it was trained.
What is wrong with a dataset: test_offline_data.py. Use of the model elsewhere: test_load_elsewhere.py."""

import json
import shutil

import h5py
import numpy as np
import pytest
from control import BANDIT, CONTROL, OFFLINE, WALK, score, walk
from every_script import options
from helpers import SMALL, command_line, metrics, new_run, user_error, weights
from small_data import pendulum

from algos import dt, ppo

NUMBERS = {  # what the sentence says -> wrong numbers, for every script that has the flag
    "from 0 to inf": "total-timesteps -1, max-steps -1, num-envs -1, learning-starts -1, huber-delta -1",
    "from 0 to 1": "gamma 1.1, gamma -0.1, gae-lambda 1.5, tau 1.5, tau -0.1, start-e 1.1, end-e -0.1, "
    "top-fraction 10, expectile 1.2, label-dropout 5, quantile 1.5, corruption-rate -0.1",
    "from 1 to inf": "num-minibatches 0, update-epochs 0, policy-frequency 0, num-critics 0, subset-size 0, "
    "num-samples 0, num-heads 0, flow-steps 0, diffusion-steps 0, n-obs-steps 0, n-action-steps 0",
}
# scripts: arguments | what the sentence says | ...
OWN = f"""
all: --resume nowhere | nowhere | config.json
all: --evaluate nowhere | nowhere | config.json
all: --env-id Absent-v0 | Absent | registered
ppo: --env-id environments:Absent-v0 | Absent | registers
ppo sac: --env-id nowhere:Name-v0 | nowhere | --env-id
ppo sac: {BANDIT} action=unit observation=sequence | observation space | fixed size
ppo sac: {BANDIT} action=dict | action space | Dict
ppo sac: {BANDIT} action=tuple | action space | Tuple
ppo sac: {BANDIT} action=integers | int64 | Box of floats
ppo: --num-minibatches 3 | --num-minibatches 3 | 32
ppo: --num-minibatches 32 | --num-minibatches 32 | at least 2
ppo: --total-timesteps 31 | --total-timesteps 31 | 32
dppo reinflow: --total-timesteps 31 | of 32
dppo: --num-minibatches 3 | 16 rows
reinflow: --num-minibatches 3 | 32 rows
dppo reinflow: --env-id CartPole-v1 | finite bounds
dppo reinflow: --min-std 0 | above 0
dppo: --num-finetuned-steps 4 | --num-finetuned-steps 4 | 1 to --diffusion-steps 3
dppo diffusion_policy: --n-action-steps 4 | --horizon 4 | steps - 1 = 5
dppo: --gamma-denoising 1.1 | is 1.1
reinflow: --min-std 0.3 | at most --max-std 0.2
sac crossq ddpg td3: --env-id CartPole-v1 | Discrete | TITLE needs a Box
sac ddpg td3: {BANDIT} action=box | Box | finite bounds
sac: {BANDIT} action=multibinary | action space | MultiBinary
sac crossq ddpg td3 dqn: --total-timesteps 161 | --total-timesteps 161 | --num-envs 2
sac: --utd-ratio 20 | --utd-ratio moved to redq.py
sac: --no-layer_norm | --no-layer_norm moved to redq.py
redq: --subset-size 6 | --subset-size 6 | --num-critics 5
dqn reinforce rainbow: --env-id Pendulum-v1 | Box | TITLE needs a Discrete one
reinforce: --num-episodes 1 | --num-episodes | at least 2
c51 rainbow: --v-min 5 --v-max 5 | --v-min 5.0 | below --v-max
c51: --num-atoms 1 | --num-atoms 1 | at least 2
her: --env-id CartPole-v1 | no goals | compute_reward
her: --env-id Pendulum-v1 | HER needs a Discrete
her_sac: --env-id Pendulum-v1 | no goals | compute_reward
bc iql rlpd dt: --dataset nowhere.hdf5 | there is no nowhere.hdf5 | a file, a folder
bc iql rlpd dt: --env-id CartPole-v1 | Discrete | finite bounds
bc iql rlpd dt: --env-id MountainCarContinuous-v0 | 3 observation and 1 action | 2 and 1
cfgrl: --label advantage | --critic (none) | finished iql.py run
awac: --temperature 0 | is 0.0 and | above 0
awac: --num-action-samples 0 | samples 0: both | above 0
xql: --gumbel-scale 0 | --gumbel-scale is 0.0 | above 0
xql: --dvl-lambda 1.5 | is 1.5 | at most 1
cql: --diversity 1 --num-critics 1 | --num-critics is 1 | at least 2
rlpd: --offline-ratio 1.5 | --offline-ratio 1.5 | from 0 to all
rlpd: --batch-size 9 | --offline-ratio 0.5 | --batch-size 9
rlpd: --init nowhere | --init nowhere | no model
dt: --embed-dim 9 | --embed-dim 9 | --num-heads 2
"""
OUT_OF_BOUNDS = [
    (algo, f"--{number}", (f"--{number.split()[0]}", bound))
    for algo in CONTROL
    for bound, numbers in NUMBERS.items()
    for number in numbers.split(", ")
    if number.split()[0].replace("-", "_") in options(algo)
]
LINES = [line.partition(": ") for line in OWN.strip().splitlines()]
WRONG = OUT_OF_BOUNDS + [
    (algo, args, [word.replace("TITLE", CONTROL[algo].TITLE) for word in words])
    for scripts, _, case in LINES
    for algo in (CONTROL if scripts == "all" else scripts.split())
    for args, *words in [case.split(" | ")]
]


@pytest.mark.parametrize("algo, args, words", WRONG, ids=str)
def test_wrong_input_is_seen_before_the_run(algo, args, words, tmp_path, monkeypatch, capsys):
    """The sentence names what is wrong, and nothing has been written."""
    monkeypatch.chdir(tmp_path)
    pendulum(tmp_path / "data.hdf5") if algo in OFFLINE else (tmp_path / "data.hdf5").touch()
    data = ["--dataset", "data.hdf5"] if algo in OFFLINE else []
    with user_error(capsys, *words):
        command_line(CONTROL[algo], *SMALL[algo], *data, *args.split(), "--output-dir", "made")
    assert [path.name for path in tmp_path.iterdir()] == ["data.hdf5"]


TRAINED = {
    "ppo-cartpole": [],
    "ppo-walk": [*WALK, "--env-kwargs", "size=5", "label=a b"],
    "ppo_atari": ["--env-id", "environments:Pixels-v0", "--env-kwargs", "layout=first", "--hidden-size", 8],
    "ppo_mask": [], "iql": ["--online-steps", 32],
}  # fmt: skip
TRAINED |= {algo: [] if algo in OFFLINE else [*walk(algo), "--env-kwargs", "size=5"] for algo in CONTROL
            if algo not in TRAINED and algo != "ppo"}  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """case -> the folder of a finished run, whose dataset is gone; never to be changed."""
    made = {}

    def make(case: str):
        if case not in made:
            algo, folder = case.partition("-")[0], tmp_path_factory.mktemp(case)
            data = ["--dataset", pendulum(folder / "data.hdf5")] if algo in OFFLINE else []
            made[case] = new_run(CONTROL[algo], folder / "runs", *SMALL[algo], *data, *TRAINED[case])
            (folder / "data.hdf5").unlink(missing_ok=True)
        return made[case]

    return make


@pytest.mark.parametrize("case", TRAINED)
def test_evaluate_gives_the_last_row(case, trained, tmp_path, monkeypatch, capsys):
    """From any folder, without further flags or the dataset, also where the run was resumed and has been moved since;
    with another seed or number of episodes it is another score. The run stays as it was."""
    folder, module = trained(case), CONTROL[case.partition("-")[0]]
    last = {name: value for name, value in metrics(folder)[-1].items() if name.startswith("eval/")}
    of_the_run = {"eval/score", "eval/best_return"} if case in OFFLINE else set()
    assert of_the_run <= last.keys()
    expected = {name: value for name, value in last.items() if name not in of_the_run}
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    assert len(expected) >= 3 and score(module, folder, capsys) == expected
    assert score(module, folder, capsys, "--seed", 7) != expected != score(module, folder, capsys, "--eval-episodes", 5)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    moved = shutil.copytree(folder, tmp_path / "resumed")
    if case not in OFFLINE:
        (moved / "curve.png").unlink()  # as if it had not come to its end
        command_line(module, "--resume", moved)
    assert score(module, moved.rename(tmp_path / "moved"), capsys) == expected


def test_evaluate_needs_a_run(trained, tmp_path, capsys):
    """Not a folder of something else, another script's, or without a checkpoint."""
    folder = shutil.copytree(trained("ppo-cartpole"), tmp_path / "copy")
    with user_error(capsys, str(folder / "model"), "config.json"):
        command_line(ppo, "--evaluate", folder / "model")
    with user_error(capsys, str(folder), "a run of ppo.py, not of sac.py"):
        command_line(CONTROL["sac"], "--evaluate", folder)
    (folder / "checkpoint.pt").unlink()
    for flag in ("--evaluate", "--resume"):
        with user_error(capsys, str(folder), "no checkpoint yet"):
            command_line(ppo, flag, folder)


def test_a_run_is_resumed_or_evaluated_and_what_differs_is_told(trained, tmp_path, capsys):
    """On stderr, for the score stands alone on stdout. A run of no steps is a run."""
    folder = trained("ppo-cartpole")
    with user_error(capsys, "--resume goes on", "--evaluate scores"):
        command_line(ppo, "--resume", folder, "--evaluate", folder)
    command_line(ppo, "--evaluate", folder, "--no-normalize")
    assert "changed on --evaluate: {'normalize': False}" in capsys.readouterr().err
    assert (new_run(CONTROL["sac"], tmp_path, "--total-timesteps", 0, "--eval-episodes", 0) / "config.json").exists()


def test_what_differs_on_resume_is_printed(trained, tmp_path, capsys):
    folder = shutil.copytree(trained("ppo-cartpole"), tmp_path / "copy")
    capsys.readouterr()
    command_line(ppo, "--resume", folder, "--gamma", 0.5, "--total-timesteps", 192)
    out = capsys.readouterr().out
    assert "changed on --resume: {'total_timesteps': 192, 'gamma': 0.5}" in out and "begin new episodes" in out
    assert "settings" not in out and "\n\n" not in out, "nothing is filled in"
    assert metrics(folder)[-1]["step"] == 192


def test_a_short_run_is_evaluated_five_times(tmp_path):
    """Without --eval-every."""
    rows = metrics(new_run(ppo, tmp_path, *SMALL["ppo"], "--eval-every", None))
    assert sum("eval/return" in row for row in rows) == 5


def test_a_transformer_can_be_asked_for_other_returns(trained, capsys):
    found = score(dt, trained("dt"), capsys, "--target-returns", -100, 50.5)
    assert {"eval/return_at_-100", "eval/return_at_50.5", "eval/slope", "eval/return"} == found.keys()


@pytest.mark.parametrize("dataset", ["", "own"])
def test_returns_are_scaled_by_the_dataset_s(dataset, tmp_path, capsys):
    """By 1,000 for what ships. --evaluate asks by the saved scale, and says how many episodes how far apart."""
    data, saved = pendulum(tmp_path / "data.hdf5"), 1000.0
    with h5py.File(data) as file:
        returns = file["rewards"][:].reshape(6, 40).sum(1)
    run = new_run(dt, tmp_path / "runs", *SMALL["dt"], *(["--dataset", data] if dataset else []))
    args = json.loads((run / "config.json").read_text())["args"]
    assert args["rtg_scale"] == (pytest.approx(np.abs(returns).max()) if dataset else saved)
    command_line(dt, "--evaluate", run)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["episodes"] == 2 and found["eval/return_std"] >= 0
    with user_error(capsys, "--rtg-scale is 0.0", "above 0"):
        command_line(dt, *SMALL["dt"], "--rtg-scale", 0, "--output-dir", tmp_path)


@pytest.mark.parametrize("algo, taken", [("bc", 40), *((one, 234) for one in "iql awac xql riql rlpd".split())])
def test_transitions_that_are_taken(algo, taken, tmp_path, capsys):
    """The smallest top fraction keeps the best trajectory; what comes after a time-out of D4RL's files is unknown."""
    path, more = pendulum(tmp_path / "d.hdf5"), ["--top-fraction", 1e-9]
    if algo != "bc":
        more = ["--env-id", "Pendulum-v1"]
        with h5py.File(path, "a") as file:
            del file["last_observations"]
    new_run(CONTROL[algo], tmp_path, *SMALL[algo], "--dataset", path, *more)
    assert f", {taken} transitions taken of 240" in capsys.readouterr().out


def test_a_model_of_raw_observations_has_no_statistics(trained, tmp_path):
    raw = new_run(ppo, tmp_path, *SMALL["ppo"], "--no-normalize")
    assert weights(trained("ppo-cartpole")).keys() - weights(raw).keys() == {"obs_mean", "obs_var"}
