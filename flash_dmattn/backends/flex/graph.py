"""The FlexAttention graph of a call, and its compiled functions: one per class of problem, each compiled once.

Importing this module imports FlexAttention, and a part of dynamo with it, so `call.py` does it lazily.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ...caches import ClockCache
from ...definition import is_transformed
from ...problem import Packing
from .blocks import BLOCK, Blocks, Places

# The graph compiler given to torch.compile. Tests set "eager": FlexAttention's own dense formula, which has a backward
# pass on CPU.
compiler = "inductor"


class Shared(NamedTuple):
    """How a mask or a bias is indexed.

    Attributes:
        dims: which of (batch, head, query, key) it has.
        group: query heads for each head of it.
        entries: (repeat, size): entry b of the batch has entry b // repeat % size. None if each has its own.
        packing: how a value per score is indexed in padded sequences: "none" by sequence and position, "queries" by
            token and position of the key; None by row and column.
    """

    dims: tuple[bool, bool, bool, bool]
    group: int
    entries: tuple[int, int] | None = None
    packing: Packing | None = None


class Form(NamedTuple):
    """The constants of a graph: no tensor and no length.

    Attributes:
        grouped: whether there are groups of query heads.
        max_scores: whether to return the maximum score of each row, too; only with `return_lse`.
        num_stages: of the kernels' pipelines; None leaves it to torch.
        no_decoding: whether torch may not use its decoding kernel.
    """

    softmax_scale: float
    softcap: float
    grouped: bool
    return_lse: bool
    max_scores: bool
    mask: Shared | None
    bias: Shared | None
    num_stages: int | None
    no_decoding: bool


def shared(x: Tensor, num_heads: int, batch: int, repeat: int, packing: Packing | None = None) -> Shared:
    """Describe how `num_heads` query heads and a batch index a mask or a bias, whose broadcast dims have size 1."""
    b, h, i, j = (size > 1 for size in x.shape)
    # int() makes it a constant also if a caller's graph has symbolic sizes.
    entries = (int(repeat), int(x.shape[0])) if packing is None and b and x.shape[0] != batch else None
    return Shared((b, h, i, j), int(num_heads // x.shape[1]) if h else 1, entries, packing)


def run(
    form: Form, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, blocks: Blocks
) -> tuple[Tensor, ...]:
    """Run FlexAttention on (B, L, H, D) tensors, and return (out,), (out, lse) or (out, lse, max_scores).

    `mask` and `bias` have 4 dims, of size 1 where `form` has none.
    """
    lists, lower, upper, places, origin = blocks
    # Locals, as a closure over `form` would capture every value in it, and floats cannot be captured.
    mask_shared, bias_shared = form.mask, form.bias
    softcap = None
    if form.softcap > 0:
        softcap = form.softcap

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None and bias_shared is not None:
            place = j if origin is None else j - i + origin
            score = score + bias[_index(bias_shared, places, b, h, i, place)]
        return score

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = None
        if mask is not None and mask_shared is not None:
            allowed = mask[_index(mask_shared, places, b, h, i, j)] != 0
        if lower is not None:
            inside = j >= lower[i] if lower.dim() else j - i >= lower
            allowed = inside if allowed is None else allowed & inside
        if upper is not None:
            inside = j <= upper[i] if upper.dim() else j - i <= upper
            allowed = inside if allowed is None else allowed & inside
        return allowed  # type: ignore[return-value]

    block_mask = None
    if lists is not None:
        # from_kv_blocks would compute the lists of columns again by a scatter.
        lengths = (q.shape[1], k.shape[1])
        block_mask = BlockMask(lengths, *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod)  # type: ignore[misc,arg-type]
    kernel_options: Any = {}
    if form.num_stages is not None:
        kernel_options["num_stages"] = form.num_stages
    if form.no_decoding:
        kernel_options["FORCE_USE_FLEX_ATTENTION"] = True
    results: Any = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=score_mod if form.softcap > 0 or bias is not None else None,
        block_mask=block_mask,
        scale=form.softmax_scale,
        enable_gqa=form.grouped,
        kernel_options=kernel_options,
        return_aux=AuxRequest(lse=True, max_scores=form.max_scores) if form.return_lse else None,
    )
    if not form.return_lse:
        return (results.transpose(1, 2),)
    out, aux = results
    # The fill stops the gradient of lse of an empty row, because even a gradient of inf must not be multiplied by p =
    # 0. With a score of +inf out is NaN, and so is lse on every backend.
    lse = aux.lse.masked_fill(aux.lse == torch.inf, torch.nan)
    results = (out.transpose(1, 2), lse.masked_fill(lse == -torch.inf, -torch.inf))
    return (*results, aux.max_scores) if form.max_scores else results


def _index(shared: Shared, places: Places | None, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
    # Four tensors always: a dim dropped by a view breaks the CPU kernel with symbolic lengths, and a literal 0 the
    # gradient of a captured tensor. The compiler folds x * 0.
    (has_b, has_h, has_i, has_j), group, entries, packing = shared
    zero = b * 0
    if packing is not None and places is not None:
        # Not the constant 0, with which Inductor fails to compile the gradient if rows are loaded (torch 2.11). The
        # batch of such a call has one entry, so b is 0.
        zero = b
        b = places.sequence[i] if packing == "none" else b
        i, j = (places.query if packing == "none" else places.token)[i], places.key[j]
    if entries is not None:
        b = b // entries[0] % entries[1]
    if group > 1:
        h = h // group
    return b if has_b else zero, h if has_h else zero, i if has_i else zero, j if has_j else zero


# A graph keeps its compiled code, some MB. A model with another scale in each layer has a graph for each layer.
_compiled: ClockCache[Callable[..., tuple[Tensor, ...]]] = ClockCache(256)
_numbers = itertools.count()


def compiled(form: Form, specialised: tuple[object, ...], dynamic: bool | None) -> Callable[..., tuple[Tensor, ...]]:
    """Return the compiled graph of a class of problems, compiled at its first use.

    torch.compile counts recompilations per code object, and stores per name which sizes have varied. One function for
    all classes would soon exhaust the limit (8), so each class has its own code object and name. `fullgraph` makes
    reaching the limit an error: without it torch silently runs the dense formula from then on.
    """
    key = (compiler, form, specialised, dynamic)
    function = _compiled.get(key)
    if function is None:

        def call(*tensors: Any) -> tuple[Tensor, ...]:
            return run(form, *tensors)

        code = call.__code__.replace(co_name=f"flex_attention_{next(_numbers)}")
        copy = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
        function = _compiled.put(key, compile_to_keep_buffers(copy, compiler, dynamic))
    return function


_patching = threading.Lock()


def compile_to_keep_buffers(
    function: Callable[..., tuple[Tensor, ...]], backend: Any, dynamic: bool | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """Compile without reusing saved tensors in the backward pass, which would refuse retain_graph=True.

    torch has one setting for all threads. It is changed only while a graph is compiled, by one thread at a time, and
    not while graphs run, because two overlapping calls would not restore it.
    """
    compile_graph = torch._dynamo.lookup_backend(backend)

    def without_reuse(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with _patching, torch._functorch.config.patch(donated_buffer=False):
            compiled: Callable[..., Any] = compile_graph(graph, inputs)
        return compiled

    run = torch.compile(function, backend=without_reuse, fullgraph=True, dynamic=dynamic)

    def call(*arguments: Any) -> tuple[Tensor, ...]:
        if is_transformed():
            raise NotImplementedError(
                "backend 'flex' compiles FlexAttention, and torch.compile does not run inside of torch.vmap and "
                "torch.func.grad; pass backend='eager', or the mapped dim as a batch dim of q, k and v"
            )
        results = run(*arguments)
        _state_that_none_is_reused(results)
        return results

    return call


def _state_that_none_is_reused(results: tuple[Tensor, ...]) -> None:
    # A graph compiled without reuse has None as its list of reused tensors. In the backward pass torch treats anything
    # but an empty list as reuse, and refuses retain_graph=True.
    for x in results:
        node = x.grad_fn
        for _ in range(3):  # a view of an output has its own node before the node of the graph
            if node is None:
                break
            metadata: Any = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
            if getattr(metadata, "bw_donated_idxs", ()) is None:
                metadata.bw_donated_idxs = []
            node = node.next_functions[0][0] if node.next_functions else None
