"""Write the package as a kernel of Hugging Face's hub: `python release/hub_layout.py`, then see build/hub.

A kernel of the hub is loaded from any folder, under any name, and several versions of it can be loaded in one process.
So it imports its own modules relatively, and its operators have a namespace that each build makes anew. The sources
here keep one spelling, and this program writes the other: `torch-ext/flash_dmattn` and `build.toml`, which
`kernel-builder` reads. With `--build ID` it also writes `build/torch-*`, as `kernel-builder` does for a kernel in
Python alone, and `kernels.get_local_kernel` loads that.

The kernel has no extension: `triton`, `flex`, `sdpa` and `eager` serve its calls.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders of the checkout, by their place in the package; the command line is left out.
FOLDERS = {"flash_dmattn": "", "reference": "reference", "triton_kernels": "triton_kernels"}
LEFT_OUT = ("tools", "__main__.py", "__pycache__", "py.typed", "*.so", "_C.not_built.txt")
BACKENDS = ("cpu", "cuda", "rocm")
DEPENDS = "einops"  # of the packages that the hub allows, the one that this package imports

# The end of the hub's `__init__.py`: what transformers looks for in a kernel that it takes as attn_implementation.
FOR_TRANSFORMERS = '''

supports_flash_attn = True


def flash_attn_forward(*arguments: object, **keywords: object) -> object:
    """Compute the attention of a layer of transformers, which passes it a mask with a value for each pair."""
    from .integrations.transformers.attention_function import attend

    return attend(*arguments, **keywords)


__all__ += ["flash_attn_forward", "supports_flash_attn"]
'''

OPS = '''import torch

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix an operator by its namespace."""
    return f"{namespace}::{{op_name}}"
'''


def as_relative(source: str, depth: int) -> str:
    """Return a module with imports of its own package made relative; `depth` is 1 at the top of the package."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            package, _, place = (node.module or "").partition(".")
            if package == "flash_dmattn":
                line = lines[node.lineno - 1]
                lines[node.lineno - 1] = line.replace(
                    f"from {node.module} import", f"from {'.' * depth}{place} import", 1
                )
        elif isinstance(node, ast.Import) and any(name.name == "flash_dmattn" for name in node.names):
            line = lines[node.lineno - 1]
            indent = line[: len(line) - len(line.lstrip())]
            package = f"import_module({'.' * depth!r}, __package__)"
            lines[node.lineno - 1] = f"{indent}from importlib import import_module\n{indent}flash_dmattn = {package}"
    return "\n".join(lines)


def with_namespace(source: str, depth: int) -> str:
    """Return a module whose operators are in the namespace of the build."""
    text = source.replace("torch.ops.flash_dmattn", "hub_ops")
    text = re.sub(r'(?<!\w)f?"flash_dmattn::(\w+|\{\w+\})"', r'add_op_namespace_prefix(f"\1")', text)
    text = re.sub(r'Library\("flash_dmattn"', 'Library(add_op_namespace_prefix("")[:-2]', text)
    if text == source:
        return source
    future = "from __future__ import annotations\n"
    if future not in text:
        raise ValueError("a module that defines operators begins with `from __future__ import annotations`")
    added = f"from {'.' * depth}_ops import add_op_namespace_prefix, ops as hub_ops\n"
    return text.replace(future, f"{future}\n{added}", 1)


def write_package(package: Path) -> None:
    """Write the modules of the package into a new folder."""
    for folder, place in FOLDERS.items():
        shutil.copytree(ROOT / folder, package / place, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    for path in package.rglob("*.py"):
        depth = len(path.relative_to(package).parts)
        path.write_text(with_namespace(as_relative(path.read_text(), depth), depth))
    with (package / "__init__.py").open("a") as file:
        file.write(FOR_TRANSFORMERS)


def write_layout(folder: Path, build_id: str = "") -> None:
    """Write the sources of the kernel, and for a build what `kernel-builder` makes of them."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "torch-ext" / "flash_dmattn"
    write_package(package)
    shutil.copy(ROOT / "LICENSE", folder)
    backends = ", ".join(f'"{name}"' for name in BACKENDS)
    (folder / "build.toml").write_text(
        "[general]\n"
        'name = "flash-dmattn"\nversion = 0\nedition = 5\nlicense = "BSD-3-Clause"\n'
        f'backends = [{backends}]\npython-depends = ["{DEPENDS}"]\n\n'
        "[torch-noarch]\n"
    )
    (folder / "flake.nix").write_text(
        '{\n  description = "flash_dmattn as a kernel of the hub";\n'
        '  inputs.kernel-builder.url = "github:huggingface/kernels";\n'
        "  outputs = { self, kernel-builder }:\n"
        "    kernel-builder.lib.genKernelFlakeOutputs {\n      inherit self;\n      path = ./.;\n    };\n}\n"
    )
    for backend in BACKENDS if build_id else ():
        built = folder / "build" / f"torch-{backend}"
        namespace = f"_flash_dmattn_{backend}_{build_id}"
        shutil.copytree(package, built)
        (built / "_ops.py").write_text(OPS.format(namespace=namespace))
        metadata = {
            "name": "flash-dmattn",
            "id": namespace,
            "version": 0,
            "license": "BSD-3-Clause",
            "python-depends": [DEPENDS],
            "backend": {"type": backend},
        }
        (built / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "hub", metavar="DIR", help="replaced by the layout"
    )
    parser.add_argument("--build", default="", metavar="ID", help="also write build/torch-*, with this end of names")
    arguments = parser.parse_args()
    write_layout(arguments.out, arguments.build)
    print(f"the kernel of the hub is in {arguments.out}")


if __name__ == "__main__":
    main()
