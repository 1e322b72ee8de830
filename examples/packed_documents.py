"""A Llama-style model on documents of many lengths: packed one behind the other, beside rows padded to the longest.

Documents are modules of the Python standard library, cut to many lengths. Both ways compute the same loss of every
document; padding computes on tokens that nobody reads, and keeps them for the backward pass.

The output: tokens computed, time, real tokens per second and memory of a training step; the largest difference of a
document's loss; and a picture of the tokens computed and of these losses, `packed_documents.png`.

    python examples/packed_documents.py                  # a CPU, or a GPU where there is one
    python examples/packed_documents.py --quick --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from flash_dmattn.examples.byte_model import load_corpus
from flash_dmattn.examples.demo import print_table
from flash_dmattn.integrations.transformers import register


def documents(lengths: Sequence[int]) -> list[Tensor]:
    """So many bytes of so many modules of the standard library, each (length,) int64."""
    results: list[Tensor] = []
    for path in load_corpus().train_files:
        text = path.read_bytes()
        if len(results) < len(lengths) and len(text) >= lengths[len(results)]:
            results.append(torch.frombuffer(bytearray(text[: lengths[len(results)]]), dtype=torch.uint8).long())
    return results


def make_model(sizes: dict[str, int], attention: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, vocab_size=257, pad_token_id=256, max_position_embeddings=8192)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def padded_losses(model: Any, texts: list[Tensor]) -> Tensor:
    """The mean loss of each document (N,), from rows that are filled up behind it."""
    rows = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=256)
    logits = model(input_ids=rows, attention_mask=(rows != 256).long(), use_cache=False).logits
    each = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    real = rows[:, 1:] != 256
    return (each.view(real.shape) * real).sum(1) / real.sum(1)


def packed_losses(model: Any, texts: list[Tensor]) -> Tensor:
    """The same from one row without padding: where documents begin is told, as transformers' data collators do."""
    lengths = torch.tensor([len(text) for text in texts])
    limits = F.pad(lengths.cumsum(0), (1, 0)).to(texts[0].device, torch.int32)
    row, longest = torch.cat(texts), int(lengths.max())
    logits = model(
        input_ids=row[None],
        position_ids=torch.cat([torch.arange(len(text), device=row.device) for text in texts])[None],
        cu_seq_lens_q=limits,
        cu_seq_lens_k=limits,
        max_length_q=longest,
        max_length_k=longest,
        use_cache=False,
    ).logits[0]
    each = F.cross_entropy(logits[:-1].float(), row[1:], reduction="none")
    # A document's last token is not asked for the first of the next one.
    return torch.stack([part[: len(part) - 1].mean() for part in F.pad(each, (0, 1)).split(lengths.tolist())])


class Step(NamedTuple):
    """The cost of one training step, and the losses of its documents."""

    losses: list[float]
    computed: int
    milliseconds: float
    megabytes: float


def measure(losses_of: Callable[[Any, list[Tensor]], Tensor], model: Any, texts: list[Tensor], repeats: int) -> Step:
    device = model.device
    on_gpu = device.type == "cuda"
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:  # each storage once
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    times = []
    for repeat in range(repeats + 1):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        with hooks if repeat == 0 else nullcontext():  # the first step is not timed
            losses = losses_of(model, texts)
        losses.mean().backward()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
        model.zero_grad()
    memory = torch.cuda.max_memory_allocated() if on_gpu else sum(saved.values())
    longest = max(map(len, texts))
    computed = len(texts) * longest if losses_of is padded_losses else sum(map(len, texts))
    return Step(losses.tolist(), computed, statistics.median(times[1:]), memory / 1e6)


def draw(path: Path, steps: dict[str, Step], real: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), dpi=110, layout="constrained")
    bars, dots = figure.subplots(1, 2)
    bars.bar(list(steps), [real] * len(steps), label="read by somebody")
    bars.bar(list(steps), [step.computed - real for step in steps.values()], bottom=real, label="padding", alpha=0.5)
    for place, step in enumerate(steps.values()):
        bars.text(place, step.computed, f"{step.milliseconds:.0f} ms", ha="center", va="bottom")
    bars.set(ylabel="tokens computed", title="What a training step computes, and how long it takes")
    bars.legend(frameon=False)
    padded, packed = steps["padded, sdpa"].losses, steps["packed, dmattn"].losses
    dots.plot([min(padded), max(padded)], [min(padded), max(padded)], color="0.6")
    dots.scatter(padded, packed)
    dots.set(xlabel="padded, sdpa", ylabel="packed, dmattn", title="Loss of each document, nats per byte")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, draw; return the numbers of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short documents and a tiny model")
    parser.add_argument("--out", type=Path, default=Path("examples_output"), help="folder of the picture")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    name = register()

    if device.type == "cuda" and not options.quick:
        lengths, hidden, layers, heads = [4096, 512, 2048, 700, 900, 1500, 600, 3000, 512, 1024, 800], 2048, 6, 16
    elif options.quick:
        lengths, hidden, layers, heads = [96, 20, 40, 17], 32, 1, 2
    else:
        lengths, hidden, layers, heads = [768, 100, 400, 150, 200, 300, 120, 600], 128, 4, 4
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    texts = [text.to(device) for text in documents(lengths)]
    real = sum(lengths)

    steps = {}
    ways = (("padded", "sdpa", padded_losses), ("padded", name, padded_losses), ("packed", name, packed_losses))
    for layout, attention, losses_of in ways:
        model = make_model(sizes, attention, device)
        steps[f"{layout}, {attention}"] = measure(losses_of, model, texts, 1 if options.quick else 3)
    wanted = steps["padded, sdpa"].losses
    difference = max(abs(x - y) for step in steps.values() for x, y in zip(step.losses, wanted))

    rows = [
        (
            way,
            str(step.computed),
            f"{real / step.computed:.0%}",
            f"{step.milliseconds:.1f}",
            f"{1e3 * real / step.milliseconds:.0f}",
            f"{step.megabytes:.1f}",
        )
        for way, step in steps.items()
    ]
    memory = "peak MB" if device.type == "cuda" else "MB kept for backward"
    columns = ("way", "tokens computed", "of them real", "ms a step", "real tokens / s", memory)
    print_table(f"{len(texts)} documents, {real} tokens", columns, rows)
    print()
    print(f"losses of a document differ by {difference:.1e} nats at most")
    draw(options.out / "packed_documents.png", steps, real)
    print(f"picture: {options.out / 'packed_documents.png'}")
    return {"difference": difference, "real": real, "steps": {way: step._asdict() for way, step in steps.items()}}


if __name__ == "__main__":
    main()
