"""The command that a script's docstring or algos/README.md calls a paper's recipe sets what the paper's table says.
Where it does not, the docstring, the line or README names the difference. Also the defaults that papers fix, so that
nobody moves one unseen."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

from tests.specs import SPECS, Recipe, sources

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "algos/README.md").read_text()

RECIPES = [pytest.param(script, recipe, id=f"{script}:{recipe.command}".replace(" ", "_"))
           for script, spec in SPECS.items() for recipe in spec.recipes]  # fmt: skip


def docstring(script: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / f"algos/{script}.py").read_text()))


def command(script: str, recipe: Recipe) -> list[str]:
    """The arguments of the one command of the docstring and README that holds the recipe's words."""
    text = re.sub(r"\\\n\s*", "", docstring(script) + "\n" + README)
    lines = [line.strip() + "  " for line in text.splitlines() if line.strip().startswith(f"python algos/{script}.py")]
    (line,) = [line for line in lines if recipe.command in line]
    return shlex.split(re.split(r"\s{2,}", line)[0])[2:]


def arguments(script: str, recipe: Recipe) -> dict:
    """As the run would have them: what the command leaves at None comes from the preset."""
    module = importlib.import_module(f"algos.{script}")
    given = vars(tyro.cli(module.Args, args=command(script, recipe)))
    table = getattr(module, "PRESETS", {})
    return given | {k: v for k, v in table.get(recipe.preset, {}).items() if given.get(k) is None}


@pytest.mark.parametrize("script, recipe", RECIPES)
def test_the_recipe_is_the_paper_s(script, recipe):
    ours, text = arguments(script, recipe), " ".join((sources()[f"algos/{script}.py"] + README).split())
    for name, value in recipe.paper.items():
        wanted, words = recipe.differs.get(name, (value, ""))
        assert ours[name] == wanted, f"--{name} is {ours[name]}; {recipe.source} has {value}"
        assert words in text, f"neither algos/{script}.py nor README says that --{name} is {wanted} and not {value}"


@pytest.mark.parametrize("script", SPECS)
def test_every_algorithm_has_a_recipe_or_says_why_not(script):
    assert bool(SPECS[script].recipes) != bool(SPECS[script].no_recipe)
