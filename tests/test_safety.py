"""A process that uses the library: what it opens and runs, what it keeps, and how it goes on after a fault."""

from __future__ import annotations

import ast
import gc
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DEVICE
from gpu_calls import Products

import flash_dmattn
from flash_dmattn.biases import ListBias, Relative
from flash_dmattn.caches import ClockCache
from flash_dmattn.call import plans
from flash_dmattn.masks import PreparedMask
from flash_dmattn.sequences import Sequences

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = [path for name in ("flash_dmattn", "triton_kernels", "reference") for path in (ROOT / name).rglob("*.py")]
# Modules that reach the network, or run what they read.
REFUSED_MODULES = {"pickle", "marshal", "shelve", "socket", "urllib", "http", "requests", "ftplib", "telnetlib", "code"}
REFUSED_CALLS = {"eval", "exec", "compile", "__import__"}
REFUSED_METHODS = {("torch", "load"), ("os", "system"), ("os", "popen"), ("pickle", "loads")}
# Programs that a person starts by name run others: nvidia-smi, and themselves.
STARTS_PROGRAMS = {"tools/info.py", "tools/calibrate_tiles.py"}

WATCHED = """
import json, sys
import torch, torch._dynamo  # their imports read and write what they like
import flash_dmattn.__main__
events = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        events.append(f"writes {arguments[0]}")
    elif event == "exec" and arguments[0].co_name != "<module>":  # modules are imported by exec
        events.append(f"exec {arguments[0]}")
    elif event.split(".")[0] in ("socket", "subprocess", "urllib", "pickle", "os.system", "os.exec"):
        events.append(event)
sys.addaudithook(hook)
q, k, v = (torch.randn(2, 70, 4, 16, requires_grad=True) for _ in range(3))
mask, bias = torch.rand(70, 70) < 0.5, torch.randn(4, 70, 70, requires_grad=True)
for backend in ("auto", "eager", "reference"):
    flash_dmattn.attention(q, k, v, mask, bias, backend=backend).sum().backward()
prepared = flash_dmattn.masks.PreparedMask.from_mask(mask)
str(flash_dmattn.explain(q, k, v, prepared, bias))
print(json.dumps(events))
"""

FORKED = """
import os, sys
import torch
import flash_dmattn
torch.set_num_threads(1)  # a child of a fork has no other threads
q, k, v = torch.randn(3, 2, 70, 4, 16)
want = flash_dmattn.attention(q, k, v, is_causal=True)
child = os.fork()
got = flash_dmattn.attention(q, k, v, is_causal=True)
wide = flash_dmattn.attention(q[:, :9], k, v, is_causal=True)  # a call that the parent has not made
if not (torch.equal(got, want) and wide.shape == (2, 9, 4, 16)):
    os._exit(3)
if child == 0:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

# A child of a process that has used a GPU cannot use it: torch says so, and the parent goes on.
FORKED_GPU = """
import os, sys
import torch
import flash_dmattn
q, k, v = torch.randn(3, 2, 70, 4, 64, device="cuda", dtype=torch.bfloat16)
want = flash_dmattn.attention(q, k, v, is_causal=True, backend=sys.argv[1])
child = os.fork()
if child == 0:
    try:
        flash_dmattn.attention(*torch.randn(3, 2, 70, 4, 64).cuda().bfloat16(), backend=sys.argv[1])
    except RuntimeError as error:
        os._exit(0 if "Cannot re-initialize CUDA in forked subprocess" in str(error) else 4)
    os._exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
got = flash_dmattn.attention(q, k, v, is_causal=True, backend=sys.argv[1])
sys.exit(status or (0 if torch.equal(got, want) else 5))
"""

# The compiler fails while there is the file argv[2].
NOT_COMPILED = """
import os, sys
import torch
import flash_dmattn
backend, broken = sys.argv[1:]
device, dtype = ("cpu", torch.float32) if backend == "flex" else ("cuda", torch.bfloat16)
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 200, 2, 64, device=device, dtype=dtype)
open(broken, "w").close()
for number in range(2):  # nothing is remembered of the first failure
    try:
        flash_dmattn.attention(q, k, v, is_causal=True, backend=backend)
    except Exception as error:
        assert "the compiler is broken" in str(error), error
    else:
        sys.exit("it compiled")
want = flash_dmattn.attention(q.float(), k.float(), v.float(), is_causal=True, backend="eager")
os.remove(broken)
if backend == "flex":
    sys.exit()  # Inductor remembers the failure
got = flash_dmattn.attention(q, k, v, is_causal=True, backend=backend)
assert (got - want).abs().max() < 0.05
"""

NO_DRIVER = """
import torch
import flash_dmattn
assert not torch.cuda.is_available()
q, k, v = torch.randn(3, 2, 70, 4, 16)
assert torch.allclose(flash_dmattn.attention(q, k, v), flash_dmattn.attention(q, k, v, backend="eager"), atol=1e-5)
for backend in ("cuda", "triton"):
    try:
        flash_dmattn.attention(q, k, v, backend=backend)
    except (flash_dmattn.BackendUnavailableError, flash_dmattn.BackendUnsupportedError) as error:
        assert backend in str(error), error
    else:
        raise AssertionError(backend)
"""

# The second of two ranks ends, or stops, between two calls.
LOST_RANK = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
import flash_dmattn
from flash_dmattn.distributed import SequenceLayout, context_parallel_attention
torch.set_num_threads(1)
rank, store, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]
limit = datetime.timedelta(seconds=60 if fault == "SIGKILL" else 8)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
layout = SequenceLayout.contiguous(128, 2)
q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 64, 2, 16))
def step():
    context_parallel_attention(q, k, v, is_causal=True, layout=layout, group=dist.group.WORLD).sum().backward()
step()
if rank == 1:
    os.kill(os.getpid(), getattr(signal, fault))
begun = time.monotonic()
try:
    step()
except RuntimeError as error:
    print(len(str(error).splitlines()), type(error).__name__, error)
else:
    sys.exit("the call ended")
alone = flash_dmattn.attention(q, k, v)
assert alone.isfinite().all()
os._exit(0)  # a group that has lost a rank cannot be destroyed
"""

# A digest of all results of a backend, the same in every process.
DIGEST = """
import hashlib, sys
import torch
import flash_dmattn
backend, device = sys.argv[1:]
torch.set_num_threads(1)
dtype = torch.float32 if device == "cpu" else torch.bfloat16
digest = hashlib.sha256()
for number, lengths in enumerate(((129, 300), (1, 500), (257, 257))):
    generator = torch.Generator().manual_seed(number)
    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    q, k, v = normal(2, lengths[0], 4, 64), normal(2, lengths[1], 2, 64), normal(2, lengths[1], 2, 64)
    mask = (torch.rand(lengths, generator=generator) < 0.4).to(device)
    bias, sink = normal(1, 4, 1, lengths[1]), normal(4)
    flags = {"backend": backend, "deterministic": True, "return_lse": True, "is_causal": number == 2}
    out, lse = flash_dmattn.attention(q, k, v, mask, bias, sink=sink, **flags)
    loss = (out.float() ** 2).sum() + torch.where(lse > -torch.inf, lse, 0.0).sum()
    for x in (out, lse, *torch.autograd.grad(loss, (q, k, v, bias, sink))):
        digest.update(x.detach().float().cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def test_no_module_loads_code_or_opens_connections() -> None:
    """Nothing that is read is run: no pickle, eval or download; only tools start programs."""
    for path in PRODUCT:
        name = path.relative_to(ROOT / "flash_dmattn").as_posix() if "flash_dmattn" in path.parts else path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {x.name for x in node.names} if isinstance(node, ast.Import) else {node.module or ""}
                roots = {module.split(".")[0] for module in modules}
                assert not roots & REFUSED_MODULES, f"{path}: {roots}"
                assert "subprocess" not in roots or name in STARTS_PROGRAMS, path
            if isinstance(node, ast.Call):
                call = node.func
                assert not (isinstance(call, ast.Name) and call.id in REFUSED_CALLS), f"{path}:{node.lineno}"
                if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name):
                    assert (call.value.id, call.attr) not in REFUSED_METHODS, f"{path}:{node.lineno}"


def start(program: str, folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start a program in a folder of its own, with a home that it cannot write."""
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nowhere",
        "XDG_CACHE_HOME": "/nowhere",
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(program: str, folder: Path, *arguments: str, **variables: str) -> str:
    """Run a program, as `start` does, and return what it prints."""
    process = start(program, folder, *arguments, **variables)
    said, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return said


def test_calls_write_no_file_and_start_nothing(tmp_path: Path) -> None:
    assert json.loads(run(WATCHED, tmp_path).splitlines()[-1]) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_a_fork_attends(tmp_path: Path) -> None:
    run(FORKED, tmp_path)


@pytest.mark.skipif(DEVICE != "cuda", reason="the fault is one of GPUs")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_fork_beside_a_gpu_is_refused_by_torch_alone(backend: str, tmp_path: Path) -> None:
    run(FORKED_GPU, tmp_path, backend, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize("backend", ["flex" if DEVICE == "cpu" else "triton"])
def test_a_call_that_does_not_compile_leaves_the_library_usable(backend: str, tmp_path: Path) -> None:
    """The compiler's own words reach the caller, each time; others serve, and Triton's kernels once they compile."""
    if backend == "flex":
        compiler, variable = shutil.which("g++") or "", "CXX"
    else:
        compiler, variable = triton_compiler(), "TRITON_PTXAS_PATH"
    broken, script = tmp_path / "broken", tmp_path / "compiler"
    says = f'[ -e {broken} ] && [ "$1" != --version ] && {{ echo the compiler is broken >&2; exit 255; }}'
    script.write_text(f'#!/bin/sh\n{says}\nexec {compiler} "$@"\n')
    script.chmod(0o755)
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    run(NOT_COMPILED, tmp_path, backend, str(broken), **{variable: str(script)}, **caches)


def triton_compiler() -> str:
    """Return the path of the ptxas that Triton has."""
    from triton import knobs

    return str(knobs.nvidia.ptxas.path)


def test_without_a_driver_auto_serves_and_kernels_say_what_they_lack(tmp_path: Path) -> None:
    run(NO_DRIVER, tmp_path, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_ends_the_call_of_the_others(fault: str, tmp_path: Path) -> None:
    """By one error, at once where the process ended, in the time of the group where it hangs; no call hangs with it."""
    ranks = [
        start(LOST_RANK, tmp_path, str(rank), str(tmp_path / "store"), fault, CUDA_VISIBLE_DEVICES="")
        for rank in range(2)
    ]
    try:
        said, error = ranks[0].communicate(timeout=300)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 0, error
    assert said.startswith("1 "), said


@pytest.mark.parametrize("backend", ["eager"] if DEVICE == "cpu" else ["eager", "triton", "cuda"])
def test_every_process_has_the_same_bits(backend: str, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(2)]
    for folder in folders:
        folder.mkdir()
    # One compiles what the others find.
    digests = [run(DIGEST, each, backend, DEVICE, TRITON_CACHE_DIR=str(tmp_path / "triton")) for each in folders]
    assert len(set(digests)) == 1 and len(digests[0]) == 65


@pytest.mark.parametrize("backend", ["eager"] if DEVICE == "cpu" else ["triton", "cuda"])
@pytest.mark.parametrize("kind", ["packed sequences", "lists", "biases by distance", "forward mode"])
def test_repeats_have_the_same_bits(kind: str, backend: str) -> None:
    """Calls that have kernels of their own, a thousand times on a busy GPU; tests/test_gpu.py has all others."""
    torch.manual_seed(0)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    heads_k, rows = 1 if kind == "lists" else 2, (2, 600)
    q, k, v = (torch.randn(*rows, heads, 64, device=DEVICE, dtype=dtype) for heads in (4, heads_k, heads_k))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call: dict[str, Any] = {"deterministic": True, "backend": backend}
    if kind == "packed sequences":
        leaves = [x.detach().flatten(0, 1).requires_grad_() for x in leaves]
        call["sequences"] = Sequences.packed(torch.tensor([0, 7, 100, 600, 1200], dtype=torch.int32, device=DEVICE))
    elif kind == "lists":
        index = torch.randint(600, (2, 1, 600, 16), device=DEVICE)
        leaves.append(torch.randn(index.shape, device=DEVICE, requires_grad=True))
        call |= {"mask": PreparedMask.from_lists(index, seqlen_k=600), "bias": ListBias(leaves[3])}
    elif kind == "biases by distance":
        leaves.append(torch.randn(4, 129, device=DEVICE, dtype=dtype, requires_grad=True))
        call["bias"] = Relative(leaves[3], zero=64, outside="clamp")
    dout = torch.randn_like(leaves[0])

    def once() -> tuple[torch.Tensor, ...]:
        if kind == "forward mode":
            attend = partial(flash_dmattn.attention, **call)
            return torch.func.jvp(attend, (q, k, v), (q.detach(), k.detach(), v.detach()))
        out = flash_dmattn.attention(*leaves[:3], **call)
        return (out, *torch.autograd.grad(out, leaves, dout))

    try:
        first = once()
    except flash_dmattn.BackendUnsupportedError as refusal:
        pytest.skip(str(refusal.reasons[0]))
    repeats = 3 if DEVICE == "cpu" else 1000
    differs = torch.zeros(repeats, dtype=torch.bool, device=DEVICE)
    products = None if DEVICE == "cpu" else Products(2048)
    for repeat in range(repeats):
        if products is not None and repeat % 3 == 0:
            products.start()
        differs[repeat] = torch.stack([(x != y).any() for x, y in zip(once(), first)]).any()
    assert not differs.any(), f"{int(differs.sum())} of {repeats} differ from the first"


def test_thousands_of_shapes_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of ever new shapes: once the caches are full, 1,500 more leave no object and no memory."""
    for table in (x for x in gc.get_objects() if type(x) is ClockCache):
        monkeypatch.setattr(table, "max_size", min(table.max_size, 256))
    gc.freeze()  # what a worker holds already, which takes seconds to look through

    def step(number: int) -> None:
        # Triton compiles for multiples of 16 and for 1. No length or number of heads is one; every stride of q is.
        lengths, heads = (3 + 2 * (number % 49), 3 + 2 * (number % 47)), 2 + number % 3
        q = torch.randn(1, lengths[0], heads, 16, device=DEVICE, requires_grad=True)
        k, v = (torch.randn(1, lengths[1], heads, 16, device=DEVICE, requires_grad=True) for _ in range(2))
        mask = torch.rand(lengths, device=DEVICE) < 0.5
        flash_dmattn.attention(q, k, v, mask if number % 2 else None, softcap=number % 5 / 2).sum().backward()

    counts = []
    for numbers in (range(500), range(500, 2000)):
        for number in numbers:
            step(number)
        gc.collect()
        assert len(plans) == 256
        memory = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        counts.append((len(gc.get_objects()), memory))
    gc.unfreeze()
    (objects, memory), (later, memory_later) = counts
    assert later < objects + 200, f"{later - objects} objects more after 1,500 steps"
    assert memory_later <= memory


# Caches without a bound, by what they are asked for: nothing, or one of a few devices, dtypes and vendors.
UNBOUNDED = {
    *("_head_dims", "_driver", "_extension_packer", "_triton_packer", "_triton_writer"),
    *("driver_overlaps", "find", "installed_instances", "kernels"),
}


def test_caches_are_bounded() -> None:
    """Nothing is cached for each shape but in tables with a bound."""
    unbounded = set()
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                decorators = map(ast.unparse, node.decorator_list)
                if any(each.rpartition(".")[2] == "cache" or "maxsize=None" in each for each in decorators):
                    unbounded.add(node.name)
    assert unbounded == UNBOUNDED


@pytest.mark.skipif(DEVICE != "cuda", reason="memory of the CPU has no limit that torch sets")
@pytest.mark.parametrize("backend", ["cuda", "triton", "eager"])
def test_out_of_memory_leaves_the_library_usable(backend: str) -> None:
    """A forward or backward pass that has no room raises torch's error; the next call is right, and memory is free."""
    q, k, v = (torch.randn(1, 300, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def call() -> list[torch.Tensor]:
        out = flash_dmattn.attention(q, k, v, is_causal=True, backend=backend)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    want = call()
    total = torch.cuda.get_device_properties(0).total_memory
    wide = torch.randn(64, 4096, 16, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    for needs_backward in (False, True):
        torch.cuda.empty_cache()
        room = 0.3 * wide.numel() * 2 + (1.1 * wide.numel() * 2 if needs_backward else 0)
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                flash_dmattn.attention(wide, wide, wide, is_causal=True, backend=backend).sum().backward()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        wide.grad = None
        gc.collect()
        assert torch.cuda.memory_allocated() <= before
    assert all(map(torch.equal, call(), want))
