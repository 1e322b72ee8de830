"""transformers itself, or one clear error; the rest of this package imports it from here."""

from __future__ import annotations

import inspect

from packaging.version import Version

OLDEST = "5.0"
INSTALL = "pip install 'flash_dmattn[transformers]'"

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"flash_dmattn.integrations.transformers needs transformers {OLDEST} or later, and there is no "
        f"{error.name}: {INSTALL}",
        name=error.name,
    ) from error

if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"flash_dmattn.integrations.transformers needs transformers {OLDEST} or later, and {transformers.__version__} "
        f"is installed: {INSTALL}"
    )

from transformers import masking_utils  # noqa: E402

# Since 5.14 or so a model may ask for a tensor as its mask by this flag; before that it only said that a causal mask
# is no plain one.
MODELS_ASK_FOR_TENSORS = "allow_is_causal_skip" in inspect.signature(masking_utils.create_causal_mask).parameters
