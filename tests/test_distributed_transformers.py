"""Models of transformers in a `use_context_parallel` block, over two processes, in fp64."""

from __future__ import annotations

import pytest
from distributed_workers import workers

pytest.importorskip("transformers")

TOLERANCE = 1e-6  # norms of models are in fp32, and gradients of their weights summed in it


@pytest.mark.parametrize("family, layout", [("llama", "zigzag"), ("mistral", "zigzag"), ("gemma2", "contiguous")])
def test_a_model_over_ranks_equals_the_model(family: str, layout: str) -> None:
    assert max(workers(2).run("distributed_models.compared", family, layout, {})) < TOLERANCE


def test_a_window_longer_than_a_part_of_the_sequence() -> None:
    """It reaches every key of a rank, and not every key."""
    window = {"sliding_window": 19}
    assert max(workers(2).run("distributed_models.compared", "mistral", "contiguous", window)) < TOLERANCE


def test_a_rank_of_one_token_is_causal() -> None:
    assert max(workers(2).run("distributed_models.compared", "llama", "contiguous", {}, 2)) < TOLERANCE


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("what", ["padding", "documents"])
def test_what_a_rank_knows_of_its_own_tokens_alone_is_refused_on_all(what: str, ranks: tuple[int, ...]) -> None:
    for said in workers(2).run("distributed_models.refused", what, ranks):
        assert said.startswith(f"rank {ranks[0]}: attention_mask has {what} of this rank's tokens")


def test_sequences_that_a_caller_describes_are_refused() -> None:
    for said in workers(2).run("distributed_models.refused", "limits", (0, 1)):
        assert "sequences" in said
