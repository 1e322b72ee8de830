"""Train a selector of keys through attention, beside one with a loss of its own, and one that stays as it is.

A sequence has pairs of a key and a value, then questions. A question is one of the keys, and its answer is the value:
one token of many matters to a query. A selector, two narrow heads, lists a few tokens for each query, and attention
reads no others.

* "through attention": attention adds the selector's scores to its own, as `biases.ListBias`. The loss of the model
  trains the selector.
* "by KL": a second loss teaches the selector the probabilities of attention over the listed tokens, summed over heads:
  `statistics.list_sums` and `selector_loss`. Attention does not see its scores. DeepSeek trains its indexer so.
* "frozen": the selector stays as it was drawn.

Both ways come to list every answer. The second loss needs fewer steps here. Attention soon tells listed tokens apart on
its own, and scores that it adds then get little gradient. A selector that imitates it learns on.

The output: a table of the losses, the accuracy and how often the token that matters is listed; and a picture of the
loss curves, `train_selector.png`.

    python examples/train_selector.py                  # a CPU, or a GPU where there is one
    python examples/train_selector.py --quick --device cpu
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_dmattn import attention, statistics
from flash_dmattn.biases import ListBias
from flash_dmattn.examples.demo import print_table
from flash_dmattn.masks import IndexScores, PreparedMask

WAYS = ("through attention", "by KL", "frozen")


class Sizes(NamedTuple):
    """Sizes of the task and of its training."""

    symbols: int  # keys, and as many values
    pairs: int
    questions: int
    listed: int
    steps: int
    batch: int = 32
    width: int = 64


class Recall(nn.Module):
    """One layer of attention over listed tokens; a token knows the one before it."""

    def __init__(self, sizes: Sizes, way: str) -> None:
        super().__init__()
        self.sizes, self.way = sizes, way
        width, heads, narrow = sizes.width, 4, 16
        self.embedding = nn.Embedding(2 * sizes.symbols, width)
        self.qkv = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(3)])
        self.heads = (heads, width // heads)
        self.index_q, self.index_k = nn.Linear(2 * width, 2 * narrow), nn.Linear(2 * width, narrow)
        self.index_weights = nn.Linear(2 * width, 2)
        self.output = nn.Linear(width, 2 * sizes.symbols)

    def select(self, x: Tensor) -> tuple[PreparedMask, Tensor]:
        """List tokens for each query; return also their scores, with gradients."""
        if self.way == "by KL":
            x = x.detach()  # the second loss trains the selector alone
        scores = IndexScores(self.index_q(x).unflatten(-1, (2, -1)), self.index_k(x), self.index_weights(x), relu=False)
        lists = PreparedMask.from_topk_lists(scores, self.sizes.listed, is_causal=True)
        return lists, scores.at(lists)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, PreparedMask]:
        """Return logits, the loss of the selector, 0 if it has none, and the lists."""
        x = self.embedding(tokens)
        x = torch.cat([x, F.pad(x, (0, 0, 1, 0))[:, :-1]], -1)
        q, k, v = (layer(x).unflatten(-1, self.heads) for layer in self.qkv)
        lists, values = self.select(x)
        loss = x.new_zeros(())
        if self.way == "by KL":
            attended, lse = attention(q, k, v, lists, return_lse=True)
            teacher = statistics.list_sums(q, k, lse, lists)  # without a gradient
            loss = statistics.selector_loss(values, teacher, lists).mean()
        else:
            attended = attention(q, k, v, lists, ListBias(values if self.way == WAYS[0] else values.detach()))
        return self.output(attended.flatten(2)), loss, lists


def draw(sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens, the answer to each question, and the place of the token that has it."""
    batch, pairs = sizes.batch, sizes.pairs
    keys = torch.rand(batch, sizes.symbols, device=device).argsort(1)[:, :pairs]
    values = torch.randint(sizes.symbols, (batch, pairs), device=device) + sizes.symbols
    asked = torch.randint(pairs, (batch, sizes.questions), device=device)
    told = torch.stack([keys, values], 2).flatten(1)
    return torch.cat([told, keys.gather(1, asked)], 1), values.gather(1, asked), 2 * asked + 1


def train(way: str, sizes: Sizes, device: str) -> dict[str, Any]:
    """Train one model; return its losses, and the accuracy and the share of listed answers on new sequences."""
    torch.manual_seed(0)
    model = Recall(sizes, way).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(sizes.steps):
        tokens, answers, _ = draw(sizes, device)
        logits, own, _ = model(tokens)
        loss = F.cross_entropy(logits[:, -sizes.questions :].flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        (loss + own).backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        tokens, answers, places = draw(sizes._replace(batch=256), device)
        logits, _, lists = model(tokens)
    is_listed = (lists.tensors[0][:, 0, -sizes.questions :] == places[..., None]).any(-1)
    right = logits[:, -sizes.questions :].argmax(-1) == answers
    return {"losses": losses, "accuracy": right.float().mean().item(), "listed": is_listed.float().mean().item()}


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the loss curves, each as a mean of 20 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for way, x in results.items():
        losses = torch.tensor(x["losses"])
        axes.plot(losses.unfold(0, min(20, len(losses)), 1).mean(1), label=way)
    axes.set(xlabel="step", ylabel="loss", title="A selector of keys, trained in three ways")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Train in each way, print and draw; return the numbers of the table and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sequences")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the picture")
    options = parser.parse_args(arguments)
    sizes = Sizes(32, 16, 16, 8, 200) if options.quick else Sizes(64, 32, 32, 8, 600)
    results = {way: train(way, sizes, options.device) for way in WAYS}
    rows = []
    for way, x in results.items():
        losses = (f"{x['losses'][0]:.2f}", f"{sum(x['losses'][-20:]) / 20:.3f}")
        rows.append((way, *losses, f"{x['accuracy']:.1%}", f"{x['listed']:.1%}"))
    title = f"{sizes.listed} of {2 * sizes.pairs + sizes.questions} tokens in a list"
    print_table(title, ("selector", "first loss", "last loss", "accuracy", "answer listed"), rows)
    options.out.mkdir(parents=True, exist_ok=True)
    plot(results, options.out / "train_selector.png")
    return results


if __name__ == "__main__":
    main()
