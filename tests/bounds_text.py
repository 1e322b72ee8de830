"""The text of a compiled kernel (TTIR), taken apart: operations, their regions, and the types of their results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Op(NamedTuple):
    """An operation of the text: the names of its results, its own name, its text, and its regions, lists of blocks."""

    results: tuple[str, ...]
    name: str
    text: str
    regions: list[list[Block]]


class Block(NamedTuple):
    label: str
    arguments: tuple[tuple[str, str], ...]
    ops: list[Op]


class NotFollowed(Exception):
    """The walk does not know a line, an operation, or a pointer."""


_TYPE = re.compile(r"tensor<((?:\d+x)*)(.*)>$")
_BLOCK = re.compile(r"\^(\w+)(?:\((.*)\))?:")


def shape_of(kind: str) -> tuple[tuple[int, ...], str]:
    """The sizes of a type, and what its elements are."""
    match = _TYPE.match(kind.strip())
    if match is None:
        return (), kind.strip()
    return tuple(int(size) for size in match[1].split("x") if size), match[2]


def bits_of(element: str) -> int | None:
    """The bits of an integer type; None of any other."""
    return int(element[1:]) if re.fullmatch(r"i\d+", element) else None


def bytes_of(element: str) -> int:
    width = re.fullmatch(r"(?:i|f|bf)(\d+)|f8\w+", element)
    if width is None:
        raise NotFollowed(f"an element of type {element}")
    return max(1, int(width[1] or 8) // 8)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """`%a: i32, %b: tensor<4xi32>`, taken apart."""
    return tuple(re.findall(r"(%[\w#$-]+): ((?:[^,<{]|<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>)+)", text))


def parsed(text: str) -> tuple[tuple[tuple[str, str], ...], list[Block]]:
    """The arguments of the one function of a module, and its blocks."""
    lines = iter([line.strip() for line in text.splitlines()])
    for line in lines:
        if line.startswith("tt.func"):
            header = re.sub(r"\{[^{}]*\}", "", line[line.index("(") + 1 : line.rindex(")")])
            blocks, _ = _region(lines, ())
            return _pairs(header), blocks
    raise NotFollowed("no function")


def _region(lines: Iterator[str], arguments: tuple[tuple[str, str], ...]) -> tuple[list[Block], str]:
    """The blocks up to the line that closes a region, and that line."""
    blocks = [Block("bb0", arguments, [])]
    for line in lines:
        line = line.partition("  //")[0].rstrip()
        if not line:
            continue
        if line.startswith("}"):
            return blocks, line
        if match := _BLOCK.match(line):
            block = Block(match[1], _pairs(match[2] or ""), [])
            blocks = [*(blocks if blocks[0].ops else []), block]
            continue
        match = re.match(r"(?:(%[\w$-]+)(?::(\d+))? = )?\"?([\w.]+)\"?(.*)$", line)
        if match is None:
            raise NotFollowed(f"the line {line[:80]}")
        first, number, name, rest = match.groups()
        results: tuple[str, ...] = () if first is None else (first,)
        if number is not None:
            results = tuple(f"{first}#{i}" for i in range(int(number)))
        regions = []
        while rest.endswith("{"):
            inside, end = _region(lines, ())
            regions.append(inside)
            rest = f"{rest[:-1]} {end[1:]}"
        blocks[-1].ops.append(Op(results, name, rest.strip(), regions))
    return blocks, ""


def result_type(text: str) -> str:
    if " -> " in text:
        return text.rpartition(" -> ")[2]
    if " to " in text:
        return text.rpartition(" to ")[2]
    return text.rpartition(" : ")[2].split(", ")[-1]
