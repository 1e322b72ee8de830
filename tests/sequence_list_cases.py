"""Calls with lists of keys and sequences, and the same by one call of the formula for each sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sequence_cases import SequenceCase
from torch import Tensor

from flash_dmattn import Sequences, attention
from flash_dmattn.biases import ListBias
from flash_dmattn.masks import PreparedMask
from flash_dmattn.problem import Layout


class SequenceLists(NamedTuple):
    """Sizes of a call with lists and sequences: the queries and keys of each, and their layout."""

    layout: Layout
    heads: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]
    entries: int = 5
    block_k: int = 1
    list_heads: int = 1
    value_heads: int = 1
    is_causal: bool = True
    window: tuple[int, int] | None = None
    shares: bool = False  # whether slots share lists and values
    head_dims: tuple[int, int] = (8, 6)
    page_size: int = 4
    spare: int = 2  # rows of no sequence, at the end of packed tokens or of each slot

    @property
    def packs(self) -> tuple[bool, bool]:
        """Whether queries are packed, and keys."""
        return self.layout in ("packed", "paged_packed"), self.layout == "packed"

    def build(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> SequenceListCall:
        """Draw the tensors."""
        (packs_q, packs_k), number = self.packs, len(self.lengths)
        most = [max(x[side] for x in self.lengths) + self.spare * (not self.packs[side]) for side in (0, 1)]
        case = SequenceCase(
            self.lengths, self.layout, self.page_size, trailing=(self.spare,) * 2, most=(most[0], most[1])
        )
        call = case.with_(heads=self.heads, head_dims=self.head_dims, dtype=dtype, sink=dtype, dlse=False).build("cpu")
        rows, sequences, table = call.q.shape[-3], call.sequences, call.sequences.block_table
        if packs_k:  # without bounds on the lengths
            sequences = Sequences.packed(sequences.cu_seqlens_q, sequences.cu_seqlens_k)
        index = torch.full((1 if packs_q or self.shares else number, self.list_heads, rows, self.entries), -1)
        fewest = min(keys for *_, keys in call.lengths)
        for s, (first, length, _, keys) in enumerate(call.lengths):
            own = index[0 if packs_q or self.shares else s, :, first : first + length]
            own.copy_(torch.randint(-1, -(-(fewest if self.shares else keys) // self.block_k), own.shape))
        others = {"is_causal": self.is_causal, "window_size": self.window, "block_size": (1, self.block_k)}
        rows_k = call.k.shape[-3] if table is None else table.shape[1] * self.page_size
        lists = PreparedMask.from_lists(index, seqlen_k=rows_k, sequences=sequences, **others).to(device)
        values = torch.randn(len(index), self.value_heads, rows, self.entries, dtype=dtype)
        assert call.sink is not None
        tensors = (call.q[None] if packs_q else call.q, *(x[None] if packs_k else x for x in (call.k, call.v)))
        places = [
            ((0 if packs_q else s, slice(i, i + n)), (0 if packs_k else s, slice(j, j + m)))
            for s, (i, n, j, m) in enumerate(call.lengths)
        ]
        return SequenceListCall(
            self, lists, index, [x.to(device) for x in (*tensors, values, call.sink)], places, table
        )


class SequenceListCall(NamedTuple):
    """The tensors of a call; by sequence the places of its queries and of its keys; the pages."""

    case: SequenceLists
    lists: PreparedMask
    index: Tensor
    tensors: list[Tensor]
    places: list[Any]
    table: Tensor | None

    def together(self, *tensors: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        """The call: (out, lse), with a batch dim if packed."""
        q, k, v, values, sink = tensors
        packs_q, packs_k = self.case.packs
        q, (k, v) = q[0] if packs_q else q, ((x[0] if packs_k else x) for x in (k, v))
        others = {"sink": sink, "sequences": self.lists.sequences, "return_lse": True, **others}
        out, lse = attention(q, k, v, self.lists, ListBias(values), **others)
        return (out[None], lse[None]) if packs_q else (out, lse)

    def alone(self, *tensors: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        """The same by a call for each sequence, with lists of its own keys."""
        q, k, v, values, sink = tensors
        nothing = sum(x.flatten()[:0].sum() for x in tensors)
        out = q.new_zeros(*q.shape[:3], v.shape[3]) + nothing
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide) + nothing
        for s, ((entry, rows), (entry_k, keys)) in enumerate(self.places):
            if rows.stop == rows.start:
                continue
            if self.table is None:
                own_k, own_v = k[entry_k, keys], v[entry_k, keys]
            else:
                own_k, own_v = (x[self.table[s].long().to(x.device)].flatten(0, 1)[keys] for x in (k, v))
            entry_v = min(entry, len(self.index) - 1)
            lists = PreparedMask.from_lists(
                self.index[entry_v, :, rows].to(q.device),
                seqlen_k=len(own_k),
                is_causal=self.case.is_causal,
                window_size=self.case.window,
                block_size=(1, self.case.block_k),
            )
            own = ListBias(values[min(entry, len(values) - 1), :, rows])
            more = {"sink": sink, "return_lse": True, "backend": "reference", **others}
            one, own_lse = attention(q[entry, rows][None], own_k[None], own_v[None], lists, own, **more)
            out[entry, rows], lse[entry, :, rows] = one[0], own_lse[0]
        return out, lse


LENGTHS = ((3, 6), (0, 2), (5, 5), (4, 9), (2, 0))
EQUAL = ((3, 7), (3, 7), (3, 7))
BESIDE = {
    "packed": SequenceLists("packed", (4, 2), LENGTHS),
    "packed, lists of key heads, values of query heads": SequenceLists("packed", (4, 2), LENGTHS, 4, 1, 2, 4),
    "packed, a window": SequenceLists("packed", (2, 1), LENGTHS, 9, is_causal=False, window=(2, 1)),
    "packed, everything": SequenceLists("packed", (2, 2), LENGTHS, 9, 1, 1, 2, False),
    "packed, equal lengths": SequenceLists("packed", (2, 1), EQUAL, spare=0),
    "packed, blocks": SequenceLists("packed", (4, 2), LENGTHS, 3, 4, 2, 2),
    "padded": SequenceLists("padded", (4, 2), LENGTHS, 5, 1, 2, 4),
    "padded, blocks and a window": SequenceLists("padded", (2, 1), LENGTHS, 3, 4, window=(3, -1)),
    "padded, shared": SequenceLists("padded", (2, 1), EQUAL, shares=True),
    "padded, shared, of several lengths": SequenceLists("padded", (2, 2), ((5, 9), (2, 4), (5, 4)), shares=True),
}
PAGED = {
    "one query": SequenceLists("paged", (4, 2), ((1, 6), (1, 2), (1, 9)), 5, 1, 2, 4, spare=0),
    "several queries": SequenceLists("paged", (2, 1), ((5, 6), (5, 5), (5, 9)), 5, spare=0),
    "packed queries": SequenceLists("paged_packed", (4, 2), LENGTHS, 5, 1, 2, 2),
    "blocks": SequenceLists("paged_packed", (4, 2), LENGTHS, 3, 2),
    "no page": SequenceLists("paged_packed", (2, 1), ((2, 0), (1, 0)), 3, spare=0),
}
