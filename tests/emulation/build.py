"""The build of the emulated extension: csrc by a C++ compiler, with a GPU of `machine.cpp` under it.

csrc is copied. `device/` replaces the two files with assembly, `cub/` replaces CUB's sort, and declarations of shared
memory of a size set at launch, which only nvcc knows, are rewritten.

    python tests/emulation/build.py flash_dmattn_emulated.so --head-dims 32,64,96,128,192 --dtypes bf16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
sys.path.insert(0, str(CSRC))

import build_cuda  # noqa: E402

REPLACED = ("device/ptx.h", "device/wgmma_instructions.h")
# A header of nvcc's that holds kernels: here it is a function of the host.
ADDED = ("cub/device/device_radix_sort.cuh",)
NOT_BUILT = ("api/module.cpp",)  # the Python module, which tells of drivers
REWRITES = (
    (re.compile(r"extern __shared__ .*?(\w+) (\w+)\[\];"), r"\1* const \2 = ::emulation::shared_memory();"),
    # Operators ask for the device of their tensors.
    (re.compile(r"\b\w+\.is_cuda\(\)"), "true"),
    # Scratch memory starts as what no kernel writes.
    (re.compile(r"return (torch::stable::Tensor\(made\));"), r"return ::emulation::unwritten(\1);"),
    # How many multiprocessors there are, and which driver, may change and is asked for again.
    (re.compile(r"static ((?:std::array<.*>|const bool) known)"), r"\1"),
)
# -O1: twice as fast to compile as -O2, and kernels spend their time in the machine. Its loops are vectorised.
FLAGS = "-std=c++20 -O1 -fPIC -fvisibility=hidden -w -Wno-psabi"
MACHINE_FLAGS = "-O3 -march=native"


def reasons_not_to_build() -> list[str]:
    """Every reason why it cannot be built here."""
    reasons = build_cuda.reasons_not_to_build()
    if platform.machine() != "x86_64":
        reasons.append(f"the processor is {platform.machine()}; fibers are switched by code for x86-64")
    return reasons


def _rewritten(text: str) -> str:
    for form, by in REWRITES:
        text = form.sub(by, text)
    return text


def build(output: Path, folder: Path, head_dims: str, dtypes: str) -> None:
    """Build the units of these head dims and dtypes, as FLASH_DMATTN_HEAD_DIMS and FLASH_DMATTN_DTYPES name them.

    Args:
        output: the file to write.
        folder: where everything else is written; kept, it saves the next build what has not changed.
        head_dims: head dims of q and k, separated by commas.
        dtypes: of "fp16" and "bf16", separated by commas.

    Raises:
        SystemExit: it cannot be built here, or a command failed, whose output is printed by then.
    """
    reasons = reasons_not_to_build()
    if reasons:
        raise SystemExit("; ".join(reasons))
    os.environ.update(FLASH_DMATTN_HEAD_DIMS=head_dims, FLASH_DMATTN_DTYPES=dtypes)
    folder, output = folder.resolve(), output.resolve()
    source = folder / "csrc"
    for path in [*CSRC.rglob("*.h"), *CSRC.rglob("*.cu"), *CSRC.rglob("*.cpp")]:
        place = path.relative_to(CSRC)
        if str(place) not in REPLACED:
            build_cuda.write_if_changed(
                source / place.with_suffix(".cpp" if path.suffix == ".cu" else path.suffix),
                _rewritten(path.read_text()),
            )
    for place in (*REPLACED, *ADDED):
        build_cuda.write_if_changed(source / place, (HERE / place).read_text())
    for path in [*HERE.glob("*.h"), *HERE.glob("*.cpp")]:
        build_cuda.write_if_changed(source / path.name, path.read_text())
    build_cuda.write_if_changed(source / "build_instances.h", build_cuda.instances_header())

    units = build_cuda.attention_units()
    units += [build_cuda.Unit(name, name) for name in build_cuda.SOURCES if name not in NOT_BUILT]
    at = build_cuda.find_torch()
    assert at is not None
    torch = at[0]
    others = (torch / "include", sysconfig.get_path("include"), _cuda_include(build_cuda.find_nvcc()))
    includes = " ".join([f"-I{source}", *(f"-isystem {path}" for path in others)])
    first = source / "cuda_functions.h"
    lines = [
        f"flags = {FLAGS} {build_cuda.TORCH_DEFINE} {includes}",
        # Every file includes it, and reading it takes a second: g++ takes the precompiled one where flags agree.
        "rule header",
        "  command = g++ $flags -x c++-header -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $out",
        f"build {first}.gch: header {first}",
        "rule cpp",
        "  command = g++ $flags -include cuda_functions.h $more -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $out",
        "rule link",
        f"  command = g++ -shared -Wl,-Bsymbolic $in -o $out -L{torch / 'lib'} -ltorch_cpu",
        "  description = $out",
    ]
    objects = []
    for unit in units:
        path = (source / unit.source).with_suffix(".cpp")
        lines += [f"build {unit.object}: cpp {path} | {first}.gch", f"  more = {unit.defines}"]
        objects.append(unit.object)
    for name in ("machine", "runtime"):
        lines += [f"build {name}.o: cpp {source / name}.cpp | {first}.gch", f"  more = {MACHINE_FLAGS}"]
        objects.append(f"{name}.o")
    lines += [f"build {output}: link {' '.join(objects)}"]
    lines += ["rule program", "  command = g++ $in -o $out", "  description = $out"]
    lines += [
        f"build mistakes.o: cpp {source / 'mistakes.cpp'} | {first}.gch",
        "build mistakes: program mistakes.o machine.o",
        "",
    ]
    build_cuda.write_if_changed(folder / "build.ninja", "\n".join(lines))
    build_cuda.write_if_changed(output.with_suffix(".json"), json.dumps([unit.name for unit in units]))
    ninja = build_cuda.find_ninja()
    if subprocess.run([*ninja, "-C", str(folder), "-j", str(build_cuda.jobs())]).returncode != 0:
        raise SystemExit("a command of the build failed, and what it said is above")


def _cuda_include(nvcc: str) -> Path:
    said = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"TOP=(.*)", said)
    for folder in [Path(top[1].strip()) / "include", *Path(top[1].strip()).glob("targets/*/include")] if top else []:
        if (folder / "cuda_runtime_api.h").is_file():
            return folder.resolve()
    raise SystemExit(f"the headers of CUDA were not found beside {nvcc}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("build/emulation"))
    parser.add_argument("--head-dims", default="32,64,96,128,192")
    parser.add_argument("--dtypes", default="bf16")
    options = parser.parse_args()
    build(options.output, options.folder, options.head_dims, options.dtypes)
