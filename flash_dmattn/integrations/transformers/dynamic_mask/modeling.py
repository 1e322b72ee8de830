"""The dynamic-mask language model: classes as transformers has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ....nn.positions import rotary_angles
from ..versions import transformers
from .arguments import CACHE, LOSS_ARGUMENTS, one_cache, refuse_unknown
from .configuration import DynamicMaskConfig
from .keys import Keys, static_padding
from .layers import DynamicMaskDecoderLayer, DynamicMaskSelfAttention


class DynamicMaskPreTrainedModel(transformers.PreTrainedModel):
    """What the classes below share: configuration, initial weights, what transformers may do with them."""

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
        """Whether gradient checkpointing runs each layer again in the backward pass."""
        checkpointing = any(getattr(part, "gradient_checkpointing", False) for part in self.modules())
        return checkpointing and self.training and torch.is_grad_enabled()

    @staticmethod
    def create_masks_for_generate(
        config: Any, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **others: Any
    ) -> Tensor:
        """The mask of a static cache, of one shape at all steps; `generate` calls it."""
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
        """Hidden states of tokens.

        Args:
            input_ids: (B, L) tokens, or inputs_embeds: (B, L, hidden_size) in their place.
            attention_mask: (B, cached + L), non-zero for a real token, padding on either side; None without padding.
            position_ids: (B or 1, L) positions of the tokens; by default they follow those that are cached.
            cache: a `Cache` of transformers, which is appended to; past_key_values is its older name.
            use_cache: make a cache where none is given; default of the configuration, False in training.
            output_hidden_states: return the input of each layer and of the norm, too.

        Returns:
            last_hidden_state (B, L, hidden_size), the cache, hidden_states.

        Raises:
            ValueError: both or none of input_ids and inputs_embeds; a wrong shape of attention_mask.
            NotImplementedError: an argument that would change the result and is not known.
        """
        refuse_unknown(others)
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither is" if input_ids is None else "both are"
            raise ValueError(f"input_ids or inputs_embeds: {given} given; exactly one of them is needed")
        cache = one_cache(cache, past_key_values)
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
    `flash_dmattn.integrations.transformers.dynamic_mask` and it is one of transformers' models: `AutoModelForCausalLM`,
    `save_pretrained`, `generate` with every cache, `Trainer`, gradient checkpointing.

    Args:
        config: a `DynamicMaskConfig`.

    Source: Shi et al., "Trainable Dynamic Mask Sparse Attention", 2025.

    >>> import torch, transformers
    >>> from flash_dmattn.integrations.transformers.dynamic_mask import DynamicMaskConfig
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
        """Logits of the next tokens, and their loss.

        Args: those of `DynamicMaskModel`, and
            labels: (B, L) tokens, -100 where none counts; the loss is that of each token from those before it.
            logits_to_keep: how many last positions, or the indices of which ones, have logits; 0 for all.

        Returns:
            loss, a scalar, with labels; logits (B, L, vocab_size); the cache; hidden_states.
        """
        loss_arguments = {name: others.pop(name) for name in LOSS_ARGUMENTS if name in others}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_cache(cache, past_key_values),
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
