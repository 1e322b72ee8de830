"""The CUDA extension for Hopper: a forward pass of its own, whose lse another backend's backward pass reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import extension, ops
from ..problem import AttentionProblem, dtype_name, fits_copy_engine
from .protocol import Availability, Rule

NAME = "cuda"
MASK_FORM = "prepared"

# (head_dim, head_dim_v) that kernels are compiled for; a call takes the first that holds its own.
UNITS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def installed_units() -> frozenset[str] | None:
    """The names of the units in the extension, which is not loaded for that; None where there is no extension."""
    try:
        path = extension.find()
        return None if path is None else frozenset(extension.build_info(path)["units"])
    except extension.ExtensionMismatchError:  # for the probe to report
        return None


def _built_dims(dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """The head dims that a call of this dtype can have; of a dtype that no unit has, another rule speaks."""
    return _dims_of(installed_units(), dtype)


@cache
def _dims_of(units: frozenset[str] | None, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    if units is None or dtype not in _DTYPES:
        return UNITS
    name = _DTYPES[dtype]
    return tuple((d, d_v) for d, d_v in UNITS if f"forward_d{d}{f'_{d_v}' if d_v != d else ''}_{name}" in units)


# A file is read, which torch.compile cannot trace; see `selection._works`.
setattr(_built_dims, "_dynamo_marked_constant", True)  # noqa: B010


def _has_unit(p: AttentionProblem) -> bool:
    return any(p.head_dim <= d and p.head_dim_v <= d_v for d, d_v in _built_dims(p.dtype))


def _units_text(p: AttentionProblem) -> str:
    dims = " or ".join(f"{d} and {d_v}" for d, d_v in _built_dims(p.dtype))
    if not dims:
        return f"this build has no kernels of {dtype_name(p.dtype)}"
    return f"the kernels that are built take multiples of 8 up to {dims}"


def _has_key_mask(p: AttentionProblem) -> bool:
    if p.mask is None or p.mask_form == "tiles":
        return False
    return p.mask_form == "keys" or p.mask.broadcast()[2]


RULES: tuple[Rule, ...] = (
    Rule(
        "device",
        lambda p: p.device == "cuda",
        lambda p: f"device is {p.device}; the extension runs on NVIDIA GPUs",
        "move the tensors to a Hopper GPU",
    ),
    Rule(
        "capability",
        lambda p: p.device != "cuda" or p.capability == (9, 0),
        lambda p: f"the GPU is {p.architecture}; the kernels are written for sm_90a",
        "other GPUs are served by the other backends",
    ),
    Rule(
        "dtype",
        lambda p: p.dtype in _DTYPES,
        lambda p: f"dtype is {dtype_name(p.dtype)}; the tensor cores take float16 or bfloat16",
        "cast q, k and v",
    ),
    Rule(
        "bias_dtype",
        lambda p: p.bias is None or p.bias.dtype in _BIAS_DTYPES,
        lambda p: f"bias has dtype {'none' if p.bias is None else dtype_name(p.bias.dtype)}; the scores are float32",
        "cast bias",
    ),
    Rule(
        "head_dim",
        lambda p: p.head_dim % 8 == 0 == p.head_dim_v % 8 and _has_unit(p),
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); {_units_text(p)}",
        'use backend="triton"',
    ),
    Rule(
        "key_mask",
        lambda p: not _has_key_mask(p),
        lambda p: (
            f"mask, of shape {None if p.mask is None else tuple(p.mask.shape)}, has one row for all queries; "
            "the kernels read masks as tiles and would visit keys left out"
        ),
        'backend="triton" gathers the kept keys',
    ),
    Rule(
        "return_probs",
        lambda p: not p.return_probs,
        lambda p: "return_probs is set; this backend never holds the probabilities of a whole call",
        'use backend="reference"',
    ),
    Rule(
        "no_backward",
        lambda p: False,
        lambda p: (
            "gradients of "
            + ", ".join(name for name, needed in zip(p.need._fields, p.need, strict=True) if needed)
            + " are needed; the extension has no backward kernels yet"
        ),
        'backend=("cuda", "triton") runs its forward pass and the backward pass of the other',
        passes=("backward",),
    ),
)

# Where the triton kernels are faster, and by how much, on an H200 (bf16; their time over that of cuda, both forward).
# A persistent kernel starts later, and does not share a row among processors: it needs work for all of them.
_ROWS = 128


def _tiles_of_rows(p: AttentionProblem) -> int:
    return p.batch * p.num_heads * -(-p.seqlen_q // _ROWS)


def _bias_per_score(p: AttentionProblem) -> bool:
    return p.bias is not None and not any(p.bias.broadcast()[2:])


def _least_tiles(p: AttentionProblem) -> int:
    """From how many tiles of rows on cuda is as fast."""
    if max(p.head_dim, p.head_dim_v) > 64 or p.mask is not None or _bias_per_score(p):
        # D128: 64 tiles 0.85, 128 1.19, 256 1.20; a bias per score 32 tiles 2.1, 128 tiles 4.3.
        # D64 with a mask: 32 tiles 0.92, 128 tiles 1.27; with a bias per score 0.88 and 1.01.
        return 128
    return 512  # D64: 128 tiles 0.82, 256 tiles 0.94 to 0.98, 512 tiles 1.15


AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "few_rows",  # 64 queries, 4096 keys, 512 tiles: D64 0.43, D128 0.71; 128 queries: 0.83 and 1.32
        lambda p: p.seqlen_q >= _ROWS,
        lambda p: f"there are {p.seqlen_q} queries, less than the {_ROWS} of a tile",
        'backend="cuda" runs it all the same',
    ),
    Rule(
        "few_tiles",
        lambda p: _tiles_of_rows(p) >= _least_tiles(p),
        lambda p: (
            f"there are {_tiles_of_rows(p)} tiles of {_ROWS} queries of a head; "
            f"from {_least_tiles(p)} on there is work enough for every processor"
        ),
        'backend="cuda" runs it all the same',
    ),
    Rule(
        "narrow_heads",  # D32 beside D64's tiles: 0.82, with a bias per score 0.97, with a mask 1.07
        lambda p: p.mask is not None or max(p.head_dim, p.head_dim_v) > 32,
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); without a mask the triton kernels are faster",
        'backend="cuda" runs it all the same',
    ),
    Rule(
        "bias_copies",  # float32 beside bfloat16: D64 0.59, D128 0.87
        lambda p: p.bias is None or p.bias.dtype == p.dtype or not _bias_per_score(p),
        lambda p: "bias is not of the dtype of q, so its tiles are not copied but read value by value",
        'cast bias, or backend="cuda" runs it all the same',
    ),
)


_found: Availability | None = None


def probe() -> Availability:
    """Whether the compiled extension can be loaded; the first result is remembered."""
    global _found
    if _found is None:
        _found = _load()
    return _found


def _load() -> Availability:
    try:
        loaded = extension.load()
    except extension.ExtensionMismatchError as error:
        return Availability(False, str(error), "rebuild it, or install what it needs: docs/building.md", error)
    except Exception as error:  # a broken installation raises anything; a probe reports it
        if isinstance(error, ModuleNotFoundError) and error.name == extension.NAME:
            return Availability(False, str(error), "build it: docs/building.md", error)
        return Availability(False, f"the CUDA extension cannot be loaded: {error}", "rebuild it", error)
    driver, runtime = loaded.cuda_versions()
    if driver // 1000 < runtime // 1000:
        return Availability(
            False,
            f"the driver is of CUDA {_dotted(driver)}; the extension holds the runtime of {_dotted(runtime)}",
            "update the driver, or build the extension with an older nvcc",
        )
    return Availability(True)


def _dotted(version: int) -> str:
    """13000 as 13.0, as CUDA counts."""
    return f"{version // 1000}.{version % 1000 // 10}"


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """Copies that a call makes."""
    p = problem
    return tuple(
        f"copies {name}, of strides {tuple(strides)}: the copy engine reads rows of unit stride that start on 16 bytes"
        for name, shape, strides in (
            ("q", (p.batch, p.seqlen_q, p.num_heads, p.head_dim), p.q_strides),
            ("k", (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim), p.k_strides),
            ("v", (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v), p.v_strides),
        )
        if not (strides[3] == 1 and fits_copy_engine(shape, strides, p.dtype.itemsize))
    )


def _rows(x: Tensor) -> Tensor:
    # The smallest copy that the copy engine can read is that of the one tensor.
    strides = x.stride()
    readable = strides[3] == 1 and x.data_ptr() % 16 == 0 and fits_copy_engine(x.shape, strides, x.element_size())
    return x if readable else x.clone(memory_format=torch.contiguous_format)


class _Kernels(NamedTuple):
    """What a call uses: the extension's operators, and what folds a band and an expanded mask."""

    attend: Callable[..., Any]
    pack_mask: Callable[..., Any]
    make_band: Callable[..., Any]
    collapse: Callable[..., Any]


_found_kernels: _Kernels | None = None


def _kernels() -> _Kernels:
    # Looked up once: torch.ops takes a microsecond to find an operator, and importing flash_dmattn needs no masks.
    global _found_kernels
    if _found_kernels is None:
        from ..masks.broadcast import collapse
        from ..masks.packing import make_band

        operators = torch.ops.flash_dmattn  # the probe has loaded the extension
        attend, pack_mask = operators.cuda_forward_kernel.default, operators.cuda_pack_mask.default
        _found_kernels = _Kernels(attend, pack_mask, make_band, collapse)
    return _found_kernels


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    bias: Tensor | None,
    is_causal: bool,
    window_size: list[int],
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = ops.empty_outputs(q, v)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if seqlen_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if out.numel() == 0:
        return out, lse
    kernels = _kernels()
    left, right = window_size
    band = kernels.make_band(seqlen_q, seqlen_k, is_causal, (left, right))
    low, high = (-seqlen_q, seqlen_k) if band is None else band
    if len(mask) == 1:
        dense = kernels.collapse(mask[0]).expand(-1, -1, seqlen_q, seqlen_k)
        mask = kernels.pack_mask(dense, low, high, band is not None)
    tiles = [mask[0], mask[2]] if mask else []
    kernels.attend(_rows(q), _rows(k), _rows(v), tiles, bias, out, lse, low, high, softmax_scale, softcap)
    return out, lse


forward = ops.define_forward(NAME, _forward)
