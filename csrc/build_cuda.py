"""The build of the CUDA extension: nvcc and ninja, without torch's CUDAExtension, which refuses a CPU torch.

`setup.py` calls it; `python csrc/build_cuda.py` says whether it would. A build against the CPU wheel of torch equals a
build against a CUDA wheel: only headers of torch's stable ABI are included, and a stub stands in for
libtorch_cuda.so at link time.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CSRC = Path(__file__).resolve().parent
SOURCES = (
    "api/backward.cpp",
    "api/backward_arguments.cpp",
    "api/backward_dbias.cpp",
    "api/backward_scratch.cpp",
    "api/forward.cpp",
    "api/intervals.cpp",
    "api/mask.cpp",
    "api/module.cpp",
    "api/older_linux.cpp",
    "api/tensor_map.cpp",
    "sm90/backward/clear_dbias.cu",
    "sm90/backward/clusters.cu",
    "sm90/backward/order.cu",
    "sm90/backward/rows.cu",
    "sm90/mask/intervals.cu",
    "sm90/mask/key_mask.cu",
    "sm90/mask/list.cu",
    "sm90/mask/pack.cu",
    "sm90/mask/sort.cu",
    "sm90/mask/topk.cu",
    "sm90/sequences/few_keys.cu",
    "sm90/sequences/prepare.cu",
    "sm90/shared_dbias/add_chunks.cu",
    "sm90/shared_dbias/add_diagonals.cu",
)
FORWARD = "sm90/forward/instantiate.cu"
BACKWARD = "sm90/backward/instantiate.cu"
WIDE_BACKWARD = "sm90/wide_backward/instantiate.cu"
SHARED_DBIAS = "sm90/shared_dbias/instantiate.cu"
FORWARD_SEQUENCES = "sm90/forward/instantiate_sequences.cu"
BACKWARD_SEQUENCES = "sm90/backward/instantiate_sequences.cu"
SHARED_DBIAS_SEQUENCES = "sm90/shared_dbias/instantiate_sequences.cu"
STUB = "api/stub_libtorch_cuda.cpp"

# glibc 2.34 moved these to libc.so.6, under new versions: a file that is linked with it needs 2.34. Stubs at link time
# name the libraries and versions from before, which every glibc has. CUDA's runtime calls the functions.
STUBS_OF_GLIBC = {
    "libdl.so.2": "dlclose dlerror dlmopen dlopen dlsym dlvsym",
    "librt.so.1": "shm_open shm_unlink",
    "libpthread.so.0": """
        pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join pthread_key_create
        pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
        pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init
        pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
        pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock pthread_rwlockattr_destroy
        pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific pthread_spin_destroy
        pthread_spin_init pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post
        sem_timedwait sem_trywait sem_wait
    """,
}
VERSIONS_OF_GLIBC = "GLIBC_2.2.5 { *; };\nGLIBC_2.3.4 { dlmopen; };\n"  # of x86-64

ARCH = "sm_90a"
CAPABILITY = "9.0"  # of the GPUs that run code for ARCH
TORCH_TARGET = (2, 10)  # the first with lists of tensors in the stable ABI
OLDEST_NVCC = (12, 5)  # the first whose runtime finds a function of the driver by its version
GIB_PER_JOB = 1  # every unit takes 0.2 GiB, by nvcc 13.0

# A unit is compiled for each of these (head_dim, head_dim_v) in each dtype. A call takes the first that holds its own
# head dims, so a pair comes before every pair that is larger.
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
WIDE_BACKWARD_HEAD_DIMS = ((192, 128), (192, 192), (256, 256))  # whose backward pass has kernels of its own
SEQUENCES_HEAD_DIMS = ((64, 64), (128, 128))  # of both passes of calls with sequences
DTYPES = {"fp16": ("__half", "Half"), "bf16": ("__nv_bfloat16", "BFloat16")}  # the name in CUDA, and in torch

# Spilled bytes are the bytes of the stores and the loads in a kernel's code, each counted once. At head dim 256 a
# thread holds 128 sums of out beside its scores in 232 registers, and nvcc 13.0 spills up to 268 bytes. The bound is 68
# registers stored and loaded once: a kernel that lost those sums would spill 1024 bytes. In the backward kernels it is
# the warps that copy and hand out work, up to 528 bytes: with 24 registers they leave 224 to 240 to each consumer. With
# a bias a second main loop, for heads with a great lse, spills as much and more.
SPILLED_BYTES_ALLOWED = 1536

FORCE = "FLASH_DMATTN_BUILD_CUDA=force"
INFO_PREFIX = "FLASH_DMATTN_BUILD_INFO "

TORCH_DEFINE = f"-DTORCH_TARGET_VERSION=0x{TORCH_TARGET[0]:02x}{TORCH_TARGET[1]:02x}000000000000"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-cudart static",
    "-Xcompiler -fPIC,-fvisibility=hidden,-fstack-protector-strong",
    TORCH_DEFINE,
)
# Not compute_90: ptxas refuses the matrix instructions for that, because they are inline assembly behind no condition.
GENCODE = f"-gencode arch=compute_{ARCH[3:]},code={ARCH}"
DEVICE_FLAGS = (GENCODE, "-Xptxas -v")
# Kernels are alike, so that compressed they take an eighth. An older runtime runs on drivers that cannot unpack them.
COMPRESS_FLAG = "--compress-mode=size"
COMPRESSING_NVCC = (13, 0)
# For compute-sanitizer --tool racecheck alone: see barrier_arrive_of_warp in device/ptx.h.
RACECHECK_FLAG = "-DFLASH_DMATTN_RACECHECK"

# `rule cuda` keeps what ptxas says in a file, for builds that find the unit compiled already.
NINJA = """\
nvcc = {nvcc}
flags = {flags}

rule cpp
  command = $nvcc $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $unit

rule cuda
  command = $nvcc $flags {device_flags} $defines -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || $
    {{ cat $out.log; exit 1; }}
  depfile = $out.d
  deps = gcc
  description = $unit

rule stub
  command = $nvcc -shared -cudart none -Xcompiler -fPIC -Xlinker -soname=$soname$script $in -o $out
  description = $unit

rule link
  command = $nvcc -shared -cudart static {gencode} $objects -o $out -L. -L{torch_lib} -Xlinker $
    --no-as-needed,--exclude-libs=ALL,-z,relro,-z,now,-z,noexecstack $stubs -ltorch_cuda -ltorch_cpu
  description = {output_name}
"""


# How much of a compiler's output is kept: an error in a header of torch takes five lines, and command lines are long.
KEPT_LINES = 20
KEPT_COLUMNS = 240

# In the folder of the build: every line of ninja and of the compilers, then the registers and spills of each kernel.
LOG = "build.log"
SECONDS_PER_LINE = 60  # of progress


class BuildError(Exception):
    """Why the extension cannot be built, in a sentence; `output` is the last that a compiler said, where one ran."""

    def __init__(self, sentence: str, output: str = "") -> None:
        super().__init__(sentence)
        self.output = output


class Unit(NamedTuple):
    """One compilation: its name, its source below csrc, what is defined for it, and its row in build_instances.h."""

    name: str
    source: str
    defines: str = ""
    row: str = ""

    @property
    def object(self) -> str:
        """The file it is compiled to."""
        return self.name.replace("/", "_") + ".o"


class Kernel(NamedTuple):
    """The words of ptxas about one kernel; `symbol` is its name in the file, `name` that in the source."""

    symbol: str
    name: str
    registers: int
    spilled_bytes: int
    is_serialized: bool  # each matrix product waits for the one before, for want of registers

    def __str__(self) -> str:
        spills = f"{self.spilled_bytes} bytes spilled" if self.spilled_bytes else "no spills"
        serialized = ", matrix products serialized" if self.is_serialized else ""
        return f"{self.name}: {self.registers} registers, {spills}{serialized}"


def say(text: str) -> None:
    """Print a line of the build at once."""
    print(f"flash_dmattn: {text}", flush=True)


def find_nvcc() -> str | None:
    """Return the path of the CUDA compiler, or None."""
    homes = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    folders = [os.path.join(home, "bin") for home in homes if home] + [os.environ.get("PATH", os.defpath)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def find_ninja() -> list[str] | None:
    """Return the command of ninja, or None: the wheel of this interpreter, else the program on PATH."""
    if importlib.util.find_spec("ninja") is not None:
        return [sys.executable, "-m", "ninja"]
    program = shutil.which("ninja")
    return None if program is None else [program]


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """Return the release of the compiler, or None where it does not say."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60).stdout
    except OSError:
        return None
    release = re.search(r"release (\d+)\.(\d+)", said)
    return None if release is None else (int(release[1]), int(release[2]))


def find_torch() -> tuple[Path, str] | None:
    """Return the folder and the version of the installed torch, without importing it, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent, importlib.metadata.version("torch")


def compute_capabilities() -> list[str]:
    """Return the compute capability of each GPU of this machine, as "9.0", without importing torch.

    nvidia-smi says it. Where that does not run, as in a container without it, the library of the driver does.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return _capabilities_by_driver()
    return re.findall(r"^\d+\.\d+$", done.stdout, re.MULTILINE) if done.returncode == 0 else _capabilities_by_driver()


def _capabilities_by_driver() -> list[str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, number = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    capabilities = []
    for ordinal in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        numbers = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            numbers.append(number.value)
        capabilities.append("{}.{}".format(*numbers))
    return capabilities


def reason_not_to_use() -> str:
    """Return why this machine could not run the extension; empty where it has a GPU for it."""
    capabilities = compute_capabilities()
    if CAPABILITY in capabilities:
        return ""
    others = ", ".join(sorted(set(capabilities)))
    # In words that are still right where the package is used on another machine.
    seen = f"had GPUs of compute capability {others}" if capabilities else "showed no NVIDIA GPU"
    return f"the machine of the build {seen}, and only a Hopper GPU (compute capability {CAPABILITY}) can run it"


def decide() -> tuple[str, str]:
    """Return what FLASH_DMATTN_BUILD_CUDA says, and why the extension is not to be built; empty where it is.

    `auto`, as when unset, builds where a GPU can run it: nobody waits for minutes for what cannot be used.

    Raises:
        BuildError: the variable has another value than these, or `force` cannot be done.
    """
    wish = os.environ.get("FLASH_DMATTN_BUILD_CUDA", "auto")
    if wish not in ("auto", "force", "skip"):
        raise BuildError(f"FLASH_DMATTN_BUILD_CUDA is {wish!r}; it must be 'auto' (as when unset), 'force' or 'skip'")
    if wish == "skip":
        return wish, "FLASH_DMATTN_BUILD_CUDA was 'skip'"
    useless = reason_not_to_use() if wish == "auto" else ""
    if useless:
        return wish, useless
    missing = "; ".join(reasons_not_to_build())
    if missing and wish == "force":
        raise BuildError(
            f"{FORCE}, but the CUDA extension cannot be built: {missing}. Use 'auto' or 'skip' to install without it"
        )
    return wish, missing


def reasons_not_to_build() -> list[str]:
    """Return every reason why the extension cannot be built here."""
    reasons = []
    if sys.platform != "linux":
        reasons.append(f"the platform is {sys.platform}; the build is written for Linux")
    nvcc = find_nvcc()
    if nvcc is None:
        reasons.append("nvcc was not found in CUDA_HOME, in CUDA_PATH or on PATH")
    else:
        version = nvcc_version(nvcc)
        if version is None:
            reasons.append(f"{nvcc} --version names no release")
        elif version < OLDEST_NVCC:
            reasons.append(f"{nvcc} is release {_dotted(version)}; {ARCH} needs {_dotted(OLDEST_NVCC)}")
    if find_ninja() is None:
        reasons.append("ninja was not found (pip install ninja)")
    torch = find_torch()
    if torch is None:
        reasons.append("torch is not installed beside the build (install it, then use --no-build-isolation)")
    elif _numbers(torch[1]) < TORCH_TARGET:
        reasons.append(f"torch is {torch[1]}; its stable ABI is used as of {_dotted(TORCH_TARGET)}")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        reasons.append(f"Python.h is not in {sysconfig.get_path('include')}")
    return reasons


def jobs() -> int:
    """Return how many units to compile at once: MAX_JOBS, or what cores and memory allow."""
    wish = os.environ.get("MAX_JOBS")
    if wish is not None:
        if not wish.isdecimal() or int(wish) == 0:
            raise BuildError(f"MAX_JOBS is {wish!r}; it must be a positive number")
        return int(wish)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (GIB_PER_JOB << 30)))


def forward_instances() -> list[Unit]:
    """Return the units of the forward pass.

    FLASH_DMATTN_HEAD_DIMS keeps the units whose head dim of q and k it names; FLASH_DMATTN_DTYPES does so for dtypes.
    """
    return _instances("forward", HEAD_DIMS, lambda pair: FORWARD)


def backward_instances() -> list[Unit]:
    """Return the units of the backward pass, chosen by the same variables."""
    source = lambda pair: WIDE_BACKWARD if pair in WIDE_BACKWARD_HEAD_DIMS else BACKWARD
    return _instances("backward", HEAD_DIMS, source)


def shared_dbias_instances() -> list[Unit]:
    """Return the units of a shared bias' gradient: one for each of the backward pass, which calls it."""
    return _instances("shared_dbias", HEAD_DIMS, lambda pair: SHARED_DBIAS)


def sequences_instances() -> list[list[Unit]]:
    """Return the units of calls with sequences: of the forward pass, the backward pass, a shared bias' gradient."""
    sources = {
        "forward_sequences": FORWARD_SEQUENCES,
        "backward_sequences": BACKWARD_SEQUENCES,
        "shared_dbias_sequences": SHARED_DBIAS_SEQUENCES,
    }
    return [_instances(name, SEQUENCES_HEAD_DIMS, lambda pair, x=x: x) for name, x in sources.items()]


def _instances(
    name: str, pairs: tuple[tuple[int, int], ...], source_of: Callable[[tuple[int, int]], str]
) -> list[Unit]:
    head_dims = _chosen("FLASH_DMATTN_HEAD_DIMS", list(dict.fromkeys(str(d) for d, _ in HEAD_DIMS)))
    dtypes = _chosen("FLASH_DMATTN_DTYPES", list(DTYPES))
    units = []
    for d, dv in pairs:
        for dtype in dtypes if str(d) in head_dims else []:
            element, scalar = DTYPES[dtype]
            dims = f"d{d}" if d == dv else f"d{d}_{dv}"
            defines = f"-DFLASH_DMATTN_ELEMENT={element} -DFLASH_DMATTN_HEAD_DIM={d} -DFLASH_DMATTN_HEAD_DIM_V={dv}"
            units.append(
                Unit(f"{name}_{dims}_{dtype}", source_of((d, dv)), defines, f"X({element}, {scalar}, {d}, {dv})")
            )
    return units


def _for_racecheck() -> bool:
    wish = os.environ.get("FLASH_DMATTN_RACECHECK", "0")
    if wish not in ("0", "1"):
        raise BuildError(f"FLASH_DMATTN_RACECHECK is {wish!r}; it must be '0' (as when unset) or '1'")
    return wish == "1"


def _chosen(variable: str, known: list[str]) -> list[str]:
    """Return the names in `known` that the environment variable lists, or all where it is not set."""
    wish = os.environ.get(variable)
    if wish is None:
        return known
    named = {name.strip() for name in wish.split(",")}
    if not named <= set(known):
        raise BuildError(f"{variable} is {wish!r}; it must name some of {','.join(known)}, separated by commas")
    return [name for name in known if name in named]


def attention_units() -> list[Unit]:
    """Return all units that are compiled for head dims and dtypes."""
    dense = [*forward_instances(), *backward_instances(), *shared_dbias_instances()]
    return [*dense, *(unit for units in sequences_instances() for unit in units)]


def instances_header() -> str:
    """Return the lists of units for the code that chooses: X(element, torch's name of it, head_dim, head_dim_v)."""
    lists = {
        "FLASH_DMATTN_INSTANCES": forward_instances(),
        "FLASH_DMATTN_SEQUENCES_INSTANCES": sequences_instances()[0],
    }
    return "".join(
        " \\\n  ".join([f"#define {name}(X)", *(unit.row for unit in units)]) + "\n" for name, units in lists.items()
    )


def build(output: Path, folder: Path, version: str) -> list[Kernel]:
    """Build the extension.

    Args:
        output: the file to write.
        folder: where everything else is written; kept, it saves the next build what has not changed.
        version: of the package, to be embedded.

    Returns:
        The registers and spills of each kernel.

    Raises:
        BuildError: it cannot be built here, or a command failed, whose output is printed by then.
    """
    reasons = reasons_not_to_build()
    if reasons:
        raise BuildError("; ".join(reasons))
    nvcc, ninja, torch_found = find_nvcc(), find_ninja(), find_torch()
    assert nvcc is not None and ninja is not None and torch_found is not None
    torch, torch_version = torch_found
    folder.mkdir(parents=True, exist_ok=True)
    folder, output = folder.resolve(), output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)

    release = nvcc_version(nvcc)
    assert release is not None
    attention = attention_units()
    device_flags = list(DEVICE_FLAGS)
    if release >= COMPRESSING_NVCC:
        device_flags.append(COMPRESS_FLAG)
    if _for_racecheck():
        device_flags.append(RACECHECK_FLAG)
    units = [*(Unit(source, source) for source in SOURCES), *attention]
    info = {
        "version": version,
        "torch_target": _dotted(TORCH_TARGET),
        "torch_built_with": torch_version,
        "python": ">=3.10",
        "arches": [ARCH],
        "instances": [unit.name for unit in attention],
        "nvcc": _dotted(release),
        "flags": [*FLAGS, *device_flags],
        "commit": _commit(),
    }
    write_if_changed(
        folder / "build_info.h",
        f"#define FLASH_DMATTN_BUILD_INFO_PREFIX {json.dumps(INFO_PREFIX)}\n"
        f"#define FLASH_DMATTN_BUILD_INFO {json.dumps(json.dumps(info))}\n",
    )
    write_if_changed(folder / "build_instances.h", instances_header())
    # ninja runs in the folder, and reads its commands there: a copy of the tree and the folder has nothing to compile.
    sources = Path(os.path.relpath(CSRC, folder))
    includes = (".", torch / "include", sysconfig.get_path("include"))
    flags = " ".join([*FLAGS, *(f"-isystem {shlex.quote(str(path))}" for path in includes)])
    rules = NINJA.format(
        nvcc=shlex.quote(nvcc), flags=flags, gencode=GENCODE, device_flags=" ".join(device_flags),
        torch_lib=shlex.quote(str(torch / "lib")), output_name=output.name,
    )  # fmt: skip
    # Kernels wait for the host code, which takes seconds: a torch whose headers do not fit then costs no more.
    host_objects = [unit.object for unit in units if unit.source.endswith(".cpp")]
    edges = [f"build host: phony {' '.join(host_objects)}"]
    for unit in units:
        source = _escaped(sources / unit.source)
        step = f"cuda {source} || host" if unit.source.endswith(".cu") else f"cpp {source}"
        edges.append(f"build {unit.object}: {step}\n  unit = {unit.name}\n  defines = {unit.defines}")
    objects = " ".join(unit.object for unit in units)
    edges.append(
        f"build libtorch_cuda.so: stub {_escaped(sources / STUB)}\n  unit = {STUB}\n  soname = libtorch_cuda.so"
    )
    stubs = _stubs_of_glibc(folder)
    edges += (
        f"build lib{stub}.so: stub {stub}.cpp | glibc.map\n  unit = {stub}\n  soname = {library}\n"
        "  script = ,--version-script=glibc.map"
        for stub, library in stubs.items()
    )
    linked = " ".join(["libtorch_cuda.so", *(f"lib{stub}.so" for stub in stubs)])
    edges.append(
        f"build {_escaped(output)}: link {objects} | {linked}\n  objects = {objects}\n"
        f"  stubs = {' '.join(f'-l{stub}' for stub in stubs)}"
    )
    write_if_changed(folder / "build.ninja", "\n".join([rules, *edges, ""]))

    log = folder / LOG
    at_once = jobs()
    say(f"compiling the CUDA extension, {at_once} files at once; every line of the build goes to {log}")
    started = time.monotonic()
    is_done, output_of_ninja = _run_ninja([*ninja, "-C", str(folder), "-j", str(at_once)], log)
    if not is_done:
        print(output_of_ninja, flush=True)
        tools = f"nvcc {info['nvcc']}, torch {torch_version}"
        raise BuildError(f"a command of the build failed ({tools})", output_of_ninja)
    unit_logs = [folder / f"{unit.object}.log" for unit in units if unit.source.endswith(".cu")]
    kernels = [kernel for path in unit_logs for kernel in parse_ptxas(path.read_text())]
    with log.open("a") as file:
        file.writelines(f"{kernel}\n" for kernel in kernels)
    say(f"the CUDA extension has {len(kernels)} kernels and took {_duration(time.monotonic() - started)}")
    return kernels


def _stubs_of_glibc(folder: Path) -> dict[str, str]:
    """Write the sources of the stubs, and return the library that each of them stands for."""
    if platform.machine() != "x86_64":
        return {}
    write_if_changed(folder / "glibc.map", VERSIONS_OF_GLIBC)
    stubs = {f"stub_{library.split('.')[0]}": library for library in STUBS_OF_GLIBC}
    for stub, library in stubs.items():
        names = STUBS_OF_GLIBC[library].split()
        write_if_changed(folder / f"{stub}.cpp", "".join(f'extern "C" void {name}() {{}}\n' for name in names))
    return stubs


def _run_ninja(command: list[str], log: Path) -> tuple[bool, str]:
    """Run it, and return whether it ended well, and its last lines, lines of progress left out.

    Its output goes to the log. In a long build a line each minute tells how many files are done.
    """
    last: deque[str] = deque(maxlen=KEPT_LINES)
    started = said = time.monotonic()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"LC_ALL": "C"},  # compilers then speak English, in characters that every terminal can print
        encoding="ascii",
        errors="backslashreplace",
    ) as process, log.open("w") as file:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            progress = re.match(r"\[(\d+)/(\d+)\] ", line)
            if progress is None and not line.startswith("ninja: Entering "):
                last.append(line.rstrip()[:KEPT_COLUMNS])
            if progress is not None and time.monotonic() - said > SECONDS_PER_LINE:
                said = time.monotonic()
                say(f"{progress[1]} of {progress[2]} files after {_duration(said - started)}")
    return process.returncode == 0, "\n".join(last)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def parse_ptxas(log: str) -> list[Kernel]:
    """Return what `-Xptxas -v` says of each kernel."""
    rows = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    serialized = re.findall(r"wgmma\.mma_async instructions are serialized .*?function '(\w+)'", log)
    return [
        Kernel(name, _demangled(name), int(used), int(stores) + int(loads), name in serialized)
        for name, stores, loads, used in rows
    ]


def _demangled(name: str) -> str:
    program = shutil.which("c++filt")
    if program is None:
        return name
    said = subprocess.run([program, name], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"\(anonymous namespace\)::|flash_dmattn::|^void |\([^()]*\)$", "", said)


def write_if_changed(path: Path, text: str) -> None:
    """Write a file, and its folders, unless that is what it holds: what depends on it is then not built again."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _escaped(path: Path | str) -> str:
    """A path as ninja reads it."""
    return re.sub(r"([$: ])", r"$\1", str(path))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _commit() -> str:
    root = CSRC.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Say whether an installation here would build the extension; 0 where it would."""
    try:
        _, reason = decide()
    except BuildError as error:
        reason = str(error)
    print(f"the CUDA extension is not built: {reason}" if reason else "the CUDA extension is built, in some minutes")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
