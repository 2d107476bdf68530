"""benchmarks/grpo_family.py: every rule can be trained; entropy and KL by hand; the table's numbers."""

import pytest
import torch

from benchmarks import grpo_family
from utils.models import TINY_MODEL, load_model
from utils.tasks import load_task

SMALL = dict(max_steps=1, num_prompts=4, num_generations=2, eval_every=1, eval_prompts=2)


@pytest.mark.parametrize("rule", [rule for rule, how in grpo_family.RULES.items() if how])
def test_every_rule_can_be_trained(rule):
    columns = grpo_family.train(rule, 1, **SMALL)
    assert set(columns) == set(grpo_family.PANELS)
    assert len(columns["reward"]) == 1 and all(len(columns[name]) == 2 for name in columns if name != "reward")
    assert columns["eval/kl"][0] == pytest.approx(0, abs=1e-6)


def test_trl_can_be_trained():
    pytest.importorskip("trl")
    columns = grpo_family.train("TRL's GRPO", 1, **SMALL)
    assert len(columns["reward"]) == 1 and len(columns["eval/kl"]) == 2 and columns["eval/kl"][0] < 1e-6


def test_entropy_and_divergence_of_a_sharper_policy(monkeypatch):
    """The policy is the start with logits twice as large: at each of its tokens both follow from the start's logits."""
    start, tokenizer = load_model(TINY_MODEL)
    policy, _ = load_model(TINY_MODEL)
    with torch.no_grad():
        policy.get_output_embeddings().weight = torch.nn.Parameter(2 * start.get_output_embeddings().weight)
    seen = []
    sample_all = grpo_family.sample_all
    monkeypatch.setattr(grpo_family, "sample_all", lambda *args: seen.append(sample_all(*args)) or seen[-1])
    found = grpo_family.measured(start, policy, tokenizer, load_task("countdown"), None, 3, 8, 20, 1.0, 1)
    (samples,) = seen
    entropies, divergences = [], []
    for row in range(len(samples.completion_ids)):
        group = row // grpo_family.ANSWERS
        prompt = samples.prompt_ids[group][samples.prompt_mask[group]]
        completion = samples.completion_ids[row][samples.completion_mask[row]]
        with torch.no_grad():
            logits = start(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1].double()
        p, q = (2 * logits).softmax(-1), logits.softmax(-1)
        entropies += (-(p * p.log()).sum(-1)).tolist()
        divergences += (p * (p / q).log()).sum(-1).tolist()
    assert found["eval/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert found["eval/kl"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-4)
    assert found["eval/kl"] > 0.01


def test_the_table(monkeypatch):
    run = {name: [0.0, 0.5] for name in grpo_family.PANELS}
    better = run | {"eval/kl": [0.0, 0.7]}
    monkeypatch.setattr(grpo_family, "recorded", lambda: {("GRPO", 1): run, ("GRPO", 2): better})
    line = next(line for line in grpo_family.table().splitlines() if line.startswith("| GRPO |"))
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells[:3] == ["2", "0.25 +- 0.00", "0.50 +- 0.00"]
    assert [cell.strip() for cell in grpo_family.table().splitlines()[-1].split("|")[2:4]] == ["0", "-"]
    assert cells[6] == "0.60 +- 1.27"  # 0.1 x sqrt(2) / sqrt(2) x t of one degree of freedom, 12.7


def test_the_picture(monkeypatch, tmp_path):
    run = {name: [0.0, 0.5] for name in grpo_family.PANELS} | {"reward": [0.1] * 20}
    monkeypatch.setattr(grpo_family, "recorded", lambda: {("GRPO", 1): run, ("TRL's GRPO", 1): run})
    monkeypatch.setattr(grpo_family, "PICTURE", tmp_path / "family.png")
    monkeypatch.setattr(grpo_family, "ROOT", tmp_path)
    grpo_family.show()
    assert grpo_family.PICTURE.stat().st_size > 10_000
