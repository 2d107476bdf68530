"""Environments with tools: search, a Python interpreter, and classes that were written for TRL's `environment_factory`.

`--environment search:CORPUS.jsonl` and `--environment python` are examples; copy them to change them.

In both a turn ends behind a call or behind an answer: `<search>..</search>`, `<python>..</python>`,
`<answer>..</answer>`. Rows have a column `answer`, a text or several; the reward is 1 for one of them (`exact_match`).
An answer ends the episode, and so does a turn without a call, with 0. Say in the prompts how to call.
"""

import asyncio
import inspect
import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from utils.errors import UserError
from utils.tasks import Task, answer_of

# punctuation but in numbers: that of -3, .5 and 1/2, not of F-16
NO_SIGN = re.compile(rf"(?!(?<![^\W\d_])[-.]\d|(?<=\d)/\d)[{re.escape(string.punctuation)}]")
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
LIMITED = """import resource, sys
cpu, memory, size = map(int, sys.argv[1:])
for name, soft, hard in (("CPU", cpu, cpu + 1), ("AS", memory, memory), ("FSIZE", size, size), ("CORE", 0, 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard))  # at its hard limit it would die of SIGKILL
exec(compile(sys.stdin.read(), "<python>", "exec"), {"__name__": "__main__"})
"""


def exact_match(row: dict, text: str) -> float:
    """1 if the text between the last answer tags equals row["answer"], or one of them, but for case, punctuation,
    articles and white space (the rule of SQuAD, arXiv 1606.05250). Unlike there, -3, 3.5 and 1/2 keep their signs, and
    an answer that is nothing but an article or punctuation, such as the choice A, stays."""

    def plain(text: str) -> list[str]:
        words = NO_SIGN.sub("", text.lower()).split()
        return [word for word in words if word not in ("a", "an", "the")] or words or text.split()

    golds = [row["answer"]] if isinstance(row["answer"], str) else row["answer"]
    return float("</answer>" in text and plain(answer_of(text)) in [plain(str(gold)) for gold in golds])


class Tool:
    """One tool: a turn `<tag>call</tag>` is answered with `<shown>what use(call) returns</shown>`."""

    tag: str
    shown: str
    stop: tuple[str, ...]

    def reset(self, row: dict, seed: int) -> None:
        if not isinstance(row.get("answer"), (str, list)):
            raise UserError("--environment needs rows with a column answer, a text or a list of texts: look at --task")
        self.row = row

    def step(self, text: str) -> tuple[str, float, bool]:
        calls = re.findall(f"<{self.tag}>(.*?)</{self.tag}>", text, re.DOTALL)
        if not calls or "</answer>" in text:
            return "", exact_match(self.row, text), True
        return f"\n<{self.shown}>{self.use(calls[-1])}</{self.shown}>\n", 0.0, False

    def use(self, call: str) -> str:
        raise NotImplementedError


class Search(Tool):
    """A search engine: the best passages of a corpus (Search-R1, arXiv 2503.09516), ranked by BM25 (library bm25s)."""

    tag, shown, stop = "search", "information", ("</search>", "</answer>")
    corpus: str  # a line for each passage: {"text": ...}
    top = 3  # passages in an answer

    def use(self, call: str) -> str:
        return "\n".join(search_corpus(self.corpus, call, self.top))


@lru_cache
def corpus_index(corpus: str) -> tuple[Any, list[str]]:
    """The passages of a file, and BM25's index of them."""
    try:
        import bm25s
    except ImportError as error:
        raise UserError("searching needs bm25s: pip install bm25s") from error
    try:
        with open(corpus) as file:
            passages = [json.loads(line)["text"] for line in file if line.strip()]
        retriever = bm25s.BM25()
        retriever.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f'--environment search:{corpus} must name a file with lines {{"text": ...}}'
        raise UserError(f"{wrong} ({error!r})") from error
    return retriever, passages


def search_corpus(corpus: str, query: str, top: int) -> list[str]:
    """Up to `top` passages that share a word with the query, best first."""
    import bm25s

    retriever, passages = corpus_index(corpus)
    words = bm25s.tokenize(query, return_ids=False, show_progress=False)
    numbers, scores = retriever.retrieve(words, k=min(top, len(passages)), show_progress=False)
    return [passages[i] for i, score in zip(numbers[0], scores[0]) if score > 0]


class Python(Tool):
    """A Python interpreter: what the code prints (ReTool, arXiv 2504.11536). Each call is a process of its own, with
    limits of time, memory and output. This is not a security boundary: code can read and delete your files. Run models
    that you do not trust in a container."""

    tag, shown, stop = "python", "output", ("</python>", "</answer>")
    seconds, megabytes = 5, 512
    characters = 2000  # of the output; what is longer loses its middle

    def use(self, call: str) -> str:
        output, half = run_python(call, self.seconds, self.megabytes), self.characters // 2
        return output if len(output) <= self.characters else f"{output[:half]}\n...\n{output[-half:]}"


def run_python(code: str, seconds: int, megabytes: int) -> str:
    """What a Python program prints, errors included. It is killed after `seconds`, with all processes it began."""
    limits = map(str, (seconds, megabytes << 20, 1 << 20))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        child = subprocess.Popen([sys.executable, "-I", "-c", LIMITED, *limits], stdin=subprocess.PIPE, stdout=output,
                                 stderr=subprocess.STDOUT, cwd=folder, env={}, start_new_session=True)  # fmt: skip
        try:
            child.communicate(code.encode(errors="replace"), timeout=seconds)
            late = child.returncode == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            late = True
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return text + f"\nTimeoutError: longer than {seconds} seconds" * late


def from_trl(kind: Callable) -> type:
    """An environment of utils/turns.py around a class for TRL's `environment_factory`.

    Such a class has reset(**row), get_reward(), and public methods, which are the model's tools; their docstrings and
    types are shown to it by the chat template. A turn ends behind `<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>`; the tool message that answers is the method's result as text, or {"error": ...} where the call
    fails. A turn without a call ends the episode. get_reward is asked after every turn, and what it has changed by is
    the turn's reward, so an episode's reward is its last value. Python's `random` is seeded for reset, so that a
    group's episodes begin alike. Raises UserError for methods that cannot be described.
    """
    from transformers.utils import get_json_schema

    names = [name for name, _ in inspect.getmembers(kind, inspect.isroutine)  # of the class: a property may need reset
             if name[0] != "_" and name not in ("reset", "get_reward")]  # fmt: skip
    try:
        first = kind()
        schemas = [get_json_schema(getattr(first, name)) for name in names]
    except Exception as error:  # of transformers, which has its own kinds, or of the class
        raise UserError(f"--environment: {error}") from error

    class FromTRL:
        stop, role, tools = ("</tool_call>",), "tool", schemas

        @staticmethod
        def task() -> Task:
            """Empty messages, where reset writes the prompt."""
            rows = [{"prompt": [{"role": "user", "content": ""}]}] * 64
            return Task(getattr(kind, "__name__", "trl"), lambda i, seed: rows[0], rows)

        def reset(self, row: dict, seed: int) -> str | None:
            self.inner, self.paid, before = kind(), 0.0, random.getstate()
            random.seed(seed)
            try:
                return self.inner.reset(**row)
            finally:
                random.setstate(before)

        def step(self, text: str) -> tuple[str, float, bool]:
            call = CALL.search(text)
            answer = self.answer(call[1]) if call else ""
            total = waited_for(self.inner.get_reward())
            total = self.paid if total is None else float(total)
            reward, self.paid = total - self.paid, total
            return answer, reward, call is None

        def answer(self, call: str) -> str:
            try:
                asked = json.loads(call)
                if asked["name"] not in names:
                    raise ValueError(f"Tool {asked['name']} not found.")
                return str(waited_for(getattr(self.inner, asked["name"])(**asked["arguments"])))
            except (Exception, SystemExit) as error:  # a model writes what it likes, and a tool refuses it by raising
                return str({"error": str(error)})

    return FromTRL


def waited_for(value: Any) -> Any:
    """The value, or what a coroutine returns."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value
