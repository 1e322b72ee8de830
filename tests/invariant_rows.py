"""Compare bits of rows in random surroundings, in the invariant mode: `python tests/invariant_rows.py 10000`.

Each draw takes a sequence, computes it alone, and again in one random surrounding: in a batch, packed, padded, in
pages, as a chunk, with fewer heads, or beside other rows. Unused memory is NaN, and neighbours are ten times as large.
At the end it prints the draws, the rows of a head that it compared, and how many values have other bits: 0 is right.
The exit status is 1 otherwise. It needs a GPU that the backend runs on, triton or with `--backend cuda` cuda.
`interpreted_rows.py` makes the same comparisons in Triton's interpreter, and `test_cuda_invariance.py` on the emulated
GPU.
docs/invariance.md says what is promised.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn import Sequences  # noqa: E402

LOUD = 10.0


class Rows(NamedTuple):
    """Results of the rows of one sequence: out (L, Hq, Dv), lse (Hq, L), and gradients as q, k, v and bias."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None

    def queries(self, first: int, end: int) -> Rows:
        """The results that belong to queries alone, of some of them."""
        dq = None if self.dq is None else self.dq[first:end]
        return Rows(self.out[first:end], self.lse[:, first:end], dq)


@dataclass(frozen=True)
class Class:
    """Settings that all calls of a class have; `mask` and `bias` name their forms."""

    head_dim: int = 64
    group: int = 1
    heads_k: int = 2
    dtype: torch.dtype = torch.bfloat16
    is_causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    sink: bool = False
    mask: bool = False
    bias: str = ""  # "key" or "score"
    backend: str = "triton"

    @property
    def looks_back(self) -> bool:
        """Whether a query sees no key after its own, so that a prefix has all of them."""
        return self.is_causal or self.window[1] == 0


@dataclass(frozen=True)
class Sequence:
    """The tensors of one sequence: q and dout (L, Hq, D), k and v (L, Hk, D), mask (L, L), bias (Hq, L or 1, L)."""

    own: Class
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Tensor | None
    bias: Tensor | None
    sink: Tensor | None

    @property
    def length(self) -> int:
        return self.q.shape[0]


def draw_sequence(own: Class, length: int, device: str, like: Sequence | None = None, loud: float = 1.0) -> Sequence:
    """Draw a sequence; one of another call shares the sink of `like`."""

    def normal(*shape: int, size: float = loud) -> Tensor:
        return (torch.randn(shape, device=device) * size).to(own.dtype)

    heads = own.group * own.heads_k
    q, dout = normal(length, heads, own.head_dim), normal(length, heads, own.head_dim)
    k, v = normal(length, own.heads_k, own.head_dim), normal(length, own.heads_k, own.head_dim)
    mask = None
    if own.mask:  # tiles that are full, partial and empty
        kept = torch.rand(-(-length // 64), -(-length // 64), device=device).repeat_interleave(64, 0)
        kept = kept.repeat_interleave(64, 1)[:length, :length]
        mask = (kept < 0.6) | ((kept < 0.85) & (torch.rand(length, length, device=device) < 0.5))
    bias = normal(heads, length if own.bias == "score" else 1, length) if own.bias else None
    sink = like.sink if like is not None else normal(heads, size=1.0) if own.sink else None
    return Sequence(own, q, k, v, dout, mask, bias, sink)


def attend(own: Class, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, bias: Tensor | None, **more: Any) -> Rows:
    """Call the backend in the mode: out, lse and gradients in the shapes of the call; without dout no gradients."""
    needed = [x.detach().requires_grad_() if dout is not None and x is not None else x for x in (q, k, v, bias)]
    with flash_dmattn.config(invariant=True), torch.set_grad_enabled(dout is not None):
        out, lse = flash_dmattn.attention(
            *needed[:3],
            bias=needed[3],
            is_causal=own.is_causal,
            window_size=own.window,
            softcap=own.softcap,
            softmax_scale=own.scale,
            return_lse=True,
            backend=own.backend,
            **more,
        )
        if dout is None:
            return Rows(out, lse)
        gradients = torch.autograd.grad((out, lse), [x for x in needed if x is not None], (dout, torch.ones_like(lse)))
    return Rows(out.detach(), lse.detach(), *gradients)


def batch_of(sequences: list[Sequence], place: int) -> Rows:
    """The results of one of some sequences of equal length, as entries of a batch."""
    first = sequences[0]

    def stack(name: str) -> Any:
        return None if getattr(first, name) is None else torch.stack([getattr(s, name) for s in sequences])

    mask = None if first.mask is None else stack("mask")[:, None]
    rows = attend(
        first.own, stack("q"), stack("k"), stack("v"), stack("dout"), stack("bias"), mask=mask, sink=first.sink
    )
    return Rows(*(None if x is None else x[place] for x in rows))


def alone(s: Sequence) -> Rows:
    return batch_of([s], 0)


def in_batch(s: Sequence, rng: random.Random, most: int = 8) -> tuple[Rows, Rows]:
    """In a batch of up to `most` entries, at any place."""
    others = [draw_sequence(s.own, s.length, str(s.q.device), s, LOUD) for _ in range(rng.randint(1, most - 1))]
    place = rng.randint(0, len(others))
    others.insert(place, s)
    return alone(s), batch_of(others, place)


def packed(s: Sequence, rng: random.Random) -> tuple[Rows, Rows]:
    """Between other sequences of a row of tokens, some of them empty, and with room behind the last."""
    lengths = [rng.choice((0, 1, 7, 33, 64, 130)) for _ in range(rng.randint(1, 4))]
    place = rng.randint(0, len(lengths))
    own, device = s.own, str(s.q.device)
    all_of = [draw_sequence(own, n, device, s, LOUD) for n in lengths]
    all_of.insert(place, s)
    ends = [0]
    for each in all_of:
        ends.append(ends[-1] + each.length)
    most, total = max(x.length for x in all_of) + rng.choice((0, 50)), ends[-1] + rng.choice((0, 0, 40))

    def pack(name: str) -> Tensor:
        rows = torch.cat([getattr(x, name) for x in all_of])
        return torch.cat([rows, rows.new_full((total - len(rows), *rows.shape[1:]), torch.nan)])

    mask = bias = None
    if s.mask is not None:
        mask = torch.zeros(1, total, most, dtype=torch.bool, device=device)
    if s.bias is not None:
        shape = (len(s.bias), 1, total) if own.bias == "key" else (len(s.bias), total, most)
        bias = s.q.new_full(shape, torch.nan)
    for x, (begin, end) in zip(all_of, pairwise(ends), strict=True):
        if mask is not None and x.mask is not None:
            mask[0, begin:end, : x.length] = x.mask
        if bias is not None and x.bias is not None and own.bias == "key":
            bias[:, 0, begin:end] = x.bias[:, 0]
        elif bias is not None and x.bias is not None:
            bias[:, begin:end, : x.length] = x.bias
    bounds = Sequences.packed(torch.tensor(ends, device=device), max_seqlen_q=most, max_seqlen_k=most)
    q, k, v, dout = map(pack, ("q", "k", "v", "dout"))
    rows = attend(own, q, k, v, dout, bias, mask=mask, sink=s.sink, sequences=bounds)
    begin, end = ends[place], ends[place + 1]
    dbias = None
    if rows.dbias is not None:
        dbias = rows.dbias[:, :, begin:end] if own.bias == "key" else rows.dbias[:, begin:end, : s.length]
    tokens = [None if x is None else x[begin:end] for x in (rows.out, rows.dq, rows.dk, rows.dv)]
    return alone(s), Rows(tokens[0], rows.lse[:, begin:end], *tokens[1:], dbias)  # type: ignore[arg-type]


def padded(s: Sequence, rng: random.Random) -> tuple[Rows, Rows]:
    """In the front of a slot, beside other slots."""
    own, device = s.own, str(s.q.device)
    slots, size = rng.randint(1, 3), s.length + rng.choice((0, 1, 70))
    all_of = [draw_sequence(own, rng.randint(0, size), device, s, LOUD) for _ in range(slots)]
    place = rng.randint(0, slots)
    all_of.insert(place, s)

    def slot(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_full((size - len(x), *x.shape[1:]), torch.nan)])

    q, k, v, dout = (torch.stack([slot(getattr(x, name)) for x in all_of]) for name in ("q", "k", "v", "dout"))
    mask = bias = None
    if s.mask is not None:
        mask = torch.zeros(len(all_of), 1, size, size, dtype=torch.bool, device=device)
    if s.bias is not None:
        bias = q.new_full((len(all_of), len(s.bias), size if own.bias == "score" else 1, size), torch.nan)
    for number, x in enumerate(all_of):
        if mask is not None and x.mask is not None:
            mask[number, 0, : x.length, : x.length] = x.mask
        if bias is not None and x.bias is not None:
            bias[number, :, : x.bias.shape[1], : x.length] = x.bias
    lengths = torch.tensor([x.length for x in all_of], device=device)
    used = Sequences.padded(seqlens_q=lengths, seqlens_k=lengths)
    rows = attend(own, q, k, v, dout, bias, mask=mask, sink=s.sink, sequences=used)
    n, dbias = s.length, None if rows.dbias is None else rows.dbias[place, :, :, : s.length]
    dbias = dbias[:, :n] if dbias is not None and own.bias == "score" else dbias
    tokens = [None if x is None else x[place, :n] for x in (rows.out, rows.dq, rows.dk, rows.dv)]
    return alone(s), Rows(tokens[0], rows.lse[place, :, :n], *tokens[1:], dbias)  # type: ignore[arg-type]


def paged(s: Sequence, rng: random.Random, sizes: tuple[int, ...] = (16, 128)) -> tuple[Rows, Rows]:
    """As a chunk of queries whose keys are in shuffled pages, in a cache with room for more; forward alone."""
    own, device, page = s.own, str(s.q.device), rng.choice(sizes)
    queries = min(rng.choice((1, 7, 64, 512)), s.length)
    keys = rng.randint(queries, s.length) if own.looks_back else s.length
    others = [draw_sequence(own, rng.randint(queries, s.length), device, s, LOUD) for _ in range(rng.randint(0, 3))]
    place = rng.randint(0, len(others))
    all_of = [*others[:place], s, *others[place:]]
    held = [keys if x is s else x.length for x in all_of]
    columns = max(-(-n // page) for n in held) + rng.choice((0, 3))
    pages = torch.randperm(len(all_of) * columns, device=device).view(len(all_of), columns)
    pools = [s.k.new_full((pages.numel(), page, own.heads_k, own.head_dim), torch.nan) for _ in range(2)]
    q = torch.stack([x.q[n - queries : n] for x, n in zip(all_of, held, strict=True)])
    mask = bias = None
    if s.mask is not None:
        mask = torch.zeros(len(all_of), 1, queries, columns * page, dtype=torch.bool, device=device)
    if s.bias is not None:
        rows = queries if own.bias == "score" else 1
        bias = q.new_full((len(all_of), len(s.bias), rows, columns * page), torch.nan)
    for number, (x, n) in enumerate(zip(all_of, held, strict=True)):
        for pool, values in zip(pools, (x.k, x.v), strict=True):
            every = values.new_full((columns * page, *values.shape[1:]), torch.nan)
            every[:n] = values[:n]
            pool[pages[number]] = every.view(columns, page, *values.shape[1:])
        if mask is not None and x.mask is not None:
            mask[number, 0, :, :n] = x.mask[n - queries : n, :n]
        if bias is not None and x.bias is not None:
            bias[number, :, :, :n] = (x.bias[:, n - queries : n] if own.bias == "score" else x.bias)[:, :, :n]
    cache = Sequences.paged(pages, torch.tensor(held, device=device))
    rows_of = attend(own, q, *pools, None, bias, mask=mask, sink=s.sink, sequences=cache)
    whole_rows = alone(s).queries(keys - queries, keys)._replace(dq=None)
    return whole_rows, Rows(rows_of.out[place], rows_of.lse[place])


def as_chunk(s: Sequence, rng: random.Random) -> tuple[Rows, Rows]:
    """Some queries, with the keys up to their last one where none sees a later key; else the last ones, with all."""
    queries = min(rng.choice((1, 7, 30, 64, 512)), s.length)
    # A bias of one key has one value for each query, which the mode refuses.
    end = rng.randint(max(queries, 2), s.length) if s.own.looks_back else s.length
    begin = end - queries
    part = replace(
        s,
        q=s.q[begin:end],
        dout=s.dout[begin:end],
        k=s.k[:end],
        v=s.v[:end],
        mask=None if s.mask is None else s.mask[begin:end, :end],
        bias=None if s.bias is None else (s.bias[:, begin:end] if s.own.bias == "score" else s.bias)[:, :, :end],
    )
    return alone(s).queries(begin, end), alone(part).queries(0, queries)


def fewer_heads(s: Sequence, rng: random.Random) -> tuple[Rows, Rows]:
    """One key-value head alone, with its group."""
    h, group = rng.randrange(s.own.heads_k), s.own.group
    queries, keys = slice(h * group, (h + 1) * group), slice(h, h + 1)
    part = replace(
        s,
        own=replace(s.own, heads_k=1),
        q=s.q[:, queries],
        dout=s.dout[:, queries],
        k=s.k[:, keys],
        v=s.v[:, keys],
        bias=None if s.bias is None else s.bias[queries],
        sink=None if s.sink is None else s.sink[queries],
    )
    every = alone(s)
    places = (queries, queries, keys, keys)
    out, dq, dk, dv = (None if x is None else x[:, p] for x, p in zip((every.out, *every[2:5]), places, strict=True))
    dbias = None if every.dbias is None else every.dbias[queries]
    return Rows(out, every.lse[queries], dq, dk, dv, dbias), alone(part)  # type: ignore[arg-type]


def other_rows(s: Sequence, rng: random.Random) -> tuple[Rows, Rows]:
    """A row whose neighbours in its tile have other queries, other masks and other values of the bias."""
    row = rng.randrange(s.length)
    other = draw_sequence(s.own, s.length, str(s.q.device), s, LOUD)

    def mixed(own: Tensor | None, others: Tensor | None, at: tuple[Any, ...]) -> Tensor | None:
        if own is None or others is None:
            return None
        result = others.clone()
        result[at] = own[at]
        return result

    q, dout = (mixed(x, y, (row,)) for x, y in ((s.q, other.q), (s.dout, other.dout)))
    bias = mixed(s.bias, other.bias, (slice(None), row)) if s.own.bias == "score" else s.bias
    changed = replace(s, q=q, dout=dout, mask=mixed(s.mask, other.mask, (row,)), bias=bias)
    return alone(s).queries(row, row + 1), alone(changed).queries(row, row + 1)


SURROUNDINGS: dict[str, Callable[[Sequence, random.Random], tuple[Rows, Rows]]] = {
    each.__name__: each for each in (in_batch, packed, padded, paged, as_chunk, fewer_heads, other_rows)
}


def unequal(wanted: Rows, result: Rows) -> dict[str, int]:
    """Count the values of each result that have other bits, where both have them."""
    counts = {}
    for name, x, y in zip(Rows._fields, wanted, result, strict=True):
        if x is not None and y is not None:
            assert x.shape == y.shape and x.dtype == y.dtype, (name, x.shape, y.shape)
            kind = torch.int32 if x.dtype.itemsize == 4 else torch.int16
            counts[name] = int((x.contiguous().view(kind) != y.contiguous().view(kind)).sum())
    return counts


def draw_class(rng: random.Random, backend: str) -> Class:
    """Draw a class of the mode. With a scale of 3 loud rows have maxima whose rounding would show."""
    window = rng.choice(((-1, -1), (-1, -1), (-1, -1), (90, 0), (1000, 0), (200, 60)))
    scale, is_causal = rng.choice((None, None, None, -0.1, 3.0)), window == (-1, -1) and rng.random() < 0.7
    head_dim, group, sink = rng.choice((64, 128)), rng.choice((1, 1, 3, 4)), rng.random() < 0.2
    if backend == "cuda":
        return Class(head_dim, group, 2, torch.bfloat16, is_causal, window, 0.0, scale, sink, backend=backend)
    return Class(
        head_dim=head_dim,
        group=group,
        is_causal=is_causal,
        window=window,
        softcap=rng.choice((0.0, 0.0, 0.0, 20.0)),
        scale=scale,
        sink=sink,
        mask=rng.random() < 0.25,
        bias=rng.choice(("", "", "", "key", "score")),
    )


# Few lengths, because Triton compiles a kernel for each divisibility; they have one, two and three spans.
LENGTHS = (2, 31, 200, 512, 1000, 2048, 2049, 3100, 4500)


class Drawn(NamedTuple):
    """A draw: its surrounding, class and length, the results, and how many values of each have other bits."""

    name: str
    own: Class
    length: int
    rows: Rows
    counts: dict[str, int]

    def __str__(self) -> str:
        return f"{self.name}, length {self.length}, {self.own}: {self.counts}"


def draw(seed: int, device: str, backend: str, lengths: tuple[int, ...] = LENGTHS) -> Drawn:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    own, name, length = draw_class(rng, backend), rng.choice(list(SURROUNDINGS)), rng.choice(lengths)
    wanted, result = SURROUNDINGS[name](draw_sequence(own, length, device), rng)
    return Drawn(name, own, length, result, unequal(wanted, result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, nargs="?", default=10_000, help="draws")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("triton", "cuda"), default="triton")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further draw begins")
    chosen = parser.parse_args()
    begin, count, rows, values, different = time.monotonic(), 0, 0, 0, 0
    by_name: dict[str, int] = {}
    for each in range(chosen.number):
        drawn = draw(chosen.seed * 10**6 + each, "cuda", chosen.backend)
        count, rows = count + 1, rows + drawn.rows.out.shape[0] * drawn.rows.out.shape[1]
        values += sum(x.numel() for x in drawn.rows if x is not None)
        different += sum(drawn.counts.values())
        by_name[drawn.name] = by_name.get(drawn.name, 0) + 1
        if any(drawn.counts.values()):
            print(drawn, flush=True)
        if time.monotonic() - begin > chosen.budget:
            break
    print(f"{count} draws, {rows} rows of a head, {values} values: {different} with other bits")
    print(", ".join(f"{name} {n}" for name, n in sorted(by_name.items())), f"in {time.monotonic() - begin:.0f} s")
    return int(different > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main())
