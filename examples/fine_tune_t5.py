"""Train a T5 of transformers whose relative position bias learns, on flash_dmattn beside transformers' own attention.

The model puts the vowels back into docstrings of the Python standard library: "rd th fl" becomes "read the file".

1. In float64 and without dropout both implementations compute the same losses at every step, and the same gradient of
   the relative position bias, which comes back in the bias's own shape.
2. With T5's dropout of 0.1, each with its own random numbers, both learn alike.

The output: a table of both, which backend ran, and a picture of the loss curves, `fine_tune_t5.png`.

    python examples/fine_tune_t5.py                  # a CPU, or a GPU where there is one
    python examples/fine_tune_t5.py --quick --device cpu
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import flash_dmattn
from flash_dmattn.examples.demo import print_table
from flash_dmattn.integrations.transformers import register

PADDING, END, FIRST_BYTE = 0, 1, 3  # token ids as ByT5 has them
VOCABULARY = 256 + FIRST_BYTE


def docstrings(longest: int) -> list[bytes]:
    """The first paragraphs of docstrings in the standard library's modules, shortened to so many bytes."""
    results = set()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                words = (ast.get_docstring(node) or "").partition("\n\n")[0].split()
                if len(words) > 5:
                    results.add(" ".join(words).lower().encode()[:longest])
    return sorted(results)


def tokens(texts: Sequence[bytes], fill: int) -> Tensor:
    """(B, L) bytes with an end, filled up."""
    rows = [torch.tensor([*(byte + FIRST_BYTE for byte in text), END]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def batch(texts: list[bytes], size: int, step: int, device: torch.device) -> dict[str, Tensor]:
    """The batch of a step: the same for every model."""
    generator = torch.Generator().manual_seed(step)
    chosen = [texts[index] for index in torch.randint(len(texts), (size,), generator=generator)]
    sources = tokens([text.translate(None, b"aeiou") for text in chosen], PADDING)
    wanted = tokens(chosen, -100)
    return {
        "input_ids": sources.to(device),
        "attention_mask": (sources != PADDING).long().to(device),
        "labels": wanted.to(device),
    }


def make_model(sizes: dict[str, int], dropout: float, attention: str) -> Any:
    """A T5 with random weights, the same for every implementation."""
    torch.manual_seed(0)
    more = {"vocab_size": VOCABULARY, "decoder_start_token_id": PADDING, "feed_forward_proj": "gated-gelu"}
    config = transformers.T5Config(**sizes, **more, dropout_rate=dropout)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention)
    return model.train()


class Run:
    """One training: its losses, its first gradients of the two relative biases, the backends that ran, the time."""

    def __init__(self, model: Any, texts: list[bytes], size: int, steps: int) -> None:
        device = model.device
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.losses: list[float] = []
        self.bias_gradients: list[Tensor] = []
        started = time.perf_counter()
        decisions: list[Any] = []
        with flash_dmattn.config(record=decisions):
            for step in range(1, steps + 1):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = model(**batch(texts, size, step, device)).loss
                optimizer.zero_grad()
                loss.backward()
                if step == 1:
                    named = model.named_parameters()
                    self.bias_gradients = [p.grad.clone() for name, p in named if "relative_attention_bias" in name]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                self.losses.append(loss.item())
        self.seconds = time.perf_counter() - started
        self.backends = sorted({f"{d.forward}, {d.backward} backward" for d in decisions})

    @property
    def end(self) -> float:
        """The mean of the last tenth of the losses."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def draw(path: Path, exact: dict[str, Run], dropped: dict[str, Run]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), dpi=110, layout="constrained")
    titles = ("float64, without dropout: one curve", "with dropout 0.1: other random numbers, the same course")
    for axes, runs, title in zip(figure.subplots(1, 2), (exact, dropped), titles):
        for (name, run), style in zip(runs.items(), ("-", "--")):
            axes.plot(range(1, len(run.losses) + 1), run.losses, style, label=name, linewidth=1.6)
        axes.set(xlabel="training step", ylabel="loss (nats per byte)", title=title)
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, print, draw; return the numbers of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--out", type=Path, default=Path("examples_output"), help="folder of the picture")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    name = register()

    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1 if options.quick else 2, "num_heads": 4}
    large = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 6, "num_heads": 8}
    on_gpu = device.type == "cuda" and not options.quick
    length = 24 if options.quick else 60
    exact_steps, steps = (4, 10) if options.quick else (30, 150)
    texts = docstrings(length)

    exact = {}
    for attention in ("eager", name):
        model = make_model(small, 0.0, attention).double()  # on the CPU, whatever the device
        exact[attention] = Run(model, texts, 4 if options.quick else 8, exact_steps)
    losses = zip(exact["eager"].losses, exact[name].losses)
    loss_difference = max(abs(x - y) / x for x, y in losses)
    gradients = zip(exact["eager"].bias_gradients, exact[name].bias_gradients)
    gradient_difference = max(float((x - y).norm() / x.norm()) for x, y in gradients)

    dropped = {}
    texts = docstrings(510) if on_gpu else texts
    for attention in ("eager", name):
        model = make_model(large if on_gpu else small, 0.1, attention).to(device)
        dropped[attention] = Run(model, texts, 32 if on_gpu else 8, steps)

    rows = []
    for dropout, runs in (("0", exact), ("0.1", dropped)):
        for attention, run in runs.items():
            cells = (f"{run.losses[0]:.3f}", f"{run.end:.3f}", f"{run.seconds:.1f}")
            rows.append((attention, dropout, *cells, "; ".join(run.backends) or "-"))
    print_table("T5", ("attention", "dropout", "first loss", "last losses", "seconds", "our backends"), rows)
    print()
    print(f"float64, {exact_steps} steps: losses differ by {loss_difference:.1e} of them at most,")
    print(f"gradients of the relative position bias by {gradient_difference:.1e}")
    draw(options.out / "fine_tune_t5.png", exact, dropped)
    print(f"picture: {options.out / 'fine_tune_t5.png'}")
    return {
        "loss_difference": loss_difference,
        "gradient_difference": gradient_difference,
        "first": {attention: run.losses[0] for attention, run in dropped.items()},
        "end": {attention: run.end for attention, run in dropped.items()},
        "backends": {attention: run.backends for attention, run in dropped.items()},
    }


if __name__ == "__main__":
    main()
