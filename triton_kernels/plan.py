"""`Call`: a class of calls that are alike, and everything that it decides for the launches of both passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from flash_dmattn.problem import Flags, MaskView, device_arch, fits_tma
from flash_dmattn.reference.dropout import scale_of, threshold_of

from .bias_forms import ROW_BIAS, TILE_BIAS, form_of, has_flat_blocks
from .dropout import Dropout
from .gpus import LIKE_HOPPER
from .kernel_launch import Descriptor, Launch, by_name, driver_overlaps
from .plan_packed import packed_strides
from .precision import MOST_FEW_ROWS, select_precision
from .sequences import NO_SEQUENCES
from .short_calls import ShortTile
from .tile_ops import BAND, BOUNDS, DENSE, KEYS, LOG2E, TILES, TREE, BiasStrides, MaskStrides, Shape, Strides, cap_of
from .tile_table import Tile, tf32_fits, tile_of

# Up to this many keys fit in one tile of every kernel; backward kernels then compute delta from p and dp.
MOST_FEW_KEYS = 32
# The least queries of a tile of the kernel of dk and dv where threads have long runs.
LEAST_LONG_RUNS = 32
# From so many queries and keys, and so many pairs of all heads on, pieces of fp32 are stored: docs/notes/triton.md.
# The first number is of forward passes, but for padded head dims up to 32, which take the second as gradients do.
LEAST_TO_PACK_FORWARD, LEAST_TO_PACK, LEAST_PAIRS_TO_PACK = 512, 384, 2**21


# The largest scores and the entropies of a call that asks for neither.
NO_ROWS = (None, None)


def rows_of_flags(flags: Any, rows: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors of the largest scores and of the entropies among the rows that flags ask for."""
    rest = iter(rows)
    return next(rest) if flags.max_scores else None, next(rest) if flags.entropy else None


def read_of(mask: MaskView, columns: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Return the tensors of a mask that a kernel reads: bits and lists, kept and prefix, or one tensor."""
    if mask.form == "none":
        return None, None
    if mask.form == "keys":
        kept, _, prefix = mask.tensors
        return kept, prefix
    if mask.form in ("dense", "tree", "intervals"):
        return mask.tensors[0], None
    bits, _, row_lists, col_lists = mask.tensors
    return bits, col_lists if columns else row_lists


def classes_of(mask: MaskView) -> Tensor | None:
    return mask.tensors[1] if mask.form in ("tiles", "sequence_tiles") else None


_MASK_KINDS = {
    "none": BAND.value,
    "tiles": TILES.value,
    "sequence_tiles": TILES.value,
    "keys": KEYS.value,
    "dense": DENSE.value,
    "intervals": BOUNDS.value,
    "tree": TREE.value,
}


class Call:
    """Everything that one class of calls decides for all of its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        flags: Flags,
        sink: Tensor | None = None,
    ) -> None:
        self.has_sink = sink is not None
        # Strides of the sink by head and by row. Rows have sinks of their own where they are the heads of a group.
        self.sink_strides = (0, 0) if sink is None else (1, 0) if sink.dim() == 1 else (sink.shape[1], 1)
        self.q, self.k, self.v, self.bias, self.mask, self.flags = q, k, v, bias, mask, flags
        p = flags.dropout_p
        self.dropout = Dropout(threshold_of(p), scale_of(p)) if p > 0 else None
        batch, seqlen_q, num_heads, head_dim = q.shape
        _, seqlen_k, num_heads_k, head_dim_v = v.shape
        left, right = flags.window
        # A side of the window need not be longer than the sequence; sums with a longer one could overflow int32.
        left, right = min(left, seqlen_k), min(right, seqlen_q)
        group = num_heads // num_heads_k
        self.shape = Shape(batch, seqlen_q, seqlen_k, num_heads, group, head_dim, head_dim_v, left, right)
        self.num_heads_k = num_heads_k
        # The padded head dims are equal, or both at least 64. With 32 and 16, the forward kernel that Triton 3.6 makes
        # for unaligned rows reads beyond its shared memory (shown by compute-sanitizer on an H200), and out is wrong.
        padded_d, padded_dv = padded_dim(head_dim), padded_dim(head_dim_v)
        self.block_d, self.block_dv = max(padded_d, min(padded_dv, 64)), max(padded_dv, min(padded_d, 64))
        self.pads = (self.block_d != head_dim, self.block_dv != head_dim_v)
        properties = torch.cuda.get_device_properties(q.device) if q.is_cuda else None
        self.arch = device_arch(q.device)
        self.num_sms = 1 if properties is None else properties.multi_processor_count
        self.mask_kind = _MASK_KINDS[mask.form]
        self.bias_kind, self.extent = form_of(bias, flags)
        # Prepared masks include the band, except for masks of kept keys.
        folded = mask.form in ("tiles", "sequence_tiles", "intervals")
        self.band = (False, False) if folded else (left >= 0, right >= 0)
        softcap, scale = flags.softcap, flags.softmax_scale
        # The factor of products of q and k. Scores are in base 2, but natural where a bias adds to them.
        self.score_scale = scale / softcap if softcap > 0 else scale if self.is_biased else scale * LOG2E.value
        # A descriptor costs the host 20 us (H200, Triton 3.6), longer than a small call takes the GPU.
        self.pays_for_tma = batch * num_heads * seqlen_q * seqlen_k * (head_dim + head_dim_v) >= 2**34
        self.allows_tf32 = flags.allows_tf32
        self.invariant = flags.invariant
        self.heads_first = False  # whether out is (B, Hq, Lq, Dv) in memory
        self.packed: frozenset[str] = frozenset()  # which of q, k, v and dout kernels read as stored pieces

    @property
    def is_biased(self) -> bool:
        """Return whether a bias adds to scores; one of one value per query moves lse alone."""
        return self.bias_kind > ROW_BIAS.value

    @property
    def precision(self) -> str:
        """Return the precision of the products of all kernels: see `precision.py`."""
        head_dim = max(self.shape.head_dim, self.shape.head_dim_v)
        return select_precision(self.q.dtype, self.arch, head_dim, self.has_few_rows, self.allows_tf32)

    @property
    def has_wide_heads(self) -> bool:
        """Return whether a padded head dim is 512, whose tiles take most of the registers and of the shared memory."""
        return max(self.block_d, self.block_dv) > 256

    def column_parts(self, tile: Tile) -> int:
        """Return how many programs of the forward kernel share the columns of v and of out.

        A program holds the sums of 128 queries for 256 columns, or of 64 queries for 512.
        """
        return 2 if tile.block_m * self.block_dv > 128 * 256 else 1

    @property
    def has_few_rows(self) -> bool:
        """Return whether all queries of a head fit in one tile of the least size, so that reading k and v is the bound.

        False for padded head dims of 256, and where all calls of a class have one tile (`invariant`). False for masks
        of kept keys with more than two heads for each SM: larger tiles gather such keys faster.
        """
        if (
            self.invariant
            or self.shape.seqlen_q > MOST_FEW_ROWS
            or (max(self.block_d, self.block_dv) > 128 and not self.has_wide_heads)
        ):
            return False
        return self.mask_kind != KEYS.value or self._heads <= 2 * self.num_sms

    @property
    def _has_wide_blocks(self) -> bool:
        """Return whether programs of few rows, one for each head, take wide blocks of keys, one program to an SM.

        True if there are more than two heads for each SM. Also true if heads leave SMs idle, and two programs for each
        head would be more programs than SMs, but by a third at most.
        """
        leaves_some = self.num_sms < 2 * self._heads <= 4 * self.num_sms // 3
        return leaves_some or self._heads > 2 * self.num_sms

    @property
    def _heads(self) -> int:
        return self.shape.batch * self.shape.num_heads

    @property
    def has_few_keys(self) -> bool:
        """Return whether all keys lie in one tile, so that kernels take delta from p and dp.

        False where a row must not depend on the keys that it does not see (`invariant`).
        """
        return self.shape.seqlen_k <= MOST_FEW_KEYS and not self.invariant

    def tiles_of_queries(self, block: int) -> tuple[int, bool]:
        """Return the number of tiles of queries of one head, and whether a program searches for its sequence."""
        return triton.cdiv(self.shape.seqlen_q, block) * self.shape.batch, False

    def tiles_of_keys(self, block: int) -> tuple[int, bool]:
        """Return the number of tiles of keys of one head, and whether a program searches for its sequence."""
        return triton.cdiv(self.shape.seqlen_k, block), False

    def key_sums_shape(self, heads: int) -> tuple[int, int, int]:
        """Return the shape of the sums of ds over queries of so many heads."""
        return self.shape.batch, heads, self.shape.seqlen_k

    @property
    def overlaps(self) -> bool:
        """Return whether a kernel may start before the kernel that it reads from has ended."""
        return self.arch in LIKE_HOPPER and driver_overlaps()

    @property
    def has_dropout(self) -> bool:
        return self.dropout is not None

    @property
    def has_long_runs(self) -> bool:
        """Return whether Triton gives each thread 8 neighbours of a row of p for `mma.sync`: too many for 16 queries.

        It does where p comes from bytes of a bool mask and joined words of dropout. The four threads that share a row
        have 32 places. Two of them then hold the same values of a sum over 16, and up to Triton 3.7 the sum has some
        terms several times and misses others (mended by triton-lang/triton, pull request 11691).
        """
        return self.has_dropout and self.mask_kind == DENSE.value

    def tile(self, kernel: str) -> Tile:
        block_d = max(self.block_d, self.block_dv)
        bias_tma = self.bias_tma() and self.tma(self.k, self.v)
        # A tree is a band except for the last keys.
        read = BAND.value if self.mask_kind == TREE.value else self.mask_kind
        few = None if not self.has_few_rows else "wide" if self._has_wide_blocks else "narrow"
        # A bias of one query is per score and per key at once, so both have one tile where chunks have equal bits.
        bias = TILE_BIAS.value if self.invariant and self.is_biased else self.bias_kind
        kinds = {"mask": read, "bias": bias, "bias_tma": bias_tma, "few_rows": few}
        kinds |= {"precision": self.precision_of(kernel), "stored": bool(self.packed), "may_prefer": not self.invariant}
        if kernel == "forward" and self.has_wide_heads and self.bias_kind == TILE_BIAS.value:
            kernel = "biased forward"
        tile = tile_of(kernel, self.q.dtype, block_d, self.arch, **kinds)
        is_short = kernel in ("keys", "sums") and tile.block_m < LEAST_LONG_RUNS
        if is_short and self.has_long_runs and self._takes_tensor_cores(kernel):
            # As many scores as before, so that it still fits.
            tile = tile._replace(block_m=LEAST_LONG_RUNS, block_n=tile.block_m * tile.block_n // LEAST_LONG_RUNS)
        return tile

    def _takes_tensor_cores(self, kernel: str) -> bool:
        return self.q.dtype != torch.float32 or self.precision_of(kernel) != "ieee"

    def precision_of(self, kernel: str) -> str:
        """Return the precision of the products of a kernel: TF32 only if its tiles fit in memory."""
        precision = self.precision
        fits = precision != "tf32" or tf32_fits(kernel, max(self.block_d, self.block_dv), self.arch)
        return precision if fits else "ieee"

    def launch(
        self, kernel: Any, programs: int, tile: Tile | ShortTile, descriptors: Sequence[Descriptor] = (), **own: Any
    ) -> Launch:
        """Make the launch of a kernel on a tile: it takes its arguments by name from `values` and from `own`."""
        sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        return Launch(kernel, programs, by_name(kernel, self.values(), **sizes, **own), tile.options, descriptors)

    def values(self) -> dict[str, Any]:
        """Name the numbers and constants that several kernels take; a kernel may overrule some."""
        return {
            **self.row_strides(q=self.q, k=self.k, v=self.v),
            "bias_strides": self.bias_strides(),
            "mask_strides": self.mask_strides(),
            "shape": self.shape,
            "score_scale": self.score_scale,
            "scale": self.flags.softmax_scale,
            "softcap": self.flags.softcap,
            "sink_of_head": self.sink_strides[0],
            "sink_of_row": self.sink_strides[1],
            "layout": None,
            "dropout": self.dropout,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
            "MASK": self.mask_kind,
            "BIAS": self.bias_kind,
            "SOFTCAP": cap_of(self.flags.softcap, self.q.dtype),
            "LEFT": self.band[0],
            "RIGHT": self.band[1],
            "PAD_D": self.pads[0],
            "PAD_DV": self.pads[1],
            "TMA": False,
            "ROWS_TMA": False,
            "BIAS_TMA": False,
            "PRECISION": self.precision,
            "FEW_KEYS": self.has_few_keys,
            # For backward kernels. They read sinks only with few keys, and otherwise through lse.
            "HAS_SINK": self.has_few_keys and self.has_sink,
            "SEQUENCES": NO_SEQUENCES.value,
            "SEARCH": False,
            "DROPOUT": self.has_dropout,
            "HEADS_FIRST": self.heads_first,
            "extent": self.extent,
            "FLAT": has_flat_blocks(self.bias_kind, self.mask_kind) and not self.invariant,
        }

    def packs_pieces(self, least: int) -> bool:
        """Return whether pieces of rows are made once and stored, which pays where many tiles read them.

        Not of sequences, whose rows lie in other ways. `least` is of queries and of keys.
        """
        if self.invariant or self.flags.sequences is not None or self.precision not in ("bf16x3", "fp16x3"):
            return False
        seqlen_q, seqlen_k = self.shape.seqlen_q, self.shape.seqlen_k
        is_long = min(seqlen_q, seqlen_k) >= least
        return is_long and self._heads * seqlen_q * seqlen_k >= LEAST_PAIRS_TO_PACK

    def row_strides(self, **tensors: Tensor) -> dict[str, Strides]:
        """Return the strides of (B, L, H, D) tensors, or of their pieces, under the names that kernels give them."""
        strides = {name: packed_strides(x) for name, x in tensors.items() if name in self.packed}
        return {**row_strides(**tensors), **{f"{name}_strides": Strides(*each) for name, each in strides.items()}}

    def mask_strides(self, columns: bool = False) -> BiasStrides | MaskStrides:
        if self.mask.form == "dense":
            return self.dense_mask_strides()
        data, index = read_of(self.mask, columns)
        if data is None or index is None:
            return MaskStrides(0, 0, 0, 0, 0, 0, 1, 1, 1)
        row, list_row = (0, 0) if self.mask_kind == KEYS.value else (data.stride(2), index.stride(2))
        strides = (*_broadcast(data)[:2], row, *_broadcast(index)[:2], list_row)
        return MaskStrides(*strides, self._sharing(data), self.flags.mask_repeat, data.shape[0])

    def bias_strides(self, tma: bool = False) -> BiasStrides:
        """Return the strides of the bias, or with `tma` the steps of its descriptor."""
        if self.bias is None:
            return BiasStrides(0, 0, 0, 0, 1, 1, 1)
        strides = [int(size > 1) for size in self.bias.shape] if tma else _broadcast(self.bias)
        return BiasStrides(*strides, self._sharing(self.bias), self.flags.bias_repeat, self.bias.shape[0])

    def dense_mask_strides(self) -> BiasStrides:
        """Return the strides of the first tensor of the mask, in the form of a bias; intervals have one row."""
        if not self.mask.tensors:
            return BiasStrides(0, 0, 0, 0, 1, 1, 1)
        data = self.mask.tensors[0]
        strides = _broadcast(data) if data.dim() == 4 else [*_broadcast(data)[:2], 0, 0]
        return BiasStrides(*strides, self._sharing(data), self.flags.mask_repeat, data.shape[0])

    def _sharing(self, x: Tensor) -> int:
        return self.shape.group if x.shape[1] == self.num_heads_k else 1

    def edges(self, rest: int) -> bool:
        """Return whether some block needs a mask check; `rest` is the size of the last block, 0 if it is full."""
        return self.mask_kind != BAND.value or self.band != (False, False) or rest != 0

    def wide(self, *tensors: Tensor) -> bool:
        """Return whether offsets within one head of these tensors, or of the bias or a bool mask, need 64 bits."""
        spans = [x.shape[1] * (packed_strides(x)[1] if self.packed else x.stride(1)) for x in tensors]
        for x in (self.bias, self.mask.dense):
            if x is not None:
                spans.append(sum(n * stride for n, stride in zip(x.shape[2:], x.stride()[2:], strict=True)))
        # 1024, because a row may be longer than its stride. Offsets beyond the end may overflow: what reaches there is
        # masked.
        return max(spans) + 1024 > 2**31 - 1

    def tma(self, *tensors: Tensor) -> bool:
        """Return whether tiles of (B, L, H, D) tensors are loaded by TMA."""
        serves = self.arch in LIKE_HOPPER and self.q.dtype != torch.float32 and self.pays_for_tma
        return serves and all(_fits_tma(x) for x in tensors)

    def bias_tma(self) -> bool:
        bias = self.bias
        if self.invariant:  # its tiles would depend on alignment
            return False
        read_in_tiles = self.bias_kind == TILE_BIAS.value and self.mask_kind != KEYS.value
        return read_in_tiles and bias is not None and bias.stride(3) == 1 and self.tma(bias)

    def key_descriptors(self, tile: Tile, parts: int = 1) -> tuple[bool, bool, list[Descriptor]]:
        """Decide which tiles a loop over keys loads by TMA: (tiles of k and v, tiles of the bias, the descriptors).

        It serves kernels whose first arguments are q, k, v and bias. With `parts` above 1 a tile of v has one of so
        many parts of its columns.
        """
        tma = self.mask_kind != KEYS.value and self.shape.seqlen_k > 2 * tile.block_n and self.tma(self.k, self.v)
        bias_tma = tma and self.bias_tma()
        descriptors = []
        if tma:
            descriptors.append(self.rows_descriptor(1, self.k, tile.block_n, self.block_d))
            descriptors.append(self.rows_descriptor(2, self.v, tile.block_n, self.block_dv // parts))
        if bias_tma and self.bias is not None:
            descriptors.append(self.bias_descriptor(3, self.bias, tile))
        return tma, bias_tma, descriptors

    def rows_descriptor(self, slot: int, x: Tensor, block: int, block_d: int) -> Descriptor:
        """Describe a (B, L, H, D) tensor as (B, H, L, D), loaded by blocks of rows of one head."""
        return _descriptor(slot, x.transpose(1, 2), [1, 1, block, block_d])

    def bias_descriptor(self, slot: int, x: Tensor, tile: Tile) -> Descriptor:
        return _descriptor(slot, x, [1, 1, tile.block_m, tile.block_n])


def row_strides(**tensors: Tensor) -> dict[str, Strides]:
    """Return the strides of (B, L, H, D) tensors under the names that kernels give them."""
    return {f"{name}_strides": Strides(*x.stride()[:3]) for name, x in tensors.items()}


def padded_dim(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _broadcast(x: Tensor) -> list[int]:
    # A dim of size 1 is broadcast, whatever its stride is.
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _fits_tma(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and fits_tma(x.shape, x.stride(), x.element_size())


def _descriptor(slot: int, x: Tensor, block: list[int]) -> Descriptor:
    # A dim of size 1 may have any stride, but TMA wants multiples of 16 bytes.
    strides = [stride if size > 1 else 16 for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return Descriptor(slot, list(x.shape), [*strides, 1], block)


def num_kv_splits(programs: int, blocks: int, num_sms: int) -> int:
    """Return how many programs share each loop over blocks: 1 unless most SMs would be idle, and at least four blocks
    to a program."""
    return 1 if 2 * programs > num_sms else max(1, min(2 * num_sms // programs, blocks // 4, 64))
