"""Draw the gallery of masks in docs/masks.md: `python docs/draw_masks.py` writes docs/pictures/masks.png."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib import pyplot
from matplotlib.colors import ListedColormap

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flash_dmattn import masks  # noqa: E402

L = 24


def gallery() -> dict[str, torch.Tensor]:
    """Return a title and a mask (L, L) for each panel."""
    scores = torch.randn(1, 1, 1, L, generator=torch.Generator().manual_seed(4))
    documents = masks.document_ids(torch.tensor([9, 5, 10]))
    causal = masks.causal_mask(L, L)
    window = masks.sliding_window_mask(L, L, (5, 0))
    first = torch.arange(L) < 3
    blocks = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(2)) < 0.45
    drawn = {
        "causal_mask": causal,
        "sliding_window_mask": window,
        "combine: first keys or window": masks.combine(window, masks.combine(first[None, None, None], causal), op="or"),
        "document_mask and causal": masks.combine(masks.document_mask(documents), causal),
        "prefix_lm_mask": masks.prefix_lm_mask(torch.tensor([8]), L, L),
        "padding_mask": masks.padding_mask(torch.tensor([17]), L),
        "topk_mask of a score per key": masks.topk_mask(scores, 6, is_causal=True),
        "expand_blocks": masks.expand_blocks(blocks, 6, L, L),
    }
    return {title: mask.expand(-1, -1, L, L)[0, 0] for title, mask in drawn.items()}


def main() -> None:
    """Write the picture."""
    figure, axes = pyplot.subplots(2, 4, figsize=(10, 5.4), layout="constrained")
    for axis, (title, mask) in zip(axes.flat, gallery().items(), strict=True):
        axis.imshow(mask, cmap=ListedColormap(["#eceff4", "#2b5c9e"]), vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0, 0].set_ylabel("queries")
    axes[1, 0].set_xlabel("keys")
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.06)
    path = ROOT / "docs" / "pictures" / "masks.png"
    figure.savefig(path, dpi=90)
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
