"""Unpaired preference data: rows with a label, pairs taken as two of them, and what is refused."""

import pytest
from helpers import write_rows

from algos.kto import labelled, load_unpaired
from utils.data import load_pairs, load_task

pytestmark = pytest.mark.usefixtures("own_cache")
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "21"), ("assistant", "12"), ("assistant", "21")))


def chosen_columns(rows: list[dict], *names: str) -> list[dict]:
    return [{name: row[name] for name in names} for row in rows]


@pytest.mark.parametrize("name", ["countdown", "sort"])
def test_embedded_rows(name):
    """Both kinds for each problem, and the label says what the task says."""
    data, task = load_unpaired(name, 50, 1), load_task(name)
    assert len(data.train) == 100 and data.task.score is not None
    assert sum(row["label"] for row in data.train) == 50
    for row in data.train + data.heldout:
        assert task.score(row, row["completion"]) == row["label"]
    pairs = load_pairs(name, 50, 1)
    assert [row["completion"] for row in data.train[::2]] == [row["chosen"] for row in pairs.train]
    assert [row["completion"] for row in data.train[1::2]] == [row["rejected"] for row in pairs.train]
    assert len(data.heldout) == 2 * len(pairs.heldout)


@pytest.mark.parametrize("form", ["explicit", "implicit", "chat"])
def test_pairs_become_two_rows(form, tmp_path):
    """As trl.unpair_preference_dataset makes them, prompts taken from what both begin with where there are none."""
    rows = [dict(prompt=f"Q {i}:", chosen=f" good {i}", rejected=f" bad {i}") for i in range(9)]
    if form == "implicit":
        rows = [dict(chosen=r["prompt"] + r["chosen"], rejected=r["prompt"] + r["rejected"]) for r in rows]
    if form == "chat":
        rows = [dict(chosen=[USER | {"content": str(i)}, GOOD], rejected=[USER | {"content": str(i)}, BAD])
                for i in range(9)]  # fmt: skip
    data = load_unpaired(write_rows(tmp_path / "rows.jsonl", rows), 1, 1)
    found = chosen_columns([*data.train, *data.heldout], "prompt", "completion", "label")
    if form == "chat":
        expected = [dict(prompt=[USER | {"content": str(i)}], completion=[c], label=label)
                    for i in range(9) for c, label in ((GOOD, True), (BAD, False))]  # fmt: skip
    else:
        expected = [dict(prompt=f"Q {i}:", completion=f" {kind} {i}", label=label)
                    for i in range(9) for kind, label in (("good", True), ("bad", False))]  # fmt: skip
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert {row["prompt"] for row in data.train}.isdisjoint(r["prompt"] for r in data.heldout) if form != "chat" else 1


def test_as_trl_unpairs_them(tmp_path):
    trl = pytest.importorskip("trl", reason="not run: trl is not installed")
    import datasets

    rows = [dict(prompt=f"Q {i}:", chosen=f" good {i}", rejected=f" bad {i}") for i in range(9)]
    data = load_unpaired(write_rows(tmp_path / "rows.jsonl", rows), 1, 1)
    ours = chosen_columns([*data.train, *data.heldout], "prompt", "completion", "label")
    theirs = chosen_columns(trl.unpair_preference_dataset(datasets.Dataset.from_list(rows)), *ours[0])
    assert sorted(map(str, ours)) == sorted(map(str, theirs))


@pytest.mark.parametrize("label", [True, False, 1, 0])
@pytest.mark.parametrize("prompt, completion", [("p", "c"), ([USER], [GOOD])])
def test_forms(label, prompt, completion):
    row = labelled(dict(prompt=prompt, completion=completion, label=label, score=5))
    assert row == dict(prompt=prompt, completion=completion, label=bool(label), score=5)
    assert type(row["label"]) is bool
