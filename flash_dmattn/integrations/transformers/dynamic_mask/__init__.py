"""A causal language model with dynamic-mask attention, in the form of transformers; docs/dynamic_mask_model.md.

Importing this package makes it known to `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from ..versions import transformers
from .configuration import DynamicMaskConfig
from .modeling import DynamicMaskForCausalLM, DynamicMaskModel, DynamicMaskPreTrainedModel

transformers.AutoConfig.register(DynamicMaskConfig.model_type, DynamicMaskConfig, exist_ok=True)
transformers.AutoModel.register(DynamicMaskConfig, DynamicMaskModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(DynamicMaskConfig, DynamicMaskForCausalLM, exist_ok=True)

__all__ = ["DynamicMaskConfig", "DynamicMaskForCausalLM", "DynamicMaskModel", "DynamicMaskPreTrainedModel"]
