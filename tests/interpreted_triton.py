"""Calls that are the same every time, in Triton's interpreter: `interpreted_triton.py WHAT [NAME]`.

WHAT is a word of `main`; NAME chooses among its calls. `run_calls.py` draws calls there.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any
from unittest import mock

import fp32_cases
import interpreter
import tangent_calls
import torch
from accuracy import assert_empty_rows_ignore_dlse, error, gross, oracle, run
from cases import ALL, Case, Inputs, Numbers
from descriptors import descriptors_wherever_they_serve
from draws import Drawn
from interpreter import EVERY_DTYPE, NUM_SMS, Tile, set_up
from layouts import LAYOUTS, rearranged
from leading_calls import LeadingCall, results
from leading_calls import assert_accurate as leading_accurate
from outcomes import outcome_of, report
from predecessor_cases import CALLS, build
from run_calls import Interpreter, check_case
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.biases import Relative, split
from flash_dmattn.dispatch.registry import choices_changed
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import formula
from flash_dmattn.reference.distances import Distances, dense
from flash_dmattn.triton_kernels import launch, plan, plan_forward, plan_slots, short_calls
from flash_dmattn.triton_kernels.plan import MOST_FEW_KEYS

SMALL = interpreter.TILES[0]
NUMBERS = ("max_scores", "entropy")  # of rows, which some calls ask for
FULL = ("B", "Hq", "Lq", "Lk")
SHARED = ("1", "1", "Lq", "Lk")
PLACE = Interpreter()
attention = partial(flash_dmattn.attention, return_lse=True, backend="triton")


def failure_of(
    case: Case,
    tile: Tile,
    num_sms: int = 1,
    prepared: bool = False,
    inputs: Inputs | None = None,
    arch: str = "cpu",
) -> str | None:
    """Run a call; None where every result is as it has to be."""
    set_up(tile, num_sms, arch=arch)
    told, check, _ = check_case(PLACE, Drawn(case, prepared=prepared), inputs=inputs)
    return outcome_of(check, told)


def predecessor_calls() -> Iterator[str | None]:
    """Outcomes of what the predecessor answered wrongly."""
    for name in CALLS:
        case, inputs = build(name)
        # Whole tiles of a mask are 128 x 128, and small blocks of them take the interpreter too long.
        tile = Tile(64, 64, 4, 1) if case.seqlen_q > 100 else SMALL
        for prepared in (False, True) if case.mask is not None else (False,):
            yield failure_of(case, tile, prepared=prepared, inputs=inputs)


def empty_row_calls() -> Iterator[str | None]:
    """Outcomes of gradients that come back through the lse of empty rows."""
    for bias in (("1", "Hk", "Lq", "1"), ("B", "1", "1", "Lk"), ("B", "Hq", "Lq", "Lk")):
        case = Case(batch=1, num_heads=2, num_heads_k=1, bias=bias, mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows")
        set_up()
        yield outcome_of(partial(assert_empty_rows_ignore_dlse, attention, case, case.build()), case.repro())


def wide_window_calls() -> Iterator[str | None]:
    """Outcomes of windows with a side beyond every key or query, about as long as an int32 reaches, or longer."""
    far = 2**31 - 1
    for window_size in ((far, 3), (3, far), (far - 40, far - 40), (2**32 + 3, 0), (2**40, 2**63 - 1)):
        for mask in (None, ("B", "1", "1", "Lk"), ("B", "1", "Lq", "Lk")):
            small = Case(batch=1, num_heads=2, num_heads_k=1, seqlen_q=20, seqlen_k=40)
            case = small.with_(window_size=window_size, mask=mask, bias=("1", "Hq", "Lq", "Lk"))
            yield failure_of(case, SMALL)


def forgetting_calls() -> Iterator[str | None]:
    """Outcomes of asking whether the tensors of a call are freed after it, while its plans are remembered."""
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
            set_up(num_sms=num_sms)
            inputs = case.build()
            arguments = {x.data_ptr() for x in (inputs.mask, *(x for _, x in inputs.floats())) if x is not None}
            run(attention, case, inputs)
            interpreter.assert_margins()
            del inputs
            gc.collect()
            alive = sum(type(x) is Tensor and x.data_ptr() in arguments for x in gc.get_objects())
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
    few: list[Case] = []
    biases, masks = (("1", "Hk", "1", "Lk"), ("1", "Hq", "Lq", "Lk"), FULL), (None, ("B", "1", "1", "Lk"), SHARED)
    for seqlen_k, bias, mask in product((20, MOST_FEW_KEYS), biases, masks):
        few.append(FEW_KEYS.with_(seqlen_k=seqlen_k, is_causal=True, bias=bias, mask=mask))
    few += [FEW_KEYS.with_(seqlen_k=2, is_causal=True, bias=bias) for bias in biases]
    for window_size, mask in product(((3, 0), (20, 11), (31, 0)), (None, SHARED, ("B", "Hk", "1", "Lk"))):
        few.append(FEW_KEYS.with_(seqlen_k=96, mask=mask, bias=FULL, window_size=window_size))
    for case in few:
        set_up()
        inputs = case.build()
        off_by = error(run(attention, case, inputs)["dbias"], oracle(case, inputs)["dbias"])
        yield None if off_by < 5e-6 else f"{case.repro()}\n  dbias is off by {off_by:.1e}"
    for mask in (None, ("B", "Hk", "Lq", "Lk"), ("B", "1", "1", "Lk")):
        for bias in (("1", "1", "Lq", "Lk"), ("B", "Hq", "Lq", "Lk"), ("1", "Hk", "1", "Lk")):
            case = Case(dtype=torch.float32, dlse=True, mask=mask, bias=bias, bias_kind="huge")
            set_up()
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
LINES = {
    "scores": (
        PLAIN.with_(num_heads=4, num_heads_k=2, logits=10.0, aux=NUMBERS),  # maxima rise from tile to tile
        PLAIN.with_(bias=FULL),
        PLAIN.with_(bias=SHARED),
        # Tiles without an edge take the scale after the maximum: of a negative one that would be the minimum.
        PLAIN.with_(softmax_scale=-3.0, logits=10.0, seqlen_q=32, seqlen_k=64, aux=NUMBERS),
    ),
    "softcap": (CAPPED, CAPPED.with_(bias=FULL), CAPPED.with_(bias=SHARED, aux=NUMBERS)),
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
        FEW_ROWS.with_(logits=3.0, aux=NUMBERS),
        FEW_ROWS.with_(mask=SHARED, mask_kind="empty_rows", aux=NUMBERS),
        FEW_ROWS.with_(sink="normal", aux=NUMBERS),
        # Blocks at both edges of a window are shared as the others are.
        FEW_ROWS.with_(window_size=(150, 40), logits=3.0),
        PLAIN.with_(seqlen_q=17, seqlen_k=300, window_size=(150, 40), needs_grad=()),
        # The heads of a group are rows of one tile, and lie in out before the queries that they are taken for.
        GROUPS,
        GROUPS.with_(sink="normal", bias=("B", "Hq", "1", "Lk"), dtype=torch.float16, aux=NUMBERS),
        # Sets of kept keys behind a window; a mask of each group is a set, one of each head a row of tiles.
        FEW_ROWS.with_(mask=("B", "1", "1", "Lk"), window_size=(150, 40), sink="normal"),
        GROUPS.with_(mask=("B", "Hk", "1", "Lk")),
        GROUPS.with_(mask=("B", "Hq", "1", "Lk"), softcap=2.0),
        # Shares count the blocks near the values of a bias by distance before all others.
        FEW_ROWS.with_(seqlen_q=40, seqlen_k=600, relative=Numbers(("1", "Hq", "1"), 33, 400, "clamp"), logits=3.0),
    ),
    # A logit of each head: in rows of many keys and of none, where few keys are normalised again, and for the G heads
    # of a group as rows of one.
    "sinks": (
        SUNK.with_(mask=SHARED, mask_kind="empty_rows", aux=NUMBERS),
        SUNK.with_(bias=("B", "Hq", "Lq", "1"), mask=SHARED, mask_kind="empty_rows", aux=NUMBERS),
        SUNK.with_(seqlen_k=20, bias=FULL, logits=10.0, aux=NUMBERS),
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
    """Outcomes of walks over all heads of a call, over the heads of two chunks, and of two runs of the backward kernel.

    In the rows of great scores lse is rounded to 64 and more, and each run normalises their probabilities again.
    """
    short_calls.DTYPES = EVERY_DTYPE
    for programs, bias in ((1, None), (1, ("1", "1", "Lq", "Lk")), (2, ("1", "1", "Lq", "Lk"))):
        plan_slots.PROGRAMS_PER_SM = plan_slots.PROGRAMS_WITH_SLOTS = programs
        case = WALKED.with_(bias=bias, aux=NUMBERS)
        # A read of the row behind the last one would end the process.
        yield failure_of(case, SMALL, inputs=rearranged(case.build(), LAYOUTS["offset_by_one"]))
    short_calls.TWO_RUNS_FROM = 1
    for data in ("row -1e9", "entry -1e6"):
        case = PLAIN.with_(batch=2, num_heads_k=2, seqlen_q=120, seqlen_k=128, bias=("1", "Hq", "Lq", "Lk"))
        yield failure_of(case.with_(dtype=torch.float16, bias_dtype=torch.float32, data=data), SMALL)


def line_calls(name: str) -> Iterator[str | None]:
    """Outcomes of the calls of that name, also with a prepared mask and a window; two parts are loaded at once."""
    plan_forward.COMBINE_VALUES = 32 if name == "parts" else plan_forward.COMBINE_VALUES
    num_sms = 64 if name == "parts" else 1
    for case in LINES[name]:
        for prepared in (False, True) if case.mask is not None and case.window_size is not None else (False,):
            yield failure_of(case, Tile(32, 32, 4, 1), num_sms, prepared)


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
    """Outcomes of a call with leading dims, on kernels that walk tiles of keys and on kernels of short rows."""
    call = LEADING_CALLS[name]
    arguments, mask = call.build(), None
    if name == "order of keys":
        mask = PreparedMask.from_mask(arguments["mask"], seqlen_q=call.seqlen_q, reorder=True)
    for short_calls.DTYPES in ((), EVERY_DTYPE):
        set_up(Tile(32, 64, 4, 1))
        yield outcome_of(
            lambda: leading_accurate(results(attention, call, arguments, mask), call, arguments), str(call)
        )
        interpreter.assert_margins()


# Head dims above 256. Where descriptors load tiles, as on sm_90, the table says which tiles; sequences and few queries
# have their own plans.
WIDE = PLAIN.with_(dtype=torch.float16, head_dim=512, seqlen_q=70, seqlen_k=140)
WIDE_CALLS = (
    WIDE.with_(is_causal=True, num_heads=4, num_heads_k=2, aux=NUMBERS),
    WIDE.with_(head_dim=320, bias=FULL, is_causal=True),
    WIDE.with_(head_dim=264, head_dim_v=64, bias=SHARED, mask=SHARED, mask_kind="empty_rows"),
    WIDE.with_(head_dim=40, head_dim_v=400, bias=("1", "Hk", "1", "Lk"), mask=("B", "1", "1", "Lk"), dropout_p=0.3),
    WIDE.with_(bias=("B", "Hq", "Lq", "1"), window_size=(30, 9), softcap=2.0, sink="normal", needs_grad=(*ALL, "sink")),
    WIDE.with_(seqlen_k=20, bias=FULL, needs_grad=("q", "v", "bias")),
    WIDE.with_(bias=("1", "Hq", "1", "Lk"), needs_grad=("bias",)),
    WIDE.with_(needs_grad=("v",)),
    WIDE.with_(seqlen_q=1, seqlen_k=600, num_heads=4, num_heads_k=2, needs_grad=()),
    WIDE.with_(seqlen_q=9, seqlen_k=600, is_causal=True),
    WIDE.with_(dtype=torch.float32, head_dim=300, is_causal=True, needs_grad=()),
    WIDE.with_(seqlen_q=40, seqlen_k=300, num_heads=1, window_size=(200, 50)),  # programs share the keys
    WIDE.with_(seqlen_q=33, seqlen_k=90, window_size=(20, 0)),  # delta is computed from an out in fp32
)


def wide_head_calls() -> Iterator[str | None]:
    """Outcomes of calls with head dims above 256, on a small GPU and on one that loads tiles by descriptors."""
    short_calls.DTYPES = ()
    for case in WIDE_CALLS:
        yield failure_of(case, SMALL)
    for case, num_sms in zip(WIDE_CALLS, cycle(NUM_SMS)):
        # No launch overlaps, which the interpreter does not know.
        with descriptors_wherever_they_serve(), mock.patch.object(plan, "driver_overlaps", lambda: False):
            choices_changed()  # passes hold the plans that the line above sets aside
            yield failure_of(case, SMALL, num_sms, arch="sm_90")


# Biases by distance: clamped ends inside of a tile, at its edge, and beyond all; every way that a mask is read.
T5 = Numbers(("1", "Hq", "1"), 33, 16, "clamp")
CLAMPED = PLAIN.with_(seqlen_q=40, seqlen_k=90, relative=T5)
GROUPED = CLAMPED.with_(num_heads=4, num_heads_k=2, batch=2)
BY_KEY = ("B", "1", "1", "Lk")
RELATIVE_CALLS = (
    GROUPED.with_(is_causal=True, aux=NUMBERS),
    GROUPED.with_(relative=Numbers(("B", "Hk", "1"), 65, 1, "zero"), window_size=(30, 9), softcap=2.0),
    CLAMPED.with_(
        relative=Numbers(("1", "1", "1"), 1, 0, "clamp"), sink="normal", needs_grad=(*ALL, "sink"), aux=NUMBERS
    ),
    CLAMPED.with_(relative=Numbers(("1", "Hk", "1"), 2, -40, "clamp"), mask=FULL, mask_kind="empty_rows"),
    CLAMPED.with_(relative=Numbers(("1", "Hq", "1"), 5, 500, "zero")),
    CLAMPED.with_(relative=Numbers(("1", "Hq", "1"), 300, 150, "error"), dropout_p=0.4, needs_grad=("bias",)),
    CLAMPED.with_(mask=BY_KEY, seqlen_q=9),  # keys are gathered
    CLAMPED.with_(mask=BY_KEY, mask_kind="empty_tiles"),  # keys stay in their order
    CLAMPED.with_(seqlen_k=20, logits=10.0),
    CLAMPED.with_(seqlen_q=1, seqlen_k=600, needs_grad=()),  # not a row for each head
    CLAMPED.with_(dtype=torch.float16, bias_dtype=torch.float32, needs_grad=("q", "bias")),
    WIDE.with_(relative=T5, num_heads=1, needs_grad=("q", "k", "v")),
)
BAND = Numbers(("B", "Hq", "Lq"), 33, 20, "zero")
BAND_CALLS = (
    GROUPED.with_(relative=BAND, is_causal=True),
    CLAMPED.with_(relative=BAND, mask=FULL, softcap=2.0, dtype=torch.float16),
    CLAMPED.with_(relative=BAND, mask=BY_KEY, window_size=(40, 9)),  # keys are gathered
    GROUPED.with_(relative=Numbers(("1", "Hk", "Lq"), 40, -9, "zero"), needs_grad=("q", "k", "v")),
    WIDE.with_(relative=BAND, num_heads=1, needs_grad=("q", "k", "v")),
)


def relative_calls() -> Iterator[str | None]:
    """Outcomes of biases by distance, with descriptors too, and of values that a part of the batch shares."""
    short_calls.DTYPES = EVERY_DTYPE  # which no such call takes
    for case, num_sms in zip((*RELATIVE_CALLS, *BAND_CALLS), cycle(NUM_SMS)):
        yield failure_of(case, SMALL, num_sms)
    for tile in (Tile(16, 64, 4, 1), Tile(64, 16, 4, 1)):  # blocks with values and without, by either side of a tile
        yield failure_of(BAND_CALLS[0].with_(batch=1, seqlen_q=100, seqlen_k=150), tile)
        for case in RELATIVE_CALLS[:2]:
            values = case.relative._replace(number=37, zero=18)  # a tile reaches the second, another the last but one
            yield failure_of(case.with_(batch=1, seqlen_q=100, seqlen_k=150, relative=values), tile)
    with descriptors_wherever_they_serve(), mock.patch.object(plan, "driver_overlaps", lambda: False):
        choices_changed()
        yield failure_of(CLAMPED.with_(dtype=torch.float16, head_dim=64), Tile(32, 32, 4, 1), arch="sm_90")
    choices_changed()
    set_up(SMALL)
    yield outcome_of(shares_values, "values of (2, 1) entries with a batch of (2, 3)")
    for layout in ("packed", "padded", "paged"):
        for entries in (1, 4):
            yield outcome_of(partial(reads_distances_of_sequences, layout, entries), f"{layout}, {entries} entries")


def shares_values() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 2, 8, generator=random).requires_grad_() for length in (40, 50, 50))
    values = torch.randn(2, 1, 2, 9, generator=random).requires_grad_()
    results = []
    for backend in ("triton", "eager"):
        out, lse = flash_dmattn.attention(q, k, v, bias=Relative(values, 4, "clamp"), return_lse=True, backend=backend)
        sent = out.cos().sum() + lse.sin().sum()
        results.append([out, lse, *torch.autograd.grad(sent, (q, k, v, values))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def reads_distances_of_sequences(layout: str, entries: int) -> None:
    """Each sequence has distances of its own; of few queries and of many, dq, dk and dv included."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[5, 40], [33, 33], [0, 7], [17, 2]], dtype=torch.int32)
    ends = torch.cat((torch.zeros(1, 2, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
    values = torch.randn(entries, 4, 9, generator=random)
    for most in (33, 2):
        used = lengths.clamp(max=most) if layout != "packed" else lengths
        if layout == "packed":
            shapes, sequences = [(55,), (82,)], Sequences.packed(*ends.unbind(1))
        elif layout == "padded":
            shapes, sequences = [(4, most), (4, 40)], Sequences.padded(seqlens_q=used[:, 0], seqlens_k=lengths[:, 1])
        else:
            pages = torch.arange(20, dtype=torch.int32).view(4, 5)
            shapes, sequences = [(4, most), (20, 8)], Sequences.paged(pages, lengths[:, 1])
        needs_grad = layout != "paged"
        q, k, v = (
            torch.randn(*shapes[n > 0], heads, 8, generator=random).requires_grad_(needs_grad)
            for n, heads in enumerate((4, 2, 2))
        )
        results = []
        for backend in ("triton", "eager"):
            bias = Relative(values, 4, "clamp")
            out, lse = flash_dmattn.attention(
                q, k, v, bias=bias, sequences=sequences, is_causal=True, return_lse=True, backend=backend
            )
            sent = out.cos().sum() + lse.clamp(min=-30.0).sin().sum()
            results.append([out, lse, *(torch.autograd.grad(sent, (q, k, v)) if needs_grad else ())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def forward_mode_calls() -> Iterator[str | None]:
    """Outcomes of calls in forward mode that random ones may miss: keys with an order, and tiles by descriptors."""
    set_up(SMALL)
    yield outcome_of(reads_keys_in_place, "a mask whose keys have an order")
    set_up(SMALL, arch="sm_90")
    yield outcome_of(makes_no_pieces_of_tangents, "fp32, where other kernels multiply pieces")
    set_up(SMALL, arch="sm_90")
    with descriptors_wherever_they_serve():
        for names, head_dim in ((("q", "k", "v", "bias"), 64), (("k", "v"), 256), (("bias",), 64)):
            told = f"descriptors, head dim {head_dim}, tangents of {names}"
            yield outcome_of(partial(reads_tiles_of_tangents, names, head_dim), told)


def reads_keys_in_place() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v, tq, tk, tv = (torch.randn(1, 40, 2, 8, generator=random) for _ in range(6))
    mask = PreparedMask.from_mask(torch.rand(1, 2, 1, 40, generator=random) < 0.2, seqlen_q=40, reorder=True)
    call = lambda backend: lambda *x: flash_dmattn.attention(*x, mask, return_lse=True, backend=backend)
    results = (torch.func.jvp(call(backend), (q, k, v), (tq, tk, tv)) for backend in ("triton", "eager"))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def makes_no_pieces_of_tangents() -> None:
    call = tangent_calls.dense_call(0, Drawn(Case(batch=1, seqlen_q=20, seqlen_k=40, num_heads=2, bias=FULL)), "cpu")
    for word in ("bf16x3", "fp16x3"):
        set_up(SMALL)
        with interpreter.on_tensor_cores(word, SMALL):
            tangent_calls.assert_accurate(call.run("triton"), call)


def reads_tiles_of_tangents(names: tuple[str, ...], head_dim: int) -> None:
    """At head dim 256 two programs share the columns of v."""
    case = Case(batch=1, seqlen_q=70, seqlen_k=200, num_heads=2, num_heads_k=1, dtype=torch.float16, bias=FULL)
    case = case.with_(head_dim=head_dim)
    call = tangent_calls.dense_call(0, Drawn(case), "cpu")
    random = torch.Generator().manual_seed(1)
    tangents = {n: torch.randn(call.tensors[n].shape, generator=random).half() for n in names}
    call = replace(call, tangents=tangents)
    tangent_calls.assert_accurate(call.run("triton"), call)


# A constant that all scores of a row have changes no gradient: in every kernel that reads a bias, one by one.
GREAT = PLAIN.with_(bias=FULL)
KEYED = ("1", "Hk", "1", "Lk")
GREAT_CALLS = (
    GREAT.with_(is_causal=True, softcap=2.0),
    GREAT.with_(bias=SHARED, softmax_scale=-0.4),  # dbias has a kernel of its own
    GREAT.with_(bias=SHARED, mask=SHARED, mask_kind="empty_rows", num_heads=4, num_heads_k=2, dropout_p=0.4),
    GREAT.with_(bias=KEYED, window_size=(9, 5)),
    GREAT.with_(bias=KEYED, mask=BY_KEY, seqlen_q=9),  # keys are gathered
    GREAT.with_(bias=("B", "Hq", "Lq", "1"), sink="normal", needs_grad=(*ALL, "sink")),
    GREAT.with_(bias=("B", "Hq", "Lq", "1"), seqlen_k=20, sink="normal", needs_grad=(*ALL, "sink")),
    GREAT.with_(sink="normal", needs_grad=(*ALL, "sink")),
    GREAT.with_(seqlen_k=20, sink="normal", needs_grad=(*ALL, "sink")),  # few keys, which are normalised again
    CLAMPED.with_(is_causal=True),
    CLAMPED.with_(seqlen_k=20, sink="normal"),
    CLAMPED.with_(relative=Numbers(("1", "Hq", "1"), 300, 150, "error"), softcap=2.0),
    CLAMPED.with_(mask=BY_KEY, seqlen_q=9),
    CLAMPED.with_(relative=Numbers(("B", "Hq", "Lq"), 300, 150, "zero")),
    # Programs share the keys, with a sink or without.
    FEW_ROWS.with_(bias=("1", "Hk", "Lq", "Lk"), sink="normal"),
    FEW_ROWS.with_(bias=KEYED),
    FEW_ROWS.with_(bias=("B", "Hq", "Lq", "1")),
    GROUPS.with_(bias=("B", "Hq", "1", "Lk"), sink="normal"),
    GROUPS.with_(bias=("B", "Hq", "1", "1")),
    # Short rows in 16 bits, in one run and in two; and wide heads.
    GREAT.with_(dtype=torch.float16, num_heads_k=2, seqlen_k=50),
    GREAT.with_(dtype=torch.float16, num_heads_k=2, seqlen_k=50, bias=SHARED, sink="normal", needs_grad=(*ALL, "sink")),
    GREAT.with_(dtype=torch.float16, num_heads_k=2, seqlen_k=50, bias=("B", "Hq", "Lq", "1"), sink="normal"),
    GREAT.with_(dtype=torch.float16, num_heads_k=2, seqlen_q=80, seqlen_k=90, bias=SHARED),
    WIDE.with_(bias=KEYED, seqlen_q=20, seqlen_k=40),
)
CONSTANTS = (-1e9, 2.0**100)


def great_calls() -> Iterator[str | None]:
    """Outcomes of calls whose biases all have a great constant, or have it in one row."""
    short_calls.DTYPES = (torch.float16,)
    with mock.patch.object(short_calls, "TWO_RUNS_FROM", 0):
        choices_changed()
        for case, constant in product(GREAT_CALLS, CONSTANTS):
            has_rows = case.bias is not None and case.bias[2] == "Lq" and not (case.sink and case.bias[3] == "1")
            for one_row in (False, True) if has_rows else (False,):
                set_up(Tile(32, 32, 4, 1), 64 if case.needs_grad == () else 1)
                told = f"{case.repro()}\n  {constant:g} {'in one row' if one_row else ''}"
                yield outcome_of(partial(right_beside_a_constant, constant, case, one_row), told)
    for layout, shape in product(("packed", "padded", "paged"), ("position", "tokens", "key", "row")):
        set_up(Tile(32, 32, 4, 1))
        yield outcome_of(partial(right_in_sequences, layout, shape), f"{layout}, bias per {shape}")
    for case in (GREAT, GREAT.with_(bias=KEYED), GREAT.with_(bias=("B", "Hq", "Lq", "1")), CLAMPED):
        set_up(Tile(32, 32, 4, 1))
        yield outcome_of(partial(right_in_forward_mode, case), f"forward mode, {case.repro()}")
    set_up(Tile(32, 32, 4, 1))
    yield outcome_of(bounded_after_another_forward, "scores of 1e9 whose forward pass eager has run")


def bounded_after_another_forward() -> None:
    """Eager sums products in another order, by which scores of 1e9 differ by 64 and more; still no p is above 1."""
    q, k, v, dout = (torch.randn(1, 40, 2, 80, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    leaves = [x.requires_grad_() for x in (q * 2e4, k * 2e4, v)]
    bias = torch.zeros(1, 2, 40, 40, requires_grad=True)
    out, _ = attention(*leaves, bias=bias, backend=("eager", "triton"))
    dv = torch.autograd.grad(out, leaves[2], dout)[0]
    assert (dv.abs() <= dout.abs().sum(1, keepdim=True) * 1.001).all(), f"dv is {dv.abs().max():.1e}"


def right_beside_a_constant(constant: float, case: Case, one_row: bool) -> None:
    plain = case.build()
    assert plain.bias is not None
    rows = slice(3, 4) if one_row else slice(None)
    inputs, exact = (replace(plain, bias=plain.bias.to(dtype)) for dtype in (torch.float32, torch.float64))
    inputs.bias[:, :, rows] += constant  # type: ignore[index]
    exact.bias.copy_(inputs.bias)  # type: ignore[union-attr, arg-type]
    if plain.sink is not None and not one_row and constant < 0:  # as all scores; a sink may be smaller or larger, too
        inputs = replace(inputs, sink=plain.sink.float() + constant)
    exact = replace(inputs.to(torch.float64), bias=exact.bias)
    shift = torch.zeros(case.seqlen_q)
    if case.bias is not None and case.bias[3] == "1":
        # The kernel does not add such a bias to scores: fp64 has no room for 1e30 and scores. The constant moves lse.
        shift[rows] = constant
        exact.bias[:, :, rows] -= constant  # type: ignore[index]
        exact = exact if exact.sink is None else replace(exact, sink=exact.sink - constant)
    got = run(attention, case, inputs)
    interpreter.assert_margins()
    want = run(partial(attention_of_rounded, case), case, exact, {"dropout": case.dropout("cpu")})
    want["lse"] = want["lse"] + shift  # type: ignore[operator]
    # Sums of ds that cancel have the size of their terms.
    sizes, limit = gross(case, plain), 1e-5 if case.dtype == torch.float32 else 3e-3
    for name, x in got.items():
        assert (x is None) == (want[name] is None)
        if x is not None:
            off = error(x, want[name], sizes.get(name))  # type: ignore[arg-type]
            assert off < limit, f"{name} is off by {off:.1e}"


def right_in_sequences(layout: str, shape: str) -> None:
    """All scores of the second sequence have a great constant, of some queries or of a few."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[5, 40], [33, 37], [0, 7], [17, 2]], dtype=torch.int32)
    ends = torch.cat((torch.zeros(1, 2, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
    most, packs = (2 if layout == "paged" else 33), layout == "packed"
    if packs:
        sizes, sequences = [(55,), (86,)], Sequences.packed(*ends.unbind(1), max_seqlen_q=33, max_seqlen_k=40)
    elif layout == "padded":
        sizes, sequences = [(4, most), (4, 40)], Sequences.padded(seqlens_q=lengths[:, 0], seqlens_k=lengths[:, 1])
    else:
        pages = torch.arange(20, dtype=torch.int32).view(4, 5)
        sizes, sequences = [(4, most), (20, 8)], Sequences.paged(pages, lengths[:, 1])
    forms = {"position": (4, 4, most, 40), "key": (4, 1, 1, 40), "row": (4, 4, most, 1)}
    if packs:
        forms |= {"tokens": (4, 55, 40), "key": (2, 1, 86), "row": (4, 55, 1)}
    if shape not in forms:
        return
    needs_grad, great = layout != "paged", torch.zeros(forms[shape])
    if not packs or shape == "position":
        great[1] = -1e9
    else:
        rows, keys = slice(5, 38), slice(40, 77)
        (great[..., keys] if shape == "key" else great[:, rows]).fill_(-1e9)
    q, k, v = (
        torch.randn(*sizes[n > 0], heads, 8, generator=random).requires_grad_(needs_grad)
        for n, heads in enumerate((4, 2, 2))
    )
    results = []
    for backend in ("triton", "eager"):
        # A bias of one value per query is not added to scores, which then are what they were.
        plain = backend == "eager" and shape == "row"
        bias = (torch.zeros_like(great) if plain else great.clone()).requires_grad_(needs_grad)
        out, lse = flash_dmattn.attention(
            q, k, v, bias=bias, sequences=sequences, is_causal=True, return_lse=True, backend=backend
        )
        sent = (out * out.detach().cos()).sum()
        results.append([out, *([] if plain or shape == "row" else [lse])])
        results[-1] += torch.autograd.grad(sent, (q, k, v, bias)) if needs_grad else ()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def right_in_forward_mode(case: Case) -> None:
    """A great constant in one row, or in all values by distance, only shifts lse."""
    call = tangent_calls.dense_call(0, Drawn(case), "cpu")
    bias = call.tensors["bias"].clone()
    is_row_bias = case.bias is not None and case.bias[3] == "1"
    (bias[..., 3, :] if case.bias is not None and case.bias[2] == "Lq" else bias).add_(-1e9)
    call = replace(call, tensors={**call.tensors, "bias": bias})
    plain = replace(call, tensors={**call.tensors, "bias": torch.zeros_like(bias)}) if is_row_bias else call
    got, want = call.run("triton"), plain.run("eager")
    names = ("out", "tout", "tlse") if is_row_bias else tuple(got)
    torch.testing.assert_close([got[n] for n in names], [want[n] for n in names], rtol=1e-4, atol=1e-5)


# NaN and inf in one query, one key, or one value of the bias, and which rows of out and lse see it.
ODD_CALLS = (
    *(GREAT.with_(bias=bias, batch=1) for bias in (None, FULL, KEYED, ("B", "Hq", "Lq", "1"))),
    CLAMPED,
    GREAT.with_(bias=None, is_causal=True, sink="normal"),
    GREAT.with_(is_causal=True),
    GREAT.with_(bias=None, softcap=2.0, mask=SHARED),
    FEW_ROWS,
    FEW_ROWS.with_(bias=KEYED, sink="normal"),
    GREAT.with_(dtype=torch.float16, num_heads_k=2, seqlen_k=50, bias=None),
    GREAT.with_(dtype=torch.float16, num_heads_k=2, seqlen_k=50, sink="normal"),
    # Short rows that do not see the key, because it comes later or is too far away.
    GREAT.with_(dtype=torch.float16, num_heads_k=2, seqlen_q=50, seqlen_k=50, is_causal=True),
    GREAT.with_(dtype=torch.float16, num_heads_k=2, seqlen_q=40, seqlen_k=50, window_size=(4, 2), bias=None),
)


def odd_calls() -> Iterator[str | None]:
    """Outcomes of asking which results of a call with NaN or inf in it are NaN, infinite or 0, against eager."""
    short_calls.DTYPES = (torch.float16,)
    choices_changed()
    for case in ODD_CALLS:
        set_up(Tile(32, 32, 4, 1), 64 if case.seqlen_k == 300 else 1)
        needs_grad = ("v",) if case.bias is not None and case.bias[3] == "1" else ()
        yield outcome_of(partial(has_nan_as_eager, case.with_(needs_grad=needs_grad)), case.repro())


def has_nan_as_eager(case: Case) -> None:
    for name, value in product(("q", "k", "keys", "bias", "sink"), (torch.nan, torch.inf, -torch.inf)):
        inputs = case.build()
        x = {"keys": inputs.k}.get(name, getattr(inputs, name, None))
        if x is None:
            continue
        if name == "sink":
            x[0] = value
        else:
            rows = (0, slice(None), 0) if name == "keys" else (0, 3, 0) if name != "bias" else (0, 0, -1)
            x[rows][..., 0] = value
        results = [run(partial(attention, backend=backend), case, inputs) for backend in ("triton", "eager")]
        for result in ("out", "lse"):
            mine, other = (x[result].float() for x in results)  # type: ignore[union-attr]
            for kind in (torch.isnan, torch.isposinf, torch.isneginf, lambda x: x == 0):
                assert torch.equal(kind(mine), kind(other)), f"{value} in {name}: {kind} of {result}"
        if case.needs_grad and name == "bias":
            mine, other = (x["dv"].isnan() for x in results)  # type: ignore[union-attr]
            assert torch.equal(mine, other), f"{value} in {name}: NaN of dv"


def fp32_calls(word: str = "fp16x3", pieces: str = "made") -> Iterator[str | None]:
    """Outcomes of calls in fp32 on pieces that a word names, on tiles of which even short rows have several.

    Pieces are made in the kernels that multiply them, or "stored" before.
    """
    tile = Tile(32, 32, 4, 1)
    cases = {**fp32_cases.CASES, "small rows": fp32_cases.SMALL_ROWS}
    for name in fp32_cases.STORED if pieces == "stored" else fp32_cases.TWO_OF_BFLOAT16 if word == "bf16x3" else cases:
        case = cases[name]
        set_up(tile)
        yield outcome_of(partial(right_on_pieces, word, pieces == "stored", tile, case), f"{name}: {case.repro()}")
    set_up(tile)
    odd = fp32_cases.PLAIN.with_(needs_grad=())
    with interpreter.on_tensor_cores(word, tile, pieces == "stored"):
        yield outcome_of(partial(has_nan_as_eager, odd), f"NaN and inf: {odd.repro()}")


def right_on_pieces(word: str, stored: bool, tile: Tile, case: Case) -> None:
    inputs = case.build()
    with interpreter.on_tensor_cores(word, tile, stored):
        results = run(attention, case, inputs)
    interpreter.assert_margins()
    if word == "bf16x3":
        fp32_cases.assert_right_to(results, case, inputs, fp32_cases.ERROR_OF_BFLOAT16)
    else:
        fp32_cases.assert_right(results, case, inputs, "triton")


def attention_of_rounded(
    case: Case, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, **more: Any
) -> tuple[Tensor, ...]:
    """The formula in fp64, of scores that are rounded to fp32 once; a bias of one value per query is not added to them.

    Gradients are those of scores that are not rounded.
    """
    values, numbers = split(bias)
    if numbers is not None:
        bias = dense(Distances(values, numbers.zero, numbers.outside == "clamp"), case.seqlen_q, case.seqlen_k)
    if case.bias is None or case.bias[3] != "1":
        scale = formula.default_scale(q, case.softmax_scale)
        s = formula.scores(q, k, None, None, False, scale, case.softcap, None)[0].detach()
        own = formula.grouped(bias, case.num_heads_k, case.num_heads)
        rounded = (s + own.detach()).float().double()
        bias = (own - own.detach() + (rounded - s)).flatten(1, 2)
    return formula.attention(q, k, v, mask, bias, **more)


def main(what: str, *name: str) -> int:
    """Run the calls that a word stands for; returns the exit status."""
    calls = {
        "bugs": predecessor_calls,
        "empty rows": empty_row_calls,
        "freed": forgetting_calls,
        "few keys": few_keys_calls,
        "wide windows": wide_window_calls,
        "lines": line_calls,
        "walks": walk_calls,
        "wide heads": wide_head_calls,
        "leading": leading_calls,
        "relative": relative_calls,
        "forward mode": forward_mode_calls,
        "great": great_calls,
        "odd": odd_calls,
        "fp32": fp32_calls,
    }
    return report(calls[what](*name))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
