"""Writes one self-contained file: a script with exactly the part of utils/ that it uses inlined, readable, in order.

    python utils/eject.py algos/grpo.py > mine.py

How: a file's top-level statements are its units. Starting from all units of the script, every global name that a unit
refers to brings in the units that bind it, through `from utils.x import name` into other modules, until nothing is
missing. Text is copied, never regenerated, so comments and the docstrings under dataclass fields (which tyro reads from
the source) survive. Everything ends up in one namespace; a name that would mean two things there is an error, never a
guess. What is looked up at run time only (getattr, quoted annotations, a decorator that registers) is not seen.
"""

import argparse
import ast
import builtins
import symtable
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

UTILS = Path(__file__).resolve().parent
WIDTH = 120  # of an import line


class EjectError(Exception):
    """One sentence for the user."""


@dataclass(eq=False)
class Unit:
    """One top-level statement, with the comments above it."""

    text: str
    binds: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    is_block: bool = False  # a function or class: two blank lines around it
    is_apart: bool = False  # a blank line stood above it in the original


@dataclass(eq=False)
class File:
    label: str
    head: str = ""  # script: down to the docstring; module: its docstring as a comment, for it may define the terms
    units: list[Unit] = field(default_factory=list)
    owners: dict[str, list[Unit]] = field(default_factory=dict)  # name -> the units that bind it
    imports: dict[str, set[tuple]] = field(default_factory=dict)  # name -> {(module, attribute or "", as or "")}
    borrowed: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (utils module, its name there)
    mentioned: set[str] = field(default_factory=set)  # every global name in use anywhere in the original
    future: set[str] = field(default_factory=set)
    aliases: set[str] = field(default_factory=set)  # what others import from here `as` something: lines `b = a`


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


def is_utils(node: ast.AST) -> TypeGuard[ast.Import | ast.ImportFrom]:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").split(".")[0] == "utils"
    return isinstance(node, ast.Import) and any(a.name.split(".")[0] == "utils" for a in node.names)


def record_import(file: File, node: ast.Import | ast.ImportFrom) -> None:
    for a in node.names:
        module, attribute = (a.name, "") if isinstance(node, ast.Import) else (node.module or "", a.name)
        name = a.asname or attribute or module.split(".")[0]
        if module == "__future__":
            file.future.add(attribute)
        elif is_utils(node):
            file.borrowed[name] = (module, attribute)
        else:
            rename = a.asname if a.asname and a.asname != (attribute or module) else ""
            file.imports.setdefault(name, set()).add((module, attribute, rename))


def parse(path: Path, label: str) -> tuple[str, ast.Module]:
    try:
        source = path.read_text(encoding="utf-8")
        return source, ast.parse(source)
    except OSError as error:
        raise EjectError(f"{label}: {error.strerror}; give the path of a script, as in algos/grpo.py.") from None
    except (ValueError, SyntaxError) as error:
        raise EjectError(f"{label} is not Python source in UTF-8: {error}.") from None


def dissect(source: str, tree: ast.Module, label: str, is_script: bool = False) -> File:
    file, lines, body, end = File(label), source.split("\n"), tree.body, 0
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) or is_utils(n)):
        plain = isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "utils" and node in body
        if node.names[0].name == "*" or (is_utils(node) and not plain):
            says = f"line {node.lineno} of {label}, `{ast.unparse(node)}`, cannot be inlined"
            raise EjectError(f"{says}: write `from some.module import name` at the top level of the file.")
    starts = [min(n.lineno for n in [node, *getattr(node, "decorator_list", [])]) - 1 for node in body] + [len(lines)]
    for node, start, stop in zip(body, starts, starts[1:]):
        above, end = end, node.end_lineno or end
        if start < above:
            raise EjectError(f"{label} has two statements in line {start + 1}: give each its own line.")
        # Indented comments below a function's last statement still belong to it.
        end = max([end, *(i + 1 for i in range(end, stop) if lines[i][:1].isspace() and lines[i].strip())])
        code, (binds, reads) = ast.unparse(node), global_names(node)
        file.mentioned |= reads
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom):
            record_import(file, node)
        elif is_string and above == 0:
            file.head = "\n".join(lines[:end])
        elif is_string and file.units:  # the docstring of the constant above
            file.units[-1].text += "\n" + "\n".join(lines[above:end])
        elif not (code.startswith("sys.path.") or (code.startswith("if __name__ ==") and not is_script)):
            top = start
            while top > above and (is_script or lines[top - 1].startswith("#")):
                top -= 1
            top += next(i for i, line in enumerate(lines[top:end]) if line.strip())
            is_apart = top > above and not lines[top - 1].strip()
            is_block = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            file.units.append(Unit("\n".join(lines[top:end]), binds, reads, is_block, is_apart))
            for name in binds:
                file.owners.setdefault(name, []).append(file.units[-1])
    if is_script and "".join(lines[end:]).strip():
        file.units.append(Unit("\n".join(lines[end:]).strip("\n"), is_apart=True))
    if not is_script:
        file.head = "\n".join(f"# {line}".rstrip() for line in (ast.get_docstring(tree) or "").splitlines())
    if clash := set(file.owners) & set(file.borrowed):
        raise EjectError(f"{label} imports {min(clash)!r} from utils and also defines it: rename one.")
    return file


def import_block(wanted: set[tuple]) -> str:
    """Standard library first, `import x` before `from x import y`, each sorted as ruff does it."""
    sections = []
    for standard in (True, False):
        lines, members = [], {}
        for module, attribute, rename in sorted(wanted):
            if (module.split(".")[0] in sys.stdlib_module_names) == standard:
                name = (attribute or module) + (f" as {rename}" if rename else "")
                members.setdefault(module, []).append(name) if attribute else lines.append(f"import {name}")
        for module, names in members.items():
            names.sort(key=lambda n: (not n.split()[0].isupper(), not n[0].isupper(), n))  # CONSTANTS, Classes, others
            line = f"from {module} import {', '.join(names)}"
            wrapped = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
            lines.append(line if len(line) <= WIDTH else wrapped)
        sections += ["\n".join(lines)] if lines else []
    return "\n\n".join(sections)


def joined(units: list[Unit]) -> str:
    text = units[0].text
    for previous, unit in zip(units, units[1:]):
        text += "\n" * (3 if unit.is_block or previous.is_block else 1 + unit.is_apart) + unit.text
    return text


def eject(path: Path) -> str:
    """The text of the self-contained file; raises EjectError where there cannot be one."""
    path = Path(path).resolve()
    label = path.relative_to(UTILS.parent).as_posix() if path.is_relative_to(UTILS.parent) else path.name
    source, tree = parse(path, label)
    if not any(map(is_utils, ast.walk(tree))):
        return source
    files, order, used, started, wanted, senses = {}, [], set(), set(), set(), {}

    def load(module: str) -> File:
        if module not in files:
            place = UTILS.joinpath(*module.split(".")[1:]).with_suffix(".py")
            label = place.relative_to(UTILS.parent).as_posix()
            files[module] = dissect(*parse(place, label), label)
            for needed, _ in files[module].borrowed.values():
                load(needed)
            order.append(files[module])  # after what it imports: the order in which Python runs them
        return files[module]

    def use(file: File, name: str) -> tuple:
        """Brings in what `name` stands for in `file`. Returns its meaning: equal in two files, equal tuples."""
        if name in file.borrowed:
            home, there = load(file.borrowed[name][0]), file.borrowed[name][1]
            if there not in {*home.owners, *home.imports, *home.borrowed}:
                raise EjectError(f"{file.label} imports {there!r} from {home.label}, which has no such name.")
            sense = use(home, there)
            home.aliases |= {f"{name} = {there}"} if name != there else set()
        elif name in file.owners:
            take(file, file.owners[name])
            sense = tuple(unit.text for unit in file.owners[name])
        elif name in file.imports:
            wanted.update(i for i in file.imports[name] if name not in senses or not any(i[1:]))
            # `import a.b as c` and `from a import b as c` mean the same; `import a.b` binds a.
            meant = {f"{m}.{a}" if a else m if rename else m.split(".")[0] for m, a, rename in file.imports[name]}
            sense = ("import", *sorted(meant))
        elif hasattr(builtins, name):
            sense = ("built-in",)
        else:
            return ()  # a property's own name in its class
        other, where = senses.setdefault(name, (sense, file.label))
        if other != sense:
            raise EjectError(f"{name!r} means one thing in {where} and another in {file.label}: rename one of them.")
        return sense

    def take(file: File, units: list[Unit]) -> None:
        if file not in started:  # statements that bind nothing and imports that nothing mentions act by being there
            started.add(file)
            take(file, [unit for unit in file.units if not unit.binds])
            for name in sorted(set(file.imports) - file.mentioned):
                use(file, name)
        for unit in (unit for unit in units if unit not in used):
            used.add(unit)
            for name in sorted(unit.binds | unit.reads):
                use(file, name)

    script = dissect(source, tree, label, is_script=True)
    for name in script.borrowed:
        use(script, name)
    take(script, script.units)

    note = f"# Ejected from plainrl: {label} and, inlined, the part of utils/ that it uses. One file, yours to change."
    future = ", ".join(sorted(set().union(*(file.future for file in started))))
    parts, seen = [], set()
    for file in [*order, script]:
        # The same statement in two modules (a logger, a guarded import) is wanted once.
        units = [unit for unit in file.units if unit in used and (unit.text not in seen or file is script)]
        seen |= {unit.text for unit in units}
        if units := units + [Unit(alias) for alias in sorted(file.aliases)]:
            title = f"# --- {file.label} ---" if file is script else f"# --- from {file.label} ---\n{file.head}".strip()
            parts.append(f"{title}\n\n\n{joined(units)}")
    blocks = [
        f"{note}\n{script.head}".strip(),
        f"from __future__ import {future}" if future else "",
        import_block(wanted),
        "\n\n\n".join(parts),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints a script and the part of utils/ that it uses as one file.")
    parser.add_argument("script", type=Path, help="for example algos/grpo.py")
    try:
        sys.stdout.buffer.write(eject(parser.parse_args().script).encode())
    except EjectError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
