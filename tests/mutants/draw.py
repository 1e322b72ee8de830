"""Draw faults from the syntax trees of the package: each changes one expression or one statement.

`TESTS` names the tests of each file; the quick suite joins them.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from .faults import Fault

ROOT = Path(__file__).resolve().parents[2]
QUICK = "@tests/quick.txt"

# The first row whose prefix a file has. Names are globs below tests/, without their .py.
TESTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("flash_dmattn/backends/cuda/", ("test_cuda_*",)),
    ("flash_dmattn/backends/flex/", ("test_flex*",)),
    ("flash_dmattn/backends/sdpa/", ("test_sdpa_backend",)),
    ("flash_dmattn/backends/triton/", ("test_triton_*",)),
    ("flash_dmattn/biases", ("test_relative", "test_nn_biases", "test_lists")),
    ("flash_dmattn/dispatch/", ("test_selection", "test_profile", "test_settings", "test_explain", "test_call_cache")),
    ("flash_dmattn/distributed/", ("test_distributed_*",)),
    ("flash_dmattn/explanation", ("test_explain",)),
    ("flash_dmattn/autograd", ("test_autograd", "test_tangents", "test_ops")),
    ("flash_dmattn/operators", ("test_ops", "test_citizen")),
    ("flash_dmattn/integrations/flash_attn", ("test_flash_attn*",)),
    ("flash_dmattn/integrations/sdpa", ("test_sdpa",)),
    ("flash_dmattn/integrations/transformers", ("test_transformers_*",)),
    ("flash_dmattn/masks/index_scores", ("test_lists",)),
    ("flash_dmattn/masks/prepared/lists", ("test_lists",)),
    ("flash_dmattn/masks/", ("test_mask*", "test_find_*", "test_interval*", "test_prepared_mask*", "test_tree*")),
    ("flash_dmattn/nn/", ("test_nn*",)),
    ("flash_dmattn/problem/", ("test_validation", "test_leading_dims", "test_ops", "test_arch", "test_derived")),
    ("flash_dmattn/sequences/", ("test_sequence*", "test_append*")),
    ("flash_dmattn/tools/", ("test_cli*", "test_calibrate*")),
    (
        "flash_dmattn/",
        ("test_selection", "test_autograd", "test_validation", "test_settings", "test_compile", "test_ops"),
    ),
    ("reference/lists", ("test_lists",)),
    ("reference/tangents", ("test_tangents",)),
    ("reference/", ("test_formula*", "test_eager_*", "test_dropout*", "test_sinks*", "test_relative", "test_random*")),
    ("triton_kernels/interval_pack", ("test_find_intervals", "test_mask_pack_interpreter")),
    ("triton_kernels/list_", ("test_lists", "test_triton_lists")),
    ("triton_kernels/plan_tangents", ("test_tangents",)),
    ("triton_kernels/sequence_pack", ("test_sequence_pack",)),
    ("triton_kernels/tangents", ("test_tangents",)),
    (
        "triton_kernels/tile_table",
        ("test_triton_plan", "test_triton_gpus", "test_triton_short", "test_triton_compiled"),
    ),
    ("triton_kernels/tree_mask", ("test_trees", "test_triton_*")),
    (
        "triton_kernels/",
        ("test_triton_[!l]*", "test_triton_launch", "test_mask_pack_*", "test_append", "test_triton_lists"),
    ),
)

_OTHER: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
}
_SYMMETRIC = ("max", "min", "maximum", "minimum", "logical_and", "logical_or")  # in their first two arguments
# No behaviour: annotations, texts (Python 3.11 does not say where the parts of an f-string stand), messages of errors.
_SILENT = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)


def find_tests(file: str) -> tuple[str, ...]:
    """Name the test files that see a fault in this file, nearest first.

    Raises:
        ValueError: no row of `TESTS` has the file, or one of its globs has no test file.
    """
    names = next((names for prefix, names in TESTS if file.startswith(prefix)), None)
    if names is None:
        raise ValueError(f"tests/mutants/draw.py: TESTS has no row for {file}")
    tests: list[str] = []
    for name in names:
        paths = sorted((ROOT / "tests").glob(f"{name}.py"))
        if not paths:
            raise ValueError(f"tests/mutants/draw.py: no file of tests/ has the name {name}.py")
        if not file.startswith("triton_kernels/"):  # minutes, and a fault elsewhere shows without a kernel
            paths = [path for path in paths if "interpreter" not in path.name]
        tests += [f"tests/{path.name}" for path in paths]
    return (*tests, QUICK)


def sources(only: str | tuple[str, ...] = "") -> list[str]:
    """List the files of the package, or those whose paths begin with `only`."""
    every = (p for folder in ("flash_dmattn", "reference", "triton_kernels") for p in (ROOT / folder).rglob("*.py"))
    return sorted(name for name in (str(path.relative_to(ROOT)) for path in every) if name.startswith(only))


def draw(number: int, seed: int, only: str | tuple[str, ...] = "") -> list[Fault]:
    """Draw so many different faults; the same tree and seed give the same."""
    places = [(file, change) for file in sources(only) for change in changes_in((ROOT / file).read_text())]
    drawn = random.Random(seed).sample(places, min(number, len(places)))
    return [fault_of(file, change) for file, change in drawn]


class Change(NamedTuple):
    """One change of a text: `after` takes the place of the bytes from `start` to `stop`."""

    line: int
    kind: str
    start: int
    stop: int
    after: str


def changes_in(text: str) -> Iterator[Change]:
    """List every change of a file, in the order of its syntax tree."""
    starts = list(accumulate((len(line) for line in text.encode().splitlines(keepends=True)), initial=0))
    for node, kind, after in _changes(ast.parse(text)):
        stop = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        yield Change(node.lineno, kind, starts[node.lineno - 1] + node.col_offset, stop, after)


def fault_of(file: str, change: Change) -> Fault:
    """Make a fault whose `before` and `after` are the whole file, where the changed expression may stand again."""
    before = (ROOT / file).read_bytes()
    after = before[: change.start] + change.after.encode() + before[change.stop :]
    old = before[change.start : change.stop].decode()
    what = f"line {change.line}, {change.kind}: {_short(old)} -> {_short(change.after)}"
    return Fault(what, file, before.decode(), after.decode(), find_tests(file))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """(place, kind of change, new text) of every change below a node."""
    for child, is_silent in _children(node):
        if not is_silent:
            yield from _changes_of(child)
            yield from _changes(child)


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child, field in ("annotation", "returns", "decorator_list") or isinstance(child, _SILENT)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    def text(changed: ast.expr) -> str:
        return f"({ast.unparse(changed)})"

    match node:
        case ast.Compare(left, [op], [right]):
            yield node, "comparison", text(ast.Compare(left, [_OTHER[type(op)]()], [right]))
        case ast.BoolOp(op, values):
            yield node, "and/or", text(ast.BoolOp(_OTHER[type(op)](), values))
        case ast.BinOp(left, op, right) if type(op) in _OTHER and not isinstance(right, ast.Constant | ast.JoinedStr):
            yield node, "operator", text(ast.BinOp(left, _OTHER[type(op)](), right))
        case ast.Constant(bool(value)):
            yield node, "constant", str(not value)
        case ast.Constant(int(value)):
            yield node, "constant", str(value + 1)
        case ast.Call(function, [first, second, *more], keywords) if not isinstance(second, ast.Starred):
            name = ast.unparse(function).rpartition(".")[2]
            is_symmetric = name in _SYMMETRIC or ast.dump(first) == ast.dump(second)
            if not isinstance(first, ast.Starred) and not is_symmetric:
                swapped = ast.unparse(ast.Call(function, [second, first, *more], keywords))
                yield node, "arguments swapped", swapped
        case ast.Tuple([*items], ast.Load()) if len(items) > 2 and not any(isinstance(x, ast.Slice) for x in items):
            yield node, "last item dropped", text(ast.Tuple(items[:-1], ast.Load()))
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield node, "result dropped", "return None"
        case ast.Expr(ast.Call()):
            yield node, "call dropped", "pass"
    if isinstance(node, ast.If | ast.IfExp | ast.While) and ast.unparse(node.test) != "TYPE_CHECKING":
        yield node.test, "condition negated", f"(not ({ast.unparse(node.test)}))"
