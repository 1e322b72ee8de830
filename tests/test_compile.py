"""torch.compile: one graph, the same values and gradients, no recompilation per tensor, settings that take effect."""

from __future__ import annotations

import contextvars
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import needs_inductor
from out_of_tree import KernelPair, needs_hints, registered, replaced
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn import api, nn
from flash_dmattn import call as call_module
from flash_dmattn.backends.protocol import Availability, Rule
from flash_dmattn.operators import flat_flags
from flash_dmattn.problem import Flags

OURS = KernelPair("out_of_tree_under_compile")  # an operator is defined once per process


@pytest.fixture(autouse=True)
def as_in_a_new_process(untouched_settings: None) -> None:
    torch._dynamo.reset()


@pytest.fixture
def ours() -> Iterator[KernelPair]:
    with registered(OURS, before="sdpa"):
        OURS.count = Counter()
        yield OURS


def inputs(seqlen_q: int = 5, seqlen_k: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (2, seqlen_q, 4, 8), (2, seqlen_k, 2, 8), (2, seqlen_k, 2, 6), (1, 2, 1, seqlen_k)
    torch.manual_seed(seqlen_q)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def some_mask(seqlen_q: int = 5, seqlen_k: int = 7, seed: int = 0) -> Tensor:
    mask = torch.rand(seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(seed)) > 0.3
    mask[-1] = False
    return mask


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> tuple[Any, Any]:
    """The function as one graph, and what counts its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return flash_dmattn.attention(q, k, v, mask, bias, is_causal=True, softcap=3.0, return_lse=True)


def all_results(function: Callable[..., Any], leaves: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    q, k, v, bias = leaves
    out, lse = function(q, k, v, mask, bias)
    total = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()
    return [out, lse, *torch.autograd.grad(total, [x for x in leaves if x.requires_grad])]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    # The reference unrolls into the graph, which costs ten seconds with symbolic sizes.
    [("auto", False), ("auto", True), (("eager", "eager"), True), ("reference", False)],
    ids=str,
)
def test_values_and_gradients_are_those_of_eager_mode(backend: Any, dynamic: bool) -> None:
    def on_backend(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, mask, bias = tensors
        return flash_dmattn.attention(
            q, k, v, mask, bias, is_causal=True, window_size=(4, -1), return_lse=True, backend=backend
        )

    run, counter = compiled(on_backend, dynamic=dynamic)
    compilations = []
    for sizes in ((5, 7), (11, 8)):
        arguments, mask = inputs(*sizes), some_mask(*sizes)
        assert_same(all_results(run, arguments, mask), all_results(on_backend, arguments, mask))
        compilations.append(counter.frame_count)
    first, second = compilations
    assert second == (first if dynamic else first + 1)


@needs_inductor
@pytest.mark.parametrize("bias_shape", [(1, 1, 1, 5), (4, 2, 5, 5)], ids=["bias expanded", "bias full"])
def test_inductor_forward_and_backward(bias_shape: tuple[int, ...]) -> None:
    """Inductor relies on the strides of the fakes: outputs and gradients go through fused kernels of its own."""

    def among_others(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = x.mul(2).transpose(2, 3).unbind(0)  # (4, 5, 2, 8), strided
        added = bias.cos().expand(4, 2, 5, 5)
        out, lse = flash_dmattn.attention(q, k.sin(), v, None, added, backend="eager", return_lse=True)
        return torch.relu(out) + 1, lse.exp()

    torch.manual_seed(0)
    leaves = torch.randn(3, 4, 2, 5, 8, requires_grad=True), torch.randn(bias_shape, requires_grad=True)
    actual, expected = [], []
    for results, function in ((expected, among_others), (actual, compiled(among_others, "inductor")[0])):
        out, lse = function(*leaves)
        results += [out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), leaves)]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def with_table(bias: nn.RelativePositionBias | nn.WindowPositionBias) -> Callable[[Tensor], Tensor]:
    """Attention of x (B, L, 16) to itself with the bias of a module."""

    def run(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (2, 8)), x.sin().unflatten(-1, (2, 8)), x.cos().unflatten(-1, (2, 8))
        lengths = (x.shape[1],) if isinstance(bias, nn.RelativePositionBias) else ()
        return flash_dmattn.attention(q, k, v, bias=bias(*lengths)).flatten(2)

    return run


def with_pairs(layer: nn.PairBiasAttention) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x, (x[:, :, None] * x[:, None])[..., :4], x[..., 0] < 1.5)


def packed(layer: nn.DynamicMaskAttention) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        edges = torch.tensor([0, 5, 9, x.shape[1]], dtype=torch.int32)
        return layer(x[0], sequences=flash_dmattn.Sequences.packed(edges, max_seqlen_q=x.shape[1]))

    return run


# The module, what calls it with x (B, L, 16), and the dim that varies: tokens, or windows of 4 x 4.
MODULES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[Any], Callable[[Tensor], Tensor]], int]] = {
    "RelativePositionBias": (lambda: nn.RelativePositionBias(2), with_table, 1),
    "WindowPositionBias": (lambda: nn.WindowPositionBias(4, 4, 2), with_table, 0),
    "PairBiasAttention": (lambda: nn.PairBiasAttention(16, 4, 2), with_pairs, 1),
    "DynamicMaskAttention": (
        lambda: nn.DynamicMaskAttention(16, 2, keep_window_size=8, local_window_size=2, qk_norm=True),
        lambda layer: lambda x: layer(x, x[..., 0] < 1.5),
        1,
    ),
    "DynamicMaskAttention of sequences": (lambda: nn.DynamicMaskAttention(16, 2, keep_window_size=4), packed, 1),
}


@needs_inductor
@pytest.mark.parametrize("name", MODULES)
def test_inductor_trains_modules_on_any_length(name: str) -> None:
    """One compilation serves all lengths: it takes no length and no stride for a constant."""
    make, caller, dim = MODULES[name]
    torch.manual_seed(0)
    module = make()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    function = caller(module)
    run, counter = compiled(function, "inductor")
    for size in (20, 24, 33):
        x = torch.randn((2, size, 16) if dim == 1 else (size, 16, 16), requires_grad=True)
        torch._dynamo.mark_dynamic(x, dim)
        leaves = [x, *module.parameters()]
        # The first call of a process checks its environment, so it is not the compiled one.
        expected, compiled_ones = (torch.autograd.grad(f(x).square().sum(), leaves) for f in (function, run))
        torch.testing.assert_close(compiled_ones, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_inductor_trains_every_module() -> None:
    modules = {name for name in nn.__all__ if isinstance(vars(nn)[name], type)}
    assert {name for name in modules if issubclass(vars(nn)[name], torch.nn.Module)} == {x.split()[0] for x in MODULES}


@needs_hints
def test_the_operator_adds_no_guards_on_fake_tensors_of_any_length() -> None:
    """Choosing a backward pass asks for hints in code that a compiler runs, too, where `is_compiling` is False."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)

    def any_length(x: Tensor) -> Tensor:
        sizes = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    q, k = (any_length(torch.zeros(2, length, 4, 64, requires_grad=True)) for length in (100, 200))
    mask = any_length(torch.zeros(2, 1, 1, 200, dtype=torch.bool).transpose(1, 3)).transpose(1, 3)
    problem = (None, None, None, None, *flat_flags(Flags(-1, -1, 0.125, 0.0, False)), "triton", "")
    with mode:
        out, *_ = torch.ops.flash_dmattn.attention_forward(q, k, k, [mask], "dense", *problem)
    assert out.grad_fn is not None and out.shape == q.shape
    assert not shapes.guards, [str(guard.expr) for guard in shapes.guards]


# One tensor in the place of several arguments: Dynamo takes none twice for an `autograd.Function`.

X, Y, ROWS = ((2, 6, 2, 8), 0), ((2, 6, 2, 8), 1), ((8, 2, 8), 2)
EDGES = torch.tensor([0, 3, 8], dtype=torch.int32)
ONE_TENSOR: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "q, k and v": ((X, X, X), {}),
    "k and v": ((X, Y, Y), {"is_causal": True}),
    "q and v": ((X, Y, X), {"backend": "eager"}),
    "with a prepared mask": ((X, X, X), {"mask": flash_dmattn.masks.PreparedMask.from_mask(some_mask(6, 6))}),
    "in packed sequences": ((ROWS, ROWS, ROWS), {"sequences": flash_dmattn.Sequences.packed(EDGES, max_seqlen_q=5)}),
    "in padded ones": (
        (X, X, X),
        {"sequences": flash_dmattn.Sequences.padded(seqlens_q=EDGES[1:] - 2, seqlens_k=EDGES[1:] - 2)},
    ),
}


@pytest.mark.parametrize("name", ONE_TENSOR)
def test_one_tensor_may_be_several_arguments(name: str) -> None:
    which, flags = ONE_TENSOR[name]
    tensors_of = {
        shape: torch.randn(shape[0], generator=torch.Generator().manual_seed(shape[1]), requires_grad=True)
        for shape in which
    }

    def call_of_few(*tensors: Tensor) -> Tensor:
        named = dict(zip(tensors_of, tensors, strict=True))
        return flash_dmattn.attention(*(named[shape] for shape in which), **flags)

    leaves = list(tensors_of.values())
    run, counter = compiled(call_of_few)
    expected = torch.autograd.grad(call_of_few(*leaves).sin().sum(), leaves)
    for _ in range(2):
        compiled_ones = torch.autograd.grad(run(*leaves).sin().sum(), leaves)
        torch.testing.assert_close(compiled_ones, expected)
    assert counter.frame_count == 1


PACKED_BY_ROWS: dict[str, Callable[[int], flash_dmattn.masks.PreparedMask]] = {
    "blocks": lambda n: flash_dmattn.masks.PreparedMask.from_blocks(torch.ones(1, 1, dtype=torch.bool), n, n, n),
    "documents": lambda n: flash_dmattn.masks.PreparedMask.from_documents(torch.arange(n) // 4),
    "a function": lambda n: flash_dmattn.masks.PreparedMask.from_mask_mod(lambda b, h, i, j: (i - j) % 3 == 0, n, n),
}


@pytest.mark.parametrize("name", PACKED_BY_ROWS)
def test_a_mask_packed_by_rows_may_be_made_inside(name: str) -> None:
    def call_of(x: Tensor) -> Tensor:
        return flash_dmattn.attention(x, x, x, PACKED_BY_ROWS[name](x.shape[1]))

    run, _ = compiled(call_of)
    for length in (6, 9):
        x = torch.randn(1, length, 2, 8)
        torch.testing.assert_close(run(x), call_of(x))


def test_mask_and_bias_may_come_and_go() -> None:
    run, counter = compiled(call, "eager")
    q, k, v, bias = (x.detach() for x in inputs())
    for _ in range(2):
        for mask in (None, some_mask(), some_mask()[None].expand(4, 5, 7)):
            for b in (None, bias):
                assert_same(run(q, k, v, mask, b), call(q, k, v, mask, b))
    assert counter.frame_count == 6


def test_no_grad_leaves_the_backward_out(ours: KernelPair) -> None:
    run, counter = compiled(call)
    q, k, v, bias = inputs()
    with torch.no_grad():
        assert_same(run(q, k, v, None, bias), call(q, k, v, None, bias))
    assert not run(q.detach(), k.detach(), v.detach(), None, bias.detach())[0].requires_grad
    assert_same(all_results(run, [q, k, v, bias], None), all_results(call, [q, k, v, bias], None))
    assert counter.frame_count >= 2
    assert ours.count["backward"] == 2


def test_autocast_inside_and_outside() -> None:
    def inside(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return call(q, k, v, mask, bias)

    arguments = inputs(dtype=torch.float32)
    expected = all_results(inside, arguments, some_mask())
    assert expected[0].dtype == torch.bfloat16
    torch.testing.assert_close(all_results(compiled(inside)[0], arguments, some_mask()), expected)
    run, _ = compiled(call)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(all_results(run, arguments, some_mask()), expected)
    assert run(*arguments[:3], None, arguments[3])[0].dtype == torch.float32


GRADIENTS_INSIDE: dict[str, Callable[..., Any]] = {
    "of q and a bias": lambda q, k, v, bias: torch.func.grad(
        lambda q, bias: flash_dmattn.attention(q, k, v, None, bias[0], is_causal=True).square().sum(), argnums=(0, 1)
    )(q, bias),
    "of v": lambda q, k, v, bias: torch.func.vjp(lambda v: flash_dmattn.attention(q, k, v), v)[1](q[..., :6]),
    "of a sink": lambda q, k, v, bias: torch.func.grad(
        lambda sink: flash_dmattn.attention(q, k, v, sink=sink, return_lse=True)[1].square().sum()
    )(bias[0, 0, 0, :4]),
    "of each number of out": lambda q, k, v, bias: torch.func.jacrev(
        lambda q, bias: flash_dmattn.attention(q, k[:1], v[:1], None, bias[0], is_causal=True, backend="eager"), (0, 1)
    )(q[:1], bias),
}
NESTED_GRADIENTS_INSIDE: dict[str, Callable[..., Any]] = {
    "of a gradient": lambda q, k, v, bias, **options: torch.func.grad(
        lambda q: torch.func.grad(lambda q: flash_dmattn.attention(q * 2, k, v, **options).square().sum())(q).norm()
    )(q),
    "of mapped calls": lambda q, k, v, bias, **options: torch.vmap(
        torch.func.grad(lambda q, k, v: flash_dmattn.attention(q[None], k[None], v[None], **options).square().sum())
    )(q, k, v),
    "of a map": lambda q, k, v, bias, **options: torch.func.grad(
        lambda q: torch.vmap(lambda *x: flash_dmattn.attention(*x, **options).square().sum())(
            q[:, None], k[:, None], v[:, None]
        ).sum()
    )(q),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GRADIENTS_INSIDE)
def test_gradients_inside_are_those_of_eager_mode(name: str, dynamic: bool) -> None:
    arguments, call = [x.detach() for x in inputs()], GRADIENTS_INSIDE[name]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(*arguments), call(*arguments))


@pytest.mark.parametrize("name", NESTED_GRADIENTS_INSIDE)
def test_nested_gradients_inside_break_the_graph_and_are_not_wrong(name: str) -> None:
    arguments, call = [x.detach() for x in inputs()], NESTED_GRADIENTS_INSIDE[name]
    exact = call(*arguments, backend="eager")
    torch.testing.assert_close(torch.compile(call, backend="aot_eager")(*arguments, backend="eager"), exact)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="keeps no derivative"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*arguments, backend="eager")
    torch._dynamo.reset()
    in_one_graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(in_one_graph(*arguments, backend="reference"), exact)


def test_module_with_checkpoint() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 3 * 2 * 8, dtype=torch.float64)
            self.bias = torch.nn.Parameter(torch.zeros(1, 2, 1, 5, dtype=torch.float64))

        def attend(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(2, (3, 2, 8)).unbind(2)
            return flash_dmattn.attention(q, k, v, None, self.bias, is_causal=True).flatten(2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.attend, x, use_reentrant=False)

    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 5, 8, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters()))
    run, counter = compiled(layer)
    assert_same(torch.autograd.grad(run(x).sin().sum(), list(layer.parameters())), expected)
    assert counter.frame_count == 1


@needs_hints
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_lengths_that_decide_nothing_compile_nothing(backend: str, with_gradients: bool) -> None:
    """The first length of all compiles, and the first other one."""
    run, counter = compiled(lambda q, k, v: flash_dmattn.attention(q, k, v, is_causal=True, backend=backend), "eager")
    for length in (3, 17, 20, 63, 64, 100, 127, 128, 200, 512, 1023, 2048):
        q, k, v = torch.randn(3, 1, length, 2, 8).unbind()
        run(q.requires_grad_(with_gradients), k, v)
    assert counter.frame_count == 2


@needs_hints
def test_lengths_decide_where_a_rule_of_the_backend_that_is_taken_asks(ours: KernelPair) -> None:
    """A rule holds for all lengths of a graph, a preference of auto for the length that is compiled."""
    few = Rule("length", lambda p: p.seqlen_q <= 64, lambda p: f"there are {p.seqlen_q} queries")
    for name, compilations in (("rules", 3), ("auto_rules", 2)):
        torch._dynamo.reset()
        with replaced(ours.backend.name, **{name: (few,)}):
            run, counter = compiled(lambda q, k, v: flash_dmattn.attention(q, k, v), "eager")
            ours.count.clear()
            for length in (3, 17, 64, 65, 512):
                run(*torch.randn(3, 1, length, 2, 8).unbind())
        assert counter.frame_count == compilations
        assert ours.count == {"forward": 3 if name == "rules" else 5}


# Settings changed between calls take effect: counted inside the operators, where no trace can hide it.


def test_settings_changed_between_calls_take_effect(ours: KernelPair) -> None:
    run, counter = compiled(call)
    arguments = inputs()
    with flash_dmattn.config(backend="reference"):
        expected = all_results(call, arguments, some_mask())

    def passes_of_ours() -> tuple[int, int]:
        before = Counter(ours.count)
        assert_same(all_results(run, arguments, some_mask()), expected)
        return ours.count["forward"] - before["forward"], ours.count["backward"] - before["backward"]

    assert passes_of_ours() == (1, 1)  # auto prefers it
    with flash_dmattn.config(backend="eager"):
        assert passes_of_ours() == (0, 0)
        with flash_dmattn.config(backend=(ours.backend.name, "eager")):
            assert passes_of_ours() == (1, 0)
        assert passes_of_ours() == (0, 0)
    assert passes_of_ours() == (1, 1)
    flash_dmattn.config.set(backend=("eager", ours.backend.name))
    assert passes_of_ours() == (0, 1)
    flash_dmattn.config.set(backend="auto")
    with flash_dmattn.config(disabled=ours.backend.name):
        assert passes_of_ours() == (0, 0)
    assert passes_of_ours() == (1, 1)
    assert counter.frame_count <= 5  # the settings seen: each compiles once and is found again


def test_backend_registered_between_calls_takes_effect() -> None:
    run, _ = compiled(call)
    arguments = inputs()
    expected = all_results(run, arguments, None)
    OURS.count = Counter()
    with registered(OURS, before="sdpa"):
        assert_same(all_results(run, arguments, None), expected)
        assert OURS.count == {"forward": 1, "backward": 1}
    assert_same(all_results(run, arguments, None), expected)
    assert OURS.count == {"forward": 1, "backward": 1}


def test_settings_of_threads_and_tasks_take_effect(ours: KernelPair) -> None:
    """Guards read the context of the call, in which others may have blocks of their own."""
    run, counter = compiled(call)
    arguments = [x.detach() for x in inputs()]

    def forward_of_ours() -> int:
        before = ours.count["forward"]
        run(*arguments[:3], None, arguments[3])
        return ours.count["forward"] - before

    with flash_dmattn.config(backend="eager"):
        assert forward_of_ours() == 0
        assert contextvars.Context().run(forward_of_ours) == 1
        assert contextvars.copy_context().run(forward_of_ours) == 0
    assert forward_of_ours() == 1
    assert counter.frame_count == 2


def test_setting_inside_the_compiled_function(ours: KernelPair) -> None:
    def switched(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        with flash_dmattn.config(backend="eager", disabled=("flex", "triton"), fallback="error", record=[]):
            first = call(*tensors)
        return first[0] + call(*tensors)[0], first[1]

    q, k, v, bias = (x.detach() for x in inputs())
    run, _ = compiled(switched)
    actual = run(q, k, v, None, bias)
    assert ours.count == {"forward": 1}
    assert_same(actual, switched(q, k, v, None, bias))


def test_deterministic_follows_the_global_switch() -> None:
    seen: list[bool] = []

    def spy(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        names = [argument.name for argument in torch.ops.flash_dmattn.attention_forward.default._schema.arguments]
        at = names.index("deterministic")
        seen.extend(node.args[at] for node in graph.graph.nodes if "attention_forward" in str(node.target))
        return graph.forward

    run = torch.compile(lambda x: flash_dmattn.attention(x, x, x, backend="eager"), backend=spy, fullgraph=True)
    x = inputs()[1].detach()
    flash_dmattn.attention(x, x, x, backend="eager")  # the first call of a process checks its environment
    try:
        for switch in (False, True, False):
            torch.use_deterministic_algorithms(switch)
            run(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


def test_first_call_of_all_may_be_a_compiled_one(ours: KernelPair) -> None:
    """A first probe imports a library, which no trace may run through."""
    probed: list[Availability] = []

    def probe() -> Availability:
        if not probed:
            importlib.import_module("json.tool")
            probed.append(Availability(True))
        return probed[0]

    q, k, v, bias = (x.detach() for x in inputs())
    with replaced(ours.backend.name, probe=probe):
        assert_same(compiled(call)[0](q, k, v, None, bias), call(q, k, v, None, bias))
    assert ours.count == {"forward": 2}


# Refusals


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        ({"backend": "eager", "return_probs": True}, flash_dmattn.BackendUnsupportedError, "return_probs is set"),
        ({"backend": "sdpa", "softcap": 2.0}, flash_dmattn.BackendUnsupportedError, "softcap is set; this backend"),
        ({"backend": ("sdpa", "cuda")}, flash_dmattn.BackendUnavailableError, "device is cpu; the extension runs"),
        ({"window_size": (1, -2)}, ValueError, "both sides need to be at least -1"),
        ({"is_causal": 1}, TypeError, "is_causal is 1; it needs to be True or False"),
    ],
)
def test_refusal_keeps_its_type_and_words(flags: dict[str, Any], error: type[Exception], text: str) -> None:
    x = inputs()[1].detach().requires_grad_()
    with pytest.raises(error, match=text):
        torch.compile(lambda x: flash_dmattn.attention(x, x, x, **flags), backend="aot_eager")(x)


@pytest.mark.parametrize("backend", ["sdpa", ("eager", "sdpa"), "flex", "cuda"])
def test_refusal_in_one_graph_names_the_backend(backend: Any) -> None:
    x = inputs()[1].detach().requires_grad_()
    run = torch.compile(
        lambda x: flash_dmattn.attention(x, x, x, backend=backend, softcap=2.0), backend="aot_eager", fullgraph=True
    )
    name = backend if isinstance(backend, str) else backend[1]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"backend '{name}' does not serve this call; .*explain"):
        run(x)


def test_a_torch_without_such_graphs_breaks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch before 2.11; in one graph it is refused."""
    for name in ("prepare_call", "run_call"):
        monkeypatch.setattr(api, name, call_module._outside_of_graphs(getattr(api, name)))
    x = inputs()[1].detach().requires_grad_()
    attend = lambda x: flash_dmattn.attention(x * 2, x, x, is_causal=True)
    counter = CompileCounterWithBackend("aot_eager")
    results = torch.compile(attend, backend=counter)(x), attend(x)
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), x) for out in results))
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert targets and not any("flash_dmattn" in target for target in targets)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"needs torch 2\.11 or later, and this is "):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(x)
