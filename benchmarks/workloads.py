"""The workloads of `benchmarks.peers`: their shapes, their inputs from a seed, and the pairs that they allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flash_dmattn import explain_problem, masks
from flash_dmattn.problem import AttentionProblem

TILE = 128
BLOCK_DENSITY = 0.1


class MaskRule(NamedTuple):
    """How a mask is made.

    "keys": the `size` highest scored keys, the same for every query. "topk": for every query the `size` highest scored
    keys of its causal prefix. "blocks": tiles of `size`, each kept with probability 0.1, and the diagonal. "band": keys
    at most `size` away.
    """

    kind: Literal["keys", "topk", "blocks", "band"]
    size: int


@dataclass(frozen=True)
class Workload:
    """One attention problem to be timed, in bf16, with the gradients of q, k, v and, where it has one, of the bias.

    Attributes:
        bias: "bhll" (B,Hq,L,L), "1hll" (1,Hq,L,L), "row" (B,Hk,1,L), or None. A row also is the score that "keys" and
            "topk" masks select by.
        launch_bound: so small that the host's launches would be timed: it is timed as a CUDA graph.
        quick: one of the few that `--quick` keeps.
    """

    name: str
    batch: int
    heads: int
    heads_k: int
    seqlen: int
    head_dim: int
    is_causal: bool = False
    mask: MaskRule | None = None
    bias: Literal["bhll", "1hll", "row"] | None = None
    launch_bound: bool = False
    quick: bool = False

    @property
    def shape(self) -> str:
        return f"{self.batch},{self.heads},{self.heads_k},{self.seqlen},{self.head_dim}"

    @property
    def mask_shape(self) -> tuple[int, int, int, int] | None:
        """(B,Hk,1,L) of "keys", (1,1,L,L) of "band", else (B,Hk,L,L)."""
        if self.mask is None:
            return None
        if self.mask.kind == "band":
            return 1, 1, self.seqlen, self.seqlen
        return self.batch, self.heads_k, 1 if self.mask.kind == "keys" else self.seqlen, self.seqlen

    @property
    def bias_shape(self) -> tuple[int, int, int, int] | None:
        """As `bias` says."""
        if self.bias == "row":
            return self.batch, self.heads_k, 1, self.seqlen
        if self.bias is None:
            return None
        return self.batch if self.bias == "bhll" else 1, self.heads, self.seqlen, self.seqlen

    def problem(self, device: str = "sm_90") -> AttentionProblem:
        """The call as the rules of a backend see it."""
        q = (self.batch, self.seqlen, self.heads, self.head_dim)
        shapes = {"kv_heads": self.heads_k, "mask": self.mask_shape, "bias": self.bias_shape}
        flags = {"is_causal": self.is_causal, "grad": True, "bias_grad": True}
        return explain_problem(q, dtype="bf16", device=device, **shapes, **flags).problem

    @property
    def what(self) -> str:
        """In words, for tables."""
        parts = ["causal"] if self.is_causal else []
        if self.mask is not None:
            kind, size = self.mask
            dims = {"keys": "(B,Hk,1,L)", "band": "(1,1,L,L)"}.get(kind, "(B,Hk,L,L)")
            said = {
                "keys": f"{size} keys kept",
                "topk": f"top {size} per query",
                "blocks": f"{size}-blocks, density {BLOCK_DENSITY}",
                "band": f"band of ±{size}",
            }
            parts.append(f"mask {dims}: {said[kind]}")
        if self.bias is not None:
            parts.append({"bhll": "bias (B,Hq,L,L)", "1hll": "bias (1,Hq,L,L)", "row": "bias (B,Hk,1,L)"}[self.bias])
        return ", ".join(parts) or "full"


def _topk(seqlen: int, quick: bool = False) -> Workload:
    rule = MaskRule("topk", 1024)
    return Workload(f"topk-{seqlen // 1024}k", 1, 16, 4, seqlen, 128, True, rule, "row", quick=quick)


def _keys(seqlen: int, quick: bool = False) -> Workload:
    rule = MaskRule("keys", 1024)
    return Workload(f"keys-{seqlen // 1024}k", 1, 2, 1, seqlen, 64, True, rule, "row", launch_bound=True, quick=quick)


WORKLOADS = (
    Workload("dense-d64", 4, 32, 32, 4096, 64),
    Workload("dense-d128", 4, 16, 16, 4096, 128, quick=True),
    Workload("causal-d64", 1, 32, 32, 16384, 64, True),
    Workload("causal-d128", 1, 16, 16, 16384, 128, True),
    Workload("causal-gqa", 4, 32, 8, 4096, 128, True, quick=True),
    Workload("bias-bhll-d64", 4, 16, 16, 2048, 64, bias="bhll"),
    Workload("bias-bhll-d128", 1, 16, 16, 4096, 128, bias="bhll"),
    Workload("bias-1hll-d64", 8, 16, 16, 2048, 64, bias="1hll", quick=True),
    _keys(2048),
    _keys(8192, quick=True),
    _keys(32768),
    _topk(8192, quick=True),
    _topk(16384),
    Workload("blocks", 1, 16, 4, 16384, 128, mask=MaskRule("blocks", TILE), quick=True),
    Workload("band", 1, 16, 4, 16384, 128, mask=MaskRule("band", 1024), quick=True),
)


class Inputs(NamedTuple):
    """The tensors of one call: q, k, v, dout (B, L, H, D), a bool mask, a bias; q, k, v and bias take gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Tensor | None
    bias: Tensor | None
    is_causal: bool

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What takes a gradient, by the gradient's name."""
        named = {"dq": self.q, "dk": self.k, "dv": self.v, "dbias": self.bias}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.q.shape[2] // self.k.shape[2]

    def allowed(self) -> Tensor | None:
        """Mask and causality as one dense bool tensor (B | 1, Hk | 1, L, L), or None where everything is allowed."""
        seqlen = self.q.shape[1]
        allowed = self.mask
        if self.is_causal:
            place = torch.arange(seqlen, device=self.q.device)
            causal = (place <= place[:, None])[None, None]
            allowed = causal if allowed is None else allowed & causal
        return allowed if allowed is None else allowed.expand(-1, -1, seqlen, -1)


def make_inputs(workload: Workload, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random normal inputs; the same for every call."""
    w = workload
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, dout = normal(w.batch, w.seqlen, w.heads, w.head_dim), normal(w.batch, w.seqlen, w.heads, w.head_dim)
    k, v = normal(w.batch, w.seqlen, w.heads_k, w.head_dim), normal(w.batch, w.seqlen, w.heads_k, w.head_dim)
    row = normal(w.batch, w.heads_k, 1, w.seqlen)
    mask, bias = None, None
    if w.bias is not None:
        bias = (row.clone() if w.bias == "row" else normal(*w.bias_shape)).requires_grad_()
    if w.mask is not None:
        kind, size = w.mask
        if kind in ("keys", "topk"):
            mask = masks.topk_mask(row, size, is_causal=kind == "topk")
        elif kind == "band":
            mask = masks.sliding_window_mask(w.seqlen, w.seqlen, (size, size), device)
        else:
            tiles = -(-w.seqlen // size)
            chance = torch.rand(w.batch, w.heads_k, tiles, tiles, generator=generator, device=device)
            kept = (chance < BLOCK_DENSITY) | torch.eye(tiles, dtype=torch.bool, device=device)
            mask = masks.expand_blocks(kept, size, w.seqlen, w.seqlen)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return Inputs(q, k, v, dout, mask, bias, w.is_causal)


class Counts(NamedTuple):
    """What a call allows, causality included, over batch and query heads."""

    pairs: int
    density: float
    active_tiles: float  # fraction of the 128 x 128 tiles in which something is allowed
    empty_rows: int


def count(inputs: Inputs) -> Counts:
    """Count the allowed pairs in the dense mask, by plain PyTorch: no kernel under test has a part in it."""
    (batch, seqlen, heads, _), allowed = inputs.q.shape, inputs.allowed()
    if allowed is None:
        return Counts(batch * heads * seqlen * seqlen, 1.0, 1.0, 0)
    copies = batch * heads // (allowed.shape[0] * allowed.shape[1])
    stats = masks.mask_stats(allowed, TILE)
    pairs = copies * int(allowed.sum(dtype=torch.int64))
    return Counts(pairs, stats.density, stats.active_tile_fraction, copies * stats.empty_rows)
