"""The grammar of random calls: `draw(rng, features)` makes a `Case`, and features name the choices for its fields.

`DRAWS[backend](number)` is the call of a number at sizes around the edges of the tiles of that backend.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from cases import ALL, DEVICE, GREAT, GREAT_MIN, HIDDEN, JUMPS, MEANS, SEEN, SIGNS, STEPS, Case, Inputs, Numbers
from layouts import LAYOUTS, offset, rearranged
from torch import Tensor

from flash_dmattn.backends.cuda.operands import FLOAT_TILE_DIM
from flash_dmattn.backends.cuda.rules import INSTANCES
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared.operators import FEW_QUERIES, interval_walk
from flash_dmattn.masks.prepared.storage import IntervalMask

# The choices for each field of a `Case`, and for "group", the query heads of a key-value head. A choice that stands
# there twice is drawn twice as often.
Features = Mapping[str, Sequence[Any]]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FORMS = tuple(itertools.product(("1", "B"), ("1", "Hk", "Hq"), ("1", "Lq"), ("1", "Lk")))
PER_QUERY = tuple(form for form in FORMS if form[3] == "1")
PER_KEY = tuple(form for form in FORMS if form[2:] == ("1", "Lk"))
PER_SCORE = tuple(form for form in FORMS if form[2:] == ("Lq", "Lk"))
QKV = ("q", "k", "v")
SHARES = {"any": 0.2, "uncentred": 1.0}  # of calls whose data are not centred, by what a program is asked for
UNCENTRED = SHARES["any"]
DATA = (MEANS, (*SIGNS, *STEPS), JUMPS, GREAT, GREAT, SEEN, HIDDEN)
ANY: Features = {
    "batch": (1, 2, 3),
    "num_heads_k": (1, 2, 3),
    "group": (1, 1, 2, 3),
    "head_dim_v": (0,),
    "bias_dtype": (None, None, FP32, BF16),
    "mask": (None,) * 6 + FORMS,
    "mask_kind": ("random", "random", "empty_rows", "empty_tiles", "none_allowed", "all_allowed"),
    "bias": (None,) * 6 + FORMS,
    "bias_kind": ("normal", "normal", "inf"),
    "is_causal": (True, True, False, False, False),
    "softmax_scale": (None, None, None, 0.0, 0.7, -0.2),
    "softcap": (0.0, 0.0, 0.0, 5.0),
    "window_size": (None, None, None, (-1, 2), (20, -1), (9, 5), (3, 0)),
    "needs_grad": (ALL, ALL, ALL, (), ("bias",), ("q",), ("k", "bias"), ("v",), QKV),
    "dlse": (True, False),
    "logits": (1.0, 1.0, 30.0),
    "sink": (None, None, "normal", "normal", "inf", "huge"),
    "sink_dtype": (None, None, FP32, BF16, FP16, FP64),
    "dropout_p": (0.0,) * 5 + (0.1, 0.5, 0.9, 1.0),
    "data": DATA,
}


def draw(rng: random.Random, features: Features, seed: int) -> Case:
    """A call of these features; each field that they leave out has the choices of `ANY`."""
    features = {**ANY, **features}
    values = {name: rng.choice(choices) for name, choices in features.items() if name not in ("relative", "data")}
    values["num_heads"] = values["num_heads_k"] * values.pop("group")
    if values["bias"] is None and "relative" in features:  # its own numbers, so that all else is drawn as without it
        values["relative"] = draw_relative(random.Random(f"relative {seed}"), values, features["relative"])
    has_gradient, is_alone = rng.random() < 0.7, rng.random() < 0.1
    if values["sink"] is not None and is_alone and "q" in values["needs_grad"]:
        values["needs_grad"] = ("sink",)
    elif values["sink"] is not None and has_gradient:
        values["needs_grad"] = (*values["needs_grad"], "sink")
    return with_data(Case(**values, seed=seed), features["data"])


def with_data(case: Case, groups: Sequence[Sequence[str]] = DATA) -> Case:
    """The case, or for a share of `UNCENTRED` one whose data are of a kind of these groups that it has room for."""
    rng, has_bias = random.Random(f"data {case.seed}"), case.bias is not None or case.relative is not None
    hides = case.mask is not None and case.mask[3] == "Lk" and case.seqlen_k > 1
    fits = {JUMPS: has_bias, GREAT: has_bias, (*GREAT, *GREAT_MIN): has_bias, HIDDEN: hides}
    served = [group for group in groups if fits.get(group, True)]
    served += [tuple(STEPS)] * 4 * (case.relative is not None and len(served) > 0)  # in addition to its flat ends
    if rng.random() >= UNCENTRED or case.dtype == FP64 or not served:
        return case
    kinds = [x for x in rng.choice(served) if not x.endswith(" bias") or case.bias is not None]
    # With great scores and others, only rounding would be tested.
    case = case.with_(data=rng.choice(kinds), logits=1.0, bias_kind="normal")
    if case.data in HIDDEN and (case.data.endswith("bias") and case.bias[3] != "Lk"):
        case = case.with_(data="hidden nan k")
    without_sink = tuple(name for name in case.needs_grad if name != "sink")
    if case.data in STEPS and case.relative is not None:  # tiles beyond its values, and maxima that these tiles raise
        wide = case.relative._replace(number=3, zero=1, outside="zero" if case.relative.letters[2] == "Lq" else "clamp")
        plain = {"window_size": None, "softmax_scale": None, "sink": None, "needs_grad": without_sink}
        return case.with_(relative=wide, **plain)
    if case.data in (*GREAT, *GREAT_MIN) and case.bias is not None and case.bias[3] == "1":
        return case.with_(sink=None, needs_grad=without_sink)  # the great value may be left out, see `accuracy.py`
    if case.data not in (*SEEN, *HIDDEN):
        return case
    # A dropped NaN is 0, and so is one at a scale of 0 in products of BLAS.
    return case.with_(dropout_p=0.0, softmax_scale=case.softmax_scale or None, needs_grad=without_sink)


def draw_relative(rng: random.Random, values: Mapping[str, Any], rows: Sequence[str]) -> Numbers | None:
    """A bias by distance, or for one call of four none; `rows` are the choices for its dim of queries."""
    if rng.random() < 0.25:
        return None
    letters = rng.choice(("1", "B")), rng.choice(("1", "Hk", "Hq")), rng.choice(rows)
    outside = "zero" if letters[2] == "Lq" else rng.choice(("error", "clamp", "clamp", "zero"))
    if outside != "error":
        number = rng.choice((1, 2, 5, 17, 33, 64, 150))
        return Numbers(letters, number, rng.choice((number // 2, number // 2, number - 1, 0, -3, number + 4)), outside)
    low, high = 1 - values["seqlen_k"], values["seqlen_q"] - 1
    left, right = values["window_size"] or (-1, -1)
    right = 0 if values["is_causal"] else right
    low, high = low if left < 0 else max(low, -left), high if right < 0 else min(high, right)
    more = rng.choice((0, 0, 3))  # values of distances that the call has not
    return Numbers(letters, max(high - low, 0) + 1 + more, more - low, outside)


class Drawn(NamedTuple):
    """A call of a kernel: how its tensors lie, and whether its mask is prepared beforehand.

    `descriptors`: whether triton uses tensor descriptors wherever they serve. `offset`: so many elements into their
    storage start mask and bias.
    """

    case: Case
    layout: str | None = None
    prepared: bool = False
    descriptors: bool = False
    offset: int = 0
    deterministic: bool = False


def placed(drawn: Drawn, inputs: Inputs) -> Inputs:
    """The tensors of a call as they lie in memory, and the mask prepared if the call has it so."""
    case = drawn.case
    inputs = inputs if drawn.layout is None else rearranged(inputs, LAYOUTS[drawn.layout])
    if drawn.offset:
        mask, bias = (x if x is None else offset(x, drawn.offset) for x in (inputs.mask, inputs.bias))
        inputs = replace(inputs, mask=mask, bias=bias)
    if drawn.prepared and inputs.mask is not None:
        band = {"is_causal": case.is_causal, "window_size": case.window_size}
        mask = PreparedMask.from_mask(inputs.mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, **band)
        inputs = replace(inputs, mask=mask)
    return inputs


# For backends that compile nothing for a call: sizes that the fp64 formula answers in a millisecond.
SMALL_LENGTHS = (*range(1, 41), *(0, 1, 31, 32, 33, 63, 64, 65, 100) * 5)
SMALL: Features = {
    "seqlen_q": SMALL_LENGTHS,
    "seqlen_k": SMALL_LENGTHS,
    "group": (1, 2, 3, 4),
    "head_dim": (8, 16, 24, 32, 64),
    "head_dim_v": (0, 0, 8, 16, 48),
    "dtype": (FP32, BF16, FP16) + ((FP64,) if DEVICE == "cpu" else ()),
    "bias_kind": ("normal", "normal", "inf", "min"),
    "data": tuple((*GREAT, *GREAT_MIN) if group is GREAT else group for group in DATA),
    "window_size": (None, None, *itertools.product((-1, 0, 1, 5, 20, 50), repeat=2)),
    "relative": ("1", "1", "Lq"),
}


def simpler(drawn: Drawn) -> Iterator[Drawn]:
    """The call with one thing less: a plain memory layout, a field at its default, fewer gradients, a smaller size."""
    plain, case = Drawn(drawn.case), drawn.case
    for name in Drawn._fields[1:]:
        if getattr(drawn, name) != getattr(plain, name):
            yield drawn._replace(**{name: getattr(plain, name)})
    sizes = ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_k", "head_dim", "head_dim_v", "seed")
    for field in fields(Case):
        if field.name not in (*sizes, "dtype", "needs_grad") and getattr(case, field.name) != field.default:
            yield drawn._replace(case=case.with_(**{field.name: field.default}))
    for name in case.needs_grad:
        yield drawn._replace(case=case.with_(needs_grad=tuple(x for x in case.needs_grad if x != name)))
    group = case.num_heads // case.num_heads_k
    for heads_k, per_key in ((1, group), (case.num_heads_k, 1), (case.num_heads_k // 2, group)):
        if heads_k and heads_k * per_key < case.num_heads:
            yield drawn._replace(case=case.with_(num_heads=heads_k * per_key, num_heads_k=heads_k))
    for name in ("batch", "seqlen_q", "seqlen_k"):
        size = getattr(case, name)
        for smaller_size in sorted({1, size // 2, size - 1}):
            if 0 < smaller_size < size:
                yield drawn._replace(case=case.with_(**{name: smaller_size}))


def draw_small(number: int) -> Drawn:
    """The call of a number, of a backend without tiles."""
    rng = random.Random(number)
    return Drawn(draw(rng, SMALL, number), rng.choice((None, *LAYOUTS)), number % 4 == 3)


# A step of a kernel takes 32 to 128 of them, and a tile of a prepared mask 128; from 512 on programs share a row.
TILE_EDGES = (1, 63, 64, 65, 127, 128, 129, 130, 200, 257, 300) * 2 + (5, 600, 1100)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 96, 128, 160, 192, 256, 20, 33, 100, 320, 512) + (64, 128) * 4
KERNELS: Features = {
    "seqlen_q": TILE_EDGES,
    "seqlen_k": TILE_EDGES,
    "window_size": (None, None, (-1, 2), (20, -1), (90, 40), (3, 0)),
}


def draw_triton(number: int) -> Drawn:
    """The call of a number; 72 of them go through all forms of mask and bias."""
    rng = random.Random(number)
    dtype = rng.choice((BF16, BF16, FP16, FP32))
    # Without tensor cores the products of a large tile take long to compile.
    dims = tuple(d for d in HEAD_DIMS if d <= 64 or dtype != FP32)
    forms = {"mask": FORMS[number // 2 % len(FORMS)], "bias": FORMS[number // 3 % len(FORMS)]}
    chosen = {name: (None, *4 * (form,)) for name, form in forms.items()}
    head_dims = {"head_dim": dims, "head_dim_v": (0,) * 2 * len(dims) + dims}
    case = draw(rng, {**KERNELS, **head_dims, **chosen, "dtype": (dtype,), "relative": ("1",)}, number)
    layout = rng.choice((None, None, None, *("nan_margins",) * 4, *LAYOUTS))
    return Drawn(case, layout, number % 2 == 1, rng.random() < 0.5)


# Tiles are 128, 192 or 256 rows and 64, 128 or 176 keys. Rows of a bias of a multiple of 8 keys are copied as tiles.
CUDA_EDGES = tuple(n + i for n in (176, 192, 384) for i in (-1, 0, 1)) + (176, 192, 384, 64, 128, 200, 600)
CUDA_FORMS = tuple(form for form in FORMS if form[2] == "Lq")  # it refuses a mask of one row for all queries
CUDA_BIASES: tuple[tuple[tuple[str, ...] | None, ...], ...] = ((None,), PER_QUERY, PER_KEY, *3 * (PER_SCORE,))
CUDA: Features = {
    **KERNELS,
    # With 8, there are more tiles of rows than SMs.
    "num_heads_k": (1, 2, 3, 8),
    "bias_dtype": (None, None, None, FP32, FP16, BF16),
    # Below 1e-6 the scale is applied before the bias, and just above it the bias is divided by it.
    "softmax_scale": (None, None, None, None, 0.0, 1e-7, 2e-6, 0.7, -0.2),
    "needs_grad": (*ANY["needs_grad"], QKV, QKV),
}


def draw_cuda(number: int) -> Drawn:
    """The call of a number, which breaks no rule of its forward pass, and mostly none of its backward pass.

    168 of them go through all pairs of a kernel instance (head dims and dtype) and a kind of mask and bias.
    """
    rng = random.Random(number)
    rest, instance = divmod(number, len(INSTANCES))
    rest, dtype = divmod(rest, 2)
    rest, has_mask = divmod(rest, 2)
    lengths, forms = TILE_EDGES + CUDA_EDGES, CUDA_BIASES[rest % len(CUDA_BIASES)]
    head_dim, head_dim_v = (d - rng.choice((0, 0, rng.randrange(0, min(57, d), 8))) for d in INSTANCES[instance])
    has_gradients, is_served = (rng.random() < 0.9 for _ in range(2))
    features: dict[str, Any] = {
        "head_dim": (head_dim,),
        "head_dim_v": (head_dim_v,),
        "dtype": ((BF16, FP16)[dtype],),
        # A mask of one query would be of one row for all queries.
        "seqlen_q": [n for n in lengths if n > 1 or not has_mask],
        # All in turn, and after 168 calls another form first.
        "seqlen_k": (lengths[number % len(lengths)],),
        "mask": (CUDA_FORMS[(number + number // 84) % len(CUDA_FORMS)] if has_mask else None,),
        "bias": (forms[(number + number // 168) % len(forms)],),
        "data": (),
    }
    if not has_gradients:
        features |= {"needs_grad": ((),), "dlse": (False,)}
    if max(INSTANCES[instance]) <= FLOAT_TILE_DIM:  # which have kernels of their own for it
        features |= {"bias_dtype": (None, None, FP32, FP32, FP16, BF16)}
    case = draw(rng, {**CUDA, **features}, number)
    if not has_gradients:
        case = case.with_(needs_grad=())
    elif is_served:
        case = _differentiable(case, rng)
    has_float_tiles = case.bias_dtype == FP32 and case.bias in PER_SCORE
    # Only the kernels of 64 have dropout.
    if INSTANCES[instance] != (64, 64) or case.softcap > 0 or has_float_tiles:
        case = case.with_(dropout_p=0.0)
    if case.bias is None and INSTANCES[instance] in ((64, 64), (128, 128)) and number // 168 % 3:
        values = {name: getattr(case, name) for name in ("seqlen_q", "seqlen_k", "window_size", "is_causal")}
        relative = draw_relative(random.Random(f"relative {number}"), values, ("1",))
        case = case if relative is None else case.with_(relative=relative, softcap=0.0, dropout_p=0.0)
    case = with_data(case)
    if case.data in STEPS and case.relative is not None:  # so that there are several tiles of keys
        case = case.with_(mask=None, seqlen_k=rng.choice((512, 600)))
    # Calls with dropout read tiles of a bias in the dtype of q.
    case = case.with_(bias_dtype=None) if case.dropout_p else case
    layout = rng.choice((None, None, None, *("aligned_margins",) * 4, *LAYOUTS))
    offset = rng.choice((0, 0, *range(1, 8))) if layout is None else 0
    return Drawn(case, layout, number // 12 % 2 == 1, offset=offset, deterministic=rng.random() < 0.5)


def _differentiable(case: Case, rng: random.Random) -> Case:
    """The case with what the backward kernels of cuda ask for, where its layout keeps rows on 16 bytes."""
    per_score = case.bias in PER_SCORE
    seqlen_k = case.seqlen_k
    if seqlen_k <= 32 or (per_score and seqlen_k % 8 != 0):
        seqlen_k = rng.choice([n for n in CUDA_EDGES if n % 8 == 0])
    case = case.with_(seqlen_k=seqlen_k)
    if not per_score:
        return case
    has_floats = max(case.head_dim, case.head_dim_v) <= FLOAT_TILE_DIM and case.softcap == 0
    if case.bias_dtype == FP32 and has_floats:
        return case
    return case.with_(bias_dtype=None, bias=("B", "Hq", "Lq", "Lk") if "bias" in case.needs_grad else case.bias)


# Short rows on a GPU: few classes for Triton, which compiles each anew; sizes that are no constants of a kernel differ.
SHARED = (("1", "Hq", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk"), ("1", "1", "Lq", "Lk"), ("B", "1", "Lq", "Lk"))
SHORT_LENGTHS = ((1, 7, 16, 31, 33, 49, 64, 65, 77, 100, 127, 128),) * 2 + ((129, 144, 197, 200, 256, 300),)
SHORT: Features = {
    "batch": (1, 2, 3, 7, 40, 130),
    "num_heads_k": (2, 2, 4, 6, 1, 3),
    "group": (1, 1, 1, 2),
    "head_dim": (32, 64, 64, 128),
    "dtype": (BF16, BF16, FP16),
    "bias_dtype": (None,),
    "mask": (None, ("B", "1", "1", "Lk"), ("B", "1", "1", "Lk"), ("B", "1", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk")),
    "mask_kind": ("random", "random", "empty_rows", "none_allowed"),
    "bias": (*SHARED, *SHARED, None, ("B", "Hq", "Lq", "Lk"), ("1", "Hq", "1", "Lk"), ("B", "Hq", "Lq", "1")),
    "bias_kind": ("normal",),
    "is_causal": (True, False, False, False, False),
    "softmax_scale": (None,),
    "window_size": (None,),
    "needs_grad": (ALL, ALL, ALL, ("bias",), ("k", "v"), ("q", "bias"), ()),
    "logits": (1.0,),
    "dropout_p": (0.0,),
}


def draw_short(number: int) -> Drawn:
    """The call of a number, of many entries with short rows."""
    rng = random.Random(number)
    lengths = rng.choice(SHORT_LENGTHS)
    case = draw(rng, {**SHORT, "seqlen_q": lengths, "seqlen_k": lengths}, number)
    prepared, deterministic = rng.random() < 0.25 and not case.is_causal, rng.random() < 0.4
    return Drawn(case, prepared=prepared, deterministic=deterministic)


# In Triton's interpreter: a few tiles of 16 to 64 rows. bf16 products are wrong there.
SCORE_BIASES = tuple((*heads, "Lq", "Lk") for heads in (("B", "Hq"), ("1", "Hq"), ("B", "1"), ("1", "Hk")))
INTERPRETED: Features = {
    "batch": (1, 2),
    "seqlen_q": (0, 1, 7, 31, 32, 33, 40),
    "seqlen_k": (0, 1, 5, 16, 17, 31, 33, 40, 70),
    "num_heads_k": (1, 1, 2),
    "group": (1, 2),
    "head_dim": (8, 16, 24),
    "head_dim_v": (0, 0, 8, 32),
    "dtype": (FP32, FP32, FP16),
    "bias_dtype": (None, None, FP32),
    "mask": (None,) * 24 + FORMS + PER_KEY + PER_SCORE,
    # Each bias of a score has a kernel of its own for its gradient, or a way of storing it.
    "bias": (None,) * 24 + FORMS + FORMS + 6 * SCORE_BIASES,
    "is_causal": (True, False),
    "softmax_scale": (None, None, 0.0, 0.7, -0.2),
    "needs_grad": (ALL, ALL, (), ("bias",), ("q",), ("k", "bias"), ("v",)),
    "logits": (1.0,),
    "relative": ("1",),
}
SEVERAL_TILES = ((130, 17), (33, 140), (130, 140))  # of a packed mask
MANY_BLOCKS = ((1, 300), (17, 290), (150, 20), (200, 33), (140, 70))  # which programs share


def draw_interpreted(number: int) -> Drawn:
    """The call of a number on kernels that walk tiles of keys; few heads where it is long."""
    rng = random.Random(number)
    features, length = dict(INTERPRETED), rng.random()
    if length < 0.25:
        seqlen_q, seqlen_k = rng.choice(SEVERAL_TILES if length < 0.1 else MANY_BLOCKS)
        features |= {"batch": (1,), "group": (1,), "seqlen_q": (seqlen_q,), "seqlen_k": (seqlen_k,)}
    return Drawn(draw(rng, features, number), rng.choice((None, None, *LAYOUTS)), number % 3 == 0)


def draw_short_interpreted(number: int) -> Drawn:
    """The call of a number whose rows lie in one tile; now and then one whose gradients take two runs."""
    rng = random.Random(f"short {number}")
    # Only the forward kernel serves grouped heads.
    features = {**INTERPRETED, "batch": (1, 2, 5), "num_heads_k": (1, 1, 2, 4), "group": (1, 1, 2)}
    features |= {"seqlen_q": (1, 7, 31, 33, 40, 49), "seqlen_k": (1, 5, 17, 31, 32, 33, 49, 70)}
    kind = rng.random()
    if kind < 0.05:  # one forward kernel, and two runs of the backward kernel
        features |= {"seqlen_q": (120,), "seqlen_k": (128,), "group": (1,), "bias": (("1", "Hq", "Lq", "Lk"),)}
        features |= {"needs_grad": (ALL,), "batch": (1,), "num_heads_k": (1, 2)}
    elif kind < 0.1:
        features |= {"seqlen_q": (130,), "seqlen_k": (20,)}
    return Drawn(draw(rng, features, number), rng.choice((None, None, *LAYOUTS)), number % 3 == 0)


# Head dims above 256, whose gradients come from chunks of stored pairs: with masks and biases of every form.
WIDE_DIMS = ((512, 0), (512, 0), (320, 0), (264, 0), (512, 64), (40, 512), (300, 400))


def draw_wide(number: int, sizes: Features, dtypes: Sequence[torch.dtype]) -> Drawn:
    """The call of a number with a head dim above 256; 72 of them go through all forms of mask and bias."""
    rng = random.Random(f"wide {number}")
    head_dim, head_dim_v = rng.choice(WIDE_DIMS)
    forms = {"mask": FORMS[number % len(FORMS)], "bias": FORMS[number // 3 % len(FORMS)]}
    chosen = {name: (None, *2 * (form,)) for name, form in forms.items()}
    features = {"head_dim": (head_dim,), "head_dim_v": (head_dim_v,), "dtype": dtypes, "batch": (1, 2), **chosen}
    layout = rng.choice((None, None, "nan_margins", *LAYOUTS))
    return Drawn(
        draw(rng, {**sizes, **features}, number), layout, number % 2 == 1, rng.random() < 0.5, deterministic=True
    )


MOST_SCORES = 200_000  # of a call on the emulated GPU or under a sanitizer, where they take a second


def smaller(case: Case) -> Case:
    """The case with fewer heads, and where that is not enough fewer queries and keys."""
    heads_k = min(case.num_heads_k, 2)
    heads = heads_k * min(case.num_heads // case.num_heads_k, 3)
    case = case.with_(batch=min(case.batch, 2), num_heads_k=heads_k, num_heads=heads)
    while case.batch * heads * case.seqlen_q * case.seqlen_k > MOST_SCORES:
        if case.seqlen_q >= case.seqlen_k:
            case = case.with_(seqlen_q=case.seqlen_q // 2)
        else:
            case = case.with_(seqlen_k=case.seqlen_k // 16 * 8 + case.seqlen_k % 8)
    return case


ROWS = ("max_scores", "entropy")


def asked_of(number: int, backend: str, is_plain: bool) -> tuple[str, ...]:
    """The results besides out and lse that a call of a number asks for, and a backend has.

    Only plain calls ask cuda, which has them beside no mask, bias, dropout or pages.
    """
    if backend == "cuda" and not is_plain:
        return ()
    asked = random.Random(f"aux {number}").choice(((), (), (), (), ROWS[:1], ROWS))
    return tuple(name for name in asked if name in BACKENDS[backend].features)


def asking(drawn: Drawn, backend: str) -> Drawn:
    """The call, asking for the numbers about its rows that a backend has; one of three does if its data are centred."""
    case = drawn.case
    is_plain = not any((case.mask, case.bias, case.relative, case.dropout_p))
    aux = asked_of(case.seed, backend, is_plain) if case.data == "centred" else ()
    return drawn._replace(case=case.with_(aux=aux))


DRAWS: dict[str, Callable[[int], Drawn]] = {
    "sdpa": draw_small,
    "flex": lambda number: asking(draw_small(number), "flex"),
    "eager": lambda number: asking(draw_small(number), "eager"),
    "triton": lambda number: asking(draw_triton(number), "triton"),
    "cuda": lambda number: asking(draw_cuda(number), "cuda"),
}

# Interval masks replace masks; rows of biases have gradients with top-k.
ROW_BIASES = (("B", "Hq", "1", "Lk"), ("1", "Hk", "1", "Lk"), ("1", "1", "1", "Lk"), ("B", "Hq", "Lq", "1"))
INTERVALS: Features = {
    "batch": (1, 2),
    "num_heads_k": (1, 2),
    "bias_dtype": (None,),
    "mask": (None,),
    "bias_kind": ("normal",),
    "is_causal": (False,),
    "softmax_scale": (None,),
    "softcap": (0.0, 0.0, 5.0),
    "window_size": (None,),
    "needs_grad": (ALL, ALL, ALL, ("bias",), ("k", "v"), ("q",), ()),
    "logits": (1.0,),
    "dropout_p": (0.0,),
}


class IntervalSizes(NamedTuple):
    """The sizes of calls with interval masks in one place.

    `kept`: keys that top-k keeps. `live`: live keys. Rows of few keys feel the rounding of out, from which cuda takes
    delta: it refuses calls if their sizes imply such rows.
    """

    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    lengths: tuple[int, ...]
    kept: tuple[int, ...] = (1, 5, 40)
    live: tuple[int, ...] = (0, 1, 127, 128, 129)


INTERVAL_SIZES = {
    "gpu": IntervalSizes(
        (BF16, FP16),
        (32, 64, 96, 128, 128, 192, 256),
        (1, 5, 64, 127, 128, 129, 256, 300, 500, 1000, 1024, 1777),
        (40, 200),
        (0, 127, 128, 129),
    ),
    "emulated": IntervalSizes((BF16,), (64, 128), (1, 7, 64, 127, 128, 129, 256, 300)),
    "interpreter": IntervalSizes((FP32,), (16, 32), (1, 7, 64, 127, 128, 129)),
}


def draw_intervals(number: int, sizes: IntervalSizes) -> tuple[Drawn, IntervalMask]:
    """The call of a number, and its mask on the CPU."""
    rng = random.Random(number)
    seqlen_k = rng.choice(sizes.lengths)
    biases = (None, None, *ROW_BIASES)
    if seqlen_k % 8 == 0:  # cuda makes the gradient of no other bias of one value per score
        biases += (("B", "Hq", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk"))
    features = {"dtype": sizes.dtypes, "head_dim": sizes.head_dims, "seqlen_q": sizes.lengths}
    case = draw(rng, {**INTERVALS, **features, "seqlen_k": (seqlen_k,), "bias": biases}, number)
    if number % 7 == 3 and max(case.head_dim, case.head_dim_v) <= 64 and case.softcap == 0:  # what cuda has kernels of
        case = case.with_(dropout_p=0.3, bias_dtype=None)
    mask = draw_interval_mask(rng, sizes, case)
    return Drawn(case, deterministic=rng.random() < 0.4), compacted(mask) if rng.random() < 0.5 else mask


def draw_interval_mask(rng: random.Random, sizes: IntervalSizes, case: Case) -> IntervalMask:
    random_numbers = torch.Generator().manual_seed(case.seed)
    heads = (rng.choice((1, case.batch)), rng.choice((1, case.num_heads_k, case.num_heads_k, case.num_heads)))
    seqlen_q, seqlen_k = case.seqlen_q, case.seqlen_k
    flags: dict[str, Any] = {"reorder": rng.random() < 0.75}

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, max(low + 1, high), (*heads, seqlen_k), generator=random_numbers)

    kind = rng.choice(("topk", "topk", "random", "window", "few live", "keys"))
    if kind == "keys" and seqlen_q >= FEW_QUERIES:
        kept = torch.rand(*heads, 1, seqlen_k, generator=random_numbers) < rng.choice((0.1, 0.7, 1.0))
        kept[..., seqlen_k - seqlen_k // rng.choice((2, 5, 1000)) :] = False  # padding
        flags |= {"is_causal": rng.random() < 0.5, "window_size": (rng.choice((-1, 30, 200)), -1)}
        made = PreparedMask.from_mask(kept, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **flags)
        assert isinstance(made, IntervalMask)
        return made
    if kind == "topk":
        scores = torch.randn(*heads, 1, seqlen_k, generator=random_numbers).round(decimals=1)  # with ties
        allowed = torch.rand(*heads, 1, seqlen_k, generator=random_numbers) < rng.choice((0.2, 0.6, 1.1))
        is_causal = rng.random() < 0.8
        flags |= {"is_causal": is_causal, "mask": allowed, "local": rng.choice((0, 9)) * is_causal}
        return PreparedMask.from_topk(scores, rng.choice(sizes.kept), seqlen_q=seqlen_q, **flags)
    if kind == "random":
        start = integers(-3, seqlen_q + 3)
        return PreparedMask.from_intervals(start, start + integers(-20, seqlen_q), seqlen_q, **flags)
    if kind == "few live":
        live = integers(0, 1 << 30).argsort(-1) < rng.choice(sizes.live)
        stop = torch.where(live, seqlen_q, 0)
        return PreparedMask.from_intervals(torch.zeros_like(stop), stop, seqlen_q, **flags)
    flags |= {"is_causal": rng.random() < 0.3, "window_size": (rng.choice((0, 30, 200)), rng.choice((-1, 0, 20)))}
    return PreparedMask.from_intervals([0], torch.full((seqlen_k,), seqlen_q), seqlen_q, **flags)


def compacted(mask: IntervalMask) -> IntervalMask:
    """The mask with as few places as its live keys need, in whole tiles, where that is fewer than it has."""
    live = int((mask.start < mask.stop).sum(-1).max()) if mask.start.numel() else 0
    places = max(1, -(-live // 128)) * 128
    if not mask.is_reordered or places >= mask.seqlen_k:
        return mask
    order, bounds, row_lists, col_lists = interval_walk(mask.start, mask.stop, mask.seqlen_q, True, places)
    return replace(mask, order=order, bounds=bounds, row_lists=row_lists, col_lists=col_lists)


def with_dead_keys_nan(case: Case, mask: IntervalMask, inputs: Inputs, backend: str | tuple[str, str]) -> Inputs:
    """The inputs with NaN in the keys that no query sees, where k and v follow the mask's order.

    They do not where triton's kernels of short rows read every key.
    """
    is_short = case.seqlen_k <= 128 and case.dtype != FP32 and "triton" in backend
    per_score = case.bias is not None and case.bias[2:] == ("Lq", "Lk") and case.seqlen_q > 1 and case.seqlen_k > 1
    if not mask.is_reordered or mask.shape[1] not in (1, case.num_heads_k) or per_score or is_short or case.dropout_p:
        return inputs
    dead = (mask.start == mask.stop).expand(case.batch, case.num_heads_k, -1).transpose(1, 2)[..., None]
    k, v = (x.masked_fill(dead.to(x.device), torch.nan) for x in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v)
