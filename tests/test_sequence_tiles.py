"""Masks prepared for sequences: every tensor against a loop, calls of every backend, and every refusal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEVICE
from conftest import Runner, refusal_of
from sequence_calls import ON_GPU, SequenceCall, assert_accurate, draw, run
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences, attention
from flash_dmattn.explanation import explain_problem
from flash_dmattn.masks import PreparedMask, mask_stats
from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.storage import SequenceTileMask

EXAMPLES = int(os.environ.get("FLASH_DMATTN_EXAMPLES", 120))
LONG = (0, 1, 31, 128, 129, 200, 300)  # around the edges of tiles


def rows_of(call: SequenceCall) -> dict[str, int]:
    """The lengths that `PreparedMask.from_mask` asks for."""
    table = call.sequences.block_table
    rows_k = call.k.shape[-3] if table is None else table.shape[1] * call.k.shape[1]
    return {"seqlen_q": call.q.shape[-3], "seqlen_k": rows_k}


def band_of(call: SequenceCall) -> dict[str, Any]:
    return {name: call.flags[name] for name in ("is_causal", "window_size")}


def prepared(call: SequenceCall) -> SequenceCall:
    """The same call with its mask prepared, which brings its band."""
    assert isinstance(call.mask, Tensor)
    mask = PreparedMask.from_mask(call.mask, sequences=call.sequences, **rows_of(call), **band_of(call))
    return replace(call, mask=mask)  # type: ignore[arg-type]


def with_mask(number: int, *options: Any, **more: Any) -> SequenceCall:
    """Draw the first call with a mask, from a number on; parts of the mask are all True or all False."""
    while (call := draw(number, *options, **more)).mask is None:
        number += 1_000_000
    assert isinstance(call.mask, Tensor)
    generator = torch.Generator().manual_seed(number)
    for allowed in (True, False):
        first = torch.randint(0, 200, (2,), generator=generator).tolist()
        call.mask[..., first[0] : first[0] + 260, first[1] : first[1] + 260] = allowed
    return call


def allowed_in(call: SequenceCall, s: int) -> Tensor:
    """The mask and the band of one sequence: bool (Hm, queries, keys)."""
    first_q, n, first_k, m = call.lengths[s]
    mask = call.mask
    assert isinstance(mask, Tensor)
    if mask.dim() == 4:
        mask = mask[s if mask.shape[0] > 1 else 0]
        own = mask[:, : n if mask.shape[1] > 1 else 1, : m if mask.shape[2] > 1 else 1]
    elif mask.shape[1] == 1 != mask.shape[2] and call.packs_keys:
        own = mask[:, :, first_k : first_k + m]
    else:
        own = mask[:, first_q : first_q + n, : m if mask.shape[2] > 1 else 1]
    left, right = call.flags["window_size"] or (-1, -1)
    right = 0 if call.flags["is_causal"] else right
    gap = torch.arange(m)[None, :] - torch.arange(n)[:, None] - (m - n)
    band = ((left < 0) | (gap >= -left)) & ((right < 0) | (gap <= right))
    return own.cpu().expand(-1, n, m) & band


def check_tensors(call: SequenceCall, mask: SequenceTileMask) -> None:
    """Bits, classes and lists, sequence by sequence."""
    bits = packing.unpack_words(mask.bits[0].cpu(), mask.bits.shape[3] * 32)
    classes, row_lists, col_lists = (x[0].cpu() for x in mask.tensors[1:])
    rows_q, rows_k = rows_of(call).values()
    used = torch.zeros(bits.shape[1], dtype=torch.bool)
    for s, (first_q, n, first_k, m) in enumerate(call.lengths):
        first_q += 0 if call.packs_queries else s * rows_q
        first_k += 0 if call.packs_keys else s * rows_k
        wanted = torch.zeros(bits.shape[0], n, bits.shape[2], dtype=torch.bool)
        wanted[:, :, :m] = allowed_in(call, s)[: len(wanted)]  # an empty mask may count as expanded
        assert torch.equal(bits[:, first_q : first_q + n], wanted)
        used[first_q : first_q + n] = True
        tiles = range(-(-n // 128)), range(mask.classes.shape[3])
        kinds = torch.zeros(bits.shape[0], len(tiles[0]), len(tiles[1]), dtype=torch.int64)
        for i in tiles[0]:
            for j in tiles[1]:
                tile = wanted[:, i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].flatten(1)
                kinds[:, i, j] = tile.any(1).long() + tile.all(1)
        top, left = first_q // 128 + s, first_k // 128 + s
        assert torch.equal(classes[:, top : top + len(tiles[0])].long(), kinds)
        for h in range(bits.shape[0]):
            for i in tiles[0]:
                check_list(row_lists[h, top + i], kinds[h, i])
            for j in range(-(-m // 128)):
                check_list(col_lists[h, left + j], kinds[h, :, j])
    assert not bits[:, ~used].any()


def check_list(actual: Tensor, kinds: Tensor) -> None:
    """The counts of full and of partial tiles, and which these are."""
    full, partial = ((kinds == kind).nonzero().flatten().tolist() for kind in (2, 1))
    assert actual[:2].tolist() == [len(full), len(partial)]
    assert actual[2 : 2 + len(full) + len(partial)].tolist() == full + partial


@pytest.mark.parametrize("chunk", (1 << 24, 5000))
def test_tensors_against_a_loop(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK_ELEMENTS", chunk)
    for number in range(60):
        call = with_mask(number, lengths=LONG if number % 2 else (0, 1, 5, 33), page_sizes=(16, 100))
        mask = prepared(call).mask
        assert isinstance(mask, SequenceTileMask)
        check_tensors(call, mask)


def test_stats_are_the_sums_of_those_of_each_sequence() -> None:
    """Keys are whole tiles: of a last one that is cut, `mask_stats` may call full what kernels have to mask."""
    for number in range(30):
        call = with_mask(number, lengths=(0, 1, 31, 129, 300), lengths_k=(0, 128, 256))
        mask = prepared(call).mask
        assert isinstance(mask, SequenceTileMask)
        own = [mask_stats(allowed_in(call, s)[: mask.shape[1]]) for s in range(len(call.lengths))]
        for s, one in enumerate(own):
            for head in range(mask.shape[1]):
                assert torch.equal(mask.dense_sequence(s, head).cpu(), allowed_in(call, s)[head])
            assert one.shape[2:] == (call.lengths[s][1], call.lengths[s][3])
        actual = mask.stats()
        pairs = [math.prod(x.shape) for x in own]
        tiles = [mask.shape[1] * -(-n // 128) * -(-m // 128) for _, n, _, m in call.lengths]
        assert actual.shape == (1, mask.shape[1], sum(n for _, n, _, _ in call.lengths), mask.spec.max_seqlen_k)
        assert actual.empty_rows == sum(x.empty_rows for x in own)
        for name, counts in (("density", pairs), ("active_tile_fraction", tiles), ("full_tile_fraction", tiles)):
            full = sum(getattr(x, name) * count for x, count in zip(own, counts, strict=True))
            assert getattr(actual, name) == pytest.approx(full / max(1, sum(counts)))


def test_a_batch_of_no_sequences_has_empty_tiles() -> None:
    none = Sequences.packed(torch.tensor([0], device=DEVICE), max_seqlen_q=200)
    q = torch.randn(300, 2, 8, device=DEVICE, requires_grad=True)
    for shape in ((1, 300, 200), (1, 2, 200, 200), (2, 1, 300)):
        mask = torch.ones(shape, dtype=torch.bool, device=DEVICE)
        tiles = PreparedMask.from_mask(mask, sequences=none, seqlen_q=300, seqlen_k=300)
        assert tiles.classes.shape[2:] == (2, 2) and not any(x.any() for x in (tiles.bits, tiles.classes))
        stats = tiles.stats()
        assert stats.shape == (1, tiles.shape[1], 0, 200) and stats.empty_rows == 0 == stats.active_tile_fraction
        out = attention(q, q, q, tiles, sequences=none, backend="eager")
        assert isinstance(out, Tensor) and not out.any()
        assert not torch.autograd.grad(out.sum(), q)[0].any()


def test_a_mask_that_is_expanded_is_read_once() -> None:
    sequences = Sequences.packed(torch.tensor([0, 150, 290], device=DEVICE), max_seqlen_q=150)
    mask = (torch.rand(1, 290, 150, device=DEVICE) < 0.5).expand(4, 290, 150)
    actual = PreparedMask.from_mask(mask, sequences=sequences, seqlen_q=290, seqlen_k=290)
    assert actual.bits.shape == (1, 1, 290, 8) and torch.equal(actual.unpacked()[0, :, :150], mask[:1, :150])


@pytest.mark.parametrize("part", range(3))
def test_calls_beside_one_dense_call(serving: Runner, part: int) -> None:
    drawn = ON_GPU | {"lengths": LONG} if serving.name == "triton" else {}
    for number in range(part, EXAMPLES, 3):
        call = with_mask(number, **drawn)
        assert_accurate(run(prepared(call), serving.name), call)


def test_ragged_masks() -> None:
    for number in range(40):
        call = with_mask(number, lengths=LONG)
        options = {**rows_of(call), **band_of(call)}
        heads = call.mask.shape[-3]  # type: ignore[union-attr]
        free = replace(call, flags={**call.flags, "is_causal": False, "window_size": None})
        parts = [allowed_in(free, s).flatten(1) for s in range(len(call.lengths))]
        flat = torch.cat([torch.zeros(heads, 0, dtype=torch.bool), *parts], 1).to(DEVICE)
        ragged = PreparedMask.from_ragged(flat[0] if heads == 1 else flat, call.sequences, **options)
        wanted = prepared(call).mask
        assert isinstance(wanted, SequenceTileMask)
        for x, y in zip(ragged.tensors, wanted.tensors, strict=True):
            assert torch.equal(x, y)


def test_explain_says_what_a_mask_costs() -> None:
    sequences = Sequences.packed(torch.tensor([0, 300, 500], device=DEVICE), max_seqlen_q=300)
    q = torch.randn(500, 2, 16, device=DEVICE)
    mask = torch.rand(1, 1, 300, 300, device=DEVICE) < 0.5
    tiles = PreparedMask.from_mask(mask, is_causal=True, sequences=sequences, seqlen_q=500, seqlen_k=500)
    actual = flash_dmattn.explain(q, q, q, tiles, sequences=sequences)
    assert actual.problem.mask_form == "sequence_tiles" and actual.problem.is_causal
    notes = {verdict.backend: verdict.notes for verdict in actual.verdicts}
    assert "unpacks the prepared mask to a dense bool tensor of 0.1 MB" in notes["reference"]
    assert notes["eager"] == ()
    assert "prepared mask (1, 1, 500, 300) of packed queries" in str(actual.problem)
    described = explain_problem(
        (1, 500, 2, 16),
        **{"dtype": "fp32", "device": actual.problem.arch, "mask": (1, 1, 300, 300), "mask_prepared": True},
        **{"is_causal": True, "sequences": tiles.spec},
    )
    assert described.problem == actual.problem


EDGES = Sequences.packed(torch.tensor([0, 3, 8], device=DEVICE), max_seqlen_q=5)
OTHER = Sequences.packed(torch.tensor([0, 4, 8], device=DEVICE), max_seqlen_q=5)
MASK = torch.ones(1, 8, 5, dtype=torch.bool, device=DEVICE)
Q = torch.zeros(8, 2, 4, device=DEVICE)


def tiles_of(mask: Tensor = MASK, sequences: Any = EDGES, **options: Any) -> SequenceTileMask:
    return PreparedMask.from_mask(mask, sequences=sequences, **{"seqlen_q": 8, "seqlen_k": 8, **options})


# The error that each call raises.
BAD: dict[str, Callable[[], Any]] = {
    "ValueError: mask was prepared with sequences; it needs sequences=mask.sequences with it": lambda: attention(
        Q[None], Q[None], Q[None], tiles_of()
    ),
    (
        "ValueError: mask was prepared for other Sequences than those of the call; it needs the same object: "
        "pass sequences=mask.sequences, or prepare it anew"
    ): lambda: attention(Q, Q, Q, tiles_of(), sequences=OTHER),
    "ValueError: mask was prepared for other Sequences": lambda: flash_dmattn.explain(
        Q, Q, Q, tiles_of(), sequences=OTHER
    ),
    "ValueError: mask was prepared for seqlen_q 7; it needs that of the call, 8": lambda: attention(
        Q, Q, Q, tiles_of(MASK[None, :, :5], seqlen_q=7), sequences=EDGES
    ),
    "ValueError: mask was prepared for seqlen_k 9; it needs that of the call, 8": lambda: attention(
        Q, Q, Q, tiles_of(seqlen_k=9), sequences=EDGES
    ),
    "ValueError: mask was prepared with 3 heads; it needs one of [1, 2]": lambda: attention(
        Q, Q, Q, tiles_of(MASK.expand(3, 8, 5).contiguous()), sequences=EDGES
    ),
    "ValueError: mask is on meta; it needs to be on the device of q": lambda: attention(
        Q, Q, Q, replace(tiles_of(), bits=torch.zeros(1, 1, 8, 4, device="meta")), sequences=EDGES
    ),
    "ValueError: is_causal is True, but mask was prepared with is_causal=False, window_size=(-1, -1)": lambda: (
        attention(Q, Q, Q, tiles_of(), is_causal=True, sequences=EDGES)
    ),
    "ValueError: window_size is (3, -1), but mask was prepared with": lambda: attention(
        Q, Q, Q, tiles_of(), window_size=(3, -1), sequences=EDGES
    ),
    "ValueError: seqlen_q is None; with sequences it needs to be q.shape[-3]": lambda: tiles_of(seqlen_q=None),
    (
        "ValueError: seqlen_k is None; with sequences it needs to be k.shape[-3], of pages block_table.shape[1]"
        " * page_size"
    ): lambda: tiles_of(seqlen_k=None),
    "ValueError: reorder is True; with sequences it needs to be None": lambda: tiles_of(reorder=True),
    "TypeError: sequences is a Tensor; it needs to be a flash_dmattn.Sequences": lambda: tiles_of(
        sequences=torch.tensor([0, 3, 8])
    ),
    (
        "ValueError: mask has shape (1, 4, 5), read as (heads, queries of all sequences, max_seqlen_k); it "
        "needs queries of all sequences in {1, 8} and max_seqlen_k in {1, 5}"
    ): lambda: tiles_of(MASK[:, :4]),
    "TypeError: mask has dtype torch.int32; it needs to be torch.bool": lambda: tiles_of(MASK.int()),
    f"ValueError: mask is on meta; it needs to be on the device of sequences, {EDGES.device}": lambda: tiles_of(
        MASK.to("meta")
    ),
    "ValueError: flat has shape (1, 8, 5); it needs to be (pairs,) or (heads, pairs)": lambda: PreparedMask.from_ragged(
        MASK, EDGES, seqlen_q=8, seqlen_k=8
    ),
    f"ValueError: flat is on meta; it needs to be on the device of sequences, {EDGES.device}": lambda: (
        PreparedMask.from_ragged(torch.ones(34, device="meta") > 0, EDGES, seqlen_q=8, seqlen_k=8)
    ),
    "TypeError: flat has dtype torch.float32; it needs to be torch.bool": lambda: PreparedMask.from_ragged(
        torch.ones(34), EDGES, seqlen_q=8, seqlen_k=8
    ),
}
if DEVICE == "cpu":  # elsewhere nobody waits to count them
    pairs = "ValueError: flat has 33 pairs; it needs 34, queries times keys of sequences"
    BAD[pairs] = lambda: PreparedMask.from_ragged(torch.ones(33) > 0, EDGES, seqlen_q=8, seqlen_k=8)


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_by_name(message: str) -> None:
    error = refusal_of(BAD[message], lambda: attention(Q, Q, Q, tiles_of(), sequences=EDGES))
    assert f"{type(error).__name__}: {error}".startswith(message)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU does not run ahead")
def test_nothing_waits_for_the_device() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        tiles_of()
    finally:
        torch.cuda.set_sync_debug_mode("default")
