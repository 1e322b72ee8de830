"""A backend that reads prepared masks, as kernels do, and computes as eager does: it runs where there is no GPU."""

from __future__ import annotations

from torch import Tensor

from flash_dmattn import Backend, register_backend
from flash_dmattn.backends.protocol import Backward, Forward, Rule
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks.prepared.storage import unpack_view
from flash_dmattn.problem import AttentionProblem, Gradients, MaskView
from flash_dmattn.problem.inputs import Inputs, Saved


class Unpacking:
    """Every mask has to arrive in a prepared form and of the sizes of its call; `forms` has those that did."""

    def __init__(self, name: str = "unpacking", rules: tuple[Rule, ...] = ()) -> None:
        self.forms: set[str] = set()
        self.backend = Backend(
            name=name,
            plan_forward=self._plan_forward,
            plan_backward=self._plan_backward,
            features=BACKENDS["eager"].features - {"sequences", "paged", "dropout_p"},
            rules=rules,
            mask_forms=frozenset({"tiles", "keys", "intervals"}),
        )

    def _plan_forward(self, problem: AttentionProblem) -> Forward:
        run = BACKENDS["eager"].plan_forward(problem)
        return lambda inputs: run(self._dense(problem, inputs))

    def _plan_backward(self, problem: AttentionProblem) -> Backward:
        plan = BACKENDS["eager"].plan_backward
        assert plan is not None
        run = plan(problem)

        def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
            assert saved.out.is_contiguous() and saved.lse.is_contiguous()
            return run(saved._replace(inputs=self._dense(problem, saved.inputs)), dout, dlse)

        return backward

    def _dense(self, problem: AttentionProblem, x: Inputs) -> Inputs:
        """The same inputs with a bool mask."""
        mask = x.mask
        assert (problem.k_strides, problem.v_strides) == (x.k.stride(), x.v.stride())
        assert mask.form == problem.mask_form
        self.forms.add(mask.form)
        if mask.form == "none":
            return x
        assert all(t.is_contiguous() for t in mask.tensors)
        dense = unpack_view(mask, problem.seqlen_q, problem.seqlen_k)
        assert problem.mask is not None and dense.shape == problem.mask.shape
        return x._replace(mask=MaskView("dense", (dense,)))


def for_few_keys(name: str, most: int) -> Backend:
    """The same for calls of at most so many keys."""
    return Unpacking(
        name, (Rule("keys", lambda p: p.seqlen_k <= most, lambda p: f"there are {p.seqlen_k} keys"),)
    ).backend


_unpacking = Unpacking()


def registered() -> Unpacking:
    """The backend, registered in this process."""
    if _unpacking.backend.name not in BACKENDS:
        register_backend(_unpacking.backend)
    return _unpacking
