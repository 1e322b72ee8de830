"""Build the documentation as a site: `python docs/build_site.py`, then open build/site/index.html.

MkDocs reads one folder. Pages of docs, examples, benchmarks and the folders of kernels link to each other by paths.
So the folder gets copies with the same paths. docs/index.md becomes the first page, and README.md install.md.
A page for each module comes from docstrings, by mkdocstrings. A warning is an error, and so is a page that loads
something from another host.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "CITATION.cff",
    "docs",
    "examples",
    "benchmarks/results",
    "csrc/README.md",
    "triton_kernels/README.md",
    "tests/emulation/README.md",
)
# Modules of the reference, in the order of the menu.
MODULES = (
    "flash_dmattn",
    "flash_dmattn.masks",
    "flash_dmattn.biases",
    "flash_dmattn.sequences",
    "flash_dmattn.statistics",
    "flash_dmattn.nn",
    "flash_dmattn.distributed",
    "flash_dmattn.integrations",
    "flash_dmattn.integrations.sdpa",
    "flash_dmattn.integrations.flash_attn",
    "flash_dmattn.integrations.transformers",
)


def copy_pages(folder: Path) -> None:
    """Copy every page and picture, and the programs that pages link to."""
    for name in PAGES:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (folder / "install.md").write_text((ROOT / "README.md").read_text().replace("](docs/index.md)", "](index.md)"))
    first = (folder / "docs" / "index.md").read_text()
    (folder / "docs" / "index.md").unlink()
    first = re.sub(r"\]\((?!\.\./|#|\w+:)", "](docs/", first).replace("](../", "](")
    first = first.replace("](README.md", "](install.md")
    (folder / "index.md").write_text(f"---\ntitle: flash_dmattn\nhide: [navigation, toc]\n---\n\n{first}")


def write_reference(folder: Path) -> None:
    """Write a page for each module, with the names that it exports in the order of docs/api.md, and a list of them."""
    folder.mkdir()
    order = (ROOT / "docs" / "api.md").read_text()
    listed = ["# Reference", "", "Every public name; [API](../docs/api.md) has a line for each.", ""]
    for name in MODULES:
        module = importlib.import_module(name)
        lines = [f"# {name}", ""]
        names = [x for x in module.__all__ if not x.startswith("_") and not isinstance(getattr(module, x), ModuleType)]
        names.sort(key=lambda x: order.index(f"`{x}"))
        for exported in names:
            lines += [f"::: {name}.{exported}", ""]
        (folder / f"{name}.md").write_text("\n".join(lines))
        linked = ", ".join(f"[{x}]({name}.md#{name}.{x})" for x in names)
        listed += [f"## [{name}]({name}.md)", "", linked, ""]
    (folder / "index.md").write_text("\n".join(listed))


def main() -> int:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", metavar="DIR", help="where the site goes")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    pages = ROOT / "build" / "site_pages"
    shutil.rmtree(pages, ignore_errors=True)
    copy_pages(pages)
    write_reference(pages / "reference")
    command = (
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(arguments.out.resolve()),
    )
    # Material for MkDocs names its successor at every start; the plugin for docstrings does not serve that yet.
    failed = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode
    if failed:
        return failed
    elsewhere = re.compile(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    for page in sorted(arguments.out.rglob("*.html")):
        if loads := elsewhere.search(page.read_text()):
            sys.exit(f"{page} loads something from another host: {loads[0]}")
    print(f"the site begins with {arguments.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
