"""The CUDA extension without a GPU: its build, what the compiler made of it, its record, and loading it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from by_path import load

import flash_dmattn
from flash_dmattn.backends.cuda import backend as cuda
from flash_dmattn.backends.cuda import extension
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.tools import info

ROOT = Path(__file__).resolve().parent.parent
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
# clear_dbias_kernel reads the bounds of a sequence so.
LOAD_WIDE = (
    "turned_sums_kernel",
    "backward",
    "gather_keys",
    "key_mask",
    "add_chunks",
    "few_keys",
    "prepare_kernel",
    "clear_dbias_kernel",
)
WIDE, NARROW = "PackTraitsILb1E", "PackTraitsILb0E"
# One unit of a pass stands for all: they are one source.
ONE_INSTANCE = {"FLASH_DMATTN_HEAD_DIMS": "64", "FLASH_DMATTN_DTYPES": "bf16"}
INSTANCE, BACKWARD_INSTANCE, DBIAS_INSTANCE = "forward_d64_bf16", "backward_d64_bf16", "shared_dbias_d64_bf16"


build_cuda = load(ROOT / "csrc" / "build_cuda.py")
REASONS = "; ".join(build_cuda.reasons_not_to_build())
builds = pytest.mark.skipif(bool(REASONS), reason=f"the CUDA extension cannot be built here: {REASONS}")


class Built(NamedTuple):
    """A wheel with the extension, the logs of its build and of a second one, their tree and the wheel unpacked."""

    wheel: Path
    printed: str  # by the first build
    log: str
    log_again: str
    spilled_bytes: dict[str, int]  # of each kernel, as ptxas says
    tree: Path
    site: Path

    @property
    def file(self) -> Path:
        return self.site / "flash_dmattn" / "_C.abi3.so"

    @property
    def folder(self) -> Path:
        return self.tree / "build" / "cuda"


def copy_checkout(tree: Path) -> Path:
    """Copy what a build needs, and a program that shows a Hopper GPU, without which `auto` would build nothing."""
    (tree / "tools").mkdir()
    (tree / "tools" / "nvidia-smi").write_text("#!/bin/sh\necho 9.0\n")
    (tree / "tools" / "nvidia-smi").chmod(0o755)
    for folder in ("flash_dmattn", "reference", "triton_kernels", "examples", "csrc"):
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
        timeout=1200,  # a build beside another worker, on two cores, and nothing of it compiled before
    )


def build(
    tree: Path, out: Path, hook: str = "build_wheel", wish: str = "force", **environment: str
) -> subprocess.CompletedProcess[str]:
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    path = os.pathsep.join([str(tree / "tools"), os.environ.get("PATH", os.defpath)])
    wishes = {"PATH": path, "FLASH_DMATTN_BUILD_CUDA": wish, "MAX_JOBS": "2"}
    return call(code, tree, **{**wishes, **ONE_INSTANCE, **environment})


# Compiled in any case: small host code and small kernels.
COMPILED = ("api/tensor_map.cpp", "sm90/mask/list.cu")


def copy_compiled(tree: Path) -> None:
    """Copy what an installation of this checkout has compiled, which ninja takes where it is of the same sources."""
    for path in (ROOT / "build" / "cuda").glob("*"):
        is_for_tests = not re.search(r"_d\d+(_\d+)?_(fp16|bf16)\.", path.name) or "_d64_bf16." in path.name
        if is_for_tests and not path.name.startswith(tuple(unit.replace("/", "_") for unit in COMPILED)):
            (tree / "build" / "cuda").mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, tree / "build" / "cuda")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    tree, out = copy_checkout(tmp_path_factory.mktemp("cuda_tree")), tmp_path_factory.mktemp("cuda_wheel")
    copy_compiled(tree)
    done = build(tree, out)
    assert done.returncode == 0, done.stdout
    log = tree / "build" / "cuda" / build_cuda.LOG
    first = log.read_text()
    again = build(tree, tmp_path_factory.mktemp("cuda_wheel_again"))
    assert again.returncode == 0, again.stdout
    logs = "".join(path.read_text() for path in (tree / "build" / "cuda").glob("*.o.log"))
    spilled_bytes = {kernel.symbol: kernel.spilled_bytes for kernel in build_cuda.parse_ptxas(logs)}
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return Built(wheel, done.stdout, first, log.read_text(), spilled_bytes, tree, out / "site")


@pytest.fixture
def small_unit(built: Built) -> Iterator[Path]:
    """A source of the built tree for a test to change: a build after that compiles little else."""
    unit = built.tree / "csrc" / "sm90" / "mask" / "list.cu"
    text = unit.read_text()
    yield unit
    unit.write_text(text)


def tool(name: str) -> str:
    """A program of the CUDA toolkit or of binutils; Triton brings the toolkit's along."""
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
def test_second_build_compiles_nothing_and_reports_the_same(built: Built) -> None:
    assert "ninja: no work to do" in built.log_again, built.log_again

    def report(log: str) -> list[str]:
        return [line for line in log.splitlines() if re.search(r": \d+ registers, ", line)]

    assert report(built.log_again) == report(built.log)


@builds
@pytest.mark.parametrize(
    ("result", "needs"),
    [
        ("api_forward.cpp.o", {"build_instances.h", "launch.h", "params.h", "tensor_map.h"}),
        ("api_backward.cpp.o", {"build_instances.h", "launch.h", "params.h", "tensor_map.h"}),
        ("api_module.cpp.o", {"build_info.h"}),
        (f"{INSTANCE}.o", {"forward.h", "wgmma_instructions.h", "ptx.h", "params.h"}),
        (f"{BACKWARD_INSTANCE}.o", {"backward.h", "wgmma_instructions.h", "ptx.h", "params.h"}),
        (f"{DBIAS_INSTANCE}.o", {"shared_dbias.h", "wgmma_instructions.h", "ptx.h", "params.h"}),
    ],
)
def test_headers_that_change_compile_what_includes_them(built: Built, result: str, needs: set[str]) -> None:
    said = output(*build_cuda.find_ninja(), "-C", built.folder, "-t", "deps", result)
    assert needs <= {Path(line.strip()).name for line in said.splitlines()}, said


@builds
def test_editable_install_puts_it_into_the_checkout(built: Built, tmp_path: Path) -> None:
    done = build(built.tree, tmp_path, hook="build_editable")
    assert done.returncode == 0, done.stdout
    log = (built.folder / build_cuda.LOG).read_text()
    assert not re.search(r"\] \w+_d64_bf16", log), "it compiled what the wheel had compiled"
    done = call("from flash_dmattn.backends.cuda import extension; print(extension.find())", built.tree)
    assert done.stdout.strip() == str(built.tree / "flash_dmattn" / "_C.abi3.so")


SPILLING = """
__global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float held[COUNT];
#pragma unroll
  for (int n = 0; n < COUNT; ++n) held[n] = x[n * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int n = 0; n < COUNT; ++n) x[(COUNT - 1 - n) * 1024 + threadIdx.x] = held[n] * held[(n * 7 + 1) % COUNT];
}
"""


@builds
@pytest.mark.parametrize("count", [40, 128])
def test_spills_warn_and_many_stop_force(count: int, built: Built, small_unit: Path, tmp_path: Path) -> None:
    with small_unit.open("a") as unit:
        unit.write(SPILLING.replace("COUNT", str(count)))
    allowed = build_cuda.SPILLED_BYTES_ALLOWED
    for wish in ("force", "auto"):  # the second finds everything compiled
        done = build(built.tree, tmp_path / wish, wish=wish)
        log = (built.folder / build_cuda.LOG).read_text()
        spilled = re.search(r"^spilling\S*: \d+ registers, (\d+) bytes spilled$", log, re.MULTILINE)
        assert spilled is not None and (int(spilled[1]) > allowed) == (count == 128), done.stdout
        stops = count == 128 and wish == "force"
        refusal = f"force refuses kernels that spill more than {allowed} bytes of registers: spilling"
        warning = r"^flash_dmattn: warning: \d+ of \d+ kernels spill registers, up to \d+ bytes"
        assert (refusal in done.stdout) == stops, done.stdout
        assert bool(re.search(warning, done.stdout, re.MULTILINE)) != stops, done.stdout
        assert (done.returncode != 0) == stops, done.stdout
        assert len(list((tmp_path / wish).glob("*-abi3-*.whl"))) == (0 if stops else 1)


# The sum of a product is read while the next is under way, which takes a wait behind each.
SERIALIZED = """
__device__ void product(float (&d)[4], unsigned long long a) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));
}
__global__ void serialized(float* x, unsigned long long a) {
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;");
  product(d, a);
  d[0] += x[threadIdx.x];
  product(d, a);
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) x[threadIdx.x * 4 + i] = d[i];
}
"""


@builds
def test_serialized_products_warn_and_stop_force(built: Built, small_unit: Path, tmp_path: Path) -> None:
    with small_unit.open("a") as unit:
        unit.write(SERIALIZED)
    for wish, verb in (("force", "refuses"), ("auto", "warning: there are")):
        done = build(built.tree, tmp_path / wish, wish=wish)
        said = f"{verb} kernels whose matrix products are serialized, for want of registers: serialized."
        assert said in done.stdout, done.stdout
        assert (done.returncode != 0) == (wish == "force"), done.stdout
        assert len(list((tmp_path / wish).glob("*-abi3-*.whl"))) == (0 if wish == "force" else 1)


# The choice of units


def choose_instances(monkeypatch: pytest.MonkeyPatch, head_dims: str | None, dtypes: str | None) -> None:
    for name, value in (("FLASH_DMATTN_HEAD_DIMS", head_dims), ("FLASH_DMATTN_DTYPES", dtypes)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("head_dims", "dtypes", "units"),
    [
        ("64", "bf16", ["d64_bf16"]),
        ("128, 64", "fp16", ["d64_fp16", "d128_fp16"]),
        ("192", None, ["d192_128_fp16", "d192_128_bf16", "d192_fp16", "d192_bf16"]),
        (None, "bf16,bf16", [f"d{dims}_bf16" for dims in ("32", "64", "96", "128", "192_128", "192", "256")]),
    ],
)
def test_units_are_chosen_by_head_dim_and_dtype(
    head_dims: str | None, dtypes: str | None, units: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_instances(monkeypatch, head_dims, dtypes)
    for name in ("forward", "backward", "shared_dbias"):
        made = getattr(build_cuda, f"{name}_instances")()
        assert [unit.name for unit in made] == [f"{name}_{unit}" for unit in units]


def test_every_unit_is_built_when_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_instances(monkeypatch, None, None)
    units = build_cuda.attention_units()
    pairs = 3 * (len(build_cuda.HEAD_DIMS) + len(build_cuda.SEQUENCES_HEAD_DIMS))
    assert len(units) == len({unit.name for unit in units}) == pairs * len(build_cuda.DTYPES)


@pytest.mark.parametrize("value", ["", "64,", "64;128", "65", "x"])
def test_unknown_head_dim_is_a_sentence(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = f"FLASH_DMATTN_HEAD_DIMS is '{value}'; it must name some of 32,64,96,128,192,256, separated by commas"
    with pytest.raises(build_cuda.BuildError, match=f"^{re.escape(sentence)}$"):
        choose_instances(monkeypatch, value, None)
        build_cuda.backward_instances()


def test_first_unit_that_holds_a_call_is_the_smallest() -> None:
    places = {pair: place for place, pair in enumerate(build_cuda.HEAD_DIMS)}
    for d, dv in places:
        assert all(places[d, dv] <= place for (e, ev), place in places.items() if e >= d and ev >= dv)


@pytest.mark.parametrize("value", ["0", "two", "-1", ""])
def test_max_jobs_must_be_a_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(build_cuda.BuildError, match=f"MAX_JOBS is '{value}'; it must be a positive number"):
        build_cuda.jobs()


@pytest.mark.parametrize(("cores", "gib", "jobs"), [(2, 64, 2), (16, 5, 5), (16, 0, 1)])
def test_jobs_by_cores_and_memory(cores: int, gib: int, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": gib << 18, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert build_cuda.jobs() == jobs
    monkeypatch.setenv("MAX_JOBS", "7")
    assert build_cuda.jobs() == 7


# Machine code


@builds
def test_plain_compute_90_does_not_compile(built: Built, tmp_path: Path) -> None:
    """Code for sm_90 without the a would run without wgmma: here it has no way to compile, in any unit.

    The smallest unit stands for all: they take their matrix instructions from one file, and no code is conditional.
    """
    conditions = [path for path in (ROOT / "csrc").rglob("*.*") if "__CUDA_ARCH" in path.read_text("utf-8", "ignore")]
    assert not conditions, conditions
    unit = DBIAS_INSTANCE
    said = output(*build_cuda.find_ninja(), "-C", built.folder, "-t", "commands", "-s", f"{unit}.o")
    (command,) = (line for line in said.splitlines() if build_cuda.GENCODE in line)
    command = command.replace(build_cuda.GENCODE, "-gencode arch=compute_90,code=sm_90")
    command = command.replace(f"{unit}.o", str(tmp_path / "plain.o"))
    done = subprocess.run(command, shell=True, cwd=built.folder, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and not (tmp_path / "plain.o").exists()
    assert re.search(r"wgmma\.mma_async\b.*'sm_90'", done.stdout), done.stdout[-2000:]


def local_bytes(instructions: list[str]) -> int:
    """The bytes of the loads and stores of local memory in the code, each instruction counted once."""
    sizes = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
    forms = [name for name in instructions if name.startswith(("LDL", "STL"))]
    return sum(next((size for part, size in sizes.items() if part in form), 4) for form in forms)


def instructions_of(file: Path, kinds: str) -> dict[str, list[str]]:
    """The instructions of these kinds in the code of each kernel; the whole code is some hundred megabytes of text."""
    words = rf"Function : |[[:space:]]({kinds})[. ]"
    said = subprocess.check_output(
        f"{tool('cuobjdump')} -sass {file} | LC_ALL=C grep -E '{words}'", shell=True, text=True
    )
    kernels = (part.partition("\n") for part in said.split("Function : ")[1:])
    return {name: re.findall(rf"\b(?:{kinds})\b[.\w]*", sass) for name, _, sass in kernels}


@builds
def test_machine_code_is_of_hopper_and_loads_as_it_is_meant_to(built: Built) -> None:
    """Local memory holds reported spills alone, and only forward kernels load by __ldg what has to be constant.

    All others start while the kernel before still writes, so nothing is constant meanwhile.
    """
    said = output(tool("cuobjdump"), "-lelf", built.file)
    assert {line.split(".")[-2] for line in said.splitlines()} == {"sm_90a"}
    kernels = instructions_of(built.file, "LDG|LDL|STL|HGMMA|UTMALDG")
    assert kernels.keys() == built.spilled_bytes.keys()
    for name, instructions in kernels.items():
        assert local_bytes(instructions) <= built.spilled_bytes[name], name
        assert "forward_kernel" in name or not any(".CONSTANT" in each for each in instructions), name
        if any(kernel in name for kernel in ("forward_kernel", "backward_kernel", "shared_dbias_kernel")):
            assert any(each.startswith("HGMMA.64x") for each in instructions), name
            assert any(each.startswith("UTMALDG") for each in instructions), name
            continue
        counts = Counter(each[: len("LDG.E.128")] for each in instructions)
        if any(kernel in name for kernel in LOAD_WIDE):
            assert counts["LDG.E.128"], name
            continue
        assert counts["LDG.E.128"] == (8 if WIDE in name else 0), name  # all 8 of a thread on their way together
        if NARROW in name:
            assert sum(each.startswith("LDG.E.U8") for each in instructions) == 16, name


GENERATOR = ROOT / "csrc" / "device" / "generate_wgmma.py"


def test_matrix_instructions_are_as_generated(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    copy = shutil.copy(GENERATOR, tmp_path)
    (tmp_path / "wgmma_instructions.h").write_text("// edited by hand\n")
    done = subprocess.run([sys.executable, str(copy), "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and "wgmma_instructions.h is not current" in done.stderr


@builds
def test_symbols_are_of_the_stable_abis_alone(built: Built) -> None:
    nm = tool("nm")
    needed = [line.split()[-1] for line in output(nm, "-D", "--undefined-only", built.file).splitlines()]
    linker = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize"}
    system_names = {name for name in needed if re.search(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_", name)}
    python_names = {name for name in needed if name.startswith(("Py", "_Py"))}
    torch_names = {name for name in needed if re.match(r"(aoti_torch|torch)_\w+$", name)}
    assert set(needed) - system_names - python_names - torch_names - linker == set()
    # All are in the limited API since before 3.10: https://docs.python.org/3/c-api/stable.html
    assert python_names == {"PyModuleDef_Init", "PyUnicode_FromString", "Py_BuildValue"}
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    exported = {line.split()[-1] for line in output(nm, "-D", "--defined-only", library).splitlines()}
    assert torch_names - exported == {"aoti_torch_get_current_cuda_stream"}
    if platform.machine() == "x86_64":  # what an index calls manylinux_2_28
        for library, newest in {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}.items():
            asked = {name: re.search(rf"@{library}_([\d.]+)$", name) for name in system_names}
            newer = [n for n, version in asked.items() if version and tuple(map(int, version[1].split("."))) > newest]
            assert newer == [], "the wheel would need a newer Linux: see STUBS_OF_GLIBC and api/older_linux.cpp"
    own = {line.split()[-1] for line in output(nm, "-D", "--defined-only", built.file).splitlines()}
    assert "PyInit__C" in own
    assert not {name for name in own if "cuda" in name.lower()}, "another library could bind to this CUDA runtime"


@builds
def test_memory_that_tells_where_to_jump_is_read_only(built: Built) -> None:
    """Tables of addresses are resolved at the load and sealed, stacks hold no code, and overwritten stacks abort."""
    readelf = tool("readelf")
    segments, dynamic = output(readelf, "-lW", built.file), output(readelf, "-dW", built.file)
    assert "GNU_RELRO" in segments and re.search(r"FLAGS_1.*NOW", dynamic)
    (stack,) = re.findall(r"GNU_STACK.*", segments)
    assert "RWE" not in stack and " E " not in stack
    assert "__stack_chk_fail" in output(tool("nm"), "-D", "--undefined-only", built.file)


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
q = torch.ones(1, 4, 1, 64, dtype=torch.bfloat16)
lse = torch.empty(1, 1, 4)
calls = {{
    "cuda_pack_mask": (torch.ones(1, 1, 4, 4, dtype=torch.bool), 0, 0, False),
    "cuda_forward_kernel": (
        *(q, q, q, [], None, None, torch.empty_like(q), lse, -4, 4, 0.125, 0.0, 1, None, 0.0, False, 0, 0, 0, None, []),
    ),
    "cuda_backward_kernel": (
        *(q, None, q, q, q, [], None, None, q, lse, None, q.clone(), None, None, lse, None),
        *(-4, 4, 0.125, 0.0, False, 0, None, 0.0, 0, 0),
    ),
}}
for name, arguments in calls.items():
    try:
        getattr(torch.ops.flash_dmattn, name)(*arguments)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""


@builds
def test_operators_are_registered_and_refuse_cpu_tensors(built: Built, tmp_path: Path) -> None:
    done = call(LOAD.format(stub=str(built.folder / "libtorch_cuda.so"), file=str(built.file)), tmp_path)
    assert done.returncode == 0, done.stdout
    info, *refusals = done.stdout.splitlines()
    assert json.loads(info) == extension.build_info(built.file)
    operands = ("cuda_pack_mask: mask", "cuda_forward_kernel: q", "cuda_backward_kernel: q")
    for operand, refusal in zip(operands, refusals, strict=True):
        assert f"{operand} is not on a CUDA device; the kernel is written for sm_90a" in refusal


@builds
def test_record_of_the_build(built: Built, tmp_path: Path) -> None:
    """In the file, in `info`, and why it does not fit a torch without CUDA."""
    record = extension.build_info(built.file)
    assert record["version"] == flash_dmattn.__version__
    assert record["torch_target"] == "2.10" and record["arches"] == ["sm_90a"]
    sequence_instances = [f"{name}_sequences_d64_bf16" for name in ("forward", "backward", "shared_dbias")]
    assert record["instances"] == [INSTANCE, BACKWARD_INSTANCE, DBIAS_INSTANCE, *sequence_instances]
    assert any("compute_90a" in flag for flag in record["flags"])
    assert record["commit"] == "unknown"  # the copy that was built is no repository
    assert re.fullmatch(r"\d+\.\d+", record["nvcc"])
    code = """
from flash_dmattn.__main__ import main
from flash_dmattn.backends.cuda import backend
print(backend.probe().reason)
main(["info", "--json"])
main(["info"])
"""
    done = call(code, tmp_path, PYTHONPATH=str(built.site))
    reason, _, rest = done.stdout.partition("\n")
    if torch.version.cuda is None:
        why = f"it needs a torch that is built with CUDA, and {torch.__version__} is not"
        assert reason == f"the CUDA extension {built.file} does not fit: {why}"
    else:
        assert done.returncode == 0 and "does not fit" not in done.stdout, done.stdout
    report, end = json.JSONDecoder().raw_decode(rest)
    assert report["extension"] == {"path": str(built.file), **record}
    row = rf"^extension +{re.escape(record['version'])} for sm_90a and torch >= 2\.10, built by nvcc \S+ from commit "
    assert re.search(rf"{row}unknown, " + re.escape(str(built.file)), rest[end:], re.MULTILINE), rest[end:]


INFO = {
    "version": flash_dmattn.__version__,
    "torch_target": "2.10",
    "torch_built_with": "2.13.0",
    "python": ">=3.10",
    "arches": ["sm_90a"],
    "instances": ["forward_d128_bf16"],
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
    "older record": (FITS.replace(b"instances", b"parts"), "the record of its build in .* does not name instances$"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch_is_a_sentence(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, sentence = MISMATCHES[case]
    file = tmp_path / "_C.abi3.so"
    file.write_bytes(content)
    monkeypatch.setattr(extension, "find", lambda: file)
    monkeypatch.setattr(cuda.probe, "found", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    availability = cuda.probe()
    assert not availability.usable and str(file) in availability.reason
    assert re.search(sentence, availability.reason), availability.reason
    assert isinstance(availability.exception, extension.ExtensionMismatchError)
    assert availability.hint == "rebuild it, or install what it needs: docs/building.md"


RECORDS = (None, "nvcc was not found\n\n", "a command failed\ncommon.h(34): error: é\nstopped\n")


@pytest.mark.parametrize("record", RECORDS)
def test_no_extension_is_explained(record: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a build wrote; every line of it stands in the error of a call, and in `info`."""
    file = tmp_path / "_C.not_built.txt"
    if record is not None:
        file.write_text(record, encoding="utf-8")
    monkeypatch.setattr(extension, "_NOT_BUILT", file)
    monkeypatch.setattr(extension, "find", lambda: None)
    monkeypatch.setattr(info, "find", lambda: None)
    monkeypatch.setattr(cuda.probe, "found", None)
    reason, *output = (record or "").splitlines() or [""]
    output = [line for line in output if line]
    sentence = "the CUDA extension flash_dmattn._C is not in this installation"
    availability = cuda.probe()
    assert availability.reason == sentence + (f"; its build said: {reason}" if reason else "")
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(flash_dmattn.BackendUnavailableError) as caught:
        flash_dmattn.attention(q, q, q, backend="cuda")
    raised, report = str(caught.value).splitlines(), info.render(info.collect()).splitlines()
    assert any(line.startswith(f"  - {availability.reason} (build it in a checkout: ") for line in raised), raised
    start = next(at for at, line in enumerate(report) if line.startswith("extension "))
    assert report[start].endswith(f"none: not built: {reason}" if reason else "none: not built")
    rows = [line.strip() for line in report[start + 1 : start + 2 + len(output)]]
    assert rows == [*(f"| {line}" for line in output), f"build it in a checkout: {extension.BUILD_COMMAND}"]
    assert [line for line in raised if line.startswith("    | ")] == [f"    | {line}" for line in output]


class Driver:
    """The library of the driver, on a machine with these GPUs; None is one that does not start."""

    def __init__(self, capabilities: list[tuple[int, int]] | None) -> None:
        self.capabilities = capabilities

    def cuInit(self, flags: int) -> int:
        return 999 if self.capabilities is None else 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.capabilities or ())
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> int:
        assert self.capabilities is not None
        number._obj.value = self.capabilities[device.value][attribute - 75]
        return 0


@pytest.mark.parametrize("capabilities", [None, [], [(9, 0)], [(8, 9), (10, 0)]])
def test_the_driver_names_gpus_where_there_is_no_nvidia_smi(
    capabilities: list[tuple[int, int]] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_cuda.ctypes, "CDLL", lambda name: Driver(capabilities))
    assert build_cuda.compute_capabilities() == [f"{major}.{minor}" for major, minor in capabilities or ()]


@pytest.mark.parametrize("release", ["2.10.0", "2.10.0a0+git123", "2.11.0+cu130", "3.0.0"])
def test_every_torch_from_the_target_fits(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert extension.mismatch(INFO) == ""


@pytest.mark.parametrize("driver", (13000, 13010, 12090, 0))
def test_probe_of_an_extension_that_loads(driver: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "_C.abi3.so"
    file.write_bytes(FITS)
    module = ModuleType(extension.NAME)
    setattr(module, "cuda_versions", lambda: (driver, 13000))  # noqa: B010 (a module has no such attribute for mypy)
    monkeypatch.setattr(extension, "find", lambda: file)
    monkeypatch.setattr(extension, "load", lambda: module)
    monkeypatch.setattr(cuda.probe, "found", None)
    availability = cuda.probe()
    assert availability.usable == (driver >= 13000)
    if not availability.usable:
        version = f"{driver // 1000}.{driver % 1000 // 10}"
        assert availability.reason == f"the driver supports CUDA {version}; the extension holds the runtime of 13.0"


def test_installed_instances_are_read_without_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "_C.abi3.so"
    instances_of = cuda_rules.installed_instances.__wrapped__  # what it remembers is of the installation
    built_in = frozenset(INFO["instances"])
    for content, instances in ((FITS, built_in), (FITS[len(b"\x7fELF ") :], built_in), (b"no record", None)):
        file.write_bytes(content)
        monkeypatch.setattr(extension, "find", lambda: file)
        assert instances_of() == instances
    monkeypatch.setattr(extension, "find", lambda: None)
    assert instances_of() is None


def test_backend_knows_the_instances_of_the_build() -> None:
    assert cuda_rules.INSTANCES == build_cuda.HEAD_DIMS
    assert list(cuda_rules._DTYPES.values()) == list(build_cuda.DTYPES)


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
    assert (tidy.symbol, sloppy.symbol) == ("_Z4tidyv", "_Z6sloppyv")
    assert not tidy.is_serialized and not sloppy.is_serialized
    warning = """\
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the function '_Z4tidyv'
"""
    tidy, sloppy = build_cuda.parse_ptxas(warning + log)
    assert str(tidy).endswith("no spills, matrix products serialized") and not sloppy.is_serialized
