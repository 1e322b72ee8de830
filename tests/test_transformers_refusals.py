"""transformers: what would be computed wrongly is refused with one clear error, and what is of no effect is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", exc_type=ImportError)

import transformers
from transformers_fixture import Counted
from transformers_models import SMALL, VOCABULARY, inputs, lacks_interface, make

from flash_dmattn.integrations.transformers import arguments, check, register
from flash_dmattn.integrations.transformers.attention_function import attend
from flash_dmattn.integrations.transformers.layer_mask import LayerMask

Q, K, V = torch.randn(3, 1, 4, 6, 8).unbind()
LIMITS = torch.tensor([0, 2, 6], dtype=torch.int32)


class Layer(torch.nn.Module):
    is_causal = True


def call(**given: Any) -> torch.Tensor:
    given = {"attention_mask": None, "scaling": None, "query": Q, "key": K, "value": V, **given}
    return attend(Layer(), **given)[0]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"indices": torch.zeros(1)}, NotImplementedError, "does not know indices, which Layer passes"),
        ({"cache": object()}, NotImplementedError, "a paged cache, of continuous batching, is not read"),
        ({"output_attentions": True}, NotImplementedError, "probabilities are never made"),
        ({"sinks": torch.zeros(1)}, NotImplementedError, r"register\(ignored_arguments=\[\"sinks\"\]\)"),
        ({"attention_mask": torch.ones(1, 6, 6)}, ValueError, r"shape \(1, 6, 6\); a layer needs 4 dims"),
        ({"attention_mask": torch.ones(1, 1, 6, 6).int()}, TypeError, "dtype int32; with 4 dims it needs to be bool"),
        ({"key": K[:, :, :4], "value": V[:, :, :4]}, ValueError, "6 queries and 4 keys"),
        (
            {"attention_mask": LayerMask((1, 1, 6, 7), is_causal=True)},
            ValueError,
            "attention_mask is for 6 queries and 7 keys; this layer has 6 and 6",
        ),
        ({"cu_seq_lens_k": LIMITS}, ValueError, "cu_seq_lens_q is None"),
        ({"query": Q.expand(2, -1, -1, -1), "cu_seq_lens_q": LIMITS}, ValueError, "a batch of 2; .* a batch of 1"),
        (
            {"cu_seq_lens_q": LIMITS, "attention_mask": torch.ones(1, 1, 6, 6).bool()},
            ValueError,
            r"attention_mask is a tensor of shape \(1, 1, 6, 6\), which does not go with it",
        ),
        ({"cu_seq_lens_q": LIMITS, "position_bias": torch.ones(1, 4, 6, 6)}, ValueError, "there is a bias"),
        (
            {"cu_seq_lens_q": LIMITS, "attention_mask": LayerMask((1, 1, 6, 6), is_causal=True, used=4)},
            ValueError,
            "the keys are those of a static cache",
        ),
    ],
)
def test_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**given)


def test_what_is_of_no_effect_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    want = call()
    for given in ({"position_ids": LIMITS}, {"indices": None}, {"output_attentions": False}, {"sliding_window": 4}):
        torch.testing.assert_close(call(**given), want, rtol=0, atol=0)
    monkeypatch.setattr(arguments, "_HARMLESS", set(arguments._HARMLESS))
    register(ignored_arguments=["mine"])
    torch.testing.assert_close(call(mine=3), want, rtol=0, atol=0)


def test_packed_sequences_with_padding() -> None:
    """A mask beside cu_seq_lens_q counts: its padding forbids keys, its window holds within each sequence."""
    kept = torch.tensor([True, False, True, True, True, False])
    mask = LayerMask((1, 1, 6, 6), padding=kept[None, None, None], is_causal=True, window=(1, 0))
    found = call(cu_seq_lens_q=LIMITS, attention_mask=mask)
    index, document = torch.arange(6), torch.tensor([0, 0, 1, 1, 1, 1])
    distance = index[:, None] - index
    allowed = (document[:, None] == document) & (distance >= 0) & (distance <= 1) & kept
    want = call(attention_mask=allowed[None, None])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_without_a_mask_queries_and_keys_are_aligned_at_their_beginning() -> None:
    """As transformers has it of an empty static cache: query i sees keys up to i, and a bias is cut with them."""
    bias = torch.randn(1, 4, 4, 6)
    found = call(query=Q[:, :, :4], position_bias=bias)
    allowed = torch.ones(4, 6, dtype=torch.bool).tril()
    want = call(query=Q[:, :, :4], attention_mask=allowed[None, None], position_bias=bias)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    one = call(query=Q[:, :, :1])  # a single query sees all keys
    torch.testing.assert_close(one, call(query=Q[:, :, :1], is_causal=False), rtol=0, atol=0)


def test_output_attentions_of_a_model(counted: Counted) -> None:
    model = make("bert")
    model.set_attn_implementation("dmattn")
    given = inputs(model, "masked")
    with pytest.raises(NotImplementedError, match="probabilities are never made"):
        model(**given, output_attentions=True)


def test_dropout_in_training_alone(counted: Counted) -> None:
    config = transformers.BertConfig(vocab_size=VOCABULARY, **SMALL)  # 0.1, by default
    model = transformers.AutoModel.from_config(config, attn_implementation="dmattn")
    tokens = torch.ones(1, 5, dtype=torch.long)
    model.eval()(tokens)
    assert [call["dropout_p"] for call in counted.calls] == [0.0, 0.0]
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(model.train()(tokens).last_hidden_state)
    assert [call["dropout_p"] for call in counted.calls[2:]] == 6 * [0.1]
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


# The newest model that calls the mask function and computes attention itself.
MISREADS = "bloom" if lacks_interface("t5") is None else "t5"
WITHOUT = {
    "t5": lambda: transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "mpnet": lambda: transformers.MPNetConfig(vocab_size=VOCABULARY, **SMALL),
    "deberta": lambda: transformers.DebertaV2Config(vocab_size=VOCABULARY, **SMALL),
}


@pytest.mark.parametrize("name", [name for name in WITHOUT if name in ("mpnet", "deberta", MISREADS)])
def test_models_without_an_interface(name: str, counted: Counted) -> None:
    """from_config takes any name for them; check refuses, and so does the mask function where they call it."""
    model = transformers.AutoModel.from_config(WITHOUT[name](), attn_implementation="dmattn")
    with pytest.raises(NotImplementedError, match=f"{type(model).__name__} has no attention interface"):
        check(model)
    if name == MISREADS:  # its own code would add our mask to its scores
        tokens = torch.ones(1, 5, dtype=torch.long)
        given = {"decoder_input_ids": tokens} if name == "t5" else {}
        with pytest.raises(NotImplementedError, match=f"{type(model).__name__} has no attention interface"):
            model(tokens, **given)
    assert not counted.calls


def test_check_says_what_each_module_runs_on(counted: Counted) -> None:
    model = make("mistral")
    model.set_attn_implementation("dmattn")
    assert str(check(model)).splitlines() == [
        f"model.layers.{layer}.self_attn (MistralAttention): on dmattn" for layer in (0, 1)
    ]
    found = check(model, **inputs(model, "causal", "right"))
    assert found.complete
    (call,) = found.rows[0].calls
    assert (call.forward, call.backward) == ("eager", "eager")
    assert call.problem.window_size == (4, -1) or call.problem.window_size == (4, 0)
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert str(check(model, **inputs(model, "causal"))).endswith("(MistralAttention): eager")
    model.set_attn_implementation("sdpa")
    found = check(model)
    assert not found.complete and found.rows[0].problem is not None
    assert 'its configuration says "sdpa"' in found.rows[0].problem


def test_check_names_modules_that_compute_attention_themselves(counted: Counted) -> None:
    if lacks_interface("t5") is not None:
        pytest.skip("LongT5 has an attention interface in its decoder from 5.15 on")
    config = transformers.LongT5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    model = transformers.AutoModel.from_config(config, attn_implementation="dmattn")
    problems = {row.name: row.problem for row in check(model).rows}
    assert problems["decoder.block.0.layer.0.SelfAttention"] is None
    assert "computes attention itself" in str(problems["encoder.block.0.layer.0.LocalSelfAttention"])


def test_check_names_modules_that_the_inputs_do_not_reach(counted: Counted) -> None:
    model = make("bart")
    model.set_attn_implementation("dmattn")
    tokens = inputs(model, "seq2seq")["input_ids"]
    found = check(model.model.encoder, input_ids=tokens)
    assert found.complete and len(found.rows) == 2
    model.model.decoder.layers = model.model.decoder.layers[:1]
    kept = torch.nn.ModuleDict({"model": model, "unused": make("vit")})
    kept["unused"].set_attn_implementation("dmattn")
    kept.forward = lambda **given: model(**given)  # type: ignore[method-assign]
    rows = {row.name.partition(".")[0]: row.problem for row in check(kept, input_ids=tokens).rows}
    assert rows == {"model": None, "unused": "these inputs do not reach it"}
