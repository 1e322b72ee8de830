"""Converts padded batches and nested tensors to packed tokens, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import check_device, check_tensor
from .layout import Sequences


class Padding:
    """The padding of a batch, which it removes from tensors and puts back.

    A model then computes embeddings and MLPs only for real tokens, and passes `sequences` to attention. The
    constructor waits for the device once, to count the tokens.

    Args:
        mask: (S, L), bool or 0/1 as tokenizers return it: which tokens are real. Padding may be on either side, or
            between.

    Attributes:
        sequences: the real tokens of each row, as `Sequences.packed` with max_seqlen_q and max_seqlen_k.
        indices: int64 (tokens,), the index of each real token in the flattened batch.

    Raises:
        TypeError: the mask is no tensor of bools or integers.
        ValueError: it has not two dims.

    >>> import torch, flash_dmattn
    >>> padding = flash_dmattn.sequences.Padding(torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]]))
    >>> x = torch.randn(2, 4, 2, 8)
    >>> tokens = padding.unpad(x)
    >>> tokens.shape
    torch.Size([5, 2, 8])
    >>> out = flash_dmattn.attention(tokens, tokens, tokens, is_causal=True, sequences=padding.sequences)
    >>> padding.pad(out).shape
    torch.Size([2, 4, 2, 8])
    """

    def __init__(self, mask: Tensor) -> None:
        if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
            kind = str(mask.dtype).removeprefix("torch.") if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask is {kind}; it needs to be a torch.Tensor of bools or integers, 1 for real tokens")
        if mask.dim() != 2:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; it needs (sequences, tokens)")
        self._shape = (mask.shape[0], mask.shape[1])
        with torch.inference_mode(False):  # autograd cannot save tensors that are made in inference mode
            real = mask != 0
            self.indices = real.flatten().nonzero().flatten()
            edges = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
        self.sequences = Sequences.packed(edges, max_seqlen_q=mask.shape[1])

    def unpad(self, x: Tensor) -> Tensor:
        """Take the real tokens (tokens, ...) out of a tensor (S, L, ...); differentiable.

        Raises:
            TypeError: x is no tensor.
            ValueError: the first two sizes of x differ from the sizes of the mask, or it is on another device.
        """
        self._check("x", x)
        if tuple(x.shape[:2]) != self._shape:
            raise ValueError(f"x has shape {tuple(x.shape)}; it needs {self._shape} in front, as the mask")
        return x.flatten(0, 1)[self.indices]

    def pad(self, tokens: Tensor) -> Tensor:
        """Put tokens (tokens, ...) back into (S, L, ...), with zeros for padding; differentiable.

        Raises:
            TypeError: tokens is no tensor.
            ValueError: the mask has another number of tokens, or is on another device.
        """
        self._check("tokens", tokens)
        number = self.indices.shape[0]
        if tokens.shape[:1] != (number,):
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}; the mask has {number} tokens")
        flat = tokens.new_zeros((self._shape[0] * self._shape[1], *tokens.shape[1:]))
        return flat.index_copy(0, self.indices, tokens).unflatten(0, self._shape)

    def _check(self, name: str, x: Tensor) -> None:
        check_tensor(name, x)
        check_device(name, x.device, self.indices.device, "the mask")

    def __reduce__(self) -> tuple[object, ...]:
        # For pickle, copy and `torch.save`.
        return restore_padding, (self._shape, self.indices, self.sequences)


def restore_padding(shape: tuple[int, int], indices: Tensor, sequences: Sequences) -> Padding:
    """Make a `Padding` from its fields, for `torch.load`, also with `weights_only=True`."""
    padding = Padding.__new__(Padding)
    padding._shape, padding.indices, padding.sequences = shape, indices, sequences
    return padding


torch.serialization.add_safe_globals([restore_padding])


class Jagged:
    """Converts q, k and v that are jagged `torch.nested` tensors, (S, j, H, D), to packed tokens and `Sequences`.

    The attributes q, k and v are the values of the nested tensors, (tokens, H, D); `sequences` is their layout.
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
                "v is a nested tensor with other offsets than k; it needs to share them, as "
                "torch.nested.nested_tensor_from_jagged(v.values(), k.offsets()) does"
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
        """Return out as (S, j, Hq, Dv), and lse and its like as (S, Hq, j), nested, with the offsets of q."""
        out, *rows = results
        return self._nested(out), *(self._nested(x.mT).transpose(1, 2) for x in rows)

    def _nested(self, values: Tensor) -> Tensor:
        like = self._like
        nested: Tensor = torch.nested.nested_tensor_from_jagged(values, like.offsets(), like.lengths())
        return nested
