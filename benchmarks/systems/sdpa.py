"""`scaled_dot_product_attention`, pinned to each of its kernels.

Causality alone goes as `is_causal`. Otherwise mask, bias and causality are folded into one tensor, as its users have
to, anew in every call; "prepared" is with mask and causality folded beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..cases import Case
from ..inputs import Inputs, allowed_by, layer_mask
from .protocol import Attend, Bound, Mode, Needs, System

KERNELS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-mem": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
ON_CPU = ("sdpa-flash", "sdpa-math")
# The plain formula keeps some six matrices of scores; beyond this many bytes each it is left out.
MATRIX_BYTES = 4 << 30


def folds(case: Case) -> bool:
    """Return whether a call has to hand over a tensor to add or to mask by."""
    return case.mask is not None or case.bias is not None or (case.is_causal and case.queries is not None)


def needs(name: str, case: Case, device: torch.device) -> Needs:
    """Refuse what is known before a run: what flash does not take, and matrices of math that may not fit."""
    if name == "sdpa-flash" and device.type == "cuda" and folds(case):
        return Needs("the kernel takes neither mask nor bias")
    if case.bias == "hd":
        return Needs("a bias by distance would be a tensor of all scores")
    scores = 4 * case.batch * case.heads * case.seqlen_q * case.seqlen
    if name == "sdpa-math" and scores > MATRIX_BYTES:
        return Needs(f"a matrix of scores takes {scores / 2**30:.0f} GiB")
    no_gradient = name == "sdpa-flash" and device.type == "cpu" and case.bias is not None and case.takes_gradients
    return Needs("", "the kernel of CPUs has no gradient of a bias" if no_gradient else "", "it is not returned")


def missing(name: str, device: torch.device) -> str:
    """Return why a kernel cannot run on the device; "" where it can."""
    return "" if device.type == "cuda" or name in ON_CPU else "PyTorch has no such kernel on CPU"


def bind(kernel: SDPBackend, inputs: Inputs, mode: Mode) -> Bound:
    """Return the pinned call; k and v are repeated, which is timed, where a kernel has no grouped heads."""
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    seqlen_q, seqlen_k = inputs.lengths
    folded = inputs.mask is not None or inputs.bias is not None or (inputs.is_causal and seqlen_q != seqlen_k)
    is_causal = inputs.is_causal and not folded
    group = inputs.group
    allowed = per_query_head(inputs.allowed(), inputs) if folded and mode.prepared else None
    if allowed is not None and inputs.bias is None:
        # The kernels add a float mask, and would convert a bool mask in every call.
        allowed = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)
    native = group > 1 and _serves_groups(kernel, q, k, v, fold(inputs, allowed) if folded else None, is_causal)

    def call() -> tuple[Tensor]:
        added = fold(inputs, allowed) if folded else None
        keys, values = (k, v) if native or group == 1 else (x.repeat_interleave(group, 1) for x in (k, v))
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, keys, values, added, is_causal=is_causal, enable_gqa=native)
        return (out.transpose(1, 2),)

    return call


def _serves_groups(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, is_causal: bool) -> bool:
    if kernel is SDPBackend.MATH:
        return True
    asks = {
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
    }
    ask = asks.get(kernel)
    if ask is None or not q.is_cuda:
        return False
    return ask(torch.backends.cuda.SDPAParams(q, k, v, added, 0.0, is_causal, True))


def fold(inputs: Inputs, allowed: Tensor | None = None) -> Tensor | None:
    """Fold mask, causality and bias into one tensor, differentiable in bias; `allowed` has mask and causality."""
    bias = None if inputs.bias is None else per_query_head(inputs.bias, inputs)
    if allowed is None:
        allowed = per_query_head(inputs.allowed(), inputs)
    if bias is None or allowed is None:
        return allowed if bias is None else bias
    return torch.where(allowed, bias, -torch.inf)


def per_query_head(x: Tensor | None, inputs: Inputs) -> Tensor | None:
    """Return a mask or bias with 1 or Hq heads."""
    heads = inputs.q.shape[2]
    return x if x is None or x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)


def layers(kernel: SDPBackend, case: Case, biases: Sequence[Tensor]) -> list[Attend]:
    """The pinned call of each layer; its mask, with causality, is dense, and the bias is folded into it in each call.

    The kernel of cuDNN gives no gradient of what is added, so it gets the bias without.
    """
    group = case.heads // case.heads_k

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, allowed: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        bias = bias.detach() if kernel is SDPBackend.CUDNN_ATTENTION else bias
        added = torch.where(allowed, bias.to(q.dtype).repeat_interleave(group, 1), -torch.inf)
        native = group > 1 and _serves_groups(kernel, q, k, v, added, False)
        keys, values = (k, v) if native or group == 1 else (x.repeat_interleave(group, 1) for x in (k, v))
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, keys, values, added, enable_gqa=native).transpose(1, 2)

    lengths = case.seqlen_q, case.seqlen
    dense = (allowed_by(layer_mask(case, bias), case.is_causal, *lengths, bias.device) for bias in biases)
    return [partial(attend, allowed=allowed.repeat_interleave(group, 1)) for allowed in dense if allowed is not None]


SYSTEMS = tuple(
    System(
        name,
        partial(bind, kernel),
        partial(needs, name),
        partial(missing, name),
        slow=name == "sdpa-math",
        layers=partial(layers, kernel),
    )
    for name, kernel in KERNELS.items()
)
