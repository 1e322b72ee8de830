"""What every system of the benchmarks computes on a CPU, what it says of the cases, and how it is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

import flash_dmattn
from benchmarks import systems
from benchmarks.cases import CASES, Case
from benchmarks.inputs import Inputs, make_inputs
from benchmarks.suites.trial import outputs
from benchmarks.systems import Mode, flexattention, ours, predecessor, sdpa
from benchmarks.truth import errors, truth
from flash_dmattn.dispatch.registry import BACKENDS

CPU = torch.device("cpu")
NAMES = ("causal-gqa", "bias-1hll-d64", "keys-8k", "topk-8k", "blocks", "band", "mask-documents", "mask-padding")


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return named(request.param).reduced(256)


@pytest.fixture
def inputs(case: Case) -> Inputs:
    return make_inputs(case, CPU, torch.float32)


def results_agree(call: systems.Bound, inputs: Inputs, backward: bool = True) -> None:
    exact = truth(inputs, backward)
    found = errors(outputs(call, inputs, backward=backward), exact)
    assert {"out", *(inputs.leaves if backward else ())} <= set(found)
    assert all(error < 1e-5 for error in found.values()), found


MODES = pytest.mark.parametrize("mode", [Mode(), Mode(prepared=True), Mode(with_lse=True)], ids=str)


@MODES
@pytest.mark.parametrize("name", ["eager", "reference"])
def test_ours(name: str, mode: Mode, inputs: Inputs) -> None:
    results_agree(ours.bind(name, inputs, mode), inputs)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("grouped_kernel", [False, True])
def test_sdpa(inputs: Inputs, grouped_kernel: bool, prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_serves_groups", lambda *call: grouped_kernel)
    results_agree(sdpa.bind(SDPBackend.MATH, inputs, Mode(prepared=prepared)), inputs)


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention's own dense formula has a backward pass on CPU, once nothing refuses it."""
    import torch._functorch.config
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda query, key, value: None)
    before = torch._functorch.config.donated_buffer
    yield
    torch._functorch.config.donated_buffer = before


@MODES
def test_flexattention(inputs: Inputs, mode: Mode, backward_on_cpu: None) -> None:
    results_agree(flexattention.bind(inputs, mode), inputs)


def test_flexattention_forward_alone(inputs: Inputs) -> None:
    with torch.no_grad():
        results_agree(flexattention.bind(inputs, Mode(with_lse=True)), inputs, backward=False)


def test_lengths_that_differ(backward_on_cpu: None) -> None:
    inputs = make_inputs(named("form-few-queries"), CPU, torch.float32)
    results_agree(sdpa.bind(SDPBackend.MATH, inputs, Mode()), inputs)
    results_agree(flexattention.bind(inputs, Mode()), inputs)


@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize("name", [case.name for case in CASES if case.mask is not None])
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


def test_flexattention_with_too_many_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    build = flexattention.build

    def scarce(inputs: Inputs, mode: Mode, options: dict[str, int]) -> systems.Bound:
        tried.append(options)
        call = build(inputs, mode, {})

        def refuses() -> tuple[torch.Tensor, ...]:
            raise RuntimeError("InductorError: out of resource: shared memory, Required: 278528")

        return call if options == {"num_stages": 2} else refuses

    monkeypatch.setattr(flexattention, "build", scarce)
    inputs = make_inputs(named("causal-gqa").reduced(256), CPU, torch.float32)
    with torch.no_grad():
        assert flexattention.bind(inputs, Mode())()[0].shape == inputs.q.shape
    assert tried == [{}, {"num_stages": 2}]


def test_the_block_mask_is_made_of_one_function(inputs: Inputs) -> None:
    """Another function in each call would be another graph to compile in each call."""
    allowed, make = inputs.allowed(), flexattention.block_mask_maker(inputs)
    first, second = make(), make()
    if allowed is None:
        assert first is None
        return
    assert (first is second) == (inputs.mask is None)  # that of causality belongs to the lengths, and is kept
    assert first.mask_mod is second.mask_mod
    heads = first.kv_num_blocks.shape[1]
    tiles = allowed.unflatten(3, (2, 128)).unflatten(2, (2, 128)).any(5).any(3)
    wanted = tiles.repeat_interleave(heads // tiles.shape[1], 1) if heads > 1 else tiles
    assert torch.equal(first.to_dense().bool(), wanted.expand_as(first.to_dense()))


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
    assert "flexattention" not in chosen and "reference" not in chosen and {"cuda", "fa4"} <= set(chosen)


def test_the_predecessor_is_loaded_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert predecessor.missing(gpu).startswith("FLASH_DMATTN_PREDECESSOR does not name")
    monkeypatch.setenv(predecessor.PREDECESSOR, str(tmp_path))
    assert "cannot be imported: FileNotFoundError" in predecessor.missing(gpu)
    package = tmp_path / "flash_dmattn"
    package.mkdir()
    source = "def flash_dmattn_func(q, k, v, mask, bias, is_causal):\n    return q * 2 if is_causal else k\n"
    (package / "flash_dmattn_interface.py").write_text(source)
    inputs = make_inputs(named("causal-gqa").reduced(256), CPU)
    try:
        assert predecessor.missing(gpu) == ""
        assert torch.equal(predecessor.bind(inputs, Mode())()[0], inputs.q * 2)
        assert flash_dmattn.attention is not None and not hasattr(flash_dmattn, "flash_dmattn_func")
    finally:
        import sys

        sys.modules.pop("predecessor_flash_dmattn_interface", None)
        sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
