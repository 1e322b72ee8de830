"""The systems of the benchmarks on a CPU: what each computes, which cases it takes, and how a peer is computed.

Peers whose kernels run on GPUs alone are stood in for by functions of their signatures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmark_systems import CPU, EAGER, GPU, RATES, named, times
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask

import flash_dmattn
from benchmarks import systems
from benchmarks.cases import CASES, Case, cases_of
from benchmarks.inputs import Inputs, make_inputs, shifted_windows
from benchmarks.suites import performance
from benchmarks.suites.trial import attempt, outputs
from benchmarks.systems import Mode, Needs, cuequivariance, fa4, flexattention, ours, predecessor, sdpa
from benchmarks.truth import errors, truth
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.reference import formula

NAMES = ("causal-gqa", "bias-1hll-d64", "keys-8k", "topk-8k", "blocks", "band", "mask-documents", "mask-padding")
SHORT = cases_of("performance", ["short"])


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


# FlashAttention-4


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[float, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute by SDPA what the function of 4.0.0b36 takes and returns; tensors are (B, L, H, D)."""
    unused = (qv, gather_kv_indices, learnable_sink, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars)
    assert all(x is None for x in unused) and window_size == (None, None) and softcap == 0.0
    group, length, scale = q.shape[2] // k.shape[2], q.shape[1], softmax_scale or q.shape[3] ** -0.5
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    allowed = torch.ones(length, k.shape[2], dtype=torch.bool)
    if causal:
        allowed = allowed.tril(k.shape[2] - length)
    out = F.scaled_dot_product_attention(q, k, v, allowed, scale=scale).transpose(1, 2)
    if not return_lse:
        return out, None
    scores = (q.float() @ k.float().transpose(2, 3) * scale).masked_fill(~allowed, -torch.inf)
    return out, scores.logsumexp(3).detach()


def install_fa4(monkeypatch: pytest.MonkeyPatch, attend: Callable[..., Any]) -> None:
    """Put modules in the place of the package, with a function for `flash_attn_func`."""
    monkeypatch.setenv(fa4.KEEP_COMPILED, "0")  # back as it was after the test
    for name in ("flash_attn", "flash_attn.cute", fa4.MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[fa4.MODULE], "flash_attn_func", attend, raising=False)


@pytest.mark.parametrize("mode", [Mode(), Mode(with_lse=True)], ids=["out", "out and lse"])
@pytest.mark.parametrize("name", ["causal-gqa", "causal-d64", "decode-8k"])
def test_fa4_computes_the_formula(name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fa4(monkeypatch, flash_attn_func)
    case = named(name).reduced(128)
    inputs = make_inputs(case, CPU, torch.float32)
    computed = errors(outputs(fa4.bind(inputs, mode), inputs, backward=case.takes_gradients), truth(inputs, True))
    expected = {"out"} | ({"lse"} if mode.with_lse else set()) | ({"dq", "dk", "dv"} if case.takes_gradients else set())
    assert set(computed) == expected
    assert all(error < 1e-5 for error in computed.values()), computed


def test_fa4_is_checked_in_the_run_that_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = flash_attn_func(*tensors, **options)
        return out * 1.05, lse

    (system,) = fa4.SYSTEMS
    for attend, wrong in ((flash_attn_func, []), (spoiled, ["out", "dq", "dk", "dv"])):
        install_fa4(monkeypatch, attend)
        row = performance.row(
            named("causal-gqa").reduced(128),
            [EAGER, system],
            CPU,
            passes=("forward", "backward"),
            effort=performance.Effort(1.0, 2, 3),
            rates=RATES,
        )
        column = times(row, "fa4")
        assert not column["failed"], column["reason"]
        assert column["wrong"] == wrong
        assert column["first_call_s"] is not None and column["forward"] and column["backward"]


def test_which_cases_fa4_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "device_arch", lambda device: "sm_90")
    for case in CASES:
        computed = fa4.needs(case, GPU)
        has_kernel = case.head_dim % 8 == 0 and case.head_dim <= 256
        assert bool(computed.refusal) == (case.mask is not None or case.bias is not None or not has_kernel)
        assert not computed.backward_refusal and not computed.lse_refusal
    for head_dim in (4, 100, 264):
        assert str(head_dim) in fa4.needs(replace(named("causal-gqa"), head_dim=head_dim), GPU).refusal
    monkeypatch.setattr(fa4, "device_arch", lambda device: "sm_80")
    assert "sm_80" in fa4.needs(named("causal-gqa"), GPU).backward_refusal
    assert fa4.needs(named("decode-8k"), GPU) == systems.Needs()


def test_where_fa4_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fa4.KEEP_COMPILED, "0")
    monkeypatch.setitem(sys.modules, fa4.MODULE, None)  # as if there were no such module, whatever is installed
    working, reasons = systems.available(["fa4"], GPU)
    assert not working and "flash_attn.cute.interface cannot be imported: ModuleNotFoundError" in reasons["fa4"]
    assert "docs/benchmarks.md" in reasons["fa4"]
    assert fa4.missing(CPU) == "its kernels run on GPUs"


def test_compiled_kernels_are_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fa4(monkeypatch, flash_attn_func)
    fa4.interface()
    assert os.environ[fa4.KEEP_COMPILED] == "0"
    monkeypatch.delenv(fa4.KEEP_COMPILED)
    fa4.interface()
    assert os.environ[fa4.KEEP_COMPILED] == "1"


# Short rows, and cuEquivariance


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


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_eager_is_right_on_short_rows(case: Case) -> None:
    """Every case, cut to what a CPU runs."""
    inputs = make_inputs(case.reduced(64), CPU, torch.float32)
    trial = attempt(systems.by_name("eager"), Mode(), case.reduced(64), inputs)
    assert trial.has_backward and max(errors(trial.results, truth(inputs)).values()) < 1e-5


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> Tensor:
    """Compute what its documentation says: (B, N, H, L, D), a bias (B, 1, H, Lq, Lk), a mask (B, N, 1, 1, Lk)."""
    assert q.dim() == 5 and q.shape[0] == 1 and scale is None and not return_aux
    batch, rows, heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[3]
    assert bias.shape == (batch, 1, heads, seqlen_q, seqlen_k)
    assert mask is None or mask.shape == (batch, rows, 1, 1, seqlen_k)
    allowed = None if mask is None else mask[0]
    out, *_ = formula.attention(*(x[0].transpose(1, 2) for x in (q, k, v)), allowed, bias[0])
    return out.transpose(1, 2).unsqueeze(0)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(cuequivariance.MODULE)
    monkeypatch.setattr(made, "triangle_attention", triangle_attention, raising=False)
    monkeypatch.setitem(sys.modules, cuequivariance.MODULE, made)
    return made


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["short-pair-64", "short-triangle", "short-t5"])
def test_cuequivariance(name: str) -> None:
    case = named(name).reduced(64)
    inputs = make_inputs(case, CPU, torch.float32)
    (system,) = cuequivariance.SYSTEMS
    assert system.missing(GPU) == "" and system.missing(CPU) == "its kernels run on GPUs"
    trial = attempt(system, Mode(), case, inputs)
    assert trial.reason == "" and trial.has_backward and list(system.modes(case)) == ["call"]
    computed = errors(trial.results, truth(inputs))
    assert list(computed) == ["out", "dq", "dk", "dv", "dbias"] and max(computed.values()) < 1e-5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("causal-gqa", "it takes neither causality nor grouped heads"),
        ("short-vit-197", "it takes calls with a bias (1,Hq,L,L)"),
        ("bias-bhll-d64", "it takes calls with a bias (1,Hq,L,L)"),
        ("short-shifted-256", "it takes masks (B,1,1,L)"),
    ],
)
def test_what_cuequivariance_does_not_take(name: str, sentence: str) -> None:
    assert cuequivariance.needs(named(name), GPU) == Needs(sentence)


def test_without_cuequivariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, cuequivariance.MODULE, None)
    said = cuequivariance.missing(GPU)
    assert said.startswith("cuequivariance_torch cannot be imported: ModuleNotFoundError: ")
