"""Run the Triton kernels in Triton's interpreter on CPU tensors: `python interpreted_triton.py <seed> <cases>`.

With "bugs" in the place of the seed, the calls of `predecessor_cases.py`, each with its mask dense and prepared; the
other words stand below, beside what they run.

A process of its own, because Triton decides at its import whether it interprets, and because an access far out of
bounds is a segmentation fault there. Random cases in fp32 and fp16 (bf16 products are wrong there), with NaN
margins round inputs, a third of the masks prepared, against the fp64 formula; on tiles of several shapes, and as if the
GPU had more SMs than the call has programs. What the kernels write to is NaN before, and so is what lies round
it, then and afterwards. Every failure prints the lines that rebuild it.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
os.environ.pop("FLASH_DMATTN_TEST_DTYPE", None)  # bf16 products are wrong here
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from accuracy import assert_accurate, assert_empty_rows_ignore_dlse, error, oracle, run  # noqa: E402
from cases import ALL, Case, Inputs  # noqa: E402
from descriptors import descriptors_wherever_they_serve  # noqa: E402
from draws import with_dropout, with_sink  # noqa: E402
from layouts import LAYOUTS, rearranged  # noqa: E402
from leading_calls import LeadingCall, results  # noqa: E402
from leading_calls import assert_accurate as leading_accurate  # noqa: E402
from out_of_tree import replace_backend, rules_without  # noqa: E402
from outcomes import report  # noqa: E402
from predecessor_cases import CALLS, build  # noqa: E402
from quick_interpreter import make_quick  # noqa: E402
from torch import Tensor  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.backends.triton import passes  # noqa: E402
from flash_dmattn.dispatch.registry import choices_changed  # noqa: E402
from flash_dmattn.masks import PreparedMask  # noqa: E402
from flash_dmattn.triton_kernels import (  # noqa: E402
    launch,
    plan,
    plan_backward,
    plan_forward,
    plan_slots,
    short_calls,
    tile_table,
)
from flash_dmattn.triton_kernels.plan import MOST_FEW_KEYS, Call  # noqa: E402
from flash_dmattn.triton_kernels.tile_table import Tile  # noqa: E402

EVERY_DTYPE = (torch.float32, torch.float16)
# The interpreter takes the same time for a step of any size, and a few steps show every edge.
TILES = (Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 64, 4, 1))
# More SMs than programs: loops over blocks are shared among programs.
NUM_SMS = (1, 64)
# Each has a kernel of its own for its gradient, or a way of storing it, and is too rare among all shapes.
SCORE_BIASES = tuple((*heads, "Lq", "Lk") for heads in (("B", "Hq"), ("1", "Hq"), ("B", "1"), ("1", "Hk")))
# At 0, a key mask whose programs need no parts does without them.
PARTS_BYTES = (plan_backward.MAX_PARTS_BYTES, plan_backward.MAX_PARTS_BYTES, 0)
FEW_PAIRS = (0, passes.FEW_PAIRS)

WIDE_TABLE = tile_table._wide_table

MARGIN = 64
_allocated: list[tuple[Tensor, int]] = []


def admit_cpu() -> None:
    """Lift the rule on the device, which the interpreter does not need."""
    make_quick()
    replace_backend("triton", rules=rules_without("triton", "device"))


def set_up(tile: Tile, num_sms: int, parts_bytes: int, few_pairs: int = 0, arch: str = "cpu") -> None:
    """Make the plans of the next calls with these tiles, and as on a GPU of so many SMs.

    Args:
        few_pairs: as `passes.FEW_PAIRS`; at 0 every bool mask is packed.
        arch: "sm_90" loads tiles by descriptors, where these pay.
    """

    def call(*given: Any) -> Call:
        made = Call(*given)
        made.num_sms, made.arch = num_sms, arch
        return made

    tile_table._FP32 = tile_table._SMALL = {256: tile}
    tile_table._wide_table = WIDE_TABLE if arch == "sm_90" else lambda *_: {512: tile}
    plan_backward.MAX_PARTS_BYTES = parts_bytes
    launch.Call = call
    launch.plans.clear()
    if few_pairs != passes.FEW_PAIRS:
        passes.FEW_PAIRS = few_pairs
        choices_changed()


def guarded_empty(*shape: Any, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
    """`torch.empty`, of NaN and between margins of NaN: what a kernel leaves out or writes beside its output shows."""
    sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
    if not dtype.is_floating_point:
        return torch.full(sizes, 77, dtype=dtype)
    whole = torch.full((sizes.numel() + 2 * MARGIN,), torch.nan, dtype=dtype)
    _allocated.append((whole, sizes.numel()))
    return whole[MARGIN : MARGIN + sizes.numel()].view(sizes)


def assert_margins() -> None:
    """Nothing was written beside what was allocated since the last call."""
    for whole, size in _allocated:
        assert bool(whole[:MARGIN].isnan().all()), "written before an output"
        assert bool(whole[MARGIN + size :].isnan().all()), "written behind an output"
    _allocated.clear()


def draw(rng: random.Random) -> Case:
    """A random call of at most a few tiles, of one batch entry and two heads where they are many."""

    def letters(*keys: str) -> tuple[str, ...]:
        return rng.choice("1B"), rng.choice(("1", "Hk", "Hq")), rng.choice(("1", "Lq")), rng.choice(keys)

    heads_k, batch = rng.choice((1, 1, 2)), rng.choice((1, 2))
    seqlen_q, seqlen_k = rng.choice((0, 1, 7, 31, 32, 33, 40)), rng.choice((0, 1, 5, 16, 17, 31, 33, 40, 70))
    # Now and then several tiles of a packed mask, or so many blocks that programs share them.
    length, group = rng.random(), rng.choice((1, 2))
    if length < 0.25:
        batch, group = 1, min(group, 3 - heads_k)
    if length < 0.1:
        seqlen_q, seqlen_k = rng.choice(((130, seqlen_k), (seqlen_q, 140), (130, 140)))
    elif length < 0.25:
        seqlen_q, seqlen_k = rng.choice(((1, 300), (17, 290), (150, 20), (200, 33), (140, 70)))
    case = Case(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=heads_k * group,
        num_heads_k=heads_k,
        head_dim=rng.choice((8, 16, 24)),
        head_dim_v=rng.choice((0, 0, 8, 32)),
        dtype=rng.choice((torch.float32, torch.float32, torch.float16)),
        bias_dtype=rng.choice((None, None, torch.float32)),
        mask=letters("1", "Lk", "Lk", "Lk") if rng.random() < 0.6 else None,
        mask_kind=rng.choice(("random", "random", "empty_rows", "empty_tiles", "none_allowed", "all_allowed")),
        bias=rng.choice((None, letters("1", "Lk"), letters("1", "Lk"), rng.choice(SCORE_BIASES))),
        bias_kind=rng.choice(("normal", "normal", "inf")),
        is_causal=rng.random() < 0.5,
        softmax_scale=rng.choice((None, None, 0.0, 0.7, -0.2)),
        softcap=rng.choice((0.0, 0.0, 0.0, 5.0)),
        window_size=rng.choice((None, None, None, (3, 0), (9, 5), (-1, 2), (20, -1))),
        needs_grad=rng.choice((ALL, ALL, (), ("bias",), ("q",), ("k", "bias"), ("v",))),
        dlse=rng.random() < 0.5,
        seed=rng.randrange(2**16),
    )
    return with_dropout(with_sink(case, random.Random(case.seed)), random.Random(f"dropout {case.seed}"))


def with_prepared_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, **flags: Any
) -> tuple[Tensor, ...]:
    """The call with its mask and its band prepared beforehand."""
    if mask is None:
        return flash_dmattn.attention(q, k, v, None, bias, return_lse=True, backend="triton", **flags)
    band = {"is_causal": flags.pop("is_causal"), "window_size": flags.pop("window_size")}
    prepared = PreparedMask.from_mask(mask, seqlen_q=q.shape[1], seqlen_k=k.shape[1], **band)
    return flash_dmattn.attention(q, k, v, prepared, bias, return_lse=True, backend="triton", **flags)


Settings = tuple[Any, ...]  # of `set_up`


def failure_of(case: Case, inputs: Inputs, layout: str | None, prepared: bool, settings: Settings) -> str | None:
    """Run a call; None where every result is as it has to be."""
    moved = inputs if layout is None else rearranged(inputs, LAYOUTS[layout])
    attention = partial(flash_dmattn.attention, return_lse=True, backend="triton")
    _allocated.clear()
    try:
        set_up(*settings)
        assert_accurate(run(with_prepared_mask if prepared else attention, case, moved), case, inputs)
        assert_margins()
    except Exception as failure:  # the other cases still count
        where = f"layout {layout}, prepared {prepared}, set_up{settings}"
        return f"{case.repro()}\n  {where}\n{type(failure).__name__}: {failure}"[:2000]
    return None


def random_calls(seed: int, count: int) -> Iterator[str | None]:
    """Outcomes of random calls on the kernels that walk tiles of keys."""
    short_calls.DTYPES = ()
    rng = random.Random(seed)
    for _ in range(count):
        case, layout = draw(rng), rng.choice((None, None, *LAYOUTS))
        settings = rng.choice(TILES), rng.choice(NUM_SMS), rng.choice(PARTS_BYTES), rng.choice(FEW_PAIRS)
        yield failure_of(case, case.build(), layout, case.seed % 3 == 0, settings)


def draw_short(rng: random.Random) -> Case:
    """A random call whose rows lie in one tile; now and then one whose gradients take two runs."""
    case = draw(rng)
    lengths = {"seqlen_q": rng.choice((1, 7, 31, 33, 40, 49)), "seqlen_k": rng.choice((1, 5, 17, 31, 32, 33, 49, 70))}
    if rng.random() < 0.1:
        lengths = rng.choice(({"seqlen_q": 120, "seqlen_k": 128}, {"seqlen_q": 130, "seqlen_k": 20}))
    heads_k = case.num_heads if rng.random() < 0.7 else case.num_heads_k  # else the forward kernel alone serves it
    short = case.with_(**lengths, num_heads_k=heads_k, batch=rng.choice((1, 2, 5)))
    if lengths["seqlen_q"] == 120:  # two runs of the backward kernel
        short = short.with_(num_heads_k=case.num_heads, bias=("1", "Hq", "Lq", "Lk"), needs_grad=(*ALL, "sink"))
    return short


def calls_of_short_rows(seed: int, count: int) -> Iterator[str | None]:
    """Outcomes of random calls on the kernels of short rows."""
    rng = random.Random(seed)
    for _ in range(count):
        case, layout = draw_short(rng), rng.choice((None, None, *LAYOUTS))
        short_calls.DTYPES, short_calls.TWO_RUNS_FROM = EVERY_DTYPE, rng.choice((1, 1, 1024))
        plan_slots.PROGRAMS_PER_SM = plan_slots.PROGRAMS_WITH_SLOTS = rng.choice((1, 4, 8))
        yield failure_of(
            case, case.build(), layout, case.seed % 3 == 0, (TILES[0], rng.choice(NUM_SMS), PARTS_BYTES[0])
        )


def predecessor_calls() -> Iterator[str | None]:
    """Outcomes of what the predecessor answered wrongly."""
    for name in CALLS:
        case, inputs = build(name)
        # Whole tiles of a mask are 128 x 128, and small blocks of them take the interpreter too long.
        tile = Tile(64, 64, 4, 1) if case.seqlen_q > 100 else TILES[0]
        for prepared in (False, True) if case.mask is not None else (False,):
            yield failure_of(case, inputs, None, prepared, (tile, 1, PARTS_BYTES[0]))


def empty_row_calls() -> Iterator[str | None]:
    """Outcomes of gradients that come back through the lse of empty rows."""
    attention = partial(flash_dmattn.attention, return_lse=True, backend="triton")
    for bias in (("1", "Hk", "Lq", "1"), ("B", "1", "1", "Lk"), ("B", "Hq", "Lq", "Lk")):
        case = Case(batch=1, num_heads=2, num_heads_k=1, bias=bias, mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows")
        set_up(TILES[0], 1, PARTS_BYTES[0])
        try:
            assert_empty_rows_ignore_dlse(attention, case, case.build())
            yield None
        except AssertionError as failure:
            yield f"{case.repro()}\n{failure}"


def wide_window_calls() -> Iterator[str | None]:
    """Outcomes of windows with a side beyond every key or query, about as long as an int32 reaches, or longer."""
    far = 2**31 - 1
    for window_size in ((far, 3), (3, far), (far - 40, far - 40), (2**32 + 3, 0), (2**40, 2**63 - 1)):
        for mask in (None, ("B", "1", "1", "Lk"), ("B", "1", "Lq", "Lk")):
            small = Case(batch=1, num_heads=2, num_heads_k=1, seqlen_q=20, seqlen_k=40)
            case = small.with_(window_size=window_size, mask=mask, bias=("1", "Hq", "Lq", "Lk"))
            yield failure_of(case, case.build(), None, False, (TILES[0], 1, PARTS_BYTES[0]))


def forgetting_calls() -> Iterator[str | None]:
    """Outcomes of asking whether the tensors of a call are freed after it, while its plans are remembered."""
    attention = partial(flash_dmattn.attention, return_lse=True, backend="triton")
    full = ("B", "Hq", "Lq", "Lk")
    for mask, bias in (
        (None, None),
        (full, full),
        (("B", "Hk", "1", "Lk"), ("1", "Hk", "1", "Lk")),
        (full, full[:3] + ("1",)),
        (None, ("1", *full[1:])),
    ):
        # Half precision makes rows as short as these a call of one tile.
        for num_sms, dtype in product(NUM_SMS, EVERY_DTYPE):
            case = Case(num_heads=2, num_heads_k=2, mask=mask, bias=bias, dlse=True, dtype=dtype)
            set_up(TILES[0], num_sms, PARTS_BYTES[0])
            inputs = case.build()
            given = {x.data_ptr() for x in (inputs.mask, *(x for _, x in inputs.floats())) if x is not None}
            run(attention, case, inputs)
            _allocated.clear()
            del inputs
            gc.collect()
            alive = sum(type(x) is Tensor and x.data_ptr() in given for x in gc.get_objects())
            yield f"{case.repro()}\n{alive} tensors on its memory are kept" if alive or not launch.plans else None


FEW_KEYS = Case(
    batch=1,
    num_heads=2,
    num_heads_k=1,
    seqlen_q=40,
    dtype=torch.float16,
    bias_dtype=torch.float32,
    dlse=True,
)


def few_keys_calls() -> Iterator[str | None]:
    """Outcomes of asking whether two roundings stay out of the gradients of few keys: of out to 16 bits, and of lse.

    dbias, in fp32, feels no other of 16 bits: with delta taken from out it is off by 1e-4 and more. lse is about 3e4
    with a huge bias, and kept to 2e-3: by so much p would be off, and ds by more where the terms of delta cancel.
    """
    attention = partial(flash_dmattn.attention, return_lse=True, backend="triton")
    for seqlen_k in (2, 20, MOST_FEW_KEYS):
        for bias in (("1", "Hk", "1", "Lk"), ("1", "Hq", "Lq", "Lk"), ("B", "Hq", "Lq", "Lk")):
            for mask in (None, ("B", "1", "1", "Lk"), ("1", "1", "Lq", "Lk")):
                case = FEW_KEYS.with_(seqlen_k=seqlen_k, is_causal=True, bias=bias, mask=mask)
                set_up(TILES[0], 1, PARTS_BYTES[0])
                inputs = case.build()
                found = error(run(attention, case, inputs)["dbias"], oracle(case, inputs)["dbias"])
                yield None if found < 5e-6 else f"{case.repro()}\n  dbias is off by {found:.1e}"
    for window_size in ((3, 0), (20, 11), (31, 0)):
        for mask in (None, ("1", "1", "Lq", "Lk"), ("B", "Hk", "1", "Lk")):
            case = FEW_KEYS.with_(seqlen_k=96, mask=mask, bias=("B", "Hq", "Lq", "Lk"), window_size=window_size)
            set_up(TILES[0], 1, PARTS_BYTES[0])
            inputs = case.build()
            found = error(run(attention, case, inputs)["dbias"], oracle(case, inputs)["dbias"])
            yield None if found < 5e-6 else f"{case.repro()}\n  dbias is off by {found:.1e}"
    for mask in (None, ("B", "Hk", "Lq", "Lk"), ("B", "1", "1", "Lk")):
        for bias in (("1", "1", "Lq", "Lk"), ("B", "Hq", "Lq", "Lk"), ("1", "Hk", "1", "Lk")):
            case = Case(dtype=torch.float32, dlse=True, mask=mask, bias=bias, bias_kind="huge")
            set_up(TILES[0], 1, PARTS_BYTES[0])
            inputs = case.build()
            got, exact = run(attention, case, inputs), oracle(case, inputs)
            off = {name: error(got[name], exact[name]) for name in ("dq", "dk", "dv", "dbias")}
            yield None if max(off.values()) < 1e-5 else f"{case.repro()}\n  {off}"


# The same calls every time, for lines of the kernels that random ones may all miss: 40 queries and 70 keys are two and
# three tiles, and the last are not whole.
PLAIN = Case(batch=1, seqlen_q=40, seqlen_k=70, num_heads=2, num_heads_k=1, dtype=torch.float32, dlse=True)
CAPPED = PLAIN.with_(softcap=2.0, logits=3.0)  # from where tanh is a line to where it is flat
FEW_ROWS = PLAIN.with_(seqlen_q=7, seqlen_k=300, needs_grad=())
SUNK = PLAIN.with_(sink="normal", needs_grad=(*ALL, "sink"))
GROUPS = FEW_ROWS.with_(batch=2, seqlen_q=1, seqlen_k=600, num_heads=4, num_heads_k=2)
FULL = ("B", "Hq", "Lq", "Lk")
SHARED = ("1", "1", "Lq", "Lk")
LINES = {
    "scores": (
        PLAIN.with_(num_heads=4, num_heads_k=2, logits=10.0),  # maxima rise from tile to tile
        PLAIN.with_(bias=FULL),
        PLAIN.with_(bias=SHARED),
        # Tiles without an edge take the scale after the maximum: of a negative one that would be the minimum.
        PLAIN.with_(softmax_scale=-3.0, logits=10.0, seqlen_q=32, seqlen_k=64),
    ),
    "softcap": (CAPPED, CAPPED.with_(bias=FULL), CAPPED.with_(bias=SHARED)),
    "bands": (
        PLAIN.with_(is_causal=True),
        PLAIN.with_(is_causal=True, seqlen_q=70, seqlen_k=40),
        PLAIN.with_(window_size=(9, 5)),
        PLAIN.with_(window_size=(7, -1), bias=SHARED),
        PLAIN.with_(window_size=(2**40, 0)),
        PLAIN.with_(window_size=(2**40, 0), mask=SHARED),
    ),
    "masks": (
        PLAIN.with_(num_heads=4, num_heads_k=2, mask=("1", "Hk", "Lq", "Lk"), mask_kind="empty_rows", seqlen_k=140),
        PLAIN.with_(mask=("B", "1", "1", "Lk"), bias=SHARED),
    ),
    # Programs share the keys: parts differ, and some rows have a key in none of them.
    "parts": (
        FEW_ROWS.with_(logits=3.0),
        FEW_ROWS.with_(mask=SHARED, mask_kind="empty_rows"),
        FEW_ROWS.with_(sink="normal"),
        # Blocks at both edges of a window are shared as the others are.
        FEW_ROWS.with_(window_size=(150, 40), logits=3.0),
        PLAIN.with_(seqlen_q=17, seqlen_k=300, window_size=(150, 40), needs_grad=()),
        # The heads of a group are rows of one tile, and lie in out before the queries that they are taken for.
        GROUPS,
        GROUPS.with_(sink="normal", bias=("B", "Hq", "1", "Lk"), dtype=torch.float16),
        # Sets of kept keys behind a window; a mask of each group is a set, one of each head a row of tiles.
        FEW_ROWS.with_(mask=("B", "1", "1", "Lk"), window_size=(150, 40), sink="normal"),
        GROUPS.with_(mask=("B", "Hk", "1", "Lk")),
        GROUPS.with_(mask=("B", "Hq", "1", "Lk"), softcap=2.0),
    ),
    # A logit of each head: in rows of many keys and of none, where few keys are normalised again, and for the G heads
    # of a group as rows of one.
    "sinks": (
        SUNK.with_(mask=SHARED, mask_kind="empty_rows"),
        SUNK.with_(bias=("B", "Hq", "Lq", "1"), mask=SHARED, mask_kind="empty_rows"),
        SUNK.with_(seqlen_k=20, bias=FULL, logits=10.0),
        SUNK.with_(seqlen_q=1, seqlen_k=600, num_heads=4, num_heads_k=2),
    ),
}


DROPPED = PLAIN.with_(dropout_p=0.4)
LINES["dropout"] = (
    DROPPED,
    DROPPED.with_(num_heads=4, num_heads_k=2, bias=FULL, is_causal=True, batch=2),
    DROPPED.with_(bias=SHARED, mask=SHARED, mask_kind="empty_rows", sink="normal", needs_grad=(*ALL, "sink")),
    DROPPED.with_(bias=("1", "Hk", "1", "Lk"), mask=("B", "1", "1", "Lk"), seqlen_q=40),  # keys stay in their order
    DROPPED.with_(bias=("1", "Hk", "1", "Lk"), mask=("B", "1", "1", "Lk"), seqlen_q=9),  # keys are gathered
    DROPPED.with_(seqlen_k=20, bias=FULL, logits=10.0),
    DROPPED.with_(softcap=2.0, window_size=(9, 5), bias=SHARED),
    DROPPED.with_(dropout_p=1.0, bias=FULL),
    DROPPED.with_(seqlen_q=1, seqlen_k=600, num_heads=4, num_heads_k=2, needs_grad=()),  # not a row for each head
)


# Short rows: one program walks every head, each with bools of its own.
WALKED = PLAIN.with_(batch=3, seqlen_q=20, seqlen_k=33, num_heads_k=2, mask=FULL)


def walk_calls() -> Iterator[str | None]:
    """Outcomes of walks over all heads of a call, and over those of two chunks."""
    short_calls.DTYPES = EVERY_DTYPE
    for programs, bias in ((1, None), (1, ("1", "1", "Lq", "Lk")), (2, ("1", "1", "Lq", "Lk"))):
        plan_slots.PROGRAMS_PER_SM = plan_slots.PROGRAMS_WITH_SLOTS = programs
        case = WALKED.with_(bias=bias)
        yield failure_of(case, case.build(), None, False, (TILES[0], 1, PARTS_BYTES[0]))


def line_calls(name: str) -> Iterator[str | None]:
    """Outcomes of the calls of that name, a mask beside a window prepared too; of parts, two are loaded at once."""
    plan_forward.COMBINE_VALUES = 32 if name == "parts" else plan_forward.COMBINE_VALUES
    settings = (Tile(32, 32, 4, 1), 64 if name == "parts" else 1, PARTS_BYTES[0])
    for case in LINES[name]:
        for prepared in (False, True) if case.mask is not None and case.window_size is not None else (False,):
            yield failure_of(case, case.build(), None, prepared, settings)


# Entries that a part of the batch shares, of masks and biases of each kind; the last mask has an order of keys.
LEADING = LeadingCall((2, 2), seqlen_q=9, seqlen_k=40, num_heads=1, num_heads_k=1, dtype=torch.float32)
LEADING_CALLS = {
    "bias per score": replace(LEADING, mask=(1, 2, 1, 9, 40), bias=(2, 1, 1, 9, 40)),
    "bias per key": replace(LEADING, mask=(2, 1, 1, 9, 40), bias=(1, 2, 1, 1, 40), is_causal=True),
    "bias per query": replace(LEADING, bias=(2, 1, 1, 9, 1)),
    "key mask": replace(LEADING, mask=(2, 1, 1, 1, 40), bias=(1, 2, 1, 9, 40)),
    "three dims": replace(LEADING, batch=(2, 2, 2), mask=(2, 1, 1, 1, 9, 40), bias=(1, 2, 1, 1, 9, 40), seqlen_k=40),
    "order of keys": replace(LEADING, seqlen_q=17, mask=(1, 2, 1, 1, 40), bias=(2, 1, 1, 1, 40)),
}


def leading_calls(name: str) -> Iterator[str | None]:
    """The outcomes of a call with leading dims, on the kernels that walk tiles of keys and on those of short rows."""
    call = LEADING_CALLS[name]
    given, mask = call.build(), None
    if name == "order of keys":
        mask = PreparedMask.from_mask(given["mask"], seqlen_q=call.seqlen_q, reorder=True)
    attention = partial(flash_dmattn.attention, return_lse=True, backend="triton")
    for short_calls.DTYPES in ((), EVERY_DTYPE):
        set_up(Tile(32, 64, 4, 1), 1, PARTS_BYTES[0])
        _allocated.clear()
        try:
            leading_accurate(results(attention, call, given, mask), call, given)
            assert_margins()
            yield None
        except AssertionError as failure:
            yield f"{call}\n{failure}"


# Head dims above 256. As on sm_90, where descriptors load tiles, the tiles come from the table.
WIDE = PLAIN.with_(dtype=torch.float16, head_dim=512, seqlen_q=70, seqlen_k=140)
WIDE_CALLS = (
    WIDE.with_(is_causal=True, num_heads=4, num_heads_k=2),
    WIDE.with_(head_dim=320, bias=FULL, is_causal=True),
    WIDE.with_(head_dim=264, head_dim_v=64, bias=SHARED, mask=SHARED, mask_kind="empty_rows"),
    WIDE.with_(head_dim=40, head_dim_v=400, bias=("1", "Hk", "1", "Lk"), mask=("B", "1", "1", "Lk"), dropout_p=0.3),
    WIDE.with_(bias=("B", "Hq", "Lq", "1"), window_size=(30, 9), softcap=2.0, sink="normal", needs_grad=(*ALL, "sink")),
    WIDE.with_(seqlen_k=20, bias=FULL, needs_grad=("q", "v", "bias")),
    WIDE.with_(bias=("1", "Hq", "1", "Lk"), needs_grad=("bias",)),
    WIDE.with_(needs_grad=("v",)),
    WIDE.with_(seqlen_q=1, seqlen_k=600, num_heads=4, num_heads_k=2, needs_grad=()),
    WIDE.with_(seqlen_q=9, seqlen_k=600, is_causal=True),
    WIDE.with_(seqlen_q=40, seqlen_k=300, num_heads=1, window_size=(200, 50)),  # programs share the keys
    WIDE.with_(dtype=torch.float32, head_dim=300, is_causal=True, needs_grad=()),
    WIDE.with_(seqlen_q=33, seqlen_k=90, window_size=(20, 0)),  # delta is computed from an out in fp32
)


def wide_head_calls() -> Iterator[str | None]:
    """Outcomes of calls with head dims above 256, on a small GPU and on one that loads tiles by descriptors."""
    short_calls.DTYPES = ()
    for case in WIDE_CALLS:
        yield failure_of(case, case.build(), None, False, (TILES[0], 1, PARTS_BYTES[0]))
    for case in WIDE_CALLS:
        # No launch overlaps, which the interpreter does not know.
        with descriptors_wherever_they_serve(), mock.patch.object(plan, "driver_overlaps", lambda: False):
            for num_sms in NUM_SMS:
                choices_changed()  # passes hold the plans that the line above sets aside
                yield failure_of(case, case.build(), None, False, (TILES[0], num_sms, PARTS_BYTES[0], 0, "sm_90"))


def main(outcomes: Iterator[str | None]) -> int:
    """Run them in the interpreter, on outputs that are NaN before; returns the exit status."""
    admit_cpu()
    torch.empty, torch.empty_like = guarded_empty, lambda x: guarded_empty(x.shape, dtype=x.dtype)
    return report(outcomes)


if __name__ == "__main__":
    fixed = {
        "bugs": predecessor_calls,
        "empty rows": empty_row_calls,
        "freed": forgetting_calls,
        "few keys": few_keys_calls,
        "wide windows": wide_window_calls,
        "lines": lambda: line_calls(sys.argv[2]),
        "walks": walk_calls,
        "short": lambda: calls_of_short_rows(int(sys.argv[2]), int(sys.argv[3])),
        "wide heads": wide_head_calls,
        "leading": lambda: leading_calls(sys.argv[2]),
    }.get(sys.argv[1])
    sys.exit(main(random_calls(int(sys.argv[1]), int(sys.argv[2])) if fixed is None else fixed()))
