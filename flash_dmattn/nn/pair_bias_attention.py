"""Attention with a pair bias, as in protein models: a projection of features of two tokens is added to their score."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

import flash_dmattn
from flash_dmattn.dispatch.config import BackendChoice
from flash_dmattn.masks.arguments import integer
from flash_dmattn.problem import check_flag, check_strided, check_tensor, dtype_name


class PairBiasAttention(nn.Module):
    """Gated self-attention with a bias that is projected from a pair representation.

    Equivalent to, with x (*batch, L, dim) and pair (*batch, L, L, pair_dim)::

        q, k, v = x @ Wq + bq, x @ Wk, x @ Wv                         # (*batch, H, L, D)
        bias = rearrange(layer_norm(pair) @ Wb, "... i j h -> ... h i j")
        scores = q @ k.mT * D**-0.5 + bias                            # (*batch, H, L, L)
        out = scores.masked_fill(~mask[..., None, None, :], -inf).softmax(-1) @ v
        return (sigmoid(x @ Wg) * out) @ Wo

    Rows of an alignment, or of a pair representation, are a batch dim: x is (B, N, L, dim). All rows use the same
    pair, (B, 1, L, L, pair_dim), so that its projection and its gradient keep that size.

    x is not normalised here. docs/biases.md has the names of OpenFold's parameters.

    Args:
        dim: width of x.
        pair_dim: width of pair.
        num_heads: heads.
        head_dim: channels of a head; dim // num_heads by default.
        is_gated: whether the output is multiplied by the gate.
        backend: of the call, as in `attention`.
        device, dtype: of the parameters.

    Raises:
        TypeError: a size is no int, or `is_gated` no bool.
        ValueError: a size is below 1; `num_heads` does not divide `dim`, and `head_dim` is None.

    Source: algorithm 24 of Abramson et al., "Accurate structure prediction of biomolecular interactions with AlphaFold
        3", 2024, without its conditioning.

    Example:
        >>> layer = PairBiasAttention(dim=32, pair_dim=8, num_heads=4)
        >>> x, pair = torch.randn(2, 10, 32), torch.randn(2, 10, 10, 8)
        >>> mask = torch.ones(2, 10, dtype=torch.bool)
        >>> layer(x, pair, mask).shape
        torch.Size([2, 10, 32])
        >>> rows = torch.randn(2, 6, 10, 32)  # 6 rows with the pair representation of their batch entry
        >>> layer(rows, pair[:, None], mask[:, None]).shape
        torch.Size([2, 6, 10, 32])
    """

    def __init__(
        self,
        dim: int,
        pair_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        is_gated: bool = True,
        backend: BackendChoice = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "pair_dim": pair_dim, "num_heads": num_heads}
        for name, size in (sizes if head_dim is None else sizes | {"head_dim": head_dim}).items():
            integer(name, size, 1)
        check_flag("is_gated", is_gated)
        if head_dim is None and dim % num_heads:
            raise ValueError(f"dim is {dim} and num_heads {num_heads}, which does not divide it; pass head_dim")
        head_dim = dim // num_heads if head_dim is None else head_dim
        self.dim, self.pair_dim, self.num_heads, self.head_dim = dim, pair_dim, num_heads, head_dim
        self.backend: BackendChoice = backend
        width = num_heads * head_dim

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj, self.k_proj, self.v_proj = linear(dim, width, bias=True), linear(dim, width), linear(dim, width)
        self.gate_proj = linear(dim, width) if is_gated else None
        self.o_proj = linear(width, dim)
        self.pair_norm = nn.LayerNorm(pair_dim, device=device, dtype=dtype)
        self.pair_proj = linear(pair_dim, num_heads)

    def forward(self, x: Tensor, pair: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from every token of x to every token that the mask allows.

        Args:
            x: (*batch, L, dim), with one batch dim or more.
            pair: (*batch, L, L, pair_dim), each batch dim as in x or 1; entry (i, j) belongs to query i and key j.
            mask: bool (*batch, L), each batch dim as in x or 1; True for a token, False for padding. Or a mask of
                `attention` with all dims, (*batch, H or 1, L or 1, L). None without padding.

        Returns:
            (*batch, L, dim) in x's dtype. An entry that is all padding gets o_proj(zeros).

        Raises:
            TypeError: x, pair or mask is no tensor, or mask is not bool.
            ValueError: x, pair or mask has another shape.
        """
        check_tensor("x", x)
        check_strided("x", x)
        if x.dim() < 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; it needs to be (*batch, length, {self.dim})")
        self._check_shared("pair", pair, x, (x.shape[-2], x.shape[-2], self.pair_dim))
        keys = None if mask is None else self._mask(mask, x)
        projections = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (rearrange(y, "... l (h d) -> ... l h d", h=self.num_heads) for y in projections)
        # Contiguous, because kernels copy tiles and need rows of unit stride.
        bias = rearrange(self.pair_proj(self.pair_norm(pair)), "... i j h -> ... h i j").contiguous()
        out = flash_dmattn.attention(q, k, v, keys, bias, backend=self.backend)
        out = rearrange(out, "... l h d -> ... l (h d)")
        if self.gate_proj is not None:
            out = torch.sigmoid(self.gate_proj(x)) * out
        result: Tensor = self.o_proj(out)
        return result

    def _mask(self, mask: Tensor, x: Tensor) -> Tensor:
        """Return the mask as `attention` takes it."""
        check_tensor("mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask has dtype {dtype_name(mask.dtype)}; it needs bool, True for a token: mask.bool() of 1 and 0, "
                "mask == 0 of 0 and -inf"
            )
        if mask.dim() == x.dim() + 1:
            return mask
        self._check_shared("mask", mask, x, (x.shape[-2],))
        return rearrange(mask, "... j -> ... 1 1 j")

    @staticmethod
    def _check_shared(name: str, shared: Tensor, x: Tensor, sizes: tuple[int, ...]) -> None:
        check_tensor(name, shared)
        batch = x.shape[:-2]
        dims = shared.shape[: -len(sizes)]
        if (
            shared.dim() == len(batch) + len(sizes)
            and shared.shape[-len(sizes) :] == sizes
            and all(has in (1, size) for has, size in zip(dims, batch, strict=True))
        ):
            return
        needs = ", ".join([*("1" if size == 1 else f"{size} or 1" for size in batch), *map(str, sizes)])
        raise ValueError(
            f"{name} has shape {tuple(shared.shape)}; with x of shape {tuple(x.shape)} it needs to be ({needs})"
        )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, backend={self.backend!r}"
