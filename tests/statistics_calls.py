"""Calls of `flash_dmattn.statistics` over lists, drawn at random, and their oracle; and a script for Triton kernels.

The script runs on a GPU, or without one in Triton's interpreter.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    import interpreter  # which decides that Triton interprets

from cases import DEVICE, Inputs
from torch import Tensor

from flash_dmattn import Sequences, attention, statistics
from flash_dmattn.biases import ListBias
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import formula


@dataclass(frozen=True)
class ListCall:
    """A call over lists; `bias` is None, "tensor", "query", "values" or "both", with values for lists or queries."""

    number: int
    dtype: torch.dtype
    batch: int
    list_batch: int
    seqlen_q: int
    seqlen_k: int
    heads_k: int
    group: int
    list_heads: int
    block_q: int
    block_k: int
    places: int
    is_causal: bool
    softcap: float
    has_sink: bool
    bias: str | None
    value_heads: int
    by_query: bool
    offset: float

    @property
    def heads(self) -> int:
        return self.heads_k * self.group

    @property
    def rows(self) -> int:
        return -(-self.seqlen_q // self.block_q)

    def index(self) -> Tensor:
        """Entries with blocks named twice, -1 anywhere, and hidden ones; one list has none."""
        generator = torch.Generator().manual_seed(self.number)
        shape = (self.list_batch, self.list_heads, self.rows, self.places)
        index = torch.randint(-1, -(-self.seqlen_k // self.block_k), shape, generator=generator)
        index[:, :, self.rows // 2] = -1
        return index.to(DEVICE)

    def build(self) -> tuple[Inputs, PreparedMask, Any]:
        """Draw the tensors, the lists and the bias."""
        generator = torch.Generator().manual_seed(self.number)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, self.dtype)

        q = normal(self.batch, self.heads, self.seqlen_q, 8).transpose(1, 2) + self.offset
        k = normal(self.batch, self.seqlen_k, self.heads_k, 8) + self.offset
        mask = PreparedMask.from_lists(
            self.index(), seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k, is_causal=self.is_causal,
            block_size=(self.block_q, self.block_k),
        )  # fmt: skip
        rows = self.seqlen_q if self.by_query else self.rows
        values = normal(self.list_batch, self.value_heads, rows, self.places)
        own = normal(1, self.heads, self.seqlen_q, 1 if self.bias == "query" or self.block_k > 1 else self.seqlen_k)
        made = {"tensor": own, "query": own, "values": ListBias(values), "both": ListBias(values, own)}
        sink = normal(self.heads) if self.has_sink else None
        return Inputs(q, k, k, None, None, q, None, sink), mask, made.get(self.bias or "")


def listed(number: int) -> ListCall:
    """Return the call of a number."""
    rng = random.Random(f"lists {number}")
    batch, heads_k, group = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 2, 3))
    list_heads = rng.choice((1, 1, heads_k, heads_k * group))
    value_heads = rng.choice((1, heads_k, heads_k * group))
    return ListCall(
        number,
        rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
        batch,
        rng.choice((1, batch)),
        rng.choice((1, 4, 7, 10)),
        rng.choice((1, 6, 13)),
        heads_k,
        group,
        list_heads,
        rng.choice((1, 1, 3)),
        rng.choice((1, 1, 4)),
        rng.choice((1, 3, 5)),
        rng.random() < 0.5,
        rng.choice((0.0, 2.0)),
        rng.random() < 0.4,
        rng.choice((None, "tensor", "query", "values", "both")),
        value_heads,
        rng.random() < 0.5,
        rng.choice((0.0, 0.0, 2.0)),
    )


def exact_list_sums(case: ListCall, weights: Tensor) -> Tensor:
    """The sums by p itself in fp64."""
    return _list_sums(case, weights, torch.float64)


def plain_list_sums(case: ListCall, weights: Tensor) -> Tensor:
    """The sums by p of plain PyTorch in the dtype of the call."""
    return _list_sums(case, weights, case.dtype)


def _list_sums(case: ListCall, weights: Tensor, dtype: torch.dtype) -> Tensor:
    inputs, mask, bias = case.build()
    x = inputs.to(dtype)
    if isinstance(bias, ListBias):
        wide = torch.promote_types(dtype, torch.float32)
        bias = ListBias(*(None if t is None else t.to(wide) for t in bias)).dense(mask)
    elif bias is not None:
        bias = bias.to(dtype)
    s, _ = formula.scores(x.q, x.k, mask.dense(), bias, False, 8**-0.5, case.softcap, None)
    p = formula.softmax(s, x.sink)[0].flatten(1, 2) * weights.to(s.dtype).unsqueeze(-1)
    p = p.unflatten(1, (case.list_heads, -1)).sum(2)  # (B, Hm, Lq, Lk)
    index, sums = case.index(), p.new_zeros(case.batch, case.list_heads, case.rows, case.places)
    for b, h, row, place in torch.cartesian_prod(*map(torch.arange, sums.shape)).view(-1, 4).tolist():
        own = index[b % case.list_batch, h, row].tolist()
        key = own[place]
        if key >= 0 and key not in own[:place]:
            rows, keys = (slice(n * size, (n + 1) * size) for n, size in ((row, case.block_q), (key, case.block_k)))
            sums[b, h, row, place] = p[b, h, rows, keys].sum()
    return sums


def _causal(q: Tensor, k: Tensor) -> Tensor:
    """Return p (1, Hk, G, Lq, Lk) of a causal call."""
    s, _ = formula.scores(q, k, None, None, True, q.shape[-1] ** -0.5, 0.0, None)
    return formula.softmax(s)[0]


def on_triton() -> int:
    """Compare sums on the Triton kernels with p of the formula; returns the exit status."""
    from accuracy import error, limits_of
    from outcomes import outcome_of, report

    interprets = DEVICE == "cpu"
    if interprets:
        interpreter.admit_cpu()
        interpreter.guard_outputs()

    def check_keys(dtype: torch.dtype, heads: Any, has_bias: bool, has_sink: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, n, h, 16, generator=generator).to(DEVICE, dtype) for n, h in ((20, 4), (40, 2)))
        bias = torch.randn(1, 4, 20, 40, generator=generator).to(DEVICE, dtype) if has_bias else None
        weights = torch.rand(1, 20, 4, generator=generator).to(DEVICE).mT
        shared: dict[str, Any] = {"is_causal": True, "softcap": 2.0}
        shared["sink"] = torch.zeros(4, device=DEVICE) if has_sink else None
        exact = [None if x is None else x.double() for x in (q, k, bias)]
        s, _ = formula.scores(exact[0], exact[1], None, exact[2], True, 0.25, 2.0, None)  # type: ignore[arg-type]
        p = formula.softmax(s, shared["sink"])[0].flatten(1, 2)
        _, lse = attention(q, k, k, None, bias, return_lse=True, backend="triton", **shared)
        sums = statistics.key_sums(q, k, lse, None, bias, weights=weights, heads=heads, backend="triton", **shared)
        wanted = (p * weights.unsqueeze(-1)).sum(2)
        wanted = wanted if heads == "q" else wanted.unflatten(1, (2, 2)).sum(2)
        judge(sums, wanted, dtype, has_bias)

    def check_lists(dtype: torch.dtype, number: int) -> None:
        case = ListCall(
            number, dtype, 1, 1, 6, 40, 1, 2, 1, 1, 1, 7, True, 0.0, number % 2 == 0, (None, "values")[number % 2],
            2, False, 0.0,
        )  # fmt: skip
        x, mask, bias = case.build()
        _, lse = attention(x.q, x.k, x.v, mask, bias, return_lse=True, sink=x.sink, backend="triton")
        sums = statistics.list_sums(x.q, x.k, lse, mask, bias, sink=x.sink, backend="triton")
        judge(sums, exact_list_sums(case, torch.ones_like(lse)), dtype, False)

    def check_sequences(dtype: torch.dtype) -> None:
        """Check sequences of 0, 1 and 33 keys."""
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(34, h, 16, generator=generator).to(DEVICE, dtype) for h in (4, 2))
        edges = torch.tensor([0, 0, 1, 34], device=DEVICE)
        shared: dict[str, Any] = {"sequences": Sequences.packed(edges, max_seqlen_q=33), "is_causal": True}
        _, lse = attention(q, k, k, return_lse=True, backend="triton", **shared)
        sums = statistics.key_sums(q, k, lse, backend="triton", **shared)
        p = [_causal(q[None, rows].double(), k[None, rows].double()) for rows in (slice(0, 1), slice(1, 34))]
        judge(sums, torch.cat([each.sum((2, 3))[0] for each in p], -1), dtype, False)

    def check_lists_of_keys(dtype: torch.dtype) -> None:
        case = ListCall(0, dtype, 1, 1, 6, 40, 1, 2, 1, 1, 1, 7, True, 0.0, False, None, 2, False, 0.0)
        x, mask, _ = case.build()
        _, lse = attention(x.q, x.k, x.v, mask, return_lse=True, backend="triton")
        sums = statistics.key_sums(x.q, x.k, lse, mask, backend="triton")
        s, _ = formula.scores(x.q.double(), x.k.double(), mask.dense(), None, False, 8**-0.5, 0.0, None)
        judge(sums, formula.softmax(s)[0].sum((2, 3)), dtype, True)

    def judge(sums: Tensor, wanted: Tensor, dtype: torch.dtype, is_rounded: bool) -> None:
        # Results are in fp32, or rounded as a gradient of v is.
        limit = torch.finfo(dtype).eps if is_rounded else limits_of(torch.float32)[1] * 10
        off = error(sums, wanted)
        assert off < max(limit, 1e-6), f"off by {off}, and {limit} is allowed"

    keys = [
        (torch.float32, "k", False, True),
        (torch.float32, "q", False, False),
        (torch.float16, "q", False, False),
        (torch.float32, "k", True, True),
        (torch.float16, "q", True, False),
        (torch.float16, "k", True, False),
    ]
    lists = [(torch.float32, 0), (torch.float32, 1), (torch.float16, 2), (torch.float16, 3)]
    checks: list[tuple[Any, Any]] = [(check_keys, arguments) for arguments in keys]
    checks += [(check_lists, arguments) for arguments in lists]
    checks += [(check_sequences, (torch.float16,)), (check_lists_of_keys, (torch.float16,))]

    def run(check: Any, arguments: Any) -> None:
        if interprets:
            interpreter.set_up()
        check(*arguments)
        if interprets:
            interpreter.assert_margins()

    return report(outcome_of(partial(run, *each), f"{each[1]}") for each in checks)


if __name__ == "__main__":
    sys.exit(on_triton())
