"""The operator that packs a mask beside sequences, for `PreparedMask` and for calls of `attention`, compiled or not."""

from __future__ import annotations

from typing import Any

import torch

from ...definition import LIBRARY, define
from ...problem import AttentionProblem, Layout, MaskView, SequenceSpec, SequenceView
from ..broadcast import collapse
from .packers import packer
from .packing import TILE_WORDS, tiles
from .sequence_packing import MaskPacking, row_counts, tile_count


def pack_beside(
    mask: torch.Tensor, bounds: torch.Tensor, mask_packing: MaskPacking, spec: SequenceSpec, window: tuple[int, int]
) -> list[torch.Tensor]:
    """The tensors of a `SequenceTileMask`, by the operator.

    Args:
        mask: as `pack_sequences` takes it; an expanded dim (stride 0) counts as size 1.
        bounds, mask_packing, spec, window: as there.
    """
    # Collapsed before the operator, so that sizes alone decide what it returns: compilers change strides.
    sizes = (spec.layout, spec.rows_q, spec.rows_k, spec.max_seqlen_q, spec.max_seqlen_k)
    tensors: list[torch.Tensor] = _OPERATOR(collapse(mask), bounds, mask_packing, *sizes, *window)
    return tensors


def prepared_beside(problem: AttentionProblem, mask: torch.Tensor, sequences: SequenceView) -> MaskView:
    """The bool mask of a call, 4-D, as kernels receive it in tiles."""
    assert problem.sequences is not None
    packed = pack_beside(mask, sequences.bounds, problem.flags.mask_packing, problem.sequences, problem.window)
    return MaskView("sequence_tiles", tuple(packed))


def _spec_of(bounds: torch.Tensor, layout: Layout, *sizes: int) -> tuple[SequenceSpec, tuple[int, int]]:
    """The spec and the window, from what the schema has behind the tensors and the packing."""
    rows_q, rows_k, max_seqlen_q, max_seqlen_k, left, right = sizes
    return SequenceSpec(layout, bounds.shape[0], rows_q, rows_k, max_seqlen_q, max_seqlen_k), (left, right)


def _prepare(mask: torch.Tensor, bounds: torch.Tensor, mask_packing: MaskPacking, *sizes: Any) -> list[torch.Tensor]:
    spec, window = _spec_of(bounds, *sizes)
    return packer(mask).pack_sequences(mask, bounds, mask_packing, spec, window)


def _prepare_fake(
    mask: torch.Tensor, bounds: torch.Tensor, mask_packing: MaskPacking, *sizes: Any
) -> list[torch.Tensor]:
    spec, _ = _spec_of(bounds, *sizes)
    all_q, all_k = row_counts(spec)
    of_rows, of_columns = tiles(spec.max_seqlen_k), tiles(spec.max_seqlen_q)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty((1, mask.shape[1], *shape), dtype=dtype, device=mask.device)

    return [
        empty(all_q, of_rows * TILE_WORDS),
        empty(tile_count(all_q, spec), of_rows, dtype=torch.uint8),
        empty(tile_count(all_q, spec), 2 + of_rows),
        empty(tile_count(all_k, spec), 2 + of_columns),
    ]


def _prepare_many(
    info: Any, in_dims: tuple[Any, ...], mask: torch.Tensor, bounds: torch.Tensor, *others: Any
) -> tuple[list[torch.Tensor], list[int]]:
    """The rule of `torch.vmap`: each of its calls has tiles of its own."""
    made = [
        _OPERATOR(
            mask if in_dims[0] is None else mask.select(in_dims[0], index),
            bounds if in_dims[1] is None else bounds.select(in_dims[1], index),
            *others,
        )
        for index in range(info.batch_size)
    ]
    return [torch.stack(x) for x in zip(*made, strict=True)], [0] * 4


_OPERATOR = define(
    "prepare_sequence_mask",
    "(Tensor mask, Tensor bounds, str mask_packing, str layout, SymInt rows_q, SymInt rows_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, int left, int right) -> Tensor[]",
    _prepare,
    _prepare_fake,
)
torch.library.register_vmap("flash_dmattn::prepare_sequence_mask", _prepare_many, lib=LIBRARY)
