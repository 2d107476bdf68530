"""Runs of a fraction of a second in this process, for tests that train a script with many settings: models, rewards and
data of their own, and counts of what a run does that its results do not show."""

import atexit
import copy
import dataclasses
import functools
import importlib
import json
import multiprocessing.process
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
import transformers
from every_script import options
from helpers import REPO
from safetensors.torch import load_file, save_file
from small_data import pendulum

from algos import iql
from utils import data

REWARDS = """
import random, numpy, torch
def graded(completions, **_):
    return [sum(map(ord, str(text))) % 7 / 7 for text in completions]
def sparse(completions, **_):
    return [float(sum(map(ord, str(text))) % 5 == 0) for text in completions]
def coins(completions, **_):
    return [float(random.random() + numpy.random.rand() + torch.rand(()).item() > 1.5) for _ in completions]
def noisy(completions, **_):
    return [random.random() + numpy.random.rand() + torch.rand(()).item() for _ in completions]
def jittered(samples, prompts):
    return noisy(samples)
"""
ENVIRONMENTS = """
import time
class Graded:
    def reset(self, row, seed):
        self.turns = 0
    def step(self, text):
        self.turns += 1
        return "+", sum(map(ord, text)) % 7 / 7, self.turns == 2
class Slow(Graded):
    def step(self, text):
        time.sleep(0.01)
        return super().step(text)
"""
TEMPLATE = (
    "{{ mark }}{% for m in messages %}{{ '=' if m.role == 'system' else 'C' if m.role == 'user' else 'S' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}S{% endif %}"
)
MODELS = {  # name -> architecture, seed of the weights, settings
    "model": ("Llama", 0, {}),
    "other": ("Llama", 1, {}),
    "chat": ("Llama", 0, {}),  # with a chat template
    "dropout": ("Llama", 0, {"attention_dropout": 0.5}),  # the weights of "model"
    # draws while it trains, so little that `alarm` lets it
    "jitter": ("Mixtral", 0, {"router_jitter_noise": 1e-4, "num_local_experts": 2}),
    "classifier": ("Llama", 0, {"num_labels": 1}),
    "other-classifier": ("Llama", 1, {"num_labels": 1}),
}
gym.register("Heavy-v0", "gymnasium.envs.classic_control:PendulumEnv", kwargs={"g": 20}, max_episode_steps=40)
gym.register("ALE/NoisyPong-v0", "tiny_runs:noisy_pong")


def noisy_pong(**kwargs) -> gym.Env:
    """Pong whose rewards come from NumPy's global generator."""
    import ale_py

    class NoisyPong(ale_py.AtariEnv):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, 2 * np.random.normal(), *rest

    return NoisyPong(game="pong", **kwargs)


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@functools.cache
def world() -> Path:
    """The folder of what settings name with @: models, rewards, datasets."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(REPO / "utils" / "tiny_model")
    for name, (kind, seed, more) in MODELS.items():
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=1, pad_token_id=0, initializer_range=0.2, **more,
        )  # fmt: skip
        torch.manual_seed(seed)
        head = "SequenceClassification" if "classifier" in name else "CausalLM"
        getattr(transformers, f"{kind}For{head}")(config).save_pretrained(folder / name)
        tokenizer.chat_template = TEMPLATE if name == "chat" else None
        tokenizer.save_pretrained(folder / name)
    (folder / "tiny").symlink_to(REPO / "utils" / "tiny_model")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "turns.py").write_text(ENVIRONMENTS)
    rows = [{"prompt": f"S{i}:", "question": f"S{i}{i}:", "completion": f"{i}"} for i in range(10, 30)]
    rows = [row | {"chosen": row["completion"], "rejected": "9"} for row in rows]
    (folder / "rows.jsonl").write_text(jsonl(rows))
    rows = [{"prompt": f"S{i}:", "chosen": f"{i}", "rejected": f"{i + 1}", "margin": i} for i in range(10, 30)]
    (folder / "margins.jsonl").write_text(jsonl(rows))
    rows = [{"prompt": f"S{i if (i + 1) % 3 else 101 * i}:", "chosen": "12", "rejected": "21"} for i in range(10, 30)]
    rows = [row | {"completion": row["chosen"]} for row in rows]  # the held-out one is short
    (folder / "lengths.jsonl").write_text(jsonl(rows))
    for name, start, end in ("long", "1234", "5678"), ("other-end", "1234", "9999"), ("other-start", "4321", "5678"):
        rows = [{"prompt": f"S{i}:", "completion": (one := f"{start}{i % 2}{end}"), "chosen": one,
                 "rejected": f"0{one}"} for i in range(10, 30)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text(jsonl(rows))
    pendulum(folder / "pendulum.hdf5")
    pendulum(folder / "other.hdf5", length=30)
    pendulum(folder / "walk.hdf5", "environments:Walk-v0")
    for name in "iql", "iql2":  # of Pendulum
        (folder / name / "model").mkdir(parents=True)
        critics = iql.Agent(3, 1, iql.Args(hidden_size=8, dropout=0.0)).state_dict()
        save_file(critics, folder / name / "model" / "model.safetensors")
    return folder


TOLD = []  # step and answer of each call of `told`


def told(prompts, completions, trainer_state, **_) -> list[float | None]:
    """A reward of 0 or 1, and none for the first prompt and for the last completion."""
    answer = [None if prompt == prompts[0] else float(sum(map(ord, str(text))) % 2)
              for prompt, text in zip(prompts, completions)]  # fmt: skip
    answer[-1] = None
    TOLD.append((trainer_state.global_step, answer))
    return answer


def paired(prompts, completions, **_) -> list[float]:
    """Of each completion with its prompt."""
    return [float(sum(map(ord, prompt + text)) % 2) for prompt, text in zip(prompts, completions)]


class Counts(Counter):
    """passes: forward passes of modules; recomputed: those of them within a backward pass; compiled: calls of compiled
    functions; processes: those started. Nothing is really compiled."""

    def __enter__(self):
        self.backward = 0
        backward, start = torch.autograd.backward, multiprocessing.process.BaseProcess.start

        def counted(*args, **kwargs):
            self.backward += 1
            backward(*args, **kwargs)
            self.backward -= 1

        def started(process):
            self["processes"] += 1
            start(process)

        def passed(*_):
            self["passes"] += 1
            self["recomputed"] += self.backward

        self.patches = [
            mock.patch.object(torch, "compile", self.compile),
            mock.patch.object(torch.autograd, "backward", counted),
            mock.patch.object(multiprocessing.process.BaseProcess, "start", started),
        ]
        for patch in self.patches:
            patch.start()
        self.hook = torch.nn.modules.module.register_module_forward_hook(passed)
        return self

    def compile(self, function, **_):
        def compiled(*args):
            self["compiled"] += 1
            return function(*args)

        return compiled

    def __exit__(self, *_):
        self.hook.remove()
        for patch in self.patches:
            patch.stop()


class Result(NamedTuple):
    rows: list[dict]
    """of metrics, without time/* and learning_rate, which only repeats what was asked for"""
    weights: dict[str, torch.Tensor]
    args: dict
    """as the script resolved them"""
    counts: Counts
    told: list[dict]
    """the rows with all columns"""


def same(one: Result, other: Result) -> bool:
    """Bit for bit."""
    return (one.rows, one.weights.keys()) == (other.rows, other.weights.keys()) and all(
        torch.equal(w, other.weights[name]) for name, w in one.weights.items()
    )


def rows_asked_for(module, monkeypatch) -> list[int]:
    """Where a run of `module` on sort will write the number of each row that it takes."""
    task, rows = data.load_task("sort"), []
    train = lambda index, seed: rows.append(index) or task.train(index, seed)  # noqa: E731
    asked = task._replace(train=train)
    if hasattr(module, "load_tasks"):
        monkeypatch.setattr(module, "load_tasks", lambda *_: {"sort": asked})
    else:
        monkeypatch.setattr(module, "load_task", lambda *_, **__: asked)
    return rows


read_splits = functools.cache(data.read_splits)  # no file of a tiny run changes
load_from_disk = functools.cache(transformers.AutoModelForCausalLM.from_pretrained)


def copy_of_model(*args, **kwargs) -> transformers.PreTrainedModel:
    return copy.deepcopy(load_from_disk(*args, **kwargs))


def train(algo: str, settings: dict, output_dir: Path) -> tuple[list[dict], dict, Counts]:
    """The history, the resolved arguments and the counts of a run. Settings that only other scripts know are left out;
    versions are not recorded. Fails where an update's metrics hold its graph, and with it all activations."""

    def paths(value):
        if isinstance(value, tuple):
            return tuple(map(paths, value))
        return f"{world()}/{value[1:]}" if isinstance(value, str) and value.startswith("@") else value

    if algo == "ppo_atari":
        pytest.importorskip("ale_py", reason="not run: ale_py is not installed")
    module = importlib.import_module(f"algos.{algo}")

    def update(*inputs, function=module.update):
        found = function(*inputs)
        values = found.values() if isinstance(found, dict) else ()
        assert not any(getattr(value, "requires_grad", False) for value in values), found
        return found

    args = dict(device="cpu", output_dir=str(output_dir), save_every=10**9) | settings
    args = module.Args(**{name: paths(value) for name, value in args.items() if name in options(algo)})
    loaded = mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", copy_of_model)
    procedural = data.procedural
    few = lambda name: [x[:32] if isinstance(x, list) else x for x in procedural(name)]  # held-out rows  # noqa: E731
    read = mock.patch.multiple(data, procedural=few, read_splits=read_splits)
    with Counts() as counts, loaded, read, mock.patch.object(module, "update", update):
        return module.train(args), dataclasses.asdict(args), counts


def result(algo: str, settings: dict) -> Result:
    """Trains; known results are kept. What says the default, or what the script does not have, makes no other run."""
    fields = importlib.import_module(f"algos.{algo}").Args.__dataclass_fields__
    said = [(name, value) for name, value in sorted(settings.items()) if name in fields]
    return result_of(algo, tuple((name, x) for name, x in said if name == "save_every" or x != fields[name].default))


@functools.cache
def result_of(algo: str, settings: tuple) -> Result:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(torch, "save"):  # nobody reads the checkpoint
        history, args, counts = train(algo, dict(settings), Path(folder))
        rows = [{k: v for k, v in row.items() if k != "learning_rate" and k[:5] != "time/"} for row in history]
        files = sorted(Path(folder).glob("*/model/**/*.safetensors"))
        weights = {f"{path.parent.name} {name}": w for path in files for name, w in load_file(path).items()}
    return Result(rows, weights, args, counts, history)
