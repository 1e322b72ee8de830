"""Modules that `import flash_dmattn` loads, and its import with each optional package broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parent.parent

LOADED = """
import json, sys
import torch
before = set(sys.modules)
import flash_dmattn
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# Each costs a second or more to load, or is not installed everywhere, or is a part that few programs use.
LAZY = (
    "triton",
    "torch.nn.attention.flex_attention",
    "torch._dynamo",
    "torch._inductor",
    "matplotlib",
    "rich",
    "numpy",
    "flash_dmattn.nn",
    "flash_dmattn.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "flash_dmattn.masks.prepared.mask",
    "flash_dmattn.examples.demo",
    "flash_dmattn.__main__",
)

BROKEN = """
import sys
import torch

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r} or name.startswith({package!r} + "."):
            raise {error}("this package is broken")

loaded = [name for name in sys.modules if name == {package!r} or name.startswith({package!r} + ".")]
for name in loaded:
    del sys.modules[name]
sys.meta_path.insert(0, Broken())

import flash_dmattn
q, k, v = torch.randn(3, 2, 6, 2, 8, dtype=torch.float64).unbind()
q.requires_grad_()
bias = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
scores = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 + bias
want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
want_grads = torch.autograd.grad(want.square().sum(), (q, bias))
for backend in ("eager", "auto"):
    out = flash_dmattn.attention(q, k, v, bias=bias, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), (q, bias))
    # torch.testing.assert_close imports numpy.
    for name, x, x64 in zip(("out", "dq", "dbias"), (out, *grads), (want, *want_grads)):
        error = float((x - x64).norm() / x64.norm())
        assert error < 1e-12, f"{{backend}}: the error of {{name}} is {{error:.1e}}"
flash_dmattn.available_backends()
print(flash_dmattn.explain(q, k, v, bias=bias))
{then}
"""

FORCE_FLEX = """
try:
    flash_dmattn.attention(q.float(), k.float(), v.float(), backend="flex")
except flash_dmattn.BackendUnavailableError as error:
    assert type(error.__cause__) is {error}, repr(error.__cause__)
    assert "this package is broken" in str(error), error
    assert "eager" in str(error), error
else:
    raise AssertionError("flex ran without torch.nn.attention.flex_attention")
"""


def run(code: str) -> forked.Done:
    """Run a program in a process that has imported only torch."""
    (done,) = forked.run([({}, code)])
    assert done.status == 0, done.said
    return done


def test_import_loads_nothing_heavy() -> None:
    loaded = json.loads(run(LOADED).said)
    assert "flash_dmattn" in loaded
    heavy = [name for name in loaded if any(name == lazy or name.startswith(lazy + ".") for lazy in LAZY)]
    assert not heavy, f"import flash_dmattn also loads {heavy}"
    others = {name.partition(".")[0] for name in loaded} - {"flash_dmattn", "torch"} - sys.stdlib_module_names
    assert not others, f"import flash_dmattn also loads the packages {others}"


OTHERS = """
import importlib.util, sys
finders = list(sys.meta_path)
import flash_dmattn, flash_dmattn.reference.formula, flash_dmattn.triton_kernels.gpus, flash_dmattn.examples.byte_model
assert sys.meta_path == finders, sys.meta_path
for name in ("benchmarks", "csrc", "docs", "flash_dmattn", "setup", "tests"):
    assert importlib.util.find_spec(f"flash_dmattn.{name}") is None, name
assert importlib.util.find_spec("flash_dmattn.reference.eager") and importlib.util.find_spec("flash_dmattn.nn")
"""


def test_the_package_has_three_folders_of_a_checkout_and_no_finder() -> None:
    run(OTHERS)


def test_a_folder_shared_with_the_predecessor_is_refused(tmp_path: Path) -> None:
    """flash-dmattn 1.x has the same import name, and an installation into the same folder leaves its modules there."""
    package = tmp_path / "flash_dmattn"
    (package / "dispatch").mkdir(parents=True)
    for name in ("__init__.py", "_version.py"):
        (package / name).write_text((ROOT / "flash_dmattn" / name).read_text())
    (package / "flash_dmattn_interface.py").touch()
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flash_dmattn"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {package} has files of flash-dmattn 1.x"), done.stderr
    assert last.endswith("run `python -m pip uninstall flash-dmattn`, then install flash_dmattn again")


PACKAGES = ("triton", "torch.nn.attention.flex_attention", "matplotlib", "rich", "numpy")


def test_broken_optional_package_costs_only_what_needs_it() -> None:
    broken = [(package, error) for package in PACKAGES for error in ("ImportError", "OSError")]
    programs = []
    for package, error in broken:
        then = FORCE_FLEX.format(error=error) if package.endswith("flex_attention") else ""
        programs.append(({}, BROKEN.format(package=package, error=error, then=then)))
    failed = [
        f"{package}, {error}:\n{done.said}"
        for (package, error), done in zip(broken, forked.run(programs), strict=True)
        if done.status != 0 or "eager" not in done.said
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("module", ("integrations.transformers", "examples.dynamic_mask_model"))
def test_what_needs_transformers_says_so(module: str) -> None:
    """Where there is none, one sentence says which one to install."""
    program = f"import sys; sys.modules['transformers'] = None; import flash_dmattn.{module}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True)
    assert "needs transformers 5.0 or later" in done.stderr.splitlines()[-1], done.stderr
