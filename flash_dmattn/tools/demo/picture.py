"""The picture of the demo: loss curves of both models, and the mask that one head has learned."""

from __future__ import annotations

from pathlib import Path

import torch

from flash_dmattn.masks import show

from .training import History

# As in masks.show: blue and orange stay apart for every common form of colour blindness, and in grey.
BLUE, ORANGE, GREY = (0.12, 0.38, 0.66), (0.80, 0.36, 0.02), (0.4, 0.4, 0.4)


def draw(
    path: Path,
    dynamic: History,
    full: History,
    entropy: float,
    mask: torch.Tensor,
    *,
    keep: int,
    layer: int,
    head: int,
    block_size: int = 16,
) -> Path:
    """Write the picture as a PNG.

    Args:
        path: file to write.
        dynamic, full: histories of the two models.
        entropy: byte-unigram entropy of the held-out text, nats per byte.
        mask: (B, Hk, L, L) mask of a real batch; its first text is drawn.
        keep: keys kept per query, for the titles.
        layer, head: which layer the mask is of, and which of its heads to draw.
        block_size: tokens a side of the tiles drawn.

    Returns:
        path.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.4), dpi=110, layout="constrained")
    curves, picture = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for history, name, color in (
        (dynamic, f"dynamic mask, {keep} keys per query", ORANGE),
        (full, "full attention", BLUE),
    ):
        curves.plot(range(1, len(history.train_loss) + 1), history.train_loss, color=color, alpha=0.2, linewidth=0.8)
        last = history.held_out_loss[-1]
        curves.plot(
            history.held_out_steps,
            history.held_out_loss,
            color=color,
            marker="o",
            markersize=4,
            linewidth=1.8,
            label=f"{name}: ends at {last:.3f} nats",
        )
    curves.axhline(entropy, color=GREY, linestyle="--", label=f"byte-unigram entropy: {entropy:.3f} nats")
    # The untrained model starts at ln 256 = 5.5 nats; what matters happens far below.
    lowest = min(*dynamic.held_out_loss, *full.held_out_loss, *dynamic.train_loss, *full.train_loss)
    curves.set_ylim(max(0.0, lowest - 0.1), entropy + 0.6)
    curves.set_xlim(0, len(dynamic.train_loss))
    curves.set_xlabel("training step")
    curves.set_ylabel("loss (nats per byte)")
    curves.set_title("Loss on held-out text (dots) and on each training batch (thin)", fontsize=11)
    curves.grid(alpha=0.25)
    curves.legend(frameon=False, fontsize=10)
    show(
        mask,
        block_size=block_size,
        head=head,
        ax=picture,
        title=f"Keys that key-value head {head} of layer {layer} keeps, one held-out text",
    )
    figure.savefig(path)
    return path
