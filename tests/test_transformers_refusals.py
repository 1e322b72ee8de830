"""transformers: what would be computed wrongly is refused with one clear error, and what is of no effect is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", exc_type=ImportError)

import transformers
from transformers_models import SMALL, VOCABULARY, Counted, inputs, lacks_interface, make

from flash_dmattn.call import prepare_call
from flash_dmattn.integrations.transformers import attention_function, check, register
from flash_dmattn.integrations.transformers.attention_function import attend, observed
from flash_dmattn.integrations.transformers.mask_function import LayerMask
from flash_dmattn.integrations.transformers.models import asks_for_attention, is_called_without, makes_zeros

Q, K, V = torch.randn(3, 1, 4, 6, 8).unbind()
LIMITS = torch.tensor([0, 2, 6], dtype=torch.int32)


class Layer(torch.nn.Module):
    is_causal = True


def call(**options: Any) -> torch.Tensor:
    options = {"attention_mask": None, "scaling": None, "query": Q, "key": K, "value": V, **options}
    return attend(Layer(), **options)[0]


REFUSED: dict[type[Exception], list[tuple[str, dict[str, Any]]]] = {
    NotImplementedError: [
        ("does not know indices, which Layer passes", {"indices": torch.zeros(1)}),
        ("a paged cache, of continuous batching, is not read", {"cache": object()}),
        ("probabilities are never made", {"output_attentions": True}),
        (r"register\(ignored_arguments=\[\"sinks\"\]\)", {"sinks": torch.zeros(1)}),
        ("sliding_window is 5 and attention_mask, None, has no window", {"sliding_window": 5}),
        ("sliding_window is 4 .* of 6 keys it would forbid some", {"sliding_window": 4, "is_causal": False}),
        (
            r"attention_mask, LayerMask\(.*\), has no window",
            {"sliding_window": 5, "attention_mask": LayerMask((1, 1, 6, 6), is_causal=True)},
        ),
    ],
    ValueError: [
        (r"shape \(1, 6, 6\); a layer needs 4 dims", {"attention_mask": torch.ones(1, 6, 6)}),
        ("6 queries and 4 keys", {"key": K[:, :, :4], "value": V[:, :, :4]}),
        (
            "attention_mask is for 6 queries and 7 keys; this layer has 6 and 6",
            {"attention_mask": LayerMask((1, 1, 6, 7), is_causal=True)},
        ),
        ("cu_seq_lens_q is None", {"cu_seq_lens_k": LIMITS}),
        ("a batch of 2; .* a batch of 1", {"query": Q.expand(2, -1, -1, -1), "cu_seq_lens_q": LIMITS}),
        (
            r"attention_mask is a tensor of shape \(1, 1, 6, 6\), which does not go with it",
            {"cu_seq_lens_q": LIMITS, "attention_mask": torch.ones(1, 1, 6, 6).bool()},
        ),
        ("there is a bias", {"cu_seq_lens_q": LIMITS, "position_bias": torch.ones(1, 4, 6, 6)}),
        (
            "the keys are those of a static cache",
            {"cu_seq_lens_q": LIMITS, "attention_mask": LayerMask((1, 1, 6, 6), is_causal=True, used=4)},
        ),
    ],
    TypeError: [
        ("dtype int32; with 4 dims it needs to be bool", {"attention_mask": torch.ones(1, 1, 6, 6).int()}),
        (r"attention_mask is a list; it needs to be a torch\.Tensor", {"attention_mask": [[True] * 6]}),
        (r"position_bias is a list; it needs to be a torch\.Tensor", {"position_bias": [0.0]}),
        ("cu_seq_lens_q is a list; it needs to be an int32", {"cu_seq_lens_q": [0, 2, 6]}),
        ("cu_seq_lens_k is a list; it needs to be an int32", {"cu_seq_lens_q": LIMITS, "cu_seq_lens_k": [0, 2, 6]}),
    ],
}


@pytest.mark.parametrize("error, message, options", [(error, *row) for error, rows in REFUSED.items() for row in rows])
def test_refused(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        call(**options)


def test_what_is_of_no_effect_is_not_refused() -> None:
    want = call()
    for options in ({"position_ids": LIMITS}, {"indices": None}, {"output_attentions": False}, {"sliding_window": 6}):
        torch.testing.assert_close(call(**options), want, rtol=0, atol=0)
    for parts in ({}, {"documents": torch.zeros(1, 6).int(), "padding": torch.ones(1, 1, 1, 6).bool()}):
        mask = LayerMask((1, 1, 6, 6), is_causal=True, window=(3, -1), **parts)
        assert torch.equal(call(attention_mask=mask, sliding_window=4), call(attention_mask=mask))
    documents = {"cu_seq_lens_q": LIMITS, "max_length_q": 4, "max_length_k": 4}
    torch.testing.assert_close(call(sliding_window=4, **documents), call(**documents), rtol=0, atol=0)


def test_ignored_arguments_are_those_of_the_last_registration() -> None:
    """A registration says all of them: one that another library made is not widened by it, nor it by others."""

    def registered(**options: Any) -> torch.Tensor:
        return transformers.AttentionInterface()["dmattn"](Layer(), Q, K, V, None, **options)[0]

    try:
        register(ignored_arguments=["mine", "yours"])
        torch.testing.assert_close(registered(mine=3, yours=4, scaling=0.3), call(scaling=0.3), rtol=0, atol=0)
        with pytest.raises(NotImplementedError, match="does not know mine"):
            call(mine=3)
        register(ignored_arguments=["mine"])
        with pytest.raises(NotImplementedError, match="does not know yours"):
            registered(mine=3, yours=4)
    finally:
        register()
    with pytest.raises(NotImplementedError, match="does not know mine"):
        registered(mine=3)
    for used in ("position_bias", "cu_seq_lens_k"):
        with pytest.raises(ValueError, match=f"ignored_arguments has {used}, which attention uses"):
            register(ignored_arguments=["mine", used])
    for no_names in ("mine", None, [1]):
        with pytest.raises(TypeError, match=r"ignored_arguments is .*; it needs to be a list of names"):
            register(ignored_arguments=no_names)


def test_deterministic_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """True arrives; False, which a model passes by default, leaves it to torch."""
    arrived: list[Any] = []

    def watched(*tensors: Any, heads_first: bool) -> Any:
        layer = prepare_call(*tensors, heads_first=heads_first)
        arrived.append(layer.raw_flags.deterministic)
        return layer

    monkeypatch.setattr(attention_function, "prepare_call", watched)
    seen: list[Any] = []
    with observed(lambda module, options: seen.append(options["deterministic"])):
        for value in (True, False, None):
            call(deterministic=value)
    assert seen == arrived == [True, None, None]
    model = make("bert")
    model.set_attn_implementation(register())
    model(**inputs(model, "masked"), deterministic=True)
    assert arrived[3:] == 2 * [True]


class CrossAttention(torch.nn.Module):
    """As T5's says what it is, which makes zeros for a bias where it receives none."""

    is_causal, is_decoder, has_relative_attention_bias = False, True, False


def test_only_zeros_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their values: where a bias of cross attention is none of T5's own, it counts, and so does its gradient."""

    def attended(bias: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        seen: list[dict[str, Any]] = []
        with observed(lambda module, options: seen.append(options)):
            out = attend(CrossAttention(), Q, K, V, None, position_bias=bias)[0]
        return out, seen[0]["bias"]

    zeros, bias = torch.zeros(1, 4, 6, 6), torch.randn(1, 4, 6, 6)
    assert attended(zeros)[1] is None and attended(zeros)[1] is None
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert attended(zeros.clone())[1] is None  # no graph holds what is on a CPU
    result, used = attended(bias)
    assert used is not None and torch.equal(result, call(position_bias=bias, is_causal=False))
    zeros.copy_(bias)
    assert torch.equal(attended(zeros)[0], result)
    learned = torch.zeros(1, 4, 6, 6, requires_grad=True)
    attended(learned)[0].square().sum().backward()
    assert learned.grad is not None and learned.grad.abs().max() > 1e-3
    with torch.inference_mode():
        assert attended(torch.zeros(1, 4, 6, 6))[1] is not None  # nothing says when these change
    compiled = torch.compile(lambda x: attend(CrossAttention(), Q, K, V, None, position_bias=x)[0], backend="eager")
    torch.testing.assert_close(compiled(bias), result, rtol=0, atol=0)


def test_modules_that_make_zeros_are_known_by_their_source() -> None:
    """Their zeros need not be read, which would wait for a GPU; before 5.10 or so T5 adds its mask to them."""
    from transformers.models.t5 import modeling_t5
    from transformers.models.umt5 import modeling_umt5

    class Other(modeling_t5.T5Attention):
        def forward(self, position_bias: Any = None) -> Any:  # type: ignore[override]
            return attend(self, Q, K, V, None, position_bias=position_bias)

    interfaces = [kind for kind in (modeling_t5.T5Attention, modeling_umt5.UMT5Attention) if asks_for_attention(kind)]
    assert all(map(makes_zeros, interfaces)) and (interfaces or lacks_interface("t5"))
    assert not any(map(makes_zeros, (Other, CrossAttention, modeling_t5.T5LayerFF, torch.nn.Linear)))


def test_a_bias_that_cross_attention_receives_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too: the device asserts nothing of a bias that a caller or a hook has passed."""
    seen: list[tuple[bool, bool]] = []
    original = attention_function._is_empty_bias

    def as_on_a_gpu(module: Any, bias: torch.Tensor) -> bool:
        with monkeypatch.context() as gpu:
            gpu.setattr(torch.Tensor, "is_cuda", True)
            gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            empty = original(module, bias)
        seen.append((is_called_without(module, "position_bias"), empty))
        return empty

    monkeypatch.setattr(attention_function, "_is_empty_bias", as_on_a_gpu)
    model = make("t5")
    layer = model.decoder.block[0].layer[1].EncDecAttention.eval()
    x, y = (torch.randn(2, length, layer.d_model, dtype=torch.float64) for length in (6, 5))
    bias = torch.randn(1, layer.n_heads, 6, 5, dtype=torch.float64)
    results: dict[str, list[torch.Tensor]] = {}
    for name in ("eager", register()):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outs = [
                layer(x, None, y, bias),
                layer(x, key_value_states=y, position_bias=bias),
                layer.forward(x, None, y, bias),
            ]
            outs.append(layer(x, key_value_states=y))
            pass_bias = lambda module, args, kwargs: (args, {**kwargs, "position_bias": bias})
            hook = layer.register_forward_pre_hook(pass_bias, with_kwargs=True)
            outs.append(layer(x, key_value_states=y))
            hook.remove()
        results[name] = [out[0] for out in outs]
    assert seen == [*3 * [(False, False)], (True, True), (False, False)]
    for ours, theirs in zip(results[register()], results["eager"], strict=True):
        torch.testing.assert_close(ours, theirs)
    seen.clear()
    with torch.no_grad():
        model(**inputs(model, "masked"))
    crossed = [one for one in seen if one[1]]
    assert crossed[0] == (True, True) and len(crossed) == len(model.decoder.block), "layers share the zeros"


@pytest.mark.parametrize("kind", ("bias", "limits"))
def test_nothing_kept_goes_into_a_captured_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay computes with the values that tensors have then."""
    bias, longest = torch.randn(1, 4, 6, 6, dtype=torch.float64), torch.tensor(4)

    def made() -> Any:
        if kind == "bias":
            return attention_function.in_dtype(bias, torch.float32)
        return attention_function.take_packed({"cu_seq_lens_q": LIMITS, "max_length_q": longest}, 1)

    kept = made()
    assert made() is kept
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = made()
    assert captured is not kept and made() is not captured
    if kind == "limits":
        assert kept.max_seqlen_q == 4 and captured.max_seqlen_q is None


def test_what_is_known_of_limits_goes_with_them() -> None:
    """And is made anew where a tensor among them has changed in place."""
    limits, longest = LIMITS.clone(), torch.tensor(4)
    options = {"cu_seq_lens_q": limits, "max_length_q": longest, "max_length_k": longest}
    seen: list[Any] = []
    with observed(lambda module, call: seen.append(call["sequences"])):
        want = call(**options)
        assert torch.equal(call(**options), want)
        limits.copy_(torch.tensor([0, 3, 6]))
        longest.fill_(3)
        changed = call(**options)
    assert seen[0] is seen[1] and seen[1] is not seen[2]
    torch.testing.assert_close(changed[:, :3], call(query=Q[:, :, :3], key=K[:, :, :3], value=V[:, :, :3]))
    number = len(attention_function._limits)
    del limits, options
    assert len(attention_function._limits) == number - 1


def test_packed_sequences_with_padding() -> None:
    """A mask with cu_seq_lens_q counts: its padding forbids keys, its window holds within each sequence."""
    kept = torch.tensor([True, False, True, True, True, False])
    mask = LayerMask((1, 1, 6, 6), padding=kept[None, None, None], is_causal=True, window=(1, 0))
    result = call(cu_seq_lens_q=LIMITS, attention_mask=mask)
    index, document = torch.arange(6), torch.tensor([0, 0, 1, 1, 1, 1])
    distance = index[:, None] - index
    allowed = (document[:, None] == document) & (distance >= 0) & (distance <= 1) & kept
    want = call(attention_mask=allowed[None, None])
    torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-6)


def test_without_a_mask_queries_and_keys_are_aligned_at_their_beginning() -> None:
    """As transformers has it of an empty static cache: query i sees keys up to i, and a bias is cut with them."""
    bias = torch.randn(1, 4, 4, 6)
    result = call(query=Q[:, :, :4], position_bias=bias)
    allowed = torch.ones(4, 6, dtype=torch.bool).tril()
    want = call(query=Q[:, :, :4], attention_mask=allowed[None, None], position_bias=bias)
    torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-6)
    one = call(query=Q[:, :, :1])  # a single query sees all keys
    torch.testing.assert_close(one, call(query=Q[:, :, :1], is_causal=False), rtol=0, atol=0)


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
        options = {"decoder_input_ids": tokens} if name == "t5" else {}
        with pytest.raises(NotImplementedError, match=f"{type(model).__name__} has no attention interface"):
            model(tokens, **options)
    assert not counted.calls


def test_check_says_what_each_module_runs_on(counted: Counted) -> None:
    model = make("mistral")
    model.set_attn_implementation("dmattn")
    assert str(check(model)).splitlines() == [
        f"model.layers.{layer}.self_attn (MistralAttention): on dmattn" for layer in (0, 1)
    ]
    result = check(model, **inputs(model, "causal", "right"))
    assert result.complete
    (call,) = result.rows[0].calls
    assert (call.forward, call.backward) == ("sdpa", "sdpa")
    assert call.problem.window_size == (4, -1) or call.problem.window_size == (4, 0)
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        assert str(check(model, **inputs(model, "causal"))).endswith("(MistralAttention): sdpa")
    model.set_attn_implementation("sdpa")
    result = check(model)
    assert not result.complete and result.rows[0].problem is not None
    assert 'its configuration says "sdpa"' in result.rows[0].problem


def test_check_needs_a_module() -> None:
    with pytest.raises(TypeError, match=r"model is a NoneType; it needs to be a torch\.nn\.Module"):
        check(None)


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
    result = check(model.model.encoder, input_ids=tokens)
    assert result.complete and len(result.rows) == 2
    model.model.decoder.layers = model.model.decoder.layers[:1]
    kept = torch.nn.ModuleDict({"model": model, "unused": make("vit")})
    kept["unused"].set_attn_implementation("dmattn")
    kept.forward = lambda **options: model(**options)  # type: ignore[method-assign]
    rows = {row.name.partition(".")[0]: row.problem for row in check(kept, input_ids=tokens).rows}
    assert rows == {"model": None, "unused": "these inputs do not reach it"}
