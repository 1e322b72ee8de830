"""Random calls of short rows on a GPU, by the fp64 formula: `short_row_calls.py BACKEND FIRST COUNT`.

Many entries of up to 300 queries and keys, key masks and masks of each entry, biases that entries or heads share, every
subset of the gradients. Runs COUNT calls from number FIRST on, but for those that a rule refuses. Deterministic calls
run twice, for the same bits.
"""

from __future__ import annotations

import itertools
import random
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from accuracy import assert_accurate, run  # noqa: E402
from cases import ALL, Case  # noqa: E402
from draws import with_sink  # noqa: E402
from outcomes import report, served  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.masks import PreparedMask  # noqa: E402

# Few classes for Triton, which compiles each anew: sizes that are no constants of a kernel may differ at will.
LENGTHS = (1, 7, 16, 31, 33, 49, 64, 65, 77, 100, 127, 128)
LONGER = (129, 144, 197, 200, 256, 300)
SHARED = (("1", "Hq", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk"), ("1", "1", "Lq", "Lk"), ("B", "1", "Lq", "Lk"))
BIASES = (*SHARED, *SHARED, None, ("B", "Hq", "Lq", "Lk"), ("1", "Hq", "1", "Lk"), ("B", "Hq", "Lq", "1"))
MASKS = (None, ("B", "1", "1", "Lk"), ("B", "1", "1", "Lk"), ("B", "1", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk"))
NEEDS = (ALL, ALL, ALL, ("bias",), ("k", "v"), ("q", "bias"), ())


def draw(rng: random.Random, number: int) -> Case:
    """A call of many short rows."""
    lengths = LENGTHS if rng.random() < 0.7 else LONGER
    heads = rng.choice((1, 2, 3))
    bias, needs_grad = rng.choice(BIASES), rng.choice(NEEDS)
    case = Case(
        batch=rng.choice((1, 2, 3, 7, 40, 130)),
        seqlen_q=rng.choice(lengths),
        seqlen_k=rng.choice(lengths),
        num_heads=2 * heads,
        num_heads_k=rng.choice((heads, 2 * heads, 2 * heads, 2 * heads)),
        head_dim=rng.choice((32, 64, 64, 128)),
        dtype=rng.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        mask=rng.choice(MASKS),
        mask_kind=rng.choice(("random", "random", "empty_rows", "none_allowed")),
        bias=bias,
        needs_grad=tuple(name for name in needs_grad if name != "bias" or bias is not None),
        is_causal=rng.random() < 0.2,
        softcap=rng.choice((0.0, 0.0, 0.0, 5.0)),
        dlse=rng.random() < 0.3,
        seed=number,
    )
    return with_sink(case, random.Random(f"sink {number}"))


def failure_of(backend: str, number: int) -> str | None:
    """Run a call; None where every result is as it has to be.

    Raises:
        flash_dmattn.BackendUnsupportedError: a rule refuses it.
    """
    rng = random.Random(number)
    case = draw(rng, number)
    prepared, deterministic = rng.random() < 0.25, rng.random() < 0.4
    inputs = given = case.build("cuda")
    attention = partial(flash_dmattn.attention, return_lse=True, backend=backend, deterministic=deterministic)
    if prepared and inputs.mask is not None and not case.is_causal:
        mask = PreparedMask.from_mask(inputs.mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k)
        given = type(inputs)(**{**vars(inputs), "mask": mask})
    try:
        results = run(attention, case, given)
        assert_accurate(results, case, inputs)
        if deterministic:
            for name, x in run(attention, case, given).items():
                assert x is None or torch.equal(x, results[name]), f"{name} moves"
    except flash_dmattn.BackendUnsupportedError:
        raise
    except Exception as failure:  # the other calls still count
        return f"number {number}, prepared {prepared}: {case.repro()}\n{type(failure).__name__}: {failure}"[:2000]
    return None


if __name__ == "__main__":
    numbers = itertools.count(int(sys.argv[2]))
    sys.exit(report(served(partial(failure_of, sys.argv[1]), numbers, int(sys.argv[3]))))
