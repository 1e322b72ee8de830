"""Small calls that reach every kernel of a backend, for compute-sanitizer: `python tests/sanitized_cases.py --help`.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitized_cases.py --backend cuda

Each call runs once forward and, but for those of `cuda`, once backward; `cuda-backward` are calls of that backend with
their gradients. The results are compared with the formula in fp64 on the CPU, so that the tool watches little else than
the kernels. Without caching every tensor is an allocation of its own, and an access beyond its end is seen. Prints one
line a call; the number of wrong ones is the exit status.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from accuracy import Results, assert_accurate, run  # noqa: E402
from cases import ALL, DEVICE, Case, Inputs  # noqa: E402
from descriptors import descriptors_wherever_they_serve  # noqa: E402
from layouts import LAYOUTS, rearranged  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.backends.cuda import passes  # noqa: E402
from flash_dmattn.backends.triton import passes as triton_passes  # noqa: E402
from flash_dmattn.dispatch.registry import choices_changed  # noqa: E402

FEW_PAIRS = triton_passes.FEW_PAIRS

BASE = Case(batch=1, seqlen_q=65, seqlen_k=130, num_heads=2, head_dim=64, dtype=torch.bfloat16, dlse=True)
FP32 = torch.float32
FULL = ("B", "Hq", "Lq", "Lk")
TILES = ("B", "Hk", "Lq", "Lk")
KEYS = ("B", "1", "1", "Lk")
SINK = {"sink": "normal", "needs_grad": (*ALL, "sink")}

PLAIN = (
    # No mask and no bias: blocks at every edge, and the band.
    BASE,
    BASE.with_(seqlen_q=130, seqlen_k=65, is_causal=True),
    BASE.with_(seqlen_q=257, seqlen_k=1, **SINK),
    BASE.with_(seqlen_q=130, seqlen_k=130, head_dim=40, head_dim_v=64, window_size=(20, 5)),
    BASE.with_(seqlen_k=65, head_dim=128, head_dim_v=40, softcap=5.0, softmax_scale=-0.2),
    # Few queries or few keys: shares of a row, combined or gathered.
    BASE.with_(seqlen_q=1, seqlen_k=257, head_dim=40, num_heads=4, dtype=FP32, **SINK),
    BASE.with_(seqlen_q=1, seqlen_k=520, head_dim=128, **SINK),
    BASE.with_(seqlen_q=257, seqlen_k=33, dtype=FP32, is_causal=True),
    BASE.with_(seqlen_q=520, seqlen_k=65, num_heads=4, num_heads_k=1),
    # Every class of the gradient of a bias.
    BASE.with_(seqlen_q=130, seqlen_k=257, bias=FULL, is_causal=True),
    BASE.with_(bias=FULL, bias_dtype=FP32, softcap=5.0),
    BASE.with_(batch=2, seqlen_q=65, seqlen_k=257, head_dim=40, bias=("1", "Hq", "Lq", "Lk"), window_size=(40, 0)),
    BASE.with_(num_heads=4, dtype=FP32, bias=("B", "Hk", "Lq", "Lk")),
    BASE.with_(seqlen_q=257, batch=2, bias=("1", "Hk", "1", "Lk"), is_causal=True),
    BASE.with_(num_heads=4, bias=("B", "Hq", "1", "Lk"), needs_grad=("k", "bias")),
    BASE.with_(bias=("B", "Hq", "Lq", "1"), head_dim=128, mask=FULL, mask_kind="none_allowed"),
    # Masks of tiles: rows that are read 16 bytes at a time, 4, and 1.
    BASE.with_(seqlen_q=130, seqlen_k=272, head_dim=128, mask=("1", "1", "Lq", "Lk"), is_causal=True),
    BASE.with_(seqlen_k=132, mask=TILES, mask_kind="empty_tiles", window_size=(-1, 30)),
    BASE.with_(seqlen_q=257, mask=FULL, mask_kind="empty_rows", dtype=FP32, **SINK),
    BASE.with_(seqlen_q=257, mask=TILES, mask_kind="empty_tiles", bias=FULL),
    BASE.with_(batch=2, seqlen_q=130, mask=TILES, bias=("1", "1", "Lq", "Lk")),
    # Masks of keys.
    BASE.with_(seqlen_q=130, seqlen_k=257, mask=KEYS, is_causal=True),
    BASE.with_(mask=KEYS, bias=FULL, head_dim=128),
    BASE.with_(num_heads=4, mask=("B", "Hq", "1", "Lk"), bias=("1", "Hq", "1", "Lk"), dtype=FP32),
    BASE.with_(seqlen_q=5, seqlen_k=520, mask=KEYS, mask_kind="empty_tiles", bias=("1", "Hq", "Lq", "Lk"), batch=2),
    # Sets of keys, which fewer than 16 queries are left with.
    BASE.with_(seqlen_q=9, seqlen_k=257, mask=KEYS, is_causal=True),
    BASE.with_(seqlen_q=15, mask=KEYS, bias=FULL, head_dim=128),
    BASE.with_(seqlen_q=9, num_heads=4, mask=("B", "Hq", "1", "Lk"), bias=("1", "Hq", "1", "Lk"), dtype=FP32),
)
# Rows of one tile: one run of the backward kernel or two, sums of dbias in slots, every form of mask.
SHORT = BASE.with_(num_heads_k=2, seqlen_q=49, seqlen_k=49, head_dim=32)
SHORT_ROWS = (
    SHORT.with_(batch=40, bias=("1", "Hq", "Lq", "Lk"), mask=("B", "1", "Lq", "Lk")),
    SHORT.with_(bias=FULL, softcap=5.0, mask=("1", "Hq", "Lq", "Lk"), mask_kind="empty_rows", **SINK),
    SHORT.with_(batch=3, seqlen_q=7, seqlen_k=16, mask=KEYS, bias=("B", "Hq", "1", "Lk")),
    SHORT.with_(seqlen_q=64, seqlen_k=64, head_dim=128, is_causal=True),
    SHORT.with_(batch=8, num_heads=128, num_heads_k=128, seqlen_q=100, seqlen_k=97, bias=("1", "Hq", "Lq", "Lk")),
    SHORT.with_(seqlen_q=300, seqlen_k=77, head_dim=40, head_dim_v=64, mask=KEYS, mask_kind="empty_tiles"),
)
# Through tensor descriptors, at sizes that do not pay for them.
DESCRIPTORS = (
    BASE.with_(seqlen_q=257, seqlen_k=257, head_dim=128, is_causal=True),
    BASE.with_(seqlen_q=130, seqlen_k=264, head_dim=128, bias=FULL),
    BASE.with_(seqlen_q=257, seqlen_k=264, head_dim=40, mask=TILES, mask_kind="empty_tiles", bias=FULL),
    BASE.with_(batch=2, seqlen_q=257, seqlen_k=264, mask=TILES, bias=("1", "Hk", "Lq", "Lk")),
)
# One element into their storage, where no row is aligned.
UNALIGNED = (
    BASE.with_(seqlen_q=257, seqlen_k=257, is_causal=True),
    BASE.with_(seqlen_q=130, mask=TILES, bias=FULL, head_dim=40, dtype=FP32),
    BASE.with_(mask=KEYS, bias=("1", "Hk", "1", "Lk"), head_dim=128, seqlen_k=257),
)


def _narrow(*cases: Case) -> tuple[Case, ...]:
    """Those of head dims up to 64, at head dims up to 32."""
    return tuple(
        case.with_(head_dim=min(case.head_dim, 32), head_dim_v=min(case.head_dim_v, 32))
        for case in cases
        if max(case.head_dim, case.head_dim_v) <= 64
    )


def _at_96(*cases: Case) -> tuple[Case, ...]:
    """Those of head dims above 64, at head dims up to 96."""
    return tuple(
        case.with_(head_dim=min(case.head_dim, 96), head_dim_v=min(case.head_dim_v, 96))
        for case in cases
        if max(case.head_dim, case.head_dim_v) > 64
    )


def _numbered(**groups: tuple[Case, ...]) -> tuple[tuple[Case, str], ...]:
    return tuple((case, how) for how, cases in groups.items() for case in cases)


# The forward kernels of cuda: of each form of bias with and without a mask, all at 64 and 128, some at other head dims.
FORWARD = BASE.with_(needs_grad=(), dlse=False)
FP16 = torch.float16
PER_KEY = ("1", "Hk", "1", "Lk")
MANY = {"batch": 2, "num_heads": 96, "num_heads_k": 48}  # more pieces of work than SMs
D64 = (
    # A block computes 192 rows without a mask, 128 with one, against 128 keys. At 32 without a mask it is 192 or 256,
    # whichever take less time, against 64.
    FORWARD.with_(**MANY, seqlen_k=72),
    FORWARD.with_(seqlen_q=193, seqlen_k=129, dtype=FP16, is_causal=True),
    FORWARD.with_(seqlen_q=257, seqlen_k=130, mask=TILES, mask_kind="empty_tiles", is_causal=True),
    FORWARD.with_(seqlen_q=193, seqlen_k=264, bias=FULL, is_causal=True),
    FORWARD.with_(seqlen_q=130, seqlen_k=392, bias=FULL, mask=FULL, mask_kind="empty_rows", num_heads=4, sink="inf"),
    FORWARD.with_(seqlen_q=130, seqlen_k=257, bias=PER_KEY, window_size=(20, 5), dtype=FP16),
    FORWARD.with_(batch=2, bias=("B", "Hq", "1", "Lk"), bias_dtype=FP32, mask=("1", "1", "Lq", "Lk")),
    FORWARD.with_(bias=("1", "Hq", "Lq", "Lk"), softcap=5.0),
    FORWARD.with_(seqlen_q=129, bias=FULL, bias_dtype=FP32, mask=TILES, softmax_scale=-0.2),
    FORWARD.with_(seqlen_q=1, seqlen_k=257, bias=("B", "Hq", "Lq", "1")),
)
WIDE = FORWARD.with_(head_dim=128)
D128 = (
    WIDE.with_(seqlen_q=129, seqlen_k=1),
    WIDE.with_(seqlen_q=257, seqlen_k=177, mask=("B", "1", "Lq", "1"), mask_kind="none_allowed", dtype=FP16),
    WIDE.with_(**MANY, seqlen_k=72, mask=TILES, mask_kind="empty_tiles", is_causal=True),
    WIDE.with_(batch=2, seqlen_q=129, seqlen_k=264, bias=("1", "1", "Lq", "Lk"), window_size=(40, 0), dtype=FP16),
    WIDE.with_(**MANY, seqlen_k=136, bias=("1", "Hk", "Lq", "Lk"), mask=TILES, is_causal=True),
    WIDE.with_(seqlen_q=130, seqlen_k=353, bias=("B", "Hq", "1", "Lk"), softcap=5.0, sink="normal"),
    WIDE.with_(seqlen_q=130, bias=PER_KEY, mask=FULL, mask_kind="empty_rows", softmax_scale=0.0, head_dim=104),
    WIDE.with_(seqlen_q=257, seqlen_k=136, bias=FULL, bias_dtype=FP16, is_causal=True),
    WIDE.with_(seqlen_k=257, bias=FULL, mask=TILES, dtype=FP16, num_heads=4, num_heads_k=1),
    WIDE.with_(bias=("1", "Hk", "Lq", "1"), mask=TILES, mask_kind="empty_rows", head_dim_v=72),
)
# A bias that a block of three or four consumers keeps for many entries; enough of them for 132 SMs.
SHARED_BIAS = {"batch": 180, "num_heads": 3, "num_heads_k": 3, "head_dim": 32, "bias": ("1", "Hq", "Lq", "Lk")}
HELD_BIAS = (
    FORWARD.with_(**SHARED_BIAS, seqlen_q=130, seqlen_k=136),
    FORWARD.with_(**SHARED_BIAS, seqlen_q=200, seqlen_k=72, sink="normal"),
)
# (192, 128), 192 and 256 walk 64 keys at a time.
OTHERS = (
    FORWARD.with_(head_dim=96, seqlen_k=136, bias=FULL, mask=TILES),
    FORWARD.with_(head_dim=96, seqlen_q=130, bias=PER_KEY, dtype=FP16, is_causal=True),
    FORWARD.with_(head_dim=192, head_dim_v=128, seqlen_q=129, is_causal=True),
    FORWARD.with_(
        head_dim=192, head_dim_v=128, seqlen_k=264, bias=FULL, mask=TILES, mask_kind="empty_tiles", dtype=FP16
    ),
    FORWARD.with_(head_dim=192, seqlen_k=65, bias=FULL, mask=FULL),
    FORWARD.with_(head_dim=192, bias=PER_KEY, window_size=(-1, 30), dtype=FP16),
    FORWARD.with_(head_dim=256, seqlen_k=72, bias=FULL),
    FORWARD.with_(head_dim=256, bias=PER_KEY, mask=TILES, mask_kind="empty_rows", dtype=FP16),
)
# One element into their storage: q, k and v are copied, and a bias is read by plain loads.
FORWARD_UNALIGNED = (
    FORWARD.with_(seqlen_q=193, seqlen_k=136, bias=FULL, is_causal=True),
    FORWARD.with_(head_dim=128, seqlen_k=136, bias=FULL, mask=TILES, dtype=FP16),
    FORWARD.with_(head_dim=192, head_dim_v=128, seqlen_k=65, bias=PER_KEY, mask=TILES),
    FORWARD.with_(head_dim=256, seqlen_k=129, bias=FULL, mask=FULL, is_causal=True),
)
# Pieces of work whose keys several blocks share: of each form that there is a kernel for, with and without a mask, at
# 64, 96 and 128. A call of MANY has, behind pieces that stay whole, parts of the last ones.
FORWARD_PARTS = (
    FORWARD.with_(**MANY, seqlen_k=392),
    FORWARD.with_(seqlen_q=193, seqlen_k=520, dtype=FP16, is_causal=True),
    FORWARD.with_(**MANY, seqlen_k=264, mask=TILES, mask_kind="empty_tiles"),
    FORWARD.with_(seqlen_q=193, seqlen_k=520, bias=FULL),
    FORWARD.with_(**MANY, seqlen_q=193, seqlen_k=264, bias=FULL),
    FORWARD.with_(seqlen_q=130, seqlen_k=392, bias=FULL, mask=FULL, mask_kind="empty_rows", dtype=FP16),
    FORWARD.with_(seqlen_q=1, seqlen_k=1030, bias=PER_KEY, num_heads=4),
    FORWARD.with_(seqlen_q=17, seqlen_k=520, bias=("B", "Hq", "1", "Lk"), mask=("1", "1", "Lq", "Lk")),
    WIDE.with_(seqlen_q=1, seqlen_k=1030, num_heads=4, num_heads_k=1, dtype=FP16),
    WIDE.with_(seqlen_q=193, seqlen_k=520, mask=TILES, mask_kind="none_allowed", bias=("B", "Hq", "Lq", "1")),
    WIDE.with_(seqlen_q=129, seqlen_k=392, bias=FULL, window_size=(40, 0)),
    WIDE.with_(**MANY, seqlen_k=392, bias=("1", "Hk", "Lq", "Lk"), mask=TILES, dtype=FP16),
    WIDE.with_(seqlen_q=130, seqlen_k=520, bias=PER_KEY, softcap=5.0),
    WIDE.with_(seqlen_q=130, seqlen_k=392, bias=PER_KEY, mask=FULL, mask_kind="empty_rows", head_dim=104),
    FORWARD.with_(head_dim=96, seqlen_q=130, seqlen_k=392, is_causal=True),
    FORWARD.with_(head_dim=96, seqlen_k=264, bias=FULL, mask=TILES, dtype=FP16),
)
# The backward kernels of cuda: of each dtype, pair of head dims and form of bias, with and without a mask, one call. Of
# the two dtypes one is asked for sums in a fixed order. A block has 128 keys, against 128 queries at 64, 64 at 128; 64
# against 64 above.
FP16_BASE = BASE.with_(dtype=FP16)
WIDE_BASE, WIDE_FP16 = BASE.with_(head_dim=128), FP16_BASE.with_(head_dim=128)
QKV = ("q", "k", "v")
PER_QUERY = ("B", "Hq", "Lq", "1")
SHARED = {"num_heads": 4, "num_heads_k": 1}
# So many groups that a block walks the heads of each; the two of MANY are works of their own where the order is free.
GROUPS = {"batch": 8, "num_heads": 132, "num_heads_k": 66, "seqlen_q": 9}
BACKWARD = (
    # No bias.
    BASE.with_(**GROUPS, seqlen_k=129, is_causal=True),
    FP16_BASE.with_(**MANY, seqlen_k=72, mask=TILES, mask_kind="empty_tiles", needs_grad=("q", "v")),
    WIDE_FP16.with_(**MANY, seqlen_k=72),
    WIDE_BASE.with_(seqlen_q=193, seqlen_k=257, mask=TILES, mask_kind="empty_tiles", head_dim=104, is_causal=True),
    # One value per key.
    FP16_BASE.with_(seqlen_q=127, seqlen_k=193, bias=PER_KEY, window_size=(20, 15), head_dim=40, head_dim_v=64),
    WIDE_BASE.with_(**SHARED, seqlen_q=1, seqlen_k=191, bias=PER_KEY, needs_grad=("bias",)),
    # One per score, which takes no gradient.
    BASE.with_(seqlen_q=129, seqlen_k=136, bias=("1", "1", "Lq", "Lk"), is_causal=True, needs_grad=QKV),
    FP16_BASE.with_(**SHARED, seqlen_k=264, bias=FULL, mask=FULL, mask_kind="empty_rows", needs_grad=QKV),
    WIDE_FP16.with_(seqlen_q=64, seqlen_k=264, bias=FULL, head_dim_v=40, needs_grad=QKV, dlse=False),
    # One per score, which takes one.
    BASE.with_(**SHARED, batch=2, seqlen_q=130, seqlen_k=200, bias=FULL, mask=("1", "1", "Lq", "Lk"), is_causal=True),
    WIDE_FP16.with_(**MANY, seqlen_k=136, bias=FULL, is_causal=True),
    WIDE_FP16.with_(seqlen_q=193, seqlen_k=272, bias=FULL, mask=FULL, mask_kind="empty_rows", needs_grad=("bias",)),
)
# So many that blocks of two tiles of keys, the last of them with one, are done in fewer rounds.
BACKWARD_PAIRS = (
    FP16_BASE.with_(batch=8, num_heads=8, num_heads_k=8, seqlen_q=70, seqlen_k=264, bias=FULL),
    BASE.with_(batch=8, num_heads=16, num_heads_k=8, seqlen_q=130, seqlen_k=504, bias=FULL, head_dim=40),
)
BACKWARD_PAIRS_IN_ORDER = (BASE.with_(batch=8, num_heads=16, num_heads_k=8, seqlen_q=65, seqlen_k=384, bias=FULL),)
# With a softcap: each form of bias, with a mask and without.
BACKWARD_CAPPED = tuple(
    case.with_(softcap=5.0)
    for case in (
        BASE.with_(seqlen_q=193, seqlen_k=257, is_causal=True),
        FP16_BASE.with_(seqlen_q=257, seqlen_k=193, bias=PER_KEY, mask=TILES, mask_kind="empty_tiles"),
        BASE.with_(seqlen_q=257, seqlen_k=264, bias=FULL, window_size=(40, 0)),
        FP16_BASE.with_(**SHARED, seqlen_q=130, seqlen_k=264, bias=FULL, mask=TILES, needs_grad=QKV),
        WIDE_FP16.with_(seqlen_q=193, seqlen_k=257, mask=TILES, mask_kind="empty_rows"),
        WIDE_BASE.with_(**SHARED, seqlen_q=257, seqlen_k=193, bias=PER_KEY, is_causal=True),
        WIDE_FP16.with_(**MANY, seqlen_q=193, seqlen_k=136, bias=FULL, mask=TILES),
        WIDE_BASE.with_(seqlen_q=130, seqlen_k=264, bias=FULL, needs_grad=QKV),
        BASE.with_(batch=2, seqlen_q=129, seqlen_k=136, bias=("1", "Hq", "Lq", "Lk")),
        WIDE_FP16.with_(**SHARED, seqlen_k=264, bias=("B", "1", "Lq", "Lk"), mask=TILES, is_causal=True),
    )
)
BACKWARD_IN_ORDER = (
    FP16_BASE.with_(seqlen_q=127, seqlen_k=257, bias=("1", "Hk", "Lq", "1"), window_size=(20, 15)),
    BASE.with_(
        **SHARED, seqlen_q=193, seqlen_k=129, bias=PER_QUERY, bias_dtype=FP32, mask=FULL, mask_kind="empty_rows"
    ),
    WIDE_BASE.with_(seqlen_q=129, seqlen_k=257, head_dim=104, head_dim_v=128, is_causal=True),
    WIDE_FP16.with_(seqlen_q=63, seqlen_k=191, bias=PER_QUERY, mask=("B", "1", "Lq", "1"), mask_kind="none_allowed"),
    BASE.with_(**MANY, seqlen_q=129, seqlen_k=65, bias=("B", "Hq", "1", "Lk"), is_causal=True),
    FP16_BASE.with_(seqlen_q=63, seqlen_k=65, bias=("1", "1", "1", "Lk"), mask=TILES),
    WIDE_FP16.with_(batch=2, seqlen_q=130, seqlen_k=257, bias=KEYS, bias_dtype=FP32, window_size=(40, 0)),
    WIDE_BASE.with_(**GROUPS, seqlen_k=129, bias=PER_KEY, mask=TILES, mask_kind="empty_rows"),
    FP16_BASE.with_(**GROUPS, seqlen_k=136, bias=("1", "Hk", "Lq", "Lk"), needs_grad=QKV),
    BASE.with_(batch=2, seqlen_q=257, seqlen_k=264, bias=("1", "Hq", "Lq", "Lk"), mask=TILES, needs_grad=("q",)),
    WIDE_BASE.with_(**SHARED, seqlen_q=257, seqlen_k=136, bias=("B", "Hk", "Lq", "Lk"), is_causal=True, needs_grad=QKV),
    WIDE_FP16.with_(
        **MANY, seqlen_k=72, bias=("1", "Hq", "Lq", "Lk"), mask=TILES, mask_kind="empty_tiles", needs_grad=("q", "k")
    ),
    FP16_BASE.with_(seqlen_q=128, seqlen_k=128, bias=FULL, softmax_scale=-0.2),
    FP16_BASE.with_(
        seqlen_k=392, bias=FULL, mask=TILES, mask_kind="empty_tiles", head_dim_v=24, needs_grad=("q", "bias")
    ),
    WIDE_BASE.with_(seqlen_q=191, seqlen_k=264, bias=FULL, window_size=(-1, 30)),
    WIDE_BASE.with_(**SHARED, seqlen_q=129, seqlen_k=392, bias=FULL, mask=TILES, mask_kind="empty_tiles"),
)
# Copied first are q, k, v, dout and a bias per score.
BACKWARD_UNALIGNED = (
    BASE.with_(seqlen_q=257, bias=KEYS, bias_dtype=FP32, mask=FULL, mask_kind="empty_rows", needs_grad=("k", "bias")),
    BASE.with_(seqlen_q=193, seqlen_k=136, bias=FULL, is_causal=True),
    WIDE_FP16.with_(batch=2, seqlen_k=129, bias=("B", "Hq", "1", "Lk"), mask=("1", "1", "Lq", "Lk")),
    WIDE_BASE.with_(seqlen_q=130, seqlen_k=136, bias=FULL, mask=TILES, needs_grad=QKV),
)
EVERY_KEY = ("B", "1", "1", "Lk")
# A bias per score that heads share, whose gradient has kernels of its own: of each instance, with a mask and without,
# of few heads and of more than a warp has lanes.
BACKWARD_SHARED = (
    BASE.with_(batch=3, seqlen_q=129, seqlen_k=264, bias=("1", "Hq", "Lq", "Lk")),
    BASE.with_(batch=2, seqlen_q=130, seqlen_k=200, bias=("1", "1", "Lq", "Lk"), mask=TILES, mask_kind="empty_tiles"),
    FP16_BASE.with_(batch=9, **SHARED, seqlen_q=65, seqlen_k=136, bias=("1", "1", "Lq", "Lk"), is_causal=True),
    FP16_BASE.with_(batch=9, **SHARED, seqlen_k=72, bias=("1", "Hk", "Lq", "Lk"), mask=FULL, mask_kind="empty_rows"),
    WIDE_BASE.with_(**SHARED, seqlen_q=257, seqlen_k=264, bias=("B", "Hk", "Lq", "Lk"), window_size=(40, 0)),
    WIDE_BASE.with_(batch=2, seqlen_q=193, seqlen_k=136, bias=("1", "Hq", "Lq", "Lk"), mask=FULL, is_causal=True),
    WIDE_FP16.with_(batch=2, seqlen_q=63, seqlen_k=392, head_dim_v=40, bias=("B", "1", "Lq", "Lk")),
    WIDE_FP16.with_(**SHARED, seqlen_k=264, bias=("B", "1", "Lq", "Lk"), mask=("1", "1", "Lq", "Lk")),
)
# One that many batch entries share, of which several blocks leave sums in slots; most of rows that start between 16
# bytes. At narrow and at wide head dims, in either dtype.
BACKWARD_CHUNKS = (
    BASE.with_(batch=9, num_heads=2, seqlen_q=49, seqlen_k=49, bias=("1", "Hq", "Lq", "Lk"), mask=EVERY_KEY),
    WIDE_BASE.with_(batch=8, **SHARED, seqlen_q=7, seqlen_k=130, bias=("1", "1", "Lq", "Lk"), is_causal=True),
    BASE.with_(batch=9, head_dim=256, seqlen_q=65, seqlen_k=197, bias=("1", "Hk", "Lq", "Lk"), needs_grad=("bias",)),
    FP16_BASE.with_(batch=12, head_dim=192, head_dim_v=128, seqlen_q=9, seqlen_k=136, bias=("1", "1", "Lq", "Lk")),
)
# One that batch entries share, which the blocks of a cluster sum: of each instance, with a mask and without. Of the
# first of either order there are more works than clusters.
OF_BATCH = {"bias": ("1", "Hq", "Lq", "Lk"), "mask_kind": "empty_tiles"}
EVERY_BATCH = ("1", "1", "Lq", "Lk")
BACKWARD_CLUSTERS = (
    BASE.with_(**OF_BATCH, batch=8, num_heads=18, seqlen_q=9, seqlen_k=136, is_causal=True),
    BASE.with_(**OF_BATCH, batch=2, seqlen_q=193, seqlen_k=264, mask=EVERY_BATCH, needs_grad=("k", "bias")),
    FP16_BASE.with_(**OF_BATCH, batch=4, **SHARED, seqlen_q=130, seqlen_k=392, window_size=(40, 0), head_dim=40),
    WIDE_BASE.with_(**OF_BATCH, batch=8, **SHARED, seqlen_q=65, seqlen_k=264, mask=EVERY_BATCH),
    WIDE_FP16.with_(**OF_BATCH, batch=2, seqlen_q=191, seqlen_k=136, head_dim_v=72),
)
BACKWARD_CLUSTERS_IN_ORDER = (
    WIDE_FP16.with_(**OF_BATCH, batch=8, num_heads=18, seqlen_q=65, seqlen_k=136, mask=EVERY_BATCH),
    BASE.with_(**OF_BATCH, batch=2, seqlen_q=129, seqlen_k=264),
    FP16_BASE.with_(**OF_BATCH, batch=8, seqlen_q=193, seqlen_k=200, mask=EVERY_BATCH, is_causal=True),
    WIDE_BASE.with_(**OF_BATCH, batch=4, **SHARED, seqlen_q=127, seqlen_k=264, is_causal=True),
    FP16_BASE.with_(**OF_BATCH, batch=4, seqlen_q=65, seqlen_k=136, mask=EVERY_BATCH, head_dim_v=24),
)
# Under a mask, works of a group and then of single heads: as walks are long.
BACKWARD_GROUPS_THEN_HEADS = (
    BASE.with_(batch=2, num_heads=90, num_heads_k=45, seqlen_q=500, seqlen_k=257, mask=TILES, mask_kind="empty_tiles"),
    WIDE_FP16.with_(batch=2, num_heads=68, num_heads_k=34, seqlen_q=500, seqlen_k=392, bias=PER_KEY, mask=EVERY_BATCH),
)
BACKWARD_TO_128 = (
    BACKWARD
    + BACKWARD_PAIRS
    + BACKWARD_CAPPED
    + BACKWARD_SHARED
    + BACKWARD_CHUNKS
    + BACKWARD_CLUSTERS
    + BACKWARD_GROUPS_THEN_HEADS
)
BACKWARD_IN_ORDER_TO_128 = BACKWARD_IN_ORDER + BACKWARD_PAIRS_IN_ORDER + BACKWARD_CLUSTERS_IN_ORDER
# The kernels of 96 are those of 128 with other constants.
BACKWARD_96, BACKWARD_IN_ORDER_96 = _at_96(*BACKWARD_TO_128), _at_96(*BACKWARD_IN_ORDER_TO_128)
WIDE_DIMS = ((192, 128), (192, 192), (256, 256))


def _wide_backward() -> tuple[list[Case], list[Case], list[Case]]:
    """The same above head dim 128: in any order, in a fixed one, and of a bias per score that heads share."""
    any_order, in_order, shared = [], [], []
    dtypes = (BASE.dtype, FP16)
    lengths = itertools.cycle(((65, 136), (193, 72), (130, 264), (127, 200), (64, 392)))
    forms = ((None, QKV), (PER_KEY, ALL), (("1", "Hk", "Lq", "Lk"), QKV), (FULL, ALL))
    for i, ((d, d_v), mask, (bias, needs_grad)) in enumerate(itertools.product(WIDE_DIMS, (None, TILES), forms)):
        seqlen_q, seqlen_k = next(lengths)
        case = BASE.with_(head_dim=d - i % 2 * 8, head_dim_v=d_v - i % 3 * 8, mask=mask, mask_kind="empty_tiles")
        case = case.with_(seqlen_q=seqlen_q, seqlen_k=seqlen_k, bias=bias, needs_grad=needs_grad, is_causal=i % 5 < 2)
        any_order.append(case.with_(dtype=dtypes[i % 2], num_heads=4, num_heads_k=2))
        in_order.append(case.with_(dtype=dtypes[1 - i % 2]))
    for i, ((d, d_v), mask, dtype) in enumerate(itertools.product(WIDE_DIMS, (None, TILES), dtypes)):
        case = BASE.with_(head_dim=d, head_dim_v=d_v, mask=mask, mask_kind="empty_tiles", dtype=dtype, is_causal=i < 6)
        shared.append(case.with_(batch=2, seqlen_k=136, bias=("1", "Hq", "Lq", "Lk"), needs_grad=("bias",)))
    return any_order, in_order, shared


def _wide_capped() -> tuple[Case, ...]:
    """With a softcap above head dim 128: each form of bias. Of a tile the kernel of a shared gradient stores dbias."""
    cases = []
    for i, ((d, d_v), bias) in enumerate(itertools.product(WIDE_DIMS, (None, PER_KEY, FULL))):
        case = BASE.with_(head_dim=d, head_dim_v=d_v, bias=bias, mask=(TILES, None)[i % 2], mask_kind="empty_tiles")
        case = case.with_(seqlen_q=193, seqlen_k=136, softcap=5.0, is_causal=i % 5 < 2)
        cases.append(case.with_(dtype=(BASE.dtype, FP16)[i // 2 % 2]))
    return tuple(cases)


# Bool masks that every kernel reads as they are: of keys, of pairs, odd rows, each form of a bias and its gradient.
FEW_PAIRS_READ = (
    BASE.with_(seqlen_k=131, mask=TILES, mask_kind="empty_rows", is_causal=True, bias=FULL),
    BASE.with_(batch=2, mask=KEYS, bias=("1", "Hq", "Lq", "Lk"), window_size=(40, 0)),
    BASE.with_(seqlen_q=130, num_heads=4, mask=TILES, bias=("1", "Hk", "1", "Lk"), head_dim=128, softcap=5.0),
)


BACKWARD_WIDE, BACKWARD_WIDE_IN_ORDER, BACKWARD_WIDE_SHARED = map(tuple, _wide_backward())
BACKWARD_WIDE_CAPPED = _wide_capped()
CASES = {
    "triton": _numbered(
        plain=PLAIN + SHORT_ROWS, descriptors=DESCRIPTORS, unaligned=UNALIGNED, few_pairs=FEW_PAIRS_READ
    ),
    "cuda": _numbered(
        plain=_narrow(*D64) + D64 + D128 + HELD_BIAS + OTHERS,
        unaligned=_narrow(*FORWARD_UNALIGNED) + FORWARD_UNALIGNED,
        parts=_narrow(*FORWARD_PARTS) + FORWARD_PARTS,
    ),
    "cuda-backward": _numbered(
        plain=_narrow(*BACKWARD_TO_128)
        + BACKWARD_TO_128
        + BACKWARD_WIDE
        + BACKWARD_WIDE_SHARED
        + BACKWARD_WIDE_CAPPED
        + BACKWARD_96,
        in_order=_narrow(*BACKWARD_IN_ORDER_TO_128)
        + BACKWARD_IN_ORDER_TO_128
        + BACKWARD_WIDE_IN_ORDER
        + BACKWARD_IN_ORDER_96,
        unaligned=_narrow(*BACKWARD_UNALIGNED) + BACKWARD_UNALIGNED,
    ),
}


def place(inputs: Inputs, how: str) -> Inputs:
    """The inputs on the device, in the layout of a call."""
    there = rearranged(inputs, lambda x: x.to(DEVICE))
    return rearranged(there, LAYOUTS["offset_by_one"]) if how == "unaligned" else there


def call(case: Case, how: str, calls: str) -> tuple[Results, Inputs]:
    """Run a case of some calls; return the results of the kernels and the inputs, both on the CPU."""
    inputs = case.build("cpu")
    attention = partial(
        flash_dmattn.attention,
        return_lse=True,
        deterministic=how == "in_order",
        backend=calls.removesuffix("-backward"),
    )
    passes.NUM_KV_SPLITS = 3 if how == "parts" else 1
    few_pairs = FEW_PAIRS if how == "few_pairs" else 0  # at 0 every bool mask is packed
    if few_pairs != triton_passes.FEW_PAIRS:
        triton_passes.FEW_PAIRS = few_pairs
        choices_changed()
    with descriptors_wherever_they_serve() if how == "descriptors" else nullcontext():
        results = run(attention, case, place(inputs, how))
    return {name: None if x is None else x.cpu() for name, x in results.items()}, inputs


def main(backend: str, first: int, count: int | None) -> int:
    """Run the calls from the first on; returns how many were wrong."""
    failures = 0
    stop = None if count is None else first + count
    for number, (case, how) in list(enumerate(CASES[backend]))[first:stop]:
        line = f"{number:2} {how} {case.repro()}"
        results, inputs = call(case, how, backend)
        try:
            assert_accurate(results, case, inputs)
            print(f"{line} ok", flush=True)
        except AssertionError as failure:  # the others still count
            failures += 1
            print(f"{line} WRONG: {failure}", flush=True)
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", nargs="?", type=int, default=0, help="the number of the first call (default: 0)")
    parser.add_argument("count", nargs="?", type=int, help="how many to run (default: all from there on)")
    parser.add_argument("--backend", choices=tuple(CASES), default="triton", help="and which of its calls")
    sys.exit(main(**vars(parser.parse_args())))
