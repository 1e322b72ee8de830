"""What a system of the comparison offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cases import Case
from ..inputs import Inputs


class Mode(NamedTuple):
    """How a call is made: with its mask in the form that the kernels walk already, and with lse returned."""

    prepared: bool = False
    with_lse: bool = False


class Needs(NamedTuple):
    """What a system says of a case: why it refuses the call, its backward alone or its lse; which of ours run it."""

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
        name: for tables and the command line.
        bind: does what is not timed, and returns the call.
        needs: what it says of a case on a device, before anything is made.
        missing: why it does not work on this machine, or "".
        ours: held to the accuracy rule; a failure of it fails the run.
        prepares: it turns a mask into another form, which can be done beforehand.
        compiles: it traces and compiles a graph for each case, which takes seconds.
        slow: known to be far behind, or to need memory for every score; timed on a case of each kind alone.
        layers: the attention of every layer of a model, from its case and the bias of each layer, which decides its
            mask; the masks are made here, in the form of the system. None where a system is no part of models.
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
        """The columns of a case: the whole call, and where there is a mask to prepare, the call without that."""
        found = {"call": Mode()}
        if case.mask is not None and self.prepares:
            found["prepared"] = Mode(prepared=True)
        return found
