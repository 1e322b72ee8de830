"""Calls of `flash_dmattn.statistics` over lists, drawn at random, and their oracle; and a script for Triton kernels.

The script runs on a GPU, or without one in Triton's interpreter.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    import interpreter  # which decides that Triton interprets

import draws
import sequence_calls
from accuracy import Results, failures_of, probabilities
from cases import DEVICE, MEANS, SIGNS, STEPS, Case, Inputs
from torch import Tensor

from flash_dmattn import attention, statistics
from flash_dmattn.biases import ListBias
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import formula

TRITON_CALLS = (*range(28), 60)  # the last one has no keys


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
    dim: int = 8

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

        q = normal(self.batch, self.heads, self.seqlen_q, self.dim).transpose(1, 2) + self.offset
        k = normal(self.batch, self.seqlen_k, self.heads_k, self.dim) + self.offset
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
    s, _ = formula.scores(x.q, x.k, mask.dense(), bias, False, case.dim**-0.5, case.softcap, None)
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


def judge(got: Tensor, exact: Tensor, plain: Tensor, sizes: Tensor, lse: Tensor, q: Tensor, told: str) -> None:
    """The rule of `accuracy.py` for one result. `sizes` has every term by its size."""
    results: tuple[Results, ...] = ({"dsums": got}, {"dsums": exact, "lse": lse}, {"dsums": plain})
    like = {"out": q, "dsums": torch.empty(exact.shape, dtype=lse.dtype)}
    failures = failures_of(*results, like, told, sizes={"dsums": sizes})
    assert not failures, f"{told}\n  " + "\n  ".join(failures.values())


def summed(p: Tensor, weights: Tensor, heads: str) -> Tensor:
    """Sums of p (B, Hk, G, Lq, Lk) over queries, (B, Hk or Hq, Lk)."""
    sums = (p * weights.unflatten(1, p.shape[1:3]).unsqueeze(-1)).sum(3)
    return sums.sum(2) if heads == "k" else sums.flatten(1, 2)


def drawn_call(number: int, device: str = "cpu", **changes: Any) -> tuple[Case, Inputs, Inputs]:
    """A random call without dropout, its tensors, and how they lie in memory; the mask may be prepared."""
    drawn = draws.draw_small(number)
    data = drawn.case.data if drawn.case.data in (*MEANS, *SIGNS, *STEPS) else "centred"
    kind = drawn.case.bias_kind if drawn.case.bias_kind != "min" else "inf"  # no lse in fp32 can tell such scores apart
    case = drawn.case.with_(dropout_p=0.0, data=data, bias_kind=kind, **changes)
    inputs = case.build(device)
    return case, inputs, draws.placed(drawn._replace(case=case), inputs)


def check_key_sums(
    number: int, heads: Any, has_weights: bool = True, device: str = "cpu", backend: Any = "auto", **changes: Any
) -> None:
    """Compare the sums of a random call with p in fp64; lse comes from another backend."""
    case, inputs, placed = drawn_call(number, device, **changes)
    weights = None
    if has_weights:
        weights = torch.randn(case.batch, case.seqlen_q, case.num_heads, generator=seeded(number)).mT.to(device)
    shared: dict[str, Any] = {**case.flags(), "sink": placed.sink}
    if isinstance(placed.mask, PreparedMask):  # which brings its own band
        shared.update(is_causal=False, window_size=None)
    q, k, mask, bias = placed.q, placed.k, placed.mask, case.passed(placed.bias)
    _, lse = attention(q, k, k[..., :1], mask, bias, return_lse=True, backend="eager", **shared)
    got = statistics.key_sums(q, k, lse, mask, bias, weights=weights, heads=heads, backend=backend, **shared)
    weights = torch.ones_like(lse) if weights is None else weights.to(lse.dtype)
    exact, plain = (
        probabilities(case.in_formula(inputs.to(dtype)), case.flags())[0] for dtype in (torch.float64, case.dtype)
    )
    wanted, sizes = (summed(exact, w.double(), heads) for w in (weights, weights.abs()))
    judge(got, wanted, summed(plain, weights.to(plain.dtype), heads), sizes, lse, q, f"{case.repro()}, {heads}")


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def check_sequences(number: int, backend: Any = "auto", **changes: Any) -> str | None:
    """Compare the sums of random sequences with p in fp64; return their layout, None for calls that are left out.

    Rows of no sequence have NaN, and so has what no pair reads.
    """
    call = sequence_calls.draw(number)
    if call.data in sequence_calls.GREAT or "seen" in call.data:
        return None
    flags = {name: x for name, x in call.flags.items() if name != "dropout_p"}
    call = replace(call, flags=flags, needs_grad=(), dlse=None)
    if changes:
        call = call.to(changes["dtype"])
    shared = {**flags, "sink": call.sink, "sequences": call.sequences}
    spoiled = sequence_calls.spoiled(call, scores=call.sequences.block_table is None)
    tensors = (spoiled.q, spoiled.k)
    _, lse = attention(*tensors, spoiled.v, spoiled.mask, spoiled.bias, return_lse=True, backend="eager", **shared)
    weights = torch.randn(lse.shape, generator=seeded(number)).to(lse)
    heads: Any = "kq"[number % 2]
    named = {"weights": weights, "heads": heads, "backend": backend}
    got = statistics.key_sums(*tensors, lse, spoiled.mask, spoiled.bias, **named, **shared)
    shape = (call.k.shape[-2] if heads == "k" else call.q.shape[-2], call.k.shape[-3])
    if not call.packs_keys:
        most = call.sequences.max_seqlen_k if call.sequences.block_table is not None else shape[1]
        shape = (call.sequences.number, shape[0], most)
    exact, plain, sizes = expected_of_sequences(call, weights, heads, shape)
    judge(got, exact, plain, sizes, lse, call.q, call.told)
    layout: str = call.sequences.layout
    return layout


def expected_of_sequences(
    call: sequence_calls.SequenceCall, weights: Tensor, heads: str, shape: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """The sums in fp64, in the dtype of the call, and of terms by their size, by one dense call of all tokens."""
    tokens = sequence_calls.Tokens(call)
    rows = (weights if call.packs_queries else weights.transpose(0, 1).flatten(1))[None].cpu()
    rows = rows.masked_fill(tokens.q[:, 0] < 0, 0.0)
    made = []
    numbers = {name: call.flags[name] for name in ("softcap", "softmax_scale")}
    for dtype, w in ((torch.float64, rows.double()), (call.q.dtype, rows), (torch.float64, rows.abs().double())):
        own = call.to(dtype)
        leaves = {n: None if (x := getattr(own, n)) is None else x.cpu() for n in sequence_calls.LEAVES}
        p, _ = probabilities(sequence_calls._dense(own, tokens, leaves), numbers)
        sums = summed(p, w.to(p.dtype), heads)[0]
        total = sums.new_zeros(shape)
        if call.packs_keys:
            total[:, tokens.k_at] = sums
        else:
            total.transpose(0, 1)[:, tokens.k[:, 0], tokens.k[:, 1]] = sums
        made.append(total)
    return tuple(made)


def on_triton() -> int:
    """Compare sums on the Triton kernels with p of the formula; returns the exit status."""
    from accuracy import error, limits_of
    from outcomes import outcome_of, report

    interprets = DEVICE == "cpu"
    if interprets:
        interpreter.admit_cpu()
        interpreter.guard_outputs()

    def check_lists(dtype: torch.dtype, number: int, places: int = 7, block_q: int = 1, **more: int) -> None:
        case = ListCall(
            number, dtype, 1, 1, 6, 40, 1, 2, 1, block_q, more.pop("block_k", 1), places, True, 0.0, number % 2 == 0,
            (None, "values")[number % 2], 2, False, 0.0, **more,
        )  # fmt: skip
        x, mask, bias = case.build()
        _, lse = attention(x.q, x.k, x.v[..., :8], mask, bias, return_lse=True, sink=x.sink, backend="triton")
        weights = torch.randn(lse.shape, generator=seeded(number)).to(lse)
        sums = statistics.list_sums(x.q, x.k, lse, mask, bias, weights=weights, sink=x.sink, backend="triton")
        compare(sums, exact_list_sums(case, weights), dtype, False)

    def check_lists_of_keys(dtype: torch.dtype) -> None:
        case = ListCall(0, dtype, 1, 1, 6, 40, 1, 2, 1, 1, 1, 7, True, 0.0, False, None, 2, False, 0.0)
        x, mask, _ = case.build()
        _, lse = attention(x.q, x.k, x.v, mask, return_lse=True, backend="triton")
        sums = statistics.key_sums(x.q, x.k, lse, mask, backend="triton")
        s, _ = formula.scores(x.q.double(), x.k.double(), mask.dense(), None, False, 8**-0.5, 0.0, None)
        compare(sums, formula.softmax(s)[0].sum((2, 3)), dtype, True)

    def check_lists_under_autocast() -> None:
        q, k = torch.randn(1, 6, 8, 16, device=DEVICE), torch.randn(1, 40, 1, 16, device=DEVICE)
        lists = PreparedMask.from_lists(torch.rand(6, 40, device=DEVICE).argsort(-1)[:, :36], seqlen_k=40)
        with torch.autocast(DEVICE, torch.float16):
            _, lse = attention(q, k, k, lists, return_lse=True, backend="triton")
            sums = statistics.key_sums(q, k, lse, lists, backend="triton")
        s, _ = formula.scores(q.half().double(), k.half().double(), lists.dense(), None, False, 0.25, 0.0, None)
        compare(sums, formula.softmax(s)[0].sum((2, 3)), torch.float16, True)

    def compare(sums: Tensor, wanted: Tensor, dtype: torch.dtype, is_rounded: bool) -> None:
        # Results are in fp32, or rounded as a gradient of v is.
        limit = torch.finfo(dtype).eps if is_rounded else limits_of(torch.float32)[1] * 10
        off = error(sums, wanted)
        assert off < max(limit, 1e-6), f"off by {off}, and {limit} is allowed"

    lists = [(torch.float32, 0), (torch.float32, 1), (torch.float16, 2), (torch.float16, 3)]
    checks: list[Any] = [partial(check_lists, *arguments) for arguments in lists]
    # More keys than a tile holds with its sums of p and dp; and heads whose rows exceed shared memory.
    many = ({"number": 1}, {"number": 2, "block_q": 3}, {"number": 3, "block_k": 16}, {"number": 4, "dim": 264})
    checks += [partial(check_lists, torch.float16, places=36, **sizes) for sizes in many]
    checks += [partial(check_lists_of_keys, torch.float16), check_lists_under_autocast]
    for number in TRITON_CALLS:
        dtype = (torch.float32, torch.float16)[number % 2]
        shared: dict[str, Any] = {"backend": "triton", "dtype": dtype}
        keys = {"heads": "kq"[number // 2 % 2], "has_weights": number % 3 > 0, "device": DEVICE}
        checks += [partial(check_key_sums, number, **keys, **shared), partial(check_sequences, number, **shared)]

    def run(number: int) -> None:
        if interprets:  # on tiles, numbers of SMs and ways of masks in turn
            tile, sms = (each[number % len(each)] for each in (interpreter.TILES, interpreter.NUM_SMS))
            parts, pairs = (each[number // 2 % len(each)] for each in (interpreter.PARTS_BYTES, interpreter.FEW_PAIRS))
            interpreter.set_up(tile, sms, parts, pairs)
        checks[number]()
        if interprets:
            interpreter.assert_margins()

    return report(outcome_of(partial(run, number), f"{check}") for number, check in enumerate(checks))


if __name__ == "__main__":
    sys.exit(on_triton())
