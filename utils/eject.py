"""Writes one self-contained file: a script with exactly the part of utils/ that it uses inlined, readable, in order.

    python utils/eject.py algos/grpo.py > mine.py
    python utils/eject.py --single algos/grpo.py > mine.py      without what only several processes and engines need

How: a file's top-level statements are its units. Starting from all units of the script, every global name that a unit
refers to brings in the units that bind it, through `from utils.x import name` into other modules, until nothing is
missing. Text is copied, never regenerated, so comments and the docstrings under dataclass fields (which tyro reads from
the source) survive. Everything ends up in one namespace; a name that would mean two things there is an error, never a
guess. What is looked up at run time only (getattr, quoted annotations, a decorator that registers) is not seen.
"""

import argparse
import ast
import builtins
import re
import symtable
import sys
from dataclasses import dataclass, field
from pathlib import Path

UTILS = Path(__file__).resolve().parent
WIDTH = 120  # of an import line
OURS = re.compile(r"from (\.|utils\b)|import (.*, )?utils\b")  # an import of this package's, in any form
REPLACED = ("utils.distributed", "utils.engine")  # by utils/single.py
PLAIN = re.compile(r"from utils\.\w+ import \w+(, \w+)*")  # in the form that can be inlined


class EjectError(Exception):
    """One sentence for the user."""


@dataclass(eq=False)
class Unit:
    """A top-level statement that is no import, with the comments around it."""

    text: str
    is_block: bool  # a function or class: two blank lines around it
    binds: set[str]
    reads: set[str]


@dataclass(eq=False)
class File:
    label: str
    head: str  # down to the docstring
    units: list[Unit] = field(default_factory=list)
    imports: dict[str, set[tuple]] = field(default_factory=dict)  # name -> {("import" or "from x import", what)}
    borrowed: dict[str, str] = field(default_factory=dict)  # name -> the module of utils/ that has it


def global_names(node: ast.stmt) -> tuple[set[str], set[str]]:
    """The names that a top-level statement binds, and the global names that it reads."""
    top = symtable.symtable(ast.unparse(node), "<unit>", "exec")
    binds = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    reads, scopes = set(), [top]
    for scope in scopes:
        scopes += scope.get_children()
        in_place = scope.get_type() in ("module", "class")  # where `x = x` reads the global x
        reads |= {s.get_name() for s in scope.get_symbols() if (s.is_referenced() if in_place else s.is_global())}
    return binds, reads


def read(path: Path, label: str) -> File:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError) as error:
        raise EjectError(
            f"{label} is no Python source: {error}; give the path of a script, as in algos/grpo.py."
        ) from None
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)):
        text = ast.unparse(node)
        if OURS.match(text) and (node not in tree.body or not PLAIN.fullmatch(text)):
            says = f"line {node.lineno} of {label}, `{text}`, cannot be inlined"
            raise EjectError(f"{says}: write `from utils.module import name` at the top level of the file.")
    lines, begin = source.split("\n"), (tree.body[0].end_lineno or 0) if ast.get_docstring(tree) else 0
    file = File(label, "\n".join(lines[:begin]))

    def first_line(node: ast.stmt) -> int:
        """Of the node with its decorators and the comments directly above it."""
        start = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])]) - 1
        return next(i for i in range(start, -1, -1) if not lines[i - 1].startswith("#"))

    body = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    for node, end in zip(body, [*map(first_line, body[1:]), len(lines)]):  # a string belongs to the constant above it
        if isinstance(node, ast.Import | ast.ImportFrom):
            head = "import" if isinstance(node, ast.Import) else f"from {node.module} import"
            for a in node.names:
                name = a.asname or (a.name.split(".")[0] if head == "import" else a.name)
                if head.startswith("from utils."):
                    file.borrowed[name] = head.split()[1]
                else:
                    what = f"{a.name} as {a.asname}" if a.asname else a.name
                    file.imports.setdefault(name, set()).add((head, what))
        if isinstance(node, ast.Import | ast.ImportFrom) or ast.unparse(node).startswith("sys.path."):
            begin = node.end_lineno or end
            continue
        is_block = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        file.units.append(Unit("\n".join(lines[begin:end]).strip("\n"), is_block, *global_names(node)))
        begin = end
    return file


def import_block(wanted: set[tuple[str, str]]) -> str:
    """`import x` before `from x import y`, each sorted."""
    lines = sorted(f"import {what}" for head, what in wanted if head == "import")
    for head in sorted({head for head, _ in wanted} - {"import"}):
        names = sorted(what for other, what in wanted if other == head)
        line = f"{head} {', '.join(names)}"
        lines.append(line if len(line) <= WIDTH else f"{head} (\n    " + ",\n    ".join(names) + ",\n)")
    return "\n".join(lines)


def eject(script: Path, single: bool = False) -> str:
    """The text of the self-contained file; raises EjectError where there cannot be one. single: with utils/single.py
    where utils/distributed.py and utils/engine.py stood."""
    path = Path(script).resolve()
    label = path.relative_to(UTILS.parent).as_posix() if path.is_relative_to(UTILS.parent) else path.name
    files: dict[str, File] = {}  # in the order in which Python runs them
    used, wanted, senses = set(), set(), {}

    def load(module: str) -> File:
        if single and module in REPLACED:
            module = "utils.single"
        if module not in files:
            name = f"{module.replace('.', '/')}.py"
            file = read(UTILS.parent / name, name)
            for needed in file.borrowed.values():
                load(needed)
            files[module] = file
        return files[module]

    def use(file: File, name: str) -> None:
        """Brings in what `name` stands for in `file`."""
        while name in file.borrowed:
            file = load(file.borrowed[name])
        units, imports = [unit for unit in file.units if name in unit.binds], file.imports.get(name, set())
        if not (units or imports or hasattr(builtins, name)):
            return  # a property's own name in its class
        plain = all(head == "import" and " as " not in what for head, what in imports)  # `import a.b` binds a
        sense = [unit.text for unit in units] or (not plain and imports)
        other, where = senses.setdefault(name, (sense, file.label))
        if other != sense:
            raise EjectError(f"{name!r} means one thing in {where} and another in {file.label}: rename one of them.")
        wanted.update(imports)
        for unit in (unit for unit in units if unit not in used):
            used.add(unit)
            for other in sorted(unit.binds | unit.reads):
                use(file, other)

    own = read(path, label)
    for module in own.borrowed.values():
        load(module)
    used.update(own.units)
    for name in sorted({*own.imports}.union(*(unit.binds | unit.reads for unit in own.units))):
        use(own, name)
    parts = []
    for file in [*files.values(), own]:
        text, previous = "", None
        for unit in (unit for unit in file.units if unit in used):
            near = previous is not None and not (unit.is_block or previous.is_block)
            text, previous = text + ("\n" if near else "\n\n\n") + unit.text, unit
        if text:
            notes = [f"# {line}".rstrip() for line in file.head.strip('"\n').splitlines()]
            lines = [f"# --- {file.label} ---"] if file is own else [f"# --- from {file.label} ---", *notes]
            parts.append("\n".join(lines) + text)
    note = f"# Ejected from plainrl: {label} and, inlined, the part of utils/ that it uses. One file, yours to change."
    return f"{note}\n{own.head}\n\n{import_block(wanted)}\n\n" + "\n\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints a script and the part of utils/ that it uses as one file.")
    parser.add_argument("script", type=Path, help="for example algos/grpo.py")
    parser.add_argument("--single", action="store_true", help="without what only several processes and engines need")
    try:
        sys.stdout.buffer.write(eject(**vars(parser.parse_args())).encode())
    except EjectError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
