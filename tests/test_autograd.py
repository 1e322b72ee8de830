"""Derivatives through the one call: first and second, lse, functorch, checkpoint, threads, and what is refused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DEVICE, DTYPE
from out_of_tree import KernelPair, registered
from torch import Tensor

import flash_dmattn
from flash_dmattn.call import prepare_call, run_call
from flash_dmattn.dispatch import selection
from flash_dmattn.problem import AttentionProblem, Gradients, RawFlags
from flash_dmattn.problem.inputs import Saved

B, LQ, LK, HQ, HK, D, DV = 2, 2, 3, 4, 2, 2, 3


def fp64(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)


def leaves(bias_shape: tuple[int, ...] = (1, HK, 1, LK)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fp64(B, LQ, HQ, D), fp64(B, LK, HK, D, seed=1), fp64(B, LK, HK, DV, seed=2), fp64(*bias_shape, seed=3)


def some_empty_rows() -> Tensor:
    mask = torch.tensor([[True, False, True], [False, True, True]]).repeat(B, HQ, 1, 1)
    mask[0, 1, 1] = False
    mask[1, :, 0] = False
    return mask


def finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def function(mask: Tensor | None = None, **flags: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, **{"backend": "eager", **flags})
        return out, finite(lse)

    return run


def loss(*tensors: Tensor, **flags: Any) -> Tensor:
    out, lse = function(some_empty_rows(), **flags)(*tensors)
    return out.sin().sum() + lse.cos().sum()


def test_gradcheck_of_expanded_inputs() -> None:
    run = function(some_empty_rows())

    def expanded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        k, v = k.expand(B, LK, HK, D), v.expand(B, LK, HK, DV)
        return run(q.expand(B, LQ, HQ, D), k, v, bias.expand(B, HQ, LQ, LK))

    inputs = fp64(1, LQ, 1, D), fp64(B, 1, HK, D, seed=1), fp64(1, LK, HK, 1, seed=2), fp64(1, 1, LQ, LK, seed=3)
    assert torch.autograd.gradcheck(expanded, inputs)
    assert torch.autograd.gradgradcheck(expanded, inputs, fast_mode=True)


@pytest.mark.parametrize("needs_grad", [n for r in range(1, 5) for n in itertools.combinations(range(4), r)], ids=str)
def test_second_derivative_of_every_subset(needs_grad: tuple[int, ...]) -> None:
    inputs = [x.detach().requires_grad_(i in needs_grad) for i, x in enumerate(leaves())]
    wanted = [inputs[i] for i in needs_grad]
    actual, expected = [], []
    for results, backend in ((actual, "eager"), (expected, "reference")):
        first = torch.autograd.grad(loss(*inputs, backend=backend), wanted, create_graph=True)
        results += first
        results += torch.autograd.grad(sum(g.sin().sum() for g in first), wanted)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


Differentiated = tuple[Tensor, Tensor | None, Gradients]


class Seen(KernelPair):
    """A pair that keeps what its backward passes receive and return."""

    def __init__(self, name: str, seen: list[Differentiated]) -> None:
        super().__init__(name)
        self.seen = seen

    def plan_backward(self, problem: AttentionProblem) -> Any:
        run = super().plan_backward(problem)

        def backward(saved: Saved, dout: Tensor, dlse: Tensor | None) -> Gradients:
            gradients = run(saved, dout, dlse)
            self.seen.append((dout, dlse, gradients))
            return gradients

        return backward


def test_bias_alone_gets_a_gradient_and_nothing_else_is_computed() -> None:
    q, k, v, bias = leaves()
    seen: list[Differentiated] = []
    with registered(Seen("ours", seen)):
        loss(q.detach(), k.detach(), v.detach(), bias, backend="ours").backward()
    ((_, _, gradients),) = seen
    assert [g is not None for g in gradients] == [False, False, False, True, False]  # the last: of a sink
    again = leaves()
    torch.testing.assert_close(bias.grad, torch.autograd.grad(loss(*again, backend="reference"), again[3])[0])
    assert q.grad is None


@pytest.mark.parametrize("create_graph", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_an_output_that_is_not_used_costs_its_gradient_nothing(used: str, create_graph: bool) -> None:
    """The backend is handed None for dlse, by which it leaves lse out; dout is what every kernel reads."""
    seen: list[Differentiated] = []
    inputs = leaves()
    with registered(Seen("ours", seen)):
        out, lse = function(some_empty_rows(), backend="ours")(*inputs)
        parts = {"out": (out,), "lse": (lse,), "both": (out, lse)}[used]
        torch.autograd.grad(sum(x.sum() for x in parts), inputs, create_graph=create_graph)
    ((dout, dlse, _),) = seen
    assert (dlse is None) == (used == "out")
    assert torch.equal(dout, torch.zeros_like(out) if used == "lse" else torch.ones_like(out))


def test_no_gradient_no_graph() -> None:
    inputs = leaves()
    ours = KernelPair("ours")
    with registered(ours), torch.no_grad():
        assert loss(*inputs, backend="ours").grad_fn is None
    with torch.inference_mode():
        assert not loss(*inputs).requires_grad
    assert loss(*(x.detach() for x in inputs)).grad_fn is None
    assert ours.ran == ["forward"]


@pytest.mark.parametrize("backend", ("auto", "eager"))
def test_what_inference_mode_made_is_named_where_it_cannot_train(backend: str) -> None:
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    with torch.inference_mode():
        mask, other = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(), torch.randn(1, 8, 2, 16)
        prepared, sink = flash_dmattn.masks.PreparedMask.from_mask(mask), torch.zeros(2)
    for arguments, named in (
        ({"mask": mask}, "mask"),
        ({"mask": prepared, "k": other}, "k and mask"),
        ({"bias": torch.zeros(8, 8), "sink": sink}, "sink"),
    ):
        call = {"q": q, "k": q, "v": q, "backend": backend, **arguments}
        message = rf"^{named} made in torch.inference_mode\(\) cannot be saved for a backward pass; make it outside"
        with pytest.raises(RuntimeError, match=message):
            flash_dmattn.attention(**call)
        with torch.no_grad():
            flash_dmattn.attention(**call)
    flash_dmattn.attention(q, q, q, mask.clone(), backend=backend).sum().backward()


def test_a_tensor_that_outlived_a_transform_passes_its_gradient_on() -> None:
    q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    kept: list[Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(q)
    gradients = torch.autograd.grad(flash_dmattn.attention(kept[0], k, v, backend="eager").square().sum(), (q, k, v))
    expected = torch.autograd.grad(flash_dmattn.attention(q, k, v, backend="eager").square().sum(), (q, k, v))
    assert all(map(torch.equal, gradients, expected))


def test_second_derivative_of_a_kernel_backend_is_refused_with_a_way_out() -> None:
    inputs = leaves()
    once = torch.autograd.grad(loss(*inputs, backend="reference"), inputs)
    with registered(KernelPair("ours")):
        for backend in ("ours", ("eager", "ours")):
            first = torch.autograd.grad(loss(*inputs, backend=backend), inputs, create_graph=True)
            torch.testing.assert_close(first, once, rtol=1e-10, atol=1e-12)
            with pytest.raises(NotImplementedError, match=r"'ours' has no second derivative.*backend=.eager"):
                first[3].square().sum().backward()
        # The pair's backward decides: eager's own serves a forward of any kernel.
        first = torch.autograd.grad(loss(*inputs, backend=("ours", "eager")), inputs, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), inputs)
    again = torch.autograd.grad(loss(*inputs, backend="reference"), inputs, create_graph=True)
    expected = torch.autograd.grad(again[0].square().sum(), inputs)
    torch.testing.assert_close(second, expected, rtol=1e-9, atol=1e-11)


def test_auto_takes_the_second_derivative_of_eager() -> None:
    """Whatever backend the first one ran on, and whatever form of the mask its passes read; where eager is not off."""
    inputs = leaves()
    again = torch.autograd.grad(loss(*inputs, backend="reference"), inputs, create_graph=True)
    expected = torch.autograd.grad(sum(x.sin().sum() for x in again), inputs)
    for forms in ({"dense"}, {"dense", "tiles"}):
        ours = KernelPair("ours", mask_forms=frozenset(forms))
        with registered(ours, before="sdpa"):
            first = torch.autograd.grad(loss(*inputs, backend="auto"), inputs, create_graph=True)
            total = sum(x.sin().sum() for x in first)
            with flash_dmattn.config(disabled="eager"), pytest.raises(flash_dmattn.BackendUnavailableError) as caught:
                torch.autograd.grad(total, inputs, retain_graph=True)
            torch.testing.assert_close(torch.autograd.grad(total, inputs), expected, rtol=1e-9, atol=1e-11)
        assert set(ours.ran) == {"forward", "backward"} and set(ours.received) == {max(forms)}
        assert str(caught.value).startswith("a second derivative needs backend 'eager', which does not serve it here: ")
        assert "it is switched off (leave config(disabled=...)" in str(caught.value)


def second_derivative(inputs: tuple[Tensor, ...]) -> None:
    first = torch.autograd.grad(loss(*inputs, backend="auto"), inputs, create_graph=True)
    torch.autograd.grad(first[0].sum(), inputs)


def call_in_forward_mode(inputs: tuple[Tensor, ...]) -> None:
    torch.func.jvp(lambda *x: loss(*x, backend="auto"), inputs, tuple(map(torch.ones_like, inputs)))


@pytest.mark.usefixtures("untouched_settings")
@pytest.mark.parametrize(
    ("derive", "what"),
    [(second_derivative, "a second derivative"), (call_in_forward_mode, "a call in forward mode")],
)
def test_fallback_policy_binds_derivatives_that_only_eager_has(
    derive: Callable[[tuple[Tensor, ...]], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = leaves()
    derive(inputs)  # on a CPU nothing is a fallback
    monkeypatch.setattr(selection, "_NO_ACCELERATORS", ("meta",))
    monkeypatch.setattr(selection, "_warned", set())
    with registered(KernelPair("ours"), before="cuda"):
        with pytest.warns(flash_dmattn.FallbackWarning, match=f"^{what} runs on eager PyTorch, with up to "):
            derive(inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            derive(inputs)  # it warns once
        with flash_dmattn.config(fallback="silent"):
            out = flash_dmattn.attention(*inputs[:3], backend="auto")
        flash_dmattn.config.set(fallback="error")
        with pytest.raises(flash_dmattn.BackendUnsupportedError, match=f'^{what} runs on (.|\n)*fallback="error"'):
            derive(inputs)
        first = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
        torch.autograd.grad(first[0].sum(), inputs[0])  # by the policy around its call


# Batched gradients, by the transform of torch that is older than torch.func

BATCHED: dict[str, dict[str, Any]] = {
    "bias and mask": {"mask": some_empty_rows()},
    "sink": {"sink": fp64(HQ, seed=4), "is_causal": True, "softcap": 2.0},
    "dropout": {"dropout_p": 0.4},
    "sequences": {
        "sequences": flash_dmattn.Sequences.padded(seqlens_q=torch.tensor([1, 2]), seqlens_k=torch.tensor([3, 1]))
    },
}


@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_gradients_are_those_of_each(name: str, backend: str) -> None:
    flags = BATCHED[name]
    inputs = [*leaves(), *([flags["sink"]] if "sink" in flags else [])]
    generator = torch.Generator().manual_seed(5)
    for create_graph, used in itertools.product((False, True), ((0,), (1,), (0, 1))):
        torch.manual_seed(0)
        results = flash_dmattn.attention(*inputs[:3], bias=inputs[3], return_lse=True, backend=backend, **flags)
        results = [results[index] for index in used]
        many = [torch.randn(3, *x.shape, dtype=x.dtype, generator=generator) for x in results]
        options: dict[str, Any] = {"create_graph": create_graph, "allow_unused": True}
        mapped = torch.autograd.grad(results, inputs, many, retain_graph=True, is_grads_batched=True, **options)
        each = [
            torch.autograd.grad(results, inputs, [x[index] for x in many], retain_graph=True, **options)
            for index in range(3)
        ]
        expected = [None if x[0] is None else torch.stack(x) for x in zip(*each, strict=True)]
        torch.testing.assert_close(list(mapped), expected, rtol=1e-10, atol=1e-12)
        if create_graph:
            seconds = [
                torch.autograd.grad(sum(x.sin().sum() for x in first if x is not None), inputs, **options)
                for first in (expected, mapped)
            ]
            torch.testing.assert_close(seconds[1], seconds[0], rtol=1e-9, atol=1e-11)


def test_batched_gradients_of_rows_with_heads_first() -> None:
    q, k, v, _ = (x.transpose(1, 2) for x in leaves())
    for _ in range(2):  # the first call of a class, and another
        out, _ = run_call(prepare_call(q, k, v, None, None, None, None, RawFlags(), heads_first=True), "eager")
        many = torch.randn(3, *out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(6))
        mapped = torch.autograd.grad(out, (q, k, v), many, retain_graph=True, is_grads_batched=True)
        each = [torch.autograd.grad(out, (q, k, v), x, retain_graph=True) for x in many]
        torch.testing.assert_close(mapped, tuple(torch.stack(x) for x in zip(*each, strict=True)))


# Results may be written to: torch refuses that for an output of an autograd function that is a view

LISTS = flash_dmattn.masks.PreparedMask.from_lists(torch.tensor([[0, 2], [1, 4], [3, 0]]), seqlen_k=5)
WRITTEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.6},
    "a row without keys": {"mask": torch.tensor([[True], [False], [True]]).expand(3, 5)},
    "no key": {"mask": torch.zeros(1, 5, dtype=torch.bool)},
    "lists": {"mask": LISTS},
    "padded": {"sequences": flash_dmattn.Sequences.padded(seqlens_k=torch.tensor([3, 5]))},
    "packed": {"sequences": flash_dmattn.Sequences.packed(torch.tensor([0, 1, 6]), torch.tensor([0, 4, 10]))},
    "softcap": {"softcap": 2.0},
}


@pytest.mark.parametrize("arrival", ["rows", "heads first", "leading dims"])
@pytest.mark.parametrize("name", WRITTEN)
def test_results_may_be_written_to(name: str, arrival: str, backend: Any) -> None:
    flags = {key: x.to(DEVICE) if hasattr(x, "to") else x for key, x in WRITTEN[name].items()}
    q, k = torch.randn(2, 3, 4, 32, dtype=DTYPE, device=DEVICE), torch.randn(2, 5, 2, 32, dtype=DTYPE, device=DEVICE)
    if "sequences" in flags and arrival == "leading dims":
        pytest.skip("sequences are the batch")
    if name == "packed":
        q, k = q.flatten(0, 1), k.flatten(0, 1)
    if arrival == "heads first":
        q, k = (x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in (q, k))
    if arrival == "leading dims":
        q, k = q[:, None], k[:, None]
    q.requires_grad_()
    for returns in (True, False) if backend.name != "flex" else (False,):
        call = {**flags, "return_lse": returns, "backend": backend.name}
        error = flash_dmattn.explain(q, k, k, **call).error
        if error is not None:
            pytest.skip(error)
        results = flash_dmattn.attention(q, k, k, **call)
        for x in results if isinstance(results, tuple) else (results,):
            expected = x.detach() + 1
            x += 1
            assert torch.equal(x.detach(), expected)


# The caches of a call outlive the transform in which they were filled; tensors of the transform do not

X = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(7))
BEST = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(8))
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x.sin(),)),
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sin().sum())(x),
    "vmap": lambda call, x: torch.vmap(call)(torch.stack([x, x.sin()])),
    "jvp of grad": lambda call, x: torch.func.jvp(torch.func.grad(lambda x: call(x).sin().sum()), (x,), (x.sin(),)),
    "vmap of jvp": lambda call, x: torch.vmap(lambda x: torch.func.jvp(call, (x,), (x,)))(torch.stack([x, x.sin()])),
    "no transform": lambda call, x: call(x),
}
Keeping = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]


def keeps_layouts(sequences: flash_dmattn.Sequences, shape: tuple[int, ...], **options: Any) -> Keeping:
    def call(x: Tensor) -> Tensor:
        x = x.view(*x.shape[:-3], *shape) if x.dim() == 3 else x
        return flash_dmattn.attention(x, x, x, sequences=sequences, **options)

    return call, lambda: [layout[2].tensors for layout in sequences._views.values()]


def keeps_places_of_lists() -> Keeping:
    """The order of entries in the index, which a selector of keys reads for its scores."""
    lists = flash_dmattn.masks.PreparedMask.from_lists(torch.tensor([[3, 1]] * 8), seqlen_k=8)
    return lambda x: x * lists.index[0, 0, :, :1, None], lambda: [vars(lists).get("_index")]


def keeps_lists_of_flex() -> Keeping:
    from flash_dmattn.backends.flex import sequences as flex

    sequences = flash_dmattn.Sequences.packed(torch.tensor([0, 3, 8]))
    bounds = sequences.describe_with_view(X, X, X)[1].bounds
    problem = flash_dmattn.explain(X, X, X, sequences=sequences).problem
    call = lambda x: x * flex.sequence_blocks(problem, bounds, None).queries.place[:8, None, None]
    return call, lambda: [list(blocks) for blocks in flex._kept[bounds].values()]


def keeps_a_mask_of_transformers(**options: Any) -> Keeping:
    mask_function = pytest.importorskip("flash_dmattn.integrations.transformers.mask_function")
    mask = mask_function.LayerMask((1, 1, 8, 8), is_causal=True, device="cpu", **options)

    def call(x: Tensor) -> Tensor:
        made = mask.arguments(False)._asdict()
        made["mask"] = made["mask"] if mask.first_keys() is None else mask.first_keys()[0].mask
        x = x[None] if made["sequences"] is None or made["sequences"].layout == "padded" else x
        return flash_dmattn.attention(x, x, x, **made)

    return call, lambda: [list(mask._arguments.values()), mask._first_keys]


def keeps_copies_of_transformers() -> Keeping:
    layers = pytest.importorskip("flash_dmattn.integrations.transformers.attention_function")
    bias, limits = BEST.mT, torch.tensor([0, 3, 8])

    def call(x: Tensor) -> Tensor:
        packed = layers.take_packed(dict(zip(layers.PACKED, (limits, limits, 5, 5), strict=True)), 1)
        out = flash_dmattn.attention(x[None], x[None], x[None], bias=layers.in_dtype(bias, torch.float32))
        return out[0] + flash_dmattn.attention(x, x, x, sequences=packed)

    def kept() -> Any:
        entries = [entry for table in (layers._copies, layers._limits) for entry in table._entries.values()]
        return [entry[1] if isinstance(entry[1], Tensor) else entry[1]._tensors for entry in entries]

    return call, kept


KEPT: dict[str, Callable[[], Keeping]] = {
    "packed": lambda: keeps_layouts(flash_dmattn.Sequences.packed(torch.tensor([0, 3, 8])), (8, 2, 4)),
    "padded": lambda: keeps_layouts(
        flash_dmattn.Sequences.padded(seqlens_k=torch.tensor([3, 4])), (2, 4, 2, 4), is_causal=True
    ),
    "tree": lambda: keeps_layouts(
        flash_dmattn.Sequences.padded(seqlens_k=torch.tensor([3, 4])),
        (2, 4, 2, 4),
        mask=flash_dmattn.masks.PreparedMask.from_tree(torch.ones(1, 4, 4, dtype=torch.bool).tril()),
    ),
    "compared by value": lambda: keeps_layouts(
        flash_dmattn.Sequences.packed(torch.tensor([0, 3, 8]).share_memory_()), (8, 2, 4)
    ),
    "places of lists": keeps_places_of_lists,
    "lists of flex": keeps_lists_of_flex,
    "documents": lambda: keeps_a_mask_of_transformers(documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])),
    "blocks": lambda: keeps_a_mask_of_transformers(blocks=torch.tensor([[-1, 0, 0, 1, 1, 1, -1, -1]])),
    "a static cache": lambda: keeps_a_mask_of_transformers(used=torch.tensor(8), padding=BEST[:, :1, :1] > 0),
    "copies": keeps_copies_of_transformers,
}


def tensors_in(x: Any) -> list[Tensor]:
    if isinstance(x, (list, tuple)):
        return [tensor for part in x for tensor in tensors_in(part)]
    if isinstance(x, flash_dmattn.Sequences):
        return [*x._tensors, *tensors_in([layout[2] for layout in x._views.values()])]
    return [x] if isinstance(x, Tensor) else tensors_in(x.tensors) if hasattr(x, "tensors") else []


@pytest.mark.parametrize("way", TRANSFORMS)
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_outlives_a_transform(name: str, way: str) -> None:
    call, kept = KEPT[name]()
    for _ in range(2):
        TRANSFORMS[way](call, X)
        assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors_in(kept())))
    for transform in TRANSFORMS.values():
        torch.testing.assert_close(transform(call, X), transform(KEPT[name]()[0], X), rtol=0, atol=0)


def test_sequences_of_a_transform_that_has_ended() -> None:
    """Their own tensors are of it, and so nothing is kept of them."""
    made: list[flash_dmattn.Sequences] = []

    def call(x: Tensor) -> Tensor:
        made.append(flash_dmattn.Sequences.packed(torch.tensor([0, 3, 8])))
        return flash_dmattn.attention(x, x, x, sequences=made[0])

    expected = torch.func.jvp(call, (X,), (X,))
    for _ in range(2):
        torch.testing.assert_close(torch.func.jvp(call, (X,), (X,)), expected, rtol=0, atol=0)
    torch.testing.assert_close(call(X), keeps_layouts(made[-1], (8, 2, 4))[0](X), rtol=0, atol=0)
    assert not made[0]._views
