"""Tasks: rows that depend on nothing but index and seed, scores that cannot be fooled, prompts for each model."""

import itertools
import re
from collections import Counter

import pytest
from helpers import write_rows
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from utils.core import UserError
from utils.data import encode_answers, encode_prompt, load_task, present
from utils.lm import TINY_MODEL

pytestmark = pytest.mark.usefixtures("own_cache")
KEYS = {
    "countdown": lambda row: (*sorted(row["numbers"]), "=", row["target"]),
    "sort": lambda row: "".join(sorted(row["digits"])),
}
procedural = pytest.mark.parametrize("name", ["countdown", "sort"])


@procedural
def test_heldout_problems_are_never_trained(name):
    """Disjoint as problems, not as strings: the same numbers or digits in another order count as the same."""
    task = load_task(name)
    trained = {KEYS[name](task.train(i, seed)) for seed in (1, 2) for i in range(3000)}
    assert len(trained) > 500 and len(task.heldout) == 256
    assert trained.isdisjoint(KEYS[name](row) for row in task.heldout)
    assert len({row["prompt"] for row in task.heldout}) == 256


@procedural
def test_rows_depend_on_index_and_seed_alone(name):
    """Row 7 is row 7, whatever was asked for before and by whom; other seeds and indices give other rows."""
    one, other = load_task(name), load_task(name)
    ascending = [one.train(i, 1) for i in range(20)]
    assert ascending == [other.train(i, 1) for i in reversed(range(20))][::-1]
    assert one.heldout == other.heldout
    assert len({row["prompt"] for row in ascending}) > 15
    assert [row["prompt"] for row in ascending] != [one.train(i, 2)["prompt"] for i in range(20)]


def solutions(numbers: list[int], target: int) -> list[str]:
    """Every pair of right steps, by exhaustion."""
    found = []
    for a, b, c in itertools.permutations(numbers):
        for first, x in results(a, b):
            found += [f"{first},{step}" for y, z in ((x, c), (c, x)) for step, end in results(y, z) if end == target]
    return found


def results(a: int, b: int) -> list[tuple[str, int]]:
    pairs = (
        [("+", a + b), ("*", a * b)]
        + [("-", a - b)] * (a >= b)
        + [("/", a // max(b, 1))] * (b > 0 and a % max(b, 1) == 0)
    )
    return [(f"{a}{operator}{b}={result}", result) for operator, result in pairs]


def test_countdown_demonstrations():
    """Every target can be reached, and the score accepts every way to reach it and no other end. About three in four
    demonstrations are wrong, and then in nothing but the result of their last step."""
    task, plain = load_task("countdown"), tokenizer(big=True)
    wrong = []
    for i, row in enumerate([task.train(i, 3) for i in range(2000)] + task.heldout):
        numbers, target = row["numbers"], row["target"]
        assert row["prompt"] == f"C{''.join(map(str, numbers))}={target}:" and 1 <= target <= 99
        if i < 200:
            question = present(row, plain)
            assert all(f" {number}" in question for number in [*numbers, target]) and row["prompt"] not in question
        right = solutions(numbers, target)
        is_right = row["completion"] in right
        assert right and task.score(row, row["completion"]) == float(is_right)
        assert row["solution"] in right and (not is_right or row["solution"] == row["completion"])
        if i < 200:
            assert all(task.score(row, answer) == 1 for answer in right)
            assert all(task.score(row | {"target": target + 1}, answer) == 0 for answer in right)
        wrong.append(not is_right)
        steps = row["completion"].rpartition("=")[0]
        a, b = map(int, re.split(r"[-+*/]", steps.rpartition(",")[2]))
        (true,) = [result for step, result in results(a, b) if f",{step.partition('=')[0]}" in steps]
        assert task.score(row | {"target": true}, f"{steps}={true}") == 1.0
    assert 0.7 < sum(wrong) / len(wrong) < 0.8  # 2256 rows: standard deviation 0.009


COUNTDOWN = """
3 5 7=32 5*7=35,35-3=32 is right
3 5 7=32 7*5=35,35-3=32 is right
3 5 7=32 5*7=35,35-3=32,32+0=32 has an extra step
3 5 7=32 5*7=35,35-3=32, has an empty step
3 5 7=32 5*7=35 leaves a number
3 5 7=32 5*7=35,35-3=33 has wrong arithmetic
3 5 7=32 5*7=32 has wrong arithmetic
3 5 7=32 5*7=35,35-5=30 uses a number again
3 5 7=32 7+7=14,14*3=42 uses a number twice in a step
3 5 7=32 5*7=35,3*1=3 uses a number that is not there
3 5 7=32 3-5=-2,7-2=5 goes below 0
3 5 7=32 7/0=7,5*7=35 divides by zero
3 5 7=32 7/3=2,5*2=10 has an inexact division
3 5 7=32 5*7-3=32 has two operations in a step
3 5 7=32 5**7=32 has no operator
3 5 7=32 ٥*7=35,35-3=32 has digits of another script
3 5 7=32 ５*7=35,35-3=32 has wide digits
3 5 7=32 5*7=35;35-3=32 has another separator
3 5 7=32 32 has no steps
3 5 7=32 , has empty steps
4 8 2=32 4*8=32 reaches the target but leaves a number
4 8 2=32 4*8=32,32*2=64 goes beyond the target
4 4 2=4 4/2=2,2*4=8 ends elsewhere
4 4 2=4 4-2=2,4-2=2 ends elsewhere
4 4 2=4 4*2=8,8-4=4 is right: each of two equal numbers is used
4 2 2=4 4/4=1,1*2=2 uses a number twice that is there once
8 2 2=6 8/2=4,4+2=6 is right
8 4 2=4 8/2=4,4*1=4 uses a result that is not there
""".strip().splitlines()


@pytest.mark.parametrize("case", COUNTDOWN)
def test_countdown_score(case):
    numbers, target, answer, why = re.match(r"([ \d]+)=(\d+) (\S+) (.*)", case, re.ASCII).groups()
    row = {"numbers": [*map(int, numbers.split())], "target": int(target)}
    assert load_task("countdown").score(row, answer) == float(why.startswith("is right"))


@pytest.mark.parametrize(
    "answer, reward",
    [
        (" 5 * 7 = 35, 35-3 = 32\n", 1),
        ("so <answer>1+1=2</answer> or <answer>\n5*7=35,35-3=32 </answer>, I think", 1),
        ("<answer>5*7=35,35-3=32</answer> <answer>1+1=2</answer>", 0),
        ("5*7=35,35-3=32 and so on", 0),
        ("5*7=35,35-3=" + "9" * 5000, 0),
        ("9" * 100_000 + "*7=35,35-3=32", 0),
        ("", 0),
    ],
    ids=lambda x: str(x)[:30],
)
def test_countdown_score_of_other_texts(answer, reward):
    """Spaces do not matter, and what stands in the last pair of tags counts."""
    assert load_task("countdown").score({"numbers": [3, 5, 7], "target": 32}, answer) == float(reward)


def test_most_sort_demonstrations_are_wrong():
    """So that the likeliest answer of what imitates them is wrong, for every number of digits."""
    task = load_task("sort")
    wrong = {length: [] for length in range(3, 9)}
    for row in [task.train(i, 1) for i in range(3000)]:
        is_wrong = row["completion"] != "".join(sorted(row["digits"]))
        assert task.score(row, row["completion"]) == float(not is_wrong)
        assert row["solution"] == "".join(sorted(row["digits"]))
        assert sorted(row["completion"]) == sorted(row["digits"]) and row["prompt"] == f"S{row['digits']}:"
        if sorted(row["digits"])[0] != sorted(row["digits"])[1]:  # swapping two equal digits changes nothing
            wrong[len(row["digits"])].append(is_wrong)
    assert all(0.65 < sum(w) / len(w) < 0.85 for w in wrong.values())  # about 400 each: standard deviation 0.022


@pytest.mark.parametrize("answer, reward", [("0112", 1), (" 0112\n", 1), ("x <answer>0112</answer>", 1), ("1012", 0),
                                            ("112", 0), ("01122", 0), ("0 1 1 2", 0), ("٠112", 0),
                                            ("", 0)])  # fmt: skip
def test_sort_score(answer, reward):
    assert load_task("sort").score({"digits": "1201"}, answer) == float(reward)


@pytest.fixture
def gsm8k(tmp_path):
    """gsm8k:FOLDER with 30 training and 5 test problems."""
    for name, count in (("train", 30), ("test", 5)):
        rows = [{"question": f"{name} {i}?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
                for i in range(count)]  # fmt: skip
        write_rows(tmp_path / f"{name}.jsonl", rows)
    return load_task(f"gsm8k:{tmp_path}")


def test_gsm8k_rows(gsm8k):
    """The folder's own test split is held out; the prompt is the question with the instruction, the completion the
    solution, which scores full marks."""
    assert [row["prompt"].splitlines()[0] for row in gsm8k.heldout] == [f"test {i}?" for i in range(5)]
    row = gsm8k.train(3, 1)
    assert row["prompt"].startswith("train ") and "####" in row["prompt"]
    assert gsm8k.score(row, row["completion"]) == 1


@pytest.mark.parametrize("gold, text, reward", [
    ("72", "so 70 + 2 = 72\n#### 72", 1),
    ("72", "#### 72.0", 1),
    ("72", "#### $72", 1),
    ("72", "#### 72 apples", 1),
    ("72", "so it is 72.", 0),
    ("72", "72 of 100", 0),
    ("72", "#### 72\nThat is 7 dozen and 1", 1),
    ("72", "first #### 5, then\n#### 72", 1),
    ("72", "#### 72\n#### 5", 0),
    ("72", "72 ####", 0),
    ("72", "####", 0),
    ("72", "no idea", 0),
    ("72", "", 0),
    ("72", "#### 7 2", 0),
    ("1,234", "#### 1234", 1),
    ("1234", "#### 1,234", 1),
    ("1234567", "#### $1,234,567", 1),
    ("-5", "#### -5", 1),
    ("-5", "#### 5", 0),
    ("5", "#### 8-3 = 5", 0),
    ("72", "#### 72 (6 dozens of 12)", 1),
    ("-3", "#### \u22123", 1),
    ("0.5", "#### .5", 1),
    ("5", "#### No.5", 1),
    ("0.25", "#### 0.25", 1),
    ("25", "#### 0.25", 0),
    ("72", "#### ７２", 0),
])  # fmt: skip
def test_gsm8k_score(gsm8k, gold, text, reward):
    """The number after the last ####."""
    assert gsm8k.score({"answer": f"work 1 2 3\n#### {gold}"}, text) == reward


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"}]


@pytest.mark.parametrize(
    "kind, chat",
    [("jsonl", False), ("jsonl", True), ("parquet", False), ("parquet", True), ("csv", False), ("saved", True),
     ("splits", True), ("folder", True)],
)  # fmt: skip
def test_dataset_files(kind, chat, tmp_path, own_cache):
    """JSONL, Parquet, CSV, what save_to_disk writes and a folder of files, plain text and chat messages, and a prompt
    column of another name: rows arrive as they are."""
    prompts = [[*MESSAGES, {"role": "user", "content": str(i)}] if chat else f"{i}?" for i in range(60)]
    rows = [{"ask": prompt, "prompt": "another column", "gold": i} for i, prompt in enumerate(prompts)]
    path = tmp_path / ("file" if kind in ("saved", "splits", "folder") else f"file.{kind}")
    table = own_cache.Dataset.from_list(rows)
    if kind == "splits":
        table = own_cache.DatasetDict(train=table)
    if kind == "folder":
        path.mkdir()
    how = {"jsonl": lambda: write_rows(path, rows), "parquet": lambda: table.to_parquet(path),
           "csv": lambda: table.to_csv(path), "folder": lambda: table.to_json(path / "rows.jsonl")}  # fmt: skip
    how.get(kind, lambda: table.save_to_disk(path))()
    task = load_task(str(path), "ask")
    trained = [task.train(i, 1) for i in range(60 - len(task.heldout))]
    assert task.name == "file" and task.score is None and len(task.heldout) == 3
    assert sorted(row["gold"] for row in trained + task.heldout) == list(range(60))
    assert all(row["prompt"] == prompts[row["gold"]] and "ask" not in row for row in trained + task.heldout)


@pytest.mark.parametrize("spec", ["rows.csv", "./rows.txt", "/no/where", "rows"])
def test_a_source_that_is_none_is_said_at_once(spec, monkeypatch, own_cache):
    """The hub, which answers a path with half a minute of silence, is not asked."""
    monkeypatch.setattr(own_cache, "load_dataset", lambda *_: pytest.fail("asks"))
    with pytest.raises(UserError, match="there is no task and no file .*rows|where"):
        load_task(spec)


@pytest.mark.parametrize("name, text", [("rows.txt", "one?"), ("rows.jsonl", ""), ("rows.csv", "prompt\n")])
def test_a_file_without_rows_is_said(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="cannot read the dataset .*rows"):
        load_task(str(tmp_path / name))


@pytest.mark.parametrize("names, train, heldout", [
    ("train test", "train", "test"),
    ("train_sft test_sft train_gen test_gen", "train_sft", "test_sft"),
    ("test_prefs train_prefs train", "train", "test_prefs"),
    ("train validation_matched test", "train", "test"),
    ("train valid", "train", "valid"),
    ("default test", "default", "test"),
])  # fmt: skip
def test_a_dataset_with_a_test_split_of_its_own(names, train, heldout, monkeypatch, capsys, own_cache):
    """Split names as on the hub; training rows with a held-out prompt are dropped, also beyond what is kept."""
    rows = {name: [{"prompt": f"{name} {i}?"} for i in range(300)] for name in names.split()}
    rows[train] += [{"prompt": f"{heldout} 7?"}, {"prompt": f"{heldout} 299?"}]
    made = own_cache.DatasetDict({name: own_cache.Dataset.from_list(part) for name, part in rows.items()})
    monkeypatch.setattr(own_cache, "load_dataset", lambda *_: made)
    task = load_task("ORG/NAME")
    assert [row["prompt"] for row in task.heldout] == [f"{heldout} {i}?" for i in range(256)]
    assert {task.train(i, 1)["prompt"] for i in range(400)} == {f"{train} {i}?" for i in range(300)}
    assert "300 rows to train on, 2 whose prompt is held out" in capsys.readouterr().out


def test_a_test_split_that_is_the_training_split(monkeypatch, own_cache):
    rows = own_cache.Dataset.from_list([{"prompt": f"{i}?"} for i in range(9)])
    monkeypatch.setattr(own_cache, "load_dataset", lambda *_: own_cache.DatasetDict(train=rows, test=rows))
    with pytest.raises(UserError, match="not held out"):
        load_task("ORG/NAME")


def test_a_dataset_with_nothing_but_a_test_split(monkeypatch, own_cache):
    """It is trained on, and a part of it is held out: equal prompts stand on one side."""
    rows = own_cache.Dataset.from_list([{"prompt": f"{i % 50}?", "gold": i} for i in range(100)])
    monkeypatch.setattr(own_cache, "load_dataset", lambda *_: own_cache.DatasetDict(test=rows))
    task = load_task("ORG/NAME")
    train, heldout = (sorted(row["gold"] for row in part) for part in (task.rows, task.heldout))
    assert sorted(train + heldout) == list(range(100)) and heldout[2:] == [gold + 50 for gold in heldout[:2]]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}S{% endif %}"
)


def tokenizer(template: str | None = None, big: bool = False, bos: bool = False):
    """The tiny model's, with a chat template, more than a hundred tokens, a BOS that plain text gets, or not."""
    made = AutoTokenizer.from_pretrained(TINY_MODEL)
    made.chat_template = template
    if big:
        made.add_tokens([f"word{i}" for i in range(100)])
    if bos:
        made.add_special_tokens({"bos_token": "<bos>"})
        special = [("<bos>", made.bos_token_id)]
        made.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=special)
    return made


def test_prompt_for_each_kind_of_model(tmp_path):
    """The compact notation is for the tiny model alone, plain language for others, messages for chat templates."""
    row = load_task("sort").train(0, 1)
    question = present(row, tokenizer(big=True))
    assert question.startswith("Sort the digits ") and row["digits"] in question
    assert present(row, tokenizer()) == row["prompt"]
    assert present(row, tokenizer(TEMPLATE, big=True)) == [{"role": "user", "content": question}]
    assert present(row, tokenizer(TEMPLATE)) == [{"role": "user", "content": row["prompt"]}]
    assert present({"prompt": MESSAGES}, tokenizer(TEMPLATE)) == MESSAGES
    with pytest.raises(UserError, match="chat template"):
        present({"prompt": MESSAGES}, tokenizer(big=True))


def test_prompt_column_is_the_prompt(tmp_path):
    """A dataset's own column called question is data: the model gets the prompt column, and nothing in place of it."""
    rows = [{"prompt": f"Answer in one word: {i}?", "question": f"{i}?", "plain_prompt": "another"} for i in range(10)]
    row = load_task(write_rows(tmp_path / "file.JSONL", rows)).train(0, 1)
    assert present(row, tokenizer(big=True)) == row["prompt"]
    assert present(row, tokenizer(TEMPLATE, big=True)) == [{"role": "user", "content": row["prompt"]}]


def test_one_bos(tmp_path):
    """Plain text gets the tokenizer's BOS, a template brings its own: once in either case, and first."""
    tok = tokenizer(TEMPLATE, bos=True)
    for prompt in ("S21:", [{"role": "user", "content": "S21:"}]):
        ids = encode_prompt({"prompt": prompt}, tok)
        assert ids[0] == tok.bos_token_id and Counter(ids)[tok.bos_token_id] == 1
    tok.chat_template = None
    prompt, completion = encode_answers({"prompt": "S21:"}, ["12"], tok, [tok.eos_token_id])
    assert prompt[0] == tok.bos_token_id and tok.bos_token_id not in completion
