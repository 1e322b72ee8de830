"""The launch plans of calls with sequences: they use the kernels of dense calls, with a tile of one sequence each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from flash_dmattn.gradients import new_like, sequence_query_gradient
from flash_dmattn.problem import Flags, Gradients, MaskView, NeedsGrad, SequenceView, bias_class
from flash_dmattn.problem.inputs import Saved
from flash_dmattn.reference.entropy import NOTHING_SENT, SentEntropy, delta_of_sink
from flash_dmattn.reference.sinks import row_delta, sink_gradient

from .bias_forms import KEY_SUM, NO_DBIAS, ROW_BIAS, STORE, TILE_BIAS
from .fill_gaps import fill_gaps_kernel
from .forward import forward_kernel
from .gpus import LIKE_HOPPER
from .kernel_launch import Launch, by_name
from .plan import MOST_FEW_KEYS, Call
from .plan_backward import plan_bias, plan_delta, plan_keys, plan_queries
from .plan_forward import EDGES, forward_values, num_spans, run_in_shares
from .plan_pairs import plan_pairs
from .sequences import PACKED, PADDED, PAGED, PAGED_PACKED, SequenceLayout
from .tile_ops import BiasStrides, MaskStrides
from .tile_table import Tile, tile_of_short_sequences

_LAYOUTS = {
    "packed": PACKED.value,
    "padded": PADDED.value,
    "paged": PAGED.value,
    "paged_packed": PAGED_PACKED.value,
}
# Sequences of at most so many queries and keys, on average, take the tiles for small GPUs; larger ones would be empty.
SHORT = 64
# In 16 bits, a sequence whose queries times the heads of a group are at most so many rows is one tile. The tuples are
# keys per step, warps and stages. _FEW_ROWS and _FEW_ROWS_PAGED serve head dims up to 128 on sm_90. _FEW_ROWS_SMALL
# fits into the shared memory of other GPUs, and serves wider heads.
MOST_GROUP_ROWS = 64
# With pages more stages: Triton prefetches the page table before the tiles, which leaves (stages - 1) / 2 to them.
_FEW_ROWS, _FEW_ROWS_PAGED, _FEW_ROWS_SMALL = (64, 4, 3), (64, 4, 5), (32, 4, 2)
# The same with head dims above 256, where two warpgroups hold the sums of at most MOST_GROUP_ROWS_WIDE rows.
MOST_GROUP_ROWS_WIDE = 32
_FEW_ROWS_WIDE, _FEW_ROWS_WIDE_GFX = (32, 8, 2), (32, 4, 1)
# With this tile the kernel of dk and dv also makes dq. It serves sequences whose keys fit in one tile, in 16 bits up to
# head dim 128 (docs/notes/sequences.md).
_ONE_PASS = Tile(16, 64, 4, 1)
# Split-KV of a few queries: a share has at least LEAST_PART keys, and about PART keys of the longest sequence.
LEAST_PART, PART = 256, 4096
# Values that a program writes at a time into a gap, and the least number of programs of a gap. Few gaps may be long, so
# that all gaps together have 4 programs for each SM.
_GAP_BLOCK = 1024
_GAP_SHARE, _GAP_PROGRAMS = 4, 4


class SequenceCall(Call):
    """Everything that one class of calls with sequences decides for its launches; sequences are its batch entries."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        flags: Flags,
        sink: Tensor | None,
        sequences: SequenceView,
    ) -> None:
        super().__init__(q, k, v, mask, bias, flags, sink)
        spec, (left, right) = flags.sequences, flags.window
        assert spec is not None
        self.spec, self.number = spec, spec.number
        self.shape = self.shape._replace(
            batch=self.number,
            seqlen_q=spec.max_seqlen_q,
            seqlen_k=spec.max_seqlen_k,
            left=min(left, spec.max_seqlen_k),
            right=min(right, spec.max_seqlen_q),
        )
        self.code = _LAYOUTS[spec.layout]
        self.rows_q, self.rows_k = q.shape[1], k.shape[1]
        packs = flags.mask_packing, flags.bias_packing
        self.layout = SequenceLayout(
            self.number,
            self.rows_q,
            self.rows_k,
            *(int(packing == kind) for packing in packs for kind in ("queries", "keys")),
            pages=k.shape[0],
            table_row=0 if sequences.block_table is None else sequences.block_table.stride(0),
            few_keys=-1 if flags.invariant else MOST_FEW_KEYS,
            one_pass_keys=-1,
            dbias_rows=self.rows_q if flags.bias_packing == "queries" else spec.max_seqlen_q,
            dbias_keys=self.rows_k if flags.bias_packing == "keys" else spec.max_seqlen_k,
        )

    def tma(self, *tensors: Tensor) -> bool:
        """Return whether TMA loads a tensor: only a bias. Tiles of q, k and v would reach into the next sequence."""
        return len(tensors) == 1 and tensors[0] is self.bias and super().tma(*tensors)

    def tiles_of_queries(self, block: int) -> tuple[int, bool]:
        """Return the most tiles of queries, as `tiles_of_rows` counts, and whether programs search their sequence."""
        return self._tiles(self.rows_q, self.shape.seqlen_q, self.spec.packs_queries, block)

    def tiles_of_keys(self, block: int) -> tuple[int, bool]:
        return self._tiles(self.rows_k, self.shape.seqlen_k, self.spec.packs_keys, block)

    def _tiles(self, rows: int, most: int, is_packed: bool, block: int) -> tuple[int, bool]:
        with_bounds, with_search = max(1, triton.cdiv(most, block)) * self.number, rows // block + self.number
        # A search is a chain of loads, one for each bit of the number of sequences. It must save a fifth of the tiles.
        search = is_packed and 4 * with_bounds > 5 * with_search
        return (with_search if search else with_bounds), search

    def key_sums_shape(self, heads: int) -> tuple[int, int, int]:
        """Return the shape of the sums of ds over queries of so many heads."""
        return 1 if self.flags.bias_packing == "keys" else self.number, heads, self.layout.dbias_keys

    @property
    def has_few_keys(self) -> bool:
        """Return False: each sequence has its own number of keys, which the kernels read."""
        return False

    def edges(self, rest: int) -> bool:
        """Return True: any sequence may end within a block."""
        return True

    @property
    def has_few_rows(self) -> bool:
        """Return False: `plan_forward` below decides it for sequences."""
        return False

    @property
    def is_short(self) -> bool:
        """Return whether the average sequence is too short to fill a large tile."""
        if self.invariant:  # mean lengths are of the batch
            return False
        # By mean lengths: the upper bounds that the caller states must not change a result.
        mean_q = self.rows_q / (self.number if self.spec.packs_queries else 1)
        mean_k = self.rows_k / (self.number if self.spec.packs_keys else 1)
        return max(mean_q, mean_k) <= SHORT and self.code in (PACKED.value, PADDED.value)

    def tile(self, kernel: str) -> Tile:
        """Return the row of the tile table for a kernel; short sequences take smaller tiles."""
        if kernel == "keys" and self.layout.one_pass_keys >= 0:
            return _ONE_PASS
        if self.is_short and self.q.dtype != torch.float32 and not self.has_wide_heads:
            return tile_of_short_sequences(max(self.block_d, self.block_dv))
        return super().tile(kernel)

    @property
    def may_take_one_pass(self) -> bool:
        """Return whether one kernel may make all gradients of sequences whose keys fit in one tile.

        Only the cases that were timed: short sequences, 16 bits, head dims up to 128, no lists of tiles. Long runs are
        wrong with the 16 queries of its tile, except on sm_90, whose wgmma has none.
        """
        narrow = self.q.dtype != torch.float32 and max(self.block_d, self.block_dv) <= 128
        is_right = self.arch in ("sm_90", "cpu") or not self.has_long_runs
        return narrow and self.is_short and not self.has_tiles and is_right

    def take_one_pass(self) -> None:
        """Let one kernel make all gradients of sequences whose keys fit in one tile; longer ones still take two."""
        self.layout = self.layout._replace(one_pass_keys=_ONE_PASS.block_n, few_keys=_ONE_PASS.block_n)

    @property
    def has_tiles(self) -> bool:
        """Return whether the mask has bits and lists of tiles."""
        return self.mask.form == "sequence_tiles"

    def mask_strides(self, columns: bool = False) -> BiasStrides | MaskStrides:
        if self.mask.form == "tree":
            bits = self.mask.tensors[0]
            entries, _, words = bits.shape
            return MaskStrides(bits.stride(0), 0, words, 0, 0, 0, 1, 1, entries)
        return super().mask_strides(columns)

    def values(self) -> dict[str, Any]:
        return {**super().values(), "layout": self.layout, "SEQUENCES": self.code}

    def plan_fill(self, shape: Sequence[int], column: int, has_lse: bool = False) -> Launch:
        """Plan the kernel that fills rows of no sequence in tensors of this shape, (B, L, H, D): run(x, lse, bounds).

        `column` of the bounds has the first row of each sequence: 0 for queries, 2 for keys.
        """
        packed = self.spec.packs_queries if column == 0 else self.spec.packs_keys
        _, rows, heads, width = shape
        gaps = self.number + packed
        share = max(_GAP_SHARE, _GAP_PROGRAMS * self.num_sms // gaps)
        rest = by_name(
            fill_gaps_kernel,
            {},
            number=self.number,
            rows=rows,
            width=heads * width,
            num_heads=heads,
            share=share,
            COLUMN=column,
            IS_PACKED=packed,
            BLOCK=_GAP_BLOCK,
            HAS_LSE=has_lse,
        )
        return Launch(fill_gaps_kernel, gaps * share, rest)


def plan_forward(call: SequenceCall) -> Callable[..., None]:
    """Plan the results of one class of calls: run(x, out, lse, *rows)."""
    shape, tile = call.shape, call.tile("forward")
    tiles, search = call.tiles_of_queries(tile.block_m)
    heads, grouped, splits = shape.num_heads, False, 1
    most_rows = shape.seqlen_q * shape.group
    most_few = MOST_GROUP_ROWS_WIDE if call.has_wide_heads else MOST_GROUP_ROWS
    is_few = most_rows <= most_few and call.q.dtype != torch.float32
    combined = shape._replace(batch=call.q.shape[0], seqlen_q=call.rows_q)
    # The heads of a group cannot share a tile if each has its own lists of tiles.
    is_few = is_few and not (call.has_tiles and call.mask.tensors[0].shape[1] not in (1, call.num_heads_k))
    # Not packed sequences: the bound on lengths that the caller states would change the order of their sums. Not
    # dropout: its random numbers go by tiles of queries of one head. Not a bias whose form has an extent, because
    # it goes by the positions of queries, and rows are no positions then.
    if call.invariant:
        is_few = is_few and most_rows <= tile.block_m
        splits = num_spans(call, tiles * heads, combined)
    if is_few and call.spec.layout != "packed" and not call.has_dropout and call.extent is None:
        # One tile holds the queries of a sequence for all heads of a group, which read the same keys.
        has_room = call.arch in LIKE_HOPPER and max(call.block_d, call.block_dv) <= 128
        step = _FEW_ROWS_SMALL
        if call.has_wide_heads:
            step = _FEW_ROWS_WIDE_GFX if call.arch.startswith("gfx") else _FEW_ROWS_WIDE
        if has_room:
            step = _FEW_ROWS_PAGED if call.spec.has_pages else _FEW_ROWS
        tiles, search, heads, grouped = call.number, False, call.num_heads_k, shape.group > 1
        if call.invariant:
            splits = num_spans(call, tiles * heads, combined)
        else:
            tile = Tile(max(16, triton.next_power_of_2(most_rows)), *step)
            splits = _key_parts(call, tiles * heads)
    has_rows_of_heads = grouped and call.is_biased
    bias_tma = not grouped and call.bias_tma()
    launch = call.launch(
        forward_kernel,
        tiles * heads * splits * call.column_parts(tile),
        tile,
        [call.bias_descriptor(3, call.bias, tile)] if bias_tma and call.bias is not None else [],
        **forward_values(call, tile, splits),
        bias_strides=call.bias_strides(bias_tma),
        BIAS=TILE_BIAS.value if has_rows_of_heads else call.bias_kind,
        BIAS_TMA=bias_tma,
        EDGES=True,
        SEARCH=search,
        PAGE=max(1, call.k.shape[1]) if call.spec.has_pages else 0,
        GROUPED=grouped,
        ONE_LOOP=call.invariant and call.mask_kind in EDGES,
    )
    fill = call.plan_fill((*call.q.shape[:3], shape.head_dim_v), 0, has_lse=True)
    return run_in_shares(call, launch, combined, splits, fill)


def _key_parts(call: SequenceCall, programs: int) -> int:
    """Return how many programs share the keys of each sequence, if all its queries are one tile."""
    longest = call.shape.seqlen_k
    wanted = max(triton.cdiv(4 * call.num_sms, programs), triton.cdiv(longest, PART))
    return max(1, min(wanted, longest // LEAST_PART, 64))


def plan_backward(
    call: SequenceCall, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad
) -> Callable[..., Gradients]:
    """Plan the gradients of one class of calls: run(saved, dout, dlse, sent), `sent` as for `launch.backward`."""
    need_q, need_k, need_v, need_bias, need_sink = needs_grad
    bias, shape, flags = call.bias, call.shape, call.flags
    kind = None if bias is None or not need_bias else bias_class(bias.shape)
    packs_rows = flags.bias_packing == "queries"
    # If dbias has a head for each query head of each sequence, ds is stored, and nothing is summed.
    stored = kind == "score" and bias is not None and bias.shape[1] == shape.num_heads
    stored = stored and bias is not None and (packs_rows or bias.shape[0] == call.number)
    # A bias per key with a head for each query head needs a launch of its own: dk and dv are sums over a group. Wide
    # heads store pairs of each query head.
    apart = kind == "key" and bias is not None and shape.group > 1 and bias.shape[1] == shape.num_heads
    apart = apart and not call.has_wide_heads
    shared = kind == "score" and not stored
    dbias_kind = STORE if stored else KEY_SUM if kind == "key" and not apart else NO_DBIAS
    needs_keys = need_k or need_v or dbias_kind.value != NO_DBIAS.value
    # Not with a shared dbias of scores. One pass takes delta from p and dp in a tile of all keys of a sequence; the
    # bias kernel would have to do the same, and its tiles may hold fewer keys.
    one_pass = need_q and needs_keys and call.may_take_one_pass and not shared
    if one_pass:
        call.take_one_pass()
    # With few keys in every sequence, lse only changes its base, alike for all rows: rows of no sequence have -inf.
    few = shape.seqlen_k <= call.layout.few_keys
    # Not beside a bias of one value per query, which goes by sequences.
    has_row_bias = call.bias_kind == ROW_BIAS.value
    rows_q = shape._replace(batch=dout.shape[0], seqlen_q=call.rows_q) if few and not has_row_bias else None
    delta_of = plan_delta(call, dout, dlse, few, rows_q)
    pairs_of = keys_of = sums_of = queries_of = None
    if call.has_wide_heads:
        if need_q or needs_keys:
            pairs_of = plan_pairs(call, dout, need_q, need_k, need_v, dbias_kind.value)
    else:
        if needs_keys:
            keys_of = plan_keys(call, dout, need_k, need_v, dbias_kind.value, call.num_heads_k, one_pass)
        if apart:
            sums_of = plan_keys(call, dout, False, False, KEY_SUM.value, shape.num_heads)
        if need_q and shape.seqlen_k > call.layout.one_pass_keys:
            queries_of = plan_queries(call, dout)
    bias_of = plan_bias(call, dout, bias) if shared and bias is not None else None
    fill_q, fill_k, fill_v = (call.plan_fill(x.shape, side) for x, side in ((call.q, 0), (call.k, 2), (call.v, 2)))
    num_heads_k = call.num_heads_k
    new_q = new_like(call.q.shape, call.q.stride())

    def run(saved: Saved, dout: Tensor, dlse: Tensor | None, sent: SentEntropy = NOTHING_SENT) -> Gradients:
        (q, k, v, mask, bias, sink, sequences, dropout), out, lse = saved
        assert sequences is not None
        read = (q, k, v, bias, dout, *delta_of(saved, dout, dlse), sent.gradient)
        dq = dk = dv = dbias = None
        if pairs_of is not None:
            dq, dk, dv, dbias = pairs_of(read, mask, None, sequences.bounds, dropout)
        elif need_q:
            dq = new_q(q)
        if keys_of is not None:
            dk, dv, dbias = keys_of(read, mask, None, sequences.bounds, dropout, dq if one_pass else None)
        if sums_of is not None:
            dbias = sums_of(read, mask, None, sequences.bounds, dropout, None)[2]
        if dq is not None:
            if queries_of is not None:
                queries_of(read, mask, None, sequences.bounds, dropout, dq)
            fill_q(dq, None, sequences.bounds)
        if dk is not None:
            fill_k(dk, None, sequences.bounds)
        if dv is not None:
            fill_v(dv, None, sequences.bounds)
        if bias_of is not None:
            dbias = bias_of(read, mask, None, sequences.bounds, dropout)
        rows = None
        # Rows of no sequence have no sink. Their lse of -inf would look like a row that has a sink and no keys, so it
        # becomes +inf, with which they add nothing to the gradient.
        nowhere = None if sink is None else lse.masked_fill(lse == -torch.inf, torch.inf)
        if sink is not None and nowhere is not None and (need_sink or kind == "query"):
            rows = delta_of_sink(row_delta(dout, out, dlse, lse), sent.gradient, sink, nowhere)
        if kind == "query" and bias is not None:
            dbias = sequence_query_gradient(bias, sent.own(dlse), lse, num_heads_k, flags, sink, rows, sequences.bounds)
        if sink is None:
            return dq, dk, dv, dbias
        if not need_sink or rows is None or nowhere is None:
            return dq, dk, dv, dbias, None
        return dq, dk, dv, dbias, sink_gradient(sink, nowhere, rows)

    return run
