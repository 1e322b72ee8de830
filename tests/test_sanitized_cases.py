"""The calls for compute-sanitizer reach every kernel, as planned for an H200; this machine launches none."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sanitized_cases
import torch
from cuda_forms import BIAS_FORMS, bias_form, described, unit_of

from flash_dmattn.backends import cuda
from flash_dmattn.backends import triton as backend
from flash_dmattn.backends.protocol import broken_rules

KERNELS = {
    "forward_kernel",
    "combine_kernel",
    "delta_kernel",
    "backward_keys_kernel",
    "backward_gather_kernel",
    "backward_queries_kernel",
    "backward_product_kernel",
    "backward_bias_kernel",
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_of_triton_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dmattn.triton_kernels import kernel_launch, launch, plan
    from flash_dmattn.triton_kernels.tile_ops import BAND, KEYS, TILES

    launched: set[tuple[str, int, bool]] = set()
    seen: list[Any] = []
    plain: Callable[..., None] = plan.Call.__init__

    def on_an_h200(self: plan.Call, *arguments: Any) -> None:
        plain(self, *arguments)
        self.capability, self.processors = (9, 0), 132
        seen.append(self.mask_kind)

    def record(self: kernel_launch.Launch, *_: Any) -> None:
        launched.add((self.kernel.__name__, seen[-1], bool(self.descriptors)))

    monkeypatch.setattr(plan.Call, "__init__", on_an_h200)
    monkeypatch.setattr(kernel_launch.Launch, "__call__", record)
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(backend, "RULES", tuple(rule for rule in backend.RULES if rule.code != "device"))
    monkeypatch.setattr(sanitized_cases, "DEVICE", "cpu")
    for case, how in sanitized_cases.CASES["triton"]:
        sanitized_cases.call(case, how, "triton")

    assert {name for name, _, _ in launched} == KERNELS
    for main in sorted(KERNELS - {"combine_kernel", "delta_kernel", "backward_gather_kernel"}):
        assert {kind for name, kind, _ in launched if name == main} == {BAND.value, TILES.value, KEYS.value}, main
        assert {descriptors for name, _, descriptors in launched if name == main} == {False, True}, main
    assert len(sanitized_cases.CASES["triton"]) == 32


def test_the_kernels_of_cuda_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule refuses a call; with and without a mask each form of bias has one at 64 and 128, and most at others."""
    monkeypatch.setattr(sanitized_cases, "DEVICE", "cpu")
    reached: dict[tuple[int, int], set[tuple[str, bool]]] = {}
    dtypes = set()
    for case, how in sanitized_cases.CASES["cuda"]:
        assert not broken_rules(cuda, described(case), ("forward",)) and not case.need, case.repro()
        bias = sanitized_cases.place(case.build("cpu"), how).bias
        d, d_v, dtype = unit_of(case)
        reached.setdefault((d, d_v), set()).add((bias_form(bias, dtype), case.mask is not None))
        dtypes.add((d, d_v, dtype))
    assert reached[64, 64] == reached[128, 128] == set(itertools.product(BIAS_FORMS, (False, True)))
    assert set(reached) == set(cuda.UNITS) and all(len(kernels) >= 2 for kernels in reached.values())
    assert dtypes == {(*dims, dtype) for dims in cuda.UNITS for dtype in (torch.float16, torch.bfloat16)}
    assert len(sanitized_cases.CASES["cuda"]) == 32
