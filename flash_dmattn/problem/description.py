"""`AttentionProblem`: one attention call described without tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Shape4 = tuple[int, int, int, int]
# One value per query, per key, or per score (query and key); a bias of one value per head counts as one per query.
BiasClass = Literal["query", "key", "score"]
# No mask, a bool tensor, or a prepared mask: a TileMask, a KeyMask or an IntervalMask, beside sequences a
# SequenceTileMask or a TreeMask.
MaskForm = Literal["none", "dense", "tiles", "keys", "intervals", "sequence_tiles", "tree"]
# How the sequences of a batch lie: each an entry of the batch, of full length ("dense") or used in part ("padded"); one
# behind the other in one row of tokens ("packed"); or with keys in pages of a cache ("paged"), and queries that are
# packed ("paged_packed").
Layout = Literal["dense", "packed", "padded", "paged", "paged_packed"]
# Those with q in a row of tokens, (1, Tq, Hq, D) for a backend; so are k and v of the first.
PACKED_QUERIES: tuple[Layout, ...] = ("packed", "paged_packed")
# What of a mask or a bias is packed: nothing, the queries, (1, H, Tq, max_k or 1), or the keys, (1, H, 1, Tk).
Packing = Literal["none", "queries", "keys"]
# (dq, dk, dv, dbias), None where a gradient is not needed; of a call with a sink (dq, dk, dv, dbias, dsink).
Gradients = tuple[Tensor | None, ...]


class NeedsGrad(NamedTuple):
    """Which gradients a call has to produce."""

    q: bool = False
    k: bool = False
    v: bool = False
    bias: bool = False
    sink: bool = False


class MaskView(NamedTuple):
    """A mask as kernels receive it: its form, and the tensors of that form.

    "none" has no tensors; "dense" one bool tensor (Bm, Hm, Lq or 1, Lk or 1), in which a stride of 0 is a broadcast
    dim; "tiles" has bits, classes, row_lists and col_lists of a `TileMask`; "keys" has kept, count and prefix of a
    `KeyMask`; "intervals" has start, stop, order, bounds, row_lists and col_lists of an `IntervalMask`;
    "sequence_tiles" has those of "tiles", of a `SequenceTileMask`; "tree" has the bits of a `TreeMask`.
    Bm is 1, the batch size, or a number that `Flags.mask_repeat` goes with.
    """

    form: MaskForm = "none"
    tensors: tuple[Tensor, ...] = ()

    @property
    def dense(self) -> Tensor | None:
        """The bool tensor of the form "dense"; None of "none"."""
        return self.tensors[0] if self.form == "dense" else None


class SequenceView(NamedTuple):
    """Where S sequences lie, as kernels receive it.

    Attributes:
        bounds: int32 (S, 4), contiguous, a row each: the first query, how many, the first key, how many. The firsts are
            places in a row of packed tokens, ascending, and 0 where queries or keys are not packed. Whatever the
            tensors say that it was made of, no row of it leaves q, k or v.
        block_table: int32 (S, P), whose entry j // page_size is the page of key j; None where keys are not in pages.
            Its entries may be wrong: kernels clamp them.
    """

    bounds: Tensor
    block_table: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that there are."""
        return (self.bounds,) if self.block_table is None else (self.bounds, self.block_table)


class Flags(NamedTuple):
    """The numbers of a call that are no tensors, in the order of the operators' schemas.

    `left` and `right` are the window with causality folded in, -1 for an unlimited side: see `causal_window`. Entry b
    of the batch reads entry `b // mask_repeat % Bm` of a mask with Bm entries, and so of the bias: see `leading.py`.

    Of a call with sequences, `max_seqlen_q` and `max_seqlen_k` are bounds on their lengths; a mask or a bias of which
    nothing is packed has entries for S sequences, or one.

    A call whose `dropout_p` is not 0 has a key of its dropout beside it: see `flash_dmattn.reference.dropout`.

    `one_mask_row` says that the mask was made of one row for all queries, as padding is; the window is not part of it.
    """

    left: int
    right: int
    softmax_scale: float
    softcap: float
    deterministic: bool
    mask_repeat: int = 1
    bias_repeat: int = 1
    layout: Layout = "dense"
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    mask_packing: Packing = "none"
    bias_packing: Packing = "none"
    dropout_p: float = 0.0
    one_mask_row: bool = False

    @property
    def packs_queries(self) -> bool:
        """Whether q is (1, Tq, Hq, D), a row of tokens."""
        return self.layout in PACKED_QUERIES

    @property
    def packs_keys(self) -> bool:
        """Whether k and v are (1, Tk, Hk, ...), a row of tokens."""
        return self.layout == "packed"

    @property
    def window(self) -> tuple[int, int]:
        """(left, right)."""
        return self.left, self.right


def bias_class(shape: Sequence[int], strides: Sequence[int] | None = None) -> BiasClass:
    """Return the dims that a bias has values for: they decide how kernels read it and make its gradient.

    Args:
        shape: (batch, heads, seqlen_q, seqlen_k).
        strides: of the bias, where it is read: a dim of stride 0 holds one value. Its gradient has the full shape,
            so its class takes no strides.

    >>> bias_class((1, 4, 1, 128)), bias_class((1, 4, 64, 128), (0, 8192, 128, 1)), bias_class((1, 4, 64, 1))
    ('key', 'score', 'query')
    """
    if shape[3] == 1 or (strides is not None and strides[3] == 0):
        return "query"
    if shape[2] == 1 or (strides is not None and strides[2] == 0):
        return "key"
    return "score"


class TensorSpec(NamedTuple):
    """Shape, strides (in elements) and dtype of a mask or a bias, read as (batch, heads, seqlen_q, seqlen_k)."""

    shape: Shape4
    strides: Shape4
    dtype: torch.dtype

    def broadcast(self) -> tuple[bool, bool, bool, bool]:
        """For each dimension, whether one element is read for every index: size 1, or an expanded stride of 0."""
        b, h, i, j = (size == 1 or stride == 0 for size, stride in zip(self.shape, self.strides, strict=True))
        return b, h, i, j

    @property
    def bias_class(self) -> BiasClass:
        """What a bias has one value for, as kernels read it."""
        return bias_class(self.shape, self.strides)

    def span(self) -> int:
        """Elements of memory between the first and the last one, both included; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


class SequenceSpec(NamedTuple):
    """How the sequences of a call lie.

    Attributes:
        layout: see `Layout`.
        number: of sequences, S.
        rows_q, rows_k: rows of tokens where they are packed, Tq and Tk; else slots of a sequence, Lq and Lk.
        max_seqlen_q, max_seqlen_k: bounds on the lengths of sequences.
        names_max: whether the caller has named each of the two.
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
        """Whether keys are in pages."""
        return self.layout in ("paged", "paged_packed")

    @property
    def packs_queries(self) -> bool:
        """Whether q is a row of tokens."""
        return self.layout in PACKED_QUERIES

    @property
    def packs_keys(self) -> bool:
        """Whether k and v are."""
        return self.layout == "packed"

    def shape_of_tiles(self, mask_heads: int) -> Shape4:
        """That of the bool tensor which a `SequenceTileMask` beside these sequences unpacks to."""
        if self.packs_queries:
            return 1, mask_heads, self.rows_q, self.max_seqlen_k
        return self.number, mask_heads, self.max_seqlen_q, self.max_seqlen_k

    def __str__(self) -> str:
        rows = f"{self.rows_q} queries and {self.rows_k} keys"
        if self.layout == "padded":
            rows = f"at most {rows} each"
        elif self.has_pages:
            of_each = "in all" if self.packs_queries else "each"
            rows = f"{self.rows_q} queries {of_each} and at most {self.rows_k} keys in pages of {self.page_size}"
        return f"{self.number} {self.layout.partition('_')[0]} sequences of {rows}"


class AttentionProblem(NamedTuple):
    """Everything a backend may decide on: sizes, strides, dtypes, device and flags of one call, but no tensor.

    It is hashable, prints as one line, and can be built for a GPU that this machine does not have
    (`flash_dmattn.explain_problem` does). Strides count elements; `mask` and `bias` are described as 4-D, a prepared
    mask by the bool tensor that it unpacks to. Its band is that of the call. `sink` is the dtype of one, None without.
    With sequences, batch is their number, and seqlen_q and seqlen_k are bounds on their lengths. `elsewhere` says that
    no GPU of this machine has the architecture: what is installed here then decides nothing. `heads_first` says that q,
    k and v arrive as (B, H, L, D), and their gradients leave so; strides are listed in the order (B, L, H, D) anyway.
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
    sequences: SequenceSpec | None = None
    elsewhere: bool = False
    heads_first: bool = False

    @property
    def has_window(self) -> bool:
        """Whether `window_size` limits either side."""
        return self.window_size != (-1, -1)

    @property
    def window(self) -> tuple[int, int]:
        """`window_size` with causality folded in."""
        return self.flags.window

    @property
    def softmax_scale(self) -> float:
        """The factor on q @ k^T."""
        return self.flags.softmax_scale

    @property
    def softcap(self) -> float:
        """The bound on scaled scores; 0.0 is none."""
        return self.flags.softcap

    @property
    def deterministic(self) -> bool:
        """Whether results have to be equal bit by bit from run to run."""
        return self.flags.deterministic

    @property
    def dropout_p(self) -> float:
        """The probability that a probability is dropped; 0.0 is no dropout."""
        return self.flags.dropout_p

    @property
    def bias_class(self) -> BiasClass | None:
        """The class of the bias, as kernels read it; None without a bias."""
        return None if self.bias is None else self.bias.bias_class

    @property
    def dbias_class(self) -> BiasClass | None:
        """The class of the gradient of the bias; None where it is not needed."""
        return None if self.bias is None or not self.needs_grad.bias else bias_class(self.bias.shape)

    @property
    def partly_shared(self) -> tuple[str, ...]:
        """Name the mask and the bias where some entries of the batch share one and others do not: see `Flags`."""
        if self.sequences is not None:
            return ()
        specs = (("mask", self.mask), ("bias", self.bias))
        return tuple([name for name, spec in specs if spec is not None and spec.shape[0] not in (1, self.batch)])

    @property
    def features(self) -> frozenset[str]:
        """The arguments of `attention` that this call makes use of: see `FEATURES`."""
        return frozenset(name for name, is_used in FEATURES.items() if is_used(self))

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads"
        if self.num_heads_k != self.num_heads:
            heads += f" on {self.num_heads_k} key-value heads"
        dim = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        batch = self.sequences or f"batch {self.batch}, {self.seqlen_q} queries x {self.seqlen_k} keys"
        parts = [f"{batch}, {heads}, head_dim {dim}", f"{dtype_name(self.dtype)} on {self.arch}"]
        mask = {"none": "mask", "dense": "mask", "tree": "tree"}.get(self.mask_form, "prepared mask")
        flags = self.flags
        for name, spec, repeat, packing in (
            (mask, self.mask, flags.mask_repeat, flags.mask_packing),
            ("bias", self.bias, flags.bias_repeat, flags.bias_packing),
        ):
            if spec is not None:
                parts.append(
                    f"{name} {tuple(spec.shape)}"
                    + ("" if spec.dtype == torch.bool else f" {dtype_name(spec.dtype)}")
                    + ("" if spec.shape[0] in (1, self.batch) else f" of batch // {repeat} % {spec.shape[0]}")
                    + ("" if packing == "none" else f" of packed {packing}")
                )
        if self.sink is not None:
            parts.append("sink" if self.sink == self.dtype else f"sink {dtype_name(self.sink)}")
        named = [
            (self.is_causal, "causal"),
            (self.has_window, f"window {self.window_size}"),
            (self.softcap > 0, f"softcap {self.softcap:g}"),
            (self.dropout_p > 0, f"dropout_p {self.dropout_p:g}"),
            (self.deterministic, "deterministic"),
            (self.return_lse, "return_lse"),
            (self.return_probs, "return_probs"),
        ]
        parts += [text for present, text in named if present]
        wanted = [f"d{name}" for name, needed in zip(NeedsGrad._fields, self.needs_grad, strict=True) if needed]
        parts.append("gradients " + " ".join(wanted) if wanted else "no gradient")
        return ", ".join(parts)


# The arguments of `attention` that a backend may lack, and whether a call uses them. A backend lists those that it has,
# and a call that uses another is refused: an argument that is added here is dropped by nobody.
FEATURES: dict[str, Callable[[AttentionProblem], bool]] = {
    "mask": lambda p: p.mask is not None,
    "bias": lambda p: p.bias is not None,
    "is_causal": lambda p: p.is_causal,
    "softcap": lambda p: p.softcap > 0,
    "window_size": lambda p: p.has_window,
    "deterministic": lambda p: p.deterministic,
    "return_lse": lambda p: p.return_lse,
    "return_probs": lambda p: p.return_probs,
    "sink": lambda p: p.sink is not None,
    "dropout_p": lambda p: p.dropout_p > 0,
    "sequences": lambda p: p.sequences is not None,
    "paged": lambda p: p.sequences is not None and p.sequences.has_pages,
    "tree": lambda p: p.mask_form == "tree",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


def spec_of(x: Tensor) -> TensorSpec:
    """The description of a 4-D tensor."""
    return TensorSpec(x.shape, x.stride(), x.dtype)  # type: ignore[arg-type]


def unpacked_spec(shape: Shape4) -> TensorSpec:
    """The description of the contiguous bool tensor that `PreparedMask.unpacked` makes."""
    _, h, i, j = shape
    return TensorSpec(shape, (h * i * j, i * j, j, 1), torch.bool)


def hinted(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with the sizes of the call that is compiled in the place of symbols.

    A condition on a symbol becomes a guard: a graph is compiled anew where the condition holds no more, and
    `torch.export` refuses a range that it divides. A condition on a hint does neither, so rules of speed ask for hints.
    """
    if not torch.compiler.is_compiling():
        return problem
    strides = ("q_strides", "k_strides", "v_strides")
    lengths = ("max_seqlen_q", "max_seqlen_k")
    return _hints(problem, "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_k", *strides)._replace(
        mask=_hints(problem.mask, "shape", "strides"),
        bias=_hints(problem.bias, "shape", "strides"),
        flags=_hints(problem.flags, "mask_repeat", "bias_repeat", *lengths),
        sequences=_hints(problem.sequences, "number", "rows_q", "rows_k", *lengths, "page_size"),
    )


def _hints(spec: Any, *fields: str) -> Any:
    if spec is None:
        return None
    sizes = {field: getattr(spec, field) for field in fields}
    hints = {field: tuple([hint(x) for x in s]) if isinstance(s, tuple) else hint(s) for field, s in sizes.items()}
    return spec._replace(**hints)


def hint(size: int) -> int:
    """Return a size, or the size of the call that is compiled where a compiler has a symbol for it."""
    if not torch.compiler.is_compiling():
        return size
    from torch.fx.experimental import symbolic_shapes  # only a compiler needs it, and has imported it

    # Releases of torch without it have guards.
    ask = getattr(symbolic_shapes, "optimization_hint", None)
    return size if ask is None else ask(size)
