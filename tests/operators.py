"""Mistakes that no one must write down: a dozen operators edit one expression or statement of a script.

    drawn("ppo", 25, seed=1)        25 mutants of algos/ppo.py, half of them in lines that its parent lacks

They edit functions that the parent lacks or has otherwise, of a root all. Defaults, tables of settings and printed text
are left out: other tests compare them with papers and flags. `benchmarks/planted_bugs.py operators` runs the tests.
"""

import ast
import copy
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from tests.family import numbered_code_of, script_of
from tests.specs import parent_of, parse_bugs, sources

PAIRS = (
    "min max", "amin amax", "argmin argmax", "minimum maximum", "mean sum", "any all", "std var", "cos sin",
    "floor ceil", "zeros ones", "zeros_like ones_like", "log_softmax softmax",
)  # fmt: skip
SWAPPED = {a: b for pair in PAIRS for a, b in (pair.split(), reversed(pair.split()))}
OPPOSITE = (
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or), (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
)  # fmt: skip
SWAPPED |= {a: b for pair in OPPOSITE for a, b in (pair, reversed(pair))}
FOR_SPEED = ("device", "fused", "set_to_none")  # keywords that change nothing on a CPU
ATOMS = ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript
SIMPLE = ast.Assign | ast.AugAssign | ast.Expr


@dataclass(frozen=True)
class Mutant:
    script: str
    function: str
    """METHOD or CLASS.METHOD"""
    operator: str
    old: str
    """lines of the function"""
    new: str
    nth: int
    """which of the places in the function that hold these lines"""

    @property
    def name(self) -> str:
        return f"{self.operator}: {self.old.strip()} -> {self.new.strip()}"

    def lines(self, text: str) -> range | None:
        """The numbers, from 1, of the lines that it edits; None where they are gone."""
        node = functions(ast.parse(text)).get(self.function)
        lines, old = text.split("\n"), self.old.split("\n")
        places = range(node.lineno - 1, node.end_lineno) if node else ()
        found = [i for i in places if lines[i : i + len(old)] == old]
        return range(found[self.nth] + 1, found[self.nth] + 1 + len(old)) if self.nth < len(found) else None

    def apply(self, text: str) -> str:
        at, lines = self.lines(text), text.split("\n")
        return "\n".join([*lines[: at[0] - 1], *self.new.split("\n"), *lines[at[-1] :]])


KINDS = ("identity", "value never read", "printed text", "speed")  # of an argument why no test can fail
ARGUED = parse_bugs((Path(__file__).parent / "argued.txt").read_text())
"""Survivors that change nothing: `SCRIPT FUNCTION: KIND, why`, the old lines after `- `, the new ones after `+ `."""


def is_argued(mutant: Mutant) -> bool:
    place = f"{mutant.script} {mutant.function}"
    return any((bug.name, bug.old, bug.new) == (place, mutant.old, mutant.new) for bug in ARGUED)


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions of a module by name, and methods as CLASS.METHOD."""
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{owner.name}.{node.name}": node for node in owner.body if isinstance(node, ast.FunctionDef)}
    return found


def siblings(tree: ast.Module) -> dict[str, list[str]]:
    """Field of a class -> the other fields of the same type there."""
    found = defaultdict(list)
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        fields = [node for node in owner.body if isinstance(node, ast.AnnAssign)]
        for one in fields:
            same = [other for other in fields if ast.dump(other.annotation) == ast.dump(one.annotation)]
            found[one.target.id] += [other.target.id for other in same if other is not one]
    return found


def changed(node: ast.AST, **fields) -> ast.AST:
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def without(items: list, index: int) -> list:
    return [*items[:index], *items[index + 1 :]]


def exchanged(items: list, index: int) -> list:
    return [*items[:index], items[index + 1], items[index], *items[index + 2 :]]


def edits(node: ast.expr, same_type: dict[str, list[str]]) -> Iterator[tuple[str, ast.expr]]:
    """(operator, what stands in place of the expression)."""
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            if isinstance(func, ast.Attribute):
                yield "detach" if func.attr in ("detach", "clone", "copy") else "call", func.value
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", None)
            if name in SWAPPED:
                key = "attr" if isinstance(func, ast.Attribute) else "id"
                yield "swap", changed(node, func=changed(func, **{key: SWAPPED[name]}))
            if args and not isinstance(args[0], ast.Starred):
                yield "call", args[0]
            for i, keyword in enumerate(keywords):
                if keyword.arg not in FOR_SPEED:
                    yield "keyword", changed(node, keywords=without(keywords, i))
            for i in range(len(args) - 1):
                if ast.dump(args[i]) != ast.dump(args[i + 1]):
                    yield "exchange", changed(node, args=exchanged(args, i))
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) in SWAPPED:
                yield "sign" if isinstance(op, ast.Add | ast.Sub) else "swap", changed(node, op=SWAPPED[type(op)]())
            if isinstance(op, ast.Sub | ast.Div | ast.Pow | ast.Mod | ast.FloorDiv):
                yield "exchange", changed(node, left=right, right=left)
            yield "operand", left
            yield "operand", right
        case ast.BoolOp(op=op, values=values):
            yield "swap", changed(node, op=SWAPPED[type(op)]())
            for i in range(len(values)):
                rest = without(values, i)
                yield "operand", changed(node, values=rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(op=op, operand=operand):
            yield "sign" if isinstance(op, ast.USub) else "invert", operand
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            yield "compare", changed(node, ops=[SWAPPED[type(op)]()])
        case ast.IfExp(body=body, orelse=orelse):
            yield "exchange", changed(node, body=orelse, orelse=body)
            yield "operand", body
            yield "operand", orelse
        case ast.Constant(value=bool(value)):
            yield "constant", changed(node, value=not value)
        case ast.Constant(value=int(value) | float(value)):
            shifts = (value + 1, value - 1) if isinstance(value, int) else (2 * value, 0.0)
            for other in dict.fromkeys((*shifts, type(value)(0))):
                if other != value:
                    yield "constant", changed(node, value=other)
        case ast.Attribute(attr=attr, ctx=ast.Load()):
            for other in same_type.get(attr, ()):
                yield "field", changed(node, attr=other)


def only_tells(node: ast.AST) -> bool:
    """Prints, raises, or measures time."""
    text = ast.unparse(node)
    tells = text.startswith(("print(", "run.print(", "columns['time/"))
    return tells or isinstance(node, ast.JoinedStr | ast.Raise) or getattr(node, "arg", None) in FOR_SPEED


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The node and those below it."""
    if only_tells(node) or isinstance(node, ast.arguments):
        return
    if isinstance(node, ast.expr) and not isinstance(node, ast.Slice | ast.Tuple | ast.Starred):
        yield node
    timed = (
        {id(x) for k, x in zip(node.keys, node.values) if k and "'time/" in ast.unparse(k)}
        if isinstance(node, ast.Dict)
        else ()
    )
    for child in (child for child in ast.iter_child_nodes(node) if id(child) not in timed):
        yield from expressions(child)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def depend(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether one may read what the other writes."""
    written, read = ([{name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, kind)}
                      for node in (first, second)] for kind in (ast.Store, ast.Load))  # fmt: skip
    both_act = isinstance(first, ast.Expr) and isinstance(second, ast.Expr)
    return both_act or bool(written[0] & (read[1] | written[1]) or written[1] & read[0])


@dataclass(frozen=True)
class Edit:
    operator: str
    begin: tuple[int, int]
    """line, from 1, and byte of the line"""
    end: tuple[int, int]
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: offset(source, self.begin)] + self.new.encode() + source[offset(source, self.end) :]


def offset(source: bytes, place: tuple[int, int]) -> int:
    return sum(len(line) + 1 for line in source.split(b"\n")[: place[0] - 1]) + place[1]


def span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def edits_of(function: ast.FunctionDef, source: bytes, same_type: dict[str, list[str]]) -> Iterator[Edit]:
    for node in (node for statement in function.body for node in expressions(statement)):
        for operator, other in edits(node, same_type):
            new = ast.unparse(other)
            yield Edit(operator, *span(node), new if isinstance(other, ATOMS) else f"({new})")
    blocks = (value for node in ast.walk(function) for _, value in ast.iter_fields(node) if isinstance(value, list))
    for node, after in (pair for block in blocks for pair in zip(block, [*block[1:], None])):
        if not isinstance(node, SIMPLE) or only_tells(node) or is_docstring(node):
            continue
        yield Edit("delete", *span(node), "pass")
        if isinstance(after, SIMPLE) and not only_tells(after) and depend(node, after):
            a, b, c, d = (offset(source, place) for place in (*span(node), *span(after)))
            yield Edit("order", span(node)[0], span(after)[1], (source[c:d] + source[b:c] + source[a:b]).decode())


def own(script: str) -> tuple[set[str], set[int]]:
    """Functions that differ from the parent's, and the numbers of the lines that the parent lacks."""
    mine, parent = functions(ast.parse(sources()[f"algos/{script}.py"])), parent_of(script)
    code = numbered_code_of(script_of(script))
    if parent is None:
        return set(mine), {number for number, _ in code}
    theirs = functions(ast.parse(sources()[f"algos/{parent}.py"]))
    differ = {name for name, node in mine.items() if name not in theirs or ast.dump(theirs[name]) != ast.dump(node)}
    old, new = ([line for _, line in lines] for lines in (numbered_code_of(script_of(parent)), code))
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return differ, {code[i][0] for kind, _, _, begin, end in blocks if kind != "equal" for i in range(begin, end)}


def mutant_of(script: str, function: str, edit: Edit) -> Mutant | None:
    """None where the edit makes no program, or the same one."""
    text = sources()[f"algos/{script}.py"]
    after = edit.apply(text.encode()).decode()
    try:
        if ast.dump(ast.parse(after)) == ast.dump(ast.parse(text)):
            return None
    except SyntaxError:
        return None
    old, new = text.split("\n"), after.split("\n")
    head, tail = edit.begin[0] - 1, len(old) - edit.end[0]
    gone, first = old[head : len(old) - tail], functions(ast.parse(text))[function].lineno - 1
    nth = sum(old[i : i + len(gone)] == gone for i in range(first, head))
    return Mutant(script, function, edit.operator, "\n".join(gone), "\n".join(new[head : len(new) - tail]), nth)


def drawn(script: str, number: int, seed: int) -> list[Mutant]:
    """A sample: as many of each operator as there are, half in lines that the parent lacks."""
    generator, (names, lines), text = random.Random(f"{script} {seed}"), own(script), sources()[f"algos/{script}.py"]
    tree, pools = ast.parse(text), {True: defaultdict(list), False: defaultdict(list)}
    for name in sorted(names):
        for edit in edits_of(functions(tree)[name], text.encode(), siblings(tree)):
            mine = not lines.isdisjoint(range(edit.begin[0], edit.end[0] + 1))
            pools[mine][edit.operator].append((name, edit))
    found: dict[Mutant, None] = {}
    for mine, wanted in ((True, number - number // 2), (False, number), (True, number)):
        queues = [generator.sample(edits, len(edits)) for _, edits in sorted(pools[mine].items())]
        generator.shuffle(queues)
        while len(found) < wanted and any(queues):
            for queue in [queue for queue in queues if queue][: wanted - len(found)]:
                if mutant := mutant_of(script, *queue.pop()):
                    found[mutant] = None
    return list(found)
