"""Prepare docstrings for MkDocs, which reads Markdown: an extension of griffe, which mkdocstrings loads."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

# An example as doctest reads it: prompts and results, up to an empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)


# A page that a docstring names, as in "see docs/masks.md". MkDocs finds dead links.
PAGE = re.compile(r"(?<![\w/(\[`])(docs/\w+\.md)\b")

# A line of Args that describes several arguments, and the lines that continue it.
SHARED = re.compile(r"^( +)(\w+(?:, \w+)+):(.*(?:\n\1 +\S.*)*)", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """Return a docstring with examples as fenced blocks, an entry for each argument, and links to pages."""

    def fenced(example: re.Match[str]) -> str:
        return f"{example[1]}```pycon\n{example[0]}\n{example[1]}```"

    def each(shared: re.Match[str]) -> str:
        return "\n".join(f"{shared[1]}{name}:{shared[3]}" for name in shared[2].split(", "))

    text = EXAMPLE.sub(fenced, SHARED.sub(each, inspect.cleandoc(docstring)))
    text = PAGE.sub(r"[\1](../\1)", text)
    return re.sub(r"::$", ":", re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE), flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed; leaves out the parameter that only catches misspelt names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Take `**unknown` out of the signature of one function."""
        func.parameters = griffe.Parameters(*(p for p in func.parameters if p.name != "unknown"))
