"""Seeded calls of the kernel backends, at sizes around the edges of their tiles: `DRAWS[backend](number)`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from cases import ALL, Case, Inputs
from layouts import LAYOUTS, offset, rearranged

from flash_dmattn.backends.cuda.rules import INSTANCES
from flash_dmattn.masks import PreparedMask

FORMS = tuple(itertools.product(("1", "B"), ("1", "Hk", "Hq"), ("1", "Lq"), ("1", "Lk")))
NEEDS = (ALL, ALL, ALL, (), ("bias",), ("q",), ("k", "bias"), ("v",), ("q", "k", "v"))
MASK_KINDS = ("random", "random", "empty_rows", "empty_tiles", "none_allowed", "all_allowed")
SINKS = (None, None, "normal", "normal", "inf", "huge")
SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WINDOWS = (None, None, (-1, 2), (20, -1), (90, 40), (3, 0))
# A step of a kernel takes 32 to 128 of them, and a tile of a prepared mask 128; from 512 on programs share a row.
TILE_EDGES = (1, 63, 64, 65, 127, 128, 129, 130, 200, 257, 300) * 2 + (5, 600, 1100)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 96, 128, 160, 192, 256, 20, 33, 100, 320, 512) + (64, 128) * 4


class Drawn(NamedTuple):
    """A call of a kernel: how its tensors lie, and whether its mask is prepared beforehand.

    `descriptors`: whether triton uses tensor descriptors wherever they serve. `offset`: so many elements into their
    storage start mask and bias.
    """

    case: Case
    layout: str | None
    prepared: bool
    descriptors: bool = False
    offset: int = 0


def placed(drawn: Drawn, case: Case, inputs: Inputs) -> Inputs:
    """The tensors of a case as those of a drawn call lie in memory, and the mask prepared where it is there."""
    given = inputs if drawn.layout is None else rearranged(inputs, LAYOUTS[drawn.layout])
    if drawn.offset:
        mask, bias = (x if x is None else offset(x, drawn.offset) for x in (given.mask, given.bias))
        given = replace(given, mask=mask, bias=bias)
    if drawn.prepared and given.mask is not None:
        band = {"is_causal": case.is_causal, "window_size": case.window_size}
        mask = PreparedMask.from_mask(given.mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, **band)
        given = replace(given, mask=mask)
    return given


def draw_triton(number: int) -> Drawn:
    """The call of a number; 72 of them go through all forms of mask and bias."""
    rng = random.Random(number)
    num_heads_k = rng.choice((1, 2, 3))
    dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    # Without tensor cores the products of a large tile take long to compile.
    dims = [d for d in HEAD_DIMS if d <= 64 or dtype != torch.float32]
    head_dim = rng.choice(dims)
    case = Case(
        batch=rng.choice((1, 2, 3)),
        seqlen_q=rng.choice(TILE_EDGES),
        seqlen_k=rng.choice(TILE_EDGES),
        num_heads=num_heads_k * rng.choice((1, 1, 2, 3)),
        num_heads_k=num_heads_k,
        head_dim=head_dim,
        head_dim_v=rng.choice((head_dim, head_dim, rng.choice(dims))),
        dtype=dtype,
        bias_dtype=rng.choice((None, None, torch.float32, torch.bfloat16)),
        mask=FORMS[number // 2 % len(FORMS)] if rng.random() < 0.8 else None,
        mask_kind=rng.choice(MASK_KINDS),
        bias=FORMS[number // 3 % len(FORMS)] if rng.random() < 0.8 else None,
        bias_kind=rng.choice(("normal", "normal", "inf")),
        is_causal=rng.random() < 0.4,
        softmax_scale=rng.choice((None, None, None, 0.0, 0.7, -0.2)),
        softcap=rng.choice((0.0, 0.0, 0.0, 5.0)),
        window_size=rng.choice(WINDOWS),
        needs_grad=rng.choice(NEEDS),
        dlse=rng.random() < 0.5,
        logits=rng.choice((1.0, 1.0, 30.0)),
        seed=number,
    )
    layout = rng.choice((None, None, None, *("nan_margins",) * 4, *LAYOUTS))
    drawn = Drawn(case, layout, number % 2 == 1, rng.random() < 0.5)
    case = with_dropout(with_sink(case, random.Random(f"sink {number}")), random.Random(f"dropout {number}"))
    return drawn._replace(case=case)


# Tiles are 128, 192 or 256 rows and 64, 128 or 176 keys. Rows of a bias of a multiple of 8 keys are copied as tiles.
CUDA_EDGES = tuple(n + i for n in (176, 192, 384) for i in (-1, 0, 1)) + (176, 192, 384, 64, 128, 200, 600)
CUDA_FORMS = tuple(form for form in FORMS if form[2] == "Lq")  # it refuses a mask of one row for all queries
PER_QUERY = tuple(form for form in FORMS if form[3] == "1")
PER_KEY = tuple(form for form in FORMS if form[2:] == ("1", "Lk"))
PER_SCORE = tuple(form for form in FORMS if form[2:] == ("Lq", "Lk"))
CUDA_BIASES: tuple[tuple[tuple[str, ...] | None, ...], ...] = ((None,), PER_QUERY, PER_KEY, *3 * (PER_SCORE,))


def draw_cuda(number: int) -> Drawn:
    """The call of a number, which breaks no rule of its forward pass, and mostly none of its backward pass.

    168 of them go through all pairs of a kernel instance (head dims and dtype) and a kind of mask and bias.
    """
    rng = random.Random(number)
    rest, instance = divmod(number, len(INSTANCES))
    rest, dtype = divmod(rest, 2)
    rest, has_mask = divmod(rest, 2)
    head_dim, head_dim_v = (d - rng.choice((0, 0, rng.randrange(0, min(57, d), 8))) for d in INSTANCES[instance])
    # With 8, there are more tiles of rows than SMs.
    num_heads_k = rng.choice((1, 2, 3, 8))
    lengths = TILE_EDGES + CUDA_EDGES
    has_gradients = rng.random() < 0.9
    case = Case(
        batch=rng.choice((1, 2, 3)),
        seqlen_q=rng.choice([n for n in lengths if n > 1 or not has_mask]),  # else it is of one row for all queries
        seqlen_k=rng.choice(lengths),
        num_heads=num_heads_k * rng.choice((1, 1, 2, 3)),
        num_heads_k=num_heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=(torch.bfloat16, torch.float16)[dtype],
        bias_dtype=rng.choice((None, None, None, torch.float32, torch.float16, torch.bfloat16)),
        mask=rng.choice(CUDA_FORMS) if has_mask else None,
        mask_kind=rng.choice(MASK_KINDS),
        bias=rng.choice(CUDA_BIASES[rest % len(CUDA_BIASES)]),
        bias_kind=rng.choice(("normal", "normal", "inf")),
        is_causal=rng.random() < 0.4,
        # Below 1e-6 the scale is applied before the bias, and just above it the bias is divided by it.
        softmax_scale=rng.choice((None, None, None, None, 0.0, 1e-7, 2e-6, 0.7, -0.2)),
        softcap=rng.choice((0.0, 0.0, 0.0, 5.0)),
        window_size=rng.choice(WINDOWS),
        needs_grad=(),
        logits=rng.choice((1.0, 1.0, 30.0)),
        seed=number,
    )
    layout = rng.choice((None, None, None, *("aligned_margins",) * 4, *LAYOUTS))
    offset = rng.choice((0, 0, *range(1, 8))) if layout is None else 0
    prepared = rng.random() < 0.5
    if has_gradients:
        case = case.with_(needs_grad=rng.choice((*NEEDS, *2 * (("q", "k", "v"),))), dlse=rng.random() < 0.5)
        if rng.random() < 0.9:
            case = _differentiable(case, rng)
    if INSTANCES[instance] == (64, 64) and case.softcap == 0:  # whose kernels have dropout
        case = with_dropout(case, random.Random(f"dropout {number}"))
        # Beside dropout tiles of a bias are read in the dtype of q.
        case = case.with_(bias_dtype=None) if case.dropout_p else case
    return Drawn(with_sink(case, random.Random(f"sink {number}")), layout, prepared, offset=offset)


def _differentiable(case: Case, rng: random.Random) -> Case:
    """The case with what the backward kernels of cuda ask for, where its layout keeps rows on 16 bytes."""
    per_score = case.bias in PER_SCORE
    seqlen_k = case.seqlen_k
    if seqlen_k <= 32 or (per_score and seqlen_k % 8 != 0):
        seqlen_k = rng.choice([n for n in CUDA_EDGES if n % 8 == 0])
    case = case.with_(seqlen_k=seqlen_k)
    if not per_score:
        return case
    return case.with_(bias_dtype=None, bias=("B", "Hq", "Lq", "Lk") if "bias" in case.needs_grad else case.bias)


def with_sink(case: Case, rng: random.Random, kinds: tuple[str | None, ...] = SINKS) -> Case:
    """The case with a sink now and then, and its gradient beside the others or alone."""
    sink, alone = rng.choice(kinds), rng.random() < 0.1
    if sink is None:
        return case
    alone = alone and "q" in case.needs_grad
    needs_grad = ("sink",) if alone else (*case.needs_grad, "sink") if rng.random() < 0.7 else case.needs_grad
    return case.with_(sink=sink, sink_dtype=rng.choice((None, None, *SINK_DTYPES)), needs_grad=needs_grad)


def with_dropout(case: Case, rng: random.Random) -> Case:
    """The case with dropout now and then."""
    return case.with_(dropout_p=rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.5, 0.9, 1.0)))


DRAWS: dict[str, Callable[[int], Drawn]] = {"triton": draw_triton, "cuda": draw_cuda}
