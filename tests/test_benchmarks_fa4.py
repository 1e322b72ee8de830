"""FlashAttention-4 as a system of the benchmarks, with a module of the signature of its own in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmark_systems import CPU, EAGER, RATES, small, times
from torch import Tensor

from benchmarks import systems
from benchmarks.cases import CASES, Case
from benchmarks.inputs import make_inputs
from benchmarks.suites import performance
from benchmarks.suites.trial import outputs
from benchmarks.systems import Mode, fa4
from benchmarks.truth import errors, truth

GPU = torch.device("cuda")
Attend = Callable[..., tuple[Tensor, Tensor | None]]
CALLS = ("causal-gqa", "causal-d64", "decode-8k")


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


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
    """What 4.0.0b36 takes and returns, of (B, L, H, D) tensors, computed by SDPA."""
    given = (qv, gather_kv_indices, learnable_sink, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars)
    assert all(x is None for x in given) and window_size == (None, None) and softcap == 0.0
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


def install(monkeypatch: pytest.MonkeyPatch, attend: Attend) -> None:
    """Put modules in the place of the package, with a function for `flash_attn_func`."""
    monkeypatch.setenv(fa4.KEEP_COMPILED, "0")  # back as it was after the test
    for name in ("flash_attn", "flash_attn.cute", fa4.MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[fa4.MODULE], "flash_attn_func", attend, raising=False)


@pytest.mark.parametrize("mode", [Mode(), Mode(with_lse=True)], ids=["out", "out and lse"])
@pytest.mark.parametrize("name", CALLS)
def test_its_results_are_those_of_the_formula(name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash_attn_func)
    case = named(name).reduced(128)
    inputs = make_inputs(case, CPU, torch.float32)
    found = errors(outputs(fa4.bind(inputs, mode), inputs, backward=case.takes_gradients), truth(inputs, True))
    expected = {"out"} | ({"lse"} if mode.with_lse else set()) | ({"dq", "dk", "dv"} if case.takes_gradients else set())
    assert set(found) == expected
    assert all(error < 1e-5 for error in found.values()), found


def test_it_is_checked_in_the_run_that_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = flash_attn_func(*given, **options)
        return out * 1.05, lse

    (system,) = fa4.SYSTEMS
    for attend, wrong in ((flash_attn_func, []), (spoiled, ["out", "dq", "dk", "dv"])):
        install(monkeypatch, attend)
        row = performance.row(
            small("causal-gqa"),
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


def test_which_cases_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "device_arch", lambda device: "sm_90")
    for case in CASES:
        found = fa4.needs(case, GPU)
        assert bool(found.refusal) == (case.mask is not None or case.bias is not None or case.head_dim % 8 != 0)
        assert not found.backward_refusal and not found.lse_refusal
    for head_dim in (4, 100, 264):
        assert str(head_dim) in fa4.needs(replace(named("causal-gqa"), head_dim=head_dim), GPU).refusal
    monkeypatch.setattr(fa4, "device_arch", lambda device: "sm_80")
    assert "sm_80" in fa4.needs(named("causal-gqa"), GPU).backward_refusal
    assert fa4.needs(named("decode-8k"), GPU) == systems.Needs()


def test_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fa4.KEEP_COMPILED, "0")
    monkeypatch.setitem(sys.modules, fa4.MODULE, None)  # as if there were no such module, whatever is installed
    working, reasons = systems.available(["fa4"], GPU)
    assert not working and "flash_attn.cute.interface cannot be imported: ModuleNotFoundError" in reasons["fa4"]
    assert "docs/benchmarks.md" in reasons["fa4"]
    assert fa4.missing(CPU) == "its kernels run on GPUs"


def test_compiled_kernels_are_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    install(monkeypatch, flash_attn_func)
    fa4.interface()
    assert os.environ[fa4.KEEP_COMPILED] == "0"
    monkeypatch.delenv(fa4.KEEP_COMPILED)
    fa4.interface()
    assert os.environ[fa4.KEEP_COMPILED] == "1"
