"""FlexAttention as a user writes it: compiled, lengths constant, mask and bias captured, a BlockMask per mask.

"prepared" is with the BlockMask of the mask made beforehand. On CPU, where compiling takes longer than any call and
there is no backward pass, its dense formula runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from flash_dmattn import masks

from ..cases import TILE, Case
from ..inputs import Inputs, layer_mask
from .protocol import Attend, Bound, Mode, Needs, System

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

T = TypeVar("T")

# How Triton and Inductor say that a kernel needs more shared memory than there is.
OUT_OF_SHARED_MEMORY = ("out of resource", "OutOfResources", "NoValidChoices")


def needs(case: Case, device: torch.device) -> Needs:
    """On CPU there is no backward pass."""
    on_cpu = device.type == "cpu" and case.takes_gradients
    return Needs(backward_refusal="FlexAttention has no backward pass on CPU" if on_cpu else "")


def bind(inputs: Inputs, mode: Mode) -> Bound:
    """Return the call, compiled anew for the case, with its backward where gradients are enabled."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # else the compiled backward refuses retain_graph=True

    def works(call: Bound) -> None:
        out = call()[0]
        if out.requires_grad:
            torch.autograd.grad(out, list(inputs.leaves.values()), inputs.dout)

    return with_fewer_stages(lambda options: build(inputs, mode, options), works)


def with_fewer_stages(make: Callable[[dict[str, int]], T], works: Callable[[T], None]) -> T:
    """Return the result of `make` for the first kernel options with which `works` does not raise.

    If a tensor is captured, its tiles in the pipeline can exceed the shared memory, and torch does not choose other
    options by itself. Fewer stages are tried then, as its error message advises.
    """
    import torch._dynamo

    for stages in (None, 2, 1):
        made = make({} if stages is None else {"num_stages": stages})
        try:
            works(made)
            return made
        except Exception as error:
            if stages == 1 or not any(sign in str(error) for sign in OUT_OF_SHARED_MEMORY):
                raise
            print(f"    FlexAttention: {stages or 'default'} stages need too much shared memory", flush=True)
            torch._dynamo.reset()
    raise AssertionError("the last number of stages returns or raises")


def build(inputs: Inputs, mode: Mode, options: dict[str, int]) -> Bound:
    """Return the call with given kernel options."""
    from torch.nn.attention import flex_attention as torch_flex

    aux = {"return_aux": torch_flex.AuxRequest(lse=True)} if mode.with_lse else {}
    bias_shape = None if inputs.bias is None else inputs.bias.shape
    compiled = attention(bias_shape, inputs.q.shape[2], inputs.group, inputs.q.is_cuda, options, aux)
    make_block_mask = block_mask_maker(inputs)
    beforehand = make_block_mask() if mode.prepared else None

    def call() -> tuple[Tensor, ...]:
        q, k, v = (x.transpose(1, 2) for x in inputs[:3])
        bias = inputs.bias
        if not torch.is_grad_enabled():  # else it refuses on CPU, where it has no backward pass
            q, k, v = (x.detach() for x in (q, k, v))
            bias = None if bias is None else bias.detach()
        if bias is not None and (bias.dim() == 3 or bias.shape[2] == 1):
            bias = bias.float()  # its gradient is added up over all queries in its own dtype
        result = compiled(q, k, v, bias, beforehand if mode.prepared else make_block_mask())
        if not mode.with_lse:
            return (result.transpose(1, 2),)
        out, extra = result
        return out.transpose(1, 2), extra.lse

    return call


def attention(
    bias_shape: Sequence[int] | None,
    heads: int,
    group: int,
    compiles: bool,
    options: dict[str, int] | None = None,
    aux: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """`flex_attention` of (q, k, v, bias, block_mask), heads before lengths, the bias captured by its score_mod."""
    from torch.nn.attention import flex_attention as torch_flex

    dims = None if bias_shape is None else _dims(bias_shape if len(bias_shape) == 4 else (*bias_shape, 1))
    per_query_head = bias_shape is None or bias_shape[1] == heads
    attend: Any = torch_flex.flex_attention

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block_mask: BlockMask | None) -> Any:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert bias is not None and dims is not None
            head = h if per_query_head else h // group
            if bias.dim() == 3:  # by distance
                reach = bias.shape[2] // 2
                return score + bias[b * 0, head, torch.clamp(j - i, -reach, reach) + reach]
            return score + bias[_places(dims, b, head, i, j)]

        added = None if bias is None else score_mod
        return attend(
            q,
            k,
            v,
            score_mod=added,
            block_mask=block_mask,
            enable_gqa=group > 1,
            kernel_options=options or None,
            **(aux or {}),
        )

    return torch.compile(run, fullgraph=True, dynamic=False) if compiles else run


def block_mask_maker(inputs: Inputs) -> Callable[[], BlockMask | None]:
    """Return a function that makes the BlockMask of a call, or None if everything is allowed.

    A BlockMask that is only causal is made once, because it depends on lengths only.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    seqlen_q, seqlen_k = inputs.lengths
    if inputs.mask is not None:
        return mask_counter(inputs.mask, inputs.is_causal, inputs.q.shape[2], inputs.group, inputs.lengths)
    if not inputs.is_causal:
        return lambda: None

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + seqlen_k - seqlen_q

    made = create_block_mask(mask_mod, None, None, seqlen_q, seqlen_k, device=inputs.q.device)
    return lambda: made


def mask_counter(
    mask: Tensor, is_causal: bool, query_heads: int, group: int, lengths: tuple[int, int]
) -> Callable[[], BlockMask]:
    """Return a function that makes the BlockMask of a bool mask, by counting the allowed pairs of each tile.

    `create_block_mask` would need 8 bytes for every score. Compiled by Inductor, it took minutes to compile for each
    shape.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seqlen_q, seqlen_k = lengths
    dims, offset = _dims(mask.shape), seqlen_k - seqlen_q
    per_query_head = mask.shape[1] == query_heads
    copies = 1 if per_query_head or mask.shape[1] == 1 else group

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = mask[_places(dims, b, h if per_query_head else h // group, i, j)]
        return kept & (j <= i + offset) if is_causal else kept

    def make() -> BlockMask:
        allowed = mask.expand(-1, -1, seqlen_q, seqlen_k)
        if is_causal:
            allowed = allowed & masks.causal_mask(seqlen_q, seqlen_k, mask.device)
        padded = torch.nn.functional.pad(allowed, (0, -seqlen_k % TILE, 0, -seqlen_q % TILE))
        counts = padded.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).sum((3, 5), dtype=torch.int32)
        counts = counts.repeat_interleave(copies, 1)
        is_full = counts == TILE * TILE
        lists = (*_listed((counts > 0) & ~is_full), *_listed(is_full))
        return BlockMask.from_kv_blocks(*lists, TILE, mask_mod, lengths)

    return make


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles of every row are set, and their indices first in a row of all."""
    return tiles.sum(-1, dtype=torch.int32), tiles.byte().argsort(dim=-1, descending=True, stable=True).int()


def layers(case: Case, biases: Sequence[Tensor]) -> list[Attend]:
    """One compiled function for all layers, and a BlockMask for each, which reads a dense mask; made beforehand."""
    device, group = biases[0].device, case.heads // case.heads_k
    lengths, bias_shape = (case.seqlen_q, case.seqlen), case.shape_of(case.bias or "")
    dense = (layer_mask(case, bias) for bias in biases)
    block_masks = [mask_counter(mask, case.is_causal, case.heads, group, lengths)() for mask in dense]

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, run: Any, block_mask: BlockMask) -> Tensor:
        out: Tensor = run(*(x.transpose(1, 2) for x in (q, k, v)), bias, block_mask)
        return out.transpose(1, 2)

    def make(options: dict[str, int]) -> list[Attend]:
        run = attention(bias_shape, case.heads, group, device.type == "cuda", options)
        return [partial(attend, run=run, block_mask=block_mask) for block_mask in block_masks]

    def works(made: list[Attend]) -> None:
        shapes = [(case.batch, case.seqlen, heads, case.head_dim) for heads in (case.heads, case.heads_k, case.heads_k)]
        q, k, v = (torch.zeros(x, device=device, dtype=torch.bfloat16, requires_grad=True) for x in shapes)
        bias = torch.nn.Parameter(torch.zeros(bias_shape, device=device))  # a plain tensor would be another graph
        out = made[0](q, k, v, bias)
        torch.autograd.grad(out, (q, k, v, bias), torch.zeros_like(out))

    return with_fewer_stages(make, works)


def _dims(shape: Sequence[int]) -> tuple[bool, bool, bool, bool]:
    b, h, i, j = (size > 1 for size in shape)
    return b, h, i, j


def _places(dims: tuple[bool, ...], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    # A literal 0 breaks the gradient of a captured tensor; the compiler folds x * 0.
    has_b, has_h, has_i, has_j = dims
    return b if has_b else b * 0, h if has_h else h * 0, i if has_i else i * 0, j if has_j else j * 0


SYSTEMS = (System("flexattention", bind, needs, lambda device: "", compiles=True, layers=layers),)
