"""The backward pass of cuda on a GPU, sums in any order and in a fixed one: graphs, streams, repeats, torch.compile.

Blocks add their parts of dq, and of dk and dv of grouped heads, as they finish. These are equal up to the order of the
sums, everything else bit for bit, and with deterministic=True all of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, Inputs
from conftest import Runner
from gpu_calls import (
    BASE,
    LARGE,
    Products,
    assert_equal,
    attend,
    captured,
    fill,
    leaves_of,
    of_form,
    on_a_busy_stream,
    results,
    served,
    with_gradients,
)
from torch import Tensor

import flash_dmattn

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

FULL = ("B", "Hq", "Lq", "Lk")
TILES = ("B", "Hk", "Lq", "Lk")
PER_KEY = ("1", "Hk", "1", "Lk")
FORMS = {
    "groups": BASE.with_(seqlen_k=600, is_causal=True),
    "mask and bias per key": BASE.with_(head_dim=128, mask=TILES, mask_kind="empty_tiles", bias=PER_KEY),
    "bias and its gradient": BASE.with_(seqlen_k=600, num_heads_k=4, bias=FULL),
    "prepared mask": BASE.with_(seqlen_k=328, head_dim=128, mask=TILES, bias=FULL, is_causal=True),
    # Several pieces of work for each SM of an H200.
    "large": LARGE.with_(bias=FULL, is_causal=True),
    "large mask": LARGE.with_(head_dim=128, num_heads_k=16, mask=TILES, mask_kind="empty_tiles", bias=PER_KEY),
}
RACY = BASE.with_(batch=4, seqlen_q=1000, num_heads=16, num_heads_k=4)
RACES = {
    "mask and bias per key": RACY.with_(seqlen_k=1101, head_dim=128, mask=TILES, bias=PER_KEY),
    "groups": RACY.with_(batch=8, seqlen_k=1100, is_causal=True),
    "bias and its gradient": RACY.with_(seqlen_k=1104, bias=FULL),
}
every_form = pytest.mark.parametrize("form", FORMS)
IN_ANY_ORDER = {"deterministic": False}


def differentiated(backend: Runner, form: str, seed: int = 0, **flags: Any) -> tuple[Case, Inputs]:
    """A case and its tensors, of which cuda alone makes the gradients."""
    case = FORMS[form].with_(seed=seed)
    inputs = of_form(form, case, served(backend, case))
    assert backend.choice(case, inputs, **flags) == "cuda", "its rules refuse the gradients"
    return case, inputs


def summed(case: Case) -> tuple[str, ...]:
    """The gradients that several blocks add to."""
    return ("dq",) if case.num_heads == case.num_heads_k else ("dq", "dk", "dv")


@every_form
def test_a_captured_graph_replays_new_values(backend: Runner, form: str) -> None:
    case, first = differentiated(backend, form, **IN_ANY_ORDER)
    _, second = differentiated(backend, form, seed=1)
    static = of_form(form, case, case.build())
    graph, found = captured(lambda: results(backend, case, static, **IN_ANY_ORDER))
    for inputs in (second, first):
        fill(static, inputs)
        for x in found:
            x.zero_()
        graph.replay()
        assert_equal(found, results(backend, case, inputs, **IN_ANY_ORDER), "of a replay", summed(case))


@every_form
def test_a_compiled_call(backend: Runner, form: str) -> None:
    torch._dynamo.reset()
    case, inputs = differentiated(backend, form, **IN_ANY_ORDER)

    def call(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Tensor | None, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        flags = {**case.flags(), **IN_ANY_ORDER, "return_lse": True, "backend": "cuda"}
        return flash_dmattn.attention(q, k, v, mask, bias, sink=sink, **flags)

    leaves = leaves_of(inputs)
    q, k, v, bias, sink = leaves
    outputs = torch.compile(call, fullgraph=True)(q, k, v, inputs.mask, bias, sink)
    found = with_gradients(outputs, leaves, inputs)
    assert_equal(found, results(backend, case, inputs, **IN_ANY_ORDER), "compiled", summed(case))


@every_form
def test_a_busy_stream(backend: Runner, form: str) -> None:
    case, inputs = differentiated(backend, form, **IN_ANY_ORDER)
    late = of_form(form, case, case.build())
    expected = results(backend, case, inputs, **IN_ANY_ORDER)
    found = on_a_busy_stream(lambda given: results(backend, case, given, **IN_ANY_ORDER), late, inputs)
    assert_equal(found, expected, "on a busy stream", summed(case))


@every_form
def test_nothing_is_read_before_it_is_written(backend: Runner, form: str) -> None:
    """Under deterministic algorithms torch fills every new tensor with NaN, or with the largest integer."""
    case, inputs = differentiated(backend, form, **IN_ANY_ORDER)
    expected = results(backend, case, inputs, **IN_ANY_ORDER)
    try:
        torch.use_deterministic_algorithms(True)
        found = results(backend, case, inputs, **IN_ANY_ORDER)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(found, expected, "with memory that was filled", summed(case))


@every_form
def test_repeats_are_equal_up_to_the_order_of_sums(backend: Runner, form: str) -> None:
    case, inputs = differentiated(backend, form, **IN_ANY_ORDER)
    first = results(backend, case, inputs, **IN_ANY_ORDER)
    products = Products(4096)
    for repeat in range(50):
        products.start(1 + repeat % 3)
        assert_equal(results(backend, case, inputs, **IN_ANY_ORDER), first, f"in repeat {repeat}", summed(case))
    torch.cuda.synchronize()


@every_form
def test_both_orders_agree(backend: Runner, form: str) -> None:
    case, inputs = differentiated(backend, form, deterministic=True)
    in_order = results(backend, case, inputs, deterministic=True)
    assert_equal(results(backend, case, inputs, **IN_ANY_ORDER), in_order, "in any order", summed(case))


@pytest.mark.parametrize("race", RACES)
def test_a_thousand_backward_passes_are_bitwise_equal(backend: Runner, race: str) -> None:
    """One behind the other on the device, now and then beside a product; the host looks at the end alone."""
    case = RACES[race]
    inputs = served(backend, case)
    assert backend.choice(case, inputs, deterministic=True) == "cuda", "its rules refuse the gradients"
    leaves = leaves_of(inputs)
    outputs = attend(backend, case, inputs, leaves, deterministic=True)
    wanted = [x for x in leaves if x is not None]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, wanted, (inputs.dout, inputs.dlse), retain_graph=True)

    first = gradients()
    differs = torch.zeros(1000, dtype=torch.bool, device="cuda")
    products = Products(2048)
    for repeat in range(len(differs)):
        if repeat % 3 == 0:
            products.start()
        differs[repeat] = torch.stack([(x != y).any() for x, y in zip(gradients(), first)]).any()
    wrong = differs.nonzero().flatten().tolist()
    assert not wrong, f"{len(wrong)} of {len(differs)} differ from the first, from repeat {wrong[0]} on"


@pytest.mark.parametrize("race", RACES)
def test_two_kernels_that_take_turns_end(backend: Runner, race: str) -> None:
    """Their blocks wait for one another and share the num_sms, one of them with priority."""
    case = RACES[race]
    inputs = served(backend, case)

    def gradients() -> tuple[Tensor, ...]:
        leaves = leaves_of(inputs)
        outputs = attend(backend, case, inputs, leaves, deterministic=True)
        return torch.autograd.grad(outputs, [x for x in leaves if x is not None], (inputs.dout, inputs.dlse))

    first = gradients()
    torch.cuda.synchronize()
    found = []
    # autograd runs a backward pass on the stream of its forward pass.
    for stream in (torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)) * 20:
        with torch.cuda.stream(stream):
            found.append(gradients())
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, first))
