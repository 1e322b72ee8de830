"""The calls whose Triton kernels are compiled without a GPU, by name: every form of mask and bias, every head dim."""

from __future__ import annotations

from typing import Any

import torch

FULL, SHARED_BIAS, PER_KEY = ("B", "Hq", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk"), ("1", "Hk", "1", "Lk")
T5 = ("1", "Hq", "1", "257")
HALF = {"dtype": torch.float16}


def sizes(batch: int, seqlen_q: int, seqlen_k: int | None = None, heads: int | None = None) -> dict[str, int]:
    """The sizes of a call with as many keys as queries, and as many heads of keys, unless more is said."""
    lengths = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_q if seqlen_k is None else seqlen_k}
    return lengths if heads is None else {**lengths, "num_heads": heads, "num_heads_k": heads}


FEW_QUERIES: dict[str, Any] = {"head_dim": 128, "seqlen_q": 4, "seqlen_k": 8192, "num_heads": 8, "num_heads_k": 8}
FEW_PAIRS: dict[str, Any] = {**HALF, "mask": "dense", **sizes(2, 256)}
WIDE: dict[str, Any] = {"head_dim": 512, **sizes(1, 4096, heads=32), "num_heads_k": 8}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "per key": {"bias": PER_KEY},
    "full": {"bias": FULL, "is_causal": True},
    "shared": {"bias": SHARED_BIAS},
    "tiles": {"mask": "tiles"},
    "tiles, per key": {"mask": "tiles", "bias": PER_KEY, "is_causal": True},
    "tiles, full": {"mask": "tiles", "bias": FULL},
    "tiles, shared": {"mask": "tiles", "bias": SHARED_BIAS, "is_causal": True},
    "keys": {"mask": "keys", "is_causal": True},
    "keys, per key": {"mask": "keys", "bias": PER_KEY, "is_causal": True},
    "keys, full": {"mask": "keys", "bias": FULL},
    "keys, shared": {"mask": "keys", "bias": SHARED_BIAS, "is_causal": True},
    "relative": {"bias": T5, "outside": "clamp"},
    "tiles, relative": {
        "mask": "tiles",
        "bias": ("1", "1", "1", "300"),
        "outside": "zero",
        "bias_dtype": torch.float32,
    },
    "keys, relative": {"mask": "keys", "bias": T5, "outside": "clamp", "is_causal": True},
    "band": {"bias": ("B", "Hq", "Lq", "256"), "outside": "zero", "is_causal": True},
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"64 {form}": {"head_dim": 64, **fields} for form, fields in FORMS.items()},
    **{f"128 {form}": {"head_dim": 128, **fields} for form, fields in FORMS.items()},
    **{
        f"256 {form}": {"head_dim": 256, **FORMS[form]}
        for form in ("plain", "full", "shared", "tiles", "keys", "relative")
    },
    "256 relative in fp32": {"head_dim": 256, **FORMS["relative"], "bias_dtype": torch.float32},
    **{f"512 {form}": {**WIDE, **FORMS[form]} for form in ("causal", "full", "tiles, per key", "keys")},
    "512 shared": {**WIDE, "batch": 2, "bias": SHARED_BIAS},
    "512 small": {**WIDE, "seqlen_q": 500, "seqlen_k": 500, "num_heads": 2, "num_heads_k": 2, "is_causal": True},
    "512 one query": {**WIDE, "seqlen_q": 1, "seqlen_k": 8192, "sink": True},
    "512 dropout, softcap": {**WIDE, "dropout_p": 0.1, "softcap": 20.0},
    **{f"32 {form}": {"head_dim": 32, "batch": 8, **FORMS[form]} for form in ("plain", "full")},
    **{f"96 {form}": {"head_dim": 96, **FORMS[form]} for form in ("plain", "full", "tiles, per key")},
    "128 grouped": {"head_dim": 128, "num_heads_k": 4, "is_causal": True},
    "128 softcap": {"head_dim": 128, "softcap": 20.0},
    # Sums of p of each key.
    **{f"{d} sums": {"head_dim": d, "is_causal": True, "key_sums": True} for d in (64, 128, 256, 512)},
    "256 sums, tiles": {"head_dim": 256, "mask": "tiles", "key_sums": True},
    "256 sums, full": {"head_dim": 256, **FORMS["full"], "key_sums": True},
    "256 sums, fp32 bias": {"head_dim": 256, "bias": FULL, "bias_dtype": torch.float32, "key_sums": True},
    **{f"128 sums, {form}": {"head_dim": 128, **FORMS[form], "key_sums": True} for form in ("full", "tiles", "keys")},
    "64 fp16, fp32 bias": {"head_dim": 64, "dtype": torch.float16, "bias": FULL, "bias_dtype": torch.float32},
    # Few queries: keys in shares. Few keys: queries in shares.
    "128 one query": {"head_dim": 128, "seqlen_q": 1, "seqlen_k": 65536},
    "64 one query": {"head_dim": 64, "batch": 1, "seqlen_q": 1, "seqlen_k": 8191, "sink": True},
    # Spans of keys, in a program each, and in the program of a tile.
    "128 spans": {"head_dim": 128, "seqlen_q": 1, "seqlen_k": 65536, "sink": True, "invariant": True},
    **{
        f"{d} spans, {form}": {"head_dim": d, **FORMS[form], "invariant": True}
        for d in (64, 128)
        for form in ("causal", "full", "tiles, per key")
    },
    # Few of them, as the heads of a group are of one.
    "128 few queries, heads first": {**FEW_QUERIES, "heads_first": True},
    "128 few queries, full": {**FEW_QUERIES, "bias": FULL},
    "128 few queries, keys": {**FEW_QUERIES, "mask": "keys"},
    "64 few queries, wide": {**FEW_QUERIES, "head_dim": 64, "batch": 64, "softcap": 2.0},
    "128 few queries, wide": {**FEW_QUERIES, "batch": 64, "is_causal": True},
    "64 few keys": {"head_dim": 64, "seqlen_q": 65536, "seqlen_k": 64, "num_heads": 2, "num_heads_k": 1},
    # Not through the tensor memory accelerator, which small calls do not pay for either, and with offsets of 64 bits.
    "64 short": {"head_dim": 64, **sizes(1, 500, heads=2)},
    "64 small, full": {"head_dim": 64, "batch": 1, "bias": FULL, "is_causal": True},
    # A bool mask of few pairs is read as it is.
    "64 few pairs, full": {**FEW_PAIRS, "head_dim": 64, "bias": FULL},
    "128 few pairs, shared": {**FEW_PAIRS, "head_dim": 128, "bias": SHARED_BIAS, "is_causal": True},
    "256 few pairs": {**FEW_PAIRS, "head_dim": 256},
    **{
        f"{d} unaligned, {form}": {"head_dim": d, **sizes(2, 1023), **FORMS[form]}
        for d in (64, 128, 256)
        for form in ("full", "shared")
    },
    # Rows of one tile: a bool mask as it is, intervals of queries, and a bias whose gradient is summed in slots.
    "32 window": {"head_dim": 32, **sizes(64, 49), "mask": "dense", "bias": SHARED_BIAS, **HALF},
    "64 one tile": {"head_dim": 64, **sizes(64, 64), "mask": "intervals", "bias": FULL, **HALF},
    "64 two runs": {"head_dim": 64, **sizes(128, 128), "bias": SHARED_BIAS},
    # Sinks, whose rows the backward kernels sum up again; batch 1, which Triton makes a constant.
    "64 sink": {"head_dim": 64, "is_causal": True, "sink": True},
    "64 one tile, sink": {"head_dim": 64, "batch": 1, "num_heads": 128, "seqlen_q": 64, "seqlen_k": 50, "sink": True},
    "64 two runs, sink": {"head_dim": 64, **sizes(1, 128, heads=1024), "bias": ("1", "1", "Lq", "Lk"), "sink": True},
    "64 dropout, keys, shared": {"head_dim": 64, **FORMS["keys, shared"], "dropout_p": 0.1},
    "64 dropout, shared": {"head_dim": 64, "bias": SHARED_BIAS, "dropout_p": 0.1},
    "64 one tile, dropout": {"head_dim": 64, **sizes(64, 64, 50), "dropout_p": 0.1},
    "128 one tile": {"head_dim": 128, **sizes(64, 64, 50), "is_causal": True},
    "64 odd rows": {"head_dim": 64, "row_stride": 16 * 64 + 1, "is_causal": True},
    "64 far rows": {"head_dim": 64, "row_stride": 2**21 + 1},
    **{f"{d} fp32": {"head_dim": d, "dtype": torch.float32, "bias": SHARED_BIAS} for d in (32, 64, 128, 256, 512)},
    # Too few queries for products of pieces.
    **{
        f"{d} fp32, few queries": {**FEW_QUERIES, "head_dim": d, "dtype": torch.float32, "bias": SHARED_BIAS}
        for d in (64, 128)
    },
    **{f"{d} tf32": {"head_dim": d, "dtype": torch.float32, "tf32": True, "bias": SHARED_BIAS} for d in (64, 128, 256)},
    "256 tf32, dropout": {**FEW_PAIRS, "head_dim": 256, "dtype": torch.float32, "tf32": True, "dropout_p": 0.1},
}

# Calls with sequences: each layout, each form of a bias, and a head dim whose tiles are the largest.
ROWS = {"bias": ("1", "Hq", "T", "Lk"), "bias_packing": "queries"}
SHARED_ROWS = {**ROWS, "batch": 16, "bias": ("1", "1", "T", "Lk")}
PAGED = {"layout": "paged", "batch": 16}
SHORT = sizes(512, 48)
SEQUENCE_VARIANTS: dict[str, dict[str, Any]] = {
    "64 packed": {"head_dim": 64, "batch": 16, "is_causal": True},
    "128 packed, grouped": {"head_dim": 128, "batch": 16, "num_heads_k": 4, "is_causal": True, "sink": True},
    "256 packed": {"head_dim": 256, "batch": 16},
    "512 packed, grouped": {"head_dim": 512, "batch": 16, "num_heads_k": 2, "is_causal": True},
    "512 paged": {"head_dim": 512, "layout": "paged", "batch": 64, "num_heads_k": 2, "seqlen_q": 2, "seqlen_k": 8192},
    "512 paged, packed": {"head_dim": 512, "layout": "paged_packed", "batch": 4, "num_heads_k": 4, "is_causal": True},
    "512 packed, short": {"head_dim": 512, **SHORT},
    "512 packed, mask": {"head_dim": 512, "batch": 8, "mask": "sequence_tiles", "bias": ("1", "Hk", "Lq", "Lk")},
    "64 packed, rows": {"head_dim": 64, "batch": 16, **ROWS},
    "128 packed, rows": {"head_dim": 128, "batch": 16, **ROWS},
    "64 packed, shared rows": {"head_dim": 64, **SHARED_ROWS},
    "64 packed, by position": {"head_dim": 64, "batch": 16, "bias": SHARED_BIAS},
    "128 packed, keys": {"head_dim": 128, "batch": 16, "bias": ("1", "Hk", "1", "T"), "bias_packing": "keys"},
    "64 packed, mask": {"head_dim": 64, "batch": 8, "mask": "dense", "bias": FULL, "is_causal": True},
    "64 packed, short": {"head_dim": 64, **SHORT},
    "64 packed, short, mask, dropout": {"head_dim": 64, **SHORT, "mask": "dense", "dropout_p": 0.1},
    "128 packed, short": {"head_dim": 128, **SHORT, "num_heads_k": 4, "is_causal": True, **ROWS},
    "64 packed, spans": {"head_dim": 64, "batch": 16, "is_causal": True, "invariant": True},
    "128 paged, spans": {
        **PAGED,
        "head_dim": 128,
        "seqlen_q": 1,
        "seqlen_k": 8192,
        "num_heads_k": 4,
        "invariant": True,
    },
    "64 padded": {"head_dim": 64, "layout": "padded", "is_causal": True},
    "128 paged": {"head_dim": 128, "layout": "paged", "batch": 64, "num_heads_k": 4, "seqlen_q": 1, "seqlen_k": 8192},
    "128 paged, tree": {"head_dim": 128, "layout": "paged", **sizes(64, 16, 8192), "num_heads_k": 4, "mask": "tree"},
    "64 packed, tiles": {"head_dim": 64, "batch": 8, "mask": "sequence_tiles", "bias": ("1", "Hk", "Lq", "Lk")},
    "128 packed, tiles, rows": {"head_dim": 128, "batch": 16, "mask": "sequence_tiles", **ROWS},
    "64 packed, tiles, shared rows": {"head_dim": 64, **SHARED_ROWS, "mask": "sequence_tiles"},
    "128 paged, few queries, tiles": {"head_dim": 128, **PAGED, "seqlen_q": 4, "mask": "sequence_tiles"},
    "64 packed, tree": {"head_dim": 64, "batch": 16, "mask": "tree"},
    "64 pages of 128": {"head_dim": 64, **PAGED, "page_size": 128, "is_causal": True},
    "128 paged, packed": {"head_dim": 128, "layout": "paged_packed", "batch": 4, "num_heads_k": 4, "is_causal": True},
    "128 packed, sums": {"head_dim": 128, "batch": 16, "is_causal": True, "key_sums": True},
}
