"""Over-optimisation: a policy trained on reward models that few, partly wrong preference pairs have taught.

    python benchmarks/overoptimisation.py           results/overoptimisation.json and curves/overoptimisation.png

An ensemble of reward models learns from pairs of `sort`, a quarter of which have their labels flipped. RLOO is then
trained from the same start, with a small KL penalty, on one member, on the members' mean, on their worst case, and on
the mean less a multiple of their variance (Coste et al. 2023, arXiv 2310.02743). At every step it records the proxy,
which is the reward that is trained on, the gold reward, which is the task's own check of the same samples and which the
policy never sees, and the KL divergence from the start in nats per completion. Gao et al. 2022 (arXiv 2210.10760) draw
both over the square root of that divergence: over-optimisation is where the proxy goes on rising and gold turns.

Scores of a reward model have no natural scale, so proxies are drawn relative to what the start has, in units of the
proxy's standard deviation there; those of different rewards must not be compared with each other.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import reward_model, rloo  # noqa: E402
from utils.machine import environment  # noqa: E402

HERE = Path(__file__).resolve().parent


@dataclass
class Settings:
    seeds: int = 1
    """seeds 1 to this, each with reward models and policies of its own"""
    members: int = 4
    """reward models in the ensemble"""
    num_pairs: int = 128
    """pairs that they learn from"""
    label_noise: float = 0.25
    """share of the pairs with flipped labels"""
    model_steps: int = 30
    """optimizer steps of a reward model"""
    policy_steps: int = 40
    """steps of a policy"""
    beta: float = 0.05
    """weight of the KL penalty"""
    variance_weight: float = 1.0
    """of the uncertainty reward"""
    threads: int = 1
    """CPU threads"""
    out: str = str(HERE)
    """folder of results/ and curves/"""


def quiet(train, args) -> tuple[list[dict], Path]:
    """The history of a run, made without its prints, and its folder."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        history = train(args)
    return history, max(Path(args.output_dir).iterdir(), key=lambda folder: folder.stat().st_mtime_ns)


def one_seed(seed: int, settings: Settings) -> dict:
    """name of a reward -> lists over steps of proxy, gold and kl; and how good the reward models are."""
    with tempfile.TemporaryDirectory() as folder:
        common = dict(task="sort", seed=seed, eval_every=0, save_every=10**6, threads=settings.threads, device="cpu")
        start = time.perf_counter()
        history, run = quiet(reward_model.train, reward_model.Args(
            **common, output_dir=f"{folder}/models", ensemble=settings.members, num_pairs=settings.num_pairs,
            label_noise=settings.label_noise, max_steps=settings.model_steps))  # fmt: skip
        result = {"models": history[-1] | {"seconds": time.perf_counter() - start}}
        print(f"seed {seed}  models  {shown(history[-1], 'eval/pair_accuracy', 'eval/ensemble_accuracy', 'eval/ece')}")
        rewards = {"one member": "/member-1", "mean": ":mean", "worst case": ":worst-case",
                   "mean - variance": f":uncertainty={settings.variance_weight}"}  # fmt: skip
        for name, suffix in rewards.items():
            start = time.perf_counter()
            history, _ = quiet(rloo.train, rloo.Args(
                **common, output_dir=f"{folder}/policies", reward=(f"{run}/model{suffix}",), beta=settings.beta,
                max_steps=settings.policy_steps))  # fmt: skip
            steps = [row for row in history if "reward" in row]
            result[name] = {
                "proxy": [row["reward"] for row in steps], "proxy_std": steps[0]["reward_std"],
                "gold": [row["reward/task"] for row in steps], "kl": [row["kl"] for row in steps],
                "length": [row["length"] for row in steps],
                "eval": {key: value for key, value in history[-1].items() if key.startswith("eval/")},
                "eval_start": {key: value for key, value in history[0].items() if key.startswith("eval/")},
                "seconds": time.perf_counter() - start,
            }  # fmt: skip
            print(f"seed {seed}  {name:16} {shown(summary(result[name]))}", flush=True)
    return result


def summary(policy: dict) -> dict[str, float]:
    """Gold at its highest and at the end, means of five steps, where the highest was, and what the proxy gained."""
    gold, kl, proxy = (
        [statistics.mean(policy[name][max(0, i - 4) : i + 1]) for i in range(len(policy[name]))]
        for name in ("gold", "kl", "proxy")
    )
    best = max(range(len(gold)), key=gold.__getitem__)
    return {"gold_start": gold[0], "gold_best": gold[best], "kl_at_best": kl[best], "gold_end": gold[-1],
            "kl_end": kl[-1], "proxy_gain": (proxy[-1] - proxy[0]) / policy["proxy_std"],
            "greedy_end": policy["eval"]["eval/greedy"]}  # fmt: skip


def shown(row: dict, *names: str) -> str:
    return "  ".join(f"{name} {row[name]:.3f}" for name in names or row)


def draw(results: list[dict], path: Path) -> None:
    """Gold and proxy over the square root of the divergence, a line for each reward and seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for number, name in enumerate([name for name in results[0] if name != "models"]):
        for result in results:
            policy = result[name]
            distance = [max(kl, 0.0) ** 0.5 for kl in policy["kl"]]
            proxy = [(value - policy["proxy"][0]) / policy["proxy_std"] for value in policy["proxy"]]
            for axis, values in zip(axes, (policy["gold"], proxy)):
                axis.plot(distance, values, ".-", color=f"C{number}", markersize=3, linewidth=1,
                          label=name if result is results[0] else None)  # fmt: skip
    axes[0].set(title="gold: share of right answers", ylabel="reward/task")
    axes[1].set(title="proxy: gain over the start, in its standard deviations", ylabel="reward")
    for axis in axes:
        axis.set_xlabel("square root of KL(policy || start), nats per completion")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(settings: Settings) -> None:
    results = [one_seed(seed, settings) for seed in range(1, settings.seeds + 1)]
    about = {key: environment()[key] for key in ("versions", "commit", "machine")}
    record = {
        "settings": {name: value for name, value in vars(settings).items() if name != "out"},
        "summary": [{n: summary(p) for n, p in result.items() if n != "models"} for result in results],
        "seeds": results,
    }
    for name in ("results", "curves"):
        (Path(settings.out) / name).mkdir(parents=True, exist_ok=True)
    path = Path(settings.out) / "results/overoptimisation.json"
    path.write_text(json.dumps(json.loads(json.dumps(record | about), parse_float=lambda x: round(float(x), 5))))
    draw(results, Path(settings.out) / "curves/overoptimisation.png")


if __name__ == "__main__":
    main(tyro.cli(Settings))
