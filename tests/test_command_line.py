"""Wrong input ends with one sentence and exit code 2, without a traceback and, where it is seen in time, a folder."""

import ast
import dataclasses
import importlib
import inspect
import shutil
import sys
from pathlib import Path

import datasets  # noqa: F401  here, for its log goes to the stderr of its first import, which a test closes
import pytest
import transformers
from every_script import every_script
from helpers import SMALL, assert_one_sentence, command_line, metrics, runs_in, start, user_error, write_rows

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
    Path("rewards.py").write_text(
        "def fine(completions, **columns): return [0.0] * len(completions)\n"
        "def short(completions, **columns): return [0.0]\n"
        "def nan(completions, **columns): return [float('nan')] * len(completions)\n"
    )
    return tmp_path


BEFORE_THE_RUN = """
grpo --task sorting | 'sorting' | countdown
grpo --task none.jsonl | none.jsonl | file
grpo --task empty.jsonl --reward rewards.py:fine | empty.jsonl | empty
grpo --task one.jsonl --reward rewards.py:fine | one.jsonl | one prompt
grpo --task no_prompt.jsonl --reward rewards.py:fine | 'prompt' | question | --prompt-column
grpo --task half.parquet --reward rewards.py:fine | half.parquet | cannot read
grpo --task malformed.jsonl --reward rewards.py:fine | malformed.jsonl | cannot read
grpo --task chat.jsonl --reward rewards.py:fine | chat template
grpo --task good.jsonl | --reward
grpo --task gsm8k:nowhere | nowhere
grpo --model nowhere | nowhere | folder
grpo --model ./no_tokenizer | no_tokenizer | tokenizer
grpo --model ./no_weights | no_weights
grpo --reward rewards | FILE.py:FUNCTION
grpo --reward nowhere.py:f | nowhere.py | no file
grpo --reward nowhere.at.all:f | nowhere | no module
grpo --reward rewards.py:absent | no function absent
grpo --reward rewards.py:fine --reward-weights 1 2 | --reward-weights | 2 | 1
grpo --reward rewards.py:fine --reward-weights nan | --reward-weights | finite
grpo --num-generations 1 | --num-generations | 2
grpo --num-generations 4 --micro-batch-size 6 | --micro-batch-size 6 | --num-generations 4
grpo --num-prompts 0 | --num-prompts
grpo --max-steps 0 | --max-steps
grpo --eval-prompts 0 | --eval-prompts
grpo --save-every 0 | --save-every
grpo --temperature 0 | --temperature | above 0
grpo --temperature nan | --temperature is nan | finite
grpo --beta -0.1 | --beta is -0.1 | at least 0
grpo --beta inf | --beta is inf | finite
grpo --epsilon 0 | --epsilon | above 0
grpo --epsilon-high 0 | --epsilon-high | above 0
grpo --eval-every -1 | --eval-every | at least 0
grpo --learning-rate 0 | --learning-rate | above 0
grpo --learning-rate nan | --learning-rate | finite
grpo --max-grad-norm -1 | --max-grad-norm | above 0
grpo --warmup-steps -1 | --warmup-steps | at least 0
grpo --weight-decay -0.1 | --weight-decay | at least 0
grpo --lora-rank -1 | --lora-rank | at least 0
grpo --lora-modules q_proj | --lora-modules | --lora-rank
grpo --lora-rank 2 --lora-modules nothing | nothing | --lora-modules | q_proj
grpo --attn-implementation nothing | --attn-implementation nothing | sdpa
grpo --attn-implementation ORG/kernel | --attn-implementation ORG/kernel | --trust-remote-code
reward_model --attn-implementation ORG/kernel | --attn-implementation ORG/kernel | --trust-remote-code
reward_model --attn-implementation nothing | --attn-implementation nothing | sdpa
grpo --adam-beta2 1 | --adam-beta2 | below 1
grpo --adam-beta2 -0.1 | --adam-beta2 | at least 0
grpo --device quantum | quantum | cpu
grpo --resume nowhere | nowhere | config.json
online_dpo --num-generations 3 | --num-generations is 3
online_dpo --num-generations 0 | --num-generations is 0
online_dpo --micro-batch-size 1 | --micro-batch-size 1
online_dpo --num-generations 6 --micro-batch-size 3 | --micro-batch-size 3
online_dpo --num-generations 6 --micro-batch-size 4 | --micro-batch-size 4
online_dpo --xpo-alpha -0.1 | --xpo-alpha is -0.1
online_dpo --xpo-alpha nan | --xpo-alpha is nan
online_dpo --beta 0.0 | --beta is 0.0
sft --task no_completion.jsonl | completion
sft --task good.jsonl --max-length 3 | --max-length
sft --task malformed.jsonl | malformed.jsonl | cannot read
sft --task sorting | 'sorting'
sft --max-steps 0 | --max-steps
sft --batch-size 0 | --batch-size
sft --micro-batch-size 0 | --micro-batch-size
sft --eval-prompts 0 | --eval-prompts
sft --eval-every -1 | --eval-every | at least 0
sft --learning-rate 0 | --learning-rate | above 0
sft --max-grad-norm 0 | --max-grad-norm | above 0
sft --warmup-steps -1 | --warmup-steps | at least 0
sft --weight-decay nan | --weight-decay | finite
sft --lora-rank -1 | --lora-rank | at least 0
dpo --task nothing | nothing | countdown | .jsonl
dpo --task malformed.jsonl | malformed.jsonl | cannot read
dpo --beta 0 | --beta | above
dpo --loss exo | exo | --label-smoothing | 0.001
dpo --label-smoothing 0.5 | --label-smoothing | below 0.5
dpo --loss ipo --label-smoothing 0.1 | --label-smoothing | ipo | sigmoid
dpo --batch-size 0 | --batch-size | at least 1
dpo --sft-coef -1 | --sft-coef | at least 0
dpo --model nowhere | nowhere
simpo --beta 0 | --beta | above
simpo --gamma -1 | --gamma | at least 0
simpo --sft-coef -1 | --sft-coef | at least 0
simpo --task nothing | nothing | countdown | .jsonl
orpo --beta -0.1 | --beta | at least 0
orpo --learning-rate 0 | --learning-rate | above
kto --beta 0 | --beta | above
kto --batch-size 1 | --batch-size | 1 | at least 2
kto --desirable-weight 0 | --desirable-weight | above
kto --undesirable-weight -1 | --undesirable-weight | above
kto --task nothing | nothing | countdown | .jsonl
reward_model --task nothing | nothing | countdown | .jsonl
reward_model --ensemble 0 | --ensemble | at least 1
reward_model --label-noise 1.5 | --label-noise | from 0 to 1
reward_model --center-coef -1 | --center-coef | at least 0
reward_model --use-margin | --use-margin | margin
reward_model --model nowhere | nowhere
""".strip().splitlines()


@pytest.mark.parametrize("case", BEFORE_THE_RUN, ids=lambda case: case.partition(" |")[0])
def test_seen_before_the_run(case, files, capsys):
    command, *words = case.split(" | ")
    algo, *args = command.split()
    with user_error(capsys, *words):
        command_line(importlib.import_module(f"algos.{algo}"), *SMALL[algo], *args, "--output-dir", "made")
    assert not Path("made").exists()


@pytest.mark.parametrize("module", [grpo, sft])
def test_models_without_an_attention_cache(module, tmp_path, capsys):
    config = transformers.MambaConfig(vocab_size=22, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(tmp_path / "model")
    algo = module.__name__.rpartition(".")[2]
    with user_error(capsys, config.model_type, "attention"):
        command_line(module, *SMALL[algo], "--model", tmp_path / "model", "--output-dir", tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("function, words", [("short", ["1 rewards for 16"]), ("nan", ["nan", "None"])])
def test_seen_in_the_run(function, words, files, capsys):
    """What only a call of the reward function shows is said in one sentence too, with the function's name."""
    with user_error(capsys, function, *words):
        command_line(grpo, *SMALL["grpo"], "--reward", f"rewards.py:{function}", "--output-dir", "made")


def test_unwritable_output_folder(files, capsys):
    with user_error(capsys, "--output-dir", "one.jsonl/runs"):
        command_line(grpo, *SMALL["grpo"], "--output-dir", "one.jsonl/runs")


def test_a_run_of_another_script(files, capsys):
    """Even where all its arguments are known to this one. What is there stays."""
    command_line(grpo, *SMALL["grpo"], "--max-steps", 1, "--output-dir", "made")
    (folder,) = runs_in(Path("made"))
    before = (folder / "config.json").read_bytes()
    with user_error(capsys, "run of grpo.py, not of dapo.py"):
        command_line(importlib.import_module("algos.dapo"), "--resume", folder, "--max-steps", 2)
    assert (folder / "config.json").read_bytes() == before


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


def test_a_process_of_its_own(tmp_path):
    """From another folder, where a project on PYTHONPATH has a package `utils`."""
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").touch()
    process = start("grpo", "--task", "sorting", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2, err
    assert_one_sentence(err, "'sorting'", "countdown")
    assert out == "" and not (tmp_path / "runs").exists()


def documented(cls: type) -> dict[str, str]:
    """Field -> the string under it in the source."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    pairs = [(a.target.id, b.value.value) for a, b in zip(body, body[1:]) if isinstance(a, ast.AnnAssign)]
    return dict(pairs)


@every_script
def test_help(algo, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    module = importlib.import_module(f"algos.{algo}")
    with pytest.raises(SystemExit, match="0"):
        command_line(module, "--help")
    squeezed = "".join(c for c in capsys.readouterr().out if not c.isspace() and c not in "│")
    text = {name: words for cls in reversed(module.Args.__mro__[:-1]) for name, words in documented(cls).items()}
    for field in dataclasses.fields(module.Args):
        assert f"--{field.name.replace('_', '-')}" in squeezed
        assert "".join(text[field.name].split()) in squeezed, field.name
