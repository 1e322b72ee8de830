"""The demo, `python -m flash_dmattn demo`: it trains a small language model on real text, and checks its gradients."""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

import flash_dmattn
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.problem import device_arch, dtype_name
from flash_dmattn.tools.verify import FLOOR, RATIO, Outcome, Sample

from .byte_model import (
    RESULTS,
    ByteLanguageModel,
    Corpus,
    History,
    ModelConfig,
    TrainingConfig,
    capture_call,
    even_windows,
    expected_seconds,
    load_corpus,
    train,
    training_call,
    unigram_entropy,
)
from .draw_mask import show

NATS_PER_BIT = math.log(2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Nats by which the held-out loss must end under the unigram entropy, in a run of the default length and a quick one.
MARGIN, QUICK_MARGIN = 0.7, 0.1
PICTURED_LAYER, PICTURED_HEAD = 1, 0
PROGRESS_LINES = 10  # of each training
# As in draw_mask.py: blue and orange stay apart for every common form of colour blindness, and in grey.
BLUE, ORANGE, GREY = (0.12, 0.38, 0.66), (0.80, 0.36, 0.02), (0.4, 0.4, 0.4)

HOPPER = "sm_90"


class Sizes(NamedTuple):
    """Defaults of the command line: the batches, the masks, the dtype and the width of the model.

    The number of layers and of steps, and the width of the MLP, are smaller in a quick run.
    """

    batch_size: int
    context: int
    keep: int
    dtype: str
    hidden_size: int
    mlp_size: int
    quick_mlp_size: int
    steps: int
    quick_steps: int


# Two minutes and a half on one CPU core, so that `make demo` ends within four on a slow machine, downloads included.
# Other GPUs train it too: their kernels take every call of it in fp32.
SMALL = Sizes(4, 256, 64, "fp32", 128, 512, 256, 240, 60)
# The rules of cuda ask for 16 bits, and of calls without a mask (the model with full attention) for heads wider than
# 32 and 512 tiles of 128 queries: 16 texts x 4 heads x 8 tiles. A quarter of the keys is kept, as in the small sizes.
# A quick run has 180 steps: from some seeds, by every backend, the wider model still is at the unigram entropy after
# 60 steps (seed 0: held-out 3.05 of 3.14 nats per byte). After 120 it is below (2.56 to 3.02).
ON_HOPPER = Sizes(16, 1024, 256, "bf16", 256, 1024, 512, 400, 180)


def sizes_for(device: torch.device) -> Sizes:
    """Return the sizes of a run on a device.

    >>> sizes_for(torch.device("cpu")).context
    256
    """
    return ON_HOPPER if device_arch(device) == HOPPER else SMALL


class TrainedPair(NamedTuple):
    """Both models after training, and their losses."""

    dynamic: ByteLanguageModel
    full: ByteLanguageModel
    dynamic_history: History
    full_history: History


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the demo's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_dmattn demo",
        description="Train a small byte-level language model with dynamic-mask attention on the Python standard "
        "library's sources, beside the same model with full attention, and check the gradients of a real batch.",
    )
    add = parser.add_argument
    add(
        "--steps",
        type=_positive,
        help=f"training steps per model (default: {SMALL.steps}, on a Hopper GPU {ON_HOPPER.steps}; "
        f"with --quick {SMALL.quick_steps} and {ON_HOPPER.quick_steps})",
    )
    # Without these arguments `sizes_for` decides by the device.
    for name, field, text in (
        ("--batch-size", "batch_size", "texts per step"),
        ("--context", "context", "bytes per text"),
        ("--keep", "keep", "keys that each query keeps under the dynamic mask"),
    ):
        small, on_hopper = getattr(SMALL, field), getattr(ON_HOPPER, field)
        add(name, type=_positive, help=f"{text} (default: {small}, on a Hopper GPU {on_hopper})")
    add("--local-window", type=_positive, help="nearest keys kept besides, whatever their score (default: none)")
    add("--seed", type=int, default=0, help="of the weights, the batches and the sample (default: 0)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, help=f"device to train on (default: {device})")
    # Threads spin for one another beside other work. Both models, 40 steps, 2 cores: with two threads 6 s on an idle
    # machine and over 100 s on a busy one, with one thread 11 s on either.
    add("--threads", type=_positive, default=1, help="threads of PyTorch; more for an idle machine (default: 1)")
    text = f"bf16 trains under autocast (default: {SMALL.dtype}, on a Hopper GPU {ON_HOPPER.dtype})"
    add("--dtype", choices=tuple(DTYPES), help=text)
    add("--backend", default="auto", help="attention backend to train with (default: auto)")
    folder = Path("demo_output")
    add("--out-dir", type=Path, default=folder, help=f"folder for the picture; made if missing (default: {folder})")
    add("--quick", action="store_true", help="a smaller model and few steps: every part runs, little is learned")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status.

    Args:
        argv: the words after ``python -m flash_dmattn demo``; sys.argv's by default.

    Sets the number of threads of PyTorch in this process.

    Returns:
        0; or 1 if a gradient is outside its limit or the held-out loss did not end well under the unigram entropy.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    torch.set_num_threads(arguments.threads)
    try:
        device = torch.device(arguments.device)
        torch.zeros(1, device=device).item()
        with flash_dmattn.config(backend=arguments.backend):
            pass
    except (RuntimeError, AssertionError, ValueError) as error:  # torch built without CUDA asserts that it has it
        name = "backend" if isinstance(error, ValueError) else "device"
        parser.error(f"argument --{name}: {str(error).splitlines()[0]}")
    sizes = sizes_for(device)
    dtype = DTYPES[arguments.dtype or sizes.dtype]
    keep, batch_size = arguments.keep or sizes.keep, arguments.batch_size or sizes.batch_size
    line(_versions(device))

    corpus = load_corpus()
    context, longest = arguments.context or sizes.context, len(corpus.held_out) - 1
    if context > longest:
        parser.error(f"argument --context: {context} is more than the {longest} bytes to test on")
    entropy = _show_corpus(corpus)
    training = TrainingConfig(
        steps=arguments.steps or (sizes.quick_steps if arguments.quick else sizes.steps),
        batch_size=batch_size,
        context=context,
        seed=arguments.seed,
        evaluations=2 if arguments.quick else 10,
        evaluation_windows=max(batch_size, 8 if arguments.quick else 32),
        dtype=dtype,
    )
    config = ModelConfig(
        hidden_size=sizes.hidden_size,
        num_layers=2 if arguments.quick else 4,
        mlp_size=sizes.quick_mlp_size if arguments.quick else sizes.mlp_size,
        keep_window_size=keep,
        local_window_size=arguments.local_window or 0,
        backend=arguments.backend,
    )
    pair = train_both(corpus, config, training, device)
    _show_losses(pair)

    windows = even_windows(corpus.held_out, training.batch_size, training.context + 1).to(device)
    call = capture_call(pair.dynamic, windows, PICTURED_LAYER, dtype)
    heading(f"The decision for the attention of layer {PICTURED_LAYER} of the trained model")
    line(str(call.explain()))
    # The 16-bit kernels of a GPU serve no fp32 call: there the call is also checked as they would get it.
    dtypes = [torch.float32] if dtype == torch.float32 and device.type == "cpu" else [torch.float32, torch.bfloat16]
    checked = [row for x in dtypes for row in check_call(call, x)]
    _show_checks(checked)

    _show_sample(pair.dynamic, corpus, arguments.seed)
    mask = call.flags["mask"]
    if mask is None:
        line(f"\nNo picture: --keep {keep} keeps every key of {training.context} bytes.")
    else:
        _save_picture(arguments.out_dir, pair, entropy, mask, keep)

    failures = find_failures(checked, pair.dynamic_history, entropy, QUICK_MARGIN if arguments.quick else MARGIN)
    heading(f"{'FAILED' if failures else 'Done'} in {time.perf_counter() - started:.0f} s")
    for failure in failures:
        line(f"  {failure}")
    return 1 if failures else 0


def train_both(corpus: Corpus, config: ModelConfig, training: TrainingConfig, device: torch.device) -> TrainedPair:
    """Train the model with dynamic-mask attention and with full attention: same start, same batches, same steps."""
    torch.manual_seed(training.seed)
    dynamic = ByteLanguageModel(config).to(device)
    full = ByteLanguageModel(replace(config, keep_window_size=None)).to(device)
    full.load_state_dict({name: dynamic.state_dict()[name] for name in full.state_dict()})
    parameters = sum(p.numel() for p in dynamic.parameters())
    heading(
        f"Training: {parameters:,} parameters, {training.steps} steps of {training.batch_size} x {training.context} "
        f"bytes, {dtype_name(training.dtype)}, backend {config.backend}"
    )
    seconds = sum(expected_seconds(model, corpus, training) for model in (dynamic, full))
    line(f"  both models together take about {_duration(seconds)} here; the checks that follow take less")
    histories = []
    for title, model in ((f"dynamic mask, {config.keep_window_size} keys", dynamic), ("full attention", full)):
        chosen = training_call(model, training)
        line(f"  {title}: attention by {chosen.forward} forward, {chosen.backward} backward")
        show_step = partial(_show_step, title, training.steps, time.perf_counter())
        histories.append(train(model, corpus, training, show_step))
    return TrainedPair(dynamic, full, *histories)


def check_call(call: Sample, dtype: torch.dtype) -> list[Outcome]:
    """Compare every backend with the formula, q, k, v and dout in a dtype; the first outcome is the yardstick."""
    tensors = {name: x if name == "bias" else x.to(dtype) for name, x in call.tensors.items()}
    call = Sample(call.name, tensors, call.flags, call.results, call.dout.to(dtype))
    # The reference is the formula again, under its name as a backend.
    backends = [name for name in BACKENDS if name != "reference"]
    return [call.yardstick, *(call.check(name, may_be_part=False) for name in backends)]


def find_failures(checked: Sequence[Outcome], history: History, entropy: float, margin: float) -> list[str]:
    """Say why the demo fails, one sentence each: gradients outside their limit, a model that did not learn."""
    failures = [
        f"{row.backend} in {row.dtype}: error of {name} is {row.errors[name]:.1e}, above its limit "
        f"{row.limits[name]:.1e}"
        for row in checked
        for name in row.failed
    ]
    failures += [f"{row.backend} in {row.dtype}: {row.exception}" for row in checked if row.exception is not None]
    loss = history.held_out_loss[-1]
    if not loss <= entropy - margin:
        failures.append(
            f"the held-out loss ends at {loss:.3f} nats per byte; it must end {margin} under the byte-unigram entropy "
            f"{entropy:.3f}: train for more steps"
        )
    return failures


def _show_corpus(corpus: Corpus) -> float:
    rows = []
    for name, files, text in (
        ("training", corpus.train_files, corpus.train),
        ("held-out", corpus.held_out_files, corpus.held_out),
    ):
        nats = unigram_entropy(text)
        rows.append((name, str(len(files)), f"{len(text):,}", f"{nats:.3f}", f"{nats / NATS_PER_BIT:.3f}"))
    print_table(
        "Text: the standard library of this Python; byte-unigram entropy",
        ("text", "files", "bytes", "nats/byte", "bits/byte"),
        rows,
    )
    return unigram_entropy(corpus.held_out)


def _show_losses(pair: TrainedPair) -> None:
    dynamic, full = pair.dynamic_history, pair.full_history
    rows = [
        (str(step), f"{a:.3f}", f"{b:.3f}", f"{a / NATS_PER_BIT:.3f}", f"{b / NATS_PER_BIT:.3f}")
        for step, a, b in zip(dynamic.held_out_steps, dynamic.held_out_loss, full.held_out_loss, strict=True)
    ]
    rows.append(("seconds", f"{dynamic.seconds:.1f}", f"{full.seconds:.1f}", "", ""))
    print_table(
        "Loss on held-out text: nats per byte, then bits per byte",
        ("step", "dynamic mask", "full attention", "dynamic (bits)", "full (bits)"),
        rows,
    )


def _show_checks(checked: Sequence[Outcome]) -> None:
    rows = []
    for row in checked:
        errors = [f"{row.errors[name]:.1e}" if row.errors else "" for name in RESULTS]
        if row.backend == "formula":
            result = "yardstick"
        elif row.reasons and not row.errors:
            # "device is cpu", without what follows and what to do: `explain` says that.
            result = f"cannot train this: {row.reasons[0].text.partition(';')[0]}"
        else:
            result = "pass" if row.passed else f"FAIL: {row.exception or ', '.join(row.failed)}"
        rows.append((row.backend, row.dtype, *errors, result))
    print_table(
        f"Gradient check of this batch: ||x - x64|| / ||x64||, at most {RATIO} yardsticks + {FLOOR:.0e}",
        ("backend", "dtype", *RESULTS, "result"),
        rows,
    )


def _show_sample(model: ByteLanguageModel, corpus: Corpus, seed: int) -> None:
    prompt = b"    def __init__(self, "
    started = time.perf_counter()
    written = model.generate(prompt, 200, temperature=0.5, generator=torch.Generator().manual_seed(seed))
    rate = len(written) / (time.perf_counter() - started)
    heading(f"A continuation, decoded from the KV cache at {rate:.0f} bytes per second")
    for text in (prompt + written).decode("utf-8", errors="replace").rstrip().splitlines():
        line(f"  | {text.rstrip()}")


def _save_picture(out_dir: Path, pair: TrainedPair, entropy: float, mask: torch.Tensor, keep: int) -> None:
    """Draw the loss curves of both models, and the mask of one head for the first text of a real batch."""
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        line(f"\nNo picture: matplotlib cannot be imported ({error}); pip install matplotlib")
        return
    figure = Figure(figsize=(14, 6.4), dpi=110, layout="constrained")
    curves, tiles = figure.subplots(1, 2, width_ratios=(1.15, 1))
    dynamic, full = pair.dynamic_history, pair.full_history
    for history, name, color in (
        (dynamic, f"dynamic mask, {keep} keys per query", ORANGE),
        (full, "full attention", BLUE),
    ):
        curves.plot(range(1, len(history.train_loss) + 1), history.train_loss, color=color, alpha=0.2, linewidth=0.8)
        label = f"{name}: ends at {history.held_out_loss[-1]:.3f} nats"
        points = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.8, "label": label}
        curves.plot(history.held_out_steps, history.held_out_loss, **points)
    curves.axhline(entropy, color=GREY, linestyle="--", label=f"byte-unigram entropy: {entropy:.3f} nats")
    # The untrained model starts at ln 256 = 5.5 nats; what matters happens far below.
    lowest = min(*dynamic.held_out_loss, *full.held_out_loss, *dynamic.train_loss, *full.train_loss)
    curves.set(xlabel="training step", ylabel="loss (nats per byte)", xlim=(0, len(dynamic.train_loss)))
    curves.set_ylim(max(0.0, lowest - 0.1), entropy + 0.6)
    curves.set_title("Loss on held-out text (dots) and on each training batch (thin)", fontsize=11)
    curves.grid(alpha=0.25)
    curves.legend(frameon=False, fontsize=10)
    title = f"Keys that key-value head {PICTURED_HEAD} of layer {PICTURED_LAYER} keeps, one held-out text"
    show(mask, block_size=16, head=PICTURED_HEAD, ax=tiles, title=title)
    path = out_dir / "demo.png"
    figure.savefig(path)
    line(f"\nPicture of the loss curves and of a learned mask: {path}")


def line(text: str = "") -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


def heading(text: str) -> None:
    """Print a line after an empty one."""
    line(f"\n{text}")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column and columns of text to the left, numbers to the right.

    Args:
        title: heading above it.
        columns: names; "why", "result" and "dtype" are columns of text.
        rows: as many cells as columns, each.

    >>> print_table("Sizes", ("name", "bytes"), [("a", "1"), ("bc", "20")])
    <BLANKLINE>
    Sizes
      name  bytes
      ----  -----
      a         1
      bc       20
    """
    heading(title)
    widths = [max(len(row[c]) for row in (columns, *rows)) for c in range(len(columns))]
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = (
            cell.ljust(width) if c == 0 or name in ("why", "result", "dtype") else cell.rjust(width)
            for c, (name, cell, width) in enumerate(zip(columns, row, widths, strict=True))
        )
        line("  " + "  ".join(cells).rstrip())


def _show_step(title: str, steps: int, started: float, step: int, loss: float, held_out: float) -> None:
    if step % max(1, steps // PROGRESS_LINES) == 0 or step == steps:
        losses, seconds = f"loss {loss:.3f}  held-out {held_out:.3f}", time.perf_counter() - started
        line(f"  {title:<22}  {step:>{len(str(steps))}}/{steps}  {losses}  {seconds:5.1f} s")


def _duration(seconds: float) -> str:
    """Round a time as people say it.

    >>> _duration(42.3), _duration(200)
    ('40 s', '3.5 min')
    """
    return f"{max(5, 5 * round(seconds / 5))} s" if seconds < 100 else f"{round(seconds / 30) / 2:g} min"


def _versions(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"threads: {torch.get_num_threads()}"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return (
        f"flash_dmattn {flash_dmattn.__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"triton {triton}; device {device} ({name})"
    )


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a positive number")
    return value
