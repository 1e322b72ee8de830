"""The interface of a system of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cases import Case
from ..inputs import Inputs


class Mode(NamedTuple):
    """How a call is made: whether its mask is already in the form that kernels read, and whether lse is returned."""

    prepared: bool = False
    with_lse: bool = False


class Needs(NamedTuple):
    """A system's answer about a case: why it refuses the call, the backward pass or lse; and which backends run it."""

    refusal: str = ""
    backward_refusal: str = ""
    lse_refusal: str = ""
    backends: tuple[str, ...] = ()


# The call: (out,) or (out, lse).
Bound = Callable[[], tuple[Tensor, ...]]
# The attention of a layer, its mask and causality known: out of q, k, v (B, L, H, D) and bias (B | 1, Hk, 1, L).
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class System(NamedTuple):
    """One column of the comparison.

    Attributes:
        name: the name in tables and on the command line.
        bind: does everything that is not timed, and returns the call.
        needs: answers for a case on a device, before any tensor is made.
        missing: why it does not work on this machine, or "".
        ours: whether it must meet the accuracy rule, and fails the run otherwise.
        prepares: whether it converts masks to another form, which can be done in advance.
        compiles: whether it compiles kernels for each case, which takes seconds.
        slow: whether it is much slower than others, or needs memory for every score; it runs one case of each kind.
        layers: makes the attention of every layer of a model, from its case and the bias of each layer, which decides
            the mask; it makes the masks in the form of the system. None if the system does not run models.
    """

    name: str
    bind: Callable[[Inputs, Mode], Bound]
    needs: Callable[[Case, torch.device], Needs]
    missing: Callable[[torch.device], str]
    ours: bool = False
    prepares: bool = True
    compiles: bool = False
    slow: bool = False
    layers: Callable[[Case, Sequence[Tensor]], list[Attend]] | None = None

    def modes(self, case: Case) -> dict[str, Mode]:
        """Return the columns of a case: the whole call, and if it has a mask, the call with the mask prepared."""
        modes = {"call": Mode()}
        if case.mask is not None and self.prepares:
            modes["prepared"] = Mode(prepared=True)
        return modes
