"""Run the Triton kernels in Triton's interpreter on CPU tensors: `python interpreted_triton.py <seed> <cases>`.

A process of its own, because Triton decides at its import whether it interprets, and because an access far out of
bounds is a segmentation fault there. Random cases in fp32 and fp16 (bf16 products are wrong there), with NaN
margins round every input, a third of the masks prepared, against the fp64 formula; every failure prints the line that
rebuilds it.
"""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from accuracy import assert_accurate, run  # noqa: E402
from cases import ALL, Case  # noqa: E402
from layouts import LAYOUTS, rearranged  # noqa: E402
from torch import Tensor  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.backends import triton as backend  # noqa: E402
from flash_dmattn.masks import prepare_mask  # noqa: E402
from flash_dmattn.triton_kernels import tile_table  # noqa: E402

# The interpreter takes the same time for a step of any size, and a few steps show every edge.
SMALL = tile_table.Tile(16, 32, 4, 1)


def admit_cpu() -> None:
    """Lift the rule on the device, which the interpreter does not need."""
    backend.RULES = tuple(rule for rule in backend.RULES if rule.code != "device")
    tile_table._FP32 = tile_table._SMALL = {256: SMALL}


def draw(rng: random.Random) -> Case:
    """A random call of at most a few tiles."""

    def letters() -> tuple[str, ...]:
        return rng.choice("1B"), rng.choice(("1", "Hk", "Hq")), rng.choice(("1", "Lq")), rng.choice(("1", "Lk"))

    heads_k = rng.choice((1, 1, 2))
    return Case(
        batch=rng.choice((1, 2)),
        seqlen_q=rng.choice((0, 1, 7, 31, 32, 33, 40)) if rng.random() < 0.9 else 130,
        seqlen_k=rng.choice((0, 1, 5, 16, 17, 31, 33, 40)) if rng.random() < 0.9 else 140,
        num_heads=heads_k * rng.choice((1, 2)),
        num_heads_k=heads_k,
        head_dim=rng.choice((8, 16, 24)),
        head_dim_v=rng.choice((0, 0, 8, 32)),
        dtype=rng.choice((torch.float32, torch.float32, torch.float16)),
        bias_dtype=rng.choice((None, None, torch.float32)),
        mask=letters() if rng.random() < 0.5 else None,
        mask_kind=rng.choice(("random", "random", "empty_rows", "empty_tiles", "none_allowed", "all_allowed")),
        bias=letters() if rng.random() < 0.7 else None,
        bias_kind=rng.choice(("normal", "normal", "inf")),
        is_causal=rng.random() < 0.5,
        softmax_scale=rng.choice((None, None, 0.0, 0.7, -0.2)),
        softcap=rng.choice((0.0, 0.0, 0.0, 5.0)),
        window_size=rng.choice((None, None, None, (3, 0), (9, 5), (-1, 2), (20, -1))),
        need=rng.choice((ALL, ALL, (), ("bias",), ("q",), ("k", "bias"), ("v",))),
        dlse=rng.random() < 0.5,
        seed=rng.randrange(2**16),
    )


def with_prepared_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, **flags: Any
) -> tuple[Tensor, ...]:
    """The call with its mask and its band prepared beforehand."""
    if mask is None:
        return flash_dmattn.attention(q, k, v, None, bias, return_lse=True, backend="triton", **flags)
    band = {"is_causal": flags.pop("is_causal"), "window_size": flags.pop("window_size")}
    prepared = prepare_mask(mask, seqlen_q=q.shape[1], seqlen_k=k.shape[1], **band)
    return flash_dmattn.attention(q, k, v, prepared, bias, return_lse=True, backend="triton", **flags)


def main(seed: int, count: int) -> int:
    """Run the cases; the number of failures is the exit status."""
    admit_cpu()
    torch.set_num_threads(1)
    rng, failures = random.Random(seed), 0
    attention = partial(flash_dmattn.attention, return_lse=True, backend="triton")
    for _ in range(count):
        case, layout = draw(rng), rng.choice((None, None, *LAYOUTS))
        prepared = case.seed % 3 == 0
        inputs = case.build()
        moved = inputs if layout is None else rearranged(inputs, LAYOUTS[layout])
        try:
            assert_accurate(run(with_prepared_mask if prepared else attention, case, moved), case, inputs)
        except Exception as failure:  # the others still count
            failures += 1
            print(
                f"{case.repro()} layout {layout} prepared {prepared}\n{type(failure).__name__}: {failure}"[-1500:],
                flush=True,
            )
    print(f"{count - failures} passed, {failures} failed")
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
