"""The strategy "ulysses": heads traded for positions, one ordinary call over the whole sequence, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention
from ..definition import define
from ..dispatch.config import BackendChoice
from ..dispatch.selection import Selection, choice_in_force, choose
from ..problem import AttentionProblem, TensorSpec, unpacked_spec
from .agreement import agree_within
from .call import ParallelCall
from .exchange import trade
from .layout import SequenceLayout, from_flat


def _to_heads(x: Tensor, group: str, layout: list[int], direction: str, of: str, number: int) -> Tensor:
    where = from_flat(tuple(layout))
    _compare(x, group, layout, direction, of, number)
    received = trade(torch.stack(x.chunk(where.world_size, 2)), group)
    return where.unshard(list(received.unbind()), 1)


def _to_heads_fake(x: Tensor, group: str, layout: list[int], *others: Any) -> Tensor:
    batch, _, heads, dim = x.shape
    return x.new_empty(batch, layout[0], heads // from_flat(tuple(layout)).world_size, dim)


def _to_rows(x: Tensor, group: str, layout: list[int], direction: str, of: str, number: int) -> Tensor:
    where = from_flat(tuple(layout))
    _compare(x, group, layout, direction, of, number)
    sent = torch.stack([where.shard(x, 1, rank) for rank in range(where.world_size)])
    return torch.cat(list(trade(sent, group).unbind()), 2)


def _to_rows_fake(x: Tensor, group: str, layout: list[int], *others: Any) -> Tensor:
    batch, _, heads, dim = x.shape
    where = from_flat(tuple(layout))
    return x.new_empty(batch, where.local_length, heads * where.world_size, dim)


def _compare(x: Tensor, group: str, layout: list[int], direction: str, of: str, number: int) -> None:
    if direction == "backward" or number == 0:  # else the call was compared
        agree_within(group, direction, number, {"traded": of, of: x, "layout": layout})


_SCHEMA = "(Tensor x, str group, int[] layout, str direction, str of, int number) -> Tensor"
_to_heads_op = define("trade_to_heads", _SCHEMA, _to_heads, _to_heads_fake)
_to_rows_op = define("trade_to_rows", _SCHEMA, _to_rows, _to_rows_fake)


class _Trade(torch.autograd.Function):
    """(B, L / W, H, D) of this rank's rows to (B, L, H / W, D) of its heads, or back; each is the other's gradient."""

    @staticmethod
    def forward(
        x: Tensor, group: str, layout: tuple[int, ...], to_heads: bool, direction: str, of: str, number: int
    ) -> Tensor:
        traded: Tensor = (_to_heads_op if to_heads else _to_rows_op)(x, group, list(layout), direction, of, number)
        return traded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.group, ctx.layout, ctx.to_heads, _, ctx.of, ctx.number = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        own = _Trade.apply(gradient, ctx.group, ctx.layout, not ctx.to_heads, "backward", ctx.of, ctx.number)
        return own, None, None, None, None, None, None


def trade_heads(x: Tensor, of: str, number: int, group: str, layout: SequenceLayout, *, to_heads: bool) -> Tensor:
    """Trade (B, L / W, H, D) of this rank's rows for (B, L, H / W, D) of its heads, or back; differentiable.

    Args:
        x: the tensor.
        of: name of the tensor in the call.
        number: of the call, 0 in a compiled graph.
        group: name of the process group.
        layout: of the rows.
        to_heads: from rows to heads.
    """
    traded: Tensor = _Trade.apply(x, group, layout.flat, to_heads, "forward", of, number)
    return traded


class OwnHeads(NamedTuple):
    """The heads that a rank computes.

    Attributes:
        rank, size: which of how many ranks.
        num_heads, num_heads_k: of the whole call.
    """

    rank: int
    size: int
    num_heads: int
    num_heads_k: int

    @property
    def repeats(self) -> int:
        """How many ranks share a key-value head."""
        return max(1, self.size // self.num_heads_k)

    def of(self, heads: int) -> slice:
        """The part of a head dim of 1, of all key-value heads or of all query heads."""
        if heads == 1:
            return slice(0, 1)
        if heads < self.size:
            return slice(self.rank // self.repeats, self.rank // self.repeats + 1)
        width = heads // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def repeated(self, x: Tensor) -> Tensor:
        """Keys or values (B, L / W, Hk, D), each head as often as ranks share it."""
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, 2)

    def cut(self, x: Tensor | None) -> Tensor | None:
        """The same of a mask or bias (b, h, 1, j)."""
        return None if x is None else x[:, self.of(x.shape[1])]


def choose_traded(call: ParallelCall, backend: BackendChoice) -> Selection:
    """The backends of the one call that each rank makes; they are alike on all ranks.

    Raises:
        ValueError, BackendUnsupportedError, BackendUnavailableError: as `attention`.
    """
    return choose(problem_of_heads(call), choice_in_force(backend))


def _heads_of(call: ParallelCall) -> OwnHeads:
    p = call.problem
    return OwnHeads(call.members.rank, call.members.size, p.num_heads, p.num_heads_k)


def problem_of_heads(call: ParallelCall) -> AttentionProblem:
    """The one call that each rank makes: all positions of its heads."""
    p, size = call.problem, call.members.size
    own = _heads_of(call)
    heads, heads_k, seqlen_q = p.num_heads // size, max(1, p.num_heads_k // size), call.layout.length

    def spec(x: TensorSpec | None) -> TensorSpec | None:
        if x is None:
            return None
        part = own.of(x.shape[1])
        return x._replace(shape=(x.shape[0], part.stop - part.start, *x.shape[2:]))

    return p._replace(
        seqlen_q=seqlen_q,
        num_heads=heads,
        num_heads_k=heads_k,
        q_strides=unpacked_spec((p.batch, seqlen_q, heads, p.head_dim)).strides,
        k_strides=unpacked_spec((p.batch, p.seqlen_k, heads_k, p.head_dim)).strides,
        v_strides=unpacked_spec((p.batch, p.seqlen_k, heads_k, p.head_dim_v)).strides,
        mask=spec(p.mask),
        bias=spec(p.bias),
    )


def attend_traded(
    call: ParallelCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    backend: BackendChoice,
) -> Tensor | tuple[Tensor, Tensor]:
    """out of this rank's rows, with lse where the call returns it.

    Args:
        call: as it was described.
        q, k, v: of this rank.
        mask, bias: with one row for all queries, and all keys or one.
    """
    p, own, name, number = call.problem, _heads_of(call), call.members.name, call.number
    whole_q = trade_heads(q, "q", number, name, call.layout, to_heads=True)
    repeated = zip("kv", [own.repeated(x) for x in (k, v)])
    whole_k, whole_v = (trade_heads(x, of, number, name, call.layout_k, to_heads=True) for of, x in repeated)
    found = attention(
        whole_q,
        whole_k,
        whole_v,
        own.cut(mask),
        own.cut(bias),
        is_causal=p.is_causal,
        window_size=p.window_size,
        softmax_scale=p.softmax_scale,
        softcap=p.softcap,
        deterministic=p.deterministic,
        return_lse=True,
        backend=backend,
        sink=None if sink is None else sink[own.of(p.num_heads)],
    )
    out = trade_heads(found[0], "out", number, name, call.layout, to_heads=False)
    if not p.return_lse:
        return out
    columns = found[1].transpose(1, 2)[..., None]
    lse = trade_heads(columns, "lse", number, name, call.layout, to_heads=False)
    return out, lse.squeeze(-1).transpose(1, 2)
