"""Rotary position embedding (RoPE) of queries and keys."""

from __future__ import annotations

import torch


def rotary_angles(positions: torch.Tensor, head_dim: int, theta: float = 10000.0) -> torch.Tensor:
    """Angle of every pair of channels at every position.

    Equivalent to::

        positions[..., None] * theta ** (-2 * torch.arange(head_dim // 2) / head_dim)

    Args:
        positions: (L,) or (B, L) positions of the tokens, integers or floats.
        head_dim: number of channels of a head, even.
        theta: base of the geometric series of wavelengths; the longest is about ``2 * pi * theta`` tokens.

    Returns:
        (L, head_dim // 2) or (B, L, head_dim // 2) angles in radians, fp64: an angle of many thousand radians keeps
        its fraction.

    Raises:
        ValueError: head_dim is odd.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 15.

    >>> rotary_angles(torch.tensor([0, 2]), head_dim=4, theta=100.0)
    tensor([[0.0000, 0.0000],
            [2.0000, 0.2000]], dtype=torch.float64)
    """
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary positions turn channels in pairs, so it must be even")
    channel = torch.arange(head_dim // 2, dtype=torch.float64, device=positions.device)
    return positions.to(torch.float64)[..., None] * theta ** (-2 * channel / head_dim)


def apply_rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn channel pairs (c, c + D/2) of every head by the angles of their position.

    Equivalent to::

        first, second = x.chunk(2, dim=-1)
        torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

    Args:
        x: (B, L, H, D) queries or keys.
        angles: (L, D // 2) or (B, L, D // 2) from `rotary_angles`.

    Returns:
        (B, L, H, D) in x's dtype; products are taken in fp32 at least.

    Source: RoFormer, equation 34, with the half-split pairing that LLaMA checkpoints use.

    >>> x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> apply_rotary(x, torch.tensor([[torch.pi / 2]])).round(decimals=3).flatten().tolist()
    [-0.0, 1.0]
    """
    work_dtype = torch.promote_types(x.dtype, torch.float32)
    cos = angles.cos().to(work_dtype)[..., None, :]
    sin = angles.sin().to(work_dtype)[..., None, :]
    first, second = x.to(work_dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)
