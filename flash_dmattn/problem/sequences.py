"""Calls whose batch is sequences of many lengths, described without tensors; which forms of mask and bias they take."""

from __future__ import annotations

from collections.abc import Sequence

from .description import Layout, Packing, SequenceSpec

# Dimensions of q, and of k and v, in each layout.
RANKS: dict[Layout, tuple[int, int]] = {"packed": (3, 3), "padded": (4, 4), "paged": (4, 4), "paged_packed": (3, 4)}


def packing_of(name: str, shape: Sequence[int], spec: SequenceSpec) -> Packing:
    """What of a mask or a bias is packed; its rank tells, and of rank 3 whether it has one row for all queries.

    Raises:
        ValueError: calls of this layout take no such rank.
    """
    if len(shape) == 4:
        return "none"
    if len(shape) == 3 and spec.packs_queries:
        return "keys" if shape[1] == 1 != shape[2] and spec.packs_keys else "queries"
    forms = ["4 dimensions, (sequences, heads, max_seqlen_q, max_seqlen_k)"]
    if spec.packs_queries:
        forms.append("3, (heads, queries of all sequences, max_seqlen_k)")
    if spec.packs_keys:
        forms.append("or (heads, 1, keys of all sequences)")
    raise ValueError(
        f"{name} has {len(shape)} dimensions, shape {tuple(shape)}; beside sequences it needs {', '.join(forms)}"
    )


def check_scores(
    name: str, shape: Sequence[int], packing: Packing, spec: SequenceSpec, heads: tuple[int, int] | None
) -> None:
    """Refuse a mask or a bias, read as 4-D, whose shape does not fit the sequences.

    Args:
        heads: those of q, and those of k; None where no call is known.
    """
    rows, columns = spec.max_seqlen_q, spec.max_seqlen_k
    names = ("max_seqlen_q", "max_seqlen_k")
    batch = {1, spec.number}
    if packing == "queries":
        rows, names, batch = spec.rows_q, ("queries of all sequences", "max_seqlen_k"), {1}
    elif packing == "keys":
        rows, columns, names, batch = 1, spec.rows_k, ("1", "keys of all sequences"), {1}
    b, h, i, j = shape
    if b in batch and (heads is None or h in (1, *heads)) and i in (1, rows) and j in (1, columns):
        for size, named, dim in zip((i, j), spec.names_max, names, strict=True):
            if dim.startswith("max_") and size > 1 and not named:
                raise ValueError(
                    f"{name} has shape {_own(shape, packing)}, by position; it needs {dim}, which the sequences do not "
                    f"name (Sequences.{spec.layout.removesuffix('_packed')}(..., {dim}={size}))"
                )
        return
    wanted = f"{names[0]} in {sorted({1, rows})}, {names[1]} in {sorted({1, columns})}"
    if heads is not None:
        wanted = f"heads in {sorted({1, *heads})}, {wanted}"
    if packing == "none":
        wanted = f"sequences in {sorted(batch)}, {wanted}"
    dims = ("sequences, " if packing == "none" else "") + f"heads, {names[0]}, {names[1]}"
    raise ValueError(f"{name} has shape {_own(shape, packing)}, read as ({dims}); it needs {wanted}")


def check_tree(shape: Sequence[int], spec: SequenceSpec) -> None:
    """Refuse a tree mask (S or 1, n, n) that was made for other sequences."""
    number, tokens, _ = shape
    if not spec.names_max[0]:
        raise ValueError(
            f"mask is a TreeMask of {tokens} new tokens; it needs max_seqlen_q, which the sequences do not name "
            f"(Sequences.{spec.layout.removesuffix('_packed')}(..., max_seqlen_q={tokens}))"
        )
    if tokens != spec.max_seqlen_q:
        raise ValueError(
            f"mask is a TreeMask of {tokens} new tokens; it needs max_seqlen_q of them, {spec.max_seqlen_q}"
        )
    if number not in (1, spec.number):
        raise ValueError(f"mask is a TreeMask of {number} sequences; it needs 1 or {spec.number}")


def check_sequence_tiles(prepared: SequenceSpec, mask_heads: int, spec: SequenceSpec, heads: tuple[int, int]) -> None:
    """Refuse a mask with tiles that was prepared for calls of other sizes.

    Args:
        prepared: what it was prepared for.
        mask_heads: how many heads it has.
        spec, heads: of the call; heads are those of q, and those of k.
    """
    fields = {
        "the layout": "layout",
        "sequences": "number",
        "seqlen_q": "rows_q",
        "seqlen_k": "rows_k",
        "max_seqlen_q": "max_seqlen_q",
        "max_seqlen_k": "max_seqlen_k",
    }
    for name, field in fields.items():
        has, needs = getattr(prepared, field), getattr(spec, field)
        if has != needs:
            raise ValueError(f"mask was prepared for {name} {has}; it needs that of the call, {needs}")
    if mask_heads not in (1, *heads):
        raise ValueError(f"mask was prepared with {mask_heads} heads; it needs one of {sorted({1, *heads})}")


def _own(shape: Sequence[int], packing: Packing) -> tuple[int, ...]:
    return tuple(shape) if packing == "none" else tuple(shape[1:])
