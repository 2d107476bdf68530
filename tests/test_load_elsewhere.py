"""A saved agent acts the same without our code: the blocks of algos/README.md, put together as the page says, against
the scripts' own evaluation."""

import contextlib  # noqa: I001
import inspect
import io
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
from helpers import ENVIRONMENT, SMALL, command_line, new_run, weights
from small_data import pendulum

from algos import (
    awac, bc, c51, cal_ql, cfgrl, cql, crossq, ddpg, ddpo, diffusion_policy, dppo, dqn, dt, flow_bc, flow_grpo, fql,
    gsde, iql, ppo, ppo_lstm, ppo_mask, rainbow, rebrac, reinflow, riql, rlpd, rnd, sac, td3, td3_bc, xql,
)  # fmt: skip
from utils.control import seed_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "algos/README.md").read_text()
SECTION = PAGE.partition("## Load a trained agent elsewhere\n")[2].partition("\n## ")[0]
HEAD, TAIL, *BLOCKS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
PPO, SAC, CROSSQ, DQN, C51, RAINBOW, OFFLINE, FLOW, ONE_STEP, PLANS, GUIDED, DT, MASK, LSTM, GENERATOR = BLOCKS
LEARNED = PLANS.replace('"average.', '("actor" if k <= args["num_finetuned_steps"] else "start") + ".')
SHORT, SHORTER = "max_episode_steps=40", "max_episode_steps=16"  # a chain of steps magnifies rounding, plan after plan
WIDE = f"--env-id Pendulum-v1 --env-kwargs {SHORT} --learning-rate 0.1".split()  # half of the actions out of bounds
OWN_LOOP = (DT, MASK)  # need no last line
CASES = {  # name -> block, script, arguments; DATA: a small dataset of Pendulum
    "ppo discrete": (PPO, ppo, ["--learning-rate", "0.04"]),
    "ppo continuous": (PPO, ppo, WIDE),
    "rnd": (PPO, rnd, ["--env-id", "CartPole-v1", "--learning-rate", "0.04"]),
    "sac": (SAC, sac, ["--env-kwargs", SHORT]),
    "gsde": (SAC, gsde, ["--env-id", "Pendulum-v1", "--env-kwargs", SHORT]),
    "rlpd": (SAC, rlpd, ["--dataset", "DATA"]),
    "crossq": (CROSSQ, crossq, ["--env-kwargs", SHORT]),
    "ddpg": (SAC, ddpg, ["--env-kwargs", SHORT]),
    "td3": (SAC, td3, ["--env-kwargs", SHORT]),
    "dqn": (DQN, dqn, ["--learning-rate", "0.04"]),
    "c51": (C51, c51, ["--learning-rate", "0.04"]),
    "rainbow": (RAINBOW, rainbow, ["--learning-rate", "0.04"]),
    "bc": (OFFLINE, bc, ["--dataset", "DATA"]),
    "flow_bc": (FLOW, flow_bc, ["--dataset", "DATA", "--flow-steps", 3]),
    "reinflow": (FLOW, reinflow, ["--env-id", "Pendulum-v1", "--env-kwargs", SHORT]),
    "diffusion_policy": (PLANS, diffusion_policy, ["--dataset", "DATA"]),
    "dppo": (LEARNED, dppo, ["--env-id", "Pendulum-v1", "--env-kwargs", SHORTER, "--learning-rate", "1e-4"]),
    "cfgrl": (GUIDED, cfgrl, ["--dataset", "DATA", "--flow-steps", 3]),
    "fql": (ONE_STEP, fql, ["--dataset", "DATA"]),
    "td3_bc": (SAC, td3_bc, ["--dataset", "DATA"]),
    "rebrac": (SAC, rebrac, ["--dataset", "DATA"]),
    "cql": (SAC, cql, ["--dataset", "DATA"]),
    "cal_ql": (SAC, cal_ql, ["--dataset", "DATA"]),
    "iql": (OFFLINE, iql, ["--dataset", "DATA"]),
    "awac": (SAC, awac, ["--dataset", "DATA", "--normalize"]),
    "xql": (OFFLINE, xql, ["--dataset", "DATA"]),
    "riql": (OFFLINE, riql, ["--dataset", "DATA"]),
    "iql normalized": (OFFLINE, iql, ["--dataset", "DATA", "--normalize"]),
    "ppo_mask": (MASK, ppo_mask, ["--env-id", "Taxi-v4", "--env-kwargs", SHORT, "--learning-rate", "0.04"]),
    "ppo_lstm discrete": (LSTM, ppo_lstm, ["--env-id", "CartPole-v1", "--learning-rate", "0.04"]),
    "ppo_lstm continuous": (LSTM, ppo_lstm, WIDE),
    "dt": (DT, dt, ["--dataset", "DATA", "--target-returns", "-100"]),
}


class Recorder(gym.Wrapper):
    """Keeps the actions and the return of each episode by its seed. `starts`: seeds to take, not those asked for.
    Discrete actions begin at 5."""

    actions, returns, starts = {}, {}, []

    def __init__(self, env):
        super().__init__(env)
        self.first = 5 if isinstance(env.action_space, gym.spaces.Discrete) else 0
        if self.first:
            self.action_space = gym.spaces.Discrete(env.action_space.n, start=self.first)

    def reset(self, *, seed=None, options=None):
        self.seed = self.starts.pop(0) if self.starts else seed
        self.actions[self.seed], self.returns[self.seed] = [], 0.0
        return self.env.reset(seed=self.seed)

    def step(self, action):
        self.actions[self.seed].append(np.ravel(action).tolist())
        obs, reward, terminated, truncated, info = self.env.step(action - self.first if self.first else action)
        self.returns[self.seed] += float(reward)
        return obs, reward, terminated, truncated, info


ELSEWHERE = f"""
import importlib.util, json, sys
import gymnasium, gymnasium as gym, numpy as np
assert importlib.util.find_spec("utils") is None and importlib.util.find_spec("algos") is None

{inspect.getsource(Recorder)}
make = gym.make
for block, env_id, kwargs, starts in json.load(sys.stdin):
    Recorder.actions, Recorder.returns, Recorder.starts = {{}}, {{}}, starts
    gym.make = lambda name: Recorder(make(env_id, **kwargs))
    exec(block, {{}})
    print(json.dumps([Recorder.actions, Recorder.returns]))
"""


def own_evaluation(module, run: Path, seeds: list[int], monkeypatch) -> tuple[list, float]:
    """Actions of the episodes that start from `seeds`, and their mean return, by the script's --evaluate."""
    make, out = gym.make, io.StringIO()
    with monkeypatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(gym, "make", lambda *args, **kwargs: Recorder(make(*args, **kwargs)))
        patch.setattr(Recorder, "actions", {})
        if {"flow_steps", "diffusion_steps"} & vars(module.Args()).keys():  # it always samples
            patch.setattr(torch, "randn", lambda *shape, **_: torch.zeros(*shape))
        patch.setattr(Recorder, "returns", {})
        command_line(module, "--evaluate", run, "--eval-episodes", len(seeds))
        actions = [Recorder.actions[seed] for seed in seeds]
    return actions, json.loads(out.getvalue().splitlines()[-1])["eval/return"]


def test_saved_agents_act_the_same_without_our_code(tmp_path, monkeypatch):
    """One process runs all blocks, because importing Stable-Baselines3 takes seconds."""
    pytest.importorskip("stable_baselines3", reason="not run: stable-baselines3 is not installed")
    data, jobs, wanted = pendulum(tmp_path / "data.hdf5"), [], []
    for block, module, arguments in CASES.values():
        arguments = [str(data) if word == "DATA" else word for word in arguments]
        run = new_run(module, tmp_path, *SMALL[module.__name__.partition(".")[2]], *arguments)
        config = json.loads((run / "config.json").read_text())["args"]
        seeds = [seed_of(config["seed"], 2**31, i) for i in range(3)]
        wanted.append((seeds, *own_evaluation(module, run, seeds, monkeypatch)))
        block = HEAD + block + TAIL * (block not in OWN_LOOP)
        for words, here in {
            "RUN": str(run),
            "n_eval_episodes=10": "n_eval_episodes=3",
            "range(10)": "range(3)",
            "np.random.normal(size=": "np.zeros(shape=",
        }.items():
            block = block.replace(words, here)
        kwargs = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in config["env_kwargs"])}
        jobs.append([block, config["env_id"], kwargs, seeds])
    done = subprocess.run([sys.executable, "-I", "-c", ELSEWHERE], input=json.dumps(jobs), capture_output=True,
                          text=True, cwd=tmp_path, env=os.environ | ENVIRONMENT)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name, (seeds, ours, scored), printed, recorded in zip(CASES, wanted, lines[::2], lines[1::2], strict=True):
        theirs, returns = json.loads(recorded)
        for seed, actions in zip(seeds, ours):
            np.testing.assert_allclose(theirs[str(seed)], actions, rtol=0, atol=1e-5, err_msg=name)
        assert np.mean([returns[str(seed)] for seed in seeds]) == pytest.approx(scored, rel=1e-5), name
        assert float(re.search(r"-?\d+\.\d+", printed)[0]) == pytest.approx(scored, rel=1e-5), name
        if name == "ppo continuous":
            assert 2.0 in np.abs(ours[0]), "no action reaches the bounds, so the block's clip is not tested"


@pytest.mark.parametrize("module", [ddpo, flow_grpo], ids=["ddpo", "flow_grpo"])
def test_a_saved_generator_draws_the_same_without_our_code(module, tmp_path):
    """The same points from the same noise; of flow_grpo.py those of its ODE."""
    run, there = new_run(module, tmp_path, *SMALL[module.NAME]), {}
    exec(GENERATOR.replace("RUN", str(run)), there)
    model, normals = module.Velocity(16), torch.randn(40, 5, 2, generator=torch.Generator().manual_seed(0))
    model.load_state_dict(weights(run))
    prompts, noise = torch.arange(40) % 8, dict(noise=0) if module is flow_grpo else {}
    ours = (flow_grpo.solve(model, normals[:, 0], prompts, 4) if noise
            else ddpo.sample(model, prompts, normals, ddpo.Args())[:, -1])  # fmt: skip
    np.testing.assert_allclose(there["sample"](prompts.numpy(), normals.numpy(), **noise), ours, rtol=0, atol=1e-5)
