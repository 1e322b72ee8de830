"""Random calls with interval masks on a backend, by the fp64 formula: `interval_calls.py WHERE FIRST COUNT [cpu]`.

WHERE is "cuda" or "triton" on a GPU; "interpreter" for the Triton kernels in Triton's interpreter; or the file that
`emulation/build.py` has written, for the CUDA kernels on the emulated GPU. Runs COUNT calls from number FIRST on, but
for those that a rule refuses. Where k and v follow the mask's order, dead keys hold NaN. Deterministic calls run twice,
for the same bits. With "cpu" results are compared there, and a sanitizer watches little but the kernels. A process of
its own: the backend may be changed.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
if __name__ == "__main__" and sys.argv[1] == "interpreter":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at its import

import torch  # noqa: E402
from accuracy import assert_accurate, run  # noqa: E402
from cases import ALL, Case, Inputs  # noqa: E402
from draws import with_sink  # noqa: E402
from outcomes import report, served  # noqa: E402
from torch import Tensor  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.masks import PreparedMask  # noqa: E402
from flash_dmattn.masks.prepared.builders import interval_walk  # noqa: E402
from flash_dmattn.masks.prepared.operators import FEW_QUERIES  # noqa: E402
from flash_dmattn.masks.prepared.storage import IntervalMask  # noqa: E402


class Place(NamedTuple):
    """Where calls run, and which they are."""

    backend: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    lengths: tuple[int, ...]
    # Keys that top-k keeps, and live keys. Rows of few keys feel the rounding of out, which cuda takes delta from;
    # where sizes alone tell of them, it refuses the call.
    kept: tuple[int, ...] = (1, 5, 40)
    live: tuple[int, ...] = (0, 1, 127, 128, 129)
    compares_on: str = "cpu"
    prepare: Callable[[random.Random, int], None] = lambda rng, number: None


GPU_LENGTHS = (1, 5, 64, 127, 128, 129, 256, 300, 500, 1000, 1024, 1777)
FEW_LENGTHS = (1, 7, 64, 127, 128, 129, 256, 300)
BIASES = (
    None,
    None,
    ("B", "Hq", "1", "Lk"),
    ("1", "Hk", "1", "Lk"),
    ("1", "1", "1", "Lk"),
    ("B", "Hq", "Lq", "1"),
    ("B", "Hq", "Lq", "Lk"),
    ("1", "Hq", "Lq", "Lk"),
)
NEEDS = (ALL, ALL, ALL, ("bias",), ("k", "v"), ("q",), ())


def place_of(where: str) -> Place:
    """The place that a word or a file names."""
    if where in ("cuda", "triton"):
        head_dims, few = (32, 64, 96, 128, 128, 192, 256), {"kept": (40, 200), "live": (0, 127, 128, 129)}
        return Place(where, "cuda", (torch.bfloat16, torch.float16), head_dims, GPU_LENGTHS, **few, compares_on="cuda")
    if where == "interpreter":
        import interpreted_triton

        interpreted_triton.admit_cpu()
        # Whole tiles of a mask are 128 x 128, and small blocks of them take the interpreter too long.
        tile = interpreted_triton.Tile(128, 64, 4, 1)
        interpreted_triton.set_up(tile, interpreted_triton.NUM_SMS[0], interpreted_triton.PARTS_BYTES[0])
        return Place("triton", "cpu", (torch.float32,), (16, 32), FEW_LENGTHS[:6])
    import emulated_cuda

    emulated_cuda.admit_cpu(Path(where))

    def configure(rng: random.Random, number: int) -> None:
        emulated_cuda.passes.NUM_KV_SPLITS = rng.choice(emulated_cuda.NUM_KV_SPLITS)
        emulated_cuda.configure(rng.choice(emulated_cuda.NUM_SMS[:4]), number)

    return Place("cuda", "cpu", (torch.bfloat16,), (64, 128), FEW_LENGTHS, prepare=configure)


def draw_case(rng: random.Random, place: Place, number: int) -> Case:
    """A call without its mask."""
    heads_k, group = rng.choice((1, 2)), rng.choice((1, 1, 2, 3))
    seqlen_q, seqlen_k = rng.choice(place.lengths), rng.choice(place.lengths)
    bias = rng.choice(BIASES)
    if bias is not None and seqlen_k % 8 and bias[2:] == ("Lq", "Lk"):
        bias = ("1", "Hk", "1", "Lk")  # cuda makes no gradient of the other
    needs_grad = rng.choice(NEEDS)
    case = Case(
        batch=rng.choice((1, 2)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=heads_k * group,
        num_heads_k=heads_k,
        head_dim=rng.choice(place.head_dims),
        dtype=rng.choice(place.dtypes),
        bias=bias,
        needs_grad=tuple(name for name in needs_grad if name != "bias" or bias is not None),
        softcap=rng.choice((0.0, 0.0, 5.0)),
        dlse=rng.random() < 0.3,
        seed=number,
    )
    return with_sink(case, random.Random(f"sink {number}"))


def draw_mask(rng: random.Random, place: Place, case: Case, number: int) -> IntervalMask:
    """An interval mask for a call, on the CPU."""
    random_numbers = torch.Generator().manual_seed(number)
    heads = (rng.choice((1, case.batch)), rng.choice((1, case.num_heads_k, case.num_heads_k, case.num_heads)))
    seqlen_q, seqlen_k, reorder = case.seqlen_q, case.seqlen_k, rng.random() < 0.75

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, max(low + 1, high), (*heads, seqlen_k), generator=random_numbers)

    kind = rng.choice(("topk", "topk", "random", "window", "few live", "keys"))
    if kind == "keys" and seqlen_q >= FEW_QUERIES:
        kept = torch.rand(*heads, 1, seqlen_k, generator=random_numbers) < rng.choice((0.1, 0.7, 1.0))
        kept[..., seqlen_k - seqlen_k // rng.choice((2, 5, 1000)) :] = False  # padding
        window = (rng.choice((-1, 30, 200)), -1)
        made = PreparedMask.from_mask(
            kept,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            is_causal=rng.random() < 0.5,
            window_size=window,
            reorder=reorder,
        )
        assert isinstance(made, IntervalMask)
        return made
    if kind == "topk":
        scores = torch.randn(*heads, 1, seqlen_k, generator=random_numbers).round(decimals=1)  # with ties
        allowed = torch.rand(*heads, 1, seqlen_k, generator=random_numbers) < rng.choice((0.2, 0.6, 1.1))
        is_causal = rng.random() < 0.8
        flags: dict[str, Any] = {"is_causal": is_causal, "mask": allowed, "seqlen_q": seqlen_q, "reorder": reorder}
        return PreparedMask.from_topk(scores, rng.choice(place.kept), local=rng.choice((0, 9)) * is_causal, **flags)
    if kind == "random":
        start = integers(-3, seqlen_q + 3)
        return PreparedMask.from_intervals(start, start + integers(-20, seqlen_q), seqlen_q, reorder=reorder)
    if kind == "few live":
        live = integers(0, 1 << 30).argsort(-1) < rng.choice(place.live)
        stop = torch.where(live, seqlen_q, 0)
        return PreparedMask.from_intervals(torch.zeros_like(stop), stop, seqlen_q, reorder=reorder)
    window = (rng.choice((0, 30, 200)), rng.choice((-1, 0, 20)))
    stop = torch.full((seqlen_k,), seqlen_q)
    return PreparedMask.from_intervals(
        [0], stop, seqlen_q, window_size=window, is_causal=rng.random() < 0.3, reorder=reorder
    )


def compacted(mask: IntervalMask) -> IntervalMask:
    """The mask with as few places as its live keys need, in whole tiles, where that is fewer than it has."""
    live = int((mask.start < mask.stop).sum(-1).max()) if mask.start.numel() else 0
    places = max(1, -(-live // 128)) * 128
    if not mask.is_reordered or places >= mask.seqlen_k:
        return mask
    order, bounds, row_lists, col_lists = interval_walk(mask.start, mask.stop, mask.seqlen_q, True, places)
    return replace(mask, order=order, bounds=bounds, row_lists=row_lists, col_lists=col_lists)


def with_dead_keys_nan(place: Place, case: Case, mask: IntervalMask, inputs: Inputs) -> Inputs:
    """The inputs with NaN in the keys that no query sees, where k and v follow the mask's order.

    They do not where triton's kernels of short rows read every key.
    """
    is_short = case.seqlen_k <= 128 and case.dtype != torch.float32 and place.backend == "triton"
    per_score = case.bias is not None and case.bias[2:] == ("Lq", "Lk") and case.seqlen_q > 1 and case.seqlen_k > 1
    if not mask.is_reordered or mask.shape[1] not in (1, case.num_heads_k) or per_score or is_short:
        return inputs
    dead = (mask.start == mask.stop).expand(case.batch, case.num_heads_k, -1).transpose(1, 2)[..., None]
    k, v = (x.masked_fill(dead.to(x.device), torch.nan) for x in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v)


def moved(inputs: Inputs, device: str) -> Inputs:
    """The inputs on a device."""
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "mask", "bias", "dout", "dlse", "sink")}
    return Inputs(**{name: None if x is None else x.to(device) for name, x in tensors.items()})


def failure_of(place: Place, number: int) -> str | None:
    """Run a call; None where every result is as it has to be.

    Raises:
        flash_dmattn.BackendUnsupportedError: a rule refuses it.
    """
    rng = random.Random(number)
    case = draw_case(rng, place, number)
    mask = draw_mask(rng, place, case, number)
    if random.Random(f"places {number}").random() < 0.5:
        mask = compacted(mask)
    place.prepare(rng, number)
    deterministic = rng.random() < 0.4
    inputs = replace(case.build(place.device), mask=mask.unpacked().to(place.device))
    given = with_dead_keys_nan(place, case, mask, inputs)
    given = replace(given, mask=mask.to(place.device))
    attention = partial(flash_dmattn.attention, return_lse=True, backend=place.backend, deterministic=deterministic)
    try:
        results = run(attention, case, given)
        there = {name: None if x is None else x.to(place.compares_on) for name, x in results.items()}
        assert_accurate(there, case, moved(inputs, place.compares_on))
        if deterministic:
            for name, x in run(attention, case, given).items():
                assert x is None or torch.equal(x, results[name]), f"{name} moves"
    except flash_dmattn.BackendUnsupportedError:
        raise
    except Exception as failure:  # the other calls still count
        said = f"{type(failure).__name__}: {failure}"
        kind = f"{mask.num_places} places, reordered {mask.is_reordered}, deterministic {deterministic}"
        return f"number {number}: {mask}, {kind}\n{said}"[:2000]
    return None


if __name__ == "__main__":
    place = place_of(sys.argv[1])
    if sys.argv[4:] == ["cpu"]:
        place = place._replace(compares_on="cpu")
    numbers = itertools.count(int(sys.argv[2]))
    sys.exit(report(served(partial(failure_of, place), numbers, int(sys.argv[3]))))
