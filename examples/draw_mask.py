"""Pictures of masks: what attends, and which tiles a kernel skips, computes whole, or masks inside."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.arguments import bool_mask, integer, pair
from flash_dmattn.masks.blocks import expand_lengths, mask_stats, tile_counts, tile_sizes
from flash_dmattn.masks.prepared.storage import BatchMask, SequenceTileMask, TreeMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and orange stay apart for every common form of colour blindness, and in grey.
EMPTY_TILE, FULL_TILE = (0.94, 0.94, 0.94), (0.12, 0.38, 0.66)
PARTIAL_MASKED, PARTIAL_ATTENDS = (0.99, 0.90, 0.77), (0.80, 0.36, 0.02)
MAX_PIXELS = 768
MAX_GRID_LINES = 48


def show(
    mask: Tensor | PreparedMask,
    *,
    block_size: int | tuple[int, int] = 128,
    batch: int = 0,
    head: int = 0,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    path: str | os.PathLike[str] | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Draw one head of a mask and its tiles; large masks are pooled, and no lone key is pooled away.

    Tiles with nothing to compute are grey, tiles in which everything attends blue; the others are orange,
    darker where more attends. Below the title: shape, density, active tiles, empty rows of what is drawn.

    Args:
        mask: bool tensor of 2 to 4 dims, broadcastable to (B, H, Lq, Lk), or a prepared mask. Only the head that is
            drawn is unpacked, band included, its keys in their own order. For a mask that was prepared beside
            sequences, `batch` is the number of the sequence to draw.
        block_size: tokens per tile, one int or (queries, keys).
        batch, head: which one to draw; any index reaches a dim of size 1.
        seqlen_q, seqlen_k: real lengths, where the mask has size 1 for all queries or all keys.
        path: file to save the picture to; its ending chooses the format.
        ax: matplotlib axes to draw in; by default a new figure.
        title: first line above the picture.

    Returns:
        The matplotlib figure. It belongs to no pyplot window; a notebook shows it as the cell's result.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: neither a bool mask nor a prepared one, an index or length that does not fit, or nothing
            to draw.

    Example:
        >>> from flash_dmattn.examples.draw_mask import show
        >>> from flash_dmattn.masks import causal_mask
        >>> show(causal_mask(256, 256), block_size=32).axes[0].get_xlabel()
        'key (token)'
    """
    blocks = pair("block_size", block_size, 1)
    plane = _plane(mask, batch, head, seqlen_q, seqlen_k)
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("draw_mask needs matplotlib, which is not installed: pip install matplotlib") from error

    length_q, length_k = plane.shape
    figure: Any
    legend: Any
    place: dict[str, Any]
    if ax is None:
        height = min(max(6.6 * length_q / length_k, 2.0), 6.6)
        figure = Figure(figsize=(7.5, height + 2.0), dpi=150, layout="constrained")
        ax = figure.add_subplot()
        legend, place = figure.legend, {"loc": "outside lower center"}
    else:
        figure = ax.figure
        legend, place = ax.legend, {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 4.5}
    # extent puts the axes in tokens whatever the pooling; "auto" keeps a 1 x 16k mask visible.
    aspect: Literal["equal", "auto"] = "equal" if 0.2 <= length_q / length_k <= 5.0 else "auto"
    ax.imshow(_picture(plane, blocks).numpy(), extent=(0, length_k, length_q, 0), aspect=aspect)
    _draw_grid(ax, length_q, length_k, blocks)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.set_xlabel("key (token)")
    ax.set_ylabel("query (token)")

    stats = mask_stats(plane, blocks)
    facts = (
        f"{length_q} x {length_k} (queries x keys), density {stats.density:.1%}, empty rows {stats.empty_rows}\n"
        f"tiles {blocks[0]}x{blocks[1]}: {stats.active_tile_fraction:.1%} active, {stats.full_tile_fraction:.1%} full"
    )
    ax.set_title(facts if title is None else f"{title}\n{facts}", fontsize=10)
    handles = [
        Patch(facecolor=EMPTY_TILE, edgecolor="0.6", label="empty tile: skipped"),
        Patch(facecolor=FULL_TILE, label="full tile: no mask inside"),
        Patch(facecolor=PARTIAL_ATTENDS, label="partial tile: attends"),
        Patch(facecolor=PARTIAL_MASKED, edgecolor="0.6", label="partial tile: masked"),
    ]
    legend(handles=handles, ncols=2, fontsize=8, frameon=False, **place)
    if path is not None:
        figure.savefig(path)
    return figure


def _plane(mask: Tensor | PreparedMask, batch: int, head: int, seqlen_q: int | None, seqlen_k: int | None) -> Tensor:
    """Return the (Lq, Lk) mask of one batch element and head."""
    if isinstance(mask, SequenceTileMask):
        number, head = _chosen(mask.shape, (mask.spec.number, mask.shape[1]), batch, head)
        plane = mask.dense_sequence(number, head)
        if 0 in plane.shape:
            raise ValueError(f"mask has a sequence {number} of shape {tuple(plane.shape)}: there is nothing to draw.")
        return expand_lengths(plane[None, None], seqlen_q, seqlen_k)[0, 0]
    if isinstance(mask, TreeMask):
        mask = mask.unpacked()[:, None]
    if not isinstance(mask, BatchMask):
        mask = expand_lengths(bool_mask("mask", cast(Tensor, mask)), seqlen_q, seqlen_k)
    index = _chosen(mask.shape, mask.shape[:2], batch, head)
    if 0 in mask.shape or (isinstance(mask, BatchMask) and mask.seqlen_q == 0):
        raise ValueError(f"mask has shape {tuple(mask.shape)}: there is nothing to draw; every dim needs to be >= 1.")
    if isinstance(mask, BatchMask):
        # Cut to the head before it is unpacked, which takes Lq * Lk bytes for each.
        cut = mask._with_tensors([x.narrow(1, index[1], 1) for x in mask.tensors])
        if mask.sequences is None:  # each of these has a band of its own
            cut = cut._with_tensors([x.narrow(0, index[0], 1) for x in cut.tensors])
            index = 0, 0
        return expand_lengths(cut.dense(), seqlen_q, seqlen_k)[index[0], 0]
    return mask[index[0], index[1]]


def _chosen(shape: Sequence[int], sizes: Sequence[int], batch: int, head: int) -> tuple[int, int]:
    """Check the indices against so many batch entries and heads; any index reaches the only one."""
    for name, value, size in (("batch", batch, sizes[0]), ("head", head, sizes[1])):
        if integer(name, value) >= size and size != 1:
            raise ValueError(f"{name} is {value} and mask has {size} (shape {tuple(shape)}); it needs to be < {size}.")
    return batch if sizes[0] != 1 else 0, head if sizes[1] != 1 else 0


def _picture(plane: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Return the RGB picture, (rows, columns, 3) on CPU, of at most MAX_PIXELS a side."""
    length_q, length_k = plane.shape
    pool = (-(-length_q // MAX_PIXELS), -(-length_k // MAX_PIXELS))
    density = tile_counts(plane, pool) / tile_sizes(length_q, length_k, pool, plane.device)
    # A third of the scale for the first key in a pixel, so that a lone key or a thin diagonal stays visible.
    shade = torch.where(density > 0, density * 2 / 3 + 1 / 3, 0.0) if max(pool) > 1 else density
    counts = tile_counts(plane, blocks)
    full = counts == tile_sizes(length_q, length_k, blocks, plane.device)
    tile_q = (torch.arange(density.size(0), device=plane.device) * pool[0] + pool[0] // 2).clamp(max=length_q - 1)
    tile_k = (torch.arange(density.size(1), device=plane.device) * pool[1] + pool[1] // 2).clamp(max=length_k - 1)
    at = (tile_q[:, None] // blocks[0], tile_k // blocks[1])

    def color(rgb: tuple[float, float, float]) -> Tensor:
        return torch.tensor(rgb, device=plane.device)

    partial = torch.lerp(color(PARTIAL_MASKED), color(PARTIAL_ATTENDS), shade[:, :, None])
    picture = torch.where((counts > 0)[at][:, :, None], partial, color(EMPTY_TILE))
    return torch.where(full[at][:, :, None], color(FULL_TILE), picture).cpu()


def _draw_grid(ax: Axes, length_q: int, length_k: int, blocks: tuple[int, int]) -> None:
    """Draw lines between tiles, along each side that has few enough to tell them apart."""
    for length, block, line in ((length_q, blocks[0], ax.axhline), (length_k, blocks[1], ax.axvline)):
        if length / block <= MAX_GRID_LINES:
            for edge in range(block, length, block):
                line(edge, color="white", linewidth=0.6)
