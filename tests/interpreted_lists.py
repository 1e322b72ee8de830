"""Attention over lists in Triton's interpreter: `interpreted_lists.py random FIRST COUNT`, or a kind of `CASES`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import interpreter
import torch
from list_cases import ListCase, ListInputs, differences, draw, exact, run
from outcomes import outcome_of, report

from flash_dmattn.masks import topk
from flash_dmattn.triton_kernels import list_calls, list_pack
from flash_dmattn.triton_kernels.launch import plans
from flash_dmattn.triton_kernels.list_calls import ListNeeds
from flash_dmattn.triton_kernels.tile_table import Tile

# Bytes that chunks may take, all at once or the least chunk, and rows that one program adds.
ROOMS = ((2**30, 4096), (1, 8))
LIMIT = 1e-5


def check(case: ListCase, x: ListInputs, room: tuple[int, int] = ROOMS[0], repeats: int = 0, **more: object) -> None:
    """Results are right by the formula, and other runs have the same bits."""
    interpreter.set_up()
    list_calls.SPACE, list_calls.MOST_ROWS = room
    plans.clear()
    got = run(case, x, **more)
    interpreter.assert_margins()
    off = differences(got, exact(case, x))
    assert max(off.values()) < LIMIT, off
    for _ in range(repeats):
        for name, again in run(case, x, **more).items():
            first = got[name]
            assert first is again is None or torch.equal(first, again), f"{name} differs from run to run"


def random_calls(first: int, count: int) -> Iterator[str | None]:
    """Outcomes of calls drawn at random."""
    for number in range(first, first + count):
        case = draw(number)
        # One thread runs all programs in order: a few runs again see what they read that nobody wrote.
        yield outcome_of(partial(check, case, case.build(), ROOMS[number % 2], repeats=int(number % 8 == 0)), str(case))


# The interpreter takes its time for each program: one to a query, or to a block of keys, of a head.
SMALL = ListCase(seqlen_q=8, seqlen_k=28, group=3)
WIDE = ListCase(heads_k=1, group=3, head_dim=272, head_dim_v=256, latent=True, most=40, seqlen_q=5)
STEPS = SMALL.with_(group=3, keys_each=64, seqlen_q=5, seqlen_k=200, is_causal=False, most=3)
NEARLY_ALL = STEPS.with_(most=2, group=4, lists="one key", dlse=False)  # one block has nearly all of p
# Calls at an edge, which random calls may miss, by what they are an edge of, and how each is checked.
CASES: dict[str, dict[str, ListCase]] = {
    "sizes": {
        "more entries than keys": SMALL.with_(most=50, group=5),
        "no entry": SMALL.with_(lists="empty", sink=True),
        "no entry anywhere, and no sink": SMALL.with_(lists="empty"),
        "a key of every query, by rows": SMALL.with_(lists="one key", group=5, is_causal=False, seqlen_q=20),
        "a block of every query, ragged": SMALL.with_(lists="first block", keys_each=16, seqlen_k=41, most=3),
        "rows of more members than a program has": SMALL.with_(queries=40, seqlen_q=50, most=12, heads_k=1, batch=1),
        "one query": SMALL.with_(seqlen_q=1),
        "one key": SMALL.with_(seqlen_k=1, is_causal=False),
        # A chunk has at least 32 rows of lists.
        "chunk borders": SMALL.with_(seqlen_q=34, batch=2, heads_k=1, most=4),
        "chunks of p and ds": SMALL.with_(seqlen_q=67, is_causal=False, group=20, queries=2, heads_k=1, most=3),
        "values of heads, over two steps of a block": STEPS.with_(values=("B", "Hq", "R")),
        "values of entries, over two steps of a block": STEPS.with_(order="ascending"),
    },
    "wide heads": {
        "a sink": WIDE.with_(softcap=2.0, sink=True, values=("1", "Hq", "Lq"), order="ascending", aux=True),
        "two parts": WIDE.with_(group=20, queries=2, values=("B", "1", "R")),
        "few keys": WIDE.with_(most=5),
        "blocks": WIDE.with_(keys_each=16, most=3, seqlen_k=70),
        "values apart": WIDE.with_(latent=False, sink=True),
        "values apart, few keys": WIDE.with_(latent=False, most=5, aux=True),
    },
    "rounded out": {
        "values of entries": NEARLY_ALL.with_(aux=True),
        "values of queries": NEARLY_ALL.with_(values=("1", "Hk", "Lq"), queries=2, keys_each=16, most=3),
        "two steps of a block": NEARLY_ALL.with_(keys_each=128, dlse=True, lists="first block", softcap=2.0),
        "values of heads, a sink": NEARLY_ALL.with_(values=("B", "Hq", "R"), sink=True, keys_each=32, most=4, aux=True),
        "wide heads": WIDE.with_(keys_each=16, most=9, seqlen_k=120, is_causal=False, lists="one key"),
    },
    "shares": {
        "single keys": SMALL.with_(sink=True, most=40, is_causal=False, heads_k=1),
        "places by several words": SMALL.with_(group=5, heads_k=1, seqlen_q=40, is_causal=False),
        "blocks, some shares empty": SMALL.with_(keys_each=16, most=9, seqlen_k=200, softcap=2.0),
        "wide heads": WIDE.with_(keys_each=16, most=6, seqlen_k=90),
    },
    "best keys": {},
    # A constant in all scores: -1e9, or 2^100 where nothing else is great.
    "great": {
        "by rows": SMALL,
        "by rows, a sink": SMALL.with_(sink=True, values=("B", "Hq", "Lq")),
        "inverse lists": STEPS.with_(values=("1", "Hk", "R"), keys_each=32),
        "inverse lists, a bias per key": SMALL.with_(values=None, bias_heads=1, group=1, heads_k=1, is_causal=False),
        "masses, a sink": STEPS.with_(sink=True, group=2),
        "few keys, a sink": SMALL.with_(most=5, sink=True),
        "wide heads": WIDE,
        "wide heads, a sink": WIDE.with_(sink=True, keys_each=16, most=6, seqlen_k=90),
    },
}


def edge_calls(kind: str) -> Iterator[str | None]:
    """Outcomes of the calls of a kind."""
    for told, case in CASES[kind].items():
        if kind == "great":
            yield outcome_of(partial(great, case, -1e9), told)
            if not case.sink:
                yield outcome_of(partial(great, case, 2.0**100), told)
        elif kind == "rounded out":
            yield outcome_of(partial(rounded_out, case), told)
        elif kind == "shares":
            # Each program walks a third of a list.
            with mock.patch.object(list_calls, "num_key_shares", return_value=3):
                yield outcome_of(partial(check, case.with_(aux=True), case.with_(aux=True).build()), told)
        else:
            yield outcome_of(partial(check, case, case.build(), ROOMS[1]), told)
    if kind == "best keys":
        yield from (outcome_of(partial(best_keys, number), str(number)) for number in range(12))
    if kind == "wide heads":
        case = WIDE.with_(seqlen_q=3, head_dim_v=512, head_dim=544)
        tiles = {"product": Tile(128, 32, 4, 1)}
        yield outcome_of(partial(check, case, case.build(), tiles=tiles), "two programs share the columns of dq")
        yield outcome_of(values_in_keys, "values that lie in the rows of keys")
    if kind == "sizes":
        yield outcome_of(minus_infinity, "values of -inf")
        yield outcome_of(unseen_nan, "NaN that nobody chose")
        yield outcome_of(seen_nan, "NaN that some rows chose")
        yield outcome_of(single_gradients, "one gradient alone")


def great(case: ListCase, constant: float) -> None:
    """Scores that all have a great constant have the gradients of their rest; values and sinks have it."""
    x = case.build()
    for each in (x.values if x.values is not None else x.bias, x.sink):
        if each is not None:
            each += constant
    for shares in (1, 3):
        interpreter.set_up()
        with mock.patch.object(list_calls, "num_key_shares", return_value=shares):
            off = differences(run(case, x), exact(case, x, constant))
        assert max(off.values()) < LIMIT, off


def rounded_out(case: ListCase) -> None:
    """An out that was rounded to 16 bits reaches no value, though its delta moves dq.

    One block of a row has nearly all of p, or shares it with the sink: values for the first entry are large.
    """
    interpreter.set_up()
    x = case.build()
    assert x.values is not None
    x.values[..., 0] += 12.0
    if x.sink is not None:
        x.sink[:] += 12.0
    got, want = run(case, x, round_out=lambda out: out.bfloat16().float()), exact(case, x)
    off = differences(got, want)
    assert off["dvalues"] < LIMIT, off
    assert off["dq"] > LIMIT, off


def best_keys(number: int) -> None:
    """The kernel lists what PyTorch lists, of scores that tie, are infinite or NaN, or are hidden."""
    generator = torch.Generator().manual_seed(number)
    columns, k, local = (1, 5, 64, 130)[number % 4], (1, 7, 200)[number % 3], (0, 3)[number % 2]
    scores = torch.randint(-3, 4, (2, 3, 5, columns), generator=generator).float()
    if number > 5:
        scores = torch.randn(scores.shape, generator=generator)
    odd = torch.randint(0, 9, scores.shape, generator=generator)
    for value, kind in ((torch.inf, 0), (-torch.inf, 1), (torch.nan, 2), (-0.0, 3)):
        scores = torch.where(odd == kind, value, scores)
    last = torch.randint(0, columns, (5,), generator=generator)
    keys = topk.sort_keys(scores, torch.arange(columns) <= last[:, None])
    arguments = (keys, last, k, local, min(k + local, columns))
    for mine, wanted in zip(list_pack.list_best(*arguments), topk.list_best(*arguments), strict=True):
        assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)


def values_in_keys() -> None:
    """Values that are the first channels of keys are read with them; their gradient stays their own."""
    for case in (ListCase(heads_k=1, head_dim=48, head_dim_v=32, most=40, is_causal=False), WIDE.with_(latent=False)):
        x = case.build()
        own = replace(x, v=x.k[..., : case.head_dim_v].clone())
        interpreter.set_up()
        with mock.patch.object(list_calls, "ListCall", wraps=list_calls.ListCall) as made:
            got = run(case, replace(x, v=x.k[..., : case.head_dim_v]))
        assert [call.args[2] is None for call in made.call_args_list] == [True, False]
        off = differences(got, exact(case, own))
        assert max(off.values()) < LIMIT, off


def minus_infinity() -> None:
    """A value of -inf takes its entry away."""
    case = SMALL.with_(sink=True)
    x = case.build()
    assert x.values is not None
    x.values[..., ::2] = -torch.inf
    interpreter.set_up()
    got, want = run(case, x), exact(case, x)
    want["dvalues"] = want["dvalues"].nan_to_num(0.0)
    off = differences(got, want)
    assert max(off.values()) < LIMIT, off


def unseen_nan() -> None:
    """A NaN key or value reaches nothing if nobody chose it, or if causality cuts it from its block."""
    for case, key in (
        (SMALL.with_(lists="first block", most=1, heads_k=1), 7),
        (SMALL.with_(keys_each=16, seqlen_q=18, seqlen_k=18, heads_k=1), 17),
    ):
        x = case.build()
        assert x.v is not None
        clean = run(case, x)
        dout, dlse = x.dout.clone(), None if x.dlse is None else x.dlse.clone()
        x.k[:, :, key], x.v[:, :, key] = torch.nan, torch.nan
        got = run(case, replace(x, dout=dout, dlse=dlse))
        last = case.seqlen_q - 1  # it may see the last key
        for name in ("out", "dq"):
            mine, other = got[name], clean[name]
            assert mine is not None and other is not None
            assert torch.equal(mine[:, :, :last], other[:, :, :last]), name


def seen_nan() -> None:
    """A NaN in a key makes out and lse NaN in the rows that list it, of shares of a list too, and in no other."""
    for case in (SMALL.with_(is_causal=False, most=12), SMALL.with_(values=None, sink=True, is_causal=False)):
        x = case.build()
        x.k[:, :, 9] = torch.nan
        lists_it = (x.lists.tensors[0] == 9).any(3).expand(case.batch, case.heads, -1)
        for shares in (1, 3):
            interpreter.set_up()
            with mock.patch.object(list_calls, "num_key_shares", return_value=shares):
                out, lse = list_calls.list_forward(*case.operands(x), case.flags)
            assert torch.equal(lse.isnan(), lists_it) and 0 < lists_it.sum() < lists_it.numel()
            assert torch.equal(out.isnan(), lists_it[..., None].expand(out.shape))


def single_gradients() -> None:
    """A gradient has the same bits alone and with all others."""
    few = SMALL.with_(seqlen_q=3, seqlen_k=12, heads_k=1, sink=True)
    wide = WIDE.with_(latent=False, seqlen_q=2, seqlen_k=12, is_causal=False)
    others = (few, few.with_(keys_each=16, seqlen_k=20), few.with_(group=20, queries=2))
    for case in (*others, wide):
        x = case.build()
        every = run(case, x)
        for number, name in enumerate(("dq", "dk", "dv", "dvalues", "dsink")):
            needs = ListNeeds(*(n == number for n in range(5)))
            got = run(case, x, needs)
            mine, other = got[name], every[name]
            assert (mine is None) == (other is None), name
            assert mine is None or torch.equal(mine, other), name


def main(what: str, *numbers: str) -> int:
    """Run the calls of a word."""
    interpreter.guard_outputs()
    return report(random_calls(*map(int, numbers)) if what == "random" else edge_calls(what))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
