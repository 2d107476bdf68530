"""A script as HTML for the site: the parts of its docstring, and its coloured lines with what its parent lacks."""

import ast
import builtins
import io
import keyword
import re
import tokenize
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from html import escape

from tests import family
from tests.specs import parent_of, sources

BUILTINS = frozenset(dir(builtins))
SECTIONS = ("Run", "Expect", "Metrics", "Differences")
NAME = re.compile(r"\b[A-Za-z][\w]*(?:-[\w]+)*\+*")


@dataclass
class Docstring:
    title: str
    papers: list[str]
    parent: str
    """what of the parent changes; empty for a root"""
    idea: str
    objective: list[str]
    """paragraphs; formulas and symbols are indented"""
    sections: dict[str, str]


@cache
def docstring(script: str) -> Docstring:
    text = ast.get_docstring(ast.parse(sources()[f"algos/{script}.py"])) or ""
    head, *rest = re.split(rf"^({'|'.join(SECTIONS)})\n", text, flags=re.MULTILINE)
    title, *parts = [part.strip("\n") for part in re.split(r"\n\s*\n", head) if part.strip()]
    first = next((k for k, part in enumerate(parts) if part.startswith("    ")), len(parts))
    *before, idea = [" ".join(part.split()) for part in parts[:first]] or [""]
    parents = [part for part in before if part.startswith("Parent: ")]
    sections = {name: body.strip("\n") for name, body in zip(rest[::2], rest[1::2])}
    papers = [part for part in before if part not in parents]
    papers = papers or [part for part in parents if "arXiv" in part]
    changes = re.sub(r"^Parent: \w+\.py[.,] ", "", "".join(parents))
    return Docstring(title, papers, changes[:1].upper() + changes[1:], idea, parts[first:], sections)


def two_sentences(text: str) -> str:
    """The first two; a last one that the formula completes is left out."""
    sentences = [s for s in re.split(r"(?<=[.])(?<!al[.])\s+(?=[A-Z\d])", text) if s.endswith(".")]
    return " ".join(sentences[:2])


def lead(text: str) -> str:
    """What stands before the formula and ends with it, as in "On minibatches maximises"; as a paragraph."""
    last = re.split(r"(?<=[.]) ", text)[-1]
    return "" if last.endswith(".") else f"<p>{escape(last.rstrip(':'))}</p>"


def commands(script: str) -> list[tuple[str, str]]:
    """(command on one line, what the docstring says of it), of the section Run; then the script's in algos/README.md
    that others publish."""
    found = []
    text = re.sub(r"\\\n\s*", "", docstring(script).sections.get("Run", ""))
    for line in filter(str.strip, text.splitlines()):
        command, *comment = re.split(r"\s{2,}", line.strip())
        if re.match(r"(python|torchrun|srun) ", command):
            found.append([command, " ".join(comment)])
        elif found:
            found[-1][1] = f"{found[-1][1]} {' '.join([command, *comment])}".strip()
    published = (family.ROOT / "algos/README.md").read_text().partition("### Recipes that others publish")[2]
    for line in re.sub(r"\\\n\s*", "", published.partition("\n## ")[0]).splitlines():
        if line.startswith(f"python algos/{script}.py "):
            command, _, comment = line.partition("  # ")
            found.append([command.strip(), comment.strip()])
    return [(command, comment) for command, comment in found]


def names(text: str) -> list[str]:
    """Words that look like the name of an algorithm: at least two capital letters. And papers' numbers."""
    words = [word for word in NAME.findall(text) if sum(letter.isupper() for letter in word) > 1]
    return list(dict.fromkeys(words + re.findall(r"\b\d{4}\.\d{5}\b", text)))


def with_links(text: str, script: str) -> str:
    """Escaped text, in which scripts and flags lead to their page and to their line."""

    def link(match: re.Match) -> str:
        word = match[0]
        if word.endswith(".py"):
            return f'<a href="{word[:-3]}.html">{word}</a>' if f"algos/{word}" in sources() else word
        line, _ = flags(script).get(word.removeprefix("--").removeprefix("no-").replace("-", "_"), (None, ""))
        return f'<a href="#L{line}">{word}</a>' if line else word

    return re.sub(r"(?<![\w/-])--[a-z][a-z0-9-]*|(?<![\w/.])\w+\.py\b", link, escape(text, quote=False))


@cache
def flags(script: str) -> dict[str, tuple[int, str]]:
    """Flag -> its line and its documentation, of the script's own class Args."""
    tree = ast.parse(sources()[f"algos/{script}.py"])
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    return {field.target.id: (field.lineno, " ".join(text.value.value.split()) if isinstance(text, ast.Expr) else "")
            for field, text in zip(body, [*body[1:], None]) if isinstance(field, ast.AnnAssign)}  # fmt: skip


def prose(text: str, script: str) -> str:
    """Paragraphs and lists of a section as HTML. A line that ends early ends its paragraph; one that is indented deeper
    than the section is kept as it is."""
    blocks, open_ = [], False
    for line in re.sub(r"^    ", "", text, flags=re.MULTILINE).splitlines():
        item = line.startswith("- ")
        if item or not open_ or not blocks:
            blocks.append([item, line.removeprefix("- ")])
        else:
            blocks[-1][1] += f" {line.strip()}"
        open_ = len(line) > 95 or blocks[-1][0] or not line.endswith((".", ":"))
    parts = [f"<{tag}>{with_links(body, script)}</{tag}>" for item, body in blocks for tag in ["li" if item else "p"]]
    return re.sub(r"((?:<li>.*?</li>\n?)+)", r"<ul>\1</ul>", "\n".join(parts))


def formulas(parts: list[str], script: str) -> str:
    return "\n".join(
        f"<pre>{with_links(re.sub(r'^    ', '', part, flags=re.MULTILINE), script)}</pre>" if part.startswith("    ")
        else f"<p>{with_links(part, script)}</p>" for part in parts
    )  # fmt: skip


def section(name: str, script: str) -> str:
    """A section of the docstring. Commands wrap, and what is said of them stands below, not far to the right."""
    body = docstring(script).sections[name]
    if name == "Run":
        return "".join(f"<pre class=command>{with_links(command, script)}</pre><p class=faint>{escape(note)}</p>"
                       for command, note in commands(script))  # fmt: skip
    return formulas([body], script) if name == "Metrics" else prose(body, script)


def kind_of(token: tokenize.TokenInfo, before: str) -> str:
    """The class of a token's colour; empty for most."""
    if token.type == tokenize.COMMENT:
        return "c"
    if token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING"):
        return "s"
    if token.type == tokenize.NUMBER:
        return "n"
    if token.type == tokenize.NAME:
        if before in ("def", "class"):
            return "d"
        if keyword.iskeyword(token.string):
            return "k"
        return "b" if token.string in BUILTINS and before != "." else ""
    return ""


def coloured(text: str) -> list[str]:
    """The lines of a script as HTML."""
    lines, marks, before = text.splitlines(), {}, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if kind := kind_of(token, before):
            for row in range(token.start[0], token.end[0] + 1):
                begin = token.start[1] if row == token.start[0] else 0
                end = token.end[1] if row == token.end[0] else len(lines[row - 1])
                marks.setdefault(row, []).append((begin, end, kind))
        before = token.string
    html = []
    for row, line in enumerate(lines, 1):
        at, parts = 0, []
        for begin, end, kind in marks.get(row, ()):
            parts += [escape(line[at:begin], quote=False)]
            parts += [f"<i class={kind}>{escape(line[begin:end], quote=False)}</i>"]
            at = end
        html.append("".join(parts) + escape(line[at:], quote=False))
    return html


@cache
def difference(script: str) -> tuple[set[int], dict[int, list[str]]]:
    """Numbers of the lines that the parent lacks, and line -> the parent's lines that are gone before it."""
    own, gone, parent = set(), {}, parent_of(script)
    if parent:
        theirs, ours = (family.numbered_code_of(family.script_of(name)) for name in (parent, script))
        matcher = SequenceMatcher(None, [line for _, line in theirs], [line for _, line in ours], autojunk=False)
        for kind, begin, end, our_begin, our_end in matcher.get_opcodes():
            if kind != "equal":
                own |= {number for number, _ in ours[our_begin:our_end]}
                lost = [line for _, line in theirs[begin:end]]
                gone |= {ours[min(our_begin, len(ours) - 1)][0]: lost} if lost else {}
    return own, gone


def code(text: str, script: str, show_difference: bool = True) -> str:
    """The lines behind the docstring, each with its number as an anchor."""
    own, gone = difference(script) if show_difference else (set(), {})
    first = ast.parse(text).body[0].end_lineno + 2  # behind the docstring and a blank line
    rows = []
    for number, line in list(enumerate(coloured(text), 1))[first - 1 :]:
        if number in gone:
            lost = "\n".join(escape(line, quote=False) for line in gone[number])
            few = f"{len(gone[number])} line{'s' * (len(gone[number]) > 1)} of {parent_of(script)}.py"
            rows.append(f"<details class=gone><summary>in place of {few}</summary><pre>{lost}</pre></details>")
        css = "l own" if number in own else "l"
        rows.append(f'<div class="{css}" id=L{number}><a href="#L{number}">{number}</a><code>{line}</code></div>')
    return f'<div class=code tabindex=0 role=region aria-label="code">{"".join(rows)}</div>'


def outline(script: str) -> list[tuple[str, int]]:
    """Classes and functions of the script, with their lines."""
    tree = ast.parse(sources()[f"algos/{script}.py"])
    return [(n.name, n.lineno) for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
