"""Table and plot of a run, and what of it the predictor reads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..report.tables import table

Record = dict[str, Any]
# The lines of the plot by the beginning of a system's name: label, a colour of Okabe and Ito, and style. A line is the
# best of its forms at each length; of ours, the form of one head group, which is the default.
# The colour says whose it is, the line and the marker which form.
LINES = {
    "ours, heads traded": ("flash_dmattn, heads traded", "#D55E00", "o-"),
    "ours, 1 group": ("flash_dmattn, keys gathered", "#D55E00", "s--"),
    "ours in CUDA graphs": ("flash_dmattn in CUDA graphs, best of both", "#D55E00", "D:"),
    "torch, cudnn": ("torch with cuDNN, best of its forms", "#0072B2", "^-"),
    "torch, flash": ("torch with flash, best of its forms", "#0072B2", "v--"),
}


def write(content: Record, folder: Path) -> list[Path]:
    """Write scale.md, and scale.png where there is matplotlib; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "scale.md"]
    written[0].write_text(page(content), encoding="utf-8")
    if find_spec("matplotlib") is not None:
        written.append(plot(content, folder / "scale.png"))
    return written


def name_of(row: Record) -> str:
    """Return the system, with the number of head groups where it was asked for."""
    groups = row["head_groups"]
    return str(row["system"]) if groups is None else f"{row['system']}, {groups} group{'s' if groups > 1 else ''}"


def line(row: Record) -> str:
    """One row in a line, for whoever watches."""
    if "failed" in row:
        return f"{name_of(row)}: {row['failed']}"
    worst = max(row["errors"].values())
    return (
        f"{name_of(row)}: forward {row['forward_ms']:.2f} ms, backward {row['backward_ms']:.2f} ms, efficiency "
        f"{row['efficiency']:.1%}, error {worst:.1e}{'' if row['right'] else ', DIFFERS'}"
    )


def page(content: Record) -> str:
    """Return the run as markdown."""
    head = ["case", "system", "forward ms", "backward ms", "one GPU ms", "efficiency", "of the forward pass", "error"]
    body: list[list[str]] = []
    for row in content["rows"]:
        alone = f"{row['one_forward_ms']:.2f} + {row['one_backward_ms']:.2f}" if "one_forward_ms" in row else ""
        if "failed" in row:
            body.append([row["case"], name_of(row), "failed", row["failed"], alone, "", "", ""])
            continue
        worst = max(row["errors"], key=row["errors"].get)
        error = f"{row['errors'][worst]:.1e} ({worst}){'' if row['right'] else ', **differs**'}"
        times = (f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}", alone)
        shares = (f"{row['efficiency']:.1%}", f"{row['forward_efficiency']:.1%}")
        body.append([row["case"], name_of(row), *times, *shares, error])
    links = [[f"{x['mb']:g}", x["collective"], f"{x['ms']:.3f}", f"{x['gbs']:.1f}"] for x in content["bandwidth"]]
    sections = [
        "# Context parallelism",
        f"{content['world_size']} x {content['device']}, torch {content['torch']}. Times are of the slowest rank, "
        "medians; efficiency is the time of one GPU over that of all of them times their number, of both passes; error "
        "is the largest of out and gradients beside one GPU.",
        "\n".join(table(head, body)),
        "\n".join(table(["MB a rank", "collective", "ms", "GB/s received"], links)),
    ]
    return "\n\n".join(sections) + "\n"


def machine_of(content: Record) -> dict[str, float]:
    """The fields of the predictor's `Machine` that were measured; none of a quick run, which measures launches."""
    if content["quick"]:
        return {}
    measured = {}
    gathered = [x["gbs"] for x in content["bandwidth"] if x["collective"] == "all_gather"]
    if gathered:
        measured["nvlink_gbs"] = max(gathered)
    timed = [row for row in content["rows"] if "one_forward_ms" in row]
    plain = [row for row in timed if row["case"].startswith("causal, ") and "bias" not in row["case"]]
    if plain:
        row = max(plain, key=lambda row: row["length"])
        flop = 4.0 * row["length"] ** 2 * row["heads"] * 128 * 0.5
        measured["forward_tflops"] = flop / row["one_forward_ms"] / 1e9
        measured["backward_tflops"] = 2.5 * flop / row["one_backward_ms"] / 1e9
    return measured


def plot(content: Record, path: Path) -> Path:
    """Efficiency by length, a panel for each pair of heads; what is wrong or failed is left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in content["rows"] if row.get("right") and row["case"].startswith("causal, ")]
    rows = [row for row in rows if "bias" not in row["case"]]
    panels = sorted({(row["heads"], row["kv_heads"]) for row in rows}) or [(0, 0)]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4 * len(panels), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    drawn: dict[str, Any] = {}
    for place, (heads, kv_heads) in zip(axes[0], panels, strict=True):
        here = [row for row in rows if (row["heads"], row["kv_heads"]) == (heads, kv_heads)]
        for start, (label, color, style) in LINES.items():
            best: dict[int, float] = {}
            for row in here:
                if name_of(row).startswith(start):
                    best[row["length"]] = max(best.get(row["length"], 0.0), 100 * row["efficiency"])
            if best:
                x, y = zip(*sorted(best.items()))
                (drawn[label],) = place.plot(x, y, style, color=color, label=label)
        place.set(
            xscale="log",
            xlabel="tokens",
            title=f"{heads} heads on {kv_heads}",
        )
        lengths = sorted({row["length"] for row in here})
        place.set_xticks(lengths, [f"{n >> 10}k" if n >= 1024 else str(n) for n in lengths])
        place.minorticks_off()
        place.grid(alpha=0.3)
    axes[0][0].set_ylabel("efficiency, forward and backward, %")
    if drawn:
        ends = "a line ends at the longest that was timed"
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2, frameon=False, title=ends)
    figure.suptitle(f"Context parallelism, {content['world_size']} x {content['device']}, causal")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
