"""A model of transformers whose sequence is shared among ranks, beside the same model in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers_models import FAMILIES, VOCABULARY, transformers

from flash_dmattn.distributed import SequenceLayout, use_context_parallel
from flash_dmattn.integrations.transformers import register

LENGTH = 32


def made(family: str, **changes: Any) -> Any:
    """A model with random weights, the same on every rank; `changes` to its configuration."""
    torch.manual_seed(0)
    of = FAMILIES[family]
    config = getattr(transformers, of.config)(**{**of.arguments, **changes})
    config._attn_implementation = register()
    return getattr(transformers, of.model)(config).double().train()


def tokens() -> Tensor:
    """(2, LENGTH)."""
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def compared(family: str, layout_name: str, changes: dict[str, Any], length: int = LENGTH) -> float:
    """The largest difference of logits, and of any gradient of a weight once ranks have summed it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout: SequenceLayout = getattr(SequenceLayout, layout_name)(length, size)
    whole, model, given = made(family, **changes), made(family, **changes), tokens()[:, :length]
    wanted = whole(given, use_cache=False).logits
    wanted.square().sum().backward()
    with use_context_parallel(dist.group.WORLD, layout):
        positions = layout.positions(rank)[None].expand(2, -1)
        found = model(layout.shard(given, 1, rank), position_ids=positions, use_cache=False).logits
        found.square().sum().backward()
    differences = [float((found - layout.shard(wanted, 1, rank)).abs().max())]
    for x, y in zip(model.parameters(), whole.parameters()):
        dist.all_reduce(x.grad)
        differences.append(float((x.grad - y.grad).abs().max() / y.grad.abs().max().clamp(min=1e-3)))
    return max(differences)


def refused(what: str, ranks: tuple[int, ...]) -> str:
    """Return the error of a model where some ranks have a mask of their own tokens alone."""
    layout = SequenceLayout.zigzag(LENGTH, dist.get_world_size())
    rows = layout.local_length
    given: dict[str, Any] = {"position_ids": layout.positions(dist.get_rank())[None].expand(2, -1)}
    is_wrong = dist.get_rank() in ranks
    if what == "padding" and is_wrong:
        given["attention_mask"] = torch.ones(2, rows, dtype=torch.long).index_fill_(1, torch.tensor([0]), 0)
    elif what == "documents" and is_wrong:
        given["position_ids"] = torch.arange(rows)[None].remainder(5).expand(2, -1)
    elif what == "limits":
        limits = torch.tensor([0, 7, rows], dtype=torch.int32)
        given |= {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits, "max_length_q": rows, "max_length_k": rows}
    with use_context_parallel(dist.group.WORLD, layout):
        try:
            # A window gives layers a mask, beside which limits could be forgotten.
            model = made("mistral", sliding_window=rows - 3) if what == "limits" else made("llama")
            if what == "limits":
                given["position_ids"] = given["position_ids"][:1]
            model(tokens()[: len(given["position_ids"]), :rows], use_cache=False, **given)
        except (NotImplementedError, ValueError) as error:
            return str(error)
    return "nothing"
