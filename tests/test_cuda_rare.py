"""Small calls, the same every time, of what random calls of cuda reach rarely: on a GPU or the emulated one.

Each feels some line of the kernels that all else may miss; `mutants/faults.py` plants a fault there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import emulated_cuda
import pytest
import torch
from accuracy import assert_accurate, assert_empty_rows_ignore_dlse, error, run
from cases import ALL, DEVICE, Case, Inputs
from conftest import Runner

from flash_dmattn.backends.cuda import passes
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared.storage import IntervalMask

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

BASE = Case(batch=1, seqlen_q=140, seqlen_k=200, head_dim=64, dtype=torch.bfloat16, dlse=True)
FULL = ("B", "Hq", "Lq", "Lk")
TILES = ("B", "Hk", "Lq", "Lk")
PER_KEY = ("1", "Hk", "1", "Lk")
SHARED = ("1", "1", "Lq", "Lk")
BIASES = {"no bias": None, "per key": PER_KEY, "per score": FULL, "shared": SHARED}
every_bias = pytest.mark.parametrize("bias", BIASES)


def check(backend: Runner, case: Case, inputs: Inputs | None = None, arguments: Inputs | None = None) -> None:
    """All results of only cuda against fp64; `arguments`: the same tensors in another form."""
    backend.check(case, inputs, arguments, alone=True)


# Scores


@every_bias
def test_every_gradient(backend: Runner, bias: str) -> None:
    check(backend, BASE.with_(bias=BIASES[bias]))


@pytest.mark.parametrize("head_dim", (72, 96))
@every_bias
def test_head_dims_of_a_panel_and_a_half(backend: Runner, bias: str, head_dim: int) -> None:
    """Consumers have shares of dq of 64 columns and of what is left; dk and dv are summed and stored."""
    check(backend, BASE.with_(bias=BIASES[bias], head_dim=head_dim))
    check(backend, BASE.with_(bias=BIASES[bias], head_dim=head_dim, seqlen_q=200, num_heads_k=1, is_causal=True))


@pytest.mark.parametrize("sign", (1, -1))
def test_great_scores_are_subtracted_before_they_are_scaled(backend: Runner, sign: int) -> None:
    """A row of one key has its value bit for bit, and equal keys of several tiles have equal weights.

    A score of 8e6 times log2(e) is rounded by up to 2^-1, of which the exponential would make 1.4.
    """
    case = BASE.with_(seqlen_q=400, seqlen_k=400, is_causal=True)
    x = case.build()
    q, k = torch.zeros_like(x.q), torch.zeros_like(x.k)
    q[..., 0], k[..., 0] = 8000.0, sign * 8000.0
    out, _ = backend.attention(case, x)(q, k, x.v, is_causal=True)
    v = x.v.repeat_interleave(2, 2)
    assert torch.equal(out[:, 0], v[:, 0])
    means = v.float().cumsum(1) / torch.arange(1, 401, device=v.device)[:, None, None]
    assert error(out, means) < torch.finfo(torch.bfloat16).eps / 2


@every_bias
def test_a_softcap(backend: Runner, bias: str) -> None:
    """From where tanh is a line to where it is flat; a shared dbias comes from a kernel that has its own tanh."""
    check(backend, BASE.with_(bias=BIASES[bias], softcap=2.0, logits=3.0))


@pytest.mark.parametrize("bias", ("no bias", "per key"))
def test_a_negative_scale(backend: Runner, bias: str) -> None:
    check(backend, BASE.with_(bias=BIASES[bias], softmax_scale=-0.3, logits=3.0))


def test_keys_far_above_a_maximum_that_is_negative(backend: Runner) -> None:
    """Keys are walked from the last one on. By their bits, the greatest of negative scores is the least of them."""
    case = BASE.with_(seqlen_k=384, bias=("1", "1", "1", "Lk"), needs_grad=(), dlse=False)
    inputs = case.build()
    assert inputs.bias is not None
    inputs.q.zero_()
    inputs.bias[..., :192], inputs.bias[..., 192:] = -0.5, -88.0
    check(backend, case, inputs)


@pytest.mark.parametrize("bias", ("no bias", "per score"))
def test_keys_behind_the_last_where_lse_is_far_below_zero(backend: Runner, bias: str) -> None:
    """Places of a tile after the last key have a score of 0: exp(0 + 200) is inf."""
    case = BASE.with_(bias=BIASES[bias])
    inputs = case.build()
    if inputs.bias is None:
        inputs = replace(inputs, q=inputs.q / 10 - 5, k=inputs.k / 10 + 5)
    else:
        inputs.bias.sub_(200)
    check(backend, case, inputs)


# Sinks

SINK = BASE.with_(sink="normal", needs_grad=(*ALL, "sink"), mask=("1", "1", "Lq", "Lk"), mask_kind="empty_rows")
SINKS = {
    "no bias": SINK,
    "per query": SINK.with_(bias=("B", "Hq", "Lq", "1")),
    "per score": SINK.with_(bias=FULL, sink_dtype=torch.float32),
    "none for some heads": SINK.with_(sink="inf", bias=("1", "Hk", "Lq", "1")),
    "alone": SINK.with_(needs_grad=("sink",), sink_dtype=torch.float64),
}


@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize("name", SINKS)
def test_a_sink(backend: Runner, name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in every row, however many work tiles share its keys; a row without keys has the lse of its sink."""
    monkeypatch.setattr(passes, "NUM_KV_SPLITS", splits)
    check(backend, SINKS[name])


# A bias that many batch entries share

MANY = BASE.with_(batch=7, seqlen_q=49, seqlen_k=49, num_heads=2, num_heads_k=2, bias=("1", "Hq", "Lq", "Lk"))


@pytest.mark.parametrize("chunks", (0, 1, 2, 7, 100))
def test_chunks_of_a_shared_gradient(backend: Runner, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have 3 and 4 entries, or one each, no more than there are; rows end between 16 bytes or between 8."""
    monkeypatch.setattr(passes, "NUM_DBIAS_CHUNKS", chunks)
    check(backend, MANY)
    check(backend, MANY.with_(seqlen_q=7, seqlen_k=130, bias=("1", "1", "Lq", "Lk"), is_causal=True))
    check(backend, MANY.with_(seqlen_q=130, seqlen_k=52, num_heads_k=1, bias=("1", "1", "Lq", "Lk"), softcap=2.0))


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Also what the extension allocates is NaN until it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("needs_grad", (("bias",), ("k", "bias")), ids="-".join)
def test_chunks_of_which_nothing_is_visible(
    backend: Runner, needs_grad: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, new_memory_is_nan: None
) -> None:
    """Slots of entries that a mask leaves out are zeros."""
    monkeypatch.setattr(passes, "NUM_DBIAS_CHUNKS", 7)
    case = MANY.with_(seqlen_k=136, mask=("B", "1", "1", "Lk"), mask_kind="all_allowed", needs_grad=needs_grad)
    inputs = case.build()
    assert inputs.mask is not None
    inputs.mask[1:4], inputs.mask[5, ..., 128:] = False, False
    check(backend, case, inputs)
    inputs.mask[:] = False
    check(backend, case, inputs)


def test_chunks_are_added_in_their_order(backend: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Great parts of dbias cancel; in another order the small one that comes last would be lost in them."""
    monkeypatch.setattr(passes, "NUM_DBIAS_CHUNKS", 7)
    case = MANY.with_(seqlen_q=16, seqlen_k=64, needs_grad=("bias",), dlse=False)
    inputs = case.build()
    for x in (inputs.q, inputs.k, inputs.v):
        x[:6] = x[:1].clone()
    signs = torch.tensor([1, -1, 1, -1, 1, -1], device=DEVICE)[:, None, None, None]
    great, none = inputs.dout.clone(), inputs.dout.clone()
    great[:6], none[:6] = inputs.dout[:1] * signs * 2**24, 0
    attention = backend.attention(case, inputs, alone=True)
    actual, wanted = (run(attention, case, replace(inputs, dout=dout))["dbias"] for dout in (great, none))
    assert wanted is not None and wanted.any() and torch.equal(actual, wanted)


def test_a_bias_of_rows_that_end_between_16_bytes(backend: Runner) -> None:
    """It gives the same bits as a bias of padded rows, and what lies around its rows is not read."""
    inputs = MANY.build()
    assert inputs.bias is not None
    rows = torch.full((*inputs.bias.shape[:3], 56), torch.nan, dtype=MANY.dtype, device=DEVICE)
    padded = rows[..., :49].copy_(inputs.bias)
    unpadded = torch.full((*inputs.bias.shape[:3], 51), torch.nan, dtype=MANY.dtype, device=DEVICE)
    other = unpadded[..., 1:50].copy_(inputs.bias)
    results = [
        run(backend.attention(MANY, inputs, alone=True), MANY, replace(inputs, bias=x))
        for x in (padded, other, inputs.bias)
    ]
    assert_accurate(results[0], MANY, inputs)
    for result in results[1:]:
        for name in ("out", "lse", "dk", "dv", "dbias"):
            assert torch.equal(result[name], results[0][name]), name


# Rows and keys that are left out


@pytest.mark.parametrize("lengths", ((140, 328), (328, 140)), ids=str)
def test_causal_queries_of_another_number_than_keys(backend: Runner, lengths: tuple[int, int]) -> None:
    check(backend, BASE.with_(seqlen_q=lengths[0], seqlen_k=lengths[1], is_causal=True))


@pytest.mark.parametrize("window_size", ((40, 5), (40, -1), (2**40, 0)), ids=str)
@pytest.mark.parametrize("bias", ("no bias", "shared"))
def test_edges_of_a_window(backend: Runner, bias: str, window_size: tuple[int, int]) -> None:
    """There are as many queries as keys, so that at the left edge blocks of 128 of both lie in part."""
    check(backend, BASE.with_(seqlen_q=200, bias=BIASES[bias], window_size=window_size))


def test_a_window_without_end_in_a_prepared_mask(backend: Runner) -> None:
    case = BASE.with_(mask=TILES, window_size=(2**40, 0))
    inputs = case.build()
    mask = PreparedMask.from_mask(
        inputs.mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, window_size=case.window_size
    )
    check(backend, case, inputs, replace(inputs, mask=mask))


@pytest.mark.parametrize("bias", ("no bias", "shared"))
def test_a_mask_of_each_head(backend: Runner, bias: str) -> None:
    check(backend, BASE.with_(batch=2, bias=BIASES[bias], mask=TILES))


def test_the_lse_of_an_empty_row_takes_no_gradient(backend: Runner) -> None:
    case = BASE.with_(mask=TILES, mask_kind="empty_rows", bias=PER_KEY)
    inputs = case.build()
    assert_empty_rows_ignore_dlse(backend.attention(case, inputs, alone=True, deterministic=True), case, inputs)


# Blocks and warps in many orders


def test_what_is_copied_is_waited_for(backend: Runner) -> None:
    """In each order of the emulated GPU copies arrive at another time: without a wait a third of these calls fails."""
    case = BASE.with_(bias=FULL)
    for seed in range(16 if DEVICE == "cpu" else 1):
        if DEVICE == "cpu":
            emulated_cuda.configure(3, seed)
        check(backend, case)


def test_parts_of_the_keys_weigh_what_they_hold(backend: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        emulated_cuda.configure(8)
    monkeypatch.setattr(passes, "NUM_KV_SPLITS", 3)
    check(backend, BASE.with_(seqlen_q=65, seqlen_k=700, logits=2.0, needs_grad=()))


def test_heads_of_a_group_are_summed_in_their_order(backend: Runner) -> None:
    """Great parts of dv of six heads cancel; in another order the small last one would be lost in them."""
    case = BASE.with_(seqlen_q=16, seqlen_k=64, num_heads=6, num_heads_k=1, needs_grad=("q", "k", "v"), dlse=False)
    inputs = case.build()
    inputs.q.zero_()  # p is 1/64 everywhere
    for head, value in enumerate((2.0**20, -(2.0**20), 2.0**20, -(2.0**20), 0.0, 2.0**-8)):
        inputs.dout[:, :, head] = value
    attention = backend.attention(case, inputs, alone=True, deterministic=True)
    for seed in range(6):
        if DEVICE == "cpu":
            emulated_cuda.configure(6, seed)
        dv = run(attention, case, inputs)["dv"]
        assert dv is not None and (dv == 16 / 64 * 2.0**-8).all(), seed


# Interval masks


def scattered(case: Case, **flags: Any) -> IntervalMask:
    """Causal top-k with keys in an order of their own: intervals of any length, live keys that are no whole tile."""
    scores = torch.randn(1, case.num_heads_k, 1, case.seqlen_k, generator=torch.Generator().manual_seed(3))
    return PreparedMask.from_topk(scores, 9, is_causal=True, seqlen_q=case.seqlen_q, **flags).to(DEVICE)


def check_intervals(backend: Runner, case: Case, mask: IntervalMask, *, deterministic: bool = False) -> None:
    inputs = replace(case.build(), mask=mask.unpacked().to(DEVICE))
    arguments = replace(inputs, mask=mask.to(DEVICE))
    backend.check(case, inputs, arguments, alone=True, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("reorder", (False, True))
@every_bias
def test_an_interval_mask(backend: Runner, bias: str, reorder: bool, deterministic: bool) -> None:
    """Gradients in the order of keys; dead keys hold NaN where they are not read."""
    case = BASE.with_(seqlen_q=300, seqlen_k=336, num_heads=4, bias=BIASES[bias])
    mask = scattered(case, reorder=reorder)
    inputs = replace(case.build(), mask=mask.unpacked())
    arguments = replace(inputs, mask=mask)
    if reorder and bias in ("no bias", "per key"):
        dead = (mask.start == mask.stop).transpose(1, 2)[..., None]
        arguments = replace(arguments, k=inputs.k.masked_fill(dead, torch.nan), v=inputs.v.masked_fill(dead, torch.nan))
    backend.check(case, inputs, arguments, alone=True, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("bias", ("no bias", "per key"))
def test_an_order_of_few_places(backend: Runner, bias: str, deterministic: bool) -> None:
    """Kernels see the keys that have a place; dead ones, with a place or without, hold NaN and get zeros."""
    case = BASE.with_(batch=2, seqlen_q=300, seqlen_k=500, num_heads=4, num_heads_k=2, bias=BIASES[bias])
    mask = scattered(case, reorder=True, compact=True)
    assert mask.num_places == 128
    inputs = replace(case.build(), mask=mask.unpacked())
    dead = (mask.start == mask.stop).transpose(1, 2)[..., None]
    k, v = (x.masked_fill(dead, torch.nan) for x in (inputs.k, inputs.v))
    arguments = replace(inputs, mask=mask, k=k, v=v)
    actual = backend.check(case, inputs, arguments, alone=True, deterministic=deterministic)
    for name in ("dk", "dv"):
        gradient = actual[name]
        assert gradient is not None and not gradient.masked_select(dead).any(), name


def test_walks_of_an_interval_mask_that_several_blocks_share(backend: Runner) -> None:
    """More than 32 tiles of queries make two work tiles for a key block; one may get nothing."""
    case = BASE.with_(seqlen_q=4300, seqlen_k=136, num_heads=1, num_heads_k=1, bias=PER_KEY)
    start = torch.arange(136) * 20
    mask = PreparedMask.from_intervals(
        start, start + torch.where(torch.arange(136) < 70, 900, 4000), 4300, reorder=True
    )
    check_intervals(backend, case, mask)


@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("live", ((100, 300), (0, 700), (400, 1)), ids=str)
def test_heads_end_where_their_live_keys_do(backend: Runner, live: tuple[int, int], deterministic: bool) -> None:
    """Key blocks without a live key are not visited, whose sums hold what memory held; blocks of the next head are."""
    case = BASE.with_(seqlen_q=300, seqlen_k=700, num_heads=4, num_heads_k=2, bias=PER_KEY)
    numbers = torch.Generator().manual_seed(5)
    rank = torch.stack([torch.randperm(700, generator=numbers) for _ in live])
    stop = torch.randint(1, 301, (2, 700), generator=numbers).where(rank < torch.tensor(live)[:, None], 0)
    mask = PreparedMask.from_intervals(torch.zeros_like(stop)[None], stop[None], 300, reorder=True)
    for seed in range(3):
        if DEVICE == "cpu":
            emulated_cuda.configure(seed + 1, seed)
        check_intervals(backend, case, mask, deterministic=deterministic)


def test_entries_and_heads_with_intervals_of_their_own(backend: Runner) -> None:
    case = BASE.with_(batch=2, num_heads=4, bias=("B", "Hq", "1", "Lk"))
    start = torch.randint(0, 140, (2, 2, 200), generator=torch.Generator().manual_seed(4))
    for heads in (start, start[:1], start[:, :1]):
        check_intervals(backend, case, PreparedMask.from_intervals(heads, heads + 30, 140, reorder=True))
