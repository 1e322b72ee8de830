"""The cases of `benchmarks.packed` on a CPU: short sequences, each result against what checks it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from benchmarks import packed
from benchmarks.floors import Rates
from benchmarks.systems import fa4
from flash_dmattn import BackendUnavailableError, BackendUnsupportedError

CPU = torch.device("cpu")
RATES = Rates(1e9, 1e9, "made up")
LENGTHS = (40, 7, 1, 33)


def small(case: packed.Case) -> packed.Case:
    return case._replace(lengths=LENGTHS, heads=4, heads_k=min(case.heads_k, 2), head_dim=16, kept=min(case.kept, 8))


def test_every_case_is_checked_and_has_a_row_for_each_system(capsys: pytest.CaptureFixture[str]) -> None:
    for case in map(small, packed.CASES):
        assert packed.run_case(case, CPU, ("eager",), RATES, 1.0)
        rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
        systems = {row[1]: row for row in rows}
        peers = [] if case.bias else ["varlen_attn", "fa4 varlen"]
        assert list(systems) == ["eager", *(["eager, tiles"] if case.kept else []), *peers] + (
            ["making the tiles"] if case.kept else []
        )
        assert all(row[-1] == "yes |" for name, row in systems.items() if name.startswith("eager"))
        if peers:
            assert systems["varlen_attn"][2].startswith("NotImplementedError: "), "torch has no such kernel on a CPU"
            assert systems["fa4 varlen"][2] == "RuntimeError: its kernels run on GPUs"


def one_by_one(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, is_causal: bool) -> Tensor:
    """Packed sequences by SDPA, one after the other."""
    group = q.shape[1] // k.shape[1]
    parts = []
    for first, last in zip(edges.tolist(), edges.tolist()[1:], strict=False):
        heads = [
            x[first:last].transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        ]
        parts.append(F.scaled_dot_product_attention(*heads, is_causal=is_causal).transpose(0, 1))
    return torch.cat(parts)


def rows_of(case: packed.Case, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The row of each system, once all of them are right or have failed."""
    assert packed.run_case(case, CPU, (), RATES, 1.0)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    return {row[1]: row for row in rows}


@pytest.mark.parametrize("spoiled", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("number", [0, 1, 3], ids=["causal", "grouped heads", "full"])
def test_flash_attention_4_has_what_its_interface_needs(
    number: int, spoiled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function of the parameters that 4.0.0b36 has, in the place of the package."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> tuple[Tensor, None]:
        assert qv is None and min_seqlen_k is None and seqused_q is None and seqused_k is None
        assert cu_seqlens_q is not None and cu_seqlens_k is not None and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == max_seqlen_k == max(LENGTHS)
        return one_by_one(q, k, v, cu_seqlens_q, causal) * (1.05 if spoiled else 1.0), None

    monkeypatch.setenv(fa4.KEEP_COMPILED, "0")  # back as it was after the test
    for name in ("flash_attn", "flash_attn.cute", fa4.MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[fa4.MODULE], "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    monkeypatch.setattr(fa4, "missing", lambda device: "")
    case = small(packed.CASES[number])
    if spoiled:
        assert not packed.run_case(case, CPU, (), RATES, 1.0)
        assert "fa4 varlen: out is" in capsys.readouterr().err
    else:
        assert rows_of(case, capsys)["fa4 varlen"][-1] == "yes |"


@pytest.mark.parametrize("has_flag", [True, False], ids=["enable_gqa", "no enable_gqa"])
def test_grouped_heads_reach_varlen_attn_of_every_torch(
    has_flag: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch 2.11 has no `enable_gqa` and asks nothing; later releases refuse grouped heads without it."""
    seen = []

    def older(
        q: Tensor, k: Tensor, v: Tensor, edges: Tensor, _: Tensor, most: int, __: int, *, window_size: tuple[int, int]
    ) -> Tensor:
        seen.append(k.shape[1])
        return one_by_one(q, k, v, edges, window_size == (-1, 0))

    def later(*arguments: Any, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
        assert enable_gqa == (arguments[0].shape[1] != arguments[1].shape[1])
        return older(*arguments, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", later if has_flag else older)
    for case, heads_k in ((packed.CASES[0], 4), (packed.CASES[1], 2)):
        seen.clear()
        rows = rows_of(small(case)._replace(heads_k=heads_k), capsys)
        assert rows["varlen_attn"][-1] == "yes |" and set(seen) == {heads_k}


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = small(packed.CASES[0])

    def wrong(batch: packed.Batch, backends: Any) -> list[packed.System]:
        spoiled_call: Callable[[], Tensor] = lambda: batch.call() * 1.02
        return [packed.System("wrong", spoiled_call)]

    monkeypatch.setattr(packed, "systems", wrong)
    assert not packed.run_case(case, CPU, ("eager",), RATES, 1.0)
    printed = capsys.readouterr()
    assert "| NO |" in printed.out and "wrong: out is" in printed.err


def test_a_call_spoiled_call_that_raises_is_a_failure_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that fails is none, nor a refusal by the rules of a backend: `cuda` takes no mask beside sequences."""
    case, failure = small(packed.CASES[0]), RuntimeError("a kernel has failed")

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, error: Exception, late: bool) -> Tensor:
            if not late:
                raise error
            ctx.error = error
            return q.clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            raise ctx.error

    for error, is_peer, good in (
        (failure, False, False),
        (BackendUnavailableError("not built", backend="cuda"), False, False),
        (BackendUnsupportedError("no mask", backend="cuda"), False, True),
        (failure, True, True),
    ):
        for late in (False, True):

            def one(batch: packed.Batch, _: Any, arguments: Any = (error, late), is_peer: bool = is_peer) -> Any:
                return [packed.System("one", lambda: Failing.apply(batch.q, *arguments), is_peer)]

            monkeypatch.setattr(packed, "systems", one)
            assert packed.run_case(case, CPU, (), RATES, 1.0) is good
            assert f"| one | {type(error).__name__}: {error} |" in capsys.readouterr().out


def test_floors_count_what_is_allowed() -> None:
    causal = packed.Batch(packed.Case("", (3, 2), 2, 1, 4, is_causal=True), CPU)
    forward, backward = causal.floors()
    pairs = (6 + 3) * 2
    assert forward.flop == 4 * 4 * pairs and backward.flop == 10 * 4 * pairs
    assert forward.moved == 2 * (5 * 2 * 4 + 2 * 5 * 4 + 5 * 2 * 4)
    kept = packed.Batch(packed.Case("", (3, 2), 2, 1, 4, is_causal=True, kept=2), CPU)
    assert kept.mask is not None and int(kept.mask.sum()) == 5 + 3
    assert kept.floors()[0].flop == 4 * 4 * (5 + 3) * 2


def test_all_lengths_are_those_of_the_published_table() -> None:
    assert (sum(packed.MIX), sum(packed.SHORT), sum(packed.RELATIVE), sum(packed.TOP)) == (32768, 196608, 16384, 16384)
