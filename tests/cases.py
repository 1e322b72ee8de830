"""`Case`: one attention call of the suite, built from a seed and printed as one line that rebuilds it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.forced_arch import force_from_environment
from flash_dmattn import AuxRequest
from flash_dmattn.biases import Band, Relative
from flash_dmattn.reference.distances import Distances
from flash_dmattn.reference.dropout import Dropout, draw_key

NAMES = ("q", "k", "v", "bias")
ALL = NAMES
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
force_from_environment()


def default_dtype(name: str) -> torch.dtype:
    """The dtype of a case that names none, as FLASH_DMATTN_TEST_DTYPE gives it."""
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"FLASH_DMATTN_TEST_DTYPE is {name!r}; it needs to be one of {', '.join(map(repr, dtypes))}")
    return dtypes[name]


# Backends that refuse float32 see nearly all of the suite in 16 bits only.
DTYPE = default_dtype(os.environ.get("FLASH_DMATTN_TEST_DTYPE") or "float32")


# Data that are not centred, by groups: `Case.data`. A number is the size of the scores (`MEANS`), the lowest score
# (`STEPS`) or what a bias has at a place (`GREAT`); "min" is finfo.min, which kernels in base 2 take as -inf. `STEPS`
# names the score of the keys that a kernel may visit first, and the value of the flat ends of a bias by distance.
MEANS = tuple(f"{kind} {size}" for kind in ("equal", "opposite") for size in (20, 200, 2000, 10000))
SIGNS = ("positive", "negative")
STEPS = {"steps 200": (-150.0, 150.0), "steps 40": (-20.0, 20.0), "steps 30": (-14.0, 10.0)}
JUMPS = ("jumps",)
PLACES = ("row", "entry", "value", "others")
GREAT = (*(f"{place} {x}" for place in PLACES for x in ("-1e6", "-1e9", "-1e30")), "key 1e6", "key 1e9", "key 1e30")
GREAT_MIN = tuple(f"{place} min" for place in PLACES)
# Rows of v and dout, every other one times a number; q and v times a number, k and dout divided by it; or one sign.
# APART: q and k times a number, in dims where the other is 0. SMALL: v and dout times a number.
ROWS, SIZES, ONE_SIGN = ("rows 1e-3", "rows 1e-6", "rows 1e-9"), ("size 1e20", "size 1e-20", "size 1e-36"), "one sign"
APART, SMALL = "apart 1e30", "small 2e-19"
SEEN = tuple(f"seen {value} {name}" for value in ("nan", "inf") for name in NAMES)
HIDDEN = tuple(f"hidden {value} {name}" for value in ("nan", "inf") for name in NAMES[1:])


def with_means(data: str, q: Tensor, k: Tensor, scale: float, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """q and k (..., L, H, D) of a kind of `MEANS`, `SIGNS` or `STEPS`; of another kind as they are."""
    kind, _, number = data.partition(" ")
    head_dim, factor = q.shape[-1], scale if abs(scale) > 1e-3 else 1.0
    if data in SIGNS:
        return q.abs(), k.abs() if kind == "positive" else -k.abs()
    if data in STEPS:
        # The last 128 keys, which a kernel may visit first, have one score; others rise up to -1 in any order.
        keys = k.shape[-3]
        far = min(128, -(-keys // 2))
        rising = torch.linspace(-float(number), -1.0, keys - far)
        order = torch.rand(k.shape[:-1], generator=random).movedim(-2, 0)[: keys - far].argsort(0)
        scores = torch.full((keys, *k.shape[:-3], k.shape[-2]), STEPS[data][0])
        scores[: keys - far] = rising[order]
        steps = scores.movedim(0, -2).unsqueeze(-1) / (head_dim * factor)
        return torch.ones_like(q), steps.to(k).expand_as(k).contiguous()
    if data in MEANS:
        # A mean of one coordinate moves all scores of a row alike; one of all coordinates spreads them, too.
        size = 1 if torch.rand((), generator=random) < 0.5 else head_dim
        product = min(float(number) / abs(factor), 3e4)  # unscaled, and of fp16 in plain PyTorch
        mean = torch.where(torch.arange(head_dim) < size, (product / size) ** 0.5, 0.0).to(q.device)
        return (q + mean).to(q.dtype), (k + (mean if kind == "equal" else -mean)).to(k.dtype)
    return q, k


def with_sizes(data: str, x: Inputs) -> Inputs:
    """The tensors as a kind of `ROWS` or `SIZES`, `ONE_SIGN`, `APART` or `SMALL` has them; else as they are."""
    if data == ONE_SIGN:
        return replace(x, v=x.v.abs(), dout=x.dout.abs())
    if data in ROWS:
        factors = [torch.where(torch.arange(y.shape[1]) % 2 == 1, float(data.split()[1]), 1.0) for y in (x.v, x.dout)]
        v, dout = (y * f.to(y)[:, None, None] for y, f in zip((x.v, x.dout), factors, strict=True))
        return replace(x, v=v, dout=dout)
    if data in SIZES:
        factor = float(data.split()[1])
        return replace(x, q=x.q * factor, v=x.v * factor, k=x.k / factor, dout=x.dout / factor)
    if data == APART:
        factor, is_even = float(data.split()[1]), torch.arange(x.q.shape[-1]).to(x.q.device) % 2 == 0
        return replace(x, q=(x.q * factor).where(is_even, 0.0), k=(x.k * factor).where(~is_even, 0.0))
    if data == SMALL:
        factor = float(data.split()[1])
        return replace(x, v=x.v * factor, dout=x.dout * factor)
    return x


def with_great_values(data: str, bias: Tensor, random: torch.Generator) -> Tensor:
    """A bias of a kind of `JUMPS` or `GREAT`, or the values of one by distance; of another kind as it is.

    The last dims are queries, or 1, and keys or distances. With three dims, as packed sequences have, an "entry" is
    the first half of the tokens.
    """
    place, _, number = data.partition(" ")
    limits, shape = torch.finfo(bias.dtype), bias.shape
    if bias.numel() == 0 or data not in (*JUMPS, *GREAT, *GREAT_MIN):
        return bias
    if data in JUMPS:
        jumps = 300 * torch.randint(-3, 4, (shape[-1],), generator=random)
        return (bias + jumps.to(bias.device)).to(bias.dtype)
    row, key, one = (int(torch.randint(size, (), generator=random)) for size in (*shape[-2:], bias.numel()))
    value = limits.min if number == "min" else min(max(float(number), limits.min), limits.max)
    great = torch.zeros(shape, dtype=torch.bool)
    if place == "entry" and bias.dim() == 4:
        great[-1] = True
    elif place == "entry":
        tokens = -1 if shape[-2] == 1 else -2
        great.narrow(tokens, 0, -(-shape[tokens] // 2)).fill_(True)
    elif place == "others":
        great[:] = True
        great[..., key] = False
    elif place == "value":
        great.view(-1)[one] = True
    elif place == "row":
        great[..., row, :] = True
    else:
        great[..., key] = True
    return bias.masked_fill(great.to(bias.device), value)


def _converted(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Distances):
        return x._replace(values=x.values.detach().to(dtype))
    return x if x is None or x.dtype == torch.bool else x.detach().to(dtype)


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call and the gradients that arrive at its outputs; `bias` may be values of distances."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    dout: Tensor
    dlse: Tensor | None
    sink: Tensor | None = None
    dentropy: Tensor | None = None

    def floats(self) -> list[tuple[str, Tensor | None]]:
        """The operands of every call that can take a gradient, by name; so can the sink, which few calls have."""
        return list(zip(NAMES, (self.q, self.k, self.v, self.bias), strict=True))

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype; the mask stays bool."""
        return Inputs(**{f.name: _converted(x, dtype) for f in fields(self) for x in [getattr(self, f.name)]})


class Numbers(NamedTuple):
    """A bias by distance: `letters` of its batch, heads and rows; "Lq" rows make a `Band`."""

    letters: tuple[str, str, str]
    number: int
    zero: int
    outside: str


@dataclass(frozen=True)
class Case:
    """Sizes, flags and a seed. `mask` and `bias` are shapes ("Hq" style letters or sizes) or None.

    `mask_kind`: "random", "empty_rows" (every third query), "empty_tiles" (the first half of the keys and a block),
    "none_allowed", "all_allowed". `bias_kind`: "normal", "inf" (a third of it -inf), "min" (finfo.min), "huge" (1e4),
    "blocks" (a third of it -1e4, the rest 0).
    `sink`: None, "normal", "inf" (every other head has none), "huge" (1e4, -1e4 in turn); with "sink" in `needs_grad`
    its gradient is needed. `data`: "centred", or a kind of the groups above.
    """

    batch: int = 2
    seqlen_q: int = 9
    seqlen_k: int = 13
    num_heads: int = 4
    num_heads_k: int = 2
    head_dim: int = 16
    head_dim_v: int = 0  # as head_dim
    dtype: torch.dtype = DTYPE
    bias_dtype: torch.dtype | None = None
    mask: tuple[str, ...] | None = None
    mask_kind: str = "random"
    bias: tuple[str, ...] | None = None
    bias_kind: str = "normal"
    is_causal: bool = False
    softmax_scale: float | None = None
    softcap: float = 0.0
    window_size: tuple[int, int] | None = None
    needs_grad: tuple[str, ...] = ALL
    dlse: bool = False
    logits: float = 1.0  # factor on q
    seed: int = 0
    sink: str | None = None
    sink_dtype: torch.dtype | None = None
    dropout_p: float = 0.0  # of a key drawn after `torch.manual_seed(seed)`
    relative: Numbers | None = None  # in the place of `bias`
    data: str = "centred"
    aux: tuple[str, ...] = ()  # "max_scores", "entropy": what the call returns besides; the entropy has a gradient
    key_device: str = ""  # of the call's dropout key, where results are compared on another device

    def flags(self) -> dict[str, Any]:
        """The keyword arguments that every implementation of the formula takes."""
        return {
            "is_causal": self.is_causal,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "window_size": self.window_size,
        }

    def passed(self, bias: Tensor | None) -> Tensor | Relative | Band | None:
        """The bias as `attention` takes it, from its tensor."""
        if bias is None or self.relative is None:
            return bias
        numbers: Any = self.relative
        if numbers.letters[2] == "Lq":
            return Band(bias, numbers.zero)
        return Relative(bias.squeeze(2), numbers.zero, numbers.outside)

    def in_formula(self, inputs: Inputs) -> Any:
        """The inputs with the bias as the formula takes it."""
        if self.relative is None or not isinstance(inputs.bias, Tensor):
            return inputs
        bias = Distances(inputs.bias, self.relative.zero, self.relative.outside == "clamp")
        return replace(inputs, bias=bias)  # type: ignore[arg-type]

    def asked(self) -> dict[str, bool]:
        """The results that the call has besides out and lse, as the formula takes them."""
        return {name: True for name in self.aux}

    def request(self) -> AuxRequest:
        """The same as `attention` takes it."""
        return AuxRequest(True, "max_scores" in self.aux, "entropy" in self.aux)

    def dropping(self) -> dict[str, Any]:
        """Return the arguments of `attention` by which probabilities are dropped."""
        return {"dropout_p": self.dropout_p} if self.dropout_p else {}

    def dropout(self, device: torch.device | str = DEVICE) -> Dropout | None:
        """The dropout of a call right after `torch.manual_seed(seed)`, as the formula takes it on a device."""
        if not self.dropout_p:
            return None
        torch.manual_seed(self.seed)
        return Dropout(self.dropout_p, draw_key(torch.device(self.key_device or device)).to(device))

    def repro(self) -> str:
        """One line that rebuilds this case, whatever its default dtype there."""
        default = type(self)()
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name == "dtype" or getattr(self, f.name) != getattr(default, f.name)
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def sizes(self, letters: tuple[str, ...]) -> tuple[int, ...]:
        """A shape from letters: B, Hq, Hk, Lq, Lk, or 1."""
        named = {
            "B": self.batch,
            "Hq": self.num_heads,
            "Hk": self.num_heads_k,
            "Lq": self.seqlen_q,
            "Lk": self.seqlen_k,
            "1": 1,
        }
        return tuple(named[letter] for letter in letters)

    def build(self, device: str = DEVICE) -> Inputs:
        """The tensors, the same for the same case on every device."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=random).to(device=device, dtype=dtype)

        head_dim_v = self.head_dim_v or self.head_dim
        q = normal(self.batch, self.seqlen_q, self.num_heads, self.head_dim) * self.logits
        k = normal(self.batch, self.seqlen_k, self.num_heads_k, self.head_dim)
        v = normal(self.batch, self.seqlen_k, self.num_heads_k, head_dim_v)
        dout = normal(self.batch, self.seqlen_q, self.num_heads, head_dim_v)
        lse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        dlse = normal(self.batch, self.num_heads, self.seqlen_q, dtype=lse_dtype) if self.dlse else None
        bias, shape = None, None if self.bias is None else self.sizes(self.bias)
        if self.relative is not None:
            shape = (*self.sizes(self.relative.letters), self.relative.number)
        if shape is not None:
            bias = normal(*shape, dtype=self.bias_dtype or self.dtype)
            if self.bias_kind in ("inf", "min"):
                value = -torch.inf if self.bias_kind == "inf" else torch.finfo(bias.dtype).min
                chosen = torch.rand(bias.shape, generator=random) < 1 / 3
                bias = bias.masked_fill(chosen.to(device), value)
            elif self.bias_kind == "huge":
                bias = bias * 1e4
            elif self.bias_kind == "blocks":
                bias = torch.where(torch.rand(bias.shape, generator=random).to(device) < 1 / 3, -1e4, 0.0).to(bias)
        mask = None if self.mask is None else self._mask(random).to(device)
        sink = None if self.sink is None else self._sink(random).to(device)
        dentropy = normal(self.batch, self.num_heads, self.seqlen_q, dtype=lse_dtype) if "entropy" in self.aux else None
        inputs = Inputs(q, k, v, mask, bias, dout, dlse, sink, dentropy)
        return inputs if self.data == "centred" else self._uncentred(inputs)

    def _uncentred(self, x: Inputs) -> Inputs:
        """The tensors as `data` has them."""
        random = torch.Generator().manual_seed(self.seed)
        scale = self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale
        q, k = with_means(self.data, x.q, x.k, scale, random)
        bias = None if x.bias is None else with_great_values(self.data, x.bias, random)
        x = with_sizes(self.data, replace(x, q=q, k=k, bias=bias))
        if bias is not None and bias.numel() and self.relative is not None and self.data in STEPS:
            bias[..., 0] = bias[..., -1] = STEPS[self.data][1]
        elif bias is not None and self.relative is None and self.data in GREAT and self.seed % 2:
            # dout of a row of great scores is 0: nothing of that row may reach a gradient.
            rows = (bias.abs() > 6e4).all(-1)[(None,) * (4 - bias.dim())]
            rows = rows.repeat_interleave(self.num_heads // rows.shape[1], 1) if rows.shape[1] > 1 else rows
            x = replace(x, dout=x.dout.masked_fill(rows.mT.unsqueeze(-1), 0.0))
        return self._spoiled(x) if self.data in (*SEEN, *HIDDEN) else x

    def _spoiled(self, x: Inputs) -> Inputs:
        """The tensors with one NaN or inf, or with a quarter of the keys full of them and hidden by the mask."""
        how, value, name = self.data.split()
        spoiled, last = getattr(x, name), slice(self.seqlen_k - -(-self.seqlen_k // 4), None)
        if spoiled is None or (how == "hidden" and (x.mask is None or x.mask.shape[-1] != self.seqlen_k)):
            return x  # a call that was made simpler
        spoiled = spoiled.clone()
        if how == "seen":
            spoiled.view(-1)[spoiled.numel() // 2 : spoiled.numel() // 2 + 1] = float(value)
        else:
            (spoiled[:, last] if name in "kv" else spoiled[..., last]).fill_(float(value))
            x.mask[..., last] = False
        return replace(x, **{name: spoiled})

    def _sink(self, random: torch.Generator) -> Tensor:
        sink = torch.randn(self.num_heads, generator=random) + math.log(max(self.seqlen_k, 1))  # as much as all keys
        if self.sink == "inf":
            sink[::2] = -torch.inf
        elif self.sink == "huge":
            sink = 1e4 * (1.0 - 2.0 * (torch.arange(self.num_heads) % 2))
        return sink.to(self.sink_dtype or self.dtype)

    def _mask(self, random: torch.Generator) -> Tensor:
        shape = self.sizes(self.mask or ())
        mask = torch.rand(shape, generator=random) < 0.6
        if self.mask_kind == "empty_rows":
            mask[..., ::3, :] = False
        elif self.mask_kind == "empty_tiles":
            mask[..., : shape[-1] // 2] = False
            mask[..., : shape[-2] // 2, -shape[-1] // 4 :] = False
        elif self.mask_kind == "none_allowed":
            mask[:] = False
        elif self.mask_kind == "all_allowed":
            mask[:] = True
        return mask

    def with_(self, **changes: Any) -> Case:
        """A copy with some fields changed."""
        return replace(self, **changes)
