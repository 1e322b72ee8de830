"""The host's way to a Triton kernel: what plans are found by, and how a compiled kernel is called; none is compiled."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_triton
from key_parts import check_covered, check_told_apart
from out_of_tree import replaced, rules_without
from torch import Tensor

import flash_dmattn
from flash_dmattn.caches import ClockCache
from flash_dmattn.problem import Flags, MaskView, NeedsGrad, SequenceSpec, SequenceView
from flash_dmattn.problem.inputs import Inputs, Saved
from flash_dmattn.reference.entropy import SentEntropy

pytestmark = needs_triton


class Compiled:
    """As Triton's compiled kernel is called: by itself, or `[grid]` for all else that Triton does."""

    function, packed_metadata = 11, (4, 1, 0)
    metadata = SimpleNamespace(num_warps=4, num_ctas=1, shared=1000)
    src = SimpleNamespace(
        signature={
            **{"x": "*fp32", "absent": "constexpr", "y": "*bf16", "sizes": ("i32", "constexpr", ("i64", "i1"))},
            **{"scale": "fp32", "BLOCK": "constexpr"},
        }
    )

    def __init__(self) -> None:
        self.by_address: list[tuple[Any, ...]] = []
        self.by_triton: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.by_address.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.by_triton.append((grid, *arguments))


class Kernel:
    """A kernel that is compiled at its first launch."""

    do_not_specialize = ()
    arg_names = ("x", "absent", "y", "sizes", "scale", "BLOCK")

    def __init__(self) -> None:
        self.compiled, self.compilations = Compiled(), 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def first_launch(*arguments: Any, **options: int) -> Compiled:
            self.compilations += 1
            return self.compiled

        return first_launch


@pytest.fixture
def vendor() -> str:
    """The vendor of the GPU, by the name of Triton's backend: only NVIDIA's driver is called."""
    return "hip"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, vendor: str) -> list[int]:
    """The devices whose stream was asked for; the stream is 7."""
    from flash_dmattn.triton_kernels import kernel_launch

    devices: list[int] = []
    active = SimpleNamespace(
        get_current_device=lambda: 3,
        get_current_stream=lambda device: devices.append(device) or 7,
        get_current_target=lambda: SimpleNamespace(backend=vendor),
    )
    monkeypatch.setattr(kernel_launch, "driver", SimpleNamespace(active=active))
    return devices


def test_from_the_second_launch_on_the_kernel_gets_addresses(streams: list[int], young_heap: None) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    kernel = Kernel()
    launch = Launch(kernel, 5, ((1, 2), 0.5, 64, True), {"num_warps": 4})
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


def test_numbers_of_each_launch_come_behind_its_tensors(streams: list[int]) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    kernel = Kernel()
    launch, x = Launch(kernel, 5, (0.5, 64)), torch.zeros(4)
    for number in (1, 2, 3):
        launch(x, None, x, number)
    assert [arguments[9:] for arguments in kernel.compiled.by_address] == [
        (x.data_ptr(), None, x.data_ptr(), number, 0.5, 64) for number in (2, 3)
    ]


class Driver:
    """As the CUDA driver takes launches: it reads what lies at the addresses, and may call something or fail."""

    types: tuple[Any, ...] = (*2 * [ctypes.c_uint64], ctypes.c_int32, ctypes.c_int64, ctypes.c_bool, ctypes.c_float)
    types = (*types, ctypes.c_uint64, ctypes.c_uint64)  # no scratch memory

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.status, self.during = 0, lambda: None

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        self.during()
        sizes = (ctypes.c_uint32 * 7).from_address(config.value)
        stream, attributes, number = (ctypes.c_uint64 * 3).from_address(config.value + 32)
        assert (attributes, number, extra) == (0, 0, None)
        arguments = [kind.from_address(place).value for kind, place in zip(self.types, parameters, strict=True)]
        self.launches.append((function.value, *sizes, stream, *arguments))
        return self.status

    def cuGetErrorString(self, status: int, place: Any) -> None:
        place._obj.value = {700: b"an illegal memory access was encountered"}.get(status)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    from flash_dmattn.triton_kernels import kernel_launch

    own = Driver()
    monkeypatch.setattr(kernel_launch, "_driver", lambda: own)
    return own


@pytest.mark.parametrize("vendor", ["cuda"])
def test_the_driver_gets_a_stream_addresses_and_numbers(streams: list[int], cuda: Driver) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    launch = Launch(Kernel(), 5, ((-2, 9, (2**40, True)), 0.5, 64))
    x, y, z = (torch.zeros(4) for _ in range(3))
    launch(x, None, y)
    cuda.during = lambda: (setattr(cuda, "during", lambda: None), launch(z, None, z))  # as another thread may
    launch(x, None, y)
    launch(y, None, x)
    head, tail = (11, 5, 1, 1, 128, 1, 1, 1000, 7), (-2, 2**40, True, 0.5, 0, 0)
    pairs = [(z, z), (x, y), (y, x)]
    assert cuda.launches == [(*head, a.data_ptr(), b.data_ptr(), *tail) for a, b in pairs]
    assert launch.compiled.by_triton == launch.compiled.by_address == []


@pytest.mark.parametrize("vendor", ["cuda"])
def test_the_driver_gets_the_numbers_of_each_launch(
    streams: list[int], cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    monkeypatch.setattr(Kernel, "arg_names", ("x", "absent", "y", "first", "sizes", "scale", "BLOCK"))
    signature = {"x": "*fp32", "absent": "constexpr", "y": "*bf16", "first": "i32", "sizes": ("i64", "i1")}
    monkeypatch.setattr(
        Compiled, "src", SimpleNamespace(signature={**signature, "scale": "fp32", "BLOCK": "constexpr"})
    )
    launch, x, y = Launch(Kernel(), 5, ((2**40, True), 0.5, 64)), torch.zeros(4), torch.zeros(4)
    for number in (5, 0, -3):
        launch(x, None, y, number)
    assert [arguments[9:] for arguments in cuda.launches] == [
        (x.data_ptr(), y.data_ptr(), number, 2**40, True, 0.5, 0, 0) for number in (0, -3)
    ]


@pytest.mark.parametrize("vendor", ["cuda"])
def test_no_number_of_a_launch_loses_its_upper_bits(
    streams: list[int], cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    monkeypatch.setattr(Kernel, "arg_names", ("x", "absent", "y", "first", "second", "scale"))
    signature = {"x": "*fp32", "absent": "constexpr", "y": "*bf16", "first": "i32", "second": "i64", "scale": "fp32"}
    monkeypatch.setattr(Compiled, "src", SimpleNamespace(signature=signature))
    launch, x = Launch(Kernel(), 5, (0.5,)), torch.zeros(4)
    monkeypatch.setattr(Driver, "types", (*Driver.types[:4], *Driver.types[5:]))
    for numbers in ((0, 2**33), (-(2**31), 2**33), (2**31 - 1, -1)):
        launch(x, None, x, *numbers)
    assert [arguments[11:13] for arguments in cuda.launches] == [(-(2**31), 2**33), (2**31 - 1, -1)]
    with pytest.raises(struct.error, match="'i' format requires"):
        launch(x, None, x, 2**31, 0)
    assert len(cuda.launches) == 2


@pytest.mark.parametrize("vendor", ["cuda"])
def test_triton_launches_where_a_thread_has_no_context(streams: list[int], cuda: Driver) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    launch, x = Launch(Kernel(), 5, ((-2, 9, (2**40, True)), 0.5, 64)), torch.zeros(4)
    launch(x, None, x)
    cuda.status = 201
    launch(x, None, x)
    assert len(launch.compiled.by_triton) == 1


@pytest.mark.parametrize("vendor", ["cuda"])
@pytest.mark.parametrize(
    ("status", "words"), [(700, "error 700, an illegal memory access was encountered"), (9999, "error 9999, unknown")]
)
def test_an_error_of_the_driver_is_the_error_of_the_launch(
    status: int, words: str, streams: list[int], cuda: Driver
) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    kernel = Kernel()
    kernel.__name__ = "forward_kernel"  # type: ignore[attr-defined]
    launch, x = Launch(kernel, 5, ((-2, 9, (2**40, True)), 0.5, 64)), torch.zeros(4)
    launch(x, None, x)
    cuda.status = status
    with pytest.raises(RuntimeError, match=f"did not launch forward_kernel: {words}"):
        launch(x, None, x)
    assert launch.compiled.by_triton == []
    cuda.status = 0
    launch(x, None, x)
    assert len(cuda.launches) == 2 and len(launch.by_driver.blocks) == 1


@pytest.mark.parametrize("vendor", ["cuda"])
@pytest.mark.parametrize(
    ("metadata", "kind"), [({"launch_pdl": True}, "i32"), ({"num_ctas": 2}, "i32"), ({}, "fp16"), ({}, "nvTmaDesc")]
)
def test_what_only_the_launcher_of_triton_knows_goes_by_it(
    metadata: dict[str, Any], kind: str, streams: list[int], cuda: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Launch

    launch, x = Launch(Kernel(), 5, (3, 0.5, 64)), torch.zeros(4)
    monkeypatch.setattr(Compiled, "metadata", SimpleNamespace(**{**vars(Compiled.metadata), **metadata}))
    monkeypatch.setitem(Compiled.src.signature, "sizes", kind)
    launch(x, None, x)
    launch(x, None, x)
    assert cuda.launches == [] and len(launch.compiled.by_address) == 1


def test_names_of_a_kernel_are_put_in_its_order() -> None:
    from flash_dmattn.triton_kernels.kernel_launch import by_name

    def kernel(x: Any, out: Any, size: Any, scale: Any, BLOCK: Any) -> None: ...

    kernel.arg_names = ["x", "out", "size", "scale", "BLOCK"]  # type: ignore[attr-defined]
    shared = {"scale": 2.0, "BLOCK": 16, "WIDE": True}  # names of other kernels, too
    assert by_name(kernel, shared, BLOCK=32, size=5) == (5, 2.0, 32)
    with pytest.raises(KeyError, match="BLOCK"):
        by_name(kernel, {}, size=5, scale=2.0)
    for unknown in ("WIDE", "out_of_place"):
        with pytest.raises(TypeError, match=unknown):
            by_name(kernel, shared, size=5, **{unknown: True})


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("plain", [False, True])
def test_hooks_are_called_by_triton(
    name: str, plain: bool, streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    from flash_dmattn.triton_kernels.kernel_launch import Launch

    def hook(metadata: object) -> None: ...

    kernel, x = Kernel(), torch.zeros(4)
    launch = Launch(kernel, 5, (1, 64))
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

    class Versioned:
        def __init__(self, name: str) -> None:
            if status is None:
                raise OSError(f"there is no {name}")

        def cuDriverGetVersion(self, place: Any) -> int | None:
            place._obj.value = version
            return status

    monkeypatch.setattr(kernel_launch.ctypes, "CDLL", Versioned)
    assert kernel_launch.driver_overlaps.__wrapped__() is may


def test_descriptors_are_made_by_triton(streams: list[int]) -> None:
    from flash_dmattn.triton_kernels.kernel_launch import Descriptor, Launch

    kernel, x = Kernel(), torch.zeros(16, 16)
    launch = Launch(kernel, 5, (), None, [Descriptor(0, [16, 16], [16, 1], [16, 16])])
    launch(x)
    launch(x)
    ((_, descriptor),) = kernel.compiled.by_triton
    assert descriptor.base is x
    assert kernel.compiled.by_address == []


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[ClockCache[Any]]:
    """The plans of calls on CPU tensors, whose kernels do nothing."""
    from flash_dmattn.triton_kernels import kernel_launch, launch

    monkeypatch.setattr(kernel_launch.Launch, "__call__", lambda *_: None)
    monkeypatch.setattr(launch, "plans", ClockCache(4096))
    with replaced("triton", rules=rules_without("triton", "device")):
        yield launch.plans


def attend(q: Tensor, k: Tensor | None = None, bias: Tensor | None = None, **flags: Any) -> Any:
    k = q if k is None else k
    return flash_dmattn.attention(q, k, k, None, bias, backend="triton", **flags)


SHAPE = (1, 16, 2, 16)


def test_only_fp32_asks_whether_tf32_is_allowed(plans: ClockCache[Any]) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for dtype, made in ((torch.bfloat16, 1), (torch.float32, 3)):
            for precision in ("ieee", "tf32"):
                torch.backends.cuda.matmul.fp32_precision = precision
                attend(torch.randn(SHAPE).to(dtype))
            assert len(plans) == made
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [((0, 4, 2, 16), (0, 4, 2, 16)), ((1, 0, 2, 16), (1, 4, 2, 16)), ((1, 4, 2, 16), (1, 0, 2, 16))],
)
def test_an_empty_call_plans_nothing(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], plans: ClockCache[Any]
) -> None:
    out, lse = attend(torch.randn(q_shape), torch.randn(k_shape), return_lse=True)
    assert out.shape == q_shape and bool((out == 0).all())
    assert lse.shape == (q_shape[0], 2, q_shape[1]) and bool((lse == -torch.inf).all())
    assert not plans


def test_a_plan_serves_all_places_of_one_alignment(plans: ClockCache[Any]) -> None:
    """Modulo 16 bytes, by which Triton compiles; one tensor off it does not make the places of others count."""
    queries = [torch.randn(16 * 2 * 16 + 1)[1:].view(SHAPE) for _ in range(20)]
    keys = [torch.randn(SHAPE) for _ in queries]
    assert len({k.data_ptr() for k in keys}) == len(keys)
    for q, k in zip(queries, keys, strict=True):
        attend(q, k)
    assert len(plans) == 1


def test_rows_of_another_stride_are_copied_and_groups_are_rows(plans: ClockCache[Any]) -> None:
    from flash_dmattn.backends.triton.passes import GROUP_ROWS_FROM

    attend(torch.randn(1, 16, 16, 2).transpose(2, 3))  # the plan of the copies
    assert len(plans) == 1
    attend(torch.randn(1, 1, 4, 16), torch.randn(1, GROUP_ROWS_FROM, 2, 16))
    assert len(plans) == 2


@pytest.mark.parametrize(
    ("length", "strides", "copied"),
    [
        (1100, (0, 1, 2200, 2), True),  # a projection of pairs to heads, for every batch entry
        (1100, (2 * 1100**2, 1, 2200, 2), True),
        (1100, (0, 1, 0, 2), False),  # a value for each key
        (1100, (0, 1100**2, 1100, 1), False),
        (16, (0, 1, 32, 2), False),  # few scores
    ],
)
def test_a_bias_whose_keys_are_apart_is_copied(
    length: int, strides: tuple[int, ...], copied: bool, plans: ClockCache[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_dmattn.backends.triton.backend import BACKEND
    from flash_dmattn.triton_kernels import kernel_launch

    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernel_launch.Launch, "__call__", lambda _, *tensors: launches.append(tensors))
    q = torch.zeros(2, length, 2, 16, dtype=torch.bfloat16)
    bias = torch.randn(2 * 2 * length**2).bfloat16().as_strided((2, 2, length, length), strides)
    bias.requires_grad_()
    out = attend(q, bias=bias)
    forward = len(launches)
    out.backward(torch.zeros_like(out))
    notes = BACKEND.notes(flash_dmattn.explain(q, q, q, None, bias).problem)
    assert ("copies bias, whose last stride is 2: the kernels read rows of unit stride" in notes) is copied
    for passed in (launches[:forward], launches[forward:]):
        biases = [t for tensors in passed for t in tensors if isinstance(t, Tensor) and t.shape[-2:] == bias.shape[-2:]]
        read = [t for t in biases if torch.equal(t.expand(bias.shape), bias)]
        assert read and all((t.data_ptr() == bias.data_ptr()) is not copied for t in read)
        assert not copied or all(t.stride(-1) == 1 and (t.stride(0) == 0) is (strides[0] == 0) for t in read)


def test_the_heads_of_a_group_are_written_to_out_itself(
    plans: ClockCache[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_dmattn.triton_kernels import kernel_launch

    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernel_launch.Launch, "__call__", lambda _, *tensors: launches.append(tensors))
    for dtype, mask in product((torch.float32, torch.float16), (None, torch.ones(2, 1, 1, 600, dtype=torch.bool))):
        launches.clear()
        q, k = torch.randn(2, 1, 4, 16).to(dtype), torch.randn(2, 600, 2, 16).to(dtype)
        out = flash_dmattn.attention(q, k, k, mask, backend="triton")
        ((*_, written, _, _, _, _, _, _, _),) = launches  # one launch, and no copy behind it
        assert written is out


class Keys(ClockCache[Any]):
    """A table that remembers nothing but the keys that it was asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked: list[Any] = []

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        self.asked.append(key)
        return lambda *_: ()


# Rows stay of unit stride, since others are copied first.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: x.new_empty([x.shape[0] + 1, *x.shape[1:]]),
    "strides": lambda x: torch.empty_strided(x.shape, [2 * x.stride(0), *x.stride()[1:]], dtype=x.dtype),
    "dtype": lambda x: x.to(torch.float16 if x.is_floating_point() else torch.int16),
    "alignment": lambda x: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),
}
FLAGS = Flags(3, 4, 0.5, 2.0, False)
OTHER_FLAGS = {
    **{name: 7 for name in ("left", "right", "mask_repeat", "bias_repeat", "zero", "block_q", "block_k", "list_size")},
    **{name: 0.25 for name in ("softmax_scale", "softcap", "dropout_p")},
    **{name: True for name in ("deterministic", "invariant", "one_mask_row", "is_list_bias")},
    **{name: "queries" for name in ("mask_packing", "bias_packing")},
    "sequences": SequenceSpec("packed", 3, 6, 9, 5, 5),
    "outside": "clamp",
    **{name: True for name in ("allows_tf32", "max_scores", "entropy", "sums")},
}


def arguments_of(function: str) -> dict[str, Any]:
    """The arguments of an entry point, a tensor for each that may be one."""
    q, k = torch.randn(2, 6, 4, 16), torch.randn(2, 9, 2, 16)
    tiles = MaskView("tiles", tuple(torch.zeros(2, 4, n, 5, dtype=torch.int32) for n in (1, 2, 3, 4)))
    lse = torch.randn(2, 4, 6)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": k.clone(), "mask": tiles, "bias": torch.randn(2, 4, 6, 9)}
    arguments |= {"out": q.clone(), "lse": lse, "flags": FLAGS, "sink": torch.randn(4), "dropout": torch.zeros(2)}
    if function.endswith("sequences"):
        arguments["sequences"] = SequenceView(
            torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
        )
    if function.startswith("backward"):
        sent = {"dout": q.clone(), "dlse": lse.clone(), "dentropy": lse.clone()}
        arguments = {**sent, **arguments, "needs_grad": NeedsGrad()}
    return arguments


# Not in the key of a forward pass, which makes them itself.
OUTPUTS = ("out", "lse")
# Contiguous copies are made of them first.
COPIED = ("sink", "out", "lse")


def changed_arguments(function: str) -> dict[str, dict[str, Any]]:
    """Arguments that differ from `arguments_of` in one thing, by name."""
    arguments, got = arguments_of(function), {}
    for name, value in arguments.items():
        if name in OUTPUTS and function.startswith("forward"):
            continue
        if isinstance(value, Tensor):
            others = {what: change(value) for what, change in PLACES.items() if what != "strides" or name not in COPIED}
            if name in ("bias", "sink", "dropout", "dlse", "dentropy"):
                others["none"] = None  # type: ignore[assignment]
        elif isinstance(value, MaskView):
            others = {f"{i} {what}": value._replace(tensors=(*value.tensors[:i], change(x), *value.tensors[i + 1 :]))
                      for i, x in enumerate(value.tensors) for what, change in PLACES.items()}  # fmt: skip
            others |= {"form": value._replace(form="sequence_tiles"), "none": MaskView()}
        elif isinstance(value, SequenceView):
            others = {f"{field} {what}": value._replace(**{field: change(getattr(value, field))})
                      for field in value._fields for what, change in PLACES.items()}  # fmt: skip
            others["no pages"] = value._replace(block_table=None)
        else:
            changes = OTHER_FLAGS if name == "flags" else dict.fromkeys(NeedsGrad._fields, True)
            assert changes.keys() == set(value._fields)
            others = {field: value._replace(**{field: other}) for field, other in changes.items()}
        got |= {f"{name}, {what}": {**arguments, name: other} for what, other in others.items()}
    return got


ENTRIES = ("forward", "backward", "forward sequences", "backward sequences")


def key_of_plan(function: str, arguments: dict[str, Any]) -> Any:
    from flash_dmattn.triton_kernels import launch

    x = Inputs(**{name: arguments[name] for name in Inputs._fields if name in arguments})
    out, lse, flags = (arguments[name] for name in ("out", "lse", "flags"))
    with pytest.MonkeyPatch.context() as patch:
        keys = Keys()
        patch.setattr(launch, "plans", keys)
        if function.startswith("forward"):
            launch.forward(x, out, lse, flags=flags)
        else:
            others = (arguments[name] for name in ("dout", "dlse", "flags", "needs_grad"))
            launch.backward(Saved(x, out, lse), *others, SentEntropy(arguments["dentropy"]))
    return keys.asked[-1]


@pytest.mark.parametrize("function", ENTRIES)
def test_each_input_of_a_plan_alone_makes_another(function: str) -> None:
    key = key_of_plan(function, arguments_of(function))
    changed = {name: key_of_plan(function, arguments) for name, arguments in changed_arguments(function).items()}
    same = [name for name, other in changed.items() if other == key]
    assert not same
    elsewhere = [key_of_plan("backward", arguments_of("backward")), key_of_plan("forward", arguments_of("forward"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "get_device", lambda x: 3)
        elsewhere.append(key_of_plan(function, arguments_of(function)))
    check_covered(key, [*changed.values(), *elsewhere])


def key_of_launch(**changes: Any) -> Any:
    from flash_dmattn.triton_kernels import kernel_launch

    arguments = {"kernel": len, "programs": 4, "tensors": (torch.zeros(8), torch.zeros(8, dtype=torch.int32))}
    arguments |= {"numbers": (1, 2.0), "constants": (True, 16), "num_warps": 4, **changes}
    with pytest.MonkeyPatch.context() as patch:
        keys = Keys()
        patch.setattr(kernel_launch, "_launches", keys)
        kernel_launch.launch(**arguments)
    return keys.asked[-1]


def test_each_input_of_a_launch_alone_makes_another() -> None:
    tensors = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    like_one_there = {
        "device": SimpleNamespace(index=1),
        "is_cuda": False,
        "dtype": torch.float32,
        "data_ptr": lambda: 0,
    }
    on_another_gpu = SimpleNamespace(**like_one_there)
    changes: list[dict[str, Any]] = [
        {"kernel": max},
        {"programs": 5},
        *({"numbers": numbers} for numbers in ((2, 2.0), (1, 3.0))),
        *({"constants": constants} for constants in ((False, 16), (True, 32))),
        {"num_warps": 8},
        *({"tensors": (change(tensors[0]), tensors[1])} for what, change in PLACES.items() if what in NARROW),
        *({"tensors": (tensors[0], change(tensors[1]))} for what, change in PLACES.items() if what in NARROW),
        {"tensors": (on_another_gpu, tensors[1])},
    ]
    changed = [key_of_launch(**change) for change in changes]
    for other in changed:
        check_told_apart(key_of_launch(), other)
    check_covered(key_of_launch(), changed)


# Sizes and strides of tensors are numbers of such a launch, or nothing to it.
NARROW = ("dtype", "alignment")
