"""Faults of calls with DTensors, and of the predictor."""

from __future__ import annotations

from .fault import Fault

PLACED = "flash_dmattn/distributed/dtensor.py"
MODEL = "flash_dmattn/distributed/model.py"
TESTS = "tests/test_distributed_dtensor.py::"
PREDICTED = "tests/test_distributed_model.py::"


def values(*names: str) -> tuple[str, ...]:
    return tuple(f"{TESTS}test_values_gradients_and_placements[{name}]" for name in names)


def refused(name: str) -> tuple[str, ...]:
    return (f"{TESTS}test_refused_on_every_rank[{name}]",)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "the gradient of a bias that ranks share is that of one of them",
        PLACED,
        "[Partial() if shared else at for shared, at in",
        "[at for shared, at in",
        values("batch, shared bias"),
    ),
    Fault(
        "a leaf's gradient stays partial",
        PLACED,
        "whole.redistribute(placements=ctx.placements).to(ctx.dtype)",
        "whole.to(ctx.dtype)",
        values("batch, shared bias"),
    ),
    Fault(
        "shared gradients are rounded by each rank and again by their sum",
        PLACED,
        "local.float() if any(is_shared)",
        "local.float() if False and any(is_shared)",
        (f"{TESTS}test_a_shared_gradient_is_rounded_once",),
    ),
    Fault(
        "a rank slices along a dim that a later mesh dim has split",
        PLACED,
        " or want in x.placements[mesh_dim + 1 :])",
        ")",
        refused("a dim split by the later mesh dim first"),
    ),
    Fault(
        "a whole tensor is sliced as if the ranks divided it",
        PLACED,
        "each = -(-size // parts)",
        "each = size // parts",
        values("batch, whole keys"),
    ),
    Fault(
        "lse is placed as out is",
        PLACED,
        "_placements([None if dim is None else self._score_dim(dim) for dim in self._of_q])",
        "_placements(self._of_q)",
        values("heads"),
    ),
    Fault(
        "a bias of fewer dims is read from the left",
        PLACED,
        "self._score_dim(of_q) - (len(self._shape) - x.dim())",
        "self._score_dim(of_q)",
        values("heads, bias of three dims"),
    ),
    Fault(
        "key-value heads that the ranks do not divide are not refused",
        PLACED,
        "if k.shape[-2] % math.prod(sizes) != 0:",
        "if False:",
        refused("heads that do not divide"),
    ),
    Fault(
        "a shared sequence is taken for zigzag",
        PLACED,
        "contiguous, size = SequenceLayout.contiguous,",
        "contiguous, size = SequenceLayout.zigzag,",
        values("sequence"),
    ),
    Fault(
        "a bias shared as the keys are needs to be whole",
        PLACED,
        "return keys if is_shared else None",
        "return None",
        values("sequence, bias and mask of the keys"),
    ),
    Fault(
        "two queries to two ranks are not refused",
        PLACED,
        "or length < 2 * size:",
        "or length < size:",
        refused("rows like one for all"),
    ),
    Fault(
        "the whole call is not validated",
        PLACED,
        "        _validate(q, k, v, mask, bias, sink)\n",
        "",
        refused("a bias that does not broadcast"),
    ),
    Fault(
        "a DTensor beside a plain q is not noticed",
        "flash_dmattn/call.py",
        "        refuse_dtensors(call.q, call.k, call.v, call.mask, call.bias, call.sink)\n",
        "        pass\n",
        refused("all but the bias plain"),
    ),
    Fault(
        "a DTensor inside of vmap is not noticed",
        "flash_dmattn/validation.py",
        "if is_transformed() and isinstance(x, Tensor)",
        "if False and isinstance(x, Tensor)",
        (f"{TESTS}test_transforms_are_refused[vmap]",),
    ),
    Fault(
        "plain calls ask whether q is a DTensor",
        "flash_dmattn/api.py",
        "if type(q) is not Tensor and is_dtensor(q):",
        "if is_dtensor(q):",
        (f"{TESTS}test_plain_calls_ask_nothing_of_dtensors",),
    ),
    Fault(
        "gradients of keys cost the predictor no wire",
        MODEL,
        "overlapped(alone[1] + 2.5 * order, part, part)",
        "overlapped(alone[1] + 2.5 * order, part, 0.0)",
        (f"{PREDICTED}test_gather_by_hand",),
    ),
    Fault(
        "the predictor hides the wire of the first stage",
        MODEL,
        "return wire_in + (stages - 1) * stage",
        "return (stages - 1) * stage",
        (f"{PREDICTED}test_groups_hide_the_wire_by_hand",),
    ),
)
