"""Prepared masks against loops over positions and tiles: every field, every broadcast form, every builder."""

import copy
import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from key_parts import check_told_apart, parts, tensor_changes
from mask_checks import BANDS, by_place, check_fields, check_stats, in_band, same, tiled_mask
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

import flash_dmattn
from flash_dmattn import Sequences, masks
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.storage import IntervalMask, KeyMask, TileMask
from flash_dmattn.problem import SequenceSpec, make_band

SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (7, 1), (1, 130), (2, 33), (129, 31), (130, 300), (260, 128), (128, 257)]


def allowed_positions(mask, seqlen_q, seqlen_k, **band):
    """The formula of the contract: bool (Bm, Hm, Lq, Lk)."""
    return mask.broadcast_to(*mask.shape[:2], seqlen_q, seqlen_k) & in_band(seqlen_q, seqlen_k, **band)


def check_tile_mask(prepared, allowed):
    """Every field of a TileMask, by loops over words and tiles of the allowed positions."""
    batch, num_heads, seqlen_q, seqlen_k = allowed.shape
    tiles_q, tiles_k = -(-seqlen_q // 128), -(-seqlen_k // 128)
    assert prepared.shape == tuple(allowed.shape)
    assert prepared.bits.shape == (batch, num_heads, seqlen_q, 4 * tiles_k)
    weights = torch.tensor([1 << t for t in range(32)])
    for word in range(4 * tiles_k):
        columns = allowed[..., 32 * word : 32 * word + 32]
        want = (columns * weights[: columns.size(-1)]).sum(-1)
        assert torch.equal(prepared.bits[..., word].long() & 0xFFFFFFFF, want)
    for b, h in itertools.product(range(batch), range(num_heads)):
        classes = [[tile_class(allowed[b, h], row, col) for col in range(tiles_k)] for row in range(tiles_q)]
        assert prepared.classes[b, h].tolist() == classes
        columns = [[classes[row][col] for row in range(tiles_q)] for col in range(tiles_k)]
        for name, table in (("row", classes), ("col", columns)):
            want = [
                [
                    line.count(2),
                    line.count(1),
                    *(n for kind in (2, 1, 0) for n, c in enumerate(line) if c == kind),
                ]
                for line in table
            ]
            assert getattr(prepared, f"{name}_lists")[b, h].tolist() == want
    assert [x.dtype for x in prepared.tensors] == [torch.int32, torch.uint8, torch.int32, torch.int32]
    assert all(x.is_contiguous() for x in prepared.tensors)


def tile_class(allowed, row, col):
    tile = allowed[128 * row : 128 * row + 128, 128 * col : 128 * col + 128]
    return 0 if not tile.any() else 2 if tile.all() and tile.size(1) == 128 else 1


def check_key_mask(prepared, keys):
    """Every field of a KeyMask, by loops over the keys (Bm, Hm, Lk)."""
    batch, num_heads, seqlen_k = keys.shape
    assert prepared.shape == (batch, num_heads, 1, seqlen_k)
    for b, h in itertools.product(range(batch), range(num_heads)):
        kept = [j for j in range(seqlen_k) if keys[b, h, j]]
        assert prepared.kept[b, h].tolist() == kept + [seqlen_k] * (seqlen_k - len(kept))
        assert prepared.count[b, h] == len(kept)
        assert prepared.prefix[b, h].tolist() == [sum(j < n for j in kept) for n in range(seqlen_k + 1)]
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in (prepared.kept, prepared.count, prepared.prefix))


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SIZES)
def test_tile_mask_against_loops(seqlen_q, seqlen_k, band):
    mask = tiled_mask(2, 1, seqlen_q, seqlen_k)
    # A query dim of 1 is a key mask: two queries are the fewest that differ.
    prepared = PreparedMask.from_mask(mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **band)
    allowed = allowed_positions(mask, seqlen_q, seqlen_k, **band)
    if seqlen_q == 1:
        assert isinstance(prepared, KeyMask)
    else:
        assert isinstance(prepared, TileMask)
        check_tile_mask(prepared, allowed)
    assert torch.equal(prepared.dense(), allowed)
    assert torch.equal(prepared.dense(3, 70), allowed[:, :, 3:70])
    check_stats(prepared, allowed)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [
        *((0, 4), (4, 0), (1, 7), (15, 300), (15, 9), (7, 256)),
        *((16, 0), (16, 7), (200, 300), (300, 200), (140, 256)),
    ],
)
def test_one_row_for_all_queries_against_loops(seqlen_q, seqlen_k, band):
    """Keys of few queries, intervals of many."""
    keys = torch.rand(2, 3, 1, seqlen_k, generator=torch.Generator().manual_seed(1)) < 0.7
    keys[0, :, :, 128:256] = True
    keys[1, 1] = False
    allowed = allowed_positions(keys, seqlen_q, seqlen_k, **band)
    for reorder in (None, False, True):
        prepared = PreparedMask.from_mask(keys, seqlen_q=seqlen_q, seqlen_k=seqlen_k, reorder=reorder, **band)
        assert torch.equal(prepared.dense(), allowed)
        assert torch.equal(prepared.dense(2, 5), allowed[:, :, 2:5])
        if seqlen_q < 16:
            assert isinstance(prepared, KeyMask)
            check_key_mask(prepared, keys[:, :, 0])
            check_stats(prepared, allowed)
        else:
            assert isinstance(prepared, IntervalMask)
            assert prepared.order.shape == (2, 3, seqlen_k if reorder else 0)
            check_fields(prepared)
            check_stats(prepared, by_place(prepared))


def test_keys_of_many_queries_are_put_in_order_unasked():
    keys = torch.rand(1, 1, 1, 40) < 0.5
    assert [PreparedMask.from_mask(keys, seqlen_q=n).is_reordered for n in (4095, 4096)] == [False, True]
    assert not PreparedMask.from_mask(keys, seqlen_q=4096, reorder=False).is_reordered


def test_a_mask_of_one_row_as_tiles() -> None:
    """Asked for, from 16 queries on: what the dense mask becomes, band included."""
    keys = torch.rand(2, 3, 1, 150) < 0.5
    for seqlen_q in (15, 16, 140):
        prepared = PreparedMask.from_mask(keys, seqlen_q=seqlen_q, is_causal=True, as_tiles=True)
        dense = PreparedMask.from_mask(keys.repeat(1, 1, seqlen_q, 1), is_causal=True)
        assert isinstance(dense, TileMask) and isinstance(prepared, TileMask if seqlen_q >= 16 else KeyMask)
        assert torch.equal(prepared.dense(), dense.dense())
        assert isinstance(prepared, KeyMask) or same(prepared, dense)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [*SIZES, (300, 200)])
@pytest.mark.parametrize("window_size", [(2**40, 0), (0, 2**40), (2**40, -1), (500, 3), (3, 500), (2**63 - 1, 2**62)])
def test_limits_beyond_the_mask_are_cut_to_what_fits_int32(seqlen_q, seqlen_k, window_size):
    """Kernels add the limits to positions in int32; a limit past the last diagonal says what an unlimited side says."""
    nearest = tuple(min(side, seqlen_q + seqlen_k) for side in window_size)
    band = make_band(seqlen_q, seqlen_k, window_size)
    assert band == make_band(seqlen_q, seqlen_k, nearest)
    if band is not None:
        assert -seqlen_q <= band.low and band.high <= seqlen_k


def strided_forms():
    """(name, mask, the same mask contiguous): layouts in which a mask may come."""
    dense = tiled_mask(2, 3, 150, 384)
    yield "transposed", dense.mT.contiguous().mT, dense
    yield "heads last", dense.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), dense
    for offset in (1, 8):
        storage = torch.zeros(dense.numel() + offset, dtype=torch.bool)
        yield f"offset {offset}", storage[offset:].view_as(dense).copy_(dense), dense
    yield "every second key", dense.repeat_interleave(2, dim=3)[..., ::2], dense
    wide = torch.ones(2, 3, 150, 400, dtype=torch.bool)
    wide[..., 7:391] = dense
    yield "slice of wider rows", wide[..., 7:391], dense
    one = dense[:1, :1]
    yield "expanded batch and heads", one.expand(2, 3, -1, -1), one
    yield "expanded keys", dense[..., :1].expand(-1, -1, -1, 384), dense[..., :1].repeat(1, 1, 1, 384)
    yield "one key for all", dense[..., :1], dense[..., :1].repeat(1, 1, 1, 384)
    yield "three dims", dense[0], dense[:1]
    yield "two dims", dense[0, 0], dense[:1, :1]


FORMS = {name: (mask, plain) for name, mask, plain in strided_forms()}


@pytest.mark.parametrize(("mask", "plain"), FORMS.values(), ids=FORMS)
def test_layouts_and_broadcast_dims(mask, plain):
    prepared = PreparedMask.from_mask(mask, seqlen_k=384, is_causal=True)
    assert prepared.shape == tuple(plain.shape)
    check_tile_mask(prepared, allowed_positions(plain, 150, 384, is_causal=True))


def test_rows_that_start_between_words():
    mask = torch.rand(2, 1, 1, 131) < 0.5
    sliced, plain = mask[:1, ..., 3:], mask[:1, ..., 3:].clone()
    for actual, wanted in zip(packing.pack_mask(sliced, None), packing.pack_mask(plain, None), strict=True):
        assert torch.equal(actual, wanted)


def test_one_row_for_all_queries_is_known_by_its_keys():
    keys = torch.rand(2, 1, 1, 50, generator=torch.Generator().manual_seed(2)) < 0.5
    want = PreparedMask.from_mask(keys, seqlen_q=70, is_causal=True)
    assert want.form == "intervals" and same(PreparedMask.from_mask(keys.expand(2, 4, 70, 50), is_causal=True), want)
    assert want.is_causal and want.window_size == (-1, -1) and want.band == (-70, -20)
    everything = PreparedMask.from_mask(torch.ones(1, 1, dtype=torch.bool), seqlen_q=9, seqlen_k=5)
    check_key_mask(everything, torch.ones(1, 1, 5, dtype=torch.bool))


PLACES = ("meta", "cuda") if torch.cuda.is_available() else ("meta",)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(("rows", "seqlen_q"), ((1, 7), (1, 70), (70, 70)), ids=("keys", "intervals", "tiles"))
def test_to_another_device(rows, seqlen_q, device):
    prepared = PreparedMask.from_mask(torch.rand(2, 4, rows, 50) < 0.5, seqlen_q=seqlen_q, window_size=(30, 2))
    assert prepared.to("cpu") is prepared and prepared.to(torch.device("cpu")) is prepared
    moved = prepared.to(device, non_blocking=True)
    assert type(moved) is type(prepared) and moved.device.type == device
    for name in ("shape", "seqlen_q", "seqlen_k", "is_causal", "window_size", "band"):
        assert getattr(moved, name) == getattr(prepared, name)
    assert [(x.shape, x.dtype) for x in moved.tensors] == [(x.shape, x.dtype) for x in prepared.tensors]
    if device == "cuda":
        assert same(moved.to("cpu"), prepared)


def test_printing_shows_no_values():
    band = "is_causal=False, window_size=(-1, -1)"
    for rows, seqlen_q, start in (
        (70, 70, "tiles', shape=(1, 2, 70, 50)"),
        (1, 70, "intervals', shape=(1, 2, 70, 50)"),
        (1, 7, "keys', shape=(1, 2, 1, 50)"),
    ):
        prepared = PreparedMask.from_mask(torch.ones(1, 2, rows, 50, dtype=torch.bool), seqlen_q=seqlen_q)
        assert repr(prepared) == f"PreparedMask(form='{start}, {band}, seqlen_q={seqlen_q}, device='cpu')"


@pytest.mark.parametrize("chunk", [1000, 77_000])
def test_chunks_change_nothing(chunk, monkeypatch):
    mask = tiled_mask(2, 2, 300, 260)
    want = (
        PreparedMask.from_mask(mask, window_size=(100, 20)),
        PreparedMask.from_blocks(mask[:, :, :6, :6], 50, 300, 260),
    )
    monkeypatch.setattr(packing, "CHUNK_ELEMENTS", chunk)
    assert same(PreparedMask.from_mask(mask, window_size=(100, 20)), want[0])
    assert want[0].stats() == PreparedMask.from_mask(mask, window_size=(100, 20)).stats()
    assert same(PreparedMask.from_blocks(mask[:, :, :6, :6], 50, 300, 260), want[1])


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_builders_give_what_the_dense_builders_give(band):
    blocks = torch.rand(2, 2, 3, 2, generator=torch.Generator().manual_seed(3)) < 0.5
    for size, lengths in ((128, (300, 250)), ((128, 256), (384, 512)), ((50, 7), (130, 10)), ((3, 128), (8, 256))):
        for block_mask in (blocks, blocks[0, :, :, :1], blocks[:, :, :1]):
            dense = masks.expand_blocks(block_mask, size, *lengths)
            want = PreparedMask.from_mask(dense, seqlen_q=lengths[0], seqlen_k=lengths[1], **band)
            assert same(PreparedMask.from_blocks(block_mask, size, *lengths, **band), want)
    ids, ids_k = masks.document_ids([[100, 60], [20, 200]], 230), masks.document_ids([[90], [260]], 300)
    for ids_q, key_ids in ((ids, None), (ids[0], None), (ids[0], ids_k), (ids, ids_k[1])):
        want = PreparedMask.from_mask(masks.document_mask(ids_q, key_ids), **band)
        assert same(PreparedMask.from_documents(ids_q, key_ids, **band), want)


IDS = torch.randint(0, 5, (2, 300), generator=torch.Generator().manual_seed(4)).sort().values
MASK_MODS = {
    "documents": lambda b, h, q_idx, kv_idx: IDS[b, q_idx] == IDS[b, kv_idx],
    "window of each head": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < (h + 1) * 20,
    "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "padding": lambda b, h, q_idx, kv_idx: kv_idx < 100 + b * 50,
    "rows": lambda b, h, q_idx, kv_idx: q_idx % 3 > 0,
    "all": lambda b, h, q_idx, kv_idx: torch.tensor(True),
}


@pytest.mark.parametrize("chunk", [packing.CHUNK_ELEMENTS, 20_000])
@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_a_function_of_flex_attention_gives_what_its_tensor_gives(name, band, chunk, monkeypatch):
    monkeypatch.setattr(packing, "CHUNK_ELEMENTS", chunk)
    dense = create_mask(MASK_MODS[name], 2, 3, 260, 300, device="cpu")
    lengths = {"seqlen_q": 260, "seqlen_k": 300}
    got = PreparedMask.from_mask_mod(MASK_MODS[name], **lengths, batch_size=2, num_heads=3, **band)
    assert same(got, PreparedMask.from_mask(dense, **lengths, **band))


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (lambda b, h, q_idx, kv_idx: True, "mask_mod returns a bool; it needs to return a bool tensor"),
        (lambda b, h, q_idx, kv_idx: (q_idx > kv_idx)[None], r"mask_mod returns shape \(1,\); it needs to return a sc"),
        (torch.ones(3, 3), "mask_mod is a Tensor; it needs to be a function"),
        (lambda b, h, q_idx, kv_idx: q_idx - kv_idx, "mask_mod returns torch.int64; it needs to return bool"),
    ],
)
def test_a_function_that_gives_no_bool_is_refused(mask_mod, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PreparedMask.from_mask_mod(mask_mod, 3, 3)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (0, 0)])
def test_a_function_of_flex_attention_is_not_asked_about_no_pairs(seqlen_q, seqlen_k):
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx * 7 + kv_idx * 3) % 5 < 3  # torch.vmap refuses it for an empty dim
    prepared = PreparedMask.from_mask_mod(mask_mod, seqlen_q, seqlen_k)
    assert (prepared.seqlen_q, prepared.seqlen_k) == (seqlen_q, seqlen_k)
    assert not prepared.dense().any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([True],), TypeError, "mask is a list; it needs to be a bool torch.Tensor"),
        ((torch.ones(2, 2),), TypeError, "mask has dtype torch.float32; it needs to be torch.bool"),
        ((torch.ones(4, dtype=torch.bool),), ValueError, r"mask has shape \(4,\).*pass mask\[None\]"),
        ((torch.ones(1, 4, dtype=torch.bool),), ValueError, "one row for all; seqlen_q is None"),
        ((torch.ones(4, 1, dtype=torch.bool),), ValueError, "one column for all; seqlen_k is None"),
        ((torch.ones(3, 4, dtype=torch.bool), {"seqlen_q": 5}), ValueError, "mask has 3 rows and seqlen_q is 5"),
        ((torch.ones(3, 4, dtype=torch.bool), {"seqlen_k": 2.0}), TypeError, "seqlen_k is 2.0"),
        ((torch.ones(3, 4, dtype=torch.bool), {"is_causal": 1}), TypeError, "is_causal is 1"),
        ((torch.ones(3, 4, dtype=torch.bool), {"window_size": (-2, 0)}), ValueError, "at least -1"),
    ],
)
def test_errors_of_from_mask(arguments, error, message):
    with pytest.raises(error, match=message):
        PreparedMask.from_mask(arguments[0], **(arguments[1] if len(arguments) > 1 else {}))


BLOCKS = torch.ones(2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "message"),
    [
        ("blocks", (BLOCKS, 128, 300, 256), {}, r"2 blocks along seqlen_q .* needs 3, or 1, for seqlen_q = 300"),
        ("blocks", (BLOCKS, 128, 256, 300), {}, r"2 blocks along seqlen_k .* needs 3"),
        ("documents", ([[1], [2]], [[1], [2], [3]]), {}, "ids_k has batch size 3"),
    ],
)
def test_errors_of_other_classmethods(kind, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(PreparedMask, f"from_{kind}")(*arguments, **options)


def test_a_mask_of_one_row_remembers_it():
    """Also moved, expanded over a batch, copied and saved; a band is no part of it."""
    keys = torch.rand(2, 1, 1, 40) < 0.5
    for mask in (keys, keys.expand(-1, -1, 30, -1)):
        for options in ({}, {"as_tiles": True}, {"is_causal": True}):
            prepared = PreparedMask.from_mask(mask, seqlen_q=30, **options)
            assert prepared.one_row
            assert prepared.to("meta").one_row and prepared.expand_batch((3, 2)).one_row
            assert copy.deepcopy(prepared).one_row and copy.deepcopy(prepared.expand_batch((3, 2))).batch_dims == (3, 2)
    rows = keys.expand(-1, -1, 30, -1).contiguous()
    assert not PreparedMask.from_mask(rows).one_row and not PreparedMask.from_mask(rows, find_intervals=True).one_row


ALLOWED = torch.rand(1, 2, 6, 9) > 0.3
TOGETHER = Sequences.packed(torch.tensor([0, 2, 6]), max_seqlen_q=4)
KINDS = {
    "TileMask": PreparedMask.from_mask(ALLOWED, is_causal=True),
    "KeyMask": PreparedMask.from_mask(ALLOWED[:, :, :1], seqlen_q=6),
    "IntervalMask": PreparedMask.from_topk(torch.randn(1, 2, 1, 9), 3, seqlen_q=6, is_causal=True),
    "SequenceTileMask": PreparedMask.from_mask(ALLOWED[0, :, :, :4], sequences=TOGETHER, seqlen_q=6, seqlen_k=6),
    "TreeMask": PreparedMask.from_tree(torch.ones(1, 3, 3, dtype=torch.bool)),
    "ListMask": PreparedMask.from_lists(
        torch.tensor([[0, 5, -1], [2, 1, 7]]), seqlen_q=6, seqlen_k=9, block_size=(3, 1)
    ),
}
FIELDS = [(name, field.name) for name, one in KINDS.items() for field in dataclasses.fields(one) if field.init]


def another(value):
    """A value of its kind that differs."""
    if value is None:
        return (2, 3)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return (*value[:-1], 77) if not isinstance(value, SequenceSpec) else value._replace(rows_q=77)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_each_field_alone_changes_what_calls_are_told_apart_by(kind, field):
    """The fields of the class itself: one that is new tells calls apart without being named anywhere."""
    mask = KINDS[kind]
    value = getattr(mask, field)
    if field == "sequences":  # which every call compares with its own
        assert dataclasses.replace(mask, sequences=copy.copy(TOGETHER))._call_key == mask._call_key
        return
    others = tensor_changes(value, has_gradient=False).values() if isinstance(value, torch.Tensor) else [another(value)]
    for other in others:
        check_told_apart(mask._call_key, dataclasses.replace(mask, **{field: other})._call_key)


def test_every_kind_of_prepared_mask_is_told_apart():
    assert {kind.__name__ for kind in PreparedMask._classes.values()} == set(KINDS)
    assert len({mask._call_key for mask in KINDS.values()}) == len(KINDS)
    assert (
        PreparedMask.from_mask(~ALLOWED, is_causal=True)._call_key == KINDS["TileMask"]._call_key
    )  # whatever it allows
    assert all(not isinstance(part, torch.Tensor) for mask in KINDS.values() for part in parts(mask._call_key).values())


MAPPED: dict[str, Callable[[Tensor], PreparedMask]] = {
    "topk": lambda s: PreparedMask.from_topk(s[..., :1, :], 3),
    "causal topk": lambda s: PreparedMask.from_topk(s[..., :1, :], 3, is_causal=True, local=2, reorder=True),
    "topk of allowed keys": lambda s: PreparedMask.from_topk(s[:, :1, :1], 3, mask=s[:1, :, -1:] > 0),
    "intervals": lambda s: PreparedMask.from_intervals((s[0, :, 0] * 2).long(), (s[0, :, 1] * 9).long(), 8),
    "lengths": lambda s: PreparedMask.from_mask(
        masks.padding_mask((s[:, 0, 0, 0].abs() * 3).long().clamp(0, 8), 8), seqlen_q=8
    ),
    "keys": lambda s: PreparedMask.from_mask(s[:, :, :1] > 0, seqlen_q=8),
    "tiles": lambda s: PreparedMask.from_mask(s > 0),
    "topk lists": lambda s: PreparedMask.from_topk_lists(s, 3, is_causal=True),
    "lists": lambda s: PreparedMask.from_lists(s.topk(3, -1).indices, seqlen_k=8),
}


@pytest.mark.parametrize("name", MAPPED)
def test_masks_are_prepared_below_vmap(name: str) -> None:
    q, scores, make = torch.randn(3, 2, 8, 2, 16), torch.randn(3, 2, 2, 8, 8), MAPPED[name]

    def call(q: Tensor, scores: Tensor) -> Tensor:
        return flash_dmattn.attention(q, q, q, make(scores), backend="eager")

    wanted = torch.stack([call(*each) for each in zip(q, scores, strict=True)])
    torch.testing.assert_close(torch.vmap(call)(q, scores), wanted)
    pulled = torch.func.grad(lambda q: torch.vmap(call)(q, scores).square().sum())(q)
    alone = torch.stack([torch.func.grad(lambda q, s=s: call(q, s).square().sum())(x) for x, s in zip(q, scores)])
    torch.testing.assert_close(pulled, alone)


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("compact=True needs", lambda s: PreparedMask.from_topk(s[..., :1, :], 2, is_causal=True, compact=True)),
        ("find_intervals=True needs", lambda s: PreparedMask.from_mask(s > 0, find_intervals=True)),
        ("this mask needs", lambda s: PreparedMask.from_documents((s[0, 0] > 0).long())),
    ],
)
def test_what_needs_values_is_refused_below_vmap(what: str, make: Callable[[Tensor], PreparedMask]) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{what} the values of one call, and torch.vmap maps several; "):
        torch.vmap(lambda s: make(s).tensors[0])(torch.randn(3, 1, 2, 8, 8))
