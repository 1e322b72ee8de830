"""One call whose mask comes in every form, and two backends that tell the form in which it reached them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from out_of_tree import KernelPair, registered
from torch import Tensor

import flash_dmattn
from flash_dmattn.masks import PreparedMask

# Operators are defined once per process.
PREPARED = KernelPair("reads_prepared_masks", mask_forms=frozenset({"tiles", "intervals"}))
DENSE = KernelPair("reads_dense_masks")
B, LQ, LK, HQ, HK, D = 2, 140, 150, 4, 2, 8
Leaves = list[Tensor]


def leaves(dtype: torch.dtype = torch.float64, seqlen_q: int = LQ) -> Leaves:
    torch.manual_seed(0)
    shapes = (B, seqlen_q, HQ, D), (B, LK, HK, D), (B, LK, HK, D), (1, HK, 1, LK)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def random_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., ::3, : shape[-1] // 2] = False
    return mask


def results(inputs: Leaves, mask: Tensor | PreparedMask | None, **flags: Any) -> list[Tensor]:
    """out, lse and the four gradients."""
    q, k, v, bias = inputs
    out, lse = flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, **flags)
    total = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()
    return [out, lse, *torch.autograd.grad(total, inputs)]


def assert_same(actual: list[Tensor], expected: list[Tensor], rtol: float = 1e-9, atol: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


FORMS = {
    "full": random_mask(B, HQ, LQ, LK),
    "key-value heads": random_mask(1, HK, LQ, LK),
    "queries and keys": random_mask(LQ, LK),
    "one key for all": random_mask(B, 1, LQ, 1),
    "expanded heads": random_mask(B, 1, LQ, LK).expand(-1, HQ, -1, -1),
    "per key": random_mask(B, 1, 1, LK),
    "per key and head": random_mask(B, HQ, 1, LK),
    "expanded queries": random_mask(1, HK, 1, LK).expand(B, -1, LQ, -1),
    "one for all": torch.ones(1, 1, dtype=torch.bool),
    "none allowed": torch.zeros(1, HQ, LQ, LK, dtype=torch.bool),
}


@contextmanager
def both_registered() -> Iterator[None]:
    """Register PREPARED and DENSE, as if they had never run."""
    for ours in (PREPARED, DENSE):
        ours.count, ours.received = Counter(), []
    with registered(PREPARED, DENSE):
        yield
