"""Calls with sequences as a kernel backend receives them, and their oracle: the formula, sequence by sequence.

`sequence_calls.py` draws what `attention` takes. Here bounds are written by hand: sequences may begin anywhere, any two
have a gap between them, and strides are those of a `SequenceView`'s own tensors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from accuracy import DEVIATIONS, LSE_ROUNDING, Results, deviations, error, norm_of
from cases import DEVICE, Case, Inputs
from layouts import LAYOUTS as STRIDES
from torch import Tensor

from flash_dmattn.backends.protocol import Backend
from flash_dmattn.masks.prepared.sequence_packing import pack_sequences
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import Flags, Layout, MaskView, NeedsGrad, Packing, SequenceSpec, SequenceView
from flash_dmattn.problem import inputs as attention
from flash_dmattn.reference import formula
from flash_dmattn.reference import yardstick as plain
from flash_dmattn.reference.yardstick import FLOOR, RATIO

LEAVES = ("q", "k", "v", "bias", "sink")
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
        return firsts, used, max(1, at + rng.choice((0, 0, 9)))

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
    found: dict[str, Tensor | None] = {}
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
            found[name] = x
        else:
            found[name] = x.masked_fill(~used[name].to(DEVICE), True if x.dtype == torch.bool else torch.nan)
    return replace(call, **found)


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
        found = backend.plan_backward(problem)(attention.Saved(x, out, lse), call.dout, call.dlse)
        results |= dict(zip((f"d{name}" for name in LEAVES), found, strict=False))
    return results


def _of_sequence(call: ViewCall, s: int, leaves: dict[str, Tensor | None]) -> Inputs:
    entry, rows = call.rows_of(s)
    at, keys = call.keys_of(s)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    assert q is not None and k is not None and v is not None
    return Inputs(
        q[entry, rows][None],
        k[at, keys][None],
        v[at, keys][None],
        call.scores_of(None if call.mask is None else call.mask.cpu(), call.flags.mask_packing, s),
        call.scores_of(leaves["bias"], call.flags.bias_packing, s),
        call.dout.cpu()[entry, rows][None].to(q.dtype),
        None if call.dlse is None else call.dlse.cpu()[entry, :, rows][None],
        leaves["sink"],
    )


def expected(call: ViewCall) -> tuple[Results, Results, dict[str, float], Tensor]:
    """The results in fp64, those of plain PyTorch in the dtype of the call, and how much rounding of out moves dsink.

    The third are, for each gradient, the size of the terms that may cancel in it; the last is a variance per head.
    """
    f = call.flags
    given: dict[str, Any] = {"window_size": (f.left, f.right), "softmax_scale": f.softmax_scale, "softcap": f.softcap}
    leaves: dict[str, Tensor | None] = {}
    own: dict[str, Tensor | None] = {}
    for name in LEAVES:
        x = getattr(call, name)
        own[name] = None if x is None else x.detach().cpu()
        leaves[name] = None if x is None else own[name].double().requires_grad_()
    out = torch.zeros(call.dout.shape, dtype=torch.float64)
    entries, rows, heads = call.q.shape[:3]
    lse = torch.full((entries, heads, rows), -torch.inf, dtype=torch.float64)
    low_out, low_lse = torch.zeros(out.shape), lse.float()
    present = {name: x for name, x in leaves.items() if x is not None}
    exact: Results = {f"d{name}": torch.zeros(x.shape, dtype=torch.float64) for name, x in present.items()}
    low: Results = {f"d{name}": torch.zeros(x.shape) for name, x in present.items()}
    sizes = dict.fromkeys(low, 0.0)
    variance = torch.zeros(heads, dtype=torch.float64)
    for s, (_, len_q, _, len_k) in enumerate(call.bounds):
        if len_q == 0:
            continue
        entry, at = call.rows_of(s)
        x = _of_sequence(call, s, leaves)
        if len_k == 0:
            if call.sink is not None:
                lse[entry, :, at] = low_lse[entry, :, at] = leaves["sink"].detach()[:, None]
                if x.dlse is not None:
                    has_sink = leaves["sink"].detach() > -torch.inf
                    moved_by = x.dlse.double().sum((0, 2)).masked_fill(~has_sink, 0.0)
                    exact["dsink"] += moved_by
                    low["dsink"] += moved_by.float()
            continue
        y, z = formula.attention(x.q, x.k, x.v, x.mask, x.bias, **given, sink=x.sink)
        out[entry, at], lse[entry, :, at] = y[0].detach(), z[0].detach()
        loss = (y * x.dout).sum()
        if x.dlse is not None:
            loss = loss + (torch.where(z > -torch.inf, z, 0.0) * x.dlse.double()).sum()
        found = torch.autograd.grad(loss, list(present.values()), allow_unused=True)
        for name, g in zip(present, found, strict=True):
            if g is not None:
                exact[f"d{name}"] += g
                sizes[f"d{name}"] += g.abs().sum().item()
        w = _of_sequence(call, s, {name: x if x is None else x.clone().requires_grad_() for name, x in own.items()})
        y, z = formula.attention(w.q, w.k, w.v, w.mask, w.bias, **given, sink=w.sink)
        low_out[entry, at], low_lse[entry, :, at] = y[0].detach().float(), z[0].detach()
        parts = plain.gradients(w.dout, w.dlse, w.q, w.k, w.v, w.mask, w.bias, **given, sink=w.sink)
        entry_k, keys = call.keys_of(s)
        low["dq"][entry, at] += parts[0][0].detach().float()
        for name, part in zip(("dk", "dv"), parts[1:3], strict=True):
            if call.table is None:
                low[name][entry_k, keys] += part[0].detach().float()
        if call.bias is not None:
            call.scores_of(low["dbias"], f.bias_packing, s).add_(parts[3].detach().float())
        if call.sink is not None:
            low["dsink"] += parts[4].detach().float()
            case = Case(needs_grad=("sink",))
            of_sequence = {"out": out[entry, at][None], "lse": lse[entry, :, at][None], "dsink": torch.zeros(heads)}
            found_d = deviations(case, replace(x, bias=None, sink=own["sink"]), of_sequence, {"out": y.detach()})
            variance += found_d["dsink"].square()
    low = {name: x.to(own[name[1:]].dtype) for name, x in low.items()}
    exact |= {"out": out, "lse": lse}
    low |= {"out": low_out.to(call.q.dtype), "lse": low_lse}
    return exact, low, sizes, variance


def assert_accurate(results: Results, call: ViewCall) -> None:
    """The rule of `accuracy.assert_accurate`: 1.5 times the error of plain PyTorch, plus 1e-5."""
    exact, low, sizes, variance = expected(call)
    largest = exact["lse"].abs().nan_to_num(posinf=0.0).max().item()
    floor_of_gradients = min(max(FLOOR, LSE_ROUNDING * largest), 1e-2)
    failures = []
    for name, x in results.items():
        leaf = name.removeprefix("d")
        if name.startswith("d") and not getattr(call.needs, leaf):
            assert x is None, f"{call.told}: {name} was computed though nothing asks for it"
            continue
        assert x is not None, f"{call.told}: {name} is missing"
        if name.startswith("d"):
            like = getattr(call, leaf)
            assert x.shape == like.shape and x.dtype == like.dtype, f"{call.told}: {name} is {x.shape}, {x.dtype}"
        reference = exact[name]
        found, by_plain = error(x, reference), error(low[name], reference)
        allowed = RATIO * by_plain + (floor_of_gradients if name.startswith("d") else FLOOR)
        norm = max(norm_of(reference, None), 1e-300)
        of_chance = 0.0
        if name == "dsink":
            of_chance = DEVIATIONS * variance.sum().sqrt().item() + torch.finfo(x.dtype).eps * norm
        elif name == "dbias" and call.bias.shape[3] == 1 and call.sink is not None:
            of_chance = DEVIATIONS * variance.sum().sqrt().item()
        # What cancels to nothing has no relative error.
        cancels = norm <= 1e-12 * max(1.0, sizes.get(name, 0.0)) and bool((x.abs() < 1e-5).all())
        if not found <= allowed + of_chance / norm and not cancels:
            failures.append(f"{name}: error {found:.3e}, limit {allowed:.3e}")
    assert not failures, f"{call.told}\n  {call.flags}\n  " + "\n  ".join(failures)
