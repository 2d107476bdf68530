"""Reward functions written for TRL run unmodified, get what TRL gives them, and are added up as TRL adds them."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SMALL, metrics, new_run, write_rows
from transformers import AutoTokenizer

from algos import grpo
from utils.core import UserError, rng_state, set_rng_state
from utils.data import Task, load_task
from utils.lm import TINY_MODEL, load_model
from utils.rewards import evaluate, load_function, make_scorer

pytestmark = pytest.mark.usefixtures("imports_as_they_were")
TASK = Task("mine", lambda index, seed: {"prompt": "?"}, [])
CHAT = [[{"role": "user", "content": "one?"}], [{"role": "user", "content": "two?"}]]
TEXTS = ["<think>a</think>b", "no thoughts", "<think>a</think>", "</think>"]
IDS = [[1, 2, 3, 4], [5, 5, 5, 5, 5, 5, 5, 5], [1, 2, 1, 2, 1, 2], [7]]


def scored(specs, weights=(), rows=None, chat=False, step=3, task=TASK):
    """Two prompts, two completions of each: rewards and columns."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = "{{ messages }}" if chat else None
    rows = [row for row in rows or [{"prompt": "one?"}, {"prompt": "two?"}] for _ in range(2)]
    args = SimpleNamespace(reward=tuple(specs), reward_weights=tuple(weights), combine="sum", max_steps=10,
                           trust_remote_code=False)  # fmt: skip
    return make_scorer(task, args, tokenizer, "cpu")(rows, TEXTS, IDS, step)


def write(tmp_path, source: str) -> str:
    (tmp_path / "mine.py").write_text(source)
    return str(tmp_path / "mine.py")


def test_functions_of_trl(tmp_path):
    """TRL's own functions, from its module or built in a file, give what they give when called directly."""
    rewards = pytest.importorskip("trl.rewards", reason="not run: trl is not installed")
    path = write(tmp_path, "from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment\n"
                 "overlong = get_soft_overlong_punishment(max_completion_len=7, soft_punish_cache=3)\n"
                 "repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)\n")  # fmt: skip
    ours, columns = scored(["trl.rewards:think_format_reward", f"{path}:overlong", f"{path}:repetition"], chat=True)
    messages = [[{"role": "assistant", "content": text}] for text in TEXTS]
    directly = [
        rewards.think_format_reward(completions=messages),
        rewards.get_soft_overlong_punishment(7, 3)(completion_ids=IDS),
        rewards.get_repetition_penalty_reward(2)(completion_ids=IDS),
    ]
    assert directly[0] == [1, 0, 1, 0] and len({*directly[1]}) > 1 and len({*directly[2]}) > 1
    assert torch.allclose(ours, torch.tensor(directly).sum(0))
    assert list(columns) == [
        "reward/think_format_reward",
        "reward/soft_overlong_punishment_reward",
        "reward/repetition_penalty_reward",
    ]
    means = [sum(values) / 4 for values in directly]
    assert list(columns.values()) == pytest.approx(means)


@pytest.mark.parametrize("chat", [False, True])
def test_what_a_function_gets(chat, tmp_path):
    """Prompts and completions as text or as messages, token ids, the dataset's columns once per completion, the step,
    and the two ways to log; never the demonstration."""
    path = write(tmp_path, "seen = {}\n"
                 "def spy(log_extra, log_metric, trainer_state, **rest):\n"
                 "    log_extra('note', [1] * 4); log_metric('share', 1); log_metric('share', 0)\n"
                 "    seen.update(rest, step=trainer_state.global_step, last=trainer_state.max_steps)\n"
                 "    return [0, 1, True, 0.5]\n")  # fmt: skip
    rows = [{"prompt": p, "gold": g, "completion": "secret", "more": [g]} for p, g in (("one?", 1), ("two?", 2))]
    rewards, columns = scored([f"{path}:spy"], rows=rows, chat=chat)
    assert load_function(f"{path}:seen") == {
        "prompts": [p for p in (CHAT if chat else ["one?", "two?"]) for _ in range(2)],
        "completions": [[{"role": "assistant", "content": text}] for text in TEXTS] if chat else TEXTS,
        "completion_ids": IDS,
        "gold": [1, 1, 2, 2],
        "more": [[1], [1], [2], [2]],
        "step": 3,
        "last": 10,
    }
    assert rewards.tolist() == [0, 1, 1, 0.5] and columns == {"reward/spy": 0.625, "reward/share": 0.5}


def test_each_answer_is_scored_beside_its_own_prompt():
    """By the task itself where there is no function, and logged beside the function where there is one."""
    task = TASK._replace(score=lambda row, text: float(row["prompt"] == text))
    rows = [{"prompt": text} for text in (TEXTS[0], TEXTS[2])]
    assert scored([], task=task, rows=rows)[0].tolist() == [1, 0, 1, 0]
    with pytest.raises(UserError, match="cannot score answers itself: give --reward"):
        scored([])


def test_none_skips_and_weights_add_up(tmp_path):
    """TRL's rule: nansum of weight times reward over functions, None as NaN; NaN where every function said None. Each
    function's mean is over what it scored, without its weight."""
    path = write(tmp_path, "def a(completions, **columns): return [1.0, None, 3.0, None]\n"
                 "async def b(completions, **columns): return [10.0, 20.0, None, None]\n")  # fmt: skip
    task = TASK._replace(score=lambda row, text: float(text == "</think>"))
    rewards, columns = scored([f"{path}:a", f"{path}:b"], weights=[2.0, 0.5], task=task)
    table = torch.tensor([[1.0, 10.0], [torch.nan, 20.0], [3.0, torch.nan], [torch.nan, torch.nan]])
    expected = (table * torch.tensor([2.0, 0.5])).nansum(1)
    expected[3] = torch.nan
    assert torch.equal(rewards.nan_to_num(-99), expected.nan_to_num(-99))
    assert rewards[:3].tolist() == [7.0, 10.0, 6.0]
    assert columns == {"reward/a": 2.0, "reward/b": 15.0, "reward/task": 0.25}
    with pytest.raises(UserError, match="--reward-weights has 1 numbers for 2 rewards"):
        scored([f"{path}:a", f"{path}:b"], weights=[2.0])


def test_steps_without_any_reward_are_logged_without_one(tmp_path, capsys):
    """Where every reward is None there is no mean: no column, neither of training nor of evaluation, and no NaN, which
    JSON does not have; the terminal says so, and what is known is logged."""
    path = write(
        tmp_path,
        "def f(completions, trainer_state, **columns):\n"
        "    return [None if trainer_state.global_step < 2 else float(len(text)) for text in completions]\n",
    )
    task = Task("mine", load_task("sort").train, load_task("sort").heldout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "load_task", lambda *_: task)
        flags = "--eval-every", 1, "--max-steps", 2, "--reward", f"{path}:f"
        run = new_run(grpo, tmp_path / "runs", *SMALL["grpo"], *flags)
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    start, first, second = metrics(run)
    unknown = {"reward", "reward_std", "reward/f", "eval/greedy", "eval/sampled"}
    assert not unknown & (start.keys() | first.keys()) and {"entropy", "grad_norm", "frac_zero_std"} <= first.keys()
    assert first["frac_zero_std"] == 1 and first["grad_norm"] == 0
    assert unknown <= second.keys(), "the step that a function is told in evaluation is not the training step"
    out = capsys.readouterr().out
    assert "step 1: every reward of 16 answers is None" in out
    assert "step 1: not finite, so not logged: reward, reward_std, eval/greedy, eval/sampled" in out


def test_autocast_is_the_policy_s_alone(tmp_path):
    """In training and in evaluation: a reward model or a function of the user's would be rounded by it."""
    path = write(tmp_path, "import torch\n"
                 "def zero(completions, **rest):\n"
                 "    assert not torch.is_autocast_enabled('cpu')\n"
                 "    return [0.0 for _ in completions]\n")  # fmt: skip
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"S{i}:"} for i in range(10, 40)])
    flags = ["--task", tmp_path / "rows.jsonl", "--reward", f"{path}:zero", "--precision", "bfloat16", "--max-steps", 1]
    folder = new_run(grpo, tmp_path / "runs", *SMALL["grpo"], *flags)
    assert [row["eval/greedy"] for row in metrics(folder)] == [0.0, 0.0]


def test_a_file_is_run_once(tmp_path, monkeypatch):
    """Two functions of one file share what it holds (a loaded model, a cache), however its path is written."""
    path = write(tmp_path, "seen = []\n"
                 "def f(completions, **columns): seen.append(1); return [0.0] * 4\n"
                 "def g(completions, **columns): return [float(len(seen))] * 4")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert scored([f"{path}:f", "mine.py:g"])[0].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "value",
    ["None", "1.0", "'1234'", "{1: 1, 2: 1, 3: 1, 4: 1}", "{1, 2, 3, 4}", "torch.tensor(1.0)", "[[1], [2], [3], [4]]",
     "[1, 2, 3]", "[1, 2, 3, 'four']", "[0.0, 0.0, float('nan'), 0.0]", "[0.0, 0.0, float('inf'), 0.0]"],
)  # fmt: skip
def test_what_is_no_list_of_finite_numbers_is_shown(value, tmp_path):
    path = write(tmp_path, f"import torch\ndef f(completions, **columns): return {value}")
    with pytest.raises(UserError, match="function f returned .*: it must return a list of 4 finite numbers"):
        scored([f"{path}:f"])


def test_an_extra_has_a_value_for_each_completion(tmp_path):
    path = write(tmp_path, "def f(log_extra, **columns):\n    log_extra('note', 'abc')\n    return [0] * 4")
    with pytest.raises(UserError, match="log_extra got 3 values of 'note': give 4, one for each completion"):
        scored([f"{path}:f"])


@pytest.mark.parametrize("parameters", ["completions", "completions, gold_answer, **columns"])
def test_a_function_that_does_not_take_the_columns(parameters, tmp_path):
    path = write(tmp_path, f"def f({parameters}): return [1.0] * 4")
    words = r"function f does not take .*: let it end with \*\*kwargs and take any of .*prompts"
    with pytest.raises(UserError, match=words):
        scored([f"{path}:f"])


def test_file_with_a_dataclass(tmp_path):
    """A reward file is an ordinary module: dataclasses with postponed annotations work in it."""
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    source += "@dataclass\nclass C:\n    x: int = 1\n"
    path = write(tmp_path, source + "def f(completions, **columns): return [float(C().x)] * 4")
    assert scored([f"{path}:f"])[0].tolist() == [1.0] * 4


@pytest.mark.parametrize("marker", [True, False], ids=["package", "folder"])
@pytest.mark.parametrize("when", ["first", "only in the call"])
def test_package_of_the_users_called_utils(marker, when, tmp_path):
    """Every project has its `utils`: the user's is what their file imports, with or without __init__.py, at the top or
    when the function is called; a whole run of ours works with it."""
    (tmp_path / "utils").mkdir()
    if marker:
        (tmp_path / "utils" / "__init__.py").touch()
    (tmp_path / "utils" / "text.py").write_text("where = __file__")
    line = "from utils.text import where"
    at_top, in_call = (line, "pass") if when == "first" else ("", line)
    source = f"{at_top}\ndef f(completions, **columns):\n    {in_call}\n"
    source += "    return [float(where == WANTED)] * len(completions)\n"
    path = write(tmp_path, f"WANTED = {str(tmp_path / 'utils' / 'text.py')!r}\n{source}")
    flags = [*SMALL["grpo"], "--max-steps", "2", "--reward", f"{path}:f"]
    assert [row["reward"] for row in metrics(new_run(grpo, tmp_path / "runs", *flags))[1:]] == [1, 1]


def test_async_functions_run_at_the_same_time(tmp_path):
    """Each waits for the other to begin; rewards stay in their columns, beside those of ordinary functions."""
    path = write(
        tmp_path,
        "import asyncio\nbegun = set()\n"
        "async def meet(name, other, reward):\n"
        "    begun.add(name)\n"
        "    while other not in begun:\n"
        "        await asyncio.sleep(0.001)\n"
        "    return [reward] * 4\n"
        "async def a(completions, **_): return await asyncio.wait_for(meet('a', 'b', 1.0), 1)\n"
        "def plain(completions, **_): return [10.0] * 4\n"
        "async def b(completions, **_): return await asyncio.wait_for(meet('b', 'a', 100.0), 1)\n",
    )
    rewards, columns = scored([f"{path}:a", f"{path}:plain", f"{path}:b"], weights=(1, 2, 3))
    assert columns == {"reward/a": 1.0, "reward/plain": 10.0, "reward/b": 100.0}
    assert rewards.tolist() == [321.0] * 4


def test_a_completion_that_was_cut_off_costs_the_penalty(tmp_path):
    """In what is trained on: where every answer has a reward of 1, the mean says how many were cut off."""
    path = write(tmp_path, "def one(completions, **_): return [1.0] * len(completions)")
    flags = [*SMALL["grpo"], "--max-steps", "2", "--reward", f"{path}:one", "--max-completion-length", "4"]
    rows = metrics(new_run(grpo, tmp_path / "runs", *flags, "--missing-eos-penalty", "0.5"))
    assert any(0 < row["truncated"] for row in rows[1:])
    for row in rows[1:]:
        assert row["reward"] == pytest.approx(1 - 0.5 * row["truncated"], abs=1e-6) and row["reward/one"] == 1


EVALUATED = grpo.Args(eval_prompts=16, eval_samples=4, max_completion_length=20, sample_batch_size=64,
                      precision="float32")  # fmt: skip


def test_evaluation_leaves_no_trace():
    """The global generators go on as if it had not been there, also where a score draws from them. Equal seeds give
    equal numbers. Another seed samples other answers beside the same greedy ones."""
    model, tokenizer = load_model(EVALUATED)
    task, numbers = load_task("sort"), lambda: (random.random(), np.random.random(), torch.rand(()).item())
    before, expected = rng_state(), numbers()
    set_rng_state(before)
    evaluate(model, tokenizer, task._replace(score=lambda *_: sum(numbers())), None, EVALUATED)
    assert numbers() == expected
    args = [replace(EVALUATED, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (evaluate(model, tokenizer, task, None, some) for some in args)
    assert again == first and other["eval/greedy"] == first["eval/greedy"]
    assert other["eval/pass@1"] != first["eval/pass@1"]


def test_a_part_of_a_reward_is_no_right_answer(monkeypatch):
    """Two prompts, four samples each, of the first of which three are right."""
    answers = {1: ["a", "c"], 4: ["a", "a", "b", *"ccccc"]}
    monkeypatch.setattr("utils.rewards.sample_all", lambda model, prompts, count, *_: answers[count])
    monkeypatch.setattr("utils.rewards.decode", lambda texts, _: (texts, []))
    task, args = load_task("sort"), replace(EVALUATED, eval_prompts=2)
    for part, columns in ((1.0, {"eval/greedy": 0.5, "eval/pass@1": 3 / 8, "eval/pass@4": 0.5, "eval/distinct": 1.0}),
                          (0.5, {"eval/greedy": 0.25, "eval/sampled": 3 / 16})):  # fmt: skip
        graded = task._replace(score=lambda _, text, part=part: part * (text in "ab"))
        assert evaluate(*load_model(args), graded, None, args) == columns
