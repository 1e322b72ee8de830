"""Both strategies over a mesh of two dims: heads are traded within the inner one, keys gathered over the outer one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..problem import as_scores
from .call import check_layouts
from .exchange import sum_dtype
from .group import Members, check_layout
from .layout import SequenceLayout
from .mask import ShardedMask
from .strategy import check_heads
from .sums import sum_gradient
from .ulysses import OwnHeads, trade_heads


class Inputs(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | ShardedMask | None
    bias: Tensor | None
    sink: Tensor | None


class Both(NamedTuple):
    """A mesh of two dims, and who of its ranks, the inner dim counted first, has which positions.

    Attributes:
        outer, inner: the groups of this process.
        layout: of the queries over all ranks.
        layout_k: of the keys; None for that of the queries, here and below.
        outer_layout, outer_layout_k: which positions the ranks of each inner group have together. Rows of masks and
            biases are in it.
        within, within_k: which of the rows of its inner group each rank has.
    """

    outer: Members
    inner: Members
    layout: SequenceLayout
    layout_k: SequenceLayout | None
    outer_layout: SequenceLayout
    outer_layout_k: SequenceLayout | None
    within: SequenceLayout
    within_k: SequenceLayout

    @classmethod
    def of(cls, inner: Members, outer: Members, layout: SequenceLayout, layout_k: SequenceLayout | None) -> Both:
        """The same of the groups of a mesh.

        Raises:
            TypeError: `layout` is no layout.
            ValueError: it is for another number of ranks.
        """
        size = inner.size * outer.size
        check_layout(layout, size, "mesh")
        together, within = layout.joined(inner.size)
        own = within[outer.rank]
        # The validation names what is no layout of as many ranks.
        if not isinstance(layout_k, SequenceLayout) or layout_k.world_size != size:
            return cls(outer, inner, layout, layout_k, together, None, own, own)
        together_k, within_k = layout_k.joined(inner.size)
        return cls(outer, inner, layout, layout_k, together, together_k, own, within_k[outer.rank])

    def described(self, x: Inputs, reduce_bias_grad: bool, number: int) -> Inputs:
        """Make the inputs of the call over the outer dim: q, k and v without memory, and the heads of the rest.

        Args:
            x: of this rank.
            reduce_bias_grad: as in the call.
            number: of the call.

        Raises:
            TypeError, ValueError: sizes do not fit the mesh.
        """
        members = Members("", self.layout.world_size, 0)
        check_layouts(x.q, x.k, x.v, members, self.layout, self.layout_k)
        if not all(isinstance(t, Tensor) and t.dim() == 4 for t in (x.q, x.k, x.v)):
            return x  # for the validation to name
        check_heads(x.q.shape[2], x.k.shape[2], self.inner.size)
        heads, size = self._heads(x), self.inner.size

        def standing(t: Tensor) -> Tensor:
            shape = (t.shape[0], t.shape[1] * size, max(1, t.shape[2] // size), t.shape[3])
            return t.detach().new_empty((1, 1, 1, 1)).requires_grad_(t.requires_grad).expand(shape)

        mask, bias, sink = x.mask, x.bias, x.sink
        if isinstance(mask, ShardedMask) and mask.heads > 1:
            raise ValueError(f"mask was prepared with {mask.heads} heads; over a mesh of two dims it needs to have one")
        if isinstance(mask, Tensor) and mask.dim() in (2, 3, 4):
            mask = heads.cut(as_scores(mask))
        if isinstance(bias, Tensor) and bias.dim() in (2, 3, 4):
            bias = heads.cut(self._summed(as_scores(bias), reduce_bias_grad and as_scores(bias).shape[2] == 1, number))
        if isinstance(sink, Tensor) and sink.shape == (x.q.shape[2],):
            sink = self._summed(sink, reduce_bias_grad, number)[heads.of(x.q.shape[2])]
        return Inputs(standing(x.q), standing(x.k), standing(x.v), mask, bias, sink)

    def traded(self, x: Inputs, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of this rank's heads, with the rows of its inner group."""
        heads, name = self._heads(x), self.inner.name
        q = trade_heads(x.q, "q", number, name, self.within, to_heads=True)
        own = [heads.repeated(t) for t in (x.k, x.v)]
        k, v = (trade_heads(t, of, number, name, self.within_k, to_heads=True) for of, t in zip("kv", own))
        return q, k, v

    def returned(self, out: Tensor, lse: Tensor | None, number: int) -> tuple[Tensor, Tensor | None]:
        """out and lse of this rank's rows, with all heads."""
        own = trade_heads(out, "out", number, self.inner.name, self.within, to_heads=False)
        if lse is None:
            return own, None
        columns = lse.transpose(1, 2)[..., None]
        traded = trade_heads(columns, "lse", number, self.inner.name, self.within, to_heads=False)
        return own, traded.squeeze(-1).transpose(1, 2)

    def _heads(self, x: Inputs) -> OwnHeads:
        return OwnHeads(self.inner.rank, self.inner.size, x.q.shape[2], x.k.shape[2])

    def _summed(self, x: Tensor, reduce: bool, number: int) -> Tensor:
        if not (reduce and x.requires_grad):
            return x
        return sum_gradient(x.to(sum_dtype(x.dtype)), self.inner, number)
