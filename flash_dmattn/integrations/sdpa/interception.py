"""`intercept_sdpa`: a mode and a patched name, which together see every call of F.scaled_dot_product_attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode, get_overridable_functions, handle_torch_function

from .served import NO_MASK, reason_to_pass_on, serve
from .tally import Tally

SDPA = F.scaled_dot_product_attention  # the builtin, which torch hands to modes
get_overridable_functions()  # torch lists once what modes may see: now, while the builtin has its name


@contextmanager
def intercept_sdpa(*, strict: bool = False) -> Iterator[Tally]:
    """Let `flash_dmattn.attention` compute every F.scaled_dot_product_attention with a mask, in this thread.

    Of code that nobody can edit, too: direct calls, names that were imported earlier, `nn.MultiheadAttention`,
    `nn.TransformerEncoderLayer`, and code that `torch.compile` has compiled or will compile. A call without a mask is
    torch's, which has kernels for it, and so is one that `flash_dmattn.attention` does not serve. Contexts nest, and
    the innermost one decides.

    Args:
        strict: raise where a call with a mask would be torch's.

    Returns:
        A context manager that gives a `Tally`, which counts calls and prints as a table.

    Raises:
        NotImplementedError: inside, under `strict`: the reason why a call is not served.

    Equivalent to the call of torch but for rows without a key, which are 0 here with zero gradients, and of which
    torch's kernels make 0 or NaN. A float mask gets its gradient, accumulated in fp32.

    >>> import torch, torch.nn.functional as F
    >>> from flash_dmattn.integrations.sdpa import intercept_sdpa
    >>> q = torch.randn(2, 4, 8, 16)  # (B, H, L, D)
    >>> bias = torch.zeros(4, 8, 8, requires_grad=True)
    >>> with intercept_sdpa() as tally:
    ...     F.scaled_dot_product_attention(q, q, q, attn_mask=bias).sum().backward()
    >>> print(tally.served, tuple(bias.grad.shape))
    1 (4, 8, 8)
    """
    tally = Tally()
    with _patched(), _Interception(tally, strict):
        yield tally


class _Interception(TorchFunctionMode):
    """Takes calls of the builtin, by whatever name they are made."""

    def __init__(self, tally: Tally, strict: bool) -> None:
        super().__init__()
        self.tally, self.strict = tally, strict

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA or func is _patch:
            return self.attend(*args, **kwargs)
        if not isinstance(func, FunctionType):
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and torch.compiler.is_compiling():
            return (_traced_strictly if self.strict else _traced)(*args, **kwargs)
        # A function that torch hands over as a whole, as F.multi_head_attention_forward: this mode is off inside of it.
        with _inside_of(self):
            return func(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if getattr(_inside, "passes_on", False):  # a context in this one has decided
            return _torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        reason = reason_to_pass_on(query, key, value, attn_mask, is_causal, enable_gqa)
        if reason is None:
            self.tally.count(None)
            assert attn_mask is not None
            return serve(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if self.strict and reason != NO_MASK:
            raise NotImplementedError(_refusal(reason, query, key, value, attn_mask))
        self.tally.count(reason)
        _inside.passes_on = True
        try:
            return _torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        finally:
            _inside.passes_on = False


# `mode`: the one whose function runs in this thread; `passes_on`: whether a call is on its way to torch.
_inside = threading.local()


@contextmanager
def _inside_of(mode: _Interception) -> Iterator[None]:
    outer = getattr(_inside, "mode", None)
    _inside.mode = mode
    try:
        yield
    finally:
        _inside.mode = outer


# torch.compile does not look into F.multi_head_attention_forward: it would be the same node of a graph in a context and
# outside, and what is compiled of graphs is kept on disk. So it gets a node of another name.
@torch.compiler.allow_in_graph
def _traced(*args: Any, **kwargs: Any) -> Any:
    with _inside_of(_Interception(Tally(), strict=False)):
        return F.multi_head_attention_forward(*args, **kwargs)


@torch.compiler.allow_in_graph
def _traced_strictly(*args: Any, **kwargs: Any) -> Any:
    with _inside_of(_Interception(Tally(), strict=True)):
        return F.multi_head_attention_forward(*args, **kwargs)


def _patch(*args: Any, **kwargs: Any) -> Tensor:
    """What F.scaled_dot_product_attention is meanwhile, for all threads: the builtin where no mode is switched off."""
    mode = getattr(_inside, "mode", None)
    return _torch(*args, **kwargs) if mode is None else mode.attend(*args, **kwargs)


def _torch(*args: Any, **kwargs: Any) -> Tensor:
    """The builtin; for a CausalBias too, which compares what is called with the patched name."""
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if isinstance(mask, CausalBias):
        return handle_torch_function(_patch, (mask,), *args, **kwargs)
    return SDPA(*args, **kwargs)


_lock = threading.Lock()
_open = 0  # contexts of all threads
_before: tuple[Callable[..., Tensor], bool] = SDPA, True  # the name, and whether torch has its fast path


@contextmanager
def _patched() -> Iterator[None]:
    """The name in torch.nn.functional leads to `_patch` while a context of any thread is open."""
    global _open, _before
    with _lock:
        _open += 1
        if _open == 1:
            _before = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
            F.scaled_dot_product_attention = _patch
            torch.backends.mha.set_fastpath_enabled(False)  # a compiler does not see that the mode switches it off
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                if F.scaled_dot_product_attention is _patch:
                    F.scaled_dot_product_attention = _before[0]
                torch.backends.mha.set_fastpath_enabled(_before[1])


def _refusal(reason: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> str:
    named = zip(("query", "key", "value", "attn_mask"), (query, key, value, attn_mask))
    given = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in named if x is not None)
    return f"intercept_sdpa(strict=True) would leave a call with a mask to torch, by its {reason}: {given}"
