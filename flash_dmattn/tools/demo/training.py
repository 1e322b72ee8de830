"""Training of one byte-level model and its loss on held-out text over time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

import flash_dmattn
from flash_dmattn.explanation import Explanation
from flash_dmattn.nn import DynamicMaskAttention

from .model import ByteLanguageModel
from .text import Corpus, even_windows, random_windows


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


@torch.no_grad()
def evaluate(
    model: ByteLanguageModel, windows: torch.Tensor, batch_size: int, dtype: torch.dtype = torch.float32
) -> float:
    """Mean loss, in nats per byte, of windows (N, L + 1), as many at a time as in training."""
    total = 0.0
    for batch in windows.split(batch_size):
        with autocast(windows.device, dtype):
            total += model.loss(batch).item() * len(batch)
    return total / len(windows)


def training_call(model: ByteLanguageModel, config: TrainingConfig) -> Explanation:
    """The decision for the attention that a layer of a model calls in every step of its training."""
    attention = model.blocks[0].attention
    assert isinstance(attention, DynamicMaskAttention)
    device = model.embedding.weight.device
    x = torch.zeros(config.batch_size, config.context, attention.hidden_size, device=device)
    with autocast(device, config.dtype):
        arguments = attention.attention_arguments(x)
        return flash_dmattn.explain(
            *arguments, is_causal=True, softmax_scale=attention.softmax_scale, backend=attention.backend
        )


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Autocast to a 16-bit dtype; nothing for fp32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def learning_rate_factor(step: int, steps: int) -> float:
    """Factor of the learning rate: up in a twenty-fifth of the steps, then down a cosine to 0.1.

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
