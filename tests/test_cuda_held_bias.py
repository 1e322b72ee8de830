"""A bias per score that batch entries share: at head dims up to 32 a block keeps what its rows need."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_accurate, error, run
from cases import DEVICE, Case, Inputs
from conftest import Runner

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

NUM_SMS = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 3
SHARED = ("1", "Hq", "Lq", "Lk")
BASE = Case(num_heads=4, num_heads_k=4, head_dim=32, dtype=torch.bfloat16, bias=SHARED, needs_grad=(), dlse=False)


def least_batch(num_heads: int, seqlen_q: int) -> int:
    """Entries from which on blocks keep their bias: those with 4 work tiles of 256 rows for each block."""
    return -(-4 * NUM_SMS // (num_heads * -(-seqlen_q // 256)))


def some(inputs: Inputs, chosen: slice) -> Inputs:
    q, k, v, dout = (x[chosen] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    bias = inputs.bias if inputs.bias is None or len(inputs.bias) == 1 else inputs.bias[chosen]
    return Inputs(q, k, v, None, bias, dout, None, inputs.sink)


def check(backend: Runner, case: Case, more: int = 1) -> None:
    """Run a case of `more` entries than the least that keep their bias.

    Some 24 entries are compared with fp64, and all with calls of so few that nothing is kept.
    """
    case = case.with_(batch=least_batch(case.num_heads, case.seqlen_q) + more)
    inputs = case.build()
    attention = backend.attention(case, inputs)
    actual = run(attention, case, inputs)
    every = slice(None, None, -(-case.batch // 24))
    assert_accurate({name: x if x is None else x[every] for name, x in actual.items()}, case, some(inputs, every))
    few = -(-least_batch(case.num_heads, case.seqlen_q) // 3)
    for first in range(0, case.batch, few):
        chosen = slice(first, first + few)
        alone = run(attention, case, some(inputs, chosen))
        for name in ("out", "lse"):
            for x, y in zip(actual[name][chosen], alone[name], strict=True):
                assert error(x, y) < 1e-2, f"{case}: {name} of an entry among {first} to {first + few - 1}"


# Three consumers, the last maybe without rows, and four; keys that fill a block of 64, or not; all that fit.
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    ((1, 8), (64, 64), (129, 72), (192, 384), (200, 256), (256, 200), (300, 304), (384, 384), (385, 64), (500, 256)),
)
def test_lengths(backend: Runner, seqlen_q: int, seqlen_k: int) -> None:
    check(backend, BASE.with_(seqlen_q=seqlen_q, seqlen_k=seqlen_k))


@pytest.mark.parametrize("seqlen", (264, 392))
def test_more_keys_than_fit(backend: Runner, seqlen: int) -> None:
    check(backend, BASE.with_(seqlen_q=256 if seqlen == 264 else 384, seqlen_k=seqlen))


@pytest.mark.parametrize(
    "bias", (SHARED, ("1", "1", "Lq", "Lk"), ("1", "Hk", "Lq", "Lk"), ("B", "Hq", "Lq", "Lk")), ids=str
)
@pytest.mark.parametrize("kind", ("normal", "inf", "huge"))
@pytest.mark.parametrize("heads", ((4, 2), (1, 1)), ids=str)
def test_every_bias(backend: Runner, heads: tuple[int, int], kind: str, bias: tuple[str, ...]) -> None:
    case = BASE.with_(num_heads=heads[0], num_heads_k=heads[1], seqlen_q=300, seqlen_k=136)
    check(backend, case.with_(bias=bias, bias_kind=kind))


@pytest.mark.parametrize("changes", ({"is_causal": True}, {"window_size": (40, 70)}), ids=str)
def test_rows_that_see_other_keys(backend: Runner, changes: dict[str, object]) -> None:
    """Their walks differ: nothing is kept."""
    check(backend, BASE.with_(seqlen_q=300, seqlen_k=304, **changes))


def test_sinks_a_softcap_a_scale_and_wide_heads(backend: Runner) -> None:
    for changes in ({"sink": "normal"}, {"softcap": 3.0}, {"softmax_scale": 0.7}, {"head_dim": 16}, {"head_dim_v": 8}):
        check(backend, BASE.with_(seqlen_q=130, seqlen_k=136, **changes))


@pytest.mark.parametrize("times", (0.5, 1, 1.1, 1.4, 3, 4))
def test_batches(backend: Runner, times: float) -> None:
    """Blocks begin in the midst of a bias, and have one or several of them; the first has too few work tiles for it."""
    case = BASE.with_(seqlen_q=200, seqlen_k=72)
    check(backend, case, more=int((times - 1) * least_batch(case.num_heads, case.seqlen_q)))
