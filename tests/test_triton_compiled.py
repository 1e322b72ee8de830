"""The attention kernels of the Triton backend, compiled without a GPU as their plans launch them."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from cases import DEVICE
from compiled_variants import VARIANTS
from conftest import needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels; the bounds are those of the pinned Triton"),
]

CAPABILITIES = (80, 90, 100)

# Every run compiles a few, since a clean machine has none of them in Triton's cache and takes ten minutes for all;
# `test_triton_gpus.py` compiles each kernel once for every GPU, `compile_everything.py` all.
ELSEWHERE = ("64 plain", "128 full")
ON_SM_90 = (
    *ELSEWHERE,
    *("128 keys, shared", "256 plain", "64 fp32"),
    *("128 tiles, full", "64 shared", "128 softcap", "32 full", "96 tiles, per key"),
    *("64 short", "64 few keys", "128 unaligned, full", "64 odd rows", "64 two runs"),
    *("64 sink", "64 one tile, sink", "64 dropout, shared", "64 one tile, dropout"),
    *("512 causal", "512 small"),
    "64 relative",
)
PAIRS = [(name, 90) for name in ON_SM_90] + [(name, capability) for name in ELSEWHERE for capability in (80, 100)]


# Kernels without a product.
HELPERS = ("delta", "combine", "backward_gather", "sum_slots")


def stack_limit(capability: int, kernel: str, name: str, head_dim: int) -> int:
    """Bytes of stack that a 16-bit kernel may take, which is where registers spill.

    In parentheses what Triton 3.7.1 makes; the limits are somewhat above, since a line more or less moves them.
    """
    if kernel in HELPERS:
        return 32  # no spills: the frame of a call of the 64-bit division
    if kernel in ("short_forward", "short_backward"):
        return {32: 64, 64: 208, 128: 16}[head_dim]  # (48; 152, with a sink 184; 0)
    if capability != 90:  # the tiles of these are not timed
        if kernel == "backward_keys":
            return {80: {64: 544, 128: 400}, 100: {64: 768, 128: 208}}[capability][head_dim]  # (504, 368; 728, 200)
        return 96 if head_dim == 128 else 176  # (72)
    form = name.partition(" ")[2]
    if kernel == "forward":
        # At 128 the tile table has measured 128 x 64 at 4 warps to be faster than what does not spill.
        return {32: 0, 64: 0, 128: 256}[head_dim]  # (240)
    if kernel == "backward_keys":
        # At 128 it has measured so for 64 x 64; more than 176 where scores have a bias of their own and a band. Without
        # descriptors, in small calls, 64 x 64 spills with such a bias at 64 too.
        if form in ("full", "keys, full", "one query", "small, full") or form.startswith("unaligned"):
            return {32: 16, 64: 192, 128: 352}[head_dim]  # (8; 176; 336)
        return {32: 16, 64: 128, 128: 176}[head_dim]  # (8; 112; 168)
    return 0


@pytest.mark.parametrize(("name", "capability"), PAIRS, ids=str)
def test_fits_the_gpu(name: str, capability: int) -> None:
    from compiled_triton import Variant, kernels_of

    from flash_dmattn.triton_kernels.gpus import shared_bytes

    variant = Variant(**VARIANTS[name])
    head_dim = 1 << (variant.head_dim - 1).bit_length()
    kernels = kernels_of(variant, f"sm_{capability}")
    names = {kernel.name for kernel in kernels}
    assert names & {"forward", "short_forward"}
    assert any(backward < names for backward in ({"delta", "backward_keys"}, {"delta", "pairs"}, {"short_backward"}))
    for compiled in kernels:
        kernel = compiled.name
        usage = f"registers {compiled.registers}, stack {compiled.stack}, shared memory {compiled.shared}"
        what = f"{kernel} {compiled.block_m}x{compiled.block_n}: {usage}"
        assert compiled.shared <= shared_bytes(f"sm_{capability}"), what
        assert compiled.registers <= 255, what
        if variant.dtype == torch.float32:
            continue
        if head_dim <= 128:
            limit = stack_limit(capability, kernel, name, head_dim)
            assert compiled.stack <= limit, f"{what}; limit {limit}"
        if kernel not in HELPERS:
            # The products of a warpgroup have at least 64 rows; the key-stationary kernel has keys in its rows.
            rows = compiled.block_n if kernel == "backward_keys" else compiled.block_m
            hopper = "wgmma.mma_async" if rows >= 64 else "mma.sync"
            instructions = {80: "mma.sync", 90: hopper, 100: "tcgen05.mma" if rows >= 64 else "mma.sync"}
            assert instructions[capability] in compiled.text, f"{kernel} has no {instructions[capability]}"


# Kernels of 16 bits have a tile of their own for these calls.
FEW_QUERIES = [name for name in VARIANTS if ("one query" in name or "few queries" in name) and "fp32" not in name]


@pytest.mark.parametrize("name", FEW_QUERIES)
def test_the_forward_kernels_of_few_queries_spill_nothing(name: str) -> None:
    from compiled_triton import Variant, jobs_of

    kernels = [job.compile() for job in jobs_of(Variant(**VARIANTS[name]), "sm_90")[:2]]
    forward = kernels[0]
    assert forward.name == "forward" and forward.block_m == 16 and "mma.sync" in forward.text
    assert forward.stack == 0
    if "wide" not in name:
        assert 2 * (forward.shared + 1024) <= 228 * 1024  # the tile table counts on two programs to an SM
        assert kernels[1].name == "combine" and kernels[1].stack == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernel_that_combines_parts_starts_early_from_sm_90_on(capability: int) -> None:
    """Older GPUs cannot. It waits before it reads, and what it waits for lets it start."""
    from compiled_triton import Variant, jobs_of

    for name in ("128 one query", "128 few queries, heads first"):
        forward, combine = jobs_of(Variant(**VARIANTS[name]), f"sm_{capability}")[:2]
        assert (forward.name, combine.name) == ("forward", "combine")
        early = capability >= 90
        assert combine.options.get("launch_pdl", False) is early and "launch_pdl" not in forward.options
        made, joined = forward.compile().text, combine.compile().text
        assert ("griddepcontrol.launch_dependents" in made) is early
        assert ("griddepcontrol.wait" in joined) is early
        if early:
            assert joined.index("griddepcontrol.wait") < joined.index("ld.global")


@pytest.mark.parametrize("name", ["64 small, full", "64 few keys", "64 dropout, shared"])
def test_the_driver_gets_the_parameters_that_a_kernel_declares(name: str) -> None:
    from compiled_triton import Variant, jobs_of

    from flash_dmattn.triton_kernels.kernel_launch import flat

    for job in jobs_of(Variant(**VARIANTS[name]), "sm_90"):
        declared = re.findall(r"\.param \.([a-z]\d+)(?: \.ptr \S+ \.align \d+)? \S+_param_\d+", job.compile().text)
        passed = [kind for each in job.signature.values() for kind, _ in flat(each, each)]
        if any(kind.startswith("tensordesc") for kind in passed):
            continue  # Triton launches these
        types = {"i32": "u32", "i64": "u64", "fp32": "f32", "i1": "u8"}
        assert declared == ["u64" if kind[0] == "*" else types[kind] for kind in passed] + ["u64"] * 2


def test_parts_are_combined_by_loads_that_are_on_their_way_together() -> None:
    from compiled_triton import Variant, jobs_of

    text = jobs_of(Variant(**VARIANTS["128 few queries, heads first"]), "sm_90")[1].compile().text
    assert text.count("ld.global") > 4 and text.rindex("ld.global") < text.index("ex2.approx")


def test_what_philox_makes_stays_in_its_thread() -> None:
    """With dropout no kernel stores or shuffles more: the four words of a call are for scores of one thread."""
    from compiled_triton import Variant, kernels_of

    plain, dropped = (kernels_of(Variant(**VARIANTS[name]), "sm_90") for name in ("64 shared", "64 dropout, shared"))
    for without, kernel in zip(plain, dropped, strict=True):
        assert kernel.name == without.name
        drops = kernel.name in ("forward", "backward_keys", "backward_queries", "backward_bias")
        multiplier = str(0xD2511F53 - 2**32)
        assert (multiplier in kernel.text) is drops and multiplier not in without.text, kernel.name
        for word in ("st.shared", "stmatrix", "shfl.sync"):
            assert kernel.text.count(word) == without.text.count(word), f"{kernel.name}: {word}"


def test_a_shared_dbias_is_compiled_beside_a_set_of_keys_and_dropout() -> None:
    """Both say which scores count: the keys that are kept, and the probabilities that are."""
    from compiled_triton import Variant, jobs_of

    last = jobs_of(Variant(**VARIANTS["64 dropout, keys, shared"]), "sm_90")[-1]
    assert last.name == "backward_bias" and "mma" in last.compile().text


def test_every_row_of_the_tile_table_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_triton import Variant, run_plans, tangent_jobs

    from flash_dmattn.triton_kernels import plan, plan_tangents, tile_table

    rows: dict[int, str] = {}
    for name, table in vars(tile_table).items():
        if isinstance(table, dict) and name.startswith(("_SM", "_FP32")):
            by_kernel = table if isinstance(next(iter(table)), str) else {"": table}
            rows |= {id(tile): f"{name} {key} {d}" for key, part in by_kernel.items() for d, tile in part.items()}
            for part in by_kernel.values():  # what `MOST_FEW_KEYS` says of tiles
                assert all(tile.block_n >= plan.MOST_FEW_KEYS for tile in part.values())
    assert len(rows) > 30

    def recorded(choose: Callable[..., tile_table.Tile]) -> Callable[..., tile_table.Tile]:
        def run(*arguments: object, **kinds: int) -> tile_table.Tile:
            tile = choose(*arguments, **kinds)
            rows.pop(id(tile), None)
            return tile

        return run

    monkeypatch.setattr(plan, "tile_of", recorded(plan.tile_of))
    monkeypatch.setattr(plan_tangents, "tangents_tile", recorded(plan_tangents.tangents_tile))
    for arch, fields in product(("sm_80", "sm_86", "sm_90", "sm_100"), VARIANTS.values()):
        variant = Variant(**fields)
        run_plans(variant.call(arch), lambda *_: None)
    for arch, dtype, dim in (
        *product(("sm_80", "sm_90"), (torch.bfloat16,), (64, 128, 256)),
        ("sm_90", torch.float32, 64),
    ):
        tangent_jobs(arch, dtype, dim)
    assert not rows, list(rows.values())


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

    compiled = kernels_of(Variant(**VARIANTS[name]), "sm_90")
    loads = {kernel.name for kernel in compiled if "cp.async.bulk.tensor" in kernel.text}
    assert loads == set(kernels)
