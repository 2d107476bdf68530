"""Writes one self-contained file: a script with exactly the part of utils/ that it uses inlined, readable, in order.

    python utils/eject.py algos/grpo.py > mine.py

How: a file's top-level statements are its units. Starting from all units of the script, every global name that a unit
refers to brings in the units that define it, through `from utils.x import name` into other modules, until nothing is
missing. Text is copied, never regenerated, so comments and the docstrings under dataclass fields (which tyro reads from
the source) survive. Everything ends up in one namespace; a name that would mean two things there is an error, never a
guess. What is only looked up at run time (getattr, globals(), a decorator that registers) is not seen.
"""

import ast
import symtable
import sys
from dataclasses import dataclass, field
from pathlib import Path

UTILS = Path(__file__).resolve().parent
WIDTH = 120
BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class EjectError(Exception):
    """One sentence for the user."""


@dataclass(eq=False)
class Unit:
    """One top-level statement with the comments above it, and its global names."""

    text: str
    binds: set[str]
    reads: set[str]
    may_read: set[str]
    is_block: bool  # a function or class: two blank lines around it
    gap: int  # blank lines above it in the original


@dataclass(eq=False)
class File:
    label: str
    head: str = ""  # above the first statement: shebang, licence
    docstring: str = ""
    units: list[Unit] = field(default_factory=list)
    tail: str = ""  # comments below the last statement
    owners: dict[str, list[Unit]] = field(default_factory=dict)  # name -> the units that define it or fill it
    imports: dict[str, list[tuple]] = field(default_factory=dict)  # name -> [(module, attribute or "", as or "")]
    borrowed: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> (utils module, its name there)
    modules: list[str] = field(default_factory=list)  # the utils modules imported at the top, in order
    effects: list[Unit] = field(default_factory=list)  # units that define nothing here: they act on the world outside
    mentioned: set[str] = field(default_factory=set)  # every global name in use anywhere in the original
    future: set[str] = field(default_factory=set)
    aliases: set[str] = field(default_factory=set)  # what others import from here `as` something: lines `b = a`


def is_utils(node: ast.AST) -> bool:
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return False
    modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return any(m.split(".")[0] == "utils" for m in modules) or getattr(node, "level", 0) > 0


def global_names(text: str) -> tuple[set[str], set[str], set[str]]:
    """The names that `text` binds at its top level, those that it reads as globals, and those that it may read."""
    top = symtable.symtable(text, "<unit>", "exec")
    binds = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    reads, may_read, scopes = set(), set(), [top]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for s in scope.get_symbols():
            if s.is_referenced() if scope is top else s.is_global():
                reads.add(s.get_name())
            elif scope.get_type() == "class" and s.is_referenced():
                may_read.add(s.get_name())  # `x: int = x` in a class body reads the global, `@x.setter` does not
    for node in ast.walk(ast.parse(text)):  # quoted annotations hold names too, which get_type_hints evaluates
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(annotation) if annotation else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    try:
                        may_read |= {n.id for n in ast.walk(ast.parse(part.value, mode="eval")) if hasattr(n, "id")}
                    except SyntaxError:
                        pass  # a string that is no type, as in Annotated[int, "some words"]
    return binds, reads, may_read


def filled_names(node: ast.stmt) -> set[str]:
    """`TABLE["a"] = ...`, `TABLE.update(...)`: the names whose objects a top-level statement changes."""
    names = set()
    for part in [] if isinstance(node, BLOCKS) else ast.walk(node):
        target = part.value.func if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) else part
        if target is not part or isinstance(getattr(part, "ctx", None), ast.Store):
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            names |= {target.id} if isinstance(target, ast.Name) else set()
    return names


def record_import(file: File, node: ast.Import | ast.ImportFrom) -> None:
    refusal = f"{file.label} says `{ast.unparse(node)}`, which cannot be inlined: write "
    if is_utils(node) and (isinstance(node, ast.Import) or node.level or "." not in node.module):
        raise EjectError(refusal + "`from utils.module import name`.")
    for a in node.names:
        module, attribute = (a.name, "") if isinstance(node, ast.Import) else (node.module, a.name)
        name = a.asname or (attribute or module.split(".")[0])
        if attribute == "*":
            raise EjectError(refusal + "the names instead of the star.")
        if module == "__future__":
            file.future.add(attribute)
        elif not is_utils(node):
            file.imports.setdefault(name, []).append(
                (module, attribute, "" if a.asname in (attribute or module, None) else a.asname)
            )
        elif file.borrowed.setdefault(name, (module, attribute)) != (module, attribute):
            raise EjectError(f"{file.label} imports two different things from utils as {name!r}: rename one.")


def parse(path: Path, label: str) -> tuple[str, ast.Module]:
    try:
        source = path.read_text(encoding="utf-8")
        return source, ast.parse(source)
    except OSError as error:
        raise EjectError(
            f"{label} cannot be read ({error.strerror}): give a script's path, as in algos/grpo.py."
        ) from None
    except (ValueError, SyntaxError) as error:
        raise EjectError(f"{label} is not Python source in UTF-8: {error}.") from None


def dissect(source: str, tree: ast.Module, label: str, is_script: bool) -> File:
    file, lines, end = File(label), source.split("\n"), 0
    # An import of utils inside a function or an `if` would fail elsewhere, and the names that it binds are global now.
    nested = [n for n in ast.walk(tree) if is_utils(n) and n not in tree.body]
    for node in sorted(nested, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        record_import(file, node)
        first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
        stand_in = b"pass  # inlined: " + ", ".join(a.name for a in node.names).encode()
        line = first[: node.col_offset] + stand_in + last[node.end_col_offset :]
        lines[node.lineno - 1 : node.end_lineno] = [line.decode()]
    body = ast.parse("\n".join(lines)).body
    starts = [min(n.lineno for n in [node, *getattr(node, "decorator_list", [])]) - 1 for node in body] + [len(lines)]
    for node, start, stop in zip(body, starts, starts[1:], strict=False):
        if start < end:
            raise EjectError(f"{label} has two statements in line {start + 1}: give each its own line.")
        above, end = end, node.end_lineno
        # Indented comments below a function's last statement still belong to it.
        end = max([end] + [i + 1 for i in range(end, stop) if lines[i][:1].isspace() and lines[i].strip()])
        binds, reads, may_read = global_names("\n".join(lines[start:end]))
        file.mentioned |= reads | may_read
        code = ast.unparse(node)
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and above > 0:  # the docstring of a constant
            file.units[-1].text += "\n" + "\n".join(lines[above:end])
            continue
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if is_import or is_string or code.startswith(("sys.path.insert(", "sys.path.append(")):
            if above == 0:
                file.head = "\n".join(lines[:start]).rstrip()
            if is_string:
                file.docstring = "\n".join(lines[start:end])
            if is_import:
                record_import(file, node)
                file.modules += [node.module] if is_utils(node) else []
            continue
        if code.startswith("if __name__ ==") and not is_script:
            continue
        top = start
        while top > above and (lines[top - 1].startswith("#") or is_script):
            top -= 1
        while not lines[top].strip():
            top += 1
        gap = next((i for i in range(top - above) if lines[top - 1 - i].strip()), top - above)
        text = "\n".join(lines[top:end])
        file.units.append(Unit(text, binds, reads, may_read, isinstance(node, BLOCKS), gap))
        for name in binds | filled_names(node):
            file.owners.setdefault(name, []).append(file.units[-1])
    file.tail = "\n".join(lines[end:]).strip("\n")
    own = set().union(*(unit.binds for unit in file.units))
    file.owners = {name: units for name, units in file.owners.items() if name in own}
    owned = {unit for units in file.owners.values() for unit in units}
    file.effects = [unit for unit in file.units if unit not in owned]
    if clash := own & set(file.borrowed):
        raise EjectError(f"{label} imports {min(clash)!r} from utils and also defines it: rename one.")
    return file


def import_block(wanted: set[tuple]) -> str:
    """Standard library first, `import x` before `from x import y`, each sorted as ruff does."""
    sections = []
    for standard in (True, False):
        part = sorted((w for w in wanted if (w[0].split(".")[0] in sys.stdlib_module_names) == standard), key=str)
        lines = [
            f"import {module}" + f" as {rename}" * bool(rename) for module, attribute, rename in part if not attribute
        ]
        for source in sorted({module for module, attribute, _ in part if attribute}):
            names = [(attribute, rename) for module, attribute, rename in part if module == source and attribute]
            names.sort(key=lambda n: (not n[0].isupper(), not n[0][0].isupper(), n))  # CONSTANTS, Classes, functions
            names = [attribute + f" as {rename}" * bool(rename) for attribute, rename in names]
            line = f"from {source} import " + ", ".join(names)
            lines.append(
                line if len(line) <= WIDTH else f"from {source} import (\n    " + ",\n    ".join(names) + ",\n)"
            )
        sections += ["\n".join(lines)] if lines else []
    return "\n\n".join(sections)


def joined(units: list[Unit]) -> str:
    text, after_block = "", False
    for unit in units:
        gap = 2 if unit.is_block or after_block else min(unit.gap, 2)
        text, after_block = text + "\n" * (gap + 1) * bool(text) + unit.text, unit.is_block
    return text


def eject(path: Path) -> str:
    """The text of the self-contained file; raises EjectError with one sentence where that cannot be made."""
    path = Path(path).resolve()
    label = path.relative_to(UTILS.parent).as_posix() if path.is_relative_to(UTILS.parent) else path.name
    source, tree = parse(path, label)
    if not any(map(is_utils, ast.walk(tree))):
        return source
    script, files, order = dissect(source, tree, label, is_script=True), {}, []
    used, queue, wanted, senses = set(), [], set(), {}

    def load(module: str) -> File:
        if module not in files:
            place = UTILS.joinpath(*module.split(".")[1:]).with_suffix(".py")
            label = place.relative_to(UTILS.parent).as_posix()
            files[module] = dissect(*parse(place, label), label, is_script=False)
            for dependency in files[module].modules:
                load(dependency)
            order.append(files[module])  # after what it imports, which is the order in which Python runs them
        return files[module]

    def take(file: File, units: list[Unit]) -> None:
        for unit in units:
            if unit not in used:
                used.add(unit)
                queue.append((file, unit))

    def use(file: File, name: str) -> tuple:
        """Brings in what `name` stands for in `file`, and returns that in a comparable form."""
        sense = ("the built-in",)
        if name in file.borrowed:
            home, there = load(file.borrowed[name][0]), file.borrowed[name][1]
            if not any(there in names for names in (home.owners, home.imports, home.borrowed)):
                raise EjectError(f"{file.label} imports {there!r} from {home.label}, which defines no such name.")
            sense = use(home, there)
            home.aliases |= {f"{name} = {there}"} if name != there else set()
        elif name in file.owners:
            take(file, file.owners[name])
            sense = tuple(unit.text for unit in file.owners[name])
        elif name in file.imports:
            wanted.update(file.imports[name])
            # `import a.b as c` and `from a import b as c` are the same thing, `import a.b` binds a.
            sense = {f"{m}.{a}" if a else m if rename else m.split(".")[0] for m, a, rename in file.imports[name]}
            sense = ("import", *sorted(sense))
        other, where = senses.setdefault(name, (sense, file.label))
        if other != sense:
            raise EjectError(f"{name!r} means one thing in {where} and another in {file.label}: rename one of them.")
        return sense

    for module in script.modules:
        load(module)
    take(script, script.units)
    started = set()
    while queue or script not in started:
        file, unit = queue.pop()
        known = {*file.owners, *file.imports, *file.borrowed}
        for name in unit.binds | unit.reads | (unit.may_read & known):
            use(file, name)
        if file not in started:  # what acts on the world, and imports for their effect, count as soon as a file does
            started.add(file)
            take(file, file.effects)
            for name in set(file.imports) - file.mentioned:
                use(file, name)
    ...
