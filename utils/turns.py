"""Environments that a language model talks to, turn by turn, and what stands between two turns.

An environment is a class; each episode has an object of its own:

    reset(row, seed) -> str or None     what is appended to the prompt; depends on row and seed alone, which all
                                        episodes of a group share
    step(text) -> (str, float, bool)    the observation behind the model's turn, its reward, whether the episode is over
    stop = ("=",)                       optional: a turn ends behind each of these strings, besides at EOS
    role = "tool"                       optional: whose message an observation is, for chat templates; else "user"
    tools = [schema]                    optional: what the chat template tells the model that it can call
    task()                              optional, static: the Task of a run without --task

A step that raises, takes longer than `seconds`, or answers with more than FLOOD characters for each token of room ends
its episode; its reward is 0, rewards of earlier turns stay. A call that hangs goes on in its thread until the run ends.
A reset that raises ends the run. The text of a turn has no special tokens.

utils/tools.py has examples with tools. A class with get_reward is taken for one of TRL's (`from_trl` there).
"""

import bisect
import random
import re
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from utils.distributed import share, together
from utils.errors import UserError
from utils.rewards import load_function
from utils.tasks import Task, countdown_score, load_task
from utils.text import present, settings_of, template_kwargs
from utils.tools import Python, Search, corpus_index, from_trl

FLOOD = 100  # characters; no tokenizer's tokens hold that many on average
ASIDE = "7f3aQ", "x91Zk", "W5rt2"  # texts of the dummy conversations, which no template contains


class Step(NamedTuple):
    """The answer to one turn."""

    observation: str
    reward: float
    done: bool
    fault: str = ""  # why the episode ends, where the environment failed


class Guess:
    """A hidden digit. A turn names a digit, and the answer is + (it is higher) or - (it is lower). Reward 1 for the
    digit, which ends the episode; so does a turn that is no digit, with 0. Within four turns binary search always finds
    the digit; whoever ignores the answers names at most four digits of ten: 0.40."""

    stop = tuple("0123456789")

    @staticmethod
    def task() -> Task:
        """The ten digits in turn. There is nothing to hold out: the game is the same."""
        words = "Guess my digit, 0 to 9. Say one digit at a time: I answer + if mine is higher, - if it is lower."
        rows = [{"prompt": "S:", "plain_prompt": words, "digit": digit} for digit in range(10)]
        return Task("guess", lambda i, seed: rows[i % 10], rows)

    def reset(self, row: dict, seed: int) -> None:
        if "digit" not in row:
            raise UserError("--environment guess has prompts of its own: leave --task out")
        self.digit = row["digit"]

    def step(self, text: str) -> tuple[str, float, bool]:
        guess = text.strip()
        if len(guess) != 1 or guess not in self.stop or int(guess) == self.digit:
            return "", float(guess == str(self.digit)), True
        return "+" if self.digit > int(guess) else "-", 0.0, False


class Calculator:
    """Countdown, where the environment writes the result behind `=`. Two steps; the reward is countdown's own. What
    cannot be calculated ends the episode with 0."""

    stop = ("=",)

    @staticmethod
    def task() -> Task:
        return load_task("countdown")

    def reset(self, row: dict, seed: int) -> None:
        if "numbers" not in row:
            raise UserError("--environment calculator needs the rows of countdown: leave --task out")
        self.row, self.text, self.steps = row, "", 0

    def step(self, text: str) -> tuple[str, float, bool]:
        match = re.search(r"(\d{1,4})([-+*/])(\d{1,4})=$", text, re.ASCII)
        if match is None or (match[2] == "/" and (int(match[3]) == 0 or int(match[1]) % int(match[3]))):
            return "", 0.0, True
        a, b = int(match[1]), int(match[3])
        result = str({"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[match[2]])
        self.text, self.steps = self.text + text + result, self.steps + 1
        if self.steps == 2:
            return result, countdown_score(self.row, self.text)["reward"], True
        return result, 0.0, False


BUILT_IN: dict[str, Any] = {"guess": Guess, "calculator": Calculator, "python": Python}


def load_environment(spec: str) -> Any:
    """guess, calculator, python, search:CORPUS.jsonl, FILE.py:CLASS or PACKAGE.MODULE:CLASS. A class with get_reward is
    adapted by `from_trl`. Raises UserError where there is no such class or file, or the class lacks reset or step."""
    if spec.startswith("search:"):
        corpus_index(corpus := spec.partition(":")[2])  # complains, if at all
        return type("Search", (Search,), {"corpus": corpus})
    if spec not in BUILT_IN and ":" not in spec:
        raise UserError(f"unknown --environment {spec}: give {', '.join(BUILT_IN)}, search:FILE or FILE.py:CLASS")
    found: Any = BUILT_IN.get(spec) or load_function(spec, {}, "--environment")
    if hasattr(found, "get_reward"):
        found = from_trl(found)
    if not all(callable(getattr(found, name, None)) for name in ("reset", "step")):
        raise UserError(f"--environment {spec} must have the methods reset(row, seed) and step(text)")
    stop = getattr(found, "stop", ())
    if isinstance(stop, str) or not all(isinstance(string, str) and string for string in stop):
        raise UserError(f"stop of --environment {spec} is {stop!r}: it must be texts in a tuple, as in ('</search>',)")
    return found


def check_tools(environment: Any, tokenizer) -> None:
    """Raises UserError where the model would not be told of the environment's tools."""
    hidden = settings_of(tokenizer).raw_prompt or "tools" not in str(tokenizer.chat_template)
    if getattr(environment, "tools", ()) and hidden:
        raise UserError("--environment has tools, and the chat template of --model does not show them: give a model "
                        "whose template knows tools, without --raw-prompt")  # fmt: skip


class Environments:
    """One environment for each of B episodes. Of many processes each holds its share, and all know the answers."""

    def __init__(self, make: Callable, rows: Sequence[dict], group: int, key: tuple, seconds: float, room: int):
        """rows: one for each group of `group` episodes; those of a group share the seed. key: of the step."""
        self.seconds, self.longest = seconds, FLOOD * room
        self.held = {i: make() for i in share(range(len(rows) * group))}

        def reset() -> dict[int, str]:
            return {i: env.reset(rows[i // group], random.Random(f"{key}/{i // group}").getrandbits(32)) or ""
                    for i, env in self.held.items()}  # fmt: skip

        openings = {i: text for part in together(reset) for i, text in part.items()}
        if wrong := [text for text in openings.values() if not isinstance(text, str)]:
            raise UserError(f"reset of --environment returned {wrong[0]!r:.200}: it must return a text or None")
        self.openings = [openings[p * group] for p in range(len(rows))]
        if any(text != self.openings[i // group] for i, text in openings.items()):
            raise UserError("reset of --environment answers equal rows and seeds differently: it must not")

    def step(self, texts: dict[int, str]) -> dict[int, Step]:
        """The answers to the turns of some episodes, by their numbers."""

        def mine() -> dict[int, Step]:
            numbers = [i for i in texts if i in self.held]
            calls = [lambda i=i: self.held[i].step(texts[i]) for i in numbers]
            return dict(zip(numbers, map(self.judged, results(calls, self.seconds))))

        return {i: step for part in together(mine) for i, step in part.items()}

    def judged(self, answer: Any) -> Step:
        """What a call gave as a Step. Raises UserError where it is no answer at all."""
        if isinstance(answer, BaseException):
            return Step("", 0.0, True, "".join(traceback.format_exception(answer)))
        try:
            observation, reward, done = answer
            step = Step(observation or "", float(reward), bool(done))
            assert isinstance(step.observation, str) and abs(step.reward) < float("inf")
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"step of --environment returned {answer!r:.200}: it must return text, a finite number and "
                            "True or False") from error  # fmt: skip
        if len(step.observation) > self.longest:
            return Step("", 0.0, True, f"an observation of {len(step.observation)} characters\n")
        return step


def results(calls: list[Callable], seconds: float) -> list[Any]:
    """What each call returns, or the exception that it raises; TimeoutError after `seconds`. UserError is raised. One
    thread makes all calls in their order; one that hangs is left behind, and another thread makes the rest."""
    found: list[Any] = []

    def work(rest: list[Callable], queue: SimpleQueue, left_behind: threading.Event) -> None:
        for call in rest:
            if left_behind.is_set():
                return
            try:
                queue.put(call())
            except (Exception, SystemExit) as error:
                queue.put(error)

    while len(found) < len(calls):
        queue, left_behind = SimpleQueue(), threading.Event()
        threading.Thread(target=work, args=(calls[len(found) :], queue, left_behind), daemon=True).start()
        try:
            while len(found) < len(calls):
                found.append(queue.get(timeout=seconds))
        except Empty:
            left_behind.set()
            found.append(TimeoutError(f"step of --environment took longer than {seconds:g} seconds"))
    for result in found:
        if isinstance(result, UserError):
            raise result
    return found


def opened(row: dict, text: str, tools: list) -> dict:
    """The row with `text` behind its prompt: behind the last message's content, where it has messages. A chat template
    is told of `tools`."""
    row = row | {"tools": tools} if tools else row
    if not text:
        return row
    if isinstance(row["prompt"], str):
        return row | {name: row[name] + text for name in ("prompt", "plain_prompt") if name in row}
    *before, last = row["prompt"]
    content = last.get("content") or ""
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return row | {"prompt": [*before, last | {"content": content}]}


@lru_cache
def stop_ids(tokenizer, stop: tuple[str, ...]) -> list[int]:
    """All tokens that hold one of the strings. Such a token stays whole: a turn is never cut inside a token."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) if stop else []
    return [i for i, text in enumerate(texts) if any(string in text for string in stop)]


def until_stop(tokens: list[int], tokenizer, stop: tuple[str, ...]) -> int:
    """How many tokens there are up to the one that completes a stop string; 0 where none does. Strings that several
    tokens make are found here: what was sampled behind them is dropped."""

    def holds(n: int) -> bool:
        text = tokenizer.decode(tokens[:n])
        return any(string in text for string in stop)

    whole = stop and holds(len(tokens))
    return 1 + bisect.bisect_left(range(1, len(tokens)), True, key=holds) if whole else 0


def around(row: dict, tokenizer, role: str) -> tuple[str, str]:
    """The text that the chat template puts before an observation, from the end of the model's turn on, and behind it,
    up to where the next turn begins: what a dummy conversation has there. Two empty texts where prompts are text.

    The model's own turns stay as they were sampled: thinking that a template would drop from earlier turns stays, too.
    Raises UserError where the difference is ambiguous: the template drops or repeats the texts, or surrounds the second
    observation otherwise than the first.
    """
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        return "", ""
    own, observation, later = ASIDE
    turn = [{"role": "assistant", "content": own}, {"role": role, "content": observation}]
    more = [{"role": "assistant", "content": later}, {"role": role, "content": later}]
    kwargs = template_kwargs(row, tokenizer)

    def rendered(messages: list[dict]) -> str:
        try:
            return tokenizer.apply_chat_template([*prompt, *messages], tokenize=False, add_generation_prompt=True,
                                                 **kwargs)  # fmt: skip
        except Exception as error:  # a template raises what it likes
            raise UserError(f"the chat template refuses an observation as a message of {role} ({error}): set role of "
                            "--environment to one that it takes") from error  # fmt: skip

    one, two = rendered(turn), rendered(turn + more)
    pattern = f"{own}(.*?){observation}(.*)"
    first = re.search(pattern, one, re.DOTALL)
    second = re.search(f"{later}(.*?){later}(.*)", two, re.DOTALL)
    once = one.count(own) == one.count(observation) == 1
    if not once or first is None or second is None or first.groups() != second.groups():
        raise UserError("the chat template does not say what stands around an observation: it drops or changes earlier "
                        "turns; give a model with another template, or --raw-prompt")  # fmt: skip
    return first[1], first[2]


def encode_observation(text: str, last: int, ends: list[int], tokenizer, frame: tuple[str, str]) -> list[int]:
    """Token ids between two of the model's turns, encoded alone, so that nothing merges with the model's own. A turn
    that ended with an EOS (`last` is one of `ends`) has what the template would write there."""
    before, behind = frame
    if last in ends:  # perhaps with another EOS than the template's
        written = [eos for eos in map(tokenizer.decode, ends) if before.startswith(eos)]
        before = before.removeprefix(written[0]) if written else before
    return tokenizer(before + text + behind, add_special_tokens=False)["input_ids"]


def transcript(tokenizer, prompt: list[int], tokens: list[int], own: list[bool], reward: float, cut: str) -> str:
    """An episode for the terminal, a line for each turn and observation, with every special token visible."""
    lines, start = [f"prompt       {tokenizer.decode(prompt)!r}"], 0
    for i in range(1, len(tokens) + 1):
        if i == len(tokens) or own[i] != own[start]:
            who = "turn       " if own[start] else "observation"
            lines.append(f"{who}  {tokenizer.decode(tokens[start:i])!r}")
            start = i
    return "\n".join(lines) + f"\nreward       {reward:g}" + (f", cut: {cut}" if cut else "")
