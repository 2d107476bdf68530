"""The tasks that need no file: countdown and sort, and how an answer to gsm8k is scored. And what files do to rows.

Prompts are in a compact notation for the tiny character model, `plain_prompt` says the same in words for others. The
demonstrations (`completion`) are mostly wrong; `solution` is right.
"""

import contextlib
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

GSM8K = "Solve the problem step by step. End with one line that holds #### and the answer as a number."
WRONG_SHARE = 0.75  # of the demonstrations
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["'].*\}\s*\]\s*""", re.DOTALL)  # as the text of a cell
CONVERT = {  # a column of other formats: how its rows become ours
    "conversations": 'def convert(row): said = [{"role": {"human": "user", "gpt": "assistant"}.get(m["from"], m["from"]'
    '), "content": m["value"]} for m in row["conversations"]]; return {"prompt": said[:-1], "completion": said[-1:]}',
    "instruction": """def convert(row): return {"prompt": f"{row['instruction']} {row.get('input') or ''}".strip(), """
    '"completion": row["output"]}',
}


def procedural(name: str) -> tuple[Callable, list[dict], Callable]:
    """train(index, seed), held-out rows, score. Rows are drawn afresh; those whose key hashes to 0 mod 10 are held out,
    whatever their order of digits."""
    make, score = {"countdown": (countdown_row, countdown_score), "sort": (sort_row, sort_score)}[name]

    def draw(rng: random.Random, want_heldout: bool) -> dict:
        while True:
            row, key = make(rng)
            if (zlib.crc32(f"{name} {key}".encode()) % 10 == 0) == want_heldout:
                return row

    heldout, rng = {}, random.Random(name)
    while len(heldout) < 256:
        row = draw(rng, True)
        heldout[row["prompt"]] = row
    return lambda i, seed: draw(random.Random(f"{name}/{seed}/{i}"), False), list(heldout.values()), score


def countdown_row(rng: random.Random) -> tuple[dict, str]:
    """Three numbers from 1 to 9 and a target from 1 to 99 that two steps reach, larger operand first. Three in four
    demonstrations end one too high, so the warm start's likeliest answer is wrong, and sharpening keeps it wrong."""
    target = 100
    while target > 99:
        numbers = [rng.randint(1, 9) for _ in range(3)]
        left, steps = list(numbers), []
        while len(left) > 1:
            a, b = sorted((left.pop(rng.randrange(len(left))) for _ in range(2)), reverse=True)
            options = [("+", a + b), ("*", a * b)] + [("-", a - b)] * (a > b) + [("/", a // b)] * (a % b == 0)
            operator, result = rng.choice(options)
            steps.append(f"{a}{operator}{b}={result}")
            left.append(result)
        target = left[0]
    solution = ",".join(steps)
    if rng.random() < WRONG_SHARE:
        steps[-1] = f"{steps[-1].partition('=')[0]}={target + 1}"
    question = (
        f"Use each of the numbers {numbers[0]}, {numbers[1]} and {numbers[2]} exactly once, with + - * /, to reach "
        f"{target}. Work in two steps, the second of which uses the result of the first. Give the steps in the form "
        "<answer>5*7=35,35-3=32</answer>."
    )
    prompt = f"C{''.join(map(str, numbers))}={target}:"
    row = dict(prompt=prompt, plain_prompt=question, numbers=numbers, target=target, completion=",".join(steps),
               solution=solution)  # fmt: skip
    return row, f"{sorted(numbers)} {target}"


def countdown_score(row: dict, text: str) -> float:
    """1 if the steps use each number once, are right, and end at the target. A parser, never `eval`."""
    steps = answer_of(text).replace(" ", "").split(",")
    left = list(row["numbers"])
    for step in steps:
        match = re.fullmatch(r"(\d{1,4})([-+*/])(\d{1,4})=(\d{1,5})", step, re.ASCII)
        if match is None:
            return 0.0
        a, b, result = (int(match[i]) for i in (1, 3, 4))
        right = {"+": a + b == result, "-": a - b == result, "*": a * b == result, "/": b > 0 and b * result == a}
        if not right[match[2]] or a not in left or b not in [n for i, n in enumerate(left) if i != left.index(a)]:
            return 0.0
        left.remove(a)
        left.remove(b)
        left.append(result)
    return float(left == [row["target"]])


def sort_row(rng: random.Random) -> tuple[dict, str]:
    """Three to eight digits. Three in four demonstrations swap the first two of the sorted digits, so the warm
    start's likeliest answer is wrong (unless those two are equal), and sharpening keeps it wrong."""
    digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 8))]
    answer = sorted(digits)
    if rng.random() < WRONG_SHARE:
        answer[0], answer[1] = answer[1], answer[0]
    shown = "".join(map(str, digits))
    question = f"Sort the digits {shown} in ascending order and give them in the form <answer>0123</answer>."
    row = {"prompt": f"S{shown}:", "plain_prompt": question, "digits": shown, "completion": "".join(map(str, answer)),
           "solution": "".join(map(str, sorted(digits)))}  # fmt: skip
    return row, str(sorted(digits))


def sort_score(row: dict, text: str) -> float:
    """1 if the answer is the digits in ascending order."""
    return float(answer_of(text) == "".join(sorted(row["digits"])))


def right_and_wrong(rows: Iterable[dict]) -> Iterator[dict]:
    """Pairs of a right and a wrong answer, which errs as three in four demonstrations do. Sort has none where the two
    smallest digits are equal."""
    for row in rows:
        right = row["solution"]
        too_high = f"{right.rpartition('=')[0]}={row.get('target', 0) + 1}"
        wrong = right[1] + right[0] + right[2:] if "digits" in row else too_high
        if right != wrong:
            yield row | {"chosen": right, "rejected": wrong}


def answer_of(text: str) -> str:
    """The text between the last pair of answer tags; without a pair what stands before a closing tag, else all: a
    prompt may hold the opening tag."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (found[-1] if found else text.partition("</answer>")[0]).strip()


def gsm8k_score(row: dict, text: str) -> float:
    """1 if the first number in the line of the last #### is the solution's."""
    return float((found := stated(text)) is not None and found == stated(row["answer"]))


def stated(text: str) -> float | None:
    """Without thousands separators; None where there is no such line or no number in it."""
    line = text.rpartition("####")[2].strip().partition("\n")[0] if "####" in text else ""
    found = re.search(r"[-\u2212]?(?:\d[\d,]*(?:\.\d+)?|(?<!\w)\.\d+)", line, re.ASCII)
    return float(found[0].replace(",", "").replace("\u2212", "-")) if found else None


def tell_changes(path: Path, rows) -> None:
    """Prints which columns of a JSON file are read as other types: dates as datetimes, 1 beside 2.5 as 1.0."""
    with open(path) as file, contextlib.suppress(ValueError, AttributeError):  # rows in another form
        given = json.load(file) if path.suffix == ".json" else map(json.loads, file)
        kinds = {name: f"{name} ({type(value).__name__} in the file, {type(row[name]).__name__} in the rows)"
                 for one, row in zip(given, islice(rows, 1000))
                 for name, value in one.items() if type(value) is not type(row[name])}  # fmt: skip
        if kinds:
            print(f"warning: columns of {path} have other types than its text: {', '.join(kinds.values())}")


def restored(row: dict) -> dict:
    """The row as a chat template takes it. Text that holds messages as JSON (of a CSV) becomes messages. In messages
    and tools: arguments that are JSON text are read, or the template would write them as JSON once more; parts that are
    all text are joined; None, which Arrow writes for names that another of them has, is left out. Raises ValueError
    for what is no JSON."""

    def read(value, name: str = ""):
        if isinstance(value, dict):
            return {key: read(part, key) for key, part in value.items() if part is not None or key == "content"}
        if isinstance(value, list):
            texts = name == "content" and all(isinstance(x, dict) and x.get("type") == "text" for x in value)
            return "".join(part.get("text") or "" for part in value) if texts else [read(part) for part in value]
        return json.loads(value or "{}") if name == "arguments" and isinstance(value, str) else value

    cells = {name: json.loads(x) if isinstance(x, str) and MESSAGES.fullmatch(x) else x for name, x in row.items()}
    return {name: read(x) if isinstance(x, list) else x for name, x in cells.items()}
