"""Install a wheel into new environments beside several releases of torch, and compute first gradients there.

python release/fresh_install.py dist/flash_dmattn-0.1.0-py3-none-any.whl --torch 2.9.0 newest

`--torch installed` takes the torch of this interpreter, and needs no network.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_GRADIENTS = """
import ctypes
import pathlib
import time
import torch
started = time.perf_counter()
import flash_dmattn
imported = time.perf_counter()
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q, k, v = torch.randn(3, 2, 64, 4, 32, device=device, dtype=dtype, requires_grad=True)
bias = torch.randn(4, 64, 64, device=device, dtype=dtype, requires_grad=True)
told = flash_dmattn.explain(q, k, v, None, bias, is_causal=True)
out = flash_dmattn.attention(q, k, v, None, bias, is_causal=True)
(grad,) = torch.autograd.grad(out.float().square().sum(), bias)
seconds = f"imported in {imported - started:.1f} s, first gradients in {time.perf_counter() - imported:.1f} s"
q, k, v, b = (x.detach().double().requires_grad_() for x in (q, k, v, bias))
hidden = torch.ones(64, 64, device=device, dtype=torch.bool).triu(1)
p = (torch.einsum("bihd,bjhd->bhij", q, k) * 32**-0.5 + b).masked_fill(hidden, float("-inf")).softmax(-1)
(expected,) = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", p, v).square().sum(), b)
error = ((grad.double() - expected).norm() / expected.norm()).item()
assert error < (1e-5 if dtype == torch.float32 else 2e-2), error
extension = pathlib.Path(flash_dmattn.__file__).with_name("_C.abi3.so")
if extension.exists() and torch.version.cuda:  # it finds its symbols in this torch, with a GPU or without one
    ctypes.CDLL(str(extension))
    seconds += ", the extension loads"
print(f"torch {torch.__version__}: {told.forward}, {told.backward}: gradient of a bias right to {error:.0e}, {seconds}")
"""


def check(wheel: Path, torch: str) -> None:
    """Print what a new environment with one release of torch computes, and how long the installation took."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run((sys.executable, "-m", "venv", folder), check=True)
        python = str(Path(folder, "bin", "python"))
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        if torch == "installed":
            (site_packages,) = Path(folder).glob("lib/python*/site-packages")
            spec = importlib.util.find_spec("torch")
            assert spec is not None and spec.origin is not None, "this interpreter has no torch"
            (site_packages / "torch.pth").write_text(f"{Path(spec.origin).parent.parent}\n")
        else:
            subprocess.run((*pip, "torch" if torch == "newest" else f"torch=={torch}", "numpy"), check=True)
        started = time.monotonic()
        subprocess.run((*pip, str(wheel.resolve())), check=True)
        installed = time.monotonic()
        done = subprocess.run((python, "-c", FIRST_GRADIENTS), cwd=folder, check=True, capture_output=True, text=True)
    seconds = f"wheel installed in {installed - started:.0f} s, the program took {time.monotonic() - installed:.0f} s"
    print(f"{wheel.name}: {done.stdout.strip()}; {seconds}", flush=True)


def main() -> None:
    """Read the command line and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--torch", nargs="+", required=True, metavar="VERSION")
    arguments = parser.parse_args()
    for wheel in arguments.wheels:
        for torch in arguments.torch:
            check(wheel, torch)


if __name__ == "__main__":
    main()
