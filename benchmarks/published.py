"""At the budgets that the field publishes, beside the numbers of others: PPO on five MuJoCo tasks, SAC, TD3 and DDPG on
Hopper, DQN and C51 on CartPole.

    python benchmarks/curves.py record ppo-hopper-1m --seeds 10      ppo-walker2d-1m, ...; 4 to 6 minutes for each seed
    python benchmarks/record_suite.py --env-id Hopper-v5 --output data/Hopper-v5     SAC, two hours and a quarter; then
    python benchmarks/curves.py add sac-hopper-1m data/Hopper-v5/runs/RUN
    python benchmarks/published.py random                            returns of random actions -> results/random.json
    python benchmarks/published.py show                              the tables of benchmarks/README.md

PPO: ours is the mean return of sampled actions in the last tenth of training. A score is 0 for random actions and 1
for the PPO paper. IQM: the mean of the middle half of all seeds' scores over all tasks, with a bootstrap interval that
draws seeds within tasks (Agarwal et al. 2021, arXiv 2108.13264, section 4).

SAC, TD3, DDPG: the mean return of the evaluations in the last tenth of the steps, without noise. DQN, C51: as PPO.
"""

import json
import statistics
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro
from scipy.stats import trim_mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.curves import CURVES, ENOUGH, recorded  # noqa: E402

RESULT = ROOT / "benchmarks/results/random.json"
# 1M steps, most read off a plot by Tianshou's examples/mujoco/README.md, which names no version for Baselines
OTHERS = {  # task: PPO paper (arXiv 1707.06347), OpenAI Baselines, Tianshou (a run's best)
    "HalfCheetah": (1800, 1700, 5784),
    "Hopper": (2330, 2400, 2609),
    "InvertedDoublePendulum": (8000, 7350, 9231),
    "Swimmer": (108, 111, 67),
    "Walker2d": (3460, 3510, 3589),
}

HOPPER = (  # curve, steps, the paper's and Tianshou's (v3) at 1M steps, as Tianshou's README has them
    ("sac-hopper-1m", 300_000, None, None),
    ("sac-hopper-1m", 1_000_000, 3370, 3542),  # arXiv 1801.01290, read off its figure
    ("td3-hopper-300k", 300_000, 3564, 3472),  # arXiv 1802.09477
    ("ddpg-hopper-300k", 300_000, 1860, 2197),  # OurDDPG in arXiv 1802.09477
)
CARTPOLE = (  # curve, and CleanRL's mean and standard deviation (docs/rl-algorithms of its commit fe8d8a0)
    ("dqn-cartpole-500k", 488.69, 16.11),
    ("c51-cartpole-500k", 481.20, 20.53),
)


def random(episodes: int = 100) -> None:
    """Mean return of actions drawn uniformly, without training."""
    found = {}
    for task in OTHERS:
        env, returns = gym.make(f"{task}-v5"), []
        env.action_space.seed(0)
        for episode in range(episodes):
            env.reset(seed=episode)
            total, over = 0.0, False
            while not over:
                _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
                total, over = total + float(reward), terminated or truncated
            returns.append(total)
        found[task] = round(statistics.mean(returns), 2)
    RESULT.write_text(json.dumps({"episodes": episodes, "return": found}, indent=1) + "\n")


def returns_of(task: str) -> list[float]:
    return [row["late return"] for row in recorded(f"ppo-{task.lower()}-1m")]


def iqm(scores: list[np.ndarray], draws: int = 10_000) -> tuple[float, float, float]:
    """Interquartile mean of all scores of all tasks, and its stratified bootstrap interval, 95 %."""
    rng = np.random.default_rng(0)
    drawn = np.concatenate([rng.choice(task, (draws, len(task))) for task in scores], 1)
    low, high = np.quantile(trim_mean(drawn, 0.25, axis=1), (0.025, 0.975))
    return float(trim_mean(np.concatenate(scores), 0.25)), float(low), float(high)


def cell(values: list[float]) -> str:
    """Mean, standard deviation and number of seeds."""
    spread = f" +- {statistics.stdev(values):,.0f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.0f}{spread}, {len(values)}" if values else "not run"


def table() -> str:
    """Markdown: a row for each task, and the IQM where all have enough seeds."""
    base = json.loads(RESULT.read_text())["return"]
    rows = ["| task, v5 | plainrl, seeds | random | PPO paper, v1 | OpenAI Baselines | Tianshou, tuned, v3, v2 |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    scores = []
    for task, others in OTHERS.items():
        values = returns_of(task)
        scores.append((np.array(values) - base[task]) / (others[0] - base[task]))
        rows.append(f"| {task} | {cell(values)} | {base[task]:,.0f} | " + " | ".join(f"{x:,}" for x in others) + " |")
    if min(map(len, scores)) >= ENOUGH:
        middle, low, high = iqm(scores)
        scale = "A score is 0 for random actions and 1 for the PPO paper's return."
        mean = f"**{middle:.2f}** (95 %: {low:.2f} to {high:.2f})"
        rows += ["", f"Interquartile mean of the scores of all seeds: {mean}. {scale}"]
    return "\n".join(rows)


def late_returns(rows: list[dict], steps: int, every: int) -> list[float]:
    """Of each run: the mean of the evaluations in the last tenth of the first `steps`."""
    count = steps // every
    return [statistics.mean(row["eval/return"][count - max(1, count // 10) : count]) for row in rows]


def off_policy() -> str:
    """Markdown: what SAC, TD3 and DDPG reach on Hopper."""
    lines = ["| Hopper-v5 | steps | plainrl, seeds | SB3, seeds | paper, 1M, v1 | Tianshou, 1M, v3 |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, steps, paper, tianshou in HOPPER:
        every = CURVES[name].settings["eval_every"]
        ours = late_returns(recorded(name), steps, every)
        with_peer = (name, steps) == HOPPER[0][:2]  # SB3's run is no longer
        peer = cell(late_returns(recorded(f"sb3-{name}"), steps, every)) if with_peer else ""
        others = " | ".join(f"{x:,}" if x else "" for x in (paper, tianshou))
        lines.append(f"| {name.partition('-')[0].upper()} | {steps:,} | {cell(ours)} | {peer} | {others} |")
    return "\n".join(lines)


def discrete() -> str:
    """Markdown: what DQN and C51 reach on CartPole."""
    lines = ["| CartPole-v1, 500,000 steps | plainrl, seeds | CleanRL, seeds |", "|---|---|---|"]
    for name, mean, spread in CARTPOLE:
        ours = cell([row["late return"] for row in recorded(name)])
        lines.append(f"| {name.partition('-')[0].upper()} | {ours} | {mean:.0f} +- {spread:.0f}, 3 |")
    return "\n".join(lines)


def show() -> None:
    print(table(), off_policy(), discrete(), sep="\n\n")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"random": random, "show": show})
