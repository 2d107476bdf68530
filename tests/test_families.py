"""Each child's diff to its parent lies in algos/families/, and the tool that makes, draws and merges children works."""

import re
import shutil
import subprocess

import family
import pytest

CHILDREN = family.families()
ROOT = '''r"""The root.

{docstring}
"""

from dataclasses import dataclass

NAME, TITLE = "root", "Root"


@dataclass
class Args:
    """Settings."""

    beta: float = 1.0
    """a field"""


def loss(x, args):
    return args.beta * x  # why


def update(x, args):
    return loss(x, args)


def train(args):
    """Trains."""
    return update(2, args)
'''


@pytest.mark.parametrize("child", CHILDREN)
def test_the_diff_of_a_child_is_the_committed_one(child):
    first, _, *rest = family.diff_of(child).read_text().splitlines()
    message = f"run `python tests/family.py diff {child}` and look at the change of its diff in review"
    assert [first, *rest] == family.drawn(child), message


@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_has_every_change_of_its_parent(child):
    assert child not in family.behind(), family.behind()[child]


def test_every_diff_has_its_child():
    odd = {path.stem for path in family.diff_of("x").parent.iterdir()} ^ set(CHILDREN)
    assert not odd, f"`git rm algos/families/CHILD.diff` or `python tests/family.py diff CHILD` for {odd}"


def test_no_draft_is_left():
    """`new` writes TODO where a person must write."""
    files = [*family.ROOT.glob("algos/*.py"), *family.ROOT.glob("tests/specs/*.py")]
    assert not [path.name for path in files if "TODO" in path.read_text()]


@pytest.fixture
def house(tmp_path, monkeypatch, capsys):
    """A temporary repository with a root, its child and its grandchild, each with a line of its own."""
    if shutil.which("git") is None:
        pytest.skip("not run: git is not installed")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set where git itself runs the tests
        monkeypatch.delenv(name, raising=False)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for folder in ("algos", "tests/specs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "algos/root.py").write_text(ROOT.format(docstring="The idea."))
    family.new("child", parent="root", title="Child", root=tmp_path)
    replace(tmp_path, "child", "return args.beta * x  # why", "return args.beta * x**2")
    family.diff((), tmp_path)
    family.new("grandchild", parent="child", title="The Grandchild", root=tmp_path)
    replace(tmp_path, "grandchild", "beta: float = 1.0", "beta: float = 3.0")
    family.diff((), tmp_path)
    capsys.readouterr()
    return tmp_path


def replace(house, script, old, new):
    path = family.script_of(script, house)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def text(house, script):
    return family.script_of(script, house).read_text()


def test_a_new_script_is_a_copy_whose_diff_shows_the_lines_of_its_idea(house):
    assert family.families(house) == {"child": "root", "grandchild": "child"}
    assert 'NAME, TITLE = "grandchild", "The Grandchild"' in text(house, "grandchild")
    first, record, *rest = family.diff_of("child", house).read_text().splitlines()
    assert first == "Child = root.py and 1 lines of its own"
    assert record == f"in sync with {family.hash_of('root', house)}"
    assert rest == [
        "", "@@ def loss(x, args):", " class Args:", "     beta: float = 1.0", " def loss(x, args):",
        "-    return args.beta * x", "+    return args.beta * x**2",
        " def update(x, args):", "     return loss(x, args)", " def train(args):",
    ]  # fmt: skip
    assert family.own_lines("grandchild", house) == 0  # its one line is in Args
    assert "+    beta: float = 3.0" in family.diff_of("grandchild", house).read_text()


def test_a_new_script_comes_with_a_spec_and_a_test_that_fails(house):
    compile((house / "tests/specs/child.py").read_text(), "spec", "exec")
    namespace = {}
    exec((house / "tests/test_exact_child.py").read_text().replace("from algos import child", ""), namespace)
    with pytest.raises(pytest.fail.Exception):
        namespace["test_the_gradient_of_update_is_the_enumerated_one"]()
    with pytest.raises(SystemExit, match="algos/child.py, .* already there"):
        family.new("child", parent="root", title="Child", root=house)


def test_a_change_of_the_root_reaches_the_grandchild(house):
    replace(house, "root", '"Root"\n', '"Root"\nWIDTH = 8\n')  # beside a line in which all differ
    replace(house, "root", "update(2, args)", "update(WIDTH, args)")
    replace(house, "root", "The idea.", "Another word.")
    with pytest.raises(SystemExit, match="child.py misses a change of root.py: .* sync root"):
        family.diff(("child",), house)
    assert list(family.behind(house)) == ["child"]  # drawing did not put it in sync
    family.sync("root", house)
    assert not family.behind(house)
    for script in ("child", "grandchild"):
        assert "WIDTH = 8" in text(house, script) and "update(WIDTH, args)" in text(house, script)
        assert "x**2" in text(house, script) and "Another word." not in text(house, script)
        assert family.diff_of(script, house).read_text().splitlines()[2:] == family.drawn(script, house)[1:]
    assert 'NAME, TITLE = "child", "Child"' in text(house, "child")


def test_a_conflict_is_named_and_finished_by_drawing_the_diff(house):
    replace(house, "root", "return args.beta * x  # why", "return args.beta * abs(x)")
    with pytest.raises(SystemExit) as stop:
        family.sync("root", house)
    number = text(house, "child").splitlines().index("<<<<<<< child.py") + 1
    assert f"algos/child.py:{number}" in str(stop.value) and "diff child" in str(stop.value)
    with pytest.raises(SystemExit, match="resolve"):
        family.diff(("child",), house)
    conflict = text(house, "child")
    for script in ("root", "child"):
        with pytest.raises(SystemExit, match="resolve"):
            family.sync(script, house)
    assert text(house, "child") == conflict and "abs" not in text(house, "grandchild")
    assert "child.py misses a change of root.py" in family.behind(house)["child"]

    before, after = re.split("<<<<<<<.*>>>>>>> root.py\n", conflict, flags=re.DOTALL)
    family.script_of("child", house).write_text(f"{before}    return args.beta * abs(x) ** 2\n{after}")
    replace(house, "root", "The idea.", "Another word.")  # after the merge: the child has yet to get it
    with pytest.raises(SystemExit, match="child.py misses a change of root.py"):
        family.diff(("child",), house)
    family.sync("root", house)
    assert not family.behind(house)
    assert "abs(x) ** 2" in text(house, "grandchild") and "beta: float = 3.0" in text(house, "grandchild")


def test_a_clone_without_the_parents_old_text_says_so(house):
    child = family.diff_of("child", house)
    child.write_text(child.read_text().replace(family.hash_of("root", house), "0" * 40))
    with pytest.raises(SystemExit, match="git fetch --unshallow"):
        family.sync("root", house)
    assert "x**2" in text(house, "child")


def test_the_family_tree_has_every_script_below_its_parent():
    tree = re.search(r"## Family tree\n+```\n(.*?)```", (family.ROOT / "algos/README.md").read_text(), re.S)
    parents, line = {}, {}
    for mark, name in re.findall(r"^(\W*)(\w+)\.py", tree[1], re.M):
        line = {depth: above for depth, above in line.items() if depth < len(mark)} | {len(mark): name}
        parents[name] = list(line.values())[-2:-1]
    scripts = [path.stem for path in (family.ROOT / "algos").glob("*.py")]
    wanted = {script: [CHILDREN[script]] if script in CHILDREN else [] for script in scripts}
    missing = [f"{script}.py below {''.join(above) or 'no script'}" for script, above in wanted.items()
               if parents.get(script) != above]  # fmt: skip
    gone = [f"no line of {script}.py" for script in parents.keys() - wanted.keys()]
    assert not missing + gone, f"in `## Family tree` of algos/README.md write {', '.join(missing + gone)}"
