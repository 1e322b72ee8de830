"""Check the Triton kernels on sequences: `python triton_sequences.py CHECK [CALLS [FIRST]]`.

CHECK is a key of CHECKS or MADE, or "drawn" or "made" for all of these. Without a GPU `test_triton_sequences.py` runs
it so, in Triton's interpreter; with one that file calls the same checks. Calls are made as a backend receives them,
with bounds that `attention` need not make.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases import DEVICE

if DEVICE == "cpu":
    import interpreter
from accuracy import Results
from layouts import LAYOUTS as STRIDES
from outcomes import outcome_of, report
from sequence_calls import SequenceCall, assert_accurate, draw, expected, run_on, spoiled
from sequence_cases import SequenceCase
from torch import Tensor

from flash_dmattn import AuxRequest, Sequences, attention
from flash_dmattn.backends.triton.backend import BACKEND

# Lengths around the edges of tiles; tiles in the interpreter have 16 to 64 rows.
LENGTHS = (0, 1, 16, 31, 32, 33, 65) if DEVICE == "cpu" else (0, 1, 31, 32, 33, 127, 128, 129, 300)
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
# Lengths around the edges of tiles of a packed mask.
TILE_LENGTHS = (0, 1, 33, 127, 128, 129, 200, 300)
MOST_ROWS = 600 if DEVICE == "cpu" else 2**31  # queries of all heads with such a mask
# Elements of a margin. No tile before the first sequence reaches as far.
FAR = 100_000
# Biases with two sequences, and the most keys of a sequence.
LATE_BIASES = (
    *((bias, 64) for bias in (("Hq", "Tq", "Lk"), ("Hq", "1", "Tk"), ("1", "Tq", "Lk"), ("1", "Hq", "1", "Lk"))),
    (("B", "Hq", "Lq", "Lk"), 40),
)


def drawn_call(
    number: int, lengths: tuple[int, ...] = LENGTHS, lengths_k: tuple[int, ...] | None = None
) -> SequenceCall:
    return draw(number, None, lengths, DTYPES, (8, 16, 24), lengths_k, (1, 3, 16, 32, 64), is_loose=True)


def run(call: SequenceCall, **how: Any) -> Results:
    """The results of the kernels; in the interpreter no kernel may write outside of them."""
    results = run_on(call, BACKEND, **how)
    if DEVICE == "cpu":
        interpreter.assert_margins()
    return results


def set_up(rng: random.Random) -> None:
    """Other tiles, and another number of SMs, for the calls to come."""
    if DEVICE == "cpu":
        interpreter.set_up(rng.choice(interpreter.TILES), rng.choice(interpreter.NUM_SMS))


def checked(call: SequenceCall, check: Callable[[SequenceCall, random.Random], None]) -> str | None:
    rng = random.Random(call.told)
    set_up(rng)
    return outcome_of(partial(check, call, rng), f"{call.told} {call.sequences.layout}")


def assert_same(wanted: Results, results: Results) -> None:
    for name, x in wanted.items():
        assert x is None or torch.equal(x, results[name]), name


def is_accurate(call: SequenceCall, rng: random.Random) -> None:
    """NaN wherever no sequence reads, and any strides: every result as fp64 has it."""
    strides, deterministic = rng.choice((None, *STRIDES)), rng.random() < 0.5
    assert_accurate(run(spoiled(call, scores=True), strides=strides, deterministic=deterministic), call)


def tiles_are_accurate(call: SequenceCall, rng: random.Random) -> None:
    """Prepare the mask, with tiles that allow all pairs, some or none: results are as accurate."""
    assert isinstance(call.mask, Tensor)
    mask = call.mask.contiguous()
    for allowed in (True, False, True, False):
        rows, keys = (slice(x, x + rng.choice((130, 300))) for x in (rng.randrange(300), rng.randrange(300)))
        mask[..., rows, keys] = allowed
    call = replace(call, mask=mask)
    assert_accurate(run(spoiled(call, scores=True), strides=rng.choice((None, *STRIDES)), tiles=True), call)


def ignores_others(call: SequenceCall, rng: random.Random) -> None:
    """NaN in all sequences but one changes no bit of it, nor of rows of none."""
    if any(x is not None and 0 in x.stride() for x in (call.mask, call.bias)) or len(call.lengths) == 1:
        return
    s = rng.randrange(len(call.lengths))
    wanted, results = run(call), run(spoiled(call, scores=True, only=s))
    queries, keys = call.queries_of(s), call.keys_of(s)
    places = {"out": queries, "dq": queries, "dk": keys, "dv": keys}
    places["lse"] = (slice(None), *queries) if call.packs_queries else (queries[0], slice(None), queries[1])
    for name, place in places.items():
        if wanted[name] is not None:
            assert torch.equal(wanted[name][place], results[name][place]), name


def follows_lengths_alone(call: SequenceCall, rng: random.Random) -> None:
    """Larger bounds on the lengths change no bit of any result."""
    # Shapes of a mask and of a bias name the bounds.
    call = replace(call, mask=None, bias=None, needs_grad=tuple(name for name in call.needs_grad if name != "bias"))
    packs = {"max_seqlen_q": call.packs_queries, "max_seqlen_k": call.packs_keys}
    larger = {
        name: getattr(call.sequences, name) + rng.choice((1, 77, 1000))
        for name, is_packed in packs.items()
        if is_packed
    }
    assert_same(run(call), run(replace(call, sequences=replace(call.sequences, **larger))))


# Two heads of head dim 16; `run_on` hands the kernels their bounds.
SMALL = SequenceCase(
    **{"lengths": (), "heads": (2, 1), "head_dims": (16, 16), "trailing": (0, 0), "sink": None, "dlse": False},
    dtype=torch.float32,
)


def repeats(call: SequenceCall, rng: random.Random) -> None:
    """A second run has the same bits."""
    assert_same(run(call, deterministic=True), run(call, deterministic=True))


CHECKS = {
    "accurate": is_accurate,
    "others": ignores_others,
    "bounds": follows_lengths_alone,
    "repeats": repeats,
}


def few_keys() -> Iterator[str | None]:
    """Outcomes of asking whether the rounding of out to 16 bits stays out of gradients of few keys.

    dbias, in fp32, feels no other rounding of 16 bits.
    """
    for seqlen_k, window in ((2, None), (32, None), (96, (3, 0))):
        for bias in (("Hq", "Tq", "Lk"), ("1", "Hq", "Lq", "Lk"), ("Hq", "1", "Tk")):
            set_up(random.Random(seqlen_k))
            case = SMALL.with_(lengths=((40, seqlen_k),) * 2, dtype=torch.float16, bias=bias, bias_dtype=torch.float32)
            call = case.with_(seed=seqlen_k).build(window_size=window)
            dbias, exact = run(call, deterministic=True)["dbias"].cpu().double(), expected(call)[0]["dbias"]
            off = (dbias - exact).norm().item() / max(exact.norm().item(), 1e-3)
            # Sums over the rows of a column keep the rounding of fp32 sums.
            yield None if off < 5e-6 else f"{call.told}: dbias is off by {off:.1e}"


def late_calls() -> Iterator[str | None]:
    """Outcomes of calls whose first sequence begins behind the first tile, with zeroed outputs between margins."""
    zeros = torch.zeros
    margins: list[tuple[Tensor, int]] = []

    def guarded(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        room = torch.full((sizes.numel() + 2 * FAR,), 7.0, dtype=dtype, device=device)
        margins.append((room, sizes.numel()))
        return room[FAR : FAR + sizes.numel()].zero_().view(sizes)

    def check(call: SequenceCall) -> None:
        margins.clear()
        torch.zeros = guarded
        try:
            results = run_on(call, BACKEND, deterministic=True)
        finally:
            torch.zeros = zeros
        assert_accurate(results, call)
        for room, size in margins:
            assert bool((room[:FAR] == 7).all() and (room[FAR + size :] == 7).all()), "written beside an output"

    for bias, most_k in LATE_BIASES:
        case = SMALL.with_(lengths=((33, 40), (20, 33)), before=200, spare=(7, 0), trailing=(40, 17), bias=bias)
        call = case.with_(most=(300, most_k)).build()
        if DEVICE == "cpu":
            interpreter.set_up()
        yield outcome_of(partial(check, call), call.told)


def sinks_beside_gaps() -> Iterator[str | None]:
    """Outcomes of two calls with the gradient of a sink and rows of no sequence, which a few draws may all lack."""

    def is_one(call: SequenceCall) -> bool:
        rows = call.q[..., 0, 0].numel()
        return "sink" in call.needs_grad and 0 < sum(length for _, length, _, _ in call.lengths) < rows < 400

    for call in itertools.islice(filter(is_one, map(drawn_call, itertools.count())), 2):
        yield checked(call, is_accurate)


def shares_beside_gaps() -> Iterator[str | None]:
    """Outcomes of numbers about rows where programs share keys, and some rows are of no sequence."""

    def has_numbers_of_no_keys() -> None:
        if DEVICE == "cpu":
            interpreter.set_up(num_sms=64)
        q, k, v = (
            torch.randn(2, n, h, 16, device=DEVICE, dtype=torch.float16) for n, h in ((2, 2), (512, 1), (512, 1))
        )
        lengths = (torch.tensor(own, device=DEVICE) for own in ([2, 1], [512, 300]))
        sequences = Sequences.padded(**dict(zip(("seqlens_q", "seqlens_k"), lengths)))
        _, aux = attention(q, k, v, sequences=sequences, backend="triton", return_aux=AuxRequest(True, True, True))
        gap = torch.tensor([[False, False], [False, True]], device=DEVICE)[:, None].expand(2, 2, 2)
        for x, value in zip(aux, (-torch.inf, -torch.inf, 0.0), strict=True):
            assert x is not None and bool((x[gap] == value).all()) and bool(x[~gap].isfinite().all())

    yield outcome_of(has_numbers_of_no_keys, "padded queries, keys in shares")


def pages_between_blocks() -> Iterator[str | None]:
    """Outcomes of pages that are longer than a block of keys and end inside of one, with 16 and with 3 queries."""
    for page_size, seqlen_q in itertools.product((48, 96, 160), (16, 3)):
        lengths = tuple((seqlen_q, n) for n in (193, 97, 48))
        call = SMALL.with_(lengths=lengths, layout="paged", page_size=page_size).build(is_causal=True)
        set_up(random.Random(page_size))
        yield outcome_of(lambda call=call: assert_accurate(run(call, deterministic=True), call), call.told)


def _sums_scores(call: SequenceCall) -> bool:
    """Whether sequences or heads share the gradient of a bias of one value per score."""
    bias = call.bias
    if "bias" not in call.needs_grad or bias is None or bias.shape[-2] == 1 or bias.shape[-1] == 1:
        return False
    return len(call.lengths) > 1 and (bias.dim() == 3 or bias.shape[0] == 1 or bias.shape[1] < call.q.shape[-2])


def _has_lists_by_group(call: SequenceCall) -> bool:
    """Whether all heads of a group are one tile, and each group has lists of its own."""
    assert isinstance(call.mask, Tensor)
    return 1 < call.mask.shape[-3] == call.k.shape[-2] < call.q.shape[-2] and call.sequences.block_table is not None


# The kinds of calls with masks of tiles: their lengths, and a condition.
TILE_KINDS: tuple[tuple[tuple[int, ...], Callable[[SequenceCall], bool]], ...] = (
    (TILE_LENGTHS, lambda call: True),
    (TILE_LENGTHS, _sums_scores),
    ((0, 1, 5, 16), lambda call: True),
    ((1, 5, 16), _has_lists_by_group),
)


def masks_of_tiles(count: int = 8, first: int = 0) -> Iterator[str | None]:
    """Outcomes of calls whose mask is prepared, of at most three sequences and some hundred rows of heads."""
    for kind, (lengths, is_one) in enumerate(TILE_KINDS):
        numbers = itertools.count(first + kind * 100_000)
        drawn = (drawn_call(n, lengths, TILE_LENGTHS) for n in numbers)
        few = (call for call in drawn if len(call.lengths) <= 3 and call.q[..., 0].numel() <= MOST_ROWS)
        for call in itertools.islice((call for call in few if call.mask is not None and is_one(call)), count // 4):
            yield checked(call, tiles_are_accurate)
    # Two sequences share the gradient of a bias of one value per score; the first tile of one is empty, and the second
    # of the other.
    shared = SMALL.with_(mask=("B", "1", "Lq", "Lk"), bias=("1", "Hq", "Lq", "Lk"), needs_grad=("bias",))
    for empty in (0, 1):
        call = shared.with_(lengths=((130, 20), (140, 33)), trailing=(5 * empty, 5)).build()
        call.mask[empty, :, :128] = call.mask[1 - empty, :, 128:] = False
        set_up(random.Random(empty))
        yield outcome_of(lambda call=call: assert_accurate(run(call, tiles=True), call), call.told)


MADE = {
    "few keys": few_keys,
    "late": late_calls,
    "sinks": sinks_beside_gaps,
    "shares": shares_beside_gaps,
    "pages": pages_between_blocks,
    "tiles": masks_of_tiles,
}
# In the interpreter, where a draw takes a second.
DRAWS = {"accurate": 12, "others": 3, "bounds": 3, "repeats": 2}


def drawn(check: str, count: int, first: int = 0) -> Iterator[str | None]:
    """The outcomes of a check of calls from a number on."""
    return (checked(drawn_call(number), CHECKS[check]) for number in range(first, first + count))


def main(what: str, count: int = 0, first: int = 0) -> int:
    """Run all that are drawn or made, or one check, on outputs that are NaN before; returns the exit status."""
    interpreter.admit_cpu()
    interpreter.guard_outputs()
    if what == "drawn":
        return report(outcome for check, few in DRAWS.items() for outcome in drawn(check, count or few))
    if what == "made":
        return report(outcome for made in MADE.values() for outcome in made())
    return report(MADE[what]() if what in MADE else drawn(what, count, first))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *(int(number) for number in sys.argv[2:])))
