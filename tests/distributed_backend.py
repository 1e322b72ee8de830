"""A backend that reads prepared masks, as kernels do, and computes as eager does: it runs where there is no GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_dmattn.backends import eager
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch.registry import BACKENDS, register_backend
from flash_dmattn.masks.saved import restore
from flash_dmattn.problem import AttentionProblem, Gradients, MaskView


class Unpacking:
    """Every mask has to arrive in a prepared form and of the sizes of its call; `forms` has those that did."""

    NAME = "unpacking"
    FEATURES = eager.FEATURES - {"sequences", "paged", "dropout_p"}
    RULES = ()
    AUTO_RULES = ()
    MASK_FORM = "prepared"
    GATHERS_KEYS = True

    def __init__(self) -> None:
        self.forms: set[str] = set()

    def probe(self) -> Availability:
        """Always usable."""
        return Availability(True)

    def _dense(self, problem: AttentionProblem, mask: MaskView) -> MaskView:
        assert mask.form == problem.mask_form
        self.forms.add(mask.form)
        if mask.form in ("none", "dense"):
            return mask
        assert all(x.is_contiguous() for x in mask.tensors)
        prepared = restore(mask.form, problem.seqlen_q, problem.seqlen_k, False, (-1, -1), *mask.tensors)
        assert problem.mask is not None and prepared.shape == problem.mask.shape
        return MaskView("dense", (prepared.unpacked(),))

    def forward(
        self, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, mask: MaskView, bias: Any, **rest: Any
    ) -> tuple[Tensor, Tensor]:
        """As eager's."""
        assert (problem.k_strides, problem.v_strides) == (k.stride(), v.stride())
        return eager.forward(problem, q, k, v, self._dense(problem, mask), bias, **rest)

    def backward(
        self,
        problem: AttentionProblem,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        **rest: Any,
    ) -> Gradients:
        """As eager's."""
        assert out.is_contiguous() and lse.is_contiguous()
        assert (problem.k_strides, problem.v_strides) == (k.stride(), v.stride())
        return eager.backward(problem, dout, dlse, q, k, v, self._dense(problem, mask), bias, out, lse, **rest)


def registered() -> Unpacking:
    """The backend, registered in this process."""
    if Unpacking.NAME not in BACKENDS:
        register_backend(Unpacking())
    return BACKENDS[Unpacking.NAME]  # type: ignore[return-value]
