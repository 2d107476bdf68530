"""Families of scripts: a child is a copy of its parent with the lines of its idea changed.

    python tests/family.py new CHILD --parent PARENT --title TITLE      a new script with its spec, first test and diff
    python tests/family.py diff [CHILD ...]                             draws algos/families/CHILD.diff; default: all
    python tests/family.py sync PARENT                                  merges a change of PARENT into all descendants

A diff leaves out docstrings, comments, blank lines, NAME and TITLE. Its second line holds the git hash of the parent as
the child last had it, which is the base of the three-way merge. Module docstrings stay out of the merge.

Only a merge moves that hash: `sync` does it where the merge is clean. Where it is not, `sync` notes the new hash as
"to finish", and `diff CHILD` moves it there once no conflict marker is left. `diff` of a child that misses a change of
its parent leaves the hash alone and says so, so the test that compares the hashes fails until someone runs `sync`.
After a rewrite of both files by hand, delete the diff and draw it: the review then shows a new hash without a merge.
"""

import ast
import hashlib
import io
import re
import subprocess
import tempfile
import tokenize
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).resolve().parents[1]
Root = Annotated[Path, tyro.conf.Suppress]  # tests give another folder
CONTEXT = 3  # unchanged lines around a change
TITLE = re.compile(r'^NAME, TITLE = "(\w+)", "(.+)"\n', re.MULTILINE)
DOCSTRING = re.compile(r'\Ar?""".*?"""\n', re.DOTALL)  # no syntax tree: a script with conflicts has none


def script_of(name: str, root: Path = ROOT) -> Path:
    return root / f"algos/{name}.py"


def diff_of(child: str, root: Path = ROOT) -> Path:
    return root / f"algos/families/{child}.diff"


def parent_of(script: str, root: Path = ROOT) -> str | None:
    docstring = DOCSTRING.match(script_of(script, root).read_text())
    found = re.search(r"^Parent: (\w+)\.py", docstring[0] if docstring else "", re.MULTILINE)
    return found and found[1]


def families(root: Path = ROOT) -> dict[str, str]:
    """Child -> parent."""
    scripts = sorted(path.stem for path in (root / "algos").glob("*.py"))
    return {child: parent for child in scripts if (parent := parent_of(child, root))}


def numbered_code_of(path: Path) -> list[tuple[int, str]]:
    """Lines without docstrings, comments, blank lines, NAME and TITLE, formatted as in the file, with their numbers."""
    text = TITLE.sub("\n", path.read_text())
    lines, docstrings = text.splitlines(), set()
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    return [(number, line) for number, line in enumerate(lines, 1) if number not in docstrings and line.strip()]


def code_of(path: Path) -> list[str]:
    return [line for _, line in numbered_code_of(path)]


def without_args(code: list[str]) -> list[int]:
    """Indices of the lines outside the class Args."""
    kept, inside = [], False
    for index, line in enumerate(code):
        inside = line.startswith("class Args") or (inside and line.startswith(" "))
        kept += [] if inside else [index]
    return kept


def own_lines(child: str, root: Path = ROOT) -> int:
    """Lines that the diff adds to the parent, without those of Args."""
    theirs, ours = (code_of(script_of(name, root)) for name in (parent_of(child, root), child))
    changes = SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes()
    added = {line for kind, _, _, begin, end in changes if kind != "equal" for line in range(begin, end)}
    return len(added & set(without_args(ours)))


def hunks(theirs: list[str], ours: list[str]) -> list[str]:
    """A unified diff. A hunk is headed by the definition in which it begins: numbers of lines would drift."""
    lines = []
    for group in SequenceMatcher(None, theirs, ours, autojunk=False).get_grouped_opcodes(CONTEXT):
        first = next(begin for kind, _, _, begin, _ in group if kind != "equal")
        scopes = [line for line in ours[:first] if re.match(r"(def|class) ", line)]
        lines += ["", f"@@ {scopes[-1] if scopes else 'top of the file'}"]
        for kind, begin, end, our_begin, our_end in group:
            if kind == "equal":
                lines += [f" {line}" for line in theirs[begin:end]]
            else:
                lines += [f"-{line}" for line in theirs[begin:end]] + [f"+{line}" for line in ours[our_begin:our_end]]
    return lines


def drawn(child: str, root: Path = ROOT) -> list[str]:
    """The diff's lines but for the second, which is the record of merges: the head, then the hunks."""
    parent, title = parent_of(child, root), TITLE.search(script_of(child, root).read_text())
    head = f"{title[2] if title else child} = {parent}.py and {own_lines(child, root)} lines of its own"
    return [head, *hunks(code_of(script_of(parent, root)), code_of(script_of(child, root)))]


def record_of(child: str, root: Path = ROOT) -> tuple[str, str | None]:
    """Hashes from the diff's second line: of the parent as the child last had it, and of a merge to finish."""
    found = None
    if diff_of(child, root).exists():
        line = diff_of(child, root).read_text().splitlines()[1]
        found = re.fullmatch(r"in sync with ([0-9a-f]{40})(?:, to finish: ([0-9a-f]{40}))?", line)
    if found is None:
        raise SystemExit(f"{child} has no readable diff: python tests/family.py diff {child}")
    return found[1], found[2]


def write_diff(child: str, lines: list[str], base: str, to_finish: str | None = None, root: Path = ROOT) -> None:
    record = f"in sync with {base}" + (f", to finish: {to_finish}" if to_finish else "")
    diff_of(child, root).parent.mkdir(exist_ok=True)
    diff_of(child, root).write_text("\n".join([lines[0], record, *lines[1:]]) + "\n")


def hash_of(script: str, root: Path = ROOT) -> str:
    """As `git hash-object` has it."""
    content = script_of(script, root).read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def store(script: str, root: Path = ROOT) -> str:
    """The file's hash. git keeps the content, so that it can be the base of a merge before it is committed."""
    command = ["git", "hash-object", "-w", "--no-filters", script_of(script, root)]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def behind(root: Path = ROOT) -> dict[str, str]:
    """Children that miss a change of their parent -> what to say."""
    return {
        child: f"{child}.py misses a change of {parent}.py: python tests/family.py sync {parent}"
        for child, parent in families(root).items()
        if record_of(child, root)[0] != hash_of(parent, root)
    }


def conflicts_in(child: str, root: Path = ROOT) -> list[str]:
    lines = script_of(child, root).read_text().splitlines()
    return [f"algos/{child}.py:{number}" for number, line in enumerate(lines, 1) if line.startswith("<<<<<<< ")]


def merge(child: str, parent: str, base: str, root: Path = ROOT) -> bool:
    """Writes the change of the parent since `base` into the child. Returns whether there was no conflict. The child
    keeps its docstring, NAME and TITLE."""
    blob = subprocess.run(["git", "cat-file", "blob", base], cwd=root, capture_output=True)
    if blob.returncode:
        raise SystemExit(
            f"this clone lacks {parent}.py as {child}.py last had it (blob {base}): run `git fetch --unshallow`, "
            "then sync again"
        )
    ours = script_of(child, root).read_text()
    docstring, title = DOCSTRING.match(ours)[0], TITLE.search(ours)
    with tempfile.TemporaryDirectory() as folder:
        texts = {"ours": ours, "base": blob.stdout.decode(), "theirs": script_of(parent, root).read_text()}
        for name, text in texts.items():  # all have the child's line of NAME and TITLE, so that it conflicts with none
            same_title = TITLE.sub(lambda _: title[0] if title else "", DOCSTRING.sub("", text))
            (Path(folder) / name).write_text(same_title)
        labels = [f"{child}.py", f"{parent}.py as {child}.py last had it", f"{parent}.py"]
        command = ["git", "merge-file", "-p", "--diff3", *(word for label in labels for word in ("-L", label))]
        merged = subprocess.run([*command, *texts], cwd=folder, capture_output=True, text=True)
    if merged.returncode > 127:
        raise SystemExit(f"git merge-file failed on {child}.py: {merged.stderr.strip()}")
    script_of(child, root).write_text(docstring + merged.stdout)
    return merged.returncode == 0


def carry(parent: str, root: Path) -> list[str]:
    """Merges the parent into its children, then each of these into its own. Returns what is left to resolve."""
    left, now = [], store(parent, root)
    for child in [name for name, its_parent in families(root).items() if its_parent == parent]:
        base, to_finish = record_of(child, root)
        if not to_finish and base != now:
            if merge(child, parent, base, root):
                write_diff(child, drawn(child, root), now, root=root)
                print(f"{child}.py has the change of {parent}.py")
            else:
                old_head, _, *old = diff_of(child, root).read_text().splitlines()
                write_diff(child, [old_head, *old], base, now, root)
                to_finish = now
        if to_finish:
            places = conflicts_in(child, root) or [f"algos/{child}.py"]
            left.append(f"{', '.join(places)}: resolve, then run: python tests/family.py diff {child}")
        else:
            left += carry(child, root)
    return left


def sync(parent: tyro.conf.Positional[str], root: Root = ROOT) -> None:
    """Merges a change of PARENT into its children, and on into theirs. Lists conflicts by file and line."""
    if not script_of(parent, root).exists():
        raise SystemExit(f"there is no algos/{parent}.py")
    if places := conflicts_in(parent, root):
        raise SystemExit(f"{', '.join(places)}: resolve the conflict first")
    if left := carry(parent, root):
        raise SystemExit(
            "\n".join([*left, f"At the end, run `sync {parent}` again: the children of these scripts still wait."])
        )


def diff(children: tyro.conf.Positional[tuple[str, ...]] = (), root: Root = ROOT) -> None:
    """Draws the diffs of children, of all by default. Finishes a merge whose conflicts are resolved."""
    known = families(root)
    for child in children or known:
        if child not in known:
            raise SystemExit(f"{child} is no child: the children are {', '.join(known)}")
        if places := conflicts_in(child, root):
            raise SystemExit(f"{', '.join(places)}: resolve the conflict first")
        new = not diff_of(child, root).exists()
        base, to_finish = (store(known[child], root), None) if new else record_of(child, root)
        write_diff(child, drawn(child, root), to_finish or base, root=root)
    drawn_now = set(children or known)
    if missing := [line for child, line in behind(root).items() if drawn_now & {child, known[child]}]:
        raise SystemExit("\n".join(missing))


DRAFT = '''r"""{title}: TODO its name in full.

TODO Authors year, "Paper" (arXiv 0000.00000, equation 0).

Parent: {parent}.py. TODO One sentence: what of the parent changes.

TODO The idea in two sentences. Minimises

    TODO L(theta) = ...

    TODO each symbol   what it is

Run
    python algos/{child}.py                       TODO what the default learns

Expect
    TODO What the default run reaches and in how long; what {parent}.py reaches there.

Metrics
    TODO column    what it is, and what is healthy

Differences
    TODO From the paper as a whole, and from well-known code of the same name.
"""
'''
TEST = '''"""{title}: values by hand, and the expected gradient of `update` by enumeration."""

import pytest

from algos import {child}


def test_the_gradient_of_update_is_the_enumerated_one():
    pytest.fail("write this test of {child}.update first: tests/test_exact_{parent}.py shows how")
'''
SPEC = '''"""{title}: algos/{child}.py."""

from tests.specs import Spec
from tests.specs.{parent} import SPEC as PARENT

SPEC = Spec(  # the rest is {parent}.py's; see tests/specs/__init__.py
    "{title}, arXiv 0000.00000",
    tests="exact_{child} " + PARENT.tests,
    no_recipe="TODO why the paper's settings cannot be a command",
)
'''


def new(child: tyro.conf.Positional[str], parent: str, title: str, root: Root = ROOT) -> None:
    """A new script as a copy of PARENT, with a docstring to fill in, a spec, a test that fails until it is written, and
    its diff. TITLE is the name that people use, such as SimPO."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", child):
        raise SystemExit(f"{child} cannot be imported: use lower-case letters, digits and underscores")
    if not script_of(parent, root).exists():
        raise SystemExit(f"there is no algos/{parent}.py to copy")
    names = dict(child=child, parent=parent, title=title)
    copy = DOCSTRING.sub("", script_of(parent, root).read_text())
    copy = TITLE.sub(lambda _: f'NAME, TITLE = "{child}", "{title}"\n', copy)
    files = {
        script_of(child, root): DRAFT.format(**names) + copy,
        root / f"tests/specs/{child}.py": SPEC.format(**names),
        root / f"tests/test_exact_{child}.py": TEST.format(**names),
    }
    if there := [str(path.relative_to(root)) for path in files if path.exists()]:
        raise SystemExit(f"{', '.join(there)} is already there: choose another name")
    for path, text in files.items():
        path.write_text(text)
    diff((child,), root)
    print(f"""All steps: .github/CONTRIBUTING.md
1. algos/{child}.py: fill in the docstring, then change the lines of the idea
2. tests/test_exact_{child}.py: a hook for the root's tests/reference/, and values by hand; it fails until you do
3. tests/specs/{child}.py: curves, an effect, and flags that the parent lacks
4. python tests/family.py diff {child} && git diff algos/families
5. pytest --script {child}
6. python benchmarks/curves.py record CURVE, with the name of a curve in the spec""")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"new": new, "diff": diff, "sync": sync})
