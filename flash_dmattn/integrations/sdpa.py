"""`intercept_sdpa` computes calls of F.scaled_dot_product_attention with a mask by flash_dmattn; see docs/sdpa.md.

It enters a `TorchFunctionMode`, which gets every call. `reason_to_pass_on` selects the calls that are computed here,
and `heads_first.attend` converts them to calls of `flash_dmattn.attention`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from functools import partial
from types import FunctionType, TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..masks.split import check_below
from ..problem import FLOAT_DTYPES, check_flag
from .heads_first import attend, autocast_dtype, batch_dims

__all__ = ["intercept_sdpa"]

SDPA = F.scaled_dot_product_attention  # the builtin, which torch passes to modes as `func`
NO_MASK = "no mask"


class intercept_sdpa(ContextDecorator):
    """Compute every F.scaled_dot_product_attention with a mask by `flash_dmattn.attention`, in this thread and task.

    It works without editing the calling code: for direct calls, names that were imported earlier,
    `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`, and code that `torch.compile` has compiled or will compile.
    Torch computes calls without a mask, for which it has kernels, and calls that `flash_dmattn.attention` does not
    support. Contexts may be nested, also with one object; the innermost one counts.

    Args:
        strict: raise an error if torch would compute a call with a mask.
        below: split float masks that have no gradient by `flash_dmattn.masks.split_additive`: values at or below this
            number, such as -1e3, hide keys. None leaves float masks as biases.

    Returns:
        A context manager. Its `with ... as tally` is a `Tally`, which counts calls and prints as a table.

    Raises:
        TypeError: strict is no bool, or `below` no number.
        ValueError: `below` is not negative.
        NotImplementedError: inside, with `strict`: the reason why a call is not supported.

    Equivalent to the call of torch except for rows without a visible key: here they and their gradients are 0, while
    torch's kernels return 0 or NaN. A float mask gets its gradient, accumulated in fp32.

    >>> import torch, torch.nn.functional as F
    >>> from flash_dmattn.integrations.sdpa import intercept_sdpa
    >>> q = torch.randn(2, 4, 8, 16)  # (B, H, L, D)
    >>> bias = torch.zeros(4, 8, 8, requires_grad=True)
    >>> with intercept_sdpa() as tally:
    ...     F.scaled_dot_product_attention(q, q, q, attn_mask=bias).sum().backward()
    >>> print(tally.served, tuple(bias.grad.shape))
    1 (4, 8, 8)
    """

    def __init__(self, *, strict: bool = False, below: float | None = None) -> None:
        self._strict = check_flag("strict", strict)
        self._below = None if below is None else check_below(below)
        self._entries: list[_Entry] = []  # open ones, of all threads and tasks

    def __enter__(self) -> Tally:
        mode = _thread.mode
        if mode is None:
            mode = _thread.mode = _Interception(threading.get_ident())
            mode.__enter__()
        entry = _Entry(self._strict, self._below, mode)
        mode.entries.append(entry)
        self._entries.append(entry)
        _task_entries.set((*_task_entries.get(), entry))
        _fast_path.close()
        return entry.tally

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The last entry of this task: another task may have entered the same object later, and still be inside.
        entries = [entry for entry in _task_entries.get() if entry in self._entries]
        entry = entries[-1] if entries else self._entries[-1]
        self._entries.remove(entry)
        _task_entries.set(tuple(other for other in _task_entries.get() if other is not entry))
        mode = entry.mode
        mode.entries.remove(entry)
        if not mode.entries and _thread.mode is mode:
            _thread.mode = None
            mode.__exit__(kind, error, trace)
        _fast_path.open()


class Tally:
    """Counts of the calls of F.scaled_dot_product_attention in one `with` statement; prints as a table.

    Attributes:
        served: number of calls that `flash_dmattn.attention` computed.
        passed_on: number of calls that torch computed, by reason; the most frequent is printed first.

    Calls in compiled code are not counted: counting would be a side effect of the graph.

    >>> tally = Tally()
    >>> tally.count(None)
    >>> tally.count("no mask")
    >>> print(tally)
    F.scaled_dot_product_attention  calls
    flash_dmattn                        1
    torch: no mask                      1
    """

    def __init__(self) -> None:
        self.served = 0
        self.passed_on: Counter[str] = Counter()
        self._lock = threading.Lock()  # backward passes that recompute run in other threads

    def count(self, reason: str | None) -> None:
        """Count one call; `reason` is why torch computes it, None if flash_dmattn does."""
        if torch.compiler.is_compiling():
            return
        with self._lock:
            if reason is None:
                self.served += 1
            else:
                self.passed_on[reason] += 1

    def __str__(self) -> str:
        rows = [("F.scaled_dot_product_attention", "calls"), ("flash_dmattn", str(self.served))]
        rows += [(f"torch: {reason}", str(calls)) for reason, calls in self.passed_on.most_common()]
        left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{name:<{left}}  {calls:>{right}}" for name, calls in rows)

    __repr__ = __str__


class _Entry:
    """One `with` statement, from entry to exit."""

    def __init__(self, strict: bool, below: float | None, mode: _Interception) -> None:
        self.strict, self.below, self.mode, self.tally = strict, below, mode, Tally()


# The entries of this thread or asyncio task, the innermost last. A task that was started inside of an entry has a copy,
# which may contain entries that have ended meanwhile.
_task_entries: ContextVar[tuple[_Entry, ...]] = ContextVar("intercept_sdpa", default=())


class _Thread(threading.local):
    def __init__(self) -> None:
        # Attributes of the object, not of the class: a compiler would guard on the class attribute.
        self.mode: _Interception | None = None  # on the stack of torch while a context is open in the thread
        self.passes_on = False  # whether a call is being passed on to torch


_thread = _Thread()


class _Interception(TorchFunctionMode):
    """The mode that gets calls of the builtin, under any name. All contexts of a thread use one mode.

    Torch's stack of modes belongs to the thread, but asyncio tasks may leave their contexts in any order.
    """

    def __init__(self, thread: int) -> None:
        super().__init__()
        self.thread = thread
        self.entries: list[_Entry] = []
        self.entered: list[Callable[..., Any]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return self.attend(*args, **kwargs)
        if not isinstance(func, FunctionType):
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            if func is F.multi_head_attention_forward and self.entries:
                return _traced(*args, **kwargs)
            return func(*args, **kwargs)
        if func in _UNASKED and func not in self.entered and all(kind is Tensor for kind in types):
            return self.enter(func, *args, **kwargs)
        return func(*args, **kwargs)

    def enter(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that torch has passed to the mode as a whole, with the mode active inside of it.

        Torch disables a mode while it handles a call, and with the mode on the function would pass itself on again.
        """
        self.entered.append(func)
        try:
            with self:
                return _UNASKED[func](*args, **kwargs)
        finally:
            self.entered.remove(func)

    def entry(self) -> _Entry | None:
        """Find the context of a call here; None if this task has no open one."""
        # A compiler cannot trace context variables, and threads of autograd only inherit the modes of the caller.
        if torch.compiler.is_compiling() or threading.get_ident() != self.thread:
            return self.entries[-1] if self.entries else None
        return next((entry for entry in reversed(_task_entries.get()) if entry in self.entries), None)

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
        entry = None if _thread.passes_on else self.entry()  # None also if an outer mode has passed the call on
        if entry is None:
            return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        reason = reason_to_pass_on(query, key, value, attn_mask, is_causal, enable_gqa)
        if reason is None:
            entry.tally.count(None)
            assert attn_mask is not None
            call = partial(attend, query, key, value, scale=scale, is_causal=is_causal, dropout_p=dropout_p)
            if entry.below is not None:
                return call(masks=[attn_mask], below=entry.below)
            return call(masks=[attn_mask]) if attn_mask.dtype == torch.bool else call([attn_mask])
        if entry.strict and reason != NO_MASK:
            raise NotImplementedError(_refusal(reason, query, key, value, attn_mask))
        entry.tally.count(reason)
        _thread.passes_on = True
        try:
            return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        finally:
            _thread.passes_on = False


# Functions that torch's Python functions call to find out whether to pass themselves to a mode.
_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class _Names(dict[str, Any]):
    """The current globals of a module, with some names replaced."""

    def __init__(self, others: dict[str, Any], own: dict[str, Any]) -> None:
        super().__init__(own)
        self.others = others

    def __missing__(self, name: str) -> Any:
        return self.others[name]


def _unasked(func: Any) -> Any:
    """Copy a function of torch, without the check by which it passes itself to a mode."""
    names = _Names(func.__globals__, dict.fromkeys(_QUESTIONS, lambda *_: False))
    unasked = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    unasked.__kwdefaults__ = func.__kwdefaults__
    return unasked


# Functions that torch passes to modes as a whole, and that run attention inside: directly, or by recomputing in a
# backward pass.
_UNASKED: dict[Any, Any] = {
    func: _unasked(func)
    for func in (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


# torch.compile does not trace into F.multi_head_attention_forward: its graph node would be the same inside and outside
# of a context, and compiled graphs are cached on disk. So inside it gets a node of another name.
@torch.compiler.allow_in_graph
def _traced(*args: Any, **kwargs: Any) -> Any:
    """Run `F.multi_head_attention_forward` under a new mode, which belongs to no thread; its counts are dropped.

    The mode is not strict, because flash_dmattn supports every mask of this function.
    """
    mode = _Interception(thread=0)
    mode.entries.append(_Entry(False, None, mode))
    return mode.enter(F.multi_head_attention_forward, *args, **kwargs)


class _FastPath:
    """Torch's switch for the fast path of nn.TransformerEncoderLayer, off while a context of any thread is open.

    The switch is global. A mode alone would disable the fast path, too, but not in compiled code.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts, self._before = 0, True

    def close(self) -> None:
        """Switch it off, and count one more open context."""
        with self._lock:
            self._contexts += 1
            if self._contexts == 1:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)

    def open(self) -> None:
        """Count one open context less; after the last one, restore the switch."""
        with self._lock:
            self._contexts -= 1
            if self._contexts == 0:
                torch.backends.mha.set_fastpath_enabled(self._before)


_fast_path = _FastPath()


def _refusal(reason: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> str:
    named = zip(("query", "key", "value", "attn_mask"), (query, key, value, attn_mask))
    tensors = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in named if x is not None)
    return f"intercept_sdpa(strict=True) would leave a call with a mask to torch, by its {reason}: {tensors}"


def reason_to_pass_on(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> str | None:
    """Return why torch computes a call of F.scaled_dot_product_attention; None if flash_dmattn computes it.

    Invalid calls are passed on, too, so that torch raises its error.
    """
    if attn_mask is None:
        return NO_MASK
    tensors = (query, key, value, attn_mask)
    if not all(map(_is_plain, tensors)):
        return "a tensor subclass"
    dtypes = {autocast_dtype(x) for x in (query, key, value)}
    if len(dtypes) > 1 or dtypes.isdisjoint(FLOAT_DTYPES):
        return "dtypes of q, k and v"
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOAT_DTYPES:
        return "dtype of the mask"
    if any(x.device != query.device for x in tensors):
        return "devices"
    if not _shapes_fit(query, key, value, enable_gqa):
        return "shapes of q, k and v"
    if is_causal and query.shape[-2] != key.shape[-2]:
        return "is_causal, unequal lengths"  # aligned at the first key there, at the last key here
    if not _mask_fits(attn_mask, (*batch_dims(query, key, value), query.shape[-3], query.shape[-2], key.shape[-2])):
        return "shape of the mask"
    return None


def _is_plain(x: Tensor) -> bool:
    """Return whether this is an ordinary tensor: no nested or distributed one, and no other wrapper."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:  # Dynamo before 2.12 cannot compare functions
        if type(x).__torch_function__ not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl):
            return False
    return not x.is_nested and not is_traceable_wrapper_subclass(x)


def _shapes_fit(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    if min(q.dim(), k.dim(), v.dim()) < 3 or not q.dim() == k.dim() == v.dim():
        return False
    if q.shape[-1] != k.shape[-1] or k.shape[-3:-1] != v.shape[-3:-1] or 0 in (q.shape[-1], v.shape[-1]):
        return False
    for sizes in zip(q.shape[:-3], k.shape[:-3], v.shape[:-3]):
        if len(set(sizes) - {1}) > 1:
            return False
    heads, heads_k = q.shape[-3], k.shape[-3]
    return heads == heads_k > 0 or heads_k == 1 or (enable_gqa and heads_k > 0 and heads % heads_k == 0)


def _mask_fits(mask: Tensor, scores: tuple[int, ...]) -> bool:
    """Return whether the mask broadcasts to the scores without enlarging them."""
    if mask.dim() > len(scores):
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(mask.shape), reversed(scores)))
