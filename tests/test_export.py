"""torch.export: gradients of parameters, lengths that stay dynamic, builders of masks inside, AOTInductor."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from out_of_tree import KernelPair, needs_hints, registered, replaced
from torch import Tensor
from torch.export import Dim

from flash_dmattn import Sequences, attention, biases
from flash_dmattn.backends.protocol import Availability, Rule
from flash_dmattn.masks import (
    IndexScores,
    PreparedMask,
    causal_mask,
    combine,
    document_ids,
    document_mask,
    expand_blocks,
    padding_mask,
    prefix_lm_mask,
    sliding_window_mask,
    smooth_blocks,
    threshold_mask,
    topk_mask,
)

OURS = KernelPair("out_of_tree_exported", mask_forms=frozenset({"tiles", "intervals"}))
LENGTHS = (3, 17, 63, 64, 130, 2048)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelPair]:
    monkeypatch.setattr(OURS, "count", Counter())
    with registered(OURS, before="sdpa"):
        yield OURS


class Call(torch.nn.Module):
    """A function of tensors as a module, with a parameter for each input that can have a gradient."""

    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 0.9, 1.1], dtype=dtype))
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 4 * 20, dtype=dtype).view(1, 4, 1, 20))
        self.sink = torch.nn.Parameter(torch.linspace(-1, 1, 4, dtype=dtype))

    def forward(self, *inputs: Tensor) -> Tensor:
        q, k, v, *rest = inputs
        return self.function(self, q * self.scale[0], k * self.scale[1], v * self.scale[2], *rest)


def gradients(module: torch.nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    torch.manual_seed(1)
    module(*inputs).sin().sum().backward()
    return {name: x.grad.clone() for name, x in module.named_parameters() if x.grad is not None}


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 20, heads, 16, dtype=dtype) for heads in (4, 2, 2)]


def lse_too(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = attention(q, k, v, bias=m.bias, sink=m.sink, softcap=3.0, window_size=(9, 2), return_lse=True)
    return out.sum() + lse.cos().sum()


MASK = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(0)) > 0.3
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "lse, bias, sink, band": (lse_too, ()),
    "mask": (lambda m, q, k, v, mask: attention(q, k, v, mask, m.bias, is_causal=True), (MASK,)),
    "packed": (
        lambda m, q, k, v, ends: attention(
            *(x.flatten(0, 1) for x in (q, k, v)), sequences=Sequences.packed(ends), is_causal=True, sink=m.sink
        ),
        (torch.tensor([0, 7, 19, 40]),),
    ),
}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_parameters_of_a_program(name: str) -> None:
    """Strict; test_derived.py has the same of every form of a call, traced by fake tensors."""
    function, rest = CALLS[name]
    module, sample = Call(function), (*inputs(), *rest)
    expected = gradients(module, *sample)
    assert "scale" in expected and len(expected) > 1
    program = torch.export.export(module, sample, strict=True)
    assert_same(gradients(program.module(), *sample), expected)
    assert_same(gradients(program.run_decompositions().module(), *sample), expected)


def test_gradients_of_a_program_that_was_saved() -> None:
    function, _ = CALLS["lse, bias, sink, band"]
    module, sample, file = Call(function), inputs(), io.BytesIO()
    expected = gradients(module, *sample)
    torch.export.save(torch.export.export(module, tuple(sample)), file)
    file.seek(0)
    assert_same(gradients(torch.export.load(file).module(), *sample), expected)


def test_gradients_of_a_program_that_is_compiled() -> None:
    function, rest = CALLS["mask"]
    module, sample = Call(function), (*inputs(), *rest)
    program = torch.export.export(module, sample).module()
    run = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert_same(gradients(run, *sample), {f"_orig_mod.{name}": x for name, x in gradients(module, *sample).items()})


def test_gradients_that_were_not_asked_for_when_it_was_exported() -> None:
    program = torch.export.export(Plain("eager"), tuple(inputs())).module()
    for needed in range(3):
        sample = [x.requires_grad_(i == needed) for i, x in enumerate(inputs())]
        actual, expected = (
            torch.autograd.grad(run(*sample).sin().sum(), sample[needed]) for run in (program, Plain("eager"))
        )
        torch.testing.assert_close(actual, expected)


class Plain(torch.nn.Module):
    """A call of nothing but q, k and v."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True, backend=self.backend)


@pytest.mark.parametrize(
    ("backend", "passes"),
    [
        ("auto", {"forward": 1, "backward": 1}),
        (OURS.backend.name, {"forward": 1, "backward": 1}),
        ("eager", {}),
        (("eager", OURS.backend.name), {"backward": 1}),
        ((OURS.backend.name, "eager"), {"forward": 1}),
    ],
    ids=str,
)
def test_both_passes_of_a_pair_are_kept(backend: Any, passes: dict[str, int], ours: KernelPair) -> None:
    def call(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(q, k, v, mask, m.bias, is_causal=True, backend=backend)

    module, sample = Call(call), (*inputs(), MASK)
    expected = gradients(module, *sample)
    program = torch.export.export(module, sample).module()
    ours.count.clear()
    assert_same(gradients(program, *sample), expected)
    assert ours.count == passes


def test_another_backend_where_that_of_the_operator_has_no_backward_pass(ours: KernelPair) -> None:
    """It receives a mask that it reads, though the operator had one prepared for both passes."""

    def call(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(q, k, v, mask, m.bias, is_causal=True, backend=OURS.backend.name)

    module, sample = Call(call), (*inputs(), MASK)
    expected = gradients(module, *sample)
    program = torch.export.export(module, sample).module()
    assert ours.received[-1] == "tiles"
    broken = Rule("none", lambda p: False, lambda p: "it is broken", passes=("backward",))
    ours.count.clear()
    with replaced(OURS.backend.name, rules=(broken,)):
        assert_same(gradients(program, *sample), expected)
    assert ours.count == {"forward": 1}


def test_second_derivatives_of_a_program(ours: KernelPair) -> None:
    """Its operators do not tell whether a call named their backend, so what has none takes that of eager."""
    sample = [x.requires_grad_() for x in inputs(torch.float64)]

    def second(run: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(run(*sample).sin().sum(), sample, create_graph=True)
        return torch.autograd.grad(sum(x.cos().sum() for x in first), sample)

    programs = {name: torch.export.export(Plain(name), tuple(sample)).module() for name in ("eager", OURS.backend.name)}
    for program in programs.values():
        torch.testing.assert_close(second(program), second(Plain("eager")), rtol=1e-10, atol=1e-12)


# Lengths


def ranges(program: torch.export.ExportedProgram) -> list[tuple[int, Any]]:
    return [(x.lower, x.upper) for x in program.range_constraints.values()]


@needs_hints
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_lengths_of_calls_that_eager_serves_are_bound_by_nothing(with_gradients: bool, strict: bool) -> None:
    sample = tuple(x.requires_grad_(with_gradients) for x in inputs())
    named = Dim("length", min=2, max=4096)
    torch.export.export(Plain("auto"), sample, dynamic_shapes=({1: named},) * 3, strict=strict)
    program = torch.export.export(Plain("auto"), sample, dynamic_shapes=({1: Dim.AUTO},) * 3, strict=strict)
    assert len(ranges(program)) == 2  # of queries and of keys
    assert all(lower == 2 and upper > 2**60 for lower, upper in ranges(program))
    for length in LENGTHS:
        q, k, v = (torch.randn(2, length, heads, 16) for heads in (4, 2, 2))
        torch.testing.assert_close(program.module()(q, k, v), attention(q, k, v, is_causal=True))


def at_most(limit: int) -> Rule:
    return Rule("length", lambda p: p.seqlen_q <= limit, lambda p: f"there are {p.seqlen_q} queries")


@needs_hints
@pytest.mark.parametrize("limit", [10, 100], ids=["refused", "taken"])
def test_preferences_of_auto_bind_nothing(limit: int, ours: KernelPair) -> None:
    """They choose by the length of the sample, and decide only speed."""
    with replaced(OURS.backend.name, auto_rules=(at_most(limit),)):
        program = torch.export.export(Plain("auto"), tuple(inputs()), dynamic_shapes=({1: Dim.AUTO},) * 3)
    assert (OURS.backend.name in str(program.graph)) == (limit == 100)
    assert all(lower == 2 and upper > 2**60 for lower, upper in ranges(program))


@needs_hints
@pytest.mark.parametrize("works", [False, True])
def test_rules_of_a_backend_that_works_bind_and_no_others(works: bool, ours: KernelPair) -> None:
    availability = Availability(works, "" if works else "it is not installed")
    with replaced(OURS.backend.name, rules=(at_most(100),), probe=lambda: availability):
        program = torch.export.export(Plain("auto"), tuple(inputs()), dynamic_shapes=({1: Dim.AUTO},) * 3)
    assert (OURS.backend.name in str(program.graph)) == works
    assert (max(upper for _, upper in ranges(program)) > 2**60, min(upper for _, upper in ranges(program)) <= 100) == (
        True,
        works,
    )


# Masks and biases that are built inside

USED = torch.tensor([3, 4])
BUILDERS: dict[str, Callable[[Tensor, int], Any]] = {
    "causal": lambda x, n: causal_mask(n, n),
    "window": lambda x, n: sliding_window_mask(n, n, (3, 0)),
    "padding": lambda x, n: padding_mask(USED, n),
    "padding, left": lambda x, n: padding_mask(USED, n, side="left"),
    "prefix": lambda x, n: prefix_lm_mask(2, n, n),
    "half a prefix": lambda x, n: prefix_lm_mask(n // 2, n, n),
    "documents": lambda x, n: document_mask(document_ids(USED, n)),
    "one block": lambda x, n: expand_blocks(torch.ones(1, 1, dtype=torch.bool), 8, n, n),
    "blocks": lambda x, n: expand_blocks(torch.ones((n + 7) // 8, (n + 7) // 8, dtype=torch.bool), 8, n, n),
    "smooth": lambda x, n: smooth_blocks(causal_mask(n, n), 8, is_causal=True),
    "top keys": lambda x, n: topk_mask(x[:1, :, 0, 0], 5),
    "causal top keys": lambda x, n: topk_mask(x[:1, :, 0, 0], 5, is_causal=True),
    "top keys of rows": lambda x, n: topk_mask((x[:, :, 0] @ x[:, :, 0].mT)[:, None], 5, is_causal=True),
    "combined": lambda x, n: combine(causal_mask(n, n), padding_mask(USED, n)),
    "threshold": lambda x, n: threshold_mask(x[:1, :, 0, 0]),
    # Their tiles of 128 x 128 are dims of tensors, which torch binds where there is one.
    "prepared": lambda x, n: PreparedMask.from_mask(causal_mask(n, n)),
    "prepared keys": lambda x, n: PreparedMask.from_mask(padding_mask(USED, n), seqlen_q=n),
    "prepared window": lambda x, n: PreparedMask.from_mask(
        x[:1, :1, 0, 0] > -9, seqlen_q=n, seqlen_k=n, window_size=(3, 0)
    ),
    "prepared top keys": lambda x, n: PreparedMask.from_topk(x[:1, :, 0, 0], 5),
    "prepared blocks": lambda x, n: PreparedMask.from_blocks(causal_mask((n + 7) // 8, (n + 7) // 8), 8, n, n),
    "prepared documents": lambda x, n: PreparedMask.from_documents(document_ids(USED, n)),
    "prepared function": lambda x, n: PreparedMask.from_mask_mod(lambda b, h, i, j: (i - j) % 3 == 0, n, n),
    "prepared lists": lambda x, n: PreparedMask.from_lists((torch.arange(n) // 2)[:, None], seqlen_k=n),
    "prepared top lists": lambda x, n: PreparedMask.from_topk_lists((x[:, :, 0] @ x[:, :, 0].mT)[:, None], 5),
    "prepared selector": lambda x, n: PreparedMask.from_topk_lists(IndexScores(x, x[:, :, 0], x[..., 0]), 5),
}


class Masked(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.build = BUILDERS[name]

    def forward(self, x: Tensor) -> Tensor:
        return attention(x, x, x, self.build(x, x.shape[1]))


@needs_hints
@pytest.mark.parametrize("name", BUILDERS)
def test_builders_of_masks_keep_a_length_dynamic(name: str) -> None:
    module = Masked(name)
    few, many = (LENGTHS[1:4], ()) if name.startswith("prepared") else (LENGTHS[1:4], (130, 600))
    x = torch.randn(2, 20, 4, 16)
    program = torch.export.export(module, (x,), dynamic_shapes=({1: Dim.AUTO},)).module()
    for length in (*few, *many):
        x = torch.randn(2, length, 4, 16)
        torch.testing.assert_close(program(x), module(x), rtol=1e-5, atol=1e-5)


class Scaled(torch.nn.Module):
    def __init__(self, folds: bool) -> None:
        super().__init__()
        self.folds = folds

    def forward(self, q: Tensor) -> Tensor:
        scale = q.shape[1] ** -0.5
        if self.folds:
            return attention(q * scale, q, q, softmax_scale=1.0)
        return attention(q, q, q, softmax_scale=scale)


def test_a_scale_made_of_a_dynamic_length_belongs_in_q() -> None:
    q, shapes = torch.randn(1, 20, 2, 8), ({1: Dim.AUTO},)
    with pytest.raises(TypeError, match=r"softmax_scale is made of a dynamic length, .*multiply q by it and pass"):
        torch.export.export(Scaled(False), (q,), dynamic_shapes=shapes)
    program, other = torch.export.export(Scaled(True), (q,), dynamic_shapes=shapes).module(), torch.randn(1, 33, 2, 8)
    torch.testing.assert_close(program(other), Scaled(False)(other))


class OfSequences(torch.nn.Module):
    def forward(self, q: Tensor, cu_seqlens: Tensor) -> Tensor:
        return attention(q, q, q, sequences=Sequences.packed(cu_seqlens), is_causal=True)


def test_one_sequence_beside_a_dynamic_number_of_them_has_an_empty_one() -> None:
    dims = ({0: Dim("tokens", min=2, max=4096)}, {0: Dim("edges", min=3, max=100)})
    sample = torch.randn(20, 2, 8), torch.tensor([0, 5, 20])
    program = torch.export.export(OfSequences(), sample, dynamic_shapes=dims).module()
    q = torch.randn(7, 2, 8)
    wanted = attention(q[None], q[None], q[None], is_causal=True)[0]
    torch.testing.assert_close(program(q, torch.tensor([0, 7, 7])), wanted)


torch.fx.wrap("leaf")


def leaf(q: Tensor) -> Tensor:
    return attention(q, q, q)


class Called(torch.nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor) -> Tensor:
        return self.call(q)


class OfALeaf(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return leaf(q)


class Trained(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 16)
        self.values = torch.nn.Parameter(torch.randn(2, 5))

    def forward(self, q: Tensor) -> Tensor:
        return attention(self.project(q), q, q, bias=biases.Relative(self.values, 2, "clamp"), is_causal=True)


@pytest.mark.parametrize("in_grad_mode", (True, False))
def test_a_traced_module_with_parameters_follows_its_inputs(in_grad_mode: bool) -> None:
    """An autograd function of Python would return the results of the trace, whatever the inputs are."""
    module, others = Trained(), torch.randn(5, 12, 2, 16)
    with torch.set_grad_enabled(in_grad_mode):
        traced = torch.jit.trace(module, torch.randn(1, 8, 2, 16))
    torch.testing.assert_close(traced(others), module(others))
    gradients = (torch.autograd.grad(each(others).sin().sum(), list(each.parameters())) for each in (traced, module))
    torch.testing.assert_close(*gradients)


def test_what_other_exporters_do_is_said() -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(TypeError, match=r"q is a Proxy of torch\.fx\.symbolic_trace, .* torch\.fx\.wrap"):
        torch.fx.symbolic_trace(Called(lambda q: attention(q, q, q)))
    torch.testing.assert_close(torch.fx.symbolic_trace(OfALeaf())(q), leaf(q))
    torch.testing.assert_close(torch.jit.trace(OfALeaf(), q)(q), leaf(q))
    with pytest.raises(NotImplementedError, match=r"ONNX has no operator .*backend=.reference.*torch\.export"):
        torch.onnx.export(OfALeaf(), (q,), io.BytesIO(), dynamo=False)
