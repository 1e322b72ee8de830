"""The one comparison rule of the suite: errors against fp64, of a backend and of plain PyTorch in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases import GREAT, GREAT_MIN, HIDDEN, JUMPS, MEANS, SEEN, STEPS, Case, Inputs
from layouts import rearranged
from torch import Tensor

from flash_dmattn.biases import split
from flash_dmattn.reference import formula
from flash_dmattn.reference import yardstick as plain
from flash_dmattn.reference.distances import Distances, dense, distance_sums, values_of
from flash_dmattn.reference.yardstick import LSE_ROUNDING, RATIO, limits_of

Results = dict[str, Tensor | None]

GRADIENTS = ("dq", "dk", "dv", "dbias")
# fp64 backends have no lower-precision yardstick: they differ from the oracle by the order of their sums.
FLOOR_FP64 = 1e-11
# One sum over many rows has an error that is one sum of as many roundings, of either sign. The yardstick has such a sum
# of its own, which may be small by luck, so this number of standard deviations is allowed in addition.
DEVIATIONS = 5.0
# fp32 holds a score of 1e9 as a multiple of 64, so every implementation makes the softmax of rounded scores, and fp64
# does not. Beyond NOTHING_LEFT the oracle takes scores as fp32 holds them: p is a probability, and no constant
# in the scores of a row moves its gradients. Below, the error of plain PyTorch says how much fp32 holds, and
# `as_kernels_hold` how much at bad luck. Rows beyond GREAT_ROW are judged apart, for they would hide errors of others.
GREAT_ROW, NOTHING_LEFT = 1e5, 1e8


def run(
    function: Callable[..., tuple[Tensor, ...]], case: Case, inputs: Inputs, dropout: dict[str, Any] | None = None
) -> Results:
    """The results of a function with the call's signature, and the gradients the case asks for.

    `dropout` is what the function takes of it, if not what `attention` does, and then so is what it returns.
    """
    leaves = [
        x.detach().requires_grad_(name in case.needs_grad) if x is not None else None for name, x in inputs.floats()
    ]
    q, k, v, bias = leaves
    dropped: dict[str, Any] = case.dropping() if dropout is None else {**dropout, **case.asked()}
    torch.manual_seed(case.seed)  # which decides what is dropped
    if inputs.sink is not None:
        sink = dropped["sink"] = inputs.sink.detach().requires_grad_("sink" in case.needs_grad)
    if case.aux and dropout is None:
        dropped |= {"return_lse": False, "return_aux": case.request()}
    out, *rows = function(q, k, v, inputs.mask, case.passed(bias), **case.flags(), **dropped)
    if case.aux and dropout is None:
        rows = [x for x in rows[0] if x is not None]
    lse, *others = rows
    named = dict(zip(case.aux, others, strict=False))
    results: Results = {"out": out.detach(), "lse": lse.detach(), **dict.fromkeys(GRADIENTS)}
    results |= {name: x.detach() for name, x in named.items()}
    wanted = [x for x in (*leaves, dropped.get("sink")) if x is not None and x.requires_grad]
    if wanted:
        pairs = [(out, inputs.dout)]
        if inputs.dentropy is not None:
            pairs.append((named["entropy"], inputs.dentropy))
        if inputs.dlse is not None:
            # The caller's loss must not use the lse of an empty row without a sink, which is -inf whatever the inputs.
            pairs.append((torch.where(lse > -torch.inf, lse, torch.zeros_like(lse)), inputs.dlse))
        total = sum((y.to(torch.float64) * dy.to(torch.float64)).sum() for y, dy in pairs)
        total.backward()
    for name, x in zip(GRADIENTS, leaves, strict=True):
        results[name] = None if x is None or not x.requires_grad else x.grad
    if inputs.sink is not None:
        results["dsink"] = sink.grad
    return results


def assert_empty_rows_ignore_dlse(function: Callable[..., tuple[Tensor, ...]], case: Case, inputs: Inputs) -> None:
    """Whatever a caller sends back through the lse of an empty row, -inf, it counts for nothing in any gradient."""
    leaves = [x.detach().requires_grad_() for _, x in inputs.floats() if x is not None]
    out, lse = function(*leaves[:3], inputs.mask, leaves[3], **case.flags())[:2]
    empty = lse == -torch.inf
    assert empty.any() and not empty.all()
    sent = [torch.ones_like(lse).masked_fill(empty, x) for x in (0.0, torch.inf, torch.nan)]
    wanted, *both = (torch.autograd.grad((out, lse), leaves, (inputs.dout, x), retain_graph=True) for x in sent)
    for gradients in both:
        for x, y in zip(gradients, wanted, strict=True):
            assert torch.equal(x, y)


def oracle(case: Case, inputs: Inputs, hold: Callable[[Tensor], Tensor] | None = None) -> Results:
    """The results in fp64; `hold` says what becomes of each score, by default only of great ones."""
    if hold is None and case.data in (*GREAT, *GREAT_MIN) and case.dtype != torch.float64:
        hold = as_fp32_holds

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Any, **flags: Any) -> tuple[Tensor, ...]:
        values, numbers = split(bias)
        if numbers is not None:
            bias = Distances(values, numbers.zero, numbers.outside == "clamp")
        bias = bias if hold is None else with_scores_held(q, k, bias, flags, hold)
        return formula.attention(q, k, v, mask, bias, **flags)

    return run(attention, case, inputs.to(torch.float64), {"dropout": case.dropout(inputs.q.device)})


def with_scores_held(
    q: Tensor, k: Tensor, bias: Any, flags: dict[str, Any], hold: Callable[[Tensor], Tensor]
) -> Tensor:
    """A bias (B, Hq, Lq, Lk) with which scores are what `hold` makes of them; differentiable in that of the call."""
    f = (False, flags.get("softmax_scale"), flags.get("softcap", 0.0), None)
    s = formula.scores(q, k, None, bias, *f)[0].detach()
    held = hold(s)
    moved = torch.where(held == s, 0.0, held - s)
    if isinstance(bias, Distances):
        bias = dense(bias, q.shape[1], k.shape[1])
    return (moved if bias is None else moved + formula.grouped(bias, k.shape[2], q.shape[2])).flatten(1, 2)


def as_fp32_holds(s: Tensor) -> Tensor:
    """Great scores rounded to fp32."""
    return torch.where(s.abs() > NOTHING_LEFT, s.float().double(), s)


def as_kernels_hold(inputs: Inputs, softmax_scale: float | None, seed: int) -> Callable[[Tensor], Tensor]:
    """How kernels may hold scores in fp32: in base 2, off by twice the deviation of a sum of D products one by one.

    Partial sums of products that are much alike grow evenly, each is rounded, and a third of their squares counts. With
    seed 0 all scores are off to one side, as tensor cores cut sums toward zero.
    """
    x, scale = inputs.to(torch.float64), formula.default_scale(inputs.q, softmax_scale)
    sizes, _ = formula.scores(x.q.abs(), x.k.abs(), None, None, False, abs(scale), 0.0, None)
    signs = torch.randn(sizes.shape, generator=torch.Generator().manual_seed(seed)).sign().to(sizes.device)
    signs = signs if seed else -torch.ones_like(signs)
    off = signs * sizes * (x.q.shape[-1] / 3) ** 0.5 * 2.0**-23
    return lambda s: ((s + off) / math.log(2.0)).float().double() * math.log(2.0)


def yardstick(case: Case, inputs: Inputs) -> Results:
    """Compute the formulas in plain PyTorch, in the dtype of the case, softmax in fp32."""
    x, flags = case.in_formula(inputs), case.flags()
    asked = {"sink": x.sink, "dropout": case.dropout(x.q.device), "asked": case.asked()}
    out, lse, *others = in_plain_pytorch(case.data, x, **asked, **flags)
    return {"out": out, "lse": lse, **dict(zip((*case.aux, *GRADIENTS, "dsink"), others, strict=False))}


def in_plain_pytorch(data: str, x: Any, asked: Mapping[str, bool] = {}, **flags: Any) -> tuple[Tensor | None, ...]:
    """Compute out, lse, what else is asked for, and gradients.

    Products far from 0 stay in fp32, as in every backend: rounded to 16 bits they would be off by tens, and then
    anything would be allowed.
    """
    bias, heads = x.bias, (x.k.shape[2], x.q.shape[2])
    has_products_in_fp32 = data in (*MEANS, *STEPS) and not flags.get("softcap")
    if has_products_in_fp32:
        f = (False, flags.get("softmax_scale"), 0.0, None)
        rounded, _ = formula.scores(x.q, x.k, None, None, *f)
        scores, _ = formula.scores(x.q.float(), x.k.float(), None, bias, *f)
        bias = (scores - rounded).flatten(1, 2)
    forward = formula.attention(x.q, x.k, x.v, x.mask, bias, **asked, **flags)
    sent = {"dentropy": getattr(x, "dentropy", None)}
    gradients = list(plain.gradients(x.dout, x.dlse, x.q, x.k, x.v, x.mask, bias, **sent, **flags))
    if has_products_in_fp32:
        ds = gradients[3].unflatten(1, (heads[0], -1))
        gradients[3] = None if x.bias is None else formula.bias_gradient(ds, x.bias, heads[1])
    return *forward, *gradients


def gross(case: Case, inputs: Inputs, probability: float | None = None) -> Results:
    """The results with every term taken by its size: how large the parts are that cancel in a gradient of zero.

    With a probability, every p has it.
    """
    x = case.in_formula(inputs.to(torch.float64))
    heads_k = x.k.shape[2]
    f = case.flags()
    scale = formula.default_scale(x.q, f["softmax_scale"])
    s, _ = formula.scores(x.q, x.k, x.mask, x.bias, f["is_causal"], scale, f["softcap"], f["window_size"])
    p, lse = formula.softmax(s, x.sink)
    p = p if probability is None else torch.full_like(p, probability)
    dout, q = (t.unflatten(2, (heads_k, -1)).abs() for t in (x.dout, x.q))
    dp = torch.einsum("bihgd,bjhd->bhgij", dout, x.v.abs())
    weights, dropout = p, case.dropout(x.q.device)
    if dropout is not None:
        weights, dp = dropout.apply(p), dropout.apply(dp)
    ds = p * (dp + (p * dp).sum(-1, keepdim=True))
    if x.dlse is not None:
        ds = ds + p * x.dlse.abs().unflatten(1, (heads_k, -1)).unsqueeze(-1)
    terms = None
    if x.dentropy is not None:
        share = None if x.sink is None else share_of_sink(x.sink, lse.flatten(1, 2)).unflatten(1, (heads_k, -1))
        terms = x.dentropy.abs().unflatten(1, (heads_k, -1)) * formula.row_entropy(p, share)
        # Backends take log(p) as a score minus lse.
        logs = lse.masked_fill(lse == -torch.inf, 0.0).abs().unsqueeze(-1) - formula.log_of(p)
        ds = ds + p * logs * x.dentropy.abs().unflatten(1, (heads_k, -1)).unsqueeze(-1)
        ds = ds + p * terms.unsqueeze(-1)
    sizes: Results = {
        "out": torch.einsum("bhgij,bjhd->bihgd", weights, x.v.abs()).flatten(2, 3),
        "dq": abs(scale) * torch.einsum("bhgij,bjhd->bihgd", ds, x.k.abs()).flatten(2, 3),
        "dk": abs(scale) * torch.einsum("bhgij,bihgd->bjhd", ds, q),
        "dv": torch.einsum("bhgij,bihgd->bjhd", weights, dout),
    }
    if x.bias is not None:
        sizes["dbias"] = formula.bias_gradient(ds, x.bias, x.q.shape[2])
    if x.sink is not None:
        rows = (p * dp).sum(-1).flatten(1, 2)
        rows = rows if x.dlse is None else rows + x.dlse.abs()
        rows = rows if terms is None else rows + terms.flatten(1, 2)
        sizes["dsink"] = (share_of_sink(x.sink, lse.flatten(1, 2)) * rows).sum((0, 2))
    return sizes


def share_of_sink(sink: Tensor, lse: Tensor) -> Tensor:
    """(B, Hq, Lq), what the sink takes of each row; 0 in a row without keys and without a sink, or of no sequence."""
    return torch.exp(sink[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)


def row_variances(x: Inputs, exact: Results, in_dtype: Results) -> Tensor:
    """(B, Hq, Lq), what rounding of out and of lse leaves in each row's part of dsink; all in fp64, with a sink."""
    out, lse = exact["out"], exact["lse"]
    out_term = (x.dout * (in_dtype["out"].double() - out)).square().sum(-1).mT
    delta = (x.dout * out).sum(-1).mT
    if x.dlse is not None:
        delta = delta - x.dlse.masked_fill(lse == -torch.inf, 0.0)
    lse_term = (delta * LSE_ROUNDING * lse.nan_to_num(neginf=0.0)).square()
    share = share_of_sink(x.sink, lse)
    # The square of a lse is inf with a bias of finfo.min, and a sink of -inf has no share of it.
    return (share.square() * (out_term + lse_term)).masked_fill(share == 0, 0.0)


def with_rounding(variance: Tensor, exact: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Standard deviations of sums of such a variance, rounded to a dtype."""
    result_rounding = torch.zeros(()) if exact is None else exact.double() * torch.finfo(dtype).eps / 4
    allowed = (variance + result_rounding.square()).sqrt()
    assert allowed.isfinite().all(), "nothing is allowed by a limit that is no number"
    return allowed


def deviations(case: Case, inputs: Inputs, exact: Results, in_dtype: Results) -> Results:
    """The standard deviations that rounding of out, of lse and of the result leaves in sums over rows, with a sink.

    These are dsink, and dbias of one value per query. All else sums many keys of a row, or has many values.
    """
    allowed: Results = {}
    if inputs.sink is None or not case.needs_grad:
        return allowed
    rows = row_variances(inputs.to(torch.float64), exact, in_dtype)
    allowed["dsink"] = with_rounding(rows.sum((0, 2)), exact["dsink"], inputs.sink.dtype)
    if inputs.bias is not None and case.relative is None and inputs.bias.shape[3] == 1:
        groups = rows.unflatten(1, (inputs.k.shape[2], -1)).unsqueeze(-1)
        own = formula.grouped(inputs.bias, inputs.k.shape[2], inputs.q.shape[2]).shape
        summed = groups.sum_to_size(own).view(inputs.bias.shape)
        allowed["dbias"] = with_rounding(summed, exact["dbias"], inputs.bias.dtype)
    return allowed


def chance(
    name: str, x: Inputs, flags: dict[str, Any], outs: tuple[Tensor, Tensor], dropout: Any, dtype: torch.dtype
) -> float:
    """The size of what rounding leaves in a result at bad luck; `outs` are out in fp64 and in the dtype."""
    if name == "out":
        return unlucky_out(x, flags, dropout, dtype)
    if name == "dv":
        return chance_by_weights(x, flags, dropout, dtype)
    by_ds = 0.0 if name == "dbias" else chance_by_ds(name, x, flags, dropout, dtype)
    return math.hypot(by_ds, chance_by_delta(name, x, flags, *outs))


def probabilities(x: Inputs, flags: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """(B, Hk, G, Lq, Lk) of inputs in fp64, and the slope of the softcap."""
    settings = flags.get("is_causal", False), formula.default_scale(x.q, flags.get("softmax_scale"))
    s, slope = formula.scores(x.q, x.k, x.mask, x.bias, *settings, flags.get("softcap", 0.0), flags.get("window_size"))
    return formula.softmax(s, x.sink)[0], slope


def independent(variances: Tensor) -> Tensor:
    """How many equal variances vary as much as these do together; at least 1."""
    return (variances.sum().square() / variances.square().sum().clamp_min(1e-300)).clamp_min(1.0)


def rows_apart(p: Tensor, q: Tensor, variances: Tensor) -> Tensor:
    """How many rows of equal variance move dk as little together as these rows do; at least 1.

    Args:
        p: (B, Hk, G, Lq, Lk), the weights by which a row's delta moves dk along its q.
        q: (B, Lq, Hq, D).
        variances: (B, Lq, Hq), of the rows' deltas.
    """
    rows = q.unflatten(2, (p.shape[1], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (B, Hk, G Lq, D), as are p
    p, deviations = p.flatten(2, 3), variances.sqrt().unflatten(2, (p.shape[1], -1)).permute(0, 2, 3, 1).flatten(2, 3)
    trace = (deviations.square() * p.square().sum(-1) * rows.square().sum(-1)).sum()
    squares = trace.new_zeros(())
    for each_p, each_q, deviation in zip(*(x.flatten(0, 1) for x in (p, rows, deviations)), strict=True):
        for some in torch.arange(len(each_q), device=q.device).split(1024):
            alike = (each_p[some] @ each_p.mT) * (each_q[some] @ each_q.mT)
            squares += (deviation[some, None] * alike * deviation).square().sum()
    return (trace.square() / squares.clamp_min(1e-300)).clamp_min(1.0)


def chance_by_delta(name: str, x: Inputs, flags: dict[str, Any], out: Tensor, in_dtype: Tensor) -> float:
    """The size of what rounding of out leaves in dq, dk or dbias by way of delta, sum of dout times out, at bad luck.

    A row's delta moves its dq along the sum of p k, and the dk of each key along p q: one rounding of many for each row
    and head. Over many of these a backend has much the error of the yardstick, over few of them either may be lucky. So
    it may where rows move dk alike, as where q is uncentred. It moves dbias along p, which is positive: all rows whose
    dbias is one sum may move it together, and count as one.
    """
    x = x.to(torch.float64)
    weights, slope = probabilities(x, flags)
    p = formula.default_scale(x.q, flags.get("softmax_scale")) * (weights if slope is None else weights * slope)
    if name == "dbias":
        assert x.bias is not None
        if isinstance(x.bias, Distances):
            rows = x.bias.values.new_empty(()).expand(weights.shape[-2], x.bias.values.shape[-1])
            moved = distance_sums(weights, x.bias._replace(values=rows))
        else:
            moved = weights.sum(-1, keepdim=True) if x.bias.shape[3] == 1 else weights
        along = torch.einsum("bhgij->bihg", moved.square()).flatten(2)
    elif name == "dq":
        along = torch.einsum("bhgij,bjhd->bihgd", p, x.k).square().sum(-1).flatten(2)
    else:
        along = torch.einsum("bhgij->bihg", p.square()).flatten(2) * x.q.square().sum(-1)
    deltas = (x.dout * (in_dtype.double() - out)).square().sum(-1)
    variances = deltas * along
    if name == "dbias":
        own = formula.grouped(values_of(x.bias), x.k.shape[2], x.q.shape[2]).shape
        variances = variances.mT.unflatten(1, (x.k.shape[2], -1)).unsqueeze(-1).sum_to_size((*own[:-1], 1))
    number = rows_apart(p, x.q, deltas) if name == "dk" else independent(variances)
    allowed = (variances.sum().sqrt() * (1 + DEVIATIONS / (2 * number).sqrt())).item()
    assert math.isfinite(allowed), "nothing is allowed by a limit that is no number"
    return allowed


def chance_by_weights(x: Inputs, flags: dict[str, Any], dropout: Any, dtype: torch.dtype) -> float:
    """The size of what rounding of the weights to a dtype leaves in dv, at bad luck.

    dv sums dout by the softmax's weights, each rounded once, before or after dropout scales them. Over many weights a
    backend has much the error of the yardstick, over few of them either may be lucky.
    """
    x = x.to(torch.float64)
    weights, _ = probabilities(x, flags)
    if dropout is not None:
        weights = dropout.apply(weights)
    along = x.dout.square().sum(-1).unflatten(2, (x.k.shape[2], -1))
    # A rounding is at most half of eps, and as likely to be anything below. Steps of subnormal weights are all alike.
    least = torch.finfo(dtype).tiny * (1.0 if dropout is None else dropout.scale)
    steps = torch.where(weights > 0.0, weights.clamp_min(least), 0.0) * torch.finfo(dtype).eps
    variances = steps.square() / 12 * torch.einsum("bihg->bhgi", along).unsqueeze(-1)
    number = independent(variances)
    worst = torch.minimum((3 * number).sqrt(), 1 + DEVIATIONS / (2 * number).sqrt())
    allowed = (variances.sum().sqrt() * worst).item()
    assert math.isfinite(allowed), "nothing is allowed by a limit that is no number"
    return allowed


def chance_by_ds(name: str, x: Inputs, flags: dict[str, Any], dropout: Any, dtype: torch.dtype) -> float:
    """The size of what rounding of ds and of the result leaves in dq or dk, at bad luck.

    A row of dq sums k by ds, and a row of dk sums q by it. Where all of these vectors are alike, as uncentred ones are,
    the errors of a row are one sum, so that only rows may be lucky or not.
    """
    x = x.to(torch.float64)
    bias = dense(x.bias, x.q.shape[1], x.k.shape[1]) if isinstance(x.bias, Distances) else x.bias
    dense_bias = x.q.new_zeros(x.q.shape[0], x.k.shape[2], x.q.shape[2] // x.k.shape[2], x.q.shape[1], x.k.shape[1])
    dense_bias = dense_bias if bias is None else dense_bias + formula.grouped(bias, x.k.shape[2], x.q.shape[2])
    inputs = x.dout, x.dlse, x.q, x.k, x.v, x.mask, dense_bias.flatten(1, 2)
    dq, dk, _, ds = formula.gradients(*inputs, sink=x.sink, dropout=dropout, **flags)[:4]
    _, slope = probabilities(x, flags)
    ds = (
        formula.default_scale(x.q, flags.get("softmax_scale"))
        * ds.view_as(dense_bias)
        * (1.0 if slope is None else slope)
    )
    if name == "dq":
        sums = torch.einsum("bhgij,bjh->bihg", ds.square(), x.k.square().sum(-1)).flatten(2)
    else:
        sums = torch.einsum("bhgij,bihg->bjh", ds.square(), x.q.square().sum(-1).unflatten(2, dense_bias.shape[1:3]))
    result = dq if name == "dq" else dk
    variances = torch.finfo(dtype).eps ** 2 / 12 * (sums + result.square().sum(-1))
    allowed = (variances.sum().sqrt() * (1 + DEVIATIONS / (2 * independent(variances)).sqrt())).item()
    assert math.isfinite(allowed), "nothing is allowed by a limit that is no number"
    return allowed


def unlucky_out(x: Inputs, flags: dict[str, Any], dropout: Any, dtype: torch.dtype) -> float:
    """1.5 times the error of plain PyTorch in out, at the worst of the sizes at which weights may be rounded.

    PyTorch divides weights by their sum before it rounds them, kernels after the product. In a row whose weights are
    almost equal, all of them lie just below a power of two for one, where roundings are small, and just above for the
    other.
    """
    x = x.to(torch.float64)
    weights, _ = probabilities(x, flags)
    if dropout is not None:
        weights = dropout.apply(weights)
    top = weights.amax(-1, keepdim=True).clamp_min(1e-300)
    exact = torch.einsum("bhgij,bjhd->bihgd", weights, x.v)
    worst = 0.0
    for size in torch.logspace(0, 1, 18, base=2.0, dtype=torch.float64).tolist():
        rounded = (weights / top * size).to(dtype).double() / size * top
        out = torch.einsum("bhgij,bjhd->bihgd", rounded, x.v).to(dtype)
        worst = max(worst, (out.double() - exact).norm().item())
    assert math.isfinite(worst), "nothing is allowed by a limit that is no number"
    return RATIO * worst


def norm_of(exact: Tensor, size: Tensor | None) -> float:
    """The norm by which an error is divided: ||exact||.

    A value that is zero in exact arithmetic has no relative error: it is measured against the terms that cancel.
    """
    norm = exact[exact > -torch.inf].double().norm().item()
    if size is not None:
        terms = size.norm().item()
        if norm <= 1e-12 * terms:
            norm = terms
    return norm


def rounding_of_oracle(exact: Tensor, size: Tensor | None) -> float:
    """The error that the fp64 formula may have itself, where terms of that size cancel but for a small rest."""
    if size is None:
        return 0.0
    allowed = 4 * torch.finfo(torch.float64).eps * size.norm().item() / max(norm_of(exact, size), 1e-300)
    assert math.isfinite(allowed), "everything is allowed by a limit that is no number"
    return allowed


def error(x: Tensor, exact: Tensor, size: Tensor | None = None) -> float:
    """||x - exact|| / ||exact||; infinities must stand in the same places, NaN nowhere."""
    x, exact = x.double().cpu(), exact.double().cpu()
    if x.shape != exact.shape or not torch.equal(x == -torch.inf, exact == -torch.inf):
        return float("inf")
    finite = exact > -torch.inf
    norm = norm_of(exact, size)
    difference = (x[finite] - exact[finite]).norm().item()
    if difference != difference:
        return float("inf")
    return difference / norm if norm > 0 else difference


def failures_of(
    got: Results,
    exact: Results,
    in_dtype: Results,
    like: Results,
    told: str,
    *,
    sizes: Results | None = None,
    spread: Results | None = None,
    by_chance: Callable[[str], float] = lambda name: 0.0,
    row_by_chance: Callable[[str], float] = lambda name: 0.0,
    underflow: Callable[[], Results] = dict,
) -> dict[str, str]:
    """By name, what is further off than RATIO times the error of plain PyTorch in that dtype, plus FLOOR.

    In fp32 the worst row may not be further off either, relative to the terms that it sums: a row of small values has
    no share in the norm. Probabilities below 2^-126 may be 0 there, as the exponential of GPUs has them.

    Args:
        got: the results; a name that starts with d is a gradient.
        exact: the results in fp64, None for a gradient that nobody needs.
        in_dtype: the results of plain PyTorch.
        like: by name, a tensor of the dtype of a result, and of the shape of a gradient.
        told: the call, in words.
        sizes: how large the terms are that cancel in a gradient.
        spread: standard deviations of what rounding leaves in a result.
        by_chance: the size of what rounding may leave in a result at bad luck, for one that nothing else allows.
        row_by_chance: the same for the error of its worst row.
        underflow: the sizes of the terms at the least probability that is a normal number of fp32.
    """
    sizes, spread = sizes or {}, spread or {}
    lse = exact["lse"].abs()
    largest = lse[lse < GREAT_ROW].max().item() if (lse < GREAT_ROW).any() else 0.0  # p of great rows is normalised
    ratio, least = limits_of(like["out"].dtype)
    # In 16 bits the rounding of lse is more than the floor from |lse| = 84 on, and 1e-3 at logits of 1e4.
    gradient_floor = min(max(least, LSE_ROUNDING * largest), 1e-2)
    failures = {}
    for name, x in got.items():
        reference, size, is_gradient = exact[name], sizes.get(name), name.startswith("d")
        if reference is None:
            assert x is None, f"{told}: {name} was computed though nothing asks for it"
            continue
        assert x is not None, f"{told}: {name} is missing"
        if name in like:
            assert x.dtype == like[name].dtype, f"{told}: {name} has dtype {x.dtype}"
        if is_gradient:
            assert x.shape == like[name].shape, f"{told}: {name} has shape {tuple(x.shape)}"
        off = error(x, reference, size)
        if x.dtype == like["out"].dtype == torch.float64:
            limit = FLOOR_FP64 + rounding_of_oracle(reference, size)
        else:
            floor = gradient_floor if is_gradient else least
            norm = max(norm_of(reference, size), 1e-300)
            allowed = ratio * error(in_dtype[name], reference, size)
            if name in spread:
                allowed = max(allowed, DEVIATIONS * spread[name].norm().item() / norm)
            limit = allowed + floor
            if name not in spread and not off <= limit:
                limit = max(limit, by_chance(name) / norm + floor)
            if like["out"].dtype == torch.float32 and not off <= limit and name in (faint := underflow()):
                limit += faint[name].norm().item() / norm
        if not off <= limit:
            failures[name] = f"{name}: error {off:.3e}, limit {limit:.3e}"
        elif like["out"].dtype == torch.float32 and size is not None and name not in (*spread, "dsink"):
            worst, plain_worst = (worst_row(y, reference, size) for y in (x, in_dtype[name]))
            limit = ratio * plain_worst + floor
            if not worst <= limit:
                worst = worst_row(x, reference, size, underflow().get(name))
            if not worst <= limit:
                limit = max(limit, row_by_chance(name))
            if not worst <= limit:
                failures[name] = f"{name}: error of a row {worst:.3e}, limit {limit:.3e}"
    return failures


def worst_row(x: Tensor, exact: Tensor, size: Tensor, free: Tensor | None = None) -> float:
    """The largest error of a row of the last dim beyond `free`, as a share of the terms that the row sums."""
    off = (x.double().cpu() - exact.cpu()).norm(dim=-1)
    off = off if free is None else (off - free.cpu().norm(dim=-1)).clamp_min(0.0)
    return (off / size.cpu().norm(dim=-1).clamp_min(1e-300)).max().item() if off.numel() else 0.0


def assert_accurate(got: Results, case: Case, inputs: Inputs, exact: Results | None = None) -> None:
    """Every result within the limits of its dtype, see `failures_of`; shapes and dtypes as promised."""
    clean = inputs if case.data not in (*SEEN, *HIDDEN) else without_nan(inputs)
    judged = inputs if case.data in SEEN else clean
    exact = oracle(case, judged) if exact is None else exact
    in_dtype = yardstick(case, judged)
    like = dict(zip(("out", *GRADIENTS), (inputs.q, inputs.q, inputs.k, inputs.v, inputs.bias), strict=True))
    failures = {}
    if case.data in (*SEEN, *HIDDEN):
        failures = lost_nan(got, case, inputs)
        results = (got, exact, in_dtype)
        got, exact, in_dtype = (where_all_are_finite(each, results) for each in results)
    unlucky: list[Results] = []
    on_cpu: list[Results] = []

    def by_chance(name: str) -> float:
        outs = exact["out"], in_dtype["out"]
        least = 0.0
        is_of_scores = name in ("lse", "max_scores", "entropy")
        if name != "dsink" and not is_of_scores:
            least = chance(name, case.in_formula(clean), case.flags(), outs, case.dropout(inputs.q.device), case.dtype)
        own, other = on_a_cpu(name)
        least = max(least, RATIO * (other - own)[own > -torch.inf].norm().item())
        if not is_of_scores and case.data not in (*MEANS, *STEPS, *JUMPS, *GREAT, *GREAT_MIN):
            return least
        own, *others = at_bad_luck(name)
        return max(least, *(RATIO * (x - own)[own > -torch.inf].norm().item() for x in others))

    def row_by_chance(name: str) -> float:
        own, *others = at_bad_luck(name)
        size = in_part(sizes, rows, inputs)[name]
        return max(RATIO * worst_row(on_a_cpu(name)[1], own, size), *(worst_row(x, own, size) for x in others))

    def on_a_cpu(name: str) -> tuple[Tensor, Tensor]:
        """The exact result, and the result of plain PyTorch on a CPU, whose error on a GPU may be small by luck."""
        if case.dtype != torch.float32 or not inputs.q.is_cuda:
            return 2 * (in_part(exact, rows, inputs)[name],)
        if not on_cpu:
            there = case.with_(key_device=case.key_device or str(inputs.q.device))
            on_cpu.append(yardstick(there, rearranged(judged, Tensor.cpu)))
        own, other = (in_part(x, rows, inputs)[name] for x in (exact, on_cpu[0]))
        assert own is not None and other is not None
        return own, torch.where(own > -torch.inf, other.to(own.device).double(), own)

    def at_bad_luck(name: str) -> list[Tensor]:
        if not unlucky:
            hold = partial(as_kernels_hold, judged, case.softmax_scale)
            unlucky.extend(oracle(case, judged, hold(seed)) for seed in range(4))
        own, *others = (in_part(x, rows, inputs)[name].double() for x in (exact, *unlucky))
        return [own, *(torch.where(x.isfinite(), x, own) for x in others)]  # `exact` has 0 where there is no number

    def underflow() -> Results:
        return in_part(gross(case, clean, torch.finfo(torch.float32).tiny), rows, inputs)

    sizes = gross(case, clean) if case.needs_grad or case.dtype == torch.float32 else {}
    spread = {} if case.data in SEEN else deviations(case, clean, exact, in_dtype)
    like = like if inputs.sink is None else {**like, "dsink": inputs.sink}
    for rows in parts_of(case, exact):
        judge = partial(failures_of, like=like, told=str(case), sizes=sizes, spread=spread, by_chance=by_chance)
        judge = partial(judge, row_by_chance=row_by_chance, underflow=underflow)
        part = judge(*(in_part(x, rows, inputs) for x in (got, exact, in_dtype)))
        if part and case.data in (*GREAT, *GREAT_MIN) and adds_constants(case):
            # Scores without the constant of a row are as right: they have more digits than fp32 holds next to it.
            apart = replace(inputs, bias=inputs.bias.masked_fill(inputs.bias.abs() > GREAT_ROW, 0.0))
            both = judge(*(in_part(x, rows, inputs) for x in (got, oracle(case, apart), yardstick(case, apart))))
            part = {name: told for name, told in part.items() if name in both}
        failures |= part
    assert not failures, f"{case.repro()}\n  " + "\n  ".join(failures.values())


def adds_constants(case: Case) -> bool:
    """Return whether great values of the bias are one constant for all scores of a row."""
    return case.bias is not None and (case.bias[3] == "1" or case.data.split()[0] in ("row", "entry"))


def parts_of(case: Case, exact: Results) -> list[Tensor | None]:
    """Return rows (B, Hq, Lq) that are judged together: first all rows of great scores, then all others."""
    if case.data not in (*GREAT, *GREAT_MIN) or exact["lse"] is None:
        return [None]
    is_great = exact["lse"].abs().nan_to_num(posinf=0.0) > GREAT_ROW
    return [rows for rows in (~is_great, is_great) if rows.any()] or [None]


def in_part(results: Results, rows: Tensor | None, inputs: Inputs) -> Results:
    """The results with 0 outside of some rows, and outside of heads that have none of them; dbias and dsink whole."""
    if rows is None:
        return results
    by_row, by_head = rows.mT.unsqueeze(-1), rows.unflatten(1, (inputs.k.shape[2], -1)).any(3).any(2)[:, None, :, None]
    kept = {"out": by_row, "dq": by_row, "lse": rows, "dk": by_head, "dv": by_head}
    kept = {n: x.to(results["out"].device) for n, x in kept.items()} if results.get("out") is not None else kept
    return {n: torch.where(kept[n], x, 0.0) if n in kept and x is not None else x for n, x in results.items()}


def without_nan(inputs: Inputs) -> Inputs:
    """The inputs with 0 in the place of NaN and inf; -inf in a bias stays."""
    clean = {name: None if x is None else x.nan_to_num(0.0, 0.0, -torch.inf) for name, x in inputs.floats()}
    return replace(inputs, **clean)


def is_bad(name: str, x: Tensor) -> Tensor:
    """Where a result is no number: NaN or inf, but for the lse of an empty row."""
    return x.isnan() | (x == torch.inf) | ((x == -torch.inf) & (name != "lse"))


def where_all_are_finite(x: Results, results: tuple[Results, ...]) -> Results:
    """Results with 0 wherever one of several is no number."""
    present = [name for name in x if all(each.get(name) is not None for each in results)]
    bad = {name: torch.stack([is_bad(name, each[name]) for each in results]).any(0) for name in present}
    return {**x, **{name: x[name].masked_fill(bad[name], 0.0) for name in present}}


def lost_nan(got: Results, case: Case, inputs: Inputs) -> dict[str, str]:
    """By name, results that have no NaN where they need one, or one where they may have none.

    A row that sees a NaN, or an inf as a score, has NaN in out and lse, and so have the gradients of its q and of all
    that it sees. Where only a product with the probability 0 makes a NaN, there may be one: kernels skip such products.
    So there may be in gradients of a key with inf, which kernels multiply by rows of zeros.
    """
    x = case.in_formula(inputs.to(torch.float64))
    exact, heads_k = oracle(case, inputs), x.k.shape[2]
    shared = {**case.flags(), "sink": x.sink}
    by_formula = formula.gradients(x.dout, x.dlse, x.q, x.k, x.v, x.mask, x.bias, **shared)
    scale = formula.default_scale(x.q, case.softmax_scale)
    s, _ = formula.scores(x.q, x.k, x.mask, x.bias, case.is_causal, scale, case.softcap, case.window_size)
    sees = s != -torch.inf
    rows = exact["lse"].isnan().unflatten(1, (heads_k, -1))

    def by_row(x: Tensor) -> Tensor:
        return x.flatten(1, 2).mT.unsqueeze(-1)

    has_weight = (formula.softmax(s, x.sink)[0] > 1e-30).double()
    bad_values = torch.einsum("bhgij,bjhd->bihgd", has_weight, (~x.v.isfinite()).double()).flatten(2, 3) > 0
    out = bad_values | by_row(rows)
    from_rows = sees & rows.unsqueeze(-1)
    from_gradients = sees & out.any(-1).mT.unflatten(1, (heads_k, -1)).unsqueeze(-1)
    infinite = x.k.isinf().any(-1, keepdim=True)
    at_infinite_keys = {"dk": infinite, "dv": infinite}
    needed = {
        "lse": rows.flatten(1, 2),
        "out": out,
        "dq": by_row(from_gradients.any(-1)),
        "dk": from_gradients.any(3).any(2).mT.unsqueeze(-1),
        "dv": from_rows.any(3).any(2).mT.unsqueeze(-1),
    }
    if x.bias is not None and (case.relative is not None or x.bias.shape[3] > 1):  # else it is dlse
        needed["dbias"] = formula.bias_gradient(from_gradients.double(), x.bias, x.q.shape[2]) > 0
        scores = infinite.squeeze(-1).mT[:, :, None, None].expand_as(s)
        at_infinite_keys["dbias"] = formula.bias_gradient(scores.double(), x.bias, x.q.shape[2]) > 0
    failures, products = {}, dict(zip((*GRADIENTS, "dsink"), by_formula, strict=False))
    for name, y in got.items():
        if y is None:
            continue
        bad, may = is_bad(name, y), is_bad(name, exact[name])
        may = may | is_bad(name, products[name]) if name in products else may
        may = may | at_infinite_keys[name] if name in at_infinite_keys else may
        if name == "dbias" and case.relative is not None:  # hidden pairs of such a row may have any distance
            may = (may | needed[name]).any(-1, keepdim=True)
        lost, made = int((needed[name] & ~bad).sum()) if name in needed else 0, int((bad & ~may).sum())
        if lost or made:
            failures[f"NaN in {name}"] = f"{name}: NaN lost in {lost} places, made in {made}"
    return failures
