"""The command that a script's docstring calls the paper's recipe sets what the paper's table says; where it does not,
the docstring names the difference. Also the defaults that papers fix, so that nobody moves one unseen."""

import ast
import importlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Recipe:
    script: str
    command: str  # words that only this command of the docstring holds
    source: str
    paper: dict  # argument -> the paper's value
    preset: str = ""  # of PRESETS, for what the command leaves at None
    differs: dict = field(default_factory=dict)  # argument -> (our value, words of the docstring that say so)


RECIPES = [
    Recipe(
        "grpo", "deepseek-math-7b", "arXiv 2402.03300, section 4.2", preset="full",
        paper=dict(learning_rate=1e-6, beta=0.04, num_generations=64, max_completion_length=1024, num_iterations=1,
                   num_prompts=16, aggregation="sequence", scale_rewards="group"),
    ),
    Recipe(
        "rloo", "--beta 0.03", "arXiv 2402.14740, appendix C (TL;DR)", preset="full",
        paper=dict(learning_rate=1e-6, lr_schedule="constant", warmup_steps=18, max_steps=600, beta=0.03,
                   num_generations=4, num_prompts=128, num_iterations=1),
    ),
    Recipe(
        "ppo_lm", "1.5e-5", "arXiv 2009.01325, appendix B.1 (1.3B)", preset="full",
        paper=dict(learning_rate=1.5e-5, lr_schedule="linear", beta=0.05, gamma=1.0, gae_lambda=0.95, num_prompts=512,
                   num_generations=1, num_iterations=4, num_minibatches=1, critic_learning_rate=1.5e-5,
                   max_steps=1953, critic="separate"),
    ),
    Recipe(
        "dpo", "Anthropic/hh-rlhf", "arXiv 2305.18290, appendix B", preset="full",
        paper=dict(beta=0.1, batch_size=64, learning_rate=1e-6, warmup_steps=150, loss="sigmoid",
                   lr_schedule="constant", label_smoothing=0.0, sft_coef=0.0, average_logps=False),
    ),
    Recipe(
        "simpo", "llama3-ultrafeedback", "arXiv 2405.14734 and the authors' llama-3-8b-instruct-simpo.yaml",
        preset="full",
        paper=dict(beta=2.5, gamma=1.375, batch_size=128, max_length=2048, learning_rate=1e-6, lr_schedule="cosine",
                   sft_coef=0.0),
    ),
    Recipe(
        "orpo", "ultrafeedback-binarized-preferences-cleaned",
        "the authors' run_mistral_orpo_beta.sh (lambda: arXiv 2403.07691, section 6.1)", preset="full",
        paper=dict(beta=0.1, batch_size=32, learning_rate=5e-6, warmup_steps=200, max_length=2048,
                   lr_schedule="inverse_sqrt"),
        differs=dict(lr_schedule=("linear", "here with a linear decay")),
    ),
    Recipe(
        "kto", "trl-lib/ultrafeedback_binarized", "arXiv 2402.01306 and HALOs", preset="full",
        paper=dict(beta=0.1, batch_size=32, learning_rate=5e-6, desirable_weight=1.0, undesirable_weight=1.0),
    ),
    Recipe(
        "reward_model", "meta-llama/Llama-2-7b-chat-hf", "arXiv 2307.09288, section 3.2.2", preset="full",
        paper=dict(batch_size=512, learning_rate=1e-5, lr_schedule="cosine", weight_decay=0.1, warmup_steps=30,
                   use_margin=True, center_coef=0.0),
        differs=dict(use_margin=(False, "with --use-margin where there are some")),
    ),
    Recipe(
        "online_dpo", "5e-7", "arXiv 2402.04792", preset="full",
        paper=dict(learning_rate=5e-7, num_prompts=128, num_generations=2, warmup_steps=150, temperature=0.9, beta=0.1,
                   loss="sigmoid", xpo_alpha=0.0),
    ),
    Recipe(
        "sft", "9.65e-6", "arXiv 2203.02155, appendix C.1 (1.3B)", preset="full",
        paper=dict(learning_rate=9.65e-6, batch_size=32, lr_schedule="cosine", warmup_steps=0, max_steps=6500),
    ),
    Recipe(
        "ppo", "HalfCheetah-v5 --threads 1  ", "arXiv 1707.06347, table 3", preset="continuous",
        paper=dict(num_steps=2048, learning_rate=3e-4, update_epochs=10, num_minibatches=2048 // 64, gamma=0.99,
                   gae_lambda=0.95, clip_coef=0.2, total_timesteps=1_000_000, num_envs=1, hidden_size=64,
                   anneal_lr=False, normalize=False, normalize_advantages=False, clip_vloss=False, ent_coef=0.0),
        differs=dict(anneal_lr=(True, "falls linearly to 0"), normalize=(True, "Observations are normalised"),
                     normalize_advantages=(True, "Advantages are normalised per minibatch")),
    ),
    Recipe(
        "ppo", "--num-steps 512", "RL Baselines3 Zoo, hyperparams/ppo.yml, HalfCheetah", preset="continuous",
        paper=dict(total_timesteps=1_000_000, num_envs=1, num_steps=512, num_minibatches=512 // 64, update_epochs=20,
                   gamma=0.98, gae_lambda=0.92, clip_coef=0.1, learning_rate=2.0633e-5, ent_coef=0.000401762,
                   vf_coef=0.58096, max_grad_norm=0.8, log_std_init=-2.0, hidden_size=256, anneal_lr=False,
                   normalize=True),
        differs=dict(ent_coef=(0.0004, "RL Baselines3 Zoo's"),  # rounded; the others are not arguments
                     vf_coef=(0.58, "as SB3's value loss is not halved, half of its weight of the value loss"),
                     hidden_size=(256, "tanh where it has ReLU, orthogonal weights where it has ortho_init=False")),
    ),
    Recipe(
        "ppo_atari", "algos/ppo_atari.py  ", "arXiv 1707.06347, table 5", preset="discrete",
        paper=dict(num_steps=128, learning_rate=2.5e-4, update_epochs=3, num_minibatches=8 * 128 // 256, gamma=0.99,
                   gae_lambda=0.95, num_envs=8, clip_coef=0.1, vf_coef=1.0, ent_coef=0.01, anneal_lr=True,
                   total_timesteps=10_000_000),
        differs=dict(update_epochs=(4, "makes 3 epochs"), vf_coef=(0.5, "weighs the value loss by 1")),
    ),
    Recipe(
        "sac", "HalfCheetah-v5 --total-timesteps 1000000", "arXiv 1812.05905, table 1",
        paper=dict(learning_rate=3e-4, gamma=0.99, tau=0.005, batch_size=256, buffer_size=1_000_000, hidden_size=256,
                   utd_ratio=1, target_entropy=None, alpha=None),
    ),
    Recipe(
        "iql", "hopper_medium_replay", "arXiv 2110.06169, appendix B",
        paper=dict(learning_rate=3e-4, batch_size=256, hidden_size=256, tau=0.005, gamma=0.99, max_steps=1_000_000,
                   expectile=0.7, temperature=3.0, anneal_actor=True),
        preset="mujoco",
    ),
    Recipe(
        "iql", "--domain antmaze", "arXiv 2110.06169, appendix B",
        paper=dict(learning_rate=3e-4, batch_size=256, hidden_size=256, expectile=0.9, temperature=10.0,
                   max_steps=1_000_000),
        preset="antmaze",
    ),
    Recipe(
        "dt", "hopper_medium_replay", "arXiv 2106.01345, table 9",
        paper=dict(num_layers=3, num_heads=1, embed_dim=128, batch_size=64, context_length=20, dropout=0.1,
                   learning_rate=1e-4, max_grad_norm=0.25, weight_decay=1e-4, warmup_steps=100_000, max_steps=100_000,
                   target_returns=(3600.0, 1800.0)),
        differs=dict(warmup_steps=(10_000, "table has 100,000")),
    ),
]  # fmt: skip


def docstring(script: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / f"algos/{script}.py").read_text()))


def command(recipe: Recipe) -> list[str]:
    """The arguments of the one command of the docstring that holds the recipe's words."""
    text = re.sub(r"\\\n\s*", "", docstring(recipe.script)) + "  "
    lines = [line.strip() + "  " for line in text.splitlines() if line.strip().startswith("python algos/")]
    (line,) = [line for line in lines if recipe.command in line]
    return shlex.split(re.split(r"\s{2,}", line)[0])[2:]


def arguments(recipe: Recipe) -> dict:
    """As the run would have them: what the command leaves at None comes from the preset."""
    module = importlib.import_module(f"algos.{recipe.script}")
    given = vars(tyro.cli(module.Args, args=command(recipe)))
    table = getattr(module, "PRESETS", {})
    return given | {k: v for k, v in table.get(recipe.preset, {}).items() if given.get(k) is None}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.script}:{recipe.command}".replace(" ", "_"))
def test_the_recipe_is_the_paper_s(recipe):
    ours, text = arguments(recipe), " ".join(docstring(recipe.script).split())
    for name, value in recipe.paper.items():
        wanted, words = recipe.differs.get(name, (value, ""))
        assert ours[name] == wanted, f"--{name} is {ours[name]}; {recipe.source} has {value}"
        assert words in text, f"the docstring does not say that --{name} is {wanted} and not {value}"


def test_every_algorithm_has_a_recipe():
    """bc.py's is iql.py's network and update at temperature 0, and 10 %-BC's paper gives no table of its own."""
    assert {recipe.script for recipe in RECIPES} | {"bc"} == {path.stem for path in (ROOT / "algos").glob("*.py")}
