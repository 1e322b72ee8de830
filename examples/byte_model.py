"""The training of the demo: its text, a byte-level model with dynamic-mask or full attention, the loop, a real call."""

from __future__ import annotations

import copy
import math
import sysconfig
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import flash_dmattn
from flash_dmattn.explanation import Explanation
from flash_dmattn.nn import DynamicMaskAttention, KVCache
from flash_dmattn.tools.verify import Sample

# The results that the gradient check compares.
RESULTS = ("out", "dq", "dk", "dv", "dbias")
VOCABULARY = 256
MINIMUM_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """Bytes of the training files and of the held-out files, with the files they came from."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]


def is_held_out(path: Path) -> bool:
    """Tell whether a file is never trained on: one in ten, by a checksum of its name, the same on every machine.

    >>> is_held_out(Path("argparse.py")), is_held_out(Path("elsewhere/argparse.py"))
    (False, False)
    """
    return zlib.crc32(path.name.encode()) % 10 == 0


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the standard library's top-level modules, in the order of their names.

    Args:
        folder: where to read ``*.py`` from; default the standard library of the running Python.

    Returns:
        A `Corpus` of uint8 tensors, about 4 MB for training and 0.4 MB held out.

    Raises:
        FileNotFoundError: the folder holds less than 1 MB of sources, as in a Python whose library is a zip file.

    >>> corpus = load_corpus()
    >>> set(corpus.train_files) & set(corpus.held_out_files)
    set()
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    # _sysconfigdata* is written by the build of each Python: a table of one machine's compiler flags, not prose.
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    train_files = tuple(path for path in files if not is_held_out(path))
    held_out_files = tuple(path for path in files if is_held_out(path))
    train, held_out = _read(train_files), _read(held_out_files)
    if len(train) + len(held_out) < MINIMUM_BYTES:
        raise FileNotFoundError(
            f"{folder} holds {len(train) + len(held_out)} bytes of .py files; the demo needs at least {MINIMUM_BYTES}. "
            "Run it with a Python whose standard library is installed as files"
        )
    return Corpus(train, held_out, train_files, held_out_files)


def _read(files: tuple[Path, ...]) -> torch.Tensor:
    text = b"".join(path.read_bytes().replace(b"\r\n", b"\n") for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def unigram_entropy(text: torch.Tensor) -> float:
    """Compute the entropy of byte frequencies, in nats per byte: the loss of a model that knows only those.

    Equivalent to ``-(p * p.log()).sum()`` with p the relative frequencies of the bytes that occur.

    >>> round(unigram_entropy(torch.tensor([0, 1, 0, 1], dtype=torch.uint8)), 4)
    0.6931
    """
    counts = torch.bincount(text.long(), minlength=256).double()
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log()).sum())


def random_windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw int64 windows (count, length) of the text; a window holds inputs and targets, shifted by one."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def even_windows(text: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Take int64 windows (count, length) of the text at evenly spaced places, the same at every call."""
    starts = torch.linspace(0, len(text) - length, count).long()[:, None]
    return text[starts + torch.arange(length)].long()


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; about 1.0 million parameters as they stand."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_heads_k: int = 2
    mlp_size: int = 512
    keep_window_size: int | None = 64
    local_window_size: int = 0
    backend: str = "auto"


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.RMSNorm(width)
        self.attention = DynamicMaskAttention(
            width,
            config.num_heads,
            config.num_heads_k,
            keep_window_size=config.keep_window_size,
            local_window_size=config.local_window_size,
            backend=config.backend,
        )
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, width, bias=False)

    def forward(self, x: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ByteLanguageModel(nn.Module):
    """A decoder over bytes whose output weights are its embedding.

    Args:
        config: sizes; ``keep_window_size=None`` gives full attention.

    >>> model = ByteLanguageModel(ModelConfig(num_layers=1))
    >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 256])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.apply(self._initialise)

    def forward(self, tokens: torch.Tensor, caches: list[KVCache] | None = None) -> torch.Tensor:
        """Compute logits (B, L, 256) of the byte after each token (B, L); with caches, one per block, it decodes."""
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, caches[index] if caches is not None else None)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in nats per byte, of windows (B, L + 1): each byte after the ones before."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self, prompt: bytes, count: int, temperature: float = 0.7, generator: torch.Generator | None = None
    ) -> bytes:
        """Continue a prompt by count bytes, one at a time, from the KV cache; temperature 0 takes the likeliest."""
        device = self.embedding.weight.device
        caches = [KVCache(len(prompt) + count) for _ in self.blocks]
        tokens = torch.tensor([list(prompt)], device=device)
        written = bytearray()
        for _ in range(count):
            logits = self(tokens, caches)[0, -1].float().cpu()
            if temperature > 0:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            written.append(int(chosen))
            tokens = chosen.view(1, 1).to(device)
        return bytes(written)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            # The residual path sums 2 * num_layers branches: each starts small, so that the sum starts near unit size.
            for branch in (module.attention.o_proj, module.down):
                nn.init.normal_(branch.weight, std=0.02 / (2 * self.config.num_layers) ** 0.5)


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how fast to train; two models with one config see the same windows in the same order."""

    steps: int = 400
    batch_size: int = 4
    context: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    seed: int = 0
    evaluations: int = 10
    evaluation_windows: int = 32
    dtype: torch.dtype = torch.float32


@dataclass
class History:
    """Loss in nats per byte, by step: of each training batch, and of the held-out windows every so often."""

    train_loss: list[float] = field(default_factory=list)
    held_out_steps: list[int] = field(default_factory=list)
    held_out_loss: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train(
    model: ByteLanguageModel,
    corpus: Corpus,
    config: TrainingConfig,
    on_step: Callable[[int, float, float], None] = lambda step, train_loss, held_out_loss: None,
) -> History:
    """Train a model with AdamW, a short warm-up and a cosine to a tenth of the learning rate.

    Args:
        model: on the device to train on.
        corpus: only its training text is trained on.
        config: steps, sizes, seed.
        on_step: called after every step with (step, loss of its batch, last held-out loss).

    Returns:
        The `History`; seconds include the evaluations.
    """
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(config.seed)
    held_out = even_windows(corpus.held_out, config.evaluation_windows, config.context + 1).to(device)
    optimizer = torch.optim.AdamW(_parameter_groups(model, config), lr=config.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config.steps))
    evaluate_at = {round(config.steps * i / config.evaluations) for i in range(1, config.evaluations + 1)}

    history = History()
    started = time.perf_counter()
    history.held_out_steps.append(0)
    history.held_out_loss.append(evaluate(model, held_out, config.batch_size, config.dtype))
    for step in range(1, config.steps + 1):
        windows = random_windows(corpus.train, config.batch_size, config.context + 1, generator).to(device)
        with autocast(device, config.dtype):
            loss = model.loss(windows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.train_loss.append(loss.item())
        if step in evaluate_at:
            history.held_out_steps.append(step)
            history.held_out_loss.append(evaluate(model, held_out, config.batch_size, config.dtype))
        on_step(step, history.train_loss[-1], history.held_out_loss[-1])
    history.seconds = time.perf_counter() - started
    return history


def expected_seconds(model: ByteLanguageModel, corpus: Corpus, config: TrainingConfig) -> float:
    """Return how long `train` will take, from three steps of a copy of the model; the first is not counted."""
    ends: list[float] = []
    few = replace(config, steps=3, evaluations=1)
    train(copy.deepcopy(model), corpus, few, lambda *_: ends.append(time.perf_counter()))
    step = ends[1] - ends[0]
    evaluation = max(0.0, ends[2] - ends[1] - step)
    return step * config.steps + evaluation * (config.evaluations + 1)


@torch.no_grad()
def evaluate(
    model: ByteLanguageModel, windows: torch.Tensor, batch_size: int, dtype: torch.dtype = torch.float32
) -> float:
    """Return the mean loss, in nats per byte, of windows (N, L + 1), as many at a time as in training."""
    total = 0.0
    for batch in windows.split(batch_size):
        with autocast(windows.device, dtype):
            total += model.loss(batch).item() * len(batch)
    return total / len(windows)


def training_call(model: ByteLanguageModel, config: TrainingConfig) -> Explanation:
    """Explain the attention that a layer of a model calls in every step of its training."""
    attention = model.blocks[0].attention
    assert isinstance(attention, DynamicMaskAttention)
    device = model.embedding.weight.device
    x = torch.zeros(config.batch_size, config.context, attention.hidden_size, device=device)
    with autocast(device, config.dtype):
        arguments = attention.attention_arguments(x)
        return flash_dmattn.explain(
            *arguments, is_causal=True, softmax_scale=attention.softmax_scale, backend=attention.backend
        )


def capture_call(
    model: ByteLanguageModel, windows: torch.Tensor, layer: int, dtype: torch.dtype = torch.float32
) -> Sample:
    """Run one training batch; return the call that the attention of a layer made, with the gradient of its output.

    Args:
        model: with dynamic-mask attention; its gradients are cleared.
        windows: (B, L + 1) tokens.
        layer: index of the block.
        dtype: of autocast, float32 for none.
    """
    attention = model.blocks[layer].attention
    assert isinstance(attention, DynamicMaskAttention)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def keep_output(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        outputs.append(arguments[0])
        arguments[0].retain_grad()

    handles = (
        attention.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0])),
        attention.o_proj.register_forward_pre_hook(keep_output),
    )
    try:
        with autocast(windows.device, dtype):
            model.loss(windows).backward()
            q, k, v, mask, bias = attention.attention_arguments(inputs[0].detach())
    finally:
        for handle in handles:
            handle.remove()
    model.zero_grad()
    dout = outputs[0].grad
    assert dout is not None and bias is not None
    # Gradients are linear in dout: unit size takes the loss's 1 / (B * L) out of the reach of fp16's underflow.
    dout = (dout / dout.float().square().mean().sqrt()).unflatten(-1, (attention.num_heads, attention.head_dim))
    tensors = {"q": q, "k": k, "v": v, "bias": bias}
    flags = {"mask": mask, "is_causal": True, "softmax_scale": attention.softmax_scale}
    return Sample(f"layer {layer}", tensors, flags, RESULTS, dout.to(q.dtype))


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Cast automatically to a 16-bit dtype; do nothing for fp32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: up in a twenty-fifth of the steps, then down a cosine to 0.1.

    >>> [round(learning_rate_factor(step, 100), 2) for step in (0, 3, 52, 99)]
    [0.25, 1.0, 0.55, 0.1]
    """
    warmup = max(1, steps // 25)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def _parameter_groups(model: ByteLanguageModel, config: TrainingConfig) -> list[dict[str, object]]:
    # Gains and A are scales, not weights: decay would pull them to zero, and A = 0 is a layer without a choice.
    weights = [p for p in model.parameters() if p.dim() >= 2]
    scales = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": weights, "weight_decay": config.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
