"""The FlexAttention graph of a call, and the compiled functions: one per class of problem, each compiled once.

Importing this module imports FlexAttention, and with it a part of dynamo; `flash_dmattn.backends.flex` does it lazily.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .flex_blocks import BLOCK, BlockLists

# The graph compiler given to torch.compile. Tests set "eager": FlexAttention's own dense formula, which has a backward
# pass on CPU.
compiler = "inductor"


class Shared(NamedTuple):
    """How a mask or bias is shared: which of (batch, head, query, key) it has, and query heads per head of it."""

    dims: tuple[bool, bool, bool, bool]
    group: int


class Form(NamedTuple):
    """What a graph is specialised for; it holds no tensor and no length."""

    softmax_scale: float
    softcap: float
    grouped: bool
    return_lse: bool
    mask: Shared | None
    bias: Shared | None


def run(
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    lower: Tensor | int | None,
    upper: Tensor | int | None,
    lists: BlockLists | None,
) -> tuple[Tensor, ...]:
    """FlexAttention on (B, L, H, D) tensors: (out,) or (out, lse).

    Args:
        form: the constants.
        q, k, v: as in the contract.
        mask, bias: holding only the dims that `form` says they have, or one element where they have none.
        lower, upper: the band's limits: int32 of no dimension on the device, or ints to be compiled in.
        lists: the tile lists; None exactly where there is neither mask nor limit.
    """

    # Locals, as a closure over `form` would capture every value in it, and floats cannot be captured.
    mask_index, bias_index = _index(form.mask), _index(form.bias)
    softcap = None
    if form.softcap > 0:
        softcap = form.softcap

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[bias_index(b, h, i, j)]
        return score

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = None
        if mask is not None:
            allowed = mask[mask_index(b, h, i, j)]
        if lower is not None:
            inside = j - i >= lower
            allowed = inside if allowed is None else allowed & inside
        if upper is not None:
            inside = j - i <= upper
            allowed = inside if allowed is None else allowed & inside
        return allowed  # type: ignore[return-value]

    block_mask = None
    if lists is not None:
        # from_kv_blocks would derive the lists of the columns by scattering; they are at hand.
        block_mask = BlockMask(
            seq_lengths=(q.shape[1], k.shape[1]),
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=mask_mod,
            kv_num_blocks=lists.kv_num_blocks,
            kv_indices=lists.kv_indices,
            full_kv_num_blocks=lists.full_kv_num_blocks,
            full_kv_indices=lists.full_kv_indices,
            q_num_blocks=lists.q_num_blocks,
            q_indices=lists.q_indices,
            full_q_num_blocks=lists.full_q_num_blocks,
            full_q_indices=lists.full_q_indices,
        )
    results = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=score_mod if form.softcap > 0 or bias is not None else None,
        block_mask=block_mask,
        scale=form.softmax_scale,
        enable_gqa=form.grouped,
        return_aux=AuxRequest(lse=True) if form.return_lse else None,
    )
    if not form.return_lse:
        return (results.transpose(1, 2),)  # type: ignore[union-attr]
    out, aux = results
    # The fill cuts the gradient of an empty row's lse: whatever arrives for it, even inf, must not meet p = 0.
    return out.transpose(1, 2), aux.lse.masked_fill(aux.lse == -torch.inf, -torch.inf)


def _index(shared: Shared | None) -> Callable[..., tuple[Tensor, ...]]:
    if shared is None:
        return lambda b, h, i, j: ()
    (has_b, has_h, has_i, has_j), group = shared

    def index(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
        if group > 1:
            h = h // group
        chosen = ((b,) if has_b else ()) + ((h,) if has_h else ()) + ((i,) if has_i else ()) + ((j,) if has_j else ())
        # FlexAttention differentiates a captured tensor only through indexing, so a single number is a vector of one.
        return chosen or (b * 0,)

    return index


_compiled: dict[tuple[Any, ...], Callable[..., tuple[Tensor, ...]]] = {}


def compiled(form: Form, specialised: tuple[Any, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The compiled graph of a class of problems, made on its first use.

    torch.compile counts recompilations per code object, and remembers per name which sizes have varied. One function
    for all classes would exhaust the limit (8) after a few of them, so each class has a code object and a name of its
    own. `fullgraph` makes reaching the limit an error: without it torch runs the dense formula from then on, silently.

    Args:
        form: the constants of the graph.
        specialised: whatever else makes torch compile anew: dtype, head dims, which lengths are 1. Part of the key
            only. Lengths that vary inside a class are made symbolic by torch on the second one it meets.
    """
    key = (compiler, form, specialised)
    function = _compiled.get(key)
    if function is None:

        def call(*tensors: Any) -> tuple[Tensor, ...]:
            return run(form, *tensors)

        code = call.__code__.replace(co_name=f"flex_attention_{len(_compiled)}")
        own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
        function = _compiled[key] = torch.compile(own, backend=compiler, fullgraph=True)
    return function
