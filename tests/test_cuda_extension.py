"""The CUDA extension without a GPU: its build, what the compiler made of it, its record, and loading it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import flash_dmattn
from flash_dmattn import extension
from flash_dmattn.backends import cuda

ROOT = Path(__file__).resolve().parent.parent
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
WIDE, NARROW = "PackTraitsILb1E", "PackTraitsILb0E"


def load_build_cuda() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_cuda", ROOT / "csrc" / "build_cuda.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_cuda = load_build_cuda()
REASONS = "; ".join(build_cuda.reasons_not_to_build())
builds = pytest.mark.skipif(bool(REASONS), reason=f"the CUDA extension cannot be built here: {REASONS}")


class Built(NamedTuple):
    """A wheel with the extension, what its build printed, the tree it was built in and the wheel unpacked."""

    wheel: Path
    printed: str
    tree: Path
    site: Path

    @property
    def file(self) -> Path:
        return self.site / "flash_dmattn" / "_C.abi3.so"


def copy_checkout(tree: Path) -> Path:
    for folder in ("flash_dmattn", "reference", "triton_kernels", "csrc"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in FILES:
        shutil.copy(ROOT / file, tree)
    return tree


def call(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command,
        cwd=cwd,
        env=inherited | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )


def build(tree: Path, out: Path, hook: str = "build_wheel", wish: str = "force", **environment: str):
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    return call(code, tree, FLASH_DMATTN_BUILD_CUDA=wish, MAX_JOBS="2", **environment)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    tree, out = copy_checkout(tmp_path_factory.mktemp("cuda_tree")), tmp_path_factory.mktemp("cuda_wheel")
    done = build(tree, out)
    assert done.returncode == 0, done.stdout
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return Built(wheel, done.stdout, tree, out / "site")


def tool(name: str) -> str:
    """A program of the CUDA toolkit or of binutils; Triton brings those of the toolkit along."""
    program = shutil.which(name)
    if program is None and importlib.util.find_spec("triton") is not None:
        import triton

        program = shutil.which(name, path=str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin"))
    if program is None:
        pytest.skip(f"{name} is on no path here")
    return program


def output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


# The build


@builds
def test_wheel_holds_one_file_for_every_python(built: Built) -> None:
    assert re.fullmatch(r"flash_dmattn-.*-cp310-abi3-linux_\w+\.whl", built.wheel.name)
    with zipfile.ZipFile(built.wheel) as archive:
        libraries = [name for name in archive.namelist() if ".so" in name]
    assert libraries == ["flash_dmattn/_C.abi3.so"]


@builds
def test_build_shows_progress_and_every_kernel(built: Built) -> None:
    assert re.search(r"\[\d/\d\] sm90/mask/pack\.cu", built.printed), built.printed
    kernels = re.findall(r"^flash_dmattn: (.+): \d+ registers, no spills$", built.printed, re.MULTILINE)
    assert len(kernels) == 5 and any("list_tiles_kernel" in name for name in kernels), built.printed


@builds
def test_second_build_compiles_nothing_and_reports_the_same(built: Built, tmp_path: Path) -> None:
    again = build(built.tree, tmp_path)
    assert again.returncode == 0 and "ninja: no work to do" in again.stdout, again.stdout

    def report(printed: str) -> list[str]:
        return [line for line in printed.splitlines() if line.startswith("flash_dmattn: ")]

    assert report(again.stdout) == report(built.printed)


@builds
def test_editable_install_puts_it_into_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    tree = copy_checkout(tmp_path / "tree")
    done = build(tree, tmp_path, hook="build_editable")
    assert done.returncode == 0, done.stdout
    done = call("from flash_dmattn import extension; print(extension.find())", tree)
    assert done.stdout.strip() == str(tree / "flash_dmattn" / "_C.abi3.so")


@builds
@pytest.mark.parametrize("wish", ["auto", "force"])
def test_failed_compilation_stops_force_alone(wish: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    tree = copy_checkout(tmp_path / "tree")
    (tree / "csrc" / "sm90" / "mask" / "list.cu").write_text("#error this unit is broken\n")
    done = build(tree, tmp_path, wish=wish)
    assert "this unit is broken" in done.stdout
    assert "built: a command of the build failed, and what it said is above." in done.stdout
    assert (done.returncode == 0) == (wish == "auto"), done.stdout
    wheels = [zipfile.ZipFile(path).namelist() for path in tmp_path.glob("*.whl")]
    assert len(wheels) == (1 if wish == "auto" else 0)
    assert not any(".so" in name for names in wheels for name in names)


SPILLING = """
__global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float held[64];
#pragma unroll
  for (int n = 0; n < 64; ++n) held[n] = x[n * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 64; ++n) x[(63 - n) * 1024 + threadIdx.x] = held[n] * held[(n * 7 + 1) % 64];
}
"""


@builds
@pytest.mark.parametrize("wish", ["auto", "force"])
def test_spills_stop_force_and_warn_under_auto(wish: str, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    tree = copy_checkout(tmp_path / "tree")
    with (tree / "csrc" / "sm90" / "mask" / "list.cu").open("a") as unit:
        unit.write(SPILLING)
    done = build(tree, tmp_path, wish=wish)
    assert re.search(r"^flash_dmattn: spilling: \d+ registers, \d+ bytes spilled$", done.stdout, re.MULTILINE)
    expected = (
        "warning: kernels that spill registers are slow: spilling." if wish == "auto" else "force refuses kernels"
    )
    assert expected in done.stdout
    assert (done.returncode == 0) == (wish == "auto"), done.stdout


@pytest.mark.parametrize("value", ["0", "two", "-1", ""])
def test_max_jobs_must_be_a_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(build_cuda.BuildError, match=f"MAX_JOBS is '{value}'; it must be a positive number"):
        build_cuda.jobs()


@pytest.mark.parametrize(("cores", "gib", "jobs"), [(2, 64, 2), (16, 32, 5), (16, 4, 1)])
def test_jobs_by_cores_and_memory(cores: int, gib: int, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": gib << 18, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert build_cuda.jobs() == jobs
    monkeypatch.setenv("MAX_JOBS", "7")
    assert build_cuda.jobs() == 7


# What the compiler made of it


@builds
def test_sass_is_of_hopper_with_wide_loads_and_without_local_memory(built: Built) -> None:
    cuobjdump = tool("cuobjdump")
    assert {line.split(".")[-2] for line in output(cuobjdump, "-lelf", built.file).splitlines()} == {"sm_90a"}
    kernels = dict(
        re.findall(r"Function : (\w+)\n(.*?)(?=\t+Function : |\Z)", output(cuobjdump, "-sass", built.file), re.DOTALL)
    )
    assert len(kernels) == 5
    for name, sass in kernels.items():
        wide = re.findall(r"LDG\.E\.128\S*", sass)
        assert len(wide) == (8 if WIDE in name else 0), name  # all 8 of a thread on their way together
        if NARROW in name:
            assert len(re.findall(r"LDG\.E\.U8\S*", sass)) == 16, name
        assert not re.search(r"\b(LDL|STL)\b", sass), f"{name} uses local memory"


@builds
def test_symbols_are_of_the_stable_abis_alone(built: Built) -> None:
    nm = tool("nm")
    needed = [line.split()[-1] for line in output(nm, "-D", "--undefined-only", built.file).splitlines()]
    linker = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize"}
    of_system = {name for name in needed if re.search(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_", name)}
    of_python = {name for name in needed if name.startswith(("Py", "_Py"))}
    of_torch = {name for name in needed if re.match(r"(aoti_torch|torch)_\w+$", name)}
    assert set(needed) - of_system - of_python - of_torch - linker == set()
    # Both are in the limited API since before 3.10: https://docs.python.org/3/c-api/stable.html
    assert of_python == {"PyModuleDef_Init", "PyUnicode_FromString"}
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    exported = {line.split()[-1] for line in output(nm, "-D", "--defined-only", library).splitlines()}
    assert of_torch - exported == {"aoti_torch_get_current_cuda_stream"}
    own = {line.split()[-1] for line in output(nm, "-D", "--defined-only", built.file).splitlines()}
    assert "PyInit__C" in own
    assert not {name for name in own if "cuda" in name.lower()}, "another library could bind to this CUDA runtime"


# Loading it

# CPU torch has no libtorch_cuda.so: the stub of the build takes its place, and the module is loaded by hand.
LOAD = """
import ctypes, importlib.machinery, importlib.util, json
import torch
if torch.version.cuda is None:
    ctypes.CDLL({stub!r})
loader = importlib.machinery.ExtensionFileLoader("flash_dmattn._C", {file!r})
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("flash_dmattn._C", loader))
loader.exec_module(module)
print(module.build_info())
print(torch.ops.flash_dmattn.cuda_pack_mask.default._schema)
try:
    torch.ops.flash_dmattn.cuda_pack_mask(torch.ones(1, 1, 4, 4, dtype=torch.bool), 0, 0, False)
except RuntimeError as error:
    print(error)
"""


@builds
def test_operator_is_registered_and_refuses_cpu_tensors(built: Built, tmp_path: Path) -> None:
    (stub,) = built.tree.glob("build/**/libtorch_cuda.so")
    done = call(LOAD.format(stub=str(stub), file=str(built.file)), tmp_path)
    assert done.returncode == 0, done.stdout
    info, schema, refusal = done.stdout.splitlines()[:3]
    assert json.loads(info) == extension.build_info(built.file)
    assert schema == "flash_dmattn::cuda_pack_mask(Tensor mask, int low, int high, bool has_band) -> Tensor[]"
    assert "cuda_pack_mask: mask is not on a CUDA device; the kernel is written for sm_90a" in refusal


PROBE = "from flash_dmattn.backends import cuda; print(cuda.probe().reason)"


@builds
def test_record_of_the_build(built: Built) -> None:
    info = extension.build_info(built.file)
    assert info["version"] == flash_dmattn.__version__
    assert info["torch_target"] == "2.10" and info["arches"] == ["sm_90a"]
    assert any("compute_90a" in flag for flag in info["flags"])
    assert info["commit"] == "unknown"  # the copy that was built is no repository
    assert re.fullmatch(r"\d+\.\d+", info["nvcc"])


@builds
def test_installed_extension_gives_its_reason(built: Built, tmp_path: Path) -> None:
    done = call(PROBE, tmp_path, PYTHONPATH=str(built.site))
    if torch.version.cuda is None:
        reason = f"it needs a torch that is built with CUDA, and {torch.__version__} is not"
        assert done.stdout.strip() == f"the CUDA extension {built.file} does not fit: {reason}"
    else:
        assert done.stdout.strip() == "the extension has no attention kernels yet"


@builds
def test_info_shows_the_record(built: Built, tmp_path: Path) -> None:
    done = call("from flash_dmattn.__main__ import main; main(['info'])", tmp_path, PYTHONPATH=str(built.site))
    version = re.escape(flash_dmattn.__version__)
    row = rf"^extension +{version} for sm_90a and torch >= 2\.10, built by nvcc \S+ from commit unknown, "
    assert re.search(row + re.escape(str(built.file)), done.stdout, re.MULTILINE), done.stdout


INFO = {
    "version": flash_dmattn.__version__,
    "torch_target": "2.10",
    "torch_built_with": "2.13.0",
    "python": ">=3.10",
    "arches": ["sm_90a"],
    "nvcc": "13.0",
    "flags": [],
    "commit": "unknown",
}
FITS = b"\x7fELF FLASH_DMATTN_BUILD_INFO " + json.dumps(INFO).encode() + b"\0 more"
MISMATCHES = {
    "other version": (FITS.replace(INFO["version"].encode(), b"0.0.9"), "it was built for flash_dmattn 0.0.9"),
    "older torch": (FITS.replace(b'"2.10"', b'"9.10"'), r"it needs torch 9.10 or later, and this is \d"),
    "no record": (FITS.replace(b"BUILD_INFO ", b"BUILD_LOST "), "holds no record of its build"),
    "empty file": (b"", "the record of its build in .* cannot be read: cannot mmap an empty file"),
    "cut off": (FITS[:60], "the record of its build in .* cannot be read"),
    "damaged": (FITS.replace(b"{", b"["), "the record of its build in .* cannot be read"),
    "keys missing": (FITS.replace(b"nvcc", b"mvcc"), "the record of its build in .* does not name nvcc$"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch_is_a_sentence(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, sentence = MISMATCHES[case]
    file = tmp_path / "_C.abi3.so"
    file.write_bytes(content)
    monkeypatch.setattr(extension, "find", lambda: file)
    monkeypatch.setattr(cuda, "_found", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = cuda.probe()
    assert not found.usable and str(file) in found.reason
    assert re.search(sentence, found.reason), found.reason
    assert isinstance(found.exception, extension.ExtensionMismatchError)
    assert found.hint == "rebuild it, or install what it needs: docs/building.md"


@pytest.mark.parametrize("release", ["2.10.0", "2.10.0a0+git123", "2.11.0+cu130", "3.0.0"])
def test_every_torch_from_the_target_fits(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert extension.mismatch(INFO) == ""


def test_loaded_extension_has_no_attention_kernels_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "load", lambda: ModuleType(extension.NAME))
    monkeypatch.setattr(cuda, "_found", None)
    found = cuda.probe()
    assert not found.usable and found.reason == "the extension has no attention kernels yet"
    assert isinstance(found.exception, NotImplementedError)


def test_ptxas_report() -> None:
    log = """\
ptxas info    : Compiling entry function '_Z4tidyv' for 'sm_90a'
ptxas info    : Function properties for _Z4tidyv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z6sloppyv' for 'sm_90a'
ptxas info    : Function properties for _Z6sloppyv
    64 bytes stack frame, 48 bytes spill stores, 60 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size
"""
    tidy, sloppy = build_cuda.parse_ptxas(log)
    assert (tidy.registers, tidy.spilled_bytes) == (40, 0) and str(tidy).endswith(": 40 registers, no spills")
    assert (sloppy.registers, sloppy.spilled_bytes) == (255, 108) and str(sloppy).endswith("108 bytes spilled")
