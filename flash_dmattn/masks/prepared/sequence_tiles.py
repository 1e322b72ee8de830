"""`SequenceTileMask`: a mask beside sequences as bits and tile lists, made once for all layers; `prepare_ragged`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from ...problem import (
    MaskView,
    SequenceSpec,
    causal_window,
    check_flag,
    check_scores,
    check_window,
    packing_of,
    values_can_be_read,
)
from ...sequences.layout import Sequences
from ..arguments import bool_mask, integer
from ..blocks import MaskStats
from ..saved import restore_sequence_tiles
from .packing import EMPTY, FULL, TILE, count_bits, unpack_words
from .sequence_operator import pack_beside
from .sequence_packing import MaskPacking, unpack_sequences
from .types import call_key

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False, repr=False)
class SequenceTileMask:
    """A mask beside sequences, as bits and lists of 128 x 128 tiles, with causality and window of each folded in.

    A sequence has tiles of its own. With `first` its first query among those of all, its rows of tiles begin with
    number `first // 128 + s`; columns so with keys. R rows of queries are those of a row of tokens, or S slots behind
    one another. With Tq = R // 128 + S, Tk likewise of keys, and C and D the tiles of max_seqlen_k and max_seqlen_q:

    Attributes:
        sequences: those it was prepared for, which calls have to pass with it.
        spec: how they lie.
        is_causal, window_size: the band that is part of it, bottom-right aligned in each sequence.
        bits: int32 (1, Hm, R, 4 * C). Bit j % 32 of word j // 32 says whether the query attends to key j of its
            sequence; bits past the last key, and those of rows of no sequence, are 0.
        classes: uint8 (1, Hm, Tq, C). 0: empty, 1: partial, 2: full, as of a `TileMask`.
        row_lists: int32 (1, Hm, Tq, 2 + C), as of a `TileMask`.
        col_lists: int32 (1, Hm, Tk, 2 + D), rows counted from the first of the sequence.
    """

    form: ClassVar[Literal["sequence_tiles"]] = "sequence_tiles"

    sequences: Sequences
    spec: SequenceSpec
    is_causal: bool
    window_size: tuple[int, int]
    bits: torch.Tensor
    classes: torch.Tensor
    row_lists: torch.Tensor
    col_lists: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of `unpacked`."""
        return self.spec.shape_of_tiles(self.bits.shape[1])

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.bits.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its fields that are tensors, in their order."""
        return self.bits, self.classes, self.row_lists, self.col_lists

    @property
    def view(self) -> MaskView:
        """What a kernel backend receives."""
        return MaskView(self.form, self.tensors)

    @cached_property
    def call_key(self) -> tuple[object, ...]:
        """Tell calls with such masks apart, whatever these allow; hashable.

        Without its sequences, which each call compares with its own, and which would keep tensors alive.
        """
        return call_key(self, left_out=("sequences",))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same mask on a device, with its sequences there, too: calls pass `mask.sequences` of the result.

        >>> import torch
        >>> from flash_dmattn import Sequences
        >>> from flash_dmattn.masks import prepare_mask
        >>> documents = Sequences.packed(torch.tensor([0, 3, 8]), max_seqlen_q=5)
        >>> mask = prepare_mask(torch.ones(1, 1, 5, 5, dtype=torch.bool), sequences=documents, seqlen_q=8, seqlen_k=8)
        >>> mask.to("cpu")
        SequenceTileMask(shape=(1, 1, 8, 5), is_causal=False, window_size=(-1, -1), device='cpu')
        """
        if torch.device(device) == self.device:
            return self
        tensors = [x.to(device, non_blocking=non_blocking) for x in self.tensors]
        sequences = self.sequences.to(device, non_blocking=non_blocking)
        return type(self)(sequences, self.spec, self.is_causal, self.window_size, *tensors)

    def unpacked(self) -> torch.Tensor:
        """The bool tensor that it stands for, band included.

        Returns:
            (1, Hm, Tq, max_seqlen_k) where queries are packed, else (S, Hm, max_seqlen_q, max_seqlen_k).
        """
        return unpack_sequences(self.bits, self.spec)

    def of_sequence(self, number: int, head: int = 0) -> torch.Tensor:
        """What one head of one sequence allows, bool (Lq_s, Lk_s), band included; it waits for the device."""
        first, seqlen_q, _, seqlen_k = self.sequences.bounds_of(self.spec)[number].tolist()
        first += 0 if self.spec.packs_queries else number * self.spec.rows_q
        return unpack_words(self.bits[0, head, first : first + seqlen_q], self.spec.max_seqlen_k)[:, :seqlen_k]

    def stats(self) -> MaskStats:
        """Density, active and full tiles of 128 x 128, and empty rows of all sequences; it waits for the device.

        Pairs, tiles and rows are those that sequences have; `shape` is (1, Hm, queries of all of them, max_seqlen_k). A
        last tile with fewer than 128 keys is never full, as of a `TileMask`.
        """
        lengths_q, lengths_k = self.sequences.bounds_of(self.spec).long()[:, 1::2].unbind(1)
        heads, rows = self.bits.shape[1:3]
        queries, pairs = int(lengths_q.sum()), int((lengths_q * lengths_k).sum())
        number = max(1, heads * int((-(-lengths_q // TILE) * -(-lengths_k // TILE)).sum()))
        return MaskStats(
            shape=(1, heads, queries, self.spec.max_seqlen_k),
            block_size=(TILE, TILE),
            density=int(count_bits(self.bits)) / max(1, heads * pairs),
            active_tile_fraction=int((self.classes != EMPTY).sum()) / number,
            full_tile_fraction=int((self.classes == FULL).sum()) / number,
            # Rows of no sequence have no bit either.
            empty_rows=int((self.bits == 0).all(-1).sum()) - heads * (rows - queries),
        )

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle, copy and `torch.save`; with its sequences, which calls with the copy have to pass."""
        fields = (self.sequences, tuple(self.spec), self.is_causal, self.window_size, *self.tensors)
        return restore_sequence_tiles, fields

    def __repr__(self) -> str:
        # Not the values: printing them waits for the device.
        return (
            f"SequenceTileMask(shape={self.shape}, is_causal={self.is_causal}, window_size={self.window_size}, "
            f"device={str(self.device)!r})"
        )


def prepare_beside(
    mask: torch.Tensor,
    sequences: Sequences,
    *,
    seqlen_q: int | None,
    seqlen_k: int | None,
    is_causal: bool,
    window_size: tuple[int, int] | None,
) -> SequenceTileMask:
    """`prepare_mask(mask, sequences=...)`; its docstring says what the arguments are."""
    spec = _spec_of(sequences, seqlen_q, seqlen_k)
    given = _where_sequences_are("mask", bool_mask("mask", mask), sequences)
    mask_packing = packing_of("mask", mask.shape, spec)
    check_scores("mask", given.shape, mask_packing, spec, None)
    return _pack(given, mask_packing, sequences, spec, sequences.bounds_of(spec), is_causal, window_size)


def prepare_ragged(
    flat: torch.Tensor,
    sequences: Sequences,
    *,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
) -> SequenceTileMask:
    """Packs a mask that has the pairs of each sequence behind those of the one before, for all layers of a model.

    Equivalent to, for queries and keys that are packed::

        mask = torch.zeros(heads, seqlen_q, max_seqlen_k, dtype=torch.bool)
        start = 0
        for s, (n, m) in enumerate(zip(lengths_q, lengths_k)):
            mask[:, cu_seqlens_q[s] : cu_seqlens_q[s] + n, :m] = flat[:, start : start + n * m].view(-1, n, m)
            start += n * m
        prepare_mask(mask, sequences=sequences, ...)

    Args:
        flat: bool (N,) or (H, N), where N is the sum of Lq_s * Lk_s over sequences: the rows of the first sequence, one
            behind the other, then those of the second. H is 1, Hk or Hq.
        sequences: those of the calls.
        seqlen_q, seqlen_k, is_causal, window_size: as in `prepare_mask(mask, sequences=sequences)`.

    Returns:
        SequenceTileMask.

    Raises:
        TypeError: not a bool tensor, not `Sequences`.
        ValueError: another rank, or, on a CPU, another number of pairs. On an accelerator the host does not wait to
            count them: missing ones read wrong values, never beyond `flat`.

    The flat form is that of `custom_mask` in Ye et al., FlashInfer (2025).

    >>> import torch
    >>> from flash_dmattn import Sequences
    >>> from flash_dmattn.masks import prepare_ragged
    >>> documents = Sequences.packed(torch.tensor([0, 1, 3]), max_seqlen_q=2)
    >>> flat = torch.tensor([True] + [True, False, True, True])  # 1 x 1 and 2 x 2
    >>> prepare_ragged(flat, documents, seqlen_q=3, seqlen_k=3).unpacked()[0, 0].int().tolist()
    [[1, 0], [1, 0], [1, 1]]
    """
    spec = _spec_of(sequences, seqlen_q, seqlen_k)
    given = _where_sequences_are("flat", bool_mask("flat", flat), sequences)
    if flat.dim() not in (1, 2):
        raise ValueError(f"flat has shape {tuple(flat.shape)} and must be (pairs,) or (heads, pairs).")
    bounds = sequences.bounds_of(spec)
    if values_can_be_read(bounds):
        pairs = int((bounds[:, 1].long() * bounds[:, 3]).sum())
        if flat.shape[-1] != pairs:
            raise ValueError(f"flat has {flat.shape[-1]} pairs and must have {pairs}, queries times keys of sequences.")
    return _pack(given.transpose(1, 2), "ragged", sequences, spec, bounds, is_causal, window_size)


def _spec_of(sequences: Sequences, seqlen_q: int | None, seqlen_k: int | None) -> SequenceSpec:
    if not isinstance(sequences, Sequences):
        raise TypeError(f"sequences is a {type(sequences).__name__} and must be a flash_dmattn.Sequences.")
    for name, given, tensor in (("seqlen_q", seqlen_q, "q"), ("seqlen_k", seqlen_k, "k")):
        if given is None:
            pages = ", of pages block_table.shape[1] * page_size" if name == "seqlen_k" else ""
            raise ValueError(f"{name} is None; beside sequences it must be {tensor}.shape[-3]{pages}.")
    assert seqlen_q is not None and seqlen_k is not None
    return sequences.spec_of(integer("seqlen_q", seqlen_q), integer("seqlen_k", seqlen_k))


def _where_sequences_are(name: str, mask: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """The mask, if it is on their device."""
    if mask.device != sequences.device:
        raise ValueError(f"{name} is on {mask.device} and must be where sequences are, on {sequences.device}.")
    return mask


def _pack(
    mask: torch.Tensor,
    mask_packing: MaskPacking,
    sequences: Sequences,
    spec: SequenceSpec,
    bounds: torch.Tensor,
    is_causal: bool,
    window_size: tuple[int, int] | None,
) -> SequenceTileMask:
    is_causal, window_size = check_flag("is_causal", is_causal), check_window(window_size)
    tensors = pack_beside(mask, bounds, mask_packing, spec, causal_window(is_causal, window_size))
    return SequenceTileMask(sequences, spec, is_causal, window_size, *tensors)
