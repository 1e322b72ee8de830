"""Derivatives and compilers through every form of a call: each way that torch has, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.biases import Band, Relative
from flash_dmattn.masks import PreparedMask

SHAPES = {"q": (2, 2, 4, 2), "k": (2, 3, 2, 2), "v": (2, 3, 2, 3)}
ROWS = {"q": (5, 4, 2), "k": (6, 2, 2), "v": (6, 2, 3)}
MASK = torch.tensor([[True, False, True], [False, True, True]]).repeat(2, 4, 1, 1)
MASK[0, 1, 1] = MASK[1, :, 0] = False  # rows that no key is allowed to
PACKED = Sequences.packed(
    torch.tensor([0, 2, 2, 5]),
    torch.tensor([0, 3, 4, 6]),
    max_seqlen_q=3,
    max_seqlen_k=3,
    seqlens_q=torch.tensor([2, 0, 2]),
    seqlens_k=torch.tensor([3, 1, 1]),
)
PADDED = Sequences.padded(seqlens_q=torch.tensor([1, 2]), seqlens_k=torch.tensor([3, 1]))
KEYS = torch.rand(1, 2, 1, 3, generator=torch.Generator().manual_seed(0))
TOKENS = torch.rand(1, 5, 3, generator=torch.Generator().manual_seed(2)) < 0.7
TREE = torch.rand(2, 2, 2, generator=torch.Generator().manual_seed(1)) < 0.6


Call = Callable[..., tuple[Tensor, Tensor]]
Leaves = tuple[Tensor, ...]


class Form(NamedTuple):
    """A call: the shapes of what takes a gradient, and all else that it is called with."""

    shapes: dict[str, tuple[int, ...]]
    flags: dict[str, Any] = {}

    def leaves(self, seed: int = 0) -> list[Tensor]:
        random = torch.Generator().manual_seed(seed)
        return [torch.randn(x, dtype=torch.float64, generator=random).requires_grad_() for x in self.shapes.values()]

    def call(self, *leaves: Tensor, backend: str = "eager") -> tuple[Tensor, Tensor]:
        """out, and lse with 0 for rows without a key."""
        named = dict(zip(self.shapes, leaves, strict=True))
        if "values" in named:
            named["bias"] = Relative(named.pop("values"), 1, "clamp")  # type: ignore[arg-type]
        if "rows of values" in named:
            named["bias"] = Band(named.pop("rows of values"), 1)  # type: ignore[arg-type]
        out, lse = flash_dmattn.attention(**named, **self.flags, return_lse=True, backend=backend)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    def loss(self, *leaves: Tensor, backend: str = "eager") -> Tensor:
        out, lse = self.call(*leaves, backend=backend)
        return out.sin().sum() + lse.cos().sum()


FORMS = {
    "bias of scores": Form({**SHAPES, "bias": (2, 4, 2, 3)}, {"mask": MASK}),
    "bias of keys": Form({**SHAPES, "bias": (1, 2, 1, 3)}, {"mask": MASK, "is_causal": True, "softcap": 2.0}),
    "numbers": Form(SHAPES, {"mask": MASK, "softmax_scale": -1.3, "softcap": 1.5, "window_size": (0, 1)}),
    "no scale": Form(SHAPES, {"softmax_scale": 0.0}),
    "sink": Form({**SHAPES, "bias": (2, 4, 2, 1), "sink": (4,)}, {"mask": MASK}),
    "dropout": Form({**SHAPES, "bias": (1, 4, 2, 3), "sink": (4,)}, {"mask": MASK, "dropout_p": 0.4}),
    "leading dims": Form(
        {"q": (2, 1, 2, 4, 2), "k": (2, 1, 3, 2, 2), "v": (2, 1, 3, 2, 3), "bias": (2, 1, 1, 2, 3)},
        {"mask": MASK[:, None, :1]},
    ),
    "by distance": Form({**SHAPES, "values": (2, 3)}, {"mask": MASK}),
    "band": Form({**SHAPES, "rows of values": (2, 1, 2, 3)}, {"is_causal": True}),
    "padded, by distance": Form({**SHAPES, "values": (4, 2)}, {"sequences": PADDED}),
    "packed": Form({**ROWS, "bias": (2, 5, 3), "sink": (4,)}, {"sequences": PACKED, "mask": TOKENS[..., :1]}),
    "packed, bias of keys": Form({**ROWS, "bias": (2, 1, 6)}, {"sequences": PACKED, "is_causal": True}),
    "packed, dropout": Form({**ROWS, "bias": (3, 1, 3, 3)}, {"sequences": PACKED, "dropout_p": 0.4}),
    "padded": Form({**SHAPES, "bias": (2, 2, 2, 3), "sink": (4,)}, {"sequences": PADDED, "dropout_p": 0.3}),
    "tree": Form(SHAPES, {"sequences": PADDED, "mask": PreparedMask.from_tree(TREE)}),
    "tiles": Form({**SHAPES, "bias": (1, 2, 2, 3)}, {"mask": PreparedMask.from_mask(MASK, is_causal=True)}),
    "keys": Form(SHAPES, {"mask": PreparedMask.from_mask(KEYS < 0.7, seqlen_q=2)}),
    "intervals": Form({**SHAPES, "bias": (2, 2, 1, 3)}, {"mask": PreparedMask.from_topk(KEYS, 1, seqlen_q=2)}),
    "tiles of sequences": Form(
        ROWS, {"mask": PreparedMask.from_mask(TOKENS, sequences=PACKED, seqlen_q=5, seqlen_k=6), "sequences": PACKED}
    ),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
# A bias of each shape has its gradient summed over other dims.
SUMMED = {
    str(shape): Form({**SHAPES, "bias": shape}, {"mask": MASK}) for shape in product((1, 2), (1, 2, 4), (1, 2), (1, 3))
}


def seeded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that drops the same probabilities each time."""
    torch.manual_seed(5)
    return function(*arguments)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@every_form
def test_gradcheck_and_gradgradcheck(form: Form) -> None:
    call = lambda *leaves: seeded(form.call, *leaves)
    assert torch.autograd.gradcheck(call, form.leaves(), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, form.leaves(), fast_mode=True)


@pytest.mark.parametrize("form", [*FORMS.values(), *SUMMED.values()], ids=[*FORMS, *SUMMED])
def test_second_derivatives_are_those_of_the_reference(form: Form) -> None:
    results = []
    for backend in ("eager", "auto", "reference"):
        leaves = form.leaves()
        value = seeded(lambda *x, backend=backend: form.loss(*x, backend=backend), *leaves)
        first = torch.autograd.grad(value, leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)])
    *derived, expected = results
    assert_same(derived, [expected, expected])


@every_form
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_computes_the_same_again(use_reentrant: bool, form: Form) -> None:
    leaves, again = form.leaves(), form.leaves()
    seeded(lambda: checkpoint(form.loss, *leaves, use_reentrant=use_reentrant)).backward()
    seeded(form.loss, *again).backward()
    assert_same([x.grad for x in leaves], [x.grad for x in again])


@every_form
def test_functional_gradients_alone_and_mapped(form: Form) -> None:
    """Calls that are mapped share what is not mapped, and each has its own gradient of it."""
    samples, argnums = [form.leaves(seed) for seed in range(3)], tuple(range(len(form.shapes)))
    gradient = torch.func.grad(form.loss, argnums)
    for mapped in {3, len(argnums)}:  # q, k and v, or everything
        expected, inputs = [], [[*leaves[:mapped], *samples[0][mapped:]] for leaves in samples]
        for leaves in inputs:
            expected.append(torch.autograd.grad(seeded(form.loss, *leaves), leaves))
        plain = [[x.detach() for x in leaves] for leaves in inputs]
        assert_same(seeded(gradient, *plain[1]), expected[1])
        dims = tuple(0 if i < mapped else None for i in argnums)
        many = [torch.stack(x) if dim == 0 else x[0] for x, dim in zip(zip(*plain, strict=True), dims, strict=True)]
        actual = seeded(torch.func.vmap(gradient, dims, randomness="same"), *many)
        assert_same(actual, tuple(torch.stack(x) for x in zip(*expected, strict=True)))


@every_form
def test_gradcheck_of_the_reference_in_both_modes(form: Form) -> None:
    """Eager is held against it below, each entry of the Jacobian."""
    call = lambda *leaves: seeded(lambda: form.call(*leaves, backend="reference"))
    assert torch.autograd.gradcheck(call, form.leaves(), check_forward_ad=True, fast_mode=True)


def _dual(call: Call, leaves: Leaves, tangents: Leaves) -> Any:
    with forward_ad.dual_level():
        results = call(*map(forward_ad.make_dual, leaves, tangents))
        return [tuple(forward_ad.unpack_dual(x)) for x in results]


def _dual_gradients(call: Call, leaves: Leaves, tangents: Leaves) -> Any:
    leaves = tuple(x.requires_grad_() for x in leaves)
    with forward_ad.dual_level():
        duals = tuple(map(forward_ad.make_dual, leaves, tangents))
        total = sum(x.sin().sum() for x in call(*duals))
        gradients = torch.autograd.grad(total, duals, create_graph=True)
        found = [tuple(forward_ad.unpack_dual(x)) for x in gradients]
        tangent = forward_ad.unpack_dual(total).tangent
    return found, torch.autograd.grad(tangent, leaves)


def _gradients_of_tangents(call: Call, leaves: Leaves, tangents: Leaves) -> Any:
    """Return the gradients of a loss that contains out, lse and their tangents."""
    inputs = tuple(x.requires_grad_() for x in (*leaves, *tangents))
    results, moved = torch.func.jvp(call, inputs[: len(leaves)], inputs[len(leaves) :])
    return torch.autograd.grad(sum(x.sin().sum() for x in (*results, *moved)), inputs, allow_unused=True)


def _gradients_beside_tangents(call: Call, leaves: Leaves, tangents: Leaves, *others: Tensor) -> Any:
    """Return the gradients of a loss in which the tangents are constants."""
    leaves = tuple(x.requires_grad_() for x in leaves)
    results, moved = torch.func.jvp(call, leaves, tangents)
    return torch.autograd.grad(
        sum((x * t.detach()).sum() for x, t in zip(results, moved, strict=True)), (*leaves, *others)
    )


def _total(call: Call) -> Callable[..., Tensor]:
    return lambda *leaves: sum(x.sin().sum() for x in call(*leaves))  # type: ignore[return-value]


def _mapped(leaves: Leaves, tangents: Leaves) -> tuple[Leaves, Leaves]:
    both = tuple(torch.stack([x, t]) for x, t in zip(leaves, tangents, strict=True))
    return both, tuple(x.cos() for x in both)


def _all(leaves: Leaves) -> tuple[int, ...]:
    return tuple(range(len(leaves)))


WAYS: dict[str, Callable[[Call, Leaves, Leaves], Any]] = {
    "jvp": torch.func.jvp,
    "jvp of one input": lambda call, x, t: torch.func.jvp(lambda k: call(x[0], k, *x[2:]), (x[1],), (t[1],)),
    "gradients with tangents of one input": lambda call, x, t: _gradients_beside_tangents(
        lambda k: call(x[0], k, *x[2:]), (x[1],), (t[1],), x[0].requires_grad_()
    ),
    "dual level": _dual,
    "gradients of dual tensors": _dual_gradients,
    "gradients of tangents": _gradients_of_tangents,
    "gradients with tangents": _gradients_beside_tangents,
    "jvp of grad": lambda call, x, t: torch.func.jvp(torch.func.grad(_total(call), _all(x)), x, t),
    "grad of jvp": lambda call, x, t: torch.func.grad(lambda *y: torch.func.jvp(_total(call), y, t)[1], _all(x))(*x),
    "jacfwd": lambda call, x, t: torch.func.jacfwd(call, _all(x), randomness="same")(*x),
    "jacfwd of jacrev": lambda call, x, t: torch.func.jacfwd(
        torch.func.jacrev(lambda q: _total(call)(q, *x[1:])), randomness="same"
    )(x[0]),
    "vmap of jvp": lambda call, x, t: torch.func.vmap(
        lambda *both: torch.func.jvp(call, both[: len(x)], both[len(x) :]), randomness="same"
    )(*sum(_mapped(x, t), ())),
    "jvp of vmap": lambda call, x, t: torch.func.jvp(torch.func.vmap(call, randomness="same"), *_mapped(x, t)),
}


@every_form
@pytest.mark.parametrize("way", WAYS)
def test_forward_mode_is_that_of_the_reference(way: str, form: Form) -> None:
    found = []
    for backend in ("eager", "reference"):
        leaves, tangents = (tuple(x.detach() for x in form.leaves(seed)) for seed in (0, 1))
        call = lambda *x, backend=backend: form.call(*x, backend=backend)
        found.append(seeded(WAYS[way], call, leaves, tangents))
    assert_same(*found)


@pytest.mark.parametrize("form", [form for form in FORMS.values() if "dropout_p" not in form.flags])
def test_linearize_and_a_vectorized_jacobian(form: Form) -> None:
    """Dropout draws anew in each linear function, and torch refuses random numbers in this transform."""
    leaves, tangents = (tuple(x.detach() for x in form.leaves(seed)) for seed in (0, 1))
    reference = lambda *x: form.call(*x, backend="reference")
    assert_same(torch.func.linearize(form.call, *leaves)[1](*tangents), torch.func.jvp(reference, leaves, tangents)[1])
    options = {"vectorize": True, "strategy": "forward-mode"}
    assert_same(*(torch.autograd.functional.jacobian(call, leaves, **options) for call in (form.call, reference)))


def test_a_third_derivative_and_tangents_of_tangents_are_refused() -> None:
    q, k, v = (x.detach() for x in Form(SHAPES).leaves())

    def moved(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda y: flash_dmattn.attention(y, k, v, backend="eager"), (x,), (q,))[1].sin().sum()

    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative of its tangents.*jacfwd of jacrev"):
        torch.func.jvp(moved, (q,), (q,))
    x = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(moved(x), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"contains tangents has no derivative; .*reference"):
        torch.autograd.grad(gradient.sum(), x)
    _, tangent = torch.func.jvp(lambda y: flash_dmattn.attention(y, k, v, backend="eager"), (x,), (q,))
    with pytest.raises(NotImplementedError, match=r"gradients of tangents in a batch .*torch\.func\.vjp"):
        torch.autograd.grad(tangent, x, torch.stack([tangent, tangent]), is_grads_batched=True)
    with pytest.raises(NotImplementedError, match=r"gradients of tangents in a batch .*torch\.func\.hessian"):
        total = lambda x: flash_dmattn.attention(x, k, v, backend="eager").sin().sum()
        torch.autograd.functional.hessian(total, q, vectorize=True, outer_jacobian_strategy="forward-mode")


@every_form
def test_a_compiled_call_is_one_graph(form: Form) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(form.call, backend=counter, fullgraph=True)
    for seed in range(2):
        results = []
        for function in (compiled, form.call):
            leaves = form.leaves(seed)
            out, lse = seeded(function, *leaves)
            results.append([out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)])
        assert_same(*results)
    assert counter.frame_count == 1


@every_form
def test_an_exported_program_has_the_gradients_of_the_call(form: Form) -> None:
    class Call(torch.nn.Module):
        def forward(self, *leaves: Tensor) -> tuple[Tensor, Tensor]:
            return form.call(*leaves)

    leaves = form.leaves()
    exported = torch.export.export(Call(), tuple(leaves), strict=False)
    results = []
    for program in (form.call, exported.module(), exported.run_decompositions().module()):
        out, lse = seeded(program, *leaves)
        results.append([out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# Masks that are made in a graph, or arrive there


ALIGNED: dict[str, Any] = {"seqlen_q": 20, "is_causal": True}
TOGETHER: dict[str, Any] = {"seqlen_q": 14, "seqlen_k": 14, "is_causal": True}


def packed_with(edge: int) -> dict[str, Any]:
    """Tokens of two sequences; the second begins at the edge."""
    return {"x": torch.randn(14, 2, 8), "sequences": Sequences.packed(torch.tensor([0, edge, 14]), max_seqlen_q=9)}


# The shape of a bool mask, the function that prepares it, and the other arguments, which differ from call to call.
MADE: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Any], PreparedMask], Callable[[int], dict[str, Any]]]] = {
    "keys": (
        (2, 1, 1, 20),
        lambda mask, _: PreparedMask.from_mask(mask, **ALIGNED),
        lambda n: {"x": torch.randn(2, 20, 2, 8)},
    ),
    "tiles": (
        (2, 1, 20, 20),
        lambda mask, _: PreparedMask.from_mask(mask, **ALIGNED),
        lambda n: {"x": torch.randn(2, 20, 2, 8)},
    ),
    "tree": (
        (2, 5, 5),
        lambda mask, _: PreparedMask.from_tree(mask),
        lambda n: {"x": torch.randn(2, 5, 2, 8), "sequences": Sequences.padded(seqlens_k=torch.tensor([5, 4 - n]))},
    ),
    "tiles of sequences": (
        (2, 14, 9),
        lambda mask, sequences: PreparedMask.from_mask(mask, sequences=sequences, **TOGETHER),
        lambda n: packed_with(5 + n),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_masks_prepared_inside_and_outside_of_one_graph(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    shape, prepare, make = MADE[name]

    def attend(x: Tensor, mask: Any, sequences: Any = None, backend: str = "auto") -> Tensor:
        if isinstance(mask, Tensor):
            mask = prepare(mask, sequences)
        return flash_dmattn.attention(x, x, x, mask, sequences=sequences, backend=backend)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for number, is_inside in product(range(3), (True, False)):
        call = make(number)
        x = call["x"].requires_grad_()
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(number)) < 0.6
        wanted = attend(**call, mask=mask, backend="reference")
        prepared = mask if is_inside else prepare(mask, call.get("sequences"))
        out = compiled(**call, mask=prepared)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, wanted)))
    assert counter.frame_count == 2  # another mask of its form compiles nothing
