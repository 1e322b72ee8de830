"""Small models of transformers with random weights, their inputs, and what tests of them share.

Each model stands for a way of calling attention. `counting`, the fixture `counted`, registers "dmattn" and records what
arrives and is called.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing here is downloaded
import transformers
from packaging.version import Version

from flash_dmattn.integrations.transformers import attention_function, register

VERSION = Version(transformers.__version__)
VOCABULARY, LENGTH, BATCH = 96, 14, 3
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**TOKENS, **SMALL, "max_position_embeddings": 128, "attention_dropout": 0.0}
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**SMALL, **NO_DROPOUT, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
HYBRID = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
T5 = {
    "vocab_size": VOCABULARY,
    **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
}
SEQ2SEQ = {
    **TOKENS,
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 1},
    **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}  # grouped_mm has no float64
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
IMAGE = {**SMALL, **NO_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 3}


class Family(NamedTuple):
    """How a model is made, what it reads, and since which version it has an attention interface."""

    model: str
    config: str
    arguments: dict[str, Any]
    kind: str = "causal"
    since: str = "5.0"
    calls: int = 2  # of attention in one forward


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 7},
    ),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **HYBRID}),
    "gemma4": Family(  # head dims of two widths; the last two layers attend to the keys of the first two
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**DECODER, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 5}
        | {"global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
        since="5.5",
        calls=4,
    ),
    "gpt_oss": Family("GptOssForCausalLM", "GptOssConfig", {**GROUPED, **HYBRID, **EXPERTS, "num_local_experts": 4}),
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", {**GROUPED, **EXPERTS, "num_local_experts": 4, "sliding_window": None}
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**DECODER, **LATENT, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "deepseek_v32": Family(  # each query chooses its keys
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**DECODER, **LATENT, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 2},
        since="5.24",
    ),
    "llama4": Family(  # attention in chunks: a mask function that no rule describes
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**GROUPED, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": []}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
        | {"eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", ENCODER, "masked"),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TOKENS, **SMALL, "num_hidden_layers": 3, "max_position_embeddings": 64, "local_attention": 6}
        | {"global_attn_every_n_layers": 3, "cls_token_id": 3, "sep_token_id": 4},
        "masked",
        "5.4",
        3,
    ),
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5, "seq2seq", "5.20", 6),
    "umt5": Family("UMT5ForConditionalGeneration", "UMT5Config", T5, "seq2seq", "5.20", 6),
    "bart": Family(
        "BartForConditionalGeneration", "BartConfig", {**SEQ2SEQ, "max_position_embeddings": 64}, "seq2seq", calls=6
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
        "speech",
        calls=6,
    ),
    "vit": Family("ViTForImageClassification", "ViTConfig", IMAGE, "image"),
    "swin": Family(
        "SwinForImageClassification",
        "SwinConfig",
        {**NO_DROPOUT, "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
        | {"window_size": 4, "drop_path_rate": 0.0, "num_labels": 3},
        "image",
        "5.10",
        4,
    ),
    "clip": Family(
        "CLIPTextModelWithProjection", "CLIPTextConfig", {**TOKENS, **SMALL, "max_position_embeddings": 32}, "features"
    ),
}


DRAWN = (
    *("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "mixtral", "llama4", "deepseek_v3", "gpt2", "bert"),
    *("modernbert", "t5", "umt5", "bart"),
)


def drawn(name: str, number: int) -> dict[str, Any]:
    """Changes to the configuration of a family in DRAWN: heads, groups, widths and windows; the same in every run."""
    rng = random.Random(f"{name} {number}")
    dim, heads_k, window = rng.choice((8, 12, 20)), rng.choice((1, 2, 3)), rng.randint(2, 9)
    heads = heads_k * rng.choice((1, 2, 4))
    hidden = heads * dim  # of models whose heads share the hidden size
    heads_alone = {"hidden_size": hidden, "num_attention_heads": heads}
    if name == "gpt2":
        return {"n_embd": hidden, "n_head": heads}
    if name in ("t5", "umt5"):
        return {"d_model": rng.choice((24, 40)), "d_kv": dim, "num_heads": heads}
    if name == "bart":
        return {"d_model": hidden, "encoder_attention_heads": heads, "decoder_attention_heads": heads}
    if name in ("bert", "modernbert"):
        return heads_alone | ({"local_attention": 2 * window} if name == "modernbert" else {})
    if name == "deepseek_v3":
        latent = {"qk_nope_head_dim": dim, "v_head_dim": rng.choice((8, 16))}
        return {"num_attention_heads": heads, "num_key_value_heads": heads, **latent}
    windows = {"sliding_window": window} if name in ("mistral", "gemma2", "gemma3", "gpt_oss") else {}
    grouped = {"num_attention_heads": heads, "num_key_value_heads": heads_k, "head_dim": dim}
    return {"hidden_size": rng.choice((24, 40)), **grouped, **windows}


def lacks_interface(name: str) -> str | None:
    """Why a family is left out with this version of transformers; None where it is not."""
    since = FAMILIES[name].since
    if Version(since) > VERSION:
        return f"{FAMILIES[name].model} obeys set_attn_implementation from transformers {since} on, this is {VERSION}"
    return None


def make(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model whose weights are large enough for attention to matter; the same in every run.

    It skips the test where this version of transformers has no attention interface for the model.

    Args:
        name, dtype: of FAMILIES, and of its weights.
        changes: to its configuration.
    """
    family, reason = FAMILIES[name], lacks_interface(name)
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    model = getattr(transformers, family.model)(
        getattr(transformers, family.config)(**{**family.arguments, **changes})
    ).to(dtype)
    with torch.no_grad():
        for weight, values in model.named_parameters():
            if values.ndim >= 2:
                values.mul_(6)
            if "relative" in weight or "sink" in weight:
                values.normal_()
    return model


def padding(length: int, side: str | None) -> Tensor:
    """(BATCH, length), 0 for padding: none in the first row, 4 tokens in the second, 1 in the third."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    if side == "right":
        mask[1, length - 4 :] = mask[2, length - 1 :] = 0
    elif side == "left":
        mask[1, :4] = mask[2, :1] = 0
    return mask


def inputs(model: nn.Module, kind: str, side: str | None = None) -> dict[str, Any]:
    """Draw the inputs of a model of this kind, with labels; `side` is where the padding is, None for no mask at all."""
    generator, dtype = torch.Generator().manual_seed(1), next(model.parameters()).dtype

    def draw(length: int) -> Tensor:
        return torch.randint(5, VOCABULARY, (BATCH, length), generator=generator)

    if kind == "image":
        config = model.config
        pixels = torch.randn(BATCH, config.num_channels, config.image_size, config.image_size, generator=generator)
        return {"pixel_values": pixels.to(dtype), "labels": torch.tensor([0, 1, 2])}
    if kind == "speech":
        return {"input_features": torch.randn(BATCH, 8, 32, generator=generator).to(dtype), "labels": draw(9)}
    tokens = draw(LENGTH)
    result = {"input_ids": tokens}
    if side is not None:
        result["attention_mask"] = padding(LENGTH, side)
        tokens[result["attention_mask"] == 0] = 0
    if kind == "features":
        return result
    labels = draw(9) if kind == "seq2seq" else tokens.clone()
    if side is not None and kind != "seq2seq":
        labels[result["attention_mask"] == 0] = -100
    if side == "left" and kind == "causal":
        # Predicted at a padded query, whose row has no key: 0 here and with SDPA, the mean of v in eager.
        labels[1, 4] = labels[2, 1] = -100
    return {**result, "labels": labels}


class Outcome(NamedTuple):
    """The results of one step of training."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor | None]


def step(model: Any, options: dict[str, Any], implementation: str, call: Callable[..., Any] | None = None) -> Outcome:
    """A forward and a backward with an attention implementation; `call` in the place of the model, where given."""
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    out = (model if call is None else call)(**options)
    logits = out.logits if "logits" in out else out[0]
    loss = out.loss if getattr(out, "loss", None) is not None else logits.square().sum()
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Outcome(logits.detach(), loss.detach(), gradients)


def softmax_in_float64(patch: pytest.MonkeyPatch) -> None:
    """Let models in float64 take the softmax in it, where their code says float32 whatever the dtype.

    Scores of masked rows, at the least value of float64, would all be -inf there.
    """
    plain = torch.nn.functional.softmax

    def softmax(
        input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        return plain(input, dim, dtype=None if input.dtype == torch.float64 else dtype)

    patch.setattr(torch.nn.functional, "softmax", softmax)


# Relative, between models in float64: in float32 random weights amplify rounding, and the limit would be one of chance.
# Most models take their norms in float32 whatever the dtype.
LOGITS, LOSS, GRADIENTS = 5e-5, 1e-5, 5e-4
EXACT = (1e-10, 1e-10, 1e-9)


def limits(name: str) -> tuple[float, float, float]:
    """Limits for the errors of logits, loss and gradients of a family."""
    return EXACT if name in ("t5", "umt5") else (LOGITS, LOSS, GRADIENTS)


def errors(result: Outcome, wanted: Outcome, keep: Tensor | None = None) -> tuple[float, float, float]:
    """The largest errors of logits, loss and gradients, relative to the largest value of each.

    Args:
        found, wanted: of our attention and of eager.
        keep: (B, L), the tokens whose logits count; all where not given.
    """

    def relative(x: Tensor, y: Tensor, floor: float = 1e-30) -> float:
        return ((x - y).abs().max() / max(float(y.abs().max()), floor)).item()

    logits = (result.logits, wanted.logits) if keep is None else (result.logits[keep], wanted.logits[keep])
    # Gradients of key biases are zero but for rounding: none is compared on a scale below a thousandth of the largest.
    floor = max(float(g.abs().max()) for g in wanted.gradients.values() if g is not None) / 1000
    worst = 0.0
    for name, y in wanted.gradients.items():
        x = result.gradients[name]
        if x is None or y is None:  # the gradient that only one of them has must be zero
            one = x if y is None else y
            worst = max(worst, 0.0 if one is None else float(one.abs().max()))
        else:
            worst = max(worst, relative(x, y, floor))
    return relative(*logits), relative(result.loss, wanted.loss), worst


def assert_alike(result: Outcome, wanted: Outcome, name: str, keep: Tensor | None = None) -> None:
    """Hold one step of a family against another, by `errors` and `limits`."""
    off = errors(result, wanted, keep)
    assert all(x <= y for x, y in zip(off, limits(name))), off


class Counted:
    """The calls of `flash_dmattn.attention` as their arguments, and the masks that layers received."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.masks: list[Any] = []


@contextmanager
def counting() -> Iterator[Counted]:
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted()
        softmax_in_float64(patch)

        def attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **others: Any) -> Any:
            counted.masks.append(attention_mask)
            return attention_function.attend(module, query, key, value, attention_mask, **others)

        name = register()
        transformers.AttentionInterface.register(name, attend)
        try:
            with attention_function.observed(lambda module, call: counted.calls.append(call)):
                yield counted
        finally:
            register()


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and counts our operators in each."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, graph: GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        parts = [part for part in graph.modules() if isinstance(part, GraphModule)]
        self.calls.append(sum("flash_dmattn" in str(node.target) for part in parts for node in part.graph.nodes))
        return graph
