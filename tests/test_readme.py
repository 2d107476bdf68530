"""The pages stay true: .ci/run runs README's two commands, and every command of the READMEs and the docstrings runs."""

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import pytest
import tyro
from helpers import SMALL, command_line, new_run
from small_data import pendulum, write_minari

from algos import reward_model
from benchmarks import chain
from tests.family import code_of, without_args
from tests.specs import SPECS
from utils.lm import TINY_MODEL

ROOT = Path(__file__).resolve().parents[1]
FILES = [f"{x}.md" for x in "README algos/README tests/README benchmarks/README algos/METRICS algos/FLAGS".split()]
README, *_ = PAGES = [(ROOT / name).read_text() for name in FILES]
SCRIPTS = sorted(path.stem for path in (ROOT / "algos").glob("*.py"))
SHORT = dict(eval_every=0, eval_samples=2, eval_prompts=2, max_completion_length=6, overlong_buffer=2,
             eval_max_new_tokens=6, micro_batch_size=8, ensemble=1, hidden_size=8)  # fmt: skip
MOST = dict(max_steps=16, total_timesteps=64)  # learning starts after 32
OFFLINE_SCRIPTS = f"algos/(rlpd|{'|'.join(name for name, spec in SPECS.items() if spec.family == 'Offline')}).py"
NEEDED = {"ale_py": "ppo_atari", "mujoco": f"(HalfCheetah|Hopper)-v|{OFFLINE_SCRIPTS}", "moviepy": "--capture-video",
          "h5py": f"--record|{OFFLINE_SCRIPTS}", "minari": "mujoco/|D4RL/"}  # fmt: skip


@cache
def tiny(script: str) -> dict:
    """What makes a command of any size run in seconds: the sizes of the spec's small run, and those of SHORT. The task
    and the device stay the command's own."""
    fields = importlib.import_module(f"algos.{script}").Args.__dataclass_fields__
    args = vars(tyro.cli(importlib.import_module(f"algos.{script}").Args, args=SPECS[script].small.split()))
    named = {word[2:].replace("-", "_") for word in SPECS[script].small.split() if word.startswith("--")}
    small = {name: args[name] for name in named - {"task", "device", "save_every"}}
    small |= {name: min(small[name], most) for name, most in MOST.items() if name in small}
    small |= {"max_steps": 2} if "model" in fields else {}
    return small | {name: value for name, value in SHORT.items() if name in fields}


def commands() -> list[str]:
    """Every `python algos/...` of the READMEs and of the scripts' docstrings, without trailing explanations."""
    texts = PAGES + [ast.get_docstring(ast.parse((ROOT / f"algos/{s}.py").read_text())) for s in SCRIPTS]
    lines = [line.strip() for text in texts for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    # what torchrun starts runs here in one process, which has nothing to shard
    lines = [re.sub(r"^(srun )?torchrun .*?(?=algos/)", "python ", line.replace(" --fsdp", "")) for line in lines]
    return sorted({re.split(r"\s{2,}", line)[0] for line in lines if line.startswith("python algos/")})


CONTROL = [c for c in commands() if not SPECS[Path(c.split()[1]).stem].family.startswith("Language models")]


def test_the_first_two_commands_are_what_ci_runs():
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    install, _, train = blocks[0].strip().partition(" && ")
    ci = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    assert README.index(blocks[0]) < 60, "the commands stand first on the page"
    assert install == "pip install -r requirements.txt" and train == "python algos/grpo.py"
    install_tests, _, test = blocks[1].strip().partition(" && ")
    assert install_tests == "pip install -r requirements-test.txt" and test == "pytest"
    assert {install, install_tests, test} <= set(ci)
    assert {"ruff check", "ruff format --check"} <= set(ci)


@pytest.mark.parametrize("page", FILES)
def test_links_lead_somewhere(page):
    """Files that are named by a link or a picture are there, and so are the headings."""
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], anchor


@pytest.mark.parametrize("command", sorted(set(commands()) - set(CONTROL)))
def test_commands_run(command, tmp_path, monkeypatch):
    """Each command, on the embedded model and tiny sizes; what it sets otherwise is kept."""
    _, script, *words = shlex.split(command)
    module = importlib.import_module(f"algos.{Path(script).stem}")
    args = tyro.cli(module.Args, args=words)
    for name, value in tiny(Path(script).stem).items():
        setattr(args, name, value)
    if hasattr(args, "num_minibatches"):
        args.num_minibatches = min(args.num_minibatches, args.num_prompts)
    if "/" in args.model:
        args.model = TINY_MODEL
    if hasattr(args, "teacher"):
        args.teacher = ""  # of hub names, the shipped model's own
    if args.task and not set([args.task] if isinstance(args.task, str) else args.task) <= {"countdown", "sort"}:
        args.task = "sort" if isinstance(args.task, str) else ("sort",)
    if getattr(args, "reward", ()):
        (tmp_path / "rewards.py").write_text(
            "def accuracy(completions, **kwargs):\n    return [float(len(c) > 3) for c in completions]\n\n\n"
            "def format(completions, **kwargs):\n    return [float(c.isdigit()) for c in completions]\n"
        )
        if args.reward[0].startswith("RUN/"):
            small = tiny("reward_model") | dict(task="sort", ensemble=2, output_dir=str(tmp_path / "reward"))
            reward_model.train(reward_model.Args(**small))
            next((tmp_path / "reward").iterdir()).rename(tmp_path / "RUN")
        args.reward = tuple(f"{tmp_path}/{spec}" for spec in args.reward)
    if getattr(args, "environment", "").startswith(("search:", "python", "game.py")):
        (tmp_path / "game.py").write_text(
            "class Game:\n    def reset(self, row, seed):\n        pass\n\n"
            "    def step(self, text):\n        return 'found', float(len(text) > 3), False\n"
        )
        (tmp_path / "corpus.jsonl").write_text('{"text": "12"}\n')
        rows = [f'{{"prompt": "S{i}:", "answer": "{i}"}}\n' for i in range(64)]
        (tmp_path / "questions.jsonl").write_text("".join(rows))
        args.task = str(tmp_path / "questions.jsonl")
        monkeypatch.chdir(tmp_path)
    args.output_dir = str(tmp_path / "runs")
    history = module.train(args)
    assert history[-1]["step"] == args.max_steps
    assert len(list(tmp_path.glob("runs/*/model/model.safetensors"))) + args.lora_rank >= 1


@pytest.mark.parametrize("command", CONTROL)
def test_control_commands_run(command, tmp_path, monkeypatch, capsys):
    """The same for environments and generators. Where RUN stands, a tiny one is made and then scored;
    package.module:Name-v0 is one of tests/environments.py."""
    walk = SPECS[Path(command.split()[1]).stem].walk
    for package, pattern in NEEDED.items():
        if re.search(pattern, command):
            pytest.importorskip(package, reason=f"not run: {package} is not installed")
    monkeypatch.chdir(tmp_path)
    _, script, *words = shlex.split(command.replace("package.module:Name-v0", walk))
    module, sizes = importlib.import_module(f"algos.{Path(script).stem}"), tiny(Path(script).stem)
    if "--init" in words:
        spec = SPECS[module.NAME]
        known = [run for effect in spec.effects.values() for _, run in effect.runs.values()]
        start = importlib.import_module(f"algos.{next(run['init'][0] for run in known if 'init' in run)}")
        data = "--dataset", pendulum(tmp_path / "d.hdf5")  # rlpd.py's command is on the collection that ships
        data = ("--no-normalize", "--hidden-size", "8") if start.NAME == "cql" else data
        words[1] = str(new_run(start, tmp_path / "start", *SMALL[start.NAME], *data))
    if "RUN" in words:
        args = module.Args(**sizes)
        if hasattr(args, "dataset"):
            args.dataset = str(pendulum(tmp_path / "walk.hdf5", "environments:Walk-v0"))
        elif "ALE/" not in (args.env_id or ""):
            args.env_id = walk  # can be drawn without pygame
        module.train(args)
        (run,) = tmp_path.glob("runs/*")
        command_line(module, *(run if word == "RUN" else word for word in words))
        assert "eval/return" in json.loads(capsys.readouterr().out.splitlines()[-1])
        assert bool(list(run.glob("video/*.mp4"))) == ("--capture-video" in words)
        return
    args = tyro.cli(module.Args, args=words)
    for name, value in sizes.items():
        setattr(args, name, value)
    if hasattr(args, "env_kwargs") and "ALE/" not in (args.env_id or ""):
        args.env_kwargs = tuple(pair for pair in args.env_kwargs if "max_num_frames" not in pair)  # Atari's alone
    if getattr(args, "online_steps", 0):
        args.online_steps = 16
    if getattr(args, "utd_ratio", 1) > 4:
        args.utd_ratio = 4  # twenty show no more, in five times the time
    Path("rewards.py").write_text("def inside(samples, prompts):\n    return -samples.square().sum(1)\n")
    if dataset := getattr(args, "dataset", ""):  # what cannot be downloaded here stands in its place, small
        write_dataset(dataset, monkeypatch)
    steps = args.total_timesteps if hasattr(args, "total_timesteps") else args.max_steps
    assert module.train(args)[-1]["step"] == steps + getattr(args, "online_steps", 0)
    assert len(list(tmp_path.glob("runs/*/model/model.safetensors"))) == 1


def write_dataset(name: str, monkeypatch) -> None:
    """A D4RL file or a Minari dataset of that name with a few made-up steps of Hopper, in the current folder; or what
    ships."""
    if (shipped := ROOT / name).is_file():
        Path(name).parent.mkdir(parents=True)
        Path(name).symlink_to(shipped)
        return
    generator = np.random.default_rng(0)
    obs, actions = generator.normal(size=(60, 11)), generator.uniform(-1, 1, (60, 3)).astype(np.float32)
    rewards = generator.normal(size=60)
    if name.endswith(".hdf5"):
        with h5py.File(name, "w") as file:
            for key, column in dict(observations=obs, actions=actions, rewards=rewards, terminals=np.zeros(60, bool),
                                    timeouts=np.arange(60) % 20 == 19).items():  # fmt: skip
                file[key] = column
        return
    write_minari(Path.cwd() / "minari" / name, "Hopper-v5", [
        dict(observations=obs[i : i + 20], actions=actions[i : i + 19], rewards=rewards[i : i + 19],
             terminations=np.arange(19) == 18, truncations=np.zeros(19, bool)) for i in (0, 20)])  # fmt: skip
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(Path.cwd() / "minari"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_stay_readable(script):
    """At most 350 lines of code, no import of another script, and a docstring that has what it promises."""
    path = ROOT / f"algos/{script}.py"
    assert len(without_args(code_of(path))) <= (422 if script == "grpo_multiturn" else 350)  # it holds its own loop
    text = path.read_text()
    assert not re.search(r"^(from|import) algos", text, re.MULTILINE)
    for heading in ("arXiv", "Differences", "Metrics", "Run", "Expect"):
        assert heading in ast.get_docstring(ast.parse(text))


def test_every_option_has_a_docstring_and_the_trl_table_names_real_flags():
    """Of all three tables: a flag is one of the script before it, `X.py --flag`, else of the one in the heading."""
    sections = re.findall(r"^##+ (.*)\n([^#]*)", PAGES[-1], re.MULTILINE)
    assert sum(" -> ours" in title for title, _ in sections) == 3
    for title, section in sections:
        own = title[1:-4] if title[0] == "`" else "ppo" if title[0] in "CS" else "grpo"
        for script, flag in re.findall(r"(?:(\w+)\.py )?--(?:no-)?((?!help)[a-z][a-z0-9-]+)", section):
            known = vars(importlib.import_module(f"algos.{script or own}").Args())
            assert flag.replace("-", "_") in known, f"{title}: {script or own}.py --{flag}"


BENCHMARKS = (
    "curves.py record grpo-sort --seeds 0",
    "curves.py show",
    "seeds.py algos/ppo.py --help",
    "effects.py show",
    "peers/trl_grpo.py curve --seeds 0",
    "peers/speed.py --cleanrl X --help",
    "peers/trl_family.py curve --seeds 0",
    "published.py show",
    "page.py measure --help",
    "planted_bugs.py show",
)
DRIVER = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv = line.split()
    print(line, flush=True)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as exit:
        assert not exit.code, exit.code
"""


def test_benchmark_commands_run(tmp_path):
    """With nothing to train, on a copy: `show` draws, and recorded rows are neither lost nor added to."""
    for name in ("algos", "benchmarks", "tests", "utils"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in [*tmp_path.glob("benchmarks/curves/*.jsonl"), *tmp_path.glob("benchmarks/effects/*.jsonl")]:
        if not path.name.startswith("g"):  # to draw all takes 40 seconds
            path.unlink()
    command = [sys.executable, "-c", DRIVER, *(f"{tmp_path}/benchmarks/{words}" for words in BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in BENCHMARKS:
        assert any(f"python benchmarks/{' '.join(words.split()[:2])}" in page for page in PAGES)
    for path in tmp_path.glob("benchmarks/curves/*.jsonl"):
        assert (ROOT / "benchmarks/curves" / path.name).read_bytes() == path.read_bytes()


def test_the_sweep_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    optuna = pytest.importorskip("optuna", reason="not run: optuna is not installed")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    found = {}
    exec(code.replace("20_480", "1024").replace("n_trials=10", "n_trials=2"), found)
    assert [trial.state for trial in found["study"].trials] == [optuna.trial.TrialState.COMPLETE] * 2
    assert 1e-4 <= found["study"].best_params["learning_rate"] <= 1e-2 and len(list(tmp_path.glob("runs/*/model"))) == 2


def test_the_chain_runs(tmp_path, capsys):
    """Every script of it takes the model that another one wrote; no result is written."""
    before = chain.RESULT.read_text() if chain.RESULT.exists() else None
    chain.main(chain.Args(tiny=True, output_dir=str(tmp_path)))
    assert "python benchmarks/chain.py" in PAGES[3]
    table = capsys.readouterr().out
    for row in ("sft", "dpo, pairs", "ppo_lm, reward model", "online_dpo, reward model", "grpo, task's score"):
        assert f"\n{row} " in table
    assert (chain.RESULT.read_text() if chain.RESULT.exists() else None) == before
    configs = [json.loads(path.read_text())["args"] for path in sorted(tmp_path.glob("*/config.json"))]
    (start,) = [str(path / "model") for path in tmp_path.glob("sft-*")]
    assert {config["model"] for config in configs} == {"new", start}
    assert sum("reward_model" in str(config.get("reward")) for config in configs) == 4
