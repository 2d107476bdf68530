"""Rewards: the task's own score, the user's functions, called as TRL's trainers call them, and reward models."""

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from utils.core import UserError, rng_state, set_rng_state
from utils.data import Task, encode_prompt, present
from utils.dist import Samples, gathered, mean, share
from utils.lm import sample_all


def load_function(spec: str) -> Callable:
    """FILE.py:NAME or PACKAGE.MODULE:NAME."""
    source, _, name = spec.rpartition(":")
    try:
        if source.endswith(".py"):
            found = importlib.util.spec_from_file_location(f"users_{Path(source).stem}", source)
            module = sys.modules[found.name] = importlib.util.module_from_spec(found)
            sys.path.append(str(Path(source).resolve().parent))
            found.loader.exec_module(module)
        else:
            sys.path.append(os.getcwd())
            module = importlib.import_module(source)
        return getattr(module, name)
    except (ValueError, FileNotFoundError, ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"cannot load {spec} ({error}): give FILE.py:NAME or PACKAGE.MODULE:NAME") from error


class RewardModel:
    """A sequence classifier with one label, called as a reward function."""

    def __init__(self, path: str, device: torch.device):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.__name__, self.tokenizer = Path(path).name, AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).to(device).eval()

    @torch.no_grad()
    def __call__(self, prompts: list, completions: list, **_) -> list[float]:
        scores = []
        for prompt, completion in zip(prompts, completions):
            if isinstance(prompt, str):
                ids = self.tokenizer(prompt + completion + self.tokenizer.eos_token, return_tensors="pt")["input_ids"]
            else:
                ids = self.tokenizer.apply_chat_template(prompt + completion, return_tensors="pt", return_dict=False)
            scores.append(self.model(ids.to(self.model.device)).logits[0, 0].item())
        return scores


def make_scorer(task: Task, args, tokenizer, device) -> Callable:
    """Returns score(rows, texts, completion_ids, step) -> rewards (B,), NaN where every function returned None (the
    sample is skipped), and columns to log. Without specs the task's own score is the reward, with them it is logged."""
    specs, weights = args.reward, args.reward_weights
    if not specs and task.score is None:
        raise UserError(f"the task {task.name} cannot score answers itself: give --reward FILE.py:FUNCTION")
    functions = [load_function(spec) if ":" in spec else RewardModel(spec, device) for spec in specs]
    weight = torch.tensor(weights or [1.0] * len(specs))

    def score(rows: list[dict], texts: list[str], completion_ids: list, step: int) -> tuple[torch.Tensor, dict]:
        own = torch.tensor([task.score(row, text) for row, text in zip(rows, texts)]) if task.score else None
        if not specs:
            return own, {}
        prompts = [present(row, tokenizer) for row in rows]
        chat = not isinstance(prompts[0], str)
        completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        more = {key: [row[key] for row in rows] for key in rows[0] if key not in ("prompt", "completion")}
        table = torch.tensor(
            [
                [
                    math.nan if x is None else float(x)
                    for x in function(prompts=prompts, completions=completions, completion_ids=completion_ids, **more)
                ]
                for function in functions
            ]
        )
        columns = {f"reward/{f.__name__}": row.nanmean().item() for f, row in zip(functions, table)}
        total = (table.T * weight).nansum(1).masked_fill(table.isnan().all(0), math.nan)
        return total, columns | ({"reward/task": own.mean().item()} if own is not None else {})

    return score


def decode(samples: Samples, tokenizer) -> tuple[list[str], list[list[int]]]:
    """Texts without special tokens, and token lists up to and including EOS, of B completions."""
    tokens = [ids[mask].tolist() for ids, mask in zip(samples.completion_ids, samples.completion_mask)]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True), tokens


def shown(samples: Samples, tokenizer, rewards: list[float], count: int = 2) -> str:
    """The first completions with every special token visible: most silent failures are seen here."""
    lines = [f"prompt      {tokenizer.decode(samples.prompt_ids[0][samples.prompt_mask[0]])!r}"]
    for ids, mask, reward in list(zip(samples.completion_ids, samples.completion_mask, rewards))[:count]:
        lines.append(f"completion  {tokenizer.decode(ids[mask])!r}  reward {reward:g}")
    return "\n".join(lines)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(model, tokenizer, task: Task, score: Callable | None, args, step: int = 0) -> dict[str, float]:
    """Held-out prompts: eval/greedy, and of --eval-samples sampled answers eval/pass@1 and eval/pass@n, where an answer
    is right with reward 1; where rewards are other numbers, eval/greedy and eval/sampled are mean rewards. The task's
    own score judges; where it has none, `score`."""
    heldout, n = task.heldout[: args.eval_prompts], args.eval_samples
    own = share(heldout)
    rows = own or heldout[:1]  # who has none answers one that does not count
    prompts = [encode_prompt(row, tokenizer) for row in rows]

    def rewards(count: int, temperature: float) -> list[list[float]]:
        texts, ids = decode(sample_all(model, prompts, count, args, temperature, "evaluation"), tokenizer)
        repeated = [row for row in rows for _ in range(count)]
        if task.score is not None:
            found = [task.score(row, text) for row, text in zip(repeated, texts)]
        else:
            found = score(repeated, texts, ids, step)[0].tolist()  # type: ignore[misc]
        return gathered([found[i : i + count] for i in range(0, len(found), count)][: len(own)])

    before = rng_state()  # user code may draw from the global generators
    greedy, sampled = rewards(1, 0.0), rewards(n, getattr(args, "temperature", 1.0))
    set_rng_state(before)
    columns = {"eval/greedy": mean(sum(greedy, []))}
    if {reward for group in sampled for reward in group} <= {0.0, 1.0}:
        return columns | {f"eval/pass@{k}": mean([pass_at_k(n, int(sum(g)), k) for g in sampled]) for k in {1, n}}
    return columns | {"eval/sampled": mean(sum(sampled, []))}
