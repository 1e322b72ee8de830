"""transformers: logits, loss and every gradient of small models against their own eager attention."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", exc_type=ImportError)

from transformers_models import (
    DRAWN,
    FAMILIES,
    LENGTH,
    Counted,
    Graphs,
    assert_alike,
    drawn,
    inputs,
    lacks_interface,
    make,
    step,
)

from flash_dmattn.integrations.transformers import register
from flash_dmattn.integrations.transformers.attention_function import in_dtype
from flash_dmattn.integrations.transformers.mask_function import LayerMask

CASES = [
    (name, side)
    for name, family in FAMILIES.items()
    for side in ((None,) if family.kind in ("image", "speech") else (None, "right", "left"))
    # CLIP reads its features at a padded position, where eager has the mean of v and others 0.
    if (family.kind, side) != ("features", "left")
]
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])


def compare(name: str, side: str | None, counted: Counted, **changes: Any) -> None:
    model = make(name, **changes).train()
    family = FAMILIES[name]
    options = inputs(model, family.kind, side)
    wanted = step(model, options, "eager")
    assert not counted.calls, "eager has called us: the comparison would be with itself"
    result = step(model, options, "dmattn")
    assert len(counted.calls) == family.calls
    by_token = side is not None and family.kind in ("causal", "masked")
    keep = options["attention_mask"].bool() if by_token else None
    assert_alike(result, wanted, name, keep)


@pytest.mark.parametrize(("name", "side"), CASES)
def test_as_eager(name: str, side: str | None, counted: Counted) -> None:
    compare(name, side, counted)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", DRAWN)
def test_as_eager_of_drawn_sizes(name: str, number: int, counted: Counted) -> None:
    """Other heads, groups, head dims and windows than those above; padded on either side, or not."""
    side = (None, "right", "left")[number]
    compare(name, side, counted, **drawn(name, number))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.kind == "causal"])
def test_packed_documents(name: str, rows: int, counted: Counted) -> None:
    """Position ids that begin anew; a batch of one row is packed, of several rows each has intervals."""
    reason = lacks_interface(name)
    if reason is not None:
        pytest.skip(reason)
    model = make(name).train()
    options = {key: x[:rows] for key, x in inputs(model, "causal").items()}
    options |= {"position_ids": POSITIONS.expand(rows, -1), "use_cache": False}
    wanted = step(model, options, "eager")
    result = step(model, options, "dmattn")
    assert len(counted.calls) == FAMILIES[name].calls
    # Chunks follow no rule; GPT-OSS does not tell its masks of positions; DeepSeek chooses keys of each query.
    if name not in ("llama4", "gpt_oss", "deepseek_v32"):
        forms = {"packed" if call["sequences"] is not None else call["mask"].form for call in counted.calls}
        assert forms == ({"packed"} if rows == 1 else {"intervals"})
    assert_alike(result, wanted, name)


@pytest.mark.parametrize("limits_are", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_packed_documents_that_a_collator_describes(name: str, limits_are: torch.dtype, counted: Counted) -> None:
    """cu_seq_lens_q and the like, with the cache that models make by default: as separate documents."""
    model = make(name).train()
    tokens = inputs(model, "causal")["input_ids"][:1]
    limits_of = torch.tensor([0, 4, 10, 14], dtype=limits_are)
    more = {"cu_seq_lens_q": limits_of, "cu_seq_lens_k": limits_of, "max_length_q": 6, "max_length_k": 6}

    def alone(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = [model(input_ids=part).logits for part in input_ids.split([4, 6, 4], dim=1)]
        return {"logits": torch.cat(parts, 1)}

    class Joined(dict[str, torch.Tensor]):
        logits = property(lambda self: self["logits"])

    wanted = step(model, {"input_ids": tokens}, "eager", lambda **options: Joined(alone(**options)))
    result = step(model, {"input_ids": tokens, "position_ids": POSITIONS, **more}, "dmattn")
    assert len(counted.calls) == 2
    assert counted.calls[0]["sequences"] is counted.calls[1]["sequences"]  # made once
    assert_alike(result, wanted, name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "t5", "swin"])
def test_checkpointing(name: str, reentrant: bool, counted: Counted) -> None:
    model = make(name).train()
    options = inputs(model, FAMILIES[name].kind, None if name == "swin" else "right")
    wanted = step(model, options, "eager")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    result = step(model, options, "dmattn")
    assert len(counted.calls) >= 2 * FAMILIES[name].calls  # Swin recomputes a stage, and each block in it again
    result = result._replace(logits=wanted.logits)  # padded tokens are compared by the test above
    assert_alike(result, wanted, name)


@pytest.mark.parametrize("form", ["bool", "float"])
def test_masks_of_the_user(form: str, counted: Counted) -> None:
    """4-D masks go through as they are; one of floats that only hides keys becomes one of bools, for all layers."""
    model = make("llama").train()
    options = inputs(model, "causal")
    allowed = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    allowed |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(allowed.shape).double().masked_fill(~allowed, torch.finfo(torch.float64).min)
    wanted = step(model, {**options, "attention_mask": added}, "eager")
    result = step(model, {**options, "attention_mask": allowed if form == "bool" else added}, "dmattn")
    assert len(counted.calls) == 2
    for call in counted.calls:
        assert call["bias"] is None and call["mask"] is counted.calls[0]["mask"] and torch.equal(call["mask"], allowed)
    assert_alike(result, wanted, "llama")


@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_autocast(name: str, counted: Counted) -> None:
    model = make(name, torch.float32).train()
    options = inputs(model, FAMILIES[name].kind, "right")
    exact = step(model, options, "eager").loss
    losses = {}
    for implementation in ("eager", "dmattn"):
        with torch.autocast("cpu", torch.bfloat16):
            losses[implementation] = step(model, options, implementation).loss
    assert {call["q"].dtype for call in counted.calls} == {torch.bfloat16}
    assert {call["bias"].dtype for call in counted.calls if call["bias"] is not None} <= {torch.bfloat16}
    off = {name: abs(float(loss - exact)) for name, loss in losses.items()}
    assert off["dmattn"] <= 1.5 * off["eager"] + 1e-3 * float(exact)


def test_a_bias_is_converted_once(counted: Counted) -> None:
    """T5's bias comes with a last stride that is not 1; all layers of a stack receive one contiguous tensor."""
    model = make("t5").train()
    step(model, inputs(model, "seq2seq", "right"), "dmattn")
    biases = [call["bias"] for call in counted.calls]
    assert [bias is not None for bias in biases] == [True, True, True, False, True, False]  # none of cross attention
    assert all(bias is None or bias.is_contiguous() for bias in biases)
    assert biases[0] is biases[1] and biases[2] is biases[4] and biases[0] is not biases[2]


def test_the_copy_of_a_bias_follows_it(young_heap: None) -> None:
    """Changed in place or for another dtype it is made anew; it has the gradient of its original, and goes with it."""
    bias = torch.randn(1, 3, 4, 2).transpose(1, 3)
    first = in_dtype(bias, torch.float32)
    assert first is in_dtype(bias, torch.float32) and first.is_contiguous() and torch.equal(first, bias)
    assert in_dtype(first, torch.float32) is first
    assert in_dtype(bias, torch.bfloat16).dtype == torch.bfloat16
    bias.mul_(2)
    assert torch.equal(in_dtype(bias, torch.float32), bias)
    shared = torch.randn(1, 2, 4, 1).expand(5, -1, -1, 3)
    small = in_dtype(shared, torch.float32)
    assert small.shape == (1, 2, 4, 1) and torch.equal(small.expand(5, -1, -1, 3), shared)
    learned = torch.randn(1, requires_grad=True)
    computed = learned * bias
    with torch.no_grad():
        assert not in_dtype(computed, torch.float32).requires_grad
    in_dtype(computed, torch.float32).sum().backward()
    assert learned.grad is not None
    reference = weakref.ref(in_dtype(computed, torch.float32))
    del computed
    gc.collect()
    assert reference() is None


def test_masks_are_never_as_large_as_scores(counted: Counted) -> None:
    """Masks of known mask functions hold O(L), and are the same for all layers."""
    for name, family in FAMILIES.items():
        if (
            family.kind not in ("causal", "masked")
            or name in ("llama4", "deepseek_v32")
            or lacks_interface(name) is not None
        ):
            continue
        counted.masks.clear()
        model = make(name).train()
        step(model, inputs(model, family.kind, "right"), "dmattn")
        assert counted.masks
        for mask in counted.masks:
            assert isinstance(mask, LayerMask), (name, mask)
            held = [x.numel() for x in (mask.padding, mask.documents, mask.used) if isinstance(x, torch.Tensor)]
            assert sum(held) <= 3 * LENGTH


@pytest.mark.parametrize("name", ["mistral", "bert"])
def test_training_in_one_graph(name: str) -> None:
    """Closures of mask functions are hidden from a compiler: the window is read from flags."""
    register()
    model = make(name, num_hidden_layers=1).train()
    options = inputs(model, FAMILIES[name].kind, "right")
    wanted = step(model, options, "dmattn")
    torch._dynamo.reset()
    graphs = Graphs()
    result = step(model, options, "dmattn", torch.compile(model, backend=graphs, fullgraph=True))
    assert len(graphs.calls) == 1 and graphs.calls[0] >= 1
    assert all((x is None) == (y is None) for x, y in zip(result.gradients.values(), wanted.gradients.values()))
    assert_alike(result, wanted, name)
