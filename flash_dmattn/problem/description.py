"""`AttentionProblem`: one attention call described without tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Shape4 = tuple[int, int, int, int]
# A bool tensor, or a prepared mask: a TileMask or a KeyMask.
MaskForm = Literal["dense", "tiles", "keys"]
# What a forward/backward pair receives of a mask, told apart by the number of tensors: see `KernelBackend`.
MaskTensors = tuple[Tensor, ...]
# (dq, dk, dv, dbias), None where a gradient is not needed.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


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


def unpacked_spec(shape: Shape4) -> TensorSpec:
    """The description of the contiguous bool tensor that `PreparedMask.unpacked` makes."""
    _, h, i, j = shape
    return TensorSpec(shape, (h * i * j, i * j, j, 1), torch.bool)
