"""`AttentionProblem`: one attention call described without tensors, its numbers and the diagonals that it allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..definition import assume_constant

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Shape4 = tuple[int, int, int, int]
# One value per query, per key, or per score (query and key); a bias of one value per head counts as one per query.
BiasClass = Literal["query", "key", "score"]
# No mask, a bool tensor, or one of the forms of a prepared mask, which `masks/prepared/storage.py` describes.
MaskForm = Literal["none", "dense", "tiles", "keys", "intervals", "sequence_tiles", "tree", "lists"]
# The layout of the sequences of a batch. Each is an entry of the batch, of full length ("dense") or used in part
# ("padded"); or all follow each other in one row of tokens ("packed"). Keys may be in pages of a cache ("paged"), also
# with packed queries ("paged_packed").
Layout = Literal["dense", "packed", "padded", "paged", "paged_packed"]
# Layouts in which q is a row of tokens, (1, Tq, Hq, D) for a backend; in "packed" k and v are, too.
PACKED_QUERIES: tuple[Layout, ...] = ("packed", "paged_packed")
# The layout of q, k and v of a call, and of their gradients: (B, L, H, D), (B, H, L, D), or packed (T, H, D).
Arrival = Literal["rows", "heads_first", "tokens"]
# The packed dim of a mask or a bias: none, the queries, (1, H, Tq, max_k or 1), or the keys, (1, H, 1, Tk).
Packing = Literal["none", "queries", "keys"]
# The bias of distances for which a bias by distance has no value: an error, its first or last value, or 0.
Outside = Literal["error", "clamp", "zero"]


def replaced(x: Any, **changes: Any) -> Any:
    """Return `x._replace(**changes)`, which Dynamo of torch 2.11 cannot rebuild where a graph breaks."""
    return type(x)(**{**x._asdict(), **changes})


class NeedsGrad(NamedTuple):
    """Which gradients a call has to produce."""

    q: bool = False
    k: bool = False
    v: bool = False
    bias: bool = False
    sink: bool = False


class RawFlags(NamedTuple):
    """The arguments of `attention` that are no tensors, except the backend, as the caller passed them.

    An `AuxRequest` is passed as its fields.
    """

    is_causal: bool = False
    softmax_scale: float | None = None
    softcap: float = 0.0
    window_size: tuple[int, int] | None = None
    deterministic: bool | None = None
    return_lse: bool = False
    return_probs: bool = False
    dropout_p: float = 0.0
    max_scores: bool = False
    entropy: bool = False


class SequenceSpec(NamedTuple):
    """The layout of the sequences of a call.

    Attributes:
        layout: see `Layout`.
        number: of sequences, S.
        rows_q, rows_k: rows of tokens where they are packed, Tq and Tk; else slots of a sequence, Lq and Lk.
        max_seqlen_q, max_seqlen_k: bounds on the lengths of sequences.
        names_max: whether the caller has passed each of the two bounds.
        page_size: keys of a page; 0 where keys are not in pages.
    """

    layout: Layout
    number: int
    rows_q: int
    rows_k: int
    max_seqlen_q: int
    max_seqlen_k: int
    names_max: tuple[bool, bool] = (True, True)
    page_size: int = 0

    @property
    def has_pages(self) -> bool:
        return self.layout in ("paged", "paged_packed")

    @property
    def packs_queries(self) -> bool:
        return self.layout in PACKED_QUERIES

    @property
    def packs_keys(self) -> bool:
        return self.layout == "packed"

    def shape_of_tiles(self, mask_heads: int) -> Shape4:
        """Return the shape of the bool tensor that a `SequenceTileMask` with these sequences unpacks to."""
        if self.packs_queries:
            return 1, mask_heads, self.rows_q, self.max_seqlen_k
        return self.number, mask_heads, self.max_seqlen_q, self.max_seqlen_k

    def __str__(self) -> str:
        rows = f"{self.rows_q} queries and {self.rows_k} keys"
        if self.layout == "padded":
            rows = f"at most {rows} each"
        elif self.has_pages:
            share = "in all" if self.packs_queries else "each"
            rows = f"{self.rows_q} queries {share} and at most {self.rows_k} keys in pages of {self.page_size}"
        return f"{self.number} {self.layout.partition('_')[0]} sequences of {rows}"


class Flags(NamedTuple):
    """The checked flags and numbers of a call, from `RawFlags`, and from its mask, bias and sequences.

    Attributes:
        left, right: the window with causality folded in, -1 for an unlimited side: see `causal_window`.
        softmax_scale, softcap, deterministic: as in `attention`.
        mask_repeat, bias_repeat: entry b of the batch has entry `b // repeat % Bm` of Bm entries: see `leading.py`.
        mask_packing, bias_packing: see `Packing`; with "none" there are entries for all sequences, or one.
        dropout_p: if it is not 0 the call also has a dropout key: see `flash_dmattn.reference.dropout`.
        one_mask_row: whether the mask has one row for all queries, as padding has, without the window.
        zero, outside: of a bias by distance: the index of distance 0 in its values, and the rule for distances without
            a value. "" without such a bias.
        block_q, block_k, list_size: of a mask of lists: the queries of a list, the keys of an entry, and the entries of
            a list. 0 without lists.
        is_list_bias: whether the bias is a `ListBias`, one value for each entry of the lists.
        allows_tf32: see the function `allows_tf32`. Both passes use it: if torch's setting changed between them, the
            backward pass would compute p from other scores than the lse of the forward pass.
        max_scores, entropy: whether the forward pass returns them, in this order after out and lse.
        sums: whether the backward pass is for `statistics`, and returns one gradient. Either that of v, where dout has
            one column, or for head h of a group of G heads column h of G and zeros in the others. Or that of a bias,
            where dout is 0.
        invariant: whether a row's bits have to depend on the row alone: see `flash_dmattn.config`.
        sequences: their layout.
    """

    left: int
    right: int
    softmax_scale: float
    softcap: float
    deterministic: bool
    mask_repeat: int = 1
    bias_repeat: int = 1
    mask_packing: Packing = "none"
    bias_packing: Packing = "none"
    dropout_p: float = 0.0
    one_mask_row: bool = False
    zero: int = 0
    outside: Outside | Literal[""] = ""
    block_q: int = 0
    block_k: int = 0
    list_size: int = 0
    is_list_bias: bool = False
    allows_tf32: bool = False
    max_scores: bool = False
    entropy: bool = False
    sums: bool = False
    invariant: bool = False
    sequences: SequenceSpec | None = None

    @property
    def window(self) -> tuple[int, int]:
        return self.left, self.right


def bias_class(shape: Sequence[int], strides: Sequence[int] | None = None) -> BiasClass:
    """Return the dims that a bias has values for, which decide how kernels load it and compute its gradient.

    Args:
        shape: (batch, heads, seqlen_q, seqlen_k).
        strides: of the bias: a dim of stride 0 has one value. None for the gradient of a bias, which has the full
            shape.

    >>> bias_class((1, 4, 1, 128)), bias_class((1, 4, 64, 128), (0, 8192, 128, 1)), bias_class((1, 4, 64, 1))
    ('key', 'score', 'query')
    """
    if shape[3] == 1 or (strides is not None and strides[3] == 0):
        return "query"
    if shape[2] == 1 or (strides is not None and strides[2] == 0):
        return "key"
    return "score"


class TensorSpec(NamedTuple):
    """Shape, strides (in elements) and dtype of a mask or a bias, as (batch, heads, seqlen_q, seqlen_k)."""

    shape: Shape4
    strides: Shape4
    dtype: torch.dtype

    def broadcast(self) -> tuple[bool, bool, bool, bool]:
        """Return for each dim whether all indices have the same element: size 1, or an expanded stride of 0."""
        b, h, i, j = (size == 1 or stride == 0 for size, stride in zip(self.shape, self.strides, strict=True))
        return b, h, i, j

    @property
    def bias_class(self) -> BiasClass:
        """The dims that a bias has values for: see the function `bias_class`."""
        return bias_class(self.shape, self.strides)

    def span(self) -> int:
        """Count the elements of memory from the first to the last one; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


class AttentionProblem(NamedTuple):
    """Everything that a backend may base decisions on: sizes, strides, dtypes, device and flags of one call.

    It is hashable, prints as one line, and can be built for a GPU that this machine does not have, as
    `flash_dmattn.explain` does.

    Attributes:
        device, arch, dtype: see `device_arch`; the dtype of q, k and v.
        batch, seqlen_q, seqlen_k: with sequences their number, and bounds on their lengths.
        num_heads, num_heads_k, head_dim, head_dim_v: as in `attention`.
        q_strides, k_strides, v_strides: in elements, in the order (B, L, H, D) whatever the layout.
        mask, mask_form, bias: 4-D. A prepared mask is described by the bool tensor that it unpacks to, and the band of
            the call is its own. `bias` is None for the other kinds of bias:
        relative: the values of a bias by distance, (Bv, Hv, 1 or Lq, n).
        list_bias: the values of a `ListBias`, (Bv, Hv, Lq or lists, entries).
        is_causal, window_size, flags, return_lse, return_probs, needs_grad: the settings of the call, and its needed
            gradients.
        sink: the dtype of the sink.
        is_hypothetical: whether this machine has no GPU of the architecture, so that its libraries do not matter.
        arrival: see `Arrival`.
    """

    device: str
    arch: str
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
    mask_form: MaskForm
    bias: TensorSpec | None
    is_causal: bool
    window_size: tuple[int, int]
    flags: Flags
    return_lse: bool
    return_probs: bool
    needs_grad: NeedsGrad
    sink: torch.dtype | None = None
    is_hypothetical: bool = False
    arrival: Arrival = "rows"
    relative: TensorSpec | None = None
    list_bias: TensorSpec | None = None

    @property
    def sequences(self) -> SequenceSpec | None:
        return self.flags.sequences

    @property
    def rows(self) -> tuple[tuple[Shape4, Shape4], ...]:
        """Shape and strides of q, k and v in a call without sequences."""
        return (
            ((self.batch, self.seqlen_q, self.num_heads, self.head_dim), self.q_strides),
            ((self.batch, self.seqlen_k, self.num_heads_k, self.head_dim), self.k_strides),
            ((self.batch, self.seqlen_k, self.num_heads_k, self.head_dim_v), self.v_strides),
        )

    @property
    def has_window(self) -> bool:
        return self.window_size != (-1, -1)

    @property
    def window(self) -> tuple[int, int]:
        """`window_size` with causality folded in."""
        return self.flags.window

    @property
    def softmax_scale(self) -> float:
        return self.flags.softmax_scale

    @property
    def softcap(self) -> float:
        return self.flags.softcap

    @property
    def deterministic(self) -> bool:
        return self.flags.deterministic

    @property
    def dropout_p(self) -> float:
        return self.flags.dropout_p

    @property
    def bias_tensor(self) -> TensorSpec | None:
        """The tensor of the bias, whether it has values by score, by distance or for entries of lists."""
        return self.bias or self.relative or self.list_bias

    def with_bias(self, bias: Tensor | None) -> AttentionProblem:
        """Describe the call with this tensor of a bias, of the kind that the flags name."""
        spec, flags = None if bias is None else tensor_spec(bias), self.flags
        relative, list_bias = spec if flags.outside else None, spec if flags.is_list_bias else None
        return replaced(self, bias=None if relative or list_bias else spec, relative=relative, list_bias=list_bias)

    @property
    def bias_class(self) -> BiasClass | None:
        """The class of the bias; None without a bias."""
        return None if self.bias is None else self.bias.bias_class

    @property
    def dbias_class(self) -> BiasClass | None:
        """The class of the gradient of the bias; None if it is not needed."""
        return None if self.bias is None or not self.needs_grad.bias else bias_class(self.bias.shape)

    @property
    def partly_shared(self) -> tuple[str, ...]:
        """Names of mask and bias that have neither one entry nor one for each entry of the batch: see `Flags`."""
        if self.sequences is not None:
            return ()
        specs = (("mask", self.mask), ("bias", self.bias_tensor))
        return tuple([name for name, spec in specs if spec is not None and spec.shape[0] not in (1, self.batch)])

    @property
    def features(self) -> frozenset[str]:
        """The arguments of `attention` that this call uses: see `FEATURES`."""
        return frozenset(name for name, is_used in FEATURES.items() if is_used(self))

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads"
        if self.num_heads_k != self.num_heads:
            heads += f" on {self.num_heads_k} key-value heads"
        dim = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        batch = self.sequences or f"batch {self.batch}, {self.seqlen_q} queries x {self.seqlen_k} keys"
        parts = [f"{batch}, {heads}, head_dim {dim}", f"{dtype_name(self.dtype)} on {self.arch}"]
        flags = self.flags
        blocks = "keys" if flags.block_k == 1 else f"blocks of {flags.block_k} keys"
        lists = f"lists of {flags.list_size} {blocks}{'' if flags.block_q == 1 else f' for {flags.block_q} queries'},"
        names = {"none": "mask", "dense": "mask", "tree": "tree", "lists": lists}
        mask = names.get(self.mask_form, "prepared mask")
        for name, spec, repeat, packing in (
            (mask, self.mask, flags.mask_repeat, flags.mask_packing),
            ("bias", self.bias, flags.bias_repeat, flags.bias_packing),
            ("list bias", self.list_bias, flags.bias_repeat, flags.bias_packing),
        ):
            if spec is not None:
                parts.append(self._describe_tensor(f"{name} {tuple(spec.shape)}", spec, repeat, packing))
        if self.relative is not None:
            parts.append(self._describe_relative(self.relative))
        if self.sink is not None:
            parts.append("sink" if self.sink == self.dtype else f"sink {dtype_name(self.sink)}")
        named = [
            (self.is_causal, "causal"),
            (self.has_window, f"window {self.window_size}"),
            (self.softcap > 0, f"softcap {self.softcap:g}"),
            (self.dropout_p > 0, f"dropout_p {self.dropout_p:g}"),
            (self.flags.invariant, "invariant"),
            (self.deterministic, "deterministic"),
            (self.flags.allows_tf32, "TF32 allowed"),
            (self.return_lse, "return_lse"),
            (self.return_probs, "return_probs"),
            (self.flags.max_scores, "max_scores"),
            (self.flags.entropy, "entropy"),
        ]
        parts += [text for present, text in named if present]
        wanted = [f"d{name}" for name, needed in zip(NeedsGrad._fields, self.needs_grad, strict=True) if needed]
        parts.append("gradients " + " ".join(wanted) if wanted else "no gradient")
        return ", ".join(parts)

    def _describe_tensor(self, named: str, spec: TensorSpec, repeat: int, packing: Packing) -> str:
        dtype = "" if spec.dtype == torch.bool else f" {dtype_name(spec.dtype)}"
        shared = "" if spec.shape[0] in (1, self.batch) else f" of batch // {repeat} % {spec.shape[0]}"
        return f"{named}{dtype}{shared}" + ("" if packing == "none" else f" of packed {packing}")

    def _describe_relative(self, spec: TensorSpec) -> str:
        (batch, heads, rows, number), flags = spec.shape, self.flags
        named = f"relative bias {(batch, heads, number)}" if rows == 1 else f"band bias {tuple(spec.shape)}"
        beyond = {"clamp": ", clamped", "zero": ", else 0"}.get(flags.outside, "")
        described = self._describe_tensor(named, spec, flags.bias_repeat, flags.bias_packing)
        return f"{described} (distances {-flags.zero} to {number - 1 - flags.zero}{beyond})"


# The arguments of `attention` that a backend may lack, and whether a call uses them. A backend lists the ones it has,
# and refuses a call that uses another. So no backend drops an argument that is added here.
FEATURES: dict[str, Callable[[AttentionProblem], bool]] = {
    "mask": lambda p: p.mask is not None,
    "bias": lambda p: p.bias_tensor is not None,
    "is_causal": lambda p: p.is_causal,
    "softcap": lambda p: p.softcap > 0,
    "window_size": lambda p: p.has_window,
    "deterministic": lambda p: p.deterministic,
    "return_lse": lambda p: p.return_lse,
    "return_probs": lambda p: p.return_probs,
    "max_scores": lambda p: p.flags.max_scores,
    "entropy": lambda p: p.flags.entropy,
    "sink": lambda p: p.sink is not None,
    "dropout_p": lambda p: p.dropout_p > 0,
    "sequences": lambda p: p.sequences is not None,
    "paged": lambda p: p.sequences is not None and p.sequences.has_pages,
    "tree": lambda p: p.mask_form == "tree",
    "relative_bias": lambda p: p.relative is not None and p.relative.shape[2] == 1,
    "band_bias": lambda p: p.relative is not None and p.relative.shape[2] != 1,
    "lists": lambda p: p.mask_form == "lists",
    "list_bias": lambda p: p.list_bias is not None,
}


class Band(NamedTuple):
    """The diagonals that causality and a window leave: query i may attend to key j where `low <= j - i <= high`."""

    low: int
    high: int


def causal_window(is_causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """Fold causality into a window (left, right), -1 for an unlimited side: causality is a right side of 0."""
    left, right = window_size
    return left, 0 if is_causal else right


def make_band(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> Band | None:
    """Return the diagonals of a window that `causal_window` made, aligned bottom-right; None if it forbids nothing."""
    left, right = window
    aligned = seqlen_k - seqlen_q
    # Unlimited sides, and limits past the last diagonal, become the diagonal past the last: all sums stay in int32.
    low = -seqlen_q if left < 0 else max(aligned - left, -seqlen_q)
    high = seqlen_k if right < 0 else min(aligned + right, seqlen_k)
    return None if low <= 1 - seqlen_q and high >= seqlen_k - 1 else Band(low, high)


def allowed_pairs(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> int:
    """Count the pairs of a query and a key that a window of `causal_window` leaves.

    >>> allowed_pairs(4, 4, (-1, 0)), allowed_pairs(2, 5, (1, 0)), allowed_pairs(5, 2, (-1, 0))
    (10, 4, 3)
    """
    band = make_band(seqlen_q, seqlen_k, window)
    if band is None:
        return seqlen_q * seqlen_k
    return _pairs_below(seqlen_q, seqlen_k, band.high + 1) - _pairs_below(seqlen_q, seqlen_k, band.low)


def _pairs_below(seqlen_q: int, seqlen_k: int, diagonal: int) -> int:
    """Count the pairs (i, j) with j - i < diagonal: sum i + diagonal over the queries, clamped to 0 and seqlen_k."""
    first = min(max(-diagonal, 0), seqlen_q)  # the first query with a key
    last = min(max(seqlen_k - diagonal, first), seqlen_q)  # from here on all keys are below
    partly = (last - first) * (first + last - 1 + 2 * diagonal) // 2
    return partly + (seqlen_q - last) * seqlen_k


def keys_of_query(seqlen_k: int, window: tuple[int, int]) -> int:
    """Return the maximum number of keys of a query.

    >>> keys_of_query(4096, (15, 0)), keys_of_query(4096, (15, -1))
    (16, 4096)
    """
    left, right = window
    return seqlen_k if left < 0 or right < 0 else min(seqlen_k, left + right + 1)


_by_index: dict[int, str] = {}


def device_arch(device: torch.device) -> str:
    """Return "sm_90" for an NVIDIA GPU, "gfx942" for one of AMD, else the type of the device: "cpu", "mps".

    Both vendors' GPUs are of the type "cuda" in torch, and ROCm gives some of them the number (9, 0) too.
    """
    if device.type != "cuda":
        return device.type
    index = device.index or 0
    arch = _by_index.get(index)
    if arch is None:
        gpu = torch.cuda.get_device_properties(index)
        name = str(getattr(gpu, "gcnArchName", ""))  # such as "gfx942:sramecc+:xnack-"
        is_amd = torch.version.hip is not None and name
        arch = _by_index[index] = name.partition(":")[0] if is_amd else f"sm_{gpu.major}{gpu.minor}"
    return arch


@assume_constant  # Dynamo cannot trace how torch reads the setting; it recompiles when the setting changes
def allows_tf32(dtype: torch.dtype) -> bool:
    """Return whether torch allows TF32 in matrix products of a dtype: only in fp32, and if its setting says so.

    `torch.set_float32_matmul_precision("high")` or "medium" allows it, and so do newer settings. The function uses
    `fp32_precision`, because the older `allow_tf32` raises after a newer one was used. It does not query the setting
    for other dtypes, because that takes longer than the rest of the key of a call.
    """
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def sm_number(arch: str) -> int | None:
    """Return 90 for "sm_90"; None for anything but an NVIDIA GPU."""
    return int(arch[3:]) if arch.startswith("sm_") else None


def fits_tma(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether Hopper's TMA can load a 4-D tensor that starts on 16 bytes: it needs rows of unit stride.

    The stride of a dim of size 1 among the first three does not matter.
    """
    units = [stride * itemsize for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return strides[3] == 1 and all(0 < unit < 2**40 and unit % 16 == 0 for unit in units)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_spec(x: Tensor) -> TensorSpec:
    return TensorSpec(x.shape, x.stride(), x.dtype)  # type: ignore[arg-type]


def unpacked_spec(shape: Shape4) -> TensorSpec:
    """Describe the contiguous bool tensor that `PreparedMask.unpacked` makes."""
    _, h, i, j = shape
    return TensorSpec(shape, (h * i * j, i * j, j, 1), torch.bool)


def describe_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: TensorSpec | None,
    mask_form: MaskForm,
    bias: Tensor | None,
    sink: Tensor | None,
    flags: Flags,
    needs_grad: NeedsGrad,
) -> AttentionProblem:
    """Describe a call by its tensors, rows (B, L, H, D), and its checked numbers, with causality in the window.

    Validation then adds whether causality was requested, and which results are.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    _, seqlen_k, num_heads_k, head_dim_v = v.shape
    if flags.sequences is not None:
        spec = flags.sequences
        batch, seqlen_q, seqlen_k = spec.number, spec.max_seqlen_q, spec.max_seqlen_k
    is_causal = flags.right == 0
    return AttentionProblem(
        q.device.type,
        device_arch(q.device),
        q.dtype,
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_heads_k,
        int(head_dim),  # a symbol is bound on purpose: kernels are chosen and scaled by the head dims
        int(head_dim_v),
        q.stride(),  # type: ignore[arg-type]
        k.stride(),  # type: ignore[arg-type]
        v.stride(),  # type: ignore[arg-type]
        mask,
        mask_form,
        None,
        is_causal,
        (flags.left, -1 if is_causal else flags.right),
        flags,
        False,
        False,
        needs_grad,
        None if sink is None else sink.dtype,
    ).with_bias(bias)


def hinted(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with hints, the sizes of the call that is compiled, instead of symbols.

    A condition on a symbol becomes a guard: a graph is recompiled if the condition no longer holds, and `torch.export`
    refuses a range that it divides. A condition on a hint does neither, so speed rules use hints.
    """
    if not any(_may_be_symbol(size) for size in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads)):
        return problem
    strides = ("q_strides", "k_strides", "v_strides")
    return _hints(problem, "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_k", *strides)._replace(
        mask=_hints(problem.mask, "shape", "strides"),
        bias=_hints(problem.bias, "shape", "strides"),
        relative=_hints(problem.relative, "shape", "strides"),
        list_bias=_hints(problem.list_bias, "shape", "strides"),
        flags=_hints(problem.flags, "mask_repeat", "bias_repeat", "zero", "list_size")._replace(
            sequences=_hints(
                problem.sequences, "number", "rows_q", "rows_k", "max_seqlen_q", "max_seqlen_k", "page_size"
            )
        ),
    )


def _hints(spec: Any, *fields: str) -> Any:
    if spec is None:
        return None
    sizes = {field: getattr(spec, field) for field in fields}
    hints = {field: tuple([hint(x) for x in s]) if isinstance(s, tuple) else hint(s) for field, s in sizes.items()}
    return spec._replace(**hints)


def _may_be_symbol(size: int) -> bool:
    # A symbol is an int in code that Dynamo traces, and a SymInt in code that a compiler runs on fake tensors.
    return torch.compiler.is_compiling() or isinstance(size, torch.SymInt)


def hint(size: int) -> int:
    """Return a size, or for a symbol the size of the call that is compiled."""
    if not _may_be_symbol(size):
        return size
    from torch.fx.experimental import symbolic_shapes  # only a compiler needs it, and has imported it

    # Releases of torch without it have guards.
    ask = getattr(symbolic_shapes, "optimization_hint", None)
    return size if ask is None else ask(size)
