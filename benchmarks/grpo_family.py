"""GRPO's family and TRL's GRPO on countdown: seven numbers over the steps of training.

    python benchmarks/grpo_family.py run       adds what is missing to results/grpo_family.jsonl
    python benchmarks/grpo_family.py show      writes curves/grpo_family.png

All start from the embedded model and make 100 steps of 64 prompts x 8 completions and one update, at learning rate
1e-4, without a KL penalty. So no sample is stale, and clips cut nothing: stale.py has that. TRL 1.16 has the settings
of grpo.py, the same prompts in the same order, and our evaluation. Every 10 steps, on 128 held-out prompts: greedy
answers, pass@1, pass@8, different right answers of 8. Of four more answers to each prompt: entropy, and
KL(policy || start), over the whole vocabulary, in nats per token. DAPO samples up to its limit of batches for one step,
the others one.
"""

import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos.gkd import kl  # noqa: E402
from benchmarks.curves import quiet_folder  # noqa: E402
from benchmarks.effects import half_width  # noqa: E402
from benchmarks.trl_grpo import trl_trainer  # noqa: E402
from utils.errors import PositiveInt  # noqa: E402
from utils.evaluation import evaluate  # noqa: E402
from utils.lm import compare, sample_all  # noqa: E402
from utils.machine import environment  # noqa: E402
from utils.models import TINY_MODEL, eos_ids, load_model  # noqa: E402
from utils.tasks import load_task  # noqa: E402
from utils.text import encode_prompt  # noqa: E402

RESULTS, PICTURE = ROOT / "benchmarks/results/grpo_family.jsonl", ROOT / "benchmarks/curves/grpo_family.png"
SEEDS, ANSWERS, BLOCK = 4, 4, 10  # answers to each prompt for entropy and KL; steps whose rewards are drawn as one
RULES = {  # name: script and settings; TRL's has none
    "GRPO": ("grpo", {}),
    "TRL's GRPO": None,
    "Dr. GRPO": ("grpo", dict(scale_rewards="none", aggregation="constant")),
    "DAPO": ("dapo", {}),
    "GSPO": ("gspo", dict(num_minibatches=1)),
    "CISPO": ("cispo", dict(num_minibatches=1)),
    "RLOO": ("rloo", dict(beta=0.0)),
    "REINFORCE++": ("reinforce_pp", dict(beta=0.0)),
    "W-REINFORCE": ("nsr", {}),
}
COMMON = dict(task="countdown", max_steps=100, num_prompts=64, num_generations=8, learning_rate=1e-4, eval_every=10,
              eval_prompts=128, eval_samples=8, max_completion_length=20)  # fmt: skip
PANELS = {"reward": "reward in training", "eval/greedy": "greedy answer right", "eval/pass@1": "pass@1",
          "eval/pass@8": "pass@8", "eval/distinct": "different right answers of 8",
          "eval/kl": "KL to the start, nats per token", "eval/entropy": "entropy, nats per token"}  # fmt: skip


def at_tokens(ids, *logits) -> list:
    """Entropy of the first model and its divergence from the second. (N,), (N, V), (N, V) -> (N,), (N,)."""
    logps, start_logps = (x.float().log_softmax(-1) for x in logits)
    return [-(logps.exp() * logps).sum(-1), kl(logps, start_logps)]


@torch.no_grad()
def measured(start, model, tokenizer, task, score, num_prompts: int, num_samples: int, length: int, temperature: float,
             seed: int, **more) -> dict[str, float]:  # fmt: skip
    """What utils.evaluation.evaluate returns, with eval/entropy and eval/kl."""
    result = evaluate(model, tokenizer, task, score, num_prompts, num_samples, length, temperature, seed, **more)
    prompts = [encode_prompt(row, tokenizer) for row in task.heldout[:num_prompts]]
    samples = sample_all(model, prompts, ANSWERS, length, eos_ids(model, tokenizer), temperature, 512, (seed, "kl"))
    inputs = samples.prompt_ids, samples.prompt_mask, samples.completion_ids, samples.completion_mask
    entropy, divergence = (x.sum().item() for x in compare(at_tokens, (model, start), *inputs))
    tokens = samples.completion_mask.sum().item()
    return result | {"eval/entropy": entropy / tokens, "eval/kl": divergence / tokens}


def train(rule: str, seed: int, **changes) -> dict[str, list[float]]:
    """One run: the column `reward` of all steps, and the others of PANELS at each evaluation."""
    start, settings = load_model(TINY_MODEL)[0].eval(), COMMON | {"seed": seed} | changes
    if RULES[rule] is None:
        return train_trl(partial(measured, start), settings)
    script, own = RULES[rule]
    module = importlib.import_module(f"algos.{script}")
    with quiet_folder() as folder, mock.patch.object(module, "evaluate", partial(measured, start)):
        args = module.Args(**settings | own, output_dir=folder, save_every=10**6, threads=torch.get_num_threads())
        history = module.train(args)
    return {name: [row[name] for row in history if name in row] for name in PANELS}


def train_trl(evaluation: Callable, settings: dict) -> dict[str, list[float]]:
    from transformers import TrainerCallback

    task, rewards, told = load_task(settings["task"]), [], []
    prompts, group, steps, seed = (settings[k] for k in ("num_prompts", "num_generations", "max_steps", "seed"))
    rows = [task.train(i, seed) for i in range(prompts * steps)]
    model, tokenizer = load_model(TINY_MODEL)  # its own: TRL patches the forward pass of the model that it trains

    class Evaluation(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % settings["eval_every"] == 0 or state.global_step == steps:
                model.load_state_dict(kwargs["model"].state_dict())
                self.evaluate()

        def evaluate(self):
            how = (settings[k] for k in ("eval_prompts", "eval_samples", "max_completion_length"))
            told.append(evaluation(model, tokenizer, task, None, *how, 1.0, seed))

    def reward(prompts, completions, numbers, target, **_):
        given = (dict(numbers=n, target=t) for n, t in zip(numbers, target))
        scores = [task.score(row, text)["reward"] for row, text in zip(given, completions)]
        rewards.append(statistics.mean(scores))
        return scores

    with tempfile.TemporaryDirectory() as folder:
        how = dict(learning_rate=settings["learning_rate"], max_completion_length=settings["max_completion_length"])
        trainer = trl_trainer(rows, reward, prompts, group, folder, max_steps=steps, seed=seed, **how)
        trainer.add_callback(each := Evaluation())
        each.evaluate()
        trainer.train()
    return {"reward": rewards} | {name: [row[name] for row in told] for name in PANELS if name != "reward"}


def recorded() -> dict[tuple[str, int], dict[str, list[float]]]:
    rows = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else []
    return {(row["rule"], row["seed"]): row["columns"] for row in rows}


def run(of: PositiveInt = 1, part: int = 0) -> None:
    """Trains what is missing: all of it, or part 0, 1, .. of so many parts, each for a process of its own."""
    torch.set_num_threads(1)
    known = recorded()
    for rule, seed in [(rule, seed) for seed in range(1, SEEDS + 1) for rule in RULES][part::of]:
        if (rule, seed) not in known:
            start = time.perf_counter()
            columns = {name: [round(x, 5) for x in values] for name, values in train(rule, seed).items()}
            row = {"rule": rule, "seed": seed, "columns": columns, "seconds": round(time.perf_counter() - start, 1)}
            row |= {k: environment()[k] for k in ("versions", "commit", "machine")}
            with open(RESULTS, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(rule, seed, {name: values[-1] for name, values in columns.items()}, row["seconds"], flush=True)


def table() -> str:
    """Markdown: each rule's mean reward over all steps and its last evaluation, with Student's 95 % intervals."""
    known = recorded()
    lines = ["| | seeds | mean " + " | ".join(PANELS.values()) + " |", "|---|---" + "|---" * len(PANELS) + "|"]
    for rule in RULES:
        runs = [columns for (name, _), columns in known.items() if name == rule]
        ends = {name: [statistics.mean(r[name]) if name == "reward" else r[name][-1] for r in runs] for name in PANELS}
        cells = [f"{statistics.mean(x):.2f} +- {half_width(x):.2f}" if len(x) > 1 else "-" for x in ends.values()]
        lines.append(f"| {rule} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show() -> None:
    """Draws the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    known, every = recorded(), COMMON["eval_every"]
    figure, axes = plt.subplots(2, 4, figsize=(15, 6.5), constrained_layout=True)
    for axis, (name, title) in zip(axes.flat, PANELS.items()):
        for rule in RULES:
            runs = np.array([columns[name] for (one, _), columns in known.items() if one == rule])
            if not len(runs):
                continue
            middle = runs.mean(0)
            x = every * np.arange(len(middle))
            if name == "reward":
                middle = middle.reshape(-1, BLOCK).mean(1)
                x = BLOCK * (np.arange(len(middle)) + 0.5)
            black = rule in ("GRPO", "TRL's GRPO")
            axis.plot(x, middle, "-" if RULES[rule] else "--", color="black" if black else None, label=rule)
        axis.set_title(title)
        axis.set_xlabel("steps")
        axis.grid(alpha=0.3)
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(*axes.flat[0].get_legend_handles_labels(), loc="center", title="mean of the seeds")
    figure.savefig(PICTURE, dpi=90)
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "show": show})
