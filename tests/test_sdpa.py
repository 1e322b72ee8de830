"""F.scaled_dot_product_attention inside of `intercept_sdpa`: values, gradients, and who computes them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn.integrations import heads_first, sdpa
from flash_dmattn.integrations.sdpa import intercept_sdpa

imported_earlier = F.scaled_dot_product_attention

B, H, LQ, LK, D, DV = 2, 4, 5, 7, 8, 6


class Shapes(NamedTuple):
    """The shapes of q, k, v and the mask, and the other arguments."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    mask: tuple[int, ...]
    more: dict[str, Any] = {}


Q, K, V = (B, H, LQ, D), (B, H, LK, D), (B, H, LK, DV)
SERVED = {
    "each score": Shapes(Q, K, V, (B, H, LQ, LK)),
    "padding": Shapes(Q, K, V, (B, 1, 1, LK)),
    "each query": Shapes(Q, K, V, (H, LQ, 1)),
    "shared": Shapes(Q, K, V, (LQ, LK)),
    "one row": Shapes(Q, K, V, (LK,)),
    "scale": Shapes(Q, K, V, (1, H, LQ, LK), {"scale": 0.7}),
    "scale 0": Shapes(Q, K, V, (1, H, LQ, LK), {"scale": 0.0}),
    "causal": Shapes(Q, (B, H, LQ, D), (B, H, LQ, DV), (B, 1, 1, LQ), {"is_causal": True}),
    "grouped heads": Shapes(Q, (B, 2, LK, D), (B, 2, LK, DV), (B, H, 1, LK), {"enable_gqa": True}),
    "one head of keys": Shapes(Q, (B, 1, LK, D), (B, 1, LK, DV), (B, H, LQ, LK)),
    "keys without a batch": Shapes(Q, (1, H, LK, D), (1, H, LK, DV), (B, 1, LQ, LK)),
    "queries without a batch": Shapes((1, H, LQ, D), K, V, (B, 1, LQ, LK)),
    "a batch of one": Shapes((1, H, LQ, D), (1, H, LK, D), (1, H, LK, DV), (1, 1, 1, LK)),
    "heads alone": Shapes((H, LQ, D), (H, LK, D), (H, LK, DV), (H, 1, LK)),
    "two batch dims": Shapes((3, *Q), (3, *K), (3, *V), (3, 1, H, LQ, LK)),
    "two batch dims, shared": Shapes((3, *Q), (3, *K), (3, *V), (B, 1, LQ, LK)),
    "two batch dims that broadcast": Shapes((3, *Q), (1, *K), (3, 1, H, LK, DV), (H, LQ, LK)),
}


def draw(shapes: Shapes, form: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and a mask: "bool", "float" with a gradient, or "-inf", a float one that forbids some keys."""
    torch.manual_seed(0)
    qkv = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes[:3]]
    if form == "float":
        return [*qkv, torch.randn(shapes.mask, dtype=dtype).requires_grad_()]
    allowed = torch.rand(shapes.mask) < 0.6
    allowed[..., 0] = True  # no row without a key: what becomes of those is a test of its own
    added = torch.zeros(shapes.mask, dtype=dtype).masked_fill(~allowed, -torch.inf)
    return [*qkv, allowed if form == "bool" else added]


def weighted(out: Tensor) -> Tensor:
    """A loss of a result."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)).sum()


def run(tensors: list[Tensor], **more: Any) -> list[Tensor]:
    """The result, then the gradients of whatever has one."""
    out = F.scaled_dot_product_attention(*tensors, **more)
    return [out, *torch.autograd.grad(weighted(out), [x for x in tensors if x.requires_grad])]


def by_formula(tensors: list[Tensor], is_causal: bool = False, **more: Any) -> list[Tensor]:
    """By torch's plain formula; causality is put into the mask."""
    *qkv, mask = tensors
    if is_causal:
        below = torch.ones(qkv[0].shape[-2], qkv[1].shape[-2], dtype=torch.bool).tril()
        mask = mask & below if mask.dtype == torch.bool else mask.masked_fill(~below, -torch.inf)
    # The formula wants as many heads of keys, and one batch.
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in qkv))
    heads = qkv[0].shape[-3]
    full = [x.repeat_interleave(heads // x.shape[-3], -3).expand(*batch, heads, *x.shape[-2:]) for x in qkv]
    more.pop("enable_gqa", None)
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*full, mask, **more)
    return [out, *torch.autograd.grad(weighted(out), [x for x in tensors if x.requires_grad])]


def agree(outcomes: list[Tensor], wanted: list[Tensor], norm: float = 0.0) -> None:
    """Every result within 1e-12 of its norm, or of `norm` if that is larger."""
    assert len(outcomes) == len(wanted)
    for x, y in zip(outcomes, wanted):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert (x - y).norm() <= 1e-12 * max(float(y.norm()), norm) + 1e-14


@pytest.mark.parametrize("form", ["bool", "float", "-inf"])
@pytest.mark.parametrize("name", SERVED)
def test_values_and_gradients(name: str, form: str) -> None:
    tensors, more = draw(SERVED[name], form), SERVED[name].more
    wanted = by_formula(tensors, **more)
    with intercept_sdpa() as tally:
        outcomes = run(tensors, **more)
    assert tally.served == 1 and not tally.passed_on
    agree(outcomes, wanted)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values arrive as views of what was given, a mask as itself."""
    calls: list[tuple[Tensor, ...]] = []

    def watched(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        return flash_dmattn.attention(*arguments, **more)

    monkeypatch.setattr(heads_first, "attention", watched)
    for form in ("bool", "float"):
        tensors = draw(SERVED["each score"], form)
        with intercept_sdpa():
            run(tensors)
        *qkv, mask, bias = calls.pop()
        for options, arrived in zip(tensors, qkv):
            assert arrived.data_ptr() == options.data_ptr() and torch.equal(arrived.transpose(1, 2), options)
        assert (mask if form == "bool" else bias) is tensors[3]


def test_float_masks_are_split_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`below` changes no result; a mask of floats arrives as one of bools, a learned bias stays itself."""
    calls: list[tuple[Tensor | None, Tensor | None]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, **more: Any) -> Any:
        calls.append((mask, bias))
        return flash_dmattn.attention(q, k, v, mask, bias, **more)

    monkeypatch.setattr(heads_first, "attention", watched)
    for name in ("each score", "padding", "shared", "one row", "heads alone", "two batch dims, shared"):
        *qkv, hidden = draw(SERVED[name], "-inf")
        for value, below in ((-1e9, -1e3), (-100.0, -1e3), (-100.0, -100)):
            tensors = [*qkv, hidden.clamp(min=value)]
            with intercept_sdpa(below=below, strict=True):
                agree(run(tensors), by_formula(tensors))
            mask, bias = calls.pop()
            assert (mask is not None) == (bias is None) == (value <= below)
    learned = draw(SERVED["each score"], "float")
    with intercept_sdpa(below=-1e3):
        agree(run(learned), by_formula(learned))
    mask, bias = calls.pop()
    assert mask is None and bias is learned[3]
    for wrong, error in ((0.0, ValueError), ("low", TypeError)):
        with pytest.raises(error, match=r"below is .*; it needs to be"):
            intercept_sdpa(below=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["bool", "-inf"])
def test_a_row_without_keys_is_zero(form: str) -> None:
    tensors = draw(SERVED["each score"], form)
    with torch.no_grad():
        tensors[3][0, 1, 2] = False if form == "bool" else -torch.inf
    with intercept_sdpa() as tally:
        out, dq, *others = run(tensors)
    assert tally.served == 1
    assert not out[0, 1, 2].any() and not dq[0, 1, 2].any()
    assert out[0, 1, 1].all() and all(bool(x.isfinite().all()) for x in (out, dq, *others))


def test_dropout() -> None:
    """The dropout of `attention`: the same seed drops the same."""
    q, k, v, bias = draw(SERVED["each score"], "float")
    torch.manual_seed(3)
    wanted = flash_dmattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), bias=bias, dropout_p=0.4).transpose(1, 2)
    torch.manual_seed(3)
    with intercept_sdpa() as tally:
        outcomes = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.4)
    assert tally.served == 1 and torch.equal(outcomes, wanted)
    assert not torch.allclose(outcomes, F.scaled_dot_product_attention(q, k, v, bias))


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [*((dtype, False) for dtype in (torch.float16, torch.bfloat16, torch.float32))]
    + [*((dtype, True) for dtype in (torch.float16, torch.bfloat16))],
)
def test_dtypes(dtype: torch.dtype, autocast: bool, form: str) -> None:
    """As exact as torch's own result and of its dtype; under autocast float32 tensors have float32 gradients."""
    exact = draw(SERVED["grouped heads"], form)
    wanted = by_formula(exact, enable_gqa=True)
    own = torch.float32 if autocast else dtype
    tensors = [x.detach().to(own).requires_grad_() if x.is_floating_point() else x for x in exact]
    with torch.autocast("cpu", dtype, enabled=autocast):
        theirs = run(tensors, enable_gqa=True)
        with intercept_sdpa() as tally:
            ours = run(tensors, enable_gqa=True)
    assert tally.served == 1
    assert [x.dtype for x in ours] == [x.dtype for x in theirs] == [dtype, *[own] * (len(ours) - 1)]
    for x, y, z in zip(ours, theirs, wanted):
        assert (x - z).norm() <= 1.5 * (y - z).norm() + 1e-5 * z.norm()


def test_autocast_casts_a_float_mask() -> None:
    """As torch does, with q in bfloat16 too: of a mask in float32 kernels get what they read fastest."""
    q, k, v, mask = (x.detach().float() for x in draw(SERVED["each score"], "float"))
    with (
        torch.autocast("cpu", torch.bfloat16),
        flash_dmattn.config(record=(decisions := [])),
        intercept_sdpa() as tally,
    ):
        F.scaled_dot_product_attention(q, k, v, mask)
        F.scaled_dot_product_attention(q.bfloat16(), k, v, mask)
    assert tally.served == 2
    for decision in decisions:
        assert decision.problem.bias is not None and decision.problem.bias.dtype == torch.bfloat16


def calls_of_torch() -> dict[str, tuple[str, Callable[[], Tensor]]]:
    """Calls that torch computes, or refuses by itself: the reason, and the call."""
    q, k, v, mask = (x.detach() for x in draw(SERVED["each score"], "bool"))
    square = torch.ones(LQ, LK, dtype=torch.bool)
    nested = torch.nested.nested_tensor([q[0, :3], q[0]], layout=torch.jagged)
    sdpa = F.scaled_dot_product_attention
    return {
        "no mask": ("no mask", lambda: sdpa(q, k, v)),
        "causal alone": ("no mask", lambda: sdpa(q, k, v, is_causal=True)),
        "nested": ("a tensor subclass", lambda: sdpa(nested, nested, nested, mask)),
        "a wrapper": ("a tensor subclass", lambda: sdpa(*(TwoTensor(x, x.clone()) for x in (q, k, v, mask))).a),
        "CausalBias": ("a tensor subclass", lambda: sdpa(q, k, v, causal_lower_right(LQ, LK))),
        "two dims": ("shapes of q, k and v", lambda: sdpa(q[0, 0], k[0, 0], v[0, 0], square)),
        "causal": ("is_causal, unequal lengths", lambda: sdpa(q, k, v, mask, is_causal=True)),
        "heads": ("shapes of q, k and v", lambda: sdpa(q, k[:, :2], v[:, :2], mask)),
        "head dims": ("shapes of q, k and v", lambda: sdpa(q, k[..., :4], v, mask)),
        "batches": ("shapes of q, k and v", lambda: sdpa(q, k.repeat(2, 1, 1, 1), v, mask)),
        "dtypes": ("dtypes of q, k and v", lambda: sdpa(q, k.float(), v, mask)),
        "numbers": ("dtype of the mask", lambda: sdpa(q, k, v, mask.long())),
        "a mask of few heads": ("shape of the mask", lambda: sdpa(q, k[:, :2], v[:, :2], mask[:, :2], enable_gqa=True)),
        "a mask of more dims": ("shape of the mask", lambda: sdpa(q[0], k[0], v[0], mask)),
    }


def result_or_message(call: Callable[[], Tensor]) -> Tensor | str:
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("name", calls_of_torch())
def test_what_is_passed_on(name: str) -> None:
    """Torch's own result or message, counted with its reason; `strict` refuses it by that reason, unless no mask is."""
    reason, call = calls_of_torch()[name]
    wanted = result_or_message(call)
    with intercept_sdpa() as tally:
        outcomes = result_or_message(call)
    assert torch.equal(outcomes, wanted) if isinstance(outcomes, Tensor) else outcomes == wanted
    assert tally.served == 0 and tally.passed_on == {reason: 1}
    with intercept_sdpa(strict=True) as strictly:
        if reason == "no mask":
            call()
        else:
            with pytest.raises(NotImplementedError, match=rf"by its {reason}: query \("):
                call()
    assert strictly.served == 0 and strictly.passed_on == ({"no mask": 1} if reason == "no mask" else {})


def test_the_tally_prints_as_a_table() -> None:
    q, k, v, mask = (x.detach() for x in draw(SERVED["each score"], "bool"))
    with intercept_sdpa() as tally:
        for _ in range(10):
            F.scaled_dot_product_attention(q, k, v, mask)
        F.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], mask[0, 0])
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    assert str(tally).splitlines() == [
        "F.scaled_dot_product_attention  calls",
        "flash_dmattn                       10",
        "torch: no mask                      2",
        "torch: shapes of q, k and v         1",
    ]


# When it is active


def call_once() -> None:
    q, k, v, mask = (x.detach() for x in draw(SERVED["each score"], "bool"))
    F.scaled_dot_product_attention(q, k, v, mask)


def call_of_a_module() -> Callable[[], object]:
    """A call of a module of torch, with padding."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.bool)
    return lambda: attention(x, x, x, key_padding_mask=padding, need_weights=False)


def test_an_import_changes_nothing() -> None:
    """And in a process whose first compilation happens inside of a context, that one is ours all the same."""
    code = (
        "import torch, torch.nn.functional as F; before = F.scaled_dot_product_attention\n"
        "from flash_dmattn.integrations.sdpa import intercept_sdpa\n"
        "print(F.scaled_dot_product_attention is before, torch.backends.mha.get_fastpath_enabled(),\n"
        "      torch.overrides._get_current_function_mode_stack())\n"
        "def show(graph, inputs):\n"
        "    print(sum('flash_dmattn' in str(node.target) for node in graph.graph.nodes))\n"
        "    return graph\n"
        "q, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)\n"
        "with intercept_sdpa():\n"
        "    torch.compile(lambda: F.scaled_dot_product_attention(q, q, q, mask), backend=show, fullgraph=True)()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.split() == ["True", "True", "[]", "1"]


def test_contexts_nest_and_end() -> None:
    """The innermost one decides; an error inside ends a context too, and then torch is as it was."""
    with intercept_sdpa() as outer:
        call_once()
        with pytest.raises(ZeroDivisionError), intercept_sdpa() as inner:
            call_once()
            call_once()
            F.scaled_dot_product_attention(*torch.zeros(3, 1, 2, 4, 8))
            raise ZeroDivisionError
        call_of_a_module()()
        assert not torch.backends.mha.get_fastpath_enabled()
    call_once()
    assert (outer.served, inner.served) == (2, 2)
    assert not outer.passed_on and inner.passed_on == {"no mask": 1}  # counted once
    assert_nothing_is_left()


def assert_nothing_is_left() -> None:
    """Torch is as it was: the name, the fast path, and no mode."""
    assert F.scaled_dot_product_attention is imported_earlier and torch.backends.mha.get_fastpath_enabled()
    assert not torch.overrides._get_current_function_mode_stack()


def test_one_object_nests() -> None:
    """Each `with` has a tally of its own, and a decorator is one too."""
    context = intercept_sdpa()
    with context as outer:
        with context as inner:
            call_once()
        call_once()
        call_once()
        context(call_once)()
    with context as again:
        call_once()
    assert (outer.served, inner.served, again.served) == (2, 1, 1)
    assert_nothing_is_left()


def test_strict_is_a_bool() -> None:
    with pytest.raises(TypeError, match="strict is 'no'; it needs to be True or False"):
        intercept_sdpa(strict="no")


def test_contexts_may_end_in_any_order() -> None:
    first, second = intercept_sdpa(), intercept_sdpa(strict=True)
    one = first.__enter__()
    other = second.__enter__()
    first.__exit__(None, None, None)
    call_once()
    assert not torch.backends.mha.get_fastpath_enabled()
    with first as third:
        call_once()
        second.__exit__(None, None, None)
        call_once()
    assert (one.served, other.served, third.served) == (0, 1, 2)
    assert_nothing_is_left()


@pytest.mark.parametrize("shared", [False, True])
def test_tasks_have_contexts_of_their_own(shared: bool) -> None:
    """Tasks of one thread that take turns: each counts its own calls, and one without a context counts for nobody."""
    one, module_call = intercept_sdpa(), call_of_a_module()

    async def inside(calls: int) -> int:
        with one if shared else intercept_sdpa() as tally:
            for _ in range(calls):
                call_once()
                module_call()
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        call_once()
        return tally.served

    async def outside() -> None:
        for _ in range(9):
            call_once()
            await asyncio.sleep(0)

    async def started_inside(go: asyncio.Event) -> None:
        call_once()
        await go.wait()
        call_once()  # after the context that it began in

    async def all_of_them() -> None:
        assert await asyncio.gather(outside(), inside(2), inside(5), inside(3)) == [None, 4, 10, 6]
        go = asyncio.Event()
        with intercept_sdpa() as tally:
            task = asyncio.create_task(started_inside(go))
            await asyncio.sleep(0)
        with intercept_sdpa() as later:
            go.set()
            await task
        assert (tally.served, later.served) == (1, 0)

    asyncio.run(all_of_them())
    assert_nothing_is_left()


def test_a_context_may_end_in_another_task_or_thread() -> None:
    """As setup and teardown of a fixture may, or a generator that is closed elsewhere; nothing is served after it."""

    async def enter() -> None:
        context.__enter__()

    async def leave() -> None:
        context.__exit__(None, None, None)

    context = intercept_sdpa()
    asyncio.run(enter())
    asyncio.run(leave())
    assert_nothing_is_left()
    tally = context.__enter__()
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join(60)
    call_once()
    assert tally.served == 0 and torch.backends.mha.get_fastpath_enabled()
    with intercept_sdpa() as tally:
        call_once()
    assert tally.served == 1
    assert_nothing_is_left()


def test_threads_of_autograd_follow_the_caller() -> None:
    """They receive its modes, and nothing that belongs to its task."""
    with intercept_sdpa() as tally:
        (mode,) = torch.overrides._get_current_function_mode_stack()

        def backward() -> None:
            with mode:
                call_once()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join(60)
    assert tally.served == 1


def test_modes_of_others_see_what_they_saw() -> None:
    """A mode inside and one outside, and functions that torch hands over as a whole."""
    seen: list[tuple[str, Any]] = []

    class Watching(TorchFunctionMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (imported_earlier, F.multi_head_attention_forward):
                seen.append((self.name, func))
            return func(*args, **(kwargs or {}))

    module_call, x = call_of_a_module(), torch.randn(2, 4, 8)
    with Watching("outside"), intercept_sdpa() as tally, Watching("inside"):
        module_call()
        F.scaled_dot_product_attention(x, x, x)
    assert tally.passed_on == {"no mask": 1}
    assert ("inside", F.multi_head_attention_forward) in seen and ("inside", imported_earlier) in seen
    assert ("outside", imported_earlier) in seen
    assert_nothing_is_left()


@pytest.mark.parametrize("way", ["direct", "attention module"])
def test_other_threads_are_left_alone(way: str) -> None:
    """Two threads that overlap have a context each, and a third has none."""
    call = call_once if way == "direct" else call_of_a_module()
    meet = threading.Barrier(3, timeout=60)
    served_in: dict[str, int] = {}
    same: list[bool] = []

    def worker(name: str, calls: int) -> None:
        with intercept_sdpa() if name != "none" else contextlib.nullcontext() as tally:
            meet.wait()
            same.append(F.scaled_dot_product_attention is imported_earlier)
            for _ in range(calls):
                call()
            meet.wait()
        if tally is not None:
            served_in[name] = tally.served + tally.passed_on.total()

    threads = [threading.Thread(target=worker, args=options) for options in (("a", 3), ("b", 5), ("none", 7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert served_in == {"a": 3, "b": 5} and same == [True, True, True]
    assert_nothing_is_left()


def test_somebody_elses_patch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made before, it comes back; made inside, it is not removed."""
    theirs = lambda *args, **more: imported_earlier(*args, **more)
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with intercept_sdpa() as tally:
        call_once()
    assert F.scaled_dot_product_attention is theirs and tally.served == 1
    monkeypatch.setattr(F, "scaled_dot_product_attention", imported_earlier)
    with intercept_sdpa() as tally:
        F.scaled_dot_product_attention = theirs
        call_once()
    assert F.scaled_dot_product_attention is theirs and tally.served == 1


# Code that it reaches


class RelativeBias(nn.Module):
    """A window with a learned bias, as Swin and BEiT have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(16, 48), nn.Parameter(torch.randn(2 * 9 - 1, 2))
        self.register_buffer("index", torch.arange(9)[:, None] - torch.arange(9) + 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index].permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(x.shape)


PADDING = torch.zeros(3, 9, dtype=torch.bool)
PADDING[1, 6:] = True


def modules() -> dict[str, tuple[nn.Module, Callable[[Any, Tensor], Tensor]]]:
    """Modules of torch, and how they are called."""
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    padding = torch.zeros(PADDING.shape, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
    return {
        "relative bias": (RelativeBias(), lambda m, x: m(x)),
        "attention": (attention, lambda m, x: m(x, x, x, key_padding_mask=PADDING, need_weights=False)[0]),
        "encoder layer": (layer, lambda m, x: m(x, src_key_padding_mask=PADDING)),
        "causal layer": (layer, lambda m, x: m(x, causal, padding, is_causal=True)),
        "encoder": (nn.TransformerEncoder(layer, 2), lambda m, x: m(x, src_key_padding_mask=PADDING)),
    }


def outcome(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The result at tokens that are not padding, and the gradient of every weight."""
    module.zero_grad()
    out = call(x)[:, :9].masked_fill(PADDING[..., None], 0)
    if out.requires_grad:
        out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def test_functions_that_run_attention_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They see the names of their module as these are at each call."""
    made: list[object] = []
    monkeypatch.setattr(sdpa, "_unasked", made.append)
    module, call = modules()["attention"]
    x = torch.randn(3, 9, 16)
    with intercept_sdpa() as tally:
        for _ in range(2):
            call(module, x).sum().backward()
    assert tally.served == 2 and not made
    unasked = sdpa._UNASKED[F.multi_head_attention_forward]
    monkeypatch.setattr(F, "only_in_this_test", 3, raising=False)
    assert unasked.__globals__["only_in_this_test"] == 3
    assert not unasked.__globals__["has_torch_function"]()


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("name", modules())
def test_modules_of_torch(name: str, mode: str) -> None:
    """In evaluation without gradients too, where nn.TransformerEncoderLayer has a path that calls nothing."""
    module, call = modules()[name]
    module.double().train(mode == "train")
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    with torch.set_grad_enabled(mode != "no_grad"):
        wanted = outcome(module, lambda x: call(module, x), x)
        with intercept_sdpa() as tally:
            outcomes = outcome(module, lambda x: call(module, x), x)
    assert tally.served == (2 if name == "encoder" else 1) and not tally.passed_on
    assert len(outcomes) == (1 if mode == "no_grad" else 1 + len(list(module.parameters())))
    # Gradients of key biases are zero but for rounding.
    agree(outcomes, wanted, norm=max(float(y.norm()) for y in wanted))


BACKWARDS = ["Tensor.backward", "autograd.backward", "autograd.grad"]


# Torch refuses autograd.grad of reentrant checkpoints.
@pytest.mark.parametrize(
    ("way", "reentrant"), [*((way, False) for way in BACKWARDS), *((way, True) for way in BACKWARDS[:2])]
)
def test_checkpoints_recompute_with_it(way: str, reentrant: bool) -> None:
    """By whatever function the backward pass is called, and by whatever name attention is."""
    tensors = draw(SERVED["each score"], "float")
    wanted = run(tensors)[1:]
    with intercept_sdpa() as tally:
        loss = weighted(checkpoint(lambda *options: imported_earlier(*options), *tensors, use_reentrant=reentrant))
        outcomes: Any = None
        if way == "autograd.grad":
            outcomes = torch.autograd.grad(loss, tensors)
        else:
            loss.backward() if way == "Tensor.backward" else torch.autograd.backward(loss)
            outcomes = [x.grad for x in tensors]
    assert tally.served == 2
    agree(list(outcomes), wanted)


# torch.compile


class Compiled:
    """A backend of torch.compile that knows how many operators of this library each call runs."""

    def __init__(self) -> None:
        self.operators = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            return make_boxed_func(graph)

        return aot_autograd(fw_compiler=self._count, bw_compiler=compiler)(graph, inputs)

    def _count(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        ours = sum("flash_dmattn" in str(node.target) for node in graph.graph.nodes)

        def forward(*values: Any) -> Any:
            self.operators += ours
            return graph(*values)

        return make_boxed_func(forward)


@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("name", ["relative bias", "attention", "encoder layer"])
def test_compiled(name: str, mode: str) -> None:
    """Compiled outside and called inside, and the other way round: guards notice both."""
    module, call = modules()[name]
    module.double().train(mode == "train")
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    torch.compiler.reset()
    backend = Compiled()
    compiled = torch.compile(lambda x: call(module, x), backend=backend, fullgraph=True)
    with torch.set_grad_enabled(mode != "no_grad"):
        wanted = outcome(module, lambda x: call(module, x), x)
        largest = max(float(y.norm()) for y in wanted)
        for inside in (False, True, False, True):
            backend.operators = 0
            with intercept_sdpa() if inside else contextlib.nullcontext() as tally:
                outcomes = outcome(module, compiled, x)
            assert backend.operators == (1 if inside else 0)
            assert tally is None or tally.served == 0  # a graph counts nothing
            agree(outcomes, wanted, norm=largest)


@pytest.mark.parametrize(("name", "backend"), [("call", "aot"), ("module", "aot"), ("module", "eager")])
def test_calls_of_torch_in_graphs(name: str, backend: str) -> None:
    """Calls without a mask stay torch's in a graph, and it counts nothing, also where a module's runs node by node."""
    x = torch.randn(2, 4, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "call": lambda: F.scaled_dot_product_attention(x, x, x) + 1,
        "module": lambda: attention(x, x, x, need_weights=False)[0],
    }
    torch.compiler.reset()
    counting = Compiled()
    compiled = torch.compile(calls[name], backend=counting if backend == "aot" else backend, fullgraph=True)
    wanted = compiled()
    with intercept_sdpa() as tally:
        results = compiled(), compiled()
    assert tally.served == 0 and not tally.passed_on and counting.operators == 0
    assert all(torch.equal(result, wanted) for result in results)


def test_a_call_may_be_passed_on_first_while_compiling() -> None:
    """In a thread that has passed on no call yet, as in a new process."""
    x, results = torch.randn(2, 4, 8), []

    def call() -> None:
        torch.compiler.reset()
        compiled = torch.compile(lambda: F.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True)
        results.append(compiled())
        with intercept_sdpa():
            results.append(compiled())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert len(results) == 2 and torch.equal(*results)
