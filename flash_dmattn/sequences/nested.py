"""`torch.nested` tensors of the jagged layout: packed sequences that know their lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layout import Sequences


class Jagged:
    """A call whose q, k and v are jagged, (S, j, H, D): its tokens and their sequences.

    Attributes:
        q, k, v: (tokens, H, D), the values of the nested tensors.
        sequences: where they lie.

    Raises:
        TypeError: not all three are nested, or one is not jagged.
        ValueError: k and v have other lengths, or a tensor is ragged in another dim.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or not x.is_nested:
                raise TypeError(
                    f"{name} is not nested, as others of q, k and v are; it needs to be a nested tensor, too"
                )
            if x.layout != torch.jagged:
                raise TypeError(f"{name} is a nested tensor of layout {x.layout}; it needs layout=torch.jagged")
            if x.dim() != 4 or x._ragged_idx != 1:  # type: ignore[attr-defined]
                raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs (sequences, ragged, heads, head_dim)")
        if k.shape[1] != v.shape[1]:
            raise ValueError(
                f"v has ragged lengths {v.shape[1]}; it needs those of k, {k.shape[1]} (share the offsets)"
            )
        self._like: Any = q
        self.q, self.k, self.v = q.values(), k.values(), v.values()
        offsets: list[Any] = [q.offsets(), k.offsets()]  # type: ignore[attr-defined]
        used: list[Any] = [q.lengths(), k.lengths()]  # type: ignore[attr-defined]
        most: list[Any] = [x._maybe_max_seqlen for x in (q, k)]  # type: ignore[attr-defined]
        self.sequences = Sequences.packed(
            *offsets, seqlens_q=used[0], seqlens_k=used[1], max_seqlen_q=most[0], max_seqlen_k=most[1]
        )

    def wrap(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """out as (S, j, Hq, Dv), lse as (S, Hq, j), with the offsets of q."""
        out, lse = results[:2]
        return self._nested(out), self._nested(lse.mT).transpose(1, 2)

    def _nested(self, values: Tensor) -> Tensor:
        like = self._like
        nested: Tensor = torch.nested.nested_tensor_from_jagged(values, like.offsets(), like.lengths())
        return nested


def is_nested(x: object) -> bool:
    """Whether an argument is a nested tensor."""
    return isinstance(x, Tensor) and x.is_nested
