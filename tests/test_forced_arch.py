"""Kernels made for another GPU and run on a Hopper one: what `forced_arch` changes, and what Triton then makes."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import DEVICE

from benchmarks import cli, forced_arch, machine
from benchmarks.cases import cases_of
from benchmarks.systems import Needs, ours
from flash_dmattn.problem import description, device_arch
from flash_dmattn.triton_kernels.gpus import GPUS, KIB

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

FORCED = [gpu.arch for gpu in GPUS if gpu.standing == "forced"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two H100 as torch and Triton describe them."""
    from triton.runtime import driver

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 227 * KIB, "warpSize": 32})
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(description, "_by_index", {0: "sm_90", 1: "sm_90"})
    return utils


@needs_triton
@pytest.mark.parametrize("name", FORCED)
def test_plans_see_the_other_gpu_and_triton_its_shared_memory(
    name: str, hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced_arch.force_from_environment()
    assert device_arch(torch.device("cuda", 1)) == "sm_90", "without the variable nothing is forced"
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", name.replace("_", ""))
    forced_arch.force_from_environment()
    assert device_arch(torch.device("cuda", 0)) == device_arch(torch.device("cuda", 1)) == name
    room = (163 if name == "sm_80" else 99) * KIB
    assert hopper.get_device_properties(0) == {"max_shared_mem": room, "warpSize": 32}


@needs_triton
@pytest.mark.parametrize("name", ["sm_90", "sm_100", "gfx942"])
def test_what_no_hopper_gpu_runs_is_refused(name: str, hopper: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=f"names {name}; it needs to name one of sm_80, sm_86, sm_89, sm_120"):
        forced_arch.force(name)


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels")
@pytest.mark.parametrize("name", ["sm_80", "sm_120"])
def test_triton_makes_the_instructions_of_the_other_gpu_for_the_card(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import compiled_triton
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", name.replace("_", ""))
    monkeypatch.setattr(compiled_triton, "target_of", lambda arch: GPUTarget("cuda", 90, 32))
    job = compiled_triton.jobs_of(compiled_triton.Variant(128, is_causal=True), name)[0]
    text = job.compile().text
    assert job.name == "forward" and ".target sm_90a" in text
    assert "mma.sync" in text and "wgmma" not in text and "cp.async.bulk" not in text


def test_benchmarks_are_forced_and_call_themselves_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setenv(forced_arch.VARIABLE, "")
    monkeypatch.setattr(forced_arch, "force", seen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="NVIDIA H100"))
    monkeypatch.setattr(machine, "rates_of", lambda device, name: SimpleNamespace(_asdict=lambda: {"of": name}))

    def run(suite: str, options: Any) -> int:
        seen.append((options.machine["device"], options.machine["rates"], options.out.name, options.systems))
        return 0

    monkeypatch.setattr(cli.runner, "run", run)
    monkeypatch.setattr(cli, "write", lambda *_: [])
    assert cli.main(["--as", "sm_86", "performance", "--only", "dense"]) == 0
    name = "NVIDIA H100 as sm_86, a proxy", {"of": "NVIDIA H100"}, "nvidia-h100-as-sm-86-a-proxy"
    assert seen == ["sm_86", (*name, list(forced_arch.SYSTEMS))]
    with pytest.raises(SystemExit):
        cli.main(["--as", "sm_90", "performance"])
    assert cli.main(["--as", "sm_86", "performance", "--device", "cpu"]) == cli.runner.USAGE
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert cli.main(["--as", "sm_86", "performance"]) == cli.runner.USAGE


def test_auto_has_a_row_where_none_shows_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy leaves flex out, which "auto" takes for masks on other GPUs."""
    monkeypatch.setattr(ours, "needs", lambda *_: Needs(backends=("flex", "triton")))
    case, device = cases_of("performance")[0], torch.device("cuda")
    assert not ours.auto_has_a_row(case, device, forced_arch.SYSTEMS)
    assert ours.auto_has_a_row(case, device, (*forced_arch.SYSTEMS, "flex"))


@pytest.mark.skipif(forced_arch.VARIABLE not in os.environ, reason="no architecture is forced")
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
def test_a_kernel_on_the_card_has_the_instructions_of_the_forced_gpu() -> None:
    """It runs in the parts of `gpu_checks.py --forced`: what they tell is of these kernels."""
    from flash_dmattn import attention
    from flash_dmattn.triton_kernels.forward import forward_kernel

    q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, q, q, backend="triton")
    device = torch.cuda.current_device()
    texts = [kernel.asm["ptx"] for kernel in forward_kernel.device_caches[device][0].values()]
    assert texts and all("mma.sync" in text and "wgmma" not in text for text in texts)
