"""The static site: plain files that open without a server, from the specs, the docstrings, the curves and the proofs.

    python benchmarks/site.py build            benchmarks/site/build/index.html; --output FOLDER for another folder
    python benchmarks/site.py build --wall     and benchmarks/curves/wall.png, the picture of the README
    python benchmarks/site.py hunt             trains the bug hunt's curves that results/bug_hunt.jsonl lacks

Only the lesson path's questions are written here. All else is derived, so a new script needs no edit.
"""

import ast
import base64
import csv
import functools
import importlib
import json
import re
import shlex
import shutil
import statistics
import sys
import tomllib
from difflib import SequenceMatcher
from html import escape
from pathlib import Path

import tyro
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import bug_hunt, curves, drawings, effects, listing, page, planted_bugs  # noqa: E402
from tests.specs import FAMILIES, SPECS, Effect, line_of, parent_of, sources  # noqa: E402

FOLDER = ROOT / "benchmarks/site"
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RANK_OF_PAGE, RANK_OF_COMMAND, RANK_OF_MENTION = 0, 1, 2  # in the search, of equally good matches
STOPS = (  # script, "code" or "diff", what to read, question, answer
    (
        "reinforce", "code", "One policy, one environment, one formula: the whole of policy gradients.",
        "The return of an episode multiplies the gradient of the log-probability of each of its actions. Why may a "
        "number that depends on the state alone be subtracted from the return?",
        "The expected gradient of a log-probability is zero in every state, so what is subtracted adds zero on "
        "average. It takes noise away where it is close to the return that is expected.",
    ),
    (
        "reinforce_lm", "code", "The same formula, where an episode is an answer and an action is a token.",
        "A batch of answers of different lengths is a padded tensor. What goes wrong with .mean() over it?",
        "Padding counts in the denominator. Then the length of the longest answer of the batch scales the gradient of "
        "all others, and the result depends on who shares the batch.",
    ),
    (
        "rloo", "code", "Several answers to one prompt are each other's baseline.",
        "Why does an answer's own reward stay out of its baseline? With it, the result differs by a factor only.",
        "Without it the baseline does not depend on the answer, so the gradient is unbiased as it stands. With it the "
        "advantages shrink by (G - 1) / G, which Adam hides and plain gradient descent does not.",
    ),
    (
        "grpo", "code", "The ratio per token, its clip, and advantages divided by the group's deviation.",
        "Four answers have the rewards 1, 0, 0, 0, four others 1, 1, 0, 0. In which group is a right answer reinforced "
        "more, and does the policy gradient do so, too?",
        "The lonely one, by both. With the group's mean as baseline the policy gradient has the advantages 0.75 and "
        "0.5. GRPO has 0.75 / 0.5 = 1.5 and 0.5 / 0.58 = 0.87. Dividing by the deviation puts more weight on prompts "
        "that are nearly always right or nearly always wrong.",
    ),
    (
        "bc", "code", "Now there is a dataset and no environment: the policy imitates what it sees.",
        "The dataset has good and bad episodes. Why does 10 %-BC reach more than BC, although it sees less?",
        "BC learns the mixture of all who made the data. The best tenth of the episodes is the data of a better "
        "policy, and imitation is as good as what it imitates.",
    ),
    (
        "iql", "diff", "The lines that make weighted imitation of it: each action counts by its advantage.",
        "The value is an upper expectile over the data's own actions. What would a maximum over all actions do?",
        "It would ask the critic about actions that no data shows, where nothing corrects it, and take the largest of "
        "its errors. The expectile only chooses among actions that the data hold.",
    ),
)  # fmt: skip


def html(title: str, body: str, here: str = "", css: str = "") -> str:
    links = {"index.html": "plainrl", "index.html#algorithms": "Algorithms", "hunt.html": "Bug hunt",
             "path.html": "Lesson path", "measured.html": "Measured"}  # fmt: skip
    bar = "".join(f'<a href="{link}"{" class=home" * (name == "plainrl")}{" aria-current=page" * (link == here)}>'
                  f"{name}</a>" for link, name in links.items())  # fmt: skip
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel=icon href="data:,"><link rel=stylesheet href=style.css>'
        f"<nav>{bar}<form><input type=search placeholder='Search: DDPG, REDQ, Dr. GRPO' aria-label=Search>"
        f"<ol id=found></ol></form></nav><main{css}>{body}</main><script src=search.js></script>"
        "<script src=site.js></script></html>\n"
    )


def columns(rows: list[dict], name: str) -> list[list[float]]:
    return [row[curves.CURVES[name].column] for row in rows]


def recorded_curves() -> dict[str, list[list[float]]]:
    return {name: columns(rows, name) for name in curves.CURVES if (rows := curves.recorded(name))}


def key(labels: list[str]) -> str:
    return " ".join(f'<span class="key g{k}">{escape(label)}</span>' for k, label in enumerate(labels))


def started(name: str):
    """The arguments of a curve's run as it is started."""
    return importlib.import_module(f"algos.{curves.SCRIPT_OF[name]}").Args(**curves.CURVES[name].settings)


def budget(name: str) -> tuple[int, str, int]:
    """Steps of a curve, what they are called, and those of the longest published recipe of its script."""
    script, run = curves.SCRIPT_OF[name], started(name)
    unit, column = "updates" if hasattr(run, "env_id") else "steps", "max_steps"
    if hasattr(run, "total_timesteps"):
        unit, column = "environment steps", "total_timesteps"
    longest = max((arguments(script, recipe)[column] for recipe in SPECS[script].recipes), default=0)
    return getattr(run, column) or longest, unit, longest  # None: a preset's, which are the paper's


def axis(name: str) -> tuple[int, str]:
    """Steps between two points of a curve, and what they are called. Training returns come once an iteration; where an
    iteration without an ended episode has no point, iterations are counted."""
    column, (steps, unit, _) = curves.CURVES[name].column, budget(name)
    if column.startswith("eval/"):
        return curves.CURVES[name].settings["eval_every"] or steps, unit
    if column != "return":
        return 1, "steps"
    counts = {len(row[column]) for row in curves.recorded(name)}
    for preset in getattr(importlib.import_module(f"algos.{curves.SCRIPT_OF[name]}"), "PRESETS", ()):
        args = filled(curves.SCRIPT_OF[name], preset, started(name))
        every = args["num_envs"] * args["num_steps"]
        if counts == {args["total_timesteps"] // every}:
            return every, unit
    return 1, "iterations"


def curve_figure(name: str, output: Path) -> str:
    """Every seed, the peer's where it is recorded, and the same as a table to load."""
    curve, rows = curves.CURVES[name], curves.recorded(name)
    if not rows:
        return f'<figure id="curve-{name}"><figcaption><b>{name}</b>: not recorded yet.</figcaption></figure>'
    groups = {"plainrl": rows} | {peer: found for peer, found in curves.peers(name).items() if found}
    every, unit = axis(name)
    with open(output / f"{name}.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["source", "seed", unit, curve.column])
        for label, found in groups.items():
            for row in found:
                values = enumerate(row[curve.column], 1)
                table.writerows([label, row["seed"], k * every, value] for k, value in values)
    labels = [f"{label}, {len(found)} seed{'s' * (len(found) > 1)}" for label, found in groups.items()]
    drawing = drawings.curve([columns(found, name) for found in groups.values()], f"{name}: {curve.column}",
                             (every, unit), curve.column)  # fmt: skip
    seconds = statistics.median(row["seconds"] for row in rows)
    lines = "Thin: every seed. Thick: the median." if len(rows[0][curve.column]) > 1 else "Each dot is a seed."
    if curve.label_noise is not None:
        lines += f" Reward: a model trained on labels of which {curve.label_noise:.0%} were flipped."
    settings = ", ".join(setting(*item) for item in curve.settings.items())
    return (
        f'<figure id="curve-{name}">{drawing}<figcaption><b>{name}</b> {key(labels)}<br>{lines} {cut_short(name)}'
        f'About {seconds:.0f} s a seed. <a href="{name}.csv" download>CSV</a><details>'
        f"<summary>settings</summary>{escape(settings)}</details></figcaption></figure>"
    )


def setting(option: str, value) -> str:
    if option == "model" and isinstance(value, tuple):  # a run before
        script, settings = value
        return f"model: that of {script}.py with {' and '.join(setting(*item) for item in settings.items())}"
    return f"{option} {value}"


def runs_of(effect: Effect) -> str:
    """A line for each run: its script, and the settings that not all runs share; then those that all share."""
    given = [[setting(*item) for item in settings.items()] for _, settings in effect.runs.values()]
    shared = [text for text in given[0] if all(text in texts for texts in given)]
    lines = [f"<b>{escape(run)}</b>: {escape(', '.join([f'{script}.py', *(t for t in texts if t not in shared)]))}"
             for (run, (script, _)), texts in zip(effect.runs.items(), given)]  # fmt: skip
    lines += [f"All runs: {escape(', '.join(shared))}"] * bool(shared)
    return f"<ul>{''.join(f'<li>{line}' for line in lines)}</ul>"


def effect_figure(name: str) -> str:
    """The idea, its parent and the control, and whether the claims hold."""
    effect, values = effects.EFFECTS[name], effects.by_run(name)
    if min(map(len, values.values())) < effect.seeds:
        claims = " and ".join(f"<code>{escape(claim)}</code>" for claim in effect.claims)
        return (f'<figure id="effect-{name}"><figcaption><b>{name}</b>, {escape(effect.statistic)}: not run. Claimed '
                f"before: {claims}.{runs_of(effect)}</figcaption></figure>")  # fmt: skip
    drawing = drawings.dots({run: list(found.values()) for run, found in values.items()}, name, effect.statistic)
    rows = "".join(
        f"<tr><td><code>{escape(claim)}</code><td>{yes} of {n} seeds, {effect.claims[claim]} asked<td>"
        f"{'holds' if yes >= effect.claims[claim] else '<b>does not hold</b>'}"
        for claim, (yes, n) in effects.holds(effect, values).items()
    )
    return (
        f'<figure id="effect-{name}">{drawing}<figcaption><b>{name}</b>: {escape(effect.statistic)} of each seed, and '
        f"the mean.{runs_of(effect)}</figcaption><div class=scroll><table>{rows}</table></div></figure>"
    )


def said(test: str) -> str:
    """The first sentence of a test file's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / f"tests/test_{test}.py").read_text())) or ""
    return re.split(r"(?<=[.])\s", " ".join(text.split()))[0]


def proofs(script: str) -> str:
    spec, planted = SPECS[script], page.read("planted_bugs").get(f"algos/{script}.py")
    files = list(dict.fromkeys(name.partition("::")[0] for name in spec.tests.split()))
    peers = [name for name in files if name.startswith("parity")]
    items = [f"<li><code>tests/test_{name}.py</code>: {escape(said(name))}" for name in files]
    caught = [f"{planted['caught']} of {planted['run']} planted bugs that ran were caught."] if planted else []
    names = ", ".join(f"tests/test_{name}.py" for name in peers)
    independent = f"Compared with independent implementations: {names}."
    if not peers:
        independent = "No test compares its numbers with another implementation's."
        beside = {peer for name in spec.curves for peer, rows in curves.peers(name).items() if rows}
        independent += f" Its curve stands beside that of {' and '.join(sorted(beside))}." * bool(beside)
    learned = [f"Two fresh seeds must reach {band}." for band in page.bands(script).split("<br>") if band != "none"]
    green = [f"{name}: fresh seeds last passed at commit {record['commit'].replace('-dirty', ' with later edits')}."
             for name in spec.curves if (record := curves.green(name))]  # fmt: skip
    missing = [f"{name} has no recorded curve." for name in spec.curves if not curves.recorded(name)]
    missing += [f"{name} has fewer than {curves.ENOUGH} seeds, so there is no band." for name in spec.curves
                if 0 < len(curves.recorded(name)) < curves.ENOUGH]  # fmt: skip
    missing += ["There is no learning curve."] * (not spec.curves)
    missing += [f"The effect {name} was not run." for name, effect in spec.effects.items()
                if min(map(len, effects.by_run(name).values())) < effect.seeds]  # fmt: skip
    missing += ["No effect of the idea is claimed against a control."] * (not spec.effects)
    missing += ["Planted bugs were not run against these tests."] * (not planted)
    missing += dict.fromkeys(f"{recipe.source}: no recorded curve." for recipe in spec.recipes
                             if not was_run(script, recipe))  # fmt: skip
    proven = "".join(f"<li>{escape(line)}" for line in [*caught, independent, *learned, *green])
    open_ = "".join(f"<li>{escape(line)}" for line in missing)
    return f"<ul>{''.join(items)}{proven}</ul><h3>Not proven</h3><ul>{open_ or '<li>No open item is listed.'}</ul>"


def command_of(script: str, recipe) -> tuple[str, str]:
    """The one command of the docstring that holds the recipe's words, and what is said of it."""
    return next((c, note) for c, note in listing.commands(script) if recipe.command.strip() in c)


def filled(script: str, preset: str, args) -> dict:
    """Arguments as a run has them: what is None comes from the preset."""
    table = getattr(importlib.import_module(f"algos.{script}"), "PRESETS", {}).get(preset, {})
    return {name: table.get(name) if value is None else value for name, value in vars(args).items()}


def arguments(script: str, recipe) -> dict:
    """Those of the recipe's command."""
    words = shlex.split(command_of(script, recipe)[0].partition(".py")[2])
    return filled(script, recipe.preset, tyro.cli(importlib.import_module(f"algos.{script}").Args, args=words))


def cut_short(name: str) -> str:
    """What is said of a curve on MuJoCo or Atari that ends before the longest published recipe of its script."""
    steps, unit, longest = budget(name)
    outside = str(getattr(started(name), "env_id", "")).endswith(("-v5", "None"))  # None: the dataset's, Hopper-v5
    return f"Cut short: {steps:,} of the {longest:,} {unit} that are published. " * (outside and steps < longest)


def was_run(script: str, recipe) -> bool:
    """Whether a recorded curve has every argument that the recipe takes from the paper, the task and the steps."""
    given, new = arguments(script, recipe), importlib.import_module(f"algos.{script}").Args
    what = "env_id", "task", "model", "dataset", "max_steps", "total_timesteps"
    names = [name for name in (*recipe.paper, *what) if name in given]
    ran = [curve.settings for name, curve in SPECS[script].curves.items() if curves.recorded(name)]
    ran = [filled(script, recipe.preset, new(**settings)) for settings in ran]
    return any(all(run[name] == given[name] for name in names) for run in ran)


def recipes(script: str) -> str:
    spec = SPECS[script]
    if not spec.recipes:
        return f"<p>None: {escape(spec.no_recipe)}.</p>"
    parts = []
    for recipe in spec.recipes:
        command, note = command_of(script, recipe)
        numbers = ", ".join(f"{name} {value}" for name, value in recipe.paper.items())
        status = "run: see the curves" if was_run(script, recipe) else "no recorded curve"
        differs = ", ".join(f"{name} {value}" if value != recipe.paper.get(name) else words
                            for name, (value, words) in recipe.differs.items())  # fmt: skip
        differs = f" The command differs on purpose: {escape(differs)}." * bool(differs)
        parts.append(f"<p><b>{escape(recipe.source)}</b>, {status}. {escape(note[:1].upper() + note[1:])}</p>"
                     f"<pre class=command>{escape(command)}</pre>"
                     f"<p class=faint>The source's numbers: {escape(numbers)}.{differs} A test compares the command "
                     "with them.</p>")  # fmt: skip
    return "".join(parts)


def citation() -> str:
    text = (ROOT / "CITATION.cff").read_text()
    field = {name: re.search(rf'^{name}: "?([^"\n]+)', text, re.M)[1] for name in ("title", "version", "date-released")}
    return (f"<p>{escape(field['title'])}, version {field['version']}, {field['date-released']}: "
            '<a href="CITATION.cff">CITATION.cff</a>.</p>')  # fmt: skip


own_lines = functools.cache(page.own_lines)


def algorithm(script: str, output: Path) -> str:
    spec, text, parent = SPECS[script], listing.docstring(script), parent_of(script)
    children = [f'<a href="{child}.html">{child}.py</a> ({own_lines(child)})'
                for child in SPECS if parent_of(child) == script]  # fmt: skip
    family = f'<a href="index.html#tree-{line_of(script)[0]}">{escape(spec.family)}</a>.'
    if parent:
        family += (f' Parent: <a href="{parent}.html">{parent}.py</a>; {own_lines(script)} lines of its own. '
                   f"{escape(text.parent)}")  # fmt: skip
    family += f" Children, and lines of their own: {', '.join(children)}." * bool(children)
    figures = "".join(curve_figure(name, output) for name in spec.curves)
    shown = "".join(effect_figure(name) for name in spec.effects)
    formula = next((k for k, part in enumerate(text.objective) if not part.startswith("    ")), len(text.objective))
    commands = [f"<pre class=command>{escape(command)}</pre>" + f"<p class=faint>{escape(note)}</p>" * bool(note)
                for command, note in listing.commands(script)[:1]]  # fmt: skip
    raw = "".join(f"<h3 id={name.lower()}>{name}</h3>{listing.section(name, script)}" for name in text.sections)
    places = ", ".join(f'<a href="#L{line}">{name}</a>' for name, line in listing.outline(script))
    colours = (f" Marked lines are those that <a href={parent}.html>{parent}.py</a> does not have; what they replace "
               "opens with a click." if parent else "")  # fmt: skip
    contents = " ".join(f'<a href="#{name}">{label}</a>' for name, label in {
        "curves": "Curves", "proofs": "Proofs", "recipes": "Recipes", "others": "Other code", "cite": "Cite",
        "code": "Code"}.items())  # fmt: skip
    return html(f"{script}.py: {text.title}", f"""
<h1>{escape(text.title.removesuffix("."))}</h1><p class=faint><code>algos/{script}.py</code>. {family}</p>
<p class=contents>{contents}</p><p>{escape(listing.two_sentences(text.idea))}</p>
<div class=formula>{listing.lead(text.idea)}{listing.formulas(text.objective[:formula], script)}
{"".join(commands)}</div>
<h2 id=curves>Curves, and what the idea does</h2><div class=figures>{figures}{shown}</div>
<h2 id=proofs>What is proven</h2><div class=text>{proofs(script)}</div>
<h2 id=recipes>Recipes</h2><div class=text>{recipes(script)}</div>
<h2 id=others>What other code does under the same name</h2>
<div class=text>{listing.prose(text.sections["Differences"], script)}</div>
<h2 id=cite>How to cite</h2><div class=text>{"".join(f"<p>{escape(paper)}</p>" for paper in text.papers)}{citation()}
</div><h2 id=code>The script</h2><p class=faint>{places}.{colours}</p><div class=beside><aside tabindex=0>
<h3>{escape(text.title)}</h3><p>{listing.with_links(text.idea, script)}</p>
{listing.formulas(text.objective, script)}{raw}</aside>{listing.code(sources()[f"algos/{script}.py"], script)}</div>
""")  # fmt: skip


def index() -> str:
    first, second = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)[:2]
    children = {script: [child for child in SPECS if parent_of(child) == script] for script in SPECS}
    lines = {script: own_lines(script) for script in SPECS}
    field = {script: FAMILIES.index(spec.family) for script, spec in SPECS.items()}
    trees = "".join(f'<div id="tree-{root}">{drawings.tree(root, children, lines, field)}</div>'
                    for root in SPECS if not parent_of(root))  # fmt: skip
    fields = " ".join(f'<span class="f{k}">{escape(name)}</span>' for k, name in enumerate(FAMILIES))
    wall = "".join(f'<a href="{curves.SCRIPT_OF[name]}.html#curve-{name}">{drawings.small(rows, name)}{name}</a>'
                   for name, rows in recorded_curves().items())  # fmt: skip
    catalogue = ""
    for name in FAMILIES:
        entries = [(script, listing.docstring(script)) for script, spec in SPECS.items() if spec.family == name]
        rows = "".join(f'<dt><a href="{script}.html">{escape(text.title.removesuffix("."))}</a>'
                       f"<dd>{escape(listing.two_sentences(text.idea))}" for script, text in entries)  # fmt: skip
        catalogue += f"<h3>{escape(name)}</h3><dl class=text>{rows}</dl>" * bool(entries)
    seeds = sum(map(len, recorded_curves().values()))
    return html("plainrl", f"""
<h1>plainrl</h1><p>{escape(PROJECT["description"])}.</p><div class=text><pre class=command>{escape(first)}</pre>
<pre class=command>{escape(second)}</pre></div>
<h2 id=tree>Families</h2><p>A child is a copy of its parent with the lines of one idea changed. The number on an edge
counts the child's own lines.</p><p class="fields faint">{fields}</p><div class=trees>{trees}</div>
<h2 id=wall>All recorded curves</h2><p>{len(recorded_curves())} curves, {seeds} training runs. Thin lines are seeds,
the thick one is their median. Where a run is evaluated once, dots are seeds.</p><div class=wall>{wall}</div>
<h2 id=algorithms>Algorithms</h2>{catalogue}
""", "index.html")  # fmt: skip


def search_index() -> list[list]:
    """[rank, name, what is said of it, page]: of pages, then of commands, then of names that a script mentions."""
    entries, seen = [], set()
    for script, spec in SPECS.items():
        text = listing.docstring(script)
        titles = [part.split(", arXiv")[0] for part in spec.title.split("; ")]
        for name in dict.fromkeys([script, *titles, *spec.aliases, text.title.removesuffix(".")]):
            entries.append([RANK_OF_PAGE, name, text.title, f"{script}.html"])
            seen |= {name, *listing.names(name)}
        own = re.findall(r"\(([\w -]+)\)", text.title)
        entries += [[RANK_OF_PAGE, name, text.title, f"{script}.html"] for name in own]
    for script in SPECS:
        source = sources()[f"algos/{script}.py"]
        rank = RANK_OF_MENTION + len(line_of(script)) / 10  # a child repeats what its parent says
        for command, note in listing.commands(script):
            if note:
                entries.append([RANK_OF_COMMAND, note, command, f"{script}.html#run"])
        for name in listing.names(source.partition("NAME, TITLE")[0]):
            if name not in seen:
                entries.append([rank, name, f"named in {script}.py", f"{script}.html#code"])
        for flag, (line, said_of_it) in listing.flags(script).items():
            for name in listing.names(said_of_it):
                if name not in seen:
                    entries.append([rank, name, f"--{flag.replace('_', '-')} of {script}.py: {said_of_it}",
                                    f"{script}.html#L{line}"])  # fmt: skip
    return entries


def changed_lines(right: str, wrong: str) -> list[int]:
    """Numbers of the lines of the wrong text that a student may click; of lines that are missing, their neighbours."""
    lines = []
    matcher = SequenceMatcher(None, right.splitlines(), wrong.splitlines(), autojunk=False)
    for kind, _, _, begin, end in matcher.get_opcodes():
        if kind != "equal":
            lines += range(begin + 1, end + 1) if end > begin else (begin, begin + 1)
    return lines


def answer(hunt: bug_hunt.Hunt) -> str:
    """What a click tells, encoded, so that nobody reads it before."""
    bug, file = bug_hunt.bug_of(hunt), f"algos/{curves.SCRIPT_OF[hunt.curve]}.py"
    row = planted_bugs.read_rows().get((hunt.bug, file), {})
    why, _, public = re.sub(r"\)$", "", bug.why).partition(" (")
    told = {
        "lines": changed_lines(sources()[file], bug_hunt.planted(hunt)), "name": bug.mistake.replace("-", " "),
        "right": bug.old, "why": why, "public": public, "curve": bug_hunt.verdict(hunt),
        "test": row["test"] if row.get("outcome") == "failed" else "not run yet",
    }  # fmt: skip
    return base64.b64encode(json.dumps(told).encode()).decode()


def hunt_page(number: int, hunt: bug_hunt.Hunt) -> str:
    script, rows = curves.SCRIPT_OF[hunt.curve], bug_hunt.rows_of(hunt)
    text, column = listing.docstring(script), curves.CURVES[hunt.curve].column
    groups = {"right": curves.recorded(hunt.curve), "with the bug": rows}
    groups = {label: found for label, found in groups.items() if found}
    labels = [f"{label}, {len(found)} seeds" for label, found in groups.items()]
    shown = [columns(found, hunt.curve) for found in groups.values()]
    drawing = drawings.curve(shown, hunt.curve, axis(hunt.curve), column)
    missing = "" if rows else " The curve with the bug is not recorded yet."
    following = number % len(bug_hunt.HUNTS) + 1
    return html(f"Bug {number} in {script}.py", f"""
<h1>Bug {number}: one mistake in <code>{script}.py</code></h1><p>Click the line that is wrong. Comments and docstrings
are right. <button id=give-up type=button>Show it</button> <a href="hunt-{following}.html">Next bug</a></p>
<div id=verdict aria-live=polite></div><div class=beside><aside tabindex=0><figure>{drawing}<figcaption>
<b>{hunt.curve}</b> {key(labels)}{missing}</figcaption></figure><h3>{escape(text.title)}</h3><p>{escape(text.idea)}</p>
{listing.formulas(text.objective, script)}</aside>{listing.code(bug_hunt.planted(hunt), script, False)}</div>
""", css=f' class=hunt data-answer="{answer(hunt)}"')  # fmt: skip


def hunt_list() -> str:
    rows = "".join(
        f'<li><a href="hunt-{number}.html">One mistake in <code>{curves.SCRIPT_OF[hunt.curve]}.py</code></a>'
        + (f", {len(found)} seeds" if (found := bug_hunt.rows_of(hunt)) else ": its curve is not recorded yet")
        for number, hunt in enumerate(bug_hunt.HUNTS, 1)
    )
    said = [bug_hunt.verdict(hunt) for hunt in bug_hunt.HUNTS]
    unseen, better = said.count(bug_hunt.UNSEEN), said.count(bug_hunt.BETTER)
    return html("Bug hunt", f"""
<h1>Bug hunt</h1><p>Each page shows a script with one planted bug, its curve, and the curve of the right script. Click
the line. You are told which test catches the bug, and why people make it.</p><p>In reinforcement learning a wrong
program often still learns. Of these {len(bug_hunt.HUNTS)} bugs, {unseen} do not show in their curve, and with {better}
it is better than the right one.</p><ol>{rows}</ol>
""", "hunt.html")  # fmt: skip


def path_page() -> str:
    stops = ""
    for script, kind, read, question, solution in STOPS:
        link = f'<a href="{script}.html#code">{script}.py</a>'
        what = f"The lines of {link} that {parent_of(script)}.py does not have" if kind == "diff" else link
        stops += (f"<li><p>{what}. {escape(read)}</p><p><b>{escape(question)}</b></p><details><summary>Answer"
                  f"</summary><p>{escape(solution)}</p></details></li>")  # fmt: skip
    return html("Lesson path", f"""
<h1>Lesson path</h1><p>From REINFORCE to GRPO, then from behaviour cloning to IQL. Read each script from top to bottom,
answer the question, then open the answer.</p><ol>{stops}</ol>""", "path.html")  # fmt: skip


def measured(output: Path) -> str:
    """benchmarks/README.md as a page: effects lead to their scripts' pages, and other files have no links."""
    script_of = {effect: script for script, spec in SPECS.items() for effect in spec.effects}
    body = MarkdownIt().enable("table").render((ROOT / "benchmarks/README.md").read_text())
    body = re.sub(r'"effects/([\w-]+)\.png"', lambda m: f'"{script_of[m[1]]}.html#effect-{m[1]}"', body)
    for path in re.findall(r'src="(curves/[^"]+)"', body):
        shutil.copy(ROOT / "benchmarks" / path, output)
    body = re.sub(r'<img src="curves/', '<img src="', body)
    body = re.sub(r'<a href="(?!\w+\.html)[^"]*">(.*?)</a>', r"\1", body)
    return html("Measured", re.sub(r"<table>(.*?)</table>", r"<div class='scroll wide'><table>\1</table></div>", body,
                                   flags=re.DOTALL), "measured.html")  # fmt: skip


def build(output: Path = FOLDER / "build", wall: bool = False) -> None:
    """Writes the site. Files of an earlier build that are no longer made are removed.

    Args:
        output: the folder, made anew.
        wall: also draw benchmarks/curves/wall.png.
    """
    if output.exists() and any(output.iterdir()) and not (output / "site.js").exists():
        sys.exit(f"error: {output} holds something else: name an empty folder")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    for path in (FOLDER / "style.css", FOLDER / "site.js", ROOT / "CITATION.cff"):
        shutil.copy(path, output)
    files = {"index.html": index(), "hunt.html": hunt_list(), "path.html": path_page()}
    files["measured.html"] = measured(output)
    files |= {f"{script}.html": algorithm(script, output) for script in SPECS}
    files |= {f"hunt-{number}.html": hunt_page(number, hunt) for number, hunt in enumerate(bug_hunt.HUNTS, 1)}
    files["search.js"] = f"const INDEX = {json.dumps(search_index())};\n"
    for name, text in files.items():
        (output / name).write_text(text)
    if wall:
        drawings.wall(recorded_curves(), curves.FOLDER / "wall.png")
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"{output}: {len(list(output.iterdir()))} files, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"build": build, "hunt": bug_hunt.record})
