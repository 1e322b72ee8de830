"""Entry points of attention over lists: the forward and the backward pass, and their launches.

The tensors are (B, H, L, D). Lists are canonical: `keys` (Bm, Hm, R, K) ascend strictly in each row, and are -1 after
the first `count` (Bm, Hm, R). `slots` has the column of `values` of each key, None if the columns are in the order of
the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn.gradients import sink_gradient
from flash_dmattn.problem import device_arch
from flash_dmattn.reference.entropy import NOTHING_SENT, SentEntropy, delta_of_sink

from .backward_delta import delta_kernel
from .bias_forms import KEY_BIAS, NO_BIAS, TILE_BIAS
from .gpus import shared_bytes
from .kernel_launch import Launch, by_name, ceil_div, next_power_of_2, on_device
from .launch import plans, signature
from .list_forward import list_forward_kernel
from .list_keys import list_keys_kernel, list_segments_kernel
from .list_ops import NO_VALUES, OF_ENTRIES, OF_HEADS, OF_QUERIES, Lists
from .list_pairs import list_pairs_kernel
from .list_product import list_product_kernel
from .list_queries import NOTHING, PAIRS, ROWS, list_queries_kernel
from .list_rows import list_add_kernel, list_bits_kernel, list_counts_kernel, list_rows_kernel
from .list_tiles import ListKernel, list_tile, members_of_program
from .plan import MOST_FEW_KEYS, rows_of_flags
from .plan_forward import empty_parts, num_key_shares, parts_of_rows, plan_combine
from .precision import unsplit_precision
from .sequences import NO_SEQUENCES
from .tile_ops import LOG2E, BiasStrides, Shape, Strides, cap_of
from .tile_table import Tile

# The most memory for temporaries of gradients of keys, in bytes, unless the smallest chunk needs more.
SPACE = 2**30
# The maximum number of rows that a program adds in sequence. A key that every query lists has one row for each query.
MOST_ROWS = 4096


class ListNeeds(NamedTuple):
    """Which gradients the call needs."""

    q: bool
    k: bool
    v: bool
    values: bool
    sink: bool


class ListFlags(NamedTuple):
    """The sizes of a call. An entry is a block of `keys_each` keys, and a list is for `queries` queries.

    Without v, the values of keys are their first `head_dim_v` channels. As with masks and biases, `list_repeat` and
    `value_repeat` consecutive entries of the batch share one entry of the lists, and of the values. `sums` is as in
    `Flags`.
    """

    scale: float
    softcap: float
    left: int
    right: int
    queries: int
    keys_each: int
    head_dim_v: int
    list_repeat: int = 1
    value_repeat: int = 1
    allows_tf32: bool = False
    max_scores: bool = False
    entropy: bool = False
    sums: bool = False


class ListCall:
    """The properties of a class of calls that decide its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        keys: Tensor,
        slots: Tensor | None,
        values: Tensor | None,
        bias: Tensor | None,
        sink: Tensor | None,
        flags: ListFlags,
    ) -> None:
        batch, num_heads, seqlen_q, head_dim = q.shape
        _, self.heads_k, seqlen_k, _ = k.shape
        self.flags, self.is_latent, self.group = flags, v is None, num_heads // self.heads_k
        left, right = min(flags.left, seqlen_k), min(flags.right, seqlen_q)
        self.shape = Shape(
            batch, seqlen_q, seqlen_k, num_heads, self.group, head_dim, flags.head_dim_v, left, right
        )  # fmt: skip
        _, list_heads, rows, most = keys.shape
        self.lists = Lists(
            0 if keys.shape[0] == 1 else list_heads * rows, 0 if list_heads == 1 else rows, rows, most,
            flags.list_repeat, keys.shape[0],
        )  # fmt: skip
        self.blocks = ceil_div(seqlen_k, flags.keys_each)
        self.owners = batch * self.heads_k
        self.block_d, self.rest = _parts_of(head_dim)
        if self.is_latent:
            self.block_d, self.rest = flags.head_dim_v, _rest_of(head_dim, flags.head_dim_v)
        self.block_dv = max(16, next_power_of_2(flags.head_dim_v))
        self.members = self.group * flags.queries
        self.dtype, self.arch = q.dtype, device_arch(q.device)
        self.num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        self.value_kind, self.value_shape = NO_VALUES.value, None if values is None else values.shape
        value_strides, bias_strides = BiasStrides(0, 0, 0, 0, 1, 1, 1), BiasStrides(0, 0, 0, 0, 1, 1, 1)
        if values is not None:
            value_strides = self._strides(values, flags.value_repeat)
            if values.shape[2] != rows:
                self.value_kind = OF_QUERIES.value
            else:
                is_per_head = values.shape[1] not in (1, self.heads_k)
                self.value_kind = OF_HEADS.value if is_per_head else OF_ENTRIES.value
        self.is_biased = values is not None or bias is not None
        bias_kind = NO_BIAS.value
        if bias is not None:
            bias_strides = self._strides(bias, 1)
            bias_kind = KEY_BIAS.value if bias.shape[1] in (1, self.heads_k) else TILE_BIAS.value
        v = k if v is None else v
        span = max(seqlen_k * x.stride(2) for x in (k, v))
        self.values = {
            "q_strides": rows_of(q),
            "k_strides": rows_of(k),
            "v_strides": rows_of(v),
            "value_strides": value_strides,
            "bias_strides": bias_strides,
            "shape": self.shape,
            "lists": self.lists,
            "blocks": self.blocks,
            "heads_k": self.heads_k,
            # As in `Call`: with values or a bias, scores are natural.
            "score_scale": flags.scale / flags.softcap
            if flags.softcap > 0
            else flags.scale * (1.0 if self.is_biased else LOG2E.value),
            "scale": flags.scale,
            "softcap": flags.softcap,
            "BLOCK_D": self.block_d,
            "REST": self.rest,
            "BLOCK_DV": self.block_dv,
            "GROUP": self.group,
            "QUERIES": flags.queries,
            "KEYS_EACH": flags.keys_each,
            "VALUES": self.value_kind,
            "SLOTS": slots is not None and values is not None,
            "BIAS": bias_kind,
            "SOFTCAP": cap_of(flags.softcap, q.dtype),
            "LEFT": left >= 0,
            "RIGHT": right >= 0,
            "HAS_SINK": sink is not None,
            "sink_of_head": 1,
            "sink_of_row": 0,
            "HEADS_FIRST": False,
            "LATENT": self.is_latent,
            "PAD_D": self.block_d + self.rest != head_dim,
            "PAD_DV": self.block_dv != flags.head_dim_v,
            "WIDE": span > 2**31 - 1,
            "PRECISION": unsplit_precision(q.dtype, self.arch, flags.allows_tf32),
        }

    @property
    def has_wide_heads(self) -> bool:
        """Return whether a head dim is above 256."""
        return max(self.block_d + self.rest, self.block_dv) > 256

    def has_few_keys(self, step: int) -> bool:
        """Return whether one step covers a list, of so small a size that kernels compute delta from p and dp."""
        most, each = self.lists.most, self.flags.keys_each
        return min(most, self.blocks) * each <= step and min(most * each, self.shape.seqlen_k) <= MOST_FEW_KEYS

    @property
    def columns(self) -> int:
        """Return the number of columns of the head dims in a step of kernels that loop over head dims."""
        head_dim = self.shape.head_dim if self.flags.sums else self.shape.head_dim_v
        return min(64, max(16, next_power_of_2(head_dim)))

    @property
    def takes_inverse_lists(self) -> bool:
        """Return whether a program computes dk and dv of one block of keys, so that no rows are stored.

        It needs q and dout once for each pair of a list and a block.
        """
        if self.is_latent or self.has_wide_heads:
            return False
        tile, dims = self.tile("keys"), self.block_d + self.rest + self.block_dv
        if (tile.block_m + tile.block_n) * dims * self.dtype.itemsize > shared_bytes(self.arch):
            return False  # a program keeps k and v of its block in shared memory
        return self.flags.keys_each >= 32 or self.members <= 4 * self.flags.keys_each

    def tile(self, kernel: ListKernel) -> Tile:
        """Return the row of the tile table for a kernel."""
        head_dim = max(self.block_d, self.block_dv)
        if kernel == "keys":
            size = max(16, next_power_of_2(self.flags.keys_each))
        else:
            size = members_of_program(kernel, self.members, head_dim, self.dtype, self.arch, self.flags.keys_each)
        holds_v = head_dim > 256 and not self.is_latent
        return list_tile(kernel, size, head_dim, self.dtype, self.arch, self.flags.keys_each, holds_v)

    def launch(self, kernel: Any, programs: int, tile: Tile, **constants: Any) -> Launch:
        """Make the launch of a kernel: its arguments are taken by name from `values`, the tile and `own`."""
        sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.num_stages}
        rest = by_name(kernel, {**self.values, **sizes}, **constants)
        bound = {"maxnreg": tile.registers} if tile.registers else {}
        return Launch(kernel, programs, rest, {"num_warps": tile.num_warps, **bound})

    def _strides(self, x: Tensor, repeat: int) -> BiasStrides:
        strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        return BiasStrides(*strides, self.shape.num_heads // x.shape[1], repeat, x.shape[0])


def rows_of(x: Tensor) -> Strides:
    """Return the strides of a (B, H, L, D) tensor."""
    return Strides(x.stride(0), x.stride(2), x.stride(1))


def _parts_of(head_dim: int) -> tuple[int, int]:
    """Split a head dim into two powers of 2, the second smaller or 0: 576 into 512 and 64, 96 into 64 and 32."""
    padded = max(16, next_power_of_2(head_dim))
    if padded <= 16 or padded == head_dim:
        return padded, 0
    rest = _rest_of(head_dim, padded // 2)
    return (padded // 2, rest) if rest < padded // 2 else (padded, 0)


def _rest_of(head_dim: int, first: int) -> int:
    return 0 if head_dim == first else max(16, next_power_of_2(head_dim - first))


def shares_rows(head_dim: int, head_dim_v: int) -> bool:
    """Return whether kernels load keys once for both products, if values are the first channels of keys.

    Values are then the first of the two parts of a head dim.
    """
    return head_dim_v == max(16, next_power_of_2(head_dim_v)) and _rest_of(head_dim, head_dim_v) <= head_dim_v


def list_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keys: Tensor,
    count: Tensor,
    slots: Tensor | None,
    values: Tensor | None,
    bias_key: Tensor | None,
    sink: Tensor | None,
    flags: ListFlags,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, ...]:
    """Return out (B, Hq, Lq, Dv), contiguous as (B, Lq, Hq, Dv), and natural lse (B, Hq, Lq).

    The maximum scores and the entropies of rows follow, if the flags ask for them. lse is in fp32, or with values or a
    bias in fp64.

    Args:
        values: (Bv, Hv, Lq or R, slots), one for each entry of the lists. Hv is 1, Hk or Hq.
        bias_key: (1 or B, 1 or Hk or Hq, 1, Lk).
        sink: (Hq,).
        tile: replaces the tile of the table.
    """
    if v is None and not shares_rows(q.shape[3], flags.head_dim_v):
        v = k[..., : flags.head_dim_v]
    elif v is not None and _lies_in(v, k):
        v = None
    q, k, v = _unit_rows(q), _unit_rows(k), None if v is None else _unit_rows(v)
    out = torch.empty(q.shape[0], q.shape[2], q.shape[1], flags.head_dim_v, dtype=q.dtype, device=q.device)
    lse_dtype = torch.float32 if values is None and bias_key is None else torch.float64
    lse = torch.empty(q.shape[:3], dtype=lse_dtype, device=q.device)
    rows = [
        torch.empty(lse.shape, dtype=torch.float32, device=q.device) for _ in range(flags.max_scores + flags.entropy)
    ]
    with on_device(q):
        key = ("list forward", flags, tile, *signature(q, k, v, keys, count, slots, values, bias_key, sink))
        make = lambda: plan_list_forward(ListCall(q, k, v, keys, slots, values, bias_key, sink, flags), tile)
        plans.get_or_make(key, make)(q, k, v, keys, count, slots, values, bias_key, sink, out, lse, *rows)
    return out.transpose_(1, 2), lse, *rows


def plan_list_forward(call: ListCall, tile: Tile | None = None) -> Callable[..., None]:
    """Plan the results: run(q, k, v, keys, count, slots, values, bias_key, sink, out, lse, *rows)."""
    tile = tile or call.tile("forward")
    parts = ceil_div(call.members, tile.block_m)
    programs = call.owners * call.lists.rows * parts
    steps = ceil_div(call.lists.most * call.flags.keys_each, tile.block_n)
    shares = num_key_shares(programs, steps, 2 * call.num_sms)  # two per SM: each waits for an index before its keys
    has_sink = call.values["HAS_SINK"]
    constants = {"PARTS": parts, "SHARES": shares, "HAS_SINK": has_sink and shares == 1}
    launch = call.launch(list_forward_kernel, programs * shares, tile, **constants)
    combine = None if shares == 1 else plan_combine(call.values, call.shape, shares, has_sink, False)

    def run(
        q: Tensor, k: Tensor, v: Tensor | None, keys: Tensor, count: Tensor, slots: Tensor | None,
        values: Tensor | None, bias: Tensor | None, sink: Tensor | None, out: Tensor, lse: Tensor, *rows: Tensor,
    ) -> None:  # fmt: skip
        asked = rows_of_flags(call.flags, rows)
        results: tuple[Tensor | None, ...] = (out, lse, *asked)
        if combine is not None:
            results = (*empty_parts(shares, out, lse), *parts_of_rows(shares, asked))
        launch(q, k, _or(v, k), keys, count, _or(slots, keys), _or(values, q), _or(bias, q), _or(sink, q), *results)
        if combine is not None:
            combine(*results, out, lse, *asked, _or(sink, q))

    return run


def list_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keys: Tensor,
    count: Tensor,
    slots: Tensor | None,
    values: Tensor | None,
    bias_key: Tensor | None,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: ListFlags,
    needs: ListNeeds,
    *,
    inverse: tuple[Tensor, Tensor] | None = None,
    tiles: dict[str, Tile] | None = None,
    sent: SentEntropy = NOTHING_SENT,
) -> tuple[Tensor | None, ...]:
    """Return dq, dk, dv, dvalues and dsink, None where not needed; without v, dk is the gradient of both.

    Args:
        inverse: the cached result of `inverse_lists` for these lists, or None.
        tiles: tiles by the name of a kernel, which replace those of the table.
        sent: as for `launch.backward`.
    """
    if v is None and not shares_rows(q.shape[3], flags.head_dim_v):
        arguments = (
            dlse,
            q,
            k,
            k[..., : flags.head_dim_v],
            keys,
            count,
            slots,
            values,
            bias_key,
            sink,
            out,
            lse,
            flags,
        )
        others: dict[str, Any] = {"inverse": inverse, "tiles": tiles, "sent": sent}
        dq, dk, dv, *rest = list_backward(dout, *arguments, needs._replace(v=needs.k), **others)
        if dk is not None and dv is not None:
            dk[..., : flags.head_dim_v] += dv
        return dq, dk, None, *rest
    q, k, dout, out = (_unit_rows(x) for x in (q, k, dout, out))
    v = None if v is None else _unit_rows(v)
    needs = needs._replace(values=needs.values and values is not None, sink=needs.sink and sink is not None)
    with on_device(q):
        tiles_key = tuple(sorted((tiles or {}).items()))
        tensors = (q, k, v, keys, count, slots, values, bias_key, sink, dout, dlse, out, lse)
        reads_once = v is not None and _lies_in(v, k)
        key = ("list backward", flags, needs, tiles_key, reads_once, *signature(*tensors, sent.gradient))
        make = lambda: plan_list_backward(
            ListCall(q, k, v, keys, slots, values, bias_key, sink, flags),
            dout,
            out,
            dlse,
            needs,
            tiles or {},
            reads_once,
        )
        return plans.get_or_make(key, make)(*tensors, inverse, sent)


def plan_list_backward(
    call: ListCall,
    dout: Tensor,
    out: Tensor,
    dlse: Tensor | None,
    needs: ListNeeds,
    tiles: dict[str, Tile],
    reads_once: bool = False,
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Plan the gradients: run(q, k, v, keys, count, slots, values, bias_key, sink, dout, dlse, out, lse, inverse,
    sent).

    With `reads_once` v is a part of the rows of k. `list_pairs_kernel` then loads both together, but each has its
    gradient.
    """
    shape = call.shape
    needs_keys = needs.k or (needs.v and not call.is_latent)
    by_inverse = needs_keys and call.takes_inverse_lists
    queries = tiles.get("queries") or call.tile("queries")
    parts = ceil_div(call.members, queries.block_m)
    keep = NOTHING.value
    if needs_keys and not by_inverse:
        fits = parts == 1 and max(call.block_d, call.block_dv) <= 128
        keep = ROWS.value if fits else PAIRS.value
    # Wide heads: shared memory has no room for sums of dq, so a separate kernel computes them from ds.
    has_product = needs.q and call.has_wide_heads
    without_dout = call.flags.sums and not needs.v
    if call.has_wide_heads and not without_dout:
        keep = PAIRS.value
    chunks = _chunks_of(call, keep)
    few_keys = call.has_few_keys(queries.block_n)
    by_pairs = call.has_wide_heads and not few_keys
    # An entry of a whole block may have nearly all of p. Its gradient is then a sum of ds that cancel, unless dout is
    # zeros.
    has_masses = needs.values and call.flags.keys_each > 1 and not few_keys and not without_dout
    makes_values = _plan_value_gradient(call, parts, has_masses)
    constants: dict[str, Any] = {
        "dout_strides": rows_of(dout),
        "out_strides": rows_of(out),
        "dlse_strides": (0, 0, 0) if dlse is None else tuple(dlse.stride()),
        "chunk": chunks.rows,
        "PARTS": parts,
        "HAS_DLSE": dlse is not None,
        "FEW_KEYS": few_keys,
        "HAS_DOUT": not without_dout,
        "NEED_Q": needs.q and not has_product,
        "NEED_VALUES": needs.values,
        "MASSES": has_masses,
        "KEEP": keep,
        "WORDS": chunks.words,
    }
    programs = chunks.owners * chunks.rows
    launch_queries = call.launch(list_queries_kernel, programs * parts, queries, **constants)
    if by_pairs:
        pairs = tiles.get("pairs") or call.tile("pairs")
        if without_dout and pairs.block_m == 128 and pairs.num_warps == 8:
            pairs = pairs._replace(num_stages=3, registers=128)  # without dp an SM has room for two programs
        member_parts, places = ceil_div(call.members, pairs.block_m), call.lists.most * call.flags.keys_each
        tiles_n = ceil_div(places, pairs.block_n)
        launch_pairs = call.launch(
            list_pairs_kernel, programs * member_parts * tiles_n, pairs,
            dout_strides=rows_of(dout), chunk=chunks.rows, COLUMNS=call.columns, DIM=shape.head_dim,
            DIM_V=0 if without_dout else shape.head_dim_v, PARTS=member_parts, TILES=tiles_n,
            NEED_VALUES=needs.values, MASSES=has_masses, LATENT=call.is_latent or reads_once, KEEP=keep,
        )  # fmt: skip
        makes_values = _plan_value_gradient(call, member_parts, has_masses)
        block = max(16, min(64, 4096 // call.block_dv))
        launch_delta = Launch(
            delta_kernel, ceil_div(shape.seqlen_q, block) * shape.batch * shape.num_heads,
            by_name(
                delta_kernel, call.values, dout_strides=rows_of(dout), dlse_strides=constants["dlse_strides"],
                layout=None, BLOCK_M=block, HAS_DLSE=dlse is not None, FEW_KEYS=without_dout,
                SEQUENCES=NO_SEQUENCES.value, SEARCH=False,
            ),
        )  # fmt: skip
    if by_inverse:
        run_keys = _plan_inverse(call, dout, tiles)
    elif keep != NOTHING.value:
        run_keys = _plan_rows(call, chunks, dout, keep, needs_keys, has_product, tiles)

    def run(
        q: Tensor, k: Tensor, v: Tensor | None, keys: Tensor, count: Tensor, slots: Tensor | None,
        values: Tensor | None, bias: Tensor | None, sink: Tensor | None, dout: Tensor, dlse: Tensor | None,
        out: Tensor, lse: Tensor, inverse: tuple[Tensor, Tensor] | None, sent: SentEntropy = NOTHING_SENT,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        batch, heads, seqlen_q, head_dim = q.shape
        delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
        dq = torch.empty(batch, seqlen_q, heads, head_dim, dtype=q.dtype, device=q.device) if needs.q else None
        dvalues = makes_values.allocate(values) if needs.values and values is not None else None
        masses = dvalues
        if dvalues is not None and has_masses:
            dvalues, masses = dvalues.split(1)
        v_or_k, slots_or, values_or, bias_or = _or(v, k), _or(slots, keys), _or(values, q), _or(bias, q)
        read = (q, k, v_or_k, keys, count, slots_or, values_or, bias_or, _or(sink, q), dout, out, lse, _or(dlse, lse))
        written = (delta, _or(dq, q), _or(dvalues, lse), _or(masses, lse))
        rows = (dout, lse, delta, sent.gradient)

        def run_queries(kept: ChunkRows) -> None:
            if by_pairs:
                launch_pairs(
                    q, k, v_or_k, keys, count, slots_or, values_or, bias_or, *rows, *written[2:],
                    kept.rows, kept.ds, kept.first_owner, kept.first_row,
                )  # fmt: skip
            else:
                launch_queries(*read, sent.gradient, *written, *kept)

        if by_pairs:
            row_lse = torch.empty_like(delta)  # unused, because other kernels take lse itself
            launch_delta(dout, _contiguous_out(out), _or(dlse, lse), lse, None, row_lse, None, delta, None)

        dk = dv = None
        if keep == NOTHING.value:
            run_queries(ChunkRows(keys, keys, keys, q, q, 0, 0))  # placeholders, because no rows are stored
        if by_inverse:
            lists = inverse or inverse_lists(keys, call.blocks)
            dk, dv = run_keys(q, k, v_or_k, slots_or, values_or, bias_or, rows, *lists)
        elif keep != NOTHING.value:
            dk, dv = run_keys(q, k, keys, count, dout, dq, run_queries)
        if dvalues is not None and masses is not None and has_masses:
            true_sums(dvalues, masses, delta_of_sink(delta, sent.gradient, sink, lse), lse, sent.own(dlse), sink)
        return (
            None if dq is None else dq.transpose(1, 2),
            None if dk is None else dk.transpose(1, 2),
            None if dv is None else dv.transpose(1, 2),
            None if dvalues is None else makes_values.finish(dvalues, values),
            sink_gradient(sink, lse, delta_of_sink(delta, sent.gradient, sink, lse))
            if needs.sink and sink is not None
            else None,
        )

    return run


class ChunkRows(NamedTuple):
    """The last arguments of the kernel of queries: where it stores rows or pairs of a chunk for the gradients of keys.

    `words`, `before` and `offsets` decide the index of each row. `rows` gets the rows, or with PAIRS p, and `ds` gets
    ds. The chunk begins at `first_owner` and `first_row`.
    """

    words: Tensor
    before: Tensor
    offsets: Tensor
    rows: Tensor
    ds: Tensor
    first_owner: int
    first_row: int


class Chunks(NamedTuple):
    """The number of owners and rows of lists of one launch, and of 32-bit words of each key of an owner."""

    owners: int
    rows: int
    words: int


def _chunks_of(call: ListCall, keep: int) -> Chunks:
    """Choose chunks whose rows, or p and ds too, take at most `SPACE` bytes, with as many rows an owner as possible."""
    rows = call.lists.rows
    if keep == NOTHING.value:
        return Chunks(call.owners, rows, 1)
    places = call.lists.most * call.flags.keys_each
    line = places * _row_size(call) * _row_dtype(call.dtype).itemsize + call.shape.seqlen_k // 4
    if keep == PAIRS.value:
        line += 2 * places * call.members * call.dtype.itemsize
    fit = max(32, min(MOST_ROWS, next_power_of_2(SPACE // line + 1) // 2, next_power_of_2(rows)))
    return Chunks(min(call.owners, max(1, SPACE // (fit * line))), fit, fit // 32)


def _row_size(call: ListCall) -> int:
    return call.shape.head_dim + (0 if call.is_latent else call.shape.head_dim_v)


def _row_dtype(dtype: torch.dtype) -> torch.dtype:
    # Sums over a group may exceed the range of fp16.
    return dtype if dtype == torch.bfloat16 else torch.float32


def _plan_rows(
    call: ListCall, chunks: Chunks, dout: Tensor, keep: int, needs_keys: bool, has_product: bool, tiles: dict[str, Tile]
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """Plan dk and dv from rows, and dq from ds: run(q, k, keys, count, dout, dq, run_queries)."""
    shape, size, keys_of_chunk = call.shape, _row_size(call), chunks.owners * call.shape.seqlen_k
    places, programs = call.lists.most * call.flags.keys_each, chunks.owners * chunks.rows
    constants: dict[str, Any] = {"chunk": chunks.rows, "WORDS": chunks.words}
    step = min(1024, next_power_of_2(places))
    bits = call.launch(list_bits_kernel, programs, Tile(16, step, 4, 1), **constants)
    in_block = max(1, 2048 // chunks.words)
    counting = Tile(16, 16, 4, 1)
    counts_launch = call.launch(
        list_counts_kernel, ceil_div(keys_of_chunk, in_block), counting,
        number=keys_of_chunk, BLOCK=in_block, WORDS=chunks.words,
    )  # fmt: skip
    making = tiles.get("rows") or call.tile("rows")
    tiles_n = ceil_div(places, making.block_n)
    rows_launch = call.launch(
        list_rows_kernel, programs * tiles_n, making,
        dout_strides=rows_of(dout), COLUMNS=call.columns, DIM=shape.head_dim, DIM_V=shape.head_dim_v, TILES=tiles_n,
        **constants,
    )  # fmt: skip
    product = tiles.get("product") or call.tile("product")
    parts = ceil_div(call.members, product.block_m)
    column_parts = 2 if product.block_m * call.block_d > 128 * 256 else 1
    product_launch = call.launch(
        list_product_kernel, programs * parts * column_parts, product,
        PARTS=parts, COLUMN_PARTS=column_parts, chunk=chunks.rows,
    )  # fmt: skip
    adding = tiles.get("add") or (Tile(4, 256, 1, 1) if size % 256 == 0 else Tile(8, 128, 1, 1))
    wide = min(adding.block_n, max(16, next_power_of_2(size)))
    add = call.launch(
        list_add_kernel, keys_of_chunk * ceil_div(size, wide), adding,
        seqlen_k=shape.seqlen_k, number=keys_of_chunk, SIZE=size, COLUMNS=wide, PARTS=ceil_div(size, wide),
        BLOCK=adding.block_m,
    )  # fmt: skip

    def run(
        q: Tensor, k: Tensor, keys: Tensor, count: Tensor, dout: Tensor, dq: Tensor | None,
        run_queries: Callable[[ChunkRows], None],
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        device = q.device
        words = torch.empty(keys_of_chunk, chunks.words, dtype=torch.int32, device=device)
        before, counts = torch.empty_like(words), torch.empty(keys_of_chunk, dtype=torch.int32, device=device)
        offsets, used = counts, int(needs_keys)
        sums = torch.zeros(used * call.owners, shape.seqlen_k, size, dtype=torch.float32, device=device)
        rows = torch.empty(used * programs * places, size, dtype=_row_dtype(q.dtype), device=device)
        kept = (rows, q)
        if keep == PAIRS.value:
            kept = tuple(torch.empty(programs * call.members * places, dtype=q.dtype, device=device) for _ in range(2))
        for owner in range(0, call.owners, chunks.owners):
            for row in range(0, call.lists.rows, chunks.rows):
                if needs_keys:
                    bits(keys, count, words.zero_(), owner, row)
                    counts_launch(words, before, counts)
                    offsets = counts.cumsum(0, dtype=torch.int32) - counts
                run_queries(ChunkRows(words, before, offsets, *kept, owner, row))
                if has_product:
                    product_launch(k, keys, count, kept[1], dq, owner, row)
                if not needs_keys:
                    continue
                if keep == PAIRS.value:
                    rows_launch(q, keys, count, dout, words, before, offsets, rows, *kept, owner, row)
                add(rows, offsets, counts, sums, owner)
        if not needs_keys:
            return None, None
        dk, dv = (
            torch.empty(shape.batch, shape.seqlen_k, call.heads_k, dim, dtype=q.dtype, device=q.device)
            for dim in (shape.head_dim, shape.head_dim_v)
        )
        sums = sums.view(shape.batch, call.heads_k, shape.seqlen_k, size).transpose(1, 2)
        dk.copy_(sums[..., : shape.head_dim])
        return dk, None if call.is_latent else dv.copy_(sums[..., shape.head_dim :])

    return run


def inverse_lists(keys: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Sort the entries of each head of lists by block, then by row; return them and the first entry of each block.

    Args:
        keys: (Bm, Hm, R, K).
        blocks: the number of blocks of keys.

    Returns:
        (Bm * Hm, R * K) and (Bm * Hm, blocks + 1).
    """
    flat = keys.flatten(2).flatten(0, 1)
    dtype = torch.int32 if flat.shape[1] < 2**31 else torch.int64
    inverse = torch.empty(flat.shape, dtype=dtype, device=keys.device)
    offsets = torch.empty(flat.shape[0], blocks + 1, dtype=dtype, device=keys.device)
    edges = torch.arange(blocks + 1, dtype=torch.int32, device=keys.device)
    for unsorted, into, begin in zip(
        flat, inverse, offsets, strict=True
    ):  # one by one: sorting needs five times the memory
        ordered, order = unsorted.sort(stable=True)
        into.copy_(order)
        begin.copy_(torch.searchsorted(ordered, edges))
    return inverse, offsets


def _plan_inverse(call: ListCall, dout: Tensor, tiles: dict[str, Tile]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Plan dk and dv by inverse lists: run(q, k, v, slots, values, bias, rows, inverse, offsets).

    `rows` are dout, lse, delta and the gradient of entropies.
    """
    shape, keys_each, blocks = call.shape, call.flags.keys_each, call.blocks
    entries = call.lists.rows * call.lists.most
    cut = max(ceil_div(MOST_ROWS, call.members), ceil_div(entries, max(blocks, 1)))
    most_segments = blocks + entries // cut
    tile = tiles.get("keys") or call.tile("keys")
    head_dims = (shape.head_dim, shape.head_dim_v)
    owners = max(1, min(call.owners, SPACE // max(1, 4 * most_segments * keys_each * sum(head_dims))))
    constants: dict[str, Any] = {"most_segments": most_segments}
    strides = (call.values["q_strides"], rows_of(dout))
    wide = max(shape.seqlen_q * x.row + shape.num_heads * x.head for x in strides) > 2**31 - 1
    keys_launch = call.launch(
        list_keys_kernel,
        owners * most_segments,
        tile,
        MOST=call.lists.most,
        WIDE_ROWS=wide,
        cut=cut,
        dout_strides=rows_of(dout),
        **constants,
    )
    block = min(1024, next_power_of_2(keys_each * max(head_dims)))
    adds = []
    for dim in head_dims:
        parts = ceil_div(keys_each * dim, block)
        adds.append(
            call.launch(
                list_segments_kernel,
                owners * blocks * parts,
                Tile(16, 16, 4, 1),
                DIM=dim,
                BLOCK=block,
                TILES=parts,
                **constants,
            )
        )

    def run(
        q: Tensor, k: Tensor, v: Tensor, slots: Tensor, values: Tensor, bias: Tensor,
        rows: tuple[Tensor | None, ...], inverse: Tensor, offsets: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        number = (offsets.diff(dim=1) + (cut - 1)) // cut
        segments = torch.zeros_like(offsets, dtype=torch.int32)
        torch.cumsum(number, 1, dtype=torch.int32, out=segments[:, 1:])
        parts = [
            torch.empty(owners, most_segments, keys_each, dim, dtype=torch.float32, device=q.device)
            for dim in head_dims
        ]
        sums = [
            torch.empty(shape.batch, shape.seqlen_k, call.heads_k, dim, dtype=q.dtype, device=q.device)
            for dim in head_dims
        ]
        for owner in range(0, call.owners, owners):
            keys_launch(
                q, k, v, slots, values, bias, *rows, inverse, offsets, segments, *parts, owner
            )  # fmt: skip
            for add, part, into in zip(adds, parts, sums, strict=True):
                add(part, segments, into, owner)
        return sums[0], sums[1]

    return run


class ValueGradient(NamedTuple):
    """How the gradient of values is allocated for the kernel, and computed from what the kernel stores."""

    allocate: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor, Tensor], Tensor]


def _plan_value_gradient(call: ListCall, parts: int, has_masses: bool) -> ValueGradient:
    """Plan what the kernel writes: one value for each entry of a part, or for each entry of each query of each head.

    With masses it writes the latter, and also the masses.
    """
    shape, lists, flags = call.shape, call.lists, call.flags
    if call.value_kind == OF_ENTRIES.value and not has_masses:
        sizes = (parts, shape.batch, call.heads_k, lists.rows)
    else:
        sizes = (1, shape.batch, shape.num_heads, shape.seqlen_q)

    def allocate(values: Tensor) -> Tensor:
        size = (*sizes, lists.most)
        if has_masses:
            return torch.zeros(2, *size[1:], dtype=torch.float32, device=values.device)
        # Zeros, because no kernel writes entries beyond the count, or entries that canonical lists dropped.
        is_own = size == (1, *values.shape)
        return torch.zeros(size, dtype=values.dtype if is_own else torch.float32, device=values.device)

    def finish(written: Tensor, values: Tensor) -> Tensor:
        if written.shape[1:] == values.shape and written.shape[0] == 1:
            return written[0].to(values.dtype)
        sums = written.sum(0)
        entries, heads, rows, _ = values.shape
        if rows != sums.shape[2]:  # all queries of a list have the same values
            missing = rows * flags.queries - sums.shape[2]
            sums = torch.nn.functional.pad(sums, (0, 0, 0, missing)).unflatten(2, (rows, flags.queries)).sum(3)
        if heads != sums.shape[1]:
            sums = sums.unflatten(1, (heads, -1)).sum(2)
        sums = sums.unflatten(0, (-1, entries, flags.value_repeat)).sum((0, 2))
        return sums.to(values.dtype)

    return ValueGradient(allocate, finish)


def true_sums(
    sums: Tensor, masses: Tensor, delta: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor | None
) -> None:
    """Correct sums of ds over the keys of each entry, in place, to the delta that follows from p and dp.

    ds = p * (dp - delta) has the delta of an out that was rounded. If one entry has nearly all of p, its sum is mostly
    that rounding error. The sums of a whole row tell the exact delta.

    Args:
        sums: (1, B, Hq, Lq, entries) of ds.
        masses: the same of p.
        delta: (B, Hq, Lq), sum of dout * out - dlse, as ds has it.
        lse, dlse: (B, Hq, Lq).
        sink: (Hq,).
    """
    # p is normalised again: with the share of a sink it sums to 1 but for the rounding of lse.
    total, error = masses.sum(-1), sums.sum(-1)
    if sink is None:
        error /= total
    else:
        share = torch.exp(sink.unsqueeze(-1) - lse).float()
        error.addcmul_(delta, share, value=-1).div_(total + share)
    if dlse is not None:
        error -= dlse
    sums.addcmul_(masses, torch.where(total > 0, error, 0.0).unsqueeze(-1), value=-1)


def _lies_in(v: Tensor, k: Tensor) -> bool:
    """Return whether values are the first channels of keys in memory, and kernels read both at once."""
    if v.data_ptr() != k.data_ptr() or v.stride() != k.stride() or v.stride(3) != 1:
        return False
    return v.shape[3] <= k.shape[3] and v.dtype == k.dtype and shares_rows(k.shape[3], v.shape[3])


def _contiguous_out(out: Tensor) -> Tensor:
    # The forward pass returns it in this layout; other callers may not.
    return out.transpose(1, 2).contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    # A kernel does not access arguments that its constants exclude; any tensor of the call is a placeholder.
    return other if x is None else x


def _unit_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
