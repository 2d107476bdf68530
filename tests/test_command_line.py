"""Wrong input ends with one sentence and exit code 2, without a traceback and, where it is seen in time, a folder."""

import ast
import dataclasses
import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import datasets  # noqa: F401  both here, for a log goes to the stderr of its first import, which a test closes
import pytest
import transformers  # noqa: F401
from every_script import every_script, options
from helpers import SMALL, assert_one_sentence, command_line, metrics, runs_in, start, user_error, write_rows
from test_faults import without_a_layer

from algos import grpo, sft
from utils.lm import TINY_MODEL


@pytest.fixture
def files(own_cache, tmp_path, monkeypatch):
    """A folder of things that are wrong, as the current folder."""
    monkeypatch.chdir(tmp_path)
    jsonl = {
        "empty": [],
        "one": [{"prompt": "S21:", "completion": "12"}] * 3,
        "no_prompt": [{"question": "S21:"}, {"question": "S31:"}],
        "no_completion": [{"prompt": f"S{i}1:"} for i in range(9)],
        "chat": [{"prompt": [{"role": "user", "content": f"S{i}1:"}]} for i in range(9)],
        "good": [{"prompt": f"S{i}1:", "completion": f"1{i}"} for i in range(9)],
    }
    for name, rows in jsonl.items():
        write_rows(Path(f"{name}.jsonl"), rows)
    own_cache.Dataset.from_list(jsonl["good"]).to_parquet("whole.parquet")
    whole = Path("whole.parquet").read_bytes()
    Path("half.parquet").write_bytes(whole[: len(whole) // 2])
    Path("malformed.jsonl").write_text('{"prompt": "S21:"}\n{"prompt": \n')
    shutil.copytree(TINY_MODEL, "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(TINY_MODEL, "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    Path("rewards.py").write_text("def fine(completions, **columns): return [0.0] * len(completions)\n")
    return tmp_path


BEFORE_THE_RUN = """
grpo --task sorting | file sorting | hub dataset
grpo --task none.jsonl | none.jsonl | file
grpo --task empty.jsonl --reward rewards.py:fine | empty.jsonl | empty
grpo --task one.jsonl --reward rewards.py:fine | one.jsonl | no prompt to train on
grpo --task no_prompt.jsonl --reward rewards.py:fine | 'prompt' | question
grpo --task half.parquet --reward rewards.py:fine | half.parquet | cannot read
grpo --task malformed.jsonl --reward rewards.py:fine | malformed.jsonl | cannot read
grpo --task chat.jsonl --reward rewards.py:fine | chat template
grpo --task good.jsonl | --reward
grpo --task gsm8k:nowhere | nowhere
grpo --model nowhere | cannot load the model nowhere
grpo --model ./no_tokenizer | no_tokenizer | tokenizer
grpo --model ./no_weights | no_weights
grpo --reward rewards | cannot load rewards | FILE.py:NAME
grpo --reward nowhere.py:f | nowhere.py | No such file
grpo --reward nowhere.at.all:f | nowhere | No module
grpo --reward rewards.py:absent | no attribute 'absent'
grpo --reward rewards.py:fine --reward-weights 1 2 | --reward-weights | 2 | 1
grpo --num-generations 1 | --num-generations | 2
grpo --num-prompts 0 | --num-prompts
grpo --max-prompt-length 5 | some prompts of sort have more than 5 tokens
grpo --max-completion-length 128 | the model's 128 tokens leave no room for prompts: lower --max-completion-length
grpo --attn-implementation nothing | attn_implementation="nothing"
reward_model --attn-implementation nothing | attn_implementation="nothing"
dapo --keep-accuracy 0.8 0.2 | --keep-accuracy | must be LOW HIGH with 0 <= LOW <= HIGH <= 1
dapo --keep-accuracy -0.1 0.5 | --keep-accuracy | must be LOW HIGH with 0 <= LOW <= HIGH <= 1
dapo --keep-accuracy 0.5 1.5 | --keep-accuracy | must be LOW HIGH with 0 <= LOW <= HIGH <= 1
dapo --overlong-buffer 21 | --overlong-buffer 21 must be at most --max-completion-length 20
tba --num-generations 1 | --num-generations must be at least 2
tba --buffer-size 15 --sync-every 4 | give at least 16
tba --beta 0 | --beta must be above 0
grpo --resume nowhere | nowhere | config.json
online_dpo --num-generations 3 | --num-generations is 3
online_dpo --beta 0.0 | --beta is 0
sft --task no_completion.jsonl | completion
sft --task good.jsonl --max-length 3 | 4 tokens | 2 are allowed
sft --batch-size 0 | --batch-size
sft --max-length 10 | some prompts of sort have more than 9 tokens: raise --max-length
dpo --task nothing | file nothing | hub dataset
dpo --task malformed.jsonl | malformed.jsonl | cannot read
dpo --loss exo | exo | --label-smoothing | 0.001
dpo --label-smoothing 0.5 | --label-smoothing | below 0.5
dpo --loss ipo --label-smoothing 0.1 | --label-smoothing | ipo | sigmoid
kto --batch-size 1 | --batch-size | 1 | at least 2
kto --task nothing | file nothing | hub dataset
reward_model --use-margin | --use-margin | margin
reward_model --model nowhere | nowhere
ddpo --num-steps 0 | --num-steps is 0 | at least 1
ddpo --num-generations 1 | --num-generations is 1 | at least 2
ddpo --noise 0 | --noise is 0.0 | above 0
ddpo --reward rewards.py:absent | no attribute 'absent'
flow_grpo --noise-level 0 | --noise-level is 0.0 | above 0
flow_grpo --eval-steps 0 | --eval-steps is 0 | at least 1
dpt --num-arms 1 | --num-arms is 1 | at least 2
dpt --noise 0 | --noise is 0.0 | above 0
dpt --shuffle-contexts --batch-size 1 | --batch-size is 1 | at least 2
dpt --num-heads 0 | --num-heads is 0 | from 1 to inf
dpt --num-heads 3 | --embed-dim 8 | --num-heads 3
""".strip().splitlines()
BEFORE_THE_RUN += [f"{algo} --{flag} -1 | --{flag} is -1 | from 0 to inf" for algo in ("grpo", "sft", "orpo")
                   for flag in ("max-grad-norm", "warmup-steps", "lora-rank", "beta", "eval-every")
                   if flag.replace("-", "_") in options(algo)]  # fmt: skip


@pytest.mark.parametrize("case", BEFORE_THE_RUN, ids=lambda case: case.partition(" |")[0])
def test_seen_before_the_run(case, files, capsys):
    command, *words = case.split(" | ")
    algo, *args = command.split()
    with user_error(capsys, *words):
        command_line(importlib.import_module(f"algos.{algo}"), *SMALL[algo], *args, "--output-dir", "made")
    assert not Path("made").exists()


def test_tracking_without_wandb(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with user_error(capsys, "--track", "pip install wandb"):
        command_line(grpo, *SMALL["grpo"], "--track", "--output-dir", "made")
    assert not Path("made").exists()


def test_good_files_are_accepted(files):
    """The files that the wrong ones are variations of do run: the cases above fail for their own reason."""
    args = "--task whole.parquet --reward rewards.py:fine --max-steps 1 --output-dir made".split()
    command_line(grpo, *SMALL["grpo"], *args)
    command_line(sft, *SMALL["sft"], *"--task good.jsonl --max-steps 1 --output-dir made".split())
    assert [len(metrics(folder)) for folder in runs_in(Path("made"))] == [2, 1]


@pytest.mark.parametrize("args, words", [("--task sorting", ["file sorting", "hub dataset"]),
                                         ("--model mine", ["mine lacks weights"])])  # fmt: skip
def test_a_process_of_its_own(args, words, tmp_path):
    """From another folder, where a project on PYTHONPATH has a package `utils`. No library's report stands before the
    sentence."""
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").touch()
    without_a_layer(shutil.copytree(TINY_MODEL, tmp_path / "mine"))
    process = start("grpo", *args.split(), cwd=tmp_path, PYTHONPATH=str(tmp_path))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2, err
    assert_one_sentence(err, *words)
    assert out == "" and not (tmp_path / "runs").exists()


def documented(cls: type) -> dict[str, str]:
    """Field -> the string under it in the source."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    pairs = [(a.target.id, b.value.value) for a, b in zip(body, body[1:])
             if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr)]  # fmt: skip
    return dict(pairs)


@every_script
def test_help(algo, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    module = importlib.import_module(f"algos.{algo}")
    with pytest.raises(SystemExit, match="0"):
        command_line(module, "--help")
    out = capsys.readouterr().out
    assert out.index("--output-dir") < out.index("\nDifferences"), "options stand before the long text"
    squeezed = "".join(c for c in out if not c.isspace() and c not in "│")
    for kind, row in getattr(module, "PRESETS", {}).items():
        for name, value in row.items():
            assert re.search(rf"[^-]{re.escape(str(value))}[^;]*{kind.replace(' ', '')}", squeezed), (name, kind)
    text = {name: words for cls in reversed(module.Args.__mro__[:-1]) for name, words in documented(cls).items()}
    for field in dataclasses.fields(module.Args):
        assert f"--{field.name.replace('_', '-')}" in squeezed
        assert "".join(text[field.name].split()) in squeezed, field.name
