"""The tensors of a case from a seed, and the pairs that its mask and causality allow."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn import masks
from flash_dmattn.biases import Relative

from .cases import TILE, Case, MaskRule

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Inputs(NamedTuple):
    """The tensors of one call: q, k, v, dout (B, L, H, D), a bool mask, a bias; q, k, v and bias may take gradients.

    A mask that was made of lists comes with them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Tensor | None
    bias: Tensor | None
    is_causal: bool
    lists: masks.PreparedMask | None = None

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that take a gradient, by the name of the gradient."""
        named = {"dq": self.q, "dk": self.k, "dv": self.v, "dbias": self.bias}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def passed_bias(self) -> Tensor | Relative | None:
        """Return the bias as `attention` takes it: by distance if it is (1, H, distances)."""
        if self.bias is None or self.bias.dim() == 4:
            return self.bias
        return Relative(self.bias, self.bias.shape[2] // 2, "clamp")

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.q.shape[2] // self.k.shape[2]

    def allowed(self) -> Tensor | None:
        """Mask and causality as one dense bool tensor (B | 1, H | 1, Lq, Lk), or None where everything is allowed."""
        return allowed_by(self.mask, self.is_causal, *self.lengths, self.q.device)


def allowed_by(
    mask: Tensor | None, is_causal: bool, seqlen_q: int, seqlen_k: int, device: torch.device
) -> Tensor | None:
    """Join mask and causality to one dense bool tensor (B | 1, H | 1, Lq, Lk); None where everything is allowed."""
    if is_causal:
        causal = masks.causal_mask(seqlen_q, seqlen_k, device)
        mask = causal if mask is None else mask & causal
    return mask if mask is None else mask.expand(-1, -1, seqlen_q, seqlen_k)


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype | None = None) -> Inputs:
    """Return random normal inputs, the same for every call; they require gradients where the case takes any.

    They have the dtype of the case, unless another one is given.
    """
    generator, dtype = torch.Generator(device).manual_seed(0), DTYPES[case.dtype] if dtype is None else dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    c = case
    q, dout = (normal(c.batch, c.seqlen_q, c.heads, dim) for dim in (c.head_dim, c.value_dim))
    k, v = (normal(c.batch, c.seqlen, c.heads_k, dim) for dim in (c.head_dim, c.value_dim))
    scores = normal(*c.shape_of("bkj"))
    bias = None
    if c.bias is not None:
        bias = scores.clone() if c.bias == "bkj" else normal(*c.shape_of(c.bias))
    mask = lists = None
    if c.mask is not None and c.mask.kind == "lists":
        lists = make_lists(c, c.mask, generator)
        mask = lists.dense()
    elif c.mask is not None:
        mask = make_mask(c, c.mask, scores, generator)
    inputs = Inputs(q, k, v, dout, mask, bias, c.is_causal, lists)
    for x in inputs.leaves.values():
        x.requires_grad_(c.takes_gradients)
    return inputs


def make_mask(case: Case, rule: MaskRule, scores: Tensor, generator: torch.Generator) -> Tensor:
    """Return the bool mask of a case by its rule; `scores` (B, Hk, 1, L) are what "keys" and "topk" select by."""
    device, (seqlen_q, seqlen_k) = scores.device, (case.seqlen_q, case.seqlen)
    if rule.kind in ("keys", "topk"):
        return masks.topk_mask(scores, min(rule.size, seqlen_k), is_causal=rule.kind == "topk")
    if rule.kind == "band":
        return masks.sliding_window_mask(seqlen_q, seqlen_k, (rule.size, rule.size), device)
    if rule.kind == "blocks":
        rows, columns = -(-seqlen_q // rule.size), -(-seqlen_k // rule.size)
        chance = torch.rand(case.batch, case.heads_k, rows, columns, generator=generator, device=device)
        kept = (chance < rule.density) | torch.eye(rows, columns, dtype=torch.bool, device=device)
        return masks.expand_blocks(kept, rule.size, seqlen_q, seqlen_k)
    if rule.kind == "random":
        chance = torch.rand(case.shape_of(rule.dims), generator=generator, device=device)
        mask = chance < rule.density
        mask[..., 0] = True  # no row is empty: some peers have no value for one
        return mask
    place = torch.arange(seqlen_k, device=device)
    if rule.kind == "padding":
        least = seqlen_k // rule.size
        lengths = torch.randint(least, seqlen_k + 1, (case.batch, 1), generator=generator, device=device)
        return (place < lengths)[:, None, None]
    if rule.kind == "windows":
        return shifted_windows(case.batch, rule.size, seqlen_k, device)
    starts = torch.randint(1, seqlen_k, (case.batch, rule.size - 1), generator=generator, device=device)
    documents = (place >= starts.sort(-1).values[..., None]).sum(1)
    return (documents[:, None, -seqlen_q:, None] == documents[:, None, None, :]).contiguous()


def make_lists(case: Case, rule: MaskRule, generator: torch.Generator) -> masks.PreparedMask:
    """Return the lists of a case: the best of random scores."""
    rows, columns = (-(-length // each) for length, each in zip((case.seqlen_q, case.seqlen), rule.block, strict=True))
    scores = torch.rand(case.batch, case.heads_k, rows, columns, generator=generator, device=generator.device)
    return masks.PreparedMask.from_topk_lists(
        scores, rule.size, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen, block_size=rule.block, is_causal=True
    )


def layer_mask(case: Case, bias: Tensor) -> Tensor:
    """Return the dense mask (B, Hk, L, L) of a layer of a model, of its bias (B | 1, Hk, 1, L)."""
    assert case.mask is not None and case.mask.kind == "topk"
    return masks.topk_mask(bias.detach(), min(case.mask.size, case.seqlen), is_causal=True)


def shifted_windows(batch: int, per_side: int, seqlen: int, device: torch.device) -> Tensor:
    """Return the mask (B, 1, L, L) of windows that are shifted by half a side: see "windows" in `MaskRule`."""
    window = torch.arange(batch, device=device) % per_side**2
    side = math.isqrt(seqlen - 1) + 1
    token = torch.arange(seqlen, device=device)

    def beyond(window_place: Tensor, token_place: Tensor) -> Tensor:
        """Return (B, L), whether a token of a window at the border lies beyond the border."""
        return (window_place[:, None] == per_side - 1) & (token_place >= side - side // 2)

    region = 2 * beyond(window // per_side, token // side) + beyond(window % per_side, token % side).int()
    return (region[:, None, :, None] == region[:, None, None, :]).contiguous()


class Counts(NamedTuple):
    """The pairs that a call allows, causality included, over batch and query heads."""

    pairs: int
    density: float
    active_tiles: float  # fraction of the 128 x 128 tiles in which something is allowed
    empty_rows: int


def count(inputs: Inputs) -> Counts:
    """Count the allowed pairs in the dense mask, by plain PyTorch: no kernel under test has a part in it."""
    (batch, _, heads, _), allowed = inputs.q.shape, inputs.allowed()
    seqlen_q, seqlen_k = inputs.lengths
    if allowed is None:
        return Counts(batch * heads * seqlen_q * seqlen_k, 1.0, 1.0, 0)
    copies = batch * heads // (allowed.shape[0] * allowed.shape[1])
    stats = masks.mask_stats(allowed, TILE)
    pairs = copies * int(allowed.sum(dtype=torch.int64))
    return Counts(pairs, stats.density, stats.active_tile_fraction, copies * stats.empty_rows)
