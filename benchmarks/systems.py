"""The systems that are compared: our backends, PyTorch's scaled_dot_product_attention, and compiled FlexAttention.

Each is a function that takes the inputs, does what is not timed, and returns the forward that is. All are given the
same (B, L, H, D) tensors; those that want heads before lengths get transposed views, which none of them copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_dmattn
from flash_dmattn import masks
from flash_dmattn.backends.protocol import accepts
from flash_dmattn.selection import BACKENDS
from flash_dmattn.settings import BackendChoice

from .timing import Call
from .workloads import TILE, Inputs, Workload

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# What a column of ours names in its calls, where it is not its own name: the forward and the backward of a pair.
PAIRS = {"cuda": ("cuda", "triton")}
# The graph compiler of FlexAttention. On CPU "eager" runs its dense formula, which has a backward pass there.
flex_compiler = "inductor"
# How Triton and Inductor say that a kernel needs more shared memory than there is.
OUT_OF_SHARED_MEMORY = ("out of resource", "OutOfResources", "NoValidChoices")


class System(NamedTuple):
    """One column of the comparison.

    Attributes:
        name: for tables.
        bind: makes the timed forward from the inputs.
        ours: held to the accuracy rule; a failure of it fails the run.
        mask_beforehand: turning the mask into what its kernels walk is not timed.
    """

    name: str
    bind: Callable[[Inputs], Call]
    ours: bool = False
    mask_beforehand: bool = False


def systems(workload: Workload, backends: list[str]) -> list[System]:
    """Ours whose rules take such a call, then the peers that have a kernel for it at all."""
    found = []
    for backend in (name for name in backends if takes(name, workload)):
        found.append(System(backend, partial(ours, backend), ours=True))
        if workload.mask is not None:
            found.append(System(f"{backend}, prepared", partial(ours_prepared, backend), True, True))
    found.append(System("cuDNN", partial(sdpa, SDPBackend.CUDNN_ATTENTION)))
    found.append(System("mem-efficient", partial(sdpa, SDPBackend.EFFICIENT_ATTENTION)))
    if workload.mask is None and workload.bias is None:
        found.append(System("flash", partial(sdpa, SDPBackend.FLASH_ATTENTION)))
    found.append(System("flex", flex, mask_beforehand=workload.mask is not None))
    return found


def takes(backend: str, workload: Workload) -> bool:
    """Whether no rule of a backend of ours, or of either half of a pair, refuses a workload on the GPU there is."""
    on_gpu = torch.cuda.is_available()
    problem = workload.problem("sm_{}{}".format(*torch.cuda.get_device_capability()) if on_gpu else "sm_90")
    forward, backward = PAIRS.get(backend, (backend, backend))
    return accepts(BACKENDS[forward].RULES, problem, "forward") and accepts(
        BACKENDS[backward].RULES, problem, "backward"
    )


def choice(backend: str) -> BackendChoice:
    """What the calls of a column of ours name."""
    return PAIRS.get(backend, backend)


def ours(backend: str, inputs: Inputs) -> Call:
    """`flash_dmattn.attention` with the bool tensor as it is: packing it is timed."""
    q, k, v, _, mask, bias, is_causal = inputs
    return partial(flash_dmattn.attention, q, k, v, mask, bias, is_causal=is_causal, backend=choice(backend))


def ours_prepared(backend: str, inputs: Inputs) -> Call:
    """`flash_dmattn.attention` with a mask prepared beforehand, causality folded in."""
    q, k, v, _, mask, bias, is_causal = inputs
    seqlen = q.shape[1]
    prepared = masks.prepare_mask(mask, seqlen_q=seqlen, seqlen_k=seqlen, is_causal=is_causal)
    return partial(flash_dmattn.attention, q, k, v, prepared, bias, is_causal=is_causal, backend=choice(backend))


def sdpa(kernel: SDPBackend, inputs: Inputs) -> Call:
    """`scaled_dot_product_attention` pinned to one kernel, which gets all there is to add as one tensor, made anew.

    Causality alone goes as `is_causal`. Where a kernel has no grouped heads, k and v are repeated, which is timed.
    """
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    folded = inputs.mask is not None or inputs.bias is not None
    is_causal = inputs.is_causal and not folded
    group = inputs.group
    native = group > 1 and _serves_groups(kernel, q, k, v, fold(inputs) if folded else None, is_causal)

    def call() -> Tensor:
        added = fold(inputs) if folded else None
        keys, values = (k, v) if native or group == 1 else (x.repeat_interleave(group, 1) for x in (k, v))
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, keys, values, added, is_causal=is_causal, enable_gqa=native)
        return out.transpose(1, 2)

    return call


def _serves_groups(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, is_causal: bool) -> bool:
    asks = {
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
    }
    ask = asks.get(kernel)
    return ask is not None and ask(torch.backends.cuda.SDPAParams(q, k, v, added, 0.0, is_causal, True))


def fold(inputs: Inputs) -> Tensor:
    """Mask, causality and bias as one tensor (B | 1, Hq | 1, L, L) to add to the scores, differentiable in bias."""
    q, allowed, bias = inputs.q, inputs.allowed(), inputs.bias
    added = q.new_zeros(()) if bias is None else bias
    if allowed is not None:
        added = torch.where(allowed, added, -torch.inf)
    heads = q.shape[2]
    return added if added.shape[1] in (1, heads) else added.repeat_interleave(heads // added.shape[1], 1)


def flex(inputs: Inputs) -> Call:
    """FlexAttention under torch.compile, with lengths as constants and a BlockMask made beforehand.

    Tiles of a captured tensor in its pipeline can exceed the shared memory, and torch does not choose other options by
    itself: then fewer stages are tried, as its error message advises.
    """
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.reset()  # torch limits how often one function is compiled, and every workload compiles this one
    torch._functorch.config.donated_buffer = False  # else the compiled backward refuses retain_graph=True
    for stages in (None, 2, 1):
        call = _flex(inputs, {} if stages is None else {"num_stages": stages})
        try:
            torch.autograd.grad(call(), list(inputs.leaves.values()), inputs.dout)
            return call
        except Exception as error:
            if stages == 1 or not any(sign in str(error) for sign in OUT_OF_SHARED_MEMORY):
                raise
            print(f"    flex: {stages or 'default'} stages need too much shared memory", flush=True)
            torch._dynamo.reset()
    raise AssertionError("the last number of stages returns or raises")


def _flex(inputs: Inputs, options: dict[str, int]) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    block_mask, group = flex_block_mask(inputs), inputs.group
    dims = None if inputs.bias is None else _dims(inputs.bias)
    per_query_head = inputs.bias is None or inputs.bias.shape[1] == inputs.q.shape[2]

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[_places(dims, b, h if per_query_head else h // group, i, j)]

        added = None if bias is None else score_mod
        return flex_attention(
            q, k, v, score_mod=added, block_mask=block_mask, enable_gqa=group > 1, kernel_options=options
        )

    compiled = torch.compile(run, backend=flex_compiler, fullgraph=True, dynamic=False)

    def call() -> Tensor:
        q, k, v, bias = *(x.transpose(1, 2) for x in inputs[:3]), inputs.bias
        if bias is not None and bias.shape[2] == 1:
            bias = bias.float()  # its gradient is added up over all queries in its own dtype
        return compiled(q, k, v, bias).transpose(1, 2)

    return call


def _dims(x: Tensor) -> tuple[bool, bool, bool, bool]:
    b, h, i, j = (size > 1 for size in x.shape)
    return b, h, i, j


def _places(dims: tuple[bool, ...], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    # A literal 0 breaks the gradient of a captured tensor; the compiler folds x * 0.
    has_b, has_h, has_i, has_j = dims
    return b if has_b else b * 0, h if has_h else h * 0, i if has_i else i * 0, j if has_j else j * 0


def flex_block_mask(inputs: Inputs) -> BlockMask | None:
    """The BlockMask of a call, by counting in the dense mask what each tile allows; None where all is allowed."""
    from torch.nn.attention.flex_attention import BlockMask

    allowed, mask, group, is_causal = inputs.allowed(), inputs.mask, inputs.group, inputs.is_causal
    if allowed is None:
        return None
    batch, heads, seqlen, _ = allowed.shape
    tiles = seqlen // TILE
    if tiles * TILE != seqlen:
        raise ValueError(f"seqlen is {seqlen} and must be a multiple of {TILE}")
    count = allowed.reshape(batch, heads, tiles, TILE, tiles, TILE).sum((3, 5), dtype=torch.int32)
    if heads > 1:
        count = count.repeat_interleave(inputs.q.shape[2] // heads, 1)
    lists = []
    for active in ((count > 0) & (count < TILE * TILE), count == TILE * TILE):
        lists += [active.sum(-1, dtype=torch.int32), active.int().argsort(dim=-1, descending=True, stable=True).int()]
    dims = None if mask is None else _dims(mask)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if mask is None:
            return j <= i
        kept = mask[_places(dims, b, h // group, i, j)]
        return kept & (j <= i) if is_causal else kept

    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=(seqlen, seqlen))
