"""The one comparison rule of the suite: a backend's error against fp64 beside that of plain PyTorch in its dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Case, Inputs
from torch import Tensor

from flash_dmattn.reference import formula
from flash_dmattn.reference import yardstick as plain
from flash_dmattn.reference.yardstick import FLOOR, RATIO

Results = dict[str, Tensor | None]

GRADIENTS = ("dq", "dk", "dv", "dbias")
# fp64 backends have no lower-precision yardstick: they differ from the oracle by the order of their sums.
FLOOR_FP64 = 1e-11
# A backward pass recomputes p = exp(s - lse) from the fp32 lse of the contract, so p is off by lse's own rounding.
# From |lse| = 84 on that is more than the floor; at the logits of 1e4 that the suite reaches it is 1e-3.
LSE_ROUNDING = 2.0**-23


def run(function: Callable[..., tuple[Tensor, ...]], case: Case, inputs: Inputs) -> Results:
    """(out, lse) of a function with the call's signature, and the gradients the case asks for."""
    leaves = [
        x.detach().requires_grad_(name in case.needs_grad) if x is not None else None for name, x in inputs.floats()
    ]
    q, k, v, bias = leaves
    out, lse = function(q, k, v, inputs.mask, bias, **case.flags())[:2]
    results: Results = {"out": out.detach(), "lse": lse.detach(), **dict.fromkeys(GRADIENTS)}
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    if wanted:
        pairs = [(out, inputs.dout)]
        if inputs.dlse is not None:
            # The caller's loss must not use the lse of an empty row, which is -inf whatever the inputs.
            pairs.append((torch.where(lse > -torch.inf, lse, torch.zeros_like(lse)), inputs.dlse))
        total = sum((y.to(torch.float64) * dy.to(torch.float64)).sum() for y, dy in pairs)
        total.backward()
    for name, x in zip(GRADIENTS, leaves, strict=True):
        results[name] = None if x is None or not x.requires_grad else x.grad
    return results


def assert_empty_rows_ignore_dlse(function: Callable[..., tuple[Tensor, ...]], case: Case, inputs: Inputs) -> None:
    """Whatever a caller sends back through the lse of an empty row, -inf, it counts for nothing in any gradient."""
    leaves = [x.detach().requires_grad_() for _, x in inputs.floats() if x is not None]
    out, lse = function(*leaves[:3], inputs.mask, leaves[3], **case.flags())[:2]
    empty = lse == -torch.inf
    assert empty.any() and not empty.all()
    sent = [torch.ones_like(lse).masked_fill(empty, x) for x in (0.0, torch.inf, torch.nan)]
    wanted, *found = (torch.autograd.grad((out, lse), leaves, (inputs.dout, x), retain_graph=True) for x in sent)
    for gradients in found:
        for x, y in zip(gradients, wanted, strict=True):
            assert torch.equal(x, y)


def oracle(case: Case, inputs: Inputs) -> Results:
    """The formula in fp64."""
    return run(formula.attention, case, inputs.to(torch.float64))


def yardstick(case: Case, inputs: Inputs) -> Results:
    """What plain PyTorch makes of the formulas in the case's own dtype, softmax in fp32."""
    x, flags = inputs, case.flags()
    out, lse = formula.attention(x.q, x.k, x.v, x.mask, x.bias, **flags)
    gradients = plain.gradients(x.dout, x.dlse, x.q, x.k, x.v, x.mask, x.bias, **flags)
    return {"out": out, "lse": lse, **dict(zip(GRADIENTS, gradients, strict=True))}


def gross(case: Case, inputs: Inputs) -> Results:
    """The gradients with every term taken by its size: how large the parts are that cancel in a gradient of zero."""
    x = inputs.to(torch.float64)
    heads_k = x.k.shape[2]
    f = case.flags()
    scale = formula.default_scale(x.q, f["softmax_scale"])
    s, _ = formula.scores(x.q, x.k, x.mask, x.bias, f["is_causal"], scale, f["softcap"], f["window_size"])
    p, _ = formula.softmax(s)
    dout, q = (t.unflatten(2, (heads_k, -1)).abs() for t in (x.dout, x.q))
    dp = torch.einsum("bihgd,bjhd->bhgij", dout, x.v.abs())
    ds = p * (dp + (p * dp).sum(-1, keepdim=True))
    if x.dlse is not None:
        ds = ds + p * x.dlse.abs().unflatten(1, (heads_k, -1)).unsqueeze(-1)
    sizes: Results = {
        "dq": abs(scale) * torch.einsum("bhgij,bjhd->bihgd", ds, x.k.abs()).flatten(2, 3),
        "dk": abs(scale) * torch.einsum("bhgij,bihgd->bjhd", ds, q),
        "dv": torch.einsum("bhgij,bihgd->bjhd", p, dout),
    }
    if x.bias is not None:
        own = formula.grouped(x.bias, heads_k, x.q.shape[2]).shape
        sizes["dbias"] = ds.sum_to_size(own)
    return sizes


def error(x: Tensor, exact: Tensor, size: Tensor | None = None) -> float:
    """||x - exact|| / ||exact||; infinities must stand in the same places, NaN nowhere.

    A value that is zero in exact arithmetic has no relative error: it is measured against the terms that cancel.
    """
    x, exact = x.double().cpu(), exact.double().cpu()
    if x.shape != exact.shape or not torch.equal(x == -torch.inf, exact == -torch.inf):
        return float("inf")
    finite = exact > -torch.inf
    norm = exact[finite].norm().item()
    if size is not None:
        terms = size.norm().item()
        if norm <= 1e-12 * terms:
            norm = terms
    difference = (x[finite] - exact[finite]).norm().item()
    if difference != difference:
        return float("inf")
    return difference / norm if norm > 0 else difference


def assert_accurate(got: Results, case: Case, inputs: Inputs, exact: Results | None = None) -> None:
    """Every result within 1.5x the error of plain PyTorch in that dtype, plus 1e-5; shapes and dtypes as promised."""
    exact = oracle(case, inputs) if exact is None else exact
    in_dtype = yardstick(case, inputs)
    sizes = gross(case, inputs) if case.needs_grad else {}
    largest = exact["lse"].abs().nan_to_num(posinf=0.0).max().item() if exact["lse"].numel() else 0.0
    gradient_floor = min(max(FLOOR, LSE_ROUNDING * largest), 1e-2)
    like = dict(zip(("out", *GRADIENTS), (inputs.q, inputs.q, inputs.k, inputs.v, inputs.bias), strict=True))
    failures = []
    for name, x in got.items():
        reference = exact[name]
        if reference is None:
            assert x is None, f"{case}: {name} was computed though nothing asks for it"
            continue
        assert x is not None, f"{case}: {name} is missing"
        if name in like:
            assert x.dtype == like[name].dtype, f"{case}: {name} has dtype {x.dtype}"
        if name in GRADIENTS:
            assert x.shape == like[name].shape, f"{case}: {name} has shape {tuple(x.shape)}"
        found = error(x, reference, sizes.get(name))
        if x.dtype == case.dtype == torch.float64:
            limit = FLOOR_FP64
        else:
            floor = gradient_floor if name in GRADIENTS else FLOOR
            limit = RATIO * error(in_dtype[name], reference, sizes.get(name)) + floor
        if not found <= limit:
            failures.append(f"{name}: error {found:.3e}, limit {limit:.3e}")
    assert not failures, f"{case.repro()}\n  " + "\n  ".join(failures)
