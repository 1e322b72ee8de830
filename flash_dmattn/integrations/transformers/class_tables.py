"""Models of transformers with a dict from names of implementations to classes: SAM and SAM-HQ."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import Tensor

from ... import attention
from .attention_function import show_observers

# Module -> name of its dict.
_TABLES = {
    "sam.modeling_sam": "SAM_VISION_ATTENTION_CLASSES",
    "sam_hq.modeling_sam_hq": "SAM_HQ_VISION_ATTENTION_CLASSES",
}


def add_classes(name: str) -> None:
    """Add a class for an implementation to these dicts."""
    for module, table in _TABLES.items():
        if importlib.util.find_spec(f"transformers.models.{module}") is None:
            continue
        classes = vars(importlib.import_module(f"transformers.models.{module}")).get(table)
        if classes is not None and name not in classes:
            kind = classes["eager"]
            fields = {"__module__": kind.__module__, "forward": _attend_to_patches, "calls_flash_dmattn": True}
            classes[name] = type(kind.__name__, (kind,), fields)


def _attend_to_patches(self: Any, hidden_states: Tensor, output_attentions: bool | None = False) -> tuple[Tensor, None]:
    """Attend among the patches of images (B, height, width, C), with a bias that depends on queries and distances."""
    if output_attentions:
        raise NotImplementedError('output_attentions: probabilities are never made; use attn_implementation="eager"')
    height, width = hidden_states.shape[1:3]
    q, k, v = self.qkv(hidden_states.flatten(1, 2)).unflatten(-1, (3, self.num_attention_heads, -1)).unbind(2)
    bias = None
    if self.use_rel_pos:
        rows = q.transpose(1, 2)  # (B, H, L, D)
        size = height, width
        bias = self.get_decomposed_rel_pos(rows.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
        bias = bias.reshape(*rows.shape[:2], height * width, height * width)
    dropout_p = self.dropout if self.training else 0.0
    call = {"q": q, "k": k, "v": v, "bias": bias, "softmax_scale": self.scale, "dropout_p": dropout_p}
    show_observers(self, call)
    out = attention(**call)
    assert isinstance(out, Tensor)
    return self.proj(out.flatten(2).unflatten(1, (height, width))), None
