"""Environment steps per second of ppo.py, sac.py, dqn.py and td3.py beside CleanRL, Stable-Baselines3 and a bare loop.

    git clone https://github.com/vwxyzjn/cleanrl /tmp/cleanrl          (recorded with its commit fe8d8a0)
    pip install -e ".[peers]"
    python benchmarks/peers/control_speed.py --cleanrl /tmp/cleanrl          -> results/speed_CASE.json
    python benchmarks/peers/control_speed.py --cleanrl /tmp/cleanrl --quick --cases ppo-cartpole          prints only

Cases. All on the CPU, all with CleanRL's settings and the same update work on every side.
    ppo-cartpole       CartPole-v1, 4 environments x 128 steps, 4 minibatches, 4 epochs, value clipping, not normalised
    ppo-halfcheetah    HalfCheetah-v5, 1 x 2048, 32 minibatches, 10 epochs, value clipping, normalised
    sac-halfcheetah    HalfCheetah-v5, batch 256, two hidden layers of 256, one update per step; learning starts at 1000
    td3-halfcheetah    the same, the actor every second step
    dqn-cartpole       CartPole-v1, batch 128, an update every 10 steps, squared error (sb3: Huber's); two layers of
                       100, which are as many products as cleanrl's 120 and 84
Sides.
    ours      algos/*.py as they are, rows of metrics included, without evaluation and checkpoints
    compiled  the same with --compile (PPO)
    cleanrl   its scripts, changed in a temporary copy only where gymnasium 1.x demands it (EDITS below), and with a
              SummaryWriter that writes nothing, which is in its favour. It makes two actor updates every second step.
    sb3       PPO("MlpPolicy") with VecNormalize and separate 64-64 networks, SAC, TD3 and DQN("MlpPolicy"); nothing is
              logged.
    bare      `run_bare` below (PPO): the same updates on plain gymnasium environments, nothing logged, nothing saved:
              what is possible in eager torch

Every run is a fresh process with pinned threads (OMP_NUM_THREADS, MKL_NUM_THREADS, torch.set_num_threads). Each side
notes the time at the end of its iterations (ours: Run.end_step, cleanrl: when it logs charts/SPS, sb3: at the start of
a rollout); the rate is that between the case's `begin` and `end` steps, so imports, compilation, warm-up, SAC's random
actions and the last evaluation are not counted. Sides take turns, in reverse order every second round; ratios are taken
within rounds. Steps per second of processor time are given beside those of the clock: with one thread they agree on an
idle machine, and on a busy one they are the better guide. Environments are made as each side makes them: gym.make's
checker is on in cleanrl and sb3, which is their default; it looks at the first step only.

shares_of_ours: seconds inside step_vector (environment), act (inference) and update (SAC: with the sampling of the
minibatch) over all seconds; rest is storing, normalising, snapshots and metrics.
"""

import functools
import importlib
import importlib.metadata
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.peers.trl_grpo import machine  # noqa: E402

Side = Literal["ours", "compiled", "cleanrl", "sb3", "bare"]


@dataclass
class Case:
    env_id: str
    sides: tuple[str, ...]
    threads: tuple[int, ...]
    rollout: int  # steps of an iteration
    begin: int  # steps between which the rate is taken
    end: int
    aims: dict[str, tuple[float, float]]  # floor and aim of the ratio to a side
    settings: dict  # of our script; those of the others are the same by other names

    @property
    def total(self) -> int:
        return self.end + 2 * self.rollout  # so that whatever a side does at its end comes later


CASES = {
    "ppo-cartpole": Case("CartPole-v1", ("ours", "compiled", "cleanrl", "bare"), (1,), 512, 512 * 10, 512 * 160,
                         {"cleanrl": (1.5, 2.5)},
                         dict(num_envs=4, num_steps=128, num_minibatches=4, update_epochs=4, learning_rate=2.5e-4,
                              ent_coef=0.01, normalize=False, clip_vloss=True)),
    "ppo-halfcheetah": Case("HalfCheetah-v5", ("ours", "compiled", "cleanrl", "sb3", "bare"), (1,),
                            2048, 2048 * 2, 2048 * 14, {"cleanrl": (1.4, 2.0)},
                            dict(num_envs=1, num_steps=2048, num_minibatches=32, update_epochs=10, learning_rate=3e-4,
                                 ent_coef=0.0, normalize=True, clip_vloss=True)),
    "sac-halfcheetah": Case("HalfCheetah-v5", ("ours", "sb3", "cleanrl"), (1, 2), 500, 1500, 5000, {"sb3": (1.2, 1.6)},
                            dict(num_envs=1, batch_size=256, hidden_size=256, learning_starts=1000)),
    "td3-halfcheetah": Case("HalfCheetah-v5", ("ours", "cleanrl", "sb3"), (1,), 500, 1500, 5000,
                            {"cleanrl": (1.0, 1.5), "sb3": (1.0, 1.5)},
                            dict(num_envs=1, batch_size=256, hidden_size=256, learning_starts=1000)),
    "dqn-cartpole": Case("CartPole-v1", ("ours", "cleanrl", "sb3"), (1,), 1000, 2000, 22_000,
                         {"cleanrl": (1.0, 1.5), "sb3": (1.0, 1.5)},
                         dict(num_envs=1, batch_size=128, hidden_size=100, learning_starts=1000, train_frequency=10,
                              gradient_steps=1, buffer_size=10_000, target_network_frequency=50, learning_rate=2.5e-4,
                              exploration_fraction=0.5, huber=False)),
}  # fmt: skip

# What gymnasium 1.x demands of CleanRL's scripts: (old, new), each found exactly once. None changes what is computed.
# per_env(infos["final_info"]) turns the dictionary of arrays that gymnasium 1.x gives into 0.29's list of dictionaries.
SAME_STEP = ("gym.vector.SyncVectorEnv(", 'gym.vector.SyncVectorEnv(autoreset_mode="SameStep", env_fns=')
FINAL_OBS = ('infos["final_observation"]', 'infos["final_obs"]')
FINAL_INFO = ('in infos["final_info"]', 'in per_env(infos["final_info"])')
EDITS = {
    "ppo-cartpole": ("ppo.py", (SAME_STEP, FINAL_INFO)),
    "ppo-halfcheetah": ("ppo_continuous_action.py", (
        SAME_STEP, FINAL_INFO,
        ("lambda obs: np.clip(obs, -10, 10))", "lambda obs: np.clip(obs, -10, 10), None)"),  # a new argument: the space
    )),
    "sac-halfcheetah": ("sac_continuous_action.py", (
        SAME_STEP, FINAL_INFO, FINAL_OBS,
    )),
    "td3-halfcheetah": ("td3_continuous_action.py", (SAME_STEP, FINAL_INFO, FINAL_OBS)),
    "dqn-cartpole": ("dqn.py", (SAME_STEP, FINAL_INFO, FINAL_OBS)),
}  # fmt: skip


def now() -> tuple[float, float]:
    """Seconds on the clock, and of this process on the processor."""
    return time.perf_counter(), time.process_time()


def run_ours(name: str, case: Case, seed: int, threads: int, compiled: bool) -> list[tuple]:
    """Marks of a whole run of our script: (step, *now(), seconds in environment, inference and update until then)."""
    from algos import ppo
    from utils.control import ReplayBuffer
    from utils.core import Run

    script, marks, seconds = importlib.import_module(f"algos.{name.split('-')[0]}"), [], [0.0, 0.0, 0.0]

    def timed(holder, attribute: str, part: int) -> None:
        function = getattr(holder, attribute)

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[part] += time.perf_counter() - start
            return result

        setattr(holder, attribute, wrapper)

    timed(script, "step_vector", 0)
    timed(ppo.Agent if script is ppo else script, "act", 1)
    timed(script, "update", 2)
    timed(ReplayBuffer, "sample", 2)
    end_step = Run.end_step

    def marked(run, step, state):
        end_step(run, step, state)
        marks.append((step, *now(), *seconds))

    Run.end_step = marked
    args = script.Args(env_id=case.env_id, total_timesteps=case.total, seed=seed, device="cpu", threads=threads,
                       eval_every=0, eval_episodes=1, save_every=10**9, output_dir="runs",
                       compile=compiled, **case.settings)  # fmt: skip
    script.train(args)
    return marks


def run_cleanrl(name: str, case: Case, seed: int, folder: Path) -> list[tuple]:
    """Marks of CleanRL's script, run from a copy in the working directory with the EDITS made."""
    marks = []

    class SummaryWriter:  # writes nothing, and is told the step whenever a rate is logged
        def __init__(self, *_):
            pass

        def add_scalar(self, tag, value, step):
            if tag == "charts/SPS":
                marks.append((step, *now()))

        def add_text(self, *_):
            pass

        def close(self):
            pass

    def per_env(final_info: dict) -> list[dict | None]:
        episode = final_info["episode"]
        return [{"episode": {"r": episode["r"][i], "l": episode["l"][i]}} if ended else None
                for i, ended in enumerate(final_info["_episode"])]  # fmt: skip

    file, edits = EDITS[name]
    source = (folder / "cleanrl" / file).read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"{file} holds {source.count(old)} times what is to be replaced: {old}"
        source = source.replace(old, new)
    Path(file).write_text(source)
    sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    sys.path.insert(0, str(folder))  # cleanrl_utils.buffers
    s = case.settings
    sys.argv = [file, "--no-cuda", "--env-id", case.env_id, "--total-timesteps", str(case.total), "--seed", str(seed)]
    if name.startswith("ppo"):
        for option in ("num_envs", "num_steps", "num_minibatches", "update_epochs", "learning_rate", "ent_coef"):
            sys.argv += [f"--{option.replace('_', '-')}", str(s[option])]
    else:
        sys.argv += ["--batch-size", str(s["batch_size"]), "--learning-starts", str(s["learning_starts"])]
    runpy.run_path(file, {"per_env": per_env}, run_name="__main__")
    return marks


def run_sb3(name: str, case: Case, seed: int) -> list[tuple]:
    """Marks of Stable-Baselines3."""
    from stable_baselines3 import DQN, PPO, SAC, TD3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    marks, s = [], case.settings

    class Clock(BaseCallback):
        def _on_rollout_start(self):
            marks.append((self.num_timesteps, *now()))

        def _on_step(self):
            return True

    envs = make_vec_env(case.env_id, s["num_envs"], seed=seed)
    if name.startswith("ppo"):
        if s["normalize"]:
            envs = VecNormalize(envs, gamma=0.99)
        model = PPO("MlpPolicy", envs, learning_rate=lambda left: s["learning_rate"] * left, n_steps=s["num_steps"],
                    batch_size=s["num_envs"] * s["num_steps"] // s["num_minibatches"], n_epochs=s["update_epochs"],
                    ent_coef=s["ent_coef"], clip_range_vf=0.2, seed=seed, device="cpu",
                    policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}})  # fmt: skip
    else:
        kind = {"sac": SAC, "td3": TD3, "dqn": DQN}[name.split("-")[0]]
        own = dict(learning_rate=s["learning_rate"], buffer_size=s["buffer_size"], target_update_interval=500,
                   exploration_fraction=s["exploration_fraction"]) if kind is DQN else {}  # fmt: skip
        model = kind("MlpPolicy", envs, batch_size=s["batch_size"], learning_starts=s["learning_starts"],
                     train_freq=s.get("train_frequency", 1), gradient_steps=1, seed=seed, device="cpu",
                     policy_kwargs={"net_arch": [s["hidden_size"]] * 2}, **own)  # fmt: skip
    model.learn(case.total, callback=Clock())
    return marks


class Running:
    """Mean and variance of all rows so far (Welford 1962)."""

    def __init__(self):
        self.mean, self.var, self.count = 0.0, 1.0, 0

    def add(self, rows):
        for row in rows:
            self.count += 1
            delta = row - self.mean
            self.mean = self.mean + delta / self.count
            self.var = self.var + (delta * (row - self.mean) - self.var) / self.count


def run_bare(name: str, case: Case, seed: int) -> list[tuple]:
    """PPO with nothing around it. Done is done (no bootstrap at truncation), as in CleanRL."""
    import gymnasium as gym
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(seed)
    s, marks, steps = types.SimpleNamespace(**case.settings), [], 0
    envs = [gym.make(case.env_id, disable_env_checker=True) for _ in range(s.num_envs)]
    space, size = envs[0].action_space, envs[0].observation_space.shape[0]
    gaussian = isinstance(space, gym.spaces.Box)
    width = space.shape[0] if gaussian else int(space.n)
    actor, critic = (nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))
                     for out in (width, 1))  # fmt: skip
    log_std = nn.Parameter(torch.zeros(width))
    parameters = [*actor.parameters(), *critic.parameters(), *([log_std] if gaussian else [])]
    optimizer = torch.optim.Adam(parameters, lr=s.learning_rate, eps=1e-5, fused=True)

    def log_prob(states, actions):
        out = actor(states)
        if gaussian:
            z = (actions - out) * (-log_std).exp()
            return -(0.5 * z * z + log_std + 0.9189385).sum(-1), (1.4189385 + log_std).sum()
        logps = out.log_softmax(-1)
        return logps.gather(-1, actions[..., None])[..., 0], -(logps.exp() * logps).sum(-1)

    def observe(rows):
        if s.normalize:
            seen.add(rows)
            rows = ((rows - seen.mean) / np.sqrt(seen.var + 1e-8)).clip(-10, 10)
        return rows

    seen, returned, discounted = Running(), Running(), np.zeros(s.num_envs)
    obs = np.empty((s.num_steps + 1, s.num_envs, size), np.float32)
    rewards, done = (np.empty((s.num_steps, s.num_envs), np.float32) for _ in range(2))
    current = observe(np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]))
    while steps < case.total:
        optimizer.param_groups[0]["lr"] = s.learning_rate * (1 - steps / case.total)
        noise = torch.empty(s.num_steps, s.num_envs, width)
        noise = noise.normal_() if gaussian else -noise.exponential_().log()
        taken = []
        with torch.no_grad():
            for t in range(s.num_steps):
                obs[t] = current
                out = actor(torch.from_numpy(obs[t]))
                taken.append(out + log_std.exp() * noise[t] if gaussian else (out + noise[t]).argmax(-1))
                actions = taken[-1].numpy().clip(space.low, space.high) if gaussian else taken[-1].numpy()
                rows = []
                for i, env in enumerate(envs):
                    row, rewards[t, i], terminated, truncated, _ = env.step(actions[i])
                    done[t, i] = terminated or truncated
                    rows.append(env.reset()[0] if done[t, i] else row)
                current = observe(np.array(rows))
                if s.normalize:
                    discounted = discounted * 0.99 + rewards[t]
                    returned.add(discounted)
                    rewards[t] = (rewards[t] / np.sqrt(returned.var + 1e-8)).clip(-10, 10)
                    discounted *= 1 - done[t]
            obs[-1] = current
            states, actions = torch.from_numpy(obs[:-1]), torch.stack(taken)
            values = critic(torch.from_numpy(obs))[..., 0].numpy()
            advantages, last = np.empty_like(rewards), 0.0
            for t in reversed(range(s.num_steps)):
                delta = rewards[t] + 0.99 * (1 - done[t]) * values[t + 1] - values[t]
                advantages[t] = last = delta + 0.99 * 0.95 * (1 - done[t]) * last
            columns = (states, actions, log_prob(states, actions)[0], torch.from_numpy(advantages),
                       torch.from_numpy(advantages + values[:-1]), torch.from_numpy(values[:-1]))  # fmt: skip
        columns = [column.flatten(0, 1) for column in columns]
        batch = len(columns[0]) // s.num_minibatches
        for _ in range(s.update_epochs):
            order = torch.randperm(len(columns[0]))
            for states, actions, old_logps, advantage, target, old in zip(*(c[order].split(batch) for c in columns)):
                logps, entropy = log_prob(states, actions)
                value, ratio = critic(states)[:, 0], (logps - old_logps).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                near = old + (value - old).clamp(-0.2, 0.2)
                error = torch.max((value - target) ** 2, (near - target) ** 2).mean()
                loss = 0.25 * error - gain - s.ent_coef * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        steps += case.rollout
        marks.append((steps, *now()))
    return marks


def worker(side: Side, name: str, seed: int, threads: int, cleanrl: Path | None = None) -> None:
    """One side of one case in this process and the working directory; prints a line of JSON last."""
    import torch

    torch.set_num_threads(threads)
    case = CASES[name]
    if side in ("ours", "compiled"):
        marks = run_ours(name, case, seed, threads, side == "compiled")
    elif side == "cleanrl":
        marks = run_cleanrl(name, case, seed, cleanrl)
    else:
        marks = (run_sb3 if side == "sb3" else run_bare)(name, case, seed)
    first = next(mark for mark in marks if mark[0] >= case.begin)
    last = next(mark for mark in reversed(marks) if mark[0] <= case.end)
    steps, seconds, busy, *parts = (b - a for a, b in zip(first, last))
    assert steps >= 0.9 * (case.end - case.begin), f"only {steps} steps were timed"
    print()
    print(json.dumps({"rate": steps / seconds, "rate_cpu": steps / busy, "shares": [part / seconds for part in parts]}))


def measure(side: str, name: str, seed: int, threads: int, cleanrl: Path | None) -> dict:
    """The rate of one run in a fresh process."""
    environment = os.environ | {variable: str(threads) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, str(Path(__file__).resolve()), "worker", "--side", side, "--name", name, "--seed",
               str(seed), "--threads", str(threads), *(["--cleanrl", str(cleanrl)] if cleanrl else [])]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(name: str, threads: int, rounds: list[dict]) -> dict:
    """Medians of the rounds, and our rate over that of each other side, with the range over rounds."""
    case, sides = CASES[name], list(rounds[0])

    def medians(rate: str) -> dict[str, float]:
        return {side: round(statistics.median(r[side][rate] for r in rounds), 1) for side in sides}

    def ratios(rate: str) -> dict[str, dict]:
        result = {}
        for side in sides[1:]:
            values = [r["ours"][rate] / r[side][rate] for r in rounds]
            result[side] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        return {side: {name: round(value, 3) for name, value in row.items()} for side, row in result.items()}

    shares = [statistics.median(parts) for parts in zip(*(r["ours"]["shares"] for r in rounds))]
    parts = dict(zip(("environment", "inference", "update", "rest"), (*shares, 1 - sum(shares))))
    return {
        "case": name, "env_id": case.env_id, "threads": threads, "settings": case.settings,
        "steps_timed": case.end - case.begin, "steps_per_second": medians("rate"), "ours_over": ratios("rate"),
        "steps_per_cpu_second": medians("rate_cpu"), "ours_over_by_cpu": ratios("rate_cpu"),
        "floor_and_aim": case.aims, "shares_of_ours": {part: round(share, 3) for part, share in parts.items()},
        "rounds": [{side: [round(run[rate], 1) for rate in ("rate", "rate_cpu")] for side, run in r.items()}
                   for r in rounds],
    }  # fmt: skip


def commit(folder: Path | None) -> str | None:
    if folder is None:
        return None
    done = subprocess.run(["git", "-C", folder, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or None


def main(
    cleanrl: Path | None = None,
    rounds: int = 5,
    cases: tuple[str, ...] = tuple(CASES),
    quick: bool = False,
    threads: tuple[int, ...] = (),
    output: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Times all sides of the cases in turn.

    Args:
        cleanrl: folder of a clone of CleanRL; without it that side is left out
        rounds: runs of each side
        cases: of those above
        quick: one round
        threads: thread counts; default: each case's own
        output: folder for a speed_CASE.json, written where every side was run, in at least 3 rounds
    """
    cleanrl, rounds = cleanrl and cleanrl.resolve(), 1 if quick else rounds
    if unknown := set(cases) - CASES.keys():
        sys.exit(f"--cases {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    if cleanrl and not (cleanrl / "cleanrl" / "ppo.py").exists():
        sys.exit(f"--cleanrl {cleanrl} is not a clone of https://github.com/vwxyzjn/cleanrl")
    commits = {"commit": commit(ROOT), "cleanrl_commit": commit(cleanrl)}  # before results make the tree dirty
    for name in cases:
        before, results = machine(), []
        sides = [side for side in CASES[name].sides if side != "cleanrl" or cleanrl]
        for count in threads or CASES[name].threads:
            runs = []
            for i in range(rounds):
                order = sides[:: 1 if i % 2 == 0 else -1]
                runs.append({side: measure(side, name, i + 1, count, cleanrl) for side in order})
                rates = ", ".join(f"{side} {runs[-1][side]['rate']:.0f}" for side in sides)
                print(f"{name}, {count} threads, round {i + 1}: {rates} steps/s", flush=True)
            results.append(summary(name, count, [{side: run[side] for side in sides} for run in runs]))
            print(json.dumps({k: v for k, v in results[-1].items() if k not in ("settings", "rounds")}, indent=1))
        packages = ("torch", "numpy", "gymnasium", "mujoco", "stable-baselines3")
        result = {
            "case": name, "results": results,
            "versions": {package: importlib.metadata.version(package) for package in packages},
            **commits, "command": sys.argv, "machine": before,
            "load_after": machine()["load"], "python": sys.version.split()[0],
        }  # fmt: skip
        if cleanrl and rounds >= 3:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"speed_{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        tyro.cli(worker, args=sys.argv[2:])
    else:
        tyro.cli(main, description=__doc__)
