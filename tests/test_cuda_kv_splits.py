"""Pieces of work whose keys are shared by several blocks, in the forward pass of cuda: against fp64, and repeated.

The tests set `passes.NUM_KV_SPLITS`, which is 0 elsewhere, the estimate: it shares none in most calls as small as
these.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial

import emulated_cuda
import pytest
import torch
from accuracy import Results, run
from cases import DEVICE, Case, Inputs
from compiled_header import compiled
from conftest import Runner
from gpu_calls import Products, captured
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.cuda import passes

on_cuda = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

TILE = 128
# The emulated GPU (tests/emulation/) has this many; each that has work takes time here.
NUM_SMS = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 20
BASE = Case(batch=1, seqlen_q=193, seqlen_k=520, head_dim=64, dtype=torch.bfloat16, needs_grad=())
FULL = ("B", "Hq", "Lq", "Lk")
TILES = ("B", "Hk", "Lq", "Lk")
BIASES = {"no bias": None, "per query": ("B", "Hq", "Lq", "1"), "per key": ("1", "Hk", "1", "Lk"), "per score": FULL}
every_bias = pytest.mark.parametrize("bias", BIASES)
both_dims = pytest.mark.parametrize("head_dim", (64, 128))
# The estimate; fewer than there are blocks of keys, and more.
every_number = pytest.mark.parametrize("num_kv_splits", (0, 2, 3, 9))


def every_kind_of_row(mask: Tensor) -> None:
    """Rows of tiles with none, one and some of their tiles, full and partial ones in turn."""
    for i, j in itertools.product(range(-(-mask.shape[2] // TILE)), range(-(-mask.shape[3] // TILE))):
        tile = mask[:, :, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
        if i == 0 or (i == 1 and j != 2) or (i + j) % 3 == 0:
            tile.fill_(False)
        elif (i + j) % 3 == 1:
            tile.fill_(True)


MASKS: dict[str, Callable[[Tensor], None] | None] = {
    "partial tiles": None,
    "every kind of row": every_kind_of_row,
    "nothing allowed": lambda mask: mask.fill_(False),
}


@pytest.fixture
def share_keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets into how many parts pieces of work come."""
    if DEVICE == "cpu":
        emulated_cuda.configure(NUM_SMS)
    return lambda num_kv_splits: monkeypatch.setattr(passes, "NUM_KV_SPLITS", num_kv_splits)


def attend(case: Case, inputs: Inputs) -> Results:
    """(out, lse) of cuda."""
    return run(partial(flash_dmattn.attention, return_lse=True, backend="cuda"), case, inputs)


def check(backend: Runner, case: Case, inputs: Inputs | None = None, call: Inputs | None = None) -> None:
    """Compare the results of cuda with fp64 and with a second run; `call`: the same tensors in another form."""
    inputs = case.build() if inputs is None else inputs
    call = inputs if call is None else call
    results, again = backend.check(case, inputs, call), attend(case, call)
    for name in ("out", "lse"):
        assert torch.equal(results[name], again[name]), name


def more_than_sms(case: Case) -> Case:
    """Return the case with so many heads that only pieces of the last round are split."""
    rows = -(-case.seqlen_q // TILE)
    return case.with_(num_heads=2 * (-(-4 * NUM_SMS // (3 * rows)) // 2) + 2)


@on_cuda
@every_number
@both_dims
@every_bias
@pytest.mark.parametrize("form", ("none", "causal", *MASKS))
def test_every_mask(
    backend: Runner, form: str, bias: str, head_dim: int, num_kv_splits: int, share_keys: Callable[[int], None]
) -> None:
    share_keys(num_kv_splits)
    case = BASE.with_(head_dim=head_dim, bias=BIASES[bias], is_causal=form == "causal")
    case = case.with_(seqlen_q=400, mask=TILES) if form in MASKS else case
    inputs = case.build()
    leave_out = MASKS.get(form)
    if leave_out is not None:
        leave_out(inputs.mask)
    check(backend, case, inputs)


@on_cuda
@every_number
@both_dims
@pytest.mark.parametrize("form", ("dense", "causal", "per score", "mask"))
def test_the_last_round(
    backend: Runner, form: str, head_dim: int, num_kv_splits: int, share_keys: Callable[[int], None]
) -> None:
    """Pieces that stay whole, shared out evenly or as blocks finish, and behind them parts."""
    share_keys(num_kv_splits)
    case = more_than_sms(BASE.with_(head_dim=head_dim, is_causal=form == "causal"))
    case = case.with_(bias=FULL if form == "per score" else None, mask=TILES if form == "mask" else None)
    check(backend, case)


@on_cuda
@pytest.mark.parametrize("seqlen_q", (1, 15, 16, 17, 64, 65, 129, 191))
@both_dims
def test_few_rows(backend: Runner, head_dim: int, seqlen_q: int, share_keys: Callable[[int], None]) -> None:
    """Warps with all of their rows, some of them and none."""
    share_keys(4)
    for changes in ({}, {"is_causal": True, "num_heads_k": 1}, {"bias": BIASES["per key"], "head_dim_v": head_dim - 8}):
        case = BASE.with_(seqlen_q=seqlen_q, seqlen_k=1030, head_dim=head_dim, **changes)
        check(backend, case)


@on_cuda
def test_how_many_is_said_by_a_number(backend: Runner, share_keys: Callable[[int], None]) -> None:
    case = BASE.with_(seqlen_q=9)
    inputs = case.build()
    for num_kv_splits in (-1, 65):
        share_keys(num_kv_splits)
        with pytest.raises(RuntimeError, match=f"num_splits is {num_kv_splits}; it may be 0 to 64"):
            attend(case, inputs)


@on_cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("form", ("dense", "per score", "mask", "few rows"))
def test_the_order_in_which_parts_end_changes_nothing(
    backend: Runner, form: str, share_keys: Callable[[int], None]
) -> None:
    """A thousand runs during products on another stream, and replays of a graph."""
    share_keys(5)
    case = BASE.with_(seqlen_q=1, num_heads=16, seqlen_k=8200) if form == "few rows" else more_than_sms(BASE)
    case = case.with_(bias=FULL if form == "per score" else None, mask=TILES if form == "mask" else None)
    inputs = case.build()
    first = attend(case, inputs)
    differs = torch.zeros(1000, dtype=torch.bool, device="cuda")
    products = Products(2048)
    for repeat in range(len(differs)):
        if repeat % 3 == 0:
            products.start()
        actual = attend(case, inputs)
        differs[repeat] = (actual["out"] != first["out"]).any() | (actual["lse"] != first["lse"]).any()
    assert not differs.any(), f"{int(differs.sum())} of {len(differs)} differ from the first"
    graph, actual = captured(lambda: list(attend(case, inputs).values())[:2])
    for _ in range(3):
        for x in actual:
            x.zero_()
        graph.replay()
        assert torch.equal(actual[0], first["out"]) and torch.equal(actual[1], first["lse"])


# How many parts: csrc/api/num_splits.h, compiled separately

ESTIMATE = """
#include "api/num_splits.h"
extern "C" void estimate(int64_t tiles, int64_t steps, int64_t num_sms, int uneven, int64_t* result) {
  const flash_dmattn::KvSplits found = flash_dmattn::estimate_num_splits(tiles, steps, num_sms, uneven);
  result[0] = found.unsplit_tiles;
  result[1] = found.num_splits;
}
"""


@pytest.fixture(scope="module")
def estimate() -> Callable[..., tuple[int, int]]:
    """`estimate_num_splits` on 132 SMs: (unsplit tiles, splits)."""
    function = compiled(ESTIMATE).estimate
    function.argtypes = (*3 * (ctypes.c_int64,), ctypes.c_int, ctypes.POINTER(ctypes.c_int64))

    def call(pieces: int, steps: int, uneven: bool = False) -> tuple[int, int]:
        result = (ctypes.c_int64 * 2)()
        function(pieces, steps, 132, uneven, result)
        return result[0], result[1]

    return call


@pytest.mark.parametrize(
    ("pieces", "steps", "actual"),
    (
        (704, 16, (660, 3)),  # a bias at D64, (4, 16, 2048): 44 pieces are left, and 132 parts
        (2816, 32, (2772, 3)),  # dense D64, (4, 32, 4096)
        (2048, 32, (1980, 3)),  # dense D128, (4, 16, 4096): 68 pieces in two rounds of thirds
        (512, 32, (396, 1)),  # of a round that is nearly full nothing is gained
        (1408, 16, (1320, 1)),
        (660, 16, (660, 1)),  # no piece is left
        (1, 4, (0, 1)),  # too short to pay for it
        (64, 8, (0, 1)),
        (16, 8, (0, 4)),  # the more parts, the more there is to read in the end
        (32, 512, (0, 4)),  # decoding: 32 heads
        (4, 512, (0, 32)),
        (1, 1, (0, 1)),
        (44, 0, (0, 1)),
    ),
)
def test_estimate(pieces: int, steps: int, actual: tuple[int, int], estimate: Callable[..., tuple[int, int]]) -> None:
    assert estimate(pieces, steps) == actual


def test_estimate_of_pieces_that_differ(estimate: Callable[..., tuple[int, int]]) -> None:
    """Under a band the pieces of the last round are the shortest; where they are few, all of them are split."""
    assert estimate(704, 16, True) == (704, 1)
    assert estimate(64, 32, True) == (0, 2)


def test_estimate_splits_no_more_than_there_is(estimate: Callable[..., tuple[int, int]]) -> None:
    for pieces, steps in itertools.product(range(1, 400, 7), (1, 2, 3, 16, 100, 1 << 23)):
        unsplit, parts = estimate(pieces, steps)
        assert unsplit == pieces - pieces % 132 and 1 <= parts <= min(steps, 64)
