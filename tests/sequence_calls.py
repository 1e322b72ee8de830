"""Calls with sequences drawn at random, and the oracle for them: one dense call of all tokens with a mask of pairs.

The oracle does not loop over sequences, as the reference does. Every token has the number of its sequence and its place
there. Pairs of different sequences are masked, and a mask or a bias is gathered by numbers and places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import draws
import torch
from accuracy import (
    RATIO,
    Results,
    as_fp32_holds,
    as_kernels_hold,
    chance,
    failures_of,
    in_plain_pytorch,
    row_variances,
    with_rounding,
    with_scores_held,
)
from cases import DEVICE, GREAT, JUMPS, MEANS, SEEN, SIGNS, Inputs, with_great_values, with_means
from layouts import LAYOUTS as STRIDES
from torch import Tensor

from flash_dmattn import AuxRequest, Sequences, attention
from flash_dmattn.backends.protocol import Backend, Direction
from flash_dmattn.masks.prepared.packing import pack_sequences
from flash_dmattn.masks.prepared.storage import TreeMask
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import AttentionProblem, Flags, MaskView, NeedsGrad, SequenceView, causal_window
from flash_dmattn.problem import inputs as operands
from flash_dmattn.problem.checks import find_packing
from flash_dmattn.problem.inputs import result_in_rows
from flash_dmattn.reference import formula
from flash_dmattn.reference.dropout import Dropout, draw_key

LEAVES = ("q", "k", "v", "bias", "sink")
LAYOUTS = ("packed", "packed", "padded", "paged", "paged_packed")
# The choices of a draw for kernels, which have tiles of 128 rows.
ON_GPU: dict[str, Any] = {
    "dtypes": (torch.bfloat16, torch.float16, torch.float32),
    "lengths": (0, 1, 31, 32, 33, 127, 128, 129, 300),
    "head_dims": (16, 64, 128),
}


@dataclass(frozen=True)
class SequenceCall:
    """The tensors of a call, as `attention` takes them, and what arrives at its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | TreeMask | None
    bias: Tensor | None
    sink: Tensor | None
    sequences: Sequences
    lengths: tuple[tuple[int, int, int, int], ...]  # of each sequence: first query, how many, first key, how many
    flags: dict[str, Any]
    dout: Tensor
    dlse: Tensor | None
    needs_grad: tuple[str, ...]
    told: str  # how it was drawn
    seed: int = 0  # after which the key of dropout is drawn
    data: str = "centred"  # as in `Case`
    aux: tuple[str, ...] = ()  # likewise
    dentropy: Tensor | None = None

    @property
    def packs_queries(self) -> bool:
        return self.q.dim() == 3

    @property
    def packs_keys(self) -> bool:
        return self.k.dim() == 3

    def queries_of(self, s: int) -> tuple[Any, ...]:
        """The index of the queries of a sequence in q and dout, and after the heads in lse."""
        rows = slice(self.lengths[s][0], sum(self.lengths[s][:2]))
        return (rows,) if self.packs_queries else (s, rows)

    def keys_of(self, s: int) -> tuple[Any, ...]:
        """The index of the keys of a sequence in k and v."""
        first, number = self.lengths[s][2:]
        table, places = self.sequences.block_table, torch.arange(number)
        if table is None:
            return (slice(first, first + number),) if self.packs_keys else (s, slice(first, first + number))
        pages, page_size = self.k.shape[:2]
        return table[s].cpu()[places // page_size].long().clamp(0, pages - 1), places % page_size

    def to(self, dtype: torch.dtype) -> SequenceCall:
        """The same values in another dtype."""
        names = ("q", "k", "v", "bias", "sink", "dout", "dlse", "dentropy")
        return replace(self, **{n: None if (x := getattr(self, n)) is None else x.detach().to(dtype) for n in names})


def simpler(call: SequenceCall) -> Iterator[SequenceCall]:
    """The call with one thing less: a flag, a mask, a bias, a sink, a gradient."""
    for name in call.flags:
        yield replace(call, flags={key: x for key, x in call.flags.items() if key != name})
    for name in ("mask", "bias", "sink", "dlse"):
        if getattr(call, name) is not None:
            yield replace(call, **{name: None}, needs_grad=tuple(x for x in call.needs_grad if x != name))
    if call.aux:
        yield replace(call, aux=(), dentropy=None)
    for name in call.needs_grad:
        yield replace(call, needs_grad=tuple(x for x in call.needs_grad if x != name))


def asking(call: SequenceCall, backend: str) -> SequenceCall:
    """The call, asking for numbers about its rows if its data are centred: see `draws.asking`."""
    is_plain = call.mask is None and call.bias is None and call.sequences.block_table is None
    is_plain = is_plain and not call.flags.get("dropout_p")
    aux = draws.asked_of(call.seed, backend, is_plain) if call.data == "centred" else ()
    heads, rows = call.q.shape[-2], call.q.shape[:-2]
    shape = (heads, *rows) if call.packs_queries else (rows[0], heads, rows[1])
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    random_rows = torch.randn(shape, generator=torch.Generator().manual_seed(call.seed)).to(DEVICE, dtype)
    return replace(call, aux=aux, dentropy=random_rows if "entropy" in aux else None)


def draw(
    number: int,
    layout: str | None = None,
    lengths: tuple[int, ...] = (0, 1, 2, 5, 17, 32, 33),
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32),
    head_dims: tuple[int, ...] = (4, 8, 16),
    lengths_k: tuple[int, ...] | None = None,
    page_sizes: tuple[int, ...] = (1, 4, 16),
    is_loose: bool = False,
) -> SequenceCall:
    """The call of a number.

    Args:
        number: of the call.
        layout: one of `LAYOUTS`; None draws one.
        lengths: of queries, and of keys if there are no `lengths_k`.
        dtypes, head_dims, lengths_k, page_sizes: the choices.
        is_loose: draw what `attention` would refuse on a CPU and `run_on` hands to a backend. Sequences begin anywhere,
            with gaps between them; tables have wrong pages, which kernels clamp.
    """
    rng, torch_rng, loose = (
        random.Random(number),
        torch.Generator().manual_seed(number),
        random.Random(f"loose {number}"),
    )

    def loosely(*choices: Any) -> Any:
        return loose.choice(choices) if is_loose else choices[0]

    layout = layout or rng.choice(LAYOUTS)
    count, dtype = rng.choice((0, 1, 1, 2, 3, 5, 9)), rng.choice(dtypes)
    if is_loose:
        count = loose.choice((*[max(count, 1)] * 6, 40))
    if count > 9:
        lengths = tuple(n for n in lengths if n < 40)
    heads_k, group = rng.choice((1, 2, 3)), rng.choice((1, 1, 2))
    group = loosely(group, group, group, 3)
    heads, dim, dim_v = heads_k * group, rng.choice(head_dims), rng.choice(head_dims)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=torch_rng, dtype=torch.float32).to(DEVICE, dtype)

    used_q = [rng.choice(lengths) for _ in range(count)]
    same = layout == "packed" and rng.random() < 0.4 and lengths_k is None
    used_k = used_q if same else [rng.choice(lengths_k or lengths) for _ in range(count)]
    spare = rng.random() < 0.5 or is_loose  # slots are longer than what is used of them

    def slots(used: list[int]) -> list[int]:
        return [n + (rng.choice((0, 0, 1, 7)) if spare else 0) + loosely(0, 0, 50) for n in used]

    def cumulative(slots: list[int]) -> list[int]:
        first = loosely(0, 0, 3, 130)
        return [first + sum(slots[:s]) for s in range(count + 1)]

    def table(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=rng.choice((torch.int32, torch.int64)), device=DEVICE)

    behind_q, behind_k = (rng.choice((0, 0, 3)) for _ in range(2))  # tokens behind the last sequence
    slots_q = slots(used_q)
    slots_k = slots_q if same else slots(used_k)
    edges_q, edges_k = cumulative(slots_q), cumulative(slots_k)
    tokens_q = edges_q[-1] + behind_q
    tokens_k = tokens_q if same and not is_loose else edges_k[-1] + behind_k
    most_q, most_k = (max([int(is_loose), *used]) + rng.choice((0, 4)) for used in (used_q, used_k))
    page_size = rng.choice(page_sizes)
    if layout == "packed":
        named = {"max_seqlen_q": most_q, "max_seqlen_k": most_k}
        used = {"seqlens_q": table(used_q), "seqlens_k": table(used_k)} if spare else {}
        make = partial(Sequences, "packed") if is_loose else Sequences.packed
        sequences = make(table(edges_q), table(edges_k), **named, **used)
        q_shape, k_shape = (tokens_q, heads, dim), (tokens_k, heads_k, dim)
        firsts_q, firsts_k = edges_q, edges_k
    else:
        firsts_k = [0] * count
        packed_q = layout == "paged_packed"
        firsts_q = edges_q if packed_q else firsts_k
        if not packed_q:
            tokens_q = most_q
            if layout == "paged" and not is_loose:
                used_q = [most_q] * count
        q_shape = (tokens_q, heads, dim) if packed_q else (count, tokens_q, heads, dim)
        if packed_q and not is_loose:
            used_q = slots_q
            most_q = max(used_q, default=0)
        if layout == "padded":
            sequences = Sequences.padded(seqlens_q=table(used_q), seqlens_k=table(used_k))
            k_shape = (count, most_k, heads_k, dim)
        else:
            per_sequence = -(-most_k // page_size) + rng.choice((0, 1))
            pages = max(1, count * per_sequence)
            order = torch.randperm(pages, generator=torch_rng)[: count * per_sequence]
            block_table = order.view(count, per_sequence)
            if number % 3 == 0 and not is_loose:  # any strides will do
                block_table = block_table.t().contiguous().t()
            if is_loose and loose.random() < 0.3:
                wrong = loose.choice((-(2**31), -1, pages, 2**31 - 1))
                block_table[loose.randrange(count), loose.randrange(per_sequence)] = wrong
            k_shape = (pages, page_size, heads_k, dim)
            cu = {"cu_seqlens_q": table(edges_q)} if packed_q else {}
            named = {"max_seqlen_k": most_k} | ({"max_seqlen_q": most_q} if packed_q else {})
            if is_loose:
                tables = {"seqlens_k": table(used_k), "block_table": block_table.to(DEVICE, torch.int32), **cu}
                sequences = Sequences(layout, **tables, **named)  # type: ignore[arg-type]
            else:
                sequences = Sequences.paged(block_table.to(DEVICE), table(used_k), **cu, **named)
    q, k, v = normal(*q_shape), normal(*k_shape), normal(*k_shape[:-1], dim_v)

    by_position = [
        (b, h, i, j) for b in (1, count) for h in (1, heads_k, heads) for i in (1, most_q) for j in (1, most_k)
    ]
    forms: list[tuple[int, ...]] = list(by_position)
    if len(q_shape) == 3:
        packed_rows = [(h, tokens_q, j) for h in (1, heads_k, heads) for j in (1, most_k)]
        forms += 3 * packed_rows if tokens_q > 1 else []
    if len(k_shape) == 3:
        forms += 6 * [(h, 1, tokens_k) for h in (1, heads_k, heads)]
    mask = bias = None
    if rng.random() < 0.5:
        mask = (torch.rand(rng.choice(forms), generator=torch_rng) < loosely(0.7, 0.5, 0.05)).to(DEVICE)
    if rng.random() < 0.7:
        bias = normal(*rng.choice(forms), dtype=rng.choice((dtype, dtype, torch.float32)))

    def expanded(x: Tensor | None) -> Tensor | None:
        """The same shape, now and then with a stride of 0 on one dim."""
        if x is None or not is_loose or loose.random() < 0.8 or x.numel() == 0:
            return x
        return x.narrow(loose.randrange(x.dim()), 0, 1).expand(x.shape)

    sink = normal(heads, dtype=rng.choice((dtype, torch.float32))) if rng.random() < 0.3 else None
    if sink is not None and rng.random() < 0.3:
        sink[0] = -torch.inf
    flags = {
        "is_causal": rng.random() < 0.4,
        "window_size": loosely(rng.choice((None, None, (3, 0), (-1, 2), (6, 3))), (20, -1), (40, 40)),
        "softcap": rng.choice((0.0, 0.0, 2.0)),
        "softmax_scale": loosely(rng.choice((None, 0.3)), -0.2),
    }
    flags["dropout_p"] = random.Random(f"dropout {number}").choice((0.0, 0.0, 0.0, 0.3, 0.7))
    needs = rng.choice((LEAVES, LEAVES, LEAVES[:4], LEAVES[:3], ("bias",), ("q",), ("v", "sink"), ()))
    needs = loosely(needs, needs, needs, ("k", "sink")) if not layout.startswith("paged") else ()
    lse_shape = (heads, tokens_q) if q.dim() == 3 else (count, heads, tokens_q)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    call = SequenceCall(
        q,
        k,
        v,
        expanded(mask),
        expanded(bias),
        sink,
        sequences,
        tuple(zip(firsts_q[:count], used_q, firsts_k[:count], used_k, strict=True)),
        flags,
        normal(*q_shape[:-1], dim_v),
        normal(*lse_shape, dtype=lse_dtype) if rng.random() < 0.5 else None,
        tuple(name for name in needs if {"bias": bias, "sink": sink}.get(name, q) is not None),
        f"draw({number}, {layout!r}, is_loose={is_loose})",
        number,
    )
    return call if is_loose else with_data(call)


def with_data(call: SequenceCall) -> SequenceCall:
    """The call, or for a share of `draws.UNCENTRED` one whose data are not centred."""
    rng, bias = random.Random(f"data {call.seed}"), call.bias
    groups = [MEANS, SIGNS, SEEN[:2]] + [JUMPS, GREAT, GREAT] * (bias is not None and bias.shape[-1] > 1)
    if rng.random() >= draws.UNCENTRED or call.q.dtype == torch.float64:
        return call
    data, torch_rng = rng.choice(rng.choice(groups)), torch.Generator().manual_seed(call.seed)
    scale = call.flags["softmax_scale"] or call.q.shape[-1] ** -0.5
    q, k = with_means(data, call.q, call.k, scale, torch_rng)
    bias = None if bias is None else with_great_values(data, bias, torch_rng)
    call = replace(call, q=q, k=k, bias=bias, data=data, told=f"{call.told} of data {data!r}")
    if data not in SEEN:
        return call
    x = q if data.endswith("q") else k
    x.view(-1)[x.numel() // 2 : x.numel() // 2 + 1] = torch.nan
    return replace(call, needs_grad=(), dlse=None, flags={**call.flags, "dropout_p": 0.0})


# As the CUDA kernels take them: queries for blocks of three consumers, with few keys, and any length.
CUDA_LENGTHS = (0, 1, 31, 32, 33, 64, 127, 128, 129, 200, 300)
MANY_QUERIES, FEW_KEYS = (1024, 1100), (1, 40, 129)


def draw_cuda(number: int) -> SequenceCall:
    """The call of a number, most of them as the CUDA kernels of sequences take one."""
    rng = random.Random(number)
    lengths, lengths_k = (MANY_QUERIES, FEW_KEYS) if number % 16 == 15 else (CUDA_LENGTHS, None)
    call = draw(number, rng.choice(LAYOUTS), lengths, (torch.bfloat16,), (16, 64), lengths_k, (16, 32, 64, 128, 256))
    flags = dict(call.flags)
    if flags["window_size"] is not None and rng.random() < 0.6:
        flags["window_size"] = tuple(20 * side if side > 0 else side for side in flags["window_size"])
    if rng.random() < 0.8:
        flags["softcap"] = 0.0
    return replace(call, mask=None if rng.random() < 0.9 else call.mask, flags=flags)


def spoiled(call: SequenceCall, *, scores: bool = False, only: int | None = None) -> SequenceCall:
    """Put NaN in every row of q, k, v and dout that no sequence has.

    Args:
        call: the call.
        scores: also spoil dlse, and what no pair reads: NaN in a bias, True in a mask.
        only: the number of the only sequence that keeps its rows.
    """
    used_q = torch.zeros(call.q.shape[:-2], dtype=torch.bool, device=call.q.device)
    used_k = torch.zeros(call.k.shape[:-2], dtype=torch.bool, device=call.k.device)
    for s in range(len(call.lengths)) if only is None else (only,):
        used_q[call.queries_of(s)] = used_k[call.keys_of(s)] = True

    def bad(x: Tensor, used: Tensor) -> Tensor:
        return x.masked_fill(~used[..., None, None], torch.nan)

    q, dout = bad(call.q, used_q), bad(call.dout, used_q)
    call = replace(call, q=q, dout=dout, k=bad(call.k, used_k), v=bad(call.v, used_k))
    if not scores:
        return call
    dlse = call.dlse
    if dlse is not None:
        dlse = dlse.masked_fill(~used_q if call.packs_queries else ~used_q[:, None], torch.nan)
    assert not isinstance(call.mask, TreeMask)

    def bad_scores(x: Tensor | None) -> Tensor | None:
        # Dims of stride 0 hold what a sequence reads, and stay as they are.
        if x is None or 0 in x.stride() or x.numel() == 0:
            return x
        return x.masked_fill(unread(call, x, only), True if x.dtype == torch.bool else torch.nan)

    return replace(call, dlse=dlse, mask=bad_scores(call.mask), bias=bad_scores(call.bias))


def unread(call: SequenceCall, x: Tensor, only: int | None = None) -> Tensor:
    """Mark the values of a mask or a bias that no pair of a sequence, or of only one sequence, has."""
    tokens, ones = Tokens(call), torch.ones(x.shape, requires_grad=True)
    pairs, number = tokens.scores(ones), tokens.q[:, :1]
    assert pairs is not None
    same = (number == tokens.k[:, 0]) & (number >= 0) & (True if only is None else number == only)
    (read,) = torch.autograd.grad((pairs * same).sum(), ones)
    return (read == 0).to(x.device)


def run(call: SequenceCall, backend: str | tuple[str, str]) -> Results:
    """Run a call of `attention`: out, lse and gradients, None for a gradient that the call does not need."""
    leaves = {n: None if (x := getattr(call, n)) is None else x.detach().clone() for n in LEAVES}
    for name in call.needs_grad:
        leaves[name].requires_grad_()
    torch.manual_seed(call.seed)
    out, aux = attention(
        *(leaves[n] for n in "qkv"),
        call.mask,
        leaves["bias"],
        sink=leaves["sink"],
        sequences=call.sequences,
        return_aux=AuxRequest(True, "max_scores" in call.aux, "entropy" in call.aux),
        backend=backend,
        **call.flags,
    )
    results: Results = {"out": out.detach(), "lse": aux.lse.detach()}
    results |= {name: getattr(aux, name).detach() for name in call.aux}
    if call.needs_grad:
        rows = ((aux.lse, call.dlse), (aux.entropy, call.dentropy))
        pairs = [(out, call.dout), *((x, sent) for x, sent in rows if sent is not None)]
        torch.autograd.backward(*zip(*pairs, strict=True))
    for name in LEAVES:
        results[f"d{name}"] = None if leaves[name] is None else leaves[name].grad
    return results


def run_on(
    call: SequenceCall,
    backend: Backend,
    *,
    strides: str | None = None,
    tiles: bool = False,
    deterministic: bool = False,
) -> Results:
    """`run` of the passes of a backend, on what `attention` would hand them; nothing checks the call.

    Args:
        call: the call.
        backend: the backend.
        strides: of q, k, v, dout, dlse, mask and bias, a name of `layouts.LAYOUTS`.
        tiles: hand it the mask as tiles.
        deterministic: as in `attention`.
    """
    spec, f = call.sequences.describe(call.q, call.k, call.v), call.flags
    packing = {
        n: "none" if (x := getattr(call, n)) is None else find_packing(n, x.shape, spec) for n in ("mask", "bias")
    }
    left, right = causal_window(f["is_causal"], f["window_size"] or (-1, -1))
    scale = call.q.shape[-1] ** -0.5 if f["softmax_scale"] is None else f["softmax_scale"]
    flags = Flags(left, right, scale, f["softcap"], deterministic, 1, 1, packing["mask"], packing["bias"])
    flags = flags._replace(dropout_p=f.get("dropout_p", 0.0), sequences=spec)

    def laid(name: str) -> Tensor | None:
        x = getattr(call, name)
        if x is None:
            return None
        is_packed = x.dim() == (2 if name == "dlse" else 3)
        x = x[None] if is_packed else x
        return x if strides is None or 0 in x.stride() else STRIDES[strides](x)

    bounds = torch.tensor(call.lengths, dtype=torch.int32, device=call.q.device).view(-1, 4)
    mask, view = laid("mask"), MaskView()
    if mask is not None:
        packed = pack_sequences(mask, bounds, packing["mask"], spec, flags.window) if tiles else (mask,)
        view = MaskView("sequence_tiles" if tiles else "dense", tuple(packed))
    torch.manual_seed(call.seed)
    key = draw_key(call.q.device) if f.get("dropout_p") else None
    q, k, v = (laid(n) for n in "qkv")
    sequences = SequenceView(bounds, call.sequences.block_table)
    x = operands.Inputs(q, k, v, view, laid("bias"), call.sink, sequences, key)
    needs = NeedsGrad(*(name in call.needs_grad for name in LEAVES))
    problem = describe_operands(x, flags, needs)

    def arriving(direction: Direction) -> AttentionProblem:
        """Packed calls of an odd number of tokens arrive as tokens, where the pass takes these."""
        tokens = problem._replace(arrival="tokens")
        takes = call.packs_queries and call.q.shape[0] % 2 == 1 and backend.reads_as_arrived(tokens, direction)
        return tokens if takes else problem

    def make_inputs(arriving: AttentionProblem) -> operands.Inputs:
        if arriving.arrival == "rows":
            return x
        return x._replace(q=q[0], k=k[0] if spec.packs_keys else k, v=v[0] if spec.packs_keys else v)

    p = arriving("forward")
    out, lse = backend.plan_forward(p)(make_inputs(p))
    out, lse = (result_in_rows(result, p.arrival) for result in (out, lse))
    gradients: list[Tensor | None] = [None] * len(LEAVES)
    if any(needs):
        assert backend.plan_backward is not None
        p, results = arriving("backward"), (out, lse, laid("dout"), laid("dlse"))
        if p.arrival == "tokens":
            results = tuple(None if result is None else result[0] for result in results)  # type: ignore[assignment]
        saved = operands.Saved(make_inputs(p), *results[:2])
        gradients = list(backend.plan_backward(p)(saved, *results[2:]))
        gradients[:3] = [result_in_rows(gradient, p.arrival) for gradient in gradients[:3]]

    def unlaid(name: str, result: Tensor | None) -> Tensor | None:
        like = {"out": call.dout, "lse": None}.get(name, getattr(call, name[1:], None))
        is_packed = call.packs_queries if like is None else like.dim() == 3
        return result[0] if is_packed and result is not None else result

    named = {"out": out, "lse": lse, **dict(zip((f"d{name}" for name in LEAVES), gradients, strict=False))}
    return {name: result if name == "dsink" else unlaid(name, result) for name, result in named.items()}


class PairDropout(NamedTuple):
    """Stands for a `Dropout`, of a dense call of all tokens: bool (1, Hq, queries, keys)."""

    kept: Tensor
    scale: float

    def apply(self, p: Tensor) -> Tensor:
        """Probabilities (1, Hk, G, queries, keys), dropped and scaled."""
        return torch.where(self.kept.view(p.shape), p * self.scale, 0.0)


class Tokens:
    """The number of the sequence of each query and each key of a call, and its place there; -1 without a sequence."""

    def __init__(self, call: SequenceCall) -> None:
        self.call = call
        rows = call.q.shape[-3]
        number_q = rows if call.packs_queries else call.q.shape[0] * rows
        self.q = torch.full((number_q, 2), -1)
        numbers_k = torch.arange(call.k[..., 0, 0].numel()).view(call.k.shape[:-2])
        keys = []
        for s, (first_q, len_q, _, len_k) in enumerate(call.lengths):
            start = first_q if call.packs_queries else s * rows
            self.q[start : start + len_q, 0], self.q[start : start + len_q, 1] = s, torch.arange(len_q)
            keys.append(torch.stack((numbers_k[call.keys_of(s)], torch.full((len_k,), s), torch.arange(len_k)), 1))
        places = torch.cat(keys) if keys else torch.empty(0, 3, dtype=torch.long)
        self.k_at, self.k = places[:, 0], places[:, 1:]

    def scores(self, x: Tensor | None) -> Tensor | None:
        """(1, H, queries, keys) of a mask or a bias, whatever its form; 1 where it has 1."""
        if x is None:
            return None
        q, k = self.q.clamp(min=0), self.k
        if x.numel() == 0:  # no pair has a value, nor is any allowed
            return torch.zeros(1, x.shape[-3], len(q), len(k), dtype=x.dtype) + x.sum().to(x.dtype)
        if x.dim() == 4:
            b = k[:, 0][None] if len(q) == 0 else q[:, :1]
            entry = b.expand(len(q), len(k)) if x.shape[0] > 1 else torch.zeros(len(q), len(k), dtype=torch.long)
            i = q[:, 1:].expand(len(q), len(k)) if x.shape[2] != 1 else torch.zeros_like(entry)
            j = k[:, 1][None].expand(len(q), len(k)) if x.shape[3] != 1 else torch.zeros_like(entry)
            i, j = i.clamp(max=max(x.shape[2] - 1, 0)), j
            return x.transpose(0, 1)[:, entry, i, j][None]
        if x.shape[1] == 1 and x.shape[2] > 1 and self.call.packs_keys:
            return x[:, :, self.k_at][None]
        rows = torch.arange(len(self.q)) if x.shape[1] != 1 else torch.zeros(1, dtype=torch.long)
        columns = k[:, 1] if x.shape[2] != 1 else torch.zeros(1, dtype=torch.long)
        return x[:, rows[:, None], columns[None]][None]

    def tree(self, mask: TreeMask) -> Tensor:
        """(1, 1, queries, keys) of a tree: of keys of other sequences it says anything."""
        sees = mask.to("cpu").unpacked()
        lengths = torch.tensor([(n, m) for _, n, _, m in self.call.lengths] or [(0, 0)])
        s, i = (x[:, None] for x in self.q.clamp(min=0).unbind(1))
        seqlen_q, seqlen_k = (lengths[s, column] for column in (0, 1))
        token = self.k[:, 1][None] - (seqlen_k - seqlen_q)
        if sees.numel() == 0:
            return torch.ones(1, 1, len(self.q), len(self.k), dtype=torch.bool)
        among = token.clamp(0, sees.shape[1] - 1)
        return ((token < 0) | sees[s if sees.shape[0] > 1 else 0, i, among])[None, None]

    def dropout(self) -> PairDropout | None:
        """Whether each pair is kept goes by the number of its sequence and the places in it."""
        p = self.call.flags.get("dropout_p", 0.0)  # a call that was made simpler lacks it
        if p == 0.0:
            return None
        torch.manual_seed(self.call.seed)
        key = draw_key(self.call.q.device).cpu()
        heads, lengths = self.call.q.shape[-2], (*self.call.lengths, (0, 0, 0, 0))
        sizes = (max(len(self.call.lengths), 1), heads, *(max(1, *(n[side] for n in lengths)) for side in (1, 3)))
        kept = Dropout(p, key).kept(*(slice(0, size) for size in sizes))
        s, i = (x[:, None] for x in self.q.clamp(min=0).unbind(1))
        return PairDropout(kept.transpose(0, 1)[:, s, i, self.k[:, 1][None]][None], 1 / (1 - p))

    def allowed(self) -> Tensor:
        """(1, 1, queries, keys): of one sequence, and inside its band."""
        lengths = torch.tensor([(n, m) for _, n, _, m in self.call.lengths] or [(0, 0)])
        s, i, j = self.q[:, :1], self.q[:, 1:], self.k[:, 1][None]
        seqlen_q, seqlen_k = (lengths[s.clamp(min=0), column] for column in (0, 1))
        middle, flags = i + seqlen_k - seqlen_q, self.call.flags
        allowed = s == self.k[:, 0][None]
        if flags["is_causal"]:
            allowed = allowed & (j <= middle)
        if flags["window_size"] is not None:
            left, right = flags["window_size"]
            allowed = allowed & ((j >= middle - left) if left >= 0 else True)
            allowed = allowed & ((j <= middle + right) if right >= 0 else True)
        return allowed[None, None]


def _dense(call: SequenceCall, tokens: Tokens, leaves: dict[str, Tensor | None]) -> Inputs:
    q, k, v = (leaves[n] for n in "qkv")
    assert q is not None and k is not None and v is not None
    mask = tokens.allowed()
    mask_scores = tokens.tree(call.mask) if isinstance(call.mask, TreeMask) else None
    if isinstance(call.mask, Tensor):
        mask_scores = tokens.scores(call.mask.cpu())
    mask = mask if mask_scores is None else mask & mask_scores
    is_unused = tokens.q[:, 0] < 0

    def rows(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x if call.packs_queries else x.transpose(0, 1).reshape(x.shape[1], -1)
        return x.cpu().masked_fill(is_unused, 0.0)[None]

    def flat(x: Tensor) -> Tensor:
        return x if x.dim() == 3 else x.reshape(-1, *x.shape[2:])

    return Inputs(
        flat(q)[None],
        flat(k)[tokens.k_at][None],
        flat(v)[tokens.k_at][None],
        mask,
        tokens.scores(leaves["bias"]),
        flat(call.dout.cpu()).masked_fill(is_unused[:, None, None], 0.0)[None],
        rows(call.dlse),
        leaves["sink"],
        rows(call.dentropy),
    )


def expected(call: SequenceCall, hold: Callable[[Tensor], Tensor] | None = None) -> tuple[Results, Results, Inputs]:
    """The results in fp64, the results of plain PyTorch in the dtype of the call, and the dense call in fp64.

    Scores in fp64 are what `hold` makes of them.
    """
    tokens = Tokens(call)
    if hold is None and call.data in GREAT:
        hold = as_fp32_holds
    actual = []
    numbers = {k: x for k, x in call.flags.items() if k in ("softcap", "softmax_scale")}
    numbers["dropout"] = tokens.dropout()
    for dtype in (torch.float64, call.q.dtype):
        arguments = call.to(dtype) if dtype == torch.float64 else call
        leaves = {
            n: None if (x := getattr(arguments, n)) is None else x.detach().cpu().requires_grad_() for n in LEAVES
        }
        x = _dense(arguments, tokens, leaves)
        bias = x.bias
        if dtype == torch.float64 and hold is not None:
            bias = with_scores_held(x.q, x.k, bias, numbers, hold)
        asked = {name: True for name in call.aux}
        out, lse, *others = formula.attention(x.q, x.k, x.v, x.mask, bias, **numbers, sink=x.sink, **asked)
        present = {n: y for n, y in leaves.items() if y is not None}
        inputs = [y for y in (x.q, x.k, x.v, x.bias, x.sink) if y is not None]
        if dtype == torch.float64:
            safe = torch.where(lse > -torch.inf, lse, 0.0)
            pairs = [(out, x.dout)] + ([] if x.dlse is None else [(safe, x.dlse)])
            pairs += [] if x.dentropy is None else [(others[-1], x.dentropy)]
            outputs, arriving = zip(*pairs, strict=True)
            gradients = torch.autograd.grad(outputs, inputs, arriving, retain_graph=True)
        else:
            with torch.no_grad():
                out, lse, *own = in_plain_pytorch(call.data, x, asked, **numbers, sink=x.sink)
            others, own = own[: len(asked)], own[len(asked) :]
            gradients = tuple(g for g in own if g is not None)
        own = torch.autograd.grad(inputs, list(present.values()), gradients, allow_unused=True)
        empty = tokens.q[:, 0] < 0
        results: Results = {"out": out.detach()[0].view(call.dout.shape)}
        for name, each in zip(("lse", *call.aux), (lse, *others), strict=True):
            row = each.detach()[0].masked_fill(empty, 0.0 if name == "entropy" else -torch.inf)
            results[name] = row if call.packs_queries else row.unflatten(1, call.q.shape[:2]).transpose(0, 1)
        for name, g in zip(present, own, strict=True):
            results[f"d{name}"] = torch.zeros_like(present[name]) if g is None else g
        actual.append((results, x))
    (exact, inputs64), (in_dtype, _) = actual
    return exact, in_dtype, inputs64


def assert_accurate(results: Results, call: SequenceCall) -> None:
    """The rule of `accuracy.assert_accurate` for a call with sequences."""
    exact, in_dtype, dense = expected(call)
    if call.data in SEEN:
        for name in ("out", "lse"):
            bad = exact[name].isnan()
            assert torch.equal(results[name].isnan().cpu(), bad), f"{call.told}: {name} has NaN in other places"
            results, exact, in_dtype = (
                {**x, name: x[name].masked_fill(bad.to(x[name].device), 0.0)} for x in (results, exact, in_dtype)
            )
    spread = _spread(call, exact, in_dtype, dense) if call.sink is not None and call.needs_grad else {}
    unasked = {f"d{name}" for name in LEAVES if name not in call.needs_grad}
    wanted = {**exact, **dict.fromkeys(unasked)}
    like = {"out": call.dout, **{f"d{name}": getattr(call, name) for name in LEAVES}}

    unlucky: list[Results] = []

    def by_chance(name: str) -> float:
        if call.data in (*MEANS, *JUMPS, *GREAT) or name in ("lse", "max_scores", "entropy"):
            if not unlucky:
                holds = (as_kernels_hold(dense, call.flags.get("softmax_scale"), seed) for seed in range(4))
                unlucky.extend(expected(call, hold)[0] for hold in holds)
            own, *others = (x[name].double() for x in (exact, *unlucky))
            return max(least(name), *(RATIO * (x - own)[own > -torch.inf].norm().item() for x in others))
        return least(name)

    def least(name: str) -> float:
        if name not in ("out", "dq", "dk", "dv"):
            return 0.0
        numbers = {k: y for k, y in call.flags.items() if k in ("softcap", "softmax_scale")}
        before, after = (y["out"].reshape(dense.dout.shape).double() for y in (exact, in_dtype))
        return chance(name, dense, numbers, (before, after), Tokens(call).dropout(), call.q.dtype)

    failures = failures_of(results, wanted, in_dtype, like, call.told, spread=spread, by_chance=by_chance)
    failures = {name: text for name, text in failures.items() if not _is_nothing(results[name], exact[name])}
    assert not failures, f"{call.told}\n  " + "\n  ".join(failures.values())


def _spread(call: SequenceCall, exact: Results, in_dtype: Results, dense: Inputs) -> Results:
    """The result of `accuracy.deviations` with a sink: of dsink, and of dbias of one value per query."""
    assert call.sink is not None
    dense_results: Results = {"out": exact["out"].reshape(dense.dout.shape), "lse": formula_lse(exact, dense)}
    rows = row_variances(dense.to(torch.float64), dense_results, {"out": in_dtype["out"].reshape(dense.dout.shape)})
    spread = {"dsink": with_rounding(rows.sum((0, 2)), exact["dsink"], call.sink.dtype)}
    if call.bias is not None and call.bias.shape[-1] == 1 and dense.k.shape[1] > 0:
        own = torch.zeros(call.bias.shape, dtype=torch.float64, requires_grad=True)
        scores = Tokens(call).scores(own)
        assert scores is not None
        row_values = scores[..., 0]  # (1, H, queries), each the value that a row reads
        by_head = rows.unflatten(1, (row_values.shape[1], -1)).sum(2)
        (summed,) = torch.autograd.grad(row_values, own, by_head.sum_to_size(row_values.shape))
        spread["dbias"] = with_rounding(summed, exact["dbias"], call.bias.dtype)
    return spread


def formula_lse(exact: Results, dense: Inputs) -> Tensor:
    """lse of the dense call, (1, Hq, queries)."""
    lse = exact["lse"]
    assert lse is not None
    return (lse if lse.dim() == 2 else lse.transpose(0, 1).flatten(1))[None].double()


def _is_nothing(x: Tensor, reference: Tensor) -> bool:
    # Terms that cancel, and so are zero in exact arithmetic, have no relative error.
    return bool(reference.double().abs().max() < 1e-12) and bool(x.double().abs().max() < 1e-5)
