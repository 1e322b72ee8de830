"""transformers: what Gemma 4 asks besides other models, blocks of images within windows, and layers of few queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", exc_type=ImportError)

import transformers
from test_transformers_masks import FUNCTIONS, PLACES, allowed_by, arguments, dense
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils
from transformers_models import FAMILIES, Counted, assert_alike, inputs, lacks_interface, limits, make, padding, step

from flash_dmattn.integrations.transformers.mask_function import LayerMask, make_mask
from flash_dmattn.masks.prepared.storage import IntervalMask

REASON = lacks_interface("gemma4")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0, 0], [-1, -1, 3, 3, 3, -1, -1, -1]])
SQUARE = PLACES["training"]


def image_mask(blocks: Tensor, window: int = 3) -> Any:
    """The mask function of Gemma 4 in layers with windows, where the tokens of an image see each other."""
    either = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(blocks))
    return masking_utils.and_masks(either, masking_utils.sliding_window_overlay(window))


def made(blocks: Tensor, window: int = 3, side: str | None = None, place: str = "training") -> tuple[Any, Tensor]:
    """Make the mask that a layer gets, and the mask of transformers."""
    mask = None if side is None else padding(8, side).bool()
    options = arguments(PLACES[place], image_mask(blocks, window), mask) | {"use_vmap": True}
    return make_mask(**options, allow_is_causal_skip=False), dense(options)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("window", [1, 3, 99])
def test_blocks_within_a_window_are_intervals(window: int, side: str | None) -> None:
    mask, wanted = made(BLOCKS, window, side)
    assert isinstance(mask, LayerMask) and isinstance(mask.arguments(False).mask, IntervalMask)
    assert torch.equal(allowed_by(mask, SQUARE, False, False), wanted)
    assert "blocks" in repr(mask) and mask.to("meta").blocks.device.type == "meta"


@pytest.mark.parametrize(
    ("what", "place"),
    [
        ("a block in two runs", "training"),
        ("a number that comes again", "training"),
        ("blocks of more tokens", "training"),
        ("decoding", "decoding"),
    ],
)
def test_other_blocks_are_evaluated(what: str, place: str) -> None:
    blocks = BLOCKS.clone()
    if what == "a block in two runs":
        blocks[0] = torch.tensor([0, 0, -1, -1, 0, 0, -1, 1])
    elif what == "a number that comes again":
        blocks[0] = torch.tensor([1, 1, 0, 0, 1, 1, -1, -1])
    elif what == "blocks of more tokens":
        blocks = functional.pad(blocks, (0, 2), value=-1)
    mask, wanted = made(blocks, place=place)
    assert isinstance(mask, Tensor) and torch.equal(mask, wanted)


def test_other_unions_are_evaluated() -> None:
    overlay, window = masking_utils.blockwise_overlay(BLOCKS), masking_utils.sliding_window_overlay(3)
    causal = masking_utils.causal_mask_function
    for function in (
        overlay,
        masking_utils.or_masks(overlay, causal),
        masking_utils.or_masks(window, overlay),
        masking_utils.or_masks(causal, window),
        masking_utils.or_masks(causal, overlay, window),
        masking_utils.and_masks(masking_utils.or_masks(causal, overlay), causal),
        masking_utils.and_masks(image_mask(BLOCKS), masking_utils.or_masks(causal, overlay)),
    ):
        options = arguments(SQUARE, function, None) | {"use_vmap": True}
        mask = make_mask(**options, allow_is_causal_skip=False)
        assert isinstance(mask, Tensor) and torch.equal(mask, dense(options))


@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("name", [*FUNCTIONS, "image blocks"])
def test_the_last_queries_of_a_mask(name: str, queries: int) -> None:
    """Layers that take keys from others compute only their last queries, and slice the mask by rows."""
    config = transformers.Gemma4TextConfig(**FAMILIES["gemma4"].arguments)
    function = image_mask(BLOCKS) if name == "image blocks" else FUNCTIONS[name]()
    documents = name.startswith("documents")
    side = None if documents else "left"
    mask = None if side is None else padding(8, side).bool()
    options = arguments(SQUARE, function, mask) | {"use_vmap": name == "image blocks"}
    result = make_mask(**options, config=config, allow_is_causal_skip=not documents, allow_is_bidirectional_skip=True)
    assert isinstance(result, LayerMask)
    part = result[:, :, slice(-queries, None), :]
    assert part.shape == (3, 1, queries, 8)
    wanted = dense(options)[:, :, -queries:]
    assert torch.equal(allowed_by(part, (queries, 8, 0, 0), False, False), wanted)
    twice = result[:, :, 2:, :]
    assert queries > 6 or torch.equal(allowed_by(twice[:, :, -queries:, :], (queries, 8, 0, 0), False, False), wanted)


@pytest.mark.parametrize("keep", [1, 3, 0])
@pytest.mark.parametrize("side", [None, "left"])
def test_logits_of_the_last_tokens(side: str | None, keep: int, counted: Counted) -> None:
    """Without padding the mask of a full layer is None in other models, and would stand for the first queries."""
    model = make("gemma4").eval()
    options = inputs(model, "causal", side)
    del options["labels"]
    logits = {}
    for implementation in ("eager", "dmattn"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(**options, logits_to_keep=keep, use_cache=True).logits
    length = keep or options["input_ids"].shape[1]
    assert [call["q"].shape[1] for call in counted.calls] == [14, 14, length, length]
    assert logits["dmattn"].shape[1] == length
    keep = padding(14, side)[:, -length:].bool()
    error = (logits["dmattn"] - logits["eager"])[keep].abs().max() / logits["eager"].abs().max()
    assert float(error) < limits("gemma4")[0]


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_images_as_eager(side: str | None, counted: Counted) -> None:
    """Loss and gradients of a model whose sliding layers let the tokens of an image see each other."""
    text = transformers.Gemma4TextConfig(**FAMILIES["gemma4"].arguments, use_bidirectional_attention="vision")
    tokens_of = {"image_token_id": 90, "video_token_id": 91, "audio_token_id": 92}
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None, **tokens_of)
    torch.manual_seed(0)
    model = transformers.Gemma4ForConditionalGeneration(config).double().train()
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim >= 2:
                values.mul_(6)
    options = inputs(model, "causal", side)
    options["input_ids"].clamp_(max=80)
    kinds = torch.zeros_like(options["input_ids"])
    kinds[:, 4:9] = kinds[1, 10:12] = 1
    options |= {"mm_token_type_ids": kinds, "labels": options["labels"].clamp(max=80)}
    wanted = step(model, options, "eager")
    assert not counted.calls
    result = step(model, options, "dmattn")
    forms = ["dense" if isinstance(c["mask"], Tensor) else c["mask"] and c["mask"].form for c in counted.calls]
    assert forms == ["intervals", None if side is None else "dense"] * 2
    keep = None if side is None else options["attention_mask"].bool()
    assert_alike(result, wanted, "gemma4", keep)
