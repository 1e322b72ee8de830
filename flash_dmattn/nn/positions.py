"""Positions: biases for `flash_dmattn.attention` (T5's, Swin's, ALiBi's slopes), and the rotary embedding.

All batch entries have the same bias, so kernels sum its gradient over the batch. The gradient of a table is summed in
a fixed order: over diagonals or queries by a reduction, over equal buckets by `torch.nn.functional.embedding`, which
sorts them.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_dmattn.biases import Relative, t5, t5_buckets
from flash_dmattn.masks.arguments import integer
from flash_dmattn.problem import check_flag


class RelativePositionBias(nn.Module):
    """T5's bias: a learned value for each head and bucket of the distance between query and key.

    Equivalent to::

        distance = torch.arange(Lk)[None, :] - (torch.arange(Lq) + Lk - Lq)[:, None]
        bias = weight[t5_buckets(distance, ...)].permute(2, 0, 1)[None]      # (1, H, Lq, Lk)

    The last query is aligned with the last key, as everywhere in `attention`. T5 does not scale its scores: pass
    `softmax_scale=1.0`.

    Args:
        num_heads: heads of the bias: the heads of q, or of k for one bias per group.
        num_buckets: rows of the table; even with `is_bidirectional`.
        max_distance: all distances from here on are in the last bucket.
        is_bidirectional: whether half of the buckets are for keys after the query. Otherwise such keys have the bucket
            of distance 0: causal attention does not see them.
        device, dtype: of the table.

    Attributes:
        weight: (num_buckets, num_heads), zeros at first. T5's checkpoints call it `relative_attention_bias.weight`.

    Raises:
        TypeError: a number is no int, or `is_bidirectional` no bool.
        ValueError: a number is too small, or an odd `num_buckets` with `is_bidirectional`.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020.

    Example:
        >>> import flash_dmattn
        >>> position_bias = RelativePositionBias(num_heads=4)
        >>> q = k = v = torch.randn(2, 10, 4, 8)
        >>> out = flash_dmattn.attention(q, k, v, bias=position_bias(), softmax_scale=1.0)
        >>> out.sum().backward()
        >>> position_bias.weight.grad.shape
        torch.Size([32, 4])
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        is_bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = integer("num_heads", num_heads, 1)
        check_flag("is_bidirectional", is_bidirectional)
        self.num_buckets = integer("num_buckets", num_buckets, 4 if is_bidirectional else 2)
        if is_bidirectional and num_buckets % 2:
            raise ValueError(f"num_buckets is {num_buckets}; with is_bidirectional it needs to be even")
        exact = num_buckets // (4 if is_bidirectional else 2)
        self.max_distance = integer("max_distance", max_distance, exact + 1)
        self.is_bidirectional = is_bidirectional
        self.weight = nn.Parameter(torch.zeros(num_buckets, num_heads, device=device, dtype=dtype))

    @overload
    def forward(self) -> Relative: ...
    @overload
    def forward(self, seqlen_q: int, seqlen_k: int | None = None) -> Tensor: ...

    def forward(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Relative | Tensor:
        """Make the bias of a call: by distance, for any lengths, or with `seqlen_q` as a tensor.

        Args:
            seqlen_q: number of queries.
            seqlen_k: number of keys; as many as queries by default.

        Returns:
            A `flash_dmattn.biases.Relative` in the table's dtype; its size does not depend on lengths. With `seqlen_q`
            a contiguous tensor (1, num_heads, seqlen_q, seqlen_k), for backends that need one value for each score.

        Raises:
            TypeError: a length is no int.
            ValueError: a length is negative, or `seqlen_k` is passed without `seqlen_q`.
        """
        if seqlen_q is None:
            if seqlen_k is not None:
                raise ValueError(f"seqlen_k is {seqlen_k} without seqlen_q; a tensor needs both")
            return t5(self.weight, is_bidirectional=self.is_bidirectional, max_distance=self.max_distance)
        seqlen_q = integer("seqlen_q", seqlen_q)
        seqlen_k = seqlen_q if seqlen_k is None else integer("seqlen_k", seqlen_k)
        if seqlen_q == 0 or seqlen_k == 0:
            return self.weight.new_zeros(1, self.num_heads, seqlen_q, seqlen_k)
        # One value for each distance that these lengths have, so that the graph is the same for other lengths.
        distances = torch.arange(1 - seqlen_k, seqlen_q, device=self.weight.device)
        rows = t5_buckets(distances, self.num_buckets, self.max_distance, self.is_bidirectional)
        values = F.embedding(rows, self.weight).T
        # Contiguous, because kernels would copy a view with unaligned rows. Inductor saves such a view for backward
        # with other strides, and takes these for constants although lengths are dynamic.
        return Relative(values, seqlen_k - 1).dense(seqlen_q, seqlen_k)[None].contiguous()

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"is_bidirectional={self.is_bidirectional}"
        )


class WindowPositionBias(nn.Module):
    """Swin's bias: a learned value for each head and offset between two tokens of a window of height x width.

    Equivalent to, with query i at row yi and column xi of the window, key j at (yj, xj), both counted row by row::

        bias[0, h, i, j] = weight[(yi - yj + height - 1) * (2 * width - 1) + xi - xj + width - 1, h]

    Args:
        height, width: size of the window, in tokens.
        num_heads: heads of the bias.
        device, dtype: of the table.

    Attributes:
        weight: ((2 * height - 1) * (2 * width - 1), num_heads), zeros at first. Swin's checkpoints call it
            `relative_position_bias_table`.

    Source: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021.

    Example:
        >>> WindowPositionBias(7, 7, num_heads=3)().shape
        torch.Size([1, 3, 49, 49])
    """

    def __init__(
        self,
        height: int,
        width: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.height, self.width = integer("height", height, 1), integer("width", width, 1)
        self.num_heads = integer("num_heads", num_heads, 1)
        offsets = (2 * height - 1) * (2 * width - 1)
        self.weight = nn.Parameter(torch.zeros(offsets, num_heads, device=device, dtype=dtype))

    def forward(self) -> Tensor:
        """Make the bias of a call: (1, num_heads, height * width, height * width), in the table's dtype."""
        places = torch.arange(self.height * self.width, device=self.weight.device)
        down, right = (x[:, None] - x[None, :] for x in (places // self.width, places % self.width))
        rows = (down + self.height - 1) * (2 * self.width - 1) + right + self.width - 1
        return F.embedding(rows, self.weight).permute(2, 0, 1)[None].contiguous()

    def extra_repr(self) -> str:
        return f"height={self.height}, width={self.width}, num_heads={self.num_heads}"


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """Compute ALiBi's slope for each head: a score falls by it with every token between query and key.

    If n, the number of heads, is a power of 2, head h has 2 ** (-8 * (h + 1) / n). Otherwise the first heads have the
    slopes of the next lower power, and the others every second slope of the next higher one.

    Args:
        num_heads: query heads.
        device: where to put them.

    Returns:
        fp32 (num_heads,).

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        2022.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> from flash_dmattn import biases
        >>> biases.alibi(alibi_slopes(4), 6).values.shape
        torch.Size([4, 11])
    """
    integer("num_heads", num_heads, 1)
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / lower) for n in range(lower)]
    slopes += [2.0 ** (-4.0 * (2 * n + 1) / lower) for n in range(num_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def rotary_angles(positions: Tensor, head_dim: int, theta: float = 10000.0) -> Tensor:
    """Compute the angle of every pair of channels at positions (L,) or (B, L), in radians: (..., head_dim // 2), fp64.

    fp64, so that an angle of 100,000 radians keeps its fraction. Source: Su et al., "RoFormer: Enhanced Transformer
    with Rotary Position Embedding", 2021, equation 15.

    >>> rotary_angles(torch.tensor([0, 2]), head_dim=4, theta=100.0)
    tensor([[0.0000, 0.0000],
            [2.0000, 0.2000]], dtype=torch.float64)
    """
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary positions turn channels in pairs, so it needs to be even")
    channel = torch.arange(head_dim // 2, dtype=torch.float64, device=positions.device)
    return positions.to(torch.float64)[..., None] * theta ** (-2 * channel / head_dim)


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Turn channel pairs (c, c + D/2) of every head of x (B, L, H, D) by the angles of their position.

    Products are taken in fp32 at least. Source: RoFormer, equation 34, with the half-split pairing that LLaMA
    checkpoints use.

    >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> apply_rotary(x, torch.tensor([[torch.pi / 2]])).round(decimals=3).flatten().tolist()
    [-0.0, 1.0]
    """
    work_dtype = torch.promote_types(x.dtype, torch.float32)
    cos = angles.cos().to(work_dtype)[..., None, :]
    sin = angles.sin().to(work_dtype)[..., None, :]
    first, second = x.to(work_dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
