"""`AttentionProblem`: one attention call described without tensors, and the only validation of its input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .masks import PreparedMask

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Shape4 = tuple[int, int, int, int]
# A bool tensor, or a prepared mask: a TileMask or a KeyMask.
MaskForm = Literal["dense", "tiles", "keys"]


class Need(NamedTuple):
    """Which gradients a call has to produce."""

    q: bool = False
    k: bool = False
    v: bool = False
    bias: bool = False


class TensorSpec(NamedTuple):
    """Shape, strides (in elements) and dtype of a mask or a bias, read as (batch, heads, seqlen_q, seqlen_k)."""

    shape: Shape4
    strides: Shape4
    dtype: torch.dtype

    def broadcast(self) -> tuple[bool, bool, bool, bool]:
        """For each dimension, whether one element is read for every index: size 1, or an expanded stride of 0."""
        b, h, i, j = (size == 1 or stride == 0 for size, stride in zip(self.shape, self.strides, strict=True))
        return b, h, i, j

    def span(self) -> int:
        """Elements of memory between the first and the last one, both included; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


class AttentionProblem(NamedTuple):
    """Everything a backend may decide on: sizes, strides, dtypes, device and flags of one call, but no tensor.

    It is hashable, prints as one line, and can be built for a GPU that this machine does not have
    (`flash_dmattn.explain_problem` does). Strides count elements; `mask` and `bias` are described as 4-D, a prepared
    mask by the bool tensor that it unpacks to. Its band is that of the call.
    """

    device: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    q_strides: Shape4
    k_strides: Shape4
    v_strides: Shape4
    mask: TensorSpec | None
    mask_form: MaskForm | None
    bias: TensorSpec | None
    is_causal: bool
    window_size: tuple[int, int]
    softmax_scale: float
    softcap: float
    deterministic: bool
    return_lse: bool
    return_probs: bool
    need: Need

    @property
    def architecture(self) -> str:
        """The device as users name it: "cpu", "sm_90", "mps"."""
        return self.device if self.capability is None else "sm_{}{}".format(*self.capability)

    @property
    def has_window(self) -> bool:
        """Whether `window_size` limits either side."""
        return self.window_size != (-1, -1)

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads"
        if self.num_heads_k != self.num_heads:
            heads += f" on {self.num_heads_k} key-value heads"
        dim = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        parts = [
            f"batch {self.batch}, {self.seqlen_q} queries x {self.seqlen_k} keys, {heads}, head_dim {dim}",
            f"{dtype_name(self.dtype)} on {self.architecture}",
        ]
        mask = "mask" if self.mask_form == "dense" else "prepared mask"
        for name, spec in ((mask, self.mask), ("bias", self.bias)):
            if spec is not None:
                parts.append(
                    f"{name} {tuple(spec.shape)}" + ("" if spec.dtype == torch.bool else f" {dtype_name(spec.dtype)}")
                )
        flags = [
            (self.is_causal, "causal"),
            (self.has_window, f"window {self.window_size}"),
            (self.softcap > 0, f"softcap {self.softcap:g}"),
            (self.deterministic, "deterministic"),
            (self.return_lse, "return_lse"),
            (self.return_probs, "return_probs"),
        ]
        parts += [text for present, text in flags if present]
        wanted = [f"d{name}" for name, needed in zip(Need._fields, self.need, strict=True) if needed]
        parts.append("gradients " + " ".join(wanted) if wanted else "no gradient")
        return ", ".join(parts)


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


def fits_copy_engine(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether Hopper's copy engine (TMA) can walk the first three dims of a tensor that starts on 16 bytes.

    Args:
        shape, strides: of the tensor, strides in elements; that of a dim of size 1 is never taken.
        itemsize: bytes of an element.
    """
    units = [stride * itemsize for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return all(0 < unit < 2**40 and unit % 16 == 0 for unit in units)


_CAPABILITIES: dict[int, tuple[int, int]] = {}


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, remembered by index; None for any other device."""
    if device.type != "cuda":
        return None
    index = device.index or 0
    found = _CAPABILITIES.get(index)
    if found is None:
        properties = torch.cuda.get_device_properties(index)
        found = _CAPABILITIES[index] = (properties.major, properties.minor)
    return found


def follow_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of autocast where it is on; fp64 and bias keep theirs, as in torch's own."""
    # On the path of every call: torch spells the device's name anew each time that it is asked for.
    kind = "" if not isinstance(q, Tensor) else "cuda" if q.is_cuda else q.device.type
    if kind not in _AUTOCAST or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: Tensor) -> Tensor:
        follows = isinstance(x, Tensor) and x.dtype != dtype and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if follows else x  # what cannot follow is for the validation to name

    return cast(q), cast(k), cast(v)


# Asked for once: torch.is_autocast_enabled raises for a device type that has no autocast.
_AUTOCAST = tuple(name for name in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(name))


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | PreparedMask | None,
    bias: Tensor | None,
    is_causal: bool,
    softmax_scale: float | None,
    softcap: float,
    window_size: tuple[int, int] | None,
    deterministic: bool | None,
    return_lse: bool,
    return_probs: bool,
) -> tuple[AttentionProblem, Tensor | PreparedMask | None, Tensor | None]:
    """Validate one call; return its description and the mask and bias as 4-D views, a prepared mask as it is.

    Raises:
        TypeError: an argument is not a tensor, or its dtype is not what the call needs.
        ValueError: shapes, devices or values do not fit together.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)) or not (
        q.dim() == k.dim() == v.dim() == 4
    ):
        _refuse_rank(q, k, v)
    dtype, device = q.dtype, q.device
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"q has dtype {dtype_name(dtype)}; it needs float16, bfloat16, float32 or float64")
    shape_k, shape_v = k.shape, v.shape
    batch, seqlen_q, num_heads, head_dim = q.shape
    _, seqlen_k, num_heads_k, head_dim_v = shape_v
    if not (
        k.dtype == dtype == v.dtype
        and k.device == device == v.device
        and shape_k[0] == batch == shape_v[0]
        and shape_k[1] == seqlen_k
        and shape_k[2] == num_heads_k
        and shape_k[3] == head_dim
    ):
        _refuse_mismatch(q, k, v)
    if head_dim == 0 or head_dim_v == 0:
        raise ValueError(f"q, k and v have head dims {head_dim} and {head_dim_v} (v); they need at least 1")
    if num_heads_k == 0 or num_heads % num_heads_k != 0:
        raise ValueError(
            f"q has {num_heads} heads and k has {num_heads_k}; "
            "the heads of q need to be a multiple of the heads of k (grouped-query attention)"
        )

    sizes = (batch, num_heads, seqlen_q, seqlen_k)
    mask_spec = bias_spec = None
    mask_form: MaskForm | None = None
    if isinstance(mask, Tensor):
        if mask.requires_grad:
            raise TypeError("mask requires grad; a mask never takes a gradient, pass additive values as bias instead")
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask has dtype {dtype_name(mask.dtype)}; it needs bool, True where q attends "
                "(use mask.bool() for 0/1 values, or pass additive values as bias)"
            )
        mask_form = "dense"
        mask, mask_spec = _describe_broadcast("mask", mask, sizes, num_heads_k, device)
    elif mask is not None:
        from .mask_forms import describe_prepared  # which imports this module

        mask_spec, mask_form, is_causal, window_size = describe_prepared(
            mask, is_causal, window_size, sizes, num_heads_k, device
        )
    if bias is not None:
        if not isinstance(bias, Tensor):
            raise TypeError(f"bias is a {type(bias).__name__}; it needs to be a floating-point torch.Tensor")
        if bias.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"bias has dtype {dtype_name(bias.dtype)}; it needs float16, bfloat16, float32 or float64"
                + (" (pass a bool tensor as mask)" if bias.dtype == torch.bool else "")
            )
        bias, bias_spec = _describe_broadcast("bias", bias, sizes, num_heads_k, device)

    # Specialised on purpose under torch.compile: kernels are chosen and scaled by the head dims.
    head_dim, head_dim_v = int(head_dim), int(head_dim_v)
    grad = torch.is_grad_enabled()
    problem = AttentionProblem(
        device.type,
        None if device.type == "cpu" else device_capability(device),
        dtype,
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_heads_k,
        head_dim,
        head_dim_v,
        q.stride(),  # type: ignore[arg-type]
        k.stride(),  # type: ignore[arg-type]
        v.stride(),  # type: ignore[arg-type]
        mask_spec,
        mask_form,
        bias_spec,
        check_flag("is_causal", is_causal),
        _NO_WINDOW if window_size is None else check_window(window_size),
        head_dim**-0.5 if softmax_scale is None else check_scale(softmax_scale, head_dim),
        check_softcap(softcap),
        torch.are_deterministic_algorithms_enabled()
        if deterministic is None
        else check_flag("deterministic", deterministic),
        check_flag("return_lse", return_lse),
        check_flag("return_probs", return_probs),
        Need(q.requires_grad, k.requires_grad, v.requires_grad, bias is not None and bias.requires_grad)
        if grad
        else _NEED_NOTHING,
    )
    return problem, mask, bias


_NEED_NOTHING = Need()
_NO_WINDOW = (-1, -1)


# What names the fault stands apart from the test for one, which every call pays for.
def _refuse_rank(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a torch.Tensor of 4 dimensions")
        if x.dim() != 4:
            raise ValueError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; "
                "it needs 4: (batch, seqlen, num_heads, head_dim)"
            )
    raise AssertionError("q, k and v are tensors of 4 dimensions")


def _refuse_mismatch(q: Tensor, k: Tensor, v: Tensor) -> NoReturn:
    batch, head_dim = q.shape[0], q.shape[3]
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {dtype_name(x.dtype)}; it needs that of q, {dtype_name(q.dtype)}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; it needs to be on the device of q, {q.device}")
        if x.shape[0] != batch:
            raise ValueError(f"{name} has batch size {x.shape[0]}; it needs that of q, {batch}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"v has {v.shape[1]} keys and {v.shape[2]} heads; it needs those of k, {k.shape[1]} and {k.shape[2]}"
        )
    raise ValueError(f"k has head_dim {k.shape[3]}; it needs that of q, {head_dim}")


def _describe_broadcast(
    name: str, x: Tensor, sizes: Shape4, num_heads_k: int, device: torch.device
) -> tuple[Tensor, TensorSpec]:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; it needs to be on the device of q, {device}")
    dims = x.dim()
    if dims not in (2, 3, 4):
        raise ValueError(
            f"{name} has {dims} dimensions, shape {tuple(x.shape)}; it needs 2, 3 or 4, "
            "read from the right as (batch, heads, seqlen_q, seqlen_k)"
        )
    x = as_scores(x)
    shape = x.shape
    check_broadcast(name, shape, sizes, num_heads_k)
    return x, TensorSpec(shape, x.stride(), x.dtype)  # type: ignore[arg-type]


def as_scores(x: Tensor) -> Tensor:
    """A mask or a bias of 2, 3 or 4 dimensions, read from the right as (batch, heads, seqlen_q, seqlen_k)."""
    dims = x.dim()
    return x if dims == 4 else x[None] if dims == 3 else x[None, None]


def check_broadcast(name: str, shape: tuple[int, ...], sizes: Shape4, num_heads_k: int) -> None:
    """Refuse a 4-D mask or bias shape that does not broadcast to (batch, heads, seqlen_q, seqlen_k)."""
    b, h, i, j = shape
    if (
        (b == 1 or b == sizes[0])
        and (h == 1 or h == sizes[1] or h == num_heads_k)
        and (i == 1 or i == sizes[2])
        and (j == 1 or j == sizes[3])
    ):
        return
    heads = f"{{1, {num_heads_k}, {sizes[1]}}}" if num_heads_k != sizes[1] else f"{{1, {sizes[1]}}}"
    raise ValueError(
        f"{name} has shape {tuple(shape)}, read as (batch, heads, seqlen_q, seqlen_k); "
        f"it needs batch in {{1, {sizes[0]}}}, heads in {heads}, "
        f"seqlen_q in {{1, {sizes[2]}}} and seqlen_k in {{1, {sizes[3]}}}"
    )


def check_flag(name: str, value: bool) -> bool:
    """Refuse anything but a bool, so that a tensor or a string never silently counts as True."""
    if value is True or value is False:
        return value
    raise TypeError(f"{name} is {value!r}; it needs to be True or False")


def check_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor on q @ k^T: `head_dim ** -0.5` when unset; 0.0 is a value."""
    if softmax_scale is None:
        return head_dim**-0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale is a {type(softmax_scale).__name__}; it needs to be a number or None")
    if not -math.inf < softmax_scale < math.inf:  # not isfinite: torch.compile cannot trace it with dynamic floats
        raise ValueError(f"softmax_scale is {softmax_scale}; it needs to be finite")
    return float(softmax_scale)


def check_softcap(softcap: float) -> float:
    """The softcap as a float: 0.0 is off, negative is refused."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap is a {type(softcap).__name__}; it needs to be a number, 0.0 for none")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it needs to be finite and at least 0 (0 is off)")
    return float(softcap)


def keys_of_query(seqlen_k: int, is_causal: bool, window_size: Sequence[int]) -> int:
    """How many keys a query may attend, by their number and its window.

    >>> keys_of_query(4096, True, (15, -1)), keys_of_query(4096, False, (15, -1))
    (16, 4096)
    """
    left, right = window_size
    right = 0 if is_causal else right
    return seqlen_k if left < 0 or right < 0 else min(seqlen_k, left + right + 1)


def check_window(window_size: tuple[int, int] | None) -> tuple[int, int]:
    """The window as (left, right), -1 for an unlimited side; None is (-1, -1)."""
    if window_size is None:
        return (-1, -1)
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise TypeError(f"window_size is {window_size!r}; it needs to be None or a pair (left, right) of ints")
    left, right = window_size
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(f"window_size is {window_size!r}; both sides need to be ints, -1 for unlimited")
        if side < -1:
            raise ValueError(f"window_size is {window_size!r}; both sides need to be at least -1 (-1 is unlimited)")
    return (left, right)
