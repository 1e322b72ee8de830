"""The backward pass of entropies: their gradient adds to the gradients of lse and of sinks.

With the gradient g of the entropy H of a row, ds loses g p ln p and delta gets g H, as if the gradient of lse were less
by g H. So a backward pass uses that gradient of lse, and only has to subtract g p ln p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .sinks import sink_probability


class SentEntropy(NamedTuple):
    """The gradient of the entropies of a call, for use with the gradient of lse of :func:`joined_gradients`.

    Attributes:
        gradient: of the entropies, as that function returns it; None if they have no gradient.
        dlse: the gradient of lse itself.
    """

    gradient: Tensor | None = None
    dlse: Tensor | None = None

    def own(self, dlse: Tensor | None) -> Tensor | None:
        """Return the gradient of lse itself, if `dlse` is the joined one."""
        return dlse if self.gradient is None else self.dlse


NOTHING_SENT = SentEntropy()


def joined_gradients(entropy: tuple[Tensor, Tensor], dlse: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of lse less g H, and g, both contiguous, in the dtype of the entropies.

    Args:
        entropy: H of each row, shaped as lse, and its gradient.
        dlse: the gradient of lse, or None for zero.
        lse: -inf in empty rows, whose gradients are ignored.
    """
    values, gradient = entropy
    empty = lse == -torch.inf
    gradient = gradient.to(values.dtype).masked_fill(empty, 0.0).contiguous()
    joined = (values * gradient).neg_()
    return joined if dlse is None else joined.add_(dlse.masked_fill(empty, 0.0)), gradient


def delta_of_sink(delta: Tensor, gradient: Tensor | None, sink: Tensor | None, lse: Tensor) -> Tensor:
    """Return delta for the gradient of a sink: delta + g ln p of the sink; arguments but the sink are shaped as lse."""
    if gradient is None or sink is None:
        return delta
    logs = sink.to(lse.dtype)[:, None] - lse
    return delta + (gradient * logs.masked_fill(sink_probability(sink, lse) == 0, 0.0)).to(delta.dtype)
