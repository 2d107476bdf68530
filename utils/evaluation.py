"""Evaluation on held-out prompts, and what is printed: samples before training, advice during it."""

import math
from collections.abc import Callable, Sequence

from utils.checkpoint import rng_state, set_rng_state
from utils.lm import Samples, sample_all
from utils.models import autocast, eos_ids
from utils.tasks import Task
from utils.text import encode_prompt, present


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n >= k samples of which `correct` are:
    1 - C(n - correct, k) / C(n, k) (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(model, tokenizer, task: Task, score: Callable | None, num_prompts: int, num_samples: int,
             max_new_tokens: int, temperature: float, seed: int, step: int = 0, rows_at_once: int = 512,
             precision: str = "float32") -> dict[str, float]:  # fmt: skip
    """Scores greedy answers and `num_samples` sampled ones for each of the first `num_prompts` held-out rows.

    Where the task scores itself: eval/greedy, eval/pass@1 and eval/pass@n, eval/distinct (different right texts among a
    prompt's n samples), and the task's further scores of greedy answers. Else `score` (as make_scorer returns it,
    called with the training step) gives eval/greedy and eval/sampled, mean rewards, NaN where none is known. Uses
    generators of its own and leaves the global ones as it found them.
    """
    rows, eos = task.heldout[:num_prompts], eos_ids(model, tokenizer)
    prompts = [present(row, tokenizer) for row in rows]
    tokens = [encode_prompt(row, tokenizer) for row in rows]
    before = rng_state()  # user code may draw from the global generators

    def scores(count: int, at: float) -> list[tuple[dict[str, float], str]]:
        """Of `count` answers to each prompt, with their texts."""
        with autocast(model.device, precision):
            samples = sample_all(model, tokens, count, max_new_tokens, eos, at, rows_at_once, (seed, "evaluation"))
        texts, token_lists = decode(samples, tokenizer)
        repeated = [row for row in rows for _ in range(count)]
        if task.score is not None:
            return [(task.score(row, text), text) for row, text in zip(repeated, texts)]
        shown = [prompt for prompt in prompts for _ in range(count)]
        rewards = score(repeated, shown, texts, token_lists, step).rewards.tolist()  # type: ignore[misc]
        return [({"reward": r}, text) for r, text in zip(rewards, texts)]

    try:
        greedy, sampled = [s for s, _ in scores(1, 0.0)], scores(num_samples, temperature)
    finally:
        set_rng_state(before)
    more = sorted({name for s in greedy for name in s} - {"reward"})
    result = {"eval/greedy": mean([s["reward"] for s in greedy])}
    result |= {f"eval/greedy_{name}": mean([s[name] for s in greedy if name in s]) for name in more}
    if task.score is None:
        return result | {"eval/sampled": mean([s["reward"] for s, _ in sampled])}
    groups = [sampled[i : i + num_samples] for i in range(0, len(sampled), num_samples)]
    right = [[text for s, text in group if s["reward"] == 1.0] for group in groups]
    for k in sorted({1, num_samples}):
        result[f"eval/pass@{k}"] = mean([pass_at_k(num_samples, len(texts), k) for texts in right])
    return result | {"eval/distinct": mean([len(set(texts)) for texts in right])}


def mean(values: list[float]) -> float:
    """The mean without NaN (skipped samples); NaN where nothing is left."""
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


def decode(samples, tokenizer) -> tuple[list[str], list[list[int]]]:
    """Texts without special tokens, and token lists up to and including EOS, of B completions."""
    lengths = samples.completion_mask.sum(1).tolist()
    token_lists = [ids[:n] for ids, n in zip(samples.completion_ids.tolist(), lengths)]
    return tokenizer.batch_decode(token_lists, skip_special_tokens=True), token_lists


def show(tokenizer, prompt_ids: list[int], token_lists: list[list[int]], rewards: Sequence[float] = (),
         extra: dict | None = None) -> str:  # fmt: skip
    """One rendered prompt and some completions with every special token visible: most silent failures are seen here."""
    lines = [f"prompt      {tokenizer.decode(prompt_ids)!r}"]
    for i, tokens in enumerate(token_lists):
        reward = f"  reward {rewards[i]:g}" if rewards else ""
        more = "".join(f"  {name}={values[i]!r}" for name, values in (extra or {}).items())
        lines.append(f"completion  {tokenizer.decode(tokens)!r}{reward}{more}")
    return "\n".join(lines)


def show_samples(tokenizer, samples: Samples, rewards: list[float], extra: dict) -> str:
    """`show` of the first prompt and its first two completions."""
    prompt = samples.prompt_ids[0][samples.prompt_mask[0]].tolist()
    token_lists = [ids[mask].tolist() for ids, mask in zip(samples.completion_ids[:2], samples.completion_mask[:2])]
    return show(tokenizer, prompt, token_lists, rewards, extra)


def advice(history: list[dict]) -> str | None:
    """One line with cause and remedy where the newest step shows that little can be learnt; each is said once in a run.

    Reads the columns truncated, where there are groups frac_zero_std, and where any reward was known reward.
    """
    checks: dict[str, Callable[[list[dict]], bool]] = {
        "nearly all groups have equal rewards, so there is little to learn from: use easier or harder prompts, more "
        "--num-generations, a higher --temperature, or algos/dapo.py": lambda h: h[-1].get("frac_zero_std", 0) > 0.9,
        "nearly all completions are cut off before they end: raise --max-completion-length, or check that the prompt "
        "shown above makes the model stop": lambda h: h[-1]["truncated"] > 0.9,
        "the reward has not changed for five steps: check that the reward function reads the right columns and that "
        "answers can earn different rewards": lambda h: len(h) == 5 and len({row.get("reward") for row in h}) == 1,
    }
    steps = [row for row in history if "truncated" in row]
    for line, holds in checks.items():
        if holds(steps[-5:]) and not any(holds(steps[max(0, end - 5) : end]) for end in range(1, len(steps))):
            return line
    return None
