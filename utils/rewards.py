"""Rewards: the task's own score, the user's functions, called as TRL's trainers call them, and reward models. And
evaluation on held-out prompts."""

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from utils.core import UserError, find_users_code, rng_state, set_rng_state
from utils.data import Task, encode_prompt, present, shared, until_eos
from utils.dist import Samples, gathered, mean, share
from utils.lm import UNREADABLE, check_whole, sample_all

SCORED_AT_ONCE = 64  # sequences in one forward pass of a reward model


@cache
def run_file(path: Path) -> ModuleType:
    """The file as a module. It is run once, so its functions share what it holds."""
    spec: Any = importlib.util.spec_from_file_location(f"users_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    find_users_code(path.parent)
    spec.loader.exec_module(module)
    return module


def load_function(spec: str) -> Callable:
    """FILE.py:NAME or PACKAGE.MODULE:NAME."""
    source, _, name = spec.rpartition(":")
    try:
        if source.endswith(".py"):
            return getattr(run_file(Path(source).expanduser().resolve(strict=True)), name)
        find_users_code(Path.cwd())
        return getattr(importlib.import_module(source), name)
    except (ValueError, FileNotFoundError, ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"cannot load {spec} ({error}): give FILE.py:NAME or PACKAGE.MODULE:NAME") from error


def set_padding(model, tokenizer) -> None:
    """Pads on the right with a token that the tokenizer and the configuration agree on. Decoders are pooled at the last
    token whose id is not that of padding: where it was EOS, the score would be read one token earlier. GPT-2, which has
    no special token but EOS, pads with it."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS, which ends an answer that is scored: give a model with one")
    config = model.config.get_text_config()
    special = sorted((i for i, token in tokenizer.added_tokens_decoder.items() if token.special), reverse=True)
    ids = [config.pad_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, *special]
    config.pad_token_id = next((i for i in ids if i not in (None, tokenizer.eos_token_id)), tokenizer.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.padding_side = "right"


def encode_scored(row: dict, answer: str | list[dict], tokenizer) -> list[int]:
    """Token ids of the row's prompt and an answer to it. Chat messages: all that the template makes of them. Text: up
    to the answer's first EOS, which is added where there is none: one that a length limit cut off ends there."""
    ids = encode_prompt(row, tokenizer, answer)
    if not isinstance(present(row, tokenizer), str):
        return ids
    start = shared(encode_prompt(row, tokenizer), ids)
    return ids[:start] + until_eos(ids[start:], tokenizer, [tokenizer.eos_token_id])


def sequence_scores(model, sequences: list[list[int]]) -> Tensor:
    """Scores (B,) of B token lists, padded on the right: the model's own forward pass, so its own pooling."""
    width, pad = max(map(len, sequences)), model.config.get_text_config().pad_token_id
    ids = torch.tensor([s + [pad] * (width - len(s)) for s in sequences], device=model.device)
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=model.device)
    scores = model(input_ids=ids, attention_mask=mask).logits[:, 0]
    return scores if scores.dtype == torch.float64 else scores.float()


class RewardModel:
    """A sequence classifier with one label. It sees rows as its own tokenizer and chat template show them."""

    def __init__(self, path: str, device: torch.device | str, trust_remote_code: bool = False):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        path = str(Path(path).expanduser())
        self.__name__, wrong = Path(path).name, f"cannot load the reward model {path}"
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
            self.model, found = AutoModelForSequenceClassification.from_pretrained(
                path, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True)  # fmt: skip
        except UNREADABLE as error:
            raise UserError(f"{wrong} ({str(error).partition(chr(10))[0]})") from error
        if found["missing_keys"] or self.model.config.num_labels != 1:  # a missing head would be drawn at random
            raise UserError(f"{wrong}: it must be a sequence classifier with one label, as reward_model.py trains it")
        check_whole(path, self.model, found)
        set_padding(self.model.to(device).eval(), self.tokenizer)
        self.model.config.get_text_config().use_cache = False  # keys and values would outweigh the model

    @torch.no_grad()
    def __call__(self, rows: list[dict], texts: list[str]) -> list[float]:
        ids = [encode_scored(row, text, self.tokenizer) for row, text in zip(rows, texts)]
        parts = [ids[i : i + SCORED_AT_ONCE] for i in range(0, len(ids), SCORED_AT_ONCE)]
        return torch.cat([sequence_scores(self.model, part) for part in parts]).tolist()


def called(name: str, function: Callable, keywords: dict) -> Any:
    """What the function returns. Raises UserError where it does not take these keywords."""
    try:
        inspect.signature(function).bind(**keywords)
    except TypeError as error:
        right = f"let it end with **kwargs and take any of {', '.join(keywords)}"
        raise UserError(f"the reward function {name} does not take what it is given ({error}): {right}") from error
    return function(**keywords)


def checked(name: str, answer: Any, count: int) -> list[float]:
    """What a function returned as numbers, None as NaN."""
    try:
        values = [] if isinstance(answer, (str, dict, set)) else [x if x is None else float(x) for x in answer]
    except (TypeError, ValueError):
        values = []
    if len(values) != count or any(x is not None and not abs(x) <= torch.finfo(torch.float32).max for x in values):
        raise UserError(f"the reward function {name} returned {answer!r:.200}: it must return a list of {count} finite "
                        "numbers, one for each completion, or None to skip one")  # fmt: skip
    return [math.nan if x is None else x for x in values]


async def awaited(values: list) -> list:
    """The values; in place of those that are awaitable what they give, all awaited at the same time."""

    async def result(value):
        return await value if inspect.isawaitable(value) else value

    return await asyncio.gather(*map(result, values))


def make_scorer(task: Task, args, tokenizer, device) -> Any:
    """Returns score(rows, texts, completion_ids, step) -> rewards (B,), NaN where every function returned None (the
    sample is skipped), and columns to log; score.each: of its last call what each function gave each sample, and what
    they gave to log_extra. Without --reward the task's own score is the reward, with it it is logged.
    Rewards are added up by their weights; --combine min or mean-std puts one number in place of the reward models' raw
    scores first: their least, or mean minus population deviation (arXiv 2310.02743)."""
    specs, weights = args.reward, torch.tensor(args.reward_weights or [1.0] * len(args.reward))
    if len(weights) != len(specs):
        raise UserError(f"--reward-weights has {len(weights)} numbers for {len(specs)} rewards: give one for each")
    if not specs and task.score is None:
        raise UserError(f"the task {task.name} cannot score answers itself: give --reward FILE.py:FUNCTION")
    models = [j for j, x in enumerate(specs) if Path(x).expanduser().is_dir() or (":" not in x and "/" in x)]
    functions = [RewardModel(spec, device, args.trust_remote_code) if j in models else load_function(spec)
                 for j, spec in enumerate(specs)]  # fmt: skip
    names = [getattr(f, "__name__", spec.rpartition(":")[2]) for f, spec in zip(functions, specs)]
    names = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]

    def score(rows: list[dict], texts: list[str], completion_ids: list, step: int) -> tuple[Tensor, dict[str, float]]:
        own = torch.tensor([task.score(row, text) for row, text in zip(rows, texts)]) if task.score else None
        if not specs:
            return own, {}  # type: ignore[return-value]
        prompts, logged, each = [present(row, tokenizer) for row in rows], {}, {}
        chat = not isinstance(prompts[0], str)
        keywords = {name: [row.get(name) for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
        keywords |= {
            "prompts": prompts,  # type: ignore[dict-item]
            "completions": [[{"role": "assistant", "content": text}] if chat else text for text in texts],
            "completion_ids": completion_ids,
            "trainer_state": SimpleNamespace(global_step=step, max_steps=args.max_steps),  # type: ignore[dict-item]
            "log_metric": lambda name, value: logged.setdefault(name, []).append(float(value)),  # type: ignore[dict-item]
            "log_extra": lambda name, values: each.update({name: list(values)}),  # type: ignore[dict-item]
        }
        returned = [f(rows, texts) if isinstance(f, RewardModel) else called(name, f, keywords)
                    for name, f in zip(names, functions)]  # fmt: skip
        if any(map(inspect.isawaitable, returned)):
            returned = asyncio.run(awaited(returned))
        if wrong := [f"{len(values)} values of {name!r}" for name, values in each.items() if len(values) != len(rows)]:
            raise UserError(f"log_extra got {wrong[0]}: give {len(rows)}, one for each completion")
        table = torch.tensor([checked(name, answer, len(rows)) for name, answer in zip(names, returned)]).T
        each |= {f"reward/{name}": values for name, values in zip(names, table.T.tolist())}
        score.each = each  # type: ignore[attr-defined]
        columns = {f"reward/{name}": mean(values) for name, values in (*zip(names, table.T.tolist()), *logged.items())}
        columns |= {} if own is None else {"reward/task": own.mean().item()}
        weighted = table * weights
        if models and args.combine != "sum":
            raw = table[:, models]
            one = raw.amin(1) if args.combine == "min" else raw.mean(1) - raw.std(1, correction=0)
            weighted[:, models] = 0.0
            weighted[:, models[0]] = one
        total = weighted.nansum(1).masked_fill(table.isnan().all(1), math.nan)
        if total.isnan().all():
            print(f"step {step}: every reward of {len(rows)} answers is None, so they are skipped: nothing is learned")
        return total, {name: value for name, value in columns.items() if not math.isnan(value)}

    score.each = {}  # type: ignore[attr-defined]
    return score


def decode(samples: Samples, tokenizer) -> tuple[list[str], list[list[int]]]:
    """Texts without special tokens, and token lists up to and including EOS, of B completions."""
    tokens = [ids[mask].tolist() for ids, mask in zip(samples.completion_ids, samples.completion_mask)]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True), tokens


def shown(samples: Samples, tokenizer, rewards: list[float], count: int = 2) -> str:
    """The first completions with every special token visible: most silent failures are seen here."""
    first = zip(samples.prompt_ids[:1], samples.prompt_mask[:1])  # dapo.py leaves some processes none
    lines = [f"prompt      {tokenizer.decode(ids[mask])!r}" for ids, mask in first]
    for ids, mask, reward in list(zip(samples.completion_ids, samples.completion_mask, rewards))[:count]:
        lines.append(f"completion  {tokenizer.decode(ids[mask])!r}  reward {reward:g}")
    return "\n".join(lines)


def sample_rows(count: int, samples: Samples, tokenizer, columns: dict[str, Any]) -> list[dict]:
    """Rows for samples.jsonl: the completions of the first `count` prompts, with their values in each column (B,)."""
    prompts = [tokenizer.decode(ids[mask]) for ids, mask in zip(samples.prompt_ids[:count], samples.prompt_mask)]
    each = len(samples.completion_ids) // max(1, len(samples.prompt_ids))
    texts, _ = decode(Samples(*samples[:2], *(part[: each * len(prompts)] for part in samples[2:])), tokenizer)
    values = {name: column.tolist() if isinstance(column, Tensor) else column for name, column in columns.items()}
    return [{"prompt": prompts[i // each], "completion": texts[i]} | {name: x[i] for name, x in values.items()}
            for i in range(each * len(prompts))]  # fmt: skip


def told(rows: list[dict], answers: int = 4) -> str:
    """The answers to the first two of these prompts, at most 100 columns wide."""
    lines = []
    for prompt in list(dict.fromkeys(row["prompt"] for row in rows))[:2]:
        lines.append(f"{'score':>8}  held-out {prompt!r:.80}")
        given = [(row["score"], row["completion"]) for row in rows if row["prompt"] == prompt]
        lines += [f"{score:8.3g}    {text!r:.88}" for score, text in given[:answers]]
    return "\n".join(lines)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(model, tokenizer, task: Task, score: Callable | None, args, step: int = 0,
             keep: Callable | None = None) -> dict[str, float]:  # fmt: skip
    """Held-out prompts: eval/greedy, and of --eval-samples sampled answers eval/pass@1 and eval/pass@n, where an answer
    is right with reward 1, and eval/distinct, the number of different right texts for a prompt. Where rewards are other
    numbers, eval/greedy and eval/sampled are mean rewards. The task's own score judges; where it has none, `score`.
    keep: gets all answers as rows, and a text that shows some."""
    heldout, n = task.heldout[: args.eval_prompts], args.eval_samples
    own = share(heldout)
    rows = own or heldout[:1]  # who has none answers one that does not count
    prompts = [encode_prompt(row, tokenizer) for row in rows]

    def answered(count: int, temperature: float) -> list[list[tuple[float, str]]]:
        texts, ids = decode(sample_all(model, prompts, count, args, temperature, "evaluation"), tokenizer)
        repeated = [row for row in rows for _ in range(count)]
        if task.score is not None:
            found = [task.score(row, text) for row, text in zip(repeated, texts)]
        else:
            found = score(repeated, texts, ids, step)[0].tolist()  # type: ignore[misc]
        answers = list(zip(found, texts))
        return gathered([answers[i : i + count] for i in range(0, len(answers), count)][: len(own)])

    before = rng_state()  # user code may draw from the global generators
    greedy, sampled = answered(1, 0.0), answered(n, getattr(args, "temperature", 1.0))
    set_rng_state(before)
    if keep:
        asked = gathered([tokenizer.decode(ids) for ids in prompts[: len(own)]])
        said = [{"prompt": asks, "completion": text, "score": score, "greedy": part is greedy}
                for part in (greedy, sampled) for asks, some in zip(asked, part) for score, text in some]  # fmt: skip
        text, row = told([row for row in said if not row["greedy"]]), heldout[0]
        if step == 0 and "plain_prompt" in row and present(row, tokenizer) == row["prompt"]:
            text = f"{row['prompt']} means:\n  {row['plain_prompt'].partition('. ')[0]}\n{text}"
        keep(said, text)
    columns = {"eval/greedy": mean([group[0][0] for group in greedy])}
    if {reward for group in sampled for reward, _ in group} <= {0.0, 1.0}:
        right = [[text for reward, text in group if reward] for group in sampled]
        columns |= {f"eval/pass@{k}": mean([pass_at_k(n, len(texts), k) for texts in right]) for k in sorted({1, n})}
        return columns | {"eval/distinct": mean([len(set(texts)) for texts in right])}
    rewards = [reward for group in sampled for reward, _ in group]
    return columns | {"eval/sampled": mean(rewards)}
