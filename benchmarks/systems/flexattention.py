"""FlexAttention as a user writes it: compiled, lengths constant, mask and bias captured, a BlockMask per mask.

"prepared" is with the BlockMask of the mask made beforehand. On CPU, where compiling takes longer than any call and
there is no backward pass, its dense formula runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cases import TILE, Case
from ..inputs import Inputs
from .protocol import Bound, Mode, Needs, System

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# How Triton and Inductor say that a kernel needs more shared memory than there is.
OUT_OF_SHARED_MEMORY = ("out of resource", "OutOfResources", "NoValidChoices")


def needs(case: Case, device: torch.device) -> Needs:
    """On CPU there is no backward pass."""
    on_cpu = device.type == "cpu" and case.takes_gradients
    return Needs(backward_refusal="FlexAttention has no backward pass on CPU" if on_cpu else "")


def bind(inputs: Inputs, mode: Mode) -> Bound:
    """The call, compiled anew for the case, with its backward where gradients are enabled.

    Tiles of a captured tensor in its pipeline can exceed the shared memory, and torch does not choose other options by
    itself: then fewer stages are tried, as its error message advises.
    """
    import torch._dynamo
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # else the compiled backward refuses retain_graph=True
    for stages in (None, 2, 1):
        call = build(inputs, mode, {} if stages is None else {"num_stages": stages})
        try:
            out = call()[0]
            if out.requires_grad:
                torch.autograd.grad(out, list(inputs.leaves.values()), inputs.dout)
            return call
        except Exception as error:
            if stages == 1 or not any(sign in str(error) for sign in OUT_OF_SHARED_MEMORY):
                raise
            print(f"    FlexAttention: {stages or 'default'} stages need too much shared memory", flush=True)
            torch._dynamo.reset()
    raise AssertionError("the last number of stages returns or raises")


def build(inputs: Inputs, mode: Mode, options: dict[str, int]) -> Bound:
    """The call with given kernel options."""
    from torch.nn.attention import flex_attention as torch_flex

    group = inputs.group
    dims = None if inputs.bias is None else _dims(inputs.bias)
    per_query_head = inputs.bias is None or inputs.bias.shape[1] == inputs.q.shape[2]
    attend: Any = torch_flex.flex_attention
    aux = {"return_aux": torch_flex.AuxRequest(lse=True)} if mode.with_lse else {}

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block_mask: BlockMask | None) -> Any:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert bias is not None and dims is not None
            return score + bias[_places(dims, b, h if per_query_head else h // group, i, j)]

        added = None if bias is None else score_mod
        return attend(
            q,
            k,
            v,
            score_mod=added,
            block_mask=block_mask,
            enable_gqa=group > 1,
            kernel_options=options or None,
            **aux,
        )

    compiled = torch.compile(run, fullgraph=True, dynamic=False) if inputs.q.is_cuda else run
    make_block_mask = block_mask_maker(inputs)
    beforehand = make_block_mask() if mode.prepared else None

    def call() -> tuple[Tensor, ...]:
        q, k, v = (x.transpose(1, 2) for x in inputs[:3])
        bias = inputs.bias
        if not torch.is_grad_enabled():  # else it refuses on CPU, where it has no backward pass
            q, k, v = (x.detach() for x in (q, k, v))
            bias = None if bias is None else bias.detach()
        if bias is not None and bias.shape[2] == 1:
            bias = bias.float()  # its gradient is added up over all queries in its own dtype
        found = compiled(q, k, v, bias, beforehand if mode.prepared else make_block_mask())
        if not mode.with_lse:
            return (found.transpose(1, 2),)
        out, extra = found
        return out.transpose(1, 2), extra.lse

    return call


def block_mask_maker(inputs: Inputs) -> Callable[[], BlockMask | None]:
    """What makes the BlockMask of a call; it gives None where all is allowed.

    That of causality alone is made once, for it belongs to the lengths. That of a mask is counted tile by tile out of
    the bool tensor: `create_block_mask` would hold an index of 8 bytes for every score, and compiled by Inductor it is
    a kernel that took minutes to compile for each shape.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    mask, is_causal = inputs.mask, inputs.is_causal
    seqlen_q, seqlen_k = inputs.lengths
    offset = seqlen_k - seqlen_q
    if mask is None:
        if not is_causal:
            return lambda: None

        def causal_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j <= i + offset

        made = create_block_mask(causal_mod, None, None, seqlen_q, seqlen_k, device=inputs.q.device)
        return lambda: made

    group, dims = inputs.group, _dims(mask)
    per_query_head = mask.shape[1] == inputs.q.shape[2]
    copies = 1 if per_query_head or mask.shape[1] == 1 else group

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = mask[_places(dims, b, h if per_query_head else h // group, i, j)]
        return kept & (j <= i + offset) if is_causal else kept

    def make() -> BlockMask:
        allowed = inputs.allowed()
        assert allowed is not None
        padded = torch.nn.functional.pad(allowed, (0, -seqlen_k % TILE, 0, -seqlen_q % TILE))
        counts = padded.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).sum((3, 5), dtype=torch.int32)
        counts = counts.repeat_interleave(copies, 1)
        is_full = counts == TILE * TILE
        lists = (*_listed((counts > 0) & ~is_full), *_listed(is_full))
        return BlockMask.from_kv_blocks(*lists, TILE, mask_mod, (seqlen_q, seqlen_k))

    return make


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of every row are set, and their indices first in a row of all."""
    return tiles.sum(-1, dtype=torch.int32), tiles.byte().argsort(dim=-1, descending=True, stable=True).int()


def _dims(x: Tensor) -> tuple[bool, bool, bool, bool]:
    b, h, i, j = (size > 1 for size in x.shape)
    return b, h, i, j


def _places(dims: tuple[bool, ...], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    # A literal 0 breaks the gradient of a captured tensor; the compiler folds x * 0.
    has_b, has_h, has_i, has_j = dims
    return b if has_b else b * 0, h if has_h else h * 0, i if has_i else i * 0, j if has_j else j * 0


SYSTEMS = (System("flexattention", bind, needs, lambda device: "", compiles=True),)
