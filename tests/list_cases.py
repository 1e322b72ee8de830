"""Calls of the kernels of attention over lists, drawn at random or by hand, and the same by the dense formula."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_dmattn.triton_kernels.list_calls import ListFlags, ListNeeds, list_backward, list_forward

EVERY = ListNeeds(True, True, True, True, True)
NAMES = ("out", "lse", "dq", "dk", "dv", "dvalues", "dsink")


@dataclass(frozen=True)
class ListCase:
    """A call by what decides it. The dims of values have letters as in `Case`, and R is the number of rows of lists."""

    batch: int = 1
    heads_k: int = 2
    group: int = 4
    seqlen_q: int = 24
    seqlen_k: int = 40
    head_dim: int = 16
    head_dim_v: int = 16
    most: int = 7
    queries: int = 1
    keys_each: int = 1
    list_batch: int = 1  # entries of the lists
    list_heads: int = 1
    values: tuple[str, str, str] | None = ("B", "Hk", "R")
    bias_heads: int = 0  # of a bias per key, 0: none
    is_causal: bool = True
    window: int = -1
    softcap: float = 0.0
    sink: bool = False
    dlse: bool = True
    latent: bool = False
    order: str = "given"  # of the entries: "given", with slots, or "ascending", without
    lists: str = "random"  # or "empty", "one key", "first block"
    dtype: torch.dtype = torch.float32
    strided: bool = False
    seed: int = 0

    def with_(self, **changes: Any) -> ListCase:
        """The same call but for some changes."""
        return replace(self, **changes)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.group * self.heads_k

    @property
    def rows(self) -> int:
        """Rows of lists."""
        return -(-self.seqlen_q // self.queries)

    @property
    def blocks(self) -> int:
        """Blocks of keys."""
        return -(-self.seqlen_k // self.keys_each)

    @property
    def flags(self) -> ListFlags:
        """The numbers of the call, as kernels get them."""
        right = 0 if self.is_causal else -1
        scale = 1.3 * self.head_dim**-0.5
        return ListFlags(scale, self.softcap, self.window, right, self.queries, self.keys_each, self.head_dim_v)

    def build(self, device: str = "cpu") -> ListInputs:
        """Draw the tensors."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        def rows(heads: int, seqlen: int, dim: int) -> Tensor:
            if not self.strided:
                return normal(self.batch, heads, seqlen, dim)
            return normal(self.batch, seqlen, heads + 1, dim + 8)[:, :, 1:, :dim].transpose(1, 2)

        lists = (self.list_batch, self.list_heads, self.rows)
        index = torch.randint(-1, self.blocks, (*lists, self.most), generator=generator)
        if self.lists == "empty":
            index[:] = -1
        elif self.lists == "one key":
            index[:] = self.blocks // 2
        elif self.lists == "first block":
            index[..., -1] = 0
        else:
            index[:, :, self.rows // 3] = -1  # a row without keys
            index[:, :, self.rows // 2] = self.blocks - 1  # one key, which causality may forbid
        sizes = {"B": self.batch, "Hk": self.heads_k, "Hq": self.heads, "Lq": self.seqlen_q, "R": self.rows, "1": 1}
        inputs = ListInputs(
            q=rows(self.heads, self.seqlen_q, self.head_dim),
            k=rows(self.heads_k, self.seqlen_k, self.head_dim),
            v=None if self.latent else rows(self.heads_k, self.seqlen_k, self.head_dim_v),
            keys=torch.empty(0),
            count=torch.empty(0),
            slots=None,
            values=None if self.values is None else normal(*(sizes[x] for x in self.values), self.most),
            bias=normal(1, self.bias_heads, 1, self.seqlen_k) if self.bias_heads else None,
            sink=normal(self.heads, dtype=torch.float32) if self.sink else None,
            dout=rows(self.heads, self.seqlen_q, self.head_dim_v),
            dlse=normal(self.batch, self.heads, self.seqlen_q, dtype=torch.float32) if self.dlse else None,
        )
        keys, slots, count = self.canonical(index)
        inputs = replace(inputs, keys=keys, slots=slots if self.order == "given" else None, count=count)
        moved = {name: x.to(device) for name, x in vars(inputs).items() if x is not None}
        return replace(inputs, **moved)

    def canonical(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Entries ascending, each once, then -1, without what no query of a row sees; their slots, and how many."""
        beyond = 2**40
        last = torch.full((self.rows,), self.seqlen_k - 1)
        if self.is_causal:
            last = ((torch.arange(self.rows) + 1) * self.queries).clamp(max=self.seqlen_q) - 1
            last = last + self.seqlen_k - self.seqlen_q
        first = torch.zeros(self.rows, dtype=torch.long)
        if self.window >= 0:
            first = torch.arange(self.rows) * self.queries + self.seqlen_k - self.seqlen_q - self.window
        bad = (index < 0) | (index * self.keys_each > last[:, None]) | ((index + 1) * self.keys_each <= first[:, None])
        packed = torch.where(bad, beyond, index * self.most + torch.arange(self.most)).sort(-1).values
        again = torch.zeros_like(bad)
        again[..., 1:] = packed[..., 1:] // self.most == packed[..., :-1] // self.most
        packed = torch.where(again, beyond, packed).sort(-1).values
        dropped = packed == beyond
        keys, slots = (torch.where(dropped, -1, x).int() for x in (packed // self.most, packed % self.most))
        return keys, slots, (~dropped).sum(-1).int()


@dataclass(frozen=True)
class ListInputs:
    """The tensors of a call, (B, H, L, D)."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    keys: Tensor
    count: Tensor
    slots: Tensor | None
    values: Tensor | None
    bias: Tensor | None
    sink: Tensor | None
    dout: Tensor
    dlse: Tensor | None


def run(case: ListCase, x: ListInputs, needs: ListNeeds = EVERY, **more: Any) -> dict[str, Tensor | None]:
    """All results of the kernels."""
    tile, round_out = more.pop("tile", None), more.pop("round_out", lambda out: out)
    out, lse = list_forward(x.q, x.k, x.v, x.keys, x.count, x.slots, x.values, x.bias, x.sink, case.flags, tile=tile)
    own = (x.q, x.k, x.v, x.keys, x.count, x.slots, x.values, x.bias, x.sink, round_out(out), lse, case.flags, needs)
    return dict(zip(NAMES, (out, lse, *list_backward(x.dout, x.dlse, *own, **more)), strict=True))


def dense(
    case: ListCase,
    x: ListInputs,
    dtype: torch.dtype,
    matmul: torch.dtype | None = None,
    rounded: Tensor | None = None,
    constant: float = 0.0,
) -> dict[str, Tensor | None]:
    """All results of the dense formula by autograd, in a dtype.

    Args:
        matmul: the dtype of products.
        rounded: an out whose rounding reaches gradients by way of delta, as it does in kernels.
        constant: a number in all scores and sinks, for which scores are rounded to fp32.
    """
    matmul = matmul or dtype

    def leaf(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.detach().to(dtype).requires_grad_()

    q, k, v, values, sink = (leaf(t) for t in (x.q, x.k, x.v, x.values, x.sink))
    assert q is not None and k is not None
    value_rows = k[..., : case.head_dim_v] if v is None else v
    keys_in, values_in = (t.repeat_interleave(case.group, 1) for t in (k, value_rows))
    device = q.device

    # Which pairs there are, and the slot of each: (Bm, Hm, Lq, blocks), then by key.
    slots = torch.arange(case.most, device=device).expand_as(x.keys) if x.slots is None else x.slots.long()
    full = (*x.keys.shape[:3], case.blocks + 1)
    there = torch.arange(case.most, device=device) < x.count[..., None]
    at = torch.where(there, x.keys.long(), case.blocks)
    slot = torch.full(full, -1, device=device).scatter(3, at, torch.where(there, slots, -1))[..., :-1]
    slot = slot.repeat_interleave(case.queries, 2)[:, :, : case.seqlen_q]
    slot = slot.repeat_interleave(case.keys_each, 3)[..., : case.seqlen_k]
    slot = slot.repeat_interleave(case.heads // slot.shape[1], 1).expand(case.batch, -1, -1, -1)
    steps = torch.arange(case.seqlen_k, device=device) - torch.arange(case.seqlen_q, device=device)[:, None]
    steps = steps - (case.seqlen_k - case.seqlen_q)
    allowed = slot >= 0
    if case.is_causal:
        allowed = allowed & (steps <= 0)
    if case.window >= 0:
        allowed = allowed & (steps >= -case.window)

    s = torch.matmul(q.to(matmul), keys_in.to(matmul).mT).to(dtype) * case.flags.scale
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    if values is not None:
        own = values
        if own.shape[2] != case.seqlen_q:
            own = own.repeat_interleave(case.queries, 2)[:, :, : case.seqlen_q]
        own = own.repeat_interleave(case.heads // own.shape[1], 1).expand(case.batch, -1, -1, -1)
        s = s + own.gather(3, slot.clamp(min=0))
    if x.bias is not None:
        s = s + x.bias.to(dtype).repeat_interleave(case.heads // x.bias.shape[1], 1)
    if constant:
        s = s + (s.detach().float().to(dtype) - s.detach()) - constant
    scores = s
    s = s.masked_fill(~allowed, -math.inf)
    logits = s
    if sink is not None:
        sinks = (sink - constant)[None, :, None, None].expand(case.batch, -1, case.seqlen_q, 1)
        logits = torch.cat([s, sinks], -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1))
    out = torch.matmul(p.to(matmul), values_in.to(matmul))
    loss = (out.to(dtype) * x.dout.to(dtype)).sum()
    if x.dlse is not None:
        loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * x.dlse.to(dtype)).sum()
    loss.backward(retain_graph=True)
    if rounded is not None:
        moved = ((rounded.to(dtype) - out.detach()) * x.dout.to(dtype)).sum(-1)
        along = (p.detach()[..., : case.seqlen_k] * -moved.unsqueeze(-1)).masked_fill(~allowed, 0.0)
        torch.autograd.backward(scores, along, retain_graph=True)
        if sink is not None and sink.grad is not None:
            share = torch.exp(sink.detach()[:, None] - lse.detach())
            sink.grad -= (share * moved).sum((0, 2))
    results = {"out": out.detach(), "lse": lse.detach() + constant, "dq": q.grad, "dk": k.grad}
    others = {"dv": v, "dvalues": values, "dsink": sink}
    results.update({name: None if t is None else t.grad for name, t in others.items()})

    # How large the terms are that cancel in gradients of scores, and in what is made of these.
    with torch.no_grad():
        dp = torch.matmul(x.dout.to(dtype).abs(), values_in.abs().mT)
        row = (p * dp).sum(-1)
        if x.dlse is not None:
            row += x.dlse.abs().to(dtype)
        ds = p * (dp + row.unsqueeze(-1))
        results["size of dq"] = abs(case.flags.scale) * torch.matmul(ds, keys_in.abs())
        by_head = abs(case.flags.scale) * torch.matmul(ds.mT, q.abs())
        results["size of dk"] = by_head.unflatten(1, (-1, case.group)).sum(2)
        if sink is not None:
            results["size of dsink"] = (torch.exp((sink - constant)[:, None] - lse) * row).sum((0, 2))
    if values is not None:
        results["size of dvalues"] = torch.autograd.grad(scores, values, ds, retain_graph=True)[0]
    return results


def differences(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> dict[str, float]:
    """By name, the error of a result beside its norm.

    A result that is zero in exact arithmetic is measured against the terms that cancel, as everywhere in the suite: so
    are all gradients of scores of a row of one key.
    """
    errors = {}
    for name, x in got.items():
        exact = want[name]
        assert (x is None) == (exact is None), name
        if x is None or exact is None:
            continue
        assert x.shape == exact.shape, (name, x.shape, exact.shape)
        x, exact = x.double(), exact.double()
        assert torch.equal(x == -math.inf, exact == -math.inf), f"{name}: other empty rows"
        finite = exact > -math.inf
        assert x[finite].isfinite().all(), f"{name} is not finite"  # a NaN beside numbers is nobody's maximum
        norm, size = exact[finite].norm(), want.get("size of " + name)
        if size is not None and norm <= 1e-12 * size.norm():
            norm = size.double().norm()
        errors[name] = ((x[finite] - exact[finite]).norm() / norm.clamp(min=1.0)).item()
    return errors


def draw(number: int, dtype: torch.dtype = torch.float32, large: bool = False) -> ListCase:
    """A random call; with `large` of sizes that a GPU takes."""
    r = random.Random(number)
    keys_each = r.choice((1, 1, 1, 16, 32, 64, 128) if large else (1, 1, 1, 16, 32, 64))
    queries = r.choice((1, 1, 1, 16, 64) if large else (1, 1, 1, 2, 16))
    latent = r.random() < 0.15
    heads_k = 1 if latent else r.choice((1, 2, 3))
    group = r.choice((1, 2, 3, 4, 8, 16, 24, 32, 64, 128) if large else (1, 2, 3, 4, 8, 20))
    head_dim = r.choice((64, 128, 128, 192, 256, 80) if large else (16, 32, 24, 48, 20))
    head_dim_v = r.choice((head_dim, head_dim, 64 if large else 16))
    if latent:
        head_dim, head_dim_v = r.choice(
            ((576, 512), (192, 128)) if large else ((48, 32), (24, 16), (16, 16), (20, 16), (20, 12), (272, 256))
        )
        latent = head_dim <= 256 or number % 2 == 0  # wide heads may have values apart
    batch = r.choice((1, 1, 2))
    seqlen_q = r.choice((1, 33, 130, 257) if large else (1, 5, 12, 19))
    seqlen_k = seqlen_q + r.choice((0, 100, 700, -20) if large else (0, 13, 30, -4))
    values = r.choice((None, *((b, h, rows) for b in ("1", "B") for h in ("1", "Hk", "Hq") for rows in ("R", "Lq"))))
    return ListCase(
        batch=batch,
        heads_k=heads_k,
        group=group,
        seqlen_q=seqlen_q,
        seqlen_k=max(seqlen_k, 1),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        most=r.choice(
            (1, 5, 32, 64, 200) if large and keys_each == 1 else (1, 3, 9) if keys_each > 1 else (1, 4, 17, 40)
        ),
        queries=queries,
        keys_each=keys_each,
        list_batch=r.choice((1, batch)),
        list_heads=r.choice((1, heads_k)),
        values=values,
        bias_heads=r.choice((0, 0, 1, heads_k, heads_k * group)),
        is_causal=r.random() < 0.6,
        window=r.choice((-1, -1, -1, seqlen_q // 2)),
        softcap=r.choice((0.0, 0.0, 0.0, 2.0)),
        sink=r.random() < 0.3,
        dlse=r.random() < 0.5,
        latent=latent,
        order=r.choice(("given", "ascending")),
        lists=r.choice(("random", "random", "random", "first block", "one key", "empty")),
        dtype=dtype,
        strided=r.random() < 0.3,
        seed=number,
    )
