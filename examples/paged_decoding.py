"""Decode several texts at once with DynamicMaskAttention from one pool of pages, as a server does.

Keys, values and key scores of all texts lie in pages of 16 tokens. A table says whose pages they are; a page is free
again once no row of the table names it. Prompts of different lengths are read one by one; then each step takes one
token of every text, in one call of attention.

The table shows for each text its tokens, its pages, and how far the decoded outputs are from one forward of the layer
over the whole text. Both keep the same keys, so that only rounding differs.

    python examples/paged_decoding.py                  # a CPU, or a GPU where there is one
    python examples/paged_decoding.py --quick --device cpu
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_dmattn import Sequences, append_to_cache, attention
from flash_dmattn.examples.demo import print_table
from flash_dmattn.masks import topk_mask
from flash_dmattn.nn import DynamicMaskAttention
from flash_dmattn.nn.dynamic_mask_attention import ranked
from flash_dmattn.nn.positions import rotary_angles

PAGE_SIZE = 16


class PagedCache:
    """Keys, values and key scores of one layer, in pages of a pool.

    Args:
        layer: whose heads and dtype the pages have.
        pages: how many there are.
        page_size: tokens of a page.
    """

    def __init__(self, layer: DynamicMaskAttention, pages: int, page_size: int = PAGE_SIZE) -> None:
        weight = layer.k_proj.weight
        self.k = weight.new_zeros(pages, page_size, layer.num_heads_k, layer.head_dim)
        self.v = torch.zeros_like(self.k)
        self.scores = torch.zeros_like(self.k[..., :1], dtype=torch.promote_types(weight.dtype, torch.float32))

    def attend(self, layer: DynamicMaskAttention, x: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """Append the new tokens x of each text to the pages, and attend from them to their text.

        Args:
            layer: whose pages these are.
            x: (S, L, hidden_size), the last L tokens of each of S texts.
            table: (S, P), the pages of each text in order.
            lengths: (S,), how many tokens each text has, the new ones included.

        Returns:
            (S, L, hidden_size).
        """
        sequences = Sequences.paged(table, lengths)
        positions = lengths[:, None] - x.shape[1] + torch.arange(x.shape[1], device=x.device)
        q, k, v = layer.project(x, rotary_angles(positions, layer.head_dim, layer.rope_theta))
        scores = layer.key_scores(v)
        append_to_cache(self.k, self.v, k, v, sequences)
        mask = bias = None
        if scores is not None and layer.keep_window_size is not None:
            append_to_cache(self.scores, None, scores[..., None], None, sequences)
            bias = self.scores[table].flatten(1, 2).permute(0, 2, 3, 1)  # (S, Hk, 1, keys)
            key, query = torch.arange(bias.shape[-1], device=x.device), positions[:, None, :, None]
            past = key <= query
            mask = topk_mask(ranked(bias), layer.keep_window_size, mask=past, seqlen_q=x.shape[1])
            mask = mask | (past & (key > query - layer.local_window_size))
        scale, backend = layer.softmax_scale, layer.backend
        out = attention(
            q, self.k, self.v, mask, bias, is_causal=True, softmax_scale=scale, sequences=sequences, backend=backend
        )
        return layer.o_proj(out.flatten(-2))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Decode, compare with one forward of each text, print; return the numbers of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short texts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    prompts, steps = ([20, 5, 33], 4) if options.quick else ([200, 50, 330], 100)

    torch.manual_seed(0)
    layer = DynamicMaskAttention(64, num_heads=4, num_heads_k=2, keep_window_size=16, local_window_size=4)
    layer.requires_grad_(False).to(options.device)
    texts = [torch.randn(prompt + steps, 64, device=options.device) for prompt in prompts]
    pages = [-(-len(text) // PAGE_SIZE) for text in texts]
    cache, free = PagedCache(layer, sum(pages)), torch.randperm(sum(pages), device=options.device)
    table = torch.zeros(len(texts), max(pages), dtype=torch.long, device=options.device)
    for row, own in zip(table, free.split(pages), strict=True):
        row[: len(own)] = own

    lengths = torch.tensor(prompts, device=options.device)
    for s, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        cache.attend(layer, text[None, :prompt], table[s : s + 1], lengths[s : s + 1])
    decoded = []
    for step in range(steps):
        new = torch.stack([text[prompt + step] for text, prompt in zip(texts, prompts, strict=True)])
        decoded.append(cache.attend(layer, new[:, None], table, lengths + step + 1))
    out = torch.cat(decoded, dim=1)
    differences = [float((out[s] - layer(text[None])[0, -steps:]).abs().max()) for s, text in enumerate(texts)]

    rows = [
        (str(s), str(prompt), str(len(text)), str(own), f"{difference:.1e}")
        for s, (prompt, text, own, difference) in enumerate(zip(prompts, texts, pages, differences, strict=True))
    ]
    print_table("Texts in one pool", ("text", "prompt", "tokens", "pages", "difference"), rows)
    return {"differences": differences, "pages": pages, "lengths": [len(text) for text in texts]}


if __name__ == "__main__":
    main()
