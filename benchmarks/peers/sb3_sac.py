"""Stable-Baselines3's SAC with the settings of the curve sac-halfcheetah, evaluated as ours is, seed by seed beside it.

python benchmarks/peers/sb3_sac.py curve --seeds 8       appends one row per seed to curves/sb3-sac-halfcheetah.jsonl
python benchmarks/peers/sb3_sac.py curve sac-hopper-1m --seeds 1 --steps 300000    of another curve
python benchmarks/peers/sb3_sac.py log-alpha --seeds 8   ours with SB3's loss of the temperature
python benchmarks/peers/sb3_sac.py compare               differences, paired by seed, with Student's 95 % interval
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import tyro
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from algos import sac  # noqa: E402
from benchmarks.curves import CURVES, FOLDER, recorded, run_once  # noqa: E402
from utils.control import evaluate, make_env  # noqa: E402

NAME = "sac-halfcheetah"


def train(name: str, steps: int, seed: int) -> dict:
    """One run; evaluation in the environments, start states and numbers of episodes that our script uses."""
    from stable_baselines3 import SAC
    from stable_baselines3.common.callbacks import BaseCallback

    args = sac.Args(**CURVES[name].settings)
    args.seed, every, episodes = seed, args.eval_every, args.eval_episodes
    start, returns, make = time.perf_counter(), [], partial(make_env, args)
    eval_envs = [make() for _ in range(2 * episodes)]

    class Evaluation(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % every == 0:

                def act(obs, scale, generator):
                    parts = (obs[:episodes], True), (obs[episodes:], False)
                    return np.concatenate([self.model.predict(part, deterministic=mode)[0] for part, mode in parts])

                state = torch.get_rng_state()  # a sampled action must not change the training that follows
                scores = evaluate(eval_envs, act, args, torch.device("cpu"))
                torch.set_rng_state(state)
                returns.append(scores["eval/return"])
            return True

    model = SAC("MlpPolicy", make(), learning_starts=args.learning_starts, seed=seed, device="cpu")
    model.learn(steps or args.total_timesteps, callback=Evaluation())
    return {"seed": seed, "eval/return": returns, "mean eval/return": float(np.mean(returns)),
            "last eval/return": returns[-1], "seconds": round(time.perf_counter() - start, 1),
            "versions": {name: importlib.metadata.version(name) for name in ("stable_baselines3", "torch")},
            }  # fmt: skip


def append_seeds(name: str, seeds: int, run: Callable[[int], dict]) -> None:
    """One row of curves/NAME.jsonl for each of seeds 1 to `seeds` that it lacks."""
    known = {row["seed"] for row in recorded(name)}
    for seed in [seed for seed in range(1, seeds + 1) if seed not in known]:
        row = run(seed)
        with open(FOLDER / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def curve(name: tyro.conf.Positional[str] = NAME, seeds: int = 8, steps: int = 0) -> None:
    """steps: where it ends; 0: where our curve does."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    append_seeds(f"sb3-{name}", seeds, partial(train, name, steps))


def log_alpha(seeds: int = 8) -> None:
    with mock.patch.object(sac, "alpha_loss", lambda log_alpha, logps, target: -(log_alpha * (logps + target)).mean()):
        append_seeds(f"{NAME}-log-alpha", seeds, lambda seed: run_once(NAME, seed))


def compare() -> None:
    ours = {row["seed"]: row for row in recorded(NAME)}
    for other, name in {"SB3": f"sb3-{NAME}", "log(alpha)": f"{NAME}-log-alpha"}.items():
        theirs = {row["seed"]: row for row in recorded(name)}
        seeds = sorted(ours.keys() & theirs.keys())
        if len(seeds) < 2:
            sys.exit(f"{len(seeds)} seeds are recorded of both {NAME} and {name}: there must be two at least")
        for number in ("mean eval/return", "last eval/return"):
            a, b = (np.array([rows[seed][number] for seed in seeds]) for rows in (ours, theirs))
            pairs = a - b
            low, high = stats.t.interval(0.95, len(seeds) - 1, pairs.mean(), stats.sem(pairs))
            print(
                f"{number}: ours {a.mean():.0f}, {other} {b.mean():.0f}, {len(seeds)} seeds, "
                f"difference {pairs.mean():.0f} (sd {pairs.std(ddof=1):.0f}, 95 %: {low:.0f} to {high:.0f})"
            )


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"curve": curve, "log-alpha": log_alpha, "compare": compare})
