"""algos/METRICS.md has every column that a script logs, and no other."""

import importlib.util
import re

from every_script import NAMES
from tiny_runs import train

from tests.family import ROOT
from tests.specs import SPECS

PAGE = (ROOT / "algos/METRICS.md").read_text()
FIRST_CELLS = re.findall(r"^\|([^|]+)\|", PAGE[PAGE.index("## All columns") :], re.MULTILINE)
COLUMNS = [name for cell in FIRST_CELLS for name in re.findall(r"`([^`]+)`", cell)]
NEVER_HERE = {"eval/d4rl_score"}  # needs D4RL's own file and its environment
MORE = (  # columns that a flag brings
    ("grpo", dict(task="@rows.jsonl")), ("reward_model", dict(ensemble=2)), ("iql", dict(online_steps=16)),
    ("sft", dict(task=("@rows.jsonl",))), ("sft", dict(task=("sort", "@rows.jsonl"))),
)  # fmt: skip


def pattern(column: str) -> str:
    """NAME stands for any name, R and k for a number."""
    found = re.sub(r"[A-Z]{2,}", ".+", re.escape(column).replace("@k", r"@\d+"))
    return re.sub(r"_R$", r"_-?[\\d.e+-]+", found)


def test_the_page_has_the_columns_of_every_script(tmp_path):
    atari = importlib.util.find_spec("ale_py")  # else left out: ppo_atari.py has the columns of ppo.py
    logged = {}
    for number, (algo, more) in enumerate([*((algo, {}) for algo in NAMES if atari or algo != "ppo_atari"), *MORE]):
        rows, *_ = train(algo, SPECS[algo].flags | more, tmp_path / str(number))
        logged |= {column: algo for row in rows for column in row}
    patterns = {column: re.compile(pattern(column)) for column in COLUMNS}
    lacking = {c: algo for c, algo in logged.items() if not any(p.fullmatch(c) for p in patterns.values())}
    assert not lacking, f"columns that the page lacks, and scripts that log them: {lacking}"
    unknown = {c for c, p in patterns.items() if not any(map(p.fullmatch, logged))}
    assert unknown == NEVER_HERE, f"columns of the page that no script logs: {unknown}"
