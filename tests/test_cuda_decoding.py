"""Few queries on cuda: the heads of a group as rows of one tile. On a GPU or the emulated one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cases import Case
from conftest import Runner
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.cuda import group_rows, passes
from flash_dmattn.call import prepare_call, run_call
from flash_dmattn.masks import PreparedMask
from flash_dmattn.problem import RawFlags

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

BASE = Case(
    batch=2, seqlen_q=1, seqlen_k=300, num_heads=6, num_heads_k=2, head_dim=64, dtype=torch.bfloat16, needs_grad=()
)
MASKS = {
    "none": None,
    "one row": ("B", "1", "1", "Lk"),
    "of key heads": ("B", "Hk", "1", "Lk"),
    "of query heads": ("1", "Hq", "1", "Lk"),
    "of all keys": ("B", "Hq", "1", "1"),
}
BIASES = {
    "none": None,
    "shared": ("1", "1", "1", "Lk"),
    "of key heads": ("B", "Hk", "1", "Lk"),
    "of query heads": ("B", "Hq", "Lq", "Lk"),
    "per query": ("B", "Hq", "Lq", "1"),
}
BANDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (130, 0)},
    "one key": {"window_size": (0, 0)},
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """q, k, v, out and lse of the calls of a test whose heads became rows."""
    calls: list[tuple[Tensor, ...]] = []

    def watched(*call: Any) -> tuple[Tensor, ...]:
        calls.append(as_rows(*call))
        return calls[-1]

    as_rows = group_rows.as_rows
    monkeypatch.setattr(group_rows, "as_rows", watched)
    return calls


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_and_bias(
    backend: Runner, mask: str, bias: str, band: str, joined: list[tuple[Tensor, ...]]
) -> None:
    backend.check(BASE.with_(mask=MASKS[mask], bias=BIASES[bias], **BANDS[band]))
    ((q, k, _, _, lse),) = joined
    assert q.shape == (2, 3, 2, 64) and lse.shape == (2, 2, 3)
    assert k.shape[1] == {"window": 131, "one key": 1}.get(band, 300)


@pytest.mark.parametrize("keys", (1, 33, 128, 129, 1100))
@pytest.mark.parametrize("heads", ((2, 1), (40, 2), (512, 1)), ids=str)
def test_groups_and_lengths(
    backend: Runner,
    heads: tuple[int, int],
    keys: int,
    joined: list[tuple[Tensor, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group of 512 heads has several tiles of rows; several blocks share the keys of a tile."""
    monkeypatch.setattr(passes, "NUM_KV_SPLITS", 3)
    case = BASE.with_(seqlen_k=keys, num_heads=heads[0], num_heads_k=heads[1], softcap=5.0 if keys == 33 else 0.0)
    backend.check(case)
    assert len(joined) == 1


def test_a_row_without_keys(backend: Runner, joined: list[tuple[Tensor, ...]]) -> None:
    backend.check(BASE.with_(mask=MASKS["of query heads"], mask_kind="none_allowed"))
    backend.check(BASE.with_(mask=MASKS["one row"], mask_kind="empty_rows"))
    assert len(joined) == 2


def test_what_goes_head_by_head(backend: Runner, joined: list[tuple[Tensor, ...]]) -> None:
    """A sink is of each head, a prepared mask has one row, and a group of one head has nothing to join."""
    backend.check(BASE.with_(sink="normal"))
    assert joined == []
    inputs = BASE.with_(mask=MASKS["of key heads"]).build()
    assert inputs.mask is not None
    mask = PreparedMask.from_mask(inputs.mask, seqlen_q=1, seqlen_k=300)
    call = partial(flash_dmattn.attention, inputs.q, inputs.k, inputs.v, backend="cuda")
    prepared = call(mask)
    assert joined == []
    torch.testing.assert_close(prepared, call(inputs.mask), atol=2e-2, rtol=0.0)
    assert len(joined) == 1
    backend.check(BASE.with_(num_heads=2))
    assert len(joined) == 1


def test_gradients(backend: Runner, joined: list[tuple[Tensor, ...]]) -> None:
    """The backward pass reads out and lse of heads."""
    backend.check(BASE.with_(needs_grad=("q", "k", "v", "bias"), bias=BIASES["shared"], dlse=True))
    assert len(joined) == 1


SEVERAL: dict[str, dict[str, Any]] = {
    "a tile": {"seqlen_q": 9, "num_heads": 8},
    "no band": {"seqlen_q": 9, "num_heads": 8, "is_causal": False},
    "several tiles": {"seqlen_q": 50, "num_heads": 16, "num_heads_k": 2},
    "queries without keys": {"seqlen_q": 9, "seqlen_k": 5, "num_heads": 4},
    "keys to come": {"seqlen_q": 9, "is_causal": False, "window_size": (-1, 3), "num_heads": 4, "softcap": 5.0},
    "window": {"seqlen_q": 9, "is_causal": False, "window_size": (50, 0), "num_heads": 4},
    "two of six heads": {"seqlen_q": 9, "num_heads": 6, "num_heads_k": 1},
    "more heads than rows of a consumer": {"seqlen_q": 3, "num_heads": 128, "num_heads_k": 1},
    "gradients": {"seqlen_q": 20, "num_heads": 4, "needs_grad": ("q", "k", "v"), "dlse": True},
}


def shift_of(case: Case) -> int:
    x = case.build()
    return group_rows.group_shift(flash_dmattn.explain(x.q, x.k, x.v, bias=x.bias, sink=x.sink, **case.flags()).problem)


@pytest.fixture
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_rows, "LEAST_KEYS", 0)
    monkeypatch.setattr(group_rows, "MANY_KEYS", 0)


@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("name", SEVERAL)
def test_several_queries(backend: Runner, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The band is of queries, and a row is a head of one; also where blocks share the keys of a tile."""
    case = BASE.with_(**{"is_causal": True, **SEVERAL[name]})
    assert shift_of(case) > 0
    backend.check(case)
    monkeypatch.setattr(passes, "NUM_KV_SPLITS", 3)
    backend.check(case)


@pytest.mark.usefixtures("few_keys")
def test_several_queries_with_heads_first(backend: Runner) -> None:
    """The heads of a query are far apart in q."""
    x = BASE.with_(seqlen_q=9, num_heads=8).build()
    rows = flash_dmattn.attention(x.q, x.k, x.v, is_causal=True, backend="cuda")
    q, k, v = (each.transpose(1, 2).contiguous() for each in (x.q, x.k, x.v))
    numbers = RawFlags(is_causal=True)
    heads = run_call(prepare_call(q, k, v, None, None, None, None, numbers, heads_first=True), "cuda")[0]
    torch.testing.assert_close(heads, rows, atol=0.0, rtol=0.0)


def test_several_queries_that_go_head_by_head(backend: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias or a sink, groups of an odd number, many queries, and few keys in sight."""
    few = BASE.with_(seqlen_q=9, is_causal=True, num_heads=8)
    others: tuple[dict[str, Any], ...] = (
        {"num_heads": 6},
        {"num_heads": 2},
        {"bias": BIASES["shared"]},
        {"sink": "normal"},
        {"seqlen_q": 33},
        {"seqlen_q": 65, "seqlen_k": 1024},
    )
    monkeypatch.setattr(group_rows, "LEAST_KEYS", 2 * 2 * 300 * 128)
    assert all(shift_of(few.with_(**other)) == 0 for other in others)
    assert shift_of(few) == shift_of(few.with_(seqlen_q=33, seqlen_k=1024)) == 2
    assert shift_of(few.with_(seqlen_k=299)) == 0
    assert shift_of(few.with_(is_causal=False, window_size=(290, 0))) == 0
    assert shift_of(few.with_(is_causal=False, window_size=(291, 0))) == 2
