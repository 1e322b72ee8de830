"""The demo, `python -m flash_dmattn demo`: two tasks that need a learned bias or mask, and a check of gradients."""

from __future__ import annotations

import argparse
import copy
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_dmattn
from flash_dmattn import BackendChoice
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import PreparedMask
from flash_dmattn.problem import device_arch
from flash_dmattn.tools.verify import FLOOR, RATIO, Outcome, Sample

RESULTS = ("out", "dq", "dk", "dv", "dbias")  # of the gradient check
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_FACTS, NUM_BITS, NUM_QUESTIONS = 16, 8, 64
NOISE, FACT, QUESTION = 0, 1, 2
CHECKED_TOKENS = 1024  # the formula in fp64 keeps all scores
LAST = 8  # steps that the result of a training is the mean of
# As in draw_mask.py: blue and orange stay apart for every common form of colour blindness, and in grey.
BLUE, ORANGE, GREY = (0.12, 0.38, 0.66), (0.80, 0.36, 0.02), (0.4, 0.4, 0.4)
BARS = "▁▂▃▄▅▆▇█"

HOPPER = "sm_90"


class Sizes(NamedTuple):
    """The sizes of both tasks: of a text and of a graph, of the layer, and how long it trains."""

    steps: int
    batch_size: int
    tokens: int
    keep: int
    nodes: int
    width: int
    num_heads: int
    dtype: str


QUICK = Sizes(50, 2, 2048, 64, 32, 64, 4, "fp32")
SMALL = Sizes(80, 2, 4096, 128, 48, 64, 4, "fp32")
ON_HOPPER = Sizes(160, 4, 16384, 512, 128, 128, 4, "bf16")  # the rules of cuda ask for 16 bits


def sizes_for(device: torch.device, quick: bool = False) -> Sizes:
    """Return the sizes of a run on a device.

    >>> sizes_for(torch.device("cpu")).tokens
    4096
    """
    if device_arch(device) == HOPPER:
        return ON_HOPPER._replace(tokens=8192, steps=100) if quick else ON_HOPPER
    return QUICK if quick else SMALL


class Layer(nn.Module):
    """One attention layer; `arguments` has what it attends with, `answer` makes logits of what it returns."""

    learning_rate = 1e-2

    def __init__(self, sizes: Sizes, backend: BackendChoice) -> None:
        super().__init__()
        self.sizes, self.backend = sizes, backend
        self.norm = nn.RMSNorm(sizes.width)
        self.bias_proj = nn.Linear(sizes.width, sizes.num_heads)
        self.o_proj = nn.Linear(sizes.width, sizes.width)

    def batch(self, count: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Draw inputs and the bits to predict; no two batches are alike."""
        raise NotImplementedError

    def arguments(self, *inputs: Tensor) -> dict[str, Any]:
        """Return the arguments of `attention`."""
        raise NotImplementedError

    def answer(self, out: Tensor, *inputs: Tensor) -> Tensor:
        """Return a logit for each bit."""
        raise NotImplementedError

    def forward(self, *inputs: Tensor) -> Tensor:
        out = flash_dmattn.attention(**self.arguments(*inputs), backend=self.backend)
        return self.answer(out, *inputs)

    def heads(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        """Split the last dim into `count` tensors of heads (..., H, D)."""
        return x.unflatten(-1, (count, self.sizes.num_heads, -1)).unbind(-3)


class CommonNeighbours(Layer):
    """Tell for each pair (i, j) of nodes of a graph whether a third node is a neighbour of both.

    This is triangle attention: row i of the pairs attends within itself, and the bias of keys k for the query j is made
    of the pair (j, k).
    """

    learning_rate = 6e-3

    def __init__(self, sizes: Sizes, backend: BackendChoice, *, has_bias: bool) -> None:
        sizes = sizes._replace(width=sizes.width // 2)
        super().__init__(sizes, backend)
        self.has_bias = has_bias
        self.embedding = nn.Embedding(2, sizes.width)
        self.qkv_proj = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.head = nn.Sequential(
            nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.width), nn.ReLU(), nn.Linear(sizes.width, 1)
        )

    def batch(self, count: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        n = self.sizes.nodes
        one_way = torch.rand(count, n, n, generator=generator) < 0.5 * n**-0.5  # half of the answers are yes
        edges = (one_way | one_way.mT) & ~torch.eye(n, dtype=torch.bool)
        return (edges,), (edges.float() @ edges.float() > 0).float()

    def arguments(self, *inputs: Tensor) -> dict[str, Any]:
        x = self.norm(self.embedding(inputs[0].int()))
        q, k, v = self.heads(self.qkv_proj(x), 3)
        bias = self.bias_proj(x).permute(0, 3, 1, 2).unsqueeze(1).contiguous()  # (B, 1, H, N, N), shared by all rows
        return {"q": q, "k": k, "v": v, "mask": None, "bias": bias if self.has_bias else None}

    def answer(self, out: Tensor, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(inputs[0].int()) + self.o_proj(out.flatten(-2)))
        return logits.squeeze(-1)


class Recall(Layer):
    """Answer questions at the end of a long text about facts that lie anywhere before, among noise.

    A fact is a token with a name and bits; a question is a token with a name. `sees` says which keys a query has:
    "top-k" keeps those of the best learned score, "window" as many of the nearest, and "all" every earlier key.
    """

    def __init__(self, sizes: Sizes, backend: BackendChoice, *, sees: str) -> None:
        super().__init__(sizes, backend)
        self.sees = sees
        self.kind = nn.Embedding(3, sizes.width)
        self.name = nn.Embedding(NUM_FACTS + 1, sizes.width)  # the last is that of noise
        self.bits = nn.Linear(NUM_BITS, sizes.width)
        self.qv_proj = nn.Linear(sizes.width, 2 * sizes.width, bias=False)  # keys are queries: equal names attract
        self.head = nn.Linear(sizes.width, NUM_BITS)

    def batch(self, count: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        length = self.sizes.tokens
        end = length * 3 // 4  # facts are before, questions behind

        def places(begin: int, stop: int, number: int) -> Tensor:
            return begin + torch.rand(count, stop - begin, generator=generator).argsort(-1)[:, :number]

        kinds, names = torch.full((count, length), NOISE), torch.full((count, length), NUM_FACTS)
        bits = torch.randint(2, (count, length, NUM_BITS), generator=generator).float() * 2 - 1
        facts, asked = places(0, end, NUM_FACTS), places(end, length, NUM_QUESTIONS)
        about = torch.randint(NUM_FACTS, asked.shape, generator=generator)
        rows = torch.arange(count)[:, None]
        kinds[rows, facts], names[rows, facts] = FACT, torch.arange(NUM_FACTS)
        kinds[rows, asked], names[rows, asked] = QUESTION, about
        bits[rows, asked] = 0.0
        return (kinds, names, bits, asked), (bits[rows, facts[rows, about]] > 0).float()

    def arguments(self, *inputs: Tensor) -> dict[str, Any]:
        kinds, names, bits, _ = inputs
        x = self.norm(self.kind(kinds) + self.name(names) + self.bits(bits))
        q, v = self.heads(self.qv_proj(x), 2)
        call: dict[str, Any] = {"q": q, "k": q, "v": v, "mask": None, "bias": None}
        call |= {"is_causal": True, "softmax_scale": 1.0}
        if self.sees == "window":
            call["window_size"] = (self.sizes.keep - 1, 0)
        elif self.sees == "top-k":
            scores = self.bias_proj(x).mT.unsqueeze(2).contiguous()  # (B, H, 1, L), one for each key
            call["bias"] = scores  # its gradient is how the choice is learned
            call["mask"] = PreparedMask.from_topk(scores, self.sizes.keep, is_causal=True)
        return call

    def answer(self, out: Tensor, *inputs: Tensor) -> Tensor:
        asked = inputs[3].unsqueeze(-1)
        logits: Tensor = self.head(self.o_proj(out.flatten(2)).gather(1, asked.expand(-1, -1, self.sizes.width)))
        return logits


@dataclass
class Training:
    """A layer, and by step the loss, the part of the bits that is right, and the seconds since the start."""

    title: str
    layer: Layer
    losses: list[float] = field(default_factory=list)
    rights: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, steps: int, seed: int, show: Callable[[Training], None] = lambda training: None) -> None:
        """Train by AdamW, with a short warm-up, and a learning rate that falls to a tenth at the end."""
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(self.layer.parameters(), lr=self.layer.learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
        started = time.perf_counter()
        for _ in range(steps):
            loss, logits, target = self.step(generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            self.losses.append(loss.item())
            self.rights.append(((logits > 0) == (target > 0)).float().mean().item())
            self.seconds.append(time.perf_counter() - started)
            show(self)

    def step(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of a new batch, its logits and its bits."""
        sizes, device = self.layer.sizes, self.layer.o_proj.weight.device
        inputs, target = self.layer.batch(sizes.batch_size, generator)
        target = target.to(device)
        dtype = DTYPES[sizes.dtype]
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = self.layer(*(x.to(device) for x in inputs))
        return F.binary_cross_entropy_with_logits(logits.float(), target), logits, target

    def expected_seconds(self, steps: int) -> float:
        """Return how long `run` will take, from three steps of a copy; the first is not counted."""
        tried = Training(self.title, copy.deepcopy(self.layer))
        tried.run(3, seed=0)
        return (tried.seconds[2] - tried.seconds[0]) / 2 * steps

    @property
    def loss(self) -> float:
        """The mean of the last steps. All batches are new, so it is a loss of unseen data."""
        return sum(self.losses[-LAST:]) / len(self.losses[-LAST:])

    @property
    def right(self) -> float:
        """The part of the bits that is right in the last steps."""
        return sum(self.rights[-LAST:]) / len(self.rights[-LAST:])


class Task(NamedTuple):
    """A task, how it is told, and its trainings: that with this library's feature first."""

    title: str
    why: str
    trainings: tuple[Training, ...]


def make_tasks(sizes: Sizes, backend: BackendChoice, device: torch.device, seed: int) -> tuple[Task, Task]:
    """Make both tasks; the layers of one start with the same weights."""

    def training(title: str, make: Callable[[], Layer]) -> Training:
        torch.manual_seed(seed)
        return Training(title, make().to(device))

    pairs = Task(
        f"Pairs: do two of {sizes.nodes} nodes of a graph have a common neighbour? (triangle attention)",
        "Row i of the pairs has the neighbours of node i. Only a bias for each pair (j, k) says which of them are\n"
        "  neighbours of node j, and only its gradient teaches it. Kernels without either end like the second line.",
        (
            training("pair bias, learned", partial(CommonNeighbours, sizes, backend, has_bias=True)),
            training("no bias", partial(CommonNeighbours, sizes, backend, has_bias=False)),
        ),
    )
    recall = Task(
        f"Recall: {NUM_QUESTIONS} questions about {NUM_FACTS} facts, which lie anywhere in {sizes.tokens} tokens",
        f"Top-k and window compute {sizes.keep} keys for each query. The window loses facts that are farther away.\n"
        "  Top-k keeps the keys of the best learned scores, wherever they are; as a bias, scores get a gradient.\n"
        "  All keys hold every fact, too, among all of the noise: a step takes longer, and more steps are needed.",
        (
            training(f"top-k, {sizes.keep} keys", partial(Recall, sizes, backend, sees="top-k")),
            training(f"window, {sizes.keep} keys", partial(Recall, sizes, backend, sees="window")),
            training("all keys", partial(Recall, sizes, backend, sees="all")),
        ),
    )
    return pairs, recall


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the demo's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_dmattn demo",
        description="Train an attention layer on two tasks, beside what other attention would do: pairs of nodes with "
        "a learned pair bias, and recall in a long text with learned top-k keys. Then check gradients of both on every "
        "backend against the formula in fp64.",
    )
    add = parser.add_argument
    said = f"{SMALL.steps}, on a Hopper GPU {ON_HOPPER.steps}; with --quick {QUICK.steps} and 100"
    add("--steps", type=_positive, help=f"training steps of each layer (default: {said})")
    add("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, help=f"device to train on (default: {device})")
    # Threads spin for one another beside other work: with two threads on a busy machine it takes ten times as long.
    add("--threads", type=_positive, default=1, help="threads of PyTorch; more for an idle machine (default: 1)")
    text = f"bf16 trains under autocast (default: {SMALL.dtype}, on a Hopper GPU {ON_HOPPER.dtype})"
    add("--dtype", choices=tuple(DTYPES), help=text)
    add("--backend", default="auto", help="attention backend to train with (default: auto)")
    folder = Path("demo_output")
    add("--out-dir", type=Path, default=folder, help=f"folder for the picture; made if missing (default: {folder})")
    add("--quick", action="store_true", help="shorter texts and fewer steps: half a minute on one CPU core")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status.

    Args:
        argv: the words after ``python -m flash_dmattn demo``; sys.argv's by default.

    Sets the number of threads of PyTorch in this process.

    Returns:
        0; or 1 if a gradient is outside its limit, or a layer with its feature did not learn its task.
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
    sizes = sizes_for(device, arguments.quick)
    sizes = sizes._replace(steps=arguments.steps or sizes.steps, dtype=arguments.dtype or sizes.dtype)
    line(_versions(device))
    tasks = make_tasks(sizes, arguments.backend, device, arguments.seed)
    seconds = sum(training.expected_seconds(sizes.steps) for task in tasks for training in task.trainings)
    line(f"This takes about {_duration(1.2 * seconds + 5)} here, most of it for layers that train for comparison.")
    for task in tasks:
        heading(task.title)
        for training in task.trainings:
            training.run(sizes.steps, arguments.seed, _show_step)
        _show_task(task)

    pairs, recall = (task.trainings[0].layer for task in tasks)
    dtype = DTYPES[sizes.dtype]
    checked_pairs = capture_call(pairs, "pairs", dtype)
    heading("Which backend computed the pairs, and why")
    line(str(checked_pairs.explain()))
    # The 16-bit kernels of a GPU serve no fp32 call: there the call is also checked as they would get it.
    dtypes = [torch.float32] if dtype == torch.float32 and device.type == "cpu" else [torch.float32, torch.bfloat16]
    checked = [row for x in dtypes for row in check_call(checked_pairs, x)]
    checked += check_call(capture_call(recall, "recall", dtype), dtype)
    _show_checks(checked)
    _save_picture(arguments.out_dir, tasks)

    failures = find_failures(checked, tasks)
    heading(f"{'FAILED' if failures else 'Done'} in {time.perf_counter() - started:.0f} s")
    for failure in failures:
        line(f"  {failure}")
    return 1 if failures else 0


def capture_call(layer: Layer, name: str, dtype: torch.dtype) -> Sample:
    """Make a call of a layer on a batch of one, with a random gradient of its output; rows of pairs are its batch."""
    device, sizes = layer.o_proj.weight.device, layer.sizes
    generator = torch.Generator().manual_seed(1)
    layer.sizes = sizes._replace(tokens=min(sizes.tokens, CHECKED_TOKENS))
    inputs, _ = layer.batch(1, generator)
    layer.sizes = sizes
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        call = layer.arguments(*(x.to(device) for x in inputs))
    tensors = {x: call.pop(x) for x in ("q", "k", "v", "bias")}
    if tensors["q"].dim() == 5:
        tensors = {x: tensor[0] for x, tensor in tensors.items()}
    if call["mask"] is not None:
        call["mask"] = call["mask"].unpacked()
    q = tensors["q"]
    return Sample(name, tensors, call, RESULTS, torch.randn(q.shape, generator=generator).to(q))


def check_call(call: Sample, dtype: torch.dtype) -> list[Outcome]:
    """Compare every backend with the formula, q, k, v and dout in a dtype; the first outcome is the yardstick."""
    tensors = {name: x if name == "bias" else x.to(dtype) for name, x in call.tensors.items()}
    call = Sample(call.name, tensors, call.flags, call.results, call.dout.to(dtype))
    # The reference is the formula again, under its name as a backend.
    backends = [name for name in BACKENDS if name != "reference"]
    return [call.yardstick, *(call.check(name, allow_partial=False) for name in backends)]


def find_failures(checked: Sequence[Outcome], tasks: Sequence[Task]) -> list[str]:
    """Say why the demo fails, one sentence each: gradients outside their limit, a layer that did not learn."""
    failures = [
        f"{row.case} by {row.backend} in {row.dtype}: error of {name} is {row.errors[name]:.1e}, above its limit "
        f"{row.limits[name]:.1e}"
        for row in checked
        for name in row.failed
    ]
    failures += [
        f"{row.case} by {row.backend} in {row.dtype}: {row.exception}" for row in checked if row.exception is not None
    ]
    for task in tasks:
        ours, other = task.trainings[:2]
        if not ours.loss < 0.5 * other.loss:
            failures.append(
                f"{ours.title} ends at a loss of {ours.loss:.3f}; it must be under half of {other.loss:.3f}, which "
                f"{other.title} has: train for more steps"
            )
    return failures


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: up in ten steps, and down to a tenth in the last 40 % of them.

    >>> [round(learning_rate_factor(step, 100), 2) for step in (0, 9, 59, 80, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.1]
    """
    return min(1.0, (step + 1) / 10) * min(1.0, max(0.1, (steps - step) / (0.4 * steps)))


def _show_task(task: Task) -> None:
    rows = [
        (x.title, f"{x.loss:.3f}", f"{100 * x.right:.0f} %", f"{x.seconds[-1]:.1f}", sparkline(x.losses))
        for x in task.trainings
    ]
    columns = ("attention", "loss", "right", "seconds", "loss by step")
    print_table(f"Result: the last {LAST} steps; every batch is new", columns, rows)
    line(f"  {task.why}")


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw numbers as bars between 0 and the greatest of them, or as digits where stdout has no such characters.

    >>> sparkline([0.8, 0.8, 0.4, 0.0]) in ("██▅▁", "7740")
    True
    """
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
        marks = BARS
    except UnicodeEncodeError:
        marks = "01234567"
    count = min(width, len(values))
    means = [
        sum(part) / len(part)
        for part in (
            values[i * len(values) // count : max((i + 1) * len(values) // count, i * len(values) // count + 1)]
            for i in range(count)
        )
    ]
    top = max(means) or 1.0
    return "".join(marks[min(7, math.floor(8 * x / top))] if math.isfinite(x) else "?" for x in means)


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
        rows.append((row.case, row.backend, row.dtype, *errors, result))
    print_table(
        f"Gradient check of both layers: ||x - x64|| / ||x64||, at most {RATIO} yardsticks + {FLOOR:.0e}",
        ("call", "backend", "dtype", *RESULTS, "result"),
        rows,
    )


def _save_picture(out_dir: Path, tasks: tuple[Task, Task]) -> None:
    """Draw the losses of both tasks, and the keys of one text that top-k and window keep."""
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        line(f"\nNo picture: matplotlib cannot be imported ({error}); pip install matplotlib")
        return
    pairs, recall = tasks
    figure = Figure(figsize=(14, 7.2), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(1.6, 1))
    top, bottom = (figure.add_subfigure(grid[row]) for row in range(2))
    by_step, by_time = top.subplots(1, 2)
    for axes, task, title in (
        (by_step, pairs, "Pairs: is there a common neighbour?"),
        (by_time, recall, f"Recall: facts anywhere in {recall.trainings[0].layer.sizes.tokens} tokens"),
    ):
        for training, color in zip(task.trainings, (ORANGE, BLUE, GREY), strict=False):
            x = list(range(1, len(training.losses) + 1)) if task is pairs else training.seconds
            label = f"{training.title}: {100 * training.right:.0f} % right after {training.seconds[-1]:.1f} s"
            axes.plot(x, training.losses, color=color, linewidth=1.8, label=label)
        axes.set(xlabel="training step" if task is pairs else "seconds of training", ylabel="loss")
        axes.set_ylim(bottom=0, top=1.25 * max(max(x.losses) for x in task.trainings))
        axes.set_title(title, fontsize=12)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=10, loc="upper right")
    axes = bottom.subplots()
    layer = recall.trainings[0].layer
    inputs, _ = layer.batch(1, torch.Generator().manual_seed(1))
    with torch.no_grad():
        mask = layer.arguments(*(x.to(layer.o_proj.weight.device) for x in inputs))["mask"]
    if mask is None:
        return
    tokens, keep = layer.sizes.tokens, layer.sizes.keep
    kept = mask.unpacked()[0, 0, -1].nonzero()[:, 0].tolist()
    facts = (inputs[0][0] == FACT).nonzero()[:, 0].tolist()
    found = len(set(facts) & set(kept))
    rows = (
        (2, facts, GREY, f"{len(facts)} facts"),
        (1, kept, ORANGE, f"top-k keeps {found} of them"),
        (0, range(tokens - keep, tokens), BLUE, "the window none"),
    )
    for height, places, color, _ in rows:
        axes.vlines(list(places), height - 0.35, height + 0.35, color=color, linewidth=1.4)
    axes.set(yticks=[row[0] for row in rows], yticklabels=[row[3] for row in rows], xlim=(-10, tokens + 10))
    axes.tick_params(axis="y", labelsize=11, length=0)
    axes.set_xlabel("place in the text")
    axes.set_title(f"The {keep} keys that the last query of a new text has, in one head", fontsize=12)
    path = out_dir / "demo.png"
    figure.savefig(path)
    line(f"\nPicture of the losses and of the keys that are kept: {path}")


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
        columns: names; those of `TEXT` are columns of text.
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
            cell.ljust(width) if c == 0 or name in TEXT else cell.rjust(width)
            for c, (name, cell, width) in enumerate(zip(columns, row, widths, strict=True))
        )
        line("  " + "  ".join(cells).rstrip())


TEXT = ("why", "result", "dtype", "backend", "loss by step")


def _show_step(training: Training) -> None:
    """Print a line of progress where a quarter of the steps is done."""
    step, steps = len(training.losses), training.layer.sizes.steps
    if step % max(1, steps // 4) == 0:
        right = f"loss {training.losses[-1]:.3f}  right {100 * training.rights[-1]:3.0f} %"
        line(f"  {training.title:<20}  step {step:>{len(str(steps))}}/{steps}  {right}  {training.seconds[-1]:5.1f} s")


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
