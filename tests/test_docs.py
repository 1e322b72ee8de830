"""Every Python block of README.md and docs/*.md is executed, and every example in a docstring.

A section about a library that may be missing runs without the rest of its page.

By hand: `python tests/test_docs.py docs/masks.md` from the root of the checkout, and `... docs/guides.md PEFT`.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import sys
import textwrap
import traceback
from pathlib import Path
from typing import NamedTuple

import forked
import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.is_file()]
FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([^\s`]*).*$")
# A module that needs one of these may be missing it; any other failing import is a failure.
OPTIONAL = {"triton", "matplotlib", "rich", "numpy", "transformers", "accelerate"}
OPTIONAL |= {"diffusers", "lightning", "onnx", "onnxscript", "peft", "timm", "torchvision"}
SKIPPED = 77  # the status of a process in which such a module is missing


class Block(NamedTuple):
    """A fenced block: what follows the fence, the line of its first line (from 1), and its text."""

    language: str
    line: int
    text: str


def fenced_blocks(page: str) -> list[Block]:
    blocks: list[Block] = []
    opening: tuple[str, str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(page.splitlines(), start=1):
        fence = FENCE.match(line)
        if opening is None:
            if fence:
                opening, body = (fence[2], fence[3], number + 1), []
        elif fence and fence[2].startswith(opening[0]) and not fence[3]:
            blocks.append(Block(opening[1], opening[2], textwrap.dedent("\n".join(body)) + "\n"))
            opening = None
        else:
            body.append(line)
    assert opening is None, f"the block that starts on line {opening and opening[2] - 1} has no end"
    return blocks


def parts(page: Path) -> dict[str, list[Block]]:
    """Sort the blocks of a page by the section that has to run without the others, "" for the rest of the page.

    It has a block that imports an optional library, and its page does not bear the name of that library.
    """
    text = page.read_text(encoding="utf-8")
    blocks = fenced_blocks(text)
    headings = [(n, line[3:]) for n, line in enumerate(text.splitlines(), start=1) if line.startswith("## ")]
    sections: dict[str, list[Block]] = {}
    for block in blocks:
        above = [heading for n, heading in headings if n < block.line]
        sections.setdefault(above[-1] if above else "", []).append(block)
    split: dict[str, list[Block]] = {"": []}
    for heading, inside in sections.items():
        python = "".join(block.text for block in inside if block.language == "python")
        imported = set(re.findall(r"^(?:from|import) (\w+)", python, re.MULTILINE)) & OPTIONAL
        part = heading if imported and page.stem not in imported else ""
        split.setdefault(part, []).extend(inside)
    return split


def trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def execute(page: Path, part: str = "") -> None:
    """Run the Python blocks of a part in one namespace; a ```text block that comes next is what the block prints."""
    blocks = parts(page)[part]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block, following in zip(blocks, [*blocks[1:], None]):
        if block.language != "python":
            odd = block.language.lower().startswith(("py", "{"))
            assert not odd, f"{page.name}:{block.line}: write ```python, not ```{block.language}, so that it runs"
            continue
        where = f"{page.name}, the block on line {block.line}"
        printed = io.StringIO()
        try:
            # Empty lines give a traceback the line numbers of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in OPTIONAL:
                print(f"{where} needs {error.name}, which is not installed")
                sys.exit(SKIPPED)
            sys.exit(f"{where} fails:\n\n{block.text}\n{traceback.format_exc()}\nIt had printed:\n{printed.getvalue()}")
        if following is None or following.language != "text":
            continue
        if trimmed(printed.getvalue()) != trimmed(following.text):
            sys.exit(
                f"{where} does not print what the ```text block on line {following.line} says.\n\n{block.text}\n"
                f"It prints:\n{printed.getvalue()}\nThe page says:\n{following.text}"
            )
    print(f"{page.name}: {sum(block.language == 'python' for block in blocks)} blocks executed")


def modules_with_examples() -> list[str]:
    """Modules whose source has a `>>>`, found by reading, so that collecting the tests imports nothing."""
    names = []
    for folder in ("flash_dmattn", "reference", "triton_kernels", "examples"):
        package = "" if folder == "flash_dmattn" else "flash_dmattn."
        for file in sorted((ROOT / folder).rglob("*.py")):
            # Importing __main__ runs the command line.
            if file.stem != "__main__" and re.search(r"^\s*>>> ", file.read_text(encoding="utf-8"), re.MULTILINE):
                parts = file.relative_to(ROOT).with_suffix("").parts
                names.append(package + ".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.mark.parametrize(
    ("page", "part"),
    [
        pytest.param(page, part, id=page.relative_to(ROOT).as_posix() + (part and f"#{part}"))
        for page in PAGES
        for part in parts(page)
    ],
)
def test_page(page: Path, part: str, tmp_path: Path) -> None:
    # A process per part, without the package: what a reader has, and settings made there stay there.
    program = f"import os, sys; sys.path.insert(0, {str(TESTS)!r})\nimport pathlib, test_docs; "
    program += f"os.chdir({str(tmp_path)!r}); test_docs.execute(pathlib.Path({str(page)!r}), {part!r})"
    (done,) = forked.run([({"MPLBACKEND": "Agg"}, program)])
    if done.status == SKIPPED:
        pytest.skip(done.said.splitlines()[-1])
    assert done.status == 0, done.said


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {error.name}, which is not installed")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.attempted > 0, f"{name} has a >>> that doctest does not find, as in a comment or a private string"
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples fail"


LISTED = (
    "",
    ".biases",
    ".distributed",
    ".examples.dynamic_mask_model",
    ".integrations",
    ".integrations.flash_attn",
    ".integrations.sdpa",
    ".integrations.transformers",
    ".masks",
    ".nn",
    ".sequences",
)


@pytest.mark.parametrize("name", [f"flash_dmattn{part}" for part in LISTED])
def test_the_api_page_has_every_public_name(name: str) -> None:
    if "transformers" in name or "examples" in name:
        pytest.importorskip(name, exc_type=ImportError)
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    _, _, section = page.partition(f"## {name}\n")
    named = set(re.findall(r"`(\w+)", section.split("\n## ")[0]))
    public = {public for public in importlib.import_module(name).__all__ if not public.startswith("__")}
    assert public <= named, f"docs/api.md lacks {sorted(public - named)}"


@pytest.mark.parametrize("folder", ("csrc", "triton_kernels"))
def test_the_map_of_a_folder_names_every_file(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    sources = (path for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".cu", ".cpp", ".py"))
    assert [path.name for path in sorted(sources) if f"{path.name}`" not in text] == []


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nx = 1\n```\n```python\nprint(x)\n```\n```text\n1\n```\n", ""),
        ("```python\nx = 1\n```\n```python\nprint(x)\n```\n```text\n2\n```\n", "line 5 does not print what"),
        ("text\n```python\nundefined\n```\n", "the block on line 3 fails"),
        ("```py\nx = 1\n```\n", "write ```python, not ```py"),
    ],
)
def test_a_wrong_page_is_refused(page: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(page)
    if message:
        with pytest.raises((SystemExit, AssertionError), match=re.escape(message)):
            execute(file)
    else:
        execute(file)


if __name__ == "__main__":
    execute(Path(sys.argv[1]).resolve(), *sys.argv[2:])
