"""The attention kernels of the Triton backend, compiled without a GPU as their plans launch them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from cases import DEVICE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels; the bounds are those of the pinned Triton"),
]

CAPABILITIES = (80, 90, 100)
# Bytes of shared memory that a program may have on each GPU. The tiles off sm_90 are meant to fit every GPU since
# Ampere, and the smallest of those has 99 KB.
SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 99 * 1024}

FULL, SHARED_BIAS, PER_KEY = ("B", "Hq", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk"), ("1", "Hk", "1", "Lk")
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "per key": {"bias": PER_KEY},
    "full": {"bias": FULL, "is_causal": True},
    "shared": {"bias": SHARED_BIAS},
    "tiles": {"mask": "tiles"},
    "tiles, per key": {"mask": "tiles", "bias": PER_KEY, "is_causal": True},
    "tiles, full": {"mask": "tiles", "bias": FULL},
    "tiles, shared": {"mask": "tiles", "bias": SHARED_BIAS, "is_causal": True},
    "keys": {"mask": "keys", "is_causal": True},
    "keys, per key": {"mask": "keys", "bias": PER_KEY, "is_causal": True},
    "keys, full": {"mask": "keys", "bias": FULL},
    "keys, shared": {"mask": "keys", "bias": SHARED_BIAS, "is_causal": True},
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"64 {form}": {"head_dim": 64, **given} for form, given in FORMS.items()},
    **{f"128 {form}": {"head_dim": 128, **given} for form, given in FORMS.items()},
    **{f"256 {form}": {"head_dim": 256, **FORMS[form]} for form in ("plain", "full", "shared", "tiles", "keys")},
    **{f"32 {form}": {"head_dim": 32, "batch": 8, **FORMS[form]} for form in ("plain", "full")},
    **{f"96 {form}": {"head_dim": 96, **FORMS[form]} for form in ("plain", "full", "tiles, per key")},
    "128 grouped": {"head_dim": 128, "num_heads_k": 4, "is_causal": True},
    "128 softcap": {"head_dim": 128, "softcap": 20.0},
    "64 fp16, fp32 bias": {"head_dim": 64, "dtype": torch.float16, "bias": FULL, "bias_dtype": torch.float32},
    # Few queries: keys in shares. Few keys: queries in shares.
    "128 one query": {"head_dim": 128, "seqlen_q": 1, "seqlen_k": 65536},
    "64 few keys": {"head_dim": 64, "seqlen_q": 65536, "seqlen_k": 64, "num_heads": 2, "num_heads_k": 1},
    # Not through the tensor memory accelerator, which small calls do not pay for either, and with offsets of 64 bits.
    "64 short": {"head_dim": 64, "batch": 1, "seqlen_q": 500, "seqlen_k": 500, "num_heads": 2, "num_heads_k": 2},
    "64 small, full": {"head_dim": 64, "batch": 1, "bias": FULL, "is_causal": True},
    **{
        f"{d} unaligned, {form}": {"head_dim": d, "batch": 2, "seqlen_q": 1023, "seqlen_k": 1023, **FORMS[form]}
        for d in (64, 128, 256)
        for form in ("full", "shared")
    },
    "64 odd rows": {"head_dim": 64, "row_stride": 16 * 64 + 1, "is_causal": True},
    "64 far rows": {"head_dim": 64, "row_stride": 2**21 + 1},
    **{f"{d} fp32": {"head_dim": d, "dtype": torch.float32, "bias": SHARED_BIAS} for d in (64, 128, 256)},
}
# On sm_80 and sm_100 all masks and biases share the tiles of one table; fp32 products run outside the tensor cores,
# almost the same on every GPU, and take 10 s to compile.
FP32 = ("64 fp32", "128 fp32", "256 fp32")
ON_SM_90_ALONE = (
    *(name for name in VARIANTS if "unaligned" in name),
    "256 shared",
    "256 tiles",
    "256 keys",
    "64 tiles",
    "128 tiles",
    "64 keys",
    "128 keys",
    *FP32,
)
PAIRS = [
    pytest.param(name, capability, id=f"sm_{capability} {name}")
    for name, given in VARIANTS.items()
    for capability in CAPABILITIES
    if capability == 90 or name not in ON_SM_90_ALONE
]


def stack_limit(capability: int, kernel: str, name: str, head_dim: int) -> int:
    """Bytes of stack that a 16-bit kernel may take, which is where registers spill.

    In parentheses what Triton 3.7.1 makes; the limits are somewhat above, since a line more or less moves them.
    """
    if kernel in ("delta", "combine", "backward_gather"):
        return 32  # no spills: the frame of a call of the 64-bit division
    if capability != 90:  # the tiles of these are not tuned
        return {80: 544, 100: 768}[capability] if kernel == "backward_keys" else 160  # (504 and 728, 136)
    form = name.partition(" ")[2]
    if kernel == "forward":
        # At 128 the tile table has measured 128 x 64 at 4 warps to be faster than what does not spill.
        return {32: 0, 64: 0, 128: 256}[head_dim]  # (240)
    if kernel == "backward_keys":
        # At 128 it has measured so for 64 x 64; more than 160 where scores have a bias of their own and a band. Without
        # descriptors, in small calls, 64 x 64 spills with such a bias at 64 too.
        if form in ("full", "keys, full", "one query", "small, full") or form.startswith("unaligned"):
            return {32: 16, 64: 192, 128: 320}[head_dim]  # (8; 176; 288)
        return {32: 16, 64: 128, 128: 160}[head_dim]  # (8; 112; 136)
    return 0


@pytest.mark.parametrize(("name", "capability"), PAIRS)
def test_fits_the_gpu(name: str, capability: int) -> None:
    from compiled_triton import Variant, kernels_of

    variant = Variant(**VARIANTS[name])
    head_dim = 1 << (variant.head_dim - 1).bit_length()
    kernels = kernels_of(variant, capability)
    assert {"forward", "delta", "backward_keys"} < {kernel.name for kernel in kernels}
    for found in kernels:
        kernel = found.name
        usage = f"registers {found.registers}, stack {found.stack}, shared memory {found.shared}"
        what = f"{kernel} {found.block_m}x{found.block_n}: {usage}"
        assert found.shared <= SHARED[capability], what
        assert found.registers <= 255, what
        if variant.dtype == torch.float32:
            continue
        if head_dim <= 128:
            limit = stack_limit(capability, kernel, name, head_dim)
            assert found.stack <= limit, f"{what}; limit {limit}"
        if kernel not in ("delta", "combine", "backward_gather"):
            # The products of a warpgroup have at least 64 rows; the key-stationary kernel has keys in its rows.
            rows = found.block_n if kernel == "backward_keys" else found.block_m
            instructions = {80: "mma.sync", 90: "wgmma.mma_async" if rows >= 64 else "mma.sync", 100: "mma"}
            assert instructions[capability] in found.ptx, f"{kernel} has no {instructions[capability]}"


def test_every_row_of_the_tile_table_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_triton import Variant, run_plans

    from flash_dmattn.triton_kernels import plan, plan_backward, tile_table

    rows: dict[int, str] = {}
    for name, table in vars(tile_table).items():
        if isinstance(table, dict) and name.startswith(("_SM", "_FP32")):
            by_kernel = table if isinstance(next(iter(table)), str) else {"": table}
            rows |= {id(tile): f"{name} {key} {d}" for key, part in by_kernel.items() for d, tile in part.items()}
            for part in by_kernel.values():  # what `MOST_FEW_KEYS` says of tiles
                assert all(tile.block_n >= plan_backward.MOST_FEW_KEYS for tile in part.values())
    assert len(rows) > 30

    tile_of = plan.tile_of

    def recorded(*given: object, **kinds: int) -> tile_table.Tile:
        tile = tile_of(*given, **kinds)
        rows.pop(id(tile), None)
        return tile

    monkeypatch.setattr(plan, "tile_of", recorded)
    for name, capability in (pair.values for pair in PAIRS):
        run_plans(Variant(**VARIANTS[name]).call(capability), lambda *_: None)
    assert not rows


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("128 plain", ("forward", "backward_keys", "backward_queries")),
        ("64 full", ("forward", "backward_keys", "backward_product")),
        ("64 shared", ("forward", "backward_keys", "backward_queries", "backward_bias")),
        ("128 tiles", ("forward", "backward_keys", "backward_queries")),
        ("128 keys", ("backward_keys",)),  # the queries of kept keys are not gathered
        ("64 odd rows", ()),
        ("64 short", ()),
    ],
)
def test_which_kernels_load_through_the_tensor_memory_accelerator(name: str, kernels: tuple[str, ...]) -> None:
    from compiled_triton import Variant, kernels_of

    found = kernels_of(Variant(**VARIANTS[name]), 90)
    loads = {kernel.name for kernel in found if "cp.async.bulk.tensor" in kernel.ptx}
    assert loads == set(kernels)
