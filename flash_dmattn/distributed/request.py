"""The arguments of a context-parallel call, and how they are checked: nothing is sent here, and nothing computed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import check_flag
from ..validation import follow_autocast
from .both import Both, Inputs
from .call import ParallelCall, describe_call
from .exchange import sum_dtype
from .group import Members, check_layout
from .layout import SequenceLayout


class Ours(NamedTuple):
    """The arguments that `attention` does not have, or that are refused here."""

    reduce_bias_grad: bool
    exchange_dtype: torch.dtype | None
    has_sequences: bool
    dropout_p: float


class Request(NamedTuple):
    """What a rank was asked for.

    Attributes:
        groups: the one group, or the inner one and the outer one.
        number: which of the calls over these it is, 0 in a compiled graph.
        both: those of a mesh of two dims, None over one.
        given: the tensors, in the dtype of autocast.
        layout, layout_k, strategy, head_groups: as they were given.
        numbers: the arguments that are as in `attention`, is_causal to return_lse.
        ours: the others.
    """

    groups: tuple[Members, ...]
    number: int
    both: Both | None
    given: Inputs
    layout: SequenceLayout
    layout_k: SequenceLayout | None
    strategy: str
    head_groups: int | None
    numbers: tuple[Any, ...]
    ours: Ours

    @classmethod
    def of(
        cls,
        tensors: tuple[Any, ...],
        groups: tuple[Members, ...],
        number: int,
        layout: SequenceLayout,
        layout_k: SequenceLayout | None,
        *rest: Any,
    ) -> Request:
        """The same of q, k, v, mask, bias, sink and the arguments that follow in the order of the attributes.

        Raises:
            TypeError, ValueError: the layout.
        """
        both = None
        if len(groups) == 1:
            check_layout(layout, groups[0].size)
        else:
            inner, outer = groups
            both = Both.of(inner, outer, layout, layout_k)
        given = Inputs(*follow_autocast(*tensors[:3]), *tensors[3:])
        return cls(groups, number, both, given, layout, layout_k, *rest)

    def described(self) -> tuple[ParallelCall, Tensor | None]:
        """The call of one group, the outer one of two, and its sink.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        ours, given, both = self.ours, self.given, self.both
        if ours.has_sequences:
            raise ValueError(
                "sequences is set; context parallelism shares one sequence: pass a mask of its documents, "
                "flash_dmattn.masks.document_mask"
            )
        if ours.dropout_p != 0:
            raise ValueError(f"dropout_p is {ours.dropout_p!r}; context_parallel_attention has no dropout")
        check_flag("reduce_bias_grad", ours.reduce_bias_grad)
        over: tuple[Any, ...] = (self.groups[-1], self.layout, self.layout_k, self.strategy, self.head_groups)
        if both is not None:
            if self.strategy != "auto":
                raise ValueError(
                    f"strategy is {self.strategy!r}; over a mesh of two dims it needs to be 'auto', which is both"
                )
            given = both.described(given, ours.reduce_bias_grad, self.number)
            over = (both.outer, both.outer_layout, both.outer_layout_k, "gather", self.head_groups)
        call = describe_call(*given, *over, *self.numbers)._replace(number=self.number)
        dtype = call.problem.dtype
        if ours.exchange_dtype not in (None, dtype, sum_dtype(dtype)):
            raise ValueError(
                f"exchange_dtype is {ours.exchange_dtype}; it needs to be None, {dtype} or {sum_dtype(dtype)}"
            )
        return call, given.sink
