"""transformers: the dynamic-mask language model against its formula in PyTorch, its caches, files and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", exc_type=ImportError)

import transformers
from torch import Tensor
from transformers_models import VERSION

from flash_dmattn.examples.dynamic_mask_model import DynamicMaskConfig, DynamicMaskForCausalLM
from flash_dmattn.integrations.transformers import check
from flash_dmattn.masks import topk_mask
from flash_dmattn.nn.positions import apply_rotary, rotary_angles

SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "keep_window_size": 6, "local_window_size": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def make(dtype: torch.dtype = torch.float64, **changes: Any) -> DynamicMaskForCausalLM:
    """A model whose weights are large enough to tell one attention from another."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(DynamicMaskConfig(**{**SIZES, **changes}))
    assert isinstance(model, DynamicMaskForCausalLM)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model.to(dtype)


def text(batch: int = 2, length: int = 20) -> Tensor:
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def formula(model: DynamicMaskForCausalLM, tokens: Tensor, positions: Tensor, real: Tensor) -> Tensor:
    """The logits of all positions, by a dense mask and a softmax."""
    config = model.config
    heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    length = tokens.shape[1]
    angles = rotary_angles(positions, config.head_dim, config.rope_theta)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    near = causal & ~causal.tril(-config.local_window_size)
    x = model.model.embed_tokens(tokens)
    for layer in model.model.layers:
        part, normed = layer.self_attn, layer.input_layernorm(x)
        q = apply_rotary(part.q_norm(part.q_proj(normed).unflatten(-1, (heads, -1))), angles)
        k = apply_rotary(part.k_norm(part.k_proj(normed).unflatten(-1, (heads // groups, -1))), angles)
        v = part.v_proj(normed).unflatten(-1, (heads // groups, -1))
        scores = (part.score_scale * F.softplus(part.score_proj(v.flatten(2)))).transpose(1, 2)[:, :, None]
        keep = topk_mask((scores.detach() * 4096).round(), config.keep_window_size, is_causal=True, mask=real)
        keep = (keep | (near & real)).repeat_interleave(groups, 1)
        k, v = (y.repeat_interleave(groups, 2).transpose(1, 2) for y in (k, v))
        logits = q.transpose(1, 2) @ k.mT * config.head_dim**-0.5 + scores.repeat_interleave(groups, 1)
        p = logits.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()
        x = x + part.o_proj((p @ v).transpose(1, 2).flatten(2))
        y = layer.post_attention_layernorm(x)
        x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
    return model.lm_head(model.model.norm(x))


@pytest.mark.parametrize("padded", ["no", "left", "right"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_formula(padded: str, checkpointing: bool | None) -> None:
    """Logits, loss and every gradient in fp64, with and without gradient checkpointing, reentrant or not."""
    model, tokens = make(), text()
    real = torch.ones_like(tokens)
    real[1, {"no": slice(0), "left": slice(6), "right": slice(14, None)}[padded]] = 0
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    labels = tokens.masked_fill(real == 0, -100)
    if padded == "left":
        labels[1, 6] = -100  # it is told by a row that sees no key
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    model.train()
    out = model(input_ids=tokens, attention_mask=real, position_ids=positions, labels=labels)
    out.loss.backward()
    result = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = formula(model, tokens, positions, real.bool()[:, None, None])
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    seen = real.bool()
    # transformers takes the loss in fp32.
    assert torch.allclose(out.loss.double(), loss, rtol=1e-6)
    assert torch.allclose(out.logits[seen], logits[seen], rtol=1e-9, atol=1e-9)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        grad = result[name]
        assert grad is not None and parameter.grad is not None, name
        assert float((grad - parameter.grad).abs().max()) < 1e-6 * largest, name
    assert float(result["model.layers.1.self_attn.score_scale"].abs().max()) > 1e-3 * largest  # the choice learns


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 2},
    "chunks": {"prefill_chunk_size": 7},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_generate(cache: str, padded: bool) -> None:
    """Tokens and logits equal a generation that reads its whole text again at each step."""
    if cache in ("chunks", "lookup") and VERSION.release < (5, 4):
        pytest.skip("transformers fails at these by itself")
    if cache == "lookup" and padded:
        pytest.skip("transformers does it for a batch of one")
    model, tokens = make().eval(), text()
    real = torch.ones_like(tokens)
    if padded:
        real[1, :6] = 0
    if cache == "lookup":
        tokens, real = tokens[:1], real[:1]
    flags: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    flags |= {"return_dict_in_generate": True, "output_logits": True}
    beams = {"num_beams": 2} if cache == "beams" else {}
    expected = model.generate(input_ids=tokens, attention_mask=real, use_cache=False, **flags, **beams)
    result = model.generate(input_ids=tokens, attention_mask=real, **flags, **CACHES[cache])
    assert torch.equal(result.sequences, expected.sequences)
    if cache not in ("beams", "lookup"):
        assert torch.allclose(torch.stack(result.logits), torch.stack(expected.logits), rtol=1e-9, atol=1e-9)


def test_positions_follow_the_cache() -> None:
    """Without position_ids: a text in two pieces is the text in one."""
    model, tokens = make().eval(), text()
    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=tokens[:, :12], cache=cache)
    second = model(input_ids=tokens[:, 12:], cache=cache, attention_mask=torch.ones_like(tokens))
    assert torch.allclose(second.logits, model(input_ids=tokens).logits[:, 12:], rtol=1e-9, atol=1e-9)


def test_static_cache_compiled() -> None:
    """One graph decodes; a prompt does not go into a static cache under a compiler."""
    model, tokens = make(num_hidden_layers=1).eval(), text()
    flags: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(input_ids=tokens, use_cache=False, **flags)
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    result = model.generate(input_ids=tokens, cache_implementation="static", compile_config=config, **flags)
    assert torch.equal(result, expected)


def test_compiled_training() -> None:
    """torch.compile(fullgraph=True) of a training step: the same loss and gradients."""
    model, tokens = make(num_hidden_layers=1).train(), text()
    result = []
    # Not "aot_eager": in torch 2.13 its softplus_backward of a transposed gradient has other strides than it was told.
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")):
        model.zero_grad()
        run(input_ids=tokens, labels=tokens).loss.backward()
        result.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    largest = max(float(grad.abs().max()) for grad in result[0])
    assert len(result[0]) == len(result[1]) == len(list(model.parameters()))
    # transformers takes the loss in fp32.
    assert all(float((a - b).abs().max()) < 1e-6 * largest for a, b in zip(*result, strict=True))


def test_folder_and_trainer(tmp_path: Path) -> None:
    """Trainer trains a model from a folder and saves it; what is loaded again is what was trained."""
    pytest.importorskip("accelerate", exc_type=ImportError)
    make(torch.float32).save_pretrained(tmp_path / "new")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    before = model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in make(torch.float32).state_dict().items())
    rows = [{"input_ids": row, "labels": row} for row in text(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "runs"),
        max_steps=12,
        learning_rate=1e-2,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        gradient_checkpointing=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < 0.7 * losses[0], losses
    trainer.save_model(str(tmp_path / "trained"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained").eval()
    model.eval()
    assert isinstance(loaded, DynamicMaskForCausalLM)
    assert torch.equal(loaded(text()).logits, model(text()).logits)
    assert loaded.config.keep_window_size == 6


def test_missing_weights_are_initialised(tmp_path: Path) -> None:
    """A score scale that a folder lacks is one: at zero all scores would tie."""
    make(torch.float32, keep_window_size=None).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, keep_window_size=4)
    scale = model.model.layers[0].self_attn.score_scale
    assert torch.equal(scale, torch.ones_like(scale))


def test_tied_embedding() -> None:
    model = make(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hidden_states_and_kept_logits() -> None:
    model, tokens = make().eval(), text()
    out = model(input_ids=tokens, output_hidden_states=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 20, 32)] * 3
    embedded = model(inputs_embeds=model.model.embed_tokens(tokens), logits_to_keep=3)
    assert torch.allclose(embedded.logits, out.logits[:, -3:])
    assert torch.allclose(model(input_ids=tokens, logits_to_keep=torch.tensor([4])).logits, out.logits[:, 4:5])


def test_full_attention() -> None:
    """Without a keep window every key is seen, as with one that is longer than the text."""
    model, tokens = make(keep_window_size=None).eval(), text()
    longer = make(keep_window_size=40).eval()
    longer.load_state_dict(model.state_dict(), strict=False)
    for layer in longer.model.layers:
        layer.self_attn.score_scale.data.zero_()
    assert torch.allclose(model(tokens).logits, longer(tokens).logits)


def test_check_lists_its_layers() -> None:
    model = make(torch.float32).eval()
    result = check(model, input_ids=text())
    assert result.complete and [row.kind for row in result.rows] == ["DynamicMaskSelfAttention"] * 2
    assert result.rows[0].calls[0].forward == "eager"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"attention_mask": torch.ones(2, 19).bool()}, ValueError, r"has shape \(2, 19\); it needs \(batch, 20\)"),
        ({"attention_mask": torch.ones(2, 20)}, TypeError, "dtype torch.float32; it needs bools or integers"),
        ({"attention_mask": torch.ones(2, 1, 20, 20)}, ValueError, r"\(2, 1, 20, 20\); it needs to be \(batch, keys\)"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions: probabilities are never made"),
        ({"cu_seq_lens_q": torch.zeros(2)}, NotImplementedError, "cu_seq_lens_q: give each document a row"),
        ({"nonsense": 1}, NotImplementedError, "does not know nonsense"),
        ({"inputs_embeds": torch.zeros(2, 20, 32)}, ValueError, "both are given"),
        ({"input_ids": None}, ValueError, "neither is given"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()(**{"input_ids": text(), **arguments})


def test_cache_refusals() -> None:
    """Layers that run twice cannot append; two caches are one too many."""
    model = make()
    first, second = (transformers.DynamicCache(config=model.config) for _ in range(2))
    with pytest.raises(ValueError, match="cache and past_key_values are both given"):
        model(input_ids=text(), cache=first, past_key_values=second)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing runs layers twice"):
        model.train()(input_ids=text(), cache=first)
