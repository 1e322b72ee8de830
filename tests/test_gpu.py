"""Kernel backends on a GPU: graphs, torch.compile, streams, devices, repeats, autocast and checkpoint.

Every result here is compared bit for bit with the plain call, whose accuracy is for the other tests. Sums that blocks
of cuda add in any order are compared up to that order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, Inputs
from conftest import Runner
from gpu_calls import (
    BASE,
    FORMS,
    Products,
    assert_equal,
    attend,
    both_orders,
    captured,
    every_form,
    fill,
    in_form,
    leaves_of,
    made,
    on_a_busy_stream,
    on_kernels,
    results,
    served,
    summed,
    with_gradients,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flash_dmattn

pytestmark = on_kernels

# Several pieces of work for each SM of an H200, handed out as they finish.
RACY = BASE.with_(batch=4, seqlen_q=1000, num_heads=16, num_heads_k=4)
FORWARD = RACY.with_(needs_grad=(), dlse=False, is_causal=True)
FULL, TILES, PER_KEY = ("B", "Hq", "Lq", "Lk"), ("B", "Hk", "Lq", "Lk"), ("1", "Hk", "1", "Lk")
RACES = {
    "mask and bias": FORWARD.with_(seqlen_k=1104, head_dim=128, mask=TILES, bias=FULL),
    "bias of odd rows": FORWARD.with_(seqlen_k=1101, head_dim=128, mask=("1", "1", "Lq", "Lk"), bias=FULL),
    "no mask": FORWARD.with_(batch=8, seqlen_k=1100),
    "bias per key": FORWARD.with_(batch=8, seqlen_k=1100, bias=PER_KEY),
    "gradients, mask and bias per key": RACY.with_(seqlen_k=1101, head_dim=128, mask=TILES, bias=PER_KEY),
    "gradients, groups": RACY.with_(batch=8, seqlen_k=1100, is_causal=True),
    "gradients, bias": RACY.with_(seqlen_k=1104, bias=FULL),
}


@every_form
@both_orders
def test_a_captured_graph_replays_new_values(backend: Runner, deterministic: bool, form: str) -> None:
    case, first = made(backend, form, deterministic)
    _, second = made(backend, form, deterministic, seed=1)
    static = in_form(form, case, case.build())
    graph, actual = captured(lambda: results(backend, case, static, deterministic=deterministic))
    for inputs in (second, first):
        fill(static, inputs)
        for x in actual:
            x.zero_()
        graph.replay()
        expected = results(backend, case, inputs, deterministic=deterministic)
        assert_equal(actual, expected, "of a replay", summed(case, deterministic))


@every_form
@both_orders
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_compiled_calls(backend: Runner, dynamic: bool, deterministic: bool, form: str) -> None:
    """One graph without breaks; with dynamic shapes it serves other lengths as well."""
    torch._dynamo.reset()
    case, inputs = made(backend, form, deterministic)
    order = {"deterministic": deterministic}
    choice = backend.choice(case, inputs, **order)

    def call(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Tensor | None, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        flags = {**case.flags(), "return_lse": True, "backend": choice, **order}
        return flash_dmattn.attention(q, k, v, mask, bias, sink=sink, **flags)

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic)
    compilations = []
    for seqlen_k in (case.seqlen_k, case.seqlen_k + 64):
        other = case.with_(seqlen_k=seqlen_k)
        inputs = in_form(form, other, served(backend, other))
        leaves = leaves_of(inputs)
        q, k, v, bias, sink = leaves
        actual = with_gradients(compiled(q, k, v, inputs.mask, bias, sink), leaves, inputs)
        expected = results(backend, other, inputs, **order)
        assert_equal(actual, expected, f"compiled, {seqlen_k} keys", summed(case, deterministic))
        compilations.append(counter.frame_count)
    # The lengths of a mask that was prepared outside are constants of its graph.
    if dynamic and not form.startswith("prepared"):
        assert compilations[1] == compilations[0]


@every_form
@both_orders
def test_a_busy_stream(backend: Runner, deterministic: bool, form: str) -> None:
    """The kernels run on the current stream, behind what is on it, and the host does not wait for them."""
    case, inputs = made(backend, form, deterministic)
    late = in_form(form, case, case.build())
    expected = results(backend, case, inputs, deterministic=deterministic)
    actual = on_a_busy_stream(
        lambda arguments: results(backend, case, arguments, deterministic=deterministic), late, inputs
    )
    assert_equal(actual, expected, "on a busy stream", summed(case, deterministic))


@every_form
def test_torch_never_waits_for_the_device(backend: Runner, form: str) -> None:
    """With a mask that is packed inside the call, or prepared there and then."""
    case = FORMS[form]
    inputs = served(backend, case)
    expected = results(backend, case, in_form(form, case, inputs), deterministic=True)
    try:
        torch.cuda.set_sync_debug_mode("error")
        actual = results(backend, case, in_form(form, case, inputs), deterministic=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(actual, expected)


@every_form
def test_a_device_that_is_not_the_current_one(backend: Runner, form: str) -> None:
    case = FORMS[form]
    inputs = served(backend, case)
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs and finds {torch.cuda.device_count()}")
    expected = results(backend, case, in_form(form, case, inputs), deterministic=True)
    there = in_form(form, case, case.build("cuda:1"))
    assert torch.cuda.current_device() == 0
    actual = results(backend, case, there, deterministic=True)
    assert torch.cuda.current_device() == 0
    assert {x.device.index for x in actual} == {1}
    assert_equal([x.cpu() for x in actual], [x.cpu() for x in expected])


@every_form
@both_orders
def test_repeats_are_equal(backend: Runner, deterministic: bool, form: str) -> None:
    """A hundred runs, while products on another stream move the order in which programs start and end."""
    case, inputs = made(backend, form, deterministic)
    first = results(backend, case, inputs, deterministic=deterministic)
    products = Products(4096)
    for repeat in range(100):
        products.start(1 + repeat % 3)
        again = results(backend, case, inputs, deterministic=deterministic)
        assert_equal(again, first, f"in repeat {repeat}", summed(case, deterministic))
    torch.cuda.synchronize()


@every_form
def test_both_orders_agree(backend: Runner, form: str) -> None:
    case, inputs = made(backend, form, False)
    ordered, unordered = (results(backend, case, inputs, deterministic=x) for x in (True, False))
    assert_equal(unordered, ordered, "in any order", summed(case, False))


def racing(backend: Runner, race: str) -> tuple[Case, Inputs]:
    """A case and its tensors; cuda makes the gradients, and its blocks take turns."""
    case = RACES[race]
    inputs = served(backend, case)
    if case.needs_grad and backend.choice(case, inputs, deterministic=True) != "cuda":
        pytest.skip("no blocks take turns")
    return case, inputs


@pytest.mark.parametrize("race", RACES)
def test_a_thousand_passes_are_bitwise_equal(backend: Runner, race: str) -> None:
    """One behind the other on the device, now and then during a product; the host synchronises only at the end."""
    case, inputs = racing(backend, race)
    leaves = leaves_of(inputs) if case.needs_grad else [*(x for _, x in inputs.floats()), inputs.sink]
    outputs = attend(backend, case, inputs, leaves, deterministic=True)

    def once() -> tuple[Tensor, ...]:
        if not case.needs_grad:
            return attend(backend, case, inputs, leaves)
        wanted = [x for x in leaves if x is not None]
        return torch.autograd.grad(outputs, wanted, (inputs.dout, inputs.dlse), retain_graph=True)

    first = once()
    differs = torch.zeros(1000, dtype=torch.bool, device="cuda")
    products = Products(2048)
    for repeat in range(len(differs)):
        if repeat % 3 == 0:
            products.start()
        differs[repeat] = torch.stack([(x != y).any() for x, y in zip(once(), first)]).any()
    wrong = differs.nonzero().flatten().tolist()
    assert not wrong, f"{len(wrong)} of {len(differs)} differ from the first, from repeat {wrong[0]} on"


@pytest.mark.parametrize("race", [name for name, case in RACES.items() if case.needs_grad])
def test_two_kernels_that_take_turns_end(backend: Runner, race: str) -> None:
    """Their blocks wait for one another and share the SMs, one of them with priority."""
    case, inputs = racing(backend, race)
    first = results(backend, case, inputs, deterministic=True)
    torch.cuda.synchronize()
    outs = []
    # autograd runs a backward pass on the stream of its forward pass.
    for stream in (torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)) * 20:
        with torch.cuda.stream(stream):
            outs.append(results(backend, case, inputs, deterministic=True))
    torch.cuda.synchronize()
    for each in outs:
        assert_equal(each, first, "of two kernels")


@every_form
@both_orders
def test_nothing_is_read_before_it_is_written(backend: Runner, deterministic: bool, form: str) -> None:
    """Under deterministic algorithms torch fills every new tensor with NaN, or with the largest integer."""
    case, _ = made(backend, form, deterministic)
    inputs = served(backend, case)
    expected = results(backend, case, in_form(form, case, inputs), deterministic=deterministic)
    try:
        torch.use_deterministic_algorithms(True)
        actual = results(backend, case, in_form(form, case, inputs), deterministic=deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(actual, expected, "with memory that was filled", summed(case, deterministic))


@every_form
def test_autocast(backend: Runner, form: str) -> None:
    """fp32 leaves of values that bf16 holds: the same numbers as in bf16, gradients in fp32."""
    case = FORMS[form].with_(bias_dtype=torch.float32)
    low = in_form(form, case, served(backend, case))
    high = replace(low, q=low.q.float(), k=low.k.float(), v=low.v.float())
    with torch.autocast("cuda", torch.bfloat16):
        actual = results(backend, case, high, deterministic=True)
    expected = results(backend, case, low, deterministic=True)
    assert_equal(actual, [*expected[:2], *(x.float() for x in expected[2:])], "under autocast")


@every_form
@pytest.mark.parametrize("use_reentrant", (False, True), ids=("plain", "reentrant"))
def test_checkpoint(backend: Runner, form: str, use_reentrant: bool) -> None:
    case = FORMS[form]
    inputs = in_form(form, case, served(backend, case))
    leaves = leaves_of(inputs)
    outputs = checkpoint(
        lambda *arguments: attend(backend, case, inputs, arguments, deterministic=True),
        *leaves,
        use_reentrant=use_reentrant,
    )
    # A reentrant checkpoint refuses torch.autograd.grad.
    torch.autograd.backward(outputs, (inputs.dout, inputs.dlse))
    actual = [*(x.detach() for x in outputs), *(x.grad for x in leaves if x is not None)]
    assert_equal(actual, results(backend, case, inputs, deterministic=True), "through a checkpoint")


def test_a_checkpointed_region_is_recomputed_on_its_backends(backend: Runner) -> None:
    """The engine runs it in a thread of its own, here behind the end of the block around its forward pass."""
    case = FORMS["bias"]
    inputs = in_form("bias", case, served(backend, case))
    q, k, v, bias, _ = leaves = leaves_of(inputs)
    flags = {**case.flags(), "return_lse": True, "deterministic": True}
    with flash_dmattn.config(backend=backend.choice(case, inputs, deterministic=True)):
        outputs = checkpoint(lambda: flash_dmattn.attention(q, k, v, None, bias, **flags), use_reentrant=False)
    with flash_dmattn.config(backend="eager"):
        gradients = with_gradients(outputs, leaves, inputs)
    assert_equal(gradients, results(backend, case, inputs, deterministic=True), "of a region outside of its block")


@every_form
def test_an_exported_program(backend: Runner, form: str) -> None:
    """It keeps only operators, and has the gradients of the call."""
    case = FORMS[form]
    inputs = in_form(form, case, served(backend, case))
    leaves = leaves_of(inputs)
    choice = backend.choice(case, inputs, deterministic=True)
    flags = {**case.flags(), "return_lse": True, "deterministic": True, "backend": choice}

    class Call(torch.nn.Module):
        def forward(
            self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            return flash_dmattn.attention(q, k, v, inputs.mask, bias, sink=sink, **flags)

    program = torch.export.export(Call(), tuple(leaves)).module()
    actual = with_gradients(program(*leaves), leaves, inputs)
    assert_equal(actual, results(backend, case, inputs, deterministic=True), "of an exported program")


def test_one_tensor_is_three_arguments_of_a_graph(backend: Runner) -> None:
    case = BASE.with_(seqlen_k=200, num_heads_k=BASE.num_heads, bias=("1", "Hq", "Lq", "Lk"), dlse=False)
    inputs = served(backend, case)
    flags = {"deterministic": True, "backend": backend.choice(case, inputs, deterministic=True)}
    x, bias = inputs.q.detach().requires_grad_(), inputs.bias.detach().requires_grad_()

    def call(x: Tensor, bias: Tensor) -> Tensor:
        return flash_dmattn.attention(x, x, x, None, bias, **flags)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True)
    (out, dbias, dx), (plain, dbias_plain, dx_plain) = (
        (out.detach(), *torch.autograd.grad(out, (bias, x), inputs.dout))
        for out in (run(x, bias) for run in (compiled, call))
    )
    assert_equal([out, dbias], [plain, dbias_plain], "of one tensor")
    assert (dx - dx_plain).norm() <= 2**-7 * dx_plain.norm()  # a graph adds up dq, dk and dv in fp32


def test_a_position_bias_trains_in_a_graph_of_any_length(backend: Runner) -> None:
    """Lengths that are no multiple of anything: the strides of the bias and of its gradient follow them."""
    torch._dynamo.reset()
    case = BASE.with_(bias=("1", "Hq", "Lq", "Lk"))
    choice = backend.choice(case, served(backend, case))
    layer = flash_dmattn.nn.RelativePositionBias(4, device="cuda", dtype=torch.bfloat16)

    def call(x: Tensor) -> Tensor:
        q = x.view(2, -1, 4, 64)
        return flash_dmattn.attention(q, 2 * q, q + 1, None, layer(x.shape[1]), backend=choice)

    compiled = torch.compile(call, fullgraph=True)
    for length in (100, 161, 197, 330):
        x = torch.randn(2, length, 256, device="cuda", dtype=torch.bfloat16)
        (out, gradient), (plain, expected) = (
            (out, *torch.autograd.grad(out.square().sum(), layer.weight)) for out in (compiled(x), call(x))
        )
        assert (out - plain).norm() <= 2**-8 * plain.norm()
        assert (gradient - expected).norm() <= 2**-6 * expected.norm()  # the table adds it up in any order
