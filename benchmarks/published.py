"""PPO at the budget that the field publishes: five MuJoCo tasks, 1M steps, beside the numbers of others.

    python benchmarks/curves.py record ppo-hopper-1m --seeds 10      ppo-walker2d-1m, ...; 4 to 6 minutes for each seed
    python benchmarks/published.py random                            returns of random actions -> results/random.json
    python benchmarks/published.py show                              the table of benchmarks/README.md

Ours is the mean return of sampled actions in the last tenth of training. A score is 0 for random actions and 1 for the
PPO paper. IQM: the mean of the middle half of all seeds' scores over all tasks, with a bootstrap interval that draws
seeds within tasks (Agarwal et al. 2021, arXiv 2108.13264, section 4).
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
from benchmarks.curves import ENOUGH, recorded  # noqa: E402

RESULT = ROOT / "benchmarks/results/random.json"
# 1M steps, most read off a plot by Tianshou's examples/mujoco/README.md, which names no version for Baselines
OTHERS = {  # task: PPO paper (arXiv 1707.06347), OpenAI Baselines, Tianshou (a run's best)
    "HalfCheetah": (1800, 1700, 5784),
    "Hopper": (2330, 2400, 2609),
    "InvertedDoublePendulum": (8000, 7350, 9231),
    "Swimmer": (108, 111, 67),
    "Walker2d": (3460, 3510, 3589),
}


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


def table() -> str:
    """Markdown: a row for each task, and the IQM where all have enough seeds."""
    base = json.loads(RESULT.read_text())["return"]
    rows = ["| task, v5 | plainrl, seeds | random | PPO paper, v1 | OpenAI Baselines | Tianshou, tuned, v3, v2 |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    scores = []
    for task, others in OTHERS.items():
        values = returns_of(task)
        spread = f" +- {statistics.stdev(values):,.0f}" if len(values) > 1 else ""
        ours = f"{statistics.mean(values):,.0f}{spread}, {len(values)}" if values else "not run"
        scores.append((np.array(values) - base[task]) / (others[0] - base[task]))
        rows.append(f"| {task} | {ours} | {base[task]:,.0f} | " + " | ".join(f"{x:,}" for x in others) + " |")
    if min(map(len, scores)) >= ENOUGH:
        middle, low, high = iqm(scores)
        interval = f"{middle:.2f} (95 %: {low:.2f} to {high:.2f})"
        rows += ["", f"Interquartile mean of the scores of all seeds, 1 being the PPO paper's: {interval}."]
    return "\n".join(rows)


def show() -> None:
    print(table())


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"random": random, "show": show})
