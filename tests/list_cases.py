"""Calls of the kernels of attention over lists, drawn at random or by hand, and the oracle of the suite for them.

The oracle takes the mask and the bias that lists stand for (`tests/test_lists.py` has these entry by entry).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from accuracy import gross, norm_of, oracle
from cases import ALL, Case, Inputs
from torch import Tensor

from flash_dmattn.biases import ListBias
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import formula
from flash_dmattn.reference.entropy import SentEntropy, joined_gradients
from flash_dmattn.triton_kernels.list_calls import ListFlags, ListNeeds, list_backward, list_forward

EVERY = ListNeeds(True, True, True, True, True)
ROWS = ("max_scores", "entropy")
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
    strided: bool = False
    seed: int = 0
    aux: bool = False  # whether it has the largest scores and the entropies of rows, which have a gradient

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
        flags = ListFlags(scale, self.softcap, self.window, right, self.queries, self.keys_each, self.head_dim_v)
        return flags._replace(max_scores=self.aux, entropy=self.aux)

    def build(self) -> ListInputs:
        """Draw the tensors."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        def rows(heads: int, seqlen: int, dim: int) -> Tensor:
            if not self.strided:
                return normal(self.batch, heads, seqlen, dim)
            return normal(self.batch, seqlen, heads + 1, dim + 8)[:, :, 1:, :dim].transpose(1, 2)

        shape = (self.list_batch, self.list_heads, self.rows, self.most)
        index = torch.randint(-1, self.blocks, shape, generator=generator)
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
        lists = self.listed(index)
        return ListInputs(
            q=rows(self.heads, self.seqlen_q, self.head_dim),
            k=rows(self.heads_k, self.seqlen_k, self.head_dim),
            v=None if self.latent else rows(self.heads_k, self.seqlen_k, self.head_dim_v),
            lists=lists if self.order == "given" else self.listed(lists.tensors[0].long()),
            values=None if self.values is None else normal(*(sizes[x] for x in self.values), self.most),
            bias=normal(1, self.bias_heads, 1, self.seqlen_k) if self.bias_heads else None,
            sink=normal(self.heads) if self.sink else None,
            dout=rows(self.heads, self.seqlen_q, self.head_dim_v),
            dlse=normal(self.batch, self.heads, self.seqlen_q) if self.dlse else None,
            dentropy=normal(self.batch, self.heads, self.seqlen_q) if self.aux else None,
        )

    def listed(self, index: Tensor) -> PreparedMask:
        """Make the mask of an index."""
        band = {"is_causal": self.is_causal, "window_size": (self.window, -1)}
        sizes = {"seqlen_q": self.seqlen_q, "seqlen_k": self.seqlen_k, "block_size": (self.queries, self.keys_each)}
        return PreparedMask.from_lists(index, **sizes, **band)

    def operands(self, x: ListInputs) -> tuple[Tensor | None, ...]:
        """The tensors of `x` as kernels take them: slots only if entries have another order."""
        keys, count, slots = x.lists.tensors
        return x.q, x.k, x.v, keys, count, slots if self.order == "given" else None, x.values, x.bias, x.sink


@dataclass(frozen=True)
class ListInputs:
    """The tensors of a call, (B, H, L, D), and its lists."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    lists: PreparedMask
    values: Tensor | None
    bias: Tensor | None
    sink: Tensor | None
    dout: Tensor
    dlse: Tensor | None
    dentropy: Tensor | None = None


def run(case: ListCase, x: ListInputs, needs: ListNeeds = EVERY, **more: Any) -> dict[str, Tensor | None]:
    """All results of the kernels."""
    round_out, own = more.pop("round_out", lambda out: out), case.operands(x)
    out, lse, *rows = list_forward(*own, case.flags)
    dlse = x.dlse
    if x.dentropy is not None:
        dlse, dentropy = joined_gradients((rows[1], x.dentropy), dlse, lse)
        more["sent"] = SentEntropy(dentropy, x.dlse)
    gradients = list_backward(x.dout, dlse, *own, round_out(out), lse, case.flags, needs, **more)
    return dict(zip((*NAMES, *ROWS[: len(rows)]), (out, lse, *gradients, *rows), strict=True))


def exact(case: ListCase, x: ListInputs, constant: float = 0.0) -> dict[str, Tensor | None]:
    """All results in fp64, and how large the terms are that cancel in gradients.

    `constant` is a number in all scores and sinks: scores are rounded to fp32 with it.
    """
    values = None if x.values is None else x.values.double().requires_grad_()
    bias = None if values is None else by_head(case, ListBias(values).dense(x.lists))
    if x.bias is not None:
        bias = by_head(case, x.bias.double()) + (0.0 if bias is None else bias)
    if bias is not None:
        bias = bias.expand(case.batch, case.heads, case.seqlen_q, case.seqlen_k)
    v = x.k[..., : case.head_dim_v] if x.v is None else x.v
    q, k, v, dout = (y.transpose(1, 2) for y in (x.q, x.k, v, x.dout))
    sink = None if x.sink is None else x.sink.double() - constant
    added = None if bias is None else bias.detach()
    if constant and added is not None:
        alone = formula.scores(q.double(), k.double(), None, None, False, case.flags.scale, case.softcap, None)[0]
        alone = alone.flatten(1, 2)
        added = (alone + added).float() - constant - alone
    inputs = Inputs(q, k, v, by_head(case, x.lists.dense()), added, dout, x.dlse, sink, x.dentropy)
    names = ("num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "batch", "head_dim")
    sizes = dict(zip(names, (case.heads, case.heads_k, case.seqlen_q, case.seqlen_k, case.batch, case.head_dim)))
    dense = Case(**sizes, softmax_scale=case.flags.scale, softcap=case.softcap, needs_grad=(*ALL, "sink"))
    dense = dense.with_(aux=ROWS if case.aux else ())
    results, terms = oracle(dense, inputs), gross(dense, inputs)
    results["lse"] = results["lse"] + constant
    for each in (results, terms):
        d = {name: each.pop(name, None) for name in ("dq", "dk", "dv", "dbias")}
        if x.v is None:
            d["dk"][..., : case.head_dim_v] += d.pop("dv")
        for name in ("dq", "dk", "dv"):
            each[name] = None if d.get(name) is None else d[name].transpose(1, 2)
        given = values is not None and d["dbias"] is not None
        each["dvalues"] = torch.autograd.grad(bias, values, d["dbias"], retain_graph=True)[0] if given else None
    results["out"] = results["out"].transpose(1, 2)
    return {**results, **{f"size of {name}": size for name, size in terms.items()}}


def by_head(case: ListCase, x: Tensor) -> Tensor:
    """A mask or bias with a part for each query head."""
    return x.repeat_interleave(case.heads // x.shape[1], 1)


def differences(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> dict[str, float]:
    """By name, the error of a result relative to its norm.

    A result that is zero in exact arithmetic is measured against the terms that cancel, as everywhere in the suite: so
    are all gradients of scores of a row of one key.
    """
    errors = {}
    for name, x in got.items():
        y = want.get(name)
        assert (x is None) == (y is None), name
        if x is None or y is None:
            continue
        assert x.shape == y.shape, (name, x.shape, y.shape)
        assert torch.equal(x == -math.inf, y == -math.inf), f"{name}: other empty rows"
        finite = y > -math.inf
        assert x[finite].isfinite().all(), f"{name} is not finite"  # the maximum of a row with some NaN is undefined
        norm = norm_of(y, want.get(f"size of {name}"))
        errors[name] = (x[finite].double() - y[finite]).norm().item() / max(norm, 1.0)
    return errors


def draw(number: int) -> ListCase:
    """A random call."""
    r = random.Random(number)
    keys_each, queries = r.choice((1, 1, 1, 16, 32, 64)), r.choice((1, 1, 1, 2, 16))
    latent = r.random() < 0.15
    heads_k, group = 1 if latent else r.choice((1, 2, 3)), r.choice((1, 2, 3, 4, 8, 20))
    head_dim = r.choice((16, 32, 24, 48, 20))
    head_dim_v = r.choice((head_dim, head_dim, 16))
    if latent:
        head_dim, head_dim_v = r.choice(((48, 32), (24, 16), (16, 16), (20, 16), (20, 12), (272, 256)))
        latent = head_dim <= 256 or number % 2 == 0  # wide heads may have values apart
    batch, seqlen_q = r.choice((1, 1, 2)), r.choice((1, 5, 12, 19))
    seqlen_k = seqlen_q + r.choice((0, 13, 30, -4))
    values = r.choice((None, *((b, h, rows) for b in ("1", "B") for h in ("1", "Hk", "Hq") for rows in ("R", "Lq"))))
    return ListCase(
        batch=batch,
        heads_k=heads_k,
        group=group,
        seqlen_q=seqlen_q,
        seqlen_k=max(seqlen_k, 1),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        most=r.choice((1, 3, 9) if keys_each > 1 else (1, 4, 17, 40)),
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
        strided=r.random() < 0.3,
        seed=number,
        aux=random.Random(f"aux {number}").random() < 0.4,
    )
