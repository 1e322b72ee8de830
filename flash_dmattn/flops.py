"""FLOP of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

A matrix product of one pair of a query and a key over a head dim counts two FLOP for each of its terms. Counted are the
pairs that the causal limit and the window allow. What a mask allows is on the device, and the host does not wait for
it: all the pairs of a mask count, and beside sequences as many keys for each query as max_seqlen_k says. Softmax, bias
and softcap count nothing, as in torch's own formulas.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import Tensor

from .problem import Flags, MaskForm, allowed_pairs

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}


def forward_flop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor] | None,
    mask_form: MaskForm,
    bias: Tensor | None,
    sink: Tensor | None,
    sequences: list[Tensor] | None,
    dropout: Tensor | None,
    *flags_and_backward: Any,
    out_val: object = None,
) -> int:
    """FLOP of a forward operator: q k^T and p v, so 2 D + 2 Dv for each allowed pair and query head.

    Args:
        q, k, v and the rest: those of the operator, the fields of `Flags` and then the backend of the backward pass.
        out_val: its result, which plays no part.
    """
    *flags, _ = flags_and_backward
    return forward_flop_of(_pairs(q, k, Flags(*flags)), q.shape[3], v.shape[3])


def forward_flop_of(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """The same for a number of allowed pairs, those of all query heads together."""
    return pairs * 2 * (head_dim + head_dim_v)


def backward_flop(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor] | None,
    mask_form: MaskForm,
    bias: Tensor | None,
    sink: Tensor | None,
    sequences: list[Tensor] | None,
    dropout: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *flags_and_need: Any,
    out_val: object = None,
) -> int:
    """FLOP of a backward operator, for each allowed pair and query head, only for the gradients that are needed.

    The scores are computed again: 2 D. dq, dk and dbias need dp = dout v^T: 2 Dv. Then dq and dk take 2 D each, dv
    2 Dv, and dbias and dsink no product. With all of them that is 2.5 times the forward pass where D is Dv.

    Args:
        dout, dlse and the rest: those of the operator, the fields of `Flags` and then `needs_grad` last.
        out_val: its result, which plays no part.
    """
    *flags, needs_grad = flags_and_need
    return backward_flop_of(_pairs(q, k, Flags(*flags)), q.shape[3], v.shape[3], needs_grad)


def backward_flop_of(pairs: int, dim: int, dim_v: int, needs_grad: Sequence[bool]) -> int:
    """The same for a number of allowed pairs, those of all query heads together."""
    need_q, need_k, need_v, need_bias, *_ = needs_grad
    if not any(needs_grad[:4]):
        return 0
    dp = dim_v if need_q or need_k or need_bias else 0
    return pairs * 2 * (dim + dp + need_v * dim_v + (need_q + need_k) * dim)


def _pairs(q: Tensor, k: Tensor, flags: Flags) -> int:
    batch, seqlen_q, num_heads, _ = q.shape
    if flags.layout != "dense":
        return batch * seqlen_q * num_heads * flags.max_seqlen_k
    return batch * num_heads * allowed_pairs(seqlen_q, k.shape[1], flags.window)


def register(packet: Any, formula: Callable[..., int]) -> None:
    """Count the FLOP of an operator by a formula, from the first counter on that is made.

    Args:
        packet: the operator, as `torch.ops.<namespace>.<name>`.
        formula: called with the arguments of the operator and `out_val`, its result.
    """
    _formulas[packet] = formula
    counter = sys.modules.get(_COUNTER)
    if counter is not None:
        _hand_over(counter)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _hand_over(counter: ModuleType) -> None:
    for packet in [packet for packet in _formulas if packet not in counter.flop_registry]:
        # Raw: the formula takes tensors, and the sizes of those itself.
        counter.register_flop_formula(packet, get_raw=True)(_formulas[packet])


class _AfterImport(MetaPathFinder):
    """Hands the formulas over as soon as somebody imports torch's counter, which would import Triton for us."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as the other finders find it, with the formulas registered at the end of its execution."""
        if name != _COUNTER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _hand_over(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
