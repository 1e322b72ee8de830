"""Models of transformers in a `use_context_parallel` block over two processes, in fp64, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_workers import workers
from torch import Tensor

pytest.importorskip("transformers")

from transformers_models import FAMILIES, VOCABULARY, transformers

from flash_dmattn.distributed import SequenceLayout, use_context_parallel
from flash_dmattn.integrations.transformers import register

TOLERANCE = 1e-6  # norms of models are in fp32, and gradients of their weights summed in it
LENGTH = 32


def make(family: str, **changes: Any) -> Any:
    """A model with random weights, the same on every rank; `changes` to its configuration."""
    torch.manual_seed(0)
    kind = FAMILIES[family]
    config = getattr(transformers, kind.config)(**{**kind.arguments, **changes})
    config._attn_implementation = register()
    return getattr(transformers, kind.model)(config).double().train()


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def compared(
    family: str, layout_name: str, changes: dict[str, Any], length: int = LENGTH, mesh: tuple[int, int] | None = None
) -> float:
    """The largest difference of logits, and of any gradient of a weight once ranks have summed it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout: SequenceLayout = getattr(SequenceLayout, layout_name)(length, size)
    alone, model, words = make(family, **changes), make(family, **changes), tokens()[:, :length]
    wanted = alone(words, use_cache=False).logits
    wanted.square().sum().backward()
    group = dist.group.WORLD if mesh is None else dist.init_device_mesh("cpu", mesh, mesh_dim_names=("outer", "inner"))
    with use_context_parallel(group, layout):
        positions = layout.positions(rank)[None].expand(2, -1)
        logits = model(layout.shard(words, 1, rank), position_ids=positions, use_cache=False).logits
        logits.square().sum().backward()
    differences = [float((logits - layout.shard(wanted, 1, rank)).abs().max())]
    for x, y in zip(model.parameters(), alone.parameters()):
        dist.all_reduce(x.grad)
        differences.append(float((x.grad - y.grad).abs().max() / y.grad.abs().max().clamp(min=1e-3)))
    return max(differences)


def refused(what: str, ranks: tuple[int, ...]) -> str:
    """Return the error of a model if some ranks have a mask of only their own tokens."""
    layout = SequenceLayout.zigzag(LENGTH, dist.get_world_size())
    rows = layout.local_length
    arguments: dict[str, Any] = {"position_ids": layout.positions(dist.get_rank())[None].expand(2, -1)}
    is_wrong = dist.get_rank() in ranks
    if what == "padding" and is_wrong:
        arguments["attention_mask"] = torch.ones(2, rows, dtype=torch.long).index_fill_(1, torch.tensor([0]), 0)
    elif what == "documents" and is_wrong:
        arguments["position_ids"] = torch.arange(rows)[None].remainder(5).expand(2, -1)
    elif what == "limits":
        limits = torch.tensor([0, 7, rows], dtype=torch.int32)
        arguments |= {"cu_seq_lens_q": limits, "cu_seq_lens_k": limits, "max_length_q": rows, "max_length_k": rows}
    with use_context_parallel(dist.group.WORLD, layout):
        try:
            # A window gives layers a mask, with which limits could be forgotten.
            model = make("mistral", sliding_window=rows - 3) if what == "limits" else make("llama")
            if what == "limits":
                arguments["position_ids"] = arguments["position_ids"][:1]
            model(tokens()[: len(arguments["position_ids"]), :rows], use_cache=False, **arguments)
        except (NotImplementedError, ValueError) as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("family, layout", [("llama", "zigzag"), ("mistral", "zigzag"), ("gemma2", "contiguous")])
def test_a_model_over_ranks_equals_the_model(family: str, layout: str) -> None:
    assert max(workers(2).run("test_distributed_transformers.compared", family, layout, {})) < TOLERANCE


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 2)], ids=str)
def test_a_model_over_a_mesh_equals_the_model(mesh: tuple[int, int]) -> None:
    size = mesh[0] * mesh[1]
    ranks = workers(size).run("test_distributed_transformers.compared", "llama", "zigzag", {}, LENGTH, mesh)
    assert max(ranks) < TOLERANCE


def test_a_window_longer_than_a_part_of_the_sequence() -> None:
    """It reaches every key of a rank, and not every key."""
    window = {"sliding_window": 19}
    assert max(workers(2).run("test_distributed_transformers.compared", "mistral", "contiguous", window)) < TOLERANCE


def test_a_rank_of_one_token_is_causal() -> None:
    assert max(workers(2).run("test_distributed_transformers.compared", "llama", "contiguous", {}, 2)) < TOLERANCE


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("what", ["padding", "documents"])
def test_what_a_rank_knows_of_its_own_tokens_alone_is_refused_on_all(what: str, ranks: tuple[int, ...]) -> None:
    for message in workers(2).run("test_distributed_transformers.refused", what, ranks):
        assert message.startswith(f"rank {ranks[0]}: attention_mask has {what} of this rank's tokens")


def test_sequences_that_a_caller_describes_are_refused() -> None:
    for message in workers(2).run("test_distributed_transformers.refused", "limits", (0, 1)):
        assert "sequences" in message
