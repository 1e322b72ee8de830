"""A layer's call in a `use_context_parallel` block: this rank has some of the positions, and keys are on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...distributed import SequenceLayout, context_parallel_attention
from ...distributed.group import InContext, groups_of, refuse_together
from .layer_mask import LayerMask


def attend_over_ranks(
    context: InContext, call: dict[str, Any], attention_mask: Tensor | LayerMask | None, is_packed: bool
) -> Tensor:
    """What `attention` would give of the whole sequence, for the positions of this rank.

    Args:
        context: the group, and who has which positions.
        call: the arguments that `attention` would have received.
        attention_mask: what the layer received. Of a `LayerMask` causality and window count; a tensor has the rows of
            this rank, over all keys.
        is_packed: whether the caller has described sequences, which is refused.

    Raises:
        NotImplementedError: padding, documents or a cache, which the mask knows for the positions of this rank alone.
        ValueError: as `context_parallel_attention`.
    """
    call = dict(call)
    if isinstance(attention_mask, LayerMask) and not is_packed:
        try:
            _refuse_local(attention_mask, context.layout, context.rank)
        except NotImplementedError as error:
            refuse_together(groups_of(context.group), error)
        call |= {"mask": None, "is_causal": attention_mask.is_causal, "window_size": attention_mask.window}
        call["sequences"] = None
    out = context_parallel_attention(group=context.group, layout=context.layout, **call)
    assert isinstance(out, Tensor)
    return out


def _refuse_local(mask: LayerMask, layout: SequenceLayout, rank: int) -> None:
    unfit = [name for name in ("padding", "used") if getattr(mask, name) is not None]
    if mask.documents is not None and not _are_intervals(mask.documents, layout, rank):
        unfit.append("documents")
    if unfit:
        raise NotImplementedError(
            f"attention_mask has {', '.join(unfit)} of this rank's tokens, and keys are on all ranks of "
            "use_context_parallel: pass a bool mask (batch, 1, rows of this rank, all keys)"
        )


def _are_intervals(documents: Tensor, layout: SequenceLayout, rank: int) -> bool:
    """Whether what transformers took for documents, positions that do not follow each other, are a rank's intervals."""
    lengths = torch.tensor([stop - start for start, stop in layout.intervals[rank]], device=documents.device)
    number = torch.repeat_interleave(torch.arange(len(lengths), device=documents.device), lengths)
    return documents.shape[1] == len(number) and bool((documents - documents[:, :1] == number).all())
