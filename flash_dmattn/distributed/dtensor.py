"""Calls with DTensors: converts placements to the call of each rank, and results to DTensors.

The batch and the heads of a call may be sharded over the ranks of a mesh. Entries and groups of heads are independent,
so ranks only communicate to sum the gradients of replicated tensors. A sharded sequence is context parallelism. The
placements of q decide which ones k, v, mask and bias need; none of them is redistributed. docs/dtensor.md has the
table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import api, explanation
from ..biases import require_dense_bias
from ..definition import is_dtensor
from ..gradients import contiguous_strides
from ..problem import AuxRequest, RawFlags, Repeats, fold_call
from ..validation import PreparedCall, describe
from .api import context_parallel_attention
from .explanation import explain_context_parallel
from .group import Members, groups_of, refuse_together
from .layout import SequenceLayout

# For each mesh dim, the dim of a tensor that is sharded over it; None if it is replicated.
Dims = tuple[int | None, ...]


def attention(
    q: Any,
    *others: Any,
    sink: Any,
    sequences: object,
    dropout_p: float,
    max_scores: bool,
    entropy: bool,
    **flags: Any,
) -> Any:
    """Run `flash_dmattn.attention` if q is a DTensor: the call of this rank, with results as DTensors.

    q determines placements; arguments are as passed to `flash_dmattn.attention`: k, v, mask and bias in order. The
    maximum scores and entropies of rows follow lse, if the call asks for them.
    """
    return_lse, return_probs = flags["return_lse"], flags.pop("return_probs")
    try:
        call = ShardedCall((q, *others, sink), sequences, dropout_p)
        over = None if call.rows_on is None else call.over_ranks(return_probs, max_scores, entropy)
    except Exception as error:
        groups = _groups_of_rows(q)
        if groups:  # because the other ranks compare their calls
            refuse_together(groups, error)
        raise
    *local, sink = call.local
    if over is None and (max_scores or entropy):
        del flags["return_lse"]
        out, aux = api.attention(*local, sink=sink, return_aux=AuxRequest(True, max_scores, entropy), **flags)
        return call.wrap((out, *(x for x in aux if x is not None)))
    if over is None:
        results = api.attention(*local, return_probs=return_probs, sink=sink, **flags)
    else:
        results = context_parallel_attention(*local, sink=sink, **flags | over)
    results = call.wrap(results if isinstance(results, tuple) else (results,))
    return results if return_lse or return_probs else results[0]


def explain(
    *tensors: Any,
    sink: Any,
    sequences: object,
    dropout_p: float,
    return_probs: bool,
    return_lse: bool,
    max_scores: bool,
    entropy: bool,
    **flags: Any,
) -> explanation.Explanation:
    """Explain the call of this rank, by `explain_context_parallel` if the sequence is sharded."""
    call = ShardedCall((*tensors, sink), sequences, dropout_p)
    *local, sink = call.local
    if call.rows_on is None:
        if max_scores or entropy:
            flags["return_aux"] = AuxRequest(return_lse, max_scores, entropy)
        else:
            flags |= {"return_lse": return_lse, "return_probs": return_probs}
        return explanation.explain(*local, sink=sink, **flags)
    over = call.over_ranks(return_probs, max_scores, entropy)
    return explain_context_parallel(*local, sink=sink, return_lse=return_lse, **flags | over)


class ShardedCall:
    """A call whose tensors are DTensors: the local tensors of this rank, and how its results become DTensors.

    Attributes:
        local: q, k, v, mask, bias and sink of the call of this rank.
        rows_on: the mesh dim over which the sequence is sharded, or None.
    """

    def __init__(self, tensors: tuple[Any, ...], sequences: object, dropout_p: float) -> None:
        if sequences is not None:
            raise ValueError("sequences is given with DTensors; it needs local tensors: pass q.to_local() and so on")
        if dropout_p:
            raise ValueError(
                f"dropout_p is {dropout_p} with DTensors; it needs to be 0.0: ranks would draw the same for other "
                "entries (call attention with local tensors, each rank with a seed of its own)"
            )
        q, k, v, *_ = tensors
        self._mesh, self._shape = q.device_mesh, tuple(q.shape)
        named = dict(zip(("q", "k", "v", "mask", "bias", "sink"), tensors, strict=True))
        for name, x in named.items():
            self._check_kind(name, x)
        _validate(*tensors)
        self._keys, self._head_dim_v = k.shape[-3], v.shape[-1]
        self._q_dims: Dims = tuple([self._q_dim(q, dim) for dim in range(self._mesh.ndim)])
        rows_on = [mesh_dim for mesh_dim, dim in enumerate(self._q_dims) if dim == len(self._shape) - 3]
        self.rows_on = rows_on[0] if rows_on else None
        self._check_heads(q, k)
        if self.rows_on is not None:
            self._check_rows(q, len(rows_on))
        self.local = tuple([self._local(name, x) for name, x in named.items()])

    def over_ranks(self, return_probs: bool, max_scores: bool, entropy: bool) -> dict[str, Any]:
        """Return the group of the sharded sequence and its layouts, as arguments of `context_parallel_attention`."""
        if return_probs:
            raise ValueError("return_probs is True, and q shares its sequence; no rank has all probabilities of a row")
        if max_scores or entropy:
            raise ValueError(
                f"return_aux asks for {'max_scores' if max_scores else 'entropy'}, and q shares its sequence; only lse "
                "is computed over ranks (shard q by batch or heads, or call attention with local tensors)"
            )
        if torch.compiler.is_compiling():
            raise ValueError(
                "q shares its sequence in a graph of torch.compile, which cannot trace how a SequenceLayout is made; "
                "make one outside, and call flash_dmattn.distributed.context_parallel_attention with local tensors"
            )
        assert self.rows_on is not None
        contiguous, size = SequenceLayout.contiguous, self._mesh.size(self.rows_on)
        layouts = {"layout": contiguous(self._shape[-3], size), "layout_k": contiguous(self._keys, size)}
        return {"group": self._mesh.get_group(self.rows_on), **layouts}

    def wrap(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return out, lse and probabilities of this rank as DTensors of the whole call."""
        out, *scores = results
        *batch, rows, heads, _ = self._shape
        dtensors = [self._global(out, (*batch, rows, heads, self._head_dim_v), _placements(self._q_dims))]
        placements = _placements([None if dim is None else self._score_dim(dim) for dim in self._q_dims])
        for x in scores:  # (*batch, heads, rows), and keys of probabilities
            shape = (*batch, heads, rows, *x.shape[len(batch) + 2 :])
            dtensors.append(self._global(x, shape, placements))
        return tuple(dtensors)

    def _check_kind(self, name: str, x: Any) -> None:
        if x is None and name not in ("k", "v"):
            return
        if name == "mask" and not isinstance(x, Tensor):
            shape = getattr(x, "shape", None)  # a ShardedMask, which belongs to one rank, has none
            if shape is not None and math.prod(shape[:-2]) != 1:
                raise ValueError(
                    f"mask was prepared with batch and heads {tuple(shape[:-2])}; with DTensors it needs (1, 1), the "
                    "same on every rank, or to be a bool DTensor"
                )
            return
        if name == "bias":
            require_dense_bias(x, "with DTensors")
        if not is_dtensor(x):
            raise TypeError(
                f"{name} is a {type(x).__name__}, and q is a DTensor; {name} needs to be one, too, on the mesh of q "
                "(torch.distributed.tensor.distribute_tensor makes it, DTensor.from_local of local tensors)"
            )
        if x.device_mesh != self._mesh:
            raise ValueError(f"{name} is on {x.device_mesh}; it needs to be on the mesh of q, {self._mesh}")

    def _q_dim(self, q: Any, mesh_dim: int) -> int | None:
        """Return the dim of q that is sharded over a mesh dim, None if q is replicated."""
        placement, dims = q.placements[mesh_dim], q.dim()
        if type(placement) is Replicate:
            return None
        for dim in range(dims - 1):  # a loop, so that a graph is specialised on one of them
            if placement == Shard(dim):
                return dim
        batch = " or ".join([f"Shard({dim})" for dim in range(dims - 3)])
        raise ValueError(
            f"q has placements {q.placements}; on mesh dim {mesh_dim} it needs Replicate(), {batch} (batch), "
            f"Shard({dims - 3}) (sequence) or Shard({dims - 2}) (heads): q.redistribute(placements=...) communicates"
        )

    def _check_heads(self, q: DTensor, k: DTensor) -> None:
        """Refuse heads that cannot be sharded by groups: a key-value head and its query heads."""
        sizes = [self._mesh.size(dim) for dim, place in enumerate(self._q_dims) if place == q.dim() - 2]
        if k.shape[-2] % math.prod(sizes) != 0:
            raise ValueError(
                f"k has {k.shape[-2]} heads, and q has placements {q.placements} on a mesh of shape "
                f"{tuple(self._mesh.shape)}; k needs a multiple of {math.prod(sizes)} heads, the same for each rank "
                "(repeat them, k.repeat_interleave(n, dim=-2), or share the batch)"
            )

    def _check_rows(self, q: Any, mesh_dims: int) -> None:
        """Refuse lengths that leave a rank a single position, because a mask with one row applies to all queries."""
        if mesh_dims > 1:
            raise ValueError(
                f"q has placements {q.placements}, which share its sequence over {mesh_dims} mesh dims; it needs one: "
                "flatten them, mesh[names]._flatten()"
            )
        size = self._mesh.size(self.rows_on)
        for name, length in (("q", self._shape[-3]), ("k", self._keys)):
            if length % size or length < 2 * size:
                raise ValueError(
                    f"{name} has {length} positions, shared among {size} ranks; it needs a multiple of {size}, "
                    f"{2 * size} at least"
                )

    def _score_dim(self, dim: int) -> int:
        """Return the dim of scores (*batch, heads, rows, keys) for a dim of q (*batch, rows, heads, head_dim)."""
        heads = len(self._shape) - 2
        return dim - 1 if dim == heads else dim + 1 if dim == heads - 1 else dim

    def _dim_of(self, name: str, x: Any, mesh_dim: int) -> int | None:
        """Return the dim of a tensor that is sharded like a dim of q; None if it is replicated."""
        q_dim = self._q_dims[mesh_dim]
        if q_dim is None:
            return None
        if name == "sink":
            return 0 if q_dim == len(self._shape) - 2 else None
        if name not in ("mask", "bias"):
            return q_dim
        dim = self._score_dim(q_dim) - (len(self._shape) - x.dim())  # dims count from the right
        if dim >= 0 and x.shape[dim] > 1:
            return dim
        # One row for all queries may be sharded as the keys.
        keys = x.dim() - 1
        is_shared = mesh_dim == self.rows_on and x.shape[keys] > 1 and x.placements[mesh_dim] == Shard(keys)
        return keys if is_shared else None

    def _local(self, name: str, x: Any) -> Any:
        """Return the tensor of this rank; its gradient gets the placements of x."""
        if not is_dtensor(x):
            return x
        dims = tuple([self._dim_of(name, x, mesh_dim) for mesh_dim in range(self._mesh.ndim)])
        needed = _placements(dims)
        for mesh_dim, (has, needs) in enumerate(zip(x.placements, needed, strict=True)):
            # A dim is split in the order of mesh dims, so it cannot be split again by an earlier one.
            if has != needs and (type(has) is not Replicate or needs in x.placements[mesh_dim + 1 :]):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)} and placements {x.placements}; with q with "
                    f"{_placements(self._q_dims)} it needs {needed}, or Replicate() where a rank takes its part "
                    f"itself: {name}.redistribute(placements=...) communicates"
                )
        if not (x.requires_grad and torch.is_grad_enabled()):
            return _take(x, dims)
        is_shared = tuple([dim is None and q_dim is not None for dim, q_dim in zip(dims, self._q_dims, strict=True)])
        return _Local.apply(x, dims, is_shared)

    def _global(self, x: Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Tensor:
        dtensor: Tensor = DTensor.from_local(
            x, self._mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_strides(shape)
        )
        return dtensor


class _Local(torch.autograd.Function):
    """`_take`, whose backward pass sums the gradients of replicated tensors, with the placements of the tensor.

    `DTensor.to_local(grad_placements=)` leaves the gradient of a leaf Partial, which is wrong for an optimizer.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, dims: Dims, is_shared: tuple[bool, ...]) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape, ctx.dtype = x.device_mesh, x.placements, x.shape, x.dtype
        ctx.grad_placements = [
            Partial() if shared else at for shared, at in zip(is_shared, _placements(dims), strict=True)
        ]
        local = _take(x, dims)
        return local.float() if any(is_shared) and x.dtype.itemsize < 4 else local

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dtensor = DTensor.from_local(
            grad, ctx.mesh, ctx.grad_placements, run_check=False, shape=ctx.shape, stride=contiguous_strides(ctx.shape)
        )
        return dtensor.redistribute(placements=ctx.placements).to(ctx.dtype), None, None


def _groups_of_rows(q: Any) -> tuple[Members, ...]:
    """Return the group over which the sequence of q is sharded, or None."""
    on = [mesh_dim for mesh_dim, placement in enumerate(q.placements) if placement == Shard(q.dim() - 3)]
    return groups_of(q.device_mesh.get_group(on[0])) if len(on) == 1 else ()


def _take(x: DTensor, dims: Dims) -> Tensor:
    """Return a view of the local tensor of a DTensor, sliced along a mesh dim if it is replicated there."""
    local: Tensor = x.to_local()
    local = local.view_as(local)
    mesh: DeviceMesh = x.device_mesh
    for mesh_dim, dim in enumerate(dims):
        if dim is not None and type(x.placements[mesh_dim]) is Replicate:
            # As in torch.chunk: the last ranks may have fewer rows, or none.
            size, parts = local.shape[dim], mesh.size(mesh_dim)
            each = -(-size // parts)
            start = min(mesh.get_local_rank(mesh_dim) * each, size)
            local = local.narrow(dim, start, min(each, size - start))
    return local


def _placements(dims: Sequence[int | None]) -> tuple[Placement, ...]:
    """Return Shard for a mesh dim that has a tensor dim, else Replicate."""
    return tuple([Replicate() if dim is None else Shard(dim) for dim in dims])


def _validate(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Tensor | None, sink: Tensor | None) -> None:
    """Refuse wrong tensors as `attention` does for the whole tensors: on every rank, before they communicate."""
    q, k, v = _on_meta(q), _on_meta(k), _on_meta(v)
    mask = _on_meta(mask) if is_dtensor(mask) else None
    bias, sink = (None if x is None else _on_meta(x) for x in (bias, sink))
    repeats: Repeats | None = None
    if q.dim() > 4:
        q, k, v, mask, bias, _, repeats, _ = fold_call(q, k, v, mask, bias)
    describe(PreparedCall(q, k, v, mask, bias, sink, RawFlags(), repeats=repeats))


def _on_meta(x: Tensor) -> Tensor:
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return meta.requires_grad_() if x.requires_grad and x.is_floating_point() else meta
