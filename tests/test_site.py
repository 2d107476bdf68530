"""The static site: every script has its page, and links and pictures are there."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks import listing, site
from tests.specs import SPECS, parent_of, sources

ROOT = Path(__file__).resolve().parents[1]


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
