"""benchmarks/stale.py: its runs can be trained, and its table takes the best learning rate."""

import pytest

from benchmarks import stale


def test_one_update_is_one_run_for_minibatches_and_epochs():
    cells = stale.cells()
    assert len(set(cells)) == len(cells) == 8 * 5 * 3 * (1 + 2 + 2)
    assert {cell.kind for cell in cells if cell.updates == 1} == {"epochs"}


@pytest.mark.parametrize("rule", stale.RULES)
@pytest.mark.parametrize("kind", stale.KINDS)
def test_every_rule_can_be_trained(rule, kind):
    small = dict(max_steps=1, num_prompts=4, num_generations=2, eval_prompts=2, eval_samples=2)
    assert 0 <= stale.train(stale.Cell(rule, kind, 4, 1e-4, 1), **small) <= 1


def test_the_table_shows_the_best_rate_and_the_equal_one(monkeypatch, tmp_path, capsys):
    """1e-4 is the rate of all, 3e-4 is better for GSPO alone; a single update stands in both rows."""
    values = {}
    for cell in stale.cells():
        better = cell.rule == "GSPO" and cell.learning_rate == 3e-4
        values[cell] = 0.9 if better else {3e-5: 0.1, 1e-4: 0.5, 3e-4: 0.2}[cell.learning_rate]
    values |= {cell: value + 0.05 * (-1) ** cell.seed for cell, value in values.items()}
    monkeypatch.setattr(stale, "recorded", lambda: values)
    monkeypatch.setattr(stale, "PICTURE", tmp_path / "stale.png")
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    stale.table()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {tuple(line[:3]): line[3] for line in lines if line[0] in stale.KINDS}
    for kind in stale.KINDS:
        assert shown[kind, "best", "GSPO"] == "0.90"
        assert shown[kind, "equal", "GSPO"] == shown[kind, "best", "CISPO"] == "0.50"
    assert stale.PICTURE.stat().st_size > 0
