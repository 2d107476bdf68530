"""All that tests, benchmarks and the page know of a script stands in one file: tests/specs/SCRIPT.py.

    from tests.specs import SPECS            script -> Spec, in the order of the page; every list of scripts is derived

A new script gets its file from `python tests/family.py new`. A child's spec says only what differs from its parent's:
see INHERITED and MERGED. Its bugs are what stands in BUGS of its file.
"""

import ast
import importlib
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (  # the groups of the page, in their order
    "Language models: rewards", "Language models: environments", "Language models: preferences and demonstrations",
    "Control", "Offline", "In context", "Generators",
)  # fmt: skip
INHERITED = ("family", "tests", "walk")  # the parent's, where a spec leaves them out
MERGED = ("flags", "special", "noise")  # over the parent's; what it says of flags that the child lacks is dropped


@dataclass(frozen=True)
class Curve:
    """A recorded learning curve (benchmarks/curves.py)."""

    settings: dict
    """of the script; model=(script, settings), or init, trains such a run before, and begins with its model"""
    column: str
    """the column of the metrics that is drawn over steps"""
    numbers: dict[str, str]
    """what is compared, higher being better -> its scale: plain, share (of right answers) or log"""
    slow: bool = False
    """only `pytest -m slow` trains it"""
    label_noise: float | None = None
    """a reward model is trained before, on labels of which this share is flipped"""

    def but(self, **settings) -> "Curve":
        """The same with other settings."""
        return replace(self, settings=self.settings | settings)


@dataclass(frozen=True)
class Effect:
    """What an idea does beside its parent, and a control that must not show it (benchmarks/effects.py). All of it is
    fixed before the first run."""

    runs: dict[str, tuple[str, dict]]
    """name, as the claims call it -> script and settings (see Curve): the idea, its parent, the control, parts"""
    statistic: str
    """one number of a run: `last COLUMN`, `mean COLUMN`, `late COLUMN`, the mean of the last half of its rows, `rise
    COLUMN`, from the first row to the last, or `until COLUMN NUMBER`, the first step that reaches it, else the last"""
    claims: dict[str, int]
    """comparison of runs, as in "double < dqn / 2" -> in how many of the seeds it must hold"""
    seeds: int = 10
    data: tuple[str, dict] | None = None
    """sac and settings of a run before with the same seed, of which benchmarks/record_suite.py makes their datasets"""


@dataclass(frozen=True)
class Recipe:
    """A command of the docstring, and what the paper's table says (test_recipes.py)."""

    command: str
    """words that only this command of the docstring holds"""
    source: str
    paper: dict
    """argument -> the paper's value"""
    preset: str = ""
    """of PRESETS, for what the command leaves at None"""
    differs: dict = field(default_factory=dict)
    """argument -> our value, and the words of the file that say so"""


@dataclass(frozen=True)
class Bug:
    """A planted bug: one line changed in each file that holds `old`, one file at a time."""

    name: str
    """MISTAKE, or MISTAKE:WHERE for a mistake that is planted in several places with different text"""
    old: str
    new: str
    why: str

    @property
    def mistake(self) -> str:
        return self.name.partition(":")[0]

    def files(self) -> list[str]:
        """The files that hold the text once."""
        return [name for name, text in sources().items() if text.count(self.old) == 1]

    def apply(self, text: str) -> str:
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Spec:
    title: str
    """the algorithm's name and paper, on the page"""
    family: str = ""
    """one of FAMILIES"""
    small: str = ""
    """arguments of a run of about a second; behind the parent's, unless they begin with --device"""
    tests: str = ""
    """the fast tests that guard the script, exact ones first; FILE::TEST where the rest would take too long"""
    curves: dict[str, Curve] = field(default_factory=dict)
    effects: dict[str, Effect] = field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    no_recipe: str = ""
    """why there is none"""
    bugs: tuple[Bug, ...] = ()
    """only in lines that the parent lacks"""
    aliases: tuple[str, ...] = ()
    """names that people search for and that neither title nor docstring holds"""
    known: bool = False
    """one of the seven best-known scripts, whose first curve learns in every run of the tests"""
    needs: str = ""
    """a package that only this script needs"""
    flags: dict = field(default_factory=dict)
    """settings of a run of a fraction of a second in which the flags act (test_flags.py); those that the script does
    not have are left out. Text that begins with @ is a path in the folder that tests/tiny_runs.py fills"""
    special: dict = field(default_factory=dict)
    """how a flag is changed that cannot simply be another number or choice: flag -> (more settings, changed value or a
    list of them), or a list of such pairs. Goes before SPECIAL of tests/flags.py"""
    walk: str = ""
    """default environments:Walk-v0; of tests/environments.py, the one that suits the script's actions"""
    only: tuple[str, ...] = ()
    """the flags that are tried; none: all. For a child whose runs take long"""
    noise: dict = field(default_factory=dict)
    """more settings, in which Python's, NumPy's or torch's global generator acts (test_wiring.py)"""


@cache
def sources() -> dict[str, str]:
    """Path -> text of every script, every environment and every file of utils/."""
    folders = ("algos", "algos/environments", "utils")
    paths = [path for folder in folders for path in sorted(ROOT.glob(f"{folder}/*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def parse_bugs(text: str) -> tuple[Bug, ...]:
    """Bugs written as small diffs: a line `NAME: why people make it`, the old text after `- `, the new text after `+ `.

    The texts are parts of lines, or several lines. Without a `+ ` the text is deleted.
    """
    bugs = []
    for block in filter(None, re.split(r"\n\s*\n", text.strip("\n"))):
        lines = block.splitlines()
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
        name, _, why = " ".join(line for line in lines if line[:2] not in ("- ", "+ ")).partition(": ")
        bugs.append(Bug(name, old, new, why))
    return tuple(bugs)


@cache
def parent_of(script: str) -> str | None:
    match = re.search(r"^Parent: (\w+)\.py", ast.get_docstring(ast.parse(sources()[f"algos/{script}.py"])), re.M)
    return match and match[1]


def line_of(script: str) -> tuple[str, ...]:
    """The root, ..., the parent, the script."""
    parent = parent_of(script)
    return (*(line_of(parent) if parent else ()), script)


@cache
def classes(path: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(sources()[path]).body if isinstance(node, ast.ClassDef)}


@cache
def options(script: str) -> set[str]:
    """The fields of its Args and of their bases, read without importing the script."""
    known = {name: node for path in sources() if path.startswith("utils/") for name, node in classes(path).items()}
    known |= classes(f"algos/{script}.py")
    fields, name = set(), "Args"
    while name:
        lines = [line for line in known[name].body if isinstance(line, ast.AnnAssign)]
        fields |= {line.target.id for line in lines if not ast.unparse(line.annotation).startswith("ClassVar")}
        name = next((base.id for base in known[name].bases), "")
    return fields


def resolved(script: str) -> Spec:
    """The script's spec, with what it has of its line. Only what an ancestor says may be of a flag that it lacks."""
    modules, has = [importlib.import_module(f"tests.specs.{name}") for name in line_of(script)], options(script)
    specs = [module.SPEC for module in modules]
    given = [specs[-1].special] if len(specs) == 1 else [getattr(specs[-1], name) for name in MERGED]
    if unknown := set().union(*given) - has:  # a root's flags may be those that several share
        raise ValueError(f"tests/specs/{script}.py: {script}.py has no flag {', '.join(unknown)}")
    found = {name: next((x for spec in reversed(specs) if (x := getattr(spec, name))), "") for name in INHERITED}
    found["walk"] = found["walk"] or "environments:Walk-v0"
    for name in MERGED:
        found[name] = {flag: x for spec in specs for flag, x in getattr(spec, name).items() if flag in has}
    small = {}
    for spec in specs:
        own = {text.split()[0].replace("-", "_"): f"--{text.strip()}" for text in spec.small.split("--")[1:]}
        small = own if "device" in own else small | own
    found["small"] = " ".join(text for name, text in small.items() if name in has or name in own)
    return replace(specs[-1], **found, bugs=parse_bugs(getattr(modules[-1], "BUGS", "")))


def discover() -> dict[str, Spec]:
    scripts = [path.stem for path in ROOT.glob("algos/*.py")]
    if lacking := [script for script in scripts if not (ROOT / f"tests/specs/{script}.py").exists()]:
        raise FileNotFoundError(
            f"algos/{lacking[0]}.py has no spec: write tests/specs/{lacking[0]}.py with SPEC = Spec(...), as in "
            "tests/specs/simpo.py, or let `python tests/family.py new` write it."
        )
    specs = {script: resolved(script) for script in scripts}
    return dict(sorted(specs.items(), key=lambda item: (FAMILIES.index(item[1].family), line_of(item[0]))))


SPECS = discover()
