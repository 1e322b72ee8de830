"""Plans: calls that are alike share one, and whatever watches a call sees the passes that run without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import Results, run
from cases import DEVICE, Case, Inputs
from conftest import Runner
from dispatched import Dispatched
from out_of_tree import replace_backend
from ready_backend import Ready, ready_pair
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import flash_dmattn
from flash_dmattn.backends.cuda import backend as cuda
from flash_dmattn.backends.cuda import passes
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.cuda.operands import Kernels
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch import registry
from flash_dmattn.masks import PreparedMask

BASE = Case(batch=2, seqlen_q=70, seqlen_k=90, head_dim=64, dtype=torch.bfloat16)
CASES = {
    "plain": BASE,
    "causal": BASE.with_(is_causal=True, seqlen_k=70),
    "window, scale, softcap": BASE.with_(window_size=(20, 3), softmax_scale=0.3, softcap=2.0),
    "lse": BASE.with_(dlse=True),
    "mask": BASE.with_(mask=("1", "1", "Lq", "Lk"), mask_kind="empty_rows"),
    "mask of each head": BASE.with_(mask=("B", "Hq", "Lq", "Lk")),
    "padding": BASE.with_(mask=("B", "1", "1", "Lk")),
    "padding with a bias": BASE.with_(mask=("B", "1", "1", "Lk"), bias=("1", "Hq", "Lq", "Lk"), seqlen_k=96),
    "bias": BASE.with_(bias=("1", "Hq", "Lq", "Lk"), seqlen_k=96),
    "bias in fp32": BASE.with_(bias=("B", "Hq", "Lq", "Lk"), seqlen_k=96, bias_dtype=torch.float32),
    "bias of any rows": BASE.with_(bias=("1", "1", "Lq", "Lk"), batch=8),
    "bias of keys": BASE.with_(bias=("B", "Hk", "1", "Lk")),
    "bias of queries": BASE.with_(bias=("1", "Hq", "Lq", "1")),
    "sink": BASE.with_(sink="normal", needs_grad=("q", "k", "v", "sink")),
    "dropout": BASE.with_(dropout_p=0.3, num_heads_k=4),
    "few keys": BASE.with_(seqlen_q=20, seqlen_k=40, num_heads_k=4),
    "one query": BASE.with_(seqlen_q=1, seqlen_k=600),
    "one query behind a window": BASE.with_(seqlen_q=1, seqlen_k=600, window_size=(200, 0), softcap=2.0),
    "one query with a bias": BASE.with_(seqlen_q=1, seqlen_k=600, bias=("B", "Hq", "1", "Lk")),
    "one query of heads that share all keys": BASE.with_(seqlen_q=1, seqlen_k=600, num_heads_k=1, needs_grad=()),
    "no key": BASE.with_(seqlen_k=0),
    "no gradient": BASE.with_(mask=("1", "1", "Lq", "Lk"), needs_grad=()),
    **{f"gradients of {names}": BASE.with_(needs_grad=names) for names in (("q",), ("k",), ("v",), ("k", "v"))},
    "gradient of the bias": BASE.with_(bias=("1", "Hq", "Lq", "Lk"), seqlen_k=96, needs_grad=("bias",)),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "with another": lambda x: torch.cat([x, x], -1)[..., : x.shape[3]],
    "shifted": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "column by column": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


def assert_same(one: Results, other: Results) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        y = other[name]
        assert (x is None) == (y is None), name
        if x is not None and y is not None:
            assert torch.equal(x, y) and x.stride() == y.stride(), name


def both_ways(attention: Callable[..., Any], case: Case, inputs: Inputs) -> tuple[Results, Results]:
    """The results of a call that nothing watches, the second of its class, and of one that is watched."""
    run(attention, case, inputs)
    plain = run(attention, case, inputs)
    with Dispatched() as watch:
        watched = run(attention, case, inputs)
    assert "attention_forward" in watch.names
    assert ("attention_backward" in watch.names) == bool(case.needs_grad)
    return plain, watched


@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same_bits(backend: Runner, name: str) -> None:
    if backend.name == "flex":
        pytest.skip("flex is one differentiable function, without passes")
    case = CASES[name]
    if case.sink is None and "sink" not in case.needs_grad and case.bias is None:
        case = case.with_(needs_grad=tuple(x for x in case.needs_grad if x != "bias"))
    inputs = case.build()
    refusal = backend.refusal(case, inputs)
    if refusal is not None:
        pytest.skip(refusal)
    choice = backend.choice(case, inputs, deterministic=True)
    attention = partial(flash_dmattn.attention, return_lse=True, backend=choice, deterministic=True)
    assert_same(*both_ways(attention, case, inputs))


Launched = list[tuple[Any, ...]]


def seen_of(x: Any) -> Any:
    """Return what a kernel can see of an argument, but for values and addresses."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.data_ptr() % 16
    return tuple(map(seen_of, x)) if isinstance(x, (list, tuple)) else x


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Record what kernels of cuda and triton are launched with, on CPU tensors; they compute nothing."""
    if DEVICE == "cuda":
        pytest.skip("a GPU runs the kernels themselves")
    pytest.importorskip("triton")
    from flash_dmattn.triton_kernels import kernel_launch

    calls: Launched = []
    table = registry.BACKENDS.table
    monkeypatch.setattr(registry.BACKENDS, "table", table)  # for it to be put back
    for name in ("cuda", "triton"):
        replace_backend(name, rules=tuple(rule for rule in table[name].rules if rule.code != "device"))
    monkeypatch.setattr(cuda.probe, "found", Availability(True))
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)

    def stand_in(name: str) -> Callable[..., None]:
        return lambda *arguments: calls.append((name, *map(seen_of, arguments)))

    def gather(k: Tensor, v: Tensor, bias: Tensor | None, *_: Tensor) -> tuple[Tensor, ...]:
        return k.contiguous(), v.contiguous(), *(() if bias is None else (bias.float(),))

    bits = lambda bounds, n: torch.zeros(*bounds.shape[:2], n, bounds.shape[2] // 32, dtype=torch.int32)
    kernels = Kernels(stand_in("forward"), stand_in("backward"), gather, bits)
    monkeypatch.setattr(passes, "kernels", lambda: kernels)

    def launch(self: Any, *tensors: Tensor | None) -> None:
        calls.append((self.kernel, self.grid, self.rest, tuple(self.options.items()), *map(seen_of, tensors)))

    monkeypatch.setattr(kernel_launch.Launch, "__call__", launch)
    return calls


@pytest.mark.parametrize(
    ("choice", "layout"),
    [
        *itertools.product(("cuda", "triton"), LAYOUTS),
        *((pair, layout) for pair, layout in zip((("cuda", "triton"), ("triton", "cuda")), LAYOUTS)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_launched_alike(choice: Any, name: str, layout: str, launched: Launched) -> None:
    """Every class of calls and every layout, only on the host: the same launches of the same arguments, in order."""
    case = CASES[name]
    arrange = LAYOUTS[layout]
    inputs = case.build("cpu")
    inputs = replace(inputs, q=arrange(inputs.q), k=arrange(inputs.k), v=arrange(inputs.v), dout=arrange(inputs.dout))
    for prepares in (False, True) if inputs.mask is not None else (False,):
        actual = (
            replace(inputs, mask=PreparedMask.from_mask(inputs.mask, seqlen_q=case.seqlen_q)) if prepares else inputs
        )
        attention = partial(flash_dmattn.attention, return_lse=True, backend=choice, deterministic=True)
        try:
            run(attention, case, actual)
        except flash_dmattn.BackendUnsupportedError as refusal:
            pytest.skip(str(refusal.reasons[0]))
        launched.clear()
        run(attention, case, actual)
        plain = launched.copy()
        launched.clear()
        with Dispatched():
            run(attention, case, actual)
        assert plain == launched
        assert plain or name == "no key"
        launched.clear()


@pytest.fixture
def ready() -> Iterator[Ready]:
    with ready_pair() as pair:
        yield pair


SHAPES = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)


def leaves() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for shape in SHAPES)


MASK = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.3


def attend(q: Tensor, k: Tensor, v: Tensor, backend: str = "ready") -> Tensor:
    out = flash_dmattn.attention(q, k, v, MASK, backend=backend)
    assert isinstance(out, Tensor)
    return out


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


WANTED = gradients(partial(attend, backend="eager"), *leaves())


def check_gradients(actual: list[Tensor]) -> None:
    torch.testing.assert_close(actual, WANTED)


def test_a_call_that_nothing_watches_calls_no_operator(ready: Ready) -> None:
    for _ in range(3):
        check_gradients(gradients(attend, *leaves()))
    with torch.no_grad():
        torch.testing.assert_close(attend(*leaves()), WANTED[0])
    assert ready.ways == ["forward", "backward"] * 3 + ["forward"] and not ready.shown


def profiled() -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def test_fake_and_meta_tensors_run_nothing(ready: Ready) -> None:
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x).requires_grad_() for x in leaves()]
        out = flash_dmattn.attention(*fake, backend="ready")
        assert isinstance(out, Tensor)
        assert [x.shape for x in torch.autograd.grad(out.sum(), fake)] == list(map(torch.Size, SHAPES))
    meta = [torch.empty(shape, device="meta", requires_grad=True) for shape in SHAPES]
    for _ in range(2):
        out = flash_dmattn.attention(*meta, backend="ready")
        assert isinstance(out, Tensor)
        out.sum().backward()
    assert ready.ways == []


class Wrapped(Tensor):
    """A subclass without a rule of its own."""


WATCHES: dict[str, Callable[[], Any]] = {
    "profiler": profiled,
    "record": lambda: flash_dmattn.config(record=[]),
    "hooks on saved tensors": lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()),
    "count of FLOPs": lambda: FlopCounterMode(display=False),
    "dispatch mode": Dispatched,
}


@pytest.mark.parametrize("watched", ["both passes", "the backward pass"])
@pytest.mark.parametrize("watch", [*WATCHES, "subclass", "list for a tuple"])
def test_watching_changes_nothing(watch: str, watched: str, ready: Ready) -> None:
    """The same passes, planned for the same problems, and equal bits."""

    def results(around: Callable[[], Any], window: Any, inputs: list[Tensor]) -> list[Tensor]:
        with around() if watched == "both passes" else nullcontext():
            out = flash_dmattn.attention(*inputs, MASK, backend="ready", window_size=window)
        assert isinstance(out, Tensor)
        loss = out.square().sum()
        with around():
            actual = torch.autograd.grad(loss, inputs)
        return [x.detach().as_subclass(Tensor) for x in (out, *actual)]

    plain = results(nullcontext, (4, 2), list(leaves()))
    runs = ready.runs.copy()
    assert ready.ways == ["forward", "backward"]
    ready.clear()
    inputs = [x.detach().as_subclass(Wrapped).requires_grad_() for x in leaves()] if watch == "subclass" else leaves()
    window: Any = [4, 2] if watch == "list for a tuple" else (4, 2)
    got = results(WATCHES.get(watch, nullcontext), window, list(inputs))
    assert all(torch.equal(x, y) for x, y in zip(got, plain, strict=True))
    assert ready.runs == runs
    if watch in ("record", "hooks on saved tensors", "list for a tuple"):
        assert ready.shown == []
    else:  # a subclass goes through both passes
        both = watched == "both passes" or watch == "subclass"
        assert ready.shown == (["forward", "backward"] if both else ["backward"])


def test_a_parameter_is_no_subclass(ready: Ready) -> None:
    check_gradients(gradients(attend, *map(torch.nn.Parameter, leaves())))
    assert ready.ways == ["forward", "backward"]


def test_transforms_and_compilers_run_the_same_passes() -> None:
    with ready_pair(listens=False) as ready:
        gradients(attend, *leaves())
        ready.clear()
        inputs = [x.detach() for x in leaves()]
        actual = torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=(0, 1, 2))(*inputs)
        check_gradients([WANTED[0], *actual])
        mapped = torch.func.vmap(attend)(*(torch.stack([x, x]) for x in inputs))
        torch.testing.assert_close(mapped[1], WANTED[0])
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        check_gradients(gradients(compiled, *leaves()))
        both = ["forward", "backward"]
        assert ready.ways == [*both, "forward", *both]


def relaid(x: Tensor) -> Tensor:
    """The same values, in twice the room."""
    room = torch.empty_strided(x.shape, [2 * stride for stride in x.stride()], dtype=x.dtype)
    return room.copy_(x)


SAVED = ("q", "k", "v", "bias", "sink", "out", "lse", "mask")


@pytest.mark.parametrize("name", [name for name in SAVED if name != "sink"])  # passes copy it
def test_each_saved_tensor_alone_may_come_back_in_another_layout(name: str, ready: Ready) -> None:
    """Hooks that keep tensors elsewhere bring copies back, and a pass goes by the strides that it was made for."""
    q, k, v = leaves()
    bias = torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(2), requires_grad=True)
    names = iter(name for name in SAVED if name != "sink")

    def unpack(x: Tensor) -> Tensor:
        return relaid(x) if next(names) == name else x

    def call(backend: str) -> list[Tensor]:
        out = flash_dmattn.attention(q, k, v, MASK, bias, backend=backend)
        assert isinstance(out, Tensor)
        return list(torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out)))

    wanted = call("eager")
    with saved_tensors_hooks(lambda x: x, unpack):
        got = call("ready")
    torch.testing.assert_close(got, wanted)
    assert next(names, None) is None
    assert ready.ways == ["forward", "backward"] and not ready.shown  # which looks where tensors lie


@pytest.mark.parametrize("function", ["ready", "watched"])
def test_a_tensor_that_was_written_to_is_named_as_ever(function: str, ready: Ready) -> None:
    q, k, v = leaves()
    with Dispatched() if function == "watched" else nullcontext():
        out = attend(q, k, v)
    loss = out.square().sum()
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*output 0 of Attention(Backward)?,"):
        loss.backward()


def test_a_mask_that_was_written_to_is_noticed(ready: Ready) -> None:
    mask = MASK.clone()
    out = flash_dmattn.attention(*leaves(), mask, backend="ready")
    assert isinstance(out, Tensor)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_calls_of_several_choices_share_a_class(ready: Ready) -> None:
    """The choice of the call is what `torch.vmap` of its gradients chooses by."""
    with flash_dmattn.config(backend="ready"):
        for choice in ("auto", "ready"):
            check_gradients(gradients(partial(attend, backend=choice), *leaves()))
    assert ready.ways == ["forward", "backward"] * 2


def test_a_fake_gradient_is_not_taken_for_a_plain_one(ready: Ready) -> None:
    inputs = leaves()
    out = attend(*inputs)
    actual = torch.autograd.grad(out, inputs, (2 * out.detach()).as_subclass(Wrapped))
    torch.testing.assert_close([x.as_subclass(Tensor) for x in actual], WANTED[1:])
    assert ready.ways == ["forward", "backward"] and ready.shown == ["backward"]


@pytest.mark.parametrize("choice", ["cuda", "triton"])
def test_gradients_of_any_layout_that_arrive_in_calls_of_one_class(choice: str, launched: Launched) -> None:
    case = CASES["lse"]
    inputs = case.build("cpu")
    attention = partial(flash_dmattn.attention, return_lse=True, backend=choice)
    run(attention, case, inputs)
    for arrange, arrange_lse in itertools.product(LAYOUTS.values(), (Tensor.clone, lambda x: x.mT.contiguous().mT)):
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        launches = []
        for forget in (lambda: None, registry.choices_changed):  # with the plans of the layouts before it, and without
            forget()
            launched.clear()
            results = attention(*leaves)
            torch.autograd.grad(results, leaves, (arrange(inputs.dout), arrange_lse(torch.ones_like(results[1]))))
            launches.append(launched.copy())
        assert launches[0] == launches[1]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_sequences_go_both_ways_alike(dropout_p: float) -> None:
    """Their tensors come after the mask among the saved ones."""
    q, k, v = (torch.randn(12, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    limits = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    mask = torch.rand(1, 12, 7, generator=torch.Generator().manual_seed(3)) > 0.3

    def results() -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(0)
        sequences = flash_dmattn.Sequences.packed(limits, max_seqlen_q=7, max_seqlen_k=7)
        out = flash_dmattn.attention(*inputs, mask, sequences=sequences, dropout_p=dropout_p, backend="eager")
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    results()
    plain = results()
    with Dispatched() as watch:
        watched = results()
    assert watch.names[-2:] == ["attention_forward", "attention_backward"]
    assert all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))
