"""python algos/grpo_multiturn.py --environment from_trl:FILE.py:CLASS --model ORG/NAME

A class that was written for TRL's `environment_factory`, as it is.
"""

import asyncio
import inspect
import json
import random
import re
from collections.abc import Callable
from typing import Any

from utils.core import UserError
from utils.data import Task
from utils.rewards import load_function

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def load(spec: str) -> type:
    return from_trl(load_function(spec))


def from_trl(kind: Callable) -> type:
    """An environment of grpo_multiturn.py around a class for TRL's `environment_factory`.

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
