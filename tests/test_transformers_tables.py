"""T5 and its kin pass their bias as values of distances for long inputs: as their own attention with the matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the integration is optional")

import transformers
from transformers_models import T5, assert_alike, lacks_interface, step

from flash_dmattn.biases import Relative
from flash_dmattn.integrations.transformers import models, register
from flash_dmattn.integrations.transformers.attention_function import observed

pytestmark = pytest.mark.skipif(lacks_interface("t5") is not None, reason=str(lacks_interface("t5")))

KINDS = ("T5", "MT5", "UMT5", "LongT5", "SwitchTransformers")
LENGTH = 23  # more than the greatest distance of a bucket of its own
SMALL = {**T5, "relative_attention_max_distance": 11, "relative_attention_num_buckets": 8}


@pytest.fixture(autouse=True)
def every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short inputs take values of distances, too."""
    register()
    monkeypatch.setattr(models, "LEAST_SCORES", 0)


def model_of(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    experts = {"num_experts": 2, "num_decoder_layers": 2}
    more = experts if kind == "SwitchTransformers" else {}
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **more, **changes})
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative" in name:
                weight.normal_()
    return model


def inputs_of(side: str | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(5, 90, (2, length), generator=generator) for length in (LENGTH, LENGTH - 4))
    mask = torch.ones_like(tokens)
    if side is not None:
        mask[1, slice(-5, None) if side == "right" else slice(5)] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def biases_of(model: Any, call: Any) -> list[Any]:
    biases: list[Any] = []
    with observed(lambda _, arguments: biases.append(arguments["bias"])):
        call(model)
    return biases


@pytest.mark.parametrize("side", (None, "left", "right"))
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_of_the_table_are_those_of_eager(kind: str, side: str | None) -> None:
    model, options = model_of(kind), inputs_of(side)
    wanted = step(model, options, "eager")
    biases: list[Any] = []
    models.read_tables(model.config)  # the first mask of ours does so, and the encoder of Switch asks for none
    with observed(lambda _, arguments: biases.append(arguments["bias"])):
        result = step(model, options, "dmattn")
    # The encoder of LongT5 has no attention interface. The encoder of Switch adds a mask of floats, which is split.
    layers = 2 if kind == "LongT5" else 4
    assert sum(isinstance(bias, Relative) for bias in biases) == layers
    assert_alike(result, wanted, "t5")
    tabled = [name for name, x in result.gradients.items() if "relative_attention_bias" in name and x is not None]
    assert tabled
    assert all(result.gradients[name].abs().sum() > 0 for name in tabled)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ("T5", "UMT5"))
@pytest.mark.parametrize("cache", ("dynamic", "static"))
def test_generation_is_that_of_eager(kind: str, cache: str) -> None:
    model, tokens = model_of(kind).eval(), inputs_of("right")
    del tokens["labels"]
    options = {**tokens, "max_new_tokens": 15, "do_sample": False, "cache_implementation": cache}
    asks = {"min_new_tokens": 15, "output_logits": True, "return_dict_in_generate": True}
    results = []
    for name in ("eager", "dmattn"):
        model.set_attn_implementation(name)
        results.append(model.generate(**options, **asks))
    wanted, result = results
    assert torch.equal(result.sequences, wanted.sequences)
    # The tokens of a model without training hardly depend on its table.
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(wanted.logits), atol=1e-5, rtol=1e-5)
    biases = biases_of(model, lambda model: model.generate(**options))
    assert any(isinstance(bias, Relative) for bias in biases)


def test_a_matrix_stays_where_values_of_distances_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(model: Any, **changes: Any) -> int:
        biases = biases_of(model, lambda model: model(**{**inputs_of(None), **changes}))
        return sum(isinstance(bias, Relative) for bias in biases)

    model = model_of("T5").train()
    model.set_attn_implementation("dmattn")
    assert count(model) == 4
    model.gradient_checkpointing_enable()
    assert count(model) == 0
    assert count(model.eval()) == 4
    monkeypatch.setattr(models, "LEAST_SCORES", LENGTH**2)
    assert count(model) == 2  # the decoder has fewer queries

    class Louder(type(model.encoder.block[0].layer[0].SelfAttention)):  # type: ignore[misc]
        def compute_bias(self, *args: Any, **options: Any) -> Any:
            return super().compute_bias(*args, **options) * 2

    monkeypatch.setattr(models, "LEAST_SCORES", 0)
    model.encoder.block[0].layer[0].SelfAttention.__class__ = Louder
    assert count(model) == 2


def test_a_float_mask_is_added_to_the_values() -> None:
    model = model_of("T5")
    options = inputs_of(None)
    mask = torch.zeros(2, 1, 1, LENGTH, dtype=torch.float64)
    mask[1, :, :, 3:9] = -4.0
    wanted = step(model, {**options, "attention_mask": mask}, "eager")
    result = step(model, {**options, "attention_mask": mask}, "dmattn")
    assert_alike(result, wanted, "t5")
