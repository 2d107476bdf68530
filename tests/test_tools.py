"""The tools of algos/environments: search, Python, and classes written for TRL's environment_factory."""

import inspect
import json
import random
import sys
from pathlib import Path

import pytest
import transformers
from test_exact_multiturn import arguments, small_model

from algos.environments.from_trl import from_trl
from algos.environments.python import run_python
from algos.environments.search import Search
from algos.environments.tool import exact_match
from algos.grpo_multiturn import load_environment, opened, play, show_tools
from utils.core import UserError
from utils.data import encode_prompt
from utils.lm import TINY_MODEL

PASSAGES = ["Paris is the capital of France.", "Rome is the capital of Italy.", "The Tiber flows through Rome."]


@pytest.fixture
def corpus(tmp_path):
    pytest.importorskip("bm25s", reason="not run: bm25s is not installed")
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return str(path)


@pytest.mark.parametrize("text, score", [
    ("<answer>Rome</answer>", 1.0), ("so: <answer> the  ROME!</answer>", 1.0), ("<answer>roma</answer>", 1.0),
    ("<answer>Paris</answer>", 0.0), ("Rome", 0.0), ("<answer>Rome</answer> no, <answer>Paris</answer>", 0.0),
])  # fmt: skip
def test_exact_match(text, score):
    assert exact_match({"answer": ["Rome", "Roma"]}, text) == score
    assert exact_match({"answer": "rome"}, "<answer>Rome</answer>") == 1.0


@pytest.mark.parametrize("gold, right, wrong", [
    ("A", ["A", "a."], ["", "the", "...", "B"]), ("-3", ["-3", "-3."], ["3"]), ("3.5", ["3.5"], ["35"]),
    ("1/2", ["1/2"], ["12"]), ("1,000", ["1000"], ["1.000"]), ("x=-1", ["x=-1"], ["x=1"]),
    ("F-16", ["F16", "the F-16."], ["F-1"]), ("5-3", ["5-3"], ["53"]),
])  # fmt: skip
def test_exact_match_of_choices_and_numbers(gold, right, wrong):
    assert all(exact_match({"answer": gold}, f"<answer>{text}</answer>") == 1 for text in right)
    assert not any(exact_match({"answer": gold}, f"<answer>{text}</answer>") for text in wrong)
    assert exact_match({"answer": gold}, f"{gold}</answer>") == 1  # the prompt may hold the first tag


def test_search(corpus, monkeypatch):
    """A call is answered with the passages that share its words, best first; an answer ends the episode."""
    monkeypatch.setattr(Search, "top", 2)
    environment = load_environment(f"search:{corpus}")()
    environment.reset({"answer": "Rome"}, 0)
    observation, reward, done = environment.step("I look it up. <search>capital of Italy</search>")
    assert observation == f"\n<information>{PASSAGES[1]}\n{PASSAGES[0]}</information>\n"
    assert (reward, done) == (0, False)
    assert environment.step("<search>xyzzy</search>") == ("\n<information></information>\n", 0.0, False)
    assert environment.step("<answer>Rome</answer>") == ("", 1.0, True)
    assert environment.step("Rome, I think") == ("", 0.0, True)
    with pytest.raises(UserError, match="a column answer"):
        environment.reset({"prompt": "?"}, 0)


@pytest.mark.parametrize("content", [None, "text\n", "[1]\n", "\n", '{"text": null}\n', '{"text": "the"}\n'])
def test_a_corpus_that_cannot_be_read(content, corpus):
    path = Path(corpus).with_name("other.jsonl")
    if content:
        path.write_text(content)
    with pytest.raises(UserError, match=r"other.jsonl must name a file with lines"):
        load_environment(f"search:{path}")


def test_python():
    environment = load_environment("python")()
    environment.reset({"answer": "4"}, 0)
    assert environment.step("<python>print(2 + 2)</python>") == ("\n<output>4\n</output>\n", 0.0, False)
    assert "ZeroDivisionError" in environment.step("<python>1 / 0</python>")[0]
    assert len(environment.step("<python>print('x' * 10**5)</python>")[0]) < 2100
    assert environment.step("<answer>4</answer>") == ("", 1.0, True)


@pytest.mark.parametrize("code, shown", [
    ("while True: pass", "TimeoutError: longer than 1 seconds"),
    ("import time; time.sleep(60)", "TimeoutError"),
    ("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", "(1, 2)"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "TimeoutError: longer than 1 seconds"),
    ("x = bytearray(10**9); print('has it')", "MemoryError"),
    ("open('file', 'w').write('x' * 2**21); print('has it')", "OSError"),
    ("import os; print(os.environ.get('HOME'), os.getcwd() != '/')", "None True"),
    ("import sys; print('out', flush=True); sys.exit('err')", "out\nerr"),
])  # fmt: skip
def test_the_limits_of_python(code, shown):
    output = run_python(code, 1, 256)
    assert shown in output and "has it" not in output


def test_processes_that_code_begins_end_with_it(tmp_path):
    """Also those that it does not wait for."""
    file = tmp_path / "written"
    child = f"import time; time.sleep(2); open({str(file)!r}, 'w')"
    run_python(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])", 5, 512)
    run_python("import time; time.sleep(3)", 4, 512)
    assert not file.exists()


class Increment:
    """As a user of TRL would write it."""

    def reset(self, **kwargs) -> str:
        self.value, self.target = 0, kwargs.get("target") or random.randint(1, 10**6)
        return f"Count to {self.target}."

    def get_reward(self) -> float:
        return float(self.value == self.target)

    def increment(self, step: int) -> int:
        """
        Increments the counter.

        Args:
            step: What to add to it.
        """
        if step < 0:
            raise ValueError("not backwards")
        self.value += step
        return self.value

    async def double(self) -> int:
        """Doubles the counter."""
        self.value *= 2
        return self.value

    def _hidden(self):
        pass


def call(name: str, **arguments) -> str:
    return f"Let me see. <tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_class_of_trl_s():
    """Its methods are called, what it raises is told to the model, and rewards add up to the last one."""
    environment = from_trl(Increment)()
    assert environment.reset({"prompt": "", "target": 4}, 0) == "Count to 4."
    assert environment.step(call("increment", step=2)) == ("2", 0.0, False)
    assert environment.step(call("double")) == ("4", 1.0, False)
    assert environment.step(call("increment", step=1)) == ("5", -1.0, False)
    wrong = {call("increment", step=-1): "not backwards", call("_hidden"): "Tool _hidden not found.",
             call("reset"): "Tool reset not found.", call("increment", up=1): "unexpected keyword",
             "<tool_call>{</tool_call>": "Expecting", "<tool_call>[]</tool_call>": "list"}  # fmt: skip
    for text, told in wrong.items():
        observation, reward, done = environment.step(text)
        assert observation.startswith("{'error': ") and told in observation and (reward, done) == (0.0, False)
    assert environment.step("I am done.") == ("", 0.0, True)


def test_a_class_is_looked_at_without_an_episode():
    """A property may need reset, a tool may be static, a reward may be None, and model code may call exit()."""

    class Static:
        def reset(self, **kwargs):
            self.words = ["yes"]

        def get_reward(self):
            return None

        @property
        def word(self):
            return self.words[0]

        @staticmethod
        def leave() -> None:
            """Ends it all."""
            sys.exit(3)

    environment = from_trl(Static)()
    environment.reset({}, 0)
    assert environment.step(call("leave")) == ("{'error': '3'}", 0.0, False)
    assert environment.step("word") == ("", 0.0, True)


def test_groups_begin_alike():
    """reset draws from `random`, which is left as it was."""
    before, make = random.getstate(), from_trl(Increment)
    openings = [make().reset({}, seed) for seed in (1, 1, 2)]
    assert openings[0] == openings[1] != openings[2] and random.getstate() == before


def test_tools_that_cannot_be_described():
    class Bare:
        def reset(self):
            pass

        def get_reward(self):
            return 0.0

        def look(self, where):
            pass

    with pytest.raises(UserError, match="look"):
        from_trl(Bare)


TEMPLATE = (  # the tiny tokenizer has no letters but S and C
    "{% for tool in tools %}{{ tool.function.parameters.properties | length }},{% endfor %}"
    "{% for m in messages %}{{ {'user': 'S', 'tool': 'C', 'assistant': '*'}[m.role] }}{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% else %},{% endif %}{% endfor %}{% if add_generation_prompt %}*{% endif %}"
)


def test_the_model_is_told_of_its_tools(tmp_path):
    """Through the chat template, in the run's own prompts; the file's class needs nothing of ours."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = TEMPLATE
    (tmp_path / "counter.py").write_text("import random\n\n\n" + inspect.getsource(Increment))
    make = load_environment(f"from_trl:{tmp_path}/counter.py:Increment")
    (row, *_) = make.task().heldout
    show_tools(make, tokenizer)
    assert tokenizer.decode(encode_prompt(opened(row, "34"), tokenizer)) == "0,1,S34,*"  # double takes nothing
    ids = encode_prompt(opened(row | {"chat_template_kwargs": "{}"}, "34"), tokenizer)
    assert tokenizer.decode(ids) == "0,1,S34,*"
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(UserError, match="does not show them"):
        show_tools(make, tokenizer)
    tokenizer.chat_template = TEMPLATE
    args = arguments(max_completion_length=3, max_turns=2, num_generations=4, task="")
    rows = [{"prompt": [{"role": "user", "content": "1"}]}]

    class Quiet(Increment):
        def reset(self, **kwargs):
            super().reset(target=1)

    episodes = play(small_model(), tokenizer, from_trl(Quiet), rows, 4, 1.0, args, "test")
    assert tokenizer.decode(episodes.samples.prompt_ids[0]) == "0,1,S1,*" and episodes.turns == [1] * 4
