"""`intercept_sdpa`: a mode of torch that sees every call of F.scaled_dot_product_attention, and whose call it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from types import FunctionType, TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .served import NO_MASK, reason_to_pass_on, serve
from .tally import Tally

SDPA = F.scaled_dot_product_attention  # the builtin, which torch hands to modes


class intercept_sdpa(ContextDecorator):
    """Let `flash_dmattn.attention` compute every F.scaled_dot_product_attention with a mask, in this thread and task.

    Of code that nobody can edit, too: direct calls, names that were imported earlier, `nn.MultiheadAttention`,
    `nn.TransformerEncoderLayer`, and code that `torch.compile` has compiled or will compile. A call without a mask is
    torch's, which has kernels for it, and so is one that `flash_dmattn.attention` does not serve. Contexts nest, one
    object may be entered again, and the innermost one decides.

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

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._entries: list[_Entry] = []  # that are open, in whatever thread or task

    def __enter__(self) -> Tally:
        mode = _thread.mode
        if mode is None:
            mode = _thread.mode = _Interception(threading.get_ident())
            mode.__enter__()
        entry = _Entry(self._strict, mode)
        mode.entries.append(entry)
        self._entries.append(entry)
        _of_task.set((*_of_task.get(), entry))
        _fast_path.close()
        return entry.tally

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The last one of this task: another task may have entered the same object later, and not have left it yet.
        own = [entry for entry in _of_task.get() if entry in self._entries]
        entry = own[-1] if own else self._entries[-1]
        self._entries.remove(entry)
        _of_task.set(tuple(other for other in _of_task.get() if other is not entry))
        mode = entry.mode
        mode.entries.remove(entry)
        if not mode.entries and _thread.mode is mode:
            _thread.mode = None
            mode.__exit__(kind, error, trace)
        _fast_path.open()


class _Entry:
    """One `with`, from where it is entered to where it is left."""

    def __init__(self, strict: bool, mode: _Interception) -> None:
        self.strict, self.mode, self.tally = strict, mode, Tally()


# What this thread, or this task of asyncio, has entered, the innermost last. A task that was started inside has a copy,
# which may hold what has been left meanwhile.
_of_task: ContextVar[tuple[_Entry, ...]] = ContextVar("intercept_sdpa", default=())


class _Thread(threading.local):
    mode: _Interception | None = None  # on the stack of torch while a context is open in the thread
    passes_on = False  # whether a call is on its way to torch


_thread = _Thread()


class _Interception(TorchFunctionMode):
    """Takes calls of the builtin, by whatever name they are made; one of them for all contexts of a thread.

    Torch's stack of modes belongs to the thread, and tasks that take turns may leave their contexts in any order.
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
                return (_traced_strictly if self.entries[-1].strict else _traced)(*args, **kwargs)
            return func(*args, **kwargs)
        if func in _RUNS_OTHERS and func not in self.entered and all(kind is Tensor for kind in types):
            return self.enter(func, *args, **kwargs)
        return func(*args, **kwargs)

    def enter(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of a function that torch has handed over as a whole, with this mode on inside of it.

        Torch switches a mode off while it is asked, and a call of the function itself would ask it again.
        """
        names = func.__globals__ | dict.fromkeys(_QUESTIONS, _nothing_overrides)
        unasked = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
        unasked.__kwdefaults__ = func.__kwdefaults__
        self.entered.append(func)
        try:
            with self:
                return unasked(*args, **kwargs)
        finally:
            self.entered.remove(func)

    def entry(self) -> _Entry | None:
        """The context that decides about a call here, or None where this task has none open."""
        # A compiler does not read what belongs to a task, and threads of autograd have the modes of the caller alone.
        if torch.compiler.is_compiling() or threading.get_ident() != self.thread:
            return self.entries[-1] if self.entries else None
        return next((entry for entry in reversed(_of_task.get()) if entry in self.entries), None)

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
        entry = None if _thread.passes_on else self.entry()  # where a mode above this one has decided, it is torch's
        if entry is None:
            return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        reason = reason_to_pass_on(query, key, value, attn_mask, is_causal, enable_gqa)
        if reason is None:
            entry.tally.count(None)
            assert attn_mask is not None
            return serve(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if entry.strict and reason != NO_MASK:
            raise NotImplementedError(_refusal(reason, query, key, value, attn_mask))
        entry.tally.count(reason)
        _thread.passes_on = True
        try:
            return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        finally:
            _thread.passes_on = False


# Functions that torch hands over as a whole, and inside of which attention runs: their own, or what a backward pass
# computes again.
_RUNS_OTHERS: set[Any] = {F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward, torch.autograd.grad}
# By these names they ask whether to hand themselves over.
_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _nothing_overrides(*_: Any) -> bool:
    return False


# torch.compile does not look into F.multi_head_attention_forward: it would be the same node of a graph in a context and
# outside, and what is compiled of graphs is kept on disk. So it gets a node of another name.
@torch.compiler.allow_in_graph
def _traced(*args: Any, **kwargs: Any) -> Any:
    return _alone(strict=False).enter(F.multi_head_attention_forward, *args, **kwargs)


@torch.compiler.allow_in_graph
def _traced_strictly(*args: Any, **kwargs: Any) -> Any:
    return _alone(strict=True).enter(F.multi_head_attention_forward, *args, **kwargs)


def _alone(strict: bool) -> _Interception:
    """A mode of no thread's own, which counts for nobody."""
    mode = _Interception(thread=0)
    mode.entries.append(_Entry(strict, mode))
    return mode


class _FastPath:
    """The switch of torch for its fast path of nn.TransformerEncoderLayer, off while a context of any thread is open.

    A compiler does not see that a mode switches the fast path off, and the switch is one for all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts, self._before = 0, True

    def close(self) -> None:
        """Switch it off, for one context more."""
        with self._lock:
            self._contexts += 1
            if self._contexts == 1:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)

    def open(self) -> None:
        """Switch it back to what it was, for the last context."""
        with self._lock:
            self._contexts -= 1
            if self._contexts == 0:
                torch.backends.mha.set_fastpath_enabled(self._before)


_fast_path = _FastPath()


def _refusal(reason: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> str:
    named = zip(("query", "key", "value", "attn_mask"), (query, key, value, attn_mask))
    given = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in named if x is not None)
    return f"intercept_sdpa(strict=True) would leave a call with a mask to torch, by its {reason}: {given}"
