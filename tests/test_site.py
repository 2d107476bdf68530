"""The static site: every script has its page, links and pictures are there, and a browser shows it without an error."""

import base64
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

from benchmarks import bug_hunt, drawings, listing, site
from tests.specs import SPECS, parent_of, sources

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = (1440, 390)
HERE = ("DDPG", "ddpg"), ("REDQ", "sac"), ("dr grpo", "grpo"), ("Search-R1", "grpo_multiturn"), ("Double DQN", "dqn"), \
       ("IPO", "dpo"), ("gppo", "cispo"), ("2402.03300", "grpo"), ("RLHF", "ppo_lm")  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "build"
    site.build(folder)
    return folder


class Links(HTMLParser):
    """Targets of links, pictures, styles and scripts, and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.targets, self.anchors = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given["id"]} if "id" in given else set()
        self.targets |= {given[name] for name in ("href", "src") if given.get(name)}


def check_links(folder: Path) -> int:
    pages = {path.name: Links(path.read_text()) for path in folder.glob("*.html")}
    found = [(page, target) for page, links in pages.items() for target in links.targets]
    found += [("search.js", entry[3]) for entry in index_of(folder)]
    for page, target in found:
        name, _, anchor = target.partition("#")
        if name == "data:,":
            continue
        assert (folder / (name or page)).exists(), f"{page} leads to {target}"
        assert not anchor or anchor in pages[name or page].anchors, f"{page} leads to {target}"
    return len(found)


def index_of(folder: Path) -> list[list]:
    return json.loads((folder / "search.js").read_text().removeprefix("const INDEX = ").rstrip().rstrip(";"))


def test_every_script_has_a_page_with_its_objective_and_lines(built):
    front = (built / "index.html").read_text()
    for script in SPECS:
        text = (built / f"{script}.html").read_text()
        assert f'href="{script}.html"' in front
        assert listing.two_sentences(listing.docstring(script).idea)[:60] in unescape(text)
        source = sources()[f"algos/{script}.py"].splitlines()
        shown = {int(n): unescape(re.sub("<[^>]+>", "", line))
                 for n, line in re.findall(r"id=L(\d+)>.*?<code>(.*?)</code></div>", text)}  # fmt: skip
        assert shown == {n: source[n - 1] for n in shown} and max(shown) == len(source)
        assert bool(re.search('class="l own"', text)) == bool(parent_of(script))
        for name in SPECS[script].curves:
            assert f'id="curve-{name}"' in text


def test_links_lead_somewhere_and_the_site_is_small(built):
    assert check_links(built) > 1000
    assert sum(path.stat().st_size for path in built.iterdir()) < 15e6
    assert "http://" not in (built / "index.html").read_text() and "https://" not in (built / "index.html").read_text()


def test_a_csv_has_every_seed(built):
    rows = (built / "dqn-cartpole.csv").read_text().splitlines()
    recorded = site.curves.recorded("dqn-cartpole")
    assert len(rows) == 1 + sum(len(row["eval/return"]) for row in recorded)
    assert rows[1] == f"plainrl,1,2000,{recorded[0]['eval/return'][0]}"


def test_a_curve_below_the_published_budget_says_so(built):
    """PPO's 1M steps come from its preset, SAC's from its recipe's command; Pendulum has no published budget."""
    ppo, sac = (re.split("<figure", (built / f"{script}.html").read_text()) for script in ("ppo", "sac"))
    said = {part.split('"')[1]: "Cut short: " in part for part in ppo + sac if part.startswith(' id="curve-')}
    assert said["curve-ppo-hopper"] and said["curve-sac-hopper"]
    assert not (said["curve-ppo-hopper-1m"] or said["curve-ppo-halfcheetah-tuned"] or said["curve-sac-pendulum"])


def test_a_recipe_was_run_where_a_curve_has_its_steps_too():
    """The tuned PPO is recorded; of the paper's SAC on HalfCheetah only 30,000 of 1M steps."""
    ran = {recipe.command: site.was_run(s, recipe) for s in ("ppo", "sac") for recipe in SPECS[s].recipes}
    assert ran["--num-steps 512"] and not ran["HalfCheetah-v5 --total-timesteps 1000000"]


def test_what_was_measured_is_a_page(built):
    """Its tables, its pictures, and links from effects to their figures."""
    text = (built / "measured.html").read_text()
    assert all(name in text for name in re.findall("^## (.*)$", (ROOT / "benchmarks/README.md").read_text(), re.M))
    assert text.count("<table>") >= 8 and "https://" not in text
    pictures = re.findall(r'<img [^>]*src="([^"]+)"', text)
    assert pictures and all((built / picture).exists() for picture in pictures)
    assert 'href="her_sac.html#effect-sac-reach"' in text


@pytest.mark.parametrize("name, script", HERE)
def test_the_search_knows_other_names(built, name, script):
    """As site.js does: the first entry whose name begins with the words, or one that holds them."""
    wanted = re.sub(r"[^a-z0-9+]", "", name.lower())
    entries = [entry for entry in index_of(built) if wanted in re.sub(r"[^a-z0-9+]", "", entry[1].lower())]
    assert script in {entry[3].partition(".")[0] for entry in entries}


def test_the_answer_of_the_hunt_is_hidden_and_right(built):
    assert len(bug_hunt.HUNTS) == 11 and all(len(bug_hunt.rows_of(hunt)) == 3 for hunt in bug_hunt.HUNTS)
    for number, hunt in enumerate(bug_hunt.HUNTS, 1):
        text, bug = (built / f"hunt-{number}.html").read_text(), bug_hunt.bug_of(hunt)
        script = site.curves.SCRIPT_OF[hunt.curve]
        answer = json.loads(base64.b64decode(re.search(r'data-answer="([^"]+)"', text)[1]))
        for secret in (bug.name, bug.mistake.replace("-", " "), bug.why):
            assert secret not in unescape(text)
        lines = bug_hunt.planted(hunt).splitlines()
        changed = [n for n, line in enumerate(lines, 1) if line not in sources()[f"algos/{script}.py"].splitlines()]
        assert set(changed) <= set(answer["lines"]) and 1 <= len(answer["lines"]) <= 4
        assert all(f"id=L{line}>" in text for line in answer["lines"])
        assert bug.why.startswith(answer["why"]) and answer["test"]


def test_what_a_curve_says_of_a_bug(monkeypatch):
    hunt = bug_hunt.HUNTS[0]
    right, curve = bug_hunt.right_rows(hunt.curve), site.curves.CURVES[hunt.curve]
    shows = "The curve shows it."
    for change, drawn, said in ((-0.5, 0, shows), (0, -0.5, shows), (0, 0, bug_hunt.UNSEEN), (0.5, 0, bug_hunt.BETTER)):
        rows = [{name: row[name] + change for name in curve.numbers} for row in right]
        rows = [row | {curve.column: [y + drawn for y in old[curve.column]]} for row, old in zip(rows, right)]
        monkeypatch.setattr(bug_hunt, "rows_of", lambda _, rows=rows: rows)
        assert bug_hunt.verdict(hunt) == said


def test_the_hunt_trains_the_script_with_the_bug(monkeypatch, tmp_path):
    """The copy is what is trained, rows are kept, and what is there is not trained again."""
    hunt, seen = bug_hunt.HUNTS[0], []

    def run_once(name, seed):
        module = sys.modules[f"algos.{site.curves.SCRIPT_OF[name]}"]
        seen.append((seed, Path(module.__file__).read_text()))
        return {"seed": seed, "reward": [0.0], "seconds": 0.0}

    monkeypatch.setattr(bug_hunt, "run_once", run_once)
    monkeypatch.setattr(bug_hunt, "RESULTS", tmp_path / "rows.jsonl")
    bug_hunt.record((hunt.bug,))
    bug_hunt.record((hunt.bug,))
    assert seen == [(seed, bug_hunt.planted(hunt)) for seed in (1, 2, 3)]
    assert [row["seed"] for row in bug_hunt.rows_of(hunt)] == [1, 2, 3]
    assert {"commit", "machine"} <= bug_hunt.recorded()[0].keys()


def test_a_stop_without_its_script_is_left_out(built):
    text = (built / "path.html").read_text()
    assert text.count("<details>") == sum(stop[0] in SPECS for stop in site.STOPS)
    assert len(site.STOPS) == 6


@pytest.mark.parametrize("name, steps, unit", (
    ("ppo-hopper-1m", 488 * 2048, "environment steps"), ("sac-hopper-1m", 1_000_000, "environment steps"),
    ("ppo-cartpole", 24_576, "environment steps"), ("dt-hopper", 1200, "updates"), ("grpo-countdown", 100, "steps"),
))  # fmt: skip
def test_a_curve_ends_at_its_last_step(built, name, steps, unit):
    """Not at the number of its evaluations or iterations. A peer's may be shorter."""
    head, *rows = (built / f"{name}.csv").read_text().splitlines()
    last = [row for row in rows if row.startswith("plainrl,")][-1]
    assert head.split(",")[2] == unit and int(last.split(",")[2]) == steps


def test_iterations_are_counted_where_some_have_no_return(built):
    assert site.axis("reinforce-cartpole") == (1, "iterations")


def test_an_effect_says_how_its_runs_differ(built):
    """And not what all share: the same task."""
    text = (built / "prorl.html").read_text()
    assert "<b>reset</b>: prorl.py, beta 1.0, reset_reference_every 10<" in text
    assert "<b>free</b>: grpo.py, beta 0.0<" in text


def test_a_long_row_becomes_means():
    assert drawings.thinned([1.0, 3.0, 5.0, 7.0], most=2) == [(1.5, 2.0), (3.5, 6.0)]
    assert drawings.thinned([1.0, float("nan")]) == [(1.0, 1.0)]


def test_the_picture_of_the_readme_is_small():
    assert (ROOT / "benchmarks/curves/wall.png").stat().st_size < 300_000


def test_a_further_spec_appears_without_another_edit(tmp_path):
    """A copy of the project with a script and a spec more."""
    for name in ("algos", "benchmarks", "tests", "utils"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("build", "__pycache__"))
    for name in ("README.md", "pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    page = tmp_path / "algos/README.md"
    page.write_text(re.sub(r"(python algos/)simpo(.py.*\n)", r"\1simpo\2\1further\2", page.read_text()))
    script = (tmp_path / "algos/simpo.py").read_text().replace("(SimPO)", "(FurtherPO)")
    (tmp_path / "algos/further.py").write_text(script)
    spec = (tmp_path / "tests/specs/simpo.py").read_text().replace('"SimPO, arXiv', '"FurtherPO, arXiv')
    (tmp_path / "tests/specs/further.py").write_text(spec.replace("simpo-sort", "further-sort"))
    command = [sys.executable, tmp_path / "benchmarks/site.py", "build", "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_links(tmp_path / "out")
    assert "further.html" in (tmp_path / "out/index.html").read_text()
    assert "not recorded yet" in (tmp_path / "out/further.html").read_text()
    assert any(entry[1:] == ["FurtherPO", "Simple Preference Optimization (FurtherPO).", "further.html"]
               for entry in index_of(tmp_path / "out"))  # fmt: skip


@pytest.mark.slow
def test_a_browser_shows_it(built, tmp_path):
    """No error in the console, every picture drawn, no horizontal scrolling, on a desktop and on a phone."""
    if not CHROMIUM:
        pytest.skip("not run: chromium is not installed")
    browser = Browser(tmp_path / "profile")
    try:
        for page in sorted(built.glob("*.html")):
            for width in WIDTHS:
                browser.open(page, width)
                where = f"{page.name} at {width} pixels"
                assert not browser.complaints, f"{where}: {browser.complaints}"
                assert browser.ask("document.documentElement.scrollWidth") <= width, f"{where} scrolls"
                undrawn = "[...document.querySelectorAll('svg, img')].filter(e => !e.getBoundingClientRect().height)"
                assert browser.ask(f"{undrawn}.length") == 0, where
                assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "flex", where
        for name, script in HERE:
            first = browser.ask(f"find({json.dumps(name)})[0]?.page")
            assert first and first.partition(".")[0] == script, f"{name} leads to {first}"
        browser.open(built / "hunt-1.html", 390)
        browser.ask("document.querySelector('#give-up').click()")
        assert bug_hunt.bug_of(bug_hunt.HUNTS[0]).mistake.replace("-", " ") in browser.ask("verdict.textContent")
        assert not browser.complaints
    finally:
        browser.close()
