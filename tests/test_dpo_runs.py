"""Whole runs of dpo.py and its children: they learn, resume bit for bit from any checkpoint and after a kill, and say
what is wrong."""

import importlib
import json
import os
import random
import signal
import time

import pytest
import torch
from helpers import SMALL as ROWS
from helpers import (
    Forked,
    assert_same_result,
    checkpoints,
    command_line,
    metrics,
    new_run,
    runs_in,
    stopped_after,
    user_error,
    wait_for,
    weights,
)

from algos import dpo, kto, orpo, simpo
from utils.checkpoint import load_newest
from utils.lm import TINY_MODEL, load_model
from utils.preferences import encode_pair, load_preferences

SMALL = (
    "--device cpu --task sort --num-pairs 20 --batch-size 8 --max-steps 6 --eval-prompts 4 --eval-every 2 "
    "--save-every 2 --keep 99"
).split()  # two and a half epochs
LEARNS = (
    "--device cpu --task sort --max-steps 20 --batch-size 32 --learning-rate 2e-5 --num-pairs 640 --eval-every 0 "
    "--eval-samples 1"
).split()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of the run that nothing disturbed, never to be changed."""
    return new_run(dpo, tmp_path_factory.mktemp("dpo"), *SMALL)


def test_a_run(uninterrupted):
    """A row a step with the columns of the docstring, pairs told apart, and a folder that from_pretrained loads."""
    rows = metrics(uninterrupted)
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows[1:]:
        assert {
            "accuracy",
            "margin",
            "chosen_logratio",
            "rejected_logratio",
            "grad_norm",
            "learning_rate",
        } <= row.keys()
        assert ("eval/pass@8" in row) == ("eval/pair_margin" in row) == (row["step"] % 2 == 0)
    assert rows[1]["margin"] == 0.0 < rows[6]["margin"] and rows[6]["eval/pair_margin"] > 0.02
    assert (uninterrupted / "curve.png").stat().st_size > 10_000
    load_model(str(uninterrupted / "model"))


@pytest.mark.parametrize("script", ["dpo", "simpo", "orpo"])
def test_the_prompt_is_no_part_of_a_completion(script, tmp_path, monkeypatch):
    """What update gets of a pair: the whole prompt, and completions that end with EOS."""
    module, seen = importlib.import_module(f"algos.{script}"), []
    update = module.update
    monkeypatch.setattr(module, "update", lambda model, optimizer, batch, args: (
        seen.extend(batch), update(model, optimizer, batch, args))[1])  # fmt: skip
    module.train(module.Args(task="sort", num_pairs=8, batch_size=8, max_steps=1, eval_prompts=2, eval_samples=1,
                             eval_every=0, output_dir=str(tmp_path)))  # fmt: skip
    tokenizer = load_model(TINY_MODEL)[1]
    for pair in seen:
        prompt, chosen, rejected = map(tokenizer.decode, pair[:3])
        assert prompt[0] == "S" and prompt[-1] == ":" and chosen.endswith("<eos>") and rejected.endswith("<eos>")
        assert sorted(prompt[1:-1]) == sorted(chosen.removesuffix("<eos>")) == sorted(rejected.removesuffix("<eos>"))


def test_it_learns(tmp_path):
    """In a few seconds: the wrong answers of the demonstrations, which were the likeliest, are not any more."""
    folder = new_run(dpo, tmp_path, *LEARNS)
    first, last = metrics(folder)[0], metrics(folder)[-1]
    assert first["eval/greedy"] < 0.4 and last["eval/greedy"] > 0.7 and last["eval/pair_accuracy"] > 0.95


def test_it_does_not_learn_from_flipped_labels(tmp_path, monkeypatch):
    encode = dpo.encode_pair
    monkeypatch.setattr(dpo, "encode_pair", lambda *args: [(p, r, c) for p, c, r in [encode(*args)]][0])
    folder = new_run(dpo, tmp_path, *LEARNS)
    assert metrics(folder)[-1]["eval/greedy"] < 0.3


@pytest.mark.parametrize("step", [0, 2, 4])
def test_resume_from_every_checkpoint(step, uninterrupted, tmp_path):
    assert checkpoints(uninterrupted) == [0, 2, 4, 6]
    folder = stopped_after(step, uninterrupted, tmp_path)
    command_line(dpo, "--resume", folder)
    assert_same_result(folder, uninterrupted)


def test_killed(uninterrupted, tmp_path):
    """SIGKILL at a random moment after the first checkpoint loses no row, repeats none, and changes no weight."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moment: {seed}")
    process = Forked(dpo, *SMALL, "--output-dir", tmp_path / "runs", log=tmp_path / "log")
    folder = wait_for(process, tmp_path / "runs", lambda run: checkpoints(run) != [])
    time.sleep(random.Random(seed).uniform(0, 0.4))
    process.process.kill()
    out, code = process.communicate()
    assert code in (0, -signal.SIGKILL), out
    command_line(dpo, "--resume", folder)
    assert_same_result(folder, uninterrupted)


def test_the_reference_is_not_computed_again(uninterrupted, tmp_path, monkeypatch):
    """A resumed run takes it from its checkpoint: it is still there after --model's folder has changed."""
    folder = stopped_after(2, uninterrupted, tmp_path)
    load = dpo.load_policy

    def changed(*args):
        model, tokenizer = load(*args)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        return model, tokenizer

    monkeypatch.setattr(dpo, "load_policy", changed)
    command_line(dpo, "--resume", folder)
    assert_same_result(folder, uninterrupted)


def test_a_dataset_that_changed_is_refused(uninterrupted, tmp_path, monkeypatch):
    """References are kept by position: with other rows they would be those of other pairs."""
    load = dpo.load_preferences

    def longer(spec, num_pairs, seed):
        return load(spec, num_pairs + 1, seed)

    monkeypatch.setattr(dpo, "load_preferences", longer)
    folder = stopped_after(2, uninterrupted, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command_line(dpo, "--resume", folder)


def test_longer_budget(uninterrupted, tmp_path):
    """Of a run that had not seen all its pairs: the others get their reference from the model that the run began with,
    and the result is that of the longer run."""
    flags = [*SMALL, "--num-pairs", 60, "--eval-every", 0, "--lr-schedule", "constant"]
    longer = new_run(dpo, tmp_path / "longer", *flags, "--max-steps", 9)
    shorter = new_run(dpo, tmp_path / "shorter", *flags, "--max-steps", 4)
    assert load_newest(shorter / "checkpoints")["reference"].isnan().any()
    command_line(dpo, "--resume", shorter, "--max-steps", 9)
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(shorter)]
    assert rows == [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(longer)]
    ours, theirs = weights(shorter), weights(longer)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not load_newest(shorter / "checkpoints")["reference"].isnan().any()


def test_dropout_is_off(tmp_path):
    """A model that has it: the first margins are still 0, and the saved model keeps its setting."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2,
                        bos_token_id=1, eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    folder = new_run(dpo, tmp_path / "runs", *SMALL, "--model", tmp_path / "gpt2", "--max-steps", 1)
    assert metrics(folder)[1]["margin"] == 0.0
    assert json.loads((folder / "model" / "config.json").read_text())["resid_pdrop"] == 0.1


def test_a_dataset_and_long_rows(tmp_path, capsys):
    """Pairs of a file: no accuracy of answers, which nothing scores; completions are cut at --max-length and counted;
    a prompt that leaves no room is refused before there is a folder."""
    rows = [dict(prompt=f"S{i}:", chosen=f"{i}", rejected="9" * (30 if i == 12 else 3)) for i in range(10, 40)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--task", path, "--max-steps", 4, "--batch-size", 10, "--device", "cpu", "--eval-every", 2]
    folder = new_run(dpo, tmp_path / "runs", *flags, "--max-length", 16)
    assert "1 pairs have a completion cut off" in capsys.readouterr().out
    evaluated = [row for row in metrics(folder) if "eval/pair_accuracy" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 4] and not any("eval/greedy" in row for row in evaluated)
    with user_error(capsys, "30 prompts have 4 tokens or more, up to 4", "--max-length"):
        command_line(dpo, *flags, "--max-length", 4, "--output-dir", tmp_path / "none")
    assert runs_in(tmp_path / "none") == []


@pytest.mark.parametrize("module", [dpo, kto], ids=lambda module: module.__name__)
def test_a_signal_ends_the_reference_pass(module, tmp_path, monkeypatch):
    """Which can take long, and of which nothing is saved: at its next batch."""
    name, calls = "score_examples" if module is kto else "score_pairs", []
    score = getattr(module, name)

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:  # a second one would stop at once, whatever the script does
            os.kill(os.getpid(), signal.SIGTERM)
        return score(*args)

    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(SystemExit) as exit:
        command_line(module, *SMALL, "--output-dir", tmp_path)
    assert exit.value.code == 128 + signal.SIGTERM and len(calls) == 1


@pytest.mark.parametrize("loss", dpo.LOSSES)
def test_every_loss_moves_the_model(loss):
    """Three updates of the embedded model tell the pairs apart; discopop begins the wrong way (its docstring)."""
    model, tokenizer = load_model(TINY_MODEL)
    args = dpo.Args(loss=loss, label_smoothing=0.01, micro_batch_size=8, precision="float32")
    rows = load_preferences("sort", 8, 1).train
    pairs = [dpo.Pair(*encode_pair(row, tokenizer, [tokenizer.eos_token_id])) for row in rows]
    logps = dpo.score_pairs(model, pairs, args)[0].tolist()
    pairs = [pair._replace(ref_logps=tuple(ref)) for pair, ref in zip(pairs, logps)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    history = [dpo.update(model, optimizer, pairs, args) for _ in range(3)]
    assert history[0]["margin"] == 0.0 and history[0]["grad_norm"] > 0
    assert (history[2]["margin"] > 0) == (loss != "discopop")


def test_lora(tmp_path):
    """The reference is the model without its adapters, which start at 0; what is saved has them merged."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    flags = [*SMALL, "--lora-rank", 2, "--learning-rate", 1e-3, "--precision", "float32", "--eval-max-new-tokens", 12]
    folder = new_run(dpo, tmp_path, *flags)
    assert metrics(folder)[1]["margin"] == 0.0 < metrics(folder)[6]["margin"]
    before, after = load_model(TINY_MODEL)[0].state_dict(), weights(folder)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    (tmp_path / "again").mkdir()
    stopped = stopped_after(2, folder, tmp_path / "again")
    command_line(dpo, "--resume", stopped)
    assert_same_result(stopped, folder)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--task nothing", "nothing countdown .jsonl"),
        ("--beta 0", "--beta above"),
        ("--loss exo", "exo --label-smoothing 0.001"),
        ("--label-smoothing 0.5", "--label-smoothing below 0.5"),
        ("--loss ipo --label-smoothing 0.1", "--label-smoothing ipo sigmoid"),
        ("--batch-size 0", "--batch-size at least 1"),
        ("--sft-coef -1", "--sft-coef at least 0"),
        ("--model nowhere", "nowhere"),
    ],
)
def test_wrong_arguments(flags, words, tmp_path, capsys):
    with user_error(capsys, *words.split()):
        command_line(dpo, *flags.split(), "--output-dir", tmp_path / "runs")
    assert runs_in(tmp_path / "runs") == []


def test_what_cannot_change_on_resume(uninterrupted, capsys):
    with user_error(capsys, "--beta", "cannot change"):
        command_line(dpo, "--resume", uninterrupted, "--beta", 0.2)


# the children: what they do not share with dpo.py

CHILDREN = {"simpo": simpo, "orpo": orpo, "kto": kto}
every_child = pytest.mark.parametrize("name", CHILDREN)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """name -> the folder of the run that nothing disturbed; made once, never to be changed."""
    made = {}

    def make(name: str):
        if name not in made:
            made[name] = new_run(CHILDREN[name], tmp_path_factory.mktemp(name), *ROWS[name], "--keep", 99)
        return made[name]

    return make


@every_child
def test_a_run_of_a_child(name, undisturbed):
    """The columns of the docstring and no others, in every row that should have them."""
    step = {"simpo": "accuracy margin chosen_logp rejected_logp", "orpo": "accuracy margin chosen_logp rejected_logp",
            "kto": "accuracy margin z desirable_logratio undesirable_logratio"}[name].split()  # fmt: skip
    scores = ["eval/" + ("" if column.startswith(("eval", "z")) or name == "kto" else "pair_") + column
              for column in step if not (name == "kto" and column in ("accuracy", "z"))]  # fmt: skip
    rows = metrics(undisturbed(name))
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows:
        wanted = {"step"} | ({*step, "grad_norm", "learning_rate"} if row["step"] else set())
        if row["step"] % 2 == 0:
            wanted |= {*scores, "eval/greedy", "eval/pass@1", "eval/pass@8"}
        assert row.keys() == wanted
    assert rows[6]["margin"] > rows[1]["margin"]
    load_model(str(undisturbed(name) / "model"))


@every_child
@pytest.mark.parametrize("flipped", [False, True])
def test_a_child_learns(name, flipped, tmp_path, monkeypatch):
    """In a few seconds, and nothing from flipped labels."""
    module = CHILDREN[name]
    if flipped and name == "kto":
        loss = kto.kto_loss
        monkeypatch.setattr(kto, "kto_loss", lambda ratios, labels, z, args: loss(ratios, ~labels, z, args))
    elif flipped:
        encode = module.encode_pair
        monkeypatch.setattr(module, "encode_pair", lambda *args: [(p, r, c) for p, c, r in [encode(*args)]][0])
    rate = {"simpo": 2e-5, "orpo": 1e-4, "kto": 2e-5}[name]
    folder = new_run(module, tmp_path, *LEARNS, "--learning-rate", rate)
    first, last = metrics(folder)[0], metrics(folder)[-1]
    assert first["eval/greedy"] < 0.4
    assert last["eval/greedy"] < 0.3 if flipped else last["eval/greedy"] > 0.7


@every_child
@pytest.mark.parametrize("step", [0, 4])
def test_a_child_resumes_from_its_checkpoints(name, step, undisturbed, tmp_path):
    folder = stopped_after(step, undisturbed(name), tmp_path)
    command_line(CHILDREN[name], "--resume", folder)
    assert_same_result(folder, undisturbed(name))


def test_kto_takes_its_references_from_the_checkpoint(undisturbed, tmp_path, monkeypatch):
    """Matched and mismatched ones: they are still there after --model's folder has changed."""
    folder = stopped_after(2, undisturbed("kto"), tmp_path)
    load = kto.load_policy

    def changed(*args):
        model, tokenizer = load(*args)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        return model, tokenizer

    monkeypatch.setattr(kto, "load_policy", changed)
    command_line(kto, "--resume", folder)
    assert_same_result(folder, undisturbed("kto"))


def test_longer_budget_of_kto(tmp_path):
    """The steps that come new get their references from the model that the run began with."""
    flags = [*SMALL, "--eval-every", 0, "--lr-schedule", "constant"]
    longer = new_run(kto, tmp_path / "longer", *flags, "--max-steps", 9)
    shorter = new_run(kto, tmp_path / "shorter", *flags, "--max-steps", 4)
    command_line(kto, "--resume", shorter, "--max-steps", 9)
    rows = [[{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(run)]
            for run in (shorter, longer)]  # fmt: skip
    assert rows[0] == rows[1]
    ours, theirs = weights(shorter), weights(longer)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not load_newest(shorter / "checkpoints")["by_step"].isnan().any()


def test_unpaired_rows_of_a_file(tmp_path, capsys):
    """One label more often than the other; the balance is printed; long completions are cut, mismatched ones too."""
    rows = [dict(prompt=f"S{i}:", completion="9" * (30 if i == 12 else 3), label=i % 4 == 0) for i in range(10, 40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--task", path, "--max-steps", 3, "--batch-size", 10, "--device", "cpu", "--max-length", 16]
    folder = new_run(kto, tmp_path / "runs", *flags, "--desirable-weight", 2)
    out = capsys.readouterr().out
    assert "1 are cut off" in out
    good = int(out.partition(" of them desirable")[0].rpartition(" ")[2])
    total = int(out.partition(" rows, ")[0].rpartition("\n")[2])
    assert f"desirable rows weigh {2 * good / (total - good):.2f} times as much" in out
    last = metrics(folder)[-1].keys()
    assert "eval/greedy" not in last and {"eval/desirable_logratio", "eval/undesirable_logratio"} & last
    with user_error(capsys, "prompt", "--max-length"):
        command_line(kto, *flags, "--max-length", 4, "--output-dir", tmp_path / "none")
    assert runs_in(tmp_path / "none") == []


@pytest.mark.parametrize(
    "flags, words",
    [
        ("simpo --beta 0", "--beta above"),
        ("simpo --gamma -1", "--gamma at least 0"),
        ("simpo --sft-coef -1", "--sft-coef at least 0"),
        ("simpo --task nothing", "nothing countdown .jsonl"),
        ("orpo --beta -0.1", "--beta at least 0"),
        ("orpo --learning-rate 0", "--learning-rate above"),
        ("kto --beta 0", "--beta above"),
        ("kto --batch-size 1", "--batch-size 1 at least 2"),
        ("kto --desirable-weight 0", "--desirable-weight above"),
        ("kto --undesirable-weight -1", "--undesirable-weight above"),
        ("kto --task nothing", "nothing countdown .jsonl"),
    ],
)
def test_wrong_arguments_of_children(flags, words, tmp_path, capsys):
    name, *flags = flags.split()
    with user_error(capsys, *words.split()):
        command_line(CHILDREN[name], *flags, "--output-dir", tmp_path / "runs")
    assert runs_in(tmp_path / "runs") == []
