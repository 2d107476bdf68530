"""A saved agent acts the same without our code: the blocks of algos/README.md, put together as the page says, against
the scripts' own evaluation."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import score
from helpers import ENVIRONMENT, SMALL, new_run, weights
from small_data import pendulum

from algos import awac, ddpg, ddpo, dqn, flow_grpo, ppo, rebrac, rnd, sac
from utils.control import seed_of

PAGE = (Path(__file__).resolve().parents[1] / "algos/README.md").read_text()
SECTION = PAGE.partition("## Load a trained agent elsewhere\n")[2].partition("\n## ")[0]
HEAD, TAIL, PPO, SAC, DQN = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
SHORT = "--env-id Pendulum-v1 --env-kwargs max_episode_steps=40".split()
CASES = {  # name -> block, script, arguments; DATA: a small dataset of Pendulum
    "ppo discrete": (PPO, ppo, ["--learning-rate", "0.04"]),
    "ppo continuous": (PPO, ppo, [*SHORT, "--learning-rate", "0.1"]),  # half of the actions out of bounds
    "rnd": (PPO, rnd, ["--env-id", "CartPole-v1", "--learning-rate", "0.04"]),
    "sac": (SAC, sac, SHORT),
    "ddpg": (SAC, ddpg, SHORT),
    "rebrac": (SAC, rebrac, ["--dataset", "DATA"]),
    "awac": (SAC, awac, ["--dataset", "DATA", "--normalize"]),
    "dqn": (DQN, dqn, ["--learning-rate", "0.04"]),
}


class Begun(gym.Wrapper):
    """Its episodes begin with these seeds, its discrete actions with 5."""

    def __init__(self, env, seeds):
        super().__init__(env)
        self.seeds, self.first = seeds, 5 if isinstance(env.action_space, gym.spaces.Discrete) else 0
        if self.first:
            self.action_space = gym.spaces.Discrete(env.action_space.n, start=self.first)

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=self.seeds.pop(0) if self.seeds else seed)

    def step(self, action):
        return self.env.step(action - self.first if self.first else action)


ELSEWHERE = f"""
import importlib.util, json, sys
import gymnasium, gymnasium as gym
assert importlib.util.find_spec("utils") is None and importlib.util.find_spec("algos") is None

{inspect.getsource(Begun)}
make = gym.make
for block, env_id, kwargs, seeds in json.load(sys.stdin):
    gym.make = lambda name: Begun(make(env_id, **kwargs), seeds)
    exec(block, {{}})
"""


def test_saved_agents_act_the_same_without_our_code(tmp_path, capsys):
    """One process runs all blocks, because importing Stable-Baselines3 takes seconds."""
    pytest.importorskip("stable_baselines3", reason="not run: stable-baselines3 is not installed")
    data, jobs, wanted = pendulum(tmp_path / "data.hdf5"), [], []
    for block, module, arguments in CASES.values():
        arguments = [str(data) if word == "DATA" else word for word in arguments]
        run = new_run(module, tmp_path, *SMALL[module.NAME], *arguments)
        config = json.loads((run / "config.json").read_text())["args"]
        wanted.append(score(module, run, capsys, "--eval-episodes", 3)["eval/return"])
        block = (HEAD + block + TAIL).replace("RUN", str(run)).replace("n_eval_episodes=10", "n_eval_episodes=3")
        kwargs = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in config["env_kwargs"])}
        jobs.append([block, config["env_id"], kwargs, [seed_of(config["seed"], 2**31, i) for i in range(3)]])
    done = subprocess.run([sys.executable, "-I", "-c", ELSEWHERE], input=json.dumps(jobs), capture_output=True,
                          text=True, cwd=tmp_path, env=os.environ | ENVIRONMENT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, ours, printed in zip(CASES, wanted, done.stdout.splitlines(), strict=True):
        assert float(re.search(r"-?\d+\.\d+", printed)[0]) == pytest.approx(ours, rel=1e-5), name


@pytest.mark.parametrize("module", [ddpo, flow_grpo], ids=["ddpo", "flow_grpo"])
def test_a_saved_generator_draws_the_same_without_our_code(module, tmp_path):
    """The same points from the same noise; of flow_grpo.py those of its ODE."""
    w = {name: x.numpy() for name, x in weights(new_run(module, tmp_path, *SMALL[module.NAME])).items()}
    model, normals = module.Velocity(16), torch.randn(40, 5, 2, generator=torch.Generator().manual_seed(0))
    model.load_state_dict({name: torch.from_numpy(x) for name, x in w.items()})
    prompts, noise, x = torch.arange(40) % 8, 0 if module is flow_grpo else 0.3, normals[:, 0].numpy()
    ours = (flow_grpo.solve(model, normals[:, 0], prompts, 4) if module is flow_grpo
            else ddpo.sample(model, prompts, normals, ddpo.Args())[:, -1])  # fmt: skip
    for k in range(4):
        out = np.hstack([x, np.full((40, 1), k / 4), np.eye(8)[prompts]])
        for i in 0, 2:
            out = (out @ w[f"net.{i}.weight"].T + w[f"net.{i}.bias"]).clip(0)
        x = x + (out @ w["net.4.weight"].T + w["net.4.bias"]) / 4 + noise * normals[:, k + 1].numpy()
    np.testing.assert_allclose(x, ours, rtol=0, atol=1e-5)
