"""The configuration of the dynamic-mask language model."""

from __future__ import annotations

from typing import Any

from ..versions import transformers


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
        ValueError: what `flash_dmattn.nn.DynamicMaskAttention` refuses, when a model is made of it.

    >>> from flash_dmattn.integrations.transformers.dynamic_mask import DynamicMaskConfig
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
        attention_backend: str = "auto",
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
