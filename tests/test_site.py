"""The static site: every script has its page, and links and pictures are there."""

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

from benchmarks import bug_hunt, listing, site
from tests.specs import SPECS, parent_of, sources

ROOT = Path(__file__).resolve().parents[1]
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
