"""The calls that the tests on a GPU share: every form of mask and bias, through autograd and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from cases import DEVICE, Case, Inputs
from conftest import Runner
from draws import Drawn, placed
from torch import Tensor

import flash_dmattn

# A backend that does not work here skips in the fixture, one that refuses a call in `served`, each with its reason.
on_kernels = pytest.mark.parametrize("backend", ("triton", "cuda"), indirect=True)

BASE = Case(seqlen_q=200, seqlen_k=330, head_dim=64, dtype=torch.bfloat16, dlse=True)
LARGE = BASE.with_(seqlen_q=2048, seqlen_k=2200, num_heads=16, num_heads_k=8)
FORMS = {
    "plain": BASE.with_(is_causal=True),
    "dense mask": BASE.with_(mask=("B", "Hk", "Lq", "Lk"), mask_kind="empty_rows"),
    "prepared mask": BASE.with_(mask=("B", "Hk", "Lq", "Lk"), bias=("B", "Hq", "Lq", "Lk"), is_causal=True),
    "bias": BASE.with_(bias=("B", "Hq", "Lq", "Lk"), softcap=5.0),
    "shared bias": BASE.with_(bias=("1", "Hk", "Lq", "Lk"), mask=("1", "1", "Lq", "Lk"), mask_kind="empty_tiles"),
    "key mask": BASE.with_(mask=("B", "Hk", "1", "Lk"), bias=("1", "Hq", "1", "Lk"), is_causal=True),
    "prepared key mask": BASE.with_(mask=("B", "1", "1", "Lk"), bias=("B", "Hq", "Lq", "1"), window_size=(90, 0)),
    # Split among programs: over keys in the forward pass, over queries in the backward one.
    "sink": BASE.with_(sink="normal", bias=("B", "Hk", "Lq", "1"), mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows"),
    "few queries": BASE.with_(
        batch=1, seqlen_q=3, seqlen_k=2500, bias=("1", "Hq", "1", "Lk"), is_causal=True, sink="inf"
    ),
    "few keys": BASE.with_(batch=1, seqlen_q=2500, seqlen_k=65, bias=("1", "1", "Lq", "Lk")),
    # Large enough to pay for tensor descriptors.
    "large": LARGE.with_(bias=("B", "Hq", "Lq", "Lk"), is_causal=True, sink="normal"),
    "large mask": LARGE.with_(bias=("1", "1", "Lq", "Lk"), mask=("1", "Hk", "Lq", "Lk"), mask_kind="empty_tiles"),
    # Blocks of cuda add their parts of dk and dv of groups, only of dq if each head has its own, and store dbias.
    "groups": BASE.with_(seqlen_k=600, is_causal=True),
    "mask and bias per key": BASE.with_(
        head_dim=128, mask=("B", "Hk", "Lq", "Lk"), mask_kind="empty_tiles", bias=("1", "Hk", "1", "Lk")
    ),
    "bias and its gradient": BASE.with_(seqlen_k=600, num_heads_k=4, bias=("B", "Hq", "Lq", "Lk")),
    "large mask of each head": LARGE.with_(
        **{"head_dim": 128, "num_heads_k": 16, "mask": ("B", "Hk", "Lq", "Lk"), "mask_kind": "empty_tiles"},
        bias=("1", "Hk", "1", "Lk"),
    ),
}
every_form = pytest.mark.parametrize("form", FORMS)
both_orders = pytest.mark.parametrize("deterministic", (True, False), ids=("fixed order", "any order"))
# Half a second of an H200, many times what the host needs for a call that it has made before.
SLEEP_CYCLES = 10**9
# A share of the norm of a gradient. 18 normal terms, added in fp32 in two orders and rounded to bf16, differ by 2^-15
# of it, and by 2^-2 where one is left out.
ORDER_OF_SUMS = 2.0**-10


def served(backend: Runner, case: Case) -> Inputs:
    """The tensors of a case, or a skip with the reasons for which the backend refuses it."""
    if DEVICE == "cpu":  # which refuses the small call as well, without seconds for large tensors
        small = BASE.with_(seqlen_q=1, seqlen_k=1)
        refusal = backend.refusal(small, small.build())
        if refusal is not None:
            pytest.skip(refusal)
    inputs = case.build()
    backend.attention(case, inputs)  # or a skip
    return inputs


def in_form(form: str, case: Case, inputs: Inputs) -> Inputs:
    """The inputs with their mask as the form has it: prepared beforehand, or as it is."""
    return placed(Drawn(case, prepared=form.startswith("prepared")), inputs)


def made(backend: Runner, form: str, deterministic: bool, seed: int = 0) -> tuple[Case, Inputs]:
    """A case and its tensors, or a skip: only gradients of cuda are sums in any order."""
    case = FORMS[form].with_(seed=seed)
    inputs = served(backend, case)
    if not deterministic and backend.choice(case, inputs, deterministic=False) != "cuda":
        pytest.skip("its gradients are summed in one order")
    return case, in_form(form, case, inputs)


def summed(case: Case, deterministic: bool) -> tuple[str, ...]:
    """The gradients that several blocks add to in any order."""
    if deterministic:
        return ()
    return ("dq",) if case.num_heads == case.num_heads_k else ("dq", "dk", "dv")


def buffers(inputs: Inputs) -> list[Tensor]:
    """All tensors of a call, also the tensors of a prepared mask."""
    arguments = [x for f in fields(inputs) for x in [getattr(inputs, f.name)] if x is not None]
    return [y for x in arguments for y in ([x] if isinstance(x, Tensor) else x.tensors)]


def leaves_of(inputs: Inputs) -> list[Tensor | None]:
    """q, k, v, bias and sink, new leaves that share the memory of the inputs."""
    arguments = (*(x for _, x in inputs.floats()), inputs.sink)
    return [None if x is None else x.detach().requires_grad_() for x in arguments]


def attend(
    backend: Runner, case: Case, inputs: Inputs, leaves: Sequence[Tensor | None], **flags: Any
) -> tuple[Tensor, ...]:
    """(out, lse) of the call on the backend."""
    q, k, v, bias, sink = leaves
    choice = backend.choice(case, inputs, **flags)
    flags = {**case.flags(), **case.dropping(), "return_lse": True, "backend": choice, "sink": sink, **flags}
    return flash_dmattn.attention(q, k, v, inputs.mask, bias, **flags)


def results(backend: Runner, case: Case, inputs: Inputs, **flags: Any) -> list[Tensor]:
    leaves = leaves_of(inputs)
    return with_gradients(attend(backend, case, inputs, leaves, **flags), leaves, inputs)


def with_gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor | None], inputs: Inputs) -> list[Tensor]:
    """The outputs and the gradients of the leaves, with nothing between the two passes."""
    out, lse = outputs
    wanted = [x for x in leaves if x is not None]
    pairs = [(out, inputs.dout)] if inputs.dlse is None else [(out, inputs.dout), (lse, inputs.dlse)]
    gradients = torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs])
    return [out.detach(), lse.detach(), *gradients]


def captured(call: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of the call, and the results that each of its replays writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a first call compiles and allocates stays outside of the graph
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call()
    return graph, actual


def fill(places: Inputs, values: Inputs) -> None:
    """Write the values into the tensors of a call."""
    for place, x in zip(buffers(places), buffers(values), strict=True):
        place.copy_(x)


def on_a_busy_stream(call: Callable[[Inputs], list[Tensor]], late: Inputs, values: Inputs) -> list[Tensor]:
    """The results of a call whose stream gives it the values after a long sleep; the host may not wait for that."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(values)  # memory of this stream: to ask the driver for it may wait
        for x in buffers(late):
            x.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        fill(late, values)
        actual = call(late)
    assert not stream.query(), "the host waited for the device, or the sleep is too short for this machine"
    stream.synchronize()
    return actual


class Products:
    """Products on a stream of their own, which move the order in which the blocks of another kernel start and end."""

    def __init__(self, size: int) -> None:
        self.stream = torch.cuda.Stream()
        self.x = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
        self.product = torch.empty_like(self.x)
        torch.cuda.synchronize()

    def start(self, count: int = 1) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                torch.mm(self.x, self.x, out=self.product)


def assert_equal(
    actual: list[Tensor], expected: list[Tensor], note: str = "", in_any_order: Collection[str] = ()
) -> None:
    """Bit for bit, NaN excluded: the results hold none. Results in `in_any_order` are sums in any order, and equal up
    to it."""
    names = ("out", "lse", "dq", "dk", "dv", "dbias")
    assert len(actual) == len(expected)
    for name, x, y in zip(names, actual, expected):
        assert x.dtype == y.dtype and x.shape == y.shape, f"{name} {note}: {x.dtype} {tuple(x.shape)}"
        if name in in_any_order:
            off, norm = (x.double() - y.double()).norm().item(), y.double().norm().item()
            assert off <= ORDER_OF_SUMS * norm, f"{name} {note}: off by {off:.3e}, and its norm is {norm:.3e}"
        elif not torch.equal(x, y):
            number = int((x != y).sum())
            worst = (x.double() - y.double()).nan_to_num().abs().max().item()
            raise AssertionError(f"{name} {note}: {number} of {x.numel()} values differ, by up to {worst:.3e}")
