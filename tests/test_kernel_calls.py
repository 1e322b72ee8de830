"""The calls for compute-sanitizer reach every kernel, as planned for an H200; this machine launches none.

Each is in a part of `gpu_checks.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import needs_triton
from cuda_forms import (
    ALL_INSTANCES,
    BACKWARD_FLOAT_FORMS,
    BACKWARD_FORMS,
    BIAS_FORMS,
    FLOAT_FORMS,
    SUMMED,
    WHOLE,
    forms_of,
)
from gpu_checks import SANITIZED
from kernel_calls import HELD_CALLS, calls_of

from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.cuda.rules import INSTANCES

MAIN = ("forward", "backward_keys", "backward_queries", "backward_product", "backward_bias")
HELPERS = ("combine", "delta", "backward_gather", "sum_slots")


def reached(backend: str) -> dict[str, set[tuple[Any, ...]]]:
    """Collect all that the calls of a backend reach, by its kind."""
    by_kind: dict[str, set[tuple[Any, ...]]] = {}
    for _, each in calls_of(backend):
        for kind, *what in each:
            by_kind.setdefault(kind, set()).add(tuple(what))
    return by_kind


@needs_triton
def test_every_kernel_of_triton_is_launched() -> None:
    from flash_dmattn.triton_kernels.tile_ops import BAND, BOUNDS, DENSE, KEYS, TILES

    launched = reached("triton")
    masks = {name: {BAND, TILES, KEYS, DENSE} for name in MAIN} | {"backward_product": {BAND, TILES}}
    # A mask that the backward pass has prepared comes to the forward kernel of short rows as intervals.
    masks |= {"short_forward": {BAND, TILES, DENSE, BOUNDS}, "short_backward": {BAND, DENSE}}
    kernels = {f"{name}_kernel": {mask.value for mask in forms} for name, forms in masks.items()}
    assert {name for name, *_ in launched["mask"]} == {*kernels, *(f"{name}_kernel" for name in HELPERS)}
    for name, forms in kernels.items():
        assert {mask for each, mask, _ in launched["mask"] if each == name} >= forms, name
    with_descriptors = {(name, flag) for name, _, flag in launched["mask"]}
    assert {(f"{name}_kernel", flag) for name in MAIN for flag in (False, True)} <= with_descriptors
    assert len(calls_of("triton")) <= SANITIZED["triton"]


def test_every_kernel_of_cuda_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel has a call, each form has one in either order, and the work is shared in every way."""
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    by_kind = reached("cuda")
    flags, dtypes = (False, True), (torch.float16, torch.bfloat16)
    narrow = [dims for dims in INSTANCES if max(dims) <= 128]
    with_floats = [instance for instance in ALL_INSTANCES if max(instance[:2]) <= 64]
    forward = [(dims, form) for dims in INSTANCES for form in forms_of(BIAS_FORMS, FLOAT_FORMS, dims)]
    assert by_kind["forward"] == {(*each, has_mask) for each in forward for has_mask in flags}
    parts = [(dims, form) for dims, form in forward if dims in narrow and form != "strided"]
    assert by_kind["parts"] >= {(*each, has_mask) for each in parts for has_mask in flags}
    assert by_kind["largest"] >= {*itertools.product(INSTANCES, [False]), *itertools.product(narrow, [True])}
    summed = [instance for instance in ALL_INSTANCES if instance[:2] in narrow]
    assert by_kind["backward"] == {
        *itertools.product(ALL_INSTANCES, BACKWARD_FORMS, flags),
        *itertools.product(with_floats, BACKWARD_FLOAT_FORMS, flags),
        *itertools.product(summed, [SUMMED], flags),
        *(((192, 128, dtype), WHOLE, False) for dtype in dtypes),
    }
    forms = [
        *((dims, form) for dims in INSTANCES for form in forms_of(BACKWARD_FORMS, BACKWARD_FLOAT_FORMS, dims)),
        *itertools.product(narrow, [SUMMED]),
    ]
    orders = {(*form, *order) for form in forms for order in itertools.product(flags, flags)}
    assert by_kind["order"] == orders | {((192, 128), WHOLE, False, in_order) for in_order in flags}
    assert by_kind["shared"] == set(itertools.product(ALL_INSTANCES, flags, flags))
    assert by_kind["shared floats"] == set(itertools.product(with_floats, flags))
    assert by_kind["forms of pairs"] >= set(itertools.product(with_floats, ("stored tile", *BACKWARD_FLOAT_FORMS)))
    assert by_kind["dtype"] == {(instance,) for instance in ALL_INSTANCES}
    # With a softcap, which the kernel of a shared gradient has, too.
    assert by_kind["capped"] >= set(itertools.product(INSTANCES, ("none", "vector", "tile")))
    assert by_kind["capped"] >= set(itertools.product(narrow, BACKWARD_FORMS))
    assert by_kind["capped sum"] == set(itertools.product(INSTANCES, flags))
    assert by_kind["slots"] >= {(*part, True) for part in itertools.product(flags, dtypes, [True])}
    slots = {part[:3] for part in by_kind["slots"]}
    assert slots == {*itertools.product(flags, dtypes, flags), *((False, torch.float32, flag) for flag in flags)}
    assert by_kind["clusters"] == set(itertools.product(flags, flags)) and by_kind["cluster"] == {(2,), (4,), (8,)}
    assert by_kind["pairs"] == set(itertools.product(flags, flags, flags))
    heads = {(in_order, heads) for in_order, heads, _ in by_kind["works"]}
    assert heads == {*itertools.product(flags, ("its own", "a group", "one of a group")), (False, "a group, then one")}
    shares = {(in_order, share) for in_order, _, share in by_kind["works"]}
    assert {(True, "in order"), *itertools.product((False,), ("one each", "evenly", "as they finish"))} <= shares
    for case in HELD_CALLS:  # 4 work tiles for each of 132 blocks
        assert case.batch * case.num_heads * -(-case.seqlen_q // 256) >= 4 * 132
    assert len(calls_of("cuda")) <= SANITIZED["cuda"]
