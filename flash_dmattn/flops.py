"""FLOP of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

A matrix product of one pair of a query and a key over a head dim counts two FLOP for each of its terms. The pairs that
causality and the window allow are counted. Masks and lengths are on the device, and the host does not wait for them: so
all pairs of a mask count, and with sequences max_seqlen_k keys count for each query. Softmax, bias and softcap count
nothing, as in torch's own formulas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .problem import allowed_pairs

_formulas: dict[Any, Callable[..., int]] = {}


def forward_flop(q: Tensor, k: Tensor, v: Tensor, *others: Any, out_val: object = None) -> int:
    """Return the FLOP of the forward operator: q k^T and p v, so 2 D + 2 Dv for each allowed pair and query head."""
    return forward_flop_of(_pairs(q, k, others[6:-2]), q.shape[3], v.shape[3])


def forward_flop_of(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """Return the FLOP of a forward pass with a number of allowed pairs, counted over all query heads."""
    return pairs * 2 * (head_dim + head_dim_v)


def backward_flop(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any, out_val: object = None
) -> int:
    """Return the FLOP of the backward operator, for the gradients that are needed.

    For each allowed pair and query head: the scores are computed again, 2 D. dq, dk and dbias need dp = dout v^T, 2 Dv.
    Then dq and dk take 2 D each and dv takes 2 Dv; dbias and dsink take no product. All gradients together take 2.5
    times the forward pass if D is Dv.
    """
    return backward_flop_of(_pairs(q, k, others[8:-2]), q.shape[3], v.shape[3], others[-1])


def backward_flop_of(pairs: int, dim: int, dim_v: int, needs_grad: Sequence[bool]) -> int:
    """Return the FLOP of a backward pass with a number of allowed pairs, counted over all query heads."""
    need_q, need_k, need_v, need_bias, *_ = needs_grad
    if not any(needs_grad[:4]):
        return 0
    dp = dim_v if need_q or need_k or need_bias else 0
    return pairs * 2 * (dim + dp + need_v * dim_v + (need_q + need_k) * dim)


def tangents_flop(*arguments: Any, out_val: object = None) -> int:
    """Return the FLOP of the forward operator in forward mode: up to six products in the place of two.

    For each allowed pair and query head: 2 D + 2 Dv for out, 2 D each for tq k^T and q tk^T, 2 Dv for p tv, and 2 Dv
    for (p ts) v where scores have tangents.
    """
    tq, tk, tv, tbias, tsink, q, k, v = arguments[:8]
    dim, dim_v = q.shape[3], v.shape[3]
    moves_scores = any(x is not None for x in (tq, tk, tbias, tsink))
    products = dim * (1 + (tq is not None) + (tk is not None)) + dim_v * (1 + (tv is not None) + moves_scores)
    return _pairs(q, k, arguments[14:-1]) * 2 * products


def tangent_gradients_flop(*arguments: Any, out_val: object = None) -> int:
    """Return the FLOP of the gradients in forward mode, each product that the formula names counted once."""
    dout, _, dtout, _, tq, tk, tv, _, _, q, k, v = arguments[:12]
    needs_grad = arguments[-1]
    need_q, need_k, need_v, _, _, need_tq, need_tk, need_tv, *_ = needs_grad
    sent, has_tq, has_tk = (dout is not None) + (dtout is not None), tq is not None, tk is not None
    scores = 1 + has_tq + has_tk + need_q * (1 + has_tk) + need_k * (1 + has_tq) + need_tq + need_tk
    values = sent * (1 + need_v) + (dtout is not None) * ((tv is not None) + need_tv)
    return _pairs(q, k, arguments[19:-2]) * 2 * (q.shape[3] * scores + v.shape[3] * values)


def _pairs(q: Tensor, k: Tensor, numbers: Sequence[Any]) -> int:
    (batch, seqlen_q, num_heads, _), (left, right, *_, layout, _, max_seqlen_k) = q.shape, numbers
    if layout != "dense":
        return batch * seqlen_q * num_heads * max_seqlen_k
    return batch * num_heads * allowed_pairs(seqlen_q, k.shape[1], (left, right))


def register(operator: Any, formula: Callable[..., int]) -> Callable[..., Any]:
    """Let torch's counter count an operator by a formula of its arguments; return a function that calls the operator.

    Torch's counter is not imported here, because it imports Triton. If the program has imported it, it gets the
    formulas now; otherwise the first call that a dispatch mode watches passes them on.
    """
    _formulas[operator.overloadpacket] = formula
    _tell_counters()

    def call(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0:
            _tell_counters()
        return operator(*arguments)

    return call


def _tell_counters() -> None:
    """Give the formulas to torch's counter, if it is imported, and to counters that are active."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    for packet in [packet for packet in _formulas if packet not in counter.flop_registry]:
        # get_raw: the formulas take tensors, not shapes.
        counter.register_flop_formula(packet, get_raw=True)(_formulas[packet])
    for mode in _get_current_dispatch_mode_stack():
        # A counter copies the registry when it is made, perhaps before the formulas were in it.
        own = getattr(getattr(mode, "counter", None), "flop_registry", {})
        for packet in [packet for packet in _formulas if packet not in own]:
            own[packet] = counter.flop_registry[packet]
