"""The host's way to a Triton kernel: what plans are found by, and how a compiled kernel is called; none is compiled."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.triton import backend
from flash_dmattn.remembered import Remembered

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


class Compiled:
    """As Triton's compiled kernel is called: by itself, or `[grid]` for all that Triton does beside."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self) -> None:
        self.by_address: list[tuple[Any, ...]] = []
        self.by_triton: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.by_address.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.by_triton.append((grid, *arguments))


class Kernel:
    """A kernel that is compiled at its first launch."""

    def __init__(self) -> None:
        self.compiled, self.compilations = Compiled(), 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def first_launch(*arguments: Any, **options: int) -> Compiled:
            self.compilations += 1
            return self.compiled

        return first_launch


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices whose stream was asked for; the stream is 7."""
    from flash_dmattn.triton_kernels import kernel_launch

    devices: list[int] = []
    active = SimpleNamespace(
        get_current_device=lambda: 3, get_current_stream=lambda device: devices.append(device) or 7
    )
    monkeypatch.setattr(kernel_launch, "driver", SimpleNamespace(active=active))
    return devices


def test_from_the_second_launch_on_the_kernel_gets_addresses(streams: list[int]) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    kernel = Kernel()
    launch = Launch(kernel, 5, ((1, 2), 0.5), (64, True), {"num_warps": 4})
    x, y = torch.zeros(4), torch.zeros(4)
    for _ in range(3):
        launch(x, None, y)
    hooks = (None, None, None)
    call = (5, 1, 1, 7, 11, (4, 1, 0), *hooks, x.data_ptr(), None, y.data_ptr(), (1, 2), 0.5, 64, True)
    assert kernel.compilations == 1
    assert kernel.compiled.by_address == [call] * 2
    assert kernel.compiled.by_triton == []
    assert streams == [3, 3]
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("plain", [False, True])
def test_hooks_are_called_by_triton(
    name: str, plain: bool, streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    from flash_dmattn.triton_kernels.kernel_launch import Launch

    def hook(metadata: object) -> None: ...

    kernel, x = Kernel(), torch.zeros(4)
    launch = Launch(kernel, 5, (1,), (64,))
    launch(x)
    chain = getattr(knobs.runtime, name)
    if plain:
        monkeypatch.setattr(knobs.runtime, name, hook)
    else:
        chain.add(hook)
    launch(x)
    if plain:
        monkeypatch.setattr(knobs.runtime, name, None)
    else:
        chain.remove(hook)
    launch(x)
    assert kernel.compiled.by_triton == [((5, 1, 1), x, 1, 64)]
    assert len(kernel.compiled.by_address) == 1


@pytest.mark.parametrize(
    ("version", "status", "may"), [(12020, 0, False), (12030, 0, True), (13000, 1, False), (0, None, True)]
)
def test_launches_overlap_where_graphs_of_the_driver_can_hold_them(
    version: int, status: int | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_dmattn.triton_kernels import kernel_launch

    class Driver:
        def __init__(self, name: str) -> None:
            if status is None:
                raise OSError(f"there is no {name}")

        def cuDriverGetVersion(self, place: Any) -> int | None:
            place._obj.value = version
            return status

    monkeypatch.setattr(kernel_launch.ctypes, "CDLL", Driver)
    assert kernel_launch.driver_overlaps.__wrapped__() is may


def test_descriptors_are_made_by_triton(streams: list[int]) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Descriptor, Launch

    kernel, x = Kernel(), torch.zeros(16, 16)
    launch = Launch(kernel, 5, (), (), None, [Descriptor(0, [16, 16], [16, 1], [16, 16])])
    launch(x)
    launch(x)
    ((_, descriptor),) = kernel.compiled.by_triton
    assert descriptor.base is x
    assert kernel.compiled.by_address == []


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Remembered[Any]:
    """The plans of calls on CPU tensors, whose kernels do nothing."""
    from flash_dmattn.triton_kernels import kernel_launch, launch

    monkeypatch.setattr(backend, "RULES", tuple(rule for rule in backend.RULES if rule.code != "device"))
    monkeypatch.setattr(kernel_launch.Launch, "__call__", lambda *_: None)
    monkeypatch.setattr(launch, "plans", Remembered(4096))
    return launch.plans


def attend(q: Tensor, k: Tensor | None = None, bias: Tensor | None = None, **flags: Any) -> Any:
    k = q if k is None else k
    return flash_dmattn.attention(q, k, k, None, bias, backend="triton", **flags)


def shifted(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that starts on 4 bytes (2 in 16 bits) beyond a multiple of 16."""
    return torch.randn(torch.Size(shape).numel() + 1).to(dtype)[1:].view(shape)


SHAPE = (1, 16, 2, 16)
CHANGES: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "length": lambda: ((torch.randn(1, 17, 2, 16),), {}),
    "strides": lambda: ((torch.randn(1, 16, 2, 32)[..., :16],), {}),
    "place of q": lambda: ((shifted(SHAPE), torch.randn(SHAPE)), {}),
    "place of k": lambda: ((torch.randn(SHAPE), shifted(SHAPE)), {}),
    "dtype": lambda: ((torch.randn(SHAPE).half(),), {}),
    "bias": lambda: ((torch.randn(SHAPE),), {"bias": torch.randn(16, 16)}),
    "softcap": lambda: ((torch.randn(SHAPE),), {"softcap": 2.0}),
    "window_size": lambda: ((torch.randn(SHAPE),), {"window_size": (2, 2)}),
    "softmax_scale": lambda: ((torch.randn(SHAPE),), {"softmax_scale": -1.0}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_call_makes_another_plan(change: str, plans: Remembered[Any]) -> None:
    for _ in range(2):
        attend(torch.randn(SHAPE))
    assert len(plans) == 1
    tensors, flags = CHANGES[change]()
    for _ in range(2):
        attend(*tensors, **flags)
    assert len(plans) == 2


def test_the_place_of_a_bias_makes_another_plan(plans: Remembered[Any]) -> None:
    for bias in (torch.randn(16, 16), torch.randn(16, 16), shifted((16, 16)), torch.randn(1, 16)):
        attend(torch.randn(SHAPE), bias=bias)
    assert len(plans) == 3


def test_only_fp32_asks_whether_tf32_is_allowed(plans: Remembered[Any]) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for dtype, made in ((torch.bfloat16, 1), (torch.float32, 3)):
            for precision in ("ieee", "tf32"):
                torch.backends.cuda.matmul.fp32_precision = precision
                attend(torch.randn(SHAPE).to(dtype))
            assert len(plans) == made
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_plan_without_a_mask_is_also_found_for_a_problem_that_only_equals(plans: Remembered[Any]) -> None:
    for _ in range(2):
        flash_dmattn.dispatch.call_cache.forget()
        attend(torch.randn(SHAPE))
    assert len(plans) == 1


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [((0, 4, 2, 16), (0, 4, 2, 16)), ((1, 0, 2, 16), (1, 4, 2, 16)), ((1, 4, 2, 16), (1, 0, 2, 16))],
)
def test_an_empty_call_plans_nothing(q_shape: tuple[int, ...], k_shape: tuple[int, ...], plans: Remembered[Any]) -> None:
    out, lse = attend(torch.randn(q_shape), torch.randn(k_shape), return_lse=True)
    assert out.shape == q_shape and bool((out == 0).all())
    assert lse.shape == (q_shape[0], 2, q_shape[1]) and bool((lse == -torch.inf).all())
    assert not plans


def test_rows_of_another_stride_are_copied_and_groups_are_rows(plans: Remembered[Any]) -> None:
    from flash_dmattn.triton_kernels.launch import GROUP_ROWS_FROM

    attend(torch.randn(1, 16, 16, 2).transpose(2, 3))  # the plan of the copies
    assert len(plans) == 1
    attend(torch.randn(1, 1, 4, 16), torch.randn(1, GROUP_ROWS_FROM, 2, 16))
    assert len(plans) == 2


def test_the_heads_of_a_group_are_written_to_out_itself(plans: Remembered[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dmattn.triton_kernels import kernel_launch

    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernel_launch.Launch, "__call__", lambda _, *tensors: given.append(tensors))
    for dtype, mask in product((torch.float32, torch.float16), (None, torch.ones(2, 1, 1, 600, dtype=torch.bool))):
        given.clear()
        q, k = torch.randn(2, 1, 4, 16).to(dtype), torch.randn(2, 600, 2, 16).to(dtype)
        out = flash_dmattn.attention(q, k, k, mask, backend="triton")
        ((*_, written, _, _, _, _, _),) = given  # one launch, and no copy behind it
        assert written is out


def test_what_an_operator_or_the_way_without_it_makes_is_alike(plans: Remembered[Any]) -> None:
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    q, k = torch.randn(2, 5, 4, 16).half(), torch.randn(2, 7, 2, 16).half()
    plain = attend(q, k, return_lse=True)
    with Watch():
        watched = attend(q, k, return_lse=True)
    for x, y in zip(plain, watched, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
