"""The calls for compute-sanitizer launch every kernel, as planned for an H200; this machine launches none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sanitized_cases

from flash_dmattn.backends import triton as backend

pytest.importorskip("triton")

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


def test_every_kernel_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for case, how in sanitized_cases.CASES:
        sanitized_cases.call(case, how)

    assert {name for name, _, _ in launched} == KERNELS
    for main in sorted(KERNELS - {"combine_kernel", "delta_kernel", "backward_gather_kernel"}):
        assert {kind for name, kind, _ in launched if name == main} == {BAND.value, TILES.value, KEYS.value}, main
        assert {descriptors for name, _, descriptors in launched if name == main} == {False, True}, main
    assert len(sanitized_cases.CASES) == 32
