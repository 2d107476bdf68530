"""Rewards: the task's own score, functions of the user's, called as TRL's trainers call them, and reward models."""

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from utils.distributed import rank, together, world
from utils.errors import UserError
from utils.imports import users_imports
from utils.reward_models import RewardModel, model_and_aggregation
from utils.tasks import Task


class Scored(NamedTuple):
    rewards: torch.Tensor  # (B,) float32; NaN where every function returned None: the sample is skipped
    columns: dict[str, float]  # means to log
    extra: dict[str, list]  # columns that reward functions attached to the samples by log_extra


def load_function(spec: str, loaded: dict[Path, ModuleType], flag: str = "--reward") -> Callable:
    """`file.py:name` or `package.module:name`; a file that is in `loaded` is not run again, so its functions share what
    it holds. flag: which one named it. Raises UserError where there is no such file or function."""
    source, _, name = spec.rpartition(":")
    if not source:
        right = "write FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION, or a reward model's folder or hub name"
        raise UserError(f"--reward {spec} names no function: {right}")
    if source.endswith(".py"):
        path = Path(source).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"{flag} {spec}: there is no file {path}")
        if path not in loaded:
            module_spec: Any = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
            loaded[path] = importlib.util.module_from_spec(module_spec)
            sys.modules[module_spec.name] = loaded[path]  # dataclasses look their module up there
            with users_imports(path.parent):
                module_spec.loader.exec_module(loaded[path])
        module = loaded[path]
    else:
        try:
            with users_imports(Path.cwd()):
                module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise UserError(f"{flag} {spec}: there is no module {source} ({error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{flag} {spec}: {source} has no function {name}")
    return function


async def awaited(values: list) -> list:
    """The values; in place of those that are awaitable what they give, all awaited at the same time."""

    async def result(value):
        return await value if inspect.isawaitable(value) else value

    return await asyncio.gather(*map(result, values))


def own_groups(rows: list[dict]) -> slice:
    """The rows that are this rank's to score: those of whole prompts, which stand together, as the same object."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row is not rows[i - 1]]
    first, last = (len(starts) * k // world() for k in (rank(), rank() + 1))
    return slice((starts + [len(rows)])[first], (starts + [len(rows)])[last])


def lowered(scored: Scored, ended: torch.Tensor, penalty: float) -> Scored:
    """The rewards less `penalty` where a completion was cut off (`ended` False), as TRL's missing_eos_penalty."""
    return scored._replace(rewards=scored.rewards - penalty * ~ended.cpu())


def make_scorer(task: Task, specs: tuple[str, ...], weights: tuple[float, ...], max_steps: int,
                device: torch.device | str = "cpu", trust_remote_code: bool = False) -> Callable:  # fmt: skip
    """Returns score(rows, prompts, texts, completion_ids, step) -> Scored for B completions (all lists of length B).

    Without specs the task's own score is the reward; with them it is logged beside it, as reward/task, where the task
    has one. Of many processes each scores the completions of its share of the prompts. Reward models run on `device`;
    they get the text of an answer with an EOS, whether it was cut off or not.
    Raises UserError where there is neither, or weights do not fit; later, where a function returns the wrong number of
    rewards, NaN or infinity.
    """
    if weights and len(weights) != len(specs):
        raise UserError(f"--reward-weights has {len(weights)} numbers for {len(specs)} functions: give one for each")
    if not specs and task.score is None:
        raise UserError(f"the task {task.name} cannot score answers itself: give --reward FILE.py:FUNCTION")
    loaded = {}
    functions = [
        RewardModel(*named, spec, device, trust_remote_code) if named else load_function(spec, loaded)
        for spec, named in zip(specs, map(model_and_aggregation, specs))
    ]
    names = [getattr(f, "__name__", spec.rpartition(":")[2]) for f, spec in zip(functions, specs)]
    names = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
    weight = torch.tensor(weights or [1.0] * len(specs))

    def score_by_task(rows, prompts, texts, completion_ids, step) -> Scored:
        scores = [task.score(row, text) for row, text in zip(rows, texts)]  # type: ignore[misc]
        columns = {f"reward/{k}": sum(s[k] for s in scores) / len(scores) for k in scores[0] if k != "reward"}
        return Scored(torch.tensor([s["reward"] for s in scores]), columns, {})

    def ask(rows, prompts, texts, completion_ids, step) -> tuple[torch.Tensor, dict, dict]:
        """What the functions say of some completions: rewards (B, functions), metrics, columns."""
        extra, logged = {}, {}
        if not rows:
            return torch.empty(0, len(functions)), logged, extra
        chat = not isinstance(prompts[0], str)
        completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
        keys = [key for key in rows[0] if key not in ("prompt", "completion", "completion_ids")]
        keywords = {key: [row.get(key) for row in rows] for key in keys} | {
            "trainer_state": SimpleNamespace(global_step=step, max_steps=max_steps),
            "log_extra": lambda column, values: extra.__setitem__(column, list(values)),
            "log_metric": lambda name, value: logged.setdefault(name, []).append(float(value)),
        }
        keywords |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        returned = [f(rows, texts) if isinstance(f, RewardModel) else f(**keywords) for f in functions]
        if any(map(inspect.isawaitable, returned)):
            returned = asyncio.run(awaited(returned))
        for column, values in extra.items():
            if len(values) != len(texts):
                raise UserError(f"log_extra got {len(values)} values for {column!r} and {len(texts)} completions: give "
                                "one for each")  # fmt: skip
        table = torch.full((len(texts), len(functions)), torch.nan)
        for j, (name, answer) in enumerate(zip(names, returned)):
            wrong = f"the reward function {name} returned"
            try:
                if isinstance(answer, (str, bytes, dict, set)):
                    raise TypeError
                values = [None if value is None else float(value) for value in answer]
            except (TypeError, ValueError) as error:
                raise UserError(f"{wrong} {answer!r:.100}: it must return a list of numbers, or None to skip one, one "
                                "for each completion") from error  # fmt: skip
            if len(values) != len(texts):
                counts = f"{len(values)} rewards for {len(texts)} completions"
                raise UserError(f"{wrong} {counts}: it must return one number, or None, for each")
            for text, value in zip(texts, values):
                if value is not None and not abs(value) <= torch.finfo(torch.float32).max:  # also refuses NaN
                    raise UserError(f"{wrong} {value} for {text!r}: return None to skip")
            table[:, j] = torch.tensor([math.nan if value is None else value for value in values])
        return table, logged, extra

    def score_by_functions(rows, prompts, texts, completion_ids, step) -> Scored:
        mine = own_groups(rows)
        parts = together(lambda: ask(rows[mine], prompts[mine], texts[mine], completion_ids[mine], step))
        table, columns, logged, extra = torch.cat([some for some, _, _ in parts]), {}, {}, {}
        for _, metrics, attached in parts:
            for name, values in metrics.items():
                logged.setdefault(name, []).extend(values)
            for name in attached:  # perhaps to the completions of some processes only
                extra[name] = [x for some, _, own in parts for x in own.get(name, [None] * len(some))]
        if task.score is not None:
            columns["reward/task"] = sum(task.score(row, text)["reward"] for row, text in zip(rows, texts)) / len(texts)
        columns |= {f"reward/{name}": table[:, j].nanmean().item() for j, name in enumerate(names)}
        columns = {key: value for key, value in columns.items() if not math.isnan(value)}
        columns |= {f"reward/{name}": sum(values) / len(values) for name, values in logged.items()}
        total = (table * weight).nansum(1)
        if not total.isfinite().all():  # of numbers that are finite in Python, but not in float32
            raise UserError("a weighted sum of rewards is beyond 3e38, the largest number in float32: scale them down")
        total[table.isnan().all(1)] = torch.nan
        return Scored(total, columns, extra)

    return score_by_functions if specs else score_by_task
