"""Layers of models hand over (B, H, L, D): one step of the graph, the results of `attention`, and the same launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from cases import DEVICE
from dispatched import Dispatched
from ready_backend import Ready, ready_pair
from test_plans import Launched, launched, profiled
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn import autograd
from flash_dmattn import call as calls
from flash_dmattn.call import prepare_call, run_call
from flash_dmattn.masks import PreparedMask
from flash_dmattn.problem import RawFlags

__all__ = ["launched"]  # a fixture

NAMES = ("mask", "bias", "is_causal", "softmax_scale", "softcap", "window_size", "sink", "dropout_p")
DEFAULTS: dict[str, Any] = dict(zip(NAMES, (None, None, False, None, 0.0, None, None, 0.0), strict=True))
SHAPES = (2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 16)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that depend only on the shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


MASK = drawn(2, 1, 9, 11) > -0.5
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bias": {"bias": drawn(1, 4, 9, 11)},
    "bias of each entry": {"bias": drawn(2, 4, 9, 11)},
    "bias of keys": {"bias": drawn(2, 2, 1, 11)},
    "bool mask": {"mask": MASK},
    "prepared mask": {"mask": PreparedMask.from_mask(MASK)},
    "numbers": {"softmax_scale": 0.3, "softcap": 2.0, "window_size": (3, 2)},
    "sink": {"sink": drawn(4)},
    "dropout": {"dropout_p": 0.3},
    "all": {"mask": MASK, "bias": drawn(2, 4, 1, 11), "sink": drawn(4), "is_causal": True, "softcap": 3.0},
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads first": lambda x: x,
    "one projection": lambda x: torch.cat([x, x], -1)[..., : x.shape[3]],
}


def leaves(call: dict[str, Any], arrange: Callable[[Tensor], Tensor] = LAYOUTS["rows first"]) -> dict[str, Any]:
    """q, k, v and the arguments of a call; floats need gradients."""
    inputs = {name: arrange(drawn(*shape)) for name, shape in zip("qkv", SHAPES, strict=True)} | DEFAULTS | call
    copied = {
        name: x.detach().clone() if name in ("bias", "sink") and x is not None else x for name, x in inputs.items()
    }
    return {
        name: x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in copied.items()
    }


def ours(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sink: Any, **numbers: Any) -> Tensor:
    """As a layer calls it."""
    return run_call(prepare_call(q, k, v, mask, bias, sink, None, RawFlags(**numbers), heads_first=True), "auto")[0]


def by_attention(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    """As a user calls it."""
    out = flash_dmattn.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **call)
    assert isinstance(out, Tensor)
    return out


def results(function: Callable[..., Tensor], arguments: dict[str, Any]) -> list[Tensor]:
    """out, and the gradient of every argument that has one."""
    torch.manual_seed(0)
    out = function(**arguments)
    inputs = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, inputs, drawn(*out.shape, dtype=out.dtype))]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for x, y in zip(one, other, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_attention(name: str, layout: str) -> None:
    wanted = results(by_attention, leaves(CALLS[name], LAYOUTS[layout]))
    for _ in range(2):
        inputs = leaves(CALLS[name], LAYOUTS[layout])
        actual = results(ours, inputs)
        assert_same(actual, wanted)
        assert actual[0].is_contiguous() and [x.shape for x in actual[1:4]] == list(map(torch.Size, SHAPES))
        with torch.no_grad():
            torch.manual_seed(0)
            assert torch.equal(ours(**inputs), wanted[0])


def test_a_call_is_one_step_of_the_graph() -> None:
    inputs = leaves(CALLS["bias"])
    out = ours(**inputs)
    assert out.grad_fn is not None
    before = [step for step, _ in out.grad_fn.next_functions if step is not None]
    assert [step.variable for step in before] == [inputs[name] for name in ("q", "k", "v", "bias")]  # type: ignore[attr-defined]


# Rows of one window, as Swin has them: a bias that all windows share, or one with the mask of a shift in it.
WINDOWS = 4


@pytest.mark.parametrize(("choice", "width"), [("triton", 49), ("cuda", 48)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_launch_what_attention_launches(layout: str, choice: str, width: int, launched: Launched) -> None:
    """The same kernels of the same arguments, with what lies in memory the same, whatever the order of its dims."""
    arrange, bf16 = LAYOUTS[layout], torch.bfloat16
    q, k, v = (arrange(drawn(WINDOWS, 3, width, 32, dtype=bf16)).detach().requires_grad_() for _ in range(3))
    for entries in (1, WINDOWS):
        bias = drawn(entries, 3, width, width, dtype=bf16).requires_grad_()
        call = DEFAULTS | {"q": q, "k": k, "v": v, "bias": bias, "softmax_scale": 0.2}
        launches = []
        with flash_dmattn.config(backend=choice):
            for function in (by_attention, ours, ours):
                launched.clear()
                results(function, call)
                launches.append([(*one[:4], *map(rows, one[4:])) for one in launched])
        assert len(launches[0]) == 2
        assert launches[0] == launches[1] == launches[2]


def rows(x: Any) -> Any:
    """Sizes and strides of a tensor as they lie in memory, whatever the order of its dims."""
    if not isinstance(x, tuple) or not x or not isinstance(x[0], torch.Size):
        return x
    size, stride, dtype, place = x
    return sorted(zip(size, stride, strict=True)), dtype, place


def test_layers_of_swin_launch_their_kernels_and_nothing_else(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a model: each layer goes the short way in both passes, with a class and plans that are found."""
    pytest.importorskip("transformers", exc_type=ImportError)
    from transformers_models import FAMILIES, inputs, lacks_interface, make, step

    from flash_dmattn.integrations.transformers import attention_function, register
    from flash_dmattn.triton_kernels import launch
    from flash_dmattn.triton_kernels.short_backward import short_backward_kernel
    from flash_dmattn.triton_kernels.short_forward import short_forward_kernel
    from flash_dmattn.triton_kernels.sum_slots import sum_slots_kernel

    reason = lacks_interface("swin")
    if reason is not None:
        pytest.skip(reason)
    name, model = register(), make("swin", torch.bfloat16).train()
    tensors = inputs(model, "image")
    tensors["pixel_values"] = tensors["pixel_values"].bfloat16()

    def refuse(*arguments: Any, **others: Any) -> Any:
        raise AssertionError("the long way")

    with flash_dmattn.config(backend="triton"):
        step(model, tensors, name)
        launched.clear()
        for module, function in (
            *((attention_function, "attention"), (calls, "describe"), (autograd, "with_strides")),
            *((launch, "forward_plan"), (launch, "backward_plan")),
        ):
            monkeypatch.setattr(module, function, refuse)
        step(model, tensors, name)
    kernels = [one[0] for one in launched if one[0] is not sum_slots_kernel]
    assert kernels == [short_forward_kernel] * FAMILIES["swin"].calls + [short_backward_kernel] * FAMILIES["swin"].calls


@pytest.fixture
def ready() -> Iterator[Ready]:
    with ready_pair() as pair, flash_dmattn.config(backend="ready"):
        yield pair


WANTED = results(by_attention, leaves({}))


def check(actual: list[Tensor]) -> None:
    torch.testing.assert_close(actual, WANTED)


def recorded() -> AbstractContextManager[Any]:
    return flash_dmattn.config(record=[])


@pytest.mark.parametrize("watch", [Dispatched, profiled, recorded, nullcontext], ids=lambda watch: watch.__name__)
def test_a_layer_that_is_checkpointed_saves_the_same_twice(watch: Callable[[], Any], ready: Ready) -> None:
    """torch compares what both runs save; here the first is watched and the second is not."""
    calls.plans.clear()
    inputs = leaves({})
    tensors = [inputs[name] for name in "qkv"]
    with watch():
        out = checkpoint(lambda q, k, v: ours(q, k, v, **DEFAULTS), *tensors, use_reentrant=False)
    check([out.detach(), *torch.autograd.grad(out, tensors, drawn(*out.shape))])


class Wrapped(Tensor):
    """A subclass without a rule of its own."""


def test_transforms_subclasses_and_tangents() -> None:
    q, k, v = (leaves({})[name].detach() for name in "qkv")

    def attend(x: Tensor) -> Tensor:
        return ours(x, k, v, **DEFAULTS)

    wanted = WANTED[0]
    torch.testing.assert_close(torch.func.vmap(attend)(torch.stack([q, q]))[1], wanted)
    torch.testing.assert_close(torch.func.grad(lambda x: (attend(x) * drawn(*wanted.shape)).sum())(q), WANTED[1])
    torch.testing.assert_close(attend(q.as_subclass(Wrapped)).as_subclass(Tensor), wanted)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), wanted)
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(attend(q), wanted)
        dual = torch.autograd.forward_ad.make_dual(q, q)
        tangent = torch.autograd.forward_ad.unpack_dual(attend(dual)).tangent
    _, expected = torch.func.jvp(lambda x: by_attention(x, k, v, **DEFAULTS, backend="reference"), (q,), (q,))
    torch.testing.assert_close(tangent, expected)
