"""Whole runs of dpo.py and its children that train a policy: what they log, that they learn, and what they print."""

import importlib

import pytest
from helpers import SMALL, command_line, metrics, new_run, runs_in, user_error, write_rows

from algos import kto
from utils.lm import load_model

MODULES = {name: importlib.import_module(f"algos.{name}") for name in ("dpo", "simpo", "orpo", "kto")}
COLUMNS = {  # of a step; in evaluation eval/ or eval/pair_ stands before them
    "dpo": "accuracy margin chosen_logratio rejected_logratio",
    "simpo": "accuracy margin chosen_logp rejected_logp",
    "orpo": "accuracy margin chosen_logp rejected_logp",
    "kto": "accuracy margin z desirable_logratio undesirable_logratio",
}
every_child = pytest.mark.parametrize("name", MODULES)


@every_child
def test_a_run_of_a_child(name, tmp_path):
    """It logs the columns of the docstring and no others, in every row that should have them, and learns a little."""
    run, step = new_run(MODULES[name], tmp_path, *SMALL[name], picture=True), COLUMNS[name].split()
    scores = [f"eval/pair_{column}" for column in step]
    if name == "kto":
        scores = [f"eval/{column}" for column in step if column not in ("accuracy", "z")]
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows:
        wanted = {"step"} | ({*step, "grad_norm", "learning_rate", "truncated"} if row["step"] else set())
        if row["step"] % 2 == 0:
            wanted |= {*scores, "eval/greedy", "eval/pass@1", "eval/pass@8", "eval/distinct"}
        assert row.keys() == wanted
    assert rows[6]["margin"] > rows[1]["margin"] and (run / "curve.png").stat().st_size > 10_000
    load_model(MODULES[name].Args(model=str(run / "model")))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.learns(f"{name}-sort")) for name in MODULES])
def test_flipped_labels_teach_nothing(name, tmp_path, monkeypatch):
    """The control of the curves: wrong answers of the demonstrations stay the likeliest."""
    module = MODULES[name]
    if name == "kto":
        loss = kto.kto_loss
        monkeypatch.setattr(kto, "kto_loss", lambda ratios, labels, z, args: loss(ratios, ~labels, z, args))
    else:
        encode = module.encode_answers
        monkeypatch.setattr(module, "encode_answers", lambda row, answers, *rest: encode(row, answers[::-1], *rest))
    flags = "--device cpu --task sort --max-steps 20 --batch-size 32 --num-pairs 640 --eval-every 0 --eval-samples 1"
    folder = new_run(module, tmp_path, *flags.split(), "--learning-rate", 1e-4 if name == "orpo" else 2e-5)
    assert metrics(folder)[0]["eval/greedy"] < 0.4 and metrics(folder)[-1]["eval/greedy"] < 0.3


@every_child
def test_a_file_with_a_long_row(name, tmp_path, capsys):
    """Cut completions are a column. Nothing scores answers, so their accuracy is not logged. kto.py prints the balance
    of its labels. A prompt that leaves no room is refused before there is a folder."""
    path, rows = tmp_path / "rows.jsonl", []
    for i in range(10, 40):
        text = "9" * (30 if i == 12 else 3)
        rows.append({"prompt": f"S{i}:", "chosen": f"{i}", "rejected": text})
        if name == "kto":
            rows[-1] = {"prompt": f"S{i}:", "completion": text, "label": i % 4 == 0}
    write_rows(path, rows)
    flags = f"--device cpu --task {path} --max-steps 4 --batch-size 10 --eval-every 2 --max-length".split()
    more = ["--desirable-weight", 2] if name == "kto" else []
    folder = new_run(MODULES[name], tmp_path / "runs", *flags, 16, *more)
    out = capsys.readouterr().out
    assert 0 < sum(row.get("truncated", 0.0) for row in metrics(folder)) < 0.4
    if name == "kto":
        good = int(out.partition(" of them desirable")[0].rpartition(" ")[2])
        total = int(out.partition(" rows, ")[0].rpartition("\n")[2])
        assert f"desirable rows weigh {2 * good}, undesirable ones {total - good};" in out
    evaluated = [row for row in metrics(folder) if any(column.startswith("eval/") for column in row)]
    assert [row["step"] for row in evaluated] == [0, 2, 4] and not any("eval/greedy" in row for row in evaluated)
    with user_error(capsys, "no row can be used", "prompt of 4 tokens, and 3 are allowed"):
        command_line(MODULES[name], *flags, 4, "--output-dir", tmp_path / "none")
    assert runs_in(tmp_path / "none") == []
