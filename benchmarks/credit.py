"""Credit: how well VinePPO's advantages, a critic's and GRPO's tell which step of a completion was good.

    python benchmarks/credit.py        writes results/credit.json

The policy is what grpo.py makes of the embedded model in some steps, and stays as it is. It answers prompts of
countdown, the answers are cut into steps, and the true advantage of a step is V behind it minus V before it, each V
being the mean reward of many continuations (R behind the last step). Compared with it:

    vineppo K        the same with K continuations of its own
    grpo             the advantage of grpo.py, one for all steps of a completion
    critic           V of the critic of ppo_lm.py, trained on this policy's own answers, in place of continuations
    critic, GAE      the advantages that ppo_lm.py makes of this critic, mean over the tokens of a step
    shuffled K       the control: values of K continuations that belong to other states

For each: the correlation with the truth over all steps, and with each completion's last one left out, its variance and
its squared error (GRPO's has another unit). R is a part of the truth of a last step and of all estimates of it, so the
control's correlation is 0 elsewhere alone. Several seeds of prompts give Student's 95 % interval.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn.functional import pad

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import grpo, ppo_lm, vineppo  # noqa: E402
from benchmarks.effects import half_width  # noqa: E402
from utils.errors import PositiveInt  # noqa: E402
from utils.evaluation import evaluate  # noqa: E402
from utils.lm import stream  # noqa: E402
from utils.machine import environment  # noqa: E402
from utils.models import load_policy, resolve_for, without_dropout  # noqa: E402
from utils.rewards import make_scorer  # noqa: E402
from utils.tasks import load_task  # noqa: E402

CPU = torch.device("cpu")


@dataclass
class Settings:
    seeds: int = 3
    """seeds 1 to this: of the prompts, and of all that is drawn"""
    policy_steps: PositiveInt = 20
    """steps of grpo.py that made the policy"""
    num_prompts: int = 16
    """prompts of a seed"""
    num_generations: int = 8
    """answers to each"""
    num_continuations: tuple[int, ...] = (3, 9)
    """K"""
    truth: int = 256
    """continuations of a state behind its true value"""
    critic_steps: int = 20
    """batches of 512 answers that the critic learns from, none of which is compared"""
    threads: int = 1
    """CPU threads"""
    out: str = str(Path(__file__).resolve().parent / "results/credit.json")


def quiet(train, args) -> Path:
    """The folder of the model that a run leaves, made without its prints."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train(args)
    return next(Path(args.output_dir).glob("*/model"))


def trained_critic(model, tokenizer, task, score, settings: Settings) -> tuple[ppo_lm.Critic, float]:
    """A critic of the policy, by the update of ppo_lm.py, whose optimizer does not have the policy's weights here; and
    how much of its last batch's variance it explains."""
    args = ppo_lm.Args(device="cpu", beta=0.0, seed=1000)
    resolve_for(model, args, ppo_lm.PRESETS)
    critic = ppo_lm.Critic(model, shared=False)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=args.critic_learning_rate, weight_decay=0.0)
    for step in range(1, settings.critic_steps + 1):
        samples, scored = ppo_lm.collect(model, tokenizer, task, score, step, args)
        batch = ppo_lm.Batch(samples, scored.rewards, None, samples.logps)
        batch = batch._replace(values=ppo_lm.old_values(model, critic, batch, args))
        columns = ppo_lm.update(model, critic, optimizer, batch, stream(CPU, "minibatches", step), args)
    return critic, columns["explained_variance"]


def one_seed(model, tokenizer, task, score, critic, seed: int, settings: Settings) -> dict[str, dict[str, float]]:
    """Estimate -> how it relates to the true advantages of the steps, of the answers to one seed's prompts."""
    args = vineppo.Args(device="cpu", seed=seed, num_prompts=settings.num_prompts,
                        num_generations=settings.num_generations)  # fmt: skip
    resolve_for(model, args, vineppo.PRESETS)
    rows = [task.train(i, seed) for i in range(settings.num_prompts)]
    fixed, draw = replace(task, train=lambda i, _: rows[i % len(rows)]), count(2)
    samples, scored = vineppo.collect(model, tokenizer, fixed, score, 1, args)
    rewards, mask = scored.rewards, samples.completion_mask
    ends = vineppo.step_ends(samples.completion_ids, mask, torch.tensor(vineppo.separator_ids(tokenizer, args)))
    begins, number = pad(ends[:, :-1], (1, 0), value=True) & mask, ends.cumsum(1) - ends.long()

    def values(continuations: int) -> Tensor:
        """V before each step, (B, S), by continuations that no other call has drawn."""
        args.num_continuations = continuations
        return vineppo.state_values(model, tokenizer, fixed, score, samples, ends, next(draw), args)[0]

    def by_token(of_states: Tensor) -> Tensor:
        return vineppo.advantages(rewards, of_states, ends)

    true = values(settings.truth)
    estimates = {f"vineppo {k}": by_token(values(k)) for k in settings.num_continuations}
    groups = rewards.view(-1, settings.num_generations)
    estimates["grpo"] = grpo.advantages(groups, "group").view(-1, 1).expand(mask.shape)
    with torch.no_grad():
        of_tokens = critic(*samples[:4])
    sums = [
        torch.zeros_like(true).scatter_add(1, number, x * mask)
        for x in (begins * of_tokens, torch.ones_like(of_tokens))
    ]
    estimates["critic"] = by_token(sums[0])
    batch = ppo_lm.Batch(samples, rewards, None, of_tokens)
    gae = ppo_lm.gae(ppo_lm.token_rewards(batch, 0.0), of_tokens, mask, 1.0, ppo_lm.Args().gae_lambda)
    mean = torch.zeros_like(true).scatter_add(1, number, gae * mask) / sums[1].clamp(min=1)
    estimates["critic, GAE"] = mean.gather(1, number)
    others, known = values(max(settings.num_continuations)), sums[1] > 0
    others[known] = others[known][torch.randperm(int(known.sum()), generator=stream(CPU, seed))]
    estimates[f"shuffled {args.num_continuations}"] = by_token(others)

    truth, before_last = by_token(true)[begins], (number < ends.sum(1, keepdim=True))[begins]
    print(f"seed {seed}: {len(truth)} steps of {len(rewards)} answers, mean reward {rewards.mean():.3f}", flush=True)
    return {"truth": {"variance": truth.var().item()}} | {
        name: {
            "correlation": correlation(truth, estimate[begins]),
            "correlation, last steps left out": correlation(truth[before_last], estimate[begins][before_last]),
            "variance": estimate[begins].var().item(),
            "squared error": (estimate[begins] - truth).square().mean().item(),
        }
        for name, estimate in estimates.items()
    }


def correlation(one: Tensor, other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one, other]))[0, 1].item()


def interval(values: list[float]) -> str:
    """Mean and half of Student's 95 % interval."""
    return f"{statistics.mean(values):.3f} +- {half_width(values):.3f}"


def main(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    task, start = load_task("countdown"), time.perf_counter()
    score = make_scorer(task, (), (), 1)
    with tempfile.TemporaryDirectory() as folder:
        args = grpo.Args(device="cpu", seed=1, threads=settings.threads, output_dir=folder)
        made = quiet(grpo.train, replace(args, max_steps=settings.policy_steps, eval_every=0))
        model, tokenizer = load_policy(replace(args, model=str(made)), CPU)
    resolve_for(model, args, grpo.PRESETS)
    without_dropout(model)
    accuracy = evaluate(model, tokenizer, task, score, 128, 8, args.max_completion_length, 1.0, 1)
    print(f"policy: {accuracy}")
    critic, explained = trained_critic(model, tokenizer, task, score, settings)
    print(f"critic: explained variance {explained:.2f} of the returns of its last batch", flush=True)
    found = [one_seed(model, tokenizer, task, score, critic, seed, settings) for seed in range(1, settings.seeds + 1)]
    summary = {name: {key: interval([one[name][key] for one in found]) for key in found[0][name]} for name in found[0]}
    for name, numbers in summary.items():
        print(f"{name:12} {numbers}")
    record = {"settings": {name: value for name, value in vars(settings).items() if name != "out"}}
    record |= {"policy": accuracy, "explained variance of the critic": explained, "summary": summary, "seeds": found}
    record |= {"seconds": time.perf_counter() - start, **environment()}
    rounded = json.loads(json.dumps(record), parse_float=lambda number: round(float(number), 5))
    Path(settings.out).write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
