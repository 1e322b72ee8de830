"""Times training steps of models of transformers, with "sdpa" and "eager" as peers: `python -m benchmarks.training`.

Weights are random, in bf16; a step is forward, loss and backward, without an optimizer. Several steps are timed in a
row, so that the host can run ahead of the GPU; the table also has the time of the host. Exit status 1 if the first loss
of an implementation differs from the loss of "sdpa" by more than bf16 explains.

    python -m benchmarks.training                            # a GPU, some minutes
    python -m benchmarks.training --models t5 --steps 12
    python -m benchmarks.training --quick                    # tiny models, on a CPU too
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import flash_dmattn
from flash_dmattn.integrations.transformers import register

Inputs = dict[str, Tensor]
WARM, GROUPS = 3, 3  # steps before timing, and groups of timed steps, whose median counts
LOSS_ERROR = 2e-2


class Batch(NamedTuple):
    """A model and the data that it trains on.

    Attributes:
        name: of the row.
        model: "llama", "t5" or "swin".
        inputs: makes the arguments of a step on a device.
        implementations: what is timed, "sdpa" first.
        dropout: of T5.
    """

    name: str
    model: str
    inputs: Callable[[torch.device], Inputs]
    implementations: tuple[str, ...] = ("sdpa", "dmattn")
    dropout: float = 0.0


class Sizes(NamedTuple):
    """Models and batches: lengths of text are multiplied by `scale`."""

    llama: dict[str, int]
    t5: dict[str, int]
    swin: dict[str, Any]
    scale: float
    images: int


FULL = Sizes(
    dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4),
    dict(d_model=768, d_ff=2048, num_layers=6, num_decoder_layers=6, num_heads=12, d_kv=64),
    {},
    1.0,
    64,
)
QUICK = Sizes(
    dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2),
    dict(d_model=64, d_ff=64, num_layers=1, num_decoder_layers=1, num_heads=4, d_kv=16),
    dict(image_size=32, patch_size=2, window_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4]),
    1 / 64,
    2,
)
VOCABULARY = 32128


def tokens(batch: int, length: int, device: torch.device) -> Tensor:
    """(batch, length) random tokens, the same in every run."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator).to(device)


def spread(least: int, most: int, count: int) -> list[int]:
    """Lengths at equal distances, the longest one first."""
    return [most - (most - least) * index // max(count - 1, 1) for index in range(count)]


def padded(lengths: Sequence[int], device: torch.device, **more: str) -> Inputs:
    """Rows of such lengths, padded on the right; `more` names further inputs that are the same tokens."""
    x = tokens(len(lengths), max(lengths), device)
    used = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    labels = torch.where(used, x, -100)
    return {"input_ids": x, "attention_mask": used.long(), "labels": labels, **{name: x for name in more}}


def full(batch: int, length: int, device: torch.device) -> Inputs:
    """Rows without padding."""
    x = tokens(batch, length, device)
    return {"input_ids": x, "labels": x}


def documents(lengths: Sequence[int], device: torch.device) -> Inputs:
    """One row of documents, told apart by position ids alone."""
    x = tokens(1, sum(lengths), device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    return {"input_ids": x, "labels": x, "position_ids": positions}


def images(count: int, size: int, device: torch.device) -> Inputs:
    """Return random pictures with random labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, size, size, generator=generator).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"pixel_values": pixels.to(dtype), "labels": torch.arange(count, device=device) % 2}


def batches(sizes: Sizes) -> Iterator[Batch]:
    """Yield every row of the table."""

    def n(length: int) -> int:
        return max(int(length * sizes.scale), 4)

    three = ("sdpa", "dmattn", "eager")
    some = [n(x) for x in (4096, 3072, 2048, 2048, 1536, 1024, 1024, 768, 512, 512, 512)]
    size = sizes.swin.get("image_size", 224)
    yield Batch("4 of 2048", "llama", lambda device: full(4, n(2048), device))
    yield Batch("1 of 8192", "llama", lambda device: full(1, n(8192), device))
    yield Batch("8 of 512 to 2048, padded", "llama", lambda device: padded(spread(n(512), n(2048), 8), device))
    yield Batch("11 documents of 512 to 4096, packed", "llama", lambda device: documents(some, device))
    yield Batch("32 of 512", "t5", lambda device: full(32, n(512), device), three)
    yield Batch("32 of 128 to 512, padded", "t5", lambda device: padded(spread(n(128), n(512), 32), device), three)
    yield Batch("8 of 2048", "t5", lambda device: full(8, n(2048), device), three)
    yield Batch("8 of 512 to 2048, padded", "t5", lambda device: padded(spread(n(512), n(2048), 8), device), three)
    yield Batch("32 of 512, dropout 0.1", "t5", lambda device: full(32, n(512), device), three, 0.1)
    for count in (sizes.images, 4 * sizes.images):
        yield Batch(f"{count} images", "swin", partial(images, count, size))


def make_model(batch: Batch, sizes: Sizes, implementation: str, device: torch.device) -> Any:
    """Return the model of a row in training mode, with the same weights for every implementation."""
    torch.manual_seed(0)
    config: Any
    if batch.model == "llama":
        config = transformers.LlamaConfig(**sizes.llama, vocab_size=VOCABULARY, max_position_embeddings=16384)
        config.use_cache = False
        kind: Any = transformers.AutoModelForCausalLM
    elif batch.model == "t5":
        config = transformers.T5Config(**sizes.t5, vocab_size=VOCABULARY, dropout_rate=batch.dropout)
        config.use_cache, config.decoder_start_token_id = False, 0
        kind = transformers.AutoModelForSeq2SeqLM
    else:
        config = transformers.SwinConfig(**sizes.swin, drop_path_rate=0.0)
        kind = transformers.AutoModelForImageClassification
    model = kind.from_config(config, attn_implementation=implementation)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).train()


class Result(NamedTuple):
    """The results of one implementation: times of a step and of the host, peak memory, first loss, our backends."""

    milliseconds: float
    host: float
    gigabytes: float
    loss: float
    backends: str


def measure(model: Any, inputs: Inputs, steps: int) -> Result:
    """Time steps of a model."""
    on_gpu = inputs["labels"].device.type == "cuda"

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(**inputs).loss
        loss.backward()
        return loss.detach()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    decisions: list[Any] = []
    with flash_dmattn.config(record=decisions):
        loss = step().item()
    backends = sorted({f"{d.forward}/{d.backward}" for d in decisions})
    for _ in range(WARM):
        step()
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, hosts = [], []
    for _ in range(GROUPS):
        started = time.perf_counter()
        for _ in range(steps):
            step()
        hosts.append(1e3 * (time.perf_counter() - started) / steps)
        wait()
        times.append(1e3 * (time.perf_counter() - started) / steps)
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return Result(statistics.median(times), statistics.median(hosts), memory, loss, " ".join(backends) or "-")


def run(batch: Batch, sizes: Sizes, device: torch.device, steps: int) -> bool:
    """Time and print one row of each implementation; whether all losses are alike."""
    inputs, first, agreed = batch.inputs(device), None, True
    for implementation in batch.implementations:
        model = make_model(batch, sizes, implementation, device)
        measured = measure(model, inputs, steps)
        del model
        gc.collect()
        first = first or measured
        # Dropout draws other numbers for each of them.
        apart = abs(measured.loss - first.loss) / abs(first.loss) > LOSS_ERROR * (5 if batch.dropout else 1)
        agreed &= not apart
        print(
            f"| {batch.model} | {batch.name} | {implementation} | {measured.milliseconds:.1f} | {measured.host:.1f} | "
            f"{measured.gigabytes:.1f} | {measured.loss:.4f}{' WRONG' if apart else ''} | {measured.backends} |",
            flush=True,
        )
    return agreed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every row of the command line; return 1 where losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("llama", "t5", "swin"), default=("llama", "t5", "swin"))
    parser.add_argument("--match", default="", help="only batches with this in their name")
    parser.add_argument("--steps", type=int, default=8, help="steps of each of three timed runs")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cpu" and not args.quick:
        parser.error("on a CPU only --quick ends in time")
    register()
    sizes = QUICK if args.quick else FULL
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; ms a step, GiB at the peak")
    print("| model | batch | attention | step | host | memory | first loss | our backends |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    chosen = [x for x in batches(sizes) if x.model in args.models and args.match in x.name]
    agreed = [run(batch, sizes, device, args.steps) for batch in chosen]
    if not all(agreed):
        print("losses marked WRONG differ from those of sdpa by more than bf16 explains")
    return 0 if chosen and all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
