"""`Case`: one attention call of the suite, built from a seed and printed as one line that rebuilds it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from forced_arch import force_from_environment
from torch import Tensor

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
    "none_allowed", "all_allowed". `bias_kind`: "normal", "inf" (a third of it -inf), "min" (finfo.min), "huge" (1e4).
    `sink`: None, "normal", "inf" (every other head has none), "huge" (1e4, -1e4 in turn); with "sink" in `needs_grad`
    its gradient is needed.
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
        default = Case()
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name == "dtype" or getattr(self, f.name) != getattr(default, f.name)
        ]
        return f"Case({', '.join(changed)})"

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
        mask = None if self.mask is None else self._mask(random).to(device)
        sink = None if self.sink is None else self._sink(random).to(device)
        return Inputs(q, k, v, mask, bias, dout, dlse, sink)

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
