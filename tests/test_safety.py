"""A process that uses the library: what it opens and runs, what it keeps, and how it goes on after a fault."""

from __future__ import annotations

import ast
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import DEVICE

import flash_dmattn

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
import flash_dmattn.tools.cli
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


def test_no_module_loads_code_or_opens_connections() -> None:
    """Nothing that is read is run: no pickle, eval or download; programs are started by tools alone."""
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


def run(program: str, folder: Path) -> str:
    """Run a program in a folder of its own, with a home that it cannot write; return what it prints."""
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nowhere",
        "XDG_CACHE_HOME": "/nowhere",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_calls_write_no_file_and_start_nothing(tmp_path: Path) -> None:
    assert json.loads(run(WATCHED, tmp_path).splitlines()[-1]) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_a_fork_attends(tmp_path: Path) -> None:
    run(FORKED, tmp_path)


def test_thousands_of_shapes_keep_nothing() -> None:
    """Steps of ever new shapes: once the caches are full, a thousand more leave no object and no memory."""

    def step(number: int) -> None:
        lengths, heads = (1 + number % 97, 1 + number % 89), 1 + number % 3
        q = torch.randn(1, lengths[0], heads, 8, device=DEVICE, requires_grad=True)
        k, v = (torch.randn(1, lengths[1], heads, 8, device=DEVICE, requires_grad=True) for _ in range(2))
        mask = torch.rand(lengths, device=DEVICE) < 0.5
        flash_dmattn.attention(q, k, v, mask if number % 2 else None, softcap=number % 5 / 2).sum().backward()

    counts = []
    for numbers in (range(2500), range(2500, 3500)):
        for number in numbers:
            step(number)
        gc.collect()
        memory = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        counts.append((len(gc.get_objects()), memory))
    (objects, memory), (later, memory_later) = counts
    assert later < objects + 200, f"{later - objects} objects more after a thousand steps"
    assert memory_later <= memory


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
