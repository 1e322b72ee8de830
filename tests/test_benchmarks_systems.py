"""The systems of the benchmarks on a CPU: what each computes, and which cases it takes.

Every run compares the results of each system with the truth, also of peers whose kernels run on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from benchmark_systems import CPU, named
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks import systems
from benchmarks.cases import CASES, Case
from benchmarks.inputs import Inputs, make_inputs, shifted_windows
from benchmarks.suites.trial import outputs
from benchmarks.systems import Mode, flexattention, ours, sdpa
from benchmarks.truth import errors, truth
from flash_dmattn.dispatch.registry import BACKENDS

NAMES = ("causal-gqa", "bias-1hll-d64", "keys-8k", "topk-8k", "blocks", "band", "mask-documents", "mask-padding")


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return named(request.param).reduced(256)


@pytest.fixture
def inputs(case: Case) -> Inputs:
    return make_inputs(case, CPU, torch.float32)


def results_agree(call: systems.Bound, inputs: Inputs, backward: bool = True) -> None:
    exact = truth(inputs, backward)
    computed = errors(outputs(call, inputs, backward=backward), exact)
    assert {"out", *(inputs.leaves if backward else ())} <= set(computed)
    assert all(error < 1e-5 for error in computed.values()), computed


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention's own dense formula has a backward pass on CPU, once nothing refuses it."""
    import torch._functorch.config
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)
    before = torch._functorch.config.donated_buffer
    yield
    torch._functorch.config.donated_buffer = before


@pytest.mark.parametrize("mode", [Mode(), Mode(prepared=True), Mode(with_lse=True)], ids=str)
@pytest.mark.parametrize("name", ["eager", "reference", "sdpa-math", "flexattention"])
def test_results_are_those_of_the_truth(name: str, mode: Mode, inputs: Inputs, backward_on_cpu: None) -> None:
    results_agree(systems.by_name(name).bind(inputs, mode), inputs)


def test_sdpa_without_a_kernel_of_grouped_heads(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_serves_groups", lambda *call: False)
    results_agree(sdpa.bind(SDPBackend.MATH, inputs, Mode()), inputs)


@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize("name", {(case.mask.kind, case.mask.dims): case.name for case in CASES if case.mask}.values())
def test_block_masks_are_those_of_torch(name: str, heads_k: int) -> None:
    case = replace(named(name).reduced(300), heads=4, heads_k=heads_k)
    inputs = make_inputs(case, CPU)
    made = flexattention.block_mask_maker(inputs)()
    assert made is not None and inputs.mask is not None
    batch, heads = (None if inputs.mask.shape[dim] == 1 else size for dim, size in ((0, case.batch), (1, case.heads)))
    exact = create_block_mask(made.mask_mod, batch, heads, *inputs.lengths, device="cpu")
    for lists in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(made, lists), getattr(exact, lists))
        assert torch.equal(getattr(made, f"full_{lists}"), getattr(exact, f"full_{lists}"))


def test_needs_are_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "device_arch", lambda device: "sm_90")
    seen = set()
    for case in CASES:
        problem = case.explain("sm_90").problem
        needs = ours.needs("cuda", case, CPU)
        assert bool(needs.refusal) != BACKENDS["cuda"].accepts(problem, "forward")
        if not needs.refusal and case.takes_gradients:
            own = BACKENDS["cuda"].accepts(problem, "backward")
            assert needs.backends == ("cuda", "cuda" if own else "triton") and not needs.backward_refusal
        seen.add(needs.backends)
    assert {("cuda",), ("cuda", "triton")} <= seen
    assert "measured" not in ours.needs("triton", named("topk-8k"), CPU).refusal
    assert ours.needs("flex", named("form-full"), CPU).backends == ("flex", "flex")


def test_needs_on_cpu() -> None:
    needs = ours.needs("flex", named("form-full"), CPU)
    assert not needs.refusal and "no compiled backward pass" in needs.backward_refusal and needs.lse_refusal
    assert flexattention.needs(named("form-full"), CPU).backward_refusal
    assert sdpa.needs("sdpa-flash", named("band"), torch.device("cuda")).refusal
    assert "GiB" in sdpa.needs("sdpa-math", named("causal-d64"), CPU).refusal
    working, reasons = systems.available([system.name for system in systems.ALL], CPU)
    assert {system.name for system in working} == {
        *("flex", "eager", "reference", "sdpa-flash", "sdpa-math", "flexattention")
    }
    assert reasons["cuda"] == "its kernels run on GPUs"


def test_which_columns() -> None:
    flex, cuda, fa4 = (systems.by_name(name) for name in ("flexattention", "cuda", "fa4"))
    for system in (flex, cuda, fa4):
        assert list(system.modes(named("causal-gqa"))) == ["call"]
    assert list(cuda.modes(named("band"))) == list(flex.modes(named("band"))) == ["call", "prepared"]
    assert list(fa4.modes(named("band"))) == ["call"]
    with pytest.raises(ValueError, match="no system is called 'nothing'; there are cuda, triton"):
        systems.by_name("nothing")
    chosen = systems.chosen("performance", None, quick=True, device=torch.device("cuda"))
    assert not {"flexattention", "fa4", "reference"} & set(chosen) and {"cuda", "sdpa-cudnn"} <= set(chosen)


def test_shifted_windows() -> None:
    """An image of 3 x 3 windows of 4 x 4 tokens, rolled by half a window, against its definition by regions."""
    side, windows = 4, 3
    image = torch.zeros(side * windows, side * windows)
    count = 0
    for rows in (slice(0, -side), slice(-side, -side // 2), slice(-side // 2, None)):
        for columns in (slice(0, -side), slice(-side, -side // 2), slice(-side // 2, None)):
            image[rows, columns] = count
            count += 1
    regions = image.unflatten(1, (windows, side)).unflatten(0, (windows, side)).transpose(1, 2).reshape(9, 16)
    expected = regions[:, None, :, None] == regions[:, None, None, :]
    computed = shifted_windows(20, windows, side**2, CPU)
    assert computed.shape == (20, 1, 16, 16)
    assert torch.equal(computed[:9], expected) and torch.equal(computed[9:18], expected)
    # Windows of 7 x 7 tokens have 4 of the last region.
    odd = shifted_windows(4, 2, 49, CPU)
    assert odd[0].all() and odd.diagonal(dim1=2, dim2=3).all()
    assert odd[1, 0, 0].view(7, 7).all(0).tolist() == [True] * 4 + [False] * 3
