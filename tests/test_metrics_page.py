"""algos/METRICS.md has every column that a script logs, and no other."""

import re
from importlib.util import find_spec

from every_script import NAMES
from tiny_runs import result

from tests.family import ROOT
from tests.specs import SPECS

# columns that a flag brings
MORE = dict(grpo=[dict(task="@rows.jsonl")], reward_model=[dict(ensemble=2)], iql=[dict(online_steps=16)],
            sft=[dict(task=("@rows.jsonl",)), dict(task=("sort", "@rows.jsonl"))])  # fmt: skip


def pattern(column: str) -> re.Pattern:
    """NAME stands for any name, R and k for a number."""
    return re.compile(re.sub("[A-Z]{2,}", ".+", column.replace("@k", r"@\d+").replace("_R", r"_-?[\d.e+-]+")))


def test_the_page_has_the_columns_of_every_script():
    page, logged = (ROOT / "algos/METRICS.md").read_text(), {}
    cells = re.findall(r"^\|([^|]+)\|", page[page.index("## All columns") :], re.MULTILINE)
    columns = {name: pattern(name) for name in re.findall(r"`([^`]+)`", " ".join(cells))}
    for algo in (algo for algo in NAMES if algo != "ppo_atari" or find_spec("ale_py")):  # it has those of ppo.py
        for more in ({}, *MORE.get(algo, ())):
            logged |= {name: algo for row in result(algo, SPECS[algo].flags | more).told for name in row}
    lacking = {name: algo for name, algo in logged.items() if not any(p.fullmatch(name) for p in columns.values())}
    assert not lacking, f"columns that the page lacks, and scripts that log them: {lacking}"
    unknown = {name for name, p in columns.items() if not any(map(p.fullmatch, logged))}
    assert unknown == {"eval/d4rl_score"}, f"columns of the page that no script logs: {unknown}"  # a file of D4RL's
