"""Small faults planted in functions, one at a time: a comparison turned, a sign, a limit off by one, a check left out.

The functions stay the objects that they are and get other code, so that whoever imported them calls the mutant.
"""

import ast
import copy
import gc
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).parents[2]
ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """`number` counts the places of its file; `fault` says what was changed."""

    path: str
    function: str
    line: int
    number: int
    fault: str

    @property
    def key(self) -> str:
        """The same wherever its file is the same but for other functions."""
        return f"{self.path}:{self.function}:{self.fault}:{self.number}"


def _faults(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What stands in a node's place, with its words."""
    match node:
        case ast.Compare(ops=[operator, *others]) if type(operator) in COMPARISONS:
            turned = COMPARISONS[type(operator)]
            yield f"{type(operator).__name__} is {turned.__name__}", _with(node, ops=[turned(), *others])
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _is_type(node):
            turned_to = OPERATORS[type(operator)]
            yield f"{type(operator).__name__} is {turned_to.__name__}", _with(node, op=turned_to())
        case ast.BoolOp(op=ast.And()):
            yield "And is Or", _with(node, op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield "Or is And", _with(node, op=ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"without {type(node.op).__name__}", operand
        case ast.Constant(value=bool(value)):
            yield f"{value} is {not value}", _with(node, value=not value)
        case ast.Constant(value=int(value)) | ast.Constant(value=float(value)):
            yield f"{value} is {value + 1}", _with(node, value=value + 1)
        case ast.Raise():
            yield "raises nothing", ast.copy_location(ast.Pass(), node)
        case ast.If(test=test):
            yield "never", _with(node, test=ast.copy_location(ast.Constant(False), test))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_type(node: ast.BinOp) -> bool:
    """`int | None`, and text that is put together."""
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or _is_none_or_text(side) for side in sides)


def _is_none_or_text(side: ast.AST) -> bool:
    return isinstance(side, ast.Constant) and (side.value is None or isinstance(side.value, str))


class _Planter(ast.NodeTransformer):
    """Counts the places within functions in the order of the tree; plants the fault of the number `wanted`."""

    def __init__(self, path: str, wanted: int | None = None) -> None:
        self.path, self.wanted = path, wanted
        self.mutants: list[Mutant] = []
        self._names: list[str] = []
        self._depth = 0

    def visit(self, node: ast.AST) -> ast.AST:
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if not named:
            return self._visited(node)
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        inside = self._depth > 0
        if not inside:
            self._names.append(node.name)
        self._depth += isinstance(node, ast.FunctionDef)
        node.body = [self.visit(each) for each in node.body]  # type: ignore[misc]
        self._depth -= isinstance(node, ast.FunctionDef)
        if not inside:
            self._names.pop()
        return node

    def _visited(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.AnnAssign):  # its annotation is no code of a function
            if node.value is not None:
                node.value = self.visit(node.value)  # type: ignore[assignment]
            return node
        changed = node
        if self._depth:
            for fault, other in _faults(node):
                number = len(self.mutants)
                line = getattr(node, "lineno", 0)
                self.mutants.append(Mutant(self.path, ".".join(self._names), line, number, fault))
                if number == self.wanted:
                    changed = other
        return self.generic_visit(changed) if changed is node else changed


def mutants_of(path: Path) -> list[Mutant]:
    """Every one of a file of this project."""
    planter = _Planter(path.relative_to(ROOT).as_posix())
    planter.visit(ast.parse(path.read_text(encoding="utf-8")))
    return planter.mutants


def sample(mutants: list[Mutant], count: int) -> list[Mutant]:
    """As many of them, always the same ones."""
    return sorted(mutants, key=lambda mutant: hashlib.sha256(mutant.key.encode()).digest())[:count]


def plant_(mutant: Mutant) -> None:
    """Have every function object of that name in this process do what the mutant does."""
    path = ROOT / mutant.path
    source = path.read_text(encoding="utf-8")
    planted = ast.fix_missing_locations(_Planter(mutant.path, mutant.number).visit(ast.parse(source)))
    assert isinstance(planted, ast.Module)
    other = {_place(code): code for code in _functions(compile(planted, str(path), "exec"))}
    own = {
        _place(code) for code in _functions(compile(source, str(path), "exec")) if mutant.function == code.co_qualname
    }
    changed = 0
    gc.unfreeze()  # or what was frozen would not be among the objects
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename == str(path) and _place(each.__code__) in own:
            each.__code__ = other[_place(each.__code__)]
            changed += 1
    if not changed:
        raise LookupError(f"{mutant.path}: nothing in this process is {mutant.function}")


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _functions(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _functions(each)
