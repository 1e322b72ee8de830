"""Imports run downward only: each folder may import those below it, and no module is part of a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up. A part may import itself and what stands before it; docs/ARCHITECTURE.md draws the same order.
LAYERS = (
    ("_version", "definition"),
    ("problem", "reference"),
    ("caches",),
    ("sequences",),
    ("masks",),
    ("gradients",),
    ("biases",),
    ("triton_kernels",),
    ("backends",),
    ("dispatch",),
    ("validation", "operators"),
    ("autograd",),
    ("call",),
    ("bias_makers",),
    ("projected",),
    ("api", "statistics"),
    ("explanation",),
    ("nn", "distributed"),
    ("integrations",),
    ("tools",),
    ("examples",),
    ("__main__",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
# The package's own file gathers the public names of every layer; what imports the bare package asks for those.
TOP = "flash_dmattn"


def modules() -> dict[str, Path]:
    """Every module of the library by its name as it is imported."""
    files = {}
    for folder in (TOP, "reference", "triton_kernels", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == TOP else (TOP, *parts))
            files[name.removesuffix(".__init__")] = path
    return files


MODULES = modules()


def imports(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of this library, wherever in the file it stands, resolved to whole names."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith(TOP + "."))
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            if source.partition(".")[0] == TOP:
                for alias in node.names:
                    absolute = f"{source}.{alias.name}"
                    yield node.lineno, absolute if absolute in MODULES else source
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES:
            yield node.lineno, node.value  # importlib.import_module takes it so


EDGES = {
    name: [(line, other) for line, other in imports(name, ast.parse(path.read_text())) if other not in (name, TOP)]
    for name, path in MODULES.items()
}


def part_of(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name != TOP))
def test_a_module_imports_downward_only(name: str) -> None:
    own = RANK[part_of(name)]
    upward = [
        f"line {line} imports {other}"
        for line, other in EDGES[name]
        if part_of(other) != part_of(name) and RANK[part_of(other)] >= own
    ]
    assert not upward, f"{name} imports what stands above or beside it: {upward}"


def test_no_module_is_part_of_a_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle of imports: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for _, other in EDGES[name]:
                if not name.startswith(other + "."):  # a package is loaded before its modules, which changes nothing
                    visit(other, (*path, name))
            done.add(name)

    for name in MODULES:
        if name != TOP:
            visit(name, ())


def test_imports_are_read() -> None:
    """The edges that a reader of the code would name first: the test cannot pass because it sees nothing."""
    others = {name: {other for _, other in edges} for name, edges in EDGES.items()}
    assert "flash_dmattn.dispatch.selection" in others["flash_dmattn.call"]
    assert "flash_dmattn.triton_kernels.launch" in others["flash_dmattn.backends.triton.passes"]
    assert "flash_dmattn.problem" in others["flash_dmattn.triton_kernels.launch"]
    assert "flash_dmattn.masks.prepared.storage" in others["flash_dmattn.validation"]
    assert sum(map(len, others.values())) > 150
