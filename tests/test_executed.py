"""Which functions of the scripts no exact test executes. One that a child renames, or whose arguments it changes, may
drop out of its parent's tests without a word; here it is named."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from every_script import NAMES

from tests.operators import functions
from tests.specs import sources

ROOT = Path(__file__).resolve().parents[1]
FILES = "exact_* parity_* expected_gradients invariance properties sft atari preferences"
ARGUED = {  # why no exact test executes a function of that name
    "collect": "test_wiring.py: its rows, random numbers, rewards and columns in every online script",
    "score_pairs": "the metrics of `update` without a gradient; test_dpo_runs.py",
    "load_state_dict": "test_resume_control.py, test_wiring.py",
    "from_messages": "test_text.py",
} | dict.fromkeys("cut_to encode_pair in_float32 load_member save_members".split(), "test_reward_models.py")
DRIVER = """
import json, sys, pytest
seen = set()

def called(frame, *_):
    if "/algos/" in frame.f_code.co_filename:
        seen.add((frame.f_code.co_filename.rpartition("/")[2][:-3], frame.f_code.co_qualname))

class Watch:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        sys.settrace(called)
        try:
            return (yield)
        finally:
            sys.settrace(None)

code = pytest.main(["-n0", "-q", "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[Watch()])
json.dump(sorted(seen), open(sys.argv[1], "w"))
sys.exit(code)
"""


@pytest.mark.slow
def test_every_function_is_executed_by_an_exact_test(tmp_path):
    files = {path for name in FILES.split() for path in (ROOT / "tests").glob(f"test_{name}.py")}
    command = [sys.executable, "-c", DRIVER, tmp_path / "seen.json", *sorted(files)]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = {tuple(pair) for pair in json.loads((tmp_path / "seen.json").read_text())}
    trees = {algo: ast.parse(sources()[f"algos/{algo}.py"]) for algo in NAMES}
    left = {(algo, name) for algo, tree in trees.items() for name in functions(tree)} - seen
    left -= {(algo, "train") for algo in NAMES}  # wiring: test_wiring.py, test_flags.py
    assert {name.rpartition(".")[2] for _, name in left} == ARGUED.keys(), f"no exact test executes {sorted(left)}"
