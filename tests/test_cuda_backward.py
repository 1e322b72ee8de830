"""The gradients of cuda against fp64 where blocks share work, sums or a gradient; random calls have all the rest.

Calls that cuda does not differentiate run as the pair with triton, whose backward kernels read the same lse and mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, error, oracle, run
from cases import ALL, Case, Inputs
from conftest import Runner
from cuda_forms import differentiated, schedule_of
from layouts import LAYOUTS
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.cuda import passes
from flash_dmattn.masks import PreparedMask

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

TILE = 128
BASE = Case(seqlen_q=193, seqlen_k=264, head_dim=64, dtype=torch.bfloat16, dlse=True)
FULL = ("B", "Hq", "Lq", "Lk")
TILES = ("B", "Hk", "Lq", "Lk")
PER_KEY = ("1", "Hk", "1", "Lk")
# How cuda reads a bias: not at all, by its rows, per key, and in tiles.
BIASES = {"no bias": None, "per query": ("B", "Hq", "Lq", "1"), "per key": PER_KEY, "per score": FULL}
# One of each kernel of its own: 128 queries a step, 64, and 64 keys a block, by three stages of q and dout and by two.
HEAD_DIMS = (64, 128, 192, 256)

# The GPU or the emulated one has so many.
NUM_SMS = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 3

# Biases that heads or batch entries share, and what a case with one has besides.
SHARED = {f"{b}-{h}": (b, h, "Lq", "Lk") for b, h in itertools.product(("1", "B"), ("1", "Hk", "Hq"))}
del SHARED["B-Hq"]
GROUPS = {"num_heads": 8, "num_heads_k": 2}
every_bias = pytest.mark.parametrize("bias", BIASES)
both_orders = pytest.mark.parametrize("deterministic", (False, True), ids=("any order", "fixed order"))


def every_second_tile(mask: Tensor) -> None:
    for i, j in itertools.product(range(0, mask.shape[2], TILE), range(0, mask.shape[3], TILE)):
        if (i + j) // TILE % 2:
            mask[:, :, i : i + TILE, j : j + TILE] = False


def first_tiles(mask: Tensor) -> None:
    mask[:, :, :TILE] = False
    mask[:, :, :, :TILE] = False


def tiles_of_every_kind(mask: Tensor) -> None:
    """Rows and columns of tiles in which full, empty and partial ones follow each other without a pattern of bands."""
    kinds = torch.randint(3, (mask.shape[0], mask.shape[1], 16, 16), generator=torch.Generator().manual_seed(1))
    by_pair = kinds.to(mask.device).repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)
    by_pair = by_pair[:, :, : mask.shape[2], : mask.shape[3]]
    mask.logical_and_(by_pair != 0).logical_or_(by_pair == 1)


# More fields of a case, and a function that leaves some of its mask out.
MASKS: dict[str, tuple[dict[str, Any], Callable[[Tensor], None] | None]] = {
    "none": ({}, None),
    "causal": ({"is_causal": True}, None),
    "full": ({"mask": FULL}, None),
    "prepared": ({"mask": TILES, "is_causal": True}, None),
    "empty rows": ({"mask": TILES, "mask_kind": "empty_rows"}, None),
    "empty tiles": ({"mask": TILES, "mask_kind": "all_allowed"}, every_second_tile),
    "first tiles empty": ({"mask": ("1", "Hq", "Lq", "Lk")}, first_tiles),
    "all empty": ({"mask": ("B", "1", "Lq", "Lk"), "mask_kind": "none_allowed"}, None),
}
every_mask = pytest.mark.parametrize("form", MASKS)


def check_again(backend: Runner, case: Case, inputs: Inputs, *, deterministic: bool) -> None:
    """Six times the same bits: in a fixed order of everything, else of dbias, which is summed in one."""
    if not deterministic and case.bias is None:
        return
    choice = backend.choice(case, inputs, deterministic=deterministic)
    attention = partial(flash_dmattn.attention, return_lse=True, deterministic=deterministic, backend=choice)
    first = run(attention, case, inputs)
    for _ in range(5):
        again = run(attention, case, inputs)
        for name, x in first.items():
            if x is not None and (deterministic or name == "dbias"):
                assert torch.equal(x, again[name]), name


def check_masked(backend: Runner, case: Case, form: str, **flags: Any) -> None:
    changes, leave_out = MASKS[form]
    case = case.with_(**changes)
    inputs = call = case.build()
    if leave_out is not None:
        leave_out(inputs.mask)
    if form == "prepared":
        sizes = {"seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k, "is_causal": case.is_causal}
        call = replace(inputs, mask=PreparedMask.from_mask(inputs.mask, **sizes))
    backend.check(case, inputs, call, **flags)


CAPPED = {"softcap": 2.0, "logits": 3.0}  # from where tanh is a line to where it is flat


@pytest.mark.parametrize(
    "changes",
    (
        {"is_causal": True},
        {"seqlen_q": 330, "seqlen_k": 136, "is_causal": True},  # rows before the first key have none
        {"window_size": (70, 9)},
        {"seqlen_q": 100, "seqlen_k": 520, "window_size": (-1, 40)},
        {"batch": 2, "seqlen_k": 264, "window_size": (0, 64)},
    ),
    ids=str,
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dbias_beyond_a_band(backend: Runner, head_dim: int, changes: dict[str, Any], unwritten_is_nan: None) -> None:
    """A gradient that is stored tile by tile is zero where the band has no tile."""
    case = BASE.with_(head_dim=head_dim, bias=FULL, **changes)
    backend.check(case)


@pytest.mark.parametrize(
    "changes",
    (
        {"mask": TILES},
        {"mask": ("1", "Hq", "Lq", "Lk"), "bias": PER_KEY},
        {"mask": TILES, "num_heads_k": 8, "bias": FULL},
        {"batch": 2, "mask": TILES, "bias": ("1", "Hq", "Lq", "Lk")},
        {"is_causal": True},
        {"window_size": (300, 0)},
        {"window_size": (150, 260)},
        {"seqlen_q": 700, "window_size": (-1, 40)},
        {},
        CAPPED,
        {**CAPPED, "bias": PER_KEY},
        {**CAPPED, "bias": FULL, "window_size": (300, 0)},
        {"num_heads_k": 2, "bias": ("1", "Hq", "Lq", "Lk")},
        {"num_heads_k": 2, "bias": ("1", "1", "Lq", "Lk"), "is_causal": True},
        {"num_heads_k": 2, "bias": ("1", "Hk", "Lq", "Lk"), "mask": FULL},
    ),
    ids=str,
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@both_orders
def test_many_tiles(
    backend: Runner, deterministic: bool, head_dim: int, changes: dict[str, Any], unwritten_is_nan: None
) -> None:
    """Add to the same queries from many tiles of keys: all at once, in bands, in lists of full and partial tiles.

    Rings of stages go round, and SMs take one tile after the other.
    """
    sizes = {"seqlen_q": 1190, "seqlen_k": 1096, "num_heads": 8, "head_dim": head_dim}
    case = BASE.with_(**{**sizes, **changes})
    inputs = case.build()
    if inputs.mask is not None:
        tiles_of_every_kind(inputs.mask)
    backend.check(case, inputs, deterministic=deterministic)
    check_again(backend, case, inputs, deterministic=deterministic)


@pytest.mark.parametrize("needs_grad", (ALL, ("bias",), ("k", "bias"), ("q", "v", "bias")), ids="-".join)
@pytest.mark.parametrize("deterministic", (False, True), ids=("any_order", "in_order"))
@pytest.mark.parametrize("lengths", ((2, 264), (65, 384), (193, 512), (300, 776)), ids=str)
@pytest.mark.parametrize("heads", ((8, 8, 64), (16, 8, 40)), ids=str)
def test_two_tiles_of_keys_at_a_time(
    backend: Runner,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    deterministic: bool,
    needs_grad: tuple[str, ...],
) -> None:
    """Blocks have 256 keys, the last maybe one tile, if there are so many that fewer rounds pay."""
    (num_heads, num_heads_k, head_dim), (seqlen_q, seqlen_k) = heads, lengths
    case = BASE.with_(
        batch=8, num_heads=num_heads, num_heads_k=num_heads_k, head_dim=head_dim, bias=FULL, needs_grad=needs_grad
    )
    case = case.with_(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    assert schedule_of(differentiated(case, deterministic)).has_two_key_tiles
    backend.check(case, deterministic=deterministic)


@pytest.mark.parametrize("needs_grad", (ALL, ("q",), ("k", "v")), ids="-".join)
@pytest.mark.parametrize(
    "changes",
    (
        {},
        {"is_causal": True},
        {"window_size": (100, 30), "dtype": torch.float16},
        {"logits": 30.0, "softmax_scale": -0.3},  # p is almost all 0 and 1
        {"head_dim": 136, "head_dim_v": 72, "bias": ("B", "Hq", "Lq", "1")},  # which only shifts lse
    ),
    ids=str,
)
@pytest.mark.parametrize("lengths", ((1, 128), (65, 129), (300, 330)), ids=str)
@both_orders
def test_whole_tiles_of_keys_of_wide_heads(
    backend: Runner,
    deterministic: bool,
    lengths: tuple[int, int],
    changes: dict[str, Any],
    needs_grad: tuple[str, ...],
    unwritten_is_nan: None,
) -> None:
    """Blocks have 128 keys of head dims up to 192 and 128, where work tiles are more than SMs."""
    seqlen_q, seqlen_k = lengths
    num_heads_k = NUM_SMS // (4 * -(-seqlen_k // TILE)) + 1
    case = BASE.with_(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=2 * num_heads_k, num_heads_k=num_heads_k)
    case = case.with_(**{"head_dim": 192, "head_dim_v": 128, "needs_grad": needs_grad, **changes})
    assert schedule_of(differentiated(case, deterministic), NUM_SMS).block_n == TILE
    inputs = case.build()
    backend.check(case, inputs, deterministic=deterministic)
    check_again(backend, case, inputs, deterministic=deterministic)


@pytest.mark.parametrize("needs_grad", (ALL, ("q",), ("q", "k"), ("q", "bias")), ids="-".join)
@pytest.mark.parametrize(
    ("bias", "bias_dtype"),
    (
        (None, None),
        (("B", "Hq", "Lq", "1"), None),
        (("1", "Hq", "Lq", "Lk"), None),
        (FULL, None),
        (("1", "Hq", "Lq", "Lk"), torch.float32),
        (FULL, torch.float32),
    ),
    ids=("none", "per query", "shared", "full", "shared in fp32", "full in fp32"),
)
@pytest.mark.parametrize("lengths", ((2, 136), (65, 200), (193, 256)), ids=str)
@pytest.mark.parametrize("heads", ((70, 70, 64), (140, 70, 40), (140, 70, 32), (70, 70, 24)), ids=str)
def test_dq_that_a_block_completes(
    backend: Runner,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    bias: tuple[str, ...] | None,
    bias_dtype: torch.dtype | None,
    needs_grad: tuple[str, ...],
) -> None:
    """Blocks of two key tiles that are all keys: dq is stored, not added to sums, and the same in every run."""
    (num_heads, num_heads_k, head_dim), (seqlen_q, seqlen_k) = heads, lengths
    case = BASE.with_(num_heads=num_heads, num_heads_k=num_heads_k, head_dim=head_dim, bias=bias)
    case = case.with_(seqlen_q=seqlen_q, seqlen_k=seqlen_k, needs_grad=needs_grad, bias_dtype=bias_dtype)
    case = case.with_(batch=1 if bias is None or bias[0] == "B" else 3)
    schedule = schedule_of(differentiated(case, True))
    assert schedule.completes_dq and schedule.has_two_key_tiles and not schedule.is_ordered
    inputs = case.build()
    backend.check(case, inputs, deterministic=True)
    check_again(backend, case, inputs, deterministic=True)


@pytest.mark.parametrize("lengths", ((193, 264), (1190, 70)), ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dbias_per_key_is_summed_before_it_is_rounded(backend: Runner, head_dim: int, lengths: tuple[int, int]) -> None:
    """If the loss is only of lse, which delta has in fp32, ds in 16 bits would be all that is rounded: 1e-3 of it."""
    seqlen_q, seqlen_k = lengths
    case = BASE.with_(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, bias=PER_KEY, needs_grad=("bias",))
    case = case.with_(bias_dtype=torch.float32)
    inputs = case.build()
    inputs = replace(inputs, dout=torch.zeros_like(inputs.dout))
    if backend.choice(case, inputs) != "cuda":
        pytest.skip("the backward kernels of this case are not built")
    attention = partial(flash_dmattn.attention, return_lse=True, backend="cuda")
    dbias = run(attention, case, inputs)["dbias"]
    assert dbias is not None
    assert error(dbias, oracle(case, inputs)["dbias"]) < 1e-5


# Queries of a step of long walks, whose dq is computed turned; such walks begin at 4096 queries.
TURNED = 80


@pytest.mark.parametrize("window_size", (None, (-1, 4200), (-1, 4100)), ids=str)
@pytest.mark.parametrize("lengths", ((4096, 64), (51 * TURNED + 80, 129), (54 * TURNED - 79, 100)), ids=str)
@pytest.mark.parametrize("heads", ((2, 2, 128), (4, 2, 104), (2, 1, 88)), ids=str)
def test_long_walks(
    backend: Runner,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    window_size: tuple[int, int] | None,
    unwritten_is_nan: None,
) -> None:
    num_heads, num_heads_k, head_dim = heads
    sizes = {"num_heads": num_heads, "num_heads_k": num_heads_k, "head_dim": head_dim}
    for needs_grad in (ALL, ("q",), ("k", "v")):
        case = BASE.with_(
            seqlen_q=lengths[0], seqlen_k=lengths[1], window_size=window_size, needs_grad=needs_grad, **sizes
        )
        backend.check(case)


@pytest.mark.parametrize("bias_kind", ("normal", "inf", "huge"))
@pytest.mark.parametrize("softcap", (0.0, 0.02, 30.0, 1000.0))
@pytest.mark.parametrize("softmax_scale", (None, 0.0, -0.3))
@pytest.mark.parametrize("bias", (*BIASES, "1-Hk"))
@pytest.mark.parametrize("head_dim", (64, 192))
def test_extreme_scores(
    backend: Runner, head_dim: int, bias: str, softmax_scale: float | None, softcap: float, bias_kind: str
) -> None:
    case = BASE.with_(softcap=softcap, softmax_scale=softmax_scale, logits=30.0, head_dim=head_dim, bias_kind=bias_kind)
    case = case.with_(bias=BIASES[bias]) if bias in BIASES else case.with_(bias=SHARED[bias], **GROUPS)
    backend.check(case)


@every_bias
def test_dout_in_a_layout_of_its_own(backend: Runner, bias: str) -> None:
    case = BASE.with_(bias=BIASES[bias])
    inputs = case.build()
    for layout in LAYOUTS.values():
        backend.check(case, inputs, replace(inputs, dout=layout(inputs.dout)))
    expanded = replace(inputs, dout=inputs.dout[:, :, :1, :1].expand_as(inputs.dout))
    backend.check(case, expanded)


@pytest.mark.parametrize("seqlen_k", (72, 129))
@pytest.mark.parametrize("is_causal", (False, True))
@both_orders
def test_more_work_than_sms(backend: Runner, deterministic: bool, is_causal: bool, seqlen_k: int) -> None:
    """Handed out evenly, or as blocks finish; the heads of a group one by one, or of many groups all by one block."""
    few = BASE.with_(seqlen_q=65, seqlen_k=seqlen_k, num_heads=200, num_heads_k=100, is_causal=is_causal)
    many = few.with_(batch=6, seqlen_q=9, num_heads_k=200, num_heads=400)
    for case in (few, many):
        backend.check(case, deterministic=deterministic)


@pytest.mark.parametrize("needs_grad", (("q",), ("k",), ("v", "bias"), ALL), ids="-".join)
@pytest.mark.parametrize("mask", (None, ("B", "Hq", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk")), ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_groups_first_and_then_heads(
    backend: Runner, head_dim: int, mask: tuple[str, ...] | None, needs_grad: tuple[str, ...], unwritten_is_nan: None
) -> None:
    """Work tiles of a group store dk and dv; later ones, of a head each, add to sums, by batch or by head.

    Walks are long, and a few works more than fill whole waves: SMs would wait long for whole groups alone. Each head
    has its own mask: of one that a group shares blocks decide.
    """
    tiles, seqlen_q = -(-31 * NUM_SMS // 100), 450 if head_dim <= 128 else 600
    if NUM_SMS < 10:  # a work more is much of a wave, and work tiles of 64 keys are twice as many
        seqlen_q = 520 if head_dim <= 128 else 1200
    case = BASE.with_(batch=2, num_heads=15, num_heads_k=5, seqlen_q=seqlen_q, seqlen_k=tiles * TILE - 31)
    case = case.with_(head_dim=head_dim, needs_grad=needs_grad, mask=mask, mask_kind="empty_tiles", bias=PER_KEY)
    assert 0 < schedule_of(differentiated(case, False), NUM_SMS).full_group_pairs < 10
    backend.check(case)


@pytest.mark.parametrize("needs_grad", (("q",), ("k",), ("v", "bias"), ALL), ids="-".join)
@pytest.mark.parametrize(
    "bias", (None, PER_KEY, FULL, ("1", "Hq", "Lq", "Lk")), ids=("none", "per key", "stored", "shared")
)
@pytest.mark.parametrize("has_sink", (False, True), ids=("steps", "sink"))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_key_blocks_of_whole_groups_under_a_mask(
    backend: Runner,
    head_dim: int,
    has_sink: bool,
    bias: tuple[str, ...] | None,
    needs_grad: tuple[str, ...],
    unwritten_is_nan: None,
) -> None:
    """Blocks decide: the work tile of a group's first head stores dk and dv of the group, or each head adds to sums.

    Most key blocks are seen by few queries or none, some by all. Or all are seen by few but for one, the sink, in a
    call whose walks the host leaves whole.
    """
    tiles_k, heads, heads_k = (18 if has_sink else 8, 16, 8) if NUM_SMS > 3 else (3 if head_dim <= 128 else 2, 2, 1)
    case = BASE.with_(batch=2, num_heads=heads, num_heads_k=heads_k, head_dim=head_dim, mask=TILES, bias=bias)
    case = case.with_(seqlen_q=10 * TILE - 70, seqlen_k=tiles_k * TILE - 32, mask_kind="random")
    case = case.with_(needs_grad=needs_grad if bias else tuple(x for x in needs_grad if x != "bias"))
    schedule = schedule_of(differentiated(case, False), NUM_SMS)
    assert schedule.blocks_decide and (NUM_SMS <= 3 or not has_sink or schedule.full_group_pairs > 0), schedule
    inputs = case.build()
    assert inputs.mask is not None
    for i, (entry, head) in enumerate(itertools.product(*map(range, inputs.mask.shape[:2]))):
        for tile in range(-(-case.seqlen_k // TILE)):
            stop = (1 if tile else 10) if has_sink else (1, 0, 1, 10, 2)[(i + tile) % 5]
            inputs.mask[entry, head, stop * TILE :, tile * TILE : (tile + 1) * TILE] = False
    backend.check(case, inputs)


@pytest.mark.parametrize("needs_grad", (("v", "bias"), ALL), ids="-".join)
def test_groups_first_of_two_tiles_of_keys(
    backend: Runner, needs_grad: tuple[str, ...], unwritten_is_nan: None
) -> None:
    """The same where a work has two tiles of keys; the last has one and a part."""
    tiles = -(-203 * NUM_SMS // 700) * 2
    seqlen_q = 1300 if NUM_SMS > 3 else 2100  # of three SMs fewer wait
    case = BASE.with_(batch=1, num_heads=14, num_heads_k=7, seqlen_q=seqlen_q, seqlen_k=tiles * TILE - 24)
    case = case.with_(bias=FULL, needs_grad=needs_grad)
    schedule = schedule_of(differentiated(case, False), NUM_SMS)
    assert schedule.has_two_key_tiles and 0 < schedule.full_group_pairs < 7
    backend.check(case)


@pytest.mark.parametrize("shape", (("B", "Hq", "1", "Lk"), ("1", "Hq", "Lq", "Lk"), FULL), ids="-".join)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_softcap_with_a_great_bias_of_keys_left_out(backend: Runner, head_dim: int, shape: tuple[str, ...]) -> None:
    """A bias of finfo.max over log 2 is inf, and a key that is left out is marked by -inf."""
    case = BASE.with_(bias=shape, head_dim=head_dim, mask=("B", "1", "Lq", "Lk"), mask_kind="all_allowed", **CAPPED)
    inputs = case.build()
    assert inputs.bias is not None and inputs.mask is not None
    inputs.mask[..., ::3] = False
    inputs.bias[..., ::3] = torch.finfo(inputs.bias.dtype).max
    backend.check(case, inputs)


@pytest.mark.parametrize("capped", (True, False), ids=("softcap", "no softcap"))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_bias_that_is_nan_at_hidden_keys_of_great_rows(backend: Runner, head_dim: int, capped: bool) -> None:
    """Rows with a sink of 1e4 or -1e4 take the way of great rows."""
    case = BASE.with_(bias=FULL, head_dim=head_dim, mask=("B", "1", "Lq", "Lk"), sink="huge", data="hidden nan bias")
    backend.check(case.with_(**CAPPED) if capped else case)


# The gradient of a bias that heads or batch entries share

GROUPED = BASE.with_(**GROUPS)


def other_tiles_of_each_head(mask: Tensor) -> None:
    """Leaves out a third of the tiles, and with them all of the tile that each head of attention starts with."""
    for b, h in itertools.product(range(mask.shape[0]), range(mask.shape[1])):
        for i, j in itertools.product(range(0, mask.shape[2], TILE), range(0, mask.shape[3], TILE)):
            if (b + h + (i + 2 * j) // TILE) % 3 == 0:
                mask[b, h, i : i + TILE, j : j + TILE] = False


@pytest.mark.parametrize("shape", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("masked", (False, True))
def test_more_heads_that_share_than_a_warp_has_lanes(
    backend: Runner, masked: bool, shape: tuple[str, ...], unwritten_is_nan: None
) -> None:
    """Share a bias among 80 and 40 heads; each tile leaves other heads out, also all heads of a warp."""
    case = GROUPED.with_(batch=5, num_heads=80, num_heads_k=2, bias=shape, mask=FULL if masked else None)
    inputs = case.with_(mask_kind="all_allowed").build()
    if masked:
        other_tiles_of_each_head(inputs.mask)
        inputs.mask[:2, :, :TILE, :TILE] = False
        inputs.mask[3:, :, TILE:] = False
    backend.check(case, inputs, alone=True)


@pytest.mark.parametrize("heads", ("1", "Hk"))
def test_a_shared_gradient_of_a_bias_that_is_expanded(backend: Runner, heads: str, unwritten_is_nan: None) -> None:
    """Over batch entries, and heads of k, that have a gradient each; the bias has one value, and strides of 0."""
    case = GROUPED.with_(bias=("B", heads, "Lq", "Lk"))
    inputs = case.build()
    assert inputs.bias is not None
    expanded = replace(inputs, bias=inputs.bias[:1, :1].expand_as(inputs.bias))
    backend.check(case, expanded, alone=True)


@pytest.mark.parametrize("form", ("none", "causal", "of all entries", "first tiles empty"))
@both_orders
@pytest.mark.parametrize("lengths", ((2, 8), (65, 264), (193, 136), (300, 776)), ids=str)
@pytest.mark.parametrize("batch", (2, 4, 8))
@pytest.mark.parametrize("heads", ((2, 2, 64), (4, 1, 40), (2, 2, 128), (6, 2, 104)), ids=str)
def test_a_gradient_that_clusters_sum(
    backend: Runner,
    heads: tuple[int, int, int],
    batch: int,
    lengths: tuple[int, int],
    deterministic: bool,
    form: str,
    unwritten_is_nan: None,
) -> None:
    """Batch entries share a bias: their blocks send each other ds, and walk the same tiles."""
    (num_heads, num_heads_k, head_dim), (seqlen_q, seqlen_k) = heads, lengths
    case = BASE.with_(batch=batch, num_heads=num_heads, num_heads_k=num_heads_k, head_dim=head_dim)
    case = case.with_(seqlen_q=seqlen_q, seqlen_k=seqlen_k, bias=("1", "Hq", "Lq", "Lk"))
    if form == "of all entries":
        case, form = case.with_(mask=("1", "1", "Lq", "Lk"), mask_kind="empty_rows"), "none"
    assert schedule_of(differentiated(case, deterministic)).writer == "clusters"
    check_masked(backend, case, form, deterministic=deterministic)


@both_orders
@pytest.mark.parametrize("changes", ({}, {"is_causal": True}, {"mask": ("1", "1", "Lq", "Lk")}), ids=str)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_more_works_than_clusters(
    backend: Runner, head_dim: int, changes: dict[str, Any], deterministic: bool, unwritten_is_nan: None
) -> None:
    """Shared out evenly, as clusters finish, and in the order of turns; dbias is the same in every one."""
    case = BASE.with_(batch=8, num_heads=20, num_heads_k=10, seqlen_q=200, seqlen_k=392, head_dim=head_dim, **changes)
    case = case.with_(bias=("1", "Hq", "Lq", "Lk"))
    assert schedule_of(differentiated(case, deterministic)).writer == "clusters"
    inputs = case.build()
    if inputs.mask is not None:
        tiles_of_every_kind(inputs.mask)
    backend.check(case, inputs, deterministic=deterministic)
    check_again(backend, case, inputs, deterministic=deterministic)


@pytest.mark.parametrize("needs_grad", (("q", "bias"), ("k", "bias"), ("v", "bias"), ("q", "v", "bias")), ids="-".join)
@both_orders
def test_what_clusters_are_asked_for(
    backend: Runner, deterministic: bool, needs_grad: tuple[str, ...], unwritten_is_nan: None
) -> None:
    case = GROUPED.with_(batch=4, seqlen_k=264, bias=("1", "Hq", "Lq", "Lk"), needs_grad=needs_grad, dlse=True)
    backend.check(case, deterministic=deterministic)


@every_mask
@pytest.mark.parametrize("softcap", (0.0, 2.0))
@pytest.mark.parametrize(("dtype", "chunks"), ((torch.float16, 2), (torch.bfloat16, 7)), ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_chunks_of_a_shared_gradient(
    backend: Runner,
    dtype: torch.dtype,
    head_dim: int,
    chunks: int,
    softcap: float,
    form: str,
    unwritten_is_nan: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots of two columns of tiles, of rows that end anywhere."""
    monkeypatch.setattr(passes, "NUM_DBIAS_CHUNKS", chunks)
    case = BASE.with_(batch=7, seqlen_q=130, seqlen_k=197, head_dim=head_dim, dtype=dtype, softcap=softcap)
    case = case.with_(bias=("1", "1", "Lq", "Lk"), needs_grad=("q", "bias"))
    assert schedule_of(differentiated(case)).writer == "shared_dbias"
    check_masked(backend, case, form)


def test_thousands_of_entries_that_share_a_bias(backend: Runner, unwritten_is_nan: None) -> None:
    """More heads in a chunk than a warp has lanes, on any GPU."""
    case = BASE.with_(batch=4096, num_heads=6, num_heads_k=6, head_dim=32, seqlen_q=49, seqlen_k=49)
    case = case.with_(bias=("1", "1", "Lq", "Lk"), needs_grad=("bias",), dlse=False)
    backend.check(case, alone=True)


@pytest.mark.parametrize("form", ("none", "causal", "full", "empty tiles"))
@pytest.mark.parametrize("keys", (261, 129))
def test_rows_of_a_bias_that_start_between_16_bytes(backend: Runner, keys: int, form: str) -> None:
    """A bias with a value for each score is copied into longer rows, and its gradient comes out of such."""
    changes, leave_out = MASKS[form]
    case = BASE.with_(seqlen_k=keys, bias=FULL, **changes)
    inputs = case.build()
    if leave_out is not None:
        leave_out(inputs.mask)
    backend.check(case, inputs)
    assert backend.choice(case, inputs) == "cuda"


# A bias in fp32 beside q, k and v in 16 bits

FLOATS = BASE.with_(bias_dtype=torch.float32)
BY_HEADS = ("B", "Hk", "Lq", "Lk")
OWN_OR_SHARED = {
    "own": FULL,
    "by entries": ("1", "Hq", "Lq", "Lk"),
    "by heads": BY_HEADS,
    "by all": ("1", "1", "Lq", "Lk"),
}
every_float_bias = pytest.mark.parametrize("shape", OWN_OR_SHARED.values(), ids=OWN_OR_SHARED)


@every_mask
@every_float_bias
@pytest.mark.parametrize(("head_dim", "deterministic"), ((64, False), (24, True)), ids=str)
def test_a_bias_in_fp32_under_every_mask(
    backend: Runner, head_dim: int, deterministic: bool, shape: tuple[str, ...], form: str, unwritten_is_nan: None
) -> None:
    case = FLOATS.with_(head_dim=head_dim, bias=shape, **GROUPS)
    assert backend.choice(case, case.build()) == "cuda"
    check_masked(backend, case, form, deterministic=deterministic)


@pytest.mark.parametrize(
    ("lengths", "dtype"),
    (((1, 264), torch.float16), ((129, 201), torch.bfloat16), ((300, 776), torch.float16)),
    ids=str,
)
@pytest.mark.parametrize("needs_grad", (ALL, (), ("bias",), ("q", "k", "v")), ids="-".join)
@every_float_bias
def test_lengths_and_gradients_of_a_bias_in_fp32(
    backend: Runner, shape: tuple[str, ...], needs_grad: tuple[str, ...], lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    """Rows between 16 bytes are copied where the copy is small, or rows are short."""
    seqlen_q, seqlen_k = lengths
    case = FLOATS.with_(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype, bias=shape, needs_grad=needs_grad)
    backend.check(case.with_(batch=9 if shape[0] == "1" else 2))


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("shape", (FULL, ("1", "Hq", "Lq", "Lk")), ids="-".join)
@pytest.mark.parametrize("data", ("row -1e9", "row -1e30", "key 1e9", "key 1e30", "seen nan bias", "hidden inf bias"))
def test_values_of_a_bias_in_fp32(backend: Runner, data: str, shape: tuple[str, ...], masked: bool) -> None:
    """Great ones, for which there is a loop of its own, NaN and inf."""
    case = FLOATS.with_(bias=shape, data=data, mask=("B", "1", "Lq", "Lk") if masked else None)
    backend.check(case, alone=True)


@pytest.mark.parametrize("mask", (None, ("B", "1", "1", "Lk")), ids=("no mask", "padding"))
@pytest.mark.parametrize("shape", (FULL, ("1", "Hq", "Lq", "Lk")), ids="-".join)
@pytest.mark.parametrize("seqlen_q", (100, 150, 250, 330))
@pytest.mark.parametrize("head_dim", (24, 64))
def test_rows_and_padding_beside_a_bias_in_fp32(
    backend: Runner, head_dim: int, seqlen_q: int, shape: tuple[str, ...], mask: tuple[str, ...] | None
) -> None:
    """The forward pass of head dims up to 32 has 128, 192 or 256 rows to a block."""
    backend.check(FLOATS.with_(head_dim=head_dim, seqlen_q=seqlen_q, bias=shape, mask=mask), alone=True)


@pytest.mark.parametrize(
    "changes", ({"bias_kind": "inf"}, {"sink": "huge"}, {"softcap": 2.0, "needs_grad": ()}), ids=str
)
@every_float_bias
def test_other_facts_beside_a_bias_in_fp32(backend: Runner, shape: tuple[str, ...], changes: dict[str, Any]) -> None:
    backend.check(FLOATS.with_(bias=shape, **changes), alone=True)


@pytest.mark.parametrize("two", (False, True), ids=("a tile of keys", "two tiles of keys"))
@every_float_bias
def test_a_bias_in_fp32_is_not_rounded(backend: Runner, shape: tuple[str, ...], two: bool) -> None:
    """At a size of 30 bf16 has steps of 0.125 to 0.25: with a rounded bias results miss the rule of accuracy."""
    case = FLOATS.with_(bias=shape)
    if two:
        case = case.with_(batch=8, num_heads=16, num_heads_k=8, seqlen_q=65, seqlen_k=512)
    inputs = case.build()
    assert inputs.bias is not None
    inputs = replace(inputs, bias=30 * inputs.bias)
    assert schedule_of(differentiated(case), NUM_SMS).has_two_key_tiles == (two and shape == FULL)
    backend.check(case, inputs, alone=True)
    rounded = backend(case, replace(inputs, bias=inputs.bias.bfloat16().float()))
    with pytest.raises(AssertionError):
        assert_accurate(rounded, case, inputs)


@pytest.mark.parametrize("changes", ({}, {"is_causal": True}, {"mask": TILES}), ids=str)
@pytest.mark.parametrize(("chunks", "keys"), ((1, 264), (3, 264), (1, 197)))
@every_float_bias
def test_a_gradient_in_fp32_is_not_rounded(
    backend: Runner,
    shape: tuple[str, ...],
    chunks: int,
    keys: int,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the loss is only of lse, which delta has in fp32, nothing has 16 bits but what kernels would make of ds."""
    monkeypatch.setattr(passes, "NUM_DBIAS_CHUNKS", chunks)
    case = FLOATS.with_(
        batch=9, seqlen_k=264 if shape == BY_HEADS else keys, bias=shape, needs_grad=("bias",), **changes
    )
    inputs = case.build()
    inputs = replace(inputs, dout=torch.zeros_like(inputs.dout))
    dbias = backend(case, inputs)["dbias"]
    assert dbias is not None and dbias.dtype == torch.float32
    assert error(dbias, oracle(case, inputs)["dbias"]) < 1e-5


@pytest.mark.parametrize("heads", ("1", "Hk"))
def test_a_bias_in_fp32_that_is_expanded(backend: Runner, heads: str, unwritten_is_nan: None) -> None:
    case = FLOATS.with_(bias=("B", heads, "Lq", "Lk"), **GROUPS)
    inputs = case.build()
    assert inputs.bias is not None
    expanded = replace(inputs, bias=inputs.bias[:1, :1].expand_as(inputs.bias))
    backend.check(case, expanded, alone=True)
