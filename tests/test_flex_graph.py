"""The graphs that the flex backend compiles and how often it does, and its compiled CPU kernel."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import pytest
import torch
from dispatched import bytes_made
from flex_fixture import compiled_on_cpu, eager_flex
from key_parts import check_covered, check_told_apart
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.flex import call as flex_call
from flash_dmattn.backends.flex import graph
from flash_dmattn.backends.flex.blocks import BLOCK, Blocks, Places, dense_tensors
from flash_dmattn.caches import ClockCache
from flash_dmattn.problem import AttentionProblem, MaskView
from flash_dmattn.problem.inputs import Inputs
from flash_dmattn.reference import formula


class Counter:
    """How many graphs torch compiled since it was made."""

    def __init__(self) -> None:
        from torch._dynamo.utils import counters

        self.counters = counters
        self.start = counters["stats"]["unique_graphs"]

    def __call__(self) -> int:
        return self.counters["stats"]["unique_graphs"] - self.start


def call(seed: int, seqlen_q: int, seqlen_k: int, mask: bool = True, bias: bool = True, **flags: Any) -> None:
    """One call forward and backward on tensors that are new each time, compared with the formula."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, 4, 16, generator=generator) for n in (seqlen_q, seqlen_k, seqlen_k))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    allowed = torch.rand(2, 1, seqlen_q, seqlen_k, generator=generator) < 0.1 + 0.8 * (seed % 7) / 7 if mask else None
    added = torch.randn(1, 4, 1, seqlen_k, generator=generator).requires_grad_() if bias else None
    leaves = [x for x in (q, k, v, added) if x is not None]
    out = flash_dmattn.attention(q, k, v, allowed, added, backend="flex", **flags)
    want = formula.attention(q, k, v, allowed, added, **flags)[0]
    gradients, exact = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, want))
    for x, y in zip((out, *gradients), (want, *exact), strict=True):
        assert (x - y).norm() <= 1e-4 * y.norm()


LENGTHS = ((30, 40), (31, 45), (50, 37), (64, 64), (33, 99), (99, 33), (127, 4))


@pytest.mark.parametrize(
    ("lengths", "flags", "most"),
    [
        (((35, 47),) * 50, {}, 1),
        (((36, 48),) * 10, {"mask": False, "is_causal": True}, 1),
        (LENGTHS, {"is_causal": True}, 2),
    ],
    ids=("fifty masks", "ten biases", "new lengths and causal offsets"),
)
def test_calls_that_are_alike_compile_once_and_new_lengths_once_more(
    lengths: tuple[tuple[int, int], ...], flags: dict[str, Any], most: int
) -> None:
    compilations = Counter()
    with eager_flex():
        for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
            call(seed, seqlen_q, seqlen_k, **flags)
            assert compilations() <= most


def test_classes_do_not_share_a_recompile_limit() -> None:
    with eager_flex(), torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=4):
        q, k, v = (torch.randn(2, n, 4, 16) for n in (21, 22, 22))
        for shape in itertools.product((1, 2), (1, 4), (1, 21), (22,)):
            mask = torch.rand(shape) < 0.7
            out = flash_dmattn.attention(q, k, v, mask, backend="flex")
            torch.testing.assert_close(out, formula.attention(q, k, v, mask)[0])


def test_the_recompile_limit_is_an_error_and_never_the_dense_formula() -> None:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    with eager_flex(), torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        call(0, 23, 24, is_causal=True, softcap=3.0)
        with pytest.raises(FailOnRecompileLimitHit):
            call(1, 25, 24, is_causal=True, softcap=3.0)


def test_a_small_bias_reaches_the_kernel_small_and_the_summary_of_a_mask_copies_nothing() -> None:
    mask = torch.rand(2, 1, 400, 600) < 0.5
    lists = partial(dense_tensors, mask, None, 200, 4, 400, 600, torch.device("cpu"), 2, 1)
    sizes = set(bytes_made(lists)) - {mask.numel()}
    assert max(sizes) <= mask.numel() // BLOCK * 4 * 1.1
    bias = torch.randn(1, 2, 1, 600, dtype=torch.bfloat16).requires_grad_()
    sizes = set(bytes_made(lambda: flex_call._ToFloat32.apply(bias.expand(2, 2, 400, 600).detach())))
    assert max(sizes) <= 4 * 2 * 600


@compiled_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_cpu_kernel_with_everything(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator).to(dtype) for n, h in ((150, 4), (170, 2), (170, 2)))
    mask = torch.rand(2, 2, 150, 170, generator=generator) < 0.5
    mask[:, :, 9] = False
    bias = torch.randn(1, 4, 1, 170, generator=generator)
    bias[..., 3] = -torch.inf
    flags = {"is_causal": True, "window_size": (100, -1), "softcap": 4.0}
    compilations = Counter()
    for _ in range(3):
        out = flash_dmattn.attention(q, k, v, mask, bias, backend="flex", **flags)
        assert compilations() == 1
        exact = formula.attention(q.double(), k.double(), v.double(), mask, bias.double(), **flags)[0]
        plain = formula.attention(q, k, v, mask, bias, **flags)[0]
        assert (out - exact).norm() <= 1.5 * (plain - exact).norm() + 1e-5 * exact.norm()
        assert not out[:, 9].any()
        mask = mask.roll(1, 3)
        mask[:, :, 9] = False


@compiled_on_cpu
def test_inside_a_callers_graph() -> None:
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, n, h, 16, generator=generator) for n, h in ((40, 4), (50, 2), (50, 2)))
    scores = torch.randn(1, 2, 1, 50, generator=generator)

    def layer(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        # Mask and bias computed in the graph, as a model does.
        return 2 * flash_dmattn.attention(q + 1, k, v, scores > -1, scores.exp(), is_causal=True, backend="flex")

    out = torch.compile(layer, fullgraph=True)(q, k, v, scores)
    q, k, v, bias = (x.double() for x in (q + 1, k, v, scores.exp()))
    exact = 2 * formula.attention(q, k, v, scores > -1, bias, is_causal=True)[0]
    assert (out - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("first", (False, True))
def test_a_second_backward_is_allowed_whatever_the_first_one_was(first: bool) -> None:
    """retain_graph=True, also where a backward without it came first and has compiled; with a view as the result."""

    def smooth(x: Tensor) -> tuple[Tensor, ...]:
        return ((x.sin().exp() * x.cos()).tanh().transpose(0, 1),)

    torch._dynamo.reset()
    function = graph.compile_to_keep_buffers(smooth, "aot_eager")
    for length in (8, 16, 24):
        for retain in (first, not first, True):
            x = torch.randn(length, 5, requires_grad=True)
            (out,) = function(x)
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=retain)
            if retain:
                assert torch.equal(torch.autograd.grad(out.sum(), x)[0], gradient)


def test_graphs_that_run_at_once_leave_the_switch_of_torch_as_it_is() -> None:
    """One graph begins, another begins, the first ends, the other ends: no thread meets the switch turned."""
    torch._dynamo.reset()
    switch = torch._functorch.config.donated_buffer
    seen: list[bool] = []
    begun, ended = threading.Barrier(2), threading.Event()

    def slowly(is_first: bool) -> Any:
        def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            def run(*tensors: Any) -> Any:
                begun.wait(timeout=60)
                seen.append(torch._functorch.config.donated_buffer)
                if not is_first:
                    assert ended.wait(timeout=60)
                return graph(*tensors)

            return run

        return compile_graph

    functions = [graph.compile_to_keep_buffers(lambda x: (x + 1,), slowly(is_first)) for is_first in (True, False)]
    first, second = (threading.Thread(target=function, args=(torch.ones(2),)) for function in functions)
    for thread in (first, second):
        thread.start()
    first.join(timeout=60)
    ended.set()
    second.join(timeout=60)
    assert seen == [switch, switch] and torch._functorch.config.donated_buffer == switch


class Keys:
    """A table that remembers the key that it was asked for last."""

    def get(self, key: Any) -> Any:
        self.key = key
        return self  # so that nothing is compiled


def key_of(
    form: graph.Form, specialised: tuple[object, ...] = ("class",), dynamic: bool | None = None, compiler: str = "eager"
) -> Any:
    keys = Keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_compiled", keys)
        patch.setattr(graph, "compiler", compiler)
        graph.compiled(form, specialised, dynamic)
    return keys.key


SHARED = graph.Shared((True, True, False, False), 2, (3, 4), "queries")
OTHER_SHARED = {"dims": (False, False, True, True), "group": 1, "entries": (5, 6), "packing": "none"}
FORM = graph.Form(0.5, 2.0, True, False, False, SHARED, SHARED, 2, True)
FORMS = {
    "softmax_scale": 0.25,
    "softcap": 0.0,
    "grouped": False,
    "return_lse": True,
    "max_scores": True,
    "num_stages": None,
    "no_decoding": False,
}


def test_each_constant_of_a_graph_alone_makes_another() -> None:
    assert OTHER_SHARED.keys() == set(graph.Shared._fields)
    shared = [SHARED._replace(**{name: other}) for name, other in OTHER_SHARED.items()]
    forms = [FORM._replace(**{name: other}) for name, other in FORMS.items()]
    forms += [FORM._replace(**{name: other}) for name in ("mask", "bias") for other in (*shared, None)]
    changed = [key_of(form) for form in forms]
    changed += [key_of(FORM, ("other",)), key_of(FORM, dynamic=False), key_of(FORM, compiler="inductor")]
    for key in changed:
        check_told_apart(key_of(FORM), key)
    check_covered(key_of(FORM), changed)


def test_each_thing_that_torch_compiles_anew_for_makes_another_graph() -> None:
    q, k = torch.randn(2, 200, 4, 16), torch.randn(2, 300, 2, 16)
    mask, bias = torch.ones(2, 1, 200, 300), torch.randn(1, 4, 200, 300)
    problem = flash_dmattn.explain(q, k, k).problem
    scalar, rows = torch.tensor(0), torch.zeros(3)

    def key(
        problem: AttentionProblem = problem,
        limits: tuple[Tensor | None, Tensor | None] = (scalar, scalar),
        origin: Tensor | None = scalar,
        is_static: bool = False,
        **changes: Any,
    ) -> Any:
        tensors = {"q": q, "k": k, "v": k, "mask": mask, "bias": bias} | changes
        x = Inputs(**tensors | {"mask": MaskView("dense", (tensors["mask"],))})
        places = Places(rows, rows, rows, rows) if is_static else None
        return flex_call.specialisation(problem, x, x.bias, Blocks(None, *limits, places, origin), is_static)

    fields = {
        "device": "cuda",
        "dtype": torch.float16,
        **{name: 1 for name in ("num_heads", "num_heads_k")},
        **{name: 32 for name in ("head_dim", "head_dim_v")},
    }
    changed = [key(problem._replace(**{name: other})) for name, other in fields.items()]
    needs = problem.needs_grad
    changed += [key(problem._replace(needs_grad=needs._replace(**{name: True}))) for name in ("q", "k", "v", "bias")]
    changed += [key(q=q[:1]), key(q=q[:, :1]), key(k=k[:, :1]), key(q=q[:, :BLOCK]), key(k=k[:, :BLOCK])]
    changed += [key(**{name: x.mT.contiguous().mT}) for name, x in (("q", q), ("k", k), ("v", k))]
    changed += [
        key(**{name: x.transpose(1, 2).contiguous().transpose(1, 2)}) for name, x in (("q", q), ("k", k), ("v", k))
    ]
    changed += [key(bias=None), key(bias=bias.half())]
    changed += [key(limits=limits) for other in (None, rows) for limits in ((other, scalar), (scalar, other))]
    changed += [key(origin=other) for other in (None, rows)]
    with torch.no_grad():
        changed.append(key())
    for other in changed:
        check_told_apart(key(), other)
    check_covered(key(), changed)
    # A static graph has a key for each size.
    assert key() == key(q=q[:, :199])
    sizes = [key(is_static=True, **{name: x[:, :199]}) for name, x in (("q", q), ("k", k))]
    sizes += [key(is_static=True, mask=mask[:1]), key(is_static=True, bias=bias[:, :1])]
    sizes.append(key(is_static=True, q=torch.cat((q, q))))
    for other in sizes:
        check_told_apart(key(is_static=True), other)


def test_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each softmax_scale has its own graph, and a graph that was not used for long is forgotten."""
    monkeypatch.setattr(graph, "_compiled", ClockCache(3))
    q = torch.randn(1, 8, 1, 8)
    with eager_flex(), torch.no_grad():
        for step in range(6):
            attend = [flash_dmattn.attention(q, q, q, softmax_scale=s, backend="flex") for s in (0.5, 1.0 + step)]
            wanted = [flash_dmattn.attention(q, q, q, softmax_scale=s, backend="eager") for s in (0.5, 1.0 + step)]
            torch.testing.assert_close(attend, wanted)
            assert len(graph._compiled) <= 3
    assert any(key[1].softmax_scale == 0.5 for key in graph._compiled)  # type: ignore[index] # which is in use
