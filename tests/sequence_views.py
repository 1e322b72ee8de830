"""Calls with sequences as a kernel backend receives them; their oracle is the one of `sequence_calls.py`.

`sequence_calls.py` draws calls of `attention`. Here bounds are written by hand: sequences may begin anywhere, with gaps
between them, and tables may name wrong pages, which kernels clamp.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import sequence_calls
import torch
from accuracy import Results
from cases import DEVICE
from layouts import LAYOUTS as STRIDES
from sequence_calls import LEAVES, SequenceCall
from torch import Tensor

from flash_dmattn import Sequences
from flash_dmattn.backends.protocol import Backend
from flash_dmattn.masks.prepared.sequence_packing import pack_sequences
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import Flags, Layout, MaskView, NeedsGrad, Packing, SequenceSpec, SequenceView
from flash_dmattn.problem import inputs as attention

LAYOUTS: tuple[Layout, ...] = ("packed", "packed", "packed", "padded", "paged", "paged_packed")


@dataclass(frozen=True)
class ViewCall:
    """The arguments of `KernelBackend.forward` and `backward`, and how they were drawn."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    sink: Tensor | None
    bounds: tuple[tuple[int, int, int, int], ...]
    table: Tensor | None
    flags: Flags
    dout: Tensor
    dlse: Tensor | None
    needs: NeedsGrad
    told: str
    prepares: bool = False  # whether kernels receive the mask as tiles

    @property
    def view(self) -> SequenceView:
        bounds = torch.tensor(self.bounds, dtype=torch.int32, device=DEVICE).view(-1, 4)
        return SequenceView(bounds, self.table)

    @property
    def mask_view(self) -> MaskView:
        if self.mask is None:
            return MaskView()
        if not self.prepares:
            return MaskView("dense", (self.mask,))
        f, bounds = self.flags, self.view.bounds
        rows_k = self.k.shape[1] if self.table is None else self.table.shape[1] * self.k.shape[1]
        spec = SequenceSpec(f.layout, len(bounds), self.q.shape[1], rows_k, f.max_seqlen_q, f.max_seqlen_k)
        return MaskView("sequence_tiles", tuple(pack_sequences(self.mask, bounds, f.mask_packing, spec, f.window)))

    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in ("q", "k", "v", "mask", "bias", "dout", "dlse")}

    def flat(self, name: str, x: Tensor | None) -> Tensor | None:
        """One of the tensors, or a result, in the shape in which `attention` has it."""
        leaf, f = name.removeprefix("d"), self.flags
        is_packed = {"k": f.packs_keys, "v": f.packs_keys, "sink": False}.get(leaf, f.packs_queries)
        if leaf in ("mask", "bias"):
            is_packed = getattr(f, f"{leaf}_packing") != "none"
        return x[0] if is_packed and x is not None else x

    def public(self) -> SequenceCall:
        """The same call of `attention`, for the oracle."""
        f, table = self.flags, self.table
        table = None if table is None else table.clamp(0, self.k.shape[0] - 1)
        flags = {"is_causal": False, "window_size": (f.left, f.right), "softmax_scale": f.softmax_scale}
        return SequenceCall(
            *(self.flat(name, getattr(self, name)) for name in ("q", "k", "v", "mask", "bias", "sink")),
            Sequences(f.layout, block_table=table),  # the oracle takes the rest from the bounds
            self.bounds,
            flags | {"softcap": f.softcap, "dropout_p": 0.0},
            self.flat("dout", self.dout),
            self.flat("dlse", self.dlse),
            tuple(name for name in LEAVES if getattr(self.needs, name)),
            self.told,
        )

    def rows_of(self, s: int) -> tuple[int, slice]:
        """The entry of q and the rows of it that are of a sequence."""
        first, number = self.bounds[s][:2]
        return (0 if self.flags.packs_queries else s), slice(first, first + number)

    def keys_of(self, s: int) -> tuple[Tensor, Tensor]:
        """The entry and the row in it of k, of each key of a sequence."""
        first, number = self.bounds[s][2:]
        places = torch.arange(number)
        if self.table is not None:
            page_size = self.k.shape[1]
            page = self.table[s].cpu()[places // page_size].long().clamp(0, self.k.shape[0] - 1)
            return page, places % page_size
        return torch.full_like(places, 0 if self.flags.packs_keys else s), places + first

    def scores_of(self, x: Tensor | None, packing: Packing, s: int) -> Tensor | None:
        """(1, H, len_q or 1, len_k or 1) of a mask or a bias."""
        if x is None:
            return None
        first_q, len_q, first_k, len_k = self.bounds[s]
        start_q, start_k = first_q if packing == "queries" else 0, first_k if packing == "keys" else 0
        x = x[s : s + 1] if x.shape[0] > 1 else x
        x = x[:, :, start_q : start_q + len_q] if x.shape[2] > 1 else x
        return x[..., start_k : start_k + len_k] if x.shape[3] > 1 else x


def draw(
    number: int,
    lengths: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    most: int = 40,
    lengths_k: tuple[int, ...] | None = None,
) -> ViewCall:
    """The call of a number, of at most so many sequences; `lengths` are of keys, too, unless those have others."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    layout = rng.choice(LAYOUTS)
    packs_q, packs_k = layout in ("packed", "paged_packed"), layout == "packed"
    count, dtype = rng.choice([n for n in (1, 1, 2, 3, 3, 7, 40) if n <= most]), rng.choice(dtypes)
    if count > 7:
        lengths = tuple(n for n in lengths if n < 40)
    heads_k, group = rng.choice((1, 2)), rng.choice((1, 1, 2, 3))
    heads, dim = heads_k * group, rng.choice((8, 16, 24))
    dim_v = rng.choice((dim, dim, 8, 32))

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    def side(is_packed: bool, lengths: tuple[int, ...]) -> tuple[list[int], list[int], int]:
        """Firsts, lengths, and rows of the tensor."""
        used = [rng.choice(lengths) for _ in range(count)]
        if not is_packed:
            return [0] * count, used, max(1, max(used)) + rng.choice((0, 0, 5))
        gaps = rng.choice(((0,), (0, 0, 1, 50)))
        at, firsts = rng.choice((0, 0, 3, 100)), []
        for n in used:
            firsts.append(at)
            at += n + rng.choice(gaps)
        return firsts, used, max(2, at + rng.choice((0, 0, 9)))  # `attention` reads a bias of one row as one of keys

    first_q, len_q, rows_q = side(packs_q, lengths)
    first_k, len_k, rows_k = side(packs_k, lengths_k or lengths)
    max_q = max(1, max(len_q)) + rng.choice((0, 0, 3)) if packs_q else rows_q
    max_k = max(1, max(len_k)) + rng.choice((0, 0, 3)) if packs_k else rows_k
    table, k_entries, k_rows = None, 1 if packs_k else count, rows_k
    if layout.startswith("paged"):
        page_size = rng.choice((1, 3, 16, 32, 64))
        per_sequence = -(-max_k // page_size)
        max_k = per_sequence * page_size
        pages = count * per_sequence + rng.choice((0, 2))
        order = torch.randperm(pages, generator=generator)[: count * per_sequence]
        table = order.view(count, per_sequence).to(torch.int32)
        if rng.random() < 0.3:  # wrong pages, which kernels clamp
            table[rng.randrange(count), rng.randrange(per_sequence)] = rng.choice((-(2**31), -1, pages, 2**31 - 1))
        table, k_entries, k_rows = table.to(DEVICE), pages, page_size

    def form(name: str) -> tuple[tuple[int, ...], Packing]:
        h = rng.choice((1, heads_k, heads))
        packings: list[Packing] = ["none", "none"] + packs_q * ["queries", "queries"] + packs_k * ["keys"]
        packing = rng.choice(packings)
        i, j = rng.choice((1, max_q)), rng.choice((1, max_k, max_k))
        b = rng.choice((1, count))
        if packing == "queries":
            b, i, j = 1, rows_q, rng.choice((1, max_k, max_k))
        elif packing == "keys":
            b, i, j = 1, 1, rows_k
        return (b, h, i, j), packing

    def expanded(x: Tensor) -> Tensor:
        """The same shape, with a stride of 0 on one dim."""
        dim = rng.randrange(4)
        return x.narrow(dim, 0, 1).expand(x.shape)

    mask = bias = None
    mask_packing: Packing = "none"
    bias_packing: Packing = "none"
    if rng.random() < 0.5:
        shape, mask_packing = form("mask")
        mask = (torch.rand(shape, generator=generator) < rng.choice((0.8, 0.5, 0.05))).to(DEVICE)
        mask = expanded(mask) if rng.random() < 0.2 else mask
    if rng.random() < 0.7:
        shape, bias_packing = form("bias")
        bias = normal(*shape, dtype=rng.choice((dtype, dtype, torch.float32)))
        bias = expanded(bias) if rng.random() < 0.2 else bias
    sink = None
    if rng.random() < 0.3:
        sink = normal(heads, dtype=rng.choice((dtype, torch.float32)))
        sink[rng.randrange(heads)] = rng.choice((-torch.inf, 1.0))
    left, right = rng.choice(((-1, -1), (-1, -1), (-1, 0), (-1, 0), (3, 0), (5, 9), (-1, 2), (20, -1), (40, 40)))
    scale, cap = rng.choice((dim**-0.5, dim**-0.5, 0.7, -0.2)), rng.choice((0.0, 0.0, 0.0, 5.0))
    flags = Flags(left, right, scale, cap, rng.random() < 0.5, 1, 1, layout, max_q, max_k, mask_packing, bias_packing)
    needs = rng.choice(
        (
            NeedsGrad(True, True, True, True, True),
            NeedsGrad(True, True, True, True, True),
            NeedsGrad(True, True, True),
            NeedsGrad(q=True),
            NeedsGrad(k=True, sink=True),
            NeedsGrad(v=True),
            NeedsGrad(bias=True),
        )
    )
    needs = needs._replace(bias=needs.bias and bias is not None, sink=needs.sink and sink is not None)
    entries_q = 1 if packs_q else count
    return ViewCall(
        normal(entries_q, rows_q, heads, dim),
        normal(k_entries, k_rows, heads_k, dim),
        normal(k_entries, k_rows, heads_k, dim_v),
        mask,
        bias,
        sink,
        tuple(zip(first_q, len_q, first_k, len_k, strict=True)),
        table,
        flags,
        normal(entries_q, rows_q, heads, dim_v),
        normal(entries_q, heads, rows_q, dtype=torch.float32) if rng.random() < 0.5 else None,
        NeedsGrad() if layout.startswith("paged") else needs,
        f"draw({number}, {lengths}, {dtypes})",
    )


def spoiled(call: ViewCall, others: int | None = None) -> ViewCall:
    """The call with NaN, and True in the mask, wherever no sequence reads; or none but that of this number does."""
    gradients: dict[str, Tensor | None] = {}
    numbers = range(len(call.bounds)) if others is None else (others,)
    used = {name: torch.zeros(x.shape, dtype=torch.bool) for name, x in call.tensors().items() if x is not None}
    for s in numbers:
        entry, rows = call.rows_of(s)
        at, keys = call.keys_of(s)
        used["q"][entry, rows] = used["dout"][entry, rows] = True
        used["k"][at, keys] = used["v"][at, keys] = True
        if "dlse" in used:
            used["dlse"][entry, :, rows] = True
        for name in ("mask", "bias"):
            if name in used:
                call.scores_of(used[name], getattr(call.flags, f"{name}_packing"), s)[...] = True
    for name, x in call.tensors().items():
        # Dims of stride 0 hold what a sequence reads, and stay as they are.
        if x is None or 0 in x.stride() or x.numel() == 0:
            gradients[name] = x
        else:
            gradients[name] = x.masked_fill(~used[name].to(DEVICE), True if x.dtype == torch.bool else torch.nan)
    return replace(call, **gradients)


def moved(call: ViewCall, name: str) -> ViewCall:
    """The call with its tensors in other strides: see `layouts.py`."""
    change = STRIDES[name]
    return replace(call, **{n: x if x is None or 0 in x.stride() else change(x) for n, x in call.tensors().items()})


def run(call: ViewCall, backend: Backend) -> Results:
    """out, lse and gradients, None of those that the call does not need, as a backend makes them."""
    x = attention.Inputs(call.q, call.k, call.v, call.mask_view, call.bias, call.sink, call.view)
    problem = describe_operands(x, call.flags, call.needs)
    out, lse = backend.plan_forward(problem)(x)
    results: Results = {"out": out, "lse": lse, **dict.fromkeys(f"d{name}" for name in LEAVES)}
    if any(call.needs):
        assert backend.plan_backward is not None
        gradients = backend.plan_backward(problem)(attention.Saved(x, out, lse), call.dout, call.dlse)
        results |= dict(zip((f"d{name}" for name in LEAVES), gradients, strict=False))
    return results


def assert_accurate(results: Results, call: ViewCall) -> None:
    """The rule of `sequence_calls.assert_accurate`."""
    for name, x in results.items():
        if x is not None and name.startswith("d"):
            assert x.shape == getattr(call, name[1:]).shape, f"{call.told}: {name} is {x.shape}"
    sequence_calls.assert_accurate({name: call.flat(name, x) for name, x in results.items()}, call.public())
