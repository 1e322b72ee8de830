"""Train with flash_dmattn.nn.DynamicMaskAttention on long texts, beside full attention: time and memory by length.

A byte-level language model reads sources of the Python standard library. Its key-value heads learn which keys to keep,
a fixed number for each query, so that attention costs what is kept. On a GPU the longest text has 32768 bytes, on a CPU
2048.

The output: for each length the pairs of query and key that are kept, and time and memory of a training step of both
models; the losses of a few steps at the longest length; and a picture of time and memory, `long_context.png`.

    python examples/long_context.py                  # a CPU, or a GPU where there is one
    python examples/long_context.py --quick --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.examples.byte_model import ByteLanguageModel, ModelConfig, load_corpus, random_windows
from flash_dmattn.examples.demo import print_table


class Step(NamedTuple):
    """A training step at one length: pairs of each head, time, memory, and the backends that ran."""

    pairs: int
    milliseconds: float
    megabytes: float
    backends: str


def pairs_of(length: int, keep: int | None) -> int:
    """Pairs of a query and a key that it attends to: causal, and at most `keep` keys of each query."""
    most = length if keep is None else min(keep, length)
    return most * (most + 1) // 2 + (length - most) * most


class Trainer:
    """A model, its optimizer, and what one step of it costs."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.keep = device, config.keep_window_size
        self.model = ByteLanguageModel(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, window: Tensor) -> float:
        """One step on a window (1, L + 1); its loss in nats per byte."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model.loss(window)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def measure(self, window: Tensor, repeats: int) -> Step:
        """Measure time and memory of a step; on a CPU the memory of the tensors kept for the backward pass."""
        on_gpu = self.device.type == "cuda"
        kept: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        decisions: list[Any] = []
        with flash_dmattn.config(record=decisions), hooks:
            self.step(window)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            self.step(window)  # it reads the loss, which waits for the device
            times.append(1e3 * (time.perf_counter() - started))
        memory = torch.cuda.max_memory_allocated() if on_gpu else sum(kept.values())
        backends = sorted({f"{d.forward}, {d.backward}" for d in decisions})
        length = window.shape[1] - 1
        return Step(pairs_of(length, self.keep), statistics.median(times), memory / 1e6, "; ".join(backends))


def draw(path: Path, lengths: list[int], steps: dict[str, list[Step]], memory: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), dpi=110, layout="constrained")
    times, sizes = figure.subplots(1, 2)
    for name, of_lengths in steps.items():
        times.plot(lengths, [step.milliseconds for step in of_lengths], marker="o", label=name)
        sizes.plot(lengths, [step.megabytes for step in of_lengths], marker="o", label=name)
    times.set(ylabel="ms", title="A training step")
    sizes.set(ylabel="MB", title=memory)
    for axes in (times, sizes):
        axes.set(xlabel="bytes of text", xscale="log", yscale="log", xticks=lengths, xticklabels=map(str, lengths))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, draw; return the numbers of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short texts and a tiny model")
    parser.add_argument("--out", type=Path, default=Path("examples_output"), help="folder of the picture")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)

    if device.type == "cuda" and not options.quick:
        lengths, keep, training_steps, repeats = [4096, 8192, 16384, 32768], 1024, 30, 5
        config = ModelConfig(hidden_size=2048, num_layers=4, num_heads=16, num_heads_k=4, mlp_size=4096)
    elif options.quick:
        lengths, keep, training_steps, repeats = [32, 64], 16, 4, 1
        config = ModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_heads_k=1, mlp_size=32)
    else:
        lengths, keep, training_steps, repeats = [256, 512, 1024, 2048], 64, 15, 2
        config = ModelConfig(hidden_size=64, num_layers=2, num_heads=2, num_heads_k=1, mlp_size=128)

    text = load_corpus().train
    names = {f"{keep} keys per query": keep, "full attention": None}
    steps: dict[str, list[Step]] = {}
    losses: dict[str, list[float]] = {}
    for name, keys in names.items():
        trainer = Trainer(replace(config, keep_window_size=keys), device)
        windows = random_windows(text, training_steps, lengths[-1] + 1, torch.Generator().manual_seed(0))
        losses[name] = [trainer.step(window[None].to(device)) for window in windows]
        steps[name] = [trainer.measure(windows[:1, : length + 1].to(device), repeats) for length in lengths]

    memory = "peak MB" if device.type == "cuda" else "MB kept for backward"
    rows = [
        (str(length), name, f"{step.pairs:,}", f"{step.milliseconds:.1f}", f"{step.megabytes:.1f}", step.backends)
        for place, length in enumerate(lengths)
        for name, step in ((name, steps[name][place]) for name in names)
    ]
    print_table("A training step", ("length", "attention", "pairs of a head", "ms", memory, "backends"), rows)
    print()
    for name, values in losses.items():
        print(f"{name}, {lengths[-1]} bytes: loss {values[0]:.3f}, after {len(values)} steps {values[-1]:.3f}")
    draw(options.out / "long_context.png", lengths, steps, memory)
    print(f"picture: {options.out / 'long_context.png'}")
    return {
        "lengths": lengths,
        "keep": keep,
        "steps": {name: [step._asdict() for step in of_lengths] for name, of_lengths in steps.items()},
        "losses": losses,
    }


if __name__ == "__main__":
    main()
