"""The calls for compute-sanitizer reach every kernel, as planned for an H200; this machine launches none."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sanitized_cases
import torch
from cuda_forms import (
    ALL_INSTANCES,
    BACKWARD_FORMS,
    BIAS_FORMS,
    NUM_SMS,
    SUMMED,
    backward_form,
    backward_works,
    bias_form,
    described,
    differentiated,
    instance_of,
    schedule_of,
)
from out_of_tree import replaced, rules_without

from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.cuda.backend import BACKEND as CUDA
from flash_dmattn.remembered import Remembered

KERNELS = {
    "forward_kernel",
    "combine_kernel",
    "delta_kernel",
    "backward_keys_kernel",
    "backward_gather_kernel",
    "backward_queries_kernel",
    "backward_product_kernel",
    "backward_bias_kernel",
    "sum_slots_kernel",
}
SHORT_KERNELS = {"short_forward_kernel", "short_backward_kernel"}
HELPERS = {"combine_kernel", "delta_kernel", "backward_gather_kernel", "sum_slots_kernel"}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_of_triton_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dmattn.triton_kernels import kernel_launch, launch, plan
    from flash_dmattn.triton_kernels.tile_ops import BAND, BOUNDS, DENSE, KEYS, TILES

    launched: set[tuple[str, int, bool]] = set()
    seen: list[Any] = []
    plain: Callable[..., None] = plan.Call.__init__

    def on_an_h200(self: plan.Call, *arguments: Any) -> None:
        plain(self, *arguments)
        self.arch, self.num_sms = "sm_90", 132
        seen.append(self.mask_kind)

    def record(self: kernel_launch.Launch, *_: Any) -> None:
        launched.add((self.kernel.__name__, seen[-1], bool(self.descriptors)))

    monkeypatch.setattr(plan.Call, "__init__", on_an_h200)
    monkeypatch.setattr(kernel_launch.Launch, "__call__", record)
    monkeypatch.setattr(launch, "plans", Remembered(4096))
    monkeypatch.setattr(sanitized_cases, "DEVICE", "cpu")
    monkeypatch.setattr(sanitized_cases.triton_passes, "FEW_PAIRS", sanitized_cases.FEW_PAIRS)
    with replaced("triton", rules=rules_without("triton", "device")):
        for case, how in sanitized_cases.CASES["triton"]:
            sanitized_cases.call(case, how, "triton")

    assert {name for name, _, _ in launched} == KERNELS | SHORT_KERNELS
    kinds = {main: {kind for name, kind, _ in launched if name == main} for main in SHORT_KERNELS}
    # A mask that the backward pass has prepared comes to the forward kernel as intervals.
    assert kinds["short_forward_kernel"] == {BAND.value, DENSE.value, BOUNDS.value}
    assert kinds["short_backward_kernel"] == {BAND.value, DENSE.value}
    for main in sorted(KERNELS - HELPERS):
        kinds_of_main = {kind for name, kind, _ in launched if name == main}
        assert kinds_of_main == {BAND.value, TILES.value, KEYS.value, DENSE.value}, main
        assert {descriptors for name, _, descriptors in launched if name == main} == {False, True}, main
    assert len(sanitized_cases.CASES["triton"]) == 44


def test_the_kernels_of_cuda_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule refuses a call; with and without a mask each form of bias has one at 32, 64, 128, and most at others."""
    monkeypatch.setattr(sanitized_cases, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    reached: dict[tuple[int, int], set[tuple[str, bool]]] = {}
    in_parts: dict[tuple[int, int], set[tuple[str, bool]]] = {}
    dtypes = set()
    for case, how in sanitized_cases.CASES["cuda"]:
        assert not CUDA.broken_rules(described(case), ("forward",)) and not case.needs_grad, case.repro()
        bias = sanitized_cases.place(case.build("cpu"), how).bias
        d, d_v, dtype = instance_of(case)
        kernels = in_parts if how == "parts" else reached
        kernels.setdefault((d, d_v), set()).add((bias_form(bias, dtype), case.mask is not None))
        dtypes.add((d, d_v, dtype))
    every = set(itertools.product(BIAS_FORMS, (False, True)))
    assert reached[32, 32] == reached[64, 64] == reached[128, 128] == every
    shared = set(itertools.product(("none", "vector", "tile"), (False, True)))
    assert in_parts[32, 32] == in_parts[64, 64] == in_parts[128, 128] == shared
    assert set(in_parts) == {(d, d) for d in (32, 64, 96, 128)}
    assert set(reached) == set(cuda_rules.INSTANCES) and all(len(kernels) >= 2 for kernels in reached.values())
    assert dtypes == {(*dims, dtype) for dims in cuda_rules.INSTANCES for dtype in (torch.float16, torch.bfloat16)}
    for case in sanitized_cases.HELD_BIAS:  # 4 work tiles for each of 132 blocks
        assert case.batch * case.num_heads * -(-case.seqlen_q // 256) >= 4 * 132
    assert len(sanitized_cases.CASES["cuda"]) == 69


def test_the_backward_kernels_of_cuda_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule refuses a call; each kernel has one, each form in either order, and the work is shared in every way.

    Those with a softcap: one of each form of an instance, and one that has the kernel of a shared gradient.
    """
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    kernels, shared, orders, works = set(), set(), set(), set()
    capped, capped_shared, pairs, clusters, slots = set(), set(), set(), set(), set()
    for case, how in sanitized_cases.CASES["cuda-backward"]:
        in_order = how == "in_order"
        problem = differentiated(case, in_order)
        schedule = schedule_of(problem)
        assert not CUDA.broken_rules(problem, ("forward", "backward")) and case.needs_grad, case.repro()
        instance, form, has_mask = instance_of(case), backward_form(problem), case.mask is not None
        if case.softcap > 0:
            capped.add((instance[:2], form))
            if schedule.writer == "shared_dbias":
                capped_shared.add(instance[:2])
            continue
        kernels.add((instance, form, has_mask))
        if schedule.writer == "clusters":
            tiles = case.batch * case.num_heads * -(-case.seqlen_k // 128)
            clusters.add((in_order, case.batch, tiles > NUM_SMS))
        elif schedule.writer == "shared_dbias":
            shared.add((instance, has_mask))
            slots.add((max(instance[:2]) > 128, case.dtype, schedule.slot_floats > 0, case.seqlen_k % 8 > 0))
        orders.add((instance[:2], form, has_mask, in_order))
        works.add((in_order, *backward_works(problem)))
        if schedule.has_two_key_tiles:
            pairs.add((in_order, case.num_heads > case.num_heads_k, case.seqlen_k % 256 > 128))
    narrow = itertools.product(((32, 32), (64, 64), (96, 96), (128, 128)), BACKWARD_FORMS)
    wide = itertools.product(sanitized_cases.WIDE_DIMS, ("none", "vector", "tile"))
    assert capped == {*narrow, *wide} and capped_shared == set(cuda_rules.INSTANCES)
    flags = (False, True)
    summed = [instance for instance in ALL_INSTANCES if max(instance[:2]) <= 128]
    every = {
        *itertools.product(ALL_INSTANCES, BACKWARD_FORMS, flags),
        *itertools.product(summed, [SUMMED], flags),
    }
    assert kernels == every
    assert {batch for _, batch, _ in clusters} == {2, 4, 8}
    # Works of one cluster after another: told by its first block, in order and not.
    assert {(False, True), (True, True)} <= {(in_order, many) for in_order, _, many in clusters}
    assert shared == set(itertools.product(ALL_INSTANCES, flags))
    dtypes = (torch.float16, torch.bfloat16)
    assert {part[:3] for part in slots} == set(itertools.product(flags, dtypes, flags))
    assert {wide for wide, *_, is_unaligned in slots if is_unaligned} == set(flags)
    of_instances = {
        *itertools.product(cuda_rules.INSTANCES, BACKWARD_FORMS),
        *((instance[:2], SUMMED) for instance in summed),
    }
    assert orders == {(*form, has_mask, order) for form in of_instances for has_mask in flags for order in flags}
    assert {(False, False, False), (False, True, True), (True, True, False)} <= pairs  # the last block with one or two
    heads = {(in_order, heads) for in_order, heads, _ in works}
    either = itertools.product(flags, ("its own", "a group", "one of a group"))
    assert heads == {*either, (False, "a group, then one")}
    shares = {(in_order, share) for in_order, _, share in works}
    assert {(True, "in order"), *itertools.product((False,), ("one each", "evenly", "as they finish"))} <= shares
    assert len(sanitized_cases.CASES["cuda-backward"]) == 205
