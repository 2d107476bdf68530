"""Reference learning curves: how they are recorded, and the band that fresh seeds must reach.

    python benchmarks/curves.py record grpo-sort --seeds 30       appends one row per seed to curves/grpo-sort.jsonl
    python benchmarks/curves.py show                              bands, false-alarm rates, power; curves/*.png

A band is one-sided: with n recorded seeds of mean m and standard deviation s, the mean of two fresh seeds falls below
m - t s sqrt(1/2 + 1/n) with probability PAIR_ALARM, where t is that quantile of Student's distribution with n - 1
degrees of freedom (a prediction interval; the values are treated as normal). A test fails where this happens twice:
below the band, two more fresh seeds are asked. For about one seed in a hundred ends so badly as no normal distribution
has it (10 %-BC at 458, where 100 recorded seeds have 736 to 1,438; IQL at 444; a reward model that RLOO over-optimises
within 8 steps), from code that repeats its recorded seeds bit for bit; a bug is there again. Twice is a false alarm of
0.02 to 0.06 % a band of the default tests (`false_alarm`), below 1 % all together. A drop of (t + 1.64) s sqrt(1/2 +
1/n) is caught with 90 % probability, about.

Proportions of right answers are taken as arcsin(sqrt(p)), which stabilises their variance: near 1 they are skewed.
Returns of sampled actions in MuJoCo are positive and skewed, and are compared as logarithms.

Which numbers are compared was fixed before the first recording, except for bc, iql, dt, ppo on Hopper and HalfCheetah
and sac on Hopper: there it was chosen after a first recording and before any band was used. The return of mean actions
varies two to five times as much between seeds as that of sampled ones; the slope of four targets from different start
states varied more than it was large; one of eight seeds of sac fell in its last evaluation alone.
"""

import contextlib
import functools
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import tyro
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import reward_model  # noqa: E402
from utils.machine import environment  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "curves"
PAIR_ALARM = 0.01  # how often two seeds of unchanged code fall below a band; four do in a test that fails
LONG = (  # of the slow tests
    "grpo-countdown", "ppo-halfcheetah", "ppo-halfcheetah-1m", "ppo-halfcheetah-tuned", "ppo-hopper", "sac-halfcheetah",
    "sac-hopper", "dt-hopper-float32", "ppo_atari-kungfumaster",
)  # fmt: skip
ENOUGH = 8  # seeds: of fewer, a band is so wide that a run that learns nothing may lie in it
SCALES = {  # number -> the scale on which it is compared, and back
    **dict.fromkeys(
        ("eval/greedy", "eval/pass@1", "eval/pair_accuracy"),
        (lambda p: math.asin(math.sqrt(p)), lambda x: math.sin(max(x, 0)) ** 2),
    ),  # shares of right answers
    **dict.fromkeys(
        ("eval/return_stochastic", "late return"),
        (lambda x: math.log(max(x, 1e-9)), math.exp),
    ),  # returns in MuJoCo
}
CLONING = dict(max_steps=3_000, hidden_size=128, batch_size=128, learning_rate=1e-3, eval_every=0, eval_episodes=20)
TRANSFORMER = dict(max_steps=1_200, context_length=3, batch_size=192, dropout=0.0, warmup_steps=100, eval_every=200,
                   eval_episodes=8, target_returns=(2_400.0, 300.0))  # fmt: skip
CURVES = {  # name -> script, arguments, column over steps, compared numbers (all: higher is better)
    "grpo-sort": (
        "grpo",
        dict(task="sort", max_steps=16, learning_rate=1e-4, eval_every=0, eval_prompts=256),
        "reward",
        ("mean reward", "eval/greedy"),
    ),
    "rloo-sort": (
        "rloo",
        dict(task="sort", max_steps=16, eval_every=0, eval_prompts=256),
        "reward",
        ("mean reward", "eval/greedy"),
    ),
    "ppo_lm-sort": (
        "ppo_lm",
        dict(task="sort", max_steps=8, eval_every=0, eval_prompts=256),
        "reward",
        ("mean reward", "eval/greedy"),
    ),
    **{
        f"{script}-sort": (
            script,
            dict(task="sort", max_steps=steps, eval_every=0, eval_prompts=256),
            "margin",
            numbers,
        )
        for script, steps, numbers in (
            ("dpo", 40, ("eval/greedy", "eval/pass@1")),
            ("simpo", 40, ("eval/greedy",)),
            ("orpo", 20, ("eval/greedy",)),
            ("kto", 40, ("eval/greedy",)),
        )
    },
    "online_dpo-sort": (
        "online_dpo",
        dict(task="sort", max_steps=16, eval_every=0, eval_prompts=256),
        "reward",
        ("mean reward", "eval/greedy"),
    ),
    "reward_model-sort": (
        "reward_model",
        dict(task="sort", max_steps=20, eval_every=0),
        "accuracy",
        ("eval/pair_accuracy",),
    ),
    **{  # RLOO on a reward model, told by the task's own score of what it samples
        name: ("rloo", dict(task="sort", max_steps=8, eval_every=0, eval_prompts=16), "reward/task", (number,))
        for name, number in (
            ("rloo-sort-learned", "mean reward/task"),
            ("rloo-sort-flipped", "negative mean reward/task"),  # it must hurt, and never less
        )
    },
    "grpo-countdown": (
        "grpo",
        dict(task="countdown", eval_every=0, eval_prompts=256),
        "reward",
        ("mean reward", "eval/greedy"),
    ),
    "sft-sort": (
        "sft",
        dict(task=("sort",), max_steps=100, batch_size=64, eval_every=0, eval_prompts=16),
        "loss",
        ("negative final loss",),
    ),
    "ppo-cartpole": (
        "ppo",
        dict(total_timesteps=24_576, eval_every=4_096),
        "eval/return",
        ("mean eval/return",),
    ),
    "ppo-pendulum": (
        "ppo",
        dict(env_id="Pendulum-v1", total_timesteps=61_440, num_envs=8, num_steps=256, learning_rate=1e-3, gamma=0.9,
             eval_every=12_288),
        "eval/return",
        ("mean eval/return", "last eval/return"),
    ),
    "sac-pendulum": (
        "sac",
        dict(total_timesteps=4_000, learning_starts=500, learning_rate=2e-3, tau=0.01, batch_size=64, hidden_size=64,
             eval_every=1_000),
        "eval/return",
        ("mean eval/return", "last eval/return"),
    ),
    "bc-hopper": ("bc", CLONING, "eval/return", ("eval/return_stochastic",)),
    "bc10-hopper": ("bc", CLONING | dict(top_fraction=0.1), "eval/return", ("eval/return_stochastic",)),
    "iql-hopper": (
        "iql",
        dict(max_steps=5_000, hidden_size=128, batch_size=128, learning_rate=2e-3, tau=0.02, eval_every=0,
             eval_episodes=20),
        "eval/return",
        ("eval/return_stochastic",),
    ),
    "dt-hopper": ("dt", TRANSFORMER | dict(precision="bfloat16"), "eval/slope", ("mean eval/slope",)),
    "dt-hopper-float32": ("dt", TRANSFORMER, "eval/slope", ("mean eval/slope",)),
    "ppo-halfcheetah": (
        "ppo",
        dict(env_id="HalfCheetah-v5", total_timesteps=204_800, eval_every=40_960),
        "eval/return",
        ("eval/return_stochastic",),
    ),
    "ppo-halfcheetah-tuned": (  # an hour a seed, beside other work
        "ppo",
        dict(env_id="HalfCheetah-v5", total_timesteps=1_000_000, num_envs=1, num_steps=512, num_minibatches=8,
             update_epochs=20, gamma=0.98, gae_lambda=0.92, clip_coef=0.1, learning_rate=2.0633e-5, anneal_lr=False,
             log_std_init=-2.0, hidden_size=256, max_grad_norm=0.8, vf_coef=0.58, ent_coef=0.0004, eval_every=100_000),
        "eval/return",
        ("mean eval/return", "last eval/return"),
    ),
    "ppo-halfcheetah-1m": (  # CleanRL's settings; the tenth at the end is of about 100 episodes, as CleanRL's table
        "ppo",
        dict(env_id="HalfCheetah-v5", clip_vloss=True, eval_every=0),
        "return",
        ("late return",),
    ),
    "ppo-hopper": (
        "ppo",
        dict(env_id="Hopper-v5", total_timesteps=204_800, eval_every=40_960),
        "eval/return",
        ("eval/return_stochastic",),
    ),
    "ppo_atari-kungfumaster": (
        "ppo_atari",
        dict(env_id="ALE/KungFuMaster-v5", total_timesteps=61_440, eval_every=30_720, eval_episodes=5),
        "eval/return_stochastic",
        ("mean eval/return_stochastic",),
    ),
    "sac-hopper": (
        "sac",
        dict(env_id="Hopper-v5", total_timesteps=20_000, learning_starts=1_000, eval_every=5_000, eval_episodes=20),
        "eval/return",
        ("mean eval/return",),
    ),
    "sac-halfcheetah": (  # for sb3_sac.py: seeds differ so much that a band would let an untrained agent pass
        "sac",
        dict(env_id="HalfCheetah-v5", total_timesteps=30_000, learning_starts=1_000, eval_every=5_000,
             eval_episodes=5),
        "eval/return",
        (),
    ),
}  # fmt: skip
LEARNED = {"rloo-sort-learned": 0.0, "rloo-sort-flipped": 1.0}  # on a reward model -> its share of flipped labels


def run_once(name: str, seed: int, **changes) -> dict:
    """Trains curve `name` with `seed` in a temporary folder, in this process; returns one row of its file."""
    script, settings, column, _ = CURVES[name]
    module = importlib.import_module(f"algos.{script}")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        common = {"seed": seed, "output_dir": folder, "save_every": 10**6}
        if name in LEARNED:
            pairs = dict(task="sort", max_steps=20, eval_every=0, label_noise=LEARNED[name])
            reward_model.train(reward_model.Args(**pairs | common))
            changes = {"reward": tuple(map(str, Path(folder).glob("*/model")))} | changes
        history = module.train(module.Args(**settings | common | changes))
    steps = [row[column] for row in history if column in row]
    row = {"seed": seed, column: [round(x, 5) for x in steps]}
    row |= {key: value for key, value in history[-1].items() if key.startswith("eval/") and key != column}
    tenth = steps[-max(1, len(steps) // 10) :]
    row |= {f"mean {column}": statistics.mean(steps), f"last {column}": steps[-1]}
    row |= {"negative final loss": -statistics.mean(tenth)} if column == "loss" else {}
    row |= {"late return": statistics.mean(tenth)} if column == "return" else {}
    row |= {"negative mean reward/task": -statistics.mean(steps)} if column == "reward/task" else {}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def recorded(name: str) -> list[dict]:
    path = FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def band(name: str, number: str) -> dict[str, float]:
    """lower: what the mean of two fresh seeds must reach, once in two pairs; power: the drop from the recorded mean
    that is caught with 90 % probability; mean, sd, n of the recorded seeds."""
    to, back = SCALES.get(number, (float, float))
    values = [to(row[number]) for row in recorded(name)]
    n, mean, sd = len(values), statistics.mean(values), statistics.stdev(values)
    width = sd * math.sqrt(1 / 2 + 1 / n)
    quantile = student.ppf(1 - PAIR_ALARM, n - 1)
    levels = [mean, mean - quantile * width, mean - (quantile + 1.6352) * width]  # 0.949 for each pair
    middle, lower, caught = (back(level) for level in levels)
    return {"lower": lower, "mean": middle, "sd": sd, "n": n, "power": middle - caught}


@functools.cache
def false_alarm(n: int) -> float:
    """How often two pairs of normal seeds both fall below the band of n others, by simulation: the band is the same."""
    rng, draws = np.random.default_rng(0), 1_000_000
    sd = np.sqrt(rng.chisquare(n - 1, draws) / (n - 1))
    lower = rng.normal(0, n**-0.5, draws) - student.ppf(1 - PAIR_ALARM, n - 1) * sd * math.sqrt(1 / 2 + 1 / n)
    return float((rng.normal(0, 0.5**0.5, (2, draws)) < lower).all(0).mean())


def reached(number: str, rows: list[dict]) -> float:
    """The mean of fresh seeds' numbers, taken on the scale of the band."""
    to, back = SCALES.get(number, (float, float))
    return back(statistics.mean(to(row[number]) for row in rows))


def record(name: tyro.conf.Positional[str], seeds: int = 30) -> None:
    """Trains seeds 1 to `seeds` of a curve, those that its file lacks, one after the other."""
    FOLDER.mkdir(exist_ok=True)
    rows, settings = recorded(name), json.loads(json.dumps(CURVES[name][1]))
    if any(row["settings"] != settings for row in rows):
        sys.exit(f"{name}.jsonl was recorded with other settings: move it away, and draw the old curve beside the new")
    known = {row["seed"] for row in rows}
    print(f"{name}: seeds {sorted(known)} are recorded already")
    for seed in [seed for seed in range(1, seeds + 1) if seed not in known]:
        row = run_once(name, seed)
        about = {"settings": CURVES[name][1], **{k: environment()[k] for k in ("versions", "commit", "machine")}}
        with open(FOLDER / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(row | about) + "\n")
        print(name, {key: value for key, value in row.items() if not isinstance(value, list)}, flush=True)


def show() -> None:
    """Prints every band and draws each curve with the peers' beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, (_, _, column, numbers) in CURVES.items():
        if len(recorded(name)) < 2:
            continue
        for number in numbers:
            about = "  ".join(f"{key} {value:.4g}" for key, value in band(name, number).items())
            print(f"{name:16} {number:20} {about}  false alarm {false_alarm(len(recorded(name))):.3%}")
        figure, axis = plt.subplots(figsize=(6, 4))
        for label, rows in {"plainrl": recorded(name), "TRL 1.16": recorded(f"trl-{name}"),
                            "SB3 2.9": recorded(f"sb3-{name}")}.items():  # fmt: skip
            if rows:
                values = torch.tensor([row[column] for row in rows]).double()
                steps = range(1, values.shape[1] + 1)
                low, middle, high = values.quantile(torch.tensor([0.1, 0.5, 0.9]).double(), 0)
                axis.plot(steps, middle, label=f"{label}, median of {len(rows)} seeds")
                axis.fill_between(steps, low, high, alpha=0.2)
        axis.set(title=name, xlabel="evaluation" if column.startswith("eval/") else "step", ylabel=column)
        axis.legend()
        axis.grid(alpha=0.3)
        figure.savefig(FOLDER / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"record": record, "show": show})
