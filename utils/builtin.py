"""The tasks that need no file: countdown and sort, and how an answer to gsm8k is scored. And what files do to rows.

Prompts are in a compact notation for the tiny character model, `plain_prompt` says the same in words for others. The
demonstrations (`completion`) are mostly wrong; `solution` is right.
"""

import json
import random
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from utils.core import UserError

WRONG_SHARE = 0.75  # of the demonstrations
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["'].*\}\s*\]\s*""", re.DOTALL)  # as the text of a cell
TEXTS = ("prompt", "completion", "chosen", "rejected", "messages", "tools")  # columns that a model reads or writes
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # formats of the datasets library
NUMBER = r"(True|False|-?(0|[1-9]\d*)(\.(0|\d*[1-9]))?(e[-+]?\d+)?)?"  # a cell that is one, or empty
LINE = "a row as JSON"  # the one column of what was a JSON or CSV file


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


class RowFault(UserError):
    """Why a row cannot be used: it is dropped and counted, and the run goes on."""

    def __init__(self, row: dict, why: str):
        super().__init__(f"a row {why} (it begins {str(row)[:100]})")
        self.kind = re.sub(r"\d+|\(.*", "", why)


def read_splits(spec: str, *texts: str) -> dict:
    """The splits that are not empty, each a datasets.Dataset; of JSON files one of LINE. texts: names of columns that
    are text in a CSV, besides TEXTS."""
    import datasets  # slow to import, and the built-in tasks do without

    datasets.disable_progress_bars()
    path, (name, _, config) = Path(spec).expanduser(), spec.partition(":")
    kind = None if path.is_dir() else FILES.get(path.suffix.lower())
    if not path.exists() and (kind or "/" not in spec or spec[0] in "./~"):
        raise UserError(f"there is no task and no file {path}: give one that exists, or a hub dataset ORG/NAME")
    try:
        Path(datasets.config.HF_DATASETS_CACHE).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=datasets.config.HF_DATASETS_CACHE).close()
    except OSError:  # where nothing can be written
        datasets.config.HF_DATASETS_CACHE = tempfile.mkdtemp()
    try:
        saved = any((path / file).is_file() for file in ("dataset_dict.json", "state.json"))
        files = {"train": [path]} if kind else {}
        if path.is_dir() and not saved:
            files = datasets.load_dataset_builder(str(path)).config.data_files
        if saved:
            found = datasets.load_from_disk(str(path))
        elif files and all(Path(file).suffix.lower() in FILES for part in files.values() for file in part):
            read = partial(read_file, texts=(*TEXTS, *texts))
            found = {str(name): datasets.concatenate_datasets([*map(read, part)]) for name, part in files.items()}
        else:
            found = datasets.load_dataset(str(path) if path.exists() else name, config or None)
        splits = found if isinstance(found, dict) else {"train": found}
        splits = {name: rows for name, rows in splits.items() if len(rows)}
        if not splits:
            raise ValueError("it is empty")
        return splits
    except Exception as error:  # the library raises dozens of kinds, all of which mean the same to the user
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(f"cannot read the dataset {spec} ({reason}): give a readable file or hub name") from error


def read_file(file: str | Path, texts: Sequence[str]):
    """The rows of a file as they stand there, as a datasets.Dataset. A column of a CSV that is none of `texts` is
    numbers or truth values where each cell is written as one: "007" and "1.10" are none. JSON becomes one column, LINE:
    in Arrow each column has one type, and dates become datetimes."""
    from datasets import Dataset

    path = Path(file)
    if (kind := FILES[path.suffix.lower()]) == "parquet":
        return Dataset.from_parquet(str(path))
    if kind == "json":
        about = path.stat()
        return Dataset.from_generator(
            lines_of, gen_kwargs={"path": str(path), "stamp": (about.st_size, about.st_mtime_ns)}
        )
    import pandas  # comes with datasets

    rows = pandas.read_csv(path, dtype=str, keep_default_na=False)
    guess = pandas.read_csv(path, dtype_backend="numpy_nullable")  # with which whole numbers stay so beside empty cells
    if not isinstance(rows.index, pandas.RangeIndex):
        raise ValueError("a line has more cells than the first one")
    for name in rows:
        known = name not in texts and rows[name].str.fullmatch(NUMBER).all()
        rows[name] = guess[name] if known else rows[name].where(rows[name] != "", None)
    return Dataset.from_pandas(rows, preserve_index=False)


def lines_of(path: str, stamp: tuple) -> Iterator[dict]:
    """Each row of a JSON or JSON Lines file, as JSON, with all names that any row has. stamp: for the cache's key."""

    def rows() -> Iterator[dict]:
        with open(path, encoding="utf-8-sig") as file:
            whole = file.read(100).lstrip()[:1] == "["
            file.seek(0)
            for number, row in enumerate(json.load(file) if whole else filter(str.strip, file), 1):
                if not isinstance(row := row if whole else json.loads(row), dict):
                    raise ValueError(f"row {number} is no JSON object")
                yield row

    names = dict.fromkeys(name for row in rows() for name in row)
    yield from ({LINE: json.dumps(names | row)} for row in rows())


def restored(row: dict, arrow: bool, columns: Sequence[str] = TEXTS) -> dict:
    """The row as a chat template takes it. In these columns alone: text that holds messages as JSON (of a CSV)
    becomes messages; calls, their arguments and tools that are JSON text are read, or the template would write them as
    JSON once more; parts that are all text are joined. None is left out of messages, and of all that `arrow` writes it
    into, for names that another row has. Raises ValueError for what is no JSON."""

    def read(value, name: str):
        if isinstance(value, str) and name in ("arguments", "tool_calls", "tools"):
            value = json.loads(value or "{}")
        if isinstance(value, list) and name != "arguments":
            texts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
            joined = name == "content" and len(texts) == len(value) and {*map(type, texts)} <= {str}
            return "".join(map(str, texts)) if joined else [read(part, name) for part in value]
        if not isinstance(value, dict) or name in ("arguments", "tools"):  # these say what they say
            return bare(value) if arrow else value
        kept = {key: read(part, key) for key, part in value.items() if part is not None}
        return kept | {"content": kept.get("content")} if "role" in kept else kept

    cells = {name: row[name] for name in columns if isinstance(row.get(name), (str, list))}
    cells = {name: json.loads(x) if isinstance(x, str) and MESSAGES.fullmatch(x) else x for name, x in cells.items()}
    return row | {name: read(x, name) for name, x in cells.items()}


def bare(value):
    """Without the names whose value is None."""
    if isinstance(value, dict):
        return {name: bare(part) for name, part in value.items() if part is not None}
    return [bare(part) for part in value] if isinstance(value, list) else value
