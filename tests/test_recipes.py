"""The command that a script's docstring calls the paper's recipe sets what the paper's table says; where it does not,
the file names the difference, in its docstring or at the line. Also the defaults that papers fix, so that nobody moves
one unseen."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

from tests.specs import SPECS, Recipe, sources

ROOT = Path(__file__).resolve().parents[1]


RECIPES = [pytest.param(script, recipe, id=f"{script}:{recipe.command}".replace(" ", "_"))
           for script, spec in SPECS.items() for recipe in spec.recipes]  # fmt: skip


def docstring(script: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / f"algos/{script}.py").read_text()))


def command(script: str, recipe: Recipe) -> list[str]:
    """The arguments of the one command of the docstring that holds the recipe's words."""
    text = re.sub(r"\\\n\s*", "", docstring(script)) + "  "
    lines = [line.strip() + "  " for line in text.splitlines() if line.strip().startswith("python algos/")]
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
    ours, text = arguments(script, recipe), " ".join(sources()[f"algos/{script}.py"].split())
    for name, value in recipe.paper.items():
        wanted, words = recipe.differs.get(name, (value, ""))
        assert ours[name] == wanted, f"--{name} is {ours[name]}; {recipe.source} has {value}"
        assert words in text, f"algos/{script}.py does not say that --{name} is {wanted} and not {value}"


@pytest.mark.parametrize("script", SPECS)
def test_every_algorithm_has_a_recipe_or_says_why_not(script):
    assert bool(SPECS[script].recipes) != bool(SPECS[script].no_recipe)
