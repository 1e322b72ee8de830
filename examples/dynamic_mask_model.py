"""A causal language model with dynamic-mask attention, in the form of transformers; docs/dynamic_mask_model.md.

Importing this module makes it known to `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

# First, because it says which transformers is needed where there is none.
from flash_dmattn.integrations.transformers.attention_function import show_observers

# isort: split
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from flash_dmattn import BackendChoice, attention
from flash_dmattn.nn import DynamicMaskAttention
from flash_dmattn.nn.positions import rotary_angles

__all__ = ["DynamicMaskConfig", "DynamicMaskForCausalLM", "DynamicMaskModel", "DynamicMaskPreTrainedModel"]

# "past_key_values" until it was renamed.
_fields = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _fields else "past_key_values"
# The arguments that the loss of transformers reads.
LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index", "shift_labels")
# Arguments that generate() and Trainer pass along, and that are decided elsewhere.
_HARMLESS = {"cache_position", "return_dict"}


class DynamicMaskConfig(transformers.PreTrainedConfig):
    """Sizes and rules of a `DynamicMaskForCausalLM`.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the stream between layers.
        intermediate_size: width of the gated feed-forward layers.
        num_hidden_layers: number of layers.
        num_attention_heads, num_key_value_heads: query heads, and key-value heads that divide them; default as many.
        head_dim: channels per head, even; default hidden_size // num_attention_heads.
        keep_window_size: number of keys that a query may see, the best by learned score; None for full attention.
        local_window_size: last keys of each query that are kept in addition.
        qk_norm: normalise q and k per head.
        max_position_embeddings: longest text that the model is meant for; nothing is sized by it.
        rope_theta: base of the rotary wavelengths.
        rms_norm_eps: added to mean squares in norms.
        initializer_range: standard deviation of new weights.
        use_cache: return a cache.
        tie_word_embeddings: the output layer is the embedding.
        attention_backend: `backend` of `flash_dmattn.attention`.
        pad_token_id, bos_token_id, eos_token_id: tokens that fill up, begin and end texts; None where there is none.
        others: of `transformers.PreTrainedConfig`.

    Raises:
        TypeError, ValueError: what `flash_dmattn.nn.DynamicMaskAttention` refuses, when a model is made of it.

    >>> from flash_dmattn.examples.dynamic_mask_model import DynamicMaskConfig
    >>> DynamicMaskConfig(hidden_size=64, num_attention_heads=4, keep_window_size=16).head_dim
    16
    """

    model_type = "dynamic_mask"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def __init__(
        self,
        vocab_size: int = 32768,
        hidden_size: int = 1024,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        keep_window_size: int | None = 2048,
        local_window_size: int = 0,
        qk_norm: bool = True,
        max_position_embeddings: int = 32768,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        attention_backend: BackendChoice = "auto",
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.keep_window_size = keep_window_size
        self.local_window_size = local_window_size
        self.qk_norm = qk_norm
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.attention_backend = attention_backend
        # transformers reads them, and has no values of its own for them.
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(**others)


class Keys:
    """The keys of one forward, for all layers: a cache of transformers, and the padding of its keys.

    Args:
        cache: of transformers, dynamic or static; None without one.
        attention_mask: (B, cached + L) bool or integer, non-zero for a real token, or (B, 1, 1, keys) from
            `static_padding`; None where all are real.
        seqlen_q: L, the number of new tokens.
        device: theirs.

    Raises:
        TypeError: attention_mask has floats.
        ValueError: attention_mask has another shape.
        NotImplementedError: several tokens go into a static cache under torch.compile.

    Attributes:
        past: how many tokens are cached; a tensor of one in a static cache.
        padding: (B, 1, 1, keys) bool, True for a real key; None where all are.
    """

    def __init__(self, cache: Any, attention_mask: Tensor | None, seqlen_q: int, device: torch.device) -> None:
        self._cache = cache
        self.past: int | Tensor = 0 if cache is None else cache.get_seq_length()
        self._positions = torch.arange(seqlen_q, device=device) + self.past
        self._used: int | None = None  # how many keys of a static cache are read; None for all
        padding = attention_mask
        if padding is not None:
            shape = tuple(padding.shape)
            if len(shape) != 2 and not (len(shape) == 4 and shape[1:3] == (1, 1)):
                raise ValueError(
                    f"attention_mask has shape {shape}; it needs to be (batch, keys), non-zero for a real token: which "
                    "keys a query sees is the choice of the model"
                )
            if padding.is_floating_point():  # numbers to be added to scores, 0 for a real token, say the opposite
                raise TypeError(f"attention_mask has dtype {padding.dtype}; it needs bools or integers")
            padding = padding.bool()
        if is_static(cache):
            if padding is None or padding.dim() == 2:
                padding = static_padding(padding, cache, seqlen_q, device)
            # One query sees all real keys. Several queries need the keys to end at the key of the last query.
            if seqlen_q > 1:
                if torch.compiler.is_compiling():
                    raise NotImplementedError(
                        f"a static cache takes one token a step under torch.compile, and input_ids has {seqlen_q}: run "
                        "the prompt without it, as generate() does"
                    )
                self._used = int(self.past) + seqlen_q
                padding = padding[..., : self._used]
        elif padding is not None:
            keys = int(self.past) + seqlen_q
            if padding.shape[-1] != keys:
                raise ValueError(
                    f"attention_mask has shape {tuple(padding.shape)}; it needs (batch, {keys}), cached tokens included"
                )
            padding = padding[:, None, None, :] if padding.dim() == 2 else padding
        # A call without a mask is faster where nothing is padded. The look waits for the device, as SDPA's mask does.
        if padding is not None and seqlen_q > 1 and not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
        self.padding = padding

    @property
    def query_index(self) -> Tensor | None:
        """(1,): where a single query lies among the keys of a static cache; None where the last key is its own."""
        return self._positions if is_static(self._cache) and self._positions.shape[0] == 1 else None

    @property
    def positions(self) -> Tensor:
        """(L,): the index of each new token among the keys."""
        return self._positions

    def append(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append new keys and values (B, L, Hk, ·) of a layer to its cache; return all of them, (B, keys, Hk, ·)."""
        if self._cache is None:
            return k, v
        # Before 5.4 a static cache was told where to write; later ones know, and ignore it.
        where = {"cache_position": self._positions}
        k, v = (x.transpose(1, 2) for x in self._cache.update(k.transpose(1, 2), v.transpose(1, 2), layer, where))
        return k[:, : self._used], v[:, : self._used]


def is_static(cache: Any) -> bool:
    """Tell whether a cache has its full length from the beginning."""
    return cache is not None and bool(cache.is_compileable)


def static_padding(attention_mask: Tensor | None, cache: Any, seqlen_q: int, device: torch.device) -> Tensor:
    """Say which keys of a static cache are real with seqlen_q more tokens in it: bool (B or 1, 1, 1, keys).

    Args:
        attention_mask: (B, at most keys), non-zero for a real token, or None where all tokens are.
        cache: a static cache.
        seqlen_q: number of new tokens.
        device: theirs.
    """
    keys = cache.layers[0].max_cache_len
    index = torch.arange(keys, device=device)
    real = (index < cache.get_seq_length() + seqlen_q)[None]
    if attention_mask is not None:
        real = real & F.pad(attention_mask.bool()[:, :keys], (0, max(0, keys - attention_mask.shape[1])))
    return real[:, None, None, :]


class DynamicMaskSelfAttention(DynamicMaskAttention):
    """`DynamicMaskAttention` on a cache of transformers.

    The cache holds k and v alone, so that every kind of cache serves: each step computes scores from cached values.
    """

    calls_flash_dmattn = True  # for `check`: it does so whatever attention the configuration names

    def __init__(self, config: DynamicMaskConfig, layer: int) -> None:
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            keep_window_size=config.keep_window_size,
            local_window_size=config.local_window_size,
            rope_theta=config.rope_theta,
            qk_norm=config.qk_norm,
            backend=config.attention_backend,
        )
        self.layer = layer

    def forward(self, x: Tensor, angles: Tensor, keys: Keys) -> Tensor:  # type: ignore[override]
        """Attend from x (B, L, hidden_size) to all keys, those in the cache included."""
        q, k, v = self.project(x, angles)
        k, v = keys.append(k, v, self.layer)
        call = self.attention_call(q, k, v, self.key_scores(v), keys.padding, keys.query_index)
        show_observers(self, call)
        out = attention(**call)
        assert isinstance(out, Tensor)
        return self.o_proj(out.flatten(2))


class DynamicMaskMLP(nn.Module):
    """(silu(x Wg) * x Wu) Wd, the gated feed-forward layer (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: DynamicMaskConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DynamicMaskDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DynamicMaskConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DynamicMaskSelfAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DynamicMaskMLP(config)

    def forward(self, x: Tensor, angles: Tensor, keys: Keys) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, keys)
        return x + self.mlp(self.post_attention_layernorm(x))


class DynamicMaskPreTrainedModel(transformers.PreTrainedModel):
    """The base of both classes below: configuration, initial weights, and what transformers may do with them."""

    config: DynamicMaskConfig
    config_class = DynamicMaskConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DynamicMaskDecoderLayer"]
    _skip_keys_device_placement = ["keys"]
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DynamicMaskSelfAttention) and module.keep_window_size is not None:
            initialization.ones_(module.score_scale)

    def layers_run_twice(self) -> bool:
        """Tell whether gradient checkpointing runs each layer again in the backward pass."""
        checkpointing = any(getattr(part, "gradient_checkpointing", False) for part in self.modules())
        return checkpointing and self.training and torch.is_grad_enabled()

    @staticmethod
    def create_masks_for_generate(
        config: Any, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Make the mask of a static cache, of one shape at all steps; `generate` calls it."""
        embeds = others["inputs_embeds"] if "inputs_embeds" in others else others["input_embeds"]
        cache = others.get("cache", others.get("past_key_values"))
        device = embeds.device if attention_mask is None else attention_mask.device
        return static_padding(attention_mask, cache, embeds.shape[1], device)


class DynamicMaskModel(DynamicMaskPreTrainedModel):
    """Embedding, layers and norm of a `DynamicMaskForCausalLM`.

    Args:
        config: a `DynamicMaskConfig`.
    """

    def __init__(self, config: DynamicMaskConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [DynamicMaskDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Any = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Compute hidden states of tokens.

        Args:
            input_ids: (B, L) tokens, or inputs_embeds: (B, L, hidden_size) in their place.
            attention_mask: (B, cached + L), non-zero for a real token, padding on either side; None without padding.
            position_ids: (B or 1, L) positions of the tokens; by default they follow the cached tokens.
            cache: a `Cache` of transformers, which is appended to; past_key_values is its older name.
            use_cache: make a cache where none is given; default of the configuration, False in training.
            output_hidden_states: return the input of each layer and of the norm, too.

        Returns:
            last_hidden_state (B, L, hidden_size), the cache, hidden_states.

        Raises:
            ValueError: both or none of input_ids and inputs_embeds; a wrong shape of attention_mask.
            NotImplementedError: an argument that would change the result and is not known.
        """
        _refuse_unknown(others)
        if (input_ids is None) == (inputs_embeds is None):
            number = "neither is" if input_ids is None else "both are"
            raise ValueError(f"input_ids or inputs_embeds: {number} given; exactly one of them is needed")
        cache = _one_cache(cache, past_key_values)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.layers_run_twice():
            use_cache = False  # a layer that is run again would append again
            if cache is not None:
                raise ValueError("cache is given; gradient checkpointing runs layers twice and needs None")
        if use_cache and cache is None:
            cache = transformers.DynamicCache(config=self.config)
        keys = Keys(cache, attention_mask, x.shape[1], x.device)
        if position_ids is None:
            position_ids = keys.positions[None]
        angles = rotary_angles(position_ids, self.config.head_dim, self.config.rope_theta)
        inputs = [x]
        for layer in self.layers:
            x = layer(x, angles, keys)
            inputs.append(x)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(x),
            hidden_states=tuple(inputs) if output_hidden_states else None,
            **{CACHE: cache},
        )


class DynamicMaskForCausalLM(DynamicMaskPreTrainedModel, transformers.GenerationMixin):
    """A causal language model whose attention keeps the keys that it has learned to want, as in the Doge models.

    Every layer is `flash_dmattn.nn.DynamicMaskAttention` and a gated feed-forward layer, each behind a norm. Import
    `flash_dmattn.examples.dynamic_mask_model` and it is one of transformers' models: `AutoModelForCausalLM`,
    `save_pretrained`, `generate` with every cache, `Trainer`, gradient checkpointing.

    Args:
        config: a `DynamicMaskConfig`.

    Source: Shi et al., "Trainable Dynamic Mask Sparse Attention", 2025.

    >>> import torch, transformers
    >>> from flash_dmattn.examples.dynamic_mask_model import DynamicMaskConfig
    >>> config = DynamicMaskConfig(
    ...     vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, keep_window_size=8)
    >>> model = transformers.AutoModelForCausalLM.from_config(config)
    >>> tokens = torch.randint(50, (2, 20))
    >>> model(input_ids=tokens, labels=tokens).loss.isfinite().item()
    True
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DynamicMaskConfig) -> None:
        super().__init__(config)
        self.model = DynamicMaskModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits of the next tokens, and their loss.

        Args: as for `DynamicMaskModel`, and
            labels: (B, L) tokens, -100 where none counts; the loss predicts each token from the tokens before it.
            logits_to_keep: how many last positions have logits, or the indices of these positions; 0 for all.

        Returns:
            loss, a scalar, with labels; logits (B, L, vocab_size); the cache; hidden_states.
        """
        loss_arguments = {name: others.pop(name) for name in LOSS_ARGUMENTS if name in others}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=_one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **others,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        hidden = outputs.last_hidden_state
        logits = self.lm_head(hidden if isinstance(kept, int) else hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **loss_arguments)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: getattr(outputs, CACHE)}
        )


def _one_cache(cache: Any, past_key_values: Any) -> Any:
    """Return the cache, which has two names; refuse two different ones."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are both given, and differ; they are two names of one argument")
    return past_key_values if cache is None else cache


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    """Refuse arguments that are set, unknown, and may change the result."""
    for name, value in arguments.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        hint = ""
        if name == "output_attentions":
            hint = (
                ": probabilities are never made; flash_dmattn.attention(..., return_probs=True) makes those of a layer"
            )
        if name.startswith("cu_seq_lens"):
            hint = ": give each document a row of its own, and an attention_mask"
        raise NotImplementedError(f"DynamicMaskModel does not know {name}{hint}")


transformers.AutoConfig.register(DynamicMaskConfig.model_type, DynamicMaskConfig, exist_ok=True)
transformers.AutoModel.register(DynamicMaskConfig, DynamicMaskModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(DynamicMaskConfig, DynamicMaskForCausalLM, exist_ok=True)
